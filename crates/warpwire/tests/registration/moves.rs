//! Memory that moves while it is registered: pinning attachments and those that follow it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use warpwire::error::Kind;
use warpwire::mem::sim::POISON;
use warpwire::verbs::{Atomic, ProgressMode, QpOptions, ReceiveRequest, SendRequest, WrOp};

use crate::registration::harness::{Buffer, Harness, MEM_KINDS, MemKind, refused};
use crate::verbs::fixture::{QpPair, Rng, Testbed, same};
use testkit::cases;

cases!(Harness; CASES:
    pinned_memory_does_not_move_bad_flow,
    moved_memory_is_remapped,
    memory_moves_under_traffic_in_both_roles,
    memory_moves_from_another_thread,
    prefetch_avoids_the_fault,
);

fn moving() -> impl Iterator<Item = MemKind> {
    MEM_KINDS.into_iter().filter(|mem_kind| mem_kind.may_move())
}

/// A static attachment pins the memory until the attachment is dropped.
fn pinned_memory_does_not_move_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let control = harness.control();
    let mut first = Buffer::new(harness, &testbed.a, MemKind::DmaBufStatic, 8192, 0);
    let memory = first.allocation().clone();
    let again = || {
        let buffer = memory.export_dmabuf(100, 64).unwrap();
        let (pd, access) = (&testbed.a.pd, MemKind::DmaBufStatic.all());
        let attach = warpwire::verbs::AttachMode::Static;
        testbed.a.context.register_dmabuf(pd, (&buffer).into(), None, access, attach).unwrap()
    };
    let expect_pinned = |users: &str| {
        let error = refused(control.relocate(&memory), &[users, "attach dynamically"]);
        assert_eq!(error.kind(), &Kind::Busy);
    };
    expect_pinned("1 of its users");
    let second = again();
    expect_pinned("2 of its users");
    drop(first.mr.take());
    expect_pinned("1 of its users");
    // A dynamic attachment of the same memory does not pin it.
    let buffer = memory.export_dmabuf(0, 64).unwrap();
    let (pd, access) = (&testbed.a.pd, MemKind::DmaBufDynamic.all());
    let attach = warpwire::verbs::AttachMode::Dynamic;
    let dynamic =
        testbed.a.context.register_dmabuf(pd, (&buffer).into(), None, access, attach).unwrap();
    drop(second);
    control.relocate(&memory).unwrap();
    drop(dynamic);
    // A registration that was refused pins nothing.
    let buffer = memory.export_dmabuf(0, 64).unwrap();
    let range = warpwire::verbs::DmaBufRange { len: 1 << 30, ..(&buffer).into() };
    let made = testbed.a.context.register_dmabuf(
        &testbed.a.pd,
        range,
        None,
        access,
        warpwire::verbs::AttachMode::Static,
    );
    refused(made, &["the range is from"]);
    control.relocate(&memory).unwrap();
    // A forced free succeeds: the registration is dead, and deregistering it succeeds.
    let third = again();
    control.force_free(&memory).unwrap();
    drop(third);
}

fn moved_memory_is_remapped(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    for mem_kind in moving() {
        let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 40_000, 0);
        let far = Buffer::new(harness, &testbed.b, mem_kind, 40_000, 3);
        for round in 0..5 {
            crate::registration::kinds::exchange(&testbed, &conn, &near, &far, round);
            harness.control().relocate(far.allocation()).unwrap();
            crate::registration::kinds::exchange(&testbed, &conn, &near, &far, 100 + round);
            crate::registration::kinds::exchange(&testbed, &conn, &near, &far, 200 + round);
        }
        let faults = far.mr().faults();
        assert_eq!(faults.lost, 5, "{mem_kind:?}: {faults:?}");
        let on_demand = matches!(
            mem_kind,
            MemKind::DmaBufDynamic | MemKind::DeviceOnDemand | MemKind::DeviceAddressOnDemand
        );
        // On demand: one fault at the first access after each move. Otherwise the registration is
        // remapped during the move, without a fault.
        let wanted = if on_demand { 6 } else { 0 };
        assert_eq!((faults.faults, faults.refused), (wanted, 0), "{mem_kind:?}: {faults:?}");
    }
}

fn prefetch_avoids_the_fault(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 40_000, 0);
    for mem_kind in
        [MemKind::DmaBufDynamic, MemKind::DeviceOnDemand, MemKind::DeviceAddressOnDemand]
    {
        let far = Buffer::new(harness, &testbed.b, mem_kind, 40_000, 3);
        // Registering does not map the memory: only an access does.
        let mut twice = Buffer::new(harness, &testbed.b, mem_kind, 64, 0);
        let first = twice.mr.take();
        twice.register(&testbed.b, mem_kind.all()).unwrap();
        assert_eq!(twice.mr().faults(), Default::default());
        drop((first, twice));
        far.mr().prefetch(0, 40_000).unwrap();
        crate::registration::kinds::exchange(&testbed, &conn, &near, &far, 7);
        let faults = far.mr().faults();
        assert_eq!((faults.faults, faults.prefetched), (0, 1), "{mem_kind:?}: {faults:?}");
        harness.control().relocate(far.allocation()).unwrap();
        far.mr().prefetch_later(100, 1).unwrap();
        crate::registration::kinds::exchange(&testbed, &conn, &near, &far, 8);
        assert_eq!(far.mr().faults().refused, 0);
        for (offset, len) in [(0, 0), (0, 40_001), (40_000, 1), (u64::MAX, 2)] {
            let error = refused(far.mr().prefetch(offset, len), &["40000 bytes"]);
            assert_eq!(error.kind(), &Kind::OutOfRange);
            refused(far.mr().prefetch_later(offset, len), &["40000 bytes"]);
        }
        harness.control().force_free(far.allocation()).unwrap();
        let gone = far.mr().prefetch(0, 1);
        assert!(gone.is_ok() || *gone.unwrap_err().kind() == Kind::Freed);
    }
}

/// Posts a write, an atomic, a read and a message; the memory of both ends may move.
fn post_all(conn: &QpPair, near: &Buffer, far: &Buffer) {
    let into = [far.mr().sge(20_001, 17_003)];
    conn.b.qp.post_receive(&[ReceiveRequest { id: 9, data: &into }]).unwrap();
    let (from, back) = ([near.mr().sge(3, 17_003)], [near.mr().sge(20_007, 17_003)]);
    let word = [near.mr().sge(39_500, 8)];
    let at = (8 - far.start % 8) % 8 + 39_000;
    let add = WrOp::Atomic(far.mr().remote(at), Atomic::FetchAdd { add: 5 });
    conn.a
        .qp
        .post_send(&[
            SendRequest::new(1, WrOp::Write(far.mr().remote(5))).with(&from),
            SendRequest::new(2, add).with(&word),
            SendRequest::new(3, WrOp::Read(far.mr().remote(5))).with(&back),
            SendRequest::new(4, WrOp::Send).with(&from),
        ])
        .unwrap();
}

fn check_all(near: &Buffer, far: &Buffer, wanted: &[u8], added: u64) {
    let what = format!("{:?} with {:?}", near.mem_kind, far.mem_kind);
    same(&far.read(5, wanted.len()), wanted, &format!("a write: {what}"));
    same(&near.read(20_007, wanted.len()), wanted, &format!("a read: {what}"));
    same(&far.read(20_001, wanted.len()), wanted, &format!("a message: {what}"));
    let at = (8 - far.start % 8) % 8 + 39_000;
    assert_eq!((far.word(at), near.word(39_500)), (added, added - 5), "{what}");
    near.check_guards();
    far.check_guards();
}

/// The memory of either end moves between any two steps of the engines.
fn memory_moves_under_traffic_in_both_roles(harness: &Harness) {
    let mut rng = Rng::new(21);
    for near in moving() {
        for far in moving() {
            let testbed = harness.fixture.testbed();
            let conn = testbed.join(QpOptions::default());
            let near = Buffer::new(harness, &testbed.a, near, 40_000, 5);
            let far = Buffer::new(harness, &testbed.b, far, 40_000, 8);
            for round in 0..4 {
                let wanted = near.pattern(3, 17_003, round);
                post_all(&conn, &near, &far);
                for _ in 0..12 {
                    (0..rng.below(4)).for_each(|_| testbed.step());
                    let which = if rng.below(2) == 0 { &near } else { &far };
                    harness.control().relocate(which.allocation()).unwrap();
                }
                (1..=4).for_each(|id| {
                    testbed.done(&conn.a.sends, id);
                });
                testbed.done(&conn.b.receives, 9);
                check_all(&near, &far, &wanted, 5 * (round + 1));
            }
        }
    }
}

/// A thread keeps moving the memory of both ends, while the devices' own threads advance the
/// engines.
fn memory_moves_from_another_thread(harness: &Harness) {
    for mem_kind in [MemKind::DmaBufDynamic, MemKind::DeviceAddress, MemKind::DeviceEngine] {
        let testbed: Testbed = harness.fixture.with_progress(ProgressMode::Auto);
        let conn = testbed.join(QpOptions::default());
        let near = Buffer::new(harness, &testbed.a, mem_kind, 40_000, 5);
        let far = Buffer::new(harness, &testbed.b, mem_kind, 40_000, 8);
        let (stop, moves) = (AtomicBool::new(false), AtomicU64::new(0));
        let control = harness.control();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for buffer in [&near, &far] {
                        control.relocate(buffer.allocation()).unwrap();
                        moves.fetch_add(1, Ordering::Relaxed);
                    }
                    std::thread::sleep(Duration::from_micros(300));
                }
            });
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                for round in 0..100_000 {
                    if round >= 60 && moves.load(Ordering::Relaxed) >= 60 {
                        return;
                    }
                    let wanted = near.pattern(3, 17_003, round);
                    post_all(&conn, &near, &far);
                    (1..=4).for_each(|id| {
                        testbed.done(&conn.a.sends, id);
                    });
                    testbed.done(&conn.b.receives, 9);
                    check_all(&near, &far, &wanted, 5 * (round + 1));
                    assert!(!near.read(20_007, 64).iter().all(|byte| *byte == POISON));
                }
            }));
            stop.store(true, Ordering::Relaxed);
            ended.unwrap_or_else(|why| std::panic::resume_unwind(why));
        });
        assert!(moves.load(Ordering::Relaxed) >= 60, "{moves:?} moves");
    }
}
