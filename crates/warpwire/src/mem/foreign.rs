//! Streams of other libraries.
#![allow(unsafe_code)] // creating one is: the handle is trusted

use std::sync::Arc;

use super::allocation::Allocation;
use super::backend::ForeignStreamBackend;
use super::device::Device;
use super::op::{HostCall, MemOp};
use super::stream::Stream;
use crate::error::Result;

/// A stream that another library owns, by its handle: torch's, or one of the CUDA runtime. Work can
/// be put into its order; the stream itself stays the owner's.
#[derive(Clone)]
pub struct ForeignStream {
    device: Device,
    handle: u64,
    backend: Arc<dyn ForeignStreamBackend>,
}

impl std::fmt::Debug for ForeignStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.label())
    }
}

impl ForeignStream {
    /// The stream of `device` with this handle (`CUstream`, `cudaStream_t`); 0 is the default
    /// stream. On the simulated GPU the handle is [`Stream::number`].
    ///
    /// # Errors
    /// [`Kind::Unsupported`](crate::error::Kind::Unsupported) if the device has no such streams;
    /// [`Kind::InvalidArgument`](crate::error::Kind::InvalidArgument) if the simulated GPU has no
    /// stream of this number.
    ///
    /// # Safety
    /// The handle is 0, or a stream of the device's primary context that exists while this and its
    /// clones do.
    pub unsafe fn new(device: &Device, handle: u64) -> Result<Self> {
        Ok(Self { device: device.clone(), handle, backend: device.foreign_backend(handle)? })
    }

    fn label(&self) -> String {
        format!("{} stream {:#x} of another library", self.device.label(), self.handle)
    }
}

/// Memory that streams of other libraries use: unlike this library's streams, those keep nothing
/// allocated, and nobody tells when they have passed an operation. So it stays allocated for ever.
#[derive(Debug, Default)]
pub(crate) struct KeptMemory(Vec<Allocation>);

impl KeptMemory {
    /// Queues word operations on a stream, and keeps their memory if the stream does not.
    pub(crate) fn batch(&mut self, stream: StreamRef<'_>, ops: &[MemOp]) -> Result<()> {
        if !stream.keeps_memory() {
            ops.iter().for_each(|op| self.keep(op));
        }
        stream.batch(ops)
    }

    fn keep(&mut self, op: &MemOp) {
        let (MemOp::Write { word, .. } | MemOp::Wait { word, .. }) = op else { return };
        let memory = word.region().allocation();
        if self.0.iter().all(|kept| kept.address() != memory.address()) {
            self.0.push(memory.clone());
        }
    }
}

impl Drop for KeptMemory {
    fn drop(&mut self) {
        self.0.drain(..).for_each(std::mem::forget);
    }
}

/// A stream of this library or of another one.
#[derive(Clone, Copy, Debug)]
pub enum StreamRef<'a> {
    /// Of this library.
    Own(&'a Stream),
    /// Of another one.
    Foreign(&'a ForeignStream),
}

impl<'a> From<&'a Stream> for StreamRef<'a> {
    fn from(stream: &'a Stream) -> Self {
        Self::Own(stream)
    }
}

impl<'a> From<&'a ForeignStream> for StreamRef<'a> {
    fn from(stream: &'a ForeignStream) -> Self {
        Self::Foreign(stream)
    }
}

impl StreamRef<'_> {
    pub(crate) fn device(&self) -> &Device {
        match self {
            Self::Own(stream) => stream.device(),
            Self::Foreign(stream) => &stream.device,
        }
    }

    pub(crate) fn label(&self) -> String {
        match self {
            Self::Own(stream) => stream.label(),
            Self::Foreign(stream) => stream.label(),
        }
    }

    /// A number that no other stream of the device has.
    pub(crate) fn number(&self) -> u64 {
        const FOREIGN: u64 = 1 << 63; // handles are addresses, or small
        match self {
            Self::Own(stream) => stream.number(),
            Self::Foreign(stream) => stream.handle | FOREIGN,
        }
    }

    /// Whether the stream keeps the memory that its operations use allocated.
    pub(crate) fn keeps_memory(&self) -> bool {
        matches!(self, Self::Own(_))
    }

    /// Whether its operations are captured into a graph now.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        match self {
            Self::Own(stream) => Ok(stream.is_capturing()),
            Self::Foreign(stream) => stream.backend.is_capturing(),
        }
    }

    /// As [`Stream::batch`]. The caller keeps the words of a foreign stream allocated.
    pub(crate) fn batch(&self, ops: &[MemOp]) -> Result<()> {
        match self {
            Self::Own(stream) => stream.batch(ops),
            Self::Foreign(stream) => stream.backend.batch(ops),
        }
    }

    /// As [`Stream::call_host`].
    pub(crate) fn call_host(&self, run: impl Fn() + Send + Sync + 'static) -> Result<()> {
        match self {
            Self::Own(stream) => stream.call_host(run),
            Self::Foreign(stream) => stream.backend.call_host(HostCall::new(run)),
        }
    }
}
