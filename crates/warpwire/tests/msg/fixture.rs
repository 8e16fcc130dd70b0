//! Ranks as threads over a link, and buffers in host and device memory.

use std::time::Duration;

use crate::rdma_device;
pub use testkit::{assert_same as same, random_bytes as pattern};
use warpwire::link::Hub;
use warpwire::mem::Device;
use warpwire::mem::sim::{Sim, SimConfig};
use warpwire::msg::{Buffer, Comm, CommOptions};
use warpwire::verbs::LinkChoice;

/// Longer than any operation takes that works.
pub fn test_timeout() -> Duration {
    testkit::deadline(Duration::from_secs(30))
}
/// How long a case waits before it concludes that something does not happen.
pub const SHORT_WAIT: Duration = Duration::from_millis(50);

/// The links that cases run over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestLink {
    Hub,
    Udp,
    Shm,
    Auto,
    /// Not a link: an RDMA device, opened through libibverbs.
    Device,
}

impl TestLink {
    pub const LINKS: [(Self, &'static str); 4] =
        [(Self::Hub, "hub"), (Self::Udp, "udp"), (Self::Shm, "shm"), (Self::Auto, "auto")];
}

pub struct Fixture {
    pub test_link: TestLink,
}

/// Location of a message buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    Host,
    Device,
}

pub const MEMORY_KINDS: [MemoryKind; 2] = [MemoryKind::Host, MemoryKind::Device];

impl Fixture {
    pub fn new(test_link: TestLink) -> Self {
        Self { test_link }
    }

    pub fn options(&self) -> CommOptions {
        let link = match self.test_link {
            TestLink::Hub => LinkChoice::Hub(Hub::new()),
            TestLink::Udp => LinkChoice::Udp,
            TestLink::Shm => LinkChoice::Shm,
            TestLink::Auto => LinkChoice::Auto,
            TestLink::Device => rdma_device::link().parse().unwrap(),
        };
        CommOptions::default().with_link(link).with_timeout(test_timeout())
    }

    /// Runs `size` ranks, each on a thread of its own.
    pub fn ranks(&self, size: usize, run: impl Fn(Comm) + Sync) {
        self.ranks_with(size, &self.options(), run);
    }

    pub fn ranks_with(&self, size: usize, options: &CommOptions, run: impl Fn(Comm) + Sync) {
        let comms = Comm::local_with(size, options).unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                comms.into_iter().map(|comm| (comm.rank(), scope.spawn(|| run(comm)))).collect();
            let mut failed = Vec::new();
            for (rank, thread) in threads {
                if thread.join().is_err() {
                    failed.push(rank);
                }
            }
            assert!(failed.is_empty(), "ranks {failed:?} failed");
        });
    }
}

/// The GPU that the environment names, such as `cuda:0`, or a new simulated one.
pub fn gpu() -> Device {
    match std::env::var("WARPWIRE_TEST_GPU") {
        Ok(label) => warpwire::mem::open(&label).unwrap(),
        Err(_) => simulated_gpu(),
    }
}

/// A GPU that no other is.
pub fn simulated_gpu() -> Device {
    let config = SimConfig::default().with_memory(1 << 30);
    Sim::start(config).unwrap().device(0).unwrap()
}

/// A registered buffer in host memory or on a GPU.
pub fn buffer(comm: &Comm, memory_kind: MemoryKind, len: u64) -> Buffer {
    match memory_kind {
        MemoryKind::Host => comm.alloc(len).unwrap(),
        MemoryKind::Device => comm.register(gpu().alloc(len).unwrap().whole().unwrap()).unwrap(),
    }
}

pub fn read(buffer: &Buffer, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    buffer.read(offset, &mut bytes).unwrap();
    bytes
}
