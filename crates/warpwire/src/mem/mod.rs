//! Devices, their memory and their streams: one set of types over the CUDA driver and over the
//! simulated GPU.
//!
//! | type | what it is |
//! |---|---|
//! | [`Device`] | a GPU: what it is, what it can do, where memory and streams come from |
//! | [`Allocation`], [`Region`], [`Word`] | memory that a device reaches, ranges and words of it |
//! | [`Stream`], [`Event`], [`Graph`] | ordered asynchronous work, points in it, and work to replay |
//! | [`Program`], [`Kernel`], [`Launch`] | device code, as PTX and as the simulator's block functions |
//! | [`DmaBuf`], [`IpcHandle`] | memory for a NIC and for another process |
//! | [`Window`] | device memory that the CPU loads from and stores to |
//! | [`copy::Routine`] | which of the processor's instructions copy through a CPU window |
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
pub mod backend;
mod bytes;
pub mod copy;
pub mod cuda;
mod device;
mod exports;
mod op;
mod program;
mod share;
pub mod sim;
mod staging;
mod stream;
mod window;

pub use address::DeviceAddr;
pub use agent::Agent;
pub(crate) use allocation::WeakAllocation;
pub use allocation::{
    Allocation, BackingAllocation, MemoryEvent, MemoryKind, MemoryListener, PinGuard, Region,
    WatchGuard, Word, WordWidth,
};
pub use bytes::SharedBytes;
pub use device::{Backend, Capabilities, Capability, Device, DeviceInfo, MemoryUsage};
pub use exports::exported;
pub(crate) use exports::exported_range;
pub use op::{Condition, HostCall, MemOp, PendingWait, StreamOp};
pub use program::{BlockFn, Kernel, Launch, Module, Program};
pub use share::{DmaBuf, DmaBufRoute, IpcHandle};
pub(crate) use stream::CancelCheck;
pub use stream::{Event, Graph, Stream};
pub use window::{CpuMapping, MappingType, RejectedPath, Window, WindowOptions, WindowPath};

use crate::error::{Error, Kind, Result};

/// The devices of this machine, and the backends that have none, with the reason.
#[derive(Clone, Debug)]
pub struct Discovery {
    /// Real devices first, simulated ones last.
    pub devices: Vec<Device>,
    /// Backends without a device, and why.
    pub missing: Vec<(Backend, Error)>,
}

impl Discovery {
    /// Why a backend has no devices, if it has none.
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

/// Looks for devices of every backend.
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

/// The device whose memory lies at `address`, whoever allocated it: a CUDA device, or one of a simulated
/// machine in this process.
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

/// The dma-buf of device memory that anybody allocated, and where in it the memory begins.
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
/// Its owner keeps the memory for as long as the dma-buf is used by importers in this process.
#[allow(unsafe_code)]
pub unsafe fn export_address(address: DeviceAddr, len: u64) -> Result<DmaBuf> {
    // SAFETY: the caller's promise.
    let memory = unsafe { owner_of(address)?.borrow(address, len) }?;
    memory.export_dmabuf(0, len)
}

/// The device with that short name: `cuda:0`, `sim:1`.
///
/// ```
/// assert_eq!(warpwire::mem::open("sim:1").unwrap().info().ordinal, 1);
/// assert!(warpwire::mem::open("tpu:0").is_err());
/// ```
pub fn open(label: &str) -> Result<Device> {
    let unknown = || {
        Error::new(Kind::InvalidArgument, format!("open device {label:?}"))
            .why("that is not the name of a device")
            .fix("write cuda:N or sim:N, such as cuda:0")
    };
    let (backend, ordinal) = label.split_once(':').ok_or_else(unknown)?;
    let ordinal: u32 = ordinal.parse().map_err(|_| unknown())?;
    match backend {
        "cuda" => cuda::device(ordinal),
        "sim" => sim::Sim::from_env()?.device(ordinal),
        _ => Err(unknown()),
    }
}
