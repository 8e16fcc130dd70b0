//! Soak test: buffers move and are freed at random, under all kinds of traffic over a faulty
//! network, reproducible by seed.
//!
//! Each flow is a connection with a buffer of a random kind at either end, and a model of each
//! buffer's contents. After a batch of work every byte is compared. The models never contain the
//! byte with which the simulator poisons old pages, so one such byte is a use after move.
//!
//! The test runs in a child process, where descriptors can be counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use warpwire::mem::Allocation;
use warpwire::mem::sim::{POISON, SimControl};
use warpwire::verbs::{
    Atomic, Completion, Mtu, ProgressMode, QpAttributes, QpOptions, ReceiveRequest, SendRequest,
    State, Status, WrOp,
};

use crate::registration::child;
use crate::registration::harness::{Backing, Buffer, Harness, MemKind};
use crate::verbs::fixture::{QpPair, Rng, TestLink, Testbed, connect, test_timeout};
use testkit::{Effort, cases, until};

cases!(Harness; CASES: ; change: soak);

const PLAN: &str = "loss=2%,reorder=2%,dup=2%,corrupt=1%";
const FLOWS: u64 = 4;
const ROUNDS: u64 = 24;
/// Layout of each buffer: an area to send from or write to, an area to read or receive into, words
/// for atomics.
const AREA: u64 = 16_384;
const WORDS: u64 = 2 * AREA;
const LEN: u64 = WORDS + 64;

const MEM_KINDS: [MemKind; 9] = [
    MemKind::Device,
    MemKind::DeviceEngine,
    MemKind::DeviceOnDemand,
    MemKind::DeviceAddress,
    MemKind::DeviceAddressOnDemand,
    MemKind::DmaBufStatic,
    MemKind::DmaBufDynamic,
    MemKind::AnonymousOnDemand,
    MemKind::HostHandle,
];

fn soak(_: &Harness) {
    let stdout_text = child::run("soak");
    assert!(stdout_text.contains("all bytes correct"), "{stdout_text}");
    eprintln!("{}", stdout_text.trim());
}

/// Runs in the child.
pub fn run() {
    // The duration in seconds; without one, a fixed number of seeds runs.
    let seconds = match Effort::pick("WARPWIRE_SOAK", [0, 0, 300]) {
        0 => None,
        seconds => Some(seconds),
    };
    let only = std::env::var("WARPWIRE_SEED").ok().map(|text| text.parse::<u64>().unwrap());
    let (start, counters) = (Instant::now(), Counters::default());
    let first = only.unwrap_or(1);
    // The first seed creates what exists once per process: threads, tables.
    run_seed(first, &counters);
    let (before, mut seeds) = (descriptors(), 1);
    for seed in first + 1.. {
        let enough = match seconds {
            _ if only.is_some() => true,
            Some(seconds) => start.elapsed() > Duration::from_secs(seconds),
            None => seed > 10,
        };
        if enough {
            break;
        }
        run_seed(seed, &counters);
        seeds += 1;
        assert!(descriptors() <= before, "seed {seed} left descriptors: {}", descriptors());
    }
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (moves, frees, work) =
        (count(&counters.moves), count(&counters.frees), count(&counters.work));
    let (failures, batches) = (count(&counters.failures), count(&counters.batches));
    assert!(only.is_some() || moves > 200 * seeds, "only {moves} moves");
    assert!(only.is_some() || failures > 3 * seeds, "only {failures} failures");
    println!(
        "soak: {batches} batches, {work} requests, {moves} moves, {frees} frees, \
         {failures} protection errors, all bytes correct, in {:.1?}",
        start.elapsed()
    );
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[derive(Default)]
struct Counters {
    moves: AtomicU64,
    frees: AtomicU64,
    work: AtomicU64,
    failures: AtomicU64,
    batches: AtomicU64,
}

fn run_seed(seed: u64, counters: &Counters) {
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| one_seed(seed, counters)));
    if let Err(why) = ended {
        eprintln!("seed {seed} failed: replay it with WARPWIRE_SEED={seed} and the case's name");
        std::panic::resume_unwind(why);
    }
}

fn one_seed(seed: u64, counters: &Counters) {
    let harness = Harness::new(TestLink::Loopback, None);
    {
        let testbed = harness.fixture.faulty(PLAN, seed, ProgressMode::Manual);
        let registries =
            [&testbed.a, &testbed.b].map(|end| end.context.registry().unwrap().clone());
        let mut rng = Rng::new(seed);
        let mut flows: Vec<_> =
            (0..FLOWS).map(|_| Flow::new(&harness, &testbed, &mut rng)).collect();
        // In every third seed a separate thread moves the memory; otherwise it moves between steps.
        let mover = seed.is_multiple_of(3).then(|| Mover::start(harness.control()));
        for _ in 0..ROUNDS {
            round(&harness, &testbed, &mut flows, &mut rng, mover.as_ref(), counters);
        }
        counters.moves.fetch_add(mover.map_or(0, Mover::stop), Ordering::Relaxed);
        drop(flows);
        // On a starved machine copies of the simulated GPU outlast deregistration's patience.
        until("no registration is left", || registries.iter().all(|registry| registry.is_empty()));
    }
    harness.check_nothing_left();
}

/// Work on all flows concurrently, with moves and occasional frees in between; then compares every
/// byte.
fn round(
    harness: &Harness,
    testbed: &Testbed,
    flows: &mut [Flow],
    rng: &mut Rng,
    mover: Option<&Mover>,
    counters: &Counters,
) {
    if let Some(mover) = mover {
        let movable = flows.iter().flat_map(|flow| [&flow.near, &flow.far]);
        *mover.list.lock() = movable.filter_map(Endpoint::movable).collect();
    }
    for flow in flows.iter_mut() {
        flow.post(rng);
        counters.batches.fetch_add(1, Ordering::Relaxed);
        counters.work.fetch_add(flow.batch.len() as u64, Ordering::Relaxed);
    }
    let start = Instant::now();
    while flows.iter_mut().any(|flow| !flow.is_over()) {
        if start.elapsed() > test_timeout() {
            for flow in flows.iter_mut().filter_map(|flow| (!flow.is_over()).then_some(flow)) {
                let ends = [&flow.near, &flow.far].map(|end| {
                    (
                        end.buffer.mem_kind,
                        end.buffer.mr.as_ref().map(|mr| (mr.is_live(), mr.faults())),
                    )
                });
                eprintln!("unfinished: {ends:?}, freed: {}", flow.freed.is_some());
            }
            let stats = [&testbed.a, &testbed.b].map(|end| end.context.stats().unwrap());
            panic!("a batch hangs: {stats:#?}");
        }
        testbed.step();
        let flow = rng.below(FLOWS) as usize;
        let flow = &mut flows[flow];
        match rng.below(40) {
            0 if !flow.is_over() && flow.freed.is_none() && rng.below(4) == 0 => {
                flow.free(&harness.control(), rng);
                counters.frees.fetch_add(u64::from(flow.freed.is_some()), Ordering::Relaxed);
            }
            1..=9 if mover.is_none() => {
                let end = if rng.below(2) == 0 { &flow.near } else { &flow.far };
                if let Some(memory) = end.movable().filter(|_| flow.freed.is_none()) {
                    harness.control().relocate(&memory).unwrap();
                    counters.moves.fetch_add(1, Ordering::Relaxed);
                }
            }
            _ => {}
        }
    }
    if let Some(mover) = mover {
        // Stop moving during the comparison, so that a difference is reported at its address.
        mover.list.lock().clear();
    }
    for flow in flows {
        flow.check();
        if flow.failed() || flow.freed.is_some() || rng.below(12) == 0 {
            counters.failures.fetch_add(u64::from(flow.failed()), Ordering::Relaxed);
            flow.reconnect(harness, testbed, rng);
        }
    }
}

/// A buffer and its expected contents.
struct Endpoint {
    buffer: Buffer,
    model: Vec<u8>,
}

impl Endpoint {
    fn new(
        harness: &Harness,
        end: &crate::verbs::fixture::Endpoint,
        far: bool,
        rng: &mut Rng,
    ) -> Self {
        let mem_kinds = MEM_KINDS.iter().filter(|mem_kind| !far || mem_kind.has_atomics());
        let mem_kinds: Vec<_> = mem_kinds.copied().collect();
        let mem_kind = mem_kinds[rng.below(mem_kinds.len() as u64) as usize];
        let skew = if far { 8 * rng.below(500) } else { rng.below(4000) };
        Self {
            buffer: Buffer::new(harness, end, mem_kind, LEN, skew),
            model: vec![0; LEN as usize],
        }
    }

    fn movable(&self) -> Option<Allocation> {
        self.buffer.mem_kind.may_move().then(|| self.buffer.allocation().clone())
    }

    fn freeable(&self) -> bool {
        self.buffer.mem_kind.is_device() || self.buffer.mem_kind == MemKind::AnonymousOnDemand
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Near,
    Far,
}

/// A posted work request, with offsets into the buffers.
#[derive(Clone, Copy, Debug)]
enum PostedOp {
    Write { from: u64, to: u64, len: u64 },
    Send { from: u64, to: u64, len: u64 },
    Add { word: u64, result: u64, add: u64 },
    Read { from: u64, to: u64, len: u64 },
}

struct Flow {
    conn: QpPair,
    near: Endpoint,
    far: Endpoint,
    batch: Vec<PostedOp>,
    done: Vec<Completion>,
    received: usize,
    freed: Option<Side>,
}

impl Flow {
    fn new(harness: &Harness, testbed: &Testbed, rng: &mut Rng) -> Self {
        // 17 ms on an idle machine: the copies of the simulated GPU need a CPU as well.
        let timeout = testkit::timeout_exponent(12);
        let options = QpOptions::default().with_timeout(timeout).with_mtu(Mtu::new(1024).unwrap());
        let conn = testbed.join(options);
        let near = Endpoint::new(harness, &testbed.a, false, rng);
        let far = Endpoint::new(harness, &testbed.b, true, rng);
        let (batch, done) = (Vec::new(), Vec::new());
        Self { conn, near, far, batch, done, received: 0, freed: None }
    }

    /// Writes new data and posts a batch of work on it. Reads come last, because a read is not
    /// ordered against later writes.
    fn post(&mut self, rng: &mut Rng) {
        let at = rng.below(AREA - 2000);
        let fresh: Vec<u8> = (0..2000).map(|_| rng.below(u64::from(POISON)) as u8).collect();
        self.near.buffer.write(at, &fresh);
        self.near.model[at as usize..][..2000].copy_from_slice(&fresh);
        (self.batch, self.done, self.received) = (Vec::new(), Vec::new(), 0);
        for _ in 0..1 + rng.below(4) {
            let len = 1 + rng.below(AREA / 2);
            let (from, to) = (rng.below(AREA - len), rng.below(AREA - len));
            self.batch.push(match rng.below(3) {
                0 => PostedOp::Write { from, to, len },
                1 => PostedOp::Send { from, to: AREA + to, len },
                _ => {
                    let (word, result) = (WORDS + 8 * rng.below(8), WORDS + 8 * rng.below(8));
                    PostedOp::Add { word, result, add: 1 + rng.below(1000) }
                }
            });
        }
        if rng.below(2) == 0 {
            let len = 1 + rng.below(AREA / 2);
            let (from, to) = (rng.below(2 * AREA - len), AREA + rng.below(AREA - len));
            self.batch.push(PostedOp::Read { from, to, len });
        }
        let (near, far) = (self.near.buffer.mr(), self.far.buffer.mr());
        for (id, task) in self.batch.iter().enumerate() {
            let id = id as u64;
            let (op, data) = match *task {
                PostedOp::Write { from, to, len } => {
                    (WrOp::Write(far.remote(to)), near.sge(from, len as u32))
                }
                PostedOp::Send { from, to, len } => {
                    let into = [far.sge(to, len as u32)];
                    let receive = ReceiveRequest { id, data: &into };
                    self.conn.b.qp.post_receive(&[receive]).unwrap();
                    (WrOp::Send, near.sge(from, len as u32))
                }
                PostedOp::Add { word, result, add } => {
                    let atomic = Atomic::FetchAdd { add };
                    (WrOp::Atomic(far.remote(word), atomic), near.sge(result, 8))
                }
                PostedOp::Read { from, to, len } => {
                    (WrOp::Read(far.remote(from)), near.sge(to, len as u32))
                }
            };
            self.conn.a.qp.post_send(&[SendRequest::new(id, op).with(&[data])]).unwrap();
        }
    }

    fn sends(&self) -> usize {
        self.batch.iter().filter(|task| matches!(task, PostedOp::Send { .. })).count()
    }

    fn failed(&self) -> bool {
        self.done.iter().any(|completion| !completion.is_success())
    }

    /// Whether all sends have completed and, unless one failed, all receives.
    fn is_over(&mut self) -> bool {
        let mut some = [Completion::EMPTY; 16];
        let count = self.conn.a.sends.poll(&mut some).unwrap();
        self.done.extend_from_slice(&some[..count]);
        let count = self.conn.b.receives.poll(&mut some).unwrap();
        self.received += some[..count].iter().filter(|completion| completion.is_success()).count();
        if self.freed.is_none() {
            assert!(some[..count].iter().all(Completion::is_success), "{:?}", &some[..count]);
        }
        self.done.len() == self.batch.len() && (self.failed() || self.received == self.sends())
    }

    /// Frees or unmaps the memory of either end.
    fn free(&mut self, control: &SimControl, rng: &mut Rng) {
        let side = if rng.below(2) == 0 { Side::Near } else { Side::Far };
        let end = if side == Side::Near { &self.near } else { &self.far };
        if !end.freeable() {
            return;
        }
        match &end.buffer.backing {
            Backing::Device(memory) => control.force_free(memory).unwrap(),
            Backing::Pages(pages) => {
                // All pages of the registered range; some guard bytes may stay mapped.
                let first = end.buffer.start as usize / 4096 * 4096;
                pages.unmap(first, (end.buffer.len as usize).next_multiple_of(4096) + 4096);
            }
            Backing::Host(_) => return,
        }
        self.freed = Some(side);
    }

    /// The contents of both buffers before the batch and after each of its operations.
    fn versions(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut all = vec![(self.near.model.clone(), self.far.model.clone())];
        for task in &self.batch {
            let (mut near, mut far) = all[all.len() - 1].clone();
            let range = |at: u64, len: u64| at as usize..(at + len) as usize;
            match *task {
                PostedOp::Write { from, to, len } | PostedOp::Send { from, to, len } => {
                    far[range(to, len)].copy_from_slice(&near[range(from, len)]);
                }
                PostedOp::Add { word, result, add } => {
                    let old = u64::from_ne_bytes(far[range(word, 8)].try_into().unwrap());
                    near[range(result, 8)].copy_from_slice(&old.to_ne_bytes());
                    far[range(word, 8)].copy_from_slice(&(old + add).to_ne_bytes());
                }
                PostedOp::Read { from, to, len } => {
                    near[range(to, len)].copy_from_slice(&far[range(from, len)]);
                }
            }
            all.push((near, far));
        }
        all
    }

    /// Asserts that statuses and bytes are among the possible ones.
    fn check(&mut self) {
        let good = self.done.iter().take_while(|completion| completion.is_success()).count();
        for (n, completion) in self.done.iter().enumerate() {
            assert_eq!(completion.id, n as u64, "in order");
            let status = completion.status;
            let wanted = match (n.cmp(&good), self.freed) {
                (std::cmp::Ordering::Less, _) => status == Status::Success,
                (std::cmp::Ordering::Greater, _) => status == Status::Flushed,
                (_, Some(Side::Near)) => status == Status::LocalProtection,
                // For a receive buffer it is `RemoteOperation`. If an ACK was lost, the failure of
                // a later request fails the earlier one too.
                (_, Some(Side::Far)) => {
                    let sends = self.batch.iter().any(|task| matches!(task, PostedOp::Send { .. }));
                    status == Status::RemoteAccess || sends && status == Status::RemoteOperation
                }
                (_, None) => false,
            };
            let stats = [&self.conn.a, &self.conn.b].map(|side| side.qp.stats());
            let mem_kinds = [self.near.buffer.mem_kind, self.far.buffer.mem_kind];
            assert!(
                wanted,
                "{completion:?} of {:?}, {:?} of {mem_kinds:?} was freed: {stats:?}, {:?}",
                self.batch,
                self.freed,
                self.far.buffer.mr().faults()
            );
        }
        let versions = self.versions();
        let possible = &versions[good..];
        for (side, end) in [(Side::Near, &mut self.near), (Side::Far, &mut self.far)] {
            if self.freed == Some(side) {
                continue;
            }
            let found = end.buffer.read(0, LEN as usize);
            for (at, byte) in found.iter().enumerate() {
                let matches = |version: &(Vec<u8>, Vec<u8>)| match side {
                    Side::Near => version.0[at] == *byte,
                    Side::Far => version.1[at] == *byte,
                };
                assert!(
                    possible.iter().any(matches),
                    "{side:?} {:?}: byte {at} is {byte:#x}, after {good} of {:?}",
                    end.buffer.mem_kind,
                    self.batch
                );
                assert!(*byte != POISON || at as u64 >= WORDS, "a poisoned byte: use after move");
            }
            end.buffer.check_guards();
            end.model = found;
        }
    }

    /// Resets the connection and replaces buffers.
    fn reconnect(&mut self, harness: &Harness, testbed: &Testbed, rng: &mut Rng) {
        for side in [&self.conn.a, &self.conn.b] {
            side.qp.modify(&QpAttributes::new(State::Reset)).unwrap();
        }
        // After a free, the other end's buffer stays, with its contents.
        let freed = self.freed.take();
        if freed != Some(Side::Far) {
            self.near = Endpoint::new(harness, &testbed.a, false, rng);
        }
        if freed != Some(Side::Near) {
            self.far = Endpoint::new(harness, &testbed.b, true, rng);
        }
        connect(&self.conn.a.qp, &self.conn.b.qp);
        let mut some = [Completion::EMPTY; 16];
        while self.conn.a.sends.poll(&mut some).unwrap() > 0 {}
        while self.conn.b.receives.poll(&mut some).unwrap() > 0 {}
    }
}

/// A thread that keeps moving all allocations in `list`.
struct Mover {
    list: Arc<Mutex<Vec<Allocation>>>,
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<u64>,
}

impl Mover {
    fn start(control: SimControl) -> Self {
        let (list, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (mine, ended) = (list.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut moves = 0;
            while !ended.load(Ordering::Relaxed) {
                // Under the lock, so that memory removed from the list no longer moves.
                let list = mine.lock();
                for memory in &*list {
                    // It may have been freed.
                    moves += u64::from(control.relocate(memory).is_ok());
                }
                drop(list);
                std::thread::sleep(Duration::from_micros(200));
            }
            moves
        });
        Self { list, stop, thread }
    }

    fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}
