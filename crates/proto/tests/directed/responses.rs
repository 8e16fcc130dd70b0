//! Responses at the requester: which are used, and which are dropped.

use warpwire_proto::qp::{DiscardReason, SendOp, Status};
use warpwire_proto::wire::{Nak, Opcode, Syndrome};

use crate::directed::host::{HostCall, HostEffect};
use crate::directed::pair::{A, ADD, B, ConnParams, MTU, Pair, REMOTE_ADDR, opcodes, psns};

use Status::Success;

#[test]
fn a_response_to_a_request_never_sent_is_unexpected() {
    let mut pair = Pair::new();
    assert_eq!(pair.inject_ack(0x100, Syndrome::ACK), Err(DiscardReason::UnexpectedResponse));
    pair.post(A, 0, SendOp::Send, 10);
    pair.send_all(A);
    for psn in [0x101, 0x102, 0x100 + (1 << 23) - 1] {
        for syndrome in [Syndrome::ACK, Syndrome::RnrNak(1), Syndrome::Nak(Nak::RemoteAccess)] {
            assert_eq!(pair.inject_ack(psn, syndrome), Err(DiscardReason::UnexpectedResponse));
        }
    }
    assert_eq!(pair.endpoints[A].dropped(DiscardReason::UnexpectedResponse), 10);
    assert_eq!(pair.endpoints[A].sent, []);
}

#[test]
fn a_response_to_a_completed_request_is_stale() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Send, 3 * MTU);
    pair.send_all(A);
    assert_eq!(pair.inject_ack(0xff, Syndrome::ACK), Err(DiscardReason::StaleResponse));
    assert_eq!(pair.inject_ack(0x101, Syndrome::ACK), Ok(()));
    for syndrome in [Syndrome::ACK, Syndrome::RnrNak(1), Syndrome::Nak(Nak::Sequence)] {
        assert_eq!(pair.inject_ack(0x101, syndrome), Err(DiscardReason::StaleResponse));
        assert_eq!(pair.inject_ack(0x100, syndrome), Err(DiscardReason::StaleResponse));
    }
    assert_eq!(pair.endpoints[A].dropped(DiscardReason::StaleResponse), 7);
    assert_eq!(pair.send_all(A), [], "a stale NAK caused a retransmission");
    assert_eq!(pair.inject_ack(0x102, Syndrome::ACK), Ok(()));
    assert_eq!(pair.endpoints[A].sent, [(0, Success)]);
}

#[test]
fn one_acknowledgement_completes_all_before_it() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Send, 10);
    pair.post(A, 1, SendOp::Local, 0);
    pair.post(A, 2, SendOp::Write(REMOTE_ADDR), 2 * MTU);
    pair.post(A, 3, SendOp::Send, 2 * MTU);
    pair.send_all(A);
    pair.inject_ack(0x103, Syndrome::ACK).unwrap();
    assert_eq!(pair.endpoints[A].sent, [(0, Success), (1, Success), (2, Success)]);
    pair.inject_ack(0x104, Syndrome::ACK).unwrap();
    assert_eq!(pair.endpoints[A].sent.len(), 4);
}

#[test]
fn any_credit_code_is_an_acknowledgement() {
    for code in 0..32 {
        let mut pair = Pair::new();
        pair.post(A, 0, SendOp::Send, 10);
        pair.send_all(A);
        pair.inject_ack(0x100, Syndrome::Ack(code)).unwrap();
        assert_eq!(pair.endpoints[A].sent, [(0, Success)]);
    }
}

#[test]
fn data_acknowledges_the_sends_and_writes_before_it() {
    for (op, len) in [(SendOp::Read(REMOTE_ADDR), 10), (SendOp::Atomic(REMOTE_ADDR, ADD), 8)] {
        let mut pair = Pair::with_receives(ConnParams::default(), 1);
        pair.post(A, 0, SendOp::Send, 10);
        pair.post(A, 1, op, len);
        pair.transfer(A);
        let answers = pair.transfer(B);
        assert_eq!(answers.len(), 1, "an ACK in addition to the response");
        assert_eq!(pair.endpoints[A].sent, [(0, Success), (1, Success)]);
    }
}

#[test]
fn an_ack_beyond_an_unanswered_read_or_atomic_repeats_the_request_once() {
    for (op, len) in [(SendOp::Read(REMOTE_ADDR), 2 * MTU), (SendOp::Atomic(REMOTE_ADDR, ADD), 8)] {
        let mut pair = Pair::with_receives(ConnParams::default(), 3);
        pair.post(A, 0, SendOp::Send, 10);
        pair.post(A, 1, op, len);
        pair.post(A, 2, SendOp::Send, 10);
        pair.post(A, 3, SendOp::Send, 10);
        pair.transfer(A);
        let answers = pair.send_all(B);
        let ack = answers.last().unwrap();
        assert_eq!(pair.deliver(A, ack), Err(DiscardReason::ResponseGap), "{op:?}");
        assert_eq!(pair.deliver(A, ack), Err(DiscardReason::ResponseGap));
        assert_eq!(pair.endpoints[A].sent, [(0, Success)], "work before the read is complete");
        assert_eq!(pair.endpoints[A].qp.stats().response_gaps, 1, "counted once per gap");
        let again = pair.send_all(A);
        assert_eq!(again.len(), 3);
        assert_eq!(again[0].headers.psn.value(), 0x101);
        let outcomes = pair.deliver_all(B, &again);
        assert_eq!(outcomes, vec![Err(DiscardReason::Duplicate); 3]);
        pair.assert_all_succeed(4);
        assert!(pair.endpoints[B].host.call_count(HostCall::Execute) <= 1);
    }
}

#[test]
fn data_after_lost_data_is_dropped_and_requested_again_from_there() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 4 * MTU);
    pair.transfer(A);
    let answers = pair.send_all(B);
    assert_eq!(pair.deliver(A, &answers[0]), Ok(()));
    assert_eq!(pair.deliver(A, &answers[2]), Err(DiscardReason::ResponseGap));
    assert_eq!(pair.deliver(A, &answers[3]), Err(DiscardReason::ResponseGap));
    assert_eq!(pair.endpoints[A].dropped(DiscardReason::ResponseGap), 2);
    let again = pair.send_all(A);
    assert_eq!(psns(&again), [0x101]);
    assert_eq!(pair.deliver(B, &again[0]), Err(DiscardReason::Duplicate));
    let answers = pair.transfer(B);
    assert_eq!(psns(&answers), [0x101, 0x102, 0x103]);
    assert_eq!(pair.endpoints[A].sent, [(0, Success)]);
    let offsets: Vec<_> = pair.endpoints[A].host.done.iter().map(offset).collect();
    assert_eq!(offsets, [0, MTU, 2 * MTU, 3 * MTU], "each packet is placed once");
}

fn offset(done: &HostEffect) -> u32 {
    match done {
        HostEffect::Placed(warpwire_proto::qp::Target::Response { offset, .. }, _) => *offset,
        other => panic!("{other:?}"),
    }
}

#[test]
fn late_responses_from_before_a_retransmission_are_used() {
    let mut pair = Pair::with_receives(ConnParams::default(), 4);
    pair.post(A, 0, SendOp::Send, 4 * MTU);
    pair.post(A, 1, SendOp::Read(REMOTE_ADDR), 2 * MTU);
    pair.transfer(A);
    let answers = pair.send_all(B);
    pair.wait(pair.params.ack_timeout()); // times out before they arrive
    assert_eq!(pair.endpoints[A].qp.stats().timeouts, 1);
    for answer in &answers {
        pair.deliver(A, answer).unwrap();
    }
    assert_eq!(pair.endpoints[A].sent, [(0, Success), (1, Success)]);
    assert_eq!(pair.send_all(A), [], "a retransmission of answered packets");
}

#[test]
fn a_sequence_nak_acknowledges_what_is_before_it_and_goes_back_to_it() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Send, 2 * MTU);
    pair.post(A, 1, SendOp::Send, 2 * MTU);
    pair.post(A, 2, SendOp::Send, 2 * MTU);
    pair.send_all(A);
    pair.inject_ack(0x103, Syndrome::Nak(Nak::Sequence)).unwrap();
    assert_eq!(pair.endpoints[A].sent, [(0, Success)]);
    let again = pair.send_all(A);
    assert_eq!(psns(&again), [0x103, 0x104, 0x105]);
    let (first, last) = (Opcode::SendFirst, Opcode::SendLast);
    assert_eq!(opcodes(&again), [last, first, last], "a message resumes where it was");
    assert_eq!(pair.endpoints[A].qp.stats().resent, 3);
}

#[test]
fn a_sequence_nak_does_not_acknowledge_a_read() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 2 * MTU);
    pair.post(A, 1, SendOp::Send, 10);
    pair.post(A, 2, SendOp::Send, 10);
    pair.send_all(A);
    pair.inject_ack(0x103, Syndrome::Nak(Nak::Sequence)).unwrap();
    assert_eq!(pair.endpoints[A].sent, []);
    assert_eq!(psns(&pair.send_all(A)), [0x100, 0x102, 0x103]);
}

#[test]
fn after_a_timeout_a_missing_response_causes_another_go_back() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 10);
    pair.post(A, 1, SendOp::Write(REMOTE_ADDR), 10);
    pair.send_all(A);
    for missed in 1..3 {
        assert_eq!(pair.inject_ack(0x101, Syndrome::ACK), Err(DiscardReason::ResponseGap));
        assert_eq!(pair.endpoints[A].qp.stats().response_gaps, missed);
        let again: &[u32] = if missed == 1 { &[0x100, 0x101] } else { &[0x100] };
        assert_eq!(psns(&pair.send_all(A)), again);
        pair.wait(pair.params.ack_timeout());
        assert_eq!(psns(&pair.send_all(A)), [0x100], "one packet after a timeout");
    }
}
