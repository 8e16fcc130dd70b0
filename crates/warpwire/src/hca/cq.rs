//! Completion queues: written by the engine, read by whoever polls.

use std::sync::Arc;

use super::event::EventFd;
use super::memory::QueueMemory;
use crate::mem::copy::store_fence;
use crate::mlx5::{CqArm, Cqe, Sent, owner_bit};
use crate::sync::asymmetric_fence;

/// How large a completion is.
pub const CQE_LEN: u64 = 64;

/// What a completion queue is made of.
#[derive(Clone, Debug)]
pub struct CqSpec {
    /// Its memory: entries from the beginning on.
    pub memory: QueueMemory,
    /// How many: a power of two.
    pub entries: u32,
    /// Where the record lies: the consumer's count, and how it is armed.
    pub dbrec: u64,
    /// Every completion goes to the first entry.
    pub collapsed: bool,
    /// The consumer's count is not looked at: whoever polls keeps up by himself.
    pub ignore_overrun: bool,
    /// Whom to wake when it is armed.
    pub signal: Option<Arc<EventFd>>,
}

/// The queue is full: a completion is lost, and with it the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Overrun;

/// A completion queue as the engine sees it.
#[derive(Debug)]
pub(super) struct CompletionRing {
    spec: CqSpec,
    /// How many were made.
    produced: u64,
    /// How many the consumer had taken when we last looked.
    consumed: u64,
    /// The armed word that an event was given for.
    last_armed: u32,
    overrun: bool,
}

impl CompletionRing {
    pub(super) fn new(spec: CqSpec) -> Self {
        Self { spec, produced: 0, consumed: 0, last_armed: 0, overrun: false }
    }

    /// How many completions were made; the number of the last one is one less.
    pub(super) fn produced(&self) -> u64 {
        self.produced
    }

    /// Writes a completion.
    pub(super) fn push(&mut self, cqe: &Cqe) -> Result<(), Overrun> {
        let is_error = matches!(cqe.outcome, crate::mlx5::CqeOutcome::Failed { .. });
        self.write(cqe.solicited || is_error, |owner| cqe.encode_words(owner))
    }

    /// Writes the completion of work that has succeeded.
    #[inline]
    pub(super) fn push_sent(&mut self, sent: &Sent) -> Result<(), Overrun> {
        self.write(false, |owner| sent.encode_words(owner))
    }

    /// Body first, then the word that tells of it.
    #[inline]
    fn write(
        &mut self,
        solicited: bool,
        encode: impl FnOnce(bool) -> [u64; 8],
    ) -> Result<(), Overrun> {
        let entries = u64::from(self.spec.entries);
        if !self.spec.ignore_overrun && !self.spec.collapsed && self.is_full() {
            // Told once: the queue takes no more.
            let first = !std::mem::replace(&mut self.overrun, true);
            return if first { Err(Overrun) } else { Ok(()) };
        }
        let words = encode(owner_bit(self.produced, entries));
        let place = if self.spec.collapsed { 0 } else { self.produced & (entries - 1) };
        // It is there as long as the memory is; when that is gone there is nobody to tell.
        let (bytes, at) = (self.spec.memory.bytes(), place * CQE_LEN);
        if self.spec.memory.is_write_combining() {
            let [body @ .., tail] = words;
            for (word, value) in (at..).step_by(8).zip(body) {
                let _ = bytes.store_u64(word, value);
            }
            store_fence();
            let _ = bytes.store_u64(at + CQE_LEN - 8, tail);
            store_fence();
        } else {
            bytes.store_line(at, &words);
        }
        self.produced += 1;
        self.wake(solicited);
        Ok(())
    }

    #[inline]
    fn is_full(&mut self) -> bool {
        let entries = u64::from(self.spec.entries);
        if self.overrun {
            return true;
        }
        if self.produced - self.consumed < entries {
            return false;
        }
        // Only now is the consumer's word read: it shares its cache line with nobody else.
        let word = self.spec.memory.bytes().load_u32(self.spec.dbrec).unwrap_or(0);
        let consumer_index = u64::from(CqArm::consumed(word.to_ne_bytes()));
        let newly_consumed = consumer_index.wrapping_sub(self.consumed) & 0xff_ffff;
        if newly_consumed <= self.produced - self.consumed {
            self.consumed += newly_consumed;
        }
        self.produced - self.consumed >= entries
    }

    /// Wakes who waits, if the queue is armed for such a completion.
    #[inline]
    fn wake(&mut self, solicited: bool) {
        let Some(signal) = &self.spec.signal else { return };
        // The completion must be seen by whoever arms after this looks, or its arming by this.
        asymmetric_fence::light();
        let word = self.spec.memory.bytes().load_u32(self.spec.dbrec + 4).unwrap_or(0);
        let arm = CqArm::parse(word.to_ne_bytes());
        if word != self.last_armed && (solicited || !arm.solicited_only) {
            self.last_armed = word;
            signal.raise();
        }
    }
}
