//! Every sort of memory is what work reads and writes: at odd places, and nothing beside it.

use warpwire::error::Kind;
use warpwire::mr::{Named, Path};
use warpwire::verbs::{Access, Atomic, Op, QpOptions, ReceiveRequest, Remote, Request, Status};

use crate::registration::stage::{Buffer, SORTS, Sort, Stage, refused};
use crate::verbs::fixture::{Joined, Which, World, same};
use testkit::cases;

cases!(Stage; CASES:
    every_sort_is_read_and_written,
    every_sort_says_what_it_is,
    a_place_of_choice_is_where_work_finds_it,
    rights_that_were_not_given_bad_flow,
    ranges_outside_bad_flow,
    rights_that_no_registration_gives_bad_flow,
    another_domain_bad_flow,
);

const LEN: u64 = 40_000;
/// Where the word of atomics is: aligned in every buffer, whatever its skew.
const SKEWS: [u64; 4] = [0, 1, 4093, 2056];

/// A write, a read, a message and, where both can, an atomic; every byte is looked at.
pub fn exchange(world: &World, joined: &Joined, near: &Buffer, far: &Buffer, seed: u64) {
    let what = format!("{:?} with {:?}", near.sort, far.sort);
    let len = 17_003usize;
    let wanted = near.pattern(3, len, seed);
    far.write(5, &vec![0; len]);
    far.write(20_001, &vec![0; len]);
    let (from, back) = ([near.mr().sge(3, len as u32)], [near.mr().sge(20_007, len as u32)]);
    let room = [far.mr().sge(20_001, len as u32)];
    joined.b.qp.post_receive(&[ReceiveRequest { id: 9, data: &room }]).unwrap();
    joined
        .a
        .qp
        .post_send(&[
            Request::new(1, Op::Write(far.mr().remote(5))).with(&from),
            Request::new(2, Op::Read(far.mr().remote(5))).with(&back),
            Request::new(3, Op::Send).with(&from),
        ])
        .unwrap();
    (1..=3).for_each(|id| {
        let done = world.next(&joined.a.sends);
        let [ours, theirs] = [near, far].map(|end| (end.mr().faults(), end.mr().failure()));
        let why = world.b.context.hca().qp_denied(joined.b.qp.number());
        let told = format!("{what}: {ours:?} {theirs:?}, refused there: {why:?}");
        assert_eq!((done.id, done.status), (id, Status::Success), "{told}");
    });
    world.done(&joined.b.receives, 9);
    same(&far.read(5, len), &wanted, &format!("a write: {what}"));
    same(&near.read(20_007, len), &wanted, &format!("a read: {what}"));
    same(&far.read(20_001, len), &wanted, &format!("a message: {what}"));
    if far.sort.has_atomics() {
        let at = (8 - far.start % 8) % 8 + 39_000;
        far.write(at, &seed.to_ne_bytes());
        let word = [near.mr().sge(39_500, 8)];
        let add = Op::Atomic(far.mr().remote(at), Atomic::FetchAdd { add: 5 });
        joined.a.qp.post_send(&[Request::new(4, add).with(&word)]).unwrap();
        world.done(&joined.a.sends, 4);
        assert_eq!((near.word(39_500), far.word(at)), (seed, seed.wrapping_add(5)), "{what}");
    }
    near.check_guards();
    far.check_guards();
}

fn every_sort_is_read_and_written(stage: &Stage) {
    let world = stage.fixture.world();
    let joined = world.join(QpOptions::default());
    for (n, near) in SORTS.into_iter().enumerate() {
        for (m, far) in SORTS.into_iter().enumerate() {
            // Over a link that takes longer, each sort meets itself and one other.
            if stage.fixture.which != Which::Loopback && (n + m) % SORTS.len() > 1 && n != m {
                continue;
            }
            let near = Buffer::new(stage, &world.a, near, LEN, SKEWS[m % 4]);
            let far = Buffer::new(stage, &world.b, far, LEN, SKEWS[n % 4]);
            exchange(&world, &joined, &near, &far, (n * 100 + m) as u64);
        }
    }
}

fn every_sort_says_what_it_is(stage: &Stage) {
    let world = stage.fixture.world();
    for sort in SORTS {
        let buffer = Buffer::new(stage, &world.a, sort, 4096, 0);
        let mr = buffer.mr();
        let is_window = matches!(mr.path(), Path::Window(_));
        match sort {
            Sort::HostHandle => assert_eq!((mr.path(), mr.named()), (Path::Host, &Named::Handle)),
            Sort::HostAddress | Sort::Anonymous => {
                assert_eq!((mr.path(), mr.client()), (Path::Host, Some("host")));
                assert_eq!(mr.iova() % 4096, 0);
            }
            Sort::HostOnDemand | Sort::AnonymousOnDemand => {
                assert_eq!((mr.path(), mr.client()), (Path::OnDemand, Some("host")));
            }
            Sort::Memfd => assert_eq!(mr.path(), Path::DmaBuf),
            Sort::DeviceEngine => assert!(matches!(mr.path(), Path::Engine | Path::Staged)),
            Sort::DeviceAddress | Sort::DeviceAddressOnDemand => {
                assert_eq!(mr.client(), Some(stage.gpu().info().backend.to_string().as_str()));
                assert_eq!(mr.iova(), buffer.allocation().address().raw() + buffer.start);
            }
            Sort::DmaBufStatic => assert_eq!(mr.named().to_string(), "dma-buf (pinned)"),
            Sort::DmaBufDynamic => assert_eq!(mr.named().to_string(), "dma-buf (may move)"),
            Sort::Pinned => assert_eq!(mr.path(), Path::Host),
            Sort::Device | Sort::DeviceOnDemand => assert_eq!(mr.named(), &Named::Handle),
        }
        if sort.is_device() && sort != Sort::DeviceEngine {
            assert!(is_window || !mr.why().is_empty(), "{sort:?}: no window, and no reason");
        }
    }
}

fn a_place_of_choice_is_where_work_finds_it(stage: &Stage) {
    let world = stage.fixture.world();
    let joined = world.join(QpOptions::default());
    let near = Buffer::new(stage, &world.a, Sort::HostHandle, 4096, 0);
    let far = Buffer::new(stage, &world.b, Sort::DeviceAddress, 4096, 100);
    let (end, access) = (&world.b, Access::ALL);
    let address = far.allocation().address().raw() + far.start;
    let chosen = 0xffff_ffff_0000_0007;
    // SAFETY: the buffer outlives both registrations.
    let at = unsafe { end.context.register_address(&end.pd, address, 4096, Some(chosen), access) };
    let zero = access | Access::ZERO_BASED;
    // SAFETY: as above.
    let based = unsafe { end.context.register_address(&end.pd, address, 4096, None, zero) };
    let (at, based) = (at.unwrap(), based.unwrap());
    assert_eq!((at.iova(), based.iova()), (chosen, 0));
    let wanted = near.pattern(0, 100, 3);
    let from = [near.mr().sge(0, 100)];
    for (n, (mr, address)) in [(&at, chosen + 11), (&based, 500)].into_iter().enumerate() {
        let remote = Remote { address, rkey: mr.rkey() };
        joined.a.qp.post_send(&[Request::new(1, Op::Write(remote)).with(&from)]).unwrap();
        world.done(&joined.a.sends, 1);
        same(&far.read([11, 500][n], 100), &wanted, "a write to a place of choice");
    }
    // Both at once is a contradiction, whichever way the memory is named.
    // SAFETY: as above.
    let both = unsafe { end.context.register_address(&end.pd, address, 4096, Some(8), zero) };
    refused(both, &["zero-based"]);
    let region = far.allocation().region(far.start, 4096).unwrap();
    refused(end.context.register_at(&end.pd, region, Some(8), zero), &["zero-based"]);
    far.check_guards();
}

/// What a registration does not give fails the work on the right side, for every sort of memory.
fn rights_that_were_not_given_bad_flow(stage: &Stage) {
    let world = stage.fixture.world();
    let near = Buffer::new(stage, &world.a, Sort::HostHandle, 4096, 0);
    let from = [near.mr().sge(0, 64)];
    for sort in SORTS {
        let only = |access| Buffer::with(stage, &world.b, sort, 4096, 0, access).unwrap();
        let (none, read) = (only(Access::NONE), only(Access::REMOTE_READ));
        let write = only(Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let atomic = Atomic::FetchAdd { add: 1 };
        for (far, op) in [
            (&none, Op::Write(none.mr().remote(0))),
            (&none, Op::Read(none.mr().remote(0))),
            (&read, Op::Write(read.mr().remote(0))),
            (&read, Op::Atomic(read.mr().remote(0), atomic)),
            (&write, Op::Read(write.mr().remote(0))),
            (&write, Op::Atomic(write.mr().remote(0), atomic)),
        ] {
            let joined = world.join(QpOptions::default());
            let data = if matches!(op, Op::Atomic(..)) { [near.mr().sge(0, 8)] } else { from };
            joined.a.qp.post_send(&[Request::new(1, op).with(&data)]).unwrap();
            world.failed(&joined.a.sends, 1, Status::RemoteAccess);
            assert_eq!(far.read(0, 4096), vec![0; 4096], "{sort:?} {op:?}");
        }
        // A receive needs the right to write locally; its owner made the mistake.
        let joined = world.join(QpOptions::default());
        let room = [read.mr().sge(0, 64)];
        joined.b.qp.post_receive(&[ReceiveRequest { id: 2, data: &room }]).unwrap();
        joined.a.qp.post_send(&[Request::new(1, Op::Send).with(&from)]).unwrap();
        world.failed(&joined.a.sends, 1, Status::RemoteOperation);
        world.failed(&joined.b.receives, 2, Status::LocalProtection);
    }
}

fn ranges_outside_bad_flow(stage: &Stage) {
    let world = stage.fixture.world();
    let near = Buffer::new(stage, &world.a, Sort::HostHandle, 8192, 0);
    for sort in SORTS {
        let far = Buffer::new(stage, &world.b, sort, 5000, 9);
        let mr = far.mr();
        let beyond = [
            (mr.remote(4999), 2),
            (mr.remote(5000), 1),
            (mr.remote(0), 5001),
            (mr.remote(u64::MAX), 1),
            (mr.remote(u64::MAX), 2),
            (Remote { address: u64::MAX, rkey: mr.rkey() }, 3),
            (Remote { rkey: mr.rkey() ^ 1, ..mr.remote(0) }, 1),
            (Remote { rkey: mr.rkey().wrapping_add(0x100), ..mr.remote(0) }, 1),
        ];
        for (at, len) in beyond {
            for op in [Op::Write(at), Op::Read(at)] {
                let joined = world.join(QpOptions::default());
                let data = [near.mr().sge(0, len)];
                joined.a.qp.post_send(&[Request::new(1, op).with(&data)]).unwrap();
                world.failed(&joined.a.sends, 1, Status::RemoteAccess);
            }
        }
        // The last byte is inside.
        let joined = world.join(QpOptions::default());
        let data = [near.mr().sge(0, 1)];
        let last = Request::new(1, Op::Write(mr.remote(4999))).with(&data);
        joined.a.qp.post_send(&[last]).unwrap();
        world.done(&joined.a.sends, 1);
        far.check_guards();
        // The same from this side: the requester's own protection error.
        let own = Buffer::new(stage, &world.a, sort, 5000, 9);
        let target = Buffer::new(stage, &world.b, Sort::HostHandle, 8192, 0);
        for (offset, len) in [(4999, 2), (5000, 1), (u64::MAX, 2)] {
            let joined = world.join(QpOptions::default());
            let data = [own.mr().sge(offset, len)];
            let write = Request::new(1, Op::Write(target.mr().remote(0))).with(&data);
            joined.a.qp.post_send(&[write]).unwrap();
            world.failed(&joined.a.sends, 1, Status::LocalProtection);
            assert_eq!(target.read(0, 16), [0; 16]);
        }
    }
}

fn rights_that_no_registration_gives_bad_flow(stage: &Stage) {
    let world = stage.fixture.world();
    let sums = [
        Access::REMOTE_WRITE,
        Access::REMOTE_ATOMIC,
        Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
    ];
    for sort in SORTS {
        for access in sums {
            let made = Buffer::with(stage, &world.a, sort, 4096, 0, access);
            let error = refused(made.map(drop), &["local-write"]);
            assert_eq!(error.kind(), &Kind::InvalidArgument);
        }
        let more = match sort {
            Sort::Memfd | Sort::DmaBufStatic | Sort::DmaBufDynamic => {
                Some([sort.all() | Access::ZERO_BASED, sort.all() | Access::ON_DEMAND])
            }
            Sort::HostOnDemand | Sort::AnonymousOnDemand => Some([Access::ALL; 2]),
            _ => None,
        };
        for access in more.into_iter().flatten() {
            let made = Buffer::with(stage, &world.a, sort, 4096, 0, access);
            refused(made.map(drop), &["register"]);
        }
        assert!(world.a.context.hca().registry().is_empty(), "{sort:?} left something behind");
    }
}

fn another_domain_bad_flow(stage: &Stage) {
    let world = stage.fixture.world();
    let near = Buffer::new(stage, &world.a, Sort::HostHandle, 4096, 0);
    let stranger =
        crate::verbs::fixture::End { context: world.b.context.clone(), pd: world.b.context.pd() };
    for sort in SORTS {
        let far = Buffer::new(stage, &stranger, sort, 4096, 0);
        let data = [near.mr().sge(0, 64)];
        for op in [Op::Write(far.mr().remote(0)), Op::Read(far.mr().remote(0))] {
            let joined = world.join(QpOptions::default());
            joined.a.qp.post_send(&[Request::new(1, op).with(&data)]).unwrap();
            world.failed(&joined.a.sends, 1, Status::RemoteAccess);
        }
        let joined = world.join(QpOptions::default());
        let room = [far.mr().sge(0, 64)];
        joined.b.qp.post_receive(&[ReceiveRequest { id: 2, data: &room }]).unwrap();
        joined.a.qp.post_send(&[Request::new(1, Op::Send).with(&data)]).unwrap();
        world.failed(&joined.b.receives, 2, Status::LocalProtection);
        assert_eq!(far.read(0, 64), [0; 64], "{sort:?}");
    }
}
