//! Unreliable datagrams.

use warpwire_proto::Psn;
use warpwire_proto::qp::HostStatus::{Denied, Ready, Retry};
use warpwire_proto::qp::{
    Datagram, DiscardReason, GRH_LEN, Mtu, ProtocolEvent, QpAttributes, QpEvent, ReceiveCompletion,
    ReceiveKind, RxPacket, SendCompletion, SendQueueError, State, Status, Target, Transmit, Ud,
};
use warpwire_proto::wire::{Deth, Extension, Headers, Opcode};

use crate::directed::host::{HostCall, HostEffect, ScriptedHost};
use crate::directed::pair::MTU;

const QKEY: u32 = 0x1234;

fn datagram(id: u64, len: u32) -> Datagram {
    let (imm, signaled, solicited) = (None, true, false);
    Datagram { id, destination: 9, qkey: QKEY, len, imm, signaled, solicited }
}

/// A UD queue pair in RTS with that Q_Key.
fn ud_in_rts(number: u32, qkey: u32, depth: u32) -> Ud {
    let mut ud = Ud::new(number, Mtu::new(MTU).unwrap(), depth);
    let init = QpAttributes::new(State::Init).with_partition_index(0).with_port(1).with_qkey(qkey);
    let rts = QpAttributes::new(State::Rts).with_send_psn(Psn::new(0xff_ffff));
    for attr in [init, QpAttributes::new(State::Rtr), rts] {
        ud.modify(&attr).unwrap();
    }
    ud
}

/// Moves the queue pair to `SQE`: the request at its head has an invalid lkey.
pub fn fail_send_queue(ud: &mut Ud) {
    let mut host = ScriptedHost::default();
    host.answer(HostCall::FetchWork, [Denied]);
    ud.post(datagram(0, 10)).unwrap();
    assert_eq!(ud.poll_transmit(&mut host), None);
    while ud.poll_event().is_some() {}
}

fn events(ud: &mut Ud) -> Vec<ProtocolEvent> {
    std::iter::from_fn(|| ud.poll_event()).collect()
}

fn completions(ud: &mut Ud) -> Vec<(u64, Status)> {
    let end = |event| match event {
        ProtocolEvent::Sent(completion) => Some((completion.id, completion.status)),
        _ => None,
    };
    events(ud).into_iter().filter_map(end).collect()
}

fn deliver(ud: &mut Ud, packet: &Transmit, host: &mut ScriptedHost) -> Result<(), DiscardReason> {
    let payload_len = packet.payload.map_or(0, |payload| payload.len);
    ud.handle_packet(&RxPacket { headers: &packet.headers, payload_len, marked: false }, host)
}

/// A datagram of `len` bytes from queue pair 5 with that Q_Key.
fn transmit_one(qkey: u32, len: u32) -> Transmit {
    let mut sender = ud_in_rts(5, QKEY, 4);
    sender.post(Datagram { qkey, ..datagram(0, len) }).unwrap();
    sender.poll_transmit(&mut ScriptedHost::default()).unwrap()
}

fn qkey_of(packet: &Transmit) -> u32 {
    match packet.headers.extension {
        Extension::Deth(deth) | Extension::DethImm(deth, _) => deth.qkey,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_datagram_arrives_after_its_grh_with_its_sender_and_immediate() {
    for (imm, len) in [(None, 0), (None, 10), (Some(7), 1), (Some(8), MTU)] {
        let (mut sender, mut receiver) = (ud_in_rts(5, 1, 4), ud_in_rts(9, QKEY, 4));
        let mut host = ScriptedHost::default();
        sender.post(Datagram { imm, solicited: true, ..datagram(3, len) }).unwrap();
        let packet = sender.poll_transmit(&mut host).unwrap();
        assert_eq!((packet.headers.destination_qp, packet.headers.psn), (9, Psn::new(0xff_ffff)));
        assert!(!packet.headers.ack_request);
        assert_eq!(
            completions(&mut sender),
            [(3, Status::Success)],
            "complete as soon as it is sent"
        );
        host.add_receive(4, GRH_LEN + len);
        deliver(&mut receiver, &packet, &mut host).unwrap();
        let grh = HostEffect::Placed(Target::Grh { id: 4 }, GRH_LEN);
        let payload_target = HostEffect::Placed(Target::Receive { id: 4, offset: GRH_LEN }, len);
        let placed: Vec<_> =
            host.done.iter().filter(|done| **done != payload_target || len > 0).collect();
        assert_eq!(placed, if len > 0 { vec![&grh, &payload_target] } else { vec![&grh] });
        let receive_completion = ReceiveCompletion {
            id: 4,
            status: Status::Success,
            len: GRH_LEN + len,
            kind: imm.map_or(ReceiveKind::Data, ReceiveKind::Imm),
            solicited: true,
            source_qp: 5,
        };
        assert_eq!(events(&mut receiver), [ProtocolEvent::Received(receive_completion)]);
    }
}

#[test]
fn an_empty_datagram_places_no_payload() {
    let (mut receiver, mut host) = (ud_in_rts(9, QKEY, 4), ScriptedHost::default());
    host.add_receive(4, 100);
    deliver(&mut receiver, &transmit_one(QKEY, 0), &mut host).unwrap();
    assert_eq!(host.call_count(HostCall::PlaceReceive), 0, "an empty payload is not placed");
}

#[test]
fn psns_increment_and_wrap() {
    let (mut sender, mut host) = (ud_in_rts(5, QKEY, 4), ScriptedHost::default());
    (0..3).for_each(|id| sender.post(datagram(id, 1)).unwrap());
    let numbers: Vec<_> = std::iter::from_fn(|| sender.poll_transmit(&mut host))
        .map(|packet| packet.headers.psn.value())
        .collect();
    assert_eq!(numbers, [0xff_ffff, 0, 1]);
}

#[test]
fn a_key_with_the_upper_bit_stands_for_the_senders_own() {
    assert_eq!(qkey_of(&transmit_one(0x55, 1)), 0x55);
    assert_eq!(qkey_of(&transmit_one(0x8000_0055, 1)), QKEY);
}

#[test]
fn a_wrong_qkey_is_dropped_and_counted() {
    let (mut receiver, mut host) = (ud_in_rts(9, QKEY, 4), ScriptedHost::default());
    host.add_receive(0, 100);
    assert_eq!(
        deliver(&mut receiver, &transmit_one(QKEY + 1, 1), &mut host),
        Err(DiscardReason::Qkey)
    );
    assert_eq!(receiver.stats().dropped(DiscardReason::Qkey), 1);
    assert_eq!(receiver.stats().drops.iter().sum::<u64>(), 1);
    assert_eq!(host.receives_left(), 1);
}

#[test]
fn without_a_receive_it_is_dropped_and_the_next_is_not() {
    let (mut receiver, mut host) = (ud_in_rts(9, QKEY, 4), ScriptedHost::default());
    let packet = transmit_one(QKEY, 1);
    assert_eq!(deliver(&mut receiver, &packet, &mut host), Err(DiscardReason::NoReceive));
    assert_eq!(receiver.stats().dropped(DiscardReason::NoReceive), 1);
    host.add_receive(0, 100);
    assert_eq!(deliver(&mut receiver, &packet, &mut host), Ok(()));
}

#[test]
fn too_long_a_datagram_is_dropped_and_costs_no_receive() {
    let (mut receiver, mut host) = (ud_in_rts(9, QKEY, 4), ScriptedHost::default());
    host.add_receive(0, GRH_LEN + 10);
    for len in [11, MTU] {
        let long = transmit_one(QKEY, len);
        assert_eq!(deliver(&mut receiver, &long, &mut host), Err(DiscardReason::Length));
    }
    let rx =
        RxPacket { headers: &transmit_one(QKEY, 1).headers, payload_len: MTU + 1, marked: false };
    assert_eq!(receiver.handle_packet(&rx, &mut host), Err(DiscardReason::Length));
    assert_eq!(receiver.stats().dropped(DiscardReason::Length), 3);
    assert_eq!(receiver.state(), State::Rts);
    assert_eq!(deliver(&mut receiver, &transmit_one(QKEY, 10), &mut host), Ok(()));
    assert!(matches!(
        events(&mut receiver)[..],
        [ProtocolEvent::Received(ReceiveCompletion { id: 0, status: Status::Success, .. })]
    ));
}

#[test]
fn absent_memory_drops_the_datagram_but_not_the_receive() {
    for call in [HostCall::PlaceGrh, HostCall::PlaceReceive] {
        let (mut receiver, mut host) = (ud_in_rts(9, QKEY, 4), ScriptedHost::default());
        host.add_receive(0, 100);
        host.answer(call, [Retry]);
        let packet = transmit_one(QKEY, 1);
        assert_eq!(deliver(&mut receiver, &packet, &mut host), Err(DiscardReason::Busy));
        assert_eq!(deliver(&mut receiver, &packet, &mut host), Ok(()));
        assert_eq!(host.call_count(HostCall::TakeReceive), 1);
    }
}

#[test]
fn a_receive_with_a_wrong_key_fails_the_queue_pair() {
    let (mut receiver, mut host) = (ud_in_rts(9, QKEY, 4), ScriptedHost::default());
    host.add_receive(0, 100);
    host.answer(HostCall::PlaceReceive, [Denied]);
    receiver.post(datagram(7, 1)).unwrap();
    deliver(&mut receiver, &transmit_one(QKEY, 1), &mut host).unwrap();
    assert_eq!(receiver.state(), State::Err);
    let [ProtocolEvent::Sent(flushed), ProtocolEvent::Received(receive_completion)] =
        events(&mut receiver)[..]
    else {
        panic!("no send and receive completion");
    };
    assert_eq!((flushed.id, flushed.status), (7, Status::Flushed));
    assert_eq!((receive_completion.id, receive_completion.status), (0, Status::LocalProtection));
}

#[test]
fn an_untaken_receive_completion_drops_the_next_datagram() {
    let (mut receiver, mut host) = (ud_in_rts(9, QKEY, 4), ScriptedHost::default());
    host.add_receive(0, 100);
    host.add_receive(1, 100);
    let packet = transmit_one(QKEY, 1);
    assert_eq!(deliver(&mut receiver, &packet, &mut host), Ok(()));
    assert_eq!(deliver(&mut receiver, &packet, &mut host), Err(DiscardReason::Busy));
    assert_eq!(host.receives_left(), 1);
}

#[test]
fn packets_of_other_services_and_partitions_are_dropped() {
    let (mut receiver, mut host) = (ud_in_rts(9, QKEY, 4), ScriptedHost::default());
    let send = Headers::new(Opcode::SendOnly, 9, Psn::new(0), Extension::None);
    let rx = RxPacket { headers: &send, payload_len: 1, marked: false };
    assert_eq!(receiver.handle_packet(&rx, &mut host), Err(DiscardReason::Service));
    let foreign =
        crate::directed::pair::edited(&transmit_one(QKEY, 1), |headers| headers.partition = 0x1234);
    assert_eq!(deliver(&mut receiver, &foreign, &mut host), Err(DiscardReason::Partition));
}

#[test]
fn states_that_take_no_datagrams_drop_them() {
    let packet = transmit_one(QKEY, 1);
    let mut host = ScriptedHost::default();
    let mut new = Ud::new(9, Mtu::new(MTU).unwrap(), 4);
    assert_eq!(deliver(&mut new, &packet, &mut host), Err(DiscardReason::State));
    let mut failed = ud_in_rts(9, QKEY, 4);
    failed.modify(&QpAttributes::new(State::Err)).unwrap();
    assert_eq!(deliver(&mut failed, &packet, &mut host), Err(DiscardReason::State));
    assert_eq!(failed.stats().dropped(DiscardReason::State), 1);
    assert_eq!(new.post(datagram(0, 1)), Err(SendQueueError::State(State::Reset)));
}

#[test]
fn a_wrong_key_of_ours_stops_the_send_queue_until_it_is_started_again() {
    let (mut ud, mut host) = (ud_in_rts(9, QKEY, 8), ScriptedHost::default());
    host.answer(HostCall::FetchWork, [Ready, Denied]);
    (0..4).for_each(|id| ud.post(datagram(id, 1)).unwrap());
    assert!(ud.poll_transmit(&mut host).is_some());
    assert_eq!(ud.poll_transmit(&mut host), None);
    assert_eq!(ud.state(), State::Sqe);
    let (bad, flushed) = (Status::LocalProtection, Status::Flushed);
    assert_eq!(completions(&mut ud), [(0, Status::Success), (1, bad), (2, flushed), (3, flushed)]);
    ud.post(datagram(4, 1)).unwrap();
    assert_eq!(completions(&mut ud), [(4, flushed)], "posted in SQE");
    host.add_receive(0, 100);
    assert_eq!(
        deliver(&mut ud, &transmit_one(QKEY, 1), &mut host),
        Ok(()),
        "receives still work in SQE"
    );
    ud.modify(&QpAttributes::new(State::Rts)).unwrap();
    ud.post(datagram(5, 1)).unwrap();
    assert!(ud.poll_transmit(&mut host).is_some());
    assert_eq!(completions(&mut ud), [(5, Status::Success)]);
}

#[test]
fn absent_memory_pauses_sending() {
    let (mut ud, mut host) = (ud_in_rts(9, QKEY, 8), ScriptedHost::default());
    host.answer(HostCall::FetchWork, [Retry]);
    ud.post(datagram(0, 1)).unwrap();
    assert_eq!(ud.poll_transmit(&mut host), None);
    assert!(ud.poll_transmit(&mut host).is_some());
    assert_eq!(completions(&mut ud), [(0, Status::Success)]);
}

#[test]
fn failing_flushes_queued_work_and_the_taken_receive() {
    let (mut ud, mut host) = (ud_in_rts(9, QKEY, 8), ScriptedHost::default());
    ud.post(datagram(0, 1)).unwrap();
    host.add_receive(6, GRH_LEN);
    assert_eq!(deliver(&mut ud, &transmit_one(QKEY, 1), &mut host), Err(DiscardReason::Length));
    ud.modify(&QpAttributes::new(State::Err)).unwrap();
    ud.post(datagram(1, 1)).unwrap();
    let [
        ProtocolEvent::Sent(first),
        ProtocolEvent::Sent(second),
        ProtocolEvent::Received(receive_completion),
    ] = events(&mut ud)[..]
    else {
        panic!("no two send and one receive completions");
    };
    assert_eq!((first.id, first.status), (0, Status::Flushed));
    assert_eq!((second.id, second.status), (1, Status::Flushed));
    assert_eq!((receive_completion.id, receive_completion.status), (6, Status::Flushed));
}

#[test]
fn the_queue_holds_its_depth_and_no_datagram_longer_than_the_mtu() {
    let (mut ud, mut host) = (ud_in_rts(9, QKEY, 2), ScriptedHost::default());
    let footprint = ud.footprint();
    assert_eq!(ud.post(datagram(0, MTU + 1)), Err(SendQueueError::Length(MTU + 1)));
    ud.post(datagram(0, MTU)).unwrap();
    ud.post(datagram(1, 0)).unwrap();
    assert_eq!(ud.post(datagram(2, 0)), Err(SendQueueError::Full));
    assert!(ud.poll_transmit(&mut host).is_some());
    assert_eq!(
        ud.post(datagram(2, 0)),
        Err(SendQueueError::Full),
        "the completion is still untaken"
    );
    assert_eq!(completions(&mut ud).len(), 1);
    assert_eq!(ud.post(datagram(2, 0)), Ok(()));
    assert_eq!(ud.footprint(), footprint);
}

#[test]
fn draining_notifies_once_and_holds_posted_work() {
    let (mut ud, mut host) = (ud_in_rts(9, QKEY, 4), ScriptedHost::default());
    ud.modify(&QpAttributes::new(State::Sqd).with_notify_drained(true)).unwrap();
    ud.modify(&QpAttributes::new(State::Sqd).with_qkey(QKEY)).unwrap();
    ud.post(datagram(0, 1)).unwrap();
    assert_eq!(ud.poll_transmit(&mut host), None);
    assert_eq!(events(&mut ud), [ProtocolEvent::Async(QpEvent::Drained)]);
    assert_eq!(events(&mut ud), []);
    ud.modify(&QpAttributes::new(State::Rts)).unwrap();
    assert!(ud.poll_transmit(&mut host).is_some());
}

#[test]
fn reset_discards_posted_work_and_the_queue_pair_can_be_brought_up_again() {
    let (mut ud, mut host) = (ud_in_rts(9, QKEY, 4), ScriptedHost::default());
    (0..4).for_each(|id| ud.post(datagram(id, 1)).unwrap());
    ud.poll_transmit(&mut host).unwrap();
    ud.modify(&QpAttributes::new(State::Reset)).unwrap();
    assert_eq!(events(&mut ud), []);
    assert_eq!(ud.poll_transmit(&mut host), None);
}

#[test]
fn queue_pair_one_uses_its_well_known_qkey() {
    let qkey = Ud::MANAGEMENT_QKEY;
    let (mut ours, mut theirs) = (ud_in_rts(1, qkey, 4), ud_in_rts(1, qkey, 4));
    let mut host = ScriptedHost::default();
    host.add_receive(0, GRH_LEN + 256);
    // The well-known Q_Key has the upper bit set, so the sender's own Q_Key is sent.
    ours.post(Datagram { destination: 1, qkey, ..datagram(0, 256) }).unwrap();
    let packet = ours.poll_transmit(&mut host).unwrap();
    let deth = Deth { qkey: 0x8001_0000, source_qp: 1 };
    assert_eq!(packet.headers.extension, Extension::Deth(deth));
    assert_eq!(deliver(&mut theirs, &packet, &mut host), Ok(()));
}

/// A request without a packet that completes with `status`.
fn local(id: u64, status: Status) -> SendCompletion {
    SendCompletion { id, status, signaled: true }
}

#[test]
fn local_work_completes_in_order() {
    let (mut ud, mut host) = (ud_in_rts(9, QKEY, 8), ScriptedHost::default());
    ud.post_local(local(0, Status::Success)).unwrap();
    ud.post(datagram(1, 1)).unwrap();
    ud.post_local(local(2, Status::Success)).unwrap();
    assert!(!ud.has_events(), "completed before earlier work");
    assert_eq!(ud.peek_transmit(), Some(datagram(1, 1)));
    assert_eq!(completions(&mut ud), [(0, Status::Success)]);
    assert!(ud.poll_transmit(&mut host).is_some());
    assert_eq!(ud.poll_transmit(&mut host), None);
    assert!(ud.has_events());
    assert_eq!(ud.outstanding(), 2);
    assert_eq!(completions(&mut ud), [(1, Status::Success), (2, Status::Success)]);
    assert!(!ud.has_events());
    assert_eq!(ud.outstanding(), 0);
}

#[test]
fn invalid_work_and_unroutable_datagrams_stop_the_send_queue() {
    let (mut ud, mut host) = (ud_in_rts(9, QKEY, 8), ScriptedHost::default());
    ud.post(datagram(0, 1)).unwrap();
    ud.post_local(local(1, Status::LocalQpOperation)).unwrap();
    ud.post(datagram(2, 1)).unwrap();
    assert!(ud.poll_transmit(&mut host).is_some());
    assert_eq!(ud.poll_transmit(&mut host), None);
    assert_eq!(ud.state(), State::Sqe);
    let (bad, flushed) = (Status::LocalQpOperation, Status::Flushed);
    assert_eq!(completions(&mut ud), [(0, Status::Success), (1, bad), (2, flushed)]);
    ud.modify(&QpAttributes::new(State::Rts)).unwrap();
    (3..5).for_each(|id| ud.post(datagram(id, 1)).unwrap());
    ud.fail_transmit(bad);
    assert_eq!(completions(&mut ud), [(3, bad), (4, flushed)]);
    ud.fail_transmit(bad);
    assert!(!ud.has_events(), "nothing is left to fail");
}

#[test]
fn local_work_counts_towards_the_depth_and_needs_a_state_that_takes_work() {
    let mut ud = ud_in_rts(9, QKEY, 1);
    ud.post_local(local(0, Status::Success)).unwrap();
    assert_eq!(ud.post_local(local(1, Status::Success)), Err(SendQueueError::Full));
    let mut new = Ud::new(9, Mtu::new(MTU).unwrap(), 1);
    let refused = new.post_local(local(0, Status::Success));
    assert_eq!(refused, Err(SendQueueError::State(State::Reset)));
}
