//! Unreliable connections. The invariants are numbered in `qp/uc.rs`.

use warpwire_proto::Psn;
use warpwire_proto::qp::HostStatus::{Denied, Ready, Retry};
use warpwire_proto::qp::{
    Access, DiscardReason, ProtocolEvent, QpAttributes, QpEvent, ReceiveCompletion, ReceiveKind,
    RxPacket, SendOp, SendQueueError, SendWr, State, Status, Target, Transmit, Uc,
};
use warpwire_proto::wire::{Extension, Headers, Opcode, Reth};

use crate::directed::host::{HostCall, HostEffect, ScriptedHost};
use crate::directed::pair::{A, ADD, B, ConnParams, LARGE_RECEIVE, MTU, QPNS, REMOTE_ADDR};

/// A UC queue pair in RTS.
fn uc_in_rts(end: usize, access: Access) -> Uc {
    let mut uc = Uc::new(QPNS[end], 8);
    bring_up(&mut uc, end, access, State::Rts);
    uc
}

/// Brings a new queue pair to RTR or RTS.
fn bring_up(uc: &mut Uc, end: usize, access: Access, to: State) {
    let good = ConnParams { access, ..ConnParams::default() };
    let full = good.rtr_attr(end);
    let mut rtr = QpAttributes::new(State::Rtr);
    (rtr.path, rtr.mtu, rtr.destination) = (full.path, full.mtu, full.destination);
    rtr.receive_psn = full.receive_psn;
    let rts = QpAttributes::new(State::Rts).with_send_psn(Psn::new(good.psn[end]));
    for attr in [good.init_attr(), rtr, rts] {
        uc.modify(&attr).unwrap();
        if attr.to == to {
            return;
        }
    }
}

/// Moves the queue pair to `SQE`: the request at its head has an invalid lkey.
pub fn fail_send_queue(uc: &mut Uc) {
    let mut host = ScriptedHost::default();
    host.answer(HostCall::FetchWork, [Denied]);
    uc.post(SendWr::new(0, SendOp::Send, 10)).unwrap();
    assert_eq!(uc.poll_transmit(&mut host), None);
    while uc.poll_event().is_some() {}
}

fn events(uc: &mut Uc) -> Vec<ProtocolEvent> {
    std::iter::from_fn(|| uc.poll_event()).collect()
}

fn completions(uc: &mut Uc) -> Vec<(u64, Status)> {
    let end = |event| match event {
        ProtocolEvent::Sent(completion) => Some((completion.id, completion.status)),
        _ => None,
    };
    events(uc).into_iter().filter_map(end).collect()
}

fn received(uc: &mut Uc) -> Vec<ReceiveCompletion> {
    let end = |event| match event {
        ProtocolEvent::Received(completion) => Some(completion),
        _ => None,
    };
    events(uc).into_iter().filter_map(end).collect()
}

/// The packets of some work, in order.
fn packets(work: &[(SendOp, u32)]) -> Vec<Transmit> {
    let (mut sender, mut host) = (uc_in_rts(A, Access::ALL), ScriptedHost::default());
    let mut all = Vec::new();
    for (id, (op, len)) in work.iter().enumerate() {
        let wr = SendWr { solicited: true, ..SendWr::new(id as u64, *op, *len) };
        sender.post(wr).unwrap();
        all.extend(std::iter::from_fn(|| sender.poll_transmit(&mut host)));
        assert_eq!(completions(&mut sender), [(id as u64, Status::Success)]);
    }
    all
}

fn deliver(uc: &mut Uc, packet: &Transmit, host: &mut ScriptedHost) -> Result<(), DiscardReason> {
    let payload_len = packet.payload.map_or(0, |payload| payload.len);
    uc.handle_packet(&RxPacket { headers: &packet.headers, payload_len, marked: false }, host)
}

const IMM: u32 = 0xabcd;

fn every_op() -> [SendOp; 4] {
    [
        SendOp::Send,
        SendOp::SendImm(IMM),
        SendOp::Write(REMOTE_ADDR),
        SendOp::WriteImm(REMOTE_ADDR, IMM),
    ]
}

/// Promises 1 and 2.
#[test]
fn messages_of_every_length_arrive_whole() {
    for op in every_op() {
        for len in [0, 1, MTU, MTU + 1, 3 * MTU, 3 * MTU + 7] {
            let (mut receiver, mut host) = (uc_in_rts(B, Access::ALL), ScriptedHost::default());
            host.add_receive(9, LARGE_RECEIVE);
            let packets = packets(&[(op, len)]);
            assert_eq!(packets.len() as u32, len.div_ceil(MTU).max(1));
            for (at, packet) in packets.iter().enumerate() {
                let psn = Psn::new(ConnParams::default().psn[A] + at as u32);
                assert_eq!((packet.headers.psn, packet.headers.destination_qp), (psn, QPNS[B]));
                assert!(!packet.headers.ack_request);
                assert_eq!(packet.headers.solicited, at + 1 == packets.len());
                deliver(&mut receiver, packet, &mut host).unwrap();
            }
            let offset = |at: u32| at * MTU;
            let expected = (0..len.div_ceil(MTU)).map(|at| {
                let target = match op {
                    SendOp::Write(_) | SendOp::WriteImm(..) => {
                        Target::Remote(REMOTE_ADDR.forward(offset(at)))
                    }
                    _ => Target::Receive { id: 9, offset: offset(at) },
                };
                HostEffect::Placed(target, (len - offset(at)).min(MTU))
            });
            assert_eq!(host.done, expected.collect::<Vec<_>>(), "{op:?} {len}");
            let kind = match op {
                SendOp::Send => Some(ReceiveKind::Data),
                SendOp::SendImm(imm) => Some(ReceiveKind::Imm(imm)),
                SendOp::WriteImm(_, imm) => Some(ReceiveKind::WriteImm(imm)),
                _ => None,
            };
            let completion = kind.map(|kind| ReceiveCompletion {
                id: 9,
                status: Status::Success,
                len,
                kind,
                solicited: true,
                source_qp: 0,
            });
            assert_eq!(received(&mut receiver), Vec::from_iter(completion), "{op:?} {len}");
            assert_eq!(receiver.stats().drops.iter().sum::<u64>(), 0);
        }
    }
}

/// Promises 2 and 3: whichever packet of the first message is lost, the second one arrives whole,
/// in the same receive.
#[test]
fn a_message_with_a_gap_is_dropped_and_the_next_one_arrives() {
    for lost in 0..4 {
        let (mut receiver, mut host) = (uc_in_rts(B, Access::ALL), ScriptedHost::default());
        host.add_receive(9, LARGE_RECEIVE);
        let all = packets(&[(SendOp::Send, 4 * MTU), (SendOp::SendImm(IMM), 2 * MTU)]);
        for (at, packet) in all.iter().enumerate().filter(|(at, _)| *at != lost) {
            let is_useless = at < 4 && at > lost;
            let outcome = deliver(&mut receiver, packet, &mut host);
            let expected = if is_useless { Err(DiscardReason::Gap) } else { Ok(()) };
            assert_eq!(outcome, expected, "lost {lost}, at {at}");
        }
        let got = received(&mut receiver);
        let message = (9, Status::Success, 2 * MTU, ReceiveKind::Imm(IMM));
        assert_eq!(got.len(), 1, "lost {lost}");
        assert_eq!((got[0].id, got[0].status, got[0].len, got[0].kind), message);
        assert_eq!(receiver.state(), State::Rts);
    }
}

/// Promise 3. A stray packet of the past ends the message that it arrives in; those that follow
/// arrive.
#[test]
fn packets_out_of_order_and_twice() {
    let all = packets(&[(SendOp::Send, 3 * MTU), (SendOp::Send, 2 * MTU), (SendOp::Send, 1)]);
    let gap = Err(DiscardReason::Gap);
    // The order of arrival, what becomes of each packet, and the lengths that are received.
    type Case<'a> = (&'a [usize], &'a [Result<(), DiscardReason>], &'a [u32]);
    let cases: &[Case<'_>] = &[
        // Two packets of the first message change places.
        (&[0, 2, 1, 3, 4], &[Ok(()), gap, gap, Ok(()), Ok(())], &[2 * MTU]),
        // The second message comes between the packets of the first.
        (&[0, 3, 1, 4, 2, 5], &[Ok(()), Ok(()), gap, gap, gap, Ok(())], &[1]),
        // A first packet again: the message begins anew.
        (&[0, 1, 0, 1, 2], &[Ok(()); 5], &[3 * MTU]),
        // A middle packet again, and one of an earlier message.
        (&[0, 1, 1, 2, 3, 4], &[Ok(()), Ok(()), gap, gap, Ok(()), Ok(())], &[2 * MTU]),
        (
            &[0, 1, 2, 3, 2, 4, 5],
            &[Ok(()), Ok(()), Ok(()), Ok(()), gap, gap, Ok(())],
            &[3 * MTU, 1],
        ),
        // A whole message again.
        (&[3, 4, 3, 4, 5, 5], &[Ok(()); 6], &[2 * MTU, 2 * MTU, 1, 1]),
    ];
    for (order, expected, lengths) in cases {
        let (mut receiver, mut host) = (uc_in_rts(B, Access::ALL), ScriptedHost::default());
        (0..8).for_each(|id| host.add_receive(id, LARGE_RECEIVE));
        let mut got = Vec::new();
        for (at, outcome) in order.iter().zip(*expected) {
            assert_eq!(deliver(&mut receiver, &all[*at], &mut host), *outcome, "{order:?}: {at}");
            got.extend(received(&mut receiver).iter().map(|completion| completion.len));
        }
        assert_eq!((got.as_slice(), receiver.state()), (*lengths, State::Rts), "{order:?}");
    }
}

/// Promise 2, for packets that do not fit their message.
#[test]
fn broken_messages_are_dropped() {
    let good = packets(&[(SendOp::Write(REMOTE_ADDR), 2 * MTU + 9)]);
    let changed = |at: usize, len: u32| {
        let mut packets = good.clone();
        packets[at].payload = packets[at].payload.map(|from| {
            let mut shorter = from;
            shorter.len = len;
            shorter
        });
        packets
    };
    // Not full, longer than the MTU, other than the rest of the message.
    for (at, len) in [(0, MTU - 1), (1, 5), (1, MTU + 1), (2, 8), (2, 10)] {
        let (mut receiver, mut host) = (uc_in_rts(B, Access::ALL), ScriptedHost::default());
        let outcomes: Vec<_> = changed(at, len)
            .iter()
            .map(|packet| deliver(&mut receiver, packet, &mut host))
            .collect();
        assert_eq!(outcomes[at], Err(DiscardReason::Length), "{at}: {len}");
        assert!(outcomes[at + 1..].iter().all(|outcome| *outcome == Err(DiscardReason::Gap)));
        assert_eq!(events(&mut receiver), []);
    }
    // A middle packet of a write in a send; a message that begins in another one.
    let (mut receiver, mut host) = (uc_in_rts(B, Access::ALL), ScriptedHost::default());
    host.add_receive(9, LARGE_RECEIVE);
    let send = packets(&[(SendOp::Send, 2 * MTU)]);
    deliver(&mut receiver, &send[0], &mut host).unwrap();
    assert_eq!(deliver(&mut receiver, &good[1], &mut host), Err(DiscardReason::Gap));
    assert_eq!(deliver(&mut receiver, &send[1], &mut host), Err(DiscardReason::Gap));
    for packet in &good {
        deliver(&mut receiver, packet, &mut host).unwrap();
    }
    assert_eq!(events(&mut receiver), [], "a write has no completion");
}

#[test]
fn without_receive_or_right_a_message_is_dropped() {
    let write = &packets(&[(SendOp::Write(REMOTE_ADDR), 8)])[0];
    for (access, answer) in [(Access::NONE, None), (Access::ALL, Some(Denied))] {
        let (mut receiver, mut host) = (uc_in_rts(B, access), ScriptedHost::default());
        host.answer(HostCall::MayAccess, answer);
        assert_eq!(deliver(&mut receiver, write, &mut host), Err(DiscardReason::Access));
        assert_eq!((host.done.len(), receiver.state()), (0, State::Rts));
        assert_eq!(receiver.stats().dropped(DiscardReason::Access), 1);
    }
    let (mut receiver, mut host) = (uc_in_rts(B, Access::ALL), ScriptedHost::default());
    for op in [SendOp::Send, SendOp::WriteImm(REMOTE_ADDR, 1)] {
        let packet = &packets(&[(op, 8)])[0];
        assert_eq!(deliver(&mut receiver, packet, &mut host), Err(DiscardReason::NoReceive));
    }
    // The host cannot place it now.
    host.add_receive(1, 8);
    host.answer(HostCall::PlaceReceive, [Retry]);
    let send = &packets(&[(SendOp::Send, 8)])[0];
    assert_eq!(deliver(&mut receiver, send, &mut host), Err(DiscardReason::Busy));
    deliver(&mut receiver, send, &mut host).unwrap();
    assert_eq!(received(&mut receiver).len(), 1);
}

/// Promise 2: the receive is used for the next message that fits.
#[test]
fn a_message_longer_than_its_receive_is_dropped() {
    let (mut receiver, mut host) = (uc_in_rts(B, Access::ALL), ScriptedHost::default());
    host.add_receive(1, MTU + 1);
    let all = packets(&[(SendOp::Send, 3 * MTU), (SendOp::Send, MTU + 1)]);
    let outcomes = Vec::from_iter(all.iter().map(|one| deliver(&mut receiver, one, &mut host)));
    let (length, gap) = (Err(DiscardReason::Length), Err(DiscardReason::Gap));
    assert_eq!(outcomes, [Ok(()), length, gap, Ok(()), Ok(())]);
    let got = received(&mut receiver);
    assert_eq!((got.len(), got[0].id, got[0].len), (1, 1, MTU + 1));
    assert_eq!((got[0].status, receiver.state()), (Status::Success, State::Rts));
    assert_eq!(host.receives_left(), 0);
}

/// Promise 4.
#[test]
fn a_receive_without_memory_fails_the_queue_pair() {
    let (mut receiver, mut host) = (uc_in_rts(B, Access::ALL), ScriptedHost::default());
    host.add_receive(1, 2 * MTU);
    host.answer(HostCall::PlaceReceive, [Ready, Denied]);
    let send = packets(&[(SendOp::Send, 2 * MTU)]);
    send.iter().for_each(|packet| deliver(&mut receiver, packet, &mut host).unwrap());
    let told = events(&mut receiver);
    assert!(
        matches!(
            told[..],
            [
                ProtocolEvent::Received(ReceiveCompletion {
                    id: 1,
                    status: Status::LocalProtection,
                    ..
                }),
                ProtocolEvent::Async(QpEvent::Fatal),
            ]
        ),
        "{told:?}"
    );
    assert_eq!(receiver.state(), State::Err);
    assert_eq!(deliver(&mut receiver, &send[0], &mut host), Err(DiscardReason::State));
}

#[test]
fn packets_of_other_services_and_partitions_are_dropped() {
    let (mut receiver, mut host) = (uc_in_rts(B, Access::ALL), ScriptedHost::default());
    host.add_receive(1, 100);
    let good = packets(&[(SendOp::Send, 8)])[0];
    let mut foreign = good;
    foreign.headers.partition = 0x1234;
    assert_eq!(deliver(&mut receiver, &foreign, &mut host), Err(DiscardReason::Partition));
    foreign.headers.partition = 0x7fff; // limited membership of the same one
    deliver(&mut receiver, &foreign, &mut host).unwrap();
    for opcode in Opcode::all().filter(|opcode| opcode.byte() >> 5 != 1) {
        let mut foreign = good;
        foreign.headers.opcode = opcode;
        assert_eq!(deliver(&mut receiver, &foreign, &mut host), Err(DiscardReason::Service));
    }
    // An RDMA write without its header.
    let reth = Reth { address: 0, rkey: 0, len: 0 };
    let write = Headers::new(Opcode::UcWriteOnly, QPNS[B], good.headers.psn, Extension::Reth(reth));
    let bare = Transmit { headers: Headers { extension: Extension::None, ..write }, payload: None };
    while receiver.poll_event().is_some() {}
    assert_eq!(deliver(&mut receiver, &bare, &mut host), Err(DiscardReason::Service));
}

#[test]
fn work_that_it_does_not_have_fails_in_order_and_flushes_the_rest() {
    for op in
        [SendOp::Read(REMOTE_ADDR), SendOp::Atomic(REMOTE_ADDR, ADD), SendOp::SendInvalidate(1)]
    {
        let (mut uc, mut host) = (uc_in_rts(A, Access::ALL), ScriptedHost::default());
        uc.post(SendWr::new(1, SendOp::Send, 2 * MTU)).unwrap();
        uc.post(SendWr::new(2, op, 8)).unwrap();
        uc.post(SendWr::new(3, SendOp::Send, 1)).unwrap();
        assert_eq!(std::iter::from_fn(|| uc.poll_transmit(&mut host)).count(), 2);
        let expected = [(1, Status::Success), (2, Status::LocalQpOperation), (3, Status::Flushed)];
        assert_eq!(completions(&mut uc), expected, "{op:?}");
        assert_eq!(uc.state(), State::Sqe);
        uc.post(SendWr::new(4, SendOp::Send, 1)).unwrap();
        assert_eq!(completions(&mut uc), [(4, Status::Flushed)]);
        // It recovers, and goes on.
        uc.modify(&QpAttributes::new(State::Rts)).unwrap();
        uc.post(SendWr::new(5, SendOp::Send, 1)).unwrap();
        assert!(uc.poll_transmit(&mut host).is_some());
        assert_eq!(completions(&mut uc), [(5, Status::Success)]);
    }
}

#[test]
fn posting_is_limited_by_state_depth_and_length() {
    let mut new = Uc::new(1, 2);
    let send = SendWr::new(1, SendOp::Send, 1);
    assert_eq!(new.post(send), Err(SendQueueError::State(State::Reset)));
    let mut uc = uc_in_rts(A, Access::ALL);
    let long = SendWr { len: (1 << 31) + 1, ..send };
    assert_eq!(uc.post(long), Err(SendQueueError::Length(long.len)));
    for _ in 0..8 {
        uc.post(send).unwrap();
    }
    assert_eq!((uc.post(send), uc.outstanding()), (Err(SendQueueError::Full), 8));
    uc.modify(&QpAttributes::new(State::Err)).unwrap();
    assert_eq!(completions(&mut uc), [(1, Status::Flushed); 8]);
    uc.modify(&QpAttributes::new(State::Reset)).unwrap();
    assert_eq!((uc.outstanding(), uc.path()), (0, None));
}

#[test]
fn a_queue_that_drains_finishes_the_message_that_it_has_begun() {
    let (mut uc, mut host) = (uc_in_rts(A, Access::ALL), ScriptedHost::default());
    uc.post(SendWr::new(1, SendOp::Send, 3 * MTU)).unwrap();
    uc.post(SendWr::new(2, SendOp::Send, 1)).unwrap();
    uc.poll_transmit(&mut host).unwrap();
    uc.modify(&QpAttributes::new(State::Sqd).with_notify_drained(true)).unwrap();
    assert_eq!(events(&mut uc), [], "not drained yet");
    assert_eq!(std::iter::from_fn(|| uc.poll_transmit(&mut host)).count(), 2);
    let told = events(&mut uc);
    assert!(matches!(told[0], ProtocolEvent::Sent(completion) if completion.id == 1));
    assert_eq!(told[1..], [ProtocolEvent::Async(QpEvent::Drained)]);
    uc.modify(&QpAttributes::new(State::Rts)).unwrap();
    assert!(uc.poll_transmit(&mut host).is_some());
    assert_eq!(completions(&mut uc), [(2, Status::Success)]);
}

#[test]
fn a_page_that_is_absent_delays_the_packet() {
    let (mut uc, mut host) = (uc_in_rts(A, Access::ALL), ScriptedHost::default());
    host.answer(HostCall::FetchWork, [Retry]);
    uc.post(SendWr::new(1, SendOp::Send, 8)).unwrap();
    assert_eq!(uc.poll_transmit(&mut host), None);
    assert_eq!(events(&mut uc), []);
    assert!(uc.poll_transmit(&mut host).is_some());
    assert_eq!(completions(&mut uc), [(1, Status::Success)]);
    assert!(uc.footprint() <= 8 * 96 + 512, "{}", uc.footprint());
}

/// The first packet in `RTR` is reported once; packets of others do not end a message.
#[test]
fn the_first_packet_establishes_the_connection() {
    let mut receiver = Uc::new(QPNS[B], 8);
    bring_up(&mut receiver, B, Access::ALL, State::Rtr);
    let mut host = ScriptedHost::default();
    host.add_receive(1, LARGE_RECEIVE);
    let send = packets(&[(SendOp::Send, 2 * MTU)]);
    deliver(&mut receiver, &send[0], &mut host).unwrap();
    assert_eq!(events(&mut receiver), [ProtocolEvent::Async(QpEvent::Established)]);
    let mut foreign = send[1];
    foreign.headers.partition = 0x1234;
    assert_eq!(deliver(&mut receiver, &foreign, &mut host), Err(DiscardReason::Partition));
    deliver(&mut receiver, &send[1], &mut host).unwrap();
    let told = events(&mut receiver);
    assert!(matches!(told[..], [ProtocolEvent::Received(completion)] if completion.len == 2 * MTU));
}

/// Work on keys of windows is executed in queue order, once, and a refusal fails the send queue.
#[test]
fn keys_of_windows_change_in_order() {
    let (mut uc, mut host) = (uc_in_rts(A, Access::ALL), ScriptedHost::default());
    host.answer(HostCall::Invalidate, [Retry]);
    uc.post(SendWr::new(1, SendOp::LocalInvalidate(7), 0)).unwrap();
    uc.post(SendWr::new(2, SendOp::Send, 1)).unwrap();
    assert_eq!(uc.poll_transmit(&mut host), None, "nothing overtakes it");
    assert!(uc.poll_transmit(&mut host).is_some());
    assert_eq!(host.done, [HostEffect::Invalidated(7)]);
    assert_eq!(completions(&mut uc), [(1, Status::Success), (2, Status::Success)]);
    host.answer(HostCall::Invalidate, [Denied]);
    uc.post(SendWr::new(3, SendOp::LocalInvalidate(7), 0)).unwrap();
    assert_eq!(uc.poll_transmit(&mut host), None);
    assert_eq!(completions(&mut uc), [(3, Status::LocalQpOperation)]);
    assert_eq!(uc.state(), State::Sqe);
}
