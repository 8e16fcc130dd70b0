//! `warpwire.Prepared` and `warpwire.Transfer`.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use pyo3::prelude::*;
use warpwire::Error;
use warpwire::agent::{self, TransferState};
use warpwire::error::{Kind, Result};

use crate::agent::Agent;
use crate::error::{make, raise};
use crate::peer::Peer;
use crate::{stream, wait};

/// Two lists of ranges that were checked and looked up, to be posted any number of times. Keeps the
/// local memory registered.
#[pyclass(frozen, module = "warpwire")]
pub(crate) struct Prepared(pub agent::PreparedTransfer);

#[pymethods]
impl Prepared {
    /// The peer.
    #[getter]
    fn peer(&self) -> Peer {
        Peer(self.0.peer().clone())
    }

    /// Bytes in all.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.bytes()
    }

    /// Work requests that a transfer posts: neighbouring ranges are merged, long ones are split.
    #[getter]
    fn work_requests(&self) -> usize {
        self.0.work_requests()
    }

    fn __repr__(&self) -> String {
        format!("<warpwire.Prepared: {} bytes, peer {:?}>", self.0.bytes(), self.0.peer().name())
    }
}

/// A transfer that was posted. Dropping it does not end it. `await` it in asyncio.
#[pyclass(frozen, module = "warpwire")]
pub(crate) struct Transfer {
    /// `None` once it has been seen to end: it holds the local memory.
    active: Mutex<Option<agent::Transfer>>,
    outcome: OnceLock<Result<()>>,
    bytes: u64,
    agent: Py<Agent>,
}

impl Transfer {
    pub(crate) fn new(transfer: agent::Transfer, agent: Py<Agent>) -> Self {
        let bytes = transfer.bytes();
        let active = Mutex::new(Some(transfer));
        Self { active, outcome: OnceLock::new(), bytes, agent }
    }

    fn active(&self) -> Option<agent::Transfer> {
        self.active.lock().ok().and_then(|active| active.clone())
    }

    /// Its outcome, if it has ended.
    fn outcome(&self) -> Option<&Result<()>> {
        if let Some(active) = self.active() {
            match active.state() {
                TransferState::InProgress => {}
                TransferState::Done => self.end(Ok(())),
                TransferState::Failed(why) => self.end(Err(why)),
            }
        }
        self.outcome.get()
    }

    fn end(&self, outcome: Result<()>) {
        // Before the lock is given back, so that nobody finds neither.
        let _ = self.outcome.set(outcome);
        let ended = self.active.lock().ok().and_then(|mut active| active.take());
        drop(ended);
    }

    /// Waits for its outcome, and at most so long.
    fn wait_for(&self, slice: Duration) -> Result<Option<()>> {
        if let Some(active) = self.active() {
            // Why it ended, or that it has not, is asked below.
            let _ = active.wait(slice);
        }
        self.outcome().cloned().transpose()
    }
}

#[pymethods]
impl Transfer {
    /// "in progress", "done" or "failed".
    #[getter]
    fn state(&self) -> &'static str {
        match self.outcome() {
            None => "in progress",
            Some(Ok(())) => "done",
            Some(Err(_)) => "failed",
        }
    }

    /// Whether all data is in place. Raises the cause if the transfer has failed.
    #[getter]
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        match self.outcome() {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(why)) => Err(raise(py, why)),
        }
    }

    /// Why it has failed, as an exception; None if it has not.
    #[getter]
    fn error<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.outcome() {
            Some(Err(why)) => make(py, why).map(Some),
            _ => Ok(None),
        }
    }

    /// Bytes of its lists.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// Waits until it is done, without the GIL. Raises the cause if it fails, and Timeout if it is
    /// still in progress after `timeout` seconds: then it goes on.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = wait::timeout(py, timeout)?;
        let ended = wait::until(py, limit, |slice| self.wait_for(slice))?;
        ended.ok_or_else(|| {
            let why = format!("it is still in progress after {} s", timeout.unwrap_or_default());
            let error = Error::new(Kind::Timeout, "wait for a transfer").why(why);
            raise(py, &error.fix("wait longer, or cancel it"))
        })
    }

    /// Makes a CUDA stream wait: the work behind this point starts when the transfer has ended,
    /// with success or not. Does not wait here.
    fn wait_on_stream(&self, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let (py, stream) = (stream.py(), stream::stream(stream)?);
        match self.active() {
            Some(active) => {
                py.detach(|| active.wait_on_stream(stream.by_ref())).map_err(|why| raise(py, &why))
            }
            None => Ok(()),
        }
    }

    /// Cancels it: it fails with Cancelled once what was posted of it has ended, unless that
    /// completes it. Does not wait.
    fn cancel(&self, py: Python<'_>) {
        if let Some(active) = self.active() {
            py.detach(|| active.cancel());
        }
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let module = slf.py().import("warpwire._asyncio")?;
        module.call_method1("wait_transfer", (slf,))?.call_method0("__await__")
    }

    /// Whether it is done; if not, the agent's descriptor is raised when it is.
    fn _poll(&self, py: Python<'_>) -> PyResult<bool> {
        if let Some(mut active) = self.active() {
            // The descriptor wakes the event loop, so the waker has nothing to do.
            let polled = Pin::new(&mut active).poll(&mut Context::from_waker(Waker::noop()));
            if let Poll::Ready(outcome) = polled {
                self.end(outcome);
            }
        }
        match self.outcome.get() {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(why)) => Err(raise(py, why)),
        }
    }

    #[getter]
    fn _agent(&self, py: Python<'_>) -> Py<Agent> {
        self.agent.clone_ref(py)
    }

    fn __repr__(&self) -> String {
        format!("<warpwire.Transfer: {} bytes, {}>", self.bytes, self.state())
    }
}
