//! What a backend provides. The types beside this module check arguments, keep memory alive and offer
//! the pleasant form; a backend does the work.
//!
//! A third kind of GPU would implement these seven traits and join [`discover`](super::discover).

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::address::DeviceAddr;
use super::allocation::{MemoryKind, MemoryListener, PinGuard, WatchGuard};
use super::bytes::SharedBytes;
use super::device::{Capabilities, DeviceInfo, MemoryUsage};
use super::op::{PendingWait, StreamOp};
use super::program::Program;
use super::share::{DmaBuf, DmaBufRoute, IpcHandle};
use super::window::{CpuMapping, WindowPath};
use crate::error::{Error, Kind, Result};

/// Keeps memory mapped that a device was let reach.
pub type HostOwner = Arc<dyn std::any::Any + Send + Sync>;

/// A device. Everything made by it holds it, so that it goes last.
pub trait DeviceBackend: Send + Sync + 'static {
    /// What it is.
    fn info(&self) -> &DeviceInfo;
    /// What it can do.
    fn capabilities(&self) -> &Capabilities;
    /// Memory in use now.
    fn memory_usage(&self) -> Result<MemoryUsage>;
    /// Memory of one of the kinds that can be allocated; `len` is sane but may be more than is free.
    fn allocate(self: Arc<Self>, len: u64, kind: MemoryKind) -> Result<Arc<dyn MemoryBackend>>;
    /// Memory that somebody else allocated; `address + len` does not overflow.
    fn borrow(self: Arc<Self>, address: DeviceAddr, len: u64) -> Result<Arc<dyn MemoryBackend>>;
    /// Memory that somebody else mapped for the CPU, and that `owner` keeps mapped; `io` if it is registers of another
    /// device.
    fn register_host(
        self: Arc<Self>,
        _base: NonNull<u8>,
        _len: u64,
        _io: bool,
        _owner: HostOwner,
    ) -> Result<Arc<dyn MemoryBackend>> {
        Err(Error::new(Kind::Unsupported, "let streams reach host memory")
            .why("this device reaches memory that it allocated itself")
            .fix("use pinned memory of the device"))
    }
    /// Memory of another process.
    fn open_ipc(self: Arc<Self>, handle: &IpcHandle) -> Result<Arc<dyn MemoryBackend>>;
    /// A stream.
    fn create_stream(self: Arc<Self>) -> Result<Arc<dyn StreamBackend>>;
    /// An event.
    fn create_event(self: Arc<Self>) -> Result<Arc<dyn EventBackend>>;
    /// Lets go of what finished operations still hold, if it does not do so by itself.
    fn reclaim(&self) {}
    /// The kernels of a program.
    fn load(self: Arc<Self>, program: &Program) -> Result<Arc<dyn ModuleBackend>>;
}

/// Memory. Ranges passed in lie inside it.
#[allow(clippy::len_without_is_empty)] // memory is never empty
pub trait MemoryBackend: Send + Sync + std::any::Any {
    /// Where the device finds it.
    fn address(&self) -> DeviceAddr;
    /// How many bytes.
    fn len(&self) -> u64;
    /// How it was made.
    fn kind(&self) -> MemoryKind;
    /// The CPU's view, if the memory is the host's.
    fn host_bytes(&self) -> Option<SharedBytes<'_>>;
    /// Copies in; done on return.
    fn write(&self, offset: u64, from: &[u8]) -> Result<()>;
    /// Copies out; done on return.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()>;
    /// Exports a range.
    fn export_dmabuf(&self, offset: u64, len: u64, route: DmaBufRoute) -> Result<DmaBuf>;
    /// A handle for another process.
    fn export_ipc(&self) -> Result<IpcHandle>;
    /// Tells `listener` of moves and of the end.
    fn watch(self: Arc<Self>, listener: MemoryListener) -> Result<WatchGuard>;
    /// Keeps it from moving. Most memory never moves.
    fn pin(self: Arc<Self>) -> Result<PinGuard> {
        Ok(PinGuard::new(|| ()))
    }
    /// Which piece of memory lies at `offset`: a number that no other piece ever has. Nothing where memory cannot
    /// go away unseen.
    fn buffer_id(&self, _offset: u64) -> Result<Option<u64>> {
        Ok(None)
    }
    /// Where that piece ends.
    fn backing_end(&self, _offset: u64) -> Result<u64> {
        Ok(self.len())
    }
    /// The ways to a CPU window onto it, best first; none if it is the CPU's own.
    fn window_paths(&self) -> &'static [WindowPath];
    /// Maps a range for the CPU by one of them.
    fn map(&self, offset: u64, len: u64, path: WindowPath) -> Result<CpuMapping>;
    /// Maps `len` bytes at `start` for the CPU, a range that holds all of this memory and may reach beyond it,
    /// into the rest of the device's own piece that it lies in.
    fn map_around(&self, _start: DeviceAddr, _len: u64) -> Result<CpuMapping> {
        Err(Error::new(Kind::Unsupported, "map the pages around memory")
            .why("this memory lies in a piece of its own"))
    }
    /// Gives the memory back; called at most once, and never while a region of it exists.
    fn free(&self) -> Result<()>;
}

/// A stream.
pub trait StreamBackend: Send + Sync {
    /// Its number on its device, for messages.
    fn number(&self) -> u64;
    /// Puts `op` behind everything queued before, and keeps it until it is done.
    fn enqueue(&self, op: StreamOp) -> Result<()>;
    /// Whether everything is done; the error of the first failure once there was one.
    fn is_idle(&self) -> Result<bool>;
    /// The wait that holds the stream up now, if one does.
    fn blocked_on(&self) -> Option<PendingWait>;
    /// Collects the operations that follow instead of running them.
    fn begin_capture(&self) -> Result<()>;
    /// Ends collecting and gives what was collected.
    fn end_capture(&self) -> Result<Arc<dyn GraphBackend>>;
}

/// An event.
pub trait EventBackend: Send + Sync + std::any::Any {
    /// Whether the last recording of it has been reached (true if it never was recorded).
    fn is_complete(&self) -> Result<bool>;
    /// The time from `earlier` to this one, both reached.
    fn elapsed_since(&self, earlier: &dyn EventBackend) -> Result<Duration>;
}

/// Captured work, ready to be replayed.
pub trait GraphBackend: Send + Sync + std::any::Any {
    /// How many operations were captured.
    fn operations(&self) -> usize;
}

/// A loaded program.
pub trait ModuleBackend: Send + Sync {
    /// The kernel of that name.
    fn kernel(self: Arc<Self>, name: &str) -> Result<Arc<dyn KernelBackend>>;
    /// Sets the variable of that name, all of its bytes.
    fn set(&self, variable: &str, bytes: &[u8]) -> Result<()>;
}

/// A kernel.
pub trait KernelBackend: Send + Sync + std::any::Any {
    /// Its name.
    fn name(&self) -> &str;
}
