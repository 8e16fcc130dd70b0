//! Memory that moves while it is registered: those who keep it in its place, and those who follow it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use warpwire::error::Kind;
use warpwire::mem::sim::POISON;
use warpwire::verbs::{Atomic, Drive, Op, QpOptions, ReceiveRequest, Request};

use crate::registration::stage::{Buffer, SORTS, Sort, Stage, refused};
use crate::verbs::fixture::{Joined, Rng, World, same};
use testkit::cases;

cases!(Stage; CASES:
    pinned_memory_does_not_move_bad_flow,
    memory_is_found_where_it_moved_to,
    memory_moves_under_traffic_in_both_roles,
    memory_moves_from_another_thread,
    prefetch_finds_it_beforehand,
);

fn moving() -> impl Iterator<Item = Sort> {
    SORTS.into_iter().filter(|sort| sort.may_move())
}

/// Static attachments keep memory where it is, each of them for as long as it lasts.
fn pinned_memory_does_not_move_bad_flow(stage: &Stage) {
    let world = stage.fixture.world();
    let control = stage.control();
    let mut first = Buffer::new(stage, &world.a, Sort::DmaBufStatic, 8192, 0);
    let memory = first.allocation().clone();
    let again = || {
        let buffer = memory.export_dmabuf(100, 64).unwrap();
        let (pd, access) = (&world.a.pd, Sort::DmaBufStatic.all());
        let attach = warpwire::verbs::Attach::Static;
        world.a.context.register_dmabuf(pd, (&buffer).into(), None, access, attach).unwrap()
    };
    let stays = |users: &str| {
        let error = refused(control.relocate(&memory), &[users, "attach dynamically"]);
        assert_eq!(error.kind(), &Kind::Busy);
    };
    stays("1 of its users");
    let second = again();
    stays("2 of its users");
    drop(first.mr.take());
    stays("1 of its users");
    // A dynamic attachment of the same memory keeps nobody from anything.
    let buffer = memory.export_dmabuf(0, 64).unwrap();
    let (pd, access) = (&world.a.pd, Sort::DmaBufDynamic.all());
    let attach = warpwire::verbs::Attach::Dynamic;
    let dynamic =
        world.a.context.register_dmabuf(pd, (&buffer).into(), None, access, attach).unwrap();
    drop(second);
    control.relocate(&memory).unwrap();
    drop(dynamic);
    // A registration that was refused pins nothing.
    let buffer = memory.export_dmabuf(0, 64).unwrap();
    let range = warpwire::verbs::DmaBufRange { len: 1 << 30, ..(&buffer).into() };
    let made = world.a.context.register_dmabuf(
        &world.a.pd,
        range,
        None,
        access,
        warpwire::verbs::Attach::Static,
    );
    refused(made, &["the range goes from"]);
    control.relocate(&memory).unwrap();
    // Freed all the same, if the device is told to: the registration is dead, and its end is quiet.
    let third = again();
    control.free_under_users(&memory).unwrap();
    drop(third);
}

fn memory_is_found_where_it_moved_to(stage: &Stage) {
    let world = stage.fixture.world();
    let joined = world.join(QpOptions::default());
    for sort in moving() {
        let near = Buffer::new(stage, &world.a, Sort::HostHandle, 40_000, 0);
        let far = Buffer::new(stage, &world.b, sort, 40_000, 3);
        for round in 0..5 {
            crate::registration::sorts::exchange(&world, &joined, &near, &far, round);
            stage.control().relocate(far.allocation()).unwrap();
            crate::registration::sorts::exchange(&world, &joined, &near, &far, 100 + round);
            crate::registration::sorts::exchange(&world, &joined, &near, &far, 200 + round);
        }
        let faults = far.mr().faults();
        assert_eq!(faults.lost, 5, "{sort:?}: {faults:?}");
        let on_demand = matches!(
            sort,
            Sort::DmaBufDynamic | Sort::DeviceOnDemand | Sort::DeviceAddressOnDemand
        );
        // Found when it is needed, once after each move; or at once, and then nobody had to wait.
        let wanted = if on_demand { 6 } else { 0 };
        assert_eq!((faults.faults, faults.refused), (wanted, 0), "{sort:?}: {faults:?}");
    }
}

fn prefetch_finds_it_beforehand(stage: &Stage) {
    let world = stage.fixture.world();
    let joined = world.join(QpOptions::default());
    let near = Buffer::new(stage, &world.a, Sort::HostHandle, 40_000, 0);
    for sort in [Sort::DmaBufDynamic, Sort::DeviceOnDemand, Sort::DeviceAddressOnDemand] {
        let far = Buffer::new(stage, &world.b, sort, 40_000, 3);
        // Registering it once more finds nothing: only a use does.
        let mut twice = Buffer::new(stage, &world.b, sort, 64, 0);
        let first = twice.mr.take();
        twice.register(&world.b, sort.all()).unwrap();
        assert_eq!(twice.mr().faults(), Default::default());
        drop((first, twice));
        far.mr().prefetch(0, 40_000).unwrap();
        crate::registration::sorts::exchange(&world, &joined, &near, &far, 7);
        let faults = far.mr().faults();
        assert_eq!((faults.faults, faults.prefetched), (0, 1), "{sort:?}: {faults:?}");
        stage.control().relocate(far.allocation()).unwrap();
        far.mr().prefetch_later(100, 1).unwrap();
        crate::registration::sorts::exchange(&world, &joined, &near, &far, 8);
        assert_eq!(far.mr().faults().refused, 0);
        for (offset, len) in [(0, 0), (0, 40_001), (40_000, 1), (u64::MAX, 2)] {
            let error = refused(far.mr().prefetch(offset, len), &["40000 bytes"]);
            assert_eq!(error.kind(), &Kind::OutOfRange);
            refused(far.mr().prefetch_later(offset, len), &["40000 bytes"]);
        }
        stage.control().free_under_users(far.allocation()).unwrap();
        let gone = far.mr().prefetch(0, 1);
        assert!(gone.is_ok() || *gone.unwrap_err().kind() == Kind::Freed);
    }
}

/// Posts one of each on a connection whose both ends may move.
fn post_all(joined: &Joined, near: &Buffer, far: &Buffer) {
    let room = [far.mr().sge(20_001, 17_003)];
    joined.b.qp.post_receive(&[ReceiveRequest { id: 9, data: &room }]).unwrap();
    let (from, back) = ([near.mr().sge(3, 17_003)], [near.mr().sge(20_007, 17_003)]);
    let word = [near.mr().sge(39_500, 8)];
    let at = (8 - far.start % 8) % 8 + 39_000;
    let add = Op::Atomic(far.mr().remote(at), Atomic::FetchAdd { add: 5 });
    joined
        .a
        .qp
        .post_send(&[
            Request::new(1, Op::Write(far.mr().remote(5))).with(&from),
            Request::new(2, add).with(&word),
            Request::new(3, Op::Read(far.mr().remote(5))).with(&back),
            Request::new(4, Op::Send).with(&from),
        ])
        .unwrap();
}

fn check_all(near: &Buffer, far: &Buffer, wanted: &[u8], added: u64) {
    let what = format!("{:?} with {:?}", near.sort, far.sort);
    same(&far.read(5, wanted.len()), wanted, &format!("a write: {what}"));
    same(&near.read(20_007, wanted.len()), wanted, &format!("a read: {what}"));
    same(&far.read(20_001, wanted.len()), wanted, &format!("a message: {what}"));
    let at = (8 - far.start % 8) % 8 + 39_000;
    assert_eq!((far.word(at), near.word(39_500)), (added, added - 5), "{what}");
    near.check_guards();
    far.check_guards();
}

/// Between any two steps of the engines, either end moves.
fn memory_moves_under_traffic_in_both_roles(stage: &Stage) {
    let mut rng = Rng::new(21);
    for near in moving() {
        for far in moving() {
            let world = stage.fixture.world();
            let joined = world.join(QpOptions::default());
            let near = Buffer::new(stage, &world.a, near, 40_000, 5);
            let far = Buffer::new(stage, &world.b, far, 40_000, 8);
            for round in 0..4 {
                let wanted = near.pattern(3, 17_003, round);
                post_all(&joined, &near, &far);
                for _ in 0..12 {
                    (0..rng.below(4)).for_each(|_| world.step());
                    let which = if rng.below(2) == 0 { &near } else { &far };
                    stage.control().relocate(which.allocation()).unwrap();
                }
                (1..=4).for_each(|id| {
                    world.done(&joined.a.sends, id);
                });
                world.done(&joined.b.receives, 9);
                check_all(&near, &far, &wanted, 5 * (round + 1));
            }
        }
    }
}

/// Another thread moves both ends all the time, while threads of the devices' own drive them.
fn memory_moves_from_another_thread(stage: &Stage) {
    for sort in [Sort::DmaBufDynamic, Sort::DeviceAddress, Sort::DeviceEngine] {
        let world: World = stage.fixture.driven(Drive::Guarded);
        let joined = world.join(QpOptions::default());
        let near = Buffer::new(stage, &world.a, sort, 40_000, 5);
        let far = Buffer::new(stage, &world.b, sort, 40_000, 8);
        let (over, moves) = (AtomicBool::new(false), AtomicU64::new(0));
        let control = stage.control();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
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
                    post_all(&joined, &near, &far);
                    (1..=4).for_each(|id| {
                        world.done(&joined.a.sends, id);
                    });
                    world.done(&joined.b.receives, 9);
                    check_all(&near, &far, &wanted, 5 * (round + 1));
                    assert!(!near.read(20_007, 64).iter().all(|byte| *byte == POISON));
                }
            }));
            over.store(true, Ordering::Relaxed);
            ended.unwrap_or_else(|why| std::panic::resume_unwind(why));
        });
        assert!(moves.load(Ordering::Relaxed) >= 60, "{moves:?} moves");
    }
}
