//! The Python package `warpwire`: transfer agents, messages, and memory in and out of Python.
//!
//! | module | what it has |
//! |---|---|
//! | `agent`, `peer`, `transfer` | `Agent`; `Peer`; `Prepared`, `Transfer` |
//! | `comm`, `request` | ranks and messages: `Comm`; `Request` |
//! | `channel`, `stream` | messages of streams: `DeviceChannel`; `Stream`, and others' |
//! | `memory`, `ranges` | registered memory, here and at peers; lists of ranges |
//! | `object` | Python objects as memory: which protocols they offer, what is refused |
//! | `dlpack` | the layout of DLPack, in and out |
//! | `buffer` | memory that this package allocates; CPU windows |
//! | `error` | exceptions |
//!
//! # Rules
//! 1. **Waits release the GIL**, and look for signals every `wait::SLICE`.
//! 2. **No thread of the library needs the GIL.** What it may drop are references to Python objects
//!    (`Py`), which PyO3 then drops at the next call from Python.
//! 3. **No lock is held while the GIL is released or taken.**
//! 4. **A registration owns its object** (`register_owned`); prepared lists, transfers and requests
//!    own the registration. A communicator frees objects under its lock: never with the GIL, with
//!    which their destructors would run there.

mod agent;
mod buffer;
mod channel;
mod comm;
mod dlpack;
mod error;
mod memory;
mod object;
mod peer;
mod ranges;
mod request;
mod stream;
mod transfer;
mod wait;

use pyo3::prelude::*;
use warpwire::host::System;
use warpwire_doctor::{Evidence, Report};

/// Warpwire's compiled part; use `warpwire`.
#[pymodule]
mod _warpwire {
    use super::*;

    #[pymodule_export]
    use super::agent::Agent;
    #[pymodule_export]
    use super::buffer::{Buffer, Window, alloc, window};
    #[pymodule_export]
    use super::channel::{ChannelMemory, ChannelRequest, DeviceChannel};
    #[pymodule_export]
    use super::comm::Comm;
    #[pymodule_export]
    use super::memory::{Memory, RemoteMemory};
    #[pymodule_export]
    use super::peer::Peer;
    #[pymodule_export]
    use super::ranges::Range;
    #[pymodule_export]
    use super::request::Request;
    #[pymodule_export]
    use super::stream::Stream;
    #[pymodule_export]
    use super::transfer::{Prepared, Transfer};

    /// What this machine can do, what prevents it and the fix, as text or JSON; and whether
    /// anything works.
    #[pyfunction]
    #[pyo3(signature = (*, json = false))]
    fn doctor(py: Python<'_>, json: bool) -> PyResult<(String, bool)> {
        let examine = || {
            let report = Report::of(&Evidence::gather(System::live())?);
            let text = if json {
                serde_json::to_string_pretty(&report).unwrap_or_default()
            } else {
                report.to_text(false)
            };
            Ok((text, report.usable()))
        };
        py.detach(examine).map_err(|why| error::raise(py, &why))
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
