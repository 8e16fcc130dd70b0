//! Waiting that always ends, and locks of one direction.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{Failure, Outcome, Place, Sockets, at, desk};
use crate::sock::layout::pulse;

/// How long a call may wait.
#[derive(Clone, Copy, Debug)]
pub(super) enum Patience {
    /// Not at all.
    None,
    /// So long.
    For(Duration),
    /// As long as the host lives.
    Ever,
}

impl Patience {
    fn from_nanos(nanos: u64) -> Self {
        if nanos == 0 { Self::Ever } else { Self::For(Duration::from_nanos(nanos)) }
    }
}

/// The host's sign of life, as it was seen last.
struct Watch {
    beat: Cell<u64>,
    since: Cell<Instant>,
}

impl Sockets<'_> {
    /// How long a call of this socket may wait, by the time-out at that place of the desk.
    pub(super) fn patience(&self, place: Place, timeout: u64) -> Outcome<Patience> {
        let flags = self.block.load_u32(at(place.desk + desk::FLAGS))?;
        if flags & desk::NON_BLOCKING != 0 {
            return Ok(Patience::None);
        }
        Ok(Patience::from_nanos(self.block.load_u64(at(place.desk + timeout))?))
    }

    /// Asks until there is an answer. Without one in time: `EAGAIN` for calls that may not wait, else `ETIMEDOUT`;
    /// `ECONNABORTED` if the host is gone.
    pub(super) fn wait<T>(
        &self,
        patience: Patience,
        mut ask: impl FnMut() -> Outcome<Option<T>>,
    ) -> Outcome<T> {
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        if matches!(patience, Patience::None) {
            return Err(Errno::AGAIN.into());
        }
        let start = Instant::now();
        let watch = Watch { beat: Cell::new(self.beat()?), since: Cell::new(start) };
        let mut end = None;
        self.block.spin_until(|| {
            match ask() {
                Ok(None) => {}
                Ok(Some(answer)) => end = Some(Ok(answer)),
                Err(failure) => end = Some(Err(failure)),
            }
            if end.is_some() {
                return Ok(true);
            }
            if let Err(failure) = self.check_host(&watch) {
                end = Some(Err(failure));
            } else if matches!(patience, Patience::For(limit) if start.elapsed() >= limit) {
                end = Some(Err(Errno::TIMEDOUT.into()));
            }
            Ok(end.is_some())
        })?;
        end.unwrap_or(Err(Failure::Errno(Errno::TIMEDOUT)))
    }

    fn beat(&self) -> Outcome<u64> {
        Ok(self.block.load_u64(at(self.pulse + pulse::BEAT))?)
    }

    /// Whether the host has said that it ends.
    pub(super) fn check_open(&self) -> Outcome<()> {
        match self.block.load_u32(at(self.pulse + pulse::CLOSED))? {
            0 => Ok(()),
            _ => Err(Errno::CONNABORTED.into()),
        }
    }

    fn check_host(&self, watch: &Watch) -> Outcome<()> {
        self.check_open()?;
        let beat = self.beat()?;
        if beat != watch.beat.get() {
            watch.beat.set(beat);
            watch.since.set(Instant::now());
            return Ok(());
        }
        if watch.since.get().elapsed() > Duration::from_millis(u64::from(self.silence_ms)) {
            return Err(Errno::CONNABORTED.into());
        }
        Ok(())
    }

    /// Takes the lock of one direction, if it is free; `None` while another has it.
    pub(super) fn try_lock(&self, place: Place, lock: u64) -> Outcome<Option<()>> {
        let word = at(place.desk + lock);
        match self.block.compare_exchange_u32(word, desk::FREE, desk::COPYING)? {
            desk::FREE => {}
            desk::GONE => return Err(Errno::BADF.into()),
            _ => return Ok(None),
        }
        // The place may have become another socket's since it was looked at.
        let generation = self.block.load_u32(at(place.desk + desk::GENERATION))?;
        if generation != u32::from(place.generation) {
            self.unlock(place, lock)?;
            return Err(Errno::BADF.into());
        }
        Ok(Some(()))
    }

    pub(super) fn unlock(&self, place: Place, lock: u64) -> Outcome<()> {
        Ok(self.block.store_u32(at(place.desk + lock), desk::FREE)?)
    }

    /// Does something with the lock held.
    pub(super) fn locked<T>(
        &self,
        place: Place,
        lock: u64,
        work: impl FnOnce() -> Outcome<T>,
    ) -> Outcome<T> {
        let outcome = work();
        self.unlock(place, lock)?;
        outcome
    }
}
