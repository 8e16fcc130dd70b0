//! Congestion control: ECN marks, CNPs, and pacing.

use core::time::Duration;

use warpwire_proto::qp::{
    CUT_INTERVAL, RAISE_INTERVAL, RxPacket, SendOp, Transmit, TransportOptions,
};
use warpwire_proto::wire::{Extension, Opcode};
use warpwire_proto::{Instant, Psn};

use crate::directed::pair::{A, B, ConnParams, MTU, Pair, QPNS, REMOTE_ADDR};

/// Line rate: one byte per nanosecond.
const LINE: u64 = 1_000_000_000;

fn paced_pair() -> Pair {
    let options = TransportOptions::default().with_line_rate(LINE);
    Pair::with(ConnParams { options, ..ConnParams::default() })
}

fn deliver_marked(pair: &mut Pair, end: usize, packet: &Transmit) {
    let payload_len = packet.payload.map_or(0, |payload| payload.len);
    let rx = RxPacket { headers: &packet.headers, payload_len, marked: true };
    pair.deliver_rx(end, rx).unwrap();
}

fn notify(pair: &mut Pair) {
    pair.inject_response(Opcode::CongestionNotification, 0, Extension::Cnp, 0).unwrap();
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
    pair.now = pair.now + (CUT_INTERVAL - Duration::from_nanos(1));
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
fn without_a_line_rate_notifications_are_counted_and_change_nothing() {
    let mut pair = Pair::new();
    notify(&mut pair);
    assert_eq!(pair.endpoints[A].qp.stats().cnp_received, 1);
    assert_eq!(pair.endpoints[A].qp.paced_rate(), None);
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 8 * MTU);
    assert_eq!(pair.send_all(A).len(), 8);
}

#[test]
fn a_notification_halves_the_rate_and_spaces_the_packets() {
    let mut pair = paced_pair();
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 8 * MTU);
    assert_eq!(pair.endpoints[A].qp.paced_rate(), None);
    notify(&mut pair);
    assert_eq!(pair.endpoints[A].qp.paced_rate(), Some(LINE / 2));
    let start = pair.now;
    for at in 0..8 {
        assert_eq!(pair.send_all(A).len(), 1, "packets are paced");
        let opens = start + Duration::from_nanos(u64::from(2 * MTU) * (at + 1));
        assert_eq!(pair.next_deadline(), opens);
        pair.advance_to(opens);
    }
}

#[test]
fn more_notifications_cut_further_but_only_one_in_an_interval() {
    let mut pair = paced_pair();
    notify(&mut pair);
    notify(&mut pair);
    assert_eq!(pair.endpoints[A].qp.paced_rate(), Some(LINE / 2));
    pair.wait(CUT_INTERVAL);
    notify(&mut pair);
    assert_eq!(pair.endpoints[A].qp.paced_rate(), Some(LINE / 4));
}

#[test]
fn time_without_notifications_raises_the_rate_until_pacing_ends() {
    let mut pair = paced_pair();
    notify(&mut pair);
    pair.wait(RAISE_INTERVAL * 40);
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 8 * MTU);
    // The packet that ends pacing still occupies its own time at line rate.
    pair.send(A).unwrap();
    assert_eq!(pair.endpoints[A].qp.paced_rate(), None);
    pair.wait(Duration::from_nanos(u64::from(MTU)));
    assert_eq!(pair.send_all(A).len(), 7);
}

#[test]
fn a_slowed_end_spaces_the_data_of_reads_too_and_still_acknowledges() {
    let mut pair = paced_pair();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 4 * MTU);
    pair.transfer(A);
    let cnp = warpwire_proto::wire::Headers::new(
        Opcode::CongestionNotification,
        QPNS[B],
        Psn::new(0),
        Extension::Cnp,
    );
    pair.deliver_rx(B, RxPacket { headers: &cnp, payload_len: 0, marked: false }).unwrap();
    for _ in 0..4 {
        assert_eq!(pair.send_all(B).len(), 1);
        assert_ne!(pair.endpoints[B].qp.poll_timeout(pair.now), Instant::NEVER);
        pair.now = pair.endpoints[B].qp.poll_timeout(pair.now);
    }
    pair.endpoints[B].host.add_receive(0, 10);
    pair.post(A, 1, SendOp::Send, 0);
    pair.exchange();
    assert_eq!(pair.send_all(B), []);
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
