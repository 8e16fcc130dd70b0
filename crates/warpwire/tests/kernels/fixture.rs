//! The fixture of a case: a GPU, two devices on a link, and a queue pair for kernels on each.
#![allow(unsafe_code)] // launches, each with a SAFETY comment

use std::time::Duration;

use warpwire::hca::HcaOptions;
use warpwire::link::{Hub, Link, Shm, ShmOptions};
use warpwire::mem::sim::{Sim, SimConfig, SimControl};
use warpwire::mem::{Allocation, Backend, Device, Kernel, Launch, MemoryKind, Stream, cuda};
use warpwire::stream::kernel::Kernels;
use warpwire::stream::{KernelQp, KernelQpOptions};
use warpwire::verbs::{Access, Context, Mr, Pd, ProgressMode, QpOptions, Remote};

use crate::kernels::calls::{self, at};

/// Longer than any successful operation takes.
pub fn test_timeout() -> Duration {
    testkit::deadline(Duration::from_secs(40))
}
/// Bytes of memory per end.
pub const LEN: u64 = 64 << 10;
/// Offset of the word that the peer adds to, behind that memory.
pub const WORD: u64 = LEN;

/// The links that cases run over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestLink {
    Loopback,
    Shm,
}

impl TestLink {
    pub const ALL: [(Self, &'static str); 2] = [(Self::Loopback, "loopback"), (Self::Shm, "shm")];

    pub fn ends(self) -> [Box<dyn Link>; 2] {
        let hub = Hub::new();
        [1, 2].map(|n| match self {
            Self::Loopback => {
                let address = format!("10.0.0.{n}:4791").parse().unwrap();
                Box::new(hub.endpoint(address).unwrap()) as Box<dyn Link>
            }
            Self::Shm => {
                let options = ShmOptions::default().with_control_poll_interval(1);
                Box::new(Shm::bind("127.0.0.1:0".parse().unwrap(), options).unwrap())
            }
        })
    }
}

/// The progress mode that kernels need.
pub fn threaded() -> HcaOptions {
    // A longer spin would take CPU time from the threads that are waited for, where cores are few.
    let progress_mode = ProgressMode::Thread { spin: Duration::from_micros(50), core: None };
    HcaOptions::default().with_progress_mode(progress_mode)
}

pub fn contexts(test_link: TestLink) -> [Context; 2] {
    test_link.ends().map(|link| Context::open_with(link, threaded()).unwrap())
}

pub struct Fixture {
    pub test_link: TestLink,
    pub backend: Backend,
    pub gpu: Device,
    pub second: Option<Device>,
    pub kernels: Kernels,
    found: [(&'static str, Kernel); calls::NAMES.len()],
    sim: Option<Sim>,
}

impl Fixture {
    pub fn new(backend: Backend, test_link: TestLink) -> Self {
        let (gpu, second, sim) = match backend {
            Backend::Sim => {
                let config = SimConfig::default().with_memory(1 << 30);
                let sim = Sim::start(config).unwrap();
                (sim.device(0).unwrap(), sim.device(1).ok(), Some(sim))
            }
            Backend::Cuda => (cuda::device(0).unwrap(), None, None),
        };
        let module = calls::load(&gpu).unwrap();
        // All of them now: CUDA cannot load functions while streams are busy.
        let found = calls::NAMES.map(|name| (name, module.kernel(name).unwrap()));
        let kernels = Kernels::load(&gpu).unwrap();
        Self { test_link, backend, gpu, second, kernels, found, sim }
    }

    pub fn kernel(&self, name: &str) -> Kernel {
        self.found.iter().find(|(known, _)| *known == name).unwrap().1.clone()
    }

    pub fn options(&self) -> KernelQpOptions {
        KernelQpOptions::default()
            .with_send_depth(16)
            .with_receive_depth(8)
            .with_kernels(self.kernels.clone())
            .with_wait_timeout(test_timeout())
    }

    /// The fault injection interface of the simulated GPU.
    pub fn control(&self) -> Option<SimControl> {
        self.sim.as_ref().map(|sim| sim.control(0).unwrap())
    }

    /// Two connected ends.
    pub fn ends(&self) -> [Endpoint; 2] {
        self.ends_with(self.options())
    }

    pub fn ends_with(&self, options: KernelQpOptions) -> [Endpoint; 2] {
        self.connected(contexts(self.test_link), options)
    }

    /// The same between these contexts, which may be one.
    pub fn connected(&self, contexts: [Context; 2], options: KernelQpOptions) -> [Endpoint; 2] {
        self.connected_with(contexts, MemoryKind::Plain, options)
    }

    /// Two connected ends whose memory can be mapped by other queue pairs of this process.
    pub fn shareable_ends(&self, options: KernelQpOptions) -> [Endpoint; 2] {
        self.connected_with(contexts(self.test_link), MemoryKind::Vmm, options)
    }

    /// The same with memory of this kind.
    pub fn connected_with(
        &self,
        contexts: [Context; 2],
        kind: MemoryKind,
        options: KernelQpOptions,
    ) -> [Endpoint; 2] {
        let ends =
            contexts.map(|context| Endpoint::with_kind(context, &self.gpu, kind, options.clone()));
        let [a, b] = &ends;
        a.qp.connect(&b.qp.endpoint()).unwrap();
        b.qp.connect(&a.qp.endpoint()).unwrap();
        a.write_params(b.mr.remote(0), b.mr.remote(WORD));
        b.write_params(a.mr.remote(0), a.mr.remote(WORD));
        ends
    }
}

/// One end: a context with a queue pair for kernels and GPU memory.
pub struct Endpoint {
    pub qp: KernelQp,
    pub memory: Allocation,
    pub mr: Mr,
    /// The parameters and results of kernels.
    pub list: Allocation,
    pub _pd: Pd,
    pub _context: Context,
}

impl Endpoint {
    pub fn new(context: Context, gpu: &Device, options: KernelQpOptions) -> Self {
        Self::with_kind(context, gpu, MemoryKind::Plain, options)
    }

    pub fn with_kind(
        context: Context,
        gpu: &Device,
        kind: MemoryKind,
        options: KernelQpOptions,
    ) -> Self {
        let pd = context.alloc_pd();
        let qp = KernelQp::create(&context, &pd, gpu, options).unwrap();
        let memory = gpu.alloc_kind(LEN + 4096, kind).unwrap();
        memory.write(0, &vec![0; memory.len() as usize]).unwrap();
        let mr = context.register(&pd, memory.whole().unwrap(), Access::ALL).unwrap();
        let list = gpu.alloc(4096).unwrap();
        list.write(0, &[0; 4096]).unwrap();
        Self { qp, memory, mr, list, _pd: pd, _context: context }
    }

    /// Fills in the parameter list.
    pub fn write_params(&self, there: Remote, word: Remote) {
        for (param_index, value) in [
            (at::HERE, self.mr.iova()),
            (at::HERE_KEY, self.mr.lkey().into()),
            (at::THERE, there.address),
            (at::THERE_KEY, there.rkey.into()),
            (at::WORD, word.address),
            (at::WORD_KEY, word.rkey.into()),
            (at::OWN_WORD, self.memory.address().raw() + WORD),
            (at::TIMEOUT, test_timeout().as_nanos() as u64),
            (at::BAD_KEY, u64::from(there.rkey ^ 0x100)),
        ] {
            self.set_param(param_index, value);
        }
    }

    pub fn set_param(&self, param_index: u64, value: u64) {
        self.list.write(param_index * 8, &value.to_le_bytes()).unwrap();
    }

    pub fn results<const N: usize>(&self) -> [i64; N] {
        let mut words = [0; N];
        for (number, word) in words.iter_mut().enumerate() {
            let mut bytes = [0; 8];
            self.list.read((at::RESULTS + number as u64) * 8, &mut bytes).unwrap();
            *word = i64::from_le_bytes(bytes);
        }
        words
    }

    pub fn word(&self) -> u64 {
        self.read64(WORD)
    }

    pub fn read64(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.memory.read(at, &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }

    pub fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(at, &mut bytes).unwrap();
        bytes
    }

    /// Starts a kernel of the suite with the handle, the list and these arguments.
    pub fn start(&self, stream: &Stream, kernel: &Kernel, threads: u32, args: &[u64]) {
        let launch = self.qp.pass(Launch::new(kernel).threads(threads)).unwrap();
        let launch = launch.region(&self.list.whole().unwrap());
        let launch = args.iter().fold(launch, |launch, value| launch.value(*value));
        // SAFETY: the suite's kernels access the handle, the list and the memory that the list
        // refers to; the case keeps the ends alive until the stream is done.
        unsafe { stream.launch(launch.keep_alive(&self.memory.whole().unwrap())) }.unwrap();
    }
}

/// A connection with few, short retries.
pub fn short_timeouts() -> QpOptions {
    QpOptions::default().with_timeout(8).with_retry_count(1)
}

/// A pattern in which every byte depends on its position.
pub fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed).collect()
}
