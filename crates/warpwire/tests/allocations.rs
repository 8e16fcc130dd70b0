//! After warm-up, no post, packet or poll allocates, with every kind of registered memory.
//!
//! The cases run one at a time, because they count the allocations of the whole process.
#![allow(unsafe_code)] // to register memory by its address

#[path = "../../proto/benches/pump/mod.rs"]
mod pump;

use pump::{Pump, WORK, len_of};
use testkit::{Collector, CountingAllocator, Suite, cases};
use warpwire::hca::HcaOptions;
use warpwire::link::{Hub, Link, Shm, ShmOptions};
use warpwire::mem::sim::{Sim, SimConfig};
use warpwire::mr::HostMemory;
use warpwire::verbs::{
    Access, AddressHandle, Atomic, AttachMode, Completion, Context, Cq, Mr, Pd, PostError,
    ProgressMode, Qp, QpOptions, ReceiveRequest, SendRequest, Service, Srq, SrqOptions, WrOp,
};

pub const SUITE: Suite = Suite { name: "allocations", env: &[], collect, role: |_| {} };

cases!(CASES: the_data_path_does_not_allocate, the_protocol_does_not_allocate,
    full_queues_do_not_allocate, the_counter_counts);

fn collect(suite: &mut Collector) {
    suite.run_serially();
    suite.add("", CASES, |case| (case.run)(&()));
}

/// How the memory at both ends was registered.
#[derive(Clone, Copy, Debug, PartialEq)]
enum MemKind {
    Handle,
    Address,
    OnDemand,
    DeviceAddress,
    DmaBuf(AttachMode),
}

/// Owns the memory, which must outlive a registration by address.
type KeepAlive = Box<dyn std::any::Any>;

const LEN: u64 = 1 << 18;

fn register(context: &Context, pd: &Pd, mem_kind: MemKind) -> (Mr, KeepAlive) {
    let by_address = |address: u64, access| {
        // SAFETY: the memory is kept alive beside the registration, and is only copied.
        unsafe { context.register_address(pd, address, LEN, None, access) }.unwrap()
    };
    let host = HostMemory::new(LEN).unwrap();
    let device = || {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        gpu.alloc(LEN).unwrap()
    };
    match mem_kind {
        MemKind::Handle => {
            (context.register(pd, host.clone(), Access::ALL).unwrap(), Box::new(host))
        }
        MemKind::Address => (by_address(host.address(), Access::ALL), Box::new(host)),
        MemKind::OnDemand => {
            let rights = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
            (by_address(host.address(), rights | Access::ON_DEMAND), Box::new(host))
        }
        MemKind::DeviceAddress => {
            let memory = device();
            (by_address(memory.address().raw(), Access::ALL), Box::new(memory))
        }
        MemKind::DmaBuf(attach) => {
            let memory = device();
            let buffer = memory.export_dmabuf(0, LEN).unwrap();
            let range = (&buffer).into();
            let mr = context.register_dmabuf(pd, range, None, Access::ALL, attach).unwrap();
            (mr, Box::new(memory))
        }
    }
}

/// Two devices with two connections between them: one with its own receive queue, one with a
/// shared receive queue.
struct Pair {
    contexts: [Context; 2],
    cqs: [Cq; 2],
    own: [Qp; 2],
    shared: [Qp; 2],
    srq: Srq,
    near: Mr,
    far: Mr,
    mem_kind: MemKind,
    _keep: [KeepAlive; 2],
}

impl Pair {
    fn new(mem_kind: MemKind, links: [Box<dyn Link>; 2]) -> Self {
        let contexts = links.map(|link| Context::open_with(link, inline()).unwrap());
        let pds = [contexts[0].alloc_pd(), contexts[1].alloc_pd()];
        let cqs = [&contexts[0], &contexts[1]].map(|context| context.create_cq(512).unwrap());
        let srq = contexts[1].create_srq(&pds[1], SrqOptions::default()).unwrap();
        let qp =
            |n: usize, options| contexts[n].create_qp(&pds[n], &cqs[n], &cqs[n], options).unwrap();
        let connected = |options: QpOptions| {
            let pair = [qp(0, QpOptions::default()), qp(1, options)];
            pair[0].connect(&pair[1].endpoint()).unwrap();
            pair[1].connect(&pair[0].endpoint()).unwrap();
            pair
        };
        let own = connected(QpOptions::default());
        let shared = connected(QpOptions::default().with_srq(srq.clone()));
        let [(near, first), (far, second)] =
            [0, 1].map(|n: usize| register(&contexts[n], &pds[n], mem_kind));
        let _keep = [first, second];
        Self { contexts, cqs, own, shared, srq, near, far, mem_kind, _keep }
    }

    /// Posts one work request of every kind on both connections and polls for all completions.
    fn round(&self) {
        let large = [self.near.sge(0, 100_000)];
        let word = [self.near.sge(0, 8)];
        let two = [self.near.sge(0, 700), self.near.sge(5000, 9000)];
        let room = [self.far.sge(150_000, 10_000)];
        let receive = ReceiveRequest { id: 1, data: &room };
        self.own[1].post_receive(&[receive; 3]).unwrap();
        self.srq.post_receive(&[receive; 3]).unwrap();
        let at = self.far.remote(0);
        // On-demand memory is copied by the kernel, which offers no atomics.
        let word_op = match self.mem_kind {
            MemKind::OnDemand => WrOp::Read(at),
            _ => WrOp::Atomic(at, Atomic::FetchAdd { add: 1 }),
        };
        for qp in [&self.own[0], &self.shared[0]] {
            let work = [
                SendRequest::new(1, WrOp::Write(at)).with(&large),
                SendRequest::new(2, WrOp::Read(at)).with(&large),
                SendRequest::new(3, WrOp::Write(at)).inline(b"inline"),
                SendRequest::new(4, word_op).with(&word),
                SendRequest::new(5, WrOp::Send).with(&two),
                SendRequest::new(6, WrOp::SendImm([1; 4])).inline(b"more"),
                SendRequest::new(7, WrOp::WriteImm(at, [2; 4])).with(&word),
                SendRequest::new(8, WrOp::Nop),
            ];
            qp.post_send(&work).unwrap();
        }
        let mut done = [Completion::EMPTY; 16];
        let mut missing = [16, 6];
        while missing != [0, 0] {
            for (cq, missing) in self.cqs.iter().zip(&mut missing) {
                let count = cq.poll(&mut done).unwrap();
                assert!(done[..count].iter().all(Completion::is_success));
                *missing -= count;
            }
        }
    }
}

fn inline() -> HcaOptions {
    HcaOptions::default().with_progress_mode(ProgressMode::Manual)
}

/// A device that sends datagrams to itself, through a shared receive queue.
struct Datagrams {
    context: Context,
    cq: Cq,
    qp: Qp,
    srq: Srq,
    memory: Mr,
    to: AddressHandle,
}

impl Datagrams {
    fn new() -> Self {
        let link = Hub::new().endpoint("10.0.0.1:4791".parse().unwrap()).unwrap();
        let context = Context::open_with(link, inline()).unwrap();
        let (pd, cq) = (context.alloc_pd(), context.create_cq(512).unwrap());
        let srq = context.create_srq(&pd, SrqOptions::default()).unwrap();
        let options = QpOptions::default().with_service(Service::Ud).with_srq(srq.clone());
        let qp = context.create_qp(&pd, &cq, &cq, options).unwrap();
        qp.activate_ud(7).unwrap();
        let memory = HostMemory::new(1 << 18).unwrap();
        let memory = context.register(&pd, memory, Access::ALL).unwrap();
        let to = context.create_address_handle(context.path().local).unwrap();
        Self { context, cq, qp, srq, memory, to }
    }

    fn round(&self) {
        let (room, data) = ([self.memory.sge(0, 2048)], [self.memory.sge(4096, 1000)]);
        self.srq.post_receive(&[ReceiveRequest { id: 1, data: &room }; 20]).unwrap();
        let request = SendRequest::new(2, WrOp::Send).to(&self.to, self.qp.number(), 7);
        self.qp.post_send(&[request.with(&data); 10]).unwrap();
        self.qp.post_send(&[request.inline(b"small"); 10]).unwrap();
        let (mut done, mut missing) = ([Completion::EMPTY; 16], 40);
        while missing > 0 {
            let count = self.cq.poll(&mut done).unwrap();
            assert!(done[..count].iter().all(Completion::is_success));
            missing -= count;
        }
    }
}

/// With packets and with direct access; one after the other, because the counter is per process.
fn the_data_path_does_not_allocate() {
    for mem_kind in [
        MemKind::Handle,
        MemKind::Address,
        MemKind::OnDemand,
        MemKind::DeviceAddress,
        MemKind::DmaBuf(AttachMode::Static),
        MemKind::DmaBuf(AttachMode::Dynamic),
    ] {
        let hub = Hub::new();
        let end =
            |at: &str| -> Box<dyn Link> { Box::new(hub.endpoint(at.parse().unwrap()).unwrap()) };
        let pair = Pair::new(mem_kind, ["10.0.0.1:4791", "10.0.0.2:4791"].map(end));
        rounds(&pair, mem_kind, 10_000, 0);
        if mem_kind == MemKind::DmaBuf(AttachMode::Dynamic) {
            assert_eq!(pair.near.faults().faults, 1, "memory is mapped by one fault");
        }
    }
    let options = ShmOptions::default().with_control_poll_interval(8);
    let bind = |at: &str| -> Box<dyn Link> {
        Box::new(Shm::bind(at.parse().unwrap(), options.clone()).unwrap())
    };
    rounds(
        &Pair::new(MemKind::Handle, ["127.0.0.1:0", "127.0.0.1:0"].map(bind)),
        MemKind::Handle,
        1000,
        1000,
    );
    datagram_rounds();
}

/// Allocations of the process in 200 rounds: the smallest of three counts, because threads that
/// have nothing to do with it may be starting or ending.
fn allocations_of(mut round: impl FnMut()) -> u64 {
    let counts = (0..3).map(|_| {
        let before = CountingAllocator::process_allocations();
        (0..200).for_each(|_| round());
        CountingAllocator::process_allocations() - before
    });
    counts.min().unwrap_or(0)
}

fn rounds(pair: &Pair, mem_kind: MemKind, min_packets: u64, min_direct: u64) {
    for _ in 0..50 {
        pair.round();
    }
    let allocated = allocations_of(|| pair.round());
    let packets = pair.contexts[0].stats().unwrap().pairs.packets_sent;
    assert!(packets > min_packets, "{packets} packets");
    let direct = pair.contexts[0].stats().unwrap().direct;
    assert!(direct.operations >= min_direct, "{direct:?}");
    assert_eq!(allocated, 0, "allocations in 200 rounds with {mem_kind:?}");
}

fn datagram_rounds() {
    let datagrams = Datagrams::new();
    for _ in 0..50 {
        datagrams.round();
    }
    let allocated = allocations_of(|| datagrams.round());
    assert_eq!(datagrams.context.stats().unwrap().pairs.packets_sent, 13_000);
    assert_eq!(allocated, 0, "allocations in 200 rounds of datagrams");
}

/// Invariant 5 of the protocol: once connected, a queue pair allocates nothing, for any operation.
/// The test is here because the counting allocator is unsafe code, which the protocol crate bans.
fn the_protocol_does_not_allocate() {
    for (name, op, packets) in WORK {
        let mut pump = Pump::new(1024, 64);
        let before = CountingAllocator::thread_allocations();
        pump.run(op, len_of(op, packets, 1024), 10_000);
        assert_eq!(CountingAllocator::thread_allocations() - before, 0, "{name}");
    }
}

/// A program that posts until a full queue has room pays for no error text.
fn full_queues_do_not_allocate() {
    let hub = Hub::new();
    let end = |at: &str| -> Box<dyn Link> { Box::new(hub.endpoint(at.parse().unwrap()).unwrap()) };
    let pair = Pair::new(MemKind::Handle, ["10.0.0.1:4791", "10.0.0.2:4791"].map(end));
    let (nop, receive) = (SendRequest::new(1, WrOp::Nop), ReceiveRequest { id: 1, data: &[] });
    while pair.own[0].post_send(&[nop]).is_ok() {}
    while pair.own[1].post_receive(&[receive]).is_ok() {}
    while pair.srq.post_receive(&[receive]).is_ok() {}
    let before = CountingAllocator::thread_allocations();
    for _ in 0..1000 {
        assert_eq!(pair.own[0].post_send(&[nop]), Err(PostError::Full));
        assert_eq!(pair.own[0].batch().and_then(|mut b| b.push(&nop)), Err(PostError::Full));
        assert_eq!(pair.own[1].post_receive(&[receive]), Err(PostError::Full));
        assert_eq!(pair.srq.post_receive(&[receive]), Err(PostError::Full));
    }
    assert_eq!(CountingAllocator::thread_allocations() - before, 0);
    // As an error of the library it has a text, which is allocated.
    let error = warpwire::Error::from(pair.own[0].post_send(&[nop]).unwrap_err());
    assert!(CountingAllocator::thread_allocations() > before);
    assert!(error.to_string().contains("poll completions first"), "{error}");
}

fn the_counter_counts() {
    let before =
        [CountingAllocator::thread_allocations(), CountingAllocator::process_allocations()];
    drop(std::hint::black_box(Box::new(7)));
    let after = [CountingAllocator::thread_allocations(), CountingAllocator::process_allocations()];
    assert!(after[0] > before[0] && after[1] > before[1]);
}
