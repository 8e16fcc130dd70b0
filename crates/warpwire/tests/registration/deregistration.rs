//! Deregistration with work in flight on either side, and memory freed before deregistration.

use warpwire::error::Kind;
use warpwire::verbs::{
    Access, ProgressMode, QpAttributes, QpOptions, ReceiveRequest, SendRequest, State, Status, WrOp,
};

use crate::registration::harness::{Buffer, Harness, MEM_KINDS, MemKind, refused};
use crate::verbs::fixture::{QpPair, Rng, Testbed, connect, same};
use testkit::cases;

cases!(Harness; CASES:
    deregistration_with_work_in_flight_bad_flow,
    memory_freed_under_work_bad_flow,
    a_deregistered_receive_buffer_bad_flow,
    deregistered_keys_bad_flow,
    a_late_duplicate_read_is_harmless,
    a_delayed_responder_is_harmless,
    handle_registrations_keep_memory_allocated,
    many_registrations_leave_nothing_behind,
);

const LEN: u64 = 1 << 18;

fn reconnect(testbed: &Testbed, conn: &QpPair) {
    for test_qp in [&conn.a, &conn.b] {
        test_qp.qp.modify(&QpAttributes::new(State::Reset)).unwrap();
    }
    connect(&conn.a.qp, &conn.b.qp);
    testbed.check_traffic(conn);
}

/// Deregistration during a transfer, on either side, fails the work with that side's protection
/// error.
fn deregistration_with_work_in_flight_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let mut rng = Rng::new(3);
    let mut failures = 0;
    for mem_kind in MEM_KINDS {
        for round in 0..8u64 {
            let ours = round % 2 == 0;
            let (mine, other) =
                if ours { (&testbed.a, &testbed.b) } else { (&testbed.b, &testbed.a) };
            let mut ending = Buffer::new(harness, mine, mem_kind, LEN, 5);
            let other = Buffer::new(harness, other, MemKind::HostHandle, LEN, 0);
            let (near, far) =
                if ours { (ending.mr(), other.mr()) } else { (other.mr(), ending.mr()) };
            let op = if (round / 2) % 2 == 0 {
                WrOp::Write(far.remote(0))
            } else {
                WrOp::Read(far.remote(0))
            };
            let data = [near.sge(0, LEN as u32)];
            conn.a.qp.post_send(&[SendRequest::new(1, op).with(&data)]).unwrap();
            (0..rng.below(10)).for_each(|_| testbed.step());
            drop(ending.mr.take());
            // The device no longer accesses the memory: these bytes are not overwritten or sent.
            ending.write(0, &[0xde; LEN as usize]);
            let done = testbed.next(&conn.a.sends);
            let protection = if ours { Status::LocalProtection } else { Status::RemoteAccess };
            assert!(
                done.status == protection || done.is_success(),
                "{mem_kind:?} {round}: {done:?}"
            );
            failures += u32::from(!done.is_success());
            assert!(ending.read(0, LEN as usize).iter().all(|byte| *byte == 0xde), "{mem_kind:?}");
            assert!(other.read(0, LEN as usize).iter().all(|byte| *byte == 0), "{mem_kind:?}");
            ending.check_guards();
            reconnect(&testbed, &conn);
        }
    }
    assert!(failures > 20, "too few transfers were in flight: {failures}");
}

/// The device frees its memory during a transfer.
fn memory_freed_under_work_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let mut rng = Rng::new(4);
    let mut failures = 0;
    for mem_kind in MEM_KINDS.into_iter().filter(|mem_kind| mem_kind.is_device()) {
        for round in 0..12u64 {
            let ours = round % 2 == 0;
            let (mine, other) =
                if ours { (&testbed.a, &testbed.b) } else { (&testbed.b, &testbed.a) };
            let doomed = Buffer::new(harness, mine, mem_kind, LEN, 5);
            let other = Buffer::new(harness, other, MemKind::HostHandle, LEN, 0);
            let (near, far) =
                if ours { (doomed.mr(), other.mr()) } else { (other.mr(), doomed.mr()) };
            let data = [near.sge(0, LEN as u32)];
            let op = if (round / 2) % 2 == 0 {
                WrOp::Write(far.remote(0))
            } else {
                WrOp::Read(far.remote(0))
            };
            conn.a.qp.post_send(&[SendRequest::new(1, op).with(&data)]).unwrap();
            (0..rng.below(10)).for_each(|_| testbed.step());
            harness.control().force_free(doomed.allocation()).unwrap();
            let done = testbed.next(&conn.a.sends);
            let protection = if ours { Status::LocalProtection } else { Status::RemoteAccess };
            assert!(
                done.status == protection || done.is_success(),
                "{mem_kind:?} {round}: {done:?}"
            );
            failures += u32::from(!done.is_success());
            let found = other.read(0, LEN as usize);
            assert!(found.iter().all(|byte| *byte == 0), "{mem_kind:?}: a byte of freed memory");
            // Permanently: later accesses fail as well.
            reconnect(&testbed, &conn);
            let data = [near.sge(0, 8)];
            conn.a.qp.post_send(&[SendRequest::new(2, op).with(&data)]).unwrap();
            testbed.failed(&conn.a.sends, 2, protection);
            reconnect(&testbed, &conn);
        }
    }
    assert!(failures > 20, "too few transfers were in flight: {failures}");
}

fn a_deregistered_receive_buffer_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    for mem_kind in MEM_KINDS {
        let conn = testbed.join(QpOptions::default());
        let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
        let mut into = Buffer::new(harness, &testbed.b, mem_kind, 4096, 5);
        let data = [into.mr().sge(0, 4096)];
        conn.b.qp.post_receive(&[ReceiveRequest { id: 2, data: &data }; 2]).unwrap();
        drop(into.mr.take());
        let data = [near.mr().sge(0, 64)];
        conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Send).with(&data)]).unwrap();
        testbed.failed(&conn.b.receives, 2, Status::LocalProtection);
        testbed.failed(&conn.b.receives, 2, Status::Flushed);
        testbed.failed(&conn.a.sends, 1, Status::RemoteOperation);
        into.check_guards();
    }
}

/// A program cannot deregister twice, because that consumes the `Mr`, but it can use an old key.
fn deregistered_keys_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    for mem_kind in MEM_KINDS {
        let mut far = Buffer::new(harness, &testbed.b, mem_kind, 4096, 0);
        let (old, old_sge) = (far.mr().remote(0), far.mr().sge(0, 64));
        // Registers the same memory under a new key and drops the old registration.
        far.register(&testbed.b, mem_kind.all()).unwrap();
        assert_ne!(far.mr().rkey(), old.rkey);
        let data = [near.mr().sge(0, 64)];
        for op in [WrOp::Write(old), WrOp::Read(old)] {
            let conn = testbed.join(QpOptions::default());
            conn.a.qp.post_send(&[SendRequest::new(1, op).with(&data)]).unwrap();
            testbed.failed(&conn.a.sends, 1, Status::RemoteAccess);
        }
        let conn = testbed.join(QpOptions::default());
        conn.b.qp.post_send(&[SendRequest::new(1, WrOp::Send).with(&[old_sge])]).unwrap();
        testbed.failed(&conn.b.sends, 1, Status::LocalProtection);
        // The new key works.
        let conn = testbed.join(QpOptions::default());
        let write = SendRequest::new(1, WrOp::Write(far.mr().remote(0))).with(&data);
        conn.a.qp.post_send(&[write]).unwrap();
        testbed.done(&conn.a.sends, 1);
    }
}

/// A registration by handle keeps the memory allocated. One by address does not: the owner may free
/// the memory, and the registration is dead.
fn handle_registrations_keep_memory_allocated(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    for mem_kind in MEM_KINDS.into_iter().filter(|mem_kind| mem_kind.is_device()) {
        let buffer = Buffer::new(harness, &testbed.b, mem_kind, 4096, 0);
        let by_address =
            matches!(mem_kind, MemKind::DeviceAddress | MemKind::DeviceAddressOnDemand);
        let freed = buffer.allocation().free();
        if !by_address {
            let error = refused(freed, &["still use it"]);
            assert_eq!(error.kind(), &Kind::Busy, "{mem_kind:?}");
            continue;
        }
        freed.unwrap();
        let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
        let conn = testbed.join(QpOptions::default());
        let data = [near.mr().sge(0, 64)];
        let read = SendRequest::new(1, WrOp::Read(buffer.mr().remote(0))).with(&data);
        conn.a.qp.post_send(&[read]).unwrap();
        testbed.failed(&conn.a.sends, 1, Status::RemoteAccess);
        assert_eq!(near.read(0, 64), [0; 64]);
    }
}

/// Many registrations of every kind leave no descriptor, mapping or key behind.
fn many_registrations_leave_nothing_behind(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let registry = testbed.a.context.registry().unwrap().clone();
    let round = |count| {
        for _ in 0..count {
            for mem_kind in MEM_KINDS {
                drop(Buffer::with(harness, &testbed.a, mem_kind, 4096, 1, mem_kind.all()).unwrap());
                let wrong = Access::REMOTE_WRITE;
                assert!(Buffer::with(harness, &testbed.a, mem_kind, 4096, 1, wrong).is_err());
            }
        }
        assert!(registry.is_empty() && !testbed.a.pd.soft().unwrap().is_in_use());
    };
    round(20);
    harness.control().wait_empty(crate::verbs::fixture::test_timeout()).unwrap();
    round(100);
    harness.control().wait_empty(crate::verbs::fixture::test_timeout()).unwrap();
}

/// The network may duplicate a read request, and a requester may retransmit it. A responder may
/// deregister once the read is complete: a duplicate that arrives later is discarded without error.
fn a_late_duplicate_read_is_harmless(harness: &Harness) {
    let testbed = harness.fixture.faulty("dup=30%,reorder=30%,loss=2%", 11, ProgressMode::Manual);
    let conn = testbed.join(QpOptions::default().with_timeout(8));
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, LEN, 0);
    for round in 0..300u64 {
        let far = Buffer::new(harness, &testbed.b, MemKind::HostHandle, LEN, 0);
        let len = 1 + round as usize * 97 % 20_000;
        let wanted = far.pattern(0, len, round);
        let (op, data) = (WrOp::Read(far.mr().remote(0)), [near.mr().sge(0, len as u32)]);
        conn.a.qp.post_send(&[SendRequest::new(round, op).with(&data)]).unwrap();
        let done = testbed.next(&conn.a.sends);
        assert_eq!((done.id, done.status), (round, Status::Success));
        same(&near.read(0, len), &wanted, "a read");
    }
    let discarded = testbed.b.context.stats().unwrap().discarded;
    let has_duplicates = discarded.iter().any(|(why, count)| *why == "duplicate" && *count > 0);
    assert!(has_duplicates, "no duplicate request arrived: {discarded:?}");
    assert_eq!(testbed.b.async_events(), []);
}

/// The same without network faults: the responder is delayed beyond the retransmission timeout and
/// answers two copies of a request, one of them late.
fn a_delayed_responder_is_harmless(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default().with_timeout(8));
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, LEN, 0);
    for round in 0..4 {
        let far = Buffer::new(harness, &testbed.b, MemKind::HostHandle, LEN, 0);
        let (op, data) = (WrOp::Read(far.mr().remote(0)), [near.mr().sge(0, 20_000)]);
        conn.a.qp.post_send(&[SendRequest::new(round, op).with(&data)]).unwrap();
        let requester = testbed.a.context.soft().unwrap();
        let before = testbed.a.context.stats().unwrap().pairs.timeouts;
        requester.poll().unwrap();
        while testbed.a.context.stats().unwrap().pairs.timeouts == before {
            requester.poll().unwrap();
        }
        requester.poll().unwrap();
        let done = testbed.next(&conn.a.sends);
        assert_eq!((done.id, done.status), (round, Status::Success));
    }
    assert_eq!(testbed.b.async_events(), []);
}
