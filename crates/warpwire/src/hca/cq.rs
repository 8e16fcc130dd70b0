//! Completion queues: written by the engine, read by polling threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::event::EventFd;
use super::memory::QueueMemory;
use crate::error::Result;
use crate::mem::copy::store_fence;
use crate::mlx5::{CqArm, Cqe, CqeTail, SendCqe, owner_bit};
use crate::sync::asymmetric_fence;

/// Size of a CQE in bytes.
pub const CQE_LEN: u64 = 64;

/// The memory and layout of a completion queue.
#[derive(Clone, Debug)]
pub struct CqSpec {
    /// Memory of the queue: CQEs from offset 0.
    pub memory: QueueMemory,
    /// Number of CQEs, a power of two.
    pub entries: u32,
    /// Offset of the doorbell record: consumer index, and arm word.
    pub dbrec: u64,
    /// Every CQE is written to the first entry.
    pub collapsed: bool,
    /// Do not check the consumer index: the consumer guarantees that the queue never overruns.
    pub ignore_overrun: bool,
    /// Raised when a CQE is written while the queue is armed.
    pub signal: Option<Arc<EventFd>>,
}

/// The queue is full: a CQE is lost, and the queue with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Overrun {
    /// It is the first one that is lost.
    pub first: bool,
}

/// The number of CQEs of a queue, for other engines. It changes with each, so it shares no cache
/// line with other data.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct PublishedCount(AtomicU64);

/// A completion queue in the table of an engine. Where a device has several engines, each has all
/// its queues in its table, under the same number.
#[derive(Debug)]
pub(super) enum CqSlot {
    /// Only queue pairs of this engine use it, so the engine's lock protects it.
    Own(CompletionRing),
    /// Queue pairs of several engines use it.
    Shared(Arc<Mutex<CompletionRing>>),
    /// Queue pairs of other engines use it, or none: the number of its CQEs, for `WAIT`.
    Elsewhere(Arc<PublishedCount>),
}

impl CqSlot {
    /// The queue, if this engine may write to it.
    #[inline]
    pub(super) fn with_ring<R>(
        &mut self,
        apply: impl FnOnce(&mut CompletionRing) -> R,
    ) -> Option<R> {
        match self {
            Self::Own(ring) => Some(apply(ring)),
            Self::Shared(ring) => Some(apply(&mut ring.lock())),
            Self::Elsewhere(_) => None,
        }
    }

    /// CQEs written so far; the index of the last one is one less.
    pub(super) fn produced(&self) -> u64 {
        match self {
            Self::Own(ring) => ring.produced,
            Self::Shared(ring) => ring.lock().produced,
            // Acquire: what the completed work placed is visible, and may be sent.
            Self::Elsewhere(produced) => produced.0.load(Ordering::Acquire),
        }
    }

    /// Whether another engine may write to it.
    pub(super) fn has_other_writers(&self) -> bool {
        !matches!(self, Self::Own(_))
    }

    /// Lets other engines write to the queue, too; `None` if it is not here.
    pub(super) fn share(&mut self) -> Option<Arc<Mutex<CompletionRing>>> {
        let shared = match std::mem::replace(self, Self::Elsewhere(Arc::default())) {
            Self::Own(ring) => Arc::new(Mutex::new(ring)),
            Self::Shared(ring) => ring,
            elsewhere @ Self::Elsewhere(_) => {
                *self = elsewhere;
                return None;
            }
        };
        *self = Self::Shared(shared.clone());
        Some(shared)
    }

    /// Takes the queue out, for another engine; `None` if it is not here alone.
    pub(super) fn take(&mut self) -> Option<CompletionRing> {
        let Self::Own(ring) = self else { return None };
        let produced = ring.published.clone().unwrap_or_default();
        match std::mem::replace(self, Self::Elsewhere(produced)) {
            Self::Own(ring) => Some(ring),
            _ => None,
        }
    }
}

/// A completion queue as the engine sees it.
#[derive(Debug)]
pub(super) struct CompletionRing {
    spec: CqSpec,
    /// CQEs written.
    produced: u64,
    /// The same, for other engines of the device; `None` if it has only one.
    published: Option<Arc<PublishedCount>>,
    /// CQEs consumed, as of the last read of the doorbell record.
    consumed: u64,
    /// The arm word that was last answered with an event.
    last_armed: u32,
    overrun: bool,
}

impl CompletionRing {
    pub(super) fn new(spec: CqSpec, published: Option<Arc<PublishedCount>>) -> Self {
        Self { spec, produced: 0, published, consumed: 0, last_armed: 0, overrun: false }
    }

    /// Continues in new memory of `entries` empty CQEs, a larger power of two, with the doorbell
    /// record behind them. CQEs from `consumed` on and the doorbell record are copied.
    pub(super) fn resize(
        &mut self,
        memory: QueueMemory,
        entries: u32,
        consumed: u64,
    ) -> Result<()> {
        let (old, new) = (self.spec.memory.bytes(), memory.bytes());
        let dbrec = u64::from(entries) * CQE_LEN;
        new.store_u64(dbrec, old.load_u64(self.spec.dbrec)?)?;
        let first = consumed.max(self.produced.saturating_sub(u64::from(self.spec.entries)));
        for number in first..self.produced {
            let [from, to] = [self.spec.entries, entries].map(u64::from);
            let Some(mut line) = old.load_line((number & (from - 1)) * CQE_LEN) else { continue };
            let [a, b, c, d, tail @ ..] = line[7].to_ne_bytes();
            let [e, f, g, h] = CqeTail::with_owner(tail, owner_bit(number, to));
            line[7] = u64::from_ne_bytes([a, b, c, d, e, f, g, h]);
            new.store_line((number & (to - 1)) * CQE_LEN, &line);
        }
        self.spec = CqSpec { memory, entries, dbrec, ..self.spec.clone() };
        Ok(())
    }

    /// Writes a CQE.
    pub(super) fn push(&mut self, cqe: &Cqe) -> std::result::Result<(), Overrun> {
        let is_error = matches!(cqe.outcome, crate::mlx5::CqeOutcome::Failed { .. });
        self.write(cqe.solicited || is_error, |owner| cqe.encode_words(owner))
    }

    /// Writes the CQE of send work that has succeeded.
    #[inline]
    pub(super) fn push_sent(&mut self, sent: &SendCqe) -> std::result::Result<(), Overrun> {
        self.write(false, |owner| sent.encode_words(owner))
    }

    /// Writes the body first, then the word with the owner bit.
    #[inline]
    fn write(
        &mut self,
        solicited: bool,
        encode: impl FnOnce(bool) -> [u64; 8],
    ) -> std::result::Result<(), Overrun> {
        let entries = u64::from(self.spec.entries);
        if !self.spec.ignore_overrun && !self.spec.collapsed && self.is_full() {
            // The queue accepts no more.
            return Err(Overrun { first: !std::mem::replace(&mut self.overrun, true) });
        }
        let words = encode(owner_bit(self.produced, entries));
        let slot = if self.spec.collapsed { 0 } else { self.produced & (entries - 1) };
        // Stores fail only if the memory is gone, and then no consumer is left.
        let (bytes, at) = (self.spec.memory.bytes(), slot * CQE_LEN);
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
        if let Some(published) = &self.published {
            published.0.store(self.produced, Ordering::Release);
        }
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
        // The consumer index is read only now, when the queue may be full: the consumer's line is
        // left alone otherwise.
        let word = self.spec.memory.bytes().load_u32(self.spec.dbrec).unwrap_or(0);
        let consumer_index = u64::from(CqArm::consumed(word.to_ne_bytes()));
        let newly_consumed = consumer_index.wrapping_sub(self.consumed) & 0xff_ffff;
        if newly_consumed <= self.produced - self.consumed {
            self.consumed += newly_consumed;
        }
        self.produced - self.consumed >= entries
    }

    /// Raises the event if the queue is armed for such a completion.
    #[inline]
    fn wake(&mut self, solicited: bool) {
        let Some(signal) = &self.spec.signal else { return };
        // Either a consumer that arms after this load sees the CQE, or this load sees the arm word.
        asymmetric_fence::light();
        let word = self.spec.memory.bytes().load_u32(self.spec.dbrec + 4).unwrap_or(0);
        let arm = CqArm::parse(word.to_ne_bytes());
        if word != self.last_armed && (solicited || !arm.solicited_only) {
            self.last_armed = word;
            signal.raise();
        }
    }
}
