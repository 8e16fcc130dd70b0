//! Datagrams: destination, sender, and wrong Q_Keys.

use warpwire::ibv::{AhAttributes, CompletionKind, QpOptions, SendRequest, WrOp};
use warpwire::verbs::PostError;
use warpwire_proto::qp::Service;

use crate::ibv::testbed::Testbed;
use testkit::cases;

cases!(CASES: messages, wrong_keys_are_dropped, only_messages_with_an_address);

const KEY: u32 = 0x1234;
/// Bytes of the GRH before each payload.
const GRH_LEN: u32 = 40;

fn testbed() -> Testbed {
    let testbed = Testbed::unconnected(|options| QpOptions { service: Service::Ud, ..options });
    testbed.a.qp.activate_ud(KEY).unwrap();
    testbed.b.qp.activate_ud(KEY).unwrap();
    testbed
}

fn route(testbed: &Testbed) -> AhAttributes {
    let own = testbed.context.gid(1, testbed.gid_index.into()).unwrap();
    AhAttributes::to(own.address, 1, testbed.gid_index)
}

fn messages() {
    let testbed = testbed();
    let handle = testbed.pd.create_address_handle(&route(&testbed)).unwrap();
    assert_eq!(handle.route(), &route(&testbed));
    for (n, len) in [0_usize, 1, 100, 1024].into_iter().enumerate() {
        let n = n as u64;
        testbed.a.fill(0, len, n);
        let range = [testbed.a.mr.sge(0, len as u32)];
        let data = if len == 0 { &range[..0] } else { &range[..] };
        for (op, kind) in [
            (WrOp::Send, CompletionKind::Receive),
            (WrOp::SendImm([9, 8, 7, 6]), CompletionKind::ReceiveImm([9, 8, 7, 6])),
        ] {
            testbed.b.receive(1, 0, 2000);
            testbed.a.post(SendRequest::new(2, op).with(data).to(
                &handle,
                testbed.b.qp.number(),
                KEY,
            ));
            testbed.a.done(2);
            let received = testbed.b.done(1);
            assert_eq!((received.kind, received.len), (kind, GRH_LEN + len as u32));
            assert_eq!(received.sender.map(|sender| sender.qpn), Some(testbed.a.qp.number()));
            testbed.b.check(GRH_LEN.into(), len, n);
        }
    }
}

fn wrong_keys_are_dropped() {
    let testbed = testbed();
    let handle = testbed.pd.create_address_handle(&route(&testbed)).unwrap();
    testbed.b.receive(1, 0, 2000);
    testbed.a.post(SendRequest::new(2, WrOp::Send).inline(b"lost").to(
        &handle,
        testbed.b.qp.number(),
        KEY + 1,
    ));
    testbed.a.done(2);
    testbed.b.expect_no_completion();
    testbed.a.post(SendRequest::new(3, WrOp::Send).inline(b"taken").to(
        &handle,
        testbed.b.qp.number(),
        KEY,
    ));
    testbed.a.done(3);
    assert_eq!(testbed.b.done(1).len, GRH_LEN + 5);
}

fn only_messages_with_an_address() {
    let (testbed, connected) = (testbed(), Testbed::new());
    let handle = testbed.pd.create_address_handle(&route(&testbed)).unwrap();
    let foreign = connected.pd.create_address_handle(&route(&connected)).unwrap();
    let number = testbed.b.qp.number();
    for (test_qp, request, says) in [
        (&testbed.a, SendRequest::new(1, WrOp::Send), "needs a destination"),
        (
            &testbed.a,
            SendRequest::new(1, WrOp::Write(testbed.there(0))).to(&handle, number, KEY),
            "sends only",
        ),
        (&testbed.a, SendRequest::new(1, WrOp::Send).to(&foreign, number, KEY), "another context"),
        (
            &connected.a,
            SendRequest::new(1, WrOp::Send).to(&foreign, number, KEY),
            "omit the destination",
        ),
    ] {
        let refused = test_qp.qp.post_send(&[request]).unwrap_err();
        assert!(refused.posted == 0 && matches!(refused.error, PostError::Invalid(_)), "{refused}");
        assert!(refused.to_string().contains(says), "{refused}");
    }
}
