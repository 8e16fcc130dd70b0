//! Work on keys of memory windows: executed once, in queue order, by the host.

use warpwire_proto::qp::HostStatus::{Denied, Retry};
use warpwire_proto::qp::{Access, Fence, MwBind, MwType, SendOp, SendWr, State, Status};

use crate::directed::host::{HostCall, HostEffect};
use crate::directed::pair::{A, B, ConnParams, Pair, REMOTE_ADDR};

const BIND: MwBind = MwBind {
    kind: MwType::Type2,
    rkey: 0x1205,
    lkey: 0x34,
    address: 0x1000,
    len: 64,
    access: Access::REMOTE_WRITE,
};

fn effects(pair: &Pair) -> &[HostEffect] {
    &pair.endpoints[A].host.done
}

/// A bind takes effect before the message behind it is sent, which may carry the key; and once,
/// however often the messages around it are sent again.
#[test]
fn keys_change_once_before_what_follows_is_sent() {
    let mut pair = Pair::with_receives(ConnParams::default(), 4);
    pair.post(A, 0, SendOp::Send, 10);
    pair.post(A, 1, SendOp::Bind(BIND), 0);
    pair.post(A, 2, SendOp::LocalInvalidate(7), 0);
    pair.post(A, 3, SendOp::Send, 10);
    let lost = pair.send_all(A);
    assert_eq!(lost.len(), 2);
    assert_eq!(effects(&pair), [HostEffect::Bound(BIND), HostEffect::Invalidated(7)]);
    assert_eq!(pair.endpoints[A].sent, [], "completions are in order");
    pair.wait(pair.params.ack_timeout());
    pair.assert_all_succeed(4);
    assert_eq!(effects(&pair).len(), 2);
}

#[test]
fn a_fence_holds_it() {
    let mut pair = Pair::with_receives(ConnParams::default(), 4);
    pair.post(A, 1, SendOp::Read(REMOTE_ADDR), 10);
    let fenced = SendWr { fence: Fence::Reads, ..SendWr::new(2, SendOp::LocalInvalidate(7), 0) };
    pair.endpoints[A].qp.post(fenced).unwrap();
    let request = pair.send_all(A);
    assert!(!effects(&pair).contains(&HostEffect::Invalidated(7)));
    pair.deliver_all(B, &request);
    pair.run();
    assert_eq!(pair.endpoints[A].sent, [(1, Status::Success), (2, Status::Success)]);
    assert!(effects(&pair).contains(&HostEffect::Invalidated(7)));
}

/// The first failure carries its reason, in queue order.
#[test]
fn what_the_host_refuses_fails_in_order() {
    for (op, call, status) in [
        (SendOp::Bind(BIND), HostCall::Bind, Status::MwBind),
        (SendOp::LocalInvalidate(7), HostCall::Invalidate, Status::LocalQpOperation),
    ] {
        let mut pair = Pair::with_receives(ConnParams::default(), 4);
        pair.endpoints[A].host.answer(call, [Denied]);
        pair.post(A, 1, SendOp::Send, 10);
        pair.post(A, 2, op, 0);
        pair.post(A, 3, SendOp::Send, 10);
        let sent = pair.send_all(A);
        assert_eq!((sent.len(), pair.endpoints[A].qp.state()), (1, State::Rts));
        pair.deliver_all(B, &sent);
        pair.run();
        let expected = [(1, Status::Success), (2, status), (3, Status::Flushed)];
        assert_eq!(pair.endpoints[A].sent, expected);
        assert_eq!(pair.endpoints[A].qp.state(), State::Err);
        assert_eq!(pair.endpoints[A].host.call_count(call), 1);
    }
}

#[test]
fn a_host_that_cannot_now_is_asked_again() {
    let mut pair = Pair::with_receives(ConnParams::default(), 4);
    pair.endpoints[A].host.answer(HostCall::Bind, [Retry, Retry]);
    pair.post(A, 0, SendOp::Bind(BIND), 0);
    pair.post(A, 1, SendOp::Send, 10);
    assert_eq!(pair.send_all(A), [], "nothing overtakes it");
    pair.run();
    pair.assert_all_succeed(2);
    assert_eq!(effects(&pair), [HostEffect::Bound(BIND)]);
}
