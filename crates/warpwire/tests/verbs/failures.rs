//! Every kind of failure has the right status at the right end; and recovery from failures.

use std::time::Duration;

use warpwire::mlx5::AtomicWidth;
use warpwire::verbs::{
    Access, AsyncEvent, Atomic, Completion, CompletionKind, Mtu, QpOptions, ReceiveRequest, Remote,
    SendRequest, Sge, State, Status, WrOp,
};

use crate::verbs::fixture::{
    Endpoint, Fixture, KINDS, Kind, QpPair, SHORT_WAIT, TestBuffer, TestQp, Testbed, connect, same,
    short_timeouts,
};
use testkit::{cases, skip};

cases!(Fixture; CASES:
    local_memory_that_may_not_be_read,
    remote_memory_that_may_not_be_used,
    flags_of_the_queue_pair,
    receives_that_do_not_fit,
    responses_that_do_not_fit,
    a_peer_that_does_not_respond,
    a_peer_that_stops_draining,
    receiver_not_ready,
    a_failure_flushes_in_order,
    a_failure_in_the_middle_of_a_message,
    after_a_reset_it_works_again,
    registrations_that_end_under_traffic,
);
cases!(Fixture; ONCE:
    atomics_that_are_not_aligned,
    unread_completions_do_not_survive_a_reset,
    freed_memory_under_a_registration,
    zero_bytes_need_no_key,
);

/// A connection under test, and a bystander between the same devices that must keep working.
struct Trial {
    testbed: Testbed,
    conn: QpPair,
    bystander: QpPair,
    near: TestBuffer,
    far: TestBuffer,
}

impl Trial {
    fn new(fixture: &Fixture, options: QpOptions) -> Self {
        Self::with(fixture, options.clone(), options)
    }

    fn with(fixture: &Fixture, a: QpOptions, b: QpOptions) -> Self {
        let testbed = fixture.testbed();
        let bystander = testbed.join(QpOptions::default());
        let conn = testbed.join_with(a, b);
        let (near, far) = (fixture.host(&testbed.a, 1 << 16), fixture.host(&testbed.b, 1 << 17));
        Self { testbed, conn, bystander, near, far }
    }

    fn post(&self, request: SendRequest<'_>) {
        self.conn.a.qp.post_send(&[request]).unwrap();
    }

    fn receive(&self, id: u64, data: &[Sge]) {
        self.conn.b.qp.post_receive(&[ReceiveRequest { id, data }]).unwrap();
    }

    /// The requester fails with `status`; its peer reports the given async event and fails, or
    /// reports none and stays in RTS.
    fn expect(&self, id: u64, status: Status, async_events: Option<fn(u32) -> AsyncEvent>) {
        let Self { testbed, conn, .. } = self;
        testbed.failed(&conn.a.sends, id, status);
        assert_eq!(conn.a.qp.state().unwrap(), State::Err);
        if testbed.b.is_device() {
            testbed.b.async_events(); // rxe reports none, other devices do
            testbed.check_traffic(&self.bystander);
            return self.reconnect();
        }
        let qpn = conn.b.qp.number();
        let wanted: Vec<_> = async_events.map(|event| event(qpn)).into_iter().collect();
        let events_seen: Vec<_> = testbed
            .b
            .async_events()
            .into_iter()
            .filter(|e| *e != AsyncEvent::Established { qpn })
            .collect();
        assert_eq!(events_seen, wanted);
        let peer = conn.b.qp.state().unwrap();
        assert_eq!(peer, if async_events.is_some() { State::Err } else { State::Rts });
        testbed.check_traffic(&self.bystander);
        self.reconnect();
    }

    /// Resets and reconnects both, and checks that they work.
    fn reconnect(&self) {
        reset(&self.conn);
        self.testbed.check_traffic(&self.conn);
        self.testbed.a.async_events();
        self.testbed.b.async_events();
    }
}

fn reset(conn: &QpPair) {
    for test_qp in [&conn.a, &conn.b] {
        test_qp.qp.modify(&warpwire::verbs::QpAttributes::new(State::Reset)).unwrap();
        assert_eq!(test_qp.qp.state().unwrap(), State::Reset);
    }
    connect(&conn.a.qp, &conn.b.qp);
}

fn access_error(qpn: u32) -> AsyncEvent {
    AsyncEvent::AccessError { qpn }
}

fn request_error(qpn: u32) -> AsyncEvent {
    AsyncEvent::RequestError { qpn }
}

fn fatal(qpn: u32) -> AsyncEvent {
    AsyncEvent::Fatal { qpn }
}

fn local_memory_that_may_not_be_read(fixture: &Fixture) {
    let trial = Trial::new(fixture, QpOptions::default());
    let near = &trial.near.mr;
    let foreign = Endpoint {
        context: trial.testbed.a.context.clone(),
        pd: trial.testbed.a.context.alloc_pd(),
    };
    let foreign = fixture.host(&foreign, 4096);
    let good = near.sge(0, 100);
    let bad = [
        Sge { lkey: near.lkey() ^ 1, ..good },
        Sge { lkey: 0xffff_ff00, ..good },
        Sge { lkey: 0, ..good },
        near.sge(1 << 16, 1),
        near.sge((1 << 16) - 99, 100),
        near.sge(0, (1 << 16) + 1),
        near.sge(u64::MAX, 2),
        Sge { address: u64::MAX - 10, ..good },
        foreign.mr.sge(0, 100),
    ];
    let remote = trial.far.mr.remote(0);
    for range in bad {
        for op in [WrOp::Send, WrOp::Write(remote), WrOp::WriteImm(remote, [1; 4])] {
            trial.receive(1, &[trial.far.mr.sge(0, 1 << 17)]);
            trial.post(SendRequest::new(2, op).with(&[good, range]));
            trial.expect(2, Status::LocalProtection, None);
        }
    }
}

fn remote_memory_that_may_not_be_used(fixture: &Fixture) {
    let trial = Trial::new(fixture, QpOptions::default());
    let end = &trial.testbed.b;
    let other_pd = Endpoint { context: end.context.clone(), pd: end.context.alloc_pd() };
    let foreign = fixture.host(&other_pd, 4096);
    let no_write = fixture.memory(
        end,
        Kind::Host,
        4096,
        Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
    );
    let no_read = fixture.memory(
        end,
        Kind::Host,
        4096,
        Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC,
    );
    let no_atomic = fixture.memory(
        end,
        Kind::Host,
        4096,
        Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
    );
    let far = trial.far.mr.remote(0);
    let add = Atomic::FetchAdd { add: 1 };
    let places = [
        Remote { rkey: far.rkey ^ 0x80, ..far },
        Remote { rkey: 0x00ab_cd00, ..far },
        trial.far.mr.remote((1 << 17) - 4),
        Remote { address: u64::MAX - 3, ..far },
        Remote { address: far.address.wrapping_sub(1), ..far },
        foreign.mr.remote(0),
    ];
    let mut bad: Vec<_> = vec![
        WrOp::Write(no_write.mr.remote(0)),
        WrOp::WriteImm(no_write.mr.remote(0), [0; 4]),
        WrOp::Read(no_read.mr.remote(0)),
        WrOp::Atomic(no_atomic.mr.remote(0), add),
    ];
    bad.extend(places.into_iter().flat_map(|at| [WrOp::Write(at), WrOp::Read(at)]));
    bad.push(WrOp::Atomic(Remote { rkey: far.rkey ^ 0x80, ..far }, add));
    // rxe accepts the message and fails afterwards.
    if !end.is_device() {
        bad.push(WrOp::SendInvalidate(far.rkey ^ 0x80));
        bad.push(WrOp::SendInvalidate(foreign.mr.rkey()));
    }
    for op in bad {
        let receives = matches!(op, WrOp::SendInvalidate(_) | WrOp::WriteImm(..));
        if receives {
            trial.receive(1, &[]);
        }
        let data = [trial.near.mr.sge(0, 8)];
        let request = SendRequest::new(2, op);
        let invalidates = matches!(op, WrOp::SendInvalidate(_));
        trial.post(if invalidates { request } else { request.with(&data) });
        if receives {
            // The receive is consumed and fails with the reason.
            trial.testbed.failed(&trial.conn.b.receives, 1, Status::LocalAccess);
        }
        trial.expect(2, Status::RemoteAccess, Some(access_error));
    }
    for buffer in [&no_write, &no_read, &no_atomic, &foreign] {
        same(&buffer.read(0, 64), &[0; 64], "memory without access");
    }
}

fn flags_of_the_queue_pair(fixture: &Fixture) {
    let remote_of = |trial: &Trial| trial.far.mr.remote(0);
    let all = [
        (Access::REMOTE_READ | Access::REMOTE_ATOMIC, 0),
        (Access::REMOTE_WRITE | Access::REMOTE_ATOMIC, 1),
        (Access::REMOTE_WRITE | Access::REMOTE_READ, 2),
    ];
    for (access, forbidden) in all {
        let trial =
            Trial::with(fixture, QpOptions::default(), QpOptions::default().with_access(access));
        let at = remote_of(&trial);
        let ops = [WrOp::Write(at), WrOp::Read(at), WrOp::Atomic(at, Atomic::FetchAdd { add: 1 })];
        for (n, op) in ops.into_iter().enumerate() {
            let request = SendRequest::new(n as u64, op);
            trial.post(request.with(&[trial.near.mr.sge(0, 8)]));
            if n == forbidden {
                trial.expect(n as u64, Status::RemoteInvalidRequest, Some(request_error));
            } else {
                trial.testbed.done(&trial.conn.a.sends, n as u64);
            }
        }
    }
}

fn receives_that_do_not_fit(fixture: &Fixture) {
    let trial = Trial::new(fixture, QpOptions::default());
    let end = &trial.testbed.b;
    let read_only = fixture.memory(end, Kind::Host, 4096, Access::NONE);
    for (len, capacity) in [(1, 0), (100, 99), (5000, 4999), (20_000, 4096)] {
        trial.receive(1, &[trial.far.mr.sge(0, capacity)]);
        trial.post(SendRequest::new(2, WrOp::Send).with(&[trial.near.mr.sge(0, len)]));
        trial.testbed.failed(&trial.conn.b.receives, 1, Status::LocalLength);
        trial.expect(2, Status::RemoteInvalidRequest, Some(request_error));
    }
    let far = &trial.far.mr;
    let bad = [
        Sge { lkey: far.lkey() ^ 3, ..far.sge(0, 4096) },
        far.sge((1 << 17) - 10, 4096),
        read_only.mr.sge(0, 4096),
    ];
    for range in bad {
        trial.receive(1, &[range]);
        trial.post(SendRequest::new(2, WrOp::Send).with(&[trial.near.mr.sge(0, 100)]));
        trial.testbed.failed(&trial.conn.b.receives, 1, Status::LocalProtection);
        trial.expect(2, Status::RemoteOperation, Some(fatal));
    }
}

fn responses_that_do_not_fit(fixture: &Fixture) {
    let trial = Trial::new(fixture, QpOptions::default());
    let read_only = fixture.memory(&trial.testbed.a, Kind::Host, 4096, Access::NONE);
    let far = trial.far.mr.remote(0);
    let good = trial.near.mr.sge(0, 8);
    let bad = [
        Sge { lkey: good.lkey ^ 1, ..good },
        read_only.mr.sge(0, 8),
        trial.near.mr.sge((1 << 16) - 7, 8),
    ];
    for range in bad {
        for op in [WrOp::Read(far), WrOp::Atomic(far, Atomic::FetchAdd { add: 1 })] {
            trial.post(SendRequest::new(1, op).with(&[range]));
            trial.expect(1, Status::LocalProtection, None);
        }
    }
    // No space for the result.
    trial.post(
        SendRequest::new(1, WrOp::Atomic(far, Atomic::FetchAdd { add: 1 }))
            .with(&[trial.near.mr.sge(0, 7)]),
    );
    trial.expect(1, Status::LocalLength, None);
}

fn a_peer_that_does_not_respond(fixture: &Fixture) {
    let Testbed { a, b } = fixture.testbed();
    let testbed = Testbed { a, b };
    let options = short_timeouts();
    let (one, two) =
        (testbed.test_qp(&testbed.a, options.clone()), testbed.test_qp(&testbed.b, options));
    connect(&one.qp, &two.qp);
    let near = fixture.host(&testbed.a, 4096);
    let far = fixture.host(&testbed.b, 4096);
    let remote = far.mr.remote(0);
    drop((two, far));
    // The queue pair is destroyed, its device is open.
    one.qp
        .post_send(&[SendRequest::new(1, WrOp::Write(remote)).with(&[near.mr.sge(0, 4096)])])
        .unwrap();
    testbed.failed(&one.sends, 1, Status::RetryExceeded);
    if let Ok(stats) = one.qp.stats() {
        assert!(stats.timeouts >= 3);
    }
    assert!(testbed.b.is_device() || lost(&testbed.b, "no-queue-pair") > 0);
    // The device is closed too.
    let Testbed { a, b } = testbed;
    let three = {
        let testbed = Testbed { a, b };
        let conn = testbed.join(short_timeouts());
        testbed.check_traffic(&conn);
        let QpPair { a: three, b: four } = conn;
        let Testbed { a, b } = testbed;
        drop((four, b));
        (three, a)
    };
    let (test_qp, end) = three;
    for op in [WrOp::Read(remote), WrOp::Send] {
        test_qp.qp.post_send(&[SendRequest::new(5, op)]).unwrap();
    }
    assert_eq!(next_polling_one_end(&end, &test_qp).status, Status::RetryExceeded);
    assert_eq!(next_polling_one_end(&end, &test_qp).status, Status::Flushed);
}

/// The peer's device is open but not polled: the link fills up, and senders use up their retries
/// instead of waiting forever.
fn a_peer_that_stops_draining(fixture: &Fixture) {
    const LEN: u32 = 1 << 20;
    const COUNT: u64 = 32;
    if fixture.test_link.has_device() {
        skip("a device responds without being polled");
    }
    let testbed = fixture.testbed();
    let [first, second] = [(); 2].map(|()| testbed.join(short_timeouts()));
    let near = fixture.host(&testbed.a, LEN.into());
    for id in 0..COUNT {
        let data = [near.mr.sge(0, LEN)];
        first.a.qp.post_send(&[SendRequest::new(id, WrOp::Send).with(&data)]).unwrap();
    }
    for id in 0..COUNT {
        let completion = next_polling_one_end(&testbed.a, &first.a);
        let wanted = if id == 0 { Status::RetryExceeded } else { Status::Flushed };
        assert_eq!((completion.id, completion.status), (id, wanted));
    }
    // Another queue pair finds the link full.
    second.a.qp.post_send(&[SendRequest::new(1, WrOp::Send)]).unwrap();
    assert_eq!(next_polling_one_end(&testbed.a, &second.a).status, Status::RetryExceeded);
    // Once the peer is polled again, connections work.
    testbed.poll_for(SHORT_WAIT);
    testbed.check_traffic(&testbed.join(QpOptions::default()));
}

fn lost(end: &Endpoint, reason: &str) -> u64 {
    end.context.stats().unwrap().dropped.iter().find(|(name, _)| *name == reason).unwrap().1
}

/// The next completion, polling only this end.
fn next_polling_one_end(end: &Endpoint, test_qp: &TestQp) -> Completion {
    let mut one = [Completion::EMPTY];
    let start = std::time::Instant::now();
    while test_qp.sends.poll(&mut one).unwrap() == 0 {
        end.context.soft().unwrap().poll().unwrap();
        assert!(start.elapsed() < crate::verbs::fixture::test_timeout());
    }
    one[0]
}

fn receiver_not_ready(fixture: &Fixture) {
    let trial = Trial::new(fixture, short_timeouts());
    trial.post(SendRequest::new(1, WrOp::Send).inline(b"hello"));
    trial.expect(1, Status::RnrRetryExceeded, None);
    trial
        .post(SendRequest::new(2, WrOp::WriteImm(trial.far.mr.remote(0), [0; 4])).inline(b"hello"));
    trial.expect(2, Status::RnrRetryExceeded, None);
    // `rnr_retry` 7 retries forever, until a receive is posted.
    let retrying = Trial::new(fixture, short_timeouts().with_rnr_retry(7));
    retrying.post(SendRequest::new(3, WrOp::Send).inline(b"hello"));
    let rnr_sent = || retrying.conn.b.qp.stats().map_or(u64::MAX, |stats| stats.rnr_sent);
    retrying.testbed.poll_for(Duration::from_millis(10));
    testkit::until("the receiver has sent three RNR NAKs", || {
        retrying.testbed.poll_for(Duration::from_millis(1));
        rnr_sent() > 2
    });
    retrying.receive(4, &[retrying.far.mr.sge(0, 5)]);
    retrying.testbed.done(&retrying.conn.a.sends, 3);
    retrying.testbed.done(&retrying.conn.b.receives, 4);
    same(&retrying.far.read(0, 5), b"hello", "a message after RNR NAKs");
}

fn a_failure_flushes_in_order(fixture: &Fixture) {
    let options = QpOptions::default().with_signal_all(false);
    let trial = Trial::new(fixture, options);
    for id in 0..5 {
        let data = [trial.near.mr.sge(0, 64)];
        trial.conn.a.qp.post_receive(&[ReceiveRequest { id: 50 + id, data: &data }]).unwrap();
    }
    let good =
        SendRequest::new(1, WrOp::Write(trial.far.mr.remote(0))).inline(b"before").unsignaled();
    let bad = SendRequest::new(2, WrOp::Write(Remote { address: 0, rkey: 0 }))
        .inline(b"bad")
        .unsignaled();
    let later = |id| SendRequest::new(id, WrOp::Write(trial.far.mr.remote(16))).inline(b"later");
    let wait = SendRequest::new(8, WrOp::Wait { cqn: 0xffff, index: 0 });
    let posted = [
        good,
        bad,
        later(3).unsignaled(),
        later(4),
        SendRequest::new(5, WrOp::Nop),
        later(6),
        wait,
        later(9),
    ];
    trial.conn.a.qp.post_send(&posted).unwrap();
    trial.testbed.failed(&trial.conn.a.sends, 2, Status::RemoteAccess);
    for id in [3, 4, 5, 6, 8, 9] {
        trial.testbed.failed(&trial.conn.a.sends, id, Status::Flushed);
    }
    for id in 50..55 {
        trial.testbed.failed(&trial.conn.a.receives, id, Status::Flushed);
    }
    same(
        &trial.far.read(0, 21),
        b"before\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        "bytes written before the failure",
    );
    // Work posted in ERR is flushed in order.
    for id in 10..20 {
        trial.post(later(id));
        trial.conn.a.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
    }
    for id in 10..20 {
        trial.testbed.failed(&trial.conn.a.sends, id, Status::Flushed);
        trial.testbed.failed(&trial.conn.a.receives, id, Status::Flushed);
    }
    trial.testbed.check_traffic(&trial.bystander);
    trial.reconnect();
}

/// The receiver fails in the middle of a message: the receive in use is flushed too.
fn a_failure_in_the_middle_of_a_message(fixture: &Fixture) {
    let trial = Trial::new(fixture, short_timeouts());
    let (near, far) =
        (fixture.host(&trial.testbed.a, 4 << 20), fixture.host(&trial.testbed.b, 4 << 20));
    trial.receive(1, &[far.mr.sge(0, 4 << 20)]);
    trial.receive(2, &[]);
    trial.post(SendRequest::new(3, WrOp::Send).with(&[near.mr.sge(0, 4 << 20)]));
    let begun = || trial.conn.b.qp.stats().unwrap().packets_received > 20;
    trial.testbed.until("twenty packets of a message", begun);
    trial.conn.b.qp.modify(&warpwire::verbs::QpAttributes::new(State::Err)).unwrap();
    trial.testbed.failed(&trial.conn.b.receives, 1, Status::Flushed);
    trial.testbed.failed(&trial.conn.b.receives, 2, Status::Flushed);
    trial.testbed.failed(&trial.conn.a.sends, 3, Status::RetryExceeded);
    trial.testbed.check_traffic(&trial.bystander);
    trial.reconnect();
}

fn after_a_reset_it_works_again(fixture: &Fixture) {
    let trial = Trial::new(fixture, QpOptions::default());
    for round in 0..30 {
        // Reset with sends and receives at every stage.
        trial.post(
            SendRequest::new(1, WrOp::Read(trial.far.mr.remote(0)))
                .with(&[trial.near.mr.sge(0, 1 << 15)]),
        );
        trial.post(SendRequest::new(2, WrOp::Nop));
        trial.receive(3, &[]);
        for _ in 0..round {
            trial.testbed.step();
        }
        trial.reconnect();
        let wanted = trial.near.pattern(0, 9000, round);
        trial.post(
            SendRequest::new(4, WrOp::Write(trial.far.mr.remote(7)))
                .with(&[trial.near.mr.sge(0, 9000)]),
        );
        trial.testbed.done(&trial.conn.a.sends, 4);
        same(&trial.far.read(7, 9000), &wanted, "a write after a reset");
    }
}

/// Registrations at either end are dropped while they are read or written: never a crash, and no
/// access to other memory.
fn registrations_that_end_under_traffic(fixture: &Fixture) {
    for (round, kind) in KINDS.into_iter().cycle().take(12).enumerate() {
        // Small packets, so that some always remain to be sent.
        let options = QpOptions::default().with_mtu(Mtu::new(1024));
        let trial = Trial::new(fixture, options);
        let near = fixture.memory(&trial.testbed.a, kind, 1 << 20, crate::verbs::fixture::ALL);
        let far = fixture.memory(&trial.testbed.b, kind, 1 << 20, crate::verbs::fixture::ALL);
        let range = [near.mr.sge(0, 1 << 20)];
        let writes = round % 2 == 0;
        let at = far.mr.remote(0);
        trial.post(
            SendRequest::new(1, if writes { WrOp::Write(at) } else { WrOp::Read(at) }).with(&range),
        );
        for _ in 0..=round {
            trial.testbed.step();
        }
        let remote_ends = round % 4 < 2;
        let gone = if remote_ends { far } else { near };
        drop(gone); // waits for accesses in progress
        let completion = trial.testbed.next(&trial.conn.a.sends);
        let wanted = if remote_ends { Status::RemoteAccess } else { Status::LocalProtection };
        assert_eq!(completion.status, wanted, "round {round}, {kind:?}");
        trial.testbed.check_traffic(&trial.bystander);
        trial.reconnect();
    }
}

fn atomics_that_are_not_aligned(fixture: &Fixture) {
    let trial = Trial::new(fixture, QpOptions::default());
    let width = AtomicWidth::Four;
    let ops = [
        (1, Atomic::FetchAdd { add: 1 }),
        (4, Atomic::CompareSwap { compare: 0, swap: 1 }),
        (2, Atomic::MaskedFetchAdd { width, add: 1, boundary: 0 }),
    ];
    for (offset, op) in ops {
        let request = SendRequest::new(1, WrOp::Atomic(trial.far.mr.remote(offset), op));
        trial.post(request.with(&[trial.near.mr.sge(0, 8)]));
        trial.expect(1, Status::RemoteInvalidRequest, Some(request_error));
    }
}

/// Unread completions are not reported after a reset, nor for a new queue pair in the same slot.
fn unread_completions_do_not_survive_a_reset(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default().with_send_depth(8));
    for id in 0..5 {
        conn.a.qp.post_send(&[SendRequest::new(id, WrOp::Nop)]).unwrap();
    }
    testbed.poll_for(Duration::from_millis(2));
    reset(&conn);
    for id in 100..140 {
        conn.a.qp.post_send(&[SendRequest::new(id, WrOp::Nop)]).unwrap();
        testbed.done(&conn.a.sends, id);
    }
    // A new queue pair in the slot of a destroyed one, on the same completion queue.
    let QpPair { a, b } = conn;
    a.qp.post_send(&[SendRequest::new(7, WrOp::Nop), SendRequest::new(8, WrOp::Nop)]).unwrap();
    b.qp.post_receive(&[ReceiveRequest { id: 9, data: &[] }]).unwrap();
    testbed.poll_for(Duration::from_millis(2));
    let old = a.qp.number();
    drop(a.qp);
    let (end, sends) = (&testbed.a, a.sends);
    let qp = end.context.create_qp(&end.pd, &sends, &sends, QpOptions::default()).unwrap();
    assert_ne!(qp.number(), old);
    b.qp.modify(&warpwire::verbs::QpAttributes::new(State::Reset)).unwrap();
    connect(&qp, &b.qp);
    testbed.expect_no_completion(&sends);
    qp.post_send(&[SendRequest::new(10, WrOp::Nop)]).unwrap();
    testbed.done(&sends, 10);
}

fn freed_memory_under_a_registration(fixture: &Fixture) {
    for kind in [Kind::Window, Kind::Engine, Kind::Staged] {
        let trial = Trial::new(fixture, QpOptions::default());
        let far = fixture.memory(&trial.testbed.b, kind, 1 << 16, crate::verbs::fixture::ALL);
        let near = fixture.memory(&trial.testbed.a, kind, 1 << 16, crate::verbs::fixture::ALL);
        let range = [trial.near.mr.sge(0, 1 << 15)];
        fixture.control().force_free(far.allocation()).unwrap();
        for op in [WrOp::Write(far.mr.remote(0)), WrOp::Read(far.mr.remote(0))] {
            trial.post(SendRequest::new(1, op).with(&range));
            trial.expect(1, Status::RemoteAccess, Some(access_error));
        }
        fixture.control().force_free(near.allocation()).unwrap();
        let range = [near.mr.sge(0, 1 << 15)];
        for op in
            [WrOp::Write(trial.far.mr.remote(0)), WrOp::Read(trial.far.mr.remote(0)), WrOp::Dump]
        {
            trial.post(SendRequest::new(1, op).with(&range));
            trial.expect(1, Status::LocalProtection, None);
        }
    }
}

fn zero_bytes_need_no_key(fixture: &Fixture) {
    let trial = Trial::new(fixture, QpOptions::default());
    let nowhere = Remote { address: 0x1234_5678, rkey: 0xdead_be00 };
    for op in [WrOp::Write(nowhere), WrOp::Read(nowhere)] {
        trial.post(SendRequest::new(1, op));
        let done = trial.testbed.done(&trial.conn.a.sends, 1);
        assert!(matches!(done.kind, CompletionKind::Send(_)));
    }
}
