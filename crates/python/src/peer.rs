//! `warpwire.Peer`.

use pyo3::prelude::*;
use warpwire::agent;

use crate::memory::RemoteMemory;

/// Another agent, as added to this one.
#[pyclass(frozen, module = "warpwire")]
pub(crate) struct Peer(pub agent::Peer);

#[pymethods]
impl Peer {
    /// Its name.
    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    /// What it has registered, as far as is known here, sorted by address.
    #[getter]
    fn memory(&self) -> Vec<RemoteMemory> {
        self.0.memory().into_iter().map(RemoteMemory).collect()
    }

    /// Whether it is connected now. It need not be: a transfer connects.
    #[getter]
    fn connected(&self) -> bool {
        self.0.is_connected()
    }

    /// How it is reached and why, one line per queue pair; empty while it is not connected.
    #[getter]
    fn path(&self) -> Vec<String> {
        self.0.path()
    }

    fn __repr__(&self) -> String {
        format!("<warpwire.{:?}>", self.0)
    }
}
