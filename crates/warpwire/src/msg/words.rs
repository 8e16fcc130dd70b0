//! Words that others write: waiting for them, and the table in which ranks say that they are ready.

use std::time::{Duration, Instant};

use super::buffer::Buffer;
use super::comm::Comm;
use super::entries::WordUpdate;
use super::state::State;
use crate::error::{Error, Kind, Result};
use crate::mem::{Condition, WordWidth};
use crate::verbs::Remote;

/// Who is expected to write a word: if that rank is lost, nobody waits for it in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// This rank.
    Rank(usize),
    /// Any rank: the wait fails when one has died, or all have left.
    Any,
}

impl Writer {
    /// Why it will not write.
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
    /// Waits until a word of 32 bits satisfies a condition. It drives the device meanwhile.
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

    /// Waits until a word of 64 bits satisfies a condition.
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
        let what = || format!("wait for a word that is {condition} {value:#x}");
        let found = self.shared.poll_until(timeout, |state| {
            // In this order: what was written before its writer was lost counts.
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

    /// Tells a rank that this one is ready to receive, once more. It passes messages that wait for room there.
    pub fn send_ready(&self, to: usize, timeout: Duration) -> Result<()> {
        self.shared.check_rank(to, "tell")?;
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
            let error = Error::new(Kind::Timeout, format!("tell rank {to} that we are ready"));
            error.why("its queue is full")
        })?;
        ready_sent[to] = value;
        Ok(())
    }

    /// Waits until a rank has said that it is ready, and takes it at its word: the next wait is for the next time.
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

    /// Whether a rank has said that it is ready; if so, it is taken at its word.
    pub fn test_ready(&self, from: usize) -> Result<bool> {
        match self.wait_ready(from, Duration::ZERO) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == &Kind::Timeout => Ok(false),
            Err(error) => Err(error),
        }
    }
}
