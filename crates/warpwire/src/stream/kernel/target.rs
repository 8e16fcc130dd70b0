//! Where a queue pair for kernels lies: memory that a device or the CPU's own threads reach by address.

use super::CqPlacement;
use crate::error::{Error, Kind, Result};
use crate::hca::QueueMemory;
use crate::mem::{Allocation, Device, DeviceAddr, PinGuard, Region, Window};

/// Whose kernels it is for.
#[derive(Debug)]
pub(super) enum KernelTarget {
    Device(Device, CqPlacement),
    Cpu,
}

/// A piece of memory that both sides reach.
pub(super) enum KernelMemory {
    Host(QueueMemory),
    Pinned(Allocation),
    /// Device memory, which must stay where it is.
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
    /// For entries and doorbells, which the CPU reads.
    pub(super) fn queues(&self, len: u64) -> Result<KernelMemory> {
        match self {
            Self::Device(device, _) => Ok(KernelMemory::Pinned(device.alloc_pinned(len)?)),
            Self::Cpu => Ok(KernelMemory::Host(QueueMemory::host(len)?)),
        }
    }

    /// For completions, which kernels read.
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
                tracing::info!(%why, "completions for kernels go to pinned memory");
                self.queues(len)
            }
            (Err(why), _) => Err(why),
        }
    }

    /// For the handle and its counters, which only kernels change.
    pub(super) fn handle(&self, len: u64) -> Result<KernelMemory> {
        let Self::Device(device, _) = self else { return self.queues(len) };
        let memory = device.alloc(len)?;
        // The window is for looking in while kernels run; copies do as well when none does.
        let window = memory.window().ok();
        let _pin = memory.pin()?;
        Ok(KernelMemory::Device { memory, window, _pin })
    }
}

impl KernelMemory {
    /// The same memory, for queues of the engine.
    pub(super) fn queue(&self) -> Result<QueueMemory> {
        match self {
            Self::Host(memory) => Ok(memory.clone()),
            Self::Pinned(memory) => QueueMemory::pinned(memory.clone()),
            Self::Device { memory, .. } => Ok(QueueMemory::window(memory.window()?)),
        }
    }

    /// Where kernels find it.
    pub(super) fn address(&self) -> Result<DeviceAddr> {
        match self {
            Self::Host(memory) => Ok(DeviceAddr::new(memory.bytes().base().addr().get() as u64)),
            Self::Pinned(memory) | Self::Device { memory, .. } => Ok(memory.address()),
        }
    }

    /// All of it, for a launch to keep.
    pub(super) fn region(&self) -> Result<Region> {
        match self {
            Self::Pinned(memory) | Self::Device { memory, .. } => memory.whole(),
            Self::Host(_) => Err(Error::new(Kind::Unsupported, "start a kernel")
                .why("the queue pair is for threads of the CPU")
                .fix("make it by KernelQp::create, for a device")),
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
