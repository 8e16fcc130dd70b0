//! Selective repeat: only what is missing is sent again, and nothing happens out of order.

use core::time::Duration;

use warpwire_proto::qp::{DiscardReason, HostStatus, SendOp, State, Status, Target, Transmit};
use warpwire_proto::wire::{Aeth, Extension, Nak, Opcode, Sack, Syndrome};
use warpwire_proto::{Instant, Psn};

use crate::directed::host::{HostCall, HostEffect};
use crate::directed::pair::{
    A, ADD, B, ConnParams, LARGE_RECEIVE, MTU, Pair, QPNS, REMOTE_ADDR, psn, psns, syndrome,
};

/// The first PSN after `open_windows`.
const FIRST: u32 = 0x101;

fn selective_pair() -> Pair {
    let mut pair = Pair::with(ConnParams { selective: true, ..ConnParams::default() });
    pair.open_windows();
    pair.endpoints.iter_mut().for_each(|end| end.host.done.clear());
    pair
}

/// Delivers all but the packets at these positions.
fn lose(pair: &mut Pair, end: usize, packets: &[Transmit], lost: &[usize]) {
    for (at, packet) in packets.iter().enumerate().filter(|(at, _)| !lost.contains(at)) {
        assert_eq!(pair.deliver(end, packet), Ok(()), "{at}: {packet:?}");
    }
}

/// The only packet that `end` sends, as the steps behind its PSN that it reports.
#[track_caller]
fn sack(pair: &mut Pair, end: usize) -> (Transmit, Vec<u32>) {
    let packets = pair.send_all(end);
    let [nak] = packets[..] else { panic!("{packets:?}") };
    let Extension::AethSack(aeth, sack) = nak.headers.extension else { panic!("{nak:?}") };
    assert_eq!(aeth.syndrome, Syndrome::Nak(Nak::Sequence));
    (nak, (1..=Sack::SPAN).filter(|step| sack.contains(*step)).collect())
}

fn placed_offsets(pair: &Pair, end: usize) -> Vec<u64> {
    let offset = |effect: &HostEffect| match effect {
        HostEffect::Placed(Target::Remote(at), _) => Some(at.address - REMOTE_ADDR.address),
        HostEffect::Placed(Target::Response { offset, .. }, _) => Some(u64::from(*offset)),
        _ => None,
    };
    pair.endpoints[end].host.done.iter().filter_map(offset).collect()
}

fn in_order(packets: u32) -> Vec<u64> {
    (0..packets).map(|at| u64::from(at * MTU)).collect()
}

#[test]
fn only_lost_packets_are_sent_again_and_data_is_placed_in_order() {
    let mut pair = selective_pair();
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 8 * MTU);
    let packets = pair.send_all(A);
    lose(&mut pair, B, &packets, &[2, 5]);
    assert_eq!(placed_offsets(&pair, B), in_order(2), "placed before its turn");
    let (nak, behind) = sack(&mut pair, B);
    assert_eq!((psn(&nak), behind), (FIRST + 2, vec![1, 2, 4, 5]));
    pair.deliver(A, &nak).unwrap();
    assert!(pair.endpoints[A].qp.take_path_signals().lost);
    let again = pair.send_all(A);
    assert_eq!(psns(&again), [FIRST + 2, FIRST + 5]);
    assert!(again.iter().all(|packet| packet.headers.ack_request));
    // A copy of the NAK says nothing new.
    pair.deliver(A, &nak).unwrap();
    assert_eq!(pair.send_all(A), []);
    pair.deliver_all(B, &again);
    assert_eq!(placed_offsets(&pair, B), in_order(8));
    pair.exchange();
    assert_eq!(pair.endpoints[A].sent, [(0, Status::Success)]);
    assert_eq!(pair.endpoints[A].qp.stats().resent, 2);
    assert_eq!(pair.endpoints[A].qp.in_flight(), 0);
    assert_eq!(pair.next_deadline(), Instant::NEVER);
}

#[test]
fn a_lost_retransmission_is_noticed_by_what_was_sent_after_it() {
    let mut pair = selective_pair();
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 6 * MTU);
    let packets = pair.send_all(A);
    lose(&mut pair, B, &packets, &[1, 3]);
    let (nak, _) = sack(&mut pair, B);
    pair.deliver(A, &nak).unwrap();
    let again = pair.send_all(A);
    assert_eq!(psns(&again), [FIRST + 1, FIRST + 3]);
    pair.deliver(B, &again[1]).unwrap(); // the first is lost again
    let (nak, behind) = sack(&mut pair, B);
    assert_eq!((psn(&nak), behind), (FIRST + 1, vec![1, 2, 3, 4]));
    pair.deliver(A, &nak).unwrap();
    assert_eq!(psns(&pair.send_all(A)), [FIRST + 1]);
    assert_eq!(pair.endpoints[A].qp.stats().timeouts, 0);
}

#[test]
fn packets_that_arrived_or_are_lost_are_not_in_flight() {
    let mut pair = selective_pair();
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 8 * MTU);
    let packets = pair.send_all(A);
    assert_eq!(pair.endpoints[A].qp.in_flight(), 8);
    // One is lost, four arrive behind it, two are on their way.
    pair.deliver(B, &packets[0]).unwrap();
    lose(&mut pair, B, &packets[2..6], &[]);
    let (nak, _) = sack(&mut pair, B);
    pair.deliver(A, &nak).unwrap();
    assert_eq!(pair.endpoints[A].qp.in_flight(), 2);
    assert_eq!(pair.endpoints[A].qp.take_path_signals().acked, 1 + 1 + 4);
    // The window of the path has no room: the lost packet waits, and is not forgotten.
    pair.endpoints[A].qp.set_allowance(2);
    assert_eq!(pair.send_all(A), []);
    assert!(pair.endpoints[A].qp.take_blocked_by_path());
    assert_ne!(pair.next_deadline(), Instant::NEVER);
    pair.endpoints[A].qp.set_allowance(3);
    assert_eq!(psns(&pair.send_all(A)), [FIRST + 1]);
    pair.endpoints[A].qp.set_allowance(u32::MAX);
    pair.assert_all_succeed(1);
}

#[test]
fn receives_complete_and_atomics_execute_in_order_behind_a_gap() {
    let mut pair = selective_pair();
    (0..2).for_each(|id| pair.endpoints[B].host.add_receive(id, LARGE_RECEIVE));
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), MTU);
    pair.post(A, 1, SendOp::Send, 2 * MTU);
    pair.post(A, 2, SendOp::Atomic(REMOTE_ADDR, ADD), 8);
    pair.post(A, 3, SendOp::WriteImm(REMOTE_ADDR, 5), 10);
    pair.post(A, 4, SendOp::Read(REMOTE_ADDR), 3 * MTU);
    let packets = pair.send_all(A);
    lose(&mut pair, B, &packets, &[0]);
    assert_eq!(pair.endpoints[B].host.done, []);
    assert_eq!(pair.endpoints[B].received, []);
    assert_eq!(pair.endpoints[B].host.receives_left(), 2, "a receive was taken before its turn");
    let (nak, _) = sack(&mut pair, B);
    pair.deliver(A, &nak).unwrap();
    assert_eq!(psns(&pair.transfer(A)), [FIRST]);
    let statuses = [(0, Status::Success), (1, Status::Success)];
    assert_eq!(pair.endpoints[B].receive_statuses(), statuses);
    let executed = |effect: &HostEffect| matches!(effect, HostEffect::Executed(..));
    assert_eq!(pair.endpoints[B].host.done.iter().position(executed), Some(3));
    pair.assert_all_succeed(5);
    assert_eq!(pair.endpoints[B].host.call_count(HostCall::Execute), 1);
    assert_eq!(pair.endpoints[A].qp.stats().resent, 1);
}

#[test]
fn only_missing_read_data_is_requested_again() {
    let mut pair = selective_pair();
    // Two requests, of 16 packets and of 4.
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 20 * MTU);
    pair.transfer(A);
    let data = pair.send_all(B);
    lose(&mut pair, A, &data, &[3, 4, 17]);
    assert_eq!(placed_offsets(&pair, A), in_order(3));
    let again = pair.send_all(A);
    let reth = |packet: &Transmit| match packet.headers.extension {
        Extension::Reth(reth) => (psn(packet), reth.address - REMOTE_ADDR.address, reth.len),
        _ => panic!("{packet:?}"),
    };
    let mtu = u64::from(MTU);
    let wanted = [(FIRST + 3, 3 * mtu, 2 * MTU), (FIRST + 17, 17 * mtu, MTU)];
    assert_eq!(again.iter().map(reth).collect::<Vec<_>>(), wanted);
    pair.deliver_all(B, &again);
    let data = pair.send_all(B);
    assert_eq!(psns(&data), [FIRST + 3, FIRST + 4, FIRST + 17]);
    pair.deliver_all(A, &data);
    assert_eq!(placed_offsets(&pair, A), in_order(20));
    assert_eq!(pair.endpoints[A].sent, [(0, Status::Success)]);
}

#[test]
fn a_lost_result_of_an_atomic_is_asked_for_alone() {
    let mut pair = selective_pair();
    for id in 0..3 {
        pair.post(A, id, SendOp::Atomic(REMOTE_ADDR, ADD), 8);
    }
    pair.transfer(A);
    let results = pair.send_all(B);
    lose(&mut pair, A, &results, &[0]);
    assert_eq!(psns(&pair.transfer_again()), [FIRST]);
    pair.assert_all_succeed(3);
    assert_eq!(pair.endpoints[B].host.call_count(HostCall::Execute), 3);
}

#[test]
fn after_a_timeout_one_packet_is_sent_and_the_answer_says_what_is_missing() {
    let mut pair = selective_pair();
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 6 * MTU);
    let packets = pair.send_all(A);
    lose(&mut pair, B, &packets, &[0, 1, 5]);
    pair.send_all(B); // the NAK is lost
    pair.advance_to(pair.next_deadline());
    assert_eq!(psns(&pair.transfer(A)), [FIRST]);
    let (nak, behind) = sack(&mut pair, B);
    assert_eq!((psn(&nak), behind), (FIRST + 1, vec![1, 2, 3]));
    pair.deliver(A, &nak).unwrap();
    assert_eq!(psns(&pair.transfer(A)), [FIRST + 1, FIRST + 5]);
    pair.assert_all_succeed(1);
}

#[test]
fn a_packet_that_the_host_cannot_keep_is_sent_again() {
    let mut pair = selective_pair();
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 6 * MTU);
    let packets = pair.send_all(A);
    pair.endpoints[B].host.answer(HostCall::Hold, [HostStatus::Ready, HostStatus::Denied]);
    let outcomes = pair.deliver_all(B, &packets[1..]);
    assert_eq!(outcomes[1], Err(DiscardReason::Gap));
    let (nak, behind) = sack(&mut pair, B);
    assert_eq!((psn(&nak), behind), (FIRST, vec![1, 3, 4, 5]));
    pair.deliver(A, &nak).unwrap();
    assert_eq!(psns(&pair.transfer(A)), [FIRST, FIRST + 2]);
    pair.assert_all_succeed(1);
}

/// A host that keeps nothing: an ordinary NAK, and an ordinary go-back-N.
#[test]
fn without_anything_kept_the_nak_is_an_ordinary_one() {
    let mut pair = selective_pair();
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 4 * MTU);
    let packets = pair.send_all(A);
    pair.endpoints[B].host.answer(HostCall::Hold, [HostStatus::Denied; 3]);
    pair.deliver_all(B, &packets[1..]);
    let naks = pair.send_all(B);
    assert_eq!(naks.len(), 1);
    assert!(matches!(naks[0].headers.extension, Extension::Aeth(_)));
    assert_eq!(syndrome(&naks[0]), Syndrome::Nak(Nak::Sequence));
    pair.deliver(A, &naks[0]).unwrap();
    assert_eq!(pair.send_all(A).len(), 4);
}

#[test]
fn a_peer_without_a_receive_gets_everything_again_in_order() {
    let mut pair = selective_pair();
    pair.post(A, 0, SendOp::Send, 4 * MTU);
    let packets = pair.send_all(A);
    pair.deliver_all(B, &packets);
    let rnr = pair.send_all(B);
    assert_eq!(rnr.len(), 1, "an RNR NAK alone, although packets are kept: {rnr:?}");
    assert!(syndrome(&rnr[0]).is_rnr());
    pair.deliver(A, &rnr[0]).unwrap();
    pair.endpoints[B].host.add_receive(7, LARGE_RECEIVE);
    pair.wait(Duration::from_millis(10));
    // The first packet is enough: the others are there.
    assert_eq!(psns(&pair.transfer(A)), [FIRST]);
    pair.assert_all_succeed(1);
    assert_eq!(pair.endpoints[B].receive_statuses(), [(7, Status::Success)]);
}

#[test]
fn without_negotiation_nothing_is_kept_and_no_nak_has_more_than_an_aeth() {
    let mut pair = Pair::new();
    pair.open_windows();
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 4 * MTU);
    let packets = pair.send_all(A);
    pair.deliver_all(B, &packets[1..]);
    assert_eq!(pair.endpoints[B].host.call_count(HostCall::Hold), 0);
    let naks = pair.send_all(B);
    assert!(matches!(naks[0].headers.extension, Extension::Aeth(_)));
    // A peer that sends one all the same: its NAK is an ordinary one.
    let mut lie = Sack::default();
    (1..=3).for_each(|step| lie.insert(step));
    inject_sack(&mut pair, FIRST, lie);
    assert_eq!(pair.send_all(A).len(), 4);
    pair.assert_all_succeed(1);
}

fn inject_sack(pair: &mut Pair, psn: u32, sack: Sack) {
    let aeth = Aeth { syndrome: Syndrome::Nak(Nak::Sequence), msn: 0 };
    let _ = pair.inject_response(Opcode::Acknowledge, psn, Extension::AethSack(aeth, sack), 0);
}

#[test]
fn a_peer_that_lies_about_what_arrived_harms_only_its_own_connection() {
    for (what, bits) in
        [("everything", 1..=256), ("unsent packets", 4..=256), ("the end", 256..=256)]
    {
        let mut pair = selective_pair();
        pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 4 * MTU);
        pair.send_all(A);
        let mut lie = Sack::default();
        bits.for_each(|step| lie.insert(step));
        for _ in 0..3 {
            inject_sack(&mut pair, FIRST, lie);
            assert!(pair.endpoints[A].qp.in_flight() <= 4, "{what}");
            assert_eq!(pair.endpoints[A].qp.state(), State::Rts, "{what}");
            pair.send_all(A);
        }
        assert_eq!(pair.endpoints[A].sent, [], "{what}: nothing completes by it");
        // Repeated forever, and nothing else: the peer counts as silent, and the work fails.
        for _ in 0..1000 {
            if pair.endpoints[A].qp.state() == State::Err {
                break;
            }
            pair.advance_to(pair.next_deadline().min(pair.now + Duration::from_millis(1)));
            inject_sack(&mut pair, FIRST, lie);
            pair.send_all(A);
        }
        assert_eq!(pair.endpoints[A].sent, [(0, Status::RetryExceeded)], "{what}");
    }
}

/// NAKs for packets that were acknowledged, or never sent, with any bits.
#[test]
fn selective_naks_out_of_range_are_discarded() {
    let mut pair = selective_pair();
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 4 * MTU);
    pair.send_all(A);
    let all = Sack([0xff; Sack::LEN]);
    for psn in [0, FIRST - 1, FIRST + 4, FIRST + 300, 0x80_0000 + FIRST] {
        inject_sack(&mut pair, psn, all);
        assert_eq!(pair.endpoints[A].qp.in_flight(), 4);
        assert_eq!(pair.send_all(A), []);
    }
    let dropped = |reason| pair.endpoints[A].dropped(reason);
    let (stale, ghost) = (DiscardReason::StaleResponse, DiscardReason::UnexpectedResponse);
    assert_eq!(dropped(stale) + dropped(ghost), 5);
}

/// Requests too far ahead, or again and again, take no memory.
#[test]
fn requests_beyond_the_window_are_not_kept() {
    let mut pair = selective_pair();
    pair.number = Psn::new(FIRST);
    let only = |pair: &mut Pair, ahead: u32| {
        pair.number = Psn::new(FIRST + ahead);
        let reth = warpwire_proto::wire::Reth { address: 0x1000, rkey: 0x77, len: 8 };
        pair.inject_request(Opcode::WriteOnly, Extension::Reth(reth), 8)
    };
    assert_eq!(only(&mut pair, 1024), Err(DiscardReason::Gap));
    assert_eq!(only(&mut pair, 0x7f_0000), Err(DiscardReason::Gap));
    assert_eq!(only(&mut pair, 255), Ok(()));
    assert_eq!(only(&mut pair, 255), Err(DiscardReason::Duplicate));
    assert_eq!(pair.endpoints[B].host.call_count(HostCall::Hold), 1);
    let (nak, behind) = sack(&mut pair, B);
    assert_eq!((psn(&nak), behind, nak.headers.destination_qp), (FIRST, vec![255], QPNS[A]));
    assert_eq!(pair.endpoints[B].host.done, []);
}

/// More packets are in flight than a NAK has bits for: it tells of the first ones, and of the
/// others when the missing one has arrived.
#[test]
fn a_gap_in_a_long_flight_costs_one_packet() {
    let mut pair = selective_pair();
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 900 * MTU);
    let flight = pair.send_all(A);
    assert_eq!(flight.len(), 900);
    lose(&mut pair, B, &flight, &[10, 601]);
    assert_eq!(pair.endpoints[B].qp.stats().held, 888);
    for missing in [10, 601] {
        let (nak, behind) = sack(&mut pair, B);
        assert_eq!((psn(&nak), behind), (FIRST + missing, (1..Sack::SPAN).collect()));
        pair.deliver(A, &nak).unwrap();
        let again = pair.send_all(A);
        assert_eq!(psns(&again), [FIRST + missing]);
        pair.deliver_all(B, &again);
    }
    assert_eq!(placed_offsets(&pair, B), in_order(900));
    pair.exchange();
    assert_eq!(pair.endpoints[A].sent, [(0, Status::Success)]);
    assert_eq!(pair.endpoints[A].qp.stats().resent, 2);
}

#[test]
fn a_reset_forgets_what_was_kept() {
    let mut pair = selective_pair();
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 4 * MTU);
    let packets = pair.send_all(A);
    lose(&mut pair, B, &packets, &[0]);
    let qp = &mut pair.endpoints[B].qp;
    qp.modify(&warpwire_proto::qp::QpAttributes::new(State::Reset)).unwrap();
    assert_eq!(qp.take_held(), None);
    let plain = ConnParams { psn: [FIRST, 0x500], ..ConnParams::default() };
    plain.bring_to_rts(qp, B);
    pair.deliver(B, &packets[0]).unwrap();
    assert_eq!(pair.endpoints[B].qp.take_held(), None);
    assert_eq!(placed_offsets(&pair, B), in_order(1));
}

impl Pair {
    /// Sends all packets of A again, which B has seen before.
    fn transfer_again(&mut self) -> Vec<Transmit> {
        let packets = self.send_all(A);
        self.deliver_all(B, &packets);
        packets
    }
}
