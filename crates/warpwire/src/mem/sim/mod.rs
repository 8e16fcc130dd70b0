//! A simulated GPU: a device, not a mock.
//!
//! Its memory lies in memfd files that other processes can open, behind addresses that the CPU cannot
//! follow; its streams run by themselves, in order, beside each other; its kernels are Rust functions of
//! which all blocks run at once. It can be told to be slow, to move memory, to take memory away under
//! its users, to fail and to die. Everything above `mem` is tested on it.
//!
//! `WARPWIRE_SIM` sets up the simulated machine that commands see; see [`SimConfig`].

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

/// A machine of simulated GPUs. Clones are the same machine.
///
/// ```
/// use warpwire::mem::sim::{Sim, SimConfig};
/// let sim = Sim::start(SimConfig { gpus: 4, ..SimConfig::default() }).unwrap();
/// assert_eq!(sim.devices().len(), 4);
/// assert_eq!(sim.device(3).unwrap().label(), "sim:3");
/// assert!(sim.device(4).is_err());
/// ```
#[derive(Clone)]
pub struct Sim {
    gpus: Vec<Arc<SimDevice>>,
}

impl Sim {
    /// A new machine, apart from all others in this process.
    pub fn start(config: SimConfig) -> Result<Self> {
        config.check()?;
        let gpus = (0..config.gpus).map(|ordinal| Arc::new(SimDevice::new(ordinal, &config)));
        Ok(Self { gpus: gpus.collect() })
    }

    /// The one machine of this process that `WARPWIRE_SIM` sets up.
    pub fn from_env() -> Result<Self> {
        static MACHINE: OnceLock<Result<Sim>> = OnceLock::new();
        MACHINE.get_or_init(|| SimConfig::from_env().and_then(Self::start)).clone()
    }

    /// All of its devices.
    pub fn devices(&self) -> Vec<Device> {
        let device = |gpu: &Arc<SimDevice>| Device::from_backend(gpu.clone());
        self.gpus.iter().map(device).collect()
    }

    /// The device of that number.
    pub fn device(&self, ordinal: u32) -> Result<Device> {
        let backend = self.find(ordinal)?.clone();
        Ok(Device::from_backend(backend))
    }

    /// The strings behind the device of that number.
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

/// The device of whichever simulated machine of this process has memory at `address`.
pub(super) fn owner_of(address: DeviceAddr) -> Option<Device> {
    let (memory, _) = address_space().find(address, 1)?;
    Some(Device::from_backend(memory.device().clone()))
}

/// The strings behind a simulated GPU: what tests pull to see how others bear it.
#[derive(Clone)]
pub struct SimControl {
    gpu: Arc<SimDevice>,
}

impl SimControl {
    /// What the device holds now.
    pub fn live_objects(&self) -> LiveObjects {
        self.gpu.live_objects()
    }

    /// Waits until the device holds nothing, and says what it held last if it did not come to that.
    ///
    /// Streams end by themselves, a little after they are dropped.
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

    /// Moves an allocation to other backing. Those who [watch](Allocation::watch) it are told before
    /// and after; the old backing is filled with [`POISON`].
    pub fn relocate(&self, memory: &Allocation) -> Result<()> {
        self.find_own(memory)?.relocate()
    }

    /// Frees an allocation under its users: their next access is an error, and the old backing is
    /// filled with [`POISON`].
    pub fn force_free(&self, memory: &Allocation) -> Result<()> {
        self.find_own(memory)?.force_remove()
    }

    /// Fails the n-th operation of a sort from now on, once.
    pub fn fail(&self, nth: FailNth) {
        self.gpu.set_failure(nth);
    }

    /// Pauses this long before every copy.
    pub fn delay_copies(&self, delay: Duration) {
        self.gpu.set_copy_delay(delay);
    }

    /// Kills the device: everything on it ends with an error, for good.
    pub fn kill(&self) {
        self.gpu.kill();
    }

    fn find_own(&self, memory: &Allocation) -> Result<Arc<memory::SimMemory>> {
        let found = address_space().find(memory.address(), memory.len());
        let find_own = found.filter(|(owner, _)| Arc::ptr_eq(owner.device(), &self.gpu));
        find_own.map(|(owner, _)| owner).ok_or_else(|| {
            Error::new(Kind::NotDeviceMemory, "find memory")
                .on(self.gpu.label())
                .why(format!("it has no live memory at {}", memory.address()))
        })
    }
}
