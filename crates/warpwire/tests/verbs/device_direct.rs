//! Direct access to a peer's device memory: the GPU copies, ordered with other work, with the
//! protocol's statuses, and revoked in time.
//!
//! Every case runs over every link: without direct access, packets must give the same result.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use warpwire::mem::Allocation;
use warpwire::mem::sim::{Sim, SimConfig};
use warpwire::verbs::{
    Access, Atomic, Fence, QpAttributes, QpOptions, ReceiveRequest, Remote, SendRequest, State,
    Status, WrOp,
};

use crate::verbs::fixture::{
    Endpoint, Fixture, Kind, QpPair, TestBuffer, Testbed, is_unused, same, short_timeouts,
    test_timeout,
};
use testkit::{cases, deadline};

cases!(Fixture; CASES:
    device_copies_where_possible,
    device_copies_of_every_size,
    device_copies_between_two_gpus,
    device_copies_by_each_gpu_of_a_process,
    device_copies_keep_their_order,
    device_copies_that_overlap_are_ordered,
    device_copies_are_gathered,
    device_copies_end_with_the_registration,
    device_copies_end_with_the_queue_pair,
    device_copies_follow_memory_that_moves,
    device_copies_fail_with_freed_memory,
    device_copies_fail_with_the_device,
);

const LEN: u64 = 1 << 20;
/// Long enough for a copy of the GPU.
const LARGE: u32 = 64 << 10;

/// Two connected ends with device memory; `new` writes until the peer's memory is mapped.
struct Transfer {
    testbed: Testbed,
    conn: QpPair,
    near: TestBuffer,
    far: TestBuffer,
}

fn operations(end: &Endpoint) -> u64 {
    end.context.stats().unwrap().direct.operations
}

impl Transfer {
    fn new(fixture: &Fixture, options: QpOptions) -> Self {
        let testbed = fixture.testbed();
        let conn = testbed.join(options);
        let memory = |end| fixture.memory(end, Kind::Window, LEN, Access::ALL);
        let (near, far) = (memory(&testbed.a), memory(&testbed.b));
        let transfer = Self { testbed, conn, near, far };
        transfer.warm_up(fixture, &transfer.conn, transfer.far.mr.remote(0));
        transfer
    }

    /// Writes until a write is direct, on links with direct access; otherwise writes once.
    fn warm_up(&self, fixture: &Fixture, conn: &QpPair, to: Remote) {
        let before = operations(&self.testbed.a);
        let (start, data) = (Instant::now(), [self.near.mr.sge(0, LARGE)]);
        loop {
            let write = SendRequest::new(1, WrOp::Write(to)).with(&data);
            conn.a.qp.post_send(&[write]).unwrap();
            self.testbed.done(&conn.a.sends, 1);
            if !fixture.test_link.is_direct() || operations(&self.testbed.a) > before {
                return;
            }
            let stats = self.testbed.a.context.stats().unwrap().direct;
            let path = conn.a.qp.path().unwrap();
            assert!(start.elapsed() < test_timeout(), "never direct: {path}; {stats:?}");
        }
    }

    /// Executes the request; returns whether it was direct.
    fn is_direct(&self, request: SendRequest<'_>) -> bool {
        let before = operations(&self.testbed.a);
        self.conn.a.qp.post_send(&[request]).unwrap();
        self.testbed.done(&self.conn.a.sends, request.id);
        operations(&self.testbed.a) > before
    }
}

fn device_copies_where_possible(fixture: &Fixture) {
    let transfer = Transfer::new(fixture, QpOptions::default());
    let Transfer { testbed, conn, near, far } = &transfer;
    let direct = fixture.test_link.is_direct();
    let (remote, large, small) = (far.mr.remote(64), near.mr.sge(0, LARGE), near.mr.sge(0, 8));
    for op in [WrOp::Write(remote), WrOp::Read(remote)] {
        let packets = conn.a.qp.stats().unwrap().packets_sent;
        assert_eq!(transfer.is_direct(SendRequest::new(1, op).with(&[large])), direct, "{op:?}");
        let sent = conn.a.qp.stats().unwrap().packets_sent - packets;
        assert_eq!(sent > 0, !direct, "{sent} packets for {op:?}");
        // By the CPU, through a window.
        assert_eq!(transfer.is_direct(SendRequest::new(1, op).with(&[small])), direct, "{op:?}");
    }
    let add = WrOp::Atomic(remote, Atomic::FetchAdd { add: 1 });
    assert!(!transfer.is_direct(SendRequest::new(1, add).with(&[small])));
    // Between host and device memory, and where the owner wants no copies in place.
    let host = fixture.host(&testbed.a, LEN);
    let staged = fixture.memory(&testbed.a, Kind::Staged, LEN, Access::ALL);
    let theirs = fixture.memory(&testbed.b, Kind::Staged, LEN, Access::ALL);
    for (local, remote) in [(&host, far), (&staged, far), (near, &theirs)] {
        let wanted = local.pattern(0, LARGE as usize, 5);
        let data = [local.mr.sge(0, LARGE)];
        let write = SendRequest::new(2, WrOp::Write(remote.mr.remote(0))).with(&data);
        assert!(!(0..3).any(|_| transfer.is_direct(write)));
        same(&remote.read(0, LARGE as usize), &wanted, "a write by packets");
    }
    let (mine, theirs) =
        (testbed.a.context.stats().unwrap().direct, testbed.b.context.stats().unwrap().direct);
    assert_eq!((theirs.by_peers, theirs.bytes_by_peers), (mine.operations, mine.bytes));
    assert_eq!(mine.not.contains_key("small"), direct, "{:?}", mine.not);
    let path = conn.a.qp.path().unwrap().why;
    assert_eq!(path.contains("of device memory: 1"), direct, "{path}");
    testbed.check_traffic(conn);
}

fn device_copies_of_every_size(fixture: &Fixture) {
    let transfer = Transfer::new(fixture, QpOptions::default());
    let Transfer { testbed, conn, near, far } = &transfer;
    let mut seed = 7;
    let short = [1, 2, 7, 8, 9, 100, 256, 257, 4096, 16_383];
    let long = [16_384, 16_385, 16_391, 20_001, 65_536, 65_537, 131_072, 300_003];
    for len in short.into_iter().chain(long) {
        for (from, to) in [(0, 0), (1, 0), (0, 3), (5, 5), (4, 8)] {
            seed += 1;
            let wanted = near.pattern(from, len, seed);
            far.write(0, &vec![0xee; len + 64]);
            // In three segments: all of it, once more, in another order of lengths.
            let (a, b) = (len as u32 / 3, len as u32 / 2);
            let sge = |at: u32, len: u32| near.mr.sge(from + u64::from(at), len);
            let data = [sge(0, a), sge(a, b - a), sge(b, len as u32 - b)];
            for data in [&data[..], &[sge(0, len as u32)]] {
                let op = WrOp::Write(far.mr.remote(16 + to));
                transfer.is_direct(SendRequest::new(seed, op).with(data));
                same(&far.read(16 + to, len), &wanted, "a write");
                assert_eq!(far.read(0, 16 + to as usize), vec![0xee; 16 + to as usize]);
                assert_eq!(far.read(16 + to + len as u64, 8), [0xee; 8]);
                near.write(from, &vec![0; len]);
                let op = WrOp::Read(far.mr.remote(16 + to));
                transfer.is_direct(SendRequest::new(seed, op).with(data));
                same(&near.read(from, len), &wanted, "a read");
            }
        }
    }
    testbed.check_traffic(conn);
    assert_eq!(operations(&testbed.a) > 100, fixture.test_link.is_direct());
}

/// The peer's memory is on another GPU than the local memory: copied in place if the GPUs have
/// access to each other's memory, else by packets, with the reason.
fn device_copies_between_two_gpus(fixture: &Fixture) {
    for peer_access in [true, false] {
        let config = SimConfig::default().with_gpus(3).with_memory(1 << 28);
        let config = config.with_peer_access(peer_access);
        let sim = Sim::start(config).unwrap();
        let testbed = fixture.testbed();
        let conn = testbed.join(QpOptions::default());
        let memories = [0, 1].map(|gpu| sim.device(gpu).unwrap().alloc(LEN).unwrap());
        let register = |end: &Endpoint, memory: &Allocation| {
            end.context.register(&end.pd, memory.whole().unwrap(), Access::ALL).unwrap()
        };
        let (near, far) = (register(&testbed.a, &memories[0]), register(&testbed.b, &memories[1]));
        let (data, before) = ([near.sge(0, LARGE)], operations(&testbed.a));
        let run = |op, seed: u64| {
            let [from, to] = match op {
                WrOp::Write(_) => [&memories[0], &memories[1]],
                _ => [&memories[1], &memories[0]],
            };
            let wanted: Vec<u8> = (0..u64::from(LARGE)).map(|n| (n * 7 + seed) as u8).collect();
            from.write(0, &wanted).unwrap();
            conn.a.qp.post_send(&[SendRequest::new(seed, op).with(&data)]).unwrap();
            testbed.done(&conn.a.sends, seed);
            let mut found = vec![0; LARGE as usize];
            to.read(0, &mut found).unwrap();
            same(&found, &wanted, "between two GPUs");
        };
        let start = Instant::now();
        for seed in (0..).step_by(2) {
            run(WrOp::Write(far.remote(0)), seed);
            run(WrOp::Read(far.remote(0)), seed + 1);
            let (direct, path) = (operations(&testbed.a) - before, conn.a.qp.path().unwrap().why);
            let settled = match fixture.test_link.is_direct() {
                true if peer_access => direct >= 4,
                true => path.contains("it has no access to memory of sim:1"),
                false => seed >= 8,
            };
            if settled {
                assert_eq!(direct > 0, fixture.test_link.is_direct() && peer_access, "{path}");
                break;
            }
            assert!(start.elapsed() < test_timeout(), "{direct} were direct: {path}");
        }
        testbed.check_traffic(&conn);
    }
}

/// One key is used with memory of three GPUs: each opens the peer's memory. Where only the GPU that
/// it is on has access to it, the others use packets.
fn device_copies_by_each_gpu_of_a_process(fixture: &Fixture) {
    for peer_access in [true, false] {
        let config = SimConfig::default().with_gpus(3).with_memory(1 << 28);
        let config = config.with_peer_access(peer_access);
        let sim = Sim::start(config).unwrap();
        let testbed = fixture.testbed();
        let conn = testbed.join(QpOptions::default());
        let alloc = |gpu| sim.device(gpu).unwrap().alloc(LEN).unwrap();
        let register = |end: &Endpoint, memory: &Allocation| {
            end.context.register(&end.pd, memory.whole().unwrap(), Access::ALL).unwrap()
        };
        // The first is on the GPU of the peer's memory.
        let gpus = [1, 0, 2];
        let near = gpus.map(alloc);
        let near_mrs = near.each_ref().map(|memory| register(&testbed.a, memory));
        let far = alloc(1);
        let far_mr = register(&testbed.b, &far);
        let (mut seed, start) = (0, Instant::now());
        // Writes with memory of one GPU; returns whether that was direct.
        let mut write = |of: usize, len: u32| {
            seed += 1;
            let wanted: Vec<u8> = (0..u64::from(len)).map(|n| (n * 7 + seed) as u8).collect();
            near[of].write(0, &wanted).unwrap();
            let (before, data) = (operations(&testbed.a), [near_mrs[of].sge(0, len)]);
            let op = WrOp::Write(far_mr.remote(0));
            conn.a.qp.post_send(&[SendRequest::new(seed, op).with(&data)]).unwrap();
            testbed.done(&conn.a.sends, seed);
            let mut found = vec![0; len as usize];
            far.read(0, &mut found).unwrap();
            same(&found, &wanted, "by one of three GPUs");
            operations(&testbed.a) > before
        };
        let opens = |of: usize| fixture.test_link.is_direct() && (peer_access || gpus[of] == 1);
        for of in 0..3 {
            while !write(of, LARGE) && opens(of) {
                assert!(start.elapsed() < test_timeout(), "{}", conn.a.qp.path().unwrap());
            }
        }
        for round in 0..30 {
            let of = round % 3;
            assert_eq!(write(of, LARGE), opens(of), "sim:{}", gpus[of]);
            write(of, 8);
        }
        testbed.check_traffic(&conn);
    }
}

/// Copies, packets and host memory in one queue: completions come in order, and a message finds the
/// data that was written before it.
fn device_copies_keep_their_order(fixture: &Fixture) {
    let transfer = Transfer::new(fixture, QpOptions::default());
    let Transfer { testbed, conn, near, far } = &transfer;
    let (near_host, far_host) = (fixture.host(&testbed.a, LEN), fixture.host(&testbed.b, LEN));
    for round in 0..60_u64 {
        let bytes = [round as u8 | 1; LARGE as usize];
        near.write(0, &bytes);
        near_host.write(0, &bytes);
        conn.b.qp.post_receive(&[ReceiveRequest { id: round, data: &[] }]).unwrap();
        let (large, on_host) = ([near.mr.sge(0, LARGE)], [near_host.mr.sge(0, LARGE)]);
        let (back, word) = ([near.mr.sge(LEN / 2, LARGE)], round.to_ne_bytes());
        let to = |offset| WrOp::Write(far.mr.remote(offset));
        let work = [
            SendRequest::new(1, to(0)).with(&large),
            SendRequest::new(2, to(LARGE.into())).with(&large),
            SendRequest::new(3, WrOp::Write(far_host.mr.remote(0))).with(&on_host),
            SendRequest::new(4, WrOp::Send),
            SendRequest::new(5, to(LEN / 2)).with(&large),
            SendRequest::new(6, to(LEN - 8)).inline(&word),
            SendRequest::new(7, WrOp::Read(far.mr.remote(LEN / 2))).with(&back),
            SendRequest { fence: Fence::All, ..SendRequest::new(8, to(LEN / 2)).inline(&word) },
        ];
        if round % 3 == 0 {
            conn.a.qp.post_send(&work).unwrap();
        } else {
            work.iter().for_each(|one| conn.a.qp.post_send(&[*one]).unwrap());
        }
        testbed.done(&conn.b.receives, round);
        same(&far.read(0, LARGE as usize), &bytes, "the first write before the message");
        same(&far.read(LARGE.into(), LARGE as usize), &bytes, "the second");
        same(&far_host.read(0, LARGE as usize), &bytes, "the third");
        for id in 1..=8 {
            testbed.done(&conn.a.sends, id);
        }
        same(&near.read(LEN / 2, LARGE as usize), &bytes, "a read after the write");
        assert_eq!((far.word(LEN / 2), far.word(LEN - 8)), (round, round));
    }
    assert_eq!(operations(&testbed.a) > 60, fixture.test_link.is_direct());
}

/// Writes to the same place, reads of what was written, writes to what is being read: the result is
/// that of one after the other.
fn device_copies_that_overlap_are_ordered(fixture: &Fixture) {
    let transfer = Transfer::new(fixture, QpOptions::default());
    let Transfer { testbed, conn, near, far } = &transfer;
    fixture.control().delay_copies(Duration::from_millis(1));
    let part = |at: u64, len: u32| [near.mr.sge(at, len)];
    for round in 1..20_u8 {
        let fill = |at: u64, value: u8| near.write(at, &[value; LARGE as usize]);
        (0..4).for_each(|slot| fill(slot * u64::from(LARGE), round + slot as u8 * 20));
        let [first, second, third] = [0, 1, 2].map(|slot| part(slot * u64::from(LARGE), LARGE));
        let back = part(8 * u64::from(LARGE), LARGE);
        let write = |id, at: u64| SendRequest::new(id, WrOp::Write(far.mr.remote(at)));
        let read = SendRequest::new(4, WrOp::Read(far.mr.remote(0))).with(&back);
        let work = [
            write(1, 0).with(&first),
            write(2, 0).with(&second),
            write(3, u64::from(LARGE) - 16).with(&third),
            read,
            SendRequest { fence: Fence::Reads, ..write(5, 0).with(&first) },
        ];
        conn.a.qp.post_send(&work).unwrap();
        for id in 1..=5 {
            testbed.done(&conn.a.sends, id);
        }
        let mut wanted = vec![round + 20; LARGE as usize];
        wanted[LARGE as usize - 16..].fill(round + 40);
        same(&near.read(8 * u64::from(LARGE), LARGE as usize), &wanted, "the read");
        same(&far.read(0, LARGE as usize), &[round; LARGE as usize], "the last write");
        same(&far.read(LARGE.into(), 100), &[round + 40; 100], "the third write");
    }
}

/// Many writes are in flight at a time, with few completions: all arrive.
fn device_copies_are_gathered(fixture: &Fixture) {
    let count = 200_u64;
    let options = QpOptions::default().with_send_depth(256).with_signal_all(false);
    let transfer = Transfer::new(fixture, options);
    let Transfer { testbed, conn, near, far } = &transfer;
    let piece = 32_768_u64;
    let each = LEN / piece;
    let wanted = near.pattern(0, LEN as usize, 11);
    fixture.control().delay_copies(Duration::from_micros(300));
    for id in 0..count {
        let at = id % each * piece;
        let data = [near.mr.sge(at, piece as u32)];
        let write = SendRequest::new(id, WrOp::Write(far.mr.remote(at))).with(&data);
        let signaled = id % 16 == 15 || id == count - 1;
        let write = if signaled { write } else { write.unsignaled() };
        conn.a.qp.post_send(&[write]).unwrap();
    }
    for id in (0..count).filter(|id| id % 16 == 15 || *id == count - 1) {
        testbed.done(&conn.a.sends, id);
    }
    same(&far.read(0, LEN as usize), &wanted, "gathered writes");
    assert_eq!(operations(&testbed.a) >= count, fixture.test_link.is_direct());
}

/// Registrations end on either side while copies are in flight: nothing changes afterwards.
fn device_copies_end_with_the_registration(fixture: &Fixture) {
    let transfer = Transfer::new(fixture, QpOptions::default().with_timeout(10));
    let Transfer { testbed, .. } = &transfer;
    fixture.control().delay_copies(Duration::from_millis(2));
    for round in 0..24_u64 {
        // By the GPU, and by the CPU, with and without a WQE; writes and reads of each.
        let len = [300_000, 700, 300_000, 200][round as usize / 2 % 4];
        let conn = testbed.join(QpOptions::default().with_timeout(10).with_retry_count(7));
        let memories = [(); 2].map(|()| fixture.gpu().alloc(LEN).unwrap());
        memories[0].write(0, &vec![round as u8 | 1; LEN as usize]).unwrap();
        let register = |end: &Endpoint, at: usize| {
            let whole = memories[at].whole().unwrap();
            end.context.register(&end.pd, whole, Access::ALL).unwrap()
        };
        let (near, far) = (register(&testbed.a, 0), register(&testbed.b, 1));
        transfer.warm_up(fixture, &conn, far.remote(0));
        let (stop, reads) = (AtomicBool::new(false), round % 2 == 1);
        let (remote, data) = (far.remote(0), [near.sge(0, len)]);
        // Writes end with the target's registration, reads with that of their local memory.
        let (ending, memory) = if reads { (near, &memories[0]) } else { (far, &memories[1]) };
        let is_unused = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let op = if reads { WrOp::Read(remote) } else { WrOp::Write(remote) };
                while !stop.load(Ordering::Relaxed) {
                    conn.a.qp.post_send(&[SendRequest::new(1, op).with(&data)]).unwrap();
                    if !testbed.next(&conn.a.sends).is_success() {
                        return;
                    }
                }
            });
            std::thread::sleep(Duration::from_micros(700 * (round % 8)));
            let is_unused = is_unused(ending.deregister());
            memory.write(0, &vec![0xee; LEN as usize]).unwrap();
            std::thread::sleep(Duration::from_millis(5));
            stop.store(true, Ordering::Relaxed);
            writer.join().unwrap();
            is_unused
        });
        let mut found = vec![0; LEN as usize];
        memory.read(0, &mut found).unwrap();
        let is_kept = found.iter().all(|byte| *byte == 0xee);
        assert!(!is_unused || is_kept, "round {round}: changed afterwards");
    }
}

/// A queue pair that is reset, failed or closed with copies in flight reports nothing of them
/// afterwards, and connects again.
fn device_copies_end_with_the_queue_pair(fixture: &Fixture) {
    let transfer = Transfer::new(fixture, short_timeouts());
    let Transfer { testbed, near, far, .. } = &transfer;
    for to in [State::Reset, State::Err] {
        let conn = testbed.join(short_timeouts());
        transfer.warm_up(fixture, &conn, far.mr.remote(0));
        fixture.control().delay_copies(Duration::from_millis(20));
        let data = [near.mr.sge(0, LARGE)];
        let write = |id| SendRequest::new(id, WrOp::Write(far.mr.remote(0))).with(&data);
        let small = SendRequest::new(4, WrOp::Write(far.mr.remote(0))).inline(&[1]);
        conn.a.qp.post_send(&[write(1), write(2), write(3), small]).unwrap();
        testbed.step();
        conn.a.qp.modify(&QpAttributes::new(to)).unwrap();
        if to == State::Err {
            // In order: those that had been started may have succeeded, the rest is flushed.
            let statuses = [1, 2, 3, 4].map(|id| {
                let completion = testbed.next(&conn.a.sends);
                assert_eq!(completion.id, id);
                completion.status
            });
            let succeeded =
                statuses.iter().take_while(|status| **status == Status::Success).count();
            let (_, after) = statuses.split_at(succeeded);
            assert!(after.iter().all(|status| *status == Status::Flushed), "{statuses:?}");
        }
        fixture.control().delay_copies(Duration::ZERO);
        testbed.poll_for(Duration::from_millis(40));
        testbed.expect_no_completion(&conn.a.sends);
        drop(conn);
        let conn = testbed.join(short_timeouts());
        transfer.warm_up(fixture, &conn, far.mr.remote(0));
        testbed.check_traffic(&conn);
    }
}

/// Memory that its owner moves is accessed at its new place.
fn device_copies_follow_memory_that_moves(fixture: &Fixture) {
    let transfer = Transfer::new(fixture, QpOptions::default());
    let Transfer { testbed, conn, near, far } = &transfer;
    for (round, moved) in [far, near, far, near].into_iter().enumerate() {
        for step in 0..20_u64 {
            let len = if step.is_multiple_of(2) { LARGE } else { 100 };
            let data = [near.mr.sge(0, len)];
            let write = SendRequest::new(1, WrOp::Write(far.mr.remote(0))).with(&data);
            let wanted = near.pattern(0, len as usize, round as u64 * 100 + step);
            conn.a.qp.post_send(&[write]).unwrap();
            if step == 10 {
                testbed.step();
                fixture.control().relocate(moved.allocation()).unwrap();
            }
            testbed.done(&conn.a.sends, 1);
            same(&far.read(0, len as usize), &wanted, "a write beside a move");
        }
    }
    // What is registered at the new place is direct again.
    let again =
        testbed.b.context.register(&testbed.b.pd, far.allocation().whole().unwrap(), Access::ALL);
    let again = again.unwrap();
    let data = [near.mr.sge(0, LARGE)];
    let wanted = near.pattern(0, LARGE as usize, 77);
    let write = SendRequest::new(3, WrOp::Write(again.remote(0))).with(&data);
    let direct = (0..2000).any(|_| transfer.is_direct(write));
    assert_eq!(direct, fixture.test_link.is_direct());
    same(&far.read(0, LARGE as usize), &wanted, "a write after the moves");
}

fn device_copies_fail_with_freed_memory(fixture: &Fixture) {
    for free_far in [true, false] {
        let transfer = Transfer::new(fixture, short_timeouts());
        let Transfer { testbed, conn, near, far } = &transfer;
        let data = [near.mr.sge(0, LARGE)];
        let write = SendRequest::new(1, WrOp::Write(far.mr.remote(0))).with(&data);
        conn.a.qp.post_send(&[write]).unwrap();
        let (freed, status) = match free_far {
            true => (far, Status::RemoteAccess),
            false => (near, Status::LocalProtection),
        };
        fixture.control().force_free(freed.allocation()).unwrap();
        let start = Instant::now();
        loop {
            let completion = testbed.next(&conn.a.sends);
            if completion.status != Status::Success {
                assert_eq!(completion.status, status, "freed at the target: {free_far}");
                break;
            }
            conn.a.qp.post_send(&[write]).unwrap();
            assert!(start.elapsed() < test_timeout(), "writes to freed memory succeed");
        }
    }
}

/// A GPU that dies with copies in flight ends them with an error. Windows do not end with it, so
/// that packets may arrive.
fn device_copies_fail_with_the_device(fixture: &Fixture) {
    let transfer = Transfer::new(fixture, short_timeouts());
    let Transfer { testbed, conn, near, far } = &transfer;
    fixture.control().delay_copies(Duration::from_millis(5));
    let data = [near.mr.sge(0, LARGE)];
    let post = |id| {
        let write = SendRequest::new(id, WrOp::Write(far.mr.remote(0))).with(&data);
        conn.a.qp.post_send(&[write]).unwrap();
    };
    (0..8).for_each(post);
    testbed.step();
    fixture.control().kill();
    let start = Instant::now();
    // Those that were executed before have succeeded.
    for id in 8.. {
        if !testbed.next(&conn.a.sends).is_success() || !fixture.test_link.is_direct() {
            return;
        }
        assert!(start.elapsed() < deadline(Duration::from_secs(10)), "a dead GPU copies");
        post(id);
    }
}
