//! States of queue pairs, and creation of objects: every invalid transition or size is rejected and
//! changes nothing.

use std::time::Duration;

use warpwire::link::{Hub, LoopbackOptions};
use warpwire::verbs::{
    Access, AsyncEvent, CqOptions, Mtu, ProgressMode, QpAttributes, QpOptions, ReceiveRequest,
    SendRequest, SrqOptions, State, Status, WrOp,
};

use crate::verbs::fixture::{Fixture, Testbed, same};
use testkit::cases;

cases!(Fixture; ONCE:
    invalid_transitions_change_nothing,
    attributes_of_other_transitions,
    a_refused_reset_changes_nothing,
    an_mtu_beyond_the_link,
    peers_of_different_mtus,
    work_before_rts,
    the_queue_is_drained,
    invalid_sizes,
    receives_before_the_connection,
    access_can_change,
);

const STATES: [State; 5] = [State::Reset, State::Init, State::Rtr, State::Rts, State::Err];

fn invalid_transitions_change_nothing(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let peer = testbed.test_qp(&testbed.b, QpOptions::default());
    let endpoint = peer.qp.endpoint();
    for from in STATES {
        let test_qp = testbed.test_qp(&testbed.a, QpOptions::default());
        let qp = &test_qp.qp;
        let steps = [qp.init_attr(), qp.rtr_attr(&endpoint).unwrap(), qp.rts_attr(&endpoint)];
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
            qp.modify(&QpAttributes::new(State::Err)).unwrap();
        }
        assert_eq!(qp.state().unwrap(), from);
        for (step, to) in steps.iter().zip([State::Init, State::Rtr, State::Rts]) {
            let valid = matches!(
                (from, to),
                (State::Reset | State::Init, State::Init)
                    | (State::Init, State::Rtr)
                    | (State::Rtr, State::Rts)
            );
            if valid {
                continue;
            }
            let refused = qp.modify(step).unwrap_err().to_string();
            assert!(refused.contains(&format!("{:#x}", qp.number())), "{refused}");
            assert!(refused.len() > 40, "no reason given: {refused}");
            assert_eq!(qp.state().unwrap(), from, "{from:?} to {to:?}");
        }
        if from == State::Reset {
            assert!(qp.modify(&QpAttributes::new(State::Err)).is_err());
        }
        // Valid transitions still work.
        qp.modify(&QpAttributes::new(State::Reset)).unwrap();
        steps.iter().for_each(|step| qp.modify(step).unwrap());
    }
}

fn attributes_of_other_transitions(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let peer = testbed.test_qp(&testbed.b, QpOptions::default()).qp.endpoint();
    let qp = testbed.test_qp(&testbed.a, QpOptions::default()).qp;
    let bad = [
        qp.init_attr().with_port(None),
        qp.init_attr().with_port(9),
        qp.init_attr().with_partition_index(4),
        qp.init_attr().with_mtu(Mtu::ALL[0]),
        qp.init_attr().with_timeout(3),
        qp.init_attr().with_current_state(State::Rts),
    ];
    for change in bad {
        qp.modify(&change).unwrap_err();
        assert_eq!(qp.state().unwrap(), State::Reset, "{change:?}");
    }
    qp.modify(&qp.init_attr()).unwrap();
    let valid = qp.rtr_attr(&peer).unwrap();
    let bad = [
        valid.with_path(None),
        valid.with_mtu(None),
        valid.with_destination(None),
        valid.with_destination(1 << 24),
        valid.with_receive_psn(None),
        valid.with_min_rnr_timer(32),
        valid.with_max_dest_rd_atomic(255),
        valid.with_send_psn(valid.receive_psn),
    ];
    for change in bad {
        qp.modify(&change).unwrap_err();
        assert_eq!(qp.state().unwrap(), State::Init, "{change:?}");
    }
    for address in ["10.0.0.2:0", "0.0.0.0:4791", "224.0.0.1:4791", "[::1]:4791"] {
        let mut change = valid;
        change.path.as_mut().unwrap().peer = address.parse().unwrap();
        let refused = qp.modify(&change).unwrap_err().to_string();
        assert!(refused.contains(address), "{refused}");
        assert_eq!(qp.state().unwrap(), State::Init);
    }
    qp.modify(&valid).unwrap();
    let valid = qp.rts_attr(&peer);
    for change in [valid.with_retry_count(8), valid.with_timeout(32), valid.with_rnr_retry(None)] {
        qp.modify(&change).unwrap_err();
        assert_eq!(qp.state().unwrap(), State::Rtr, "{change:?}");
    }
    qp.modify(&valid).unwrap();
}

fn a_refused_reset_changes_nothing(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    testbed.check_traffic(&conn);
    for change in [
        QpAttributes::new(State::Reset).with_port(1),
        QpAttributes::new(State::Reset).with_current_state(State::Err),
    ] {
        conn.a.qp.modify(&change).unwrap_err();
        assert_eq!(conn.a.qp.state().unwrap(), State::Rts);
        testbed.check_traffic(&conn);
    }
}

fn an_mtu_beyond_the_link(_: &Fixture) {
    let hub = Hub::with(LoopbackOptions::default().with_max_packet(1200));
    let end = |at: &str| hub.endpoint(at.parse().unwrap()).unwrap();
    let testbed = Testbed::over(end("10.0.0.1:4791"), end("10.0.0.2:4791"), ProgressMode::Manual);
    assert_eq!(testbed.a.context.max_mtu().bytes(), 1024);
    let conn = testbed.join(QpOptions::default());
    testbed.check_traffic(&conn);
    let options = QpOptions::default().with_mtu(Mtu::new(2048));
    let (one, two) =
        (testbed.test_qp(&testbed.a, options.clone()), testbed.test_qp(&testbed.b, options));
    let refused = one.qp.connect(&two.qp.endpoint()).unwrap_err().to_string();
    assert!(refused.contains("smaller path MTU"), "{refused}");
    assert_eq!(one.qp.state().unwrap(), State::Init);
    let mut endpoint = two.qp.endpoint();
    endpoint.mtu = 1000;
    let refused = one.qp.rtr_attr(&endpoint).unwrap_err().to_string();
    assert!(refused.contains("1000"), "{refused}");
}

/// The smaller of the two MTUs is used.
fn peers_of_different_mtus(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let small = QpOptions::default().with_mtu(Mtu::new(256));
    for (a, b) in [(small.clone(), QpOptions::default()), (QpOptions::default(), small)] {
        let conn = testbed.join_with(a, b);
        let (near, far) = (fixture.host(&testbed.a, 4096), fixture.host(&testbed.b, 4096));
        let wanted = near.pattern(0, 4000, 1);
        let write = SendRequest::new(1, WrOp::Write(far.mr.remote(0)));
        conn.a.qp.post_send(&[write.with(&[near.mr.sge(0, 4000)])]).unwrap();
        testbed.done(&conn.a.sends, 1);
        same(&far.read(0, 4000), &wanted, "a write with the smaller MTU");
        if let Ok(stats) = conn.a.qp.stats() {
            // The first acknowledgement of a device waits for a second packet: it is asked again.
            let again = u64::from(testbed.b.is_device());
            let sent = stats.packets_sent - stats.resent;
            assert!((16..=16 + again).contains(&sent), "{stats:?}");
        }
    }
}

/// Before RTS, posting fails and leaves nothing in the queue; in ERR, posted work is flushed.
fn work_before_rts(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let (one, two) = (
        testbed.test_qp(&testbed.a, QpOptions::default()),
        testbed.test_qp(&testbed.b, QpOptions::default()),
    );
    let endpoint = two.qp.endpoint();
    let refused = |state: &str| {
        let why = one.qp.post_send(&[SendRequest::new(1, WrOp::Nop)]).unwrap_err().to_string();
        assert!(why.contains(state) && why.contains("RTS"), "{why}");
    };
    refused("RESET");
    one.qp.modify(&one.qp.init_attr()).unwrap();
    refused("INIT");
    one.qp.modify(&one.qp.rtr_attr(&endpoint).unwrap()).unwrap();
    refused("RTR");
    one.qp.modify(&one.qp.rts_attr(&endpoint)).unwrap();
    testbed.expect_no_completion(&one.sends);
    one.qp.post_send(&[SendRequest::new(2, WrOp::Nop)]).unwrap();
    testbed.done(&one.sends, 2);
    one.qp.modify(&QpAttributes::new(State::Err)).unwrap();
    one.qp.post_send(&[SendRequest::new(3, WrOp::Nop)]).unwrap();
    testbed.failed(&one.sends, 3, Status::Flushed);
    one.qp.modify(&QpAttributes::new(State::Reset)).unwrap();
    refused("RESET");
    // Work is also flushed if the queue pair failed before RTS.
    one.qp.modify(&one.qp.init_attr()).unwrap();
    one.qp.modify(&QpAttributes::new(State::Err)).unwrap();
    one.qp.post_send(&[SendRequest::new(4, WrOp::Nop)]).unwrap();
    testbed.failed(&one.sends, 4, Status::Flushed);
}

fn the_queue_is_drained(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let (near, far) = (fixture.host(&testbed.a, 1 << 20), fixture.host(&testbed.b, 1 << 20));
    let wanted = near.pattern(0, 1 << 20, 3);
    let range = [near.mr.sge(0, 1 << 20)];
    conn.a
        .qp
        .post_send(&[SendRequest::new(1, WrOp::Write(far.mr.remote(0))).with(&range)])
        .unwrap();
    testbed.step();
    testbed.a.async_events();
    let stop = QpAttributes::new(State::Sqd).with_notify_drained(true);
    conn.a.qp.modify(&stop).unwrap();
    conn.a
        .qp
        .post_send(&[SendRequest::new(2, WrOp::Write(far.mr.remote(0))).inline(b"later")])
        .unwrap();
    testbed.done(&conn.a.sends, 1);
    testbed.expect_no_completion(&conn.a.sends);
    same(&far.read(0, 1 << 20), &wanted, "a message begun before SQD");
    assert_eq!(testbed.a.async_events(), [AsyncEvent::Drained { qpn: conn.a.qp.number() }]);
    conn.a.qp.modify(&QpAttributes::new(State::Rts)).unwrap();
    testbed.done(&conn.a.sends, 2);
    same(&far.read(0, 5), b"later", "a message posted in SQD");
}

fn invalid_sizes(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let end = &testbed.a;
    let cq = end.context.create_cq(4).unwrap();
    for entries in [0, (1 << 22) + 1, u32::MAX] {
        assert!(end.context.create_cq(entries).is_err());
    }
    let usual = QpOptions::default();
    let bad = [
        usual.clone().with_send_depth(1 << 20),
        usual.clone().with_send_depth(u32::MAX),
        usual.clone().with_max_send_sge(u32::MAX),
        usual.clone().with_max_inline_data(u32::MAX),
        usual.clone().with_receive_depth((1 << 15) + 1),
        usual.clone().with_max_recv_sge(17),
        usual.clone().with_max_recv_sge(u32::MAX),
    ];
    for options in bad {
        let refused = end.context.create_qp(&end.pd, &cq, &cq, options.clone());
        assert!(refused.is_err(), "{options:?}");
    }
    for (depth, max_sge) in [(0, 1), (1 << 15, 1), (4, 0), (4, 16), (u32::MAX, u32::MAX)] {
        assert!(
            end.context
                .create_srq(&end.pd, SrqOptions::default().with_depth(depth).with_max_sge(max_sge))
                .is_err()
        );
    }
    assert!(end.context.create_cq_with(CqOptions::default().with_entries(0)).is_err());
    assert_eq!(
        testbed.a.context.stats().unwrap().queue_pairs,
        0,
        "queue pairs left after rejected creations"
    );
    // The minimum and maximum sizes.
    let min = usual
        .clone()
        .with_send_depth(0)
        .with_receive_depth(0)
        .with_max_send_sge(0)
        .with_max_recv_sge(0)
        .with_max_inline_data(0);
    testbed.check_traffic(&testbed.join(min));
    let max = usual.with_receive_depth(1 << 15).with_max_recv_sge(16).with_send_depth(1 << 13);
    testbed.check_traffic(&testbed.join(max));
    let ranges = vec![warpwire::verbs::Sge { address: 0, len: 1, lkey: 0 }; 70];
    let conn = testbed.join(QpOptions::default());
    assert!(conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Send).with(&ranges)]).is_err());
    assert!(conn.a.qp.post_receive(&[ReceiveRequest { id: 1, data: &ranges }]).is_err());
    assert!(conn.a.qp.post_receive(&[ReceiveRequest { id: 1, data: &ranges[..5] }]).is_err());
    testbed.check_traffic(&conn);
}

/// Receives can be posted in `INIT`, and a peer in RTS may send while this end is in RTR.
fn receives_before_the_connection(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let (one, two) = (
        testbed.test_qp(&testbed.a, QpOptions::default()),
        testbed.test_qp(&testbed.b, QpOptions::default()),
    );
    two.qp.modify(&two.qp.init_attr()).unwrap();
    two.qp.post_receive(&[ReceiveRequest { id: 5, data: &[] }]).unwrap();
    two.qp.modify(&two.qp.rtr_attr(&one.qp.endpoint()).unwrap()).unwrap();
    one.qp.connect(&two.qp.endpoint()).unwrap();
    one.qp.post_send(&[SendRequest::new(6, WrOp::Send)]).unwrap();
    testbed.done(&one.sends, 6);
    testbed.done(&two.receives, 5);
    if !testbed.b.is_device() {
        assert_eq!(testbed.b.async_events(), [AsyncEvent::Established { qpn: two.qp.number() }]);
    }
    two.qp.modify(&two.qp.rts_attr(&one.qp.endpoint())).unwrap();
    // Packets to a queue pair that is not connected yet cost retries, not the connection.
    let (three, four) = (
        testbed.test_qp(&testbed.a, QpOptions::default()),
        testbed.test_qp(&testbed.b, QpOptions::default()),
    );
    three.qp.connect(&four.qp.endpoint()).unwrap();
    three.qp.post_send(&[SendRequest::new(7, WrOp::Send)]).unwrap();
    testbed.poll_for(Duration::from_millis(5));
    four.qp.connect(&three.qp.endpoint()).unwrap();
    four.qp.post_receive(&[ReceiveRequest { id: 8, data: &[] }]).unwrap();
    testbed.done(&three.sends, 7);
    testbed.done(&four.receives, 8);
}

fn access_can_change(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn =
        testbed.join_with(QpOptions::default(), QpOptions::default().with_access(Access::NONE));
    let far = fixture.memory(
        &testbed.b,
        crate::verbs::fixture::Kind::Host,
        64,
        Access::LOCAL_WRITE | Access::REMOTE_WRITE,
    );
    let allow = QpAttributes::new(State::Rts).with_access(Access::REMOTE_WRITE);
    conn.b.qp.modify(&allow).unwrap();
    conn.a
        .qp
        .post_send(&[SendRequest::new(1, WrOp::Write(far.mr.remote(0))).inline(b"x")])
        .unwrap();
    testbed.done(&conn.a.sends, 1);
}
