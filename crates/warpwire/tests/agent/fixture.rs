//! Agents over a link, and memory of every kind.

use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

pub use testkit::assert_same as same;
use testkit::random_bytes;
use warpwire::agent::{Agent, AgentOptions, Descriptor, Memory, Peer, RemoteMemory};
use warpwire::link::{Auto, Hub, Shm, ShmOptions, Udp, UdpOptions};
use warpwire::mem::sim::{Sim, SimConfig};
use warpwire::mem::{Allocation, Device};
use warpwire::mr::HostMemory;
use warpwire::verbs::{Context, LinkChoice};

use crate::rdma_device;

/// Longer than any operation takes that works.
pub fn limit() -> Duration {
    testkit::deadline(Duration::from_secs(30))
}

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
    hub: Hub,
    endpoints: AtomicU16,
    sim: Sim,
}

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Host,
    Device,
}

pub const PLACES: [Place; 2] = [Place::Host, Place::Device];

/// Registered memory whose content can be compared.
pub struct Block {
    pub memory: Memory,
    bytes: Bytes,
}

enum Bytes {
    Host(HostMemory),
    Device(Allocation),
}

impl Fixture {
    pub fn new(test_link: TestLink) -> Self {
        let sim = Sim::start(SimConfig::default()).unwrap();
        Self { test_link, hub: Hub::new(), endpoints: AtomicU16::new(1), sim }
    }

    /// Options of an agent with this many devices.
    pub fn options(&self, rails: usize) -> AgentOptions {
        let options = AgentOptions::default().with_address(std::net::IpAddr::from([127, 0, 0, 1]));
        if self.test_link == TestLink::Hub {
            let endpoint = |_| {
                let number = self.endpoints.fetch_add(1, Ordering::Relaxed);
                let address = format!("10.0.{}.{}:4791", number >> 8, number & 255);
                Context::open(self.hub.endpoint(address.parse().unwrap()).unwrap()).unwrap()
            };
            return options.with_rails((0..rails).map(endpoint).collect());
        }
        let link = match self.test_link {
            TestLink::Udp => LinkChoice::Udp,
            TestLink::Shm => LinkChoice::Shm,
            TestLink::Device => rdma_device::link().parse().unwrap(),
            _ => LinkChoice::Auto,
        };
        match rails {
            1 => options.with_link(link),
            _ => options.with_rails((0..rails).map(|_| self.context()).collect()),
        }
    }

    /// A device on this link, which is not a hub.
    fn context(&self) -> Context {
        let (at, shm) = ("127.0.0.1:0".parse().unwrap(), ShmOptions::default());
        match self.test_link {
            TestLink::Udp => Context::open(Udp::bind(at, UdpOptions::default()).unwrap()),
            TestLink::Shm => Context::open(Shm::bind(at, shm).unwrap()),
            TestLink::Device => match rdma_device::link().parse() {
                Ok(LinkChoice::Device(context)) => Ok(context),
                other => panic!("{other:?}"),
            },
            _ => Context::open(Auto::bind(at, UdpOptions::default(), shm).unwrap()),
        }
        .unwrap()
    }

    pub fn agent(&self, name: &str) -> Agent {
        Agent::open(name, self.options(1)).unwrap()
    }

    /// Two agents, and the second as the first one's peer, without memory yet.
    pub fn pair(&self) -> (Agent, Agent) {
        (self.agent("alice"), self.agent("bob"))
    }

    /// The GPU that the environment names, such as `cuda:0`, or another simulated one.
    pub fn gpu(&self) -> Device {
        match std::env::var("WARPWIRE_TEST_GPU") {
            Ok(label) => warpwire::mem::open(&label).unwrap(),
            Err(_) => Sim::start(SimConfig::default()).unwrap().device(0).unwrap(),
        }
    }

    pub fn block(&self, agent: &Agent, place: Place, len: u64) -> Block {
        match place {
            Place::Host => {
                let host = HostMemory::new(len).unwrap();
                let memory = agent.register(host.clone()).unwrap();
                Block { memory, bytes: Bytes::Host(host) }
            }
            Place::Device => {
                let allocation = self.sim.device(0).unwrap().alloc(len).unwrap();
                let memory = agent.register(allocation.whole().unwrap()).unwrap();
                Block { memory, bytes: Bytes::Device(allocation) }
            }
        }
    }
}

impl Block {
    pub fn range(&self, offset: u64, len: u64) -> Descriptor {
        self.memory.range(offset, len).unwrap()
    }

    pub fn write(&self, offset: u64, bytes: &[u8]) {
        match &self.bytes {
            Bytes::Host(host) => host.bytes().write(offset, bytes).unwrap(),
            Bytes::Device(allocation) => allocation.write(offset, bytes).unwrap(),
        }
    }

    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        match &self.bytes {
            Bytes::Host(host) => host.bytes().read(offset, &mut bytes).unwrap(),
            Bytes::Device(allocation) => allocation.read(offset, &mut bytes).unwrap(),
        }
        bytes
    }

    /// Fills it with bytes of a seed; returns them.
    pub fn fill(&self, seed: u64) -> Vec<u8> {
        let bytes = random_bytes(seed, self.memory.len() as usize);
        self.write(0, &bytes);
        bytes
    }
}

/// The peer's only memory.
pub fn only(peer: &Peer) -> RemoteMemory {
    let [memory] = peer.memory().try_into().unwrap();
    memory
}
