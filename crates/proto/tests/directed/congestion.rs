//! Congestion control: ECN marks and CNPs.

use core::time::Duration;

use warpwire_proto::Psn;
use warpwire_proto::congestion::PathSignals;
use warpwire_proto::qp::{CNP_INTERVAL, RxPacket, SendOp, Transmit};
use warpwire_proto::wire::{Extension, Nak, Opcode, Syndrome};

use crate::directed::pair::{A, B, MTU, Pair, QPNS, REMOTE_ADDR};

fn deliver_marked(pair: &mut Pair, end: usize, packet: &Transmit) {
    let payload_len = packet.payload.map_or(0, |payload| payload.len);
    let rx = RxPacket { headers: &packet.headers, payload_len, marked: true };
    pair.deliver_rx(end, rx).unwrap();
}

#[test]
fn marked_packets_cause_rate_limited_notifications() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 8 * MTU);
    let packets = pair.send_all(A);
    packets[..4].iter().for_each(|packet| deliver_marked(&mut pair, B, packet));
    let responses = pair.send_all(B);
    assert_eq!(responses.len(), 1, "one CNP for all of them");
    let headers = responses[0].headers;
    assert_eq!(headers.opcode, Opcode::CongestionNotification);
    assert_eq!((headers.destination_qp, headers.psn), (QPNS[A], Psn::new(0)));
    assert!(headers.becn && !headers.ack_request);
    pair.now = pair.now + (CNP_INTERVAL - Duration::from_nanos(1));
    deliver_marked(&mut pair, B, &packets[4]);
    assert_eq!(pair.send_all(B), [], "a CNP within the interval");
    pair.now = pair.now + Duration::from_nanos(1);
    deliver_marked(&mut pair, B, &packets[5]);
    assert_eq!(pair.send_all(B).len(), 1);
    assert_eq!(pair.endpoints[B].qp.stats().cnp_sent, 2);
}

#[test]
fn marked_responses_cause_notifications_too() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 10);
    pair.transfer(A);
    let data = pair.send(B).unwrap();
    deliver_marked(&mut pair, A, &data);
    let responses = pair.send_all(A);
    assert_eq!(responses[0].headers.opcode, Opcode::CongestionNotification);
    pair.deliver(B, &responses[0]).unwrap();
    assert_eq!(pair.endpoints[B].qp.stats().cnp_received, 1);
}

#[test]
fn a_notification_is_reported_to_the_path_once() {
    let mut pair = Pair::new();
    pair.inject_response(Opcode::CongestionNotification, 0, Extension::Cnp, 0).unwrap();
    assert_eq!(pair.endpoints[A].qp.stats().cnp_received, 1);
    assert!(pair.endpoints[A].qp.take_path_signals().marked);
    assert_eq!(pair.endpoints[A].qp.take_path_signals(), PathSignals::default());
    // The window of the path decides what that means: the queue pair itself is not slowed down.
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 8 * MTU);
    assert_eq!(pair.send_all(A).len(), 8);
}

/// A mark on a request reaches the path of the end that sent it, by a CNP. A mark on the data of a
/// read counts at the end that reads, whose window holds that data.
#[test]
fn marks_reach_the_path_whose_window_they_concern() {
    for op in [SendOp::Write(REMOTE_ADDR), SendOp::Read(REMOTE_ADDR)] {
        let mut pair = Pair::new();
        pair.post(A, 0, op, 10);
        let mut packet = pair.send(A).unwrap();
        if matches!(op, SendOp::Read(_)) {
            pair.deliver(B, &packet).unwrap();
            packet = pair.send(B).unwrap();
            deliver_marked(&mut pair, A, &packet);
        } else {
            deliver_marked(&mut pair, B, &packet);
            pair.exchange();
        }
        assert!(pair.endpoints[A].qp.take_path_signals().marked, "{op:?}");
    }
}

#[test]
fn a_marked_notification_is_not_answered_with_another() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 10);
    let packet = pair.send(A).unwrap();
    deliver_marked(&mut pair, B, &packet);
    let responses = pair.send(B).unwrap();
    deliver_marked(&mut pair, A, &responses);
    assert_eq!(pair.send(A), None);
}

/// After a timeout one packet is sent. An answer for more than that one was only late.
#[test]
fn late_answers_are_reported_as_a_spurious_timeout() {
    const LAST: u32 = 0x107;
    for (timeouts, answers, is_spurious) in [
        (1, &[(LAST, Syndrome::ACK)][..], true),
        (3, &[(LAST, Syndrome::ACK)], true),
        (1, &[(0x101, Syndrome::ACK)], true),
        // The packet that was sent again, and nothing else.
        (1, &[(0x100, Syndrome::ACK), (LAST, Syndrome::ACK)], false),
        (1, &[(0x100, Syndrome::Nak(Nak::Sequence)), (LAST, Syndrome::ACK)], false),
        (0, &[(LAST, Syndrome::ACK)], false),
    ] {
        let mut pair = Pair::new();
        (0..8).for_each(|id| pair.post(A, id, SendOp::Write(REMOTE_ADDR), 10));
        assert_eq!(pair.send_all(A).len(), 8);
        let start = pair.now;
        for _ in 0..timeouts {
            let before = pair.now;
            pair.advance_to(pair.next_deadline());
            let signals = pair.endpoints[A].qp.take_path_signals();
            assert_eq!(signals.timed_out, Some(pair.now - before), "since {start:?}");
            pair.send_all(A);
        }
        let mut spurious = false;
        for (psn, syndrome) in answers {
            pair.inject_ack(*psn, *syndrome).unwrap();
            spurious |= pair.endpoints[A].qp.take_path_signals().spurious_timeout;
            pair.send_all(A);
        }
        assert_eq!(spurious, is_spurious, "{timeouts} timeouts, then {answers:?}");
    }
}
