//! The devices that a case runs on, and helpers for memory contents.
#![allow(unsafe_code)] // to borrow memory and to launch kernels

use std::time::Duration;

use warpwire::Result;
use warpwire::mem::sim::{Sim, SimConfig, SimControl};
use warpwire::mem::{
    Allocation, Backend, Device, DeviceAddr, Kernel, Launch, MemoryKind, Region, Stream, cuda,
};
use warpwire_apps::pattern;

/// Longer than any operation takes that works.
pub fn test_timeout() -> Duration {
    testkit::deadline(Duration::from_secs(20))
}
/// How long a case waits before it concludes that something does not happen.
pub const SHORT_WAIT: Duration = Duration::from_millis(30);

pub struct Fixture {
    pub backend: Backend,
    pub gpu: Device,
    second: Option<Device>,
    sim: Option<Sim>,
}

impl Fixture {
    pub fn new(backend: Backend) -> Self {
        match backend {
            Backend::Sim => {
                let sim = Sim::start(SimConfig::default().with_memory(1 << 30)).unwrap();
                let (gpu, other) = (sim.device(0).unwrap(), sim.device(1).ok());
                Self { backend, gpu, second: other, sim: Some(sim) }
            }
            Backend::Cuda => Self {
                backend,
                gpu: cuda::device(0).unwrap(),
                second: cuda::device(1).ok(),
                sim: None,
            },
        }
    }

    /// The second device. Prints a `skipped` line where there is none.
    pub fn other(&self) -> Option<&Device> {
        if self.second.is_none() {
            eprintln!("skipped: {} has one device only", self.backend);
        }
        self.second.as_ref()
    }

    /// Fault injection of the simulated device.
    pub fn control(&self) -> SimControl {
        self.sim.as_ref().expect("only on the simulator").control(0).unwrap()
    }

    /// The kinds of device memory.
    pub fn device_kinds(&self) -> [MemoryKind; 3] {
        [MemoryKind::Plain, MemoryKind::Vmm, MemoryKind::Pool]
    }

    /// Fails if the case left objects on a simulated device. CUDA has no such accounting.
    pub fn check_nothing_left(&self) {
        let Some(sim) = &self.sim else { return };
        for ordinal in 0..2 {
            if let Err(live_objects) = sim.control(ordinal).unwrap().wait_empty(test_timeout()) {
                panic!("sim:{ordinal} still holds {live_objects:?}");
            }
        }
    }
}

/// Fills memory with the pattern of `seed`, from the CPU.
pub fn put_pattern(memory: &Allocation, seed: u64) {
    let mut bytes = vec![0; memory.len() as usize];
    pattern::fill_bytes(&mut bytes, seed, 0);
    memory.write(0, &bytes).unwrap();
}

/// Asserts that memory holds the pattern of `seed`.
pub fn expect_pattern(memory: &Allocation, seed: u64) {
    let mut wanted = vec![0; memory.len() as usize];
    pattern::fill_bytes(&mut wanted, seed, 0);
    let mut found = vec![0; wanted.len()];
    memory.read(0, &mut found).unwrap();
    let wrong = wanted.iter().zip(&found).position(|(a, b)| a != b);
    assert_eq!(wrong, None, "first wrong byte of {memory:?}");
}

/// Borrows memory that the case keeps allocated, or an address that must be refused.
pub fn borrow(gpu: &Device, address: DeviceAddr, len: u64) -> Result<Allocation> {
    // SAFETY: on CUDA the cases keep the owner alive while they use the borrow; the simulator
    // detects a missing owner.
    unsafe { gpu.borrow(address, len) }
}

/// Launches the kernel `answer`, which answers the host `rounds` times.
pub fn launch_answer(stream: &Stream, kernel: &Kernel, ask: &Region, answer: &Region, rounds: u64) {
    let launch = Launch::new(kernel).region(ask).region(answer).value(rounds);
    // SAFETY: the kernel accesses only the two words in its arguments.
    unsafe { stream.launch(launch) }.unwrap();
}
