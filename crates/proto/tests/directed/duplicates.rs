//! Duplicate requests.

use warpwire_proto::Psn;
use warpwire_proto::qp::{DiscardReason, SendOp, Status, Transmit};
use warpwire_proto::wire::{Extension, Opcode, Reth, Syndrome};

use crate::directed::host::HostCall;
use crate::directed::pair::{
    A, ADD, B, ConnParams, MTU, Pair, REMOTE_ADDR, aeth, edited, one_of_each_op, opcodes, psn, psns,
};

fn at_offset(request: &Transmit, packets: u32, len: u32) -> Transmit {
    edited(request, |headers| {
        headers.psn = headers.psn.add(packets);
        let address = REMOTE_ADDR.address + u64::from(packets * MTU);
        headers.extension = Extension::Reth(Reth { address, rkey: REMOTE_ADDR.rkey, len });
    })
}

/// A pair whose responder has answered a read of `len` bytes; returns its request too.
fn after_read(params: ConnParams, len: u32) -> (Pair, Transmit) {
    let mut pair = Pair::with(params);
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), len);
    let request = pair.transfer(A)[0];
    pair.send_all(B);
    (pair, request)
}

#[test]
fn a_duplicate_send_or_write_is_acknowledged_with_the_newest_psn_and_not_delivered() {
    for op in
        [SendOp::Send, SendOp::SendImm(1), SendOp::SendInvalidate(2), SendOp::Write(REMOTE_ADDR)]
    {
        let mut pair = Pair::with_receives(ConnParams::default(), 4);
        pair.post(A, 0, op, 2 * MTU);
        pair.post(A, 1, SendOp::Send, 10);
        let packets = pair.transfer(A);
        pair.send_all(B);
        let (done, received_before) =
            (pair.endpoints[B].host.done.clone(), pair.endpoints[B].received.len());
        let position = pair.endpoints[B].qp.next_psns().0;
        for packet in &packets {
            assert_eq!(pair.deliver(B, packet), Err(DiscardReason::Duplicate), "{op:?}");
            let answer = pair.send(B).unwrap();
            assert_eq!(answer.headers.opcode, Opcode::Acknowledge);
            assert_eq!((psn(&answer), aeth(&answer).msn), (0x102, 2));
            assert_eq!(aeth(&answer).syndrome, Syndrome::ACK);
        }
        assert_eq!(pair.endpoints[B].host.done, done);
        assert_eq!(pair.endpoints[B].received.len(), received_before);
        assert_eq!(pair.endpoints[B].qp.next_psns().0, position);
    }
}

#[test]
fn many_duplicates_at_once_are_acknowledged_once() {
    let mut pair = Pair::with_receives(ConnParams::default(), 4);
    pair.post(A, 0, SendOp::Send, 4 * MTU);
    let packets = pair.transfer(A);
    pair.send_all(B);
    assert_eq!(pair.deliver_all(B, &packets), vec![Err(DiscardReason::Duplicate); 4]);
    assert_eq!(pair.send_all(B).len(), 1);
    assert_eq!(pair.endpoints[B].dropped(DiscardReason::Duplicate), 4);
}

#[test]
fn a_duplicate_read_is_answered_from_its_record() {
    let (mut pair, request) = after_read(ConnParams::default(), 3 * MTU + 10);
    assert_eq!(pair.deliver(B, &request), Err(DiscardReason::Duplicate));
    let answers = pair.send_all(B);
    assert_eq!(psns(&answers), [0x100, 0x101, 0x102, 0x103]);
    assert_eq!(
        opcodes(&answers),
        [
            Opcode::ReadResponseFirst,
            Opcode::ReadResponseMiddle,
            Opcode::ReadResponseMiddle,
            Opcode::ReadResponseLast
        ]
    );
    assert_eq!(aeth(&answers[0]).msn, 1, "the message was counted more than once");
    assert_eq!(pair.endpoints[B].host.call_count(HostCall::MayAccess), 1, "access is checked once");
    assert_eq!(
        pair.endpoints[B].host.call_count(HostCall::FetchRemote),
        8,
        "the data is fetched again"
    );
}

#[test]
fn a_partially_repeated_read_begins_with_a_first_or_only_packet() {
    let len = 3 * MTU + 10;
    let (mut pair, request) = after_read(ConnParams::default(), len);
    let tail = at_offset(&request, 2, len - 2 * MTU);
    assert_eq!(pair.deliver(B, &tail), Err(DiscardReason::Duplicate));
    let answers = pair.send_all(B);
    assert_eq!(opcodes(&answers), [Opcode::ReadResponseFirst, Opcode::ReadResponseLast]);
    assert_eq!(psns(&answers), [0x102, 0x103]);
    assert_eq!(answers[1].payload.unwrap().len, 10);
    let last = at_offset(&request, 3, 10);
    assert_eq!(pair.deliver(B, &last), Err(DiscardReason::Duplicate));
    assert_eq!(opcodes(&pair.send_all(B)), [Opcode::ReadResponseOnly]);
    let middle = at_offset(&request, 1, 2 * MTU);
    assert_eq!(pair.deliver(B, &middle), Err(DiscardReason::Duplicate));
    let answers = pair.send_all(B);
    assert_eq!(opcodes(&answers), [Opcode::ReadResponseFirst, Opcode::ReadResponseLast]);
    assert_eq!(answers[1].payload.unwrap().len, MTU);
}

#[test]
fn a_duplicate_read_restarts_its_response() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 4 * MTU);
    let request = pair.transfer(A)[0];
    pair.send(B).unwrap();
    pair.send(B).unwrap();
    assert_eq!(pair.deliver(B, &request), Err(DiscardReason::Duplicate));
    let answers = pair.send_all(B);
    assert_eq!(psns(&answers), [0x100, 0x101, 0x102, 0x103]);
    assert_eq!(answers[0].headers.opcode, Opcode::ReadResponseFirst);
}

#[test]
fn a_duplicate_read_with_another_key_address_or_length_is_ignored() {
    let len = 3 * MTU + 10;
    let (mut pair, request) = after_read(ConnParams::default(), len);
    let with = |address: u64, rkey: u32, len: u32| {
        let reth = Extension::Reth(Reth { address, rkey, len });
        edited(&request, |headers| headers.extension = reth)
    };
    for changed in [
        with(REMOTE_ADDR.address, REMOTE_ADDR.rkey + 1, len),
        with(REMOTE_ADDR.address + 1, REMOTE_ADDR.rkey, len),
        with(REMOTE_ADDR.address, REMOTE_ADDR.rkey, len + 1),
        with(REMOTE_ADDR.address, REMOTE_ADDR.rkey, len + MTU),
        with(REMOTE_ADDR.address, REMOTE_ADDR.rkey, u32::MAX),
        with(REMOTE_ADDR.address, REMOTE_ADDR.rkey, MTU + 10), // ends inside a packet
        with(REMOTE_ADDR.address, REMOTE_ADDR.rkey, 0),
        at_offset(&request, 1, len),
    ] {
        assert_eq!(pair.deliver(B, &changed), Err(DiscardReason::NoRecord), "{changed:?}");
        assert_eq!(pair.send_all(B), []);
    }
    assert_eq!(pair.endpoints[B].dropped(DiscardReason::NoRecord), 8);
    assert_eq!(pair.endpoints[B].host.call_count(HostCall::MayAccess), 1);
}

#[test]
fn a_duplicate_atomic_is_answered_with_the_saved_value_and_not_executed() {
    let mut pair = Pair::new();
    pair.endpoints[B].host.atomic_word = 10;
    pair.post(A, 0, SendOp::Atomic(REMOTE_ADDR, ADD), 8);
    pair.post(A, 1, SendOp::Atomic(REMOTE_ADDR, ADD), 8);
    let requests = pair.transfer(A);
    let answers = pair.send_all(B);
    for (request, answer) in requests.iter().zip(&answers) {
        assert_eq!(pair.deliver(B, request), Err(DiscardReason::Duplicate));
        assert_eq!(pair.send_all(B), [*answer]);
    }
    let values: Vec<_> = answers.iter().map(|answer| answer.headers.extension).collect();
    let value = |at: usize| match values[at] {
        Extension::AethAtomic(_, value) => value,
        other => panic!("{other:?}"),
    };
    assert_eq!((value(0), value(1)), (10, 15));
    assert_eq!(pair.endpoints[B].host.atomic_word, 20);
    assert_eq!(pair.endpoints[B].host.call_count(HostCall::Execute), 2);
}

#[test]
fn a_duplicate_without_a_record_is_not_answered() {
    for (op, len) in [(SendOp::Read(REMOTE_ADDR), 10), (SendOp::Atomic(REMOTE_ADDR, ADD), 8)] {
        for kept in [1, 3] {
            let params = ConnParams {
                max_rd_atomic: kept,
                max_dest_rd_atomic: kept,
                ..ConnParams::default()
            };
            let mut pair = Pair::with(params);
            let mut requests = Vec::new();
            for id in 0..u64::from(kept) + 1 {
                pair.post(A, id, op, len);
                requests.extend(pair.transfer(A));
                pair.transfer(B);
            }
            assert_eq!(pair.deliver(B, &requests[0]), Err(DiscardReason::NoRecord));
            assert_eq!(pair.send_all(B), []);
            for request in &requests[1..] {
                assert_eq!(pair.deliver(B, request), Err(DiscardReason::Duplicate));
                assert_eq!(pair.send_all(B).len(), 1);
            }
        }
    }
}

#[test]
fn a_duplicate_read_or_atomic_where_a_send_was_is_not_answered() {
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    pair.post(A, 0, SendOp::Send, 10);
    let sent = pair.transfer(A)[0];
    pair.send_all(B);
    pair.post(A, 1, SendOp::Read(REMOTE_ADDR), 10);
    let read = pair.send(A).unwrap();
    let forged = edited(&read, |headers| headers.psn = sent.headers.psn);
    assert_eq!(pair.deliver(B, &forged), Err(DiscardReason::NoRecord));
    assert_eq!(pair.send_all(B), []);
}

#[test]
fn a_duplicate_read_where_an_atomic_was_is_not_answered_and_the_other_way_round() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 8);
    pair.post(A, 1, SendOp::Atomic(REMOTE_ADDR, ADD), 8);
    let requests = pair.transfer(A);
    pair.send_all(B);
    let swapped =
        |at: usize| edited(&requests[at], |headers| headers.psn = requests[1 - at].headers.psn);
    for forged in [swapped(0), swapped(1)] {
        assert_eq!(pair.deliver(B, &forged), Err(DiscardReason::NoRecord));
    }
    assert_eq!(pair.endpoints[B].host.call_count(HostCall::Execute), 1);
}

#[test]
fn everything_twice_is_delivered_once() {
    for packets in [1, 3] {
        let mut pair = Pair::with_receives(ConnParams::default(), 8);
        for (id, (op, len)) in (0..).zip(one_of_each_op(packets)) {
            pair.post(A, id, op, len);
        }
        for _ in 0..20 {
            for from in [A, B] {
                for packet in pair.send_all(from) {
                    let _ = pair.deliver(1 - from, &packet);
                    let _ = pair.deliver(1 - from, &packet);
                }
            }
        }
        let wanted: Vec<_> = (0..8).map(|id| (id, Status::Success)).collect();
        assert_eq!(pair.endpoints[A].sent, wanted);
        assert_eq!(pair.endpoints[B].received.len(), 4);
        assert_eq!(pair.endpoints[B].host.call_count(HostCall::Execute), 2);
        assert_eq!(pair.endpoints[A].host.call_count(HostCall::StoreResult), 2);
        assert_eq!(pair.endpoints[A].host.call_count(HostCall::PlaceResponse), packets);
    }
}

#[test]
fn a_psn_far_behind_is_a_duplicate_and_one_far_ahead_a_gap() {
    let half = 1 << 23;
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    for (ahead, outcome) in [
        (half - 1, DiscardReason::Gap),
        (half, DiscardReason::Duplicate),
        (half + 1, DiscardReason::Duplicate),
        (u32::MAX, DiscardReason::Duplicate),
    ] {
        pair.number = Psn::new(0x100).add(ahead);
        assert_eq!(
            pair.inject_request(Opcode::SendOnly, Extension::None, 10),
            Err(outcome),
            "{ahead:#x}"
        );
    }
    assert_eq!(pair.endpoints[B].host.receives_left(), 1);
}

#[test]
fn a_duplicate_empty_read_is_answered_again() {
    let (mut pair, request) = after_read(ConnParams::default(), 0);
    assert_eq!(pair.deliver(B, &request), Err(DiscardReason::Duplicate));
    let answers = pair.transfer(B);
    assert_eq!(opcodes(&answers), [Opcode::ReadResponseOnly]);
    assert_eq!(pair.endpoints[A].sent, [(0, Status::Success)]);
}

#[test]
fn a_partial_repeat_does_not_shorten_a_response_in_progress() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 4 * MTU);
    let request = pair.transfer(A)[0];
    let mut answers = vec![pair.send(B).unwrap()];
    assert_eq!(pair.deliver(B, &at_offset(&request, 0, MTU)), Err(DiscardReason::Duplicate));
    answers.extend(pair.send_all(B));
    assert_eq!(psns(&answers), [0x100, 0x100, 0x101, 0x102, 0x103]);
}
