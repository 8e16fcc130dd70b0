//! `warpwire.DeviceChannel`: messages that CUDA streams send and wait for.

use std::time::Duration;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PySlice;
use warpwire::Error;
use warpwire::error::{Kind, Result};
use warpwire::msg::{self, BufferSlice};

use crate::comm::Comm;
use crate::error::raise;
use crate::{stream, wait};

/// Something that owns registrations: they own Python's objects, whose destructors must not run
/// under a lock of the library. Dropped without the GIL, they run later.
struct Detached<T: Send>(Option<T>);

impl<T: Send> Detached<T> {
    fn new(value: T) -> Self {
        Self(Some(value))
    }

    fn get(&self, py: Python<'_>) -> PyResult<&T> {
        let gone = || raise(py, &Error::new(Kind::Freed, "use a device channel"));
        self.0.as_ref().ok_or_else(gone)
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        let taken = self.0.take();
        let _ = Python::try_attach(|py| py.detach(|| drop(taken)));
    }
}

/// Connections of the streams of one device to all ranks. Messages and receives match in the order
/// in which they were posted, without tags.
#[pyclass(frozen, module = "warpwire")]
pub(crate) struct DeviceChannel {
    channel: Detached<msg::DeviceChannel>,
    device: String,
    comm: Py<Comm>,
}

impl DeviceChannel {
    pub(crate) fn new(channel: msg::DeviceChannel, comm: Py<Comm>) -> Self {
        Self { device: channel.device().label(), channel: Detached::new(channel), comm }
    }

    /// Runs a call of the channel with a stream, without the GIL.
    fn on_stream<T: Send>(
        &self,
        object: &Bound<'_, PyAny>,
        run: impl FnOnce(&msg::DeviceChannel, &stream::AnyStream) -> Result<T> + Send,
    ) -> PyResult<T> {
        let (py, stream) = (object.py(), stream::stream(object)?);
        let channel = self.channel.get(py)?;
        py.detach(|| run(channel, &stream)).map_err(|why| raise(py, &why))
    }
}

#[pymethods]
impl DeviceChannel {
    /// The device, such as "cuda:0".
    #[getter]
    fn device(&self) -> &str {
        &self.device
    }

    /// Registers the memory of an object for messages of streams. Do it before streams wait: CUDA
    /// may not register memory while one does.
    fn register(&self, object: &Bound<'_, PyAny>) -> PyResult<ChannelMemory> {
        let buffer = self.comm.get().register(object)?;
        Ok(ChannelMemory::new(buffer.whole()))
    }

    /// Posts a receive for the next message that a stream of rank `peer` sends to this one. It may
    /// be written at once: not only when a stream gets somewhere.
    fn recv(
        &self,
        py: Python<'_>,
        memory: PyRef<'_, ChannelMemory>,
        peer: usize,
    ) -> PyResult<ChannelRequest> {
        let (channel, slice) = (self.channel.get(py)?, memory.slice(py)?);
        let posted = py.detach(|| channel.receive(peer, slice)).map_err(|why| raise(py, &why))?;
        Ok(ChannelRequest::new(channel, posted))
    }

    /// Sends to rank `peer` when the stream gets to this point: what it did before is in the
    /// message, what it does behind is not, once the stream has waited for the request.
    fn send(
        &self,
        py: Python<'_>,
        memory: PyRef<'_, ChannelMemory>,
        peer: usize,
        stream: &Bound<'_, PyAny>,
    ) -> PyResult<ChannelRequest> {
        let slice = memory.slice(py)?;
        let sent = self.on_stream(stream, |channel, stream| {
            channel.send_on_stream(stream.by_ref(), peer, slice)
        })?;
        Ok(ChannelRequest::new(self.channel.get(py)?, sent))
    }

    /// Tells rank `peer`, when the stream gets to this point, that this one is ready.
    fn ready(&self, peer: usize, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        self.on_stream(stream, |channel, stream| {
            channel.send_ready_on_stream(stream.by_ref(), peer)
        })
    }

    /// Makes the stream wait until rank `peer` has said that it is ready once more.
    fn wait_ready(&self, peer: usize, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        self.on_stream(stream, |channel, stream| {
            channel.wait_ready_on_stream(stream.by_ref(), peer)
        })
    }

    /// Makes the stream wait until a stream of every rank has got to its barrier.
    fn barrier(&self, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        self.on_stream(stream, |channel, stream| channel.barrier_on_stream(stream.by_ref()))
    }

    /// Raises the cause if a connection has failed. Streams go on when a wait fails: call it after
    /// synchronizing one.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let channel = self.channel.get(py)?;
        py.detach(|| channel.check()).map_err(|why| raise(py, &why))
    }

    fn __repr__(&self) -> String {
        format!("<warpwire.DeviceChannel: {}>", self.device)
    }
}

/// Memory that a device channel sends and receives; `memory[0:4096]` is a part of it.
#[pyclass(frozen, module = "warpwire")]
pub(crate) struct ChannelMemory {
    slice: Detached<BufferSlice>,
    len: u64,
}

impl ChannelMemory {
    fn new(slice: BufferSlice) -> Self {
        Self { len: slice.len(), slice: Detached::new(slice) }
    }

    fn slice(&self, py: Python<'_>) -> PyResult<BufferSlice> {
        self.slice.get(py).cloned()
    }
}

#[pymethods]
impl ChannelMemory {
    /// Its length in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.len
    }

    fn __len__(&self) -> usize {
        self.nbytes() as usize
    }

    fn __getitem__(&self, index: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (py, slice) = (index.py(), self.slice(index.py())?);
        let range = index
            .cast::<PySlice>()
            .map_err(|_| PyTypeError::new_err("give a range of bytes, such as memory[0:4096]"))?;
        let range = range.indices(self.nbytes() as isize)?;
        if range.step != 1 {
            let error = Error::new(Kind::InvalidArgument, "take a part of memory");
            let why = format!("the step is {}", range.step);
            return Err(raise(py, &error.why(why).fix("use neighbouring bytes: step 1")));
        }
        let (start, len) = (range.start as u64, range.slicelength as u64);
        let part = slice.buffer().slice(slice.offset() + start, len);
        part.map(Self::new).map_err(|why| raise(py, &why))
    }

    fn __repr__(&self) -> String {
        format!("<warpwire.ChannelMemory: {} bytes>", self.nbytes())
    }
}

/// A message of a device channel. Dropping it does not cancel it.
#[pyclass(frozen, module = "warpwire")]
pub(crate) struct ChannelRequest(Detached<(msg::DeviceChannel, msg::ChannelRequest)>);

impl ChannelRequest {
    fn new(channel: &msg::DeviceChannel, request: msg::ChannelRequest) -> Self {
        Self(Detached::new((channel.clone(), request)))
    }
}

#[pymethods]
impl ChannelRequest {
    /// Whether it has completed. Raises the cause if it has failed.
    #[getter]
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let (_, request) = self.0.get(py)?;
        let outcome = py.detach(|| request.test()).map_err(|why| raise(py, &why))?;
        Ok(outcome.is_some())
    }

    /// Makes a stream wait: the work behind this point starts when the message has been sent or has
    /// arrived. Does not wait here.
    fn wait_on_stream(&self, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let (py, stream) = (stream.py(), stream::stream(stream)?);
        let (channel, request) = self.0.get(py)?;
        py.detach(|| channel.wait_on_stream(stream.by_ref(), request))
            .map_err(|why| raise(py, &why))
    }

    /// Waits here, without the GIL; returns the bytes of the message. Raises Timeout if it is still
    /// in progress after `timeout` seconds: then it goes on.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<u64> {
        let (limit, (_, request)) = (wait::timeout(py, timeout)?, self.0.get(py)?);
        let ended = wait::until(py, limit, |slice: Duration| match request.wait(slice) {
            Ok(outcome) => Ok(Some(outcome.len)),
            // The time is over; or a stream has waited for too long, which `test` reports too.
            Err(why) if why.kind() == &Kind::Timeout => Ok(request.test()?.map(|ended| ended.len)),
            Err(why) => Err(why),
        })?;
        ended.ok_or_else(|| {
            let why = format!("it is still in progress after {} s", timeout.unwrap_or_default());
            let error = Error::new(Kind::Timeout, "wait for a message of a stream").why(why);
            raise(py, &error.fix("wait longer; it is still in flight"))
        })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("<warpwire.{:?}>", self.0.get(py)?.1))
    }
}
