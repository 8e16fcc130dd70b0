//! A simulated GPU: a device, not a mock.
//!
//! Its memory consists of memfds that other processes can open, at addresses that the CPU cannot
//! dereference. Its streams run asynchronously, each in order, concurrently with each other. Its
//! kernels are Rust functions, all blocks of which run concurrently. It can be configured to be
//! slow, to move memory, to free memory under its users, to fail and to die. Everything above `mem`
//! is tested on it.
//!
//! `WARPWIRE_SIM` configures the simulated machine that commands see; see [`SimConfig`].

mod block;
mod config;
mod device;
mod execute;
mod memory;
mod stream;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

pub use block::{Block, KernelFault};
pub use config::{ENV_VAR, FailNth, OpKind, SimConfig};
pub use device::LiveObjects;
pub use memory::POISON;

use super::address::DeviceAddr;
use super::allocation::Allocation;
use super::device::Device;
use crate::error::{Error, Kind, Result};
use device::SimDevice;
use memory::address_space;

/// A machine with simulated GPUs. Clones refer to the same machine.
///
/// ```
/// use warpwire::mem::sim::{Sim, SimConfig};
/// let sim = Sim::start(SimConfig::default().with_gpus(4)).unwrap();
/// assert_eq!(sim.devices().len(), 4);
/// assert_eq!(sim.device(3).unwrap().label(), "sim:3");
/// assert!(sim.device(4).is_err());
/// ```
#[derive(Clone)]
pub struct Sim {
    gpus: Vec<Arc<SimDevice>>,
}

impl Sim {
    /// Creates a machine, independent of all others in this process.
    pub fn start(config: SimConfig) -> Result<Self> {
        config.check()?;
        let gpus = (0..config.gpus).map(|ordinal| Arc::new(SimDevice::new(ordinal, &config)));
        Ok(Self { gpus: gpus.collect() })
    }

    /// The process-wide machine, configured by `WARPWIRE_SIM`.
    pub fn from_env() -> Result<Self> {
        static MACHINE: OnceLock<Result<Sim>> = OnceLock::new();
        MACHINE.get_or_init(|| SimConfig::from_env().and_then(Self::start)).clone()
    }

    /// All devices, by ordinal.
    pub fn devices(&self) -> Vec<Device> {
        let device = |gpu: &Arc<SimDevice>| Device::from_backend(gpu.clone());
        self.gpus.iter().map(device).collect()
    }

    /// The device with that ordinal.
    pub fn device(&self, ordinal: u32) -> Result<Device> {
        let backend = self.find(ordinal)?.clone();
        Ok(Device::from_backend(backend))
    }

    /// The fault injection interface of the device with that ordinal.
    pub fn control(&self, ordinal: u32) -> Result<SimControl> {
        Ok(SimControl { gpu: self.find(ordinal)?.clone() })
    }

    fn find(&self, ordinal: u32) -> Result<&Arc<SimDevice>> {
        self.gpus.get(ordinal as usize).ok_or_else(|| {
            Error::new(Kind::InvalidArgument, format!("find device sim:{ordinal}"))
                .why(format!("the simulator has {} GPUs", self.gpus.len()))
                .fix(format!("set {ENV_VAR}=gpus={} or more", ordinal.saturating_add(1)))
        })
    }
}

/// The device, of any simulated machine in this process, that owns the memory at `address`.
pub(super) fn owner_of(address: DeviceAddr) -> Option<Device> {
    let (memory, _) = address_space().find(address, 1)?;
    Some(Device::from_backend(memory.device().clone()))
}

/// Controls a simulated GPU: fault injection and leak checks for tests.
#[derive(Clone)]
pub struct SimControl {
    gpu: Arc<SimDevice>,
}

impl SimControl {
    /// The objects that exist on the device now.
    pub fn live_objects(&self) -> LiveObjects {
        self.gpu.live_objects()
    }

    /// Waits until the device holds no objects. On timeout returns those that remain.
    ///
    /// A stream ends asynchronously, shortly after it is dropped.
    pub fn wait_empty(&self, timeout: Duration) -> std::result::Result<(), LiveObjects> {
        let start = Instant::now();
        loop {
            let live_objects = self.live_objects();
            if live_objects == LiveObjects::default() {
                return Ok(());
            }
            if start.elapsed() > timeout {
                return Err(live_objects);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Moves an allocation to new backing memory. [Watchers](Allocation::watch) are notified before
    /// and after; the old backing is filled with [`POISON`].
    pub fn relocate(&self, memory: &Allocation) -> Result<()> {
        self.find_own(memory)?.relocate()
    }

    /// Frees an allocation under its users: their next access fails, and the old backing is
    /// filled with [`POISON`].
    pub fn force_free(&self, memory: &Allocation) -> Result<()> {
        self.find_own(memory)?.force_remove()
    }

    /// Fails the n-th operation of a kind, counted from now, once.
    pub fn fail(&self, nth: FailNth) {
        self.gpu.set_failure(nth);
    }

    /// Sets a delay before every copy.
    pub fn delay_copies(&self, delay: Duration) {
        self.gpu.set_copy_delay(delay);
    }

    /// Kills the device: all work on it fails from now on.
    pub fn kill(&self) {
        self.gpu.kill();
    }

    fn find_own(&self, memory: &Allocation) -> Result<Arc<memory::SimMemory>> {
        let found = address_space().find(memory.address(), memory.len());
        let own = found.filter(|(owner, _)| Arc::ptr_eq(owner.device(), &self.gpu));
        own.map(|(owner, _)| owner).ok_or_else(|| {
            Error::new(Kind::NotDeviceMemory, "find memory")
                .on(self.gpu.label())
                .why(format!("it has no live memory at {}", memory.address()))
        })
    }
}
