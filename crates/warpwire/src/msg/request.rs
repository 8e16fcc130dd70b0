//! Handles of transfers in flight.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::entries::RequestKind;
use super::shared::Shared;
use super::state::State;
use crate::error::{Error, Kind, Result};

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The peer rank.
    pub peer: usize,
    /// The message's tag; 0 for puts and gets.
    pub tag: u32,
    /// Number of bytes transferred.
    pub len: u64,
}

/// A transfer in flight.
///
/// Dropping it does not wait: an unmatched receive is cancelled; any other request completes in the
/// background and keeps its memory until then.
#[must_use = "dropping a request does not wait for it, and cancels a receive"]
pub struct Request {
    shared: Arc<Shared>,
    index: u32,
    generation: u32,
    /// Moved from the table, whose entry is then free.
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

    /// Takes the outcome from the table, if there is one.
    fn take_outcome(&mut self, state: &mut State) -> bool {
        if self.outcome.is_none()
            && let Some(outcome) = state.entries.get(self.index).outcome.take()
        {
            state.entries.release(self.index);
            self.outcome = Some(outcome);
        }
        self.outcome.is_some()
    }

    /// Returns the result if the request has completed. Makes progress; never blocks.
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

    /// Waits until the request has completed.
    ///
    /// # Errors
    /// The failure of the request; or [`Kind::Timeout`], in which case the request stays in flight.
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
            .why(format!("it did not complete in {} s", timeout.as_secs_f64()))
            .fix("wait longer; it is still in flight")
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

/// Waits until all requests have completed; returns the first failure in their order, if any.
pub fn wait_all(requests: &mut [Request], timeout: Duration) -> Result<()> {
    let start = Instant::now();
    let mut failure = None;
    for request in requests {
        let left = timeout.saturating_sub(start.elapsed());
        match request.wait(left) {
            // On timeout report an earlier failure instead, since it may be the cause.
            Err(error) if error.kind() == &Kind::Timeout => return Err(failure.unwrap_or(error)),
            Err(error) => failure = failure.or(Some(error)),
            Ok(_) => {}
        }
    }
    failure.map_or(Ok(()), Err)
}

/// Waits until one of the requests has completed; returns its index and result. Requests that had
/// completed before count too: remove them from the list.
///
/// # Errors
/// [`Kind::Timeout`]; [`Kind::InvalidArgument`] if the list is empty, or if the requests belong to
/// several communicators.
pub fn wait_any(requests: &mut [Request], timeout: Duration) -> Result<(usize, Result<Outcome>)> {
    let wrong = |why: &'static str| {
        Err(Error::new(Kind::InvalidArgument, "wait for any of several requests").why(why))
    };
    let Some(first) = requests.first() else { return wrong("the list is empty") };
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
            .why(format!("none completed in {} s", timeout.as_secs_f64()))),
    }
}
