//! Failures: which end reports which status and which event.

use warpwire_proto::qp::HostStatus::Denied;
use warpwire_proto::qp::{
    Access, DiscardReason, HostStatus, QpAttributes, QpEvent, ReceiveKind, Remote, SendOp,
    SendQueueError, SendWr, State, Status, Target,
};
use warpwire_proto::wire::{Aeth, Extension, Nak, Opcode, Syndrome};

use crate::directed::host::{HostCall, HostEffect};
use crate::directed::pair::{A, ADD, B, ConnParams, MTU, Pair, REMOTE_ADDR, syndrome};

use Status::{Flushed, Success};

#[test]
fn a_wrong_key_of_ours_fails_the_send_after_earlier_work_and_the_peer_sees_nothing() {
    for op in [
        SendOp::Send,
        SendOp::SendImm(1),
        SendOp::Write(REMOTE_ADDR),
        SendOp::WriteImm(REMOTE_ADDR, 1),
    ] {
        let mut pair = Pair::with_receives(ConnParams::default(), 4);
        pair.endpoints[A]
            .host
            .answer(HostCall::FetchWork, [HostStatus::Ready, HostStatus::Ready, HostStatus::Ready]);
        pair.endpoints[A].host.answer(HostCall::FetchWork, [Denied; 100]);
        pair.post(A, 0, SendOp::Send, 3 * MTU);
        pair.post(A, 1, op, 10);
        pair.post(A, 2, SendOp::Send, 10);
        let packets = pair.transfer(A);
        assert_eq!(packets.len(), 3, "{op:?}: the invalid work is not sent");
        assert_eq!(pair.endpoints[A].qp.state(), State::Rts);
        pair.exchange();
        let endpoints = [(0, Success), (1, Status::LocalProtection), (2, Flushed)];
        assert_eq!(pair.endpoints[A].sent, endpoints);
        assert_eq!(pair.endpoints[A].qp.state(), State::Err);
        assert_eq!(pair.endpoints[B].receive_statuses(), [(0, Success)]);
        assert_eq!(pair.endpoints[B].qp.state(), State::Rts);
        assert!(pair.endpoints[B].qp_events.is_empty());
    }
}

#[test]
fn invalid_work_fails_in_order_and_the_peer_sees_nothing() {
    let mut pair = Pair::with_receives(ConnParams::default(), 4);
    pair.post(A, 0, SendOp::Send, 10);
    pair.post(A, 1, SendOp::Bad(Status::LocalQpOperation), 0);
    pair.post(A, 2, SendOp::Send, 10);
    pair.exchange();
    assert_eq!(pair.endpoints[A].sent, [(0, Success), (1, Status::LocalQpOperation), (2, Flushed)]);
    assert_eq!(pair.endpoints[B].receive_statuses(), [(0, Success)]);
    assert_eq!(pair.endpoints[B].qp.state(), State::Rts);
}

#[test]
fn work_of_invalid_length_is_rejected() {
    let mut pair = Pair::new();
    let qp = &mut pair.endpoints[A].qp;
    for (op, len) in [
        (SendOp::Send, (1 << 31) + 1),
        (SendOp::Atomic(REMOTE_ADDR, ADD), 4),
        (SendOp::Atomic(REMOTE_ADDR, ADD), 16),
        (SendOp::Read(REMOTE_ADDR), 1 << 31), // 2^23 packets of 256: half of the PSN space
    ] {
        assert_eq!(qp.post(SendWr::new(0, op, len)), Err(SendQueueError::Length(len)));
    }
    assert_eq!(qp.outstanding(), 0);
}

#[test]
fn a_wrong_remote_key_is_a_remote_access_error_and_fails_the_peer() {
    for (op, len) in [
        (SendOp::Write(REMOTE_ADDR), 10),
        (SendOp::Write(REMOTE_ADDR), 3 * MTU),
        (SendOp::Read(REMOTE_ADDR), 10),
        (SendOp::Atomic(REMOTE_ADDR, ADD), 8),
    ] {
        let mut pair = Pair::new();
        pair.endpoints[B].host.answer(HostCall::MayAccess, [Denied]);
        pair.post(A, 0, op, len);
        pair.post(A, 1, SendOp::Send, 10);
        pair.assert_ends(Status::RemoteAccess, Some(QpEvent::AccessError));
        assert_eq!(pair.endpoints[A].sent.len(), 2);
        assert_eq!(pair.endpoints[B].host.done, [], "memory was accessed");
        assert_eq!(pair.endpoints[B].receive_statuses(), [], "a receive was taken");
    }
}

#[test]
fn memory_that_goes_away_while_it_is_accessed_is_a_remote_access_error() {
    for (call, op, len) in [
        (HostCall::PlaceRemote, SendOp::Write(REMOTE_ADDR), 10),
        (HostCall::Execute, SendOp::Atomic(REMOTE_ADDR, ADD), 8),
        (HostCall::FetchRemote, SendOp::Read(REMOTE_ADDR), 10),
    ] {
        let mut pair = Pair::new();
        pair.endpoints[B].host.answer(call, [Denied]);
        pair.post(A, 0, op, len);
        pair.assert_ends(Status::RemoteAccess, Some(QpEvent::AccessError));
    }
}

#[test]
fn an_access_failure_after_a_receive_was_taken_also_fails_that_receive() {
    for (call, op, len) in [
        (HostCall::MayAccess, SendOp::WriteImm(REMOTE_ADDR, 1), 10),
        (HostCall::PlaceRemote, SendOp::WriteImm(REMOTE_ADDR, 1), 10),
        (HostCall::Invalidate, SendOp::SendInvalidate(5), 10),
        (HostCall::Invalidate, SendOp::SendInvalidate(5), 3 * MTU),
    ] {
        let mut pair = Pair::with_receives(ConnParams::default(), 2);
        pair.endpoints[B].host.answer(call, [Denied]);
        pair.post(A, 0, op, len);
        pair.assert_ends(Status::RemoteAccess, Some(QpEvent::AccessError));
        assert_eq!(
            pair.endpoints[B].receive_statuses(),
            [(0, Status::LocalAccess)],
            "{call:?} {op:?}"
        );
        assert_eq!(pair.endpoints[B].host.receives_left(), 1);
    }
}

#[test]
fn the_last_packet_of_a_write_with_immediate_uses_the_receive_before_it_fails() {
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    pair.endpoints[B]
        .host
        .answer(HostCall::PlaceRemote, [HostStatus::Ready, HostStatus::Ready, Denied]);
    pair.post(A, 0, SendOp::WriteImm(REMOTE_ADDR, 1), 3 * MTU);
    pair.assert_ends(Status::RemoteAccess, Some(QpEvent::AccessError));
    assert_eq!(pair.endpoints[B].receive_statuses(), [(0, Status::LocalAccess)]);
}

#[test]
fn an_operation_that_the_queue_pair_does_not_allow_is_an_invalid_request() {
    let all = [Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC];
    for (denied, op, len) in [
        (0, SendOp::Write(REMOTE_ADDR), 10),
        (0, SendOp::Write(REMOTE_ADDR), 2 * MTU),
        (0, SendOp::WriteImm(REMOTE_ADDR, 1), 0),
        (1, SendOp::Read(REMOTE_ADDR), 10),
        (2, SendOp::Atomic(REMOTE_ADDR, ADD), 8),
    ] {
        let access = (0..3).filter(|at| *at != denied).fold(Access::NONE, |sum, at| sum | all[at]);
        let mut pair = Pair::with_receives(ConnParams { access, ..ConnParams::default() }, 1);
        pair.post(A, 0, op, len);
        pair.assert_ends(Status::RemoteInvalidRequest, Some(QpEvent::RequestError));
        assert_eq!(pair.endpoints[B].host.call_count(HostCall::MayAccess), 0);
        assert_eq!(
            pair.endpoints[B].host.receives_left(),
            1,
            "access flags are checked before resources"
        );
    }
}

#[test]
fn sends_need_no_access_flags() {
    let params = ConnParams { access: Access::NONE, ..ConnParams::default() };
    let mut pair = Pair::with_receives(params, 3);
    pair.post(A, 0, SendOp::Send, 10);
    pair.post(A, 1, SendOp::SendImm(3), 0);
    pair.post(A, 2, SendOp::SendInvalidate(4), 2 * MTU);
    pair.assert_all_succeed(3);
    let kind: Vec<_> = pair.endpoints[B]
        .received
        .iter()
        .map(|receive_completion| receive_completion.kind)
        .collect();
    assert_eq!(kind, [ReceiveKind::Data, ReceiveKind::Imm(3), ReceiveKind::Invalidated(4)]);
}

#[test]
fn a_receive_that_is_too_small_is_a_length_error_here_and_an_invalid_request_there() {
    for (len, capacity) in [(11, 10), (3 * MTU, 3 * MTU - 1), (MTU, 0), (2 * MTU, MTU)] {
        let mut pair = Pair::new();
        pair.endpoints[B].host.add_receive(7, capacity);
        pair.post(A, 0, SendOp::Send, len);
        pair.assert_ends(Status::RemoteInvalidRequest, Some(QpEvent::RequestError));
        assert_eq!(pair.endpoints[B].receive_statuses(), [(7, Status::LocalLength)]);
    }
}

#[test]
fn a_message_may_fill_its_receive_and_a_write_with_immediate_needs_no_room_in_it() {
    let mut pair = Pair::new();
    pair.endpoints[B].host.add_receive(0, 3 * MTU);
    pair.endpoints[B].host.add_receive(1, 0);
    pair.post(A, 0, SendOp::Send, 3 * MTU);
    pair.post(A, 1, SendOp::WriteImm(REMOTE_ADDR, 9), 2 * MTU);
    pair.assert_all_succeed(2);
    let received_kinds: Vec<_> =
        pair.endpoints[B].received.iter().map(|r| (r.len, r.kind)).collect();
    assert_eq!(received_kinds, [(3 * MTU, ReceiveKind::Data), (2 * MTU, ReceiveKind::WriteImm(9))]);
}

#[test]
fn a_receive_with_a_wrong_key_is_a_protection_error_here_and_an_operation_error_there() {
    for (len, yes) in [(10, 0), (3 * MTU, 2)] {
        let mut pair = Pair::with_receives(ConnParams::default(), 2);
        pair.endpoints[B].host.answer(HostCall::PlaceReceive, vec![HostStatus::Ready; yes]);
        pair.endpoints[B].host.answer(HostCall::PlaceReceive, [Denied]);
        pair.post(A, 0, SendOp::Send, len);
        pair.assert_ends(Status::RemoteOperation, Some(QpEvent::Fatal));
        assert_eq!(pair.endpoints[B].receive_statuses(), [(0, Status::LocalProtection)]);
    }
}

#[test]
fn a_response_target_with_a_wrong_key_is_a_protection_error_and_the_peer_sees_nothing() {
    for (call, op, len) in [
        (HostCall::PlaceResponse, SendOp::Read(REMOTE_ADDR), 3 * MTU),
        (HostCall::StoreResult, SendOp::Atomic(REMOTE_ADDR, ADD), 8),
    ] {
        let mut pair = Pair::new();
        pair.endpoints[A].host.answer(call, [Denied]);
        pair.post(A, 0, op, len);
        pair.post(A, 1, SendOp::Local, 0);
        pair.assert_ends(Status::LocalProtection, None);
        assert_eq!(pair.endpoints[A].sent.len(), 2);
    }
}

#[test]
fn data_of_the_wrong_length_is_a_bad_response() {
    for len in [0, 99, 101, MTU] {
        let mut pair = Pair::new();
        pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 100);
        pair.transfer(A);
        let answer = pair.send(B).unwrap();
        let psn = answer.headers.psn.value();
        pair.inject_response(Opcode::ReadResponseOnly, psn, answer.headers.extension, len).unwrap();
        assert_eq!(pair.endpoints[A].sent, [(0, Status::BadResponse)]);
        assert_eq!(pair.endpoints[A].qp.state(), State::Err);
        assert_eq!(pair.endpoints[B].qp.state(), State::Rts);
    }
}

#[test]
fn a_response_of_another_kind_than_the_request_is_a_bad_response() {
    let ack = Aeth { syndrome: Syndrome::ACK, msn: 1 };
    let data = (Opcode::ReadResponseOnly, Extension::Aeth(ack), 8);
    let result = (Opcode::AtomicAcknowledge, Extension::AethAtomic(ack, 0), 0);
    for (op, len, (opcode, extension, answer_len)) in [
        (SendOp::Send, 8, data),
        (SendOp::Write(REMOTE_ADDR), 8, data),
        (SendOp::Atomic(REMOTE_ADDR, ADD), 8, data),
        (SendOp::Send, 8, result),
        (SendOp::Write(REMOTE_ADDR), 8, result),
        (SendOp::Read(REMOTE_ADDR), 8, result),
    ] {
        let mut pair = Pair::new();
        pair.post(A, 0, op, len);
        pair.send_all(A);
        pair.inject_response(opcode, 0x100, extension, answer_len).unwrap();
        assert_eq!(pair.endpoints[A].sent, [(0, Status::BadResponse)], "{op:?} {opcode:?}");
        assert_eq!(pair.endpoints[A].host.done, []);
    }
}

#[test]
fn a_syndrome_that_means_nothing_is_a_bad_response() {
    for byte in [0x40, 0x5f, 0x64, 0x7f] {
        let mut pair = Pair::new();
        pair.post(A, 0, SendOp::Send, 10);
        pair.send_all(A);
        pair.inject_ack(0x100, Syndrome::from_byte(byte)).unwrap();
        assert_eq!(pair.endpoints[A].sent, [(0, Status::BadResponse)], "{byte:#x}");
    }
}

#[test]
fn a_nak_acknowledges_earlier_work_and_fails_the_work_it_names() {
    for (nak, status) in [
        (Nak::InvalidRequest, Status::RemoteInvalidRequest),
        (Nak::RemoteAccess, Status::RemoteAccess),
        (Nak::RemoteOperational, Status::RemoteOperation),
    ] {
        let mut pair = Pair::new();
        pair.post(A, 0, SendOp::Send, 2 * MTU);
        pair.post(A, 1, SendOp::Write(REMOTE_ADDR), 3 * MTU);
        pair.post(A, 2, SendOp::Read(REMOTE_ADDR), 10);
        pair.send_all(A);
        pair.inject_ack(0x103, Syndrome::Nak(nak)).unwrap(); // the second packet of the write
        assert_eq!(pair.endpoints[A].sent, [(0, Success), (1, status), (2, Flushed)]);
    }
}

#[test]
fn everything_after_a_failure_is_flushed_in_order_and_unsignaled_work_too() {
    let mut pair = Pair::new();
    pair.endpoints[B].host.answer(HostCall::MayAccess, [Denied]);
    for id in 0..10 {
        let op = if id % 2 == 0 { SendOp::Write(REMOTE_ADDR) } else { SendOp::Read(REMOTE_ADDR) };
        pair.post_work(A, SendWr { signaled: id % 3 == 0, ..SendWr::new(id, op, 10) });
    }
    pair.exchange();
    let flushed = (1..10).map(|id| (id, Flushed));
    let wanted: Vec<_> = [(0, Status::RemoteAccess)].into_iter().chain(flushed).collect();
    assert_eq!(pair.endpoints[A].sent, wanted);
    pair.post(A, 10, SendOp::Send, 1);
    assert_eq!(pair.endpoints[A].sent.last(), Some(&(10, Flushed)), "work posted in ERR");
    pair.post(B, 11, SendOp::Send, 1);
    assert_eq!(pair.endpoints[B].sent, [(11, Flushed)], "work of the responder");
    assert_eq!(pair.exchange(), []);
}

#[test]
fn a_failed_peer_flushes_its_own_work() {
    let mut pair = Pair::new();
    pair.post(B, 5, SendOp::Write(REMOTE_ADDR), 10);
    pair.post(B, 6, SendOp::Write(REMOTE_ADDR), 10);
    pair.endpoints[B].host.answer(HostCall::MayAccess, [Denied]);
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 10);
    pair.transfer(A);
    assert_eq!(pair.endpoints[B].sent, [(5, Flushed), (6, Flushed)]);
}

#[test]
fn a_receive_in_use_is_flushed_when_the_queue_pair_fails_for_another_reason() {
    let mut pair = Pair::with_receives(ConnParams::default(), 2);
    pair.post(A, 0, SendOp::Send, 3 * MTU);
    let first = pair.send(A).unwrap();
    pair.deliver(B, &first).unwrap();
    let to_error = QpAttributes::new(State::Err);
    pair.endpoints[B].qp.modify(&to_error).unwrap();
    pair.endpoints[B].drain_events();
    assert_eq!(pair.endpoints[B].receive_statuses(), [(0, Flushed)]);
    assert_eq!(pair.endpoints[B].host.receives_left(), 1, "the host flushes untaken receives");
}

#[test]
fn the_host_is_called_once_for_each_effect_of_an_exchange() {
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    pair.endpoints[B].host.atomic_word = 40;
    pair.post(A, 0, SendOp::Atomic(REMOTE_ADDR, ADD), 8);
    pair.post(A, 1, SendOp::Write(REMOTE_ADDR), 2 * MTU);
    pair.assert_all_succeed(2);
    let far = Remote { address: REMOTE_ADDR.address + u64::from(MTU), ..REMOTE_ADDR };
    let placed = |at| HostEffect::Placed(Target::Remote(at), MTU);
    assert_eq!(
        pair.endpoints[B].host.done,
        [HostEffect::Executed(REMOTE_ADDR, ADD), placed(REMOTE_ADDR), placed(far)]
    );
    assert_eq!(pair.endpoints[A].host.done, [HostEffect::Stored(0, 40)]);
    assert_eq!(pair.endpoints[B].host.atomic_word, 45);
}

#[test]
fn a_failed_end_repeats_its_nak_when_the_peer_retries() {
    let mut pair = Pair::new();
    pair.endpoints[B].host.answer(HostCall::MayAccess, [Denied]);
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 10);
    let request = pair.send(A).unwrap();
    pair.deliver(B, &request).unwrap();
    let lost = pair.send(B).unwrap();
    assert_eq!(pair.send(B), None, "more than one NAK per request");
    pair.wait(pair.params.ack_timeout());
    let again = pair.send(A).unwrap();
    assert_eq!(pair.deliver(B, &again), Err(DiscardReason::State));
    let nak_packet = pair.send(B).unwrap();
    assert_eq!((nak_packet, syndrome(&nak_packet)), (lost, Syndrome::Nak(Nak::RemoteAccess)));
    pair.deliver(A, &nak_packet).unwrap();
    assert_eq!(pair.endpoints[A].sent, [(0, Status::RemoteAccess)]);
    assert_eq!(pair.endpoints[B].host.call_count(HostCall::MayAccess), 1);
}

#[test]
fn reads_accepted_before_a_failure_are_answered_before_the_nak() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 2 * MTU);
    pair.post(A, 1, SendOp::Write(REMOTE_ADDR), 10);
    pair.endpoints[B].host.answer(HostCall::MayAccess, [HostStatus::Ready, Denied]);
    pair.transfer(A);
    assert_eq!(pair.endpoints[B].qp.state(), State::Err);
    pair.exchange();
    assert_eq!(pair.endpoints[A].sent, [(0, Success), (1, Status::RemoteAccess)]);
}

#[test]
fn a_receive_taken_for_a_message_that_must_wait_is_flushed_with_the_queue_pair() {
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    pair.endpoints[B].host.answer(HostCall::PlaceReceive, [HostStatus::Retry]);
    pair.post(A, 0, SendOp::Send, 10);
    let packet = pair.send(A).unwrap();
    assert!(pair.deliver(B, &packet).is_err());
    pair.endpoints[B].qp.modify(&QpAttributes::new(State::Err)).unwrap();
    pair.endpoints[B].drain_events();
    assert_eq!(pair.endpoints[B].receive_statuses(), [(0, Flushed)]);
}
