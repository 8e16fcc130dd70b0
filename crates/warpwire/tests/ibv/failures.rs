//! What goes wrong, and how it is told.

use warpwire::error::Kind;
use warpwire::ibv::{Context, Op, QpOptions, Remote, Request, Route, Sge, explain_status};
use warpwire::mlx5::{Atomic, AtomicWidth, Status};
use warpwire_proto::qp::{Change, Mtu, Path, State};

use crate::ibv::world::{Side, World, device_name};
use testkit::cases;

cases!(CASES:
    a_wrong_remote_key,
    a_wrong_local_key,
    out_of_range,
    nobody_receives,
    a_receive_that_is_too_short,
    the_peer_is_gone,
    nobody_answers_at_the_address,
    a_queue_that_is_full,
    more_than_a_queue_takes,
    steps_that_there_are_not,
    queues_of_another_context,
);

/// Work fails with that status, what follows is flushed, and the queue pair is in ERR.
fn fails(side: &Side, request: Request<'_>, statuses: &[Status]) {
    let after = Request::new(request.id + 1, Op::Send).inline(b"after");
    side.qp.post_send(&[request, after]).unwrap();
    side.failed(request.id, statuses);
    side.failed(request.id + 1, &[Status::Flushed]);
    assert_eq!(side.qp.state().unwrap(), State::Err);
    for status in statuses {
        assert!(explain_status(*status).unwrap().fix.is_some());
    }
}

/// Both go through RESET, and work again.
fn mends(world: &World) {
    for side in [&world.a, &world.b] {
        if side.qp.state().unwrap() != State::Reset {
            side.qp.modify(&Change::to(State::Err), None).unwrap();
        }
        while side.cq.next(std::time::Duration::from_millis(20)).unwrap().is_some() {}
        side.qp.modify(&Change::to(State::Reset), None).unwrap();
        assert_eq!(side.qp.state().unwrap(), State::Reset);
    }
    world.connect();
    assert_eq!(world.a.qp.state().unwrap(), State::Rts);
    world.works();
}

fn a_wrong_remote_key() {
    let world = World::new();
    let wrong = Remote { rkey: world.b.mr.rkey() ^ 0x5500, ..world.there(0) };
    let range = [world.a.mr.sge(0, 64)];
    fails(&world.a, Request::new(1, Op::Write(wrong)).with(&range), &[Status::RemoteAccess]);
    mends(&world);
    fails(&world.a, Request::new(5, Op::Read(wrong)).with(&range), &[Status::RemoteAccess]);
    mends(&world);
}

/// What work that names memory of its own wrongly ends with. rxe of Linux 6.1 tells another status of a key that it does
/// not know, and rxe of 6.12 tells all of it as flushed.
fn local_protection(world: &World) -> &'static [Status] {
    match world.context.device().driver.as_deref() {
        Some("rxe") => &[Status::LocalProtection, Status::LocalQpOperation, Status::Flushed],
        _ => &[Status::LocalProtection],
    }
}

fn a_wrong_local_key() {
    let world = World::new();
    let wrong = [Sge { lkey: world.a.mr.lkey() ^ 0x5500, ..world.a.mr.sge(0, 64) }];
    world.b.memory.bytes().store_u64(0, 77).unwrap();
    fails(
        &world.a,
        Request::new(1, Op::Write(world.there(0))).with(&wrong),
        local_protection(&world),
    );
    assert_eq!(world.b.memory.bytes().load_u64(0).unwrap(), 77, "nothing was written");
    mends(&world);
}

fn out_of_range() {
    let world = World::new();
    let range = [world.a.mr.sge(0, 64)];
    let beyond = world.there(world.b.mr.len() - 10);
    fails(&world.a, Request::new(1, Op::Write(beyond)).with(&range), &[Status::RemoteAccess]);
    mends(&world);
    let here = [world.a.mr.sge(world.a.mr.len() - 10, 64)];
    fails(
        &world.a,
        Request::new(5, Op::Write(world.there(0))).with(&here),
        local_protection(&world),
    );
    mends(&world);
}

fn nobody_receives() {
    let world = World::with(|options| QpOptions { rnr_retry: 1, ..options });
    fails(&world.a, Request::new(1, Op::Send).inline(b"to nobody"), &[Status::RnrRetryExceeded]);
    mends(&world);
}

fn a_receive_that_is_too_short() {
    let world = World::new();
    world.b.receive(9, 0, 10);
    let range = [world.a.mr.sge(0, 64)];
    // rxe answers otherwise than the standard, on both sides.
    let (theirs, ours): (&[Status], &[Status]) = match world.context.device().driver.as_deref() {
        Some("rxe") => {
            (&[Status::RemoteOperation], &[Status::LocalLength, Status::LocalQpOperation])
        }
        _ => (&[Status::RemoteInvalidRequest], &[Status::LocalLength]),
    };
    fails(&world.a, Request::new(1, Op::Send).with(&range), theirs);
    world.b.failed(9, ours);
    mends(&world);
}

fn the_peer_is_gone() {
    let world = World::with(|options| QpOptions { timeout: 10, retry_count: 2, ..options });
    world.b.qp.modify(&Change::to(State::Reset), None).unwrap();
    fails(&world.a, Request::new(1, Op::Send).inline(b"gone"), &[Status::RetryExceeded]);
    let explained = explain_status(Status::RetryExceeded).unwrap();
    assert!(explained.why.contains("does not answer"), "{explained:?}");
    mends(&world);
}

fn to_rtr() -> Change {
    Change {
        mtu: Mtu::new(1024),
        destination: Some(17),
        receive_psn: Some(warpwire_proto::Psn::new(1)),
        max_dest_rd_atomic: Some(1),
        min_rnr_timer: Some(12),
        ..Change::to(State::Rtr)
    }
}

fn nobody_answers_at_the_address() {
    let world = World::unconnected(|options| options);
    world.a.qp.modify(&world.a.qp.to_init(), None).unwrap();
    // Of the device's own network, as the laboratory has it.
    let own = world.context.gid(1, world.gid_index.into()).unwrap().address;
    let std::net::IpAddr::V4(own) = own else { panic!("the guest has IPv4") };
    let [a, b, c, _] = own.octets();
    let peer = (std::net::Ipv4Addr::new(a, b, c, 99), 4791).into();
    let path = Path { peer, traffic_class: 0, hop_limit: 64, flow_label: 0 };
    let refused = world.a.qp.modify(&Change { path: Some(path), ..to_rtr() }, None).unwrap_err();
    assert_eq!(refused.kind(), &Kind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("nobody answers"), "{refused}");
}

fn a_queue_that_is_full() {
    let world = World::with(|options| QpOptions { send_depth: 4, rnr_retry: 7, ..options });
    // They wait for a receive, so that none makes room.
    let request = Request::new(1, Op::Send).inline(b"waits");
    let refused = world.a.qp.post_send(&[request; 200]).unwrap_err();
    assert!((4..200).contains(&refused.posted), "{refused}");
    assert_eq!(refused.error.kind(), &Kind::Busy, "{refused}");
    assert!(refused.to_string().contains("take completions"), "{refused}");
    for _ in 0..refused.posted {
        world.b.receive(2, 0, 64);
        world.b.done(2);
        world.a.done(1);
    }
    world.works();
}

fn more_than_a_queue_takes() {
    let world = World::new();
    let long = vec![0; world.a.qp.inline_room() as usize + 1];
    let ranges = vec![world.a.mr.sge(0, 1); 100];
    let masked = Atomic::MaskedFetchAdd { width: AtomicWidth::Four, add: 1, boundary: 0 };
    for (request, says) in [
        (Request::new(2, Op::Send).inline(&long), "more inline bytes"),
        (Request::new(2, Op::Send).with(&ranges), "more ranges"),
        (Request::new(2, Op::Atomic(world.there(0), masked)).with(&ranges[..1]), "masked"),
    ] {
        // What comes before it is posted all the same, and told.
        world.b.receive(8, 0, 64);
        let good = Request::new(1, Op::Send).inline(b"good");
        let refused = world.a.qp.post_send(&[good, request, good]).unwrap_err();
        assert_eq!(refused.posted, 1);
        assert!(refused.to_string().contains(says), "{refused}");
        world.a.done(1);
        world.b.done(8);
    }
    let receive = warpwire::ibv::ReceiveRequest { id: 1, data: &ranges };
    let refused = world.b.qp.post_receive(&[receive]).unwrap_err();
    assert!(refused.to_string().contains("100 ranges"), "{refused}");
    let deep = QpOptions { send_depth: u32::MAX / 2, ..QpOptions::default() };
    let refused = world.pd.create_qp(&world.a.cq, &world.a.cq, deep).unwrap_err();
    assert!(refused.to_string().contains("warpwire devices -v"), "{refused}");
}

fn steps_that_there_are_not() {
    let world = World::unconnected(|options| options);
    let refused = world.a.qp.modify(&Change::to(State::Rts), None).unwrap_err();
    assert!(refused.to_string().contains("RESET"), "{refused}");
    world.a.qp.modify(&world.a.qp.to_init(), None).unwrap();
    let own = world.context.gid(1, world.gid_index.into()).unwrap().address;
    // A GID that is not there: the answer lists those that are.
    let route = Route::to(own, 1, 200);
    let refused = world.a.qp.modify(&to_rtr(), Some(&route)).unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("no address at that place") && text.contains(&own.to_string()), "{text}");
    assert_eq!(world.a.qp.state().unwrap(), State::Init);
}

fn queues_of_another_context() {
    let world = World::unconnected(|options| options);
    let other = Context::open(&device_name()).unwrap();
    let foreign = other.create_cq(16).unwrap();
    let refused = world.pd.create_qp(&world.a.cq, &foreign, QpOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("another context"), "{refused}");
    let srq = other.create_pd().unwrap().create_srq(4, 1).unwrap();
    let options = QpOptions { srq: Some(srq), ..QpOptions::default() };
    let refused = world.pd.create_qp(&world.a.cq, &world.a.cq, options).unwrap_err();
    assert!(refused.to_string().contains("another context"), "{refused}");
}
