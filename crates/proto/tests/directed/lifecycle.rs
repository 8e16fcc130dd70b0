//! Life cycle of a queue pair: draining, reset, and packets in states that accept none.

use warpwire_proto::qp::{
    Access, DiscardReason, QpAttributes, QpEvent, RcQp, RxPacket, SendOp, SendQueueError, SendWr,
    State, Status, TransportOptions,
};
use warpwire_proto::wire::{Aeth, Deth, Extension, Headers, Opcode, Reth, Syndrome};
use warpwire_proto::{Instant, Psn};

use crate::directed::host::ScriptedHost;
use crate::directed::pair::{
    A, ADD, B, ConnParams, MTU, Pair, QPNS, REMOTE_ADDR, edited, one_of_each_op,
};

use Status::{Flushed, Success};

/// To `SQD`, with a notification when drained.
fn drain() -> QpAttributes {
    QpAttributes::new(State::Sqd).with_notify_drained(true)
}

fn modify(pair: &mut Pair, end: usize, attr: &QpAttributes) {
    pair.endpoints[end].qp.modify(attr).unwrap();
    pair.endpoints[end].drain_events();
}

#[test]
fn draining_finishes_started_messages_and_notifies_once() {
    let options = TransportOptions::default().with_window(2);
    let mut pair = Pair::with_receives(ConnParams { options, ..ConnParams::default() }, 4);
    pair.post(A, 0, SendOp::Send, 5 * MTU);
    pair.post(A, 1, SendOp::Send, 10);
    pair.transfer(A);
    modify(&mut pair, A, &drain());
    assert_eq!(pair.endpoints[A].qp_events, []);
    assert!(!pair.endpoints[A].qp.is_drained());
    pair.post(A, 2, SendOp::Send, 10); // accepted, but not started
    pair.exchange();
    assert_eq!(pair.endpoints[A].sent, [(0, Success)], "the started message completes");
    assert_eq!(pair.endpoints[A].qp_events, [QpEvent::Drained]);
    assert!(pair.endpoints[A].qp.is_drained());
    pair.exchange();
    pair.endpoints[A].drain_events();
    assert_eq!(pair.endpoints[A].qp_events, [QpEvent::Drained], "more than one event");
    modify(&mut pair, A, &QpAttributes::new(State::Rts));
    pair.assert_all_succeed(3);
    assert_eq!(pair.endpoints[A].qp_events, [QpEvent::Drained]);
}

#[test]
fn an_idle_queue_drains_immediately_and_notifies_only_if_requested() {
    let mut pair = Pair::new();
    modify(&mut pair, A, &drain());
    assert_eq!(pair.endpoints[A].qp_events, [QpEvent::Drained]);
    modify(&mut pair, B, &QpAttributes::new(State::Sqd));
    assert_eq!(pair.endpoints[B].qp_events, []);
    modify(&mut pair, A, &QpAttributes::new(State::Rts));
    modify(&mut pair, A, &drain());
    assert_eq!(pair.endpoints[A].qp_events.len(), 2, "one event per transition to SQD");
}

#[test]
fn a_draining_end_retransmits_and_responds() {
    let mut pair = Pair::with_receives(ConnParams::default(), 2);
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 2 * MTU);
    pair.send_all(A); // lost
    modify(&mut pair, A, &drain());
    modify(&mut pair, B, &drain());
    pair.wait(pair.params.ack_timeout());
    pair.assert_all_succeed(1);
    assert_eq!(pair.endpoints[A].qp_events, [QpEvent::Drained]);
}

#[test]
fn attributes_set_while_drained_hold_afterwards() {
    let mut pair = Pair::new();
    modify(&mut pair, A, &drain());
    let attr = QpAttributes::new(State::Sqd).with_timeout(5).with_retry_count(0);
    modify(&mut pair, A, &attr);
    modify(&mut pair, A, &QpAttributes::new(State::Rts));
    pair.post(A, 0, SendOp::Send, 10);
    pair.send_all(A);
    assert_eq!(pair.next_deadline(), pair.now + core::time::Duration::from_nanos(4096 << 5));
    pair.advance_to(pair.next_deadline());
    assert_eq!(pair.endpoints[A].sent, [(0, Status::RetryExceeded)]);
}

#[test]
fn reset_discards_everything_and_the_pair_can_be_brought_up_again() {
    for op in [SendOp::Send, SendOp::Write(REMOTE_ADDR), SendOp::Read(REMOTE_ADDR)] {
        let mut pair = Pair::with_receives(ConnParams::default(), 4);
        let footprint = [A, B].map(|end| pair.endpoints[end].qp.footprint());
        pair.post(A, 0, op, 3 * MTU);
        pair.post(A, 1, op, 3 * MTU);
        let packets = pair.send_all(A);
        pair.deliver(B, &packets[0]).unwrap(); // in the middle of a message
        for end in [A, B] {
            modify(&mut pair, end, &QpAttributes::new(State::Reset));
            assert_eq!(pair.endpoints[end].qp.outstanding(), 0);
            assert_eq!(pair.send_all(end), []);
        }
        assert_eq!(pair.next_deadline(), Instant::NEVER);
        assert_eq!(
            (&pair.endpoints[A].sent[..], pair.endpoints[B].receive_statuses()),
            (&[][..], vec![])
        );
        let params = ConnParams { psn: [7, 9], ..ConnParams::default() };
        for end in [A, B] {
            params.bring_to_rts(&mut pair.endpoints[end].qp, end);
        }
        // The whole depth is available.
        (0..128).for_each(|id| pair.post(A, id, SendOp::Write(REMOTE_ADDR), 10));
        pair.assert_all_succeed(128);
        assert_eq!([A, B].map(|end| pair.endpoints[end].qp.footprint()), footprint);
        assert_eq!(pair.endpoints[A].qp.next_psns().1, Psn::new(7 + 128));
    }
}

#[test]
fn a_failed_pair_can_be_brought_up_again() {
    let mut pair = Pair::new();
    pair.endpoints[B].host.answer(
        crate::directed::host::HostCall::MayAccess,
        [warpwire_proto::qp::HostStatus::Denied],
    );
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 10);
    pair.exchange();
    let params = pair.params;
    for end in [A, B] {
        assert_eq!(pair.endpoints[end].qp.state(), State::Err);
        modify(&mut pair, end, &QpAttributes::new(State::Reset));
        params.bring_to_rts(&mut pair.endpoints[end].qp, end);
        pair.endpoints[end].sent.clear();
    }
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 10);
    pair.assert_all_succeed(1);
}

#[test]
fn a_transition_to_err_flushes_and_stops_sending() {
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    pair.post(A, 0, SendOp::Send, 3 * MTU);
    pair.send(A).unwrap();
    pair.post(A, 1, SendOp::Send, 10);
    modify(&mut pair, A, &QpAttributes::new(State::Err));
    assert_eq!(pair.endpoints[A].sent, [(0, Flushed), (1, Flushed)]);
    assert_eq!(pair.send_all(A), []);
    assert_eq!(pair.next_deadline(), Instant::NEVER);
    modify(&mut pair, A, &QpAttributes::new(State::Err)); // repeated, without effect
    assert_eq!(pair.endpoints[A].sent.len(), 2);
}

/// A queue pair brought up to that state.
fn only_in(state: State) -> RcQp {
    let params = ConnParams::default();
    let mut qp = RcQp::new(QPNS[B], params.options);
    let steps_to_rts = [params.init_attr(), params.rtr_attr(B), params.rts_attr(B)];
    let steps = match state {
        State::Reset => 0,
        State::Init => 1,
        State::Rtr => 2,
        _ => 3,
    };
    steps_to_rts[..steps].iter().for_each(|attr| qp.modify(attr).unwrap());
    if qp.state() != state {
        qp.modify(&QpAttributes::new(state)).unwrap();
    }
    qp
}

#[test]
fn packets_are_dropped_and_counted_in_states_that_take_none() {
    let aeth = Extension::Aeth(Aeth { syndrome: Syndrome::ACK, msn: 0 });
    let ack = Headers::new(Opcode::Acknowledge, QPNS[B], Psn::new(0x4ff), aeth);
    let request = Headers::new(Opcode::SendOnly, QPNS[B], Psn::new(0x100), Extension::None);
    let cnp = Headers::new(Opcode::CongestionNotification, 1, Psn::new(0), Extension::Cnp);
    for (state, headers) in [
        (State::Reset, request),
        (State::Init, request),
        (State::Err, request),
        (State::Reset, ack),
        (State::Init, ack),
        (State::Rtr, ack),
        (State::Err, ack),
        (State::Reset, cnp),
        (State::Init, cnp),
        (State::Err, cnp),
    ] {
        let mut qp = only_in(state);
        let mut host = ScriptedHost::default();
        host.add_receive(0, 100);
        let rx = RxPacket { headers: &headers, payload_len: 10, marked: true };
        let outcome = qp.handle_packet(Instant::default(), &rx, &mut host);
        assert_eq!(outcome, Err(DiscardReason::State), "{state} {headers:?}");
        assert_eq!(qp.stats().dropped(DiscardReason::State), 1);
        assert_eq!(qp.stats().drops.iter().sum::<u64>(), 1, "counted once");
        assert_eq!(qp.stats().packets_received, 1);
        assert_eq!(host.receives_left(), 1);
        if state != State::Rtr {
            assert_eq!(qp.poll_transmit(Instant::default(), &mut host), None);
        }
    }
}

#[test]
fn work_is_taken_when_sending_is_possible_and_flushed_after_failure() {
    for (state, taken) in [
        (State::Reset, false),
        (State::Init, false),
        (State::Rtr, false),
        (State::Rts, true),
        (State::Sqd, true),
        (State::Err, true),
    ] {
        let mut qp = only_in(state);
        let wanted = if taken { Ok(()) } else { Err(SendQueueError::State(state)) };
        assert_eq!(qp.post(SendWr::new(0, SendOp::Send, 1)), wanted);
        assert_eq!(qp.poll_event().is_some(), state == State::Err);
    }
}

#[test]
fn a_packet_of_another_partition_is_dropped_but_a_limited_member_is_not() {
    for (partition, outcome) in [
        (0xffff, Ok(())),
        (0x7fff, Ok(())),
        (0xfffe, Err(DiscardReason::Partition)),
        (0, Err(DiscardReason::Partition)),
    ] {
        let mut pair = Pair::with_receives(ConnParams::default(), 1);
        pair.post(A, 0, SendOp::Send, 10);
        let packet = pair.send(A).unwrap();
        let foreign = edited(&packet, |headers| headers.partition = partition);
        assert_eq!(pair.deliver(B, &foreign), outcome);
        assert_eq!(
            pair.endpoints[B].dropped(DiscardReason::Partition),
            u64::from(outcome.is_err())
        );
        pair.wait(pair.params.ack_timeout()); // the dropped packet did no harm
        pair.assert_all_succeed(1);
    }
}

#[test]
fn packets_of_other_services_are_dropped() {
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    let deth = Deth { qkey: 0, source_qp: 1 };
    for (opcode, extension) in [
        (Opcode::UdSendOnly, Extension::Deth(deth)),
        (Opcode::UdSendOnlyImm, Extension::DethImm(deth, 1)),
        (Opcode::UcSendOnly, Extension::None),
        (Opcode::UcWriteOnly, Extension::Reth(Reth { address: 0, rkey: 1, len: 10 })),
        (Opcode::Unknown(0x1c), Extension::None),
        (Opcode::Unknown(0xff), Extension::None),
    ] {
        pair.number = Psn::new(0x100);
        assert_eq!(pair.inject_request(opcode, extension, 10), Err(DiscardReason::Service));
    }
    assert_eq!(pair.endpoints[B].dropped(DiscardReason::Service), 6);
    assert_eq!(pair.send_all(B), []);
    assert_eq!(pair.endpoints[B].host.receives_left(), 1);
}

#[test]
fn the_first_request_in_rtr_raises_established_once() {
    let params = ConnParams::default();
    let mut pair = Pair::with_receives(params, 4);
    modify(&mut pair, B, &QpAttributes::new(State::Reset));
    modify(&mut pair, B, &params.init_attr());
    modify(&mut pair, B, &params.rtr_attr(B));
    (0..3).for_each(|id| pair.post(A, id, SendOp::Send, 10));
    pair.assert_all_succeed(3); // responses are sent in RTR
    assert_eq!(pair.endpoints[B].qp_events, [QpEvent::Established]);
    modify(&mut pair, B, &params.rts_attr(B));
    pair.post(A, 3, SendOp::Send, 10);
    pair.run();
    assert_eq!(pair.endpoints[B].qp_events, [QpEvent::Established]);
}

#[test]
fn after_rts_the_first_request_raises_no_established_event() {
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    pair.post(A, 0, SendOp::Send, 10);
    pair.assert_all_succeed(1);
    assert_eq!(pair.endpoints[B].qp_events, []);
}

#[test]
fn access_changed_while_running_holds_for_the_next_request() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 10);
    pair.assert_all_succeed(1);
    let attr = QpAttributes::new(State::Rts).with_access(Access::REMOTE_READ);
    modify(&mut pair, B, &attr);
    pair.endpoints[A].sent.clear();
    pair.post(A, 1, SendOp::Read(REMOTE_ADDR), 10);
    pair.post(A, 2, SendOp::Atomic(REMOTE_ADDR, ADD), 8);
    pair.exchange();
    assert_eq!(pair.endpoints[A].sent, [(1, Success), (2, Status::RemoteInvalidRequest)]);
}

#[test]
fn both_ends_may_do_everything_concurrently() {
    let mut pair = Pair::with_receives(ConnParams::default(), 8);
    (0..8).for_each(|id| pair.endpoints[A].host.add_receive(id, 1 << 20));
    for (id, (op, len)) in (0..).zip(one_of_each_op(5)) {
        pair.post(A, id, op, len);
        pair.post(B, id, op, len);
    }
    pair.assert_all_succeed(8);
    assert_eq!(pair.endpoints[B].sent, pair.endpoints[A].sent);
}

#[test]
fn every_discard_reason_has_a_distinct_name() {
    let names: std::collections::BTreeSet<_> =
        DiscardReason::ALL.iter().map(|drop| drop.name()).collect();
    assert_eq!(names.len(), DiscardReason::COUNT);
}

#[test]
fn reads_in_progress_survive_a_change_of_the_limit() {
    for kept in [1, 2, 3, 8, 128] {
        let mut pair = Pair::with_receives(ConnParams::default(), 1);
        pair.post(A, 0, SendOp::Send, 10);
        pair.post(A, 1, SendOp::Read(REMOTE_ADDR), 3 * MTU);
        let request = pair.transfer(A)[1];
        pair.send(B).unwrap();
        modify(&mut pair, B, &QpAttributes::new(State::Sqd));
        let attr = QpAttributes::new(State::Sqd).with_max_dest_rd_atomic(kept);
        modify(&mut pair, B, &attr);
        assert_eq!(pair.send_all(B).len(), 2, "the rest of the response");
        assert_eq!(pair.deliver(B, &request), Err(DiscardReason::Duplicate));
        assert_eq!(pair.transfer(B).len(), 3, "its record is still there");
        assert_eq!(pair.endpoints[A].sent, [(0, Success), (1, Success)]);
    }
}

#[test]
fn a_split_read_that_was_started_is_finished_while_draining() {
    let options = TransportOptions::default().with_read_chunk(2);
    let mut pair = Pair::with(ConnParams { options, max_rd_atomic: 1, ..ConnParams::default() });
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 6 * MTU);
    pair.post(A, 1, SendOp::Read(REMOTE_ADDR), 6 * MTU);
    pair.transfer(A);
    modify(&mut pair, A, &drain());
    pair.exchange();
    assert_eq!(pair.endpoints[A].sent, [(0, Success)]);
    assert_eq!(pair.endpoints[A].qp_events, [QpEvent::Drained]);
}

#[test]
fn an_end_that_failed_on_its_own_is_silent_and_its_peer_gives_up() {
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    modify(&mut pair, B, &QpAttributes::new(State::Err));
    pair.post(A, 0, SendOp::Send, 10);
    pair.run();
    assert_eq!(pair.endpoints[A].sent, [(0, Status::RetryExceeded)]);
    assert_eq!(pair.endpoints[B].qp.stats().packets_sent, 0);
    assert_eq!(pair.endpoints[B].dropped(DiscardReason::State), 4);
}
