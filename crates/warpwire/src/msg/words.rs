//! Words that peers write: waiting for them, and the table of ready notifications.

use std::time::{Duration, Instant};

use super::buffer::Buffer;
use super::comm::Comm;
use super::entries::WordUpdate;
use super::state::State;
use crate::error::{Error, Kind, Result};
use crate::mem::{Condition, WordWidth};
use crate::verbs::Remote;

/// The rank that is expected to write a word: if it is lost, the wait fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// This rank.
    Rank(usize),
    /// Any rank: the wait fails if one has died, or if all have left.
    Any,
}

impl Writer {
    /// Why the word will not be written, if so.
    fn lost(self, state: &State) -> Option<Error> {
        match self {
            Self::Rank(rank) => state.peers.get(rank)?.end.clone(),
            Self::Any => {
                let broken = state.peers.iter().find(|peer| peer.is_broken && !peer.has_left);
                let others =
                    || state.peers.iter().enumerate().filter(|(rank, _)| *rank != state.rank);
                let all = others().count() > 0 && others().all(|(_, peer)| peer.end.is_some());
                let last = others().next_back().filter(|_| all).map(|(_, peer)| peer);
                broken.or(last).and_then(|peer| peer.end.clone())
            }
        }
    }
}

impl Comm {
    /// Waits until a 32-bit word satisfies a condition. Makes progress meanwhile.
    pub fn wait32(
        &self,
        buffer: &Buffer,
        offset: u64,
        (condition, value): (Condition, u32),
        writer: Writer,
        timeout: Duration,
    ) -> Result<()> {
        let wanted = (condition, u64::from(value));
        self.wait_word(buffer, (offset, WordWidth::Bits32), wanted, writer, timeout)
    }

    /// Waits until a 64-bit word satisfies a condition. Makes progress meanwhile.
    pub fn wait64(
        &self,
        buffer: &Buffer,
        offset: u64,
        (condition, value): (Condition, u64),
        writer: Writer,
        timeout: Duration,
    ) -> Result<()> {
        self.wait_word(buffer, (offset, WordWidth::Bits64), (condition, value), writer, timeout)
    }

    fn wait_word(
        &self,
        buffer: &Buffer,
        (offset, width): (u64, WordWidth),
        (condition, value): (Condition, u64),
        writer: Writer,
        timeout: Duration,
    ) -> Result<()> {
        buffer.check_word(width, offset)?;
        if let Writer::Rank(rank) = writer {
            self.shared.check_rank(rank, "wait for")?;
        }
        let what = || format!("wait for a word to be {condition} {value:#x}");
        let found = self.shared.poll_until(timeout, |state| {
            // In this order: a write that precedes the loss of its writer counts.
            let lost = writer.lost(state);
            match (condition.holds(width, buffer.load(width, offset)?, value), lost) {
                (true, _) => Ok(Some(())),
                (false, Some(why)) => Err(why.during(what())),
                (false, None) => Ok(None),
            }
        })?;
        found.ok_or_else(|| {
            let seen = buffer.load(width, offset).unwrap_or_default();
            Error::new(Kind::Timeout, what())
                .why(format!("it is {seen:#x} after {} s", timeout.as_secs_f64()))
        })
    }

    /// Notifies a rank that this one is ready to receive. Each call counts once; it overtakes
    /// messages that wait for credits.
    pub fn send_ready(&self, to: usize, timeout: Duration) -> Result<()> {
        self.shared.check_rank(to, "notify")?;
        let mut ready_sent = self.shared.ready_sent.lock();
        let value = ready_sent[to] + 1;
        let own = self.rank();
        if to == own {
            self.shared
                .table
                .apply_update(own as u64 * 8, WordUpdate::Write(value.to_le_bytes(), 8))?;
            ready_sent[to] = value;
            return Ok(());
        }
        let sent = self.shared.poll_until(timeout, |state| {
            let table = state.peers[to].hello.as_ref().map(|hello| hello.table);
            let (address, rkey) = table.unwrap_or_default();
            let at = Remote { address: address.wrapping_add(own as u64 * 8), rkey };
            Ok(state.write_word(to, value, at)?.then_some(()))
        })?;
        sent.ok_or_else(|| {
            let error =
                Error::new(Kind::Timeout, format!("notify rank {to} that this one is ready"));
            error.why("the send queue to it is full")
        })?;
        ready_sent[to] = value;
        Ok(())
    }

    /// Waits until a rank has sent a ready notification, and consumes it.
    pub fn wait_ready(&self, from: usize, timeout: Duration) -> Result<()> {
        self.shared.check_rank(from, "wait for")?;
        let start = Instant::now();
        let mut consumed = self.shared.consumed.lock();
        let wanted = consumed[from] + 1;
        let left = timeout.saturating_sub(start.elapsed());
        let at_least = (Condition::AtLeast, wanted);
        let table = &self.shared.table;
        self.wait_word(
            table,
            (from as u64 * 8, WordWidth::Bits64),
            at_least,
            Writer::Rank(from),
            left,
        )
        .map_err(|error| error.during(format!("wait until rank {from} is ready")))?;
        consumed[from] = wanted;
        Ok(())
    }

    /// Whether a rank has sent a ready notification; if so, consumes it.
    pub fn test_ready(&self, from: usize) -> Result<bool> {
        match self.wait_ready(from, Duration::ZERO) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == &Kind::Timeout => Ok(false),
            Err(error) => Err(error),
        }
    }
}
