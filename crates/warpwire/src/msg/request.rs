//! Handles of transfers in flight.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::{Duration, Instant};

use super::entries::{Driver, RequestKind};
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
/// Dropping it does not wait: an unmatched receive is cancelled, and its message goes to a later
/// receive; any other request completes in the background and keeps its memory until then. So the
/// message of a receive that is dropped after it was matched is lost: await `&mut request` where a
/// task may give up, and the request stays.
///
/// It is a future as well, for whatever executor: while tasks wait, and no thread of the program
/// does, a thread of the communicator sleeps until there is a completion and wakes those whose
/// requests have ended. The engine must have a thread too, as it has unless
/// [`ProgressMode::Manual`](crate::verbs::ProgressMode::Manual) is chosen. One task awaits a
/// request at a time.
///
/// ```
/// use std::pin::pin;
/// use std::task::{Context, Poll, Waker};
/// use warpwire::msg::Comm;
///
/// async fn exchange(comm: &Comm) -> warpwire::Result<u64> {
///     let (mine, theirs) = (comm.alloc(64)?, comm.alloc(64)?);
///     let receive = comm.irecv(0, 7, &theirs)?;
///     comm.isend(0, 7, &mine)?.await?;
///     Ok(receive.await?.len)
/// }
///
/// let comm = Comm::local(1)?.remove(0); // sends to itself, so the first poll finds the end
/// let polled = pin!(exchange(&comm)).poll(&mut Context::from_waker(Waker::noop()));
/// assert!(matches!(polled, Poll::Ready(Ok(64))));
/// # Ok::<(), warpwire::Error>(())
/// ```
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
            let mut state = shared.lock();
            if !self.take_outcome(&mut state) {
                shared.step(&mut state)?;
                let ended = self.take_outcome(&mut state);
                if !ended && shared.events.are_watched.load(Ordering::Relaxed) {
                    // The event loop may sleep next.
                    state.return_all_credits();
                }
            }
        }
        self.outcome.clone().transpose()
    }

    /// Returns the result if the request has completed; else `waker` is woken when it has. Makes
    /// progress; never blocks.
    pub(crate) fn poll_driven(
        &mut self,
        waker: &Waker,
        driven_by: Driver,
    ) -> Poll<Result<Outcome>> {
        let shared = self.shared.clone();
        if self.outcome.is_none() {
            let mut state = shared.lock();
            if !self.take_outcome(&mut state) {
                let stepped = shared.step(&mut state);
                state.return_all_credits();
                if !self.take_outcome(&mut state) {
                    stepped?;
                    state.entries.set_task(self.index, waker, driven_by);
                    if driven_by == Driver::Thread && !state.has_leader {
                        shared.drive.raise();
                    }
                }
            }
        }
        self.outcome.clone().map_or(Poll::Pending, Poll::Ready)
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

    #[cfg(feature = "tokio")]
    pub(crate) fn is_of(&self, comm: &super::Comm) -> bool {
        Arc::ptr_eq(&self.shared, &comm.shared)
    }

    #[cold]
    fn timed_out(&self, timeout: Duration) -> Error {
        let what = self.shared.lock().entries.get(self.index).name();
        Error::new(Kind::Timeout, what)
            .why(format!("it did not complete in {} s", timeout.as_secs_f64()))
            .fix("wait longer; it is still in flight")
    }
}

impl Future for Request {
    type Output = Result<Outcome>;

    fn poll(mut self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<Self::Output> {
        self.poll_driven(task.waker(), Driver::Thread)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.outcome.is_some() {
            return;
        }
        let shared = self.shared.clone();
        let mut state = shared.lock();
        if self.take_outcome(&mut state) {
            return;
        }
        let is_receive = state.entries.get(self.index).kind == RequestKind::Receive;
        if is_receive && state.cancel(self.index) {
            state.entries.release(self.index);
        } else {
            state.entries.forget_task(self.index);
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
