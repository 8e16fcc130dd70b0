//! Streams of Python's GPU libraries.
#![allow(unsafe_code)] // the handles of streams are trusted

use pyo3::prelude::*;
use warpwire::mem::{self, ForeignStream};

use crate::error::raise;

/// The stream that an object is: one of torch (`cuda_stream`), one with `__cuda_stream__`, one of
/// CuPy (`ptr`), a handle, or a pair of a handle and a device such as `"cuda:1"`.
pub(crate) fn stream(object: &Bound<'_, PyAny>) -> PyResult<ForeignStream> {
    let py = object.py();
    let (handle, device) = handle_and_device(object)?;
    let open = || {
        // SAFETY: Python's object or the program vouches for the handle.
        mem::open(&device).and_then(|device| unsafe { ForeignStream::new(&device, handle) })
    };
    py.detach(open).map_err(|why| raise(py, &why))
}

fn handle_and_device(object: &Bound<'_, PyAny>) -> PyResult<(u64, String)> {
    if let Ok(pair) = object.extract::<(u64, String)>() {
        return Ok(pair);
    }
    let handle = if let Ok(handle) = object.extract::<u64>() {
        handle
    } else if let Ok(protocol) = object.getattr("__cuda_stream__") {
        let answer = if protocol.is_callable() { protocol.call0()? } else { protocol };
        answer.extract::<(u32, u64)>()?.1
    } else if let Ok(handle) = object.getattr("cuda_stream").or_else(|_| object.getattr("ptr")) {
        handle.extract()?
    } else {
        let kind = object.get_type().name()?;
        return Err(pyo3::exceptions::PyTypeError::new_err(format!(
            "{kind} is no stream: give one of torch or CuPy, one with __cuda_stream__, a handle, or \
             (handle, \"cuda:N\")"
        )));
    };
    let ordinal = ["device_index", "device_id"]
        .into_iter()
        .find_map(|name| object.getattr(name).ok()?.extract::<u32>().ok())
        .or_else(|| object.getattr("device").ok()?.getattr("device_id").ok()?.extract().ok());
    Ok((handle, format!("cuda:{}", ordinal.unwrap_or(0))))
}
