//! Memory of kernel queue pairs: addressable by a device, or by CPU threads of this process.

use super::{CqPlacement, layout};
use crate::error::{Error, Kind, Result};
use crate::hca::{QueueMemory, kernel_table_layout};
use crate::mem::{Allocation, Device, DeviceAddr, PinGuard, Region, Window};

/// What runs the kernels that drive the queue pair.
#[derive(Debug)]
pub(super) enum KernelTarget {
    Device(Device, CqPlacement),
    Cpu,
}

/// Memory that both the engine and kernels can access.
pub(super) enum KernelMemory {
    Host(QueueMemory),
    Pinned(Allocation),
    /// Device memory, pinned at its address.
    Device {
        memory: Allocation,
        window: Option<Window>,
        _pin: PinGuard,
    },
}

impl std::fmt::Debug for KernelMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Host(_) => "host memory",
            Self::Pinned(_) => "pinned memory",
            Self::Device { window: Some(_), .. } => "device memory behind a window",
            Self::Device { window: None, .. } => "device memory",
        })
    }
}

impl KernelTarget {
    /// Memory for WQEs and doorbells, which the CPU reads.
    pub(super) fn queues(&self, len: u64) -> Result<KernelMemory> {
        match self {
            Self::Device(device, _) => Ok(KernelMemory::Pinned(device.alloc_pinned(len)?)),
            Self::Cpu => Ok(KernelMemory::Host(QueueMemory::host(len)?)),
        }
    }

    /// Memory for CQEs, which kernels poll.
    pub(super) fn completions(&self, len: u64) -> Result<KernelMemory> {
        let Self::Device(device, wanted) = self else { return self.queues(len) };
        if *wanted == CqPlacement::Pinned {
            return self.queues(len);
        }
        let memory = device.alloc(len)?;
        match (memory.window(), wanted) {
            (Ok(window), _) => {
                let _pin = memory.pin()?;
                Ok(KernelMemory::Device { memory, window: Some(window), _pin })
            }
            (Err(why), CqPlacement::Auto) => {
                tracing::info!(%why, "the CQs of a kernel queue pair are in pinned memory");
                self.queues(len)
            }
            (Err(why), _) => Err(why),
        }
    }

    /// Memory for the handle and its counters, which only kernels modify.
    pub(super) fn handle(&self, len: u64) -> Result<KernelMemory> {
        let Self::Device(device, _) = self else { return self.queues(len) };
        let memory = device.alloc(len)?;
        // The CPU mapping allows reads while kernels run; without one, copies do when none runs.
        let window = memory.window().ok();
        let _pin = memory.pin()?;
        Ok(KernelMemory::Device { memory, window, _pin })
    }
}

impl KernelMemory {
    /// The same memory as engine queue memory.
    pub(super) fn queue(&self) -> Result<QueueMemory> {
        match self {
            Self::Host(memory) => Ok(memory.clone()),
            Self::Pinned(memory) => QueueMemory::pinned(memory.clone()),
            Self::Device { memory, .. } => Ok(QueueMemory::window(memory.window()?)),
        }
    }

    /// The table behind a handle, if the CPU can access it while kernels run.
    pub(super) fn kernel_table(&self) -> Option<QueueMemory> {
        match self {
            Self::Device { window: Some(_), .. } => {
                Some(self.queue().ok()?.slice(layout::TABLE, kernel_table_layout::LEN))
            }
            _ => None,
        }
    }

    /// The address as kernels see it.
    pub(super) fn address(&self) -> Result<DeviceAddr> {
        match self {
            Self::Host(memory) => Ok(DeviceAddr::new(memory.bytes().base().addr().get() as u64)),
            Self::Pinned(memory) | Self::Device { memory, .. } => Ok(memory.address()),
        }
    }

    /// The whole allocation, to be kept alive by a launch.
    pub(super) fn region(&self) -> Result<Region> {
        match self {
            Self::Pinned(memory) | Self::Device { memory, .. } => memory.whole(),
            Self::Host(_) => Err(Error::new(Kind::Unsupported, "start a kernel")
                .why("the queue pair was created for CPU threads")
                .fix("create it for a device, with KernelQp::create")),
        }
    }

    pub(super) fn write(&self, at: u64, from: &[u8]) -> Result<()> {
        match self {
            Self::Host(memory) => memory.bytes().write(at, from),
            Self::Pinned(memory) => memory.host_bytes()?.write(at, from),
            Self::Device { window: Some(window), .. } => window.write(at, from),
            Self::Device { memory, .. } => memory.write(at, from),
        }
    }

    pub(super) fn read(&self, at: u64, into: &mut [u8]) -> Result<()> {
        match self {
            Self::Host(memory) => memory.bytes().read(at, into),
            Self::Pinned(memory) => memory.host_bytes()?.read(at, into),
            Self::Device { window: Some(window), .. } => window.read(at, into),
            Self::Device { memory, .. } => memory.read(at, into),
        }
    }
}
