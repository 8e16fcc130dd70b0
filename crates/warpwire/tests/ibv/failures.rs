//! Failures, and how they are reported.

use warpwire::error::Kind;
use warpwire::ibv::{
    AhAttributes, Context, QpOptions, Remote, SendRequest, Sge, WrOp, explain_status,
};
use warpwire::mlx5::{Atomic, AtomicWidth, Status};
use warpwire::verbs::PostError;
use warpwire_proto::qp::{Mtu, PathAttributes, QpAttributes, State};

use crate::ibv::testbed::{TestQp, Testbed, device_name};
use testkit::cases;

cases!(CASES:
    a_wrong_remote_key,
    a_wrong_local_key,
    out_of_range,
    no_receive_is_posted,
    a_receive_that_is_too_short,
    the_peer_is_gone,
    no_host_at_the_address,
    a_queue_that_is_full,
    more_than_a_queue_takes,
    invalid_transitions,
    queues_of_another_context,
);

/// Asserts that the request fails with one of `statuses`, that later work is flushed, and that the
/// queue pair is in ERR.
fn fails(test_qp: &TestQp, request: SendRequest<'_>, statuses: &[Status]) {
    let after = SendRequest::new(request.id + 1, WrOp::Send).inline(b"after");
    test_qp.qp.post_send(&[request, after]).unwrap();
    test_qp.failed(request.id, statuses);
    test_qp.failed(request.id + 1, &[Status::Flushed]);
    assert_eq!(test_qp.qp.state().unwrap(), State::Err);
    for status in statuses {
        assert!(explain_status(*status).unwrap().fix.is_some());
    }
}

/// Resets and reconnects both queue pairs, and checks that they work.
fn recovers(testbed: &Testbed) {
    for test_qp in [&testbed.a, &testbed.b] {
        if test_qp.qp.state().unwrap() != State::Reset {
            test_qp.qp.modify(&QpAttributes::new(State::Err), None).unwrap();
        }
        while test_qp.cq.wait_next(std::time::Duration::from_millis(20)).unwrap().is_some() {}
        test_qp.qp.modify(&QpAttributes::new(State::Reset), None).unwrap();
        assert_eq!(test_qp.qp.state().unwrap(), State::Reset);
    }
    testbed.connect();
    assert_eq!(testbed.a.qp.state().unwrap(), State::Rts);
    testbed.check_traffic();
}

fn a_wrong_remote_key() {
    let testbed = Testbed::new();
    let wrong = Remote { rkey: testbed.b.mr.rkey() ^ 0x5500, ..testbed.there(0) };
    let range = [testbed.a.mr.sge(0, 64)];
    fails(
        &testbed.a,
        SendRequest::new(1, WrOp::Write(wrong)).with(&range),
        &[Status::RemoteAccess],
    );
    recovers(&testbed);
    fails(&testbed.a, SendRequest::new(5, WrOp::Read(wrong)).with(&range), &[Status::RemoteAccess]);
    recovers(&testbed);
}

/// Statuses of a request with invalid local memory. rxe of Linux 6.1 reports another status for an
/// unknown key, and rxe of 6.12 reports all of these as flushed.
fn local_protection(testbed: &Testbed) -> &'static [Status] {
    match testbed.context.device().driver.as_deref() {
        Some("rxe") => &[Status::LocalProtection, Status::LocalQpOperation, Status::Flushed],
        _ => &[Status::LocalProtection],
    }
}

fn a_wrong_local_key() {
    let testbed = Testbed::new();
    let wrong = [Sge { lkey: testbed.a.mr.lkey() ^ 0x5500, ..testbed.a.mr.sge(0, 64) }];
    testbed.b.memory.bytes().store_u64(0, 77).unwrap();
    fails(
        &testbed.a,
        SendRequest::new(1, WrOp::Write(testbed.there(0))).with(&wrong),
        local_protection(&testbed),
    );
    assert_eq!(testbed.b.memory.bytes().load_u64(0).unwrap(), 77, "memory was written");
    recovers(&testbed);
}

fn out_of_range() {
    let testbed = Testbed::new();
    let range = [testbed.a.mr.sge(0, 64)];
    let beyond = testbed.there(testbed.b.mr.len() - 10);
    fails(
        &testbed.a,
        SendRequest::new(1, WrOp::Write(beyond)).with(&range),
        &[Status::RemoteAccess],
    );
    recovers(&testbed);
    let here = [testbed.a.mr.sge(testbed.a.mr.len() - 10, 64)];
    fails(
        &testbed.a,
        SendRequest::new(5, WrOp::Write(testbed.there(0))).with(&here),
        local_protection(&testbed),
    );
    recovers(&testbed);
}

fn no_receive_is_posted() {
    let testbed = Testbed::with(|options| QpOptions { rnr_retry: 1, ..options });
    fails(
        &testbed.a,
        SendRequest::new(1, WrOp::Send).inline(b"not ready"),
        &[Status::RnrRetryExceeded],
    );
    recovers(&testbed);
}

fn a_receive_that_is_too_short() {
    let testbed = Testbed::new();
    testbed.b.receive(9, 0, 10);
    let range = [testbed.a.mr.sge(0, 64)];
    // rxe deviates from the standard at both ends.
    let (theirs, ours): (&[Status], &[Status]) = match testbed.context.device().driver.as_deref() {
        Some("rxe") => {
            (&[Status::RemoteOperation], &[Status::LocalLength, Status::LocalQpOperation])
        }
        _ => (&[Status::RemoteInvalidRequest], &[Status::LocalLength]),
    };
    fails(&testbed.a, SendRequest::new(1, WrOp::Send).with(&range), theirs);
    testbed.b.failed(9, ours);
    recovers(&testbed);
}

fn the_peer_is_gone() {
    let testbed = Testbed::with(|options| QpOptions { timeout: 10, retry_count: 2, ..options });
    testbed.b.qp.modify(&QpAttributes::new(State::Reset), None).unwrap();
    fails(&testbed.a, SendRequest::new(1, WrOp::Send).inline(b"gone"), &[Status::RetryExceeded]);
    let explained = explain_status(Status::RetryExceeded).unwrap();
    assert!(explained.why.contains("does not answer"), "{explained:?}");
    recovers(&testbed);
}

fn rtr_attr() -> QpAttributes {
    QpAttributes::new(State::Rtr)
        .with_mtu(Mtu::new(1024))
        .with_destination(17)
        .with_receive_psn(warpwire_proto::Psn::new(1))
        .with_max_dest_rd_atomic(1)
        .with_min_rnr_timer(12)
}

fn no_host_at_the_address() {
    let testbed = Testbed::unconnected(|options| options);
    testbed.a.qp.modify(&testbed.a.qp.init_attr(), None).unwrap();
    // An unused address in the device's own network.
    let own = testbed.context.gid(1, testbed.gid_index.into()).unwrap().address;
    let std::net::IpAddr::V4(own) = own else { panic!("the guest has no IPv4 address") };
    let [a, b, c, _] = own.octets();
    let peer = (std::net::Ipv4Addr::new(a, b, c, 99), 4791).into();
    let path =
        PathAttributes { peer, traffic_class: 0, hop_limit: 64, flow_label: 0, source_port: None };
    let refused = testbed.a.qp.modify(&rtr_attr().with_path(path), None).unwrap_err();
    assert_eq!(refused.kind(), &Kind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("no reply to ARP"), "{refused}");
}

fn a_queue_that_is_full() {
    let testbed = Testbed::with(|options| QpOptions { send_depth: 4, rnr_retry: 7, ..options });
    // They wait for a receive, so that none completes.
    let request = SendRequest::new(1, WrOp::Send).inline(b"waits");
    let refused = testbed.a.qp.post_send(&[request; 200]).unwrap_err();
    assert!((4..200).contains(&refused.posted), "{refused}");
    assert_eq!(refused.error, PostError::Full);
    assert!(refused.to_string().contains("poll completions"), "{refused}");
    for _ in 0..refused.posted {
        testbed.b.receive(2, 0, 64);
        testbed.b.done(2);
        testbed.a.done(1);
    }
    testbed.check_traffic();
}

fn more_than_a_queue_takes() {
    let testbed = Testbed::new();
    let long = vec![0; testbed.a.qp.max_inline_data() as usize + 1];
    let ranges = vec![testbed.a.mr.sge(0, 1); 100];
    let masked = Atomic::MaskedFetchAdd { width: AtomicWidth::Four, add: 1, boundary: 0 };
    for (request, says) in [
        (SendRequest::new(2, WrOp::Send).inline(&long), "inline bytes do not fit"),
        (SendRequest::new(2, WrOp::Send).with(&ranges), "larger maximum"),
        (SendRequest::new(2, WrOp::Atomic(testbed.there(0), masked)).with(&ranges[..1]), "masked"),
    ] {
        // Requests before the invalid one are posted, and the error counts them.
        testbed.b.receive(8, 0, 64);
        let good = SendRequest::new(1, WrOp::Send).inline(b"good");
        let refused = testbed.a.qp.post_send(&[good, request, good]).unwrap_err();
        assert_eq!(refused.posted, 1);
        assert!(refused.to_string().contains(says), "{refused}");
        testbed.a.done(1);
        testbed.b.done(8);
    }
    let receive = warpwire::ibv::ReceiveRequest { id: 1, data: &ranges };
    let refused = testbed.b.qp.post_receive(&[receive]).unwrap_err();
    assert!(refused.to_string().contains("100 scatter-gather entries"), "{refused}");
    let deep = QpOptions { send_depth: u32::MAX / 2, ..QpOptions::default() };
    let refused = testbed.pd.create_qp(&testbed.a.cq, &testbed.a.cq, deep).unwrap_err();
    assert!(refused.to_string().contains("warpwire devices -v"), "{refused}");
}

fn invalid_transitions() {
    let testbed = Testbed::unconnected(|options| options);
    let refused = testbed.a.qp.modify(&QpAttributes::new(State::Rts), None).unwrap_err();
    assert!(refused.to_string().contains("RESET"), "{refused}");
    testbed.a.qp.modify(&testbed.a.qp.init_attr(), None).unwrap();
    let own = testbed.context.gid(1, testbed.gid_index.into()).unwrap().address;
    // An unknown GID index: the error lists the existing ones.
    let route = AhAttributes::to(own, 1, 200);
    let refused = testbed.a.qp.modify(&rtr_attr(), Some(&route)).unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("no GID at this index") && text.contains(&own.to_string()), "{text}");
    assert_eq!(testbed.a.qp.state().unwrap(), State::Init);
}

fn queues_of_another_context() {
    let testbed = Testbed::unconnected(|options| options);
    let other = Context::open(&device_name()).unwrap();
    let foreign = other.create_cq(16).unwrap();
    let refused = testbed.pd.create_qp(&testbed.a.cq, &foreign, QpOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("another context"), "{refused}");
    let srq = other.create_pd().unwrap().create_srq(4, 1).unwrap();
    let options = QpOptions { srq: Some(srq), ..QpOptions::default() };
    let refused = testbed.pd.create_qp(&testbed.a.cq, &testbed.a.cq, options).unwrap_err();
    assert!(refused.to_string().contains("another context"), "{refused}");
}
