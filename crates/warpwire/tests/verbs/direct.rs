//! Direct access to peer memory: used where possible, ordered with other work, with the protocol's
//! statuses, and revoked in time.
//!
//! Every case runs over every link: without direct access, packets must give the same result.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use warpwire::link::Hub;
use warpwire::mr::HostMemory;
use warpwire::verbs::{
    Access, Atomic, Completion, Context, Fence, Mr, ProgressMode, QpAttributes, QpOptions,
    ReceiveRequest, Remote, SendRequest, State, Status, WrOp,
};

use crate::verbs::fixture::{
    Endpoint, Fixture, Kind, QpPair, TestBuffer, TestLink, Testbed, connect, is_unused, same,
    short_timeouts, test_timeout,
};
use testkit::cases;

cases!(Fixture; CASES:
    direct_where_possible,
    direct_work_keeps_its_order,
    direct_data_is_right_at_every_size,
    direct_atomics_count_with_the_others,
    direct_failures_have_the_protocols_statuses,
    direct_ends_with_the_registration,
    direct_ends_with_the_queue_pair,
    direct_over_a_thousand_registrations,
    direct_mappings_are_limited,
    direct_registrations_end_under_traffic,
    direct_leaves_other_memory_to_packets,
    direct_access_restarts_with_the_next_connection,
    direct_writes_wrap_the_queue_with_wqes_between,
    direct_batches_are_executed_when_posted,
    messages_leave_when_they_are_posted,
    direct_copies_of_the_kernel,
);

/// Two connected ends with memory; `new` writes until the peer's memory is mapped.
struct TransferTest {
    testbed: Testbed,
    conn: QpPair,
    near: TestBuffer,
    far: TestBuffer,
}

fn operations(end: &Endpoint) -> u64 {
    end.context.stats().unwrap().direct.operations
}

impl TransferTest {
    fn new(fixture: &Fixture, options: QpOptions) -> Self {
        let testbed = fixture.testbed();
        let conn = testbed.join(options);
        let (near, far) = (fixture.host(&testbed.a, 1 << 20), fixture.host(&testbed.b, 1 << 20));
        let transfer = Self { testbed, conn, near, far };
        transfer.warm_up(fixture.test_link, &transfer.far.mr);
        transfer
    }

    /// Writes until a write is direct, on links with direct access; otherwise writes once.
    fn warm_up(&self, test_link: TestLink, mr: &Mr) {
        let before = operations(&self.testbed.a);
        let start = Instant::now();
        loop {
            self.run(SendRequest::new(1, WrOp::Write(mr.remote(0))).inline(b"warm"));
            if !test_link.is_direct() || operations(&self.testbed.a) > before {
                return;
            }
            let path = self.conn.a.qp.path().unwrap();
            let stats = self.testbed.a.context.stats().unwrap().direct;
            assert!(start.elapsed() < test_timeout(), "never direct: {path}; {stats:?}");
        }
    }

    fn run(&self, request: SendRequest<'_>) {
        self.conn.a.qp.post_send(&[request]).unwrap();
        self.testbed.done(&self.conn.a.sends, request.id);
    }

    /// Executes the request; returns whether it was direct.
    fn is_direct(&self, request: SendRequest<'_>) -> bool {
        let before = operations(&self.testbed.a);
        self.run(request);
        operations(&self.testbed.a) > before
    }
}

fn direct_where_possible(fixture: &Fixture) {
    let transfer = TransferTest::new(fixture, QpOptions::default());
    let TransferTest { testbed, conn, near, far } = &transfer;
    let (remote, data) = (far.mr.remote(64), [near.mr.sge(0, 8)]);
    let add = WrOp::Atomic(remote, Atomic::FetchAdd { add: 1 });
    let direct = fixture.test_link.is_direct();
    for op in [WrOp::Write(remote), WrOp::Read(remote), add] {
        let packets = conn.a.qp.stats().unwrap().packets_sent;
        assert_eq!(transfer.is_direct(SendRequest::new(1, op).with(&data)), direct, "{op:?}");
        let sent = conn.a.qp.stats().unwrap().packets_sent - packets;
        assert_eq!(sent > 0, !direct, "{sent} packets for {op:?}");
    }
    // Operations that consume a receive, and empty ones, use packets.
    conn.b.qp.post_receive(&[ReceiveRequest { id: 9, data: &[] }; 2]).unwrap();
    for op in [WrOp::Send, WrOp::WriteImm(remote, [1; 4]), WrOp::Write(remote)] {
        assert!(!transfer.is_direct(SendRequest::new(2, op)), "{op:?}");
    }
    let (mine, theirs) =
        (testbed.a.context.stats().unwrap().direct, testbed.b.context.stats().unwrap().direct);
    assert_eq!(mine.operations > 0, direct);
    assert_eq!((theirs.by_peers, theirs.bytes_by_peers), (mine.operations, mine.bytes));
    let path = conn.a.qp.path().unwrap().why;
    let word = if direct { "direct access: on (peer mappings: 1)" } else { "direct access: off (" };
    assert!(path.contains(word), "{path}");
    let word = if direct { "; direct access: on" } else { "; direct access: off (" };
    assert!(testbed.a.context.path().why.contains(word), "{}", testbed.a.context.path());
    for _ in 0..2 {
        testbed.done(&conn.b.receives, 9);
    }
    testbed.check_traffic(conn);
}

/// A batch larger than one turn's budget is executed when it is posted, so that the queue is empty
/// again and later work can take the fast path.
fn direct_batches_are_executed_when_posted(fixture: &Fixture) {
    const EACH: u64 = 64 << 10;
    let transfer = TransferTest::new(fixture, QpOptions::default());
    let TransferTest { testbed, conn, near, far } = &transfer;
    let data = [near.mr.sge(0, EACH as u32)];
    near.write(0, &[7; EACH as usize]);
    let before = operations(&testbed.a);
    let mut batch = conn.a.qp.batch().unwrap();
    for slot in 0..8 {
        let request = SendRequest::new(slot, WrOp::Write(far.mr.remote(slot * EACH)));
        batch.push(&request.with(&data)).unwrap();
    }
    batch.post();
    // Before any poll.
    if fixture.test_link.is_direct() {
        assert_eq!(operations(&testbed.a) - before, 8);
    }
    for slot in 0..8 {
        testbed.done(&conn.a.sends, slot);
        assert_eq!(far.word(slot * EACH + EACH - 8), u64::from_ne_bytes([7; 8]));
    }
}

/// On links with direct access the posting thread sends a message itself if at most one is
/// outstanding; where only steps may send, nothing leaves before the next one.
fn messages_leave_when_they_are_posted(fixture: &Fixture) {
    const MESSAGES: u64 = 100;
    for progress_mode in [ProgressMode::Auto, ProgressMode::Manual] {
        let testbed = fixture.with_progress(progress_mode);
        let conn = testbed.join(QpOptions::default());
        let sent = || testbed.a.context.stats().unwrap().pairs.packets_sent;
        let mut left = 0;
        for id in 0..MESSAGES {
            conn.b.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
            let before = sent();
            conn.a.qp.post_send(&[SendRequest::new(id, WrOp::Send)]).unwrap();
            left += sent() - before;
            testbed.done(&conn.a.sends, id);
            testbed.done(&conn.b.receives, id);
        }
        match progress_mode {
            ProgressMode::Manual => assert_eq!(left, 0),
            // Another thread may be making a step, which then sends it.
            _ if fixture.test_link.is_direct() => assert!(left > MESSAGES / 2, "{left} left"),
            _ => {}
        }
    }
}

fn direct_work_keeps_its_order(fixture: &Fixture) {
    let transfer = TransferTest::new(fixture, QpOptions::default());
    let TransferTest { testbed, conn, near, far } = &transfer;
    for round in 0..200_u64 {
        let word = |step: u64| (round * 10 + step).to_ne_bytes();
        // Writes before a message are visible when it arrives.
        conn.b.qp.post_receive(&[ReceiveRequest { id: round, data: &[] }]).unwrap();
        let (large, at) = ([near.mr.sge(0, 20_000)], |offset| WrOp::Write(far.mr.remote(offset)));
        near.write(0, &[round as u8; 20_000]);
        let (first, second, third) = (word(1), word(2), word(3));
        let back = [near.mr.sge(65_536, 16)];
        let work = [
            SendRequest::new(1, at(0)).inline(&first),
            SendRequest::new(2, WrOp::Send),
            SendRequest::new(3, at(8)).inline(&second),
            SendRequest::new(4, at(4096)).with(&large),
            SendRequest::new(5, WrOp::Read(far.mr.remote(0))).with(&back),
            // Without a fence, a later write may overtake a read.
            SendRequest { fence: Fence::Reads, ..SendRequest::new(6, at(0)).inline(&third) },
        ];
        if round % 3 == 0 {
            conn.a.qp.post_send(&work).unwrap();
        } else {
            work.iter().for_each(|one| conn.a.qp.post_send(&[*one]).unwrap());
        }
        let mut reported = [Completion::EMPTY];
        testbed.until("the message", || conn.b.receives.poll(&mut reported).unwrap() == 1);
        assert!(
            far.word(0) == round * 10 + 1 || far.word(0) == round * 10 + 3,
            "the write before the message"
        );
        for id in 1..=6 {
            testbed.done(&conn.a.sends, id);
        }
        assert_eq!((far.word(0), far.word(8)), (round * 10 + 3, round * 10 + 2));
        same(&far.read(4096, 20_000), &[round as u8; 20_000], "a large write among small ones");
        assert_eq!((near.word(65_536), near.word(65_544)), (round * 10 + 1, round * 10 + 2));
    }
    assert_eq!(operations(&testbed.a) > 100, fixture.test_link.is_direct());
}

fn direct_data_is_right_at_every_size(fixture: &Fixture) {
    let transfer = TransferTest::new(fixture, QpOptions::default());
    let TransferTest { testbed, near, far, .. } = &transfer;
    let sizes = [1, 7, 8, 63, 64, 127, 128, 129, 4095, 4096, 65_537, 262_144, 262_145, 900_001];
    for (seed, len) in sizes.into_iter().enumerate() {
        let (from, to) = (seed as u64 * 3 % 17, seed as u64 * 5 % 23);
        let wanted = near.pattern(from, len, seed as u64);
        let ranges = [
            near.mr.sge(from, (len / 3) as u32),
            near.mr.sge(from + len as u64 / 3, (len - len / 3) as u32),
        ];
        transfer.run(SendRequest::new(1, WrOp::Write(far.mr.remote(to))).with(&ranges));
        same(&far.read(to, len), &wanted, "a write");
        near.write(0, &vec![0; 1 << 20]);
        transfer.run(SendRequest::new(2, WrOp::Read(far.mr.remote(to))).with(&ranges));
        same(&near.read(from, len), &wanted, "a read");
    }
    let direct = testbed.a.context.stats().unwrap().direct;
    assert_eq!(
        direct.operations >= 2 * sizes.len() as u64,
        fixture.test_link.is_direct(),
        "{direct:?}"
    );
}

fn direct_atomics_count_with_the_others(fixture: &Fixture) {
    let transfer = TransferTest::new(fixture, QpOptions::default());
    let TransferTest { testbed, near, far, .. } = &transfer;
    let slow = testbed.join(QpOptions::default());
    far.write(0, &[0; 16]);
    let (result, other) = ([near.mr.sge(0, 8)], [near.mr.sge(8, 8)]);
    let add = |id, at| SendRequest::new(id, WrOp::Atomic(at, Atomic::FetchAdd { add: 1 }));
    for round in 0..100 {
        // After a send in flight, the atomic uses packets.
        slow.b.qp.post_receive(&[ReceiveRequest { id: 1, data: &[] }]).unwrap();
        let at = far.mr.remote(0);
        slow.a.qp.post_send(&[SendRequest::new(1, WrOp::Send), add(2, at).with(&other)]).unwrap();
        transfer.run(add(3, at).with(&result));
        testbed.done(&slow.a.sends, 1);
        testbed.done(&slow.a.sends, 2);
        testbed.done(&slow.b.receives, 1);
        assert_eq!(
            near.word(0) + near.word(8),
            4 * round + 1,
            "both atomics returned the same value"
        );
    }
    assert_eq!(far.word(0), 200);
    let swap = Atomic::CompareSwap { compare: 200, swap: 7 };
    transfer.run(SendRequest::new(1, WrOp::Atomic(far.mr.remote(0), swap)).with(&result));
    assert_eq!((near.word(0), far.word(0)), (200, 7));
    // The result does not fit: the request fails, and the word may or may not change.
    let narrow = [near.mr.sge(0, 4)];
    transfer.conn.a.qp.post_send(&[add(5, far.mr.remote(8)).with(&narrow)]).unwrap();
    assert!(!testbed.next(&transfer.conn.a.sends).is_success());
}

/// Builds an invalid operation, given memory of another protection domain and read-only memory.
type InvalidOp = fn(&TransferTest, &TestBuffer, &TestBuffer) -> WrOp;

/// All kinds of invalid operations on a connection that uses direct access.
fn direct_failures_have_the_protocols_statuses(fixture: &Fixture) {
    let read_only = Access::REMOTE_READ;
    let trials: [(QpOptions, InvalidOp, Status); 9] = [
        (
            short_timeouts(),
            |f, _, _| write(f.far.mr.rkey() ^ 1, f.far.mr.iova()),
            Status::RemoteAccess,
        ),
        (short_timeouts(), |f, _, _| write(0xffff_ff00, f.far.mr.iova()), Status::RemoteAccess),
        (
            short_timeouts(),
            |f, _, _| WrOp::Write(f.far.mr.remote((1 << 20) - 7)),
            Status::RemoteAccess,
        ),
        (
            short_timeouts(),
            |f, _, _| write(f.far.mr.rkey(), f.far.mr.iova() - 1),
            Status::RemoteAccess,
        ),
        (short_timeouts(), |f, _, _| write(f.far.mr.rkey(), u64::MAX - 3), Status::RemoteAccess),
        (short_timeouts(), |_, foreign, _| WrOp::Write(foreign.mr.remote(0)), Status::RemoteAccess),
        (short_timeouts(), |_, _, shut| WrOp::Write(shut.mr.remote(0)), Status::RemoteAccess),
        (short_timeouts(), |f, _, _| misaligned(f), Status::RemoteInvalidRequest),
        (
            short_timeouts().with_access(read_only),
            |f, _, _| WrOp::Write(f.far.mr.remote(0)),
            Status::RemoteInvalidRequest,
        ),
    ];
    for (number, (options, op, status)) in trials.into_iter().enumerate() {
        let testbed = fixture.testbed();
        let conn = testbed.join(options);
        let (near, far) = (fixture.host(&testbed.a, 4096), fixture.host(&testbed.b, 1 << 20));
        let transfer = TransferTest { testbed, conn, near, far };
        let other = Endpoint {
            context: transfer.testbed.b.context.clone(),
            pd: transfer.testbed.b.context.alloc_pd(),
        };
        let foreign = fixture.host(&other, 4096);
        let shut = fixture.memory(&transfer.testbed.b, Kind::Host, 4096, Access::REMOTE_READ);
        // Reads establish direct access: all options allow them.
        let data = [transfer.near.mr.sge(0, 8)];
        for _ in 0..200 {
            transfer.run(SendRequest::new(1, WrOp::Read(transfer.far.mr.remote(0))).with(&data));
        }
        assert_eq!(operations(&transfer.testbed.a) > 100, fixture.test_link.is_direct());
        let before = operations(&transfer.testbed.a);
        let op = op(&transfer, &foreign, &shut);
        transfer.conn.a.qp.post_send(&[SendRequest::new(2, op).with(&data)]).unwrap();
        let ended = transfer.testbed.next(&transfer.conn.a.sends);
        let expected = if number == 7 && ended.status == Status::RemoteAccess {
            Status::RemoteAccess // both are valid for a misaligned word
        } else {
            status
        };
        assert_eq!((ended.id, ended.status), (2, expected), "trial {number}");
        assert_eq!(operations(&transfer.testbed.a), before, "trial {number} was executed");
        assert_eq!(transfer.conn.b.qp.state().unwrap(), State::Err, "trial {number}");
    }
}

fn write(rkey: u32, address: u64) -> WrOp {
    WrOp::Write(Remote { address, rkey })
}

fn misaligned(transfer: &TransferTest) -> WrOp {
    WrOp::Atomic(transfer.far.mr.remote(4), Atomic::FetchAdd { add: 1 })
}

fn direct_ends_with_the_registration(fixture: &Fixture) {
    let mut transfer = TransferTest::new(fixture, short_timeouts());
    let memory = HostMemory::new(4096).unwrap();
    let end = transfer.testbed.b.context.clone();
    for invalidated in [false, true] {
        let mr = end.register(&transfer.testbed.b.pd, memory.clone(), Access::ALL).unwrap();
        transfer.warm_up(fixture.test_link, &mr);
        let remote = mr.remote(0);
        if invalidated {
            transfer.conn.b.qp.post_receive(&[ReceiveRequest { id: 4, data: &[] }]).unwrap();
            transfer.run(SendRequest::new(3, WrOp::SendInvalidate(remote.rkey)));
            transfer.testbed.done(&transfer.conn.b.receives, 4);
        } else {
            drop(mr);
        }
        memory.bytes().fill(0, 4096, &[7]).unwrap();
        let request = SendRequest::new(5, WrOp::Write(remote)).inline(b"too late");
        transfer.conn.a.qp.post_send(&[request]).unwrap();
        transfer.testbed.failed(&transfer.conn.a.sends, 5, Status::RemoteAccess);
        assert_eq!(memory.bytes().load_u64(0).unwrap(), u64::from_ne_bytes([7; 8]));
        transfer.conn = transfer.testbed.join(short_timeouts());
    }
}

fn direct_ends_with_the_queue_pair(fixture: &Fixture) {
    let mut transfer = TransferTest::new(fixture, short_timeouts());
    for to in [State::Err, State::Reset] {
        let word = transfer.far.word(0);
        transfer.conn.b.qp.modify(&QpAttributes::new(to)).unwrap();
        let request =
            SendRequest::new(2, WrOp::Write(transfer.far.mr.remote(0))).inline(b"too late");
        transfer.conn.a.qp.post_send(&[request]).unwrap();
        transfer.testbed.failed(&transfer.conn.a.sends, 2, Status::RetryExceeded);
        assert_eq!(transfer.far.word(0), word);
        // Reconnected to the same peer, direct access works again.
        for test_qp in [&transfer.conn.a, &transfer.conn.b] {
            test_qp.qp.modify(&QpAttributes::new(State::Reset)).unwrap();
        }
        connect(&transfer.conn.a.qp, &transfer.conn.b.qp);
        transfer.warm_up(fixture.test_link, &transfer.far.mr);
    }
    // Another connection between the same devices maps the memory again.
    let other = transfer.testbed.join(short_timeouts());
    drop(std::mem::replace(&mut transfer.conn, other));
    transfer.warm_up(fixture.test_link, &transfer.far.mr);
}

fn direct_over_a_thousand_registrations(fixture: &Fixture) {
    let transfer = TransferTest::new(fixture, QpOptions::default());
    let shared = HostMemory::new(1 << 20).unwrap();
    let context = &transfer.testbed.b.context;
    for round in 0..2 {
        let memories: Vec<HostMemory> = (0..1000)
            .map(|n| if n % 2 == 0 { shared.clone() } else { HostMemory::new(4096).unwrap() })
            .collect();
        let register = |memory: &HostMemory| {
            context.register(&transfer.testbed.b.pd, memory.clone(), Access::ALL).unwrap()
        };
        let mrs: Vec<Mr> = memories.iter().map(register).collect();
        let before = operations(&transfer.testbed.a);
        for pass in 0..3_u64 {
            for (number, mr) in mrs.iter().enumerate() {
                let word = (number as u64 * 10 + pass).to_ne_bytes();
                let at = mr.remote(number as u64 % 500 * 8);
                transfer.run(SendRequest::new(1, WrOp::Write(at)).inline(&word));
            }
        }
        for (number, memory) in memories.iter().enumerate() {
            let expected = match number % 2 == 0 && number < 500 {
                true => number as u64 + 500, // overwritten later: shared memory
                false => number as u64,
            };
            let found = memory.bytes().load_u64(number as u64 % 500 * 8).unwrap();
            assert_eq!(found, expected * 10 + 2, "registration {number}");
        }
        let direct = operations(&transfer.testbed.a) - before;
        assert_eq!(direct > 1000, fixture.test_link.is_direct(), "{direct} in round {round}");
    }
    transfer.warm_up(fixture.test_link, &transfer.far.mr);
}

/// More memories than may be mapped: all data arrives, and what is used most stays mapped.
fn direct_mappings_are_limited(fixture: &Fixture) {
    const LIMIT: u32 = 8;
    let [a, b] = fixture.test_link.ends().unwrap();
    let options = fixture.test_link.options(ProgressMode::Manual).with_max_mappings(LIMIT);
    let testbed = Testbed::with(a, b, options);
    let conn = testbed.join(QpOptions::default());
    let (near, far) = (fixture.host(&testbed.a, 4096), fixture.host(&testbed.b, 4096));
    let transfer = TransferTest { testbed, conn, near, far };
    let others: Vec<TestBuffer> =
        (0..40).map(|_| fixture.host(&transfer.testbed.b, 4096)).collect();
    transfer.warm_up(fixture.test_link, &transfer.far.mr);
    let hot = || SendRequest::new(1, WrOp::Write(transfer.far.mr.remote(8))).inline(b"hot!");
    for round in 0..3_u64 {
        for (number, other) in others.iter().enumerate() {
            // Mapped by its second use at the latest.
            for pass in 0..3 {
                let word = (round << 32 | (number as u64) << 8 | pass).to_ne_bytes();
                let write = SendRequest::new(2, WrOp::Write(other.mr.remote(16)));
                transfer.run(write.inline(&word));
                assert_eq!(other.read(16, 8), word, "round {round}, memory {number}");
                assert_eq!(transfer.is_direct(hot()), fixture.test_link.is_direct());
            }
            let path = transfer.conn.a.qp.path().unwrap().why;
            let mapped = path.split_once("peer mappings: ").map(|(_, rest)| {
                rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse::<u32>().unwrap()
            });
            assert_eq!(mapped.is_some(), fixture.test_link.is_direct(), "{path}");
            // One more than may be until the next operation.
            assert!(mapped.is_none_or(|mapped| (2..=LIMIT + 1).contains(&mapped)), "{path}");
        }
    }
    // Each of the others was unmapped before its turn came again.
    let not = transfer.testbed.a.context.stats().unwrap().direct.not;
    let requests = not.get("mapping-requested").copied().unwrap_or(0);
    assert_eq!(requests >= 3 * 40, fixture.test_link.is_direct(), "{not:?}");
    let zero = options.with_max_mappings(0);
    let refused =
        Context::open_with(Hub::new().endpoint("10.0.0.9:4791".parse().unwrap()).unwrap(), zero);
    assert!(refused.unwrap_err().to_string().contains("max_mappings is 0"));
}

/// Registrations end while another thread writes to their memory: nothing changes afterwards.
fn direct_registrations_end_under_traffic(fixture: &Fixture) {
    let transfer = TransferTest::new(fixture, QpOptions::default().with_timeout(10));
    let TransferTest { testbed, near, .. } = &transfer;
    let memory = HostMemory::new(1 << 20).unwrap();
    let rounds = 40;
    for round in 0..rounds {
        let conn = testbed.join(QpOptions::default().with_timeout(10).with_retry_count(7));
        let mr = testbed.b.context.register(&testbed.b.pd, memory.clone(), Access::ALL).unwrap();
        let (remote, stop) = (mr.remote(0), AtomicBool::new(false));
        near.write(0, &[round as u8 | 1; 300_000]);
        let is_unused = std::thread::scope(|scope| {
            scope.spawn(|| {
                let data = [near.mr.sge(0, if round % 2 == 0 { 300_000 } else { 3000 })];
                while !stop.load(Ordering::Relaxed) {
                    let write = SendRequest::new(1, WrOp::Write(remote)).with(&data);
                    conn.a.qp.post_send(&[write]).unwrap();
                    if !testbed.next(&conn.a.sends).is_success() {
                        return;
                    }
                }
            });
            std::thread::sleep(Duration::from_micros(300 * (round % 8)));
            let is_unused = is_unused(mr.deregister());
            memory.bytes().fill(0, 1 << 20, &[0xee]).unwrap();
            std::thread::sleep(Duration::from_millis(1));
            stop.store(true, Ordering::Relaxed);
            is_unused
        });
        let mut found = vec![0; 1 << 20];
        memory.bytes().read(0, &mut found).unwrap();
        assert!(
            !is_unused || found.iter().all(|byte| *byte == 0xee),
            "round {round}: written after deregistration"
        );
    }
}

fn direct_leaves_other_memory_to_packets(fixture: &Fixture) {
    let transfer = TransferTest::new(fixture, QpOptions::default());
    for kind in [Kind::Window, Kind::Engine] {
        let (near, far) = (
            fixture.memory(&transfer.testbed.a, kind, 8192, Access::ALL),
            fixture.memory(&transfer.testbed.b, Kind::Engine, 8192, Access::ALL),
        );
        let wanted = near.pattern(0, 8192, 3);
        for (from, to) in [(&near, &transfer.far), (&transfer.near, &far), (&near, &far)] {
            from.write(0, &wanted);
            for _ in 0..3 {
                let data = [from.mr.sge(0, 8192)];
                let write = SendRequest::new(1, WrOp::Write(to.mr.remote(0))).with(&data);
                assert!(!transfer.is_direct(write), "{kind:?}");
            }
            same(&to.read(0, 8192), &wanted, "a write by packets");
        }
    }
    let not = transfer.testbed.a.context.stats().unwrap().direct.not;
    let counted = not.contains_key("key-not-exported") && not.contains_key("local-memory");
    assert_eq!(counted, fixture.test_link.is_direct(), "{not:?}");
    // Read-only memory can be read directly.
    let shut = fixture.memory(&transfer.testbed.b, Kind::Host, 4096, Access::REMOTE_READ);
    let data = [transfer.near.mr.sge(0, 64)];
    let read =
        || transfer.is_direct(SendRequest::new(1, WrOp::Read(shut.mr.remote(0))).with(&data));
    let direct = (0..100).filter(|_| read()).count();
    assert_eq!(direct > 50, fixture.test_link.is_direct());
}

/// Closing the last connection to a peer drops all its mappings; the next connection maps again.
fn direct_access_restarts_with_the_next_connection(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let near = fixture.host(&testbed.a, 4096);
    for _ in 0..3 {
        let far = fixture.host(&testbed.b, 4096);
        let conn = testbed.join(short_timeouts());
        let mut direct = 0;
        for _ in 0..100 {
            let before = operations(&testbed.a);
            let data = [near.mr.sge(0, 64)];
            let write = SendRequest::new(1, WrOp::Write(far.mr.remote(0))).with(&data);
            conn.a.qp.post_send(&[write]).unwrap();
            testbed.done(&conn.a.sends, 1);
            direct += operations(&testbed.a) - before;
        }
        assert_eq!(direct > 50, fixture.test_link.is_direct());
        // Closing the last flow closes the link's connection; the next round opens a new one.
        drop(conn);
        testbed.poll_for(Duration::from_millis(2));
    }
    let direct_ops = testbed.b.context.stats().unwrap().direct.by_peers;
    assert_eq!(direct_ops > 150, fixture.test_link.is_direct());
}

/// Single direct writes use no WQE. Requests with a WQE keep their order among them, also after the
/// 16-bit WQEBB counter has wrapped.
fn direct_writes_wrap_the_queue_with_wqes_between(fixture: &Fixture) {
    let options = QpOptions::default().with_send_depth(8).with_signal_all(false);
    let transfer = TransferTest::new(fixture, options);
    let TransferTest { testbed, conn, near, far } = &transfer;
    let count = if fixture.test_link.is_direct() { 150_000_u64 } else { 3000 };
    let data = [near.mr.sge(0, 8)];
    for number in 0..count {
        let word = number.to_ne_bytes();
        let write = SendRequest::new(number, WrOp::Write(far.mr.remote(0))).inline(&word);
        // One in four is signaled, so that queue slots are released.
        let reported = number % 4 == 3;
        conn.a.qp.post_send(&[if reported { write } else { write.unsignaled() }]).unwrap();
        if reported {
            testbed.done(&conn.a.sends, number);
            assert_eq!(far.word(0), number);
        }
        if number % 997 == 3 {
            near.write(0, &(!number).to_ne_bytes());
            let write = SendRequest::new(1, WrOp::Write(far.mr.remote(8))).with(&data);
            conn.b.qp.post_receive(&[ReceiveRequest { id: 3, data: &[] }]).unwrap();
            conn.a.qp.post_send(&[write.unsignaled(), SendRequest::new(2, WrOp::Send)]).unwrap();
            testbed.done(&conn.a.sends, 2);
            testbed.done(&conn.b.receives, 3);
            assert_eq!(far.word(8), !number);
        }
    }
    assert_eq!(operations(&testbed.a) > count * 9 / 10, fixture.test_link.is_direct());
}

/// Host memory that is not in a file: the kernel copies what is long enough, at every offset, until
/// the registration ends; memory that it cannot copy is left to packets.
fn direct_copies_of_the_kernel(fixture: &Fixture) {
    let transfer = TransferTest::new(fixture, QpOptions::default());
    let TransferTest { testbed, conn, near, .. } = &transfer;
    let words: Vec<AtomicU64> = (0..1 << 17).map(|_| AtomicU64::new(0)).collect();
    let bytes = || words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
    let register = |at: u64, len| {
        let (context, pd) = (&testbed.b.context, &testbed.b.pd);
        // SAFETY: the words outlive the registration, and are atomics, so peers may change them;
        // nothing else is mapped at other addresses that are passed here.
        #[allow(unsafe_code)]
        unsafe {
            context.register_address(pd, at, len, None, Access::ALL)
        }
    };
    let far = register(words.as_ptr().addr() as u64, 1 << 20).unwrap();
    let direct = fixture.test_link.is_direct();
    let mut seed = 100;
    for (from, to, len) in [(0, 0, 4096), (3, 5, 4097), (0, 8, 70_000), (9, 0, 1 << 19)] {
        seed += 1;
        let wanted = near.pattern(from, len as usize, seed);
        let data =
            [near.mr.sge(from, len / 2), near.mr.sge(from + u64::from(len / 2), len - len / 2)];
        let write = SendRequest::new(seed, WrOp::Write(far.remote(to))).with(&data);
        let used = (0..3).filter(|_| transfer.is_direct(write)).count();
        assert_eq!(used > 0, direct, "a write of {len} bytes");
        same(&bytes().skip(to as usize).take(len as usize).collect::<Vec<_>>(), &wanted, "a write");
        near.write(from, &vec![0; len as usize]);
        let read = SendRequest::new(seed, WrOp::Read(far.remote(to))).with(&data);
        assert_eq!(transfer.is_direct(read), direct, "a read of {len} bytes");
        same(&near.read(from, len as usize), &wanted, "a read");
    }
    // Short ones, and atomics.
    let data = [near.mr.sge(0, 8)];
    let add = WrOp::Atomic(far.remote(8), Atomic::FetchAdd { add: 1 });
    for op in [WrOp::Write(far.remote(0)), WrOp::Read(far.remote(0)), add] {
        assert!(!transfer.is_direct(SendRequest::new(1, op).with(&data)), "{op:?}");
    }
    // Its end, and what lies outside of it, has the protocol's statuses.
    let (remote, data) = (far.remote(0), [near.mr.sge(0, 8192)]);
    drop(far);
    conn.a.qp.post_send(&[SendRequest::new(7, WrOp::Write(remote)).with(&data)]).unwrap();
    testbed.failed(&conn.a.sends, 7, Status::RemoteAccess);
}
