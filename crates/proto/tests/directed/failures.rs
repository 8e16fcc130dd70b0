//! Who sees what when something fails: the rows of table D3.

use warpwire_proto::qp::Verdict::Refused;
use warpwire_proto::qp::{
    Access, Carried, Change, Discard, Notice, Op, PostError, Remote, State, Status, Target,
    Verdict, Work,
};
use warpwire_proto::wire::{Aeth, Extension, Nak, Opcode, Syndrome};

use crate::directed::host::{Call, Done};
use crate::directed::pair::{A, ADD, B, MTU, PLACE, Pair, Terms, syndrome};

use Status::{Flushed, Success};

#[test]
fn a_wrong_key_of_ours_fails_the_send_after_earlier_work_and_the_peer_sees_nothing() {
    for op in [Op::Send, Op::SendImm(1), Op::Write(PLACE), Op::WriteImm(PLACE, 1)] {
        let mut pair = Pair::with_receives(Terms::default(), 4);
        pair.ends[A].host.answer(Call::FetchWork, [Verdict::Yes, Verdict::Yes, Verdict::Yes]);
        pair.ends[A].host.answer(Call::FetchWork, [Refused; 100]);
        pair.post(A, 0, Op::Send, 3 * MTU);
        pair.post(A, 1, op, 10);
        pair.post(A, 2, Op::Send, 10);
        let packets = pair.pass(A);
        assert_eq!(packets.len(), 3, "{op:?}: the wrong work waits for its turn");
        assert_eq!(pair.ends[A].qp.state(), State::Rts);
        pair.exchange();
        let ends = [(0, Success), (1, Status::LocalProtection), (2, Flushed)];
        assert_eq!(pair.ends[A].sent, ends);
        assert_eq!(pair.ends[A].qp.state(), State::Err);
        assert_eq!(pair.ends[B].receipts(), [(0, Success)]);
        assert_eq!(pair.ends[B].qp.state(), State::Rts);
        assert!(pair.ends[B].notices.is_empty());
    }
}

#[test]
fn senseless_work_fails_in_its_turn_and_the_peer_sees_nothing() {
    let mut pair = Pair::with_receives(Terms::default(), 4);
    pair.post(A, 0, Op::Send, 10);
    pair.post(A, 1, Op::Bad(Status::LocalOperation), 0);
    pair.post(A, 2, Op::Send, 10);
    pair.exchange();
    assert_eq!(pair.ends[A].sent, [(0, Success), (1, Status::LocalOperation), (2, Flushed)]);
    assert_eq!(pair.ends[B].receipts(), [(0, Success)]);
    assert_eq!(pair.ends[B].qp.state(), State::Rts);
}

#[test]
fn work_of_impossible_length_is_not_taken() {
    let mut pair = Pair::new();
    let qp = &mut pair.ends[A].qp;
    for (op, len) in [
        (Op::Send, (1 << 31) + 1),
        (Op::Atomic(PLACE, ADD), 4),
        (Op::Atomic(PLACE, ADD), 16),
        (Op::Read(PLACE), 1 << 31), // 2^23 packets of 256: half of the circle of numbers
    ] {
        assert_eq!(qp.post(Work::new(0, op, len)), Err(PostError::Length(len)));
    }
    assert_eq!(qp.outstanding(), 0);
}

#[test]
fn a_wrong_remote_key_is_a_remote_access_error_and_fails_the_peer() {
    for (op, len) in [
        (Op::Write(PLACE), 10),
        (Op::Write(PLACE), 3 * MTU),
        (Op::Read(PLACE), 10),
        (Op::Atomic(PLACE, ADD), 8),
    ] {
        let mut pair = Pair::new();
        pair.ends[B].host.answer(Call::MayAccess, [Refused]);
        pair.post(A, 0, op, len);
        pair.post(A, 1, Op::Send, 10);
        pair.assert_ends(Status::RemoteAccess, Some(Notice::AccessError));
        assert_eq!(pair.ends[A].sent.len(), 2);
        assert_eq!(pair.ends[B].host.done, [], "nothing was touched");
        assert_eq!(pair.ends[B].receipts(), [], "no receive was used");
    }
}

#[test]
fn memory_that_goes_away_while_it_is_accessed_is_a_remote_access_error() {
    for (call, op, len) in [
        (Call::PlaceRemote, Op::Write(PLACE), 10),
        (Call::Execute, Op::Atomic(PLACE, ADD), 8),
        (Call::FetchRemote, Op::Read(PLACE), 10),
    ] {
        let mut pair = Pair::new();
        pair.ends[B].host.answer(call, [Refused]);
        pair.post(A, 0, op, len);
        pair.assert_ends(Status::RemoteAccess, Some(Notice::AccessError));
    }
}

#[test]
fn an_access_failure_after_a_receive_was_used_is_also_told_to_that_receive() {
    for (call, op, len) in [
        (Call::MayAccess, Op::WriteImm(PLACE, 1), 10),
        (Call::PlaceRemote, Op::WriteImm(PLACE, 1), 10),
        (Call::Invalidate, Op::SendInvalidate(5), 10),
        (Call::Invalidate, Op::SendInvalidate(5), 3 * MTU),
    ] {
        let mut pair = Pair::with_receives(Terms::default(), 2);
        pair.ends[B].host.answer(call, [Refused]);
        pair.post(A, 0, op, len);
        pair.assert_ends(Status::RemoteAccess, Some(Notice::AccessError));
        assert_eq!(pair.ends[B].receipts(), [(0, Status::LocalAccess)], "{call:?} {op:?}");
        assert_eq!(pair.ends[B].host.receives_left(), 1);
    }
}

#[test]
fn the_last_packet_of_a_write_with_immediate_uses_the_receive_before_it_fails() {
    let mut pair = Pair::with_receives(Terms::default(), 1);
    pair.ends[B].host.answer(Call::PlaceRemote, [Verdict::Yes, Verdict::Yes, Refused]);
    pair.post(A, 0, Op::WriteImm(PLACE, 1), 3 * MTU);
    pair.assert_ends(Status::RemoteAccess, Some(Notice::AccessError));
    assert_eq!(pair.ends[B].receipts(), [(0, Status::LocalAccess)]);
}

#[test]
fn an_operation_that_the_queue_pair_does_not_allow_is_an_invalid_request() {
    let all = [Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC];
    for (denied, op, len) in [
        (0, Op::Write(PLACE), 10),
        (0, Op::Write(PLACE), 2 * MTU),
        (0, Op::WriteImm(PLACE, 1), 0),
        (1, Op::Read(PLACE), 10),
        (2, Op::Atomic(PLACE, ADD), 8),
    ] {
        let access = (0..3).filter(|at| *at != denied).fold(Access::NONE, |sum, at| sum | all[at]);
        let mut pair = Pair::with_receives(Terms { access, ..Terms::default() }, 1);
        pair.post(A, 0, op, len);
        pair.assert_ends(Status::RemoteInvalidRequest, Some(Notice::RequestError));
        assert_eq!(pair.ends[B].host.times_asked(Call::MayAccess), 0);
        assert_eq!(pair.ends[B].host.receives_left(), 1, "flags are judged before resources");
    }
}

#[test]
fn sends_need_no_access_flags() {
    let terms = Terms { access: Access::NONE, ..Terms::default() };
    let mut pair = Pair::with_receives(terms, 3);
    pair.post(A, 0, Op::Send, 10);
    pair.post(A, 1, Op::SendImm(3), 0);
    pair.post(A, 2, Op::SendInvalidate(4), 2 * MTU);
    pair.assert_all_succeed(3);
    let carried: Vec<_> = pair.ends[B].received.iter().map(|receipt| receipt.carried).collect();
    assert_eq!(carried, [Carried::Data, Carried::Imm(3), Carried::Invalidated(4)]);
}

#[test]
fn a_receive_that_is_too_small_is_a_length_error_here_and_an_invalid_request_there() {
    for (len, capacity) in [(11, 10), (3 * MTU, 3 * MTU - 1), (MTU, 0), (2 * MTU, MTU)] {
        let mut pair = Pair::new();
        pair.ends[B].host.add_receive(7, capacity);
        pair.post(A, 0, Op::Send, len);
        pair.assert_ends(Status::RemoteInvalidRequest, Some(Notice::RequestError));
        assert_eq!(pair.ends[B].receipts(), [(7, Status::LocalLength)]);
    }
}

#[test]
fn a_message_may_fill_its_receive_and_a_write_with_immediate_needs_no_room_in_it() {
    let mut pair = Pair::new();
    pair.ends[B].host.add_receive(0, 3 * MTU);
    pair.ends[B].host.add_receive(1, 0);
    pair.post(A, 0, Op::Send, 3 * MTU);
    pair.post(A, 1, Op::WriteImm(PLACE, 9), 2 * MTU);
    pair.assert_all_succeed(2);
    let told: Vec<_> = pair.ends[B].received.iter().map(|r| (r.len, r.carried)).collect();
    assert_eq!(told, [(3 * MTU, Carried::Data), (2 * MTU, Carried::WriteImm(9))]);
}

#[test]
fn a_receive_with_a_wrong_key_is_a_protection_error_here_and_an_operation_error_there() {
    for (len, yes) in [(10, 0), (3 * MTU, 2)] {
        let mut pair = Pair::with_receives(Terms::default(), 2);
        pair.ends[B].host.answer(Call::PlaceReceive, vec![Verdict::Yes; yes]);
        pair.ends[B].host.answer(Call::PlaceReceive, [Refused]);
        pair.post(A, 0, Op::Send, len);
        pair.assert_ends(Status::RemoteOperation, Some(Notice::Fatal));
        assert_eq!(pair.ends[B].receipts(), [(0, Status::LocalProtection)]);
    }
}

#[test]
fn a_response_target_with_a_wrong_key_is_a_protection_error_and_the_peer_sees_nothing() {
    for (call, op, len) in [
        (Call::PlaceResponse, Op::Read(PLACE), 3 * MTU),
        (Call::StoreResult, Op::Atomic(PLACE, ADD), 8),
    ] {
        let mut pair = Pair::new();
        pair.ends[A].host.answer(call, [Refused]);
        pair.post(A, 0, op, len);
        pair.post(A, 1, Op::Local, 0);
        pair.assert_ends(Status::LocalProtection, None);
        assert_eq!(pair.ends[A].sent.len(), 2);
    }
}

#[test]
fn data_of_the_wrong_length_is_a_bad_response() {
    for len in [0, 99, 101, MTU] {
        let mut pair = Pair::new();
        pair.post(A, 0, Op::Read(PLACE), 100);
        pair.pass(A);
        let answer = pair.send(B).unwrap();
        let psn = answer.headers.psn.value();
        pair.tell(Opcode::ReadResponseOnly, psn, answer.headers.extension, len).unwrap();
        assert_eq!(pair.ends[A].sent, [(0, Status::BadResponse)]);
        assert_eq!(pair.ends[A].qp.state(), State::Err);
        assert_eq!(pair.ends[B].qp.state(), State::Rts);
    }
}

#[test]
fn an_answer_of_another_sort_than_the_request_is_a_bad_response() {
    let ack = Aeth { syndrome: Syndrome::ACK, msn: 1 };
    let data = (Opcode::ReadResponseOnly, Extension::Aeth(ack), 8);
    let result = (Opcode::AtomicAcknowledge, Extension::AethAtomic(ack, 0), 0);
    for (op, len, (opcode, extension, answer_len)) in [
        (Op::Send, 8, data),
        (Op::Write(PLACE), 8, data),
        (Op::Atomic(PLACE, ADD), 8, data),
        (Op::Send, 8, result),
        (Op::Write(PLACE), 8, result),
        (Op::Read(PLACE), 8, result),
    ] {
        let mut pair = Pair::new();
        pair.post(A, 0, op, len);
        pair.send_all(A);
        pair.tell(opcode, 0x100, extension, answer_len).unwrap();
        assert_eq!(pair.ends[A].sent, [(0, Status::BadResponse)], "{op:?} {opcode:?}");
        assert_eq!(pair.ends[A].host.done, []);
    }
}

#[test]
fn a_syndrome_that_means_nothing_is_a_bad_response() {
    for byte in [0x40, 0x5f, 0x64, 0x7f] {
        let mut pair = Pair::new();
        pair.post(A, 0, Op::Send, 10);
        pair.send_all(A);
        pair.tell_ack(0x100, Syndrome::from_byte(byte)).unwrap();
        assert_eq!(pair.ends[A].sent, [(0, Status::BadResponse)], "{byte:#x}");
    }
}

#[test]
fn a_refusal_acknowledges_what_came_before_it_and_fails_the_work_it_names() {
    for (nak, status) in [
        (Nak::InvalidRequest, Status::RemoteInvalidRequest),
        (Nak::RemoteAccess, Status::RemoteAccess),
        (Nak::RemoteOperational, Status::RemoteOperation),
    ] {
        let mut pair = Pair::new();
        pair.post(A, 0, Op::Send, 2 * MTU);
        pair.post(A, 1, Op::Write(PLACE), 3 * MTU);
        pair.post(A, 2, Op::Read(PLACE), 10);
        pair.send_all(A);
        pair.tell_ack(0x103, Syndrome::Nak(nak)).unwrap(); // the second packet of the write
        assert_eq!(pair.ends[A].sent, [(0, Success), (1, status), (2, Flushed)]);
    }
}

#[test]
fn everything_behind_a_failure_is_flushed_in_order_and_unsignaled_work_too() {
    let mut pair = Pair::new();
    pair.ends[B].host.answer(Call::MayAccess, [Refused]);
    for id in 0..10 {
        let op = if id % 2 == 0 { Op::Write(PLACE) } else { Op::Read(PLACE) };
        pair.post_work(A, Work { signaled: id % 3 == 0, ..Work::new(id, op, 10) });
    }
    pair.exchange();
    let flushed = (1..10).map(|id| (id, Flushed));
    let wanted: Vec<_> = [(0, Status::RemoteAccess)].into_iter().chain(flushed).collect();
    assert_eq!(pair.ends[A].sent, wanted);
    pair.post(A, 10, Op::Send, 1);
    assert_eq!(pair.ends[A].sent.last(), Some(&(10, Flushed)), "work posted in ERR is flushed");
    pair.post(B, 11, Op::Send, 1);
    assert_eq!(pair.ends[B].sent, [(11, Flushed)], "at the other end too");
    assert_eq!(pair.exchange(), []);
}

#[test]
fn a_failed_peer_flushes_its_own_work_without_a_reason_of_its_own() {
    let mut pair = Pair::new();
    pair.post(B, 5, Op::Write(PLACE), 10);
    pair.post(B, 6, Op::Write(PLACE), 10);
    pair.ends[B].host.answer(Call::MayAccess, [Refused]);
    pair.post(A, 0, Op::Write(PLACE), 10);
    pair.pass(A);
    assert_eq!(pair.ends[B].sent, [(5, Flushed), (6, Flushed)]);
}

#[test]
fn a_receive_in_use_is_flushed_when_the_queue_pair_fails_for_another_reason() {
    let mut pair = Pair::with_receives(Terms::default(), 2);
    pair.post(A, 0, Op::Send, 3 * MTU);
    let first = pair.send(A).unwrap();
    pair.arrive(B, &first).unwrap();
    let to_error = Change::to(State::Err);
    pair.ends[B].qp.modify(&to_error).unwrap();
    pair.ends[B].listen();
    assert_eq!(pair.ends[B].receipts(), [(0, Flushed)]);
    assert_eq!(pair.ends[B].host.receives_left(), 1, "the host flushes those it still has");
}

#[test]
fn the_bytes_and_the_atomic_of_a_whole_exchange_are_asked_for_once() {
    let mut pair = Pair::with_receives(Terms::default(), 1);
    pair.ends[B].host.word = 40;
    pair.post(A, 0, Op::Atomic(PLACE, ADD), 8);
    pair.post(A, 1, Op::Write(PLACE), 2 * MTU);
    pair.assert_all_succeed(2);
    let far = Remote { address: PLACE.address + u64::from(MTU), ..PLACE };
    let placed = |at| Done::Placed(Target::Remote(at), MTU);
    assert_eq!(pair.ends[B].host.done, [Done::Executed(PLACE, ADD), placed(PLACE), placed(far)]);
    assert_eq!(pair.ends[A].host.done, [Done::Stored(0, 40)]);
    assert_eq!(pair.ends[B].host.word, 45);
}

#[test]
fn a_failed_end_repeats_its_reason_to_a_peer_that_asks_again() {
    let mut pair = Pair::new();
    pair.ends[B].host.answer(Call::MayAccess, [Refused]);
    pair.post(A, 0, Op::Write(PLACE), 10);
    let request = pair.send(A).unwrap();
    pair.arrive(B, &request).unwrap();
    let lost = pair.send(B).unwrap();
    assert_eq!(pair.send(B), None, "it is said once for each request");
    pair.wait(pair.terms.patience());
    let again = pair.send(A).unwrap();
    assert_eq!(pair.arrive(B, &again), Err(Discard::State));
    let said = pair.send(B).unwrap();
    assert_eq!((said, syndrome(&said)), (lost, Syndrome::Nak(Nak::RemoteAccess)));
    pair.arrive(A, &said).unwrap();
    assert_eq!(pair.ends[A].sent, [(0, Status::RemoteAccess)]);
    assert_eq!(pair.ends[B].host.times_asked(Call::MayAccess), 1);
}

#[test]
fn reads_accepted_before_a_failure_are_answered_before_the_reason_is_told() {
    let mut pair = Pair::new();
    pair.post(A, 0, Op::Read(PLACE), 2 * MTU);
    pair.post(A, 1, Op::Write(PLACE), 10);
    pair.ends[B].host.answer(Call::MayAccess, [Verdict::Yes, Refused]);
    pair.pass(A);
    assert_eq!(pair.ends[B].qp.state(), State::Err);
    pair.exchange();
    assert_eq!(pair.ends[A].sent, [(0, Success), (1, Status::RemoteAccess)]);
}

#[test]
fn a_receive_taken_for_a_message_that_must_wait_is_flushed_with_the_queue_pair() {
    let mut pair = Pair::with_receives(Terms::default(), 1);
    pair.ends[B].host.answer(Call::PlaceReceive, [Verdict::NotNow]);
    pair.post(A, 0, Op::Send, 10);
    let packet = pair.send(A).unwrap();
    assert!(pair.arrive(B, &packet).is_err());
    pair.ends[B].qp.modify(&Change::to(State::Err)).unwrap();
    pair.ends[B].listen();
    assert_eq!(pair.ends[B].receipts(), [(0, Flushed)]);
}
