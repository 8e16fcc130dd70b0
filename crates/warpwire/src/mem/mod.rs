//! GPU devices, memory and streams: one set of types over the CUDA driver and the simulated GPU.
//!
//! | type | what it is |
//! |---|---|
//! | [`Device`] | a GPU: properties, capabilities, allocation of memory and streams |
//! | [`Allocation`], [`Region`], [`Word`] | device-accessible memory, ranges and words of it |
//! | [`Stream`], [`Event`], [`Graph`] | ordered asynchronous work, points in it, captured work |
//! | [`ScatterGather`], [`CopyList`] | many copies as one operation of a stream |
//! | [`Program`], [`Kernel`], [`Launch`] | device code: PTX, or simulator block functions |
//! | [`DmaBuf`], [`IpcHandle`] | memory exported to a NIC or to another process |
//! | [`Window`] | a CPU mapping of device memory, for loads and stores |
//! | [`copy::Routine`] | the CPU instructions that copy through a window |
//!
//! ```
//! use std::time::Duration;
//! use warpwire::mem;
//! let found = mem::discover();
//! let gpu = &found.devices[0]; // CUDA first, the simulator last
//! let (from, to) = (gpu.alloc(1 << 20)?, gpu.alloc(1 << 20)?);
//! let stream = gpu.stream()?;
//! stream.fill(&from.whole()?, 0x5a)?;
//! stream.copy(&to.whole()?, &from.whole()?)?;
//! stream.synchronize(Duration::from_secs(10))?;
//! # Ok::<(), warpwire::Error>(())
//! ```

mod address;
mod agent;
mod allocation;
#[doc(hidden)]
pub mod backend;
mod bytes;
pub mod copy;
mod copy_list;
pub mod cuda;
mod device;
mod exports;
mod foreign;
mod op;
mod program;
mod share;
pub mod sim;
mod staging;
mod stream;
mod window;

pub use address::DeviceAddr;
pub(crate) use address::last_word_len;
pub use agent::CopyAgent;
pub(crate) use allocation::WeakAllocation;
pub use allocation::{
    Allocation, BackingAllocation, MemoryEvent, MemoryKind, MemoryListener, PinGuard, Region,
    WatchGuard, Word, WordWidth,
};
pub use bytes::SharedBytes;
pub use copy_list::{CopyList, CopyRange, ScatterGather};
pub(crate) use copy_list::{
    CopyQueue, CopyTicket, DeviceCopy, ListDescriptors, MAX_BATCH, MAX_BATCHES, MAX_LIST,
    PinnedReader, load_program,
};
pub use device::{Backend, Capabilities, Capability, Device, DeviceInfo, MemoryUsage};
pub use exports::exported;
pub(crate) use exports::exported_range;
pub(crate) use foreign::KeptMemory;
pub use foreign::{ForeignStream, StreamRef};
pub use op::{Condition, HostCall, MemOp, PendingWait, StreamOp};
pub use program::{BlockFn, Kernel, Launch, Module, Program};
pub use share::{DmaBuf, DmaBufRoute, IpcHandle};
pub(crate) use stream::CancelCheck;
pub use stream::{Event, Graph, Stream};
pub use window::{CpuMapping, MappingType, RejectedPath, Window, WindowOptions, WindowPath};

use crate::error::{Error, Kind, Result};

/// The devices of this machine, and for each backend without devices the reason.
#[derive(Clone, Debug)]
pub struct Discovery {
    /// Real devices first, simulated ones last.
    pub devices: Vec<Device>,
    /// Backends without a device, with the error from initializing each.
    pub missing: Vec<(Backend, Error)>,
}

impl Discovery {
    /// Why `backend` has no devices; `None` if it has some.
    pub fn reason_missing(&self, backend: Backend) -> Option<&Error> {
        let found = self.missing.iter().find(|(missing, _)| *missing == backend);
        found.map(|(_, error)| error)
    }

    /// The devices of one backend.
    pub fn devices_of(&self, backend: Backend) -> Vec<Device> {
        let mine = |device: &&Device| device.info().backend == backend;
        self.devices.iter().filter(mine).cloned().collect()
    }
}

/// Enumerates the devices of every backend. Never fails: errors end up in [`Discovery::missing`].
pub fn discover() -> Discovery {
    let mut found = Discovery { devices: Vec::new(), missing: Vec::new() };
    let backends = [
        (Backend::Cuda, cuda::devices()),
        (Backend::Sim, sim::Sim::from_env().map(|sim| sim.devices())),
    ];
    for (backend, devices) in backends {
        match devices {
            Ok(devices) => found.devices.extend(devices),
            Err(error) => found.missing.push((backend, error)),
        }
    }
    found
}

/// The device that owns the memory at `address`: a CUDA device, or one of a simulated machine in
/// this process. The memory may have been allocated by any library.
///
/// ```
/// use warpwire::mem::{self, DeviceAddr};
/// let gpu = mem::open("sim:1").unwrap();
/// let memory = gpu.alloc(64).unwrap();
/// assert_eq!(mem::owner_of(memory.address()).unwrap(), gpu);
/// assert!(mem::owner_of(DeviceAddr::new(16)).is_err());
/// ```
pub fn owner_of(address: DeviceAddr) -> Result<Device> {
    sim::owner_of(address).map_or_else(|| cuda::owner_of(address), Ok)
}

/// Exports device memory that any library allocated as a dma-buf. [`DmaBuf::offset`] is where in
/// the dma-buf the memory begins.
///
/// ```
/// use warpwire::mem;
/// let memory = mem::open("sim:0").unwrap().alloc(1 << 20).unwrap();
/// let address = memory.address().checked_add(100).unwrap();
/// // SAFETY: the memory outlives its dma-buf.
/// let buffer = unsafe { mem::export_address(address, 50) }.unwrap();
/// assert_eq!((buffer.offset(), buffer.len()), (100, 50));
/// ```
///
/// # Safety
/// The memory's owner must keep it allocated while importers in this process use the dma-buf.
#[allow(unsafe_code)]
pub unsafe fn export_address(address: DeviceAddr, len: u64) -> Result<DmaBuf> {
    // SAFETY: the caller upholds this function's contract.
    let memory = unsafe { owner_of(address)?.borrow(address, len) }?;
    memory.export_dmabuf(0, len)
}

/// Opens a device by its label: `cuda:0`, `sim:1`.
///
/// ```
/// assert_eq!(warpwire::mem::open("sim:1").unwrap().info().ordinal, 1);
/// assert!(warpwire::mem::open("tpu:0").is_err());
/// ```
pub fn open(label: &str) -> Result<Device> {
    let unknown = || {
        Error::new(Kind::InvalidArgument, format!("open device {label:?}"))
            .why("not a device label")
            .fix("use cuda:N or sim:N, such as cuda:0")
    };
    let (backend, ordinal) = label.split_once(':').ok_or_else(unknown)?;
    let ordinal: u32 = ordinal.parse().map_err(|_| unknown())?;
    match backend {
        "cuda" => cuda::device(ordinal),
        "sim" => sim::Sim::from_env()?.device(ordinal),
        _ => Err(unknown()),
    }
}
