//! `warpwire.Comm`: ranks and messages.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock, RwLock};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use warpwire::Error;
use warpwire::error::{Kind, Result};
use warpwire::mem;
use warpwire::msg::{
    self, BufferSlice, ChannelOptions, CommOptions, DataType, Launcher, Match, RankInfo, ReduceOp,
    Rendezvous,
};
use warpwire::verbs::Access;

use crate::channel::DeviceChannel;
use crate::error::{make, raise};
use crate::object::{Object, memory_of};
use crate::request::{Request, Started};
use crate::wait;

/// Ranks that exchange messages: `Comm()` joins those that a launcher started, such as
/// `warpwire run`, torchrun, mpirun or srun; `Comm(rank, size, address)` those that meet at an
/// address, "HOST:PORT" of rank 0 or "file:PATH".
#[pyclass(frozen, weakref, module = "warpwire")]
pub(crate) struct Comm {
    rank: usize,
    size: usize,
    /// Device channels can be created.
    streams: bool,
    /// `None` once it is closed.
    comm: RwLock<Option<msg::Comm>>,
    /// Event loops that wait for it, for `warpwire._asyncio`.
    watches: Py<PyDict>,
}

impl Drop for Comm {
    fn drop(&mut self) {
        // Leaving waits for messages in flight, and drops memory of Python objects.
        let taken = self.comm.get_mut().ok().and_then(Option::take);
        let _ = Python::try_attach(|py| py.detach(|| drop(taken)));
    }
}

/// What is done with the memory of an object.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// It is sent.
    Send,
    /// It is written.
    Receive,
}

fn rank_info(rank: usize, size: usize, address: &str, token: &str) -> Result<RankInfo> {
    let rendezvous = match address.strip_prefix("file:") {
        Some(path) => Rendezvous::File(path.into()),
        None if address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) => {
            Rendezvous::Address(address.to_owned())
        }
        None => {
            return Err(Error::new(Kind::InvalidArgument, format!("meet at {address:?}"))
                .why("it is no address")
                .fix("use HOST:PORT of rank 0's machine, or file:PATH"));
        }
    };
    let (token, launcher) = (token.to_owned(), Launcher::Run);
    Ok(RankInfo { rank, size, local_rank: rank, rendezvous, token, launcher })
}

/// The operation of this name.
fn reduce_op(py: Python<'_>, name: &str) -> PyResult<ReduceOp> {
    match name {
        "sum" => Ok(ReduceOp::Sum),
        "min" => Ok(ReduceOp::Min),
        "max" => Ok(ReduceOp::Max),
        _ => {
            let error = Error::new(Kind::InvalidArgument, format!("reduce with {name:?}"));
            Err(raise(py, &error.why("it is no operation").fix("use sum, min or max")))
        }
    }
}

/// The type of elements, from its name or from the object's `dtype`.
fn data_type(object: &Bound<'_, PyAny>, name: Option<&str>) -> PyResult<DataType> {
    let of_object = || Some(object.getattr("dtype").ok()?.to_string());
    let name = name.map(str::to_owned).or_else(of_object);
    let known = name.as_deref().map(|name| name.trim_start_matches("torch."));
    Ok(match known {
        Some("float32") => DataType::F32,
        Some("float64") => DataType::F64,
        Some("int32") => DataType::I32,
        Some("int64") => DataType::I64,
        Some("uint64") => DataType::U64,
        other => {
            let error = Error::new(Kind::InvalidArgument, "reduce");
            let why = match other {
                Some(name) => format!("elements of type {name} are not supported"),
                None => "the object has no dtype".to_owned(),
            };
            let fix = "use float32, float64, int32, int64 or uint64, or pass it as dtype";
            return Err(raise(object.py(), &error.why(why).fix(fix)));
        }
    })
}

impl Comm {
    /// A handle, which keeps the communicator open: not to be held in long waits.
    fn handle(&self) -> Result<msg::Comm> {
        let held = self.comm.read().map(|held| held.clone()).unwrap_or_default();
        held.ok_or_else(|| Error::new(Kind::Freed, "use a communicator").why("it was closed"))
    }

    fn open(&self, py: Python<'_>) -> PyResult<msg::Comm> {
        self.handle().map_err(|why| raise(py, &why))
    }

    /// Registers an object for one call; `None` is a message without data.
    fn slices(
        comm: &msg::Comm,
        object: &Bound<'_, PyAny>,
        used: Use,
    ) -> PyResult<Vec<BufferSlice>> {
        match object.is_none() {
            true => Ok(Vec::new()),
            false => Ok(vec![Self::register_for(comm, object, used)?.whole()]),
        }
    }

    /// Registers an object for messages in both directions.
    pub(crate) fn register(&self, object: &Bound<'_, PyAny>) -> PyResult<msg::Buffer> {
        Self::register_for(&self.open(object.py())?, object, Use::Receive)
    }

    fn register_for(
        comm: &msg::Comm,
        object: &Bound<'_, PyAny>,
        used: Use,
    ) -> PyResult<msg::Buffer> {
        let py = object.py();
        let registered = match memory_of(object)? {
            Object::Own(buffer) => {
                let source = buffer.get().source().map_err(|why| raise(py, &why))?;
                py.detach(|| comm.register(source))
            }
            Object::Foreign(memory) => {
                if memory.read_only && used == Use::Receive {
                    let error = Error::new(Kind::InvalidArgument, "receive into an object");
                    let fix = "use writable memory, such as a bytearray or a copy of the array";
                    return Err(raise(py, &error.why("it is read-only").fix(fix)));
                }
                let access = match used {
                    Use::Send => Access::REMOTE_READ,
                    Use::Receive => Access::ALL,
                };
                let owner = memory.owner.map(|owner| Box::new(owner) as _);
                let (address, len) = (memory.address, memory.len);
                py.detach(|| {
                    // SAFETY: the owner keeps the memory allocated; without one, the program has
                    // promised it. Python's objects are accessed by its interpreter, whose loads
                    // and stores assume nothing of the contents.
                    unsafe { comm.register_owned(address, len, access, owner) }
                })
            }
        };
        registered.map_err(|why| raise(py, &why))
    }

    fn start(
        slf: &Bound<'_, Self>,
        object: &Bound<'_, PyAny>,
        used: Use,
        begin: impl FnOnce(&msg::Comm, &[BufferSlice]) -> Result<msg::Request> + Send,
    ) -> PyResult<Request> {
        let (py, comm) = (slf.py(), slf.get().open(slf.py())?);
        let slices = Self::slices(&comm, object, used)?;
        let started = py.detach(move || {
            let started = begin(&comm, &slices);
            drop((slices, comm));
            started.map(Started::new)
        });
        let started = started.map_err(|why| raise(py, &why))?;
        Ok(Request::new(started, slf.clone().unbind()))
    }

    /// Runs a reduction of an object: `all_reduce` or `reduce_scatter`.
    fn reduce(
        &self,
        py: Python<'_>,
        object: &Bound<'_, PyAny>,
        (op, dtype): (&str, Option<&str>),
        timeout: Option<f64>,
        run: fn(&msg::Comm, BufferSlice, DataType, ReduceOp, Duration) -> Result<()>,
    ) -> PyResult<()> {
        let (reduce, element) = (reduce_op(py, op)?, data_type(object, dtype)?);
        let slice = self.one(py, object, Use::Receive)?;
        self.collective(py, timeout, move |comm, limit| run(&comm, slice, element, reduce, limit))
    }

    /// Runs a collective without the GIL, on a thread of its own: it cannot be interrupted, and
    /// signals are looked at meanwhile.
    fn collective(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        run: impl FnOnce(msg::Comm, Duration) -> Result<()> + Send + 'static,
    ) -> PyResult<()> {
        const NO_LIMIT: Duration = Duration::from_secs(1 << 30);
        let (comm, limit) = (self.open(py)?, wait::timeout(py, timeout)?.unwrap_or(NO_LIMIT));
        let (sender, receiver) = channel();
        let body = move || {
            let _ = sender.send(run(comm, limit));
        };
        let name = "warpwire-collective".to_owned();
        let spawned = std::thread::Builder::new().name(name).spawn(body);
        spawned.map_err(|why| raise(py, &Error::os("start a thread for a collective", &why)))?;
        let receiver = std::sync::Mutex::new(receiver);
        wait::until(py, None, |slice| {
            let ended = receiver.lock().map(|receiver| receiver.recv_timeout(slice));
            match ended {
                Ok(Ok(ended)) => ended.map(Some),
                Ok(Err(RecvTimeoutError::Timeout)) => Ok(None),
                _ => {
                    Err(Error::new(Kind::Cancelled, "run a collective").why("its thread panicked"))
                }
            }
        })?;
        Ok(())
    }
}

#[pymethods]
impl Comm {
    #[new]
    #[pyo3(signature = (
        rank = None, size = None, address = None, *,
        token = "", link = None, timeout = None, streams = false,
    ))]
    #[allow(clippy::too_many_arguments)] // Python's keywords
    fn new(
        py: Python<'_>,
        rank: Option<usize>,
        size: Option<usize>,
        address: Option<&str>,
        token: &str,
        link: Option<&str>,
        timeout: Option<f64>,
        streams: bool,
    ) -> PyResult<Self> {
        let limit = wait::timeout(py, timeout)?;
        let open = || {
            let options = if streams { CommOptions::for_streams() } else { CommOptions::default() };
            let mut options = options.with_env()?;
            if let Some(link) = link {
                options = options.with_link(link.parse()?);
            }
            if let Some(limit) = limit {
                options = options.with_timeout(limit);
            }
            let info = match (rank, size, address) {
                (None, None, None) => RankInfo::from_env()?,
                (Some(rank), Some(size), Some(address)) => rank_info(rank, size, address, token)?,
                _ => {
                    return Err(Error::new(Kind::InvalidArgument, "create a communicator")
                        .why("rank, size and address belong together")
                        .fix("give all three, or none and start it with warpwire run"));
                }
            };
            msg::Comm::open(info, options)
        };
        let opened = py.detach(open).map_err(|why| raise(py, &why))?;
        let (rank, size) = (opened.rank(), opened.size());
        let watches = PyDict::new(py).unbind();
        Ok(Self { rank, size, streams, comm: RwLock::new(Some(opened)), watches })
    }

    /// Joins the ranks that a launcher started; without one, a communicator of one rank.
    #[staticmethod]
    #[pyo3(signature = (*, link = None, timeout = None, streams = false))]
    fn from_env(
        py: Python<'_>,
        link: Option<&str>,
        timeout: Option<f64>,
        streams: bool,
    ) -> PyResult<Self> {
        Self::new(py, None, None, None, "", link, timeout, streams)
    }

    /// The rank of this process, from 0 to `size` - 1.
    #[getter]
    fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    #[getter]
    fn size(&self) -> usize {
        self.size
    }

    /// The rank among those on this machine, for choosing a GPU.
    #[getter]
    fn local_rank(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.open(py)?.local_rank())
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.handle().is_err()
    }

    /// Which path messages to a rank take, and why not a better one.
    fn path(&self, py: Python<'_>, rank: usize) -> PyResult<String> {
        let path = self.open(py)?.path(rank).map_err(|why| raise(py, &why))?;
        Ok(path.to_string())
    }

    /// Why a rank is lost, as an exception: it died, left or aborted. None while it is alive.
    fn lost<'py>(&self, py: Python<'py>, rank: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.open(py)?.lost(rank).map(|why| make(py, &why)).transpose()
    }

    /// Starts to send the memory of an object, or no data (None), to a rank. The memory must not
    /// change until the request has completed, and is kept until then.
    #[pyo3(signature = (object, peer, tag = 0))]
    fn isend(
        slf: &Bound<'_, Self>,
        object: &Bound<'_, PyAny>,
        peer: usize,
        tag: u32,
    ) -> PyResult<Request> {
        Self::start(slf, object, Use::Send, |comm, slices| comm.isendv(peer, tag, slices))
    }

    /// Starts to receive a message from a rank, with this tag or any (None), into the memory of an
    /// object, which is kept until the request has completed.
    #[pyo3(signature = (object, peer, tag = None))]
    fn irecv(
        slf: &Bound<'_, Self>,
        object: &Bound<'_, PyAny>,
        peer: usize,
        tag: Option<u32>,
    ) -> PyResult<Request> {
        let wants = tag.map_or(Match::Any, Match::Tag);
        Self::start(slf, object, Use::Receive, |comm, slices| comm.irecvv(peer, wants, slices))
    }

    /// Sends, and waits until the peer has received it, or has read it if it is long. After
    /// `timeout` seconds raises Timeout; then the message is still sent.
    #[pyo3(signature = (object, peer, tag = 0, timeout = None))]
    fn send(
        slf: &Bound<'_, Self>,
        object: &Bound<'_, PyAny>,
        peer: usize,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        Self::isend(slf, object, peer, tag)?.wait(slf.py(), timeout)
    }

    /// Receives, and returns the number of bytes. After `timeout` seconds raises Timeout; a message
    /// that comes later goes to a later receive.
    #[pyo3(signature = (object, peer, tag = None, timeout = None))]
    fn recv(
        slf: &Bound<'_, Self>,
        object: &Bound<'_, PyAny>,
        peer: usize,
        tag: Option<u32>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        Self::irecv(slf, object, peer, tag)?.wait(slf.py(), timeout)
    }

    /// Returns once every rank has called it.
    #[pyo3(signature = (timeout = None))]
    fn barrier(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.collective(py, timeout, |comm, limit| comm.barrier(limit))
    }

    /// Copies the memory of rank `root` to all ranks. The length is the same on every rank.
    #[pyo3(signature = (object, root = 0, timeout = None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        object: &Bound<'_, PyAny>,
        root: usize,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let used = if root == self.rank { Use::Send } else { Use::Receive };
        let slice = self.one(py, object, used)?;
        self.collective(py, timeout, move |comm, limit| comm.broadcast(root, slice, limit))
    }

    /// Reduces the memory of all ranks element by element, with "sum", "min" or "max"; the result
    /// replaces it on every rank. `dtype` is the object's, or a name such as "float32".
    #[pyo3(signature = (object, op = "sum", *, dtype = None, timeout = None))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        object: &Bound<'_, PyAny>,
        op: &str,
        dtype: Option<&str>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        self.reduce(py, object, (op, dtype), timeout, msg::Comm::all_reduce)
    }

    /// As `all_reduce`, but each rank gets its block of the result only: the object has one block
    /// per rank, all of one length, and the others keep this rank's values.
    #[pyo3(signature = (object, op = "sum", *, dtype = None, timeout = None))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        object: &Bound<'_, PyAny>,
        op: &str,
        dtype: Option<&str>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        self.reduce(py, object, (op, dtype), timeout, msg::Comm::reduce_scatter)
    }

    /// Gathers a block of every rank on all ranks: the object has one block per rank, all of one
    /// length, and that of this rank is its input.
    #[pyo3(signature = (object, timeout = None))]
    fn all_gather(
        &self,
        py: Python<'_>,
        object: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let slice = self.one(py, object, Use::Receive)?;
        self.collective(py, timeout, move |comm, limit| comm.all_gather(slice, limit))
    }

    /// Sends a block to every rank: block `j` of `send` becomes block `rank` of `recv` at rank `j`.
    /// Both have one block per rank, all of one length.
    #[pyo3(signature = (send, recv, timeout = None))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        send: &Bound<'_, PyAny>,
        recv: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let (send, recv) = (self.one(py, send, Use::Send)?, self.one(py, recv, Use::Receive)?);
        self.collective(py, timeout, move |comm, limit| comm.all_to_all(send, recv, limit))
    }

    /// Connects the streams of a device ("cuda:0", "sim:0") to all ranks: every rank calls it, in
    /// the same order as collectives. The communicator was created with `streams=True`. A stream
    /// that waits for longer than `wait_timeout` seconds fails the connection. Other ranks are
    /// waited for as long as the communicator's `timeout` says.
    #[pyo3(signature = (device, *, depth = 256, wait_timeout = 30.0))]
    fn device_channel(
        slf: &Bound<'_, Self>,
        device: String,
        depth: u32,
        wait_timeout: f64,
    ) -> PyResult<DeviceChannel> {
        let py = slf.py();
        if !slf.get().streams {
            let error = Error::new(Kind::InvalidArgument, "create a device channel");
            let why = "the communicator was created without streams";
            return Err(raise(py, &error.why(why).fix("pass streams=True to Comm")));
        }
        let waits = wait::timeout(py, Some(wait_timeout))?.unwrap_or(Duration::MAX);
        let options = ChannelOptions::default().with_depth(depth).with_kernels(false);
        let options = options.with_wait_timeout(waits);
        let opened = Arc::new(OnceLock::new());
        let found = opened.clone();
        slf.get().collective(py, None, move |comm, _| {
            let channel = comm.device_channel(&mem::open(&device)?, options)?;
            let _ = found.set(channel);
            Ok(())
        })?;
        let channel = opened
            .get()
            .cloned()
            .ok_or_else(|| raise(py, &Error::new(Kind::Cancelled, "create a device channel")))?;
        Ok(DeviceChannel::new(channel, slf.clone().unbind()))
    }

    /// Leaves together with all ranks: returns when each has called it, and closes.
    #[pyo3(signature = (timeout = None))]
    fn finish(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.collective(py, timeout, |comm, limit| comm.finish(limit))?;
        self.close(py)
    }

    /// Leaves with a reason: all requests of other ranks to this one fail with it.
    fn abort(&self, py: Python<'_>, why: String) -> PyResult<()> {
        let comm = self.open(py)?;
        py.detach(|| comm.abort(why));
        Ok(())
    }

    /// A descriptor that is readable when requests may have ended or a rank was lost, until
    /// `clear_events()`. It is the communicator's: do not close it.
    fn fileno(&self, py: Python<'_>) -> PyResult<RawFd> {
        Ok(self.open(py)?.as_fd().as_raw_fd())
    }

    /// Clears the descriptor and makes progress; returns whether it was readable. Call it before
    /// looking at requests.
    fn clear_events(&self, py: Python<'_>) -> PyResult<bool> {
        let comm = self.open(py)?;
        py.detach(|| comm.clear_events()).map_err(|why| raise(py, &why))
    }

    /// Leaves: requests in progress fail. Does nothing the second time.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let taken = self.comm.write().ok().and_then(|mut held| held.take());
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
        format!("<warpwire.Comm: rank {} of {}{state}>", self.rank, self.size)
    }
}

impl Comm {
    /// The memory of an object that must have some.
    fn one(&self, py: Python<'_>, object: &Bound<'_, PyAny>, used: Use) -> PyResult<BufferSlice> {
        let comm = self.open(py)?;
        Self::slices(&comm, object, used)?.pop().ok_or_else(|| {
            let error = Error::new(Kind::InvalidArgument, "run a collective");
            raise(py, &error.why("None has no memory").fix("pass an object with memory"))
        })
    }
}
