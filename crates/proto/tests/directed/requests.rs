//! Requests made by hand: opcodes in every order, and lengths that do not fit.

use warpwire_proto::qp::{Discard, Notice, Op, State, Status};
use warpwire_proto::wire::{AtomicEth, Extension, Nak, Opcode, Reth, Syndrome};

use crate::directed::host::Call;
use crate::directed::pair::{A, ADD, B, MTU, PLACE, Pair, Terms, edited, syndrome};

/// A message that is coming in when the next request comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Inside {
    Nothing,
    Send,
    Write,
}

fn reth(len: u32) -> Reth {
    Reth { address: PLACE.address, rkey: PLACE.key, len }
}

fn atomic(address: u64) -> Extension {
    Extension::Atomic(AtomicEth { address, rkey: PLACE.key, swap_or_add: 1, compare: 0 })
}

use Opcode as O;

/// Every request opcode, where it may stand, and a packet of it that is sound in itself. A message goes on
/// after its first packet for two more, the last of ten bytes.
fn requests() -> [(Opcode, Inside, Extension, u32); 17] {
    use Inside::{Nothing, Send, Write};
    let none = Extension::None;
    [
        (O::SendFirst, Nothing, none, MTU),
        (O::SendMiddle, Send, none, MTU),
        (O::SendLast, Send, none, 10),
        (O::SendLastImm, Send, Extension::Imm(1), 10),
        (O::SendLastInvalidate, Send, Extension::Invalidate(1), 10),
        (O::SendOnly, Nothing, none, 10),
        (O::SendOnlyImm, Nothing, Extension::Imm(1), 10),
        (O::SendOnlyInvalidate, Nothing, Extension::Invalidate(1), 10),
        (O::WriteFirst, Nothing, Extension::Reth(reth(MTU + 10)), MTU),
        (O::WriteMiddle, Write, none, MTU),
        (O::WriteLast, Write, none, 10),
        (O::WriteLastImm, Write, Extension::Imm(1), 10),
        (O::WriteOnly, Nothing, Extension::Reth(reth(10)), 10),
        (O::WriteOnlyImm, Nothing, Extension::RethImm(reth(10), 1), 10),
        (O::ReadRequest, Nothing, Extension::Reth(reth(10)), 0),
        (O::CompareSwap, Nothing, atomic(PLACE.address), 0),
        (O::FetchAdd, Nothing, atomic(PLACE.address), 0),
    ]
}

/// The answering end, in the middle of a message; `left` is what a write still has to bring.
fn inside(what: Inside, left: u32) -> Pair {
    let mut pair = Pair::with_receives(Terms::default(), 4);
    match what {
        Inside::Nothing => {}
        Inside::Send => pair.ask(O::SendFirst, Extension::None, MTU).unwrap(),
        Inside::Write => {
            pair.ask(O::WriteFirst, Extension::Reth(reth(MTU + left)), MTU).unwrap();
        }
    }
    pair
}

#[test]
fn every_opcode_is_taken_in_its_place_and_fails_the_queue_pair_in_any_other() {
    for place in [Inside::Nothing, Inside::Send, Inside::Write] {
        for (opcode, belongs, extension, len) in requests() {
            // A middle packet needs more to come after it.
            let left = if opcode == O::WriteMiddle { MTU + 10 } else { 10 };
            let mut pair = inside(place, left);
            assert_eq!(pair.ask(opcode, extension, len), Ok(()), "{opcode:?} {place:?}");
            if belongs == place {
                assert_eq!(pair.ends[B].qp.state(), State::Rts, "{opcode:?} {place:?}");
                continue;
            }
            pair.assert_failed(Nak::InvalidRequest, Notice::RequestError);
            let told = pair.ends[B].receipts();
            assert_eq!(told.len(), usize::from(place == Inside::Send), "{opcode:?} {place:?}");
            assert!(told.iter().all(|(_, status)| *status != Status::Success));
        }
    }
}

#[test]
fn a_whole_message_may_follow_another_of_any_sort() {
    let mut pair = Pair::with_receives(Terms::default(), 8);
    for (opcode, _, extension, len) in requests() {
        if opcode == O::WriteMiddle {
            continue; // this write has two packets only
        }
        assert_eq!(pair.ask(opcode, extension, len), Ok(()), "{opcode:?}");
        if matches!(opcode, O::SendLast | O::SendLastImm) {
            pair.ask(O::SendFirst, Extension::None, MTU).unwrap();
        }
        if opcode == O::WriteLast {
            pair.ask(O::WriteFirst, Extension::Reth(reth(MTU + 10)), MTU).unwrap();
        }
    }
    assert_eq!(pair.ends[B].qp.state(), State::Rts);
    assert_eq!(pair.ends[B].received.len(), 8);
}

#[test]
fn a_length_that_does_not_fit_its_place_is_an_invalid_request() {
    use Inside::{Nothing, Send, Write};
    let none = Extension::None;
    for (place, opcode, extension, len) in [
        (Nothing, O::SendFirst, none, MTU - 1),
        (Nothing, O::SendFirst, none, 0),
        (Nothing, O::SendFirst, none, MTU + 1),
        (Nothing, O::SendOnly, none, MTU + 1),
        (Nothing, O::SendOnlyImm, Extension::Imm(1), MTU + 1),
        (Send, O::SendMiddle, none, MTU - 1),
        (Send, O::SendMiddle, none, MTU + 1),
        (Send, O::SendLast, none, 0),
        (Send, O::SendLast, none, MTU + 1),
        (Send, O::SendLastImm, Extension::Imm(1), 0),
        (Send, O::SendLastInvalidate, Extension::Invalidate(1), MTU + 1),
        (Nothing, O::WriteFirst, Extension::Reth(reth(2 * MTU)), MTU - 1),
        (Nothing, O::WriteFirst, Extension::Reth(reth(MTU)), MTU), // nothing is left for a last one
        (Nothing, O::WriteFirst, Extension::Reth(reth((1 << 31) + 1)), MTU),
        (Nothing, O::WriteOnly, Extension::Reth(reth(11)), 10),
        (Nothing, O::WriteOnly, Extension::Reth(reth(9)), 10),
        (Nothing, O::WriteOnly, Extension::Reth(reth(MTU + 1)), MTU + 1),
        (Nothing, O::WriteOnlyImm, Extension::RethImm(reth(11), 1), 10),
        (Write, O::WriteMiddle, none, MTU), // more than the ten bytes that are left
        (Write, O::WriteLast, none, 9),
        (Write, O::WriteLast, none, 11),
        (Write, O::WriteLast, none, 0),
        (Write, O::WriteLast, none, MTU + 1),
        (Write, O::WriteLastImm, Extension::Imm(1), 9),
        (Nothing, O::ReadRequest, Extension::Reth(reth(10)), 10),
        (Nothing, O::ReadRequest, Extension::Reth(reth((1 << 31) + 1)), 0),
        (Nothing, O::ReadRequest, Extension::Reth(reth(u32::MAX)), 0),
        (Nothing, O::FetchAdd, atomic(PLACE.address), 8),
        (Nothing, O::CompareSwap, atomic(PLACE.address), 1),
        (Nothing, O::FetchAdd, atomic(PLACE.address + 4), 0),
        (Nothing, O::CompareSwap, atomic(PLACE.address + 1), 0),
    ] {
        let mut pair = inside(place, 10);
        let before = pair.ends[B].host.done.len();
        pair.ask(opcode, extension, len).unwrap();
        println!("{opcode:?} of {len} bytes, {extension:?}");
        assert_eq!(pair.ends[B].host.done.len(), before, "nothing was touched");
        pair.assert_failed(Nak::InvalidRequest, Notice::RequestError);
    }
}

#[test]
fn the_requester_learns_of_a_request_that_was_wrong() {
    for (op, len) in [(Op::Send, 2 * MTU), (Op::Write(PLACE), 2 * MTU)] {
        let mut pair = Pair::with_receives(Terms::default(), 1);
        pair.post(A, 0, op, len);
        let first = edited(&pair.send(A).unwrap(), |headers| {
            headers.opcode = if op == Op::Send { O::SendLast } else { O::WriteLast };
            headers.extension = Extension::None;
        });
        pair.arrive(B, &first).unwrap();
        pair.assert_ends(Status::RemoteInvalidRequest, Some(Notice::RequestError));
    }
}

#[test]
fn a_missing_receive_is_told_before_a_wrong_length() {
    // The order of judgement is number, sequence, flags, resources, length, memory.
    for (opcode, extension, len) in [
        (O::SendOnly, Extension::None, MTU + 1),
        (O::SendFirst, Extension::None, 1),
        (O::WriteOnlyImm, Extension::RethImm(reth(11), 1), 10),
    ] {
        let mut pair = Pair::new();
        assert_eq!(pair.ask(opcode, extension, len), Err(Discard::Busy), "{opcode:?}");
        assert_eq!(syndrome(&pair.send(B).unwrap()), Syndrome::RnrNak(5));
        assert_eq!(pair.ends[B].qp.state(), State::Rts);
    }
}

#[test]
fn an_empty_read_or_write_names_no_memory() {
    let mut pair = Pair::with_receives(Terms::default(), 1);
    pair.post(A, 0, Op::Write(PLACE), 0);
    pair.post(A, 1, Op::Read(PLACE), 0);
    pair.post(A, 2, Op::WriteImm(PLACE, 3), 0);
    pair.post(A, 3, Op::Send, 0);
    pair.ends[B].host.add_receive(1, 0);
    pair.assert_all_succeed(4);
    let host = &pair.ends[B].host;
    assert_eq!(host.times_asked(Call::MayAccess) + host.times_asked(Call::FetchRemote), 0);
    assert_eq!(host.done, []);
    assert_eq!(pair.ends[A].host.done, []);
}

#[test]
fn more_reads_and_atomics_than_agreed_are_an_invalid_request() {
    for kept in [0, 1, 3, 4] {
        for (op, len) in [(Op::Read(PLACE), 10), (Op::Atomic(PLACE, ADD), 8)] {
            // The requester was told a number that the peer did not agree to.
            let terms = Terms { max_rd_atomic: 16, max_dest_rd_atomic: kept, ..Terms::default() };
            let mut pair = Pair::with(terms);
            (0..u64::from(kept) + 1).for_each(|id| pair.post(A, id, op, len));
            let requests = pair.send_all(A);
            assert_eq!(requests.len(), usize::from(kept) + 1);
            for request in &requests {
                assert_eq!(pair.ends[B].qp.state(), State::Rts);
                pair.arrive(B, request).unwrap();
            }
            assert_eq!(pair.ends[B].qp.state(), State::Err);
            pair.exchange();
            let (failed, done) = pair.ends[A].sent.split_last().unwrap();
            assert_eq!(failed.1, Status::RemoteInvalidRequest);
            assert!(done.iter().all(|(_, status)| *status == Status::Success));
        }
    }
}

#[test]
fn a_longest_write_begins() {
    let mut pair = Pair::new();
    pair.ask(O::WriteFirst, Extension::Reth(reth(1 << 31)), MTU).unwrap();
    assert_eq!(pair.ends[B].qp.state(), State::Rts);
}

#[test]
fn a_send_longer_than_the_longest_message_is_an_invalid_request() {
    let mtu = 1 << 20; // between our own ends; it needs fewer packets
    let mut pair = Pair::with(Terms { mtu, ..Terms::default() });
    pair.ends[B].host.add_receive(0, u32::MAX);
    pair.ask(O::SendFirst, Extension::None, mtu).unwrap();
    for _ in 1..2048 {
        pair.ask(O::SendMiddle, Extension::None, mtu).unwrap();
    }
    assert_eq!(pair.ends[B].qp.state(), State::Rts, "2^31 bytes are not too many");
    pair.ask(O::SendLast, Extension::None, 1).unwrap();
    pair.assert_failed(Nak::InvalidRequest, Notice::RequestError);
}
