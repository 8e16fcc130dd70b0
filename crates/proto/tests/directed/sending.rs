//! What is sent, and when: window, ACK requests, fences, split reads.

use warpwire_proto::qp::{Fence, SendOp, SendQueueError, SendWr, TransportOptions};
use warpwire_proto::wire::{Extension, Nak, Opcode, Syndrome};

use crate::directed::pair::{
    A, ADD, B, ConnParams, MTU, Pair, REMOTE_ADDR, one_of_each_op, opcodes, psns,
};

fn with_options(options: TransportOptions) -> ConnParams {
    ConnParams { options, ..ConnParams::default() }
}

#[test]
fn the_window_closes_with_an_ack_request_and_opens_with_the_ack() {
    for window in [1, 2, 5, 16] {
        let params = with_options(TransportOptions::default().with_window(window));
        let mut pair = Pair::with_receives(params, 1);
        pair.post(A, 0, SendOp::Send, 40 * MTU);
        let packets = pair.send_all(A);
        assert_eq!(packets.len(), window as usize);
        assert!(
            packets.last().unwrap().headers.ack_request,
            "no ACK request before the window closes"
        );
        pair.deliver_all(B, &packets);
        pair.transfer(B);
        assert_eq!(pair.send_all(A).len(), window as usize);
        pair.assert_all_succeed(1);
    }
}

#[test]
fn the_last_packet_of_every_message_requests_an_ack() {
    for packets in [1, 3] {
        for (op, len) in one_of_each_op(packets) {
            let mut pair = Pair::new();
            pair.post(A, 0, op, len);
            let (last, others) =
                pair.send_all(A).split_last().map(|(l, o)| (*l, o.to_vec())).unwrap();
            assert!(last.headers.ack_request, "{op:?}");
            assert!(others.iter().all(|packet| !packet.headers.ack_request), "{op:?}");
        }
    }
}

#[test]
fn a_long_message_requests_periodic_acks() {
    let mut pair = Pair::with(with_options(TransportOptions::default().with_window(64)));
    pair.open_windows();
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 60 * MTU);
    let packets = pair.send_all(A);
    let ack_requests: Vec<_> = (0..60).filter(|at| packets[*at].headers.ack_request).collect();
    assert_eq!(ack_requests, [15, 31, 47, 59]);
}

#[test]
fn only_the_last_packet_of_a_send_or_write_with_immediate_is_solicited() {
    for packets in [1, 3] {
        for (op, len) in one_of_each_op(packets) {
            let mut pair = Pair::with_receives(ConnParams::default(), 1);
            pair.post_work(A, SendWr { solicited: true, ..SendWr::new(0, op, len) });
            let sent = pair.transfer(A);
            let takes_receive = matches!(
                op,
                SendOp::Send
                    | SendOp::SendImm(_)
                    | SendOp::SendInvalidate(_)
                    | SendOp::WriteImm(..)
            );
            let marks: Vec<_> = sent.iter().map(|packet| packet.headers.solicited).collect();
            let mut wanted = vec![false; sent.len()];
            *wanted.last_mut().unwrap() = takes_receive;
            assert_eq!(marks, wanted, "{op:?}");
            assert!(
                pair.endpoints[B]
                    .received
                    .iter()
                    .all(|receive_completion| receive_completion.solicited)
            );
        }
    }
}

#[test]
fn packets_of_a_message_are_as_long_as_the_mtu_but_for_the_last() {
    let mut pair = Pair::new();
    for (id, len) in [0, 1, MTU - 1, MTU, MTU + 1, 2 * MTU].into_iter().enumerate() {
        pair.post(A, id as u64, SendOp::SendImm(4), len);
    }
    let packets = pair.send_all(A);
    let lens: Vec<_> = packets.iter().map(|p| p.payload.map_or(0, |payload| payload.len)).collect();
    assert_eq!(lens, [0, 1, MTU - 1, MTU, MTU, 1, MTU, MTU]);
    let (only, first, last) = (Opcode::SendOnlyImm, Opcode::SendFirst, Opcode::SendLastImm);
    assert_eq!(opcodes(&packets), [only, only, only, only, first, last, first, last]);
}

#[test]
fn a_write_names_its_whole_length_in_its_first_packet_alone() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::WriteImm(REMOTE_ADDR, 6), 2 * MTU + 5);
    let packets = pair.send_all(A);
    let Extension::Reth(reth) = packets[0].headers.extension else { panic!("{packets:?}") };
    assert_eq!(
        (reth.address, reth.rkey, reth.len),
        (REMOTE_ADDR.address, REMOTE_ADDR.rkey, 2 * MTU + 5)
    );
    assert_eq!(packets[1].headers.extension, Extension::None);
    assert_eq!(packets[2].headers.extension, Extension::Imm(6));
}

#[test]
fn reads_and_atomics_beyond_the_limit_wait_and_block_later_work() {
    for (op, len) in [(SendOp::Read(REMOTE_ADDR), 2 * MTU), (SendOp::Atomic(REMOTE_ADDR, ADD), 8)] {
        let params =
            ConnParams { max_rd_atomic: 2, max_dest_rd_atomic: 2, ..ConnParams::default() };
        let mut pair = Pair::with_receives(params, 1);
        (0..5).for_each(|id| pair.post(A, id, op, len));
        pair.post(A, 5, SendOp::Send, 1);
        assert_eq!(pair.transfer(A).len(), 2);
        assert_eq!(pair.send(A), None);
        for packet in pair.send_all(B) {
            pair.deliver(A, &packet).unwrap();
            assert!(pair.endpoints[A].sent.len() <= 5);
        }
        assert_eq!(pair.transfer(A).len(), 2);
        pair.assert_all_succeed(6);
    }
}

#[test]
fn fenced_work_waits_for_reads_and_atomics_but_not_for_sends() {
    for (op, len) in [(SendOp::Read(REMOTE_ADDR), 10), (SendOp::Atomic(REMOTE_ADDR, ADD), 8)] {
        for (fenced, fenced_len) in one_of_each_op(1) {
            let mut pair = Pair::with_receives(ConnParams::default(), 3);
            pair.post(A, 0, SendOp::Send, 10);
            pair.post_work(A, SendWr { fence: Fence::Reads, ..SendWr::new(1, SendOp::Send, 10) });
            pair.post(A, 2, op, len);
            pair.post_work(A, SendWr { fence: Fence::Reads, ..SendWr::new(3, fenced, fenced_len) });
            assert_eq!(pair.transfer(A).len(), 3, "{fenced:?} waits");
            pair.transfer(B);
            assert_eq!(pair.transfer(A).len(), 1, "{fenced:?} is sent");
            pair.assert_all_succeed(4);
        }
    }
}

#[test]
fn a_long_read_is_split_within_the_peers_read_limit() {
    let options = TransportOptions::default().with_read_chunk(4);
    let params =
        ConnParams { options, max_rd_atomic: 2, max_dest_rd_atomic: 2, ..ConnParams::default() };
    let mut pair = Pair::with(params);
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 9 * MTU + 1);
    let requests = pair.transfer(A);
    assert_eq!(psns(&requests), [0x100, 0x104]);
    let extensions: Vec<_> = requests.iter().map(|request| request.headers.extension).collect();
    for (at, extension) in (0..).zip(&extensions) {
        let Extension::Reth(reth) = extension else { panic!("{extension:?}") };
        assert_eq!(reth.address, REMOTE_ADDR.address + at * 4 * u64::from(MTU));
        assert_eq!(reth.len, 4 * MTU);
    }
    assert_eq!(pair.endpoints[A].sent, []);
    pair.assert_all_succeed(1);
    assert_eq!(pair.endpoints[A].host.done.len(), 10);
}

#[test]
fn a_piece_of_a_read_is_repeated_from_the_loss_to_its_end() {
    let options = TransportOptions::default().with_read_chunk(4);
    let mut pair = Pair::with(with_options(options));
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 8 * MTU);
    pair.transfer(A);
    let answers = pair.send_all(B);
    pair.deliver(A, &answers[0]).unwrap();
    assert!(pair.deliver(A, &answers[2]).is_err());
    let again = pair.send_all(A);
    assert_eq!(psns(&again), [0x101, 0x104]);
    let Extension::Reth(reth) = again[0].headers.extension else { panic!("{again:?}") };
    assert_eq!((reth.address, reth.len), (REMOTE_ADDR.address + u64::from(MTU), 3 * MTU));
    pair.deliver_all(B, &again);
    pair.assert_all_succeed(1);
}

#[test]
fn a_retransmission_requests_an_ack_with_its_first_packet() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Send, 10 * MTU);
    assert!(!pair.send_all(A)[0].headers.ack_request);
    pair.inject_ack(0x102, Syndrome::Nak(Nak::Sequence)).unwrap();
    let again = pair.send_all(A);
    assert!(again[0].headers.ack_request, "only the ACK may have been lost");
    assert!(!again[1].headers.ack_request);
}

#[test]
fn the_queue_holds_its_depth_and_frees_slots_when_completions_are_taken() {
    for depth in [1, 3, 8] {
        let options = TransportOptions::default().with_send_depth(depth);
        let mut pair = Pair::with(with_options(options));
        (0..u64::from(depth)).for_each(|id| pair.post(A, id, SendOp::Send, 1));
        let one_more = SendWr::new(99, SendOp::Send, 1);
        assert_eq!(pair.endpoints[A].qp.post(one_more), Err(SendQueueError::Full));
        pair.send_all(A);
        pair.endpoints[A].ignore_events = true;
        pair.inject_ack(0x100, Syndrome::ACK).unwrap();
        assert_eq!(
            pair.endpoints[A].qp.post(one_more),
            Err(SendQueueError::Full),
            "its completion is still untaken"
        );
        pair.endpoints[A].drain_events();
        assert_eq!(pair.endpoints[A].qp.post(one_more), Ok(()));
    }
}

#[test]
fn local_work_completes_in_order_and_sends_nothing() {
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    pair.post(A, 0, SendOp::Local, 0);
    assert_eq!(pair.send_all(A), []);
    assert_eq!(pair.endpoints[A].sent.len(), 1);
    pair.post(A, 1, SendOp::Send, 1);
    pair.post(A, 2, SendOp::Local, 0);
    pair.transfer(A);
    assert_eq!(pair.endpoints[A].sent.len(), 1, "completed before the send");
    pair.transfer(B);
    assert_eq!(pair.endpoints[A].sent.len(), 3);
}

#[test]
fn responses_and_requests_alternate() {
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    pair.open_windows();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 20 * MTU);
    pair.transfer(A);
    pair.post(B, 1, SendOp::Write(REMOTE_ADDR), 20 * MTU);
    let packets = pair.send_all(B);
    let is_response_packet: Vec<_> =
        packets[..40].iter().map(|p| p.headers.opcode.is_response()).collect();
    assert!(is_response_packet.windows(2).all(|two| two[0] != two[1]), "{is_response_packet:?}");
}

#[test]
fn memory_does_not_grow_after_connecting() {
    let mut pair = Pair::with_receives(ConnParams::default(), 200);
    let before = [A, B].map(|end| pair.endpoints[end].qp.footprint());
    for round in 0..20 {
        for (id, (op, len)) in (8 * round..).zip(one_of_each_op(3)) {
            pair.post(A, id, op, len);
        }
        pair.run();
    }
    assert_eq!([A, B].map(|end| pair.endpoints[end].qp.footprint()), before, "invariant 5");
}

#[test]
fn a_read_with_max_rd_atomic_0_completes() {
    let mut pair = Pair::with(ConnParams { max_rd_atomic: 0, ..ConnParams::default() });
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 10);
    pair.run();
}

#[test]
fn fewer_long_packets_fit_in_the_window() {
    let pages = |count: u32| count * 4096;
    let params = || ConnParams { mtu: pages(15), ..with_options(TransportOptions::default()) };
    for (len, packets) in [(8, 128), (4096, 128), (4097, 128), (pages(4), 64), (pages(15), 17)] {
        let mut pair = Pair::with(params());
        pair.open_windows();
        (0..128).for_each(|id| pair.post(A, id, SendOp::Write(REMOTE_ADDR), len));
        let sent = pair.send_all(A);
        assert_eq!(sent.len(), packets, "messages of {len} bytes");
        assert!(sent.iter().all(|packet| packet.headers.ack_request));
    }
    // Neither short nor long packets starve the other.
    let mut pair = Pair::with(params());
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 40 * pages(15));
    (1..60).for_each(|id| pair.post(A, id, SendOp::Write(REMOTE_ADDR), 8));
    pair.post(A, 60, SendOp::Write(REMOTE_ADDR), 40 * pages(15));
    pair.assert_all_succeed(61);
}
