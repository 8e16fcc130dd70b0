//! Waits without the GIL, which signals interrupt.

use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use warpwire::Error;
use warpwire::error::Kind;

use crate::error::raise;

/// The longest time without a look for signals.
pub(crate) const SLICE: Duration = Duration::from_millis(100);

/// A timeout as Python gives it, in seconds; `None` is no limit.
pub(crate) fn timeout(py: Python<'_>, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let Some(seconds) = seconds else { return Ok(None) };
    match Duration::try_from_secs_f64(seconds) {
        Ok(timeout) => Ok(Some(timeout)),
        Err(_) if seconds == f64::INFINITY => Ok(None),
        Err(why) => Err(raise(
            py,
            &Error::new(Kind::InvalidArgument, format!("wait {seconds} s"))
                .why(why.to_string())
                .fix("use a number of seconds, 0 or more, or None for no limit"),
        )),
    }
}

/// Wakes those that wait in event loops for an agent or communicator that was closed.
pub(crate) fn wake(watches: &Bound<'_, PyDict>) -> PyResult<()> {
    if !watches.is_empty() {
        watches.py().import("warpwire._asyncio")?.call_method1("wake", (watches,))?;
    }
    Ok(())
}

/// Calls `wait` with a part of the time left, without the GIL, until it returns a value. `None` if
/// the time is over.
///
/// # Errors
/// Those of `wait`, and what a signal's handler raises.
pub(crate) fn until<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut wait: impl FnMut(Duration) -> warpwire::error::Result<Option<T>> + Send,
) -> PyResult<Option<T>> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let slice = left.map_or(SLICE, |left| left.min(SLICE));
        if let Some(value) = py.detach(|| wait(slice)).map_err(|why| raise(py, &why))? {
            return Ok(Some(value));
        }
        py.check_signals()?;
        if left.is_some_and(|left| left <= slice) {
            return Ok(None);
        }
    }
}
