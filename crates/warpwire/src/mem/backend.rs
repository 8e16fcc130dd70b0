//! The traits that a GPU backend implements. The public types of [`mem`](super) check arguments,
//! keep memory alive and add conveniences; a backend does the work.
//!
//! A third kind of GPU would implement these seven traits and be added to
//! [`discover`](super::discover).

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::address::DeviceAddr;
use super::allocation::{MemoryKind, MemoryListener, PinGuard, WatchGuard};
use super::bytes::SharedBytes;
use super::device::{Capabilities, DeviceInfo, MemoryUsage};
use super::op::{HostCall, MemOp, PendingWait, StreamOp};
use super::program::Program;
use super::share::{DmaBuf, DmaBufRoute, IpcHandle};
use super::window::{CpuMapping, WindowPath};
use crate::error::{Error, Kind, Result};

/// Keeps registered host memory mapped while a device can access it.
pub type HostOwner = Arc<dyn std::any::Any + Send + Sync>;

/// A device. Every object that it creates holds a reference to it, so it is dropped last.
pub trait DeviceBackend: Send + Sync + 'static {
    /// Name, UUID, PCI address and size.
    fn info(&self) -> &DeviceInfo;
    /// What the device supports.
    fn capabilities(&self) -> &Capabilities;
    /// Free and total memory at the time of the call.
    fn memory_usage(&self) -> Result<MemoryUsage>;
    /// Allocates memory of one of the allocatable kinds; `len` is nonzero and at most `isize::MAX`,
    /// but may be more than is free.
    fn allocate(self: Arc<Self>, len: u64, kind: MemoryKind) -> Result<Arc<dyn MemoryBackend>>;
    /// Wraps memory allocated by another library; `address + len` does not overflow.
    fn borrow(self: Arc<Self>, address: DeviceAddr, len: u64) -> Result<Arc<dyn MemoryBackend>>;
    /// Registers CPU-mapped memory with the device; `owner` keeps it mapped. `io` if the range is
    /// MMIO registers of another device.
    fn register_host(
        self: Arc<Self>,
        _base: NonNull<u8>,
        _len: u64,
        _io: bool,
        _owner: HostOwner,
    ) -> Result<Arc<dyn MemoryBackend>> {
        Err(Error::new(Kind::Unsupported, "register host memory")
            .why("this device can only access memory that it allocated itself")
            .fix("use pinned memory of the device"))
    }
    /// Opens memory exported by another process; `descriptors` are those that came with the handle,
    /// in the order of [`MemoryBackend::ipc_descriptors`].
    fn open_ipc(
        self: Arc<Self>,
        handle: &IpcHandle,
        descriptors: Option<Vec<OwnedFd>>,
    ) -> Result<Arc<dyn MemoryBackend>>;
    /// Creates a stream.
    fn create_stream(self: Arc<Self>) -> Result<Arc<dyn StreamBackend>>;
    /// The stream of another library with this handle.
    fn foreign_stream(self: Arc<Self>, _handle: u64) -> Result<Arc<dyn ForeignStreamBackend>> {
        Err(Error::new(Kind::Unsupported, "use a stream of another library")
            .on(self.info().label())
            .why("the device has no streams of CUDA")
            .fix("use a stream of this device (Device::stream)"))
    }
    /// Creates an event.
    fn create_event(self: Arc<Self>) -> Result<Arc<dyn EventBackend>>;
    /// Releases resources held by finished operations, if the backend does not do so as they
    /// finish.
    fn reclaim(&self) {}
    /// Loads a program's kernels.
    fn load(self: Arc<Self>, program: &Program) -> Result<Arc<dyn ModuleBackend>>;
}

/// A stream of another library.
pub trait ForeignStreamBackend: Send + Sync {
    /// Whether its operations are captured into a graph now.
    fn is_capturing(&self) -> Result<bool>;
    /// Queues word operations, in order. Their memory is kept allocated by the caller.
    fn batch(&self, ops: &[MemOp]) -> Result<()>;
    /// Calls the host when the stream gets there.
    fn call_host(&self, host: HostCall) -> Result<()>;
}

/// Memory. All ranges passed in have been checked to be inside it.
#[allow(clippy::len_without_is_empty)] // memory is never empty
pub trait MemoryBackend: Send + Sync + std::any::Any {
    /// Device address of the first byte.
    fn address(&self) -> DeviceAddr;
    /// Size in bytes.
    fn len(&self) -> u64;
    /// How the memory was allocated.
    fn kind(&self) -> MemoryKind;
    /// The CPU's view, if this is host memory.
    fn host_bytes(&self) -> Option<SharedBytes<'_>>;
    /// Copies from the host; complete on return.
    fn write(&self, offset: u64, from: &[u8]) -> Result<()>;
    /// Copies to the host; complete on return.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()>;
    /// Exports a range as a dma-buf.
    fn export_dmabuf(&self, offset: u64, len: u64, route: DmaBufRoute) -> Result<DmaBuf>;
    /// Creates a handle for another process.
    fn export_ipc(&self) -> Result<IpcHandle>;
    /// The descriptors that belong to that handle, duplicated; none if it consists of bytes only.
    fn ipc_descriptors(&self) -> Result<Vec<OwnedFd>>;
    /// Calls `listener` when the memory moves or is freed.
    fn watch(self: Arc<Self>, listener: MemoryListener) -> Result<WatchGuard>;
    /// Keeps the memory from moving. A no-op for memory that never moves, which is most.
    fn pin(self: Arc<Self>) -> Result<PinGuard> {
        Ok(PinGuard::new(|| ()))
    }
    /// ID of the underlying allocation at `offset`; IDs are never reused. `None` if memory cannot
    /// be freed unnoticed.
    fn buffer_id(&self, _offset: u64) -> Result<Option<u64>> {
        Ok(None)
    }
    /// Offset at which that allocation ends.
    fn backing_end(&self, _offset: u64) -> Result<u64> {
        Ok(self.len())
    }
    /// The paths to a CPU window onto this memory, best first; empty for host memory.
    fn window_paths(&self) -> &'static [WindowPath];
    /// Maps a range for the CPU by the given path.
    fn map(&self, offset: u64, len: u64, path: WindowPath) -> Result<CpuMapping>;
    /// Maps `len` bytes at `start` for the CPU. The range covers all of this memory and may extend
    /// beyond it, within the driver's allocation that contains it.
    fn map_around(&self, _start: DeviceAddr, _len: u64) -> Result<CpuMapping> {
        Err(Error::new(Kind::Unsupported, "map the pages around memory")
            .why("this memory has a driver allocation of its own"))
    }
    /// Frees the memory; called at most once, and never while a region of it exists.
    fn free(&self) -> Result<()>;
}

/// A stream.
pub trait StreamBackend: Send + Sync {
    /// Stream number, unique on its device; used in messages.
    fn number(&self) -> u64;
    /// Appends `op` to the stream and keeps it alive until it has completed.
    fn enqueue(&self, op: StreamOp) -> Result<()>;
    /// Whether all work has completed; after a failure, the first error.
    fn is_idle(&self) -> Result<bool>;
    /// The wait that blocks the stream now, if any.
    fn blocked_on(&self) -> Option<PendingWait>;
    /// Starts a capture: later operations are recorded instead of run.
    fn begin_capture(&self) -> Result<()>;
    /// Ends the capture and returns what was recorded.
    fn end_capture(&self) -> Result<Arc<dyn GraphBackend>>;
}

/// An event.
pub trait EventBackend: Send + Sync + std::any::Any {
    /// Whether the last recorded point has been reached (true if the event was never recorded).
    fn is_complete(&self) -> Result<bool>;
    /// Time from `earlier` to this event; both must have been reached.
    fn elapsed_since(&self, earlier: &dyn EventBackend) -> Result<Duration>;
}

/// Captured work, ready to be replayed.
pub trait GraphBackend: Send + Sync + std::any::Any {
    /// Number of captured operations.
    fn operations(&self) -> usize;
}

/// A loaded program.
pub trait ModuleBackend: Send + Sync {
    /// Looks up the kernel called `name`.
    fn kernel(self: Arc<Self>, name: &str) -> Result<Arc<dyn KernelBackend>>;
    /// Sets the module variable called `variable`; `bytes` must cover it exactly.
    fn set(&self, variable: &str, bytes: &[u8]) -> Result<()>;
}

/// A kernel.
pub trait KernelBackend: Send + Sync + std::any::Any {
    /// Name in the program.
    fn name(&self) -> &str;
}
