//! Lost and reordered packets at the responder; PSN wraparound; message counts.

use warpwire_proto::Psn;
use warpwire_proto::qp::{DiscardReason, SendOp, Status, Transmit};
use warpwire_proto::wire::{Nak, Opcode, Syndrome};

use crate::directed::pair::{
    A, ADD, B, ConnParams, MTU, Pair, REMOTE_ADDR, aeth, edited, one_of_each_op, opcodes, psn,
    syndrome,
};

const SEQUENCE: Syndrome = Syndrome::Nak(Nak::Sequence);

/// Ten packets of a send are in flight.
fn ten_packets() -> (Pair, Vec<Transmit>) {
    let mut pair = Pair::with_receives(ConnParams::default(), 4);
    pair.post(A, 0, SendOp::Send, 10 * MTU);
    let packets = pair.send_all(A);
    assert_eq!(packets.len(), 10);
    (pair, packets)
}

#[test]
fn a_gap_causes_one_nak_and_the_requester_goes_back_to_it() {
    let (mut pair, packets) = ten_packets();
    pair.deliver(B, &packets[0]).unwrap();
    let outcomes = pair.deliver_all(B, &packets[2..]);
    assert_eq!(outcomes, vec![Err(DiscardReason::Gap); 8]);
    let responses = pair.send_all(B);
    assert_eq!(responses.len(), 1, "more than one NAK");
    assert_eq!((psn(&responses[0]), syndrome(&responses[0])), (0x101, SEQUENCE));
    pair.deliver(A, &responses[0]).unwrap();
    assert_eq!(
        pair.send_all(A),
        packets[1..].iter().map(with_first_ack_request()).collect::<Vec<_>>()
    );
    pair.wait(pair.params.ack_timeout());
    pair.run();
    assert_eq!(pair.endpoints[A].sent, [(0, Status::Success)]);
    assert_eq!(pair.endpoints[B].dropped(DiscardReason::Gap), 8);
    assert_eq!(pair.endpoints[B].qp.stats().sequence_naks_sent, 1);
    assert_eq!(pair.endpoints[A].qp.stats().sequence_naks_received, 1);
}

/// Marks the first packet: a retransmission requests an ACK with its first packet.
fn with_first_ack_request() -> impl FnMut(&Transmit) -> Transmit {
    let mut first = true;
    move |packet| {
        let ack_request = core::mem::take(&mut first) || packet.headers.ack_request;
        edited(packet, |headers| headers.ack_request = ack_request)
    }
}

#[test]
fn a_gap_that_closes_before_the_nak_is_sent_is_acknowledged() {
    let (mut pair, packets) = ten_packets();
    assert_eq!(pair.deliver(B, &packets[1]), Err(DiscardReason::Gap));
    assert_eq!(pair.deliver(B, &packets[0]), Ok(()));
    let responses = pair.send_all(B);
    // The first packet has arrived, the second was discarded and is still missing.
    assert_eq!((psn(&responses[0]), syndrome(&responses[0])), (0x101, SEQUENCE));
    assert_eq!(pair.deliver(B, &packets[1]), Ok(()));
    assert_eq!(pair.deliver(B, &packets[3]), Err(DiscardReason::Gap));
    assert_eq!(pair.deliver(B, &packets[2]), Ok(()));
    assert_eq!(pair.deliver(B, &packets[3]), Ok(()));
    let responses = pair.send_all(B);
    assert_eq!((psn(&responses[0]), syndrome(&responses[0])), (0x103, Syndrome::ACK));
}

#[test]
fn a_new_gap_causes_a_new_nak() {
    let (mut pair, packets) = ten_packets();
    for (lost, next) in [(0, 1), (2, 3)] {
        assert_eq!(pair.deliver(B, &packets[next]), Err(DiscardReason::Gap));
        assert_eq!(psn(&pair.send_all(B)[0]), 0x100 + lost as u32);
        pair.deliver(B, &packets[lost]).unwrap();
        pair.deliver(B, &packets[next]).unwrap();
    }
}

#[test]
fn no_sequence_nak_follows_an_rnr_nak() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Send, 10);
    pair.post(A, 1, SendOp::Send, 10);
    let packets = pair.send_all(A);
    assert_eq!(pair.deliver(B, &packets[0]), Err(DiscardReason::Busy));
    assert_eq!(pair.deliver(B, &packets[1]), Err(DiscardReason::Gap));
    let responses = pair.send_all(B);
    assert_eq!(responses.len(), 1);
    assert_eq!((psn(&responses[0]), syndrome(&responses[0])), (0x100, Syndrome::RnrNak(5)));
    // All that follows is ignored until the first packet comes again.
    for _ in 0..2 {
        assert_eq!(pair.deliver(B, &packets[1]), Err(DiscardReason::Gap));
        assert_eq!(pair.send_all(B), []);
    }
    assert_eq!(pair.deliver(B, &packets[0]), Err(DiscardReason::Busy));
    assert_eq!(syndrome(&pair.send_all(B)[0]), Syndrome::RnrNak(5));
}

#[test]
fn every_operation_survives_psn_wraparound() {
    for packets in [1, 3] {
        for back in 0..3 {
            for (op, len) in one_of_each_op(packets) {
                let psn = [0xff_ffff - back, 0xff_ffff];
                let mut pair = Pair::with_receives(ConnParams { psn, ..ConnParams::default() }, 4);
                (0..4).for_each(|id| pair.post(A, id, op, len));
                pair.assert_all_succeed(4);
                let wrapped = pair.endpoints[A].qp.next_psns().1;
                assert!(wrapped.value() < 0x100, "{op:?} ends at {wrapped:?}");
                assert_eq!(pair.endpoints[B].qp.next_psns().0, wrapped);
            }
        }
    }
}

#[test]
fn every_operation_survives_the_loss_of_any_packet_at_psn_wraparound() {
    for (op, len) in one_of_each_op(3) {
        for lost in 0..6 {
            let psn = [0xff_fffe, 0xff_fffe];
            let mut pair = Pair::with_receives(ConnParams { psn, ..ConnParams::default() }, 4);
            pair.post(A, 0, op, len);
            let mut count = 0;
            for from in [A, B, A, B] {
                for packet in pair.send_all(from) {
                    if count != lost {
                        let _ = pair.deliver(1 - from, &packet);
                    }
                    count += 1;
                }
            }
            pair.assert_all_succeed(1);
            let once = u32::from(matches!(op, SendOp::Atomic(..)));
            assert_eq!(
                pair.endpoints[B].host.call_count(crate::directed::host::HostCall::Execute),
                once
            );
        }
    }
}

#[test]
fn messages_are_counted_when_complete_and_reads_when_accepted() {
    let mut pair = Pair::with_receives(ConnParams::default(), 4);
    pair.post(A, 0, SendOp::Send, 2 * MTU);
    pair.post(A, 1, SendOp::Write(REMOTE_ADDR), 2 * MTU);
    pair.post(A, 2, SendOp::Read(REMOTE_ADDR), 2 * MTU);
    pair.post(A, 3, SendOp::Atomic(REMOTE_ADDR, ADD), 8);
    pair.post(A, 4, SendOp::WriteImm(REMOTE_ADDR, 1), 0);
    let packets = pair.send_all(A);
    let mut counts = Vec::new();
    for packet in packets {
        pair.deliver(B, &packet).unwrap();
        counts.extend(pair.send_all(B).iter().map(|answer| aeth(answer).msn));
    }
    assert_eq!(counts, [1, 2, 3, 3, 4, 5]);
}

#[test]
fn naks_carry_the_message_count_too() {
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    pair.post(A, 0, SendOp::Send, 10);
    pair.post(A, 1, SendOp::Send, 10);
    let packets = pair.send_all(A);
    let _ = pair.deliver_all(B, &packets);
    let responses = pair.send_all(B);
    assert_eq!((syndrome(&responses[0]), aeth(&responses[0]).msn), (Syndrome::RnrNak(5), 1));
}

#[test]
fn acknowledgements_of_packets_handled_together_are_coalesced() {
    let mut pair = Pair::with_receives(ConnParams::default(), 8);
    (0..8).for_each(|id| pair.post(A, id, SendOp::Send, 10));
    pair.transfer(A);
    let responses = pair.transfer(B);
    assert_eq!((responses.len(), psn(&responses[0])), (1, 0x107));
    assert_eq!(pair.endpoints[A].sent.len(), 8, "one ACK completes all of them");
}

#[test]
fn nothing_is_acknowledged_without_an_ack_request() {
    let (mut pair, packets) = ten_packets();
    let quiet = |packet| edited(packet, |headers| headers.ack_request = false);
    let packets: Vec<_> = packets.iter().map(quiet).collect();
    assert_eq!(pair.deliver_all(B, &packets), vec![Ok(()); 10]);
    assert_eq!(pair.send_all(B), []);
    assert_eq!(pair.endpoints[B].received.len(), 1);
}

#[test]
fn read_data_is_sent_before_the_ack_of_later_requests() {
    let mut pair = Pair::with_receives(ConnParams::default(), 2);
    pair.post(A, 0, SendOp::Send, 10);
    pair.post(A, 1, SendOp::Read(REMOTE_ADDR), 2 * MTU);
    pair.post(A, 2, SendOp::Send, 10);
    pair.transfer(A);
    let answers = pair.transfer(B);
    let (first, last) = (Opcode::ReadResponseFirst, Opcode::ReadResponseLast);
    assert_eq!(opcodes(&answers), [first, last, Opcode::Acknowledge]);
    assert_eq!(pair.endpoints[A].sent.len(), 3);
}

#[test]
fn an_untaken_receive_completion_delays_the_next_packet() {
    let mut pair = Pair::with_receives(ConnParams::default(), 2);
    pair.post(A, 0, SendOp::Send, 10);
    pair.post(A, 1, SendOp::Send, 10);
    pair.endpoints[B].ignore_events = true;
    let packets = pair.send_all(A);
    assert_eq!(pair.deliver_all(B, &packets), [Ok(()), Err(DiscardReason::Busy)]);
    assert_eq!(pair.endpoints[B].dropped(DiscardReason::Busy), 1);
    pair.endpoints[B].ignore_events = false;
    pair.endpoints[B].drain_events();
    pair.assert_all_succeed(2);
    assert_eq!(pair.endpoints[B].receive_statuses().len(), 2);
}

#[test]
fn a_read_uses_the_psns_of_its_responses() {
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 3 * MTU + 1);
    pair.post(A, 1, SendOp::Send, 1);
    let packets = pair.send_all(A);
    assert_eq!(packets.len(), 2, "one request for four responses");
    assert_eq!((psn(&packets[0]), psn(&packets[1])), (0x100, 0x104));
    assert_eq!(pair.endpoints[A].qp.next_psns().1, Psn::new(0x105));
}

#[test]
fn an_acknowledgement_does_not_hide_a_discarded_packet() {
    let mut pair = Pair::with_receives(ConnParams::default(), 2);
    pair.post(A, 0, SendOp::Send, 10);
    pair.post(A, 1, SendOp::Send, 10);
    let packets = pair.send_all(A);
    assert_eq!(pair.deliver(B, &packets[1]), Err(DiscardReason::Gap));
    assert_eq!(pair.deliver(B, &packets[0]), Ok(())); // requests an ACK
    let responses = pair.send_all(B);
    assert_eq!((psn(&responses[0]), syndrome(&responses[0])), (0x101, SEQUENCE));
}
