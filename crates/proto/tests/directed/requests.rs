//! Injected requests: opcodes in every order, and invalid lengths.

use warpwire_proto::qp::{DiscardReason, QpEvent, SendOp, State, Status};
use warpwire_proto::wire::{AtomicEth, Extension, Nak, Opcode, Reth, Syndrome};

use crate::directed::host::HostCall;
use crate::directed::pair::{A, ADD, B, ConnParams, MTU, Pair, REMOTE_ADDR, edited, syndrome};

/// The message in progress when the next request arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessageState {
    Idle,
    Send,
    Write,
}

fn reth(len: u32) -> Reth {
    Reth { address: REMOTE_ADDR.address, rkey: REMOTE_ADDR.rkey, len }
}

fn atomic(address: u64) -> Extension {
    Extension::Atomic(AtomicEth { address, rkey: REMOTE_ADDR.rkey, swap_or_add: 1, compare: 0 })
}

use Opcode as O;

/// Every request opcode, the state that it belongs to, and a valid packet of it. After its first
/// packet a message has two more, the last with ten bytes.
fn requests() -> [(Opcode, MessageState, Extension, u32); 17] {
    use MessageState::{Idle, Send, Write};
    let none = Extension::None;
    [
        (O::SendFirst, Idle, none, MTU),
        (O::SendMiddle, Send, none, MTU),
        (O::SendLast, Send, none, 10),
        (O::SendLastImm, Send, Extension::Imm(1), 10),
        (O::SendLastInvalidate, Send, Extension::Invalidate(1), 10),
        (O::SendOnly, Idle, none, 10),
        (O::SendOnlyImm, Idle, Extension::Imm(1), 10),
        (O::SendOnlyInvalidate, Idle, Extension::Invalidate(1), 10),
        (O::WriteFirst, Idle, Extension::Reth(reth(MTU + 10)), MTU),
        (O::WriteMiddle, Write, none, MTU),
        (O::WriteLast, Write, none, 10),
        (O::WriteLastImm, Write, Extension::Imm(1), 10),
        (O::WriteOnly, Idle, Extension::Reth(reth(10)), 10),
        (O::WriteOnlyImm, Idle, Extension::RethImm(reth(10), 1), 10),
        (O::ReadRequest, Idle, Extension::Reth(reth(10)), 0),
        (O::CompareSwap, Idle, atomic(REMOTE_ADDR.address), 0),
        (O::FetchAdd, Idle, atomic(REMOTE_ADDR.address), 0),
    ]
}

/// A pair whose responder is in the middle of a message; `left` bytes of a write are missing.
fn pair_in_message(what: MessageState, left: u32) -> Pair {
    let mut pair = Pair::with_receives(ConnParams::default(), 4);
    match what {
        MessageState::Idle => {}
        MessageState::Send => pair.inject_request(O::SendFirst, Extension::None, MTU).unwrap(),
        MessageState::Write => {
            pair.inject_request(O::WriteFirst, Extension::Reth(reth(MTU + left)), MTU).unwrap();
        }
    }
    pair
}

#[test]
fn every_opcode_is_taken_in_its_place_and_fails_the_queue_pair_in_any_other() {
    for message_state in [MessageState::Idle, MessageState::Send, MessageState::Write] {
        for (opcode, belongs, extension, len) in requests() {
            // A middle packet must not be the last one.
            let left = if opcode == O::WriteMiddle { MTU + 10 } else { 10 };
            let mut pair = pair_in_message(message_state, left);
            assert_eq!(
                pair.inject_request(opcode, extension, len),
                Ok(()),
                "{opcode:?} {message_state:?}"
            );
            if belongs == message_state {
                assert_eq!(
                    pair.endpoints[B].qp.state(),
                    State::Rts,
                    "{opcode:?} {message_state:?}"
                );
                continue;
            }
            pair.assert_failed(Nak::InvalidRequest, QpEvent::RequestError);
            let statuses = pair.endpoints[B].receive_statuses();
            assert_eq!(
                statuses.len(),
                usize::from(message_state == MessageState::Send),
                "{opcode:?} {message_state:?}"
            );
            assert!(statuses.iter().all(|(_, status)| *status != Status::Success));
        }
    }
}

#[test]
fn a_whole_message_may_follow_another_of_any_kind() {
    let mut pair = Pair::with_receives(ConnParams::default(), 8);
    for (opcode, _, extension, len) in requests() {
        if opcode == O::WriteMiddle {
            continue; // this write has only two packets
        }
        assert_eq!(pair.inject_request(opcode, extension, len), Ok(()), "{opcode:?}");
        if matches!(opcode, O::SendLast | O::SendLastImm) {
            pair.inject_request(O::SendFirst, Extension::None, MTU).unwrap();
        }
        if opcode == O::WriteLast {
            pair.inject_request(O::WriteFirst, Extension::Reth(reth(MTU + 10)), MTU).unwrap();
        }
    }
    assert_eq!(pair.endpoints[B].qp.state(), State::Rts);
    assert_eq!(pair.endpoints[B].received.len(), 8);
}

#[test]
fn a_length_that_does_not_fit_its_place_is_an_invalid_request() {
    use MessageState::{Idle, Send, Write};
    let none = Extension::None;
    for (message_state, opcode, extension, len) in [
        (Idle, O::SendFirst, none, MTU - 1),
        (Idle, O::SendFirst, none, 0),
        (Idle, O::SendFirst, none, MTU + 1),
        (Idle, O::SendOnly, none, MTU + 1),
        (Idle, O::SendOnlyImm, Extension::Imm(1), MTU + 1),
        (Send, O::SendMiddle, none, MTU - 1),
        (Send, O::SendMiddle, none, MTU + 1),
        (Send, O::SendLast, none, 0),
        (Send, O::SendLast, none, MTU + 1),
        (Send, O::SendLastImm, Extension::Imm(1), 0),
        (Send, O::SendLastInvalidate, Extension::Invalidate(1), MTU + 1),
        (Idle, O::WriteFirst, Extension::Reth(reth(2 * MTU)), MTU - 1),
        (Idle, O::WriteFirst, Extension::Reth(reth(MTU)), MTU), // no bytes left for a last packet
        (Idle, O::WriteFirst, Extension::Reth(reth((1 << 31) + 1)), MTU),
        (Idle, O::WriteOnly, Extension::Reth(reth(11)), 10),
        (Idle, O::WriteOnly, Extension::Reth(reth(9)), 10),
        (Idle, O::WriteOnly, Extension::Reth(reth(MTU + 1)), MTU + 1),
        (Idle, O::WriteOnlyImm, Extension::RethImm(reth(11), 1), 10),
        (Write, O::WriteMiddle, none, MTU), // more than the ten remaining bytes
        (Write, O::WriteLast, none, 9),
        (Write, O::WriteLast, none, 11),
        (Write, O::WriteLast, none, 0),
        (Write, O::WriteLast, none, MTU + 1),
        (Write, O::WriteLastImm, Extension::Imm(1), 9),
        (Idle, O::ReadRequest, Extension::Reth(reth(10)), 10),
        (Idle, O::ReadRequest, Extension::Reth(reth((1 << 31) + 1)), 0),
        (Idle, O::ReadRequest, Extension::Reth(reth(u32::MAX)), 0),
        (Idle, O::FetchAdd, atomic(REMOTE_ADDR.address), 8),
        (Idle, O::CompareSwap, atomic(REMOTE_ADDR.address), 1),
        (Idle, O::FetchAdd, atomic(REMOTE_ADDR.address + 4), 0),
        (Idle, O::CompareSwap, atomic(REMOTE_ADDR.address + 1), 0),
    ] {
        let mut pair = pair_in_message(message_state, 10);
        let before = pair.endpoints[B].host.done.len();
        pair.inject_request(opcode, extension, len).unwrap();
        println!("{opcode:?} of {len} bytes, {extension:?}");
        assert_eq!(pair.endpoints[B].host.done.len(), before, "memory was accessed");
        pair.assert_failed(Nak::InvalidRequest, QpEvent::RequestError);
    }
}

#[test]
fn the_requester_learns_of_an_invalid_request() {
    for (op, len) in [(SendOp::Send, 2 * MTU), (SendOp::Write(REMOTE_ADDR), 2 * MTU)] {
        let mut pair = Pair::with_receives(ConnParams::default(), 1);
        pair.post(A, 0, op, len);
        let first = edited(&pair.send(A).unwrap(), |headers| {
            headers.opcode = if op == SendOp::Send { O::SendLast } else { O::WriteLast };
            headers.extension = Extension::None;
        });
        pair.deliver(B, &first).unwrap();
        pair.assert_ends(Status::RemoteInvalidRequest, Some(QpEvent::RequestError));
    }
}

#[test]
fn a_missing_receive_is_reported_before_a_wrong_length() {
    // The order of checks is PSN, opcode sequence, access flags, resources, length, memory.
    for (opcode, extension, len) in [
        (O::SendOnly, Extension::None, MTU + 1),
        (O::SendFirst, Extension::None, 1),
        (O::WriteOnlyImm, Extension::RethImm(reth(11), 1), 10),
    ] {
        let mut pair = Pair::new();
        assert_eq!(
            pair.inject_request(opcode, extension, len),
            Err(DiscardReason::Busy),
            "{opcode:?}"
        );
        assert_eq!(syndrome(&pair.send(B).unwrap()), Syndrome::RnrNak(5));
        assert_eq!(pair.endpoints[B].qp.state(), State::Rts);
    }
}

#[test]
fn an_empty_read_or_write_names_no_memory() {
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 0);
    pair.post(A, 1, SendOp::Read(REMOTE_ADDR), 0);
    pair.post(A, 2, SendOp::WriteImm(REMOTE_ADDR, 3), 0);
    pair.post(A, 3, SendOp::Send, 0);
    pair.endpoints[B].host.add_receive(1, 0);
    pair.assert_all_succeed(4);
    let host = &pair.endpoints[B].host;
    assert_eq!(host.call_count(HostCall::MayAccess) + host.call_count(HostCall::FetchRemote), 0);
    assert_eq!(host.done, []);
    assert_eq!(pair.endpoints[A].host.done, []);
}

#[test]
fn more_reads_and_atomics_than_agreed_are_an_invalid_request() {
    for kept in [0, 1, 3, 4] {
        for (op, len) in [(SendOp::Read(REMOTE_ADDR), 10), (SendOp::Atomic(REMOTE_ADDR, ADD), 8)] {
            // The requester's limit is higher than the responder's.
            let params =
                ConnParams { max_rd_atomic: 16, max_dest_rd_atomic: kept, ..ConnParams::default() };
            let mut pair = Pair::with(params);
            (0..u64::from(kept) + 1).for_each(|id| pair.post(A, id, op, len));
            let requests = pair.send_all(A);
            assert_eq!(requests.len(), usize::from(kept) + 1);
            for request in &requests {
                assert_eq!(pair.endpoints[B].qp.state(), State::Rts);
                pair.deliver(B, request).unwrap();
            }
            assert_eq!(pair.endpoints[B].qp.state(), State::Err);
            pair.exchange();
            let (failed, done) = pair.endpoints[A].sent.split_last().unwrap();
            assert_eq!(failed.1, Status::RemoteInvalidRequest);
            assert!(done.iter().all(|(_, status)| *status == Status::Success));
        }
    }
}

#[test]
fn a_write_of_maximum_length_begins() {
    let mut pair = Pair::new();
    pair.inject_request(O::WriteFirst, Extension::Reth(reth(1 << 31)), MTU).unwrap();
    assert_eq!(pair.endpoints[B].qp.state(), State::Rts);
}

#[test]
fn a_send_longer_than_the_maximum_is_an_invalid_request() {
    let mtu = 1 << 20; // a nonstandard MTU, which needs fewer packets
    let mut pair = Pair::with(ConnParams { mtu, ..ConnParams::default() });
    pair.endpoints[B].host.add_receive(0, u32::MAX);
    pair.inject_request(O::SendFirst, Extension::None, mtu).unwrap();
    for _ in 1..2048 {
        pair.inject_request(O::SendMiddle, Extension::None, mtu).unwrap();
    }
    assert_eq!(pair.endpoints[B].qp.state(), State::Rts, "2^31 bytes are allowed");
    pair.inject_request(O::SendLast, Extension::None, 1).unwrap();
    pair.assert_failed(Nak::InvalidRequest, QpEvent::RequestError);
}
