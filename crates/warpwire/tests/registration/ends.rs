//! The end of a registration: with work in flight on either side, and memory that goes before it.

use warpwire::error::Kind;
use warpwire::verbs::{
    Access, Change, Drive, Op, QpOptions, ReceiveRequest, Request, State, Status,
};

use crate::registration::stage::{Buffer, SORTS, Sort, Stage, refused};
use crate::verbs::fixture::{Joined, Rng, World, connect, same};
use testkit::cases;

cases!(Stage; CASES:
    ending_with_work_in_flight_bad_flow,
    memory_freed_under_work_bad_flow,
    a_receive_whose_memory_ended_bad_flow,
    keys_that_ended_bad_flow,
    a_late_copy_of_a_read_harms_nobody,
    a_responder_that_was_held_up_harms_nobody,
    memory_that_its_registration_keeps,
    nothing_is_left_of_many,
);

const LEN: u64 = 1 << 18;

fn revive(world: &World, joined: &Joined) {
    for side in [&joined.a, &joined.b] {
        side.qp.modify(&Change::to(State::Reset)).unwrap();
    }
    connect(&joined.a.qp, &joined.b.qp);
    world.works(joined);
}

/// The owner ends the registration in the middle of a transfer, on either side: a protection error there.
fn ending_with_work_in_flight_bad_flow(stage: &Stage) {
    let world = stage.fixture.world();
    let joined = world.join(QpOptions::default());
    let mut rng = Rng::new(3);
    let mut failures = 0;
    for sort in SORTS {
        for round in 0..8u64 {
            let ours = round % 2 == 0;
            let (mine, other) = if ours { (&world.a, &world.b) } else { (&world.b, &world.a) };
            let mut ending = Buffer::new(stage, mine, sort, LEN, 5);
            let other = Buffer::new(stage, other, Sort::HostHandle, LEN, 0);
            let (near, far) =
                if ours { (ending.mr(), other.mr()) } else { (other.mr(), ending.mr()) };
            let op = if (round / 2) % 2 == 0 {
                Op::Write(far.remote(0))
            } else {
                Op::Read(far.remote(0))
            };
            let data = [near.sge(0, LEN as u32)];
            joined.a.qp.post_send(&[Request::new(1, op).with(&data)]).unwrap();
            (0..rng.below(10)).for_each(|_| world.step());
            drop(ending.mr.take());
            // Nobody uses it any more: what is written now stays, and nobody sees it.
            ending.write(0, &[0xde; LEN as usize]);
            let done = world.next(&joined.a.sends);
            let protection = if ours { Status::LocalProtection } else { Status::RemoteAccess };
            assert!(done.status == protection || done.is_success(), "{sort:?} {round}: {done:?}");
            failures += u32::from(!done.is_success());
            assert!(ending.read(0, LEN as usize).iter().all(|byte| *byte == 0xde), "{sort:?}");
            assert!(other.read(0, LEN as usize).iter().all(|byte| *byte == 0), "{sort:?}");
            ending.check_guards();
            revive(&world, &joined);
        }
    }
    assert!(failures > 20, "most of them were in flight: {failures}");
}

/// The device takes its memory away in the middle of a transfer.
fn memory_freed_under_work_bad_flow(stage: &Stage) {
    let world = stage.fixture.world();
    let joined = world.join(QpOptions::default());
    let mut rng = Rng::new(4);
    let mut failures = 0;
    for sort in SORTS.into_iter().filter(|sort| sort.is_device()) {
        for round in 0..12u64 {
            let ours = round % 2 == 0;
            let (mine, other) = if ours { (&world.a, &world.b) } else { (&world.b, &world.a) };
            let doomed = Buffer::new(stage, mine, sort, LEN, 5);
            let other = Buffer::new(stage, other, Sort::HostHandle, LEN, 0);
            let (near, far) =
                if ours { (doomed.mr(), other.mr()) } else { (other.mr(), doomed.mr()) };
            let data = [near.sge(0, LEN as u32)];
            let op = if (round / 2) % 2 == 0 {
                Op::Write(far.remote(0))
            } else {
                Op::Read(far.remote(0))
            };
            joined.a.qp.post_send(&[Request::new(1, op).with(&data)]).unwrap();
            (0..rng.below(10)).for_each(|_| world.step());
            stage.control().free_under_users(doomed.allocation()).unwrap();
            let done = world.next(&joined.a.sends);
            let protection = if ours { Status::LocalProtection } else { Status::RemoteAccess };
            assert!(done.status == protection || done.is_success(), "{sort:?} {round}: {done:?}");
            failures += u32::from(!done.is_success());
            let found = other.read(0, LEN as usize);
            assert!(found.iter().all(|byte| *byte == 0), "{sort:?}: a byte of freed memory");
            // And for good: neither side gets at it again.
            revive(&world, &joined);
            let data = [near.sge(0, 8)];
            joined.a.qp.post_send(&[Request::new(2, op).with(&data)]).unwrap();
            world.failed(&joined.a.sends, 2, protection);
            revive(&world, &joined);
        }
    }
    assert!(failures > 20, "most of them were in flight: {failures}");
}

fn a_receive_whose_memory_ended_bad_flow(stage: &Stage) {
    let world = stage.fixture.world();
    for sort in SORTS {
        let joined = world.join(QpOptions::default());
        let near = Buffer::new(stage, &world.a, Sort::HostHandle, 4096, 0);
        let mut room = Buffer::new(stage, &world.b, sort, 4096, 5);
        let data = [room.mr().sge(0, 4096)];
        joined.b.qp.post_receive(&[ReceiveRequest { id: 2, data: &data }; 2]).unwrap();
        drop(room.mr.take());
        let data = [near.mr().sge(0, 64)];
        joined.a.qp.post_send(&[Request::new(1, Op::Send).with(&data)]).unwrap();
        world.failed(&joined.b.receives, 2, Status::LocalProtection);
        world.failed(&joined.b.receives, 2, Status::Flushed);
        world.failed(&joined.a.sends, 1, Status::RemoteOperation);
        room.check_guards();
    }
}

/// A program cannot end a registration twice: the type is taken away by its end. A key that ended is another matter.
fn keys_that_ended_bad_flow(stage: &Stage) {
    let world = stage.fixture.world();
    let near = Buffer::new(stage, &world.a, Sort::HostHandle, 4096, 0);
    for sort in SORTS {
        let mut far = Buffer::new(stage, &world.b, sort, 4096, 0);
        let (old, place) = (far.mr().remote(0), far.mr().sge(0, 64));
        far.register(&world.b, sort.all()).unwrap(); // the old one ends, the same memory has a new key
        assert_ne!(far.mr().rkey(), old.rkey);
        let data = [near.mr().sge(0, 64)];
        for op in [Op::Write(old), Op::Read(old)] {
            let joined = world.join(QpOptions::default());
            joined.a.qp.post_send(&[Request::new(1, op).with(&data)]).unwrap();
            world.failed(&joined.a.sends, 1, Status::RemoteAccess);
        }
        let joined = world.join(QpOptions::default());
        joined.b.qp.post_send(&[Request::new(1, Op::Send).with(&[place])]).unwrap();
        world.failed(&joined.b.sends, 1, Status::LocalProtection);
        // The new key works.
        let joined = world.join(QpOptions::default());
        let write = Request::new(1, Op::Write(far.mr().remote(0))).with(&data);
        joined.a.qp.post_send(&[write]).unwrap();
        world.done(&joined.a.sends, 1);
    }
}

/// Handles keep memory; addresses do not: their owner may free it, and the registration is dead.
fn memory_that_its_registration_keeps(stage: &Stage) {
    let world = stage.fixture.world();
    for sort in SORTS.into_iter().filter(|sort| sort.is_device()) {
        let buffer = Buffer::new(stage, &world.b, sort, 4096, 0);
        let by_address = matches!(sort, Sort::DeviceAddress | Sort::DeviceAddressOnDemand);
        let freed = buffer.allocation().free();
        if !by_address {
            let error = refused(freed, &["still use it"]);
            assert_eq!(error.kind(), &Kind::Busy, "{sort:?}");
            continue;
        }
        freed.unwrap();
        let near = Buffer::new(stage, &world.a, Sort::HostHandle, 4096, 0);
        let joined = world.join(QpOptions::default());
        let data = [near.mr().sge(0, 64)];
        let read = Request::new(1, Op::Read(buffer.mr().remote(0))).with(&data);
        joined.a.qp.post_send(&[read]).unwrap();
        world.failed(&joined.a.sends, 1, Status::RemoteAccess);
        assert_eq!(near.read(0, 64), [0; 64]);
    }
}

/// Thousands of registrations of every sort come and go: no descriptor, mapping or key is left of them.
fn nothing_is_left_of_many(stage: &Stage) {
    let world = stage.fixture.world();
    let registry = world.a.context.hca().registry().clone();
    let round = |count| {
        for _ in 0..count {
            for sort in SORTS {
                drop(Buffer::with(stage, &world.a, sort, 4096, 1, sort.all()).unwrap());
                let wrong = Access::REMOTE_WRITE;
                assert!(Buffer::with(stage, &world.a, sort, 4096, 1, wrong).is_err());
            }
        }
        assert!(registry.is_empty() && !world.a.pd.is_in_use());
    };
    round(20);
    stage.control().wait_empty(crate::verbs::fixture::soon()).unwrap();
    round(100);
    stage.control().wait_empty(crate::verbs::fixture::soon()).unwrap();
}

/// A network may repeat a request, and a requester may ask twice. Who has got his data may end the registration: a copy
/// of the request that comes after that costs nobody anything.
fn a_late_copy_of_a_read_harms_nobody(stage: &Stage) {
    let world = stage.fixture.faulty("dup=30%,reorder=30%,loss=2%", 11, Drive::Inline);
    let joined = world.join(QpOptions { timeout: 8, ..QpOptions::default() });
    let near = Buffer::new(stage, &world.a, Sort::HostHandle, LEN, 0);
    for round in 0..300u64 {
        let far = Buffer::new(stage, &world.b, Sort::HostHandle, LEN, 0);
        let len = 1 + round as usize * 97 % 20_000;
        let wanted = far.pattern(0, len, round);
        let (op, data) = (Op::Read(far.mr().remote(0)), [near.mr().sge(0, len as u32)]);
        joined.a.qp.post_send(&[Request::new(round, op).with(&data)]).unwrap();
        let done = world.next(&joined.a.sends);
        assert_eq!((done.id, done.status), (round, Status::Success));
        same(&near.read(0, len), &wanted, "a read");
    }
    let discarded = world.b.context.stats().discarded;
    let twice = discarded.iter().any(|(why, count)| *why == "duplicate" && *count > 0);
    assert!(twice, "no request came twice: {discarded:?}");
    assert_eq!(world.b.news(), []);
}

/// The same without any fault of the network: the responder was held up for longer than a try takes, and has two copies
/// of a request to answer, one of them late.
fn a_responder_that_was_held_up_harms_nobody(stage: &Stage) {
    let world = stage.fixture.world();
    let joined = world.join(QpOptions { timeout: 8, ..QpOptions::default() });
    let near = Buffer::new(stage, &world.a, Sort::HostHandle, LEN, 0);
    for round in 0..4 {
        let far = Buffer::new(stage, &world.b, Sort::HostHandle, LEN, 0);
        let (op, data) = (Op::Read(far.mr().remote(0)), [near.mr().sge(0, 20_000)]);
        joined.a.qp.post_send(&[Request::new(round, op).with(&data)]).unwrap();
        let requester = world.a.context.hca();
        let before = world.a.context.stats().pairs.timeouts;
        requester.poll().unwrap();
        while world.a.context.stats().pairs.timeouts == before {
            requester.poll().unwrap();
        }
        requester.poll().unwrap();
        let done = world.next(&joined.a.sends);
        assert_eq!((done.id, done.status), (round, Status::Success));
    }
    assert_eq!(world.b.news(), []);
}
