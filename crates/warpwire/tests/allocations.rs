//! After warm-up nothing is allocated for a post, a packet or a poll.
//!
//! In a binary of its own: it counts every allocation of the process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]
#![allow(unsafe_code)] // an allocator is

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use warpwire::hca::HcaOptions;
use warpwire::link::{Hub, Link, Shm, shm};
use warpwire::mr::HostMemory;
use warpwire::verbs::{
    Access, Atomic, Completion, Context, Cq, Drive, Mr, Op, Qp, QpOptions, ReceiveRequest, Request,
    Srq, SrqOptions,
};

struct Counting;

static COUNT: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as it came.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as it came.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as it came.
        unsafe { System.realloc(at, layout, len) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Two devices, and two connections between them: one with receives of its own, one with shared ones.
struct Pair {
    contexts: [Context; 2],
    cqs: [Cq; 2],
    own: [Qp; 2],
    shared: [Qp; 2],
    srq: Srq,
    near: Mr,
    far: Mr,
}

impl Pair {
    fn new(links: [Box<dyn Link>; 2]) -> Self {
        let contexts = links.map(|link| {
            Context::open_with(link, HcaOptions { drive: Drive::Inline, ..HcaOptions::default() })
                .unwrap()
        });
        let pds = [contexts[0].pd(), contexts[1].pd()];
        let cqs = [&contexts[0], &contexts[1]].map(|context| context.create_cq(512).unwrap());
        let srq = contexts[1].create_srq(&pds[1], SrqOptions::default()).unwrap();
        let qp =
            |n: usize, options| contexts[n].create_qp(&pds[n], &cqs[n], &cqs[n], options).unwrap();
        let connected = |options: QpOptions| {
            let pair = [qp(0, QpOptions::default()), qp(1, options)];
            pair[0].connect(&pair[1].offer()).unwrap();
            pair[1].connect(&pair[0].offer()).unwrap();
            pair
        };
        let own = connected(QpOptions::default());
        let shared = connected(QpOptions { srq: Some(srq.clone()), ..QpOptions::default() });
        let [near, far] = [0, 1].map(|n: usize| {
            contexts[n].register(&pds[n], HostMemory::new(1 << 18).unwrap(), Access::ALL).unwrap()
        });
        Self { contexts, cqs, own, shared, srq, near, far }
    }

    /// A piece of work of every sort, on both connections.
    fn round(&self) {
        let large = [self.near.sge(0, 100_000)];
        let word = [self.near.sge(0, 8)];
        let two = [self.near.sge(0, 700), self.near.sge(5000, 9000)];
        let room = [self.far.sge(150_000, 10_000)];
        let receive = ReceiveRequest { id: 1, data: &room };
        self.own[1].post_receive(&[receive; 3]).unwrap();
        self.srq.post_receive(&[receive; 3]).unwrap();
        let at = self.far.remote(0);
        for qp in [&self.own[0], &self.shared[0]] {
            let work = [
                Request::new(1, Op::Write(at)).with(&large),
                Request::new(2, Op::Read(at)).with(&large),
                Request::new(3, Op::Write(at)).inline(b"inline"),
                Request::new(4, Op::Atomic(at, Atomic::FetchAdd { add: 1 })).with(&word),
                Request::new(5, Op::Send).with(&two),
                Request::new(6, Op::SendImm([1; 4])).inline(b"more"),
                Request::new(7, Op::WriteImm(at, [2; 4])).with(&word),
                Request::new(8, Op::Nop),
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

/// By packets, and without; one after the other, as the count is the process's.
#[test]
fn nothing_is_allocated_on_the_way() {
    let hub = Hub::new();
    let end = |at: &str| -> Box<dyn Link> { Box::new(hub.endpoint(at.parse().unwrap()).unwrap()) };
    rounds(Pair::new(["10.0.0.1:4791", "10.0.0.2:4791"].map(end)), 10_000, 0);
    let options = shm::Options { attend: 8, ..shm::Options::default() };
    let bind =
        |at: &str| -> Box<dyn Link> { Box::new(Shm::bind(at.parse().unwrap(), options).unwrap()) };
    rounds(Pair::new(["127.0.0.1:0", "127.0.0.1:0"].map(bind)), 1000, 1000);
}

fn rounds(pair: Pair, least_packets: u64, least_direct: u64) {
    for _ in 0..50 {
        pair.round();
    }
    let before = COUNT.load(Ordering::Relaxed);
    for _ in 0..200 {
        pair.round();
    }
    let allocated = COUNT.load(Ordering::Relaxed) - before;
    let packets = pair.contexts[0].stats().pairs.packets_sent;
    assert!(packets > least_packets, "{packets} packets");
    let direct = pair.contexts[0].stats().direct;
    assert!(direct.operations >= least_direct, "{direct:?}");
    assert_eq!(allocated, 0, "allocations in 200 rounds");
}
