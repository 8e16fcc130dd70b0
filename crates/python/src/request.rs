//! `warpwire.Request`.

use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::time::Duration;

use pyo3::prelude::*;
use warpwire::Error;
use warpwire::error::{Kind, Result};
use warpwire::msg::{self, Outcome};

use crate::comm::Comm;
use crate::error::{make, raise};
use crate::wait;

/// A request, which one thread looks at at a time. Locked without the GIL only, or without waiting.
pub(crate) struct Started {
    active: Mutex<Option<msg::Request>>,
    outcome: OnceLock<Result<Outcome>>,
}

impl Started {
    pub(crate) fn new(request: msg::Request) -> Self {
        Self { active: Mutex::new(Some(request)), outcome: OnceLock::new() }
    }

    /// Keeps what a look at the request has found; it has ended, unless the time was over.
    fn keep(&self, active: &mut Option<msg::Request>, found: Result<Outcome>) {
        let in_progress = |error: &Error| error.kind() == &Kind::Timeout;
        if !found.as_ref().is_err_and(in_progress) {
            let _ = self.outcome.set(found);
            *active = None;
        }
    }

    /// Makes progress; its outcome, if it has ended. Not with the GIL.
    fn test(&self) -> Option<&Result<Outcome>> {
        // A thread that waits for it holds the lock: then it has not ended.
        if let Ok(mut active) = self.active.try_lock()
            && let Some(request) = active.as_mut()
            && let Some(found) = request.test().transpose()
        {
            self.keep(&mut active, found);
        }
        self.outcome.get()
    }

    /// Waits for its outcome, and at most so long. Not with the GIL.
    fn wait(&self, slice: Duration) -> Result<Option<Outcome>> {
        match self.active.try_lock() {
            Ok(mut active) => {
                if let Some(request) = active.as_mut() {
                    let found = request.wait(slice);
                    self.keep(&mut active, found);
                }
            }
            // Another thread waits for it.
            Err(TryLockError::WouldBlock) => {
                std::thread::sleep(slice.min(Duration::from_millis(1)));
            }
            Err(TryLockError::Poisoned(_)) => {}
        }
        self.outcome.get().cloned().transpose()
    }
}

/// A message in flight; `await` it in asyncio. Dropping it cancels a receive that no message was
/// matched to; any other request goes on, and keeps its memory until it has ended.
#[pyclass(frozen, module = "warpwire")]
pub(crate) struct Request {
    started: Arc<Started>,
    comm: Py<Comm>,
}

impl Drop for Request {
    fn drop(&mut self) {
        // Cancelling drops the object: its destructor must not run under the communicator's lock.
        // Without the GIL it runs later.
        let taken = self.started.active.try_lock().ok().and_then(|mut active| active.take());
        let _ = Python::try_attach(|py| py.detach(|| drop(taken)));
    }
}

impl Request {
    pub(crate) fn new(started: Started, comm: Py<Comm>) -> Self {
        Self { started: Arc::new(started), comm }
    }

    fn outcome(&self, py: Python<'_>) -> Option<&Result<Outcome>> {
        if self.started.outcome.get().is_none() {
            py.detach(|| {
                self.started.test();
            });
        }
        self.started.outcome.get()
    }

    fn ended(&self, py: Python<'_>) -> PyResult<Option<Outcome>> {
        match self.outcome(py) {
            None => Ok(None),
            Some(Ok(outcome)) => Ok(Some(*outcome)),
            Some(Err(why)) => Err(raise(py, why)),
        }
    }
}

#[pymethods]
impl Request {
    /// "in progress", "done" or "failed". Makes progress with all requests.
    #[getter]
    fn state(&self, py: Python<'_>) -> &'static str {
        match self.outcome(py) {
            None => "in progress",
            Some(Ok(_)) => "done",
            Some(Err(_)) => "failed",
        }
    }

    /// Whether it has completed. Raises the cause if it has failed.
    #[getter]
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.ended(py)?.is_some())
    }

    /// Why it has failed, as an exception; None if it has not.
    #[getter]
    fn error<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.outcome(py) {
            Some(Err(why)) => make(py, why).map(Some),
            _ => Ok(None),
        }
    }

    /// Bytes of the message; None while it is in progress.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        Ok(self.ended(py)?.map(|outcome| outcome.len))
    }

    /// The message's tag; None while it is in progress.
    #[getter]
    fn tag(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        Ok(self.ended(py)?.map(|outcome| outcome.tag))
    }

    /// Waits until it has completed, without the GIL; returns the bytes of the message. Raises the
    /// cause if it fails, and Timeout if it is still in progress after `timeout` seconds: then it
    /// goes on.
    #[pyo3(signature = (timeout = None))]
    pub(crate) fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<u64> {
        let limit = wait::timeout(py, timeout)?;
        let started = &self.started;
        let ended = wait::until(py, limit, |slice| started.wait(slice))?;
        ended.map(|outcome| outcome.len).ok_or_else(|| {
            let why = format!("it is still in progress after {} s", timeout.unwrap_or_default());
            let error = Error::new(Kind::Timeout, "wait for a message").why(why);
            raise(py, &error.fix("wait longer; it is still in flight"))
        })
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let module = slf.py().import("warpwire._asyncio")?;
        module.call_method1("wait_request", (slf,))?.call_method0("__await__")
    }

    /// Whether it has completed; if not, the communicator's descriptor is raised when it has.
    fn _poll(&self, py: Python<'_>) -> PyResult<bool> {
        self.done(py)
    }

    #[getter]
    fn _comm(&self, py: Python<'_>) -> Py<Comm> {
        self.comm.clone_ref(py)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("<warpwire.Request: {}>", self.state(py))
    }
}
