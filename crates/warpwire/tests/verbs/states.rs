//! The states of queue pairs, and how things are made: every wrong step is refused, and changes nothing.

use std::time::Duration;

use warpwire::link::{Hub, loopback};
use warpwire::verbs::{
    Access, AsyncEvent, Change, CqOptions, Drive, Mtu, Op, QpOptions, ReceiveRequest, Request,
    SrqOptions, State, Status,
};
use warpwire_proto::qp::Access as QpAccess;

use crate::verbs::fixture::{Fixture, World, same};
use testkit::cases;

cases!(Fixture; ONCE:
    wrong_steps_change_nothing,
    attributes_that_do_not_belong,
    a_refused_reset_changes_nothing,
    an_mtu_beyond_the_link,
    peers_of_different_mtus,
    work_before_its_time,
    the_queue_is_drained,
    sizes_that_cannot_be,
    receives_before_the_connection,
    access_can_change,
);

const STATES: [State; 5] = [State::Reset, State::Init, State::Rtr, State::Rts, State::Err];

fn wrong_steps_change_nothing(fixture: &Fixture) {
    let world = fixture.world();
    let peer = world.side(&world.b, QpOptions::default());
    let offer = peer.qp.offer();
    for from in STATES {
        let side = world.side(&world.a, QpOptions::default());
        let qp = &side.qp;
        let steps = [qp.to_init(), qp.to_rtr(&offer).unwrap(), qp.to_rts(&offer)];
        let reach = match from {
            State::Reset => 0,
            State::Init | State::Err => 1,
            State::Rtr => 2,
            _ => 3,
        };
        for step in &steps[..reach] {
            qp.modify(step).unwrap();
        }
        if from == State::Err {
            qp.modify(&Change::to(State::Err)).unwrap();
        }
        assert_eq!(qp.state().unwrap(), from);
        for (step, to) in steps.iter().zip([State::Init, State::Rtr, State::Rts]) {
            let right = matches!(
                (from, to),
                (State::Reset | State::Init, State::Init)
                    | (State::Init, State::Rtr)
                    | (State::Rtr, State::Rts)
            );
            if right {
                continue;
            }
            let refused = qp.modify(step).unwrap_err().to_string();
            assert!(refused.contains(&format!("{:#x}", qp.number())), "{refused}");
            assert!(refused.len() > 40, "it says why: {refused}");
            assert_eq!(qp.state().unwrap(), from, "{from:?} to {to:?}");
        }
        if from == State::Reset {
            assert!(qp.modify(&Change::to(State::Err)).is_err());
        }
        // And the right way still works.
        qp.modify(&Change::to(State::Reset)).unwrap();
        steps.iter().for_each(|step| qp.modify(step).unwrap());
    }
}

fn attributes_that_do_not_belong(fixture: &Fixture) {
    let world = fixture.world();
    let peer = world.side(&world.b, QpOptions::default()).qp.offer();
    let qp = world.side(&world.a, QpOptions::default()).qp;
    let bad = [
        Change { port: None, ..qp.to_init() },
        Change { port: Some(9), ..qp.to_init() },
        Change { partition_index: Some(4), ..qp.to_init() },
        Change { mtu: Some(Mtu::ALL[0]), ..qp.to_init() },
        Change { timeout: Some(3), ..qp.to_init() },
        Change { current_state: Some(State::Rts), ..qp.to_init() },
    ];
    for change in bad {
        qp.modify(&change).unwrap_err();
        assert_eq!(qp.state().unwrap(), State::Reset, "{change:?}");
    }
    qp.modify(&qp.to_init()).unwrap();
    let right = qp.to_rtr(&peer).unwrap();
    let bad = [
        Change { path: None, ..right },
        Change { mtu: None, ..right },
        Change { destination: None, ..right },
        Change { destination: Some(1 << 24), ..right },
        Change { receive_psn: None, ..right },
        Change { min_rnr_timer: Some(32), ..right },
        Change { max_dest_rd_atomic: Some(255), ..right },
        Change { send_psn: right.receive_psn, ..right },
    ];
    for change in bad {
        qp.modify(&change).unwrap_err();
        assert_eq!(qp.state().unwrap(), State::Init, "{change:?}");
    }
    for address in ["10.0.0.2:0", "0.0.0.0:4791", "224.0.0.1:4791", "[::1]:4791"] {
        let mut change = right;
        change.path.as_mut().unwrap().peer = address.parse().unwrap();
        let refused = qp.modify(&change).unwrap_err().to_string();
        assert!(refused.contains(address), "{refused}");
        assert_eq!(qp.state().unwrap(), State::Init);
    }
    qp.modify(&right).unwrap();
    let right = qp.to_rts(&peer);
    for change in [
        Change { retry_count: Some(8), ..right },
        Change { timeout: Some(32), ..right },
        Change { rnr_retry: None, ..right },
    ] {
        qp.modify(&change).unwrap_err();
        assert_eq!(qp.state().unwrap(), State::Rtr, "{change:?}");
    }
    qp.modify(&right).unwrap();
}

fn a_refused_reset_changes_nothing(fixture: &Fixture) {
    let world = fixture.world();
    let joined = world.join(QpOptions::default());
    world.works(&joined);
    for change in [
        Change { port: Some(1), ..Change::to(State::Reset) },
        Change { current_state: Some(State::Err), ..Change::to(State::Reset) },
    ] {
        joined.a.qp.modify(&change).unwrap_err();
        assert_eq!(joined.a.qp.state().unwrap(), State::Rts);
        world.works(&joined);
    }
}

fn an_mtu_beyond_the_link(_: &Fixture) {
    let hub = Hub::with(loopback::Options { largest: 1200, ..loopback::Options::default() });
    let end = |at: &str| hub.endpoint(at.parse().unwrap()).unwrap();
    let world = World::over(end("10.0.0.1:4791"), end("10.0.0.2:4791"), Drive::Inline);
    assert_eq!(world.a.context.largest_mtu().bytes(), 1024);
    let joined = world.join(QpOptions::default());
    world.works(&joined);
    let options = QpOptions { mtu: Mtu::new(2048), ..QpOptions::default() };
    let (one, two) = (world.side(&world.a, options.clone()), world.side(&world.b, options));
    let refused = one.qp.connect(&two.qp.offer()).unwrap_err().to_string();
    assert!(refused.contains("smaller path MTU"), "{refused}");
    assert_eq!(one.qp.state().unwrap(), State::Init);
    let mut offer = two.qp.offer();
    offer.mtu = 1000;
    let refused = one.qp.to_rtr(&offer).unwrap_err().to_string();
    assert!(refused.contains("1000"), "{refused}");
}

/// Each offers what it takes; the smaller one counts.
fn peers_of_different_mtus(fixture: &Fixture) {
    let world = fixture.world();
    let small = QpOptions { mtu: Mtu::new(256), ..QpOptions::default() };
    for (a, b) in [(small.clone(), QpOptions::default()), (QpOptions::default(), small)] {
        let joined = world.join_with(a, b);
        let (near, far) = (fixture.host(&world.a, 4096), fixture.host(&world.b, 4096));
        let wanted = near.pattern(0, 4000, 1);
        let write = Request::new(1, Op::Write(far.mr.remote(0)));
        joined.a.qp.post_send(&[write.with(&[near.mr.sge(0, 4000)])]).unwrap();
        world.done(&joined.a.sends, 1);
        same(&far.read(0, 4000), &wanted, "a write by the smaller MTU");
        if let Ok(stats) = joined.a.qp.stats() {
            assert_eq!(stats.packets_sent, 16);
        }
    }
}

/// Work is refused at once before a queue pair may send, and nothing of it is left; one that failed gives it back.
fn work_before_its_time(fixture: &Fixture) {
    let world = fixture.world();
    let (one, two) =
        (world.side(&world.a, QpOptions::default()), world.side(&world.b, QpOptions::default()));
    let offer = two.qp.offer();
    let refused = |state: &str| {
        let why = one.qp.post_send(&[Request::new(1, Op::Nop)]).unwrap_err().to_string();
        assert!(why.contains(state) && why.contains("RTS"), "{why}");
    };
    refused("RESET");
    one.qp.modify(&one.qp.to_init()).unwrap();
    refused("INIT");
    one.qp.modify(&one.qp.to_rtr(&offer).unwrap()).unwrap();
    refused("RTR");
    one.qp.modify(&one.qp.to_rts(&offer)).unwrap();
    world.quiet(&one.sends);
    one.qp.post_send(&[Request::new(2, Op::Nop)]).unwrap();
    world.done(&one.sends, 2);
    one.qp.modify(&Change::to(State::Err)).unwrap();
    one.qp.post_send(&[Request::new(3, Op::Nop)]).unwrap();
    world.failed(&one.sends, 3, Status::Flushed);
    one.qp.modify(&Change::to(State::Reset)).unwrap();
    refused("RESET");
    // It fails before it ever could send: then work comes back too.
    one.qp.modify(&one.qp.to_init()).unwrap();
    one.qp.modify(&Change::to(State::Err)).unwrap();
    one.qp.post_send(&[Request::new(4, Op::Nop)]).unwrap();
    world.failed(&one.sends, 4, Status::Flushed);
}

fn the_queue_is_drained(fixture: &Fixture) {
    let world = fixture.world();
    let joined = world.join(QpOptions::default());
    let (near, far) = (fixture.host(&world.a, 1 << 20), fixture.host(&world.b, 1 << 20));
    let wanted = near.pattern(0, 1 << 20, 3);
    let range = [near.mr.sge(0, 1 << 20)];
    joined.a.qp.post_send(&[Request::new(1, Op::Write(far.mr.remote(0))).with(&range)]).unwrap();
    world.step();
    world.a.news();
    let stop = Change { notify_drained: Some(true), ..Change::to(State::Sqd) };
    joined.a.qp.modify(&stop).unwrap();
    joined
        .a
        .qp
        .post_send(&[Request::new(2, Op::Write(far.mr.remote(0))).inline(b"later")])
        .unwrap();
    world.done(&joined.a.sends, 1);
    world.quiet(&joined.a.sends);
    same(&far.read(0, 1 << 20), &wanted, "what was begun is finished");
    assert_eq!(world.a.news(), [AsyncEvent::Drained { qpn: joined.a.qp.number() }]);
    joined.a.qp.modify(&Change::to(State::Rts)).unwrap();
    world.done(&joined.a.sends, 2);
    same(&far.read(0, 5), b"later", "what waited");
}

fn sizes_that_cannot_be(fixture: &Fixture) {
    let world = fixture.world();
    let end = &world.a;
    let cq = end.context.create_cq(4).unwrap();
    for entries in [0, (1 << 22) + 1, u32::MAX] {
        assert!(end.context.create_cq(entries).is_err());
    }
    let usual = QpOptions::default();
    let bad = [
        QpOptions { send_depth: 1 << 20, ..usual.clone() },
        QpOptions { send_depth: u32::MAX, ..usual.clone() },
        QpOptions { send_ranges: u32::MAX, ..usual.clone() },
        QpOptions { inline: u32::MAX, ..usual.clone() },
        QpOptions { receive_depth: (1 << 15) + 1, ..usual.clone() },
        QpOptions { receive_ranges: 17, ..usual.clone() },
        QpOptions { receive_ranges: u32::MAX, ..usual.clone() },
    ];
    for options in bad {
        let refused = end.context.create_qp(&end.pd, &cq, &cq, options.clone());
        assert!(refused.is_err(), "{options:?}");
    }
    for (depth, ranges) in [(0, 1), (1 << 15, 1), (4, 0), (4, 16), (u32::MAX, u32::MAX)] {
        assert!(end.context.create_srq(&end.pd, SrqOptions { depth, ranges }).is_err());
    }
    assert!(end.context.create_cq_with(CqOptions { entries: 0, ..CqOptions::default() }).is_err());
    assert_eq!(world.a.context.stats().queue_pairs, 0, "nothing is left of what was refused");
    // The least and the most that can be.
    let least = QpOptions {
        send_depth: 0,
        receive_depth: 0,
        send_ranges: 0,
        receive_ranges: 0,
        inline: 0,
        ..usual.clone()
    };
    world.works(&world.join(least));
    let most =
        QpOptions { receive_depth: 1 << 15, receive_ranges: 16, send_depth: 1 << 13, ..usual };
    world.works(&world.join(most));
    let ranges = vec![warpwire::verbs::Sge { address: 0, len: 1, lkey: 0 }; 70];
    let joined = world.join(QpOptions::default());
    assert!(joined.a.qp.post_send(&[Request::new(1, Op::Send).with(&ranges)]).is_err());
    assert!(joined.a.qp.post_receive(&[ReceiveRequest { id: 1, data: &ranges }]).is_err());
    assert!(joined.a.qp.post_receive(&[ReceiveRequest { id: 1, data: &ranges[..5] }]).is_err());
    world.works(&joined);
}

/// Receives are posted in `INIT`, and a peer that is ready first may send before we are.
fn receives_before_the_connection(fixture: &Fixture) {
    let world = fixture.world();
    let (one, two) =
        (world.side(&world.a, QpOptions::default()), world.side(&world.b, QpOptions::default()));
    two.qp.modify(&two.qp.to_init()).unwrap();
    two.qp.post_receive(&[ReceiveRequest { id: 5, data: &[] }]).unwrap();
    two.qp.modify(&two.qp.to_rtr(&one.qp.offer()).unwrap()).unwrap();
    one.qp.connect(&two.qp.offer()).unwrap();
    one.qp.post_send(&[Request::new(6, Op::Send)]).unwrap();
    world.done(&one.sends, 6);
    world.done(&two.receives, 5);
    if !world.b.is_device() {
        assert_eq!(world.b.news(), [AsyncEvent::Established { qpn: two.qp.number() }]);
    }
    two.qp.modify(&two.qp.to_rts(&one.qp.offer())).unwrap();
    // And one that does not exist yet for its peer costs tries, not the connection.
    let (three, four) =
        (world.side(&world.a, QpOptions::default()), world.side(&world.b, QpOptions::default()));
    three.qp.connect(&four.qp.offer()).unwrap();
    three.qp.post_send(&[Request::new(7, Op::Send)]).unwrap();
    world.drive_for(Duration::from_millis(5));
    four.qp.connect(&three.qp.offer()).unwrap();
    four.qp.post_receive(&[ReceiveRequest { id: 8, data: &[] }]).unwrap();
    world.done(&three.sends, 7);
    world.done(&four.receives, 8);
}

fn access_can_change(fixture: &Fixture) {
    let world = fixture.world();
    let joined = world.join_with(
        QpOptions::default(),
        QpOptions { access: QpAccess::NONE, ..QpOptions::default() },
    );
    let far = fixture.memory(
        &world.b,
        crate::verbs::fixture::Kind::Host,
        64,
        Access::LOCAL_WRITE | Access::REMOTE_WRITE,
    );
    let allow = Change { access: Some(QpAccess::REMOTE_WRITE), ..Change::to(State::Rts) };
    joined.b.qp.modify(&allow).unwrap();
    joined.a.qp.post_send(&[Request::new(1, Op::Write(far.mr.remote(0))).inline(b"x")]).unwrap();
    world.done(&joined.a.sends, 1);
}
