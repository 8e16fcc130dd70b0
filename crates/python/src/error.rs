//! Exceptions: the classes are in `warpwire/_errors.py`, one per kind.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use warpwire::Error;
use warpwire::error::Kind;

/// `warpwire._errors.make`.
static MAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// The exception for an error.
#[cold]
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    make(py, error).map_or_else(|failure| failure, PyErr::from_value)
}

/// The exception for an error, as an object.
pub(crate) fn make<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let make = MAKE.get_or_try_init(py, || {
        let module = py.import("warpwire._errors")?;
        PyResult::Ok(module.getattr("make")?.unbind())
    })?;
    let (kind, code) = match error.kind() {
        Kind::Os(errno) => ("Os".to_owned(), Some(*errno)),
        Kind::Cuda(result) => ("Cuda".to_owned(), Some(*result)),
        other => (format!("{other:?}"), None),
    };
    let parts = (error.what(), error.reason(), error.advice());
    let text = error.to_string();
    make.bind(py).call1((kind, code, text, parts.0, parts.1, parts.2))
}
