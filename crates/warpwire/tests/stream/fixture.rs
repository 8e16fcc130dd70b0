//! A GPU, two devices on a link with a thread each, and queue pairs between them.

use std::time::{Duration, Instant};

use warpwire::hca::HcaOptions;
use warpwire::link::{Hub, Link, Shm, ShmOptions};
use warpwire::mem::sim::{Sim, SimConfig};
use warpwire::mem::{Allocation, Backend, Device, Stream, Word, cuda};
use warpwire::stream::{CqMemory, DoorbellMode, StreamQp, StreamQpOptions};
use warpwire::verbs::{
    Access, Completion, Context, Mr, Pd, ProgressMode, ReceiveRequest, SendRequest, Sge,
};
use warpwire_apps::pattern;

/// Longer than any operation takes that works.
pub fn test_timeout() -> Duration {
    testkit::deadline(Duration::from_secs(30))
}
/// How long a case waits before it concludes that something does not happen.
pub const SHORT_WAIT: Duration = Duration::from_millis(30);

/// Options of the queue pairs, and capabilities of the device.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    pub name: &'static str,
    pub nor: bool,
    pub cq_memory: CqMemory,
    pub doorbell_mode: DoorbellMode,
    pub shm: bool,
}

const PLAIN: Variant = Variant {
    name: "plain",
    nor: true,
    cq_memory: CqMemory::Pinned,
    doorbell_mode: DoorbellMode::DoorbellRecord,
    shm: false,
};

/// Every case of `EVERYWHERE` runs with each of these.
pub const VARIANTS: [Variant; 5] = [
    PLAIN,
    Variant { name: "without-nor", nor: false, ..PLAIN },
    Variant { name: "device-cq", cq_memory: CqMemory::Device, ..PLAIN },
    Variant { name: "doorbell", doorbell_mode: DoorbellMode::RecordAndDoorbell, ..PLAIN },
    Variant { name: "shm", shm: true, ..PLAIN },
];

pub struct Fixture {
    pub gpu: Device,
    pub variant: Variant,
    sim: Option<Sim>,
}

impl Fixture {
    pub fn new(backend: Backend, variant: Variant) -> Self {
        match backend {
            Backend::Sim => {
                let config = SimConfig::default().with_memory(1 << 30).with_wait_nor(variant.nor);
                let sim = Sim::start(config).unwrap();
                Self { gpu: sim.device(0).unwrap(), variant, sim: Some(sim) }
            }
            Backend::Cuda => Self { gpu: cuda::device(0).unwrap(), variant, sim: None },
        }
    }

    /// Another device of the simulated machine; none on CUDA.
    pub fn other_gpu(&self) -> Option<Device> {
        self.sim.as_ref().map(|sim| sim.device(1).unwrap())
    }

    pub fn links(&self) -> [Box<dyn Link>; 2] {
        if self.variant.shm {
            let options = ShmOptions::default().with_control_poll_interval(1);
            let shm = || Shm::bind("127.0.0.1:0".parse().unwrap(), options.clone()).unwrap();
            return [Box::new(shm()), Box::new(shm())];
        }
        let hub = Hub::new();
        ["10.0.0.1:4791", "10.0.0.2:4791"]
            .map(|at| Box::new(hub.endpoint(at.parse().unwrap()).unwrap()) as Box<dyn Link>)
    }

    pub fn testbed(&self) -> Testbed {
        let [a, b] = self.links().map(|link| Endpoint::open(link, thread()));
        Testbed { a, b }
    }

    pub fn options(&self) -> StreamQpOptions {
        let Variant { cq_memory, doorbell_mode, .. } = self.variant;
        let wait_timeout = Some(Duration::from_secs(20));
        StreamQpOptions::default()
            .with_cq_memory(cq_memory)
            .with_doorbell_mode(doorbell_mode)
            .with_wait_timeout(wait_timeout)
    }

    /// Two connected queue pairs.
    pub fn pair(&self, testbed: &Testbed) -> [StreamQp; 2] {
        self.pair_with(testbed, &self.options())
    }

    pub fn pair_with(&self, testbed: &Testbed, options: &StreamQpOptions) -> [StreamQp; 2] {
        let make = |end: &Endpoint| {
            StreamQp::create(&end.context, &end.pd, &self.gpu, options.clone()).unwrap()
        };
        let (a, b) = (make(&testbed.a), make(&testbed.b));
        a.connect(&b.endpoint()).unwrap();
        b.connect(&a.endpoint()).unwrap();
        [a, b]
    }

    pub fn stream(&self) -> Stream {
        self.gpu.stream().unwrap()
    }

    /// Registered device memory, all zero.
    pub fn memory(&self, end: &Endpoint, len: u64) -> TestBuffer {
        let memory = self.gpu.alloc(len).unwrap();
        memory.write(0, &vec![0; len as usize]).unwrap();
        TestBuffer::of(end, memory)
    }

    /// Registered pinned memory, all zero.
    pub fn pinned(&self, end: &Endpoint, len: u64) -> TestBuffer {
        let memory = self.gpu.alloc_pinned(len).unwrap();
        memory.write(0, &vec![0; len as usize]).unwrap();
        TestBuffer::of(end, memory)
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

    /// Fails if the case left objects on the simulated device.
    pub fn check_nothing_left(&self) {
        let Some(sim) = &self.sim else { return };
        if let Err(live_objects) = sim.control(0).unwrap().wait_empty(test_timeout()) {
            panic!("sim:0 still holds {live_objects:?}");
        }
    }
}

pub fn thread() -> HcaOptions {
    let progress_mode = ProgressMode::Thread { spin: Duration::from_micros(20), core: None };
    HcaOptions::default().with_progress_mode(progress_mode)
}

/// A device with a protection domain.
pub struct Endpoint {
    pub context: Context,
    pub pd: Pd,
}

impl Endpoint {
    pub fn open(link: impl Link + 'static, options: HcaOptions) -> Self {
        let context = Context::open_with(link, options).unwrap();
        let pd = context.alloc_pd();
        Self { context, pd }
    }
}

/// Two devices on one link.
pub struct Testbed {
    pub a: Endpoint,
    pub b: Endpoint,
}

/// Registered memory.
pub struct TestBuffer {
    pub memory: Allocation,
    pub mr: Mr,
}

impl TestBuffer {
    fn of(end: &Endpoint, memory: Allocation) -> Self {
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

    /// Fills a range with the pattern of `seed` and returns the bytes.
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

/// Posts `count` receives of `len` bytes each, contiguous in the buffer.
pub fn post_receives(qp: &StreamQp, buffer: &TestBuffer, count: u64, len: u32) {
    for id in 0..count {
        let range = buffer.sge(id * u64::from(len), len);
        qp.post_receive(&[ReceiveRequest { id, data: &[range] }]).unwrap();
    }
}

pub fn sync(stream: &Stream) {
    stream.synchronize(test_timeout()).unwrap();
}

/// Asserts that the stream still has work after [`SHORT_WAIT`].
pub fn assert_blocked(stream: &Stream) {
    std::thread::sleep(SHORT_WAIT);
    assert!(!stream.is_idle().unwrap(), "{stream:?} should wait");
}

pub fn next(qp: &StreamQp) -> Completion {
    let completion = qp.wait_next(test_timeout()).unwrap();
    completion.unwrap_or_else(|| panic!("no completion of {:#x} in time", qp.number()))
}

/// The id of the next completion, which must be a success: stream waits also end on failures.
pub fn done(qp: &StreamQp) -> u64 {
    let completion = next(qp);
    assert!(completion.is_success(), "{completion:?}: {:?}", qp.failure());
    completion.id
}

pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < test_timeout(), "timeout: {what}");
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// A request that only completes.
pub fn nop(id: u64) -> SendRequest<'static> {
    SendRequest::new(id, warpwire::verbs::WrOp::Nop)
}
