//! Answers that contradict themselves or one another: data with a NAK, data out of order, a NAK
//! that overtakes data, and NAKs that come more than once.

use core::time::Duration;

use warpwire_proto::qp::{
    DiscardReason, HostStatus, QpEvent, SendOp, SendQueueError, SendWr, State, Status,
    TransportOptions,
};
use warpwire_proto::wire::ext::Reth;
use warpwire_proto::wire::{Aeth, Extension, Nak, Opcode, Syndrome};

use crate::directed::host::HostCall;
use crate::directed::pair::{
    A, ADD, B, ConnParams, MTU, Pair, REMOTE_ADDR, edited, opcodes, psns, syndrome,
};

use Opcode::{ReadResponseFirst, ReadResponseLast, ReadResponseMiddle, ReadResponseOnly};
use Status::{BadResponse, Flushed, Success};

fn aeth(syndrome: Syndrome) -> Extension {
    Extension::Aeth(Aeth { syndrome, msn: 1 })
}

/// Delivers a read response with the extension that its opcode has on the wire.
fn data(pair: &mut Pair, opcode: Opcode, psn: u32, len: u32) -> Result<(), DiscardReason> {
    let ext = if opcode == ReadResponseMiddle { Extension::None } else { aeth(Syndrome::ACK) };
    pair.inject_response(opcode, psn, ext, len)
}

const NOT_ACKS: [u8; 9] = [0x20, 0x2c, 0x40, 0x60, 0x61, 0x62, 0x80, 0xa1, 0xff];

#[test]
fn data_with_the_syndrome_of_a_nak_is_a_bad_response() {
    for byte in NOT_ACKS {
        let no = Syndrome::from_byte(byte);
        for (opcode, psn, len) in [(ReadResponseFirst, 0x100, MTU), (ReadResponseLast, 0x101, 5)] {
            let mut pair = Pair::new();
            pair.post(A, 0, SendOp::Read(REMOTE_ADDR), MTU + 5);
            pair.send_all(A);
            if opcode == ReadResponseLast {
                data(&mut pair, ReadResponseFirst, 0x100, MTU).unwrap();
            }
            pair.inject_response(opcode, psn, aeth(no), len).unwrap();
            assert_eq!(pair.endpoints[A].sent, [(0, BadResponse)], "{byte:#x} in {opcode:?}");
        }
        let mut pair = Pair::new();
        pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 5);
        pair.post(A, 1, SendOp::Send, 5);
        pair.send_all(A);
        pair.inject_response(ReadResponseOnly, 0x100, aeth(no), 5).unwrap();
        assert_eq!(pair.endpoints[A].sent, [(0, BadResponse), (1, Flushed)], "{byte:#x}");
        assert_eq!(
            pair.endpoints[A].host.call_count(HostCall::PlaceResponse),
            0,
            "data was placed"
        );
        let mut pair = Pair::new();
        pair.post(A, 0, SendOp::Atomic(REMOTE_ADDR, ADD), 8);
        pair.send_all(A);
        let value = Extension::AethAtomic(Aeth { syndrome: no, msn: 1 }, 7);
        pair.inject_response(Opcode::AtomicAcknowledge, 0x100, value, 0).unwrap();
        assert_eq!(pair.endpoints[A].sent, [(0, BadResponse)], "{byte:#x}");
        assert_eq!(pair.endpoints[A].qp.state(), State::Err);
    }
    // Any credit count is an ACK.
    for code in 0..32 {
        let mut pair = Pair::new();
        pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 5);
        pair.send_all(A);
        pair.inject_response(ReadResponseOnly, 0x100, aeth(Syndrome::Ack(code)), 5).unwrap();
        assert_eq!(pair.endpoints[A].sent, [(0, Success)]);
    }
}

#[test]
fn read_responses_come_in_the_order_first_middle_last() {
    let (first, middle) = (ReadResponseFirst, ReadResponseMiddle);
    let (last, only) = (ReadResponseLast, ReadResponseOnly);
    let all = [first, middle, last, only];
    for one in all {
        for two in all {
            for three in all {
                let mut pair = Pair::new();
                pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 3 * MTU);
                pair.send_all(A);
                for (psn, opcode) in (0x100..).zip([one, two, three]) {
                    let _ = data(&mut pair, opcode, psn, MTU);
                }
                let right = [one, two, three] == [first, middle, last];
                let status = if right { Success } else { BadResponse };
                assert_eq!(pair.endpoints[A].sent, [(0, status)], "{one:?} {two:?} {three:?}");
            }
        }
    }
    for opcode in all {
        let mut pair = Pair::new();
        pair.post(A, 0, SendOp::Read(REMOTE_ADDR), MTU);
        pair.send_all(A);
        data(&mut pair, opcode, 0x100, MTU).unwrap();
        let status = if opcode == only { Success } else { BadResponse };
        assert_eq!(pair.endpoints[A].sent, [(0, status)], "{opcode:?}");
    }
}

#[test]
fn each_chunk_of_a_read_begins_and_ends_anew() {
    let options = TransportOptions::default().with_read_chunk(2);
    let right = [ReadResponseFirst, ReadResponseLast, ReadResponseFirst, ReadResponseLast];
    for wrong in [None, Some((1, ReadResponseMiddle)), Some((2, ReadResponseMiddle))] {
        let mut pair = Pair::with(ConnParams { options, ..ConnParams::default() });
        pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 4 * MTU);
        assert_eq!(psns(&pair.send_all(A)), [0x100, 0x102]);
        let mut sent = right;
        if let Some((at, opcode)) = wrong {
            sent[at] = opcode;
        }
        for (psn, opcode) in (0x100..).zip(sent) {
            let _ = data(&mut pair, opcode, psn, MTU);
        }
        let status = if wrong.is_none() { Success } else { BadResponse };
        assert_eq!(pair.endpoints[A].sent, [(0, status)], "{wrong:?}");
    }
}

#[test]
fn a_read_that_resumes_is_answered_from_there_or_continued() {
    // Linux's rxe answers the rest of a read with a middle, other implementations with a first.
    for (opcode, status) in [
        (ReadResponseFirst, Success),
        (ReadResponseMiddle, Success),
        (ReadResponseLast, BadResponse),
        (ReadResponseOnly, BadResponse),
    ] {
        let mut pair = Pair::new();
        pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 4 * MTU);
        pair.send_all(A);
        data(&mut pair, ReadResponseFirst, 0x100, MTU).unwrap();
        // The response with 0x101 is lost: it is requested again.
        let gap = data(&mut pair, ReadResponseMiddle, 0x102, MTU);
        assert_eq!(gap, Err(DiscardReason::ResponseGap));
        assert_eq!(psns(&pair.send_all(A)), [0x101]);
        let _ = data(&mut pair, opcode, 0x101, MTU);
        let _ = data(&mut pair, ReadResponseMiddle, 0x102, MTU);
        let _ = data(&mut pair, ReadResponseLast, 0x103, MTU);
        assert_eq!(pair.endpoints[A].sent, [(0, status)], "{opcode:?}");
    }
    // Without a request from there, a response does not begin there.
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 4 * MTU);
    pair.send_all(A);
    data(&mut pair, ReadResponseFirst, 0x100, MTU).unwrap();
    data(&mut pair, ReadResponseFirst, 0x101, MTU).unwrap();
    assert_eq!(pair.endpoints[A].sent, [(0, BadResponse)]);
}

#[test]
fn a_rejection_that_overtakes_data_fails_the_rejected_work_only() {
    let nak = Syndrome::Nak(Nak::RemoteAccess);
    for repeated in [false, true] {
        let mut pair = Pair::new();
        pair.post(A, 1, SendOp::Read(REMOTE_ADDR), 64);
        pair.post(A, 2, SendOp::Write(REMOTE_ADDR), 64);
        pair.post(A, 3, SendOp::Write(REMOTE_ADDR), 64);
        pair.post(A, 4, SendOp::Write(REMOTE_ADDR), 64);
        assert_eq!(psns(&pair.send_all(A)), [0x100, 0x101, 0x102, 0x103]);
        // It acknowledges the write before the rejected one, and shows that data is missing.
        assert_eq!(pair.inject_ack(0x102, nak), Err(DiscardReason::ResponseGap));
        assert_eq!(pair.endpoints[A].sent, [], "the read was blamed");
        let again = pair.send_all(A);
        assert_eq!((again[0].headers.opcode, psns(&again)[0]), (Opcode::ReadRequest, 0x100));
        if repeated {
            assert_eq!(pair.inject_ack(0x102, nak), Err(DiscardReason::ResponseGap));
            assert_eq!(pair.send_all(A), [], "a copy of the NAK caused another request");
        }
        data(&mut pair, ReadResponseOnly, 0x100, 64).unwrap();
        let wanted = [(1, Success), (2, Success), (3, Status::RemoteAccess), (4, Flushed)];
        assert_eq!(pair.endpoints[A].sent, wanted);
    }
}

#[test]
fn a_rejection_waits_for_every_read_before_it() {
    for byte in [0x61, 0x63, 0x80] {
        let mut pair = Pair::new();
        pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 64);
        pair.post(A, 1, SendOp::Atomic(REMOTE_ADDR, ADD), 8);
        pair.post(A, 2, SendOp::Send, 64);
        pair.send_all(A);
        assert!(pair.inject_ack(0x102, Syndrome::from_byte(byte)).is_err());
        pair.send_all(A);
        data(&mut pair, ReadResponseOnly, 0x100, 64).unwrap();
        assert_eq!(pair.endpoints[A].sent, [(0, Success)]);
        let value = Extension::AethAtomic(Aeth { syndrome: Syndrome::ACK, msn: 2 }, 7);
        pair.inject_response(Opcode::AtomicAcknowledge, 0x101, value, 0).unwrap();
        let status = match byte {
            0x61 => Status::RemoteInvalidRequest,
            0x63 => Status::RemoteOperation,
            _ => BadResponse,
        };
        assert_eq!(pair.endpoints[A].sent, [(0, Success), (1, Success), (2, status)]);
    }
}

#[test]
fn data_that_never_comes_fails_by_the_timer_after_a_rejection() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 64);
    pair.post(A, 1, SendOp::Write(REMOTE_ADDR), 64);
    pair.send_all(A);
    while pair.endpoints[A].sent.is_empty() {
        let _ = pair.inject_ack(0x101, Syndrome::Nak(Nak::RemoteAccess));
        pair.send_all(A);
        pair.advance_to(pair.next_deadline());
    }
    assert_eq!(pair.endpoints[A].sent, [(0, Status::RetryExceeded), (1, Flushed)]);
}

#[test]
fn a_failed_responder_still_answers_what_it_executed_before() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 2 * MTU);
    pair.post(A, 1, SendOp::Atomic(REMOTE_ADDR, ADD), 8);
    pair.post(A, 2, SendOp::Write(REMOTE_ADDR), 64);
    let requests = pair.send_all(A);
    pair.deliver(B, &requests[0]).unwrap();
    pair.deliver(B, &requests[1]).unwrap();
    pair.endpoints[B].host.answer(HostCall::MayAccess, [HostStatus::Denied]);
    let _ = pair.deliver(B, &requests[2]);
    let answers = pair.send_all(B);
    assert_eq!(answers.len(), 4);
    assert_eq!(syndrome(&answers[3]), Syndrome::Nak(Nak::RemoteAccess));
    // All data is lost; the rejection arrives.
    assert_eq!(pair.deliver(A, &answers[3]), Err(DiscardReason::ResponseGap));
    pair.exchange();
    let wanted = [(0, Success), (1, Success), (2, Status::RemoteAccess)];
    assert_eq!(pair.endpoints[A].sent, wanted);
    assert_eq!(pair.endpoints[B].host.call_count(HostCall::Execute), 1, "executed again");
    assert_eq!(pair.endpoints[B].qp_events, [QpEvent::AccessError]);
}

#[test]
fn a_gap_is_reported_once_in_any_order() {
    for order in [[3, 2, 1], [1, 2, 3], [2, 2, 2], [1, 3, 2]] {
        let mut pair = Pair::with_receives(ConnParams::default(), 8);
        (0..4).for_each(|id| pair.post(A, id, SendOp::Send, 8));
        let requests = pair.send_all(A);
        let mut naks = Vec::new();
        for at in order {
            assert_eq!(pair.deliver(B, &requests[at]), Err(DiscardReason::Gap));
            naks.extend(pair.send_all(B));
        }
        assert_eq!(psns(&naks), [0x100], "{order:?}");
        assert_eq!(syndrome(&naks[0]), Syndrome::Nak(Nak::Sequence));
        // The missing packet ends the episode; the next gap is reported again.
        pair.deliver(B, &requests[0]).unwrap();
        let _ = pair.deliver(B, &requests[3]);
        assert_eq!(psns(&pair.send_all(B)), [0x101], "{order:?}");
    }
}

#[test]
fn a_gap_behind_a_gap_that_closed_is_reported_once() {
    let mut pair = Pair::with_receives(ConnParams::default(), 8);
    (0..5).for_each(|id| pair.post(A, id, SendOp::Send, 8));
    let requests = pair.send_all(A);
    // The NAK for the first packet is due but not sent when that packet arrives.
    let _ = pair.deliver(B, &requests[3]);
    pair.deliver(B, &requests[0]).unwrap();
    assert_eq!(psns(&pair.send_all(B)), [0x101]);
    for at in [4, 3, 2] {
        let _ = pair.deliver(B, &requests[at]);
        assert_eq!(pair.send_all(B), [], "the same gap was reported twice");
    }
}

#[test]
fn copies_of_a_sequence_nak_do_not_resend_the_window() {
    let nak = Syndrome::Nak(Nak::Sequence);
    let mut pair = Pair::new();
    (0..4).for_each(|id| pair.post(A, id, SendOp::Send, 8));
    pair.send_all(A);
    pair.inject_ack(0x101, nak).unwrap();
    assert_eq!(psns(&pair.send_all(A)), [0x101, 0x102, 0x103]);
    for _ in 0..10 {
        pair.inject_ack(0x101, nak).unwrap();
        assert_eq!(pair.send_all(A), [], "a copy resent the window");
        pair.wait(Duration::from_micros(10));
    }
    // Another gap is another NAK.
    pair.inject_ack(0x102, nak).unwrap();
    assert_eq!(psns(&pair.send_all(A)), [0x102, 0x103]);
    pair.inject_ack(0x103, Syndrome::ACK).unwrap();
    pair.assert_all_succeed(4);
    assert_eq!(pair.endpoints[A].qp.stats().sequence_naks_received, 12);
    assert_eq!(pair.endpoints[A].qp.stats().resent, 5);
}

#[test]
fn a_peer_that_only_sends_sequence_naks_gets_few_packets() {
    let mut pair = Pair::with(ConnParams { retry_count: 3, ..ConnParams::default() });
    (0..4).for_each(|id| pair.post(A, id, SendOp::Send, 8));
    let mut sent = 0;
    while pair.endpoints[A].sent.is_empty() {
        sent += pair.send_all(A).len();
        let _ = pair.inject_ack(0x100, Syndrome::Nak(Nak::Sequence));
        pair.wait(Duration::from_micros(50));
    }
    assert_eq!(pair.endpoints[A].sent[0], (0, Status::RetryExceeded));
    assert!(sent <= 4 * 4, "{sent} packets");
}

#[test]
fn the_longest_message_at_the_smallest_mtu_is_refused_when_posted() {
    let mut pair = Pair::with(ConnParams { mtu: 256, ..ConnParams::default() });
    let longest = 1_u32 << 31;
    for op in [SendOp::Send, SendOp::Write(REMOTE_ADDR), SendOp::Read(REMOTE_ADDR)] {
        let qp = &mut pair.endpoints[A].qp;
        assert_eq!(qp.post(SendWr::new(0, op, longest)), Err(SendQueueError::Length(longest)));
        assert_eq!(qp.post(SendWr::new(0, op, longest - 256)), Ok(()));
    }
    let mut pair = Pair::with(ConnParams { mtu: 512, ..ConnParams::default() });
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), longest);
}

#[test]
fn the_longest_read_of_a_peer_is_answered_at_the_smallest_mtu() {
    let mut pair = Pair::with(ConnParams { mtu: 256, ..ConnParams::default() });
    let reth = Reth { address: REMOTE_ADDR.address, rkey: REMOTE_ADDR.rkey, len: 1 << 31 };
    pair.inject_request(Opcode::ReadRequest, Extension::Reth(reth), 0).unwrap();
    let answers: Vec<_> = (0..3).filter_map(|_| pair.send(B)).collect();
    assert_eq!(opcodes(&answers), [ReadResponseFirst, ReadResponseMiddle, ReadResponseMiddle]);
    assert_eq!(psns(&answers), [0x100, 0x101, 0x102]);
    // The request for its last two packets, of 2^23.
    let again = edited(&answers[0], |headers| {
        let address = reth.address + (1 << 31) - 512;
        headers.opcode = Opcode::ReadRequest;
        headers.extension = Extension::Reth(Reth { address, len: 512, ..reth });
        headers.psn = headers.psn.add((1 << 23) - 2);
    });
    assert_eq!(pair.deliver(B, &again), Err(DiscardReason::Duplicate));
    assert_eq!(pair.endpoints[B].qp.state(), State::Rts);
    let too_long = Reth { len: (1 << 31) + 1, ..reth };
    pair.number = pair.endpoints[B].qp.next_psns().0;
    let _ = pair.inject_request(Opcode::ReadRequest, Extension::Reth(too_long), 0);
    assert_eq!(pair.endpoints[B].qp.state(), State::Err);
}
