//! `warpwire.Agent`.
#![allow(unsafe_code)]

use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::RwLock;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyList, PyType};
use warpwire::Error;
use warpwire::agent::{self, AgentOptions, TransferOp, TransferOptions};
use warpwire::error::{Kind, Result};
use warpwire::verbs::Access;

use crate::error::raise;
use crate::memory::Memory;
use crate::object::{Object, memory_of};
use crate::peer::Peer;
use crate::transfer::{Prepared, Transfer};
use crate::{ranges, stream, wait};

/// A transfer agent: registers memory, knows peers, and writes to and reads from their memory.
#[pyclass(frozen, weakref, module = "warpwire")]
pub(crate) struct Agent {
    name: String,
    /// `None` once it is closed.
    agent: RwLock<Option<agent::Agent>>,
    /// Event loops that wait for it, for `warpwire._asyncio`.
    watches: Py<PyDict>,
}

impl Agent {
    /// A handle, which keeps the agent open: not to be held in long waits.
    fn handle(&self) -> Result<agent::Agent> {
        let held = self.agent.read().map(|held| held.clone()).unwrap_or_default();
        held.ok_or_else(|| {
            Error::new(Kind::Freed, format!("use agent {:?}", self.name)).why("it was closed")
        })
    }

    fn open(&self, py: Python<'_>) -> PyResult<agent::Agent> {
        self.handle().map_err(|why| raise(py, &why))
    }

    fn register_one(&self, object: &Bound<'_, PyAny>, read_only: bool) -> PyResult<Memory> {
        let (py, agent) = (object.py(), self.open(object.py())?);
        let access = if read_only { Access::REMOTE_READ } else { Access::ALL };
        match memory_of(object)? {
            Object::Own(buffer) => {
                let source = buffer.get().source().map_err(|why| raise(py, &why))?;
                let registered = py.detach(|| agent.register_with(source, access));
                let registered = registered.map_err(|why| raise(py, &why))?;
                Ok(Memory::new(registered, Some(buffer.into_any())))
            }
            Object::Foreign(memory) => {
                if memory.read_only && !read_only {
                    let error = Error::new(Kind::InvalidArgument, "register memory")
                        .why("it is read-only, and peers could write to it")
                        .fix("pass readonly=True: then peers may only read it");
                    return Err(raise(py, &error));
                }
                let object = memory.owner.as_ref().map(|_| object.clone().unbind());
                let owner = memory.owner.map(|owner| Box::new(owner) as _);
                let (address, len) = (memory.address, memory.len);
                let register = || {
                    // SAFETY: the owner keeps the memory allocated; without one, the program has
                    // promised it. Python's objects are accessed by its interpreter, whose loads
                    // and stores assume nothing of the contents.
                    unsafe { agent.register_owned(address, len, access, owner) }
                };
                let registered = py.detach(register).map_err(|why| raise(py, &why))?;
                Ok(Memory::new(registered, object))
            }
        }
    }

    fn post(
        slf: &Bound<'_, Self>,
        op: TransferOp,
        lists: Lists<'_, '_>,
        notify: Option<&[u8]>,
        (timeout, stream): (Option<f64>, Option<&Bound<'_, PyAny>>),
    ) -> PyResult<Transfer> {
        let (py, agent) = (slf.py(), slf.get().open(slf.py())?);
        let prepared = match lists {
            (one, None, None) if one.is_instance_of::<Prepared>() => {
                one.cast::<Prepared>()?.get().0.clone()
            }
            (peer, Some(local), Some(remote)) => {
                let peer = peer.cast::<Peer>()?;
                slf.get().prepare(py, peer.get(), local, remote)?.0
            }
            _ => {
                return Err(pyo3::exceptions::PyTypeError::new_err(
                    "give a prepared transfer, or a peer, a local and a remote list",
                ));
            }
        };
        let options = TransferOptions::default()
            .with_notification(notify.map(<[u8]>::to_vec))
            .with_timeout(wait::timeout(py, timeout)?);
        let stream = stream.map(stream::stream).transpose()?;
        let posted = py.detach(|| match &stream {
            None => agent.post_with(op, &prepared, options),
            Some(stream) => agent.post_on_stream(stream.by_ref(), op, &prepared, options),
        });
        let transfer = posted.map_err(|why| raise(py, &why))?;
        Ok(Transfer::new(transfer, slf.clone().unbind()))
    }
}

/// A prepared transfer; or a peer and two lists.
type Lists<'a, 'py> =
    (&'a Bound<'py, PyAny>, Option<&'a Bound<'py, PyAny>>, Option<&'a Bound<'py, PyAny>>);

/// `warpwire._notification.Notification` of what has arrived.
fn notification(py: Python<'_>, arrived: agent::Notification) -> PyResult<Bound<'_, PyAny>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = CLASS.import(py, "warpwire._notification", "Notification")?;
    class.call1((arrived.from(), PyBytes::new(py, arrived.bytes())))
}

#[pymethods]
impl Agent {
    #[new]
    #[pyo3(signature = (name, link = None, address = None, queue_pairs = 1, engines = None))]
    fn new(
        py: Python<'_>,
        name: &str,
        link: Option<&str>,
        address: Option<&str>,
        queue_pairs: usize,
        engines: Option<u32>,
    ) -> PyResult<Self> {
        let open = || {
            let mut options = AgentOptions::default().with_env()?.with_queue_pairs(queue_pairs);
            if let Some(engines) = engines {
                options = options.with_engines(engines);
            }
            if let Some(link) = link {
                options = options.with_link(link.parse()?);
            }
            if let Some(text) = address {
                let ip: IpAddr = text.parse().map_err(|_| {
                    Error::new(Kind::InvalidArgument, format!("use address {text:?}"))
                        .why("it is no IP address")
                        .fix("use an IP address of this machine")
                })?;
                options = options.with_address(ip);
            }
            agent::Agent::open(name, options)
        };
        let opened = py.detach(open).map_err(|why| raise(py, &why))?;
        let watches = PyDict::new(py).unbind();
        Ok(Self { name: name.to_owned(), agent: RwLock::new(Some(opened)), watches })
    }

    /// Its name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.handle().is_err()
    }

    /// The devices that it uses and the reason for each, one line per device.
    #[getter]
    fn path(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(self.open(py)?.path())
    }

    /// Registers an object, a list of objects, or memory by (address, length[, device]). Peers that
    /// get the metadata of afterwards may read and write it; with `readonly`, only read it.
    #[pyo3(signature = (memory, *, readonly = false))]
    fn register<'py>(
        &self,
        memory: &Bound<'py, PyAny>,
        readonly: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = memory.py();
        let Ok(objects) = memory.cast::<PyList>() else {
            let one = self.register_one(memory, readonly)?;
            return Ok(Bound::new(py, one)?.into_any());
        };
        let all = PyList::empty(py);
        for object in objects.iter() {
            all.append(Bound::new(py, self.register_one(&object, readonly)?)?)?;
        }
        Ok(all.into_any())
    }

    /// What peers need: its name, address and all memory that is registered now. Whoever has it may
    /// access the memory.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let encoded = self.open(py)?.metadata().map_err(|why| raise(py, &why))?;
        Ok(PyBytes::new(py, &encoded))
    }

    /// Metadata with this memory alone; a peer adds it to what it knows.
    fn metadata_of<'py>(
        &self,
        py: Python<'py>,
        memory: Vec<PyRef<'py, Memory>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let all = memory.iter().map(|one| one.registered(py)).collect::<PyResult<Vec<_>>>()?;
        let all: Vec<_> = all.iter().collect();
        let encoded = self.open(py)?.metadata_of(&all).map_err(|why| raise(py, &why))?;
        Ok(PyBytes::new(py, &encoded))
    }

    /// Adds a peer by its metadata, or what has changed of it, and starts to connect.
    fn add_peer(&self, py: Python<'_>, metadata: &[u8]) -> PyResult<Peer> {
        let agent = self.open(py)?;
        py.detach(|| agent.add_peer(metadata)).map(Peer).map_err(|why| raise(py, &why))
    }

    /// The peer of this name, or None.
    fn peer(&self, py: Python<'_>, name: &str) -> PyResult<Option<Peer>> {
        Ok(self.open(py)?.peer(name).map(Peer))
    }

    /// Removes a peer, by name: its transfers in progress fail with Cancelled. Returns whether it
    /// was known.
    fn remove_peer(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        let agent = self.open(py)?;
        Ok(py.detach(|| agent.remove_peer(name)))
    }

    /// Checks two lists of ranges, with equal lengths in pairs, and looks their registrations up.
    fn prepare(
        &self,
        py: Python<'_>,
        peer: &Peer,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
    ) -> PyResult<Prepared> {
        let agent = self.open(py)?;
        let (local, remote) = (ranges::list(local)?, ranges::list(remote)?);
        let prepared = py.detach(|| agent.prepare(&peer.0, &local, &remote));
        prepared.map(Prepared).map_err(|why| raise(py, &why))
    }

    /// Writes local memory to a peer's: `write(prepared)` or `write(peer, local, remote)`. `notify`
    /// arrives at the peer after all data; after `timeout` seconds the transfer fails. With a
    /// `stream` it starts when that CUDA stream gets to this point.
    #[pyo3(signature = (
        prepared, local = None, remote = None, *, notify = None, timeout = None, stream = None,
    ))]
    fn write(
        slf: &Bound<'_, Self>,
        prepared: &Bound<'_, PyAny>,
        local: Option<&Bound<'_, PyAny>>,
        remote: Option<&Bound<'_, PyAny>>,
        notify: Option<&[u8]>,
        timeout: Option<f64>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        let lists = (prepared, local, remote);
        Self::post(slf, TransferOp::Write, lists, notify, (timeout, stream))
    }

    /// Reads a peer's memory into local memory: `read(prepared)` or `read(peer, local, remote)`.
    #[pyo3(signature = (
        prepared, local = None, remote = None, *, notify = None, timeout = None, stream = None,
    ))]
    fn read(
        slf: &Bound<'_, Self>,
        prepared: &Bound<'_, PyAny>,
        local: Option<&Bound<'_, PyAny>>,
        remote: Option<&Bound<'_, PyAny>>,
        notify: Option<&[u8]>,
        timeout: Option<f64>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        let lists = (prepared, local, remote);
        Self::post(slf, TransferOp::Read, lists, notify, (timeout, stream))
    }

    /// Sends a notification alone.
    fn notify(slf: &Bound<'_, Self>, peer: &Peer, data: &[u8]) -> PyResult<Transfer> {
        let (py, agent) = (slf.py(), slf.get().open(slf.py())?);
        let posted = py.detach(|| agent.notify(&peer.0, data));
        let transfer = posted.map_err(|why| raise(py, &why))?;
        Ok(Transfer::new(transfer, slf.clone().unbind()))
    }

    /// Takes all notifications that have arrived, of any peer, oldest first. Never waits.
    fn notifications<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let (agent, all) = (self.open(py)?, PyList::empty(py));
        while let Some(arrived) = agent.next_notification() {
            all.append(notification(py, arrived)?)?;
        }
        Ok(all)
    }

    /// Takes the oldest notification, and waits for one without the GIL; None when `timeout`
    /// seconds have passed.
    #[pyo3(signature = (timeout = None))]
    fn wait_notification<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let limit = wait::timeout(py, timeout)?;
        let arrived = wait::until(py, limit, |slice| self.handle()?.wait_notification(slice))?;
        arrived.map(|arrived| notification(py, arrived)).transpose()
    }

    /// Takes the oldest notification, and waits for one in asyncio.
    fn notification<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let module = slf.py().import("warpwire._asyncio")?;
        module.call_method1("wait_notification", (slf,))
    }

    /// A descriptor that is readable when a transfer has ended or a notification has arrived, until
    /// `clear_events()`. It is the agent's: do not close it.
    fn fileno(&self, py: Python<'_>) -> PyResult<RawFd> {
        Ok(self.open(py)?.as_fd().as_raw_fd())
    }

    /// Clears the descriptor; returns whether it was raised. Call it before looking at transfers
    /// and notifications.
    fn clear_events(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.open(py)?.clear_events())
    }

    /// Closes it: connections end, and transfers in progress fail. Does nothing the second time.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let taken = self.agent.write().ok().and_then(|mut held| held.take());
        py.detach(|| drop(taken));
        wait::wake(self.watches.bind(py))
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
        self.close(py)
    }

    #[getter]
    fn _watches(&self, py: Python<'_>) -> Py<PyDict> {
        self.watches.clone_ref(py)
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { ", closed" } else { "" };
        format!("<warpwire.Agent {:?}{state}>", self.name)
    }
}
