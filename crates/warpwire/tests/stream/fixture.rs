//! What a case gets to work with: a GPU, two devices on a link with a thread each, and queue pairs between them.

use std::time::{Duration, Instant};

use warpwire::hca::HcaOptions;
use warpwire::link::{Hub, Link, Shm, shm};
use warpwire::mem::sim::{Sim, SimConfig};
use warpwire::mem::{Allocation, Backend, Device, Stream, Word, cuda};
use warpwire::stream::{CqMemory, Ring, StreamQp, StreamQpOptions};
use warpwire::verbs::{Access, Completion, Context, Drive, Mr, Pd, ReceiveRequest, Request, Sge};
use warpwire_apps::pattern;

/// Longer than anything takes that works.
pub fn soon() -> Duration {
    testkit::deadline(Duration::from_secs(30))
}
/// Long enough to be sure that something does not happen.
pub const A_MOMENT: Duration = Duration::from_millis(30);

/// How queue pairs are made, and what the device can do.
#[derive(Clone, Copy, Debug)]
pub struct Flavour {
    pub name: &'static str,
    pub nor: bool,
    pub cq_memory: CqMemory,
    pub ring: Ring,
    pub shm: bool,
}

const PLAIN: Flavour = Flavour {
    name: "plain",
    nor: true,
    cq_memory: CqMemory::Pinned,
    ring: Ring::Record,
    shm: false,
};

/// A new way to make queue pairs is a line here.
pub const FLAVOURS: [Flavour; 5] = [
    PLAIN,
    Flavour { name: "without-nor", nor: false, ..PLAIN },
    Flavour { name: "device-cq", cq_memory: CqMemory::Device, ..PLAIN },
    Flavour { name: "doorbell", ring: Ring::RecordAndDoorbell, ..PLAIN },
    Flavour { name: "shm", shm: true, ..PLAIN },
];

pub struct Fixture {
    pub gpu: Device,
    pub flavour: Flavour,
    sim: Option<Sim>,
}

impl Fixture {
    pub fn new(backend: Backend, flavour: Flavour) -> Self {
        match backend {
            Backend::Sim => {
                let config =
                    SimConfig { memory: 1 << 30, wait_nor: flavour.nor, ..SimConfig::default() };
                let sim = Sim::start(config).unwrap();
                Self { gpu: sim.device(0).unwrap(), flavour, sim: Some(sim) }
            }
            Backend::Cuda => Self { gpu: cuda::device(0).unwrap(), flavour, sim: None },
        }
    }

    /// Another device of the simulated machine; none on CUDA.
    pub fn other_gpu(&self) -> Option<Device> {
        self.sim.as_ref().map(|sim| sim.device(1).unwrap())
    }

    pub fn links(&self) -> [Box<dyn Link>; 2] {
        if self.flavour.shm {
            let options = shm::Options { attend: 1, ..shm::Options::default() };
            let shm = || Shm::bind("127.0.0.1:0".parse().unwrap(), options).unwrap();
            return [Box::new(shm()), Box::new(shm())];
        }
        let hub = Hub::new();
        ["10.0.0.1:4791", "10.0.0.2:4791"]
            .map(|at| Box::new(hub.endpoint(at.parse().unwrap()).unwrap()) as Box<dyn Link>)
    }

    pub fn world(&self) -> World {
        let [a, b] = self.links().map(|link| End::open(link, thread()));
        World { a, b }
    }

    pub fn options(&self) -> StreamQpOptions {
        let Flavour { cq_memory, ring, .. } = self.flavour;
        let patience = Some(Duration::from_secs(20));
        StreamQpOptions { cq_memory, ring, patience, ..StreamQpOptions::default() }
    }

    /// Two queue pairs that are connected.
    pub fn pair(&self, world: &World) -> [StreamQp; 2] {
        self.pair_with(world, &self.options())
    }

    pub fn pair_with(&self, world: &World, options: &StreamQpOptions) -> [StreamQp; 2] {
        let make = |end: &End| {
            StreamQp::create(&end.context, &end.pd, &self.gpu, options.clone()).unwrap()
        };
        let (a, b) = (make(&world.a), make(&world.b));
        a.connect(&b.offer()).unwrap();
        b.connect(&a.offer()).unwrap();
        [a, b]
    }

    pub fn stream(&self) -> Stream {
        self.gpu.stream().unwrap()
    }

    /// Registered device memory, all zero.
    pub fn memory(&self, end: &End, len: u64) -> Patch {
        let memory = self.gpu.alloc(len).unwrap();
        memory.write(0, &vec![0; len as usize]).unwrap();
        Patch::of(end, memory)
    }

    /// Registered pinned memory, all zero.
    pub fn pinned(&self, end: &End, len: u64) -> Patch {
        let memory = self.gpu.alloc_pinned(len).unwrap();
        memory.write(0, &vec![0; len as usize]).unwrap();
        Patch::of(end, memory)
    }

    /// A word in pinned memory, zero.
    pub fn word64(&self) -> Word {
        let word = self.gpu.alloc_pinned(8).unwrap().word64(0).unwrap();
        word.store(0).unwrap();
        word
    }

    pub fn word32(&self) -> Word {
        let word = self.gpu.alloc_pinned(8).unwrap().word32(0).unwrap();
        word.store(0).unwrap();
        word
    }

    /// The simulator counts: after every case, nothing may be left.
    pub fn check_nothing_left(&self) {
        let Some(sim) = &self.sim else { return };
        if let Err(live) = sim.control(0).unwrap().wait_empty(soon()) {
            panic!("it still holds {live:?}");
        }
    }
}

pub fn thread() -> HcaOptions {
    let drive = Drive::Thread { spin: Duration::from_micros(20), core: None };
    HcaOptions { drive, ..HcaOptions::default() }
}

/// A device with a protection domain.
pub struct End {
    pub context: Context,
    pub pd: Pd,
}

impl End {
    pub fn open(link: impl Link + 'static, options: HcaOptions) -> Self {
        let context = Context::open_with(link, options).unwrap();
        let pd = context.pd();
        Self { context, pd }
    }
}

/// Two devices that reach each other.
pub struct World {
    pub a: End,
    pub b: End,
}

/// Registered memory.
pub struct Patch {
    pub memory: Allocation,
    pub mr: Mr,
}

impl Patch {
    fn of(end: &End, memory: Allocation) -> Self {
        let mr = end.context.register(&end.pd, memory.whole().unwrap(), Access::ALL).unwrap();
        Self { memory, mr }
    }

    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(offset, &mut bytes).unwrap();
        bytes
    }

    pub fn word(&self, offset: u64) -> u64 {
        u64::from_le_bytes(self.read(offset, 8).try_into().unwrap())
    }

    /// Fills part of it with the pattern of `seed`, and returns what it wrote.
    pub fn pattern(&self, offset: u64, len: usize, seed: u64) -> Vec<u8> {
        let mut bytes = vec![0; len];
        pattern::fill_bytes(&mut bytes, seed, 0);
        self.memory.write(offset, &bytes).unwrap();
        bytes
    }

    pub fn sge(&self, offset: u64, len: u32) -> Sge {
        self.mr.sge(offset, len)
    }
}

/// Posts receives of so many bytes each, one after the other in that memory.
pub fn post_receives(qp: &StreamQp, patch: &Patch, count: u64, len: u32) {
    for id in 0..count {
        let range = patch.sge(id * u64::from(len), len);
        qp.post_receive(&[ReceiveRequest { id, data: &[range] }]).unwrap();
    }
}

pub fn sync(stream: &Stream) {
    stream.synchronize(soon()).unwrap();
}

/// Asserts that the stream does not come to its end for a while.
pub fn expect_blocked(stream: &Stream) {
    std::thread::sleep(A_MOMENT);
    assert!(!stream.is_idle().unwrap(), "{stream:?} should wait");
}

pub fn next(qp: &StreamQp) -> Completion {
    let completion = qp.next(soon()).unwrap();
    completion.unwrap_or_else(|| panic!("a completion of {:#x} in time", qp.number()))
}

/// The name of the next piece of work that ended, with success: waits end for failures too, and what failed has moved nothing.
pub fn done(qp: &StreamQp) -> u64 {
    let completion = next(qp);
    assert!(completion.is_success(), "{completion:?}: {:?}", qp.failure());
    completion.id
}

pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < soon(), "it did not come to this: {what}");
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// A request that does nothing but complete.
pub fn nop(id: u64) -> Request<'static> {
    Request::new(id, warpwire::verbs::Op::Nop)
}
