//! `warpwire.Memory` and `warpwire.RemoteMemory`: registered memory, here and at peers.

use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::types::PySlice;
use warpwire::Error;
use warpwire::agent::{self, Descriptor};
use warpwire::error::Kind;

use crate::buffer::{Window, window_of};
use crate::error::raise;
use crate::ranges::{Range, slice};

/// Memory that is registered with an agent, with the object that it belongs to. The registration
/// ends with `deregister()`, at the end of a `with` block, or when neither this object nor a
/// prepared list or a transfer in progress refers to it.
#[pyclass(frozen, module = "warpwire")]
pub(crate) struct Memory {
    registered: Mutex<Option<agent::Memory>>,
    address: u64,
    len: u64,
    kind: String,
    /// What was registered.
    object: Option<Py<PyAny>>,
}

impl Memory {
    pub(crate) fn new(registered: agent::Memory, object: Option<Py<PyAny>>) -> Self {
        let (address, len) = (registered.address(), registered.len());
        let kind = registered.kind().to_owned();
        Self { registered: Mutex::new(Some(registered)), address, len, kind, object }
    }

    /// Its registration.
    ///
    /// # Errors
    /// `Freed` if it was deregistered.
    pub(crate) fn registered(&self, py: Python<'_>) -> PyResult<agent::Memory> {
        let held = self.registered.lock().map(|held| held.clone()).unwrap_or_default();
        held.ok_or_else(|| raise(py, &self.ended("use registered memory")))
    }

    pub(crate) fn whole(&self, py: Python<'_>) -> PyResult<Descriptor> {
        self.registered(py)?;
        Ok(Descriptor::new(self.address, self.len))
    }

    fn ended(&self, what: &'static str) -> Error {
        let object = format!("{} bytes at {:#x}", self.len, self.address);
        Error::new(Kind::Freed, what).on(object).why("it was deregistered")
    }

    /// Ends the registration, if it has not ended.
    fn end(&self, py: Python<'_>) -> PyResult<bool> {
        let taken = {
            let Ok(mut held) = self.registered.lock() else { return Ok(false) };
            match &*held {
                Some(registered) if registered.is_in_use() => {
                    let error = Error::new(Kind::Busy, "deregister memory")
                        .why("a prepared list or a transfer that has not been seen to end uses it")
                        .fix("drop prepared lists, wait for transfers or cancel them, and repeat");
                    drop(held);
                    return Err(raise(py, &error));
                }
                _ => held.take(),
            }
        };
        let Some(registered) = taken else { return Ok(false) };
        py.detach(|| registered.deregister()).map_err(|why| raise(py, &why))?;
        Ok(true)
    }
}

#[pymethods]
impl Memory {
    /// The address of its first byte, by which transfers refer to it.
    #[getter]
    fn address(&self) -> u64 {
        self.address
    }

    /// Its length in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.len
    }

    fn __len__(&self) -> usize {
        self.len as usize
    }

    /// What it is: "host", or the device, such as "cuda:0".
    #[getter]
    fn kind(&self) -> &str {
        &self.kind
    }

    /// The object that was registered; None for memory by address.
    #[getter]
    fn object(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.object.as_ref().map(|object| object.clone_ref(py))
    }

    /// How the device reaches it.
    #[getter]
    fn path(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.registered(py)?.path().to_string())
    }

    /// Why it is not reached in a better way: one line per way that was tried.
    #[getter]
    fn why(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(self.registered(py)?.why())
    }

    /// `memory[start:end]`: a range of it, in bytes.
    fn __getitem__(&self, at: &Bound<'_, PySlice>) -> PyResult<Range> {
        slice(self.address, self.len, at)
    }

    /// A CPU window onto it, if it is memory of a device.
    fn window(&self, py: Python<'_>) -> PyResult<Window> {
        let registered = self.registered(py)?;
        match &self.object {
            Some(object) => window_of(object.bind(py)),
            None => {
                let range = (registered.address(), registered.len(), registered.kind());
                window_of(range.into_pyobject(py)?.as_any())
            }
        }
    }

    /// Ends the registration: neither peers nor this agent access the memory any more. Raises Busy
    /// if a prepared list or a transfer in progress uses it.
    fn deregister(&self, py: Python<'_>) -> PyResult<()> {
        match self.end(py)? {
            true => Ok(()),
            false => Err(raise(py, &self.ended("deregister memory"))),
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _class: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.end(py).map(|_| ())
    }

    fn __repr__(&self) -> String {
        format!("<warpwire.Memory: {} bytes at {:#x}, {}>", self.len, self.address, self.kind)
    }
}

/// Memory that a peer has registered.
#[pyclass(frozen, eq, module = "warpwire")]
#[derive(PartialEq)]
pub(crate) struct RemoteMemory(pub agent::RemoteMemory);

impl RemoteMemory {
    pub(crate) fn whole(&self) -> Descriptor {
        Descriptor::new(self.0.address(), self.0.len())
    }
}

#[pymethods]
impl RemoteMemory {
    /// The address of its first byte, in the peer's process.
    #[getter]
    fn address(&self) -> u64 {
        self.0.address()
    }

    /// Its length in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.len()
    }

    fn __len__(&self) -> usize {
        self.0.len() as usize
    }

    /// What the peer says it is: "host", or the device, such as "cuda:0".
    #[getter]
    fn kind(&self) -> &str {
        self.0.kind()
    }

    /// `memory[start:end]`: a range of it, in bytes.
    fn __getitem__(&self, at: &Bound<'_, PySlice>) -> PyResult<Range> {
        slice(self.0.address(), self.0.len(), at)
    }

    fn __repr__(&self) -> String {
        let (address, len, kind) = (self.0.address(), self.0.len(), self.0.kind());
        format!("<warpwire.RemoteMemory: {len} bytes at {address:#x}, {kind}>")
    }
}
