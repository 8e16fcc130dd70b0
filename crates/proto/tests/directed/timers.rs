//! Timers that adapt: one packet after a timeout or an RNR NAK, growing waits, and a limit of
//! silence instead of a number of transmissions.

use core::time::Duration;

use warpwire_proto::Instant;
use warpwire_proto::qp::{SendOp, State, Status, TransportOptions};
use warpwire_proto::wire::{Nak, Syndrome};

use crate::directed::pair::{A, B, ConnParams, MTU, Pair, REMOTE_ADDR, psns};

use Status::Success;

/// The defaults of verbs.
fn verbs_defaults() -> ConnParams {
    ConnParams {
        mtu: 4096,
        timeout: 17,
        retry_count: 7,
        rnr_retry: 7,
        min_rnr_timer: 12,
        ..ConnParams::default()
    }
}

/// Has one message acknowledged, so that the window is open and a round trip is measured.
fn warmed_up(params: ConnParams, round_trip: Duration) -> Pair {
    let mut pair = Pair::with_receives(params, 1);
    pair.post(A, 0, SendOp::Send, 10);
    pair.transfer(A);
    pair.wait(round_trip);
    pair.transfer(B);
    assert_eq!(pair.endpoints[A].sent, [(0, Success)]);
    pair
}

#[test]
fn a_timeout_sends_one_packet_until_there_is_progress() {
    let mut pair = warmed_up(verbs_defaults(), Duration::from_micros(20));
    (1..9).for_each(|id| pair.post(A, id, SendOp::Write(REMOTE_ADDR), 10));
    assert_eq!(pair.send_all(A).len(), 8);
    for _ in 0..3 {
        pair.advance_to(pair.next_deadline());
        let probe = pair.send_all(A);
        assert_eq!(psns(&probe), [0x101]);
        assert!(probe[0].headers.ack_request);
    }
    // Half of them had arrived: only the others are sent again, all at once.
    pair.inject_ack(0x104, Syndrome::ACK).unwrap();
    assert_eq!(psns(&pair.send_all(A)), [0x105, 0x106, 0x107, 0x108]);
    pair.inject_ack(0x108, Syndrome::ACK).unwrap();
    pair.assert_all_succeed(9);
    assert_eq!(pair.endpoints[A].qp.stats().resent, 3 + 4);
}

#[test]
fn late_acknowledgements_make_a_spurious_timeout_cost_one_packet() {
    let mut pair = warmed_up(verbs_defaults(), Duration::from_micros(20));
    pair.post(A, 1, SendOp::Write(REMOTE_ADDR), 100 * 4096);
    pair.transfer(A);
    pair.advance_to(pair.next_deadline());
    assert_eq!(pair.send_all(A).len(), 1);
    pair.transfer(B);
    assert_eq!(pair.send_all(A), []);
    assert_eq!(pair.endpoints[A].sent, [(0, Success), (1, Success)]);
}

#[test]
fn waits_begin_at_the_measured_round_trip_and_double() {
    for (round_trip, first) in [(20, 4_194_u64), (10_000, 30_000)] {
        let mut pair = warmed_up(verbs_defaults(), Duration::from_micros(round_trip));
        pair.post(A, 1, SendOp::Write(REMOTE_ADDR), 10);
        let mut wait = Duration::ZERO;
        for round in 0..4 {
            pair.send_all(A);
            let next = pair.next_deadline() - pair.now;
            if round == 0 {
                assert!(next.as_micros().abs_diff(u128::from(first)) < 1000, "{next:?}");
            } else {
                assert_eq!(next, wait * 2);
            }
            wait = next;
            pair.advance_to(pair.next_deadline());
        }
        // An answer to a packet that was sent once ends the backoff.
        pair.send_all(A);
        pair.inject_ack(0x101, Syndrome::ACK).unwrap();
        pair.post(A, 2, SendOp::Write(REMOTE_ADDR), 10);
        pair.send_all(A);
        assert_eq!(pair.next_deadline() - pair.now, wait * 2);
        pair.inject_ack(0x102, Syndrome::ACK).unwrap();
        pair.post(A, 3, SendOp::Write(REMOTE_ADDR), 10);
        pair.send_all(A);
        assert!((pair.next_deadline() - pair.now).as_micros() < 2 * u128::from(first));
    }
}

#[test]
fn a_peer_may_pause_for_three_seconds() {
    for op in [SendOp::Write(REMOTE_ADDR), SendOp::Read(REMOTE_ADDR), SendOp::Send] {
        for warm in [false, true] {
            let params = verbs_defaults();
            let mut pair = match warm {
                true => warmed_up(params, Duration::from_micros(20)),
                false => Pair::with(params),
            };
            pair.endpoints[B].host.add_receive(1, 1 << 20);
            pair.post(A, 1, op, 1 << 20);
            let (end, mut sent) = (pair.now + Duration::from_secs(3), 0);
            while pair.now < end {
                sent += pair.send_all(A).len();
                pair.advance_to(pair.next_deadline().min(end));
            }
            assert!(sent <= 256 + 15, "{sent} packets to a peer that says nothing");
            assert_eq!(pair.endpoints[A].qp.state(), State::Rts);
            pair.run();
            assert_eq!(pair.endpoints[A].sent.last(), Some(&(1, Success)), "{op:?}");
        }
    }
}

#[test]
fn silence_fails_after_the_time_that_timeout_and_retry_count_allow() {
    for (timeout, retry_count) in [(17, 7), (14, 7), (14, 0), (10, 3), (1, 7), (20, 1)] {
        let mut pair = Pair::with(ConnParams { timeout, retry_count, ..verbs_defaults() });
        let start = pair.now;
        pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 10);
        while pair.endpoints[A].sent.is_empty() {
            pair.send_all(A);
            pair.advance_to(pair.next_deadline());
        }
        assert_eq!(pair.endpoints[A].sent, [(0, Status::RetryExceeded)]);
        let limit = pair.params.ack_timeout() * (u32::from(retry_count) + 1);
        assert_eq!(pair.now - start, limit, "{timeout} {retry_count}");
    }
}

#[test]
fn answers_restart_the_limit_of_silence() {
    let mut pair = warmed_up(ConnParams { retry_count: 1, ..verbs_defaults() }, Duration::ZERO);
    pair.post(A, 1, SendOp::Write(REMOTE_ADDR), 64 * 4096);
    let limit = pair.params.ack_timeout() * 2;
    for missing in 1..64 {
        // The peer is silent for almost as long as it may, and then misses another packet.
        let end = pair.now + (limit - Duration::from_millis(1));
        while pair.now < end {
            pair.send_all(A);
            pair.advance_to(pair.next_deadline().min(end));
        }
        pair.inject_ack(0x101 + missing, Syndrome::Nak(Nak::Sequence)).unwrap();
        assert_eq!(pair.endpoints[A].sent, [(0, Success)], "{missing}");
    }
}

#[test]
fn a_peer_without_a_receive_gets_few_packets() {
    let mut pair = Pair::with(verbs_defaults());
    pair.post(A, 0, SendOp::Send, 1 << 20);
    let start = pair.now;
    while pair.now - start < Duration::from_secs(4) {
        pair.exchange();
        pair.advance_to(pair.next_deadline());
    }
    let sent = pair.endpoints[A].qp.stats().packets_sent;
    assert!(sent < 100, "{sent} packets");
    assert_eq!(pair.endpoints[A].sent, []);
    pair.endpoints[B].host.add_receive(0, 1 << 20);
    let posted = pair.now;
    pair.assert_all_succeed(1);
    assert!(pair.now - posted <= Duration::from_millis(100), "{:?}", pair.now - posted);
}

#[test]
fn after_an_rnr_nak_the_first_packet_goes_alone_until_it_is_accepted() {
    let mut pair = warmed_up(verbs_defaults(), Duration::from_micros(20));
    (1..6).for_each(|id| pair.post(A, id, SendOp::Send, 10));
    let mut asked = Duration::from_micros(640);
    pair.exchange();
    for _ in 0..10 {
        assert_eq!(pair.next_deadline() - pair.now, asked.min(Duration::from_micros(640 << 7)));
        pair.advance_to(pair.next_deadline());
        let alone = pair.send_all(A);
        assert_eq!(psns(&alone), [0x101]);
        let _ = pair.deliver(B, &alone[0]);
        pair.transfer(B);
        asked *= 2;
    }
    (1..6).for_each(|id| pair.endpoints[B].host.add_receive(id, 10));
    pair.advance_to(pair.next_deadline());
    assert_eq!(pair.transfer(A).len(), 1);
    pair.transfer(B);
    assert_eq!(psns(&pair.transfer(A)), [0x102, 0x103, 0x104, 0x105]);
    pair.assert_all_succeed(6);
    // A new episode begins with the wait that was asked for.
    pair.post(A, 6, SendOp::Send, 10);
    pair.exchange();
    assert_eq!(pair.next_deadline() - pair.now, Duration::from_micros(640));
}

#[test]
fn a_wait_that_the_peer_asks_for_is_never_shortened() {
    for code in 0..32 {
        let params = ConnParams { min_rnr_timer: code, ..verbs_defaults() };
        let mut pair = Pair::with(params);
        let asked = warpwire_proto::wire::ext::rnr_time(code);
        pair.post(A, 0, SendOp::Send, 10);
        for _ in 0..10 {
            pair.exchange();
            assert!(pair.next_deadline() - pair.now >= asked, "code {code}");
            pair.advance_to(pair.next_deadline());
        }
    }
}

#[test]
fn a_new_connection_sends_few_packets_before_the_first_answer() {
    let options = TransportOptions::default().with_window(64);
    let mut pair = Pair::with(ConnParams { options, ..verbs_defaults() });
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 200 * 4096);
    let first = pair.transfer(A);
    assert_eq!(first.len(), 16);
    assert!(first[15].headers.ack_request, "the peer would say nothing");
    pair.transfer(B);
    assert_eq!(pair.send_all(A).len(), 64);
    // A smaller window stays smaller.
    let options = TransportOptions::default().with_window(4);
    let mut pair = Pair::with(ConnParams { options, mtu: MTU, ..verbs_defaults() });
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 200 * MTU);
    assert_eq!(pair.send_all(A).len(), 4);
}

#[test]
fn without_a_timeout_nothing_is_sent_again() {
    let mut pair = Pair::with(ConnParams { timeout: 0, ..verbs_defaults() });
    pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 10);
    pair.send_all(A);
    assert_eq!(pair.next_deadline(), Instant::NEVER);
}
