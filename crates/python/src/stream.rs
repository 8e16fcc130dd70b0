//! Streams: of Python's GPU libraries, and `warpwire.Stream`.
#![allow(unsafe_code)] // the handles of streams are trusted

use pyo3::prelude::*;
use warpwire::Error;
use warpwire::error::Kind;
use warpwire::mem::{self, ForeignStream, StreamRef};

use crate::buffer::Buffer;
use crate::error::raise;
use crate::wait;

/// A stream of this package, or of another one.
pub(crate) enum AnyStream {
    Own(mem::Stream),
    Foreign(ForeignStream),
}

impl AnyStream {
    pub(crate) fn by_ref(&self) -> StreamRef<'_> {
        match self {
            Self::Own(stream) => stream.into(),
            Self::Foreign(stream) => stream.into(),
        }
    }
}

/// An ordered queue of work on a device: "cuda:0", or a simulated GPU, "sim:0". Programs with torch
/// or CuPy use their streams instead.
#[pyclass(frozen, module = "warpwire")]
pub(crate) struct Stream(mem::Stream);

#[pymethods]
impl Stream {
    #[new]
    fn new(py: Python<'_>, device: &str) -> PyResult<Self> {
        let open = || mem::open(device).and_then(|device| device.stream());
        py.detach(open).map(Self).map_err(|why| raise(py, &why))
    }

    /// Its device, such as "cuda:0".
    #[getter]
    fn device(&self) -> String {
        self.0.device().label()
    }

    /// Its number on the device.
    #[getter]
    fn number(&self) -> u64 {
        self.0.number()
    }

    /// Fills memory with a byte when the stream gets to this point.
    fn fill(&self, py: Python<'_>, buffer: &Bound<'_, Buffer>, value: u8) -> PyResult<()> {
        let region = buffer.get().region().map_err(|why| raise(py, &why))?;
        self.0.fill(&region, value).map_err(|why| raise(py, &why))
    }

    /// Copies memory to other memory of the same length when the stream gets to this point.
    fn copy(
        &self,
        py: Python<'_>,
        to: &Bound<'_, Buffer>,
        source: &Bound<'_, Buffer>,
    ) -> PyResult<()> {
        let region = |of: &Bound<'_, Buffer>| of.get().region().map_err(|why| raise(py, &why));
        self.0.copy(&region(to)?, &region(source)?).map_err(|why| raise(py, &why))
    }

    /// Whether everything queued has been done. Raises the cause if the stream has failed.
    #[getter]
    fn idle(&self, py: Python<'_>) -> PyResult<bool> {
        self.0.is_idle().map_err(|why| raise(py, &why))
    }

    /// Waits without the GIL until everything queued has been done; after `timeout` seconds raises
    /// Timeout.
    #[pyo3(signature = (timeout = None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let (limit, stream) = (wait::timeout(py, timeout)?, &self.0);
        let ended = wait::until(py, limit, |slice| match stream.synchronize(slice) {
            Err(why) if why.kind() == &Kind::Timeout => Ok(None),
            ended => ended.map(Some),
        })?;
        ended.ok_or_else(|| {
            let why = format!("it is still busy after {} s", timeout.unwrap_or_default());
            raise(py, &Error::new(Kind::Timeout, "wait for a stream").on(stream.label()).why(why))
        })
    }

    fn __repr__(&self) -> String {
        format!("<warpwire.Stream: {}>", self.0.label())
    }
}

/// The stream that an object is: a `Stream`, one of torch (`cuda_stream`), one with
/// `__cuda_stream__`, one of CuPy (`ptr`), a handle, or a pair of a handle and a device such as
/// `"cuda:1"`.
pub(crate) fn stream(object: &Bound<'_, PyAny>) -> PyResult<AnyStream> {
    let py = object.py();
    if let Ok(own) = object.cast::<Stream>() {
        return Ok(AnyStream::Own(own.get().0.clone()));
    }
    let (handle, device) = handle_and_device(object)?;
    let open = || {
        let device = mem::open(&device)?;
        // SAFETY: Python's object or the program vouches for the handle.
        unsafe { ForeignStream::new(&device, handle) }.map(AnyStream::Foreign)
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
