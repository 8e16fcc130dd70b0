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

pub use block::{Block, Fault};
pub use config::{Nth, OpKind, SimConfig, VARIABLE};
pub use device::Live;
pub use memory::POISON;

use super::address::DeviceAddr;
use super::allocation::Allocation;
use super::device::Device;
use crate::error::{Error, Kind, Result};
use device::SimDevice;
use memory::space;

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
    pub fn control(&self, ordinal: u32) -> Result<Control> {
        Ok(Control { gpu: self.find(ordinal)?.clone() })
    }

    fn find(&self, ordinal: u32) -> Result<&Arc<SimDevice>> {
        self.gpus.get(ordinal as usize).ok_or_else(|| {
            Error::new(Kind::InvalidArgument, format!("find device sim:{ordinal}"))
                .why(format!("the simulator has {} GPUs", self.gpus.len()))
                .fix(format!("set {VARIABLE}=gpus={} or more", ordinal.saturating_add(1)))
        })
    }
}

/// The device of whichever simulated machine of this process has memory at `address`.
pub(super) fn owner_of(address: DeviceAddr) -> Option<Device> {
    let (memory, _) = space().find(address, 1)?;
    Some(Device::from_backend(memory.device().clone()))
}

/// The strings behind a simulated GPU: what tests pull to see how others bear it.
#[derive(Clone)]
pub struct Control {
    gpu: Arc<SimDevice>,
}

impl Control {
    /// What the device holds now.
    pub fn live(&self) -> Live {
        self.gpu.live()
    }

    /// Waits until the device holds nothing, and says what it held last if it did not come to that.
    ///
    /// Streams end by themselves, a little after they are dropped.
    pub fn wait_empty(&self, timeout: Duration) -> std::result::Result<(), Live> {
        let start = Instant::now();
        loop {
            let live = self.live();
            if live == Live::default() {
                return Ok(());
            }
            if start.elapsed() > timeout {
                return Err(live);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Moves an allocation to other backing. Those who [watch](Allocation::watch) it are told before
    /// and after; the old backing is filled with [`POISON`].
    pub fn relocate(&self, memory: &Allocation) -> Result<()> {
        self.own(memory)?.relocate()
    }

    /// Frees an allocation under its users: their next access is an error, and the old backing is
    /// filled with [`POISON`].
    pub fn free_under_users(&self, memory: &Allocation) -> Result<()> {
        self.own(memory)?.remove_under_users()
    }

    /// Fails the n-th operation of a sort from now on, once.
    pub fn fail(&self, nth: Nth) {
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

    fn own(&self, memory: &Allocation) -> Result<Arc<memory::SimMemory>> {
        let found = space().find(memory.address(), memory.len());
        let own = found.filter(|(owner, _)| Arc::ptr_eq(owner.device(), &self.gpu));
        own.map(|(owner, _)| owner).ok_or_else(|| {
            Error::new(Kind::NotDeviceMemory, "find memory")
                .on(self.gpu.label())
                .why(format!("it has no live memory at {}", memory.address()))
        })
    }
}
