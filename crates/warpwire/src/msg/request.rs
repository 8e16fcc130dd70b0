//! Requests: what a program holds of a transfer that is under way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::entries::RequestKind;
use super::shared::Shared;
use super::state::State;
use crate::error::{Error, Kind, Result};

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The other rank.
    pub peer: usize,
    /// The message's tag; 0 for puts and gets.
    pub tag: u32,
    /// How many bytes were moved.
    pub len: u64,
}

/// A transfer under way.
///
/// Dropped, it is not waited for: a receive to which no message has come is cancelled; anything else goes on to its end,
/// and keeps its memory until then.
#[must_use = "a request that is dropped is not waited for, and a receive is cancelled"]
pub struct Request {
    shared: Arc<Shared>,
    index: u32,
    generation: u32,
    /// Taken from the table: the place there is free.
    outcome: Option<Result<Outcome>>,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Request({}.{}, {:?})", self.index, self.generation, self.outcome)
    }
}

impl Request {
    pub(super) fn new(shared: Arc<Shared>, index: u32, generation: u32) -> Self {
        Self { shared, index, generation, outcome: None }
    }

    /// Takes the outcome from the table, if it is there.
    fn take_outcome(&mut self, state: &mut State) -> bool {
        if self.outcome.is_none()
            && let Some(outcome) = state.entries.get(self.index).outcome.take()
        {
            state.entries.release(self.index);
            self.outcome = Some(outcome);
        }
        self.outcome.is_some()
    }

    /// What became of it, if it has ended. Makes progress; never blocks.
    pub fn test(&mut self) -> Result<Option<Outcome>> {
        if self.outcome.is_none() {
            let shared = self.shared.clone();
            let mut state = shared.state.lock();
            if !self.take_outcome(&mut state) {
                shared.step(&mut state)?;
                self.take_outcome(&mut state);
            }
        }
        self.outcome.clone().transpose()
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// Its own failure; or [`Kind::Timeout`], and then it goes on.
    pub fn wait(&mut self, timeout: Duration) -> Result<Outcome> {
        let shared = self.shared.clone();
        if self.outcome.is_none() {
            shared.wait_until(timeout, |state| self.take_outcome(state).then_some(()))?;
        }
        match &self.outcome {
            Some(outcome) => outcome.clone(),
            None => Err(self.timed_out(timeout)),
        }
    }

    #[cold]
    fn timed_out(&self, timeout: Duration) -> Error {
        let what = self.shared.state.lock().entries.get(self.index).name();
        Error::new(Kind::Timeout, what)
            .why(format!("it has not ended in {} s", timeout.as_secs_f64()))
            .fix("wait longer; it goes on")
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.outcome.is_some() {
            return;
        }
        let shared = self.shared.clone();
        let mut state = shared.state.lock();
        if self.take_outcome(&mut state) {
            return;
        }
        let is_receive = state.entries.get(self.index).kind == RequestKind::Receive;
        if is_receive && state.cancel(self.index) {
            state.entries.release(self.index);
        } else {
            state.entries.get(self.index).detached = true;
        }
    }
}

/// Waits until all have ended; returns the first failure, in their order, if there is one.
pub fn wait_all(requests: &mut [Request], timeout: Duration) -> Result<()> {
    let start = Instant::now();
    let mut failure = None;
    for request in requests {
        let left = timeout.saturating_sub(start.elapsed());
        match request.wait(left) {
            // Others may have failed, and who waits for this one should know.
            Err(error) if error.kind() == &Kind::Timeout => return Err(failure.unwrap_or(error)),
            Err(error) => failure = failure.or(Some(error)),
            Ok(_) => {}
        }
    }
    failure.map_or(Ok(()), Err)
}

/// Waits until one of them has ended; tells which, and how. Those that had ended before count too: take them out.
///
/// # Errors
/// [`Kind::Timeout`]; [`Kind::InvalidArgument`] if there are none, or if they belong to several communicators.
pub fn wait_any(requests: &mut [Request], timeout: Duration) -> Result<(usize, Result<Outcome>)> {
    let wrong = |why: &'static str| {
        Err(Error::new(Kind::InvalidArgument, "wait for any of several requests").why(why))
    };
    let Some(first) = requests.first() else { return wrong("there are none") };
    let shared = first.shared.clone();
    if requests.iter().any(|request| !Arc::ptr_eq(&request.shared, &shared)) {
        return wrong("they belong to several communicators");
    }
    let found = shared.wait_until(timeout, |state| {
        requests.iter_mut().position(|request| request.take_outcome(state))
    })?;
    match found.and_then(|index| requests[index].outcome.clone().map(|outcome| (index, outcome))) {
        Some(found) => Ok(found),
        None => Err(Error::new(Kind::Timeout, "wait for any of several requests")
            .why(format!("none has ended in {} s", timeout.as_secs_f64()))),
    }
}
