//! Retries after timeouts, sequence NAKs and RNR NAKs: how many, and when.

use core::time::Duration;

use warpwire_proto::Instant;
use warpwire_proto::qp::{DiscardReason, SendOp, State, Status};
use warpwire_proto::wire::{Nak, Syndrome};

use crate::directed::pair::{
    A, ADD, B, ConnParams, MTU, Pair, REMOTE_ADDR, one_of_each_op, psn, psns, syndrome,
};

use Status::{Flushed, Success};

#[test]
fn silence_fails_after_retry_count_retries_at_the_ack_timeout() {
    for retry_count in 0..=7 {
        // Up to 4.2 ms; longer timeouts are shortened by measured round trips.
        for timeout in [1, 8, 10] {
            let mut pair = Pair::with(ConnParams { retry_count, timeout, ..ConnParams::default() });
            let start = pair.now;
            let ack_timeout = Duration::from_nanos(4096 << timeout);
            pair.post(A, 0, SendOp::Send, 10);
            pair.post(A, 1, SendOp::Send, 10);
            for retries in 1..=u32::from(retry_count) + 1 {
                let packets: &[u32] = if retries == 1 { &[0x100, 0x101] } else { &[0x100] };
                assert_eq!(psns(&pair.send_all(A)), packets, "transmission {retries}");
                assert_eq!(pair.next_deadline(), start + ack_timeout * retries);
                pair.advance_to(Instant::from_nanos(pair.next_deadline().as_nanos() - 1));
                assert_eq!(pair.send_all(A), [], "a retry before the timeout");
                assert_eq!(pair.endpoints[A].sent, []);
                pair.wait(Duration::from_nanos(1));
            }
            assert_eq!(pair.endpoints[A].sent, [(0, Status::RetryExceeded), (1, Flushed)]);
            assert_eq!(pair.endpoints[A].qp.state(), State::Err);
            assert_eq!(pair.send_all(A), []);
            assert_eq!(pair.next_deadline(), Instant::NEVER);
        }
    }
}

#[test]
fn silence_fails_every_operation() {
    for (op, len) in one_of_each_op(2) {
        let mut pair = Pair::new();
        pair.post(A, 0, op, len);
        while pair.endpoints[A].sent.is_empty() {
            pair.send_all(A);
            pair.advance_to(pair.next_deadline());
        }
        assert_eq!(pair.endpoints[A].sent, [(0, Status::RetryExceeded)], "{op:?}");
        assert_eq!(pair.endpoints[A].qp.stats().timeouts, 4);
    }
}

#[test]
fn without_a_timeout_the_requester_never_fails() {
    let mut pair = Pair::with(ConnParams { timeout: 0, ..ConnParams::default() });
    pair.post(A, 0, SendOp::Send, 10);
    pair.send_all(A);
    assert_eq!(pair.next_deadline(), Instant::NEVER);
    pair.wait(Duration::from_secs(100_000));
    assert_eq!(pair.send_all(A), []);
    assert_eq!(pair.endpoints[A].sent, []);
}

#[test]
fn a_full_link_uses_up_retries_like_packet_loss() {
    let mut pair = Pair::with(ConnParams { retry_count: 2, ..ConnParams::default() });
    let ack_timeout = pair.params.ack_timeout();
    pair.endpoints[A].qp.on_link_full(pair.now);
    assert_eq!(pair.next_deadline(), Instant::NEVER, "a timer without anything to send");
    pair.post(A, 0, SendOp::Send, 4 * MTU);
    pair.post(A, 1, SendOp::Send, 10);
    // Nothing was ever sent; the number of `on_link_full` calls does not matter.
    for retries in 0..3 {
        assert_eq!(pair.endpoints[A].sent, [], "after {retries} retries");
        let start = pair.now;
        pair.endpoints[A].qp.on_link_full(pair.now);
        pair.wait(ack_timeout / 2);
        pair.endpoints[A].qp.on_link_full(pair.now);
        assert_eq!(pair.next_deadline(), start + ack_timeout);
        pair.advance_to(pair.next_deadline());
    }
    assert_eq!(pair.endpoints[A].sent, [(0, Status::RetryExceeded), (1, Flushed)]);
    pair.endpoints[A].qp.on_link_full(pair.now);
    assert_eq!(pair.next_deadline(), Instant::NEVER, "a timer after the failure");
}

#[test]
fn a_link_that_drains_in_time_costs_no_retry() {
    let mut pair = Pair::with(ConnParams { retry_count: 1, ..ConnParams::default() });
    let ack_timeout = pair.params.ack_timeout();
    pair.post(A, 0, SendOp::Send, 4 * MTU);
    pair.endpoints[A].qp.on_link_full(pair.now);
    pair.wait(ack_timeout * 3 / 4);
    assert_eq!(psns(&pair.send_all(A)), [0x100, 0x101, 0x102, 0x103]);
    pair.inject_ack(0x101, Syndrome::ACK).unwrap();
    assert_eq!(pair.next_deadline(), pair.now + ack_timeout);
    pair.inject_ack(0x103, Syndrome::ACK).unwrap();
    assert_eq!(pair.next_deadline(), Instant::NEVER);
    assert_eq!(pair.endpoints[A].sent, [(0, Success)]);
    // Without a timeout there is no limit.
    let mut pair = Pair::with(ConnParams { timeout: 0, ..ConnParams::default() });
    pair.post(A, 0, SendOp::Send, 10);
    pair.endpoints[A].qp.on_link_full(pair.now);
    assert_eq!(pair.next_deadline(), Instant::NEVER);
}

/// The timer of a full link began before anything was sent: the first packet has a wait of its own,
/// and if the path has no room for it, nothing is waited for.
#[test]
fn the_wait_for_a_full_link_is_not_that_of_a_packet() {
    let mut pair = Pair::new();
    let ack_timeout = pair.params.ack_timeout();
    pair.post(A, 0, SendOp::Send, 4 * MTU);
    pair.endpoints[A].qp.on_link_full(pair.now);
    pair.wait(ack_timeout * 3 / 4);
    pair.send_all(A);
    assert_eq!(pair.next_deadline(), pair.now + ack_timeout);

    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Send, 4 * MTU);
    let qp = &mut pair.endpoints[A].qp;
    qp.on_link_full(pair.now);
    qp.set_allowance(0);
    assert_eq!(pair.send_all(A), []);
    assert!(pair.endpoints[A].qp.take_blocked_by_path());
    assert_eq!(pair.next_deadline(), Instant::NEVER);

    // The path is not told of a loss where nothing was sent.
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Send, 10);
    pair.endpoints[A].qp.on_link_full(pair.now);
    pair.advance_to(pair.next_deadline());
    let qp = &mut pair.endpoints[A].qp;
    assert_eq!((qp.stats().timeouts, qp.take_path_signals().timed_out), (1, None));
    pair.send_all(A);
    pair.advance_to(pair.next_deadline());
    assert!(pair.endpoints[A].qp.take_path_signals().timed_out.is_some());
}

#[test]
fn progress_restarts_the_timer_and_resets_the_retries() {
    let mut pair = Pair::with(ConnParams { retry_count: 1, ..ConnParams::default() });
    let ack_timeout = pair.params.ack_timeout();
    pair.post(A, 0, SendOp::Send, 8 * MTU);
    for acked in 0..7 {
        pair.send_all(A);
        pair.wait(ack_timeout);
        pair.send_all(A); // the last retry
        pair.wait(ack_timeout / 2);
        pair.inject_ack(0x100 + acked, Syndrome::ACK).unwrap();
        assert_eq!(pair.next_deadline(), Instant::NEVER, "a timer before anything was sent");
        pair.send_all(A);
        assert_eq!(pair.next_deadline(), pair.now + ack_timeout);
    }
    pair.inject_ack(0x107, Syndrome::ACK).unwrap();
    assert_eq!(pair.next_deadline(), Instant::NEVER, "a timer with nothing outstanding");
    assert_eq!(pair.endpoints[A].sent, [(0, Success)]);
}

#[test]
fn a_sequence_nak_is_an_answer_and_no_retry() {
    let mut pair = Pair::with(ConnParams { retry_count: 0, ..ConnParams::default() });
    pair.post(A, 0, SendOp::Send, 4 * MTU);
    pair.send_all(A);
    pair.wait(pair.params.ack_timeout() / 2);
    pair.inject_ack(0x100, Syndrome::Nak(Nak::Sequence)).unwrap();
    assert_eq!(psns(&pair.send_all(A)), [0x100, 0x101, 0x102, 0x103]);
    assert_eq!(pair.next_deadline(), pair.now + pair.params.ack_timeout());
    pair.advance_to(pair.next_deadline());
    assert_eq!(pair.endpoints[A].sent, [(0, Status::RetryExceeded)]);
}

#[test]
fn endless_sequence_naks_fail_by_the_timer() {
    let mut pair = Pair::with(ConnParams { retry_count: 2, ..ConnParams::default() });
    pair.post(A, 0, SendOp::Send, 4 * MTU);
    pair.send_all(A);
    let (start, ack_timeout) = (pair.now, pair.params.ack_timeout());
    // Duplicated NAKs must not use up retries, but neither may they postpone the failure forever.
    while pair.endpoints[A].sent.is_empty() {
        assert!(pair.now < start + ack_timeout * 4, "the timer was postponed");
        let _ = pair.inject_ack(0x100, Syndrome::Nak(Nak::Sequence));
        pair.send_all(A);
        pair.wait(ack_timeout / 5);
    }
    assert_eq!(pair.endpoints[A].sent, [(0, Status::RetryExceeded)]);
    assert!(pair.now > start + ack_timeout, "it failed without a retry");
}

#[test]
fn a_sequence_nak_with_progress_resets_the_retries_first() {
    let mut pair = Pair::with(ConnParams { retry_count: 2, ..ConnParams::default() });
    pair.post(A, 0, SendOp::Send, 4 * MTU);
    for lost in 1..4 {
        pair.send_all(A);
        pair.wait(pair.params.ack_timeout()); // uses the last retry, except the first time
        pair.send_all(A);
        pair.inject_ack(0x100 + lost, Syndrome::Nak(Nak::Sequence)).unwrap();
        assert_eq!(pair.endpoints[A].sent, [], "the NAK acknowledged earlier packets");
    }
}

#[test]
fn a_second_sequence_nak_before_retransmission_costs_no_retry() {
    let mut pair = Pair::with(ConnParams { retry_count: 1, ..ConnParams::default() });
    pair.post(A, 0, SendOp::Send, 4 * MTU);
    pair.send_all(A);
    for _ in 0..5 {
        pair.inject_ack(0x100, Syndrome::Nak(Nak::Sequence)).unwrap();
    }
    assert_eq!(pair.endpoints[A].sent, []);
    assert_eq!(pair.send_all(A).len(), 4);
}

#[test]
fn a_peer_without_receives_is_retried_rnr_retry_times() {
    for op in [
        SendOp::Send,
        SendOp::SendImm(1),
        SendOp::SendInvalidate(1),
        SendOp::WriteImm(REMOTE_ADDR, 1),
    ] {
        for rnr_retry in 0..7 {
            let mut pair = Pair::with(ConnParams { rnr_retry, ..ConnParams::default() });
            pair.post(A, 0, op, 10);
            pair.post(A, 1, SendOp::Write(REMOTE_ADDR), 10);
            let mut retries = 0;
            while pair.endpoints[A].sent.is_empty() {
                let packets = pair.send_all(A);
                retries += packets.iter().filter(|packet| psn(packet) == 0x100).count();
                pair.deliver_all(B, &packets);
                for answer in pair.send_all(B) {
                    assert_eq!((psn(&answer), syndrome(&answer)), (0x100, Syndrome::RnrNak(5)));
                    pair.deliver(A, &answer).unwrap();
                }
                pair.advance_to(pair.next_deadline().min(pair.now + Duration::from_secs(1)));
            }
            assert_eq!(retries, usize::from(rnr_retry) + 1, "{op:?}");
            assert_eq!(pair.endpoints[A].sent, [(0, Status::RnrRetryExceeded), (1, Flushed)]);
            assert_eq!(pair.endpoints[B].qp.state(), State::Rts, "the peer is not affected");
            assert_eq!(pair.endpoints[B].host.done, []);
        }
    }
}

#[test]
fn with_rnr_retry_7_a_peer_without_receives_is_retried_forever() {
    let mut pair = Pair::with(ConnParams { rnr_retry: 7, ..ConnParams::default() });
    pair.post(A, 0, SendOp::Send, 10);
    for _ in 0..100 {
        pair.exchange();
        pair.advance_to(pair.next_deadline());
    }
    assert_eq!(pair.endpoints[A].qp.stats().rnr_received, 100);
    assert_eq!(pair.endpoints[B].qp.stats().rnr_sent, 100);
    pair.endpoints[B].host.add_receive(0, 10);
    pair.assert_all_succeed(1);
}

#[test]
fn an_rnr_nak_pauses_sending_for_the_coded_time() {
    // The RNR timer table of the InfiniBand specification, in units of 0.01 ms.
    const TIMES: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    for (code, time) in (0..).zip(TIMES) {
        let mut pair = Pair::with(ConnParams { min_rnr_timer: code, ..ConnParams::default() });
        let wait = Duration::from_micros(10 * time);
        pair.post(A, 0, SendOp::Send, 10);
        pair.exchange();
        let resume = pair.now + wait;
        assert_eq!(pair.next_deadline(), resume, "code {code}");
        pair.advance_to(Instant::from_nanos(resume.as_nanos() - 1));
        assert_eq!(pair.send_all(A), []);
        pair.advance_to(resume);
        assert_eq!(pair.send_all(A).len(), 1);
    }
}

#[test]
fn a_first_packet_waits_for_a_receive_but_a_write_with_immediate_only_at_its_end() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::WriteImm(REMOTE_ADDR, 1), 3 * MTU);
    let packets = pair.send_all(A);
    assert_eq!(pair.deliver_all(B, &packets), [Ok(()), Ok(()), Err(DiscardReason::Busy)]);
    let responses = pair.send_all(B);
    assert_eq!((psn(&responses[0]), syndrome(&responses[0])), (0x102, Syndrome::RnrNak(5)));
    pair.deliver(A, &responses[0]).unwrap();
    pair.endpoints[B].host.add_receive(0, 0);
    pair.advance_to(pair.next_deadline());
    assert_eq!(psns(&pair.transfer(A)), [0x102], "only the last packet is repeated");
    pair.assert_all_succeed(1);
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Send, 3 * MTU);
    let packets = pair.send_all(A);
    let outcomes = pair.deliver_all(B, &packets);
    assert_eq!(
        outcomes,
        [Err(DiscardReason::Busy), Err(DiscardReason::Gap), Err(DiscardReason::Gap)]
    );
}

#[test]
fn a_repeated_rnr_nak_uses_one_retry() {
    let mut pair = Pair::with(ConnParams { rnr_retry: 1, ..ConnParams::default() });
    pair.post(A, 0, SendOp::Send, 10);
    pair.send_all(A);
    for _ in 0..3 {
        pair.inject_ack(0x100, Syndrome::RnrNak(1)).unwrap();
    }
    assert_eq!(pair.endpoints[A].sent, []);
}

#[test]
fn an_rnr_nak_acknowledges_what_is_before_it() {
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    pair.post(A, 0, SendOp::Send, 10);
    pair.post(A, 1, SendOp::Atomic(REMOTE_ADDR, ADD), 8);
    pair.post(A, 2, SendOp::Send, 10);
    pair.exchange();
    assert_eq!(pair.endpoints[A].sent, [(0, Success), (1, Success)]);
    pair.endpoints[B].host.add_receive(1, 10);
    pair.assert_all_succeed(3);
}

#[test]
fn silence_after_an_rnr_wait_fails_too() {
    let mut pair = Pair::with(ConnParams { rnr_retry: 7, retry_count: 2, ..ConnParams::default() });
    pair.post(A, 0, SendOp::Send, 10);
    pair.exchange();
    let mut retries = 0;
    while pair.endpoints[A].sent.is_empty() {
        pair.advance_to(pair.next_deadline());
        retries += pair.send_all(A).len();
    }
    assert_eq!((retries, &pair.endpoints[A].sent[..]), (3, &[(0, Status::RetryExceeded)][..]));
}

#[test]
fn packets_each_lost_once_do_no_harm() {
    for (op, len) in one_of_each_op(4) {
        let mut pair = Pair::with_receives(ConnParams::default(), 4);
        (0..4).for_each(|id| pair.post(A, id, op, len));
        let mut lost = std::collections::BTreeSet::new();
        while pair.endpoints[A].qp.outstanding() > 0 {
            let mut quiet = true;
            for from in [A, B] {
                for packet in pair.send_all(from) {
                    quiet = false;
                    if !lost.insert((from, psn(&packet))) {
                        let _ = pair.deliver(1 - from, &packet);
                    }
                }
            }
            if quiet {
                pair.advance_to(pair.next_deadline());
            }
        }
        pair.assert_all_succeed(4);
    }
}

#[test]
fn progress_resets_the_rnr_retries_too() {
    let mut pair = Pair::with(ConnParams { rnr_retry: 1, ..ConnParams::default() });
    for id in 0..4 {
        pair.post(A, id, SendOp::Send, 10);
        pair.exchange(); // uses the only retry
        pair.endpoints[B].host.add_receive(id, 10);
        pair.assert_all_succeed(id + 1);
    }
}
