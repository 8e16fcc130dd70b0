//! Silence, and receivers that are not ready: how often we try, and when.

use core::time::Duration;

use warpwire_proto::Instant;
use warpwire_proto::qp::{Discard, Op, State, Status};
use warpwire_proto::wire::{Nak, Syndrome};

use crate::directed::pair::{A, ADD, B, MTU, PLACE, Pair, Terms, one_of_each, psn, psns, syndrome};

use Status::{Flushed, Success};

#[test]
fn silence_ends_after_one_and_retry_count_tries_at_the_agreed_times() {
    for retry_count in 0..=7 {
        for timeout in [1, 8, 14, 20] {
            let mut pair = Pair::with(Terms { retry_count, timeout, ..Terms::default() });
            let start = pair.now;
            let patience = Duration::from_nanos(4096 << timeout);
            pair.post(A, 0, Op::Send, 10);
            pair.post(A, 1, Op::Send, 10);
            for tries in 1..=u32::from(retry_count) + 1 {
                assert_eq!(psns(&pair.send_all(A)), [0x100, 0x101], "try {tries}");
                assert_eq!(pair.next_deadline(), start + patience * tries);
                pair.go_to(Instant::from_nanos(pair.next_deadline().as_nanos() - 1));
                assert_eq!(pair.send_all(A), [], "not a moment too soon");
                assert_eq!(pair.ends[A].sent, []);
                pair.wait(Duration::from_nanos(1));
            }
            assert_eq!(pair.ends[A].sent, [(0, Status::RetryExceeded), (1, Flushed)]);
            assert_eq!(pair.ends[A].qp.state(), State::Err);
            assert_eq!(pair.send_all(A), []);
            assert_eq!(pair.next_deadline(), Instant::NEVER);
        }
    }
}

#[test]
fn silence_fails_every_operation() {
    for (op, len) in one_of_each(2) {
        let mut pair = Pair::new();
        pair.post(A, 0, op, len);
        while pair.ends[A].sent.is_empty() {
            pair.send_all(A);
            pair.go_to(pair.next_deadline());
        }
        assert_eq!(pair.ends[A].sent, [(0, Status::RetryExceeded)], "{op:?}");
        assert_eq!(pair.ends[A].qp.stats().timeouts, 4);
    }
}

#[test]
fn without_a_timeout_nobody_gives_up() {
    let mut pair = Pair::with(Terms { timeout: 0, ..Terms::default() });
    pair.post(A, 0, Op::Send, 10);
    pair.send_all(A);
    assert_eq!(pair.next_deadline(), Instant::NEVER);
    pair.wait(Duration::from_secs(100_000));
    assert_eq!(pair.send_all(A), []);
    assert_eq!(pair.ends[A].sent, []);
}

#[test]
fn a_link_without_room_spends_tries_as_silence_does() {
    let mut pair = Pair::with(Terms { retry_count: 2, ..Terms::default() });
    let patience = pair.terms.patience();
    pair.ends[A].qp.held_up(pair.now);
    assert_eq!(pair.next_deadline(), Instant::NEVER, "there is nothing to send");
    pair.post(A, 0, Op::Send, 4 * MTU);
    pair.post(A, 1, Op::Send, 10);
    // Nothing was ever sent; how often it is told does not matter.
    for tries in 0..3 {
        assert_eq!(pair.ends[A].sent, [], "after {tries} tries");
        let start = pair.now;
        pair.ends[A].qp.held_up(pair.now);
        pair.wait(patience / 2);
        pair.ends[A].qp.held_up(pair.now);
        assert_eq!(pair.next_deadline(), start + patience);
        pair.go_to(pair.next_deadline());
    }
    assert_eq!(pair.ends[A].sent, [(0, Status::RetryExceeded), (1, Flushed)]);
    pair.ends[A].qp.held_up(pair.now);
    assert_eq!(pair.next_deadline(), Instant::NEVER, "it has failed");
}

#[test]
fn room_that_comes_in_time_costs_nothing() {
    let mut pair = Pair::with(Terms { retry_count: 1, ..Terms::default() });
    let patience = pair.terms.patience();
    pair.post(A, 0, Op::Send, 4 * MTU);
    pair.ends[A].qp.held_up(pair.now);
    pair.wait(patience * 3 / 4);
    assert_eq!(psns(&pair.send_all(A)), [0x100, 0x101, 0x102, 0x103]);
    pair.tell_ack(0x101, Syndrome::ACK).unwrap();
    assert_eq!(pair.next_deadline(), pair.now + patience);
    pair.tell_ack(0x103, Syndrome::ACK).unwrap();
    assert_eq!(pair.next_deadline(), Instant::NEVER);
    assert_eq!(pair.ends[A].sent, [(0, Success)]);
    // Who has no time-out waits as long as it takes.
    let mut pair = Pair::with(Terms { timeout: 0, ..Terms::default() });
    pair.post(A, 0, Op::Send, 10);
    pair.ends[A].qp.held_up(pair.now);
    assert_eq!(pair.next_deadline(), Instant::NEVER);
}

#[test]
fn progress_restarts_the_timer_and_gives_all_tries_back() {
    let mut pair = Pair::with(Terms { retry_count: 1, ..Terms::default() });
    let patience = pair.terms.patience();
    pair.post(A, 0, Op::Send, 8 * MTU);
    for acked in 0..7 {
        pair.send_all(A);
        pair.wait(patience);
        pair.send_all(A); // the last try
        pair.wait(patience / 2);
        pair.tell_ack(0x100 + acked, Syndrome::ACK).unwrap();
        assert_eq!(pair.next_deadline(), pair.now + patience);
    }
    pair.tell_ack(0x107, Syndrome::ACK).unwrap();
    assert_eq!(pair.next_deadline(), Instant::NEVER, "nothing is waited for");
    assert_eq!(pair.ends[A].sent, [(0, Success)]);
}

#[test]
fn a_sequence_refusal_takes_a_try() {
    let mut pair = Pair::with(Terms { retry_count: 0, ..Terms::default() });
    pair.post(A, 0, Op::Send, 4 * MTU);
    pair.send_all(A);
    pair.tell_ack(0x100, Syndrome::Nak(Nak::Sequence)).unwrap();
    assert_eq!(pair.ends[A].sent, [(0, Status::RetryExceeded)]);
}

#[test]
fn a_place_that_is_refused_without_end_fails_by_the_timer() {
    let mut pair = Pair::with(Terms { retry_count: 2, ..Terms::default() });
    pair.post(A, 0, Op::Send, 4 * MTU);
    pair.send_all(A);
    let (start, patience) = (pair.now, pair.terms.patience());
    // What the network repeats must not cost tries; but it must not keep us trying for ever either.
    while pair.ends[A].sent.is_empty() {
        assert!(pair.now < start + patience * 4, "the timer runs on");
        let _ = pair.tell_ack(0x100, Syndrome::Nak(Nak::Sequence));
        pair.send_all(A);
        pair.wait(patience / 5);
    }
    assert_eq!(pair.ends[A].sent, [(0, Status::RetryExceeded)]);
    assert!(pair.now > start + patience, "it did try");
}

#[test]
fn a_sequence_refusal_that_shows_progress_gives_the_tries_back_first() {
    let mut pair = Pair::with(Terms { retry_count: 2, ..Terms::default() });
    pair.post(A, 0, Op::Send, 4 * MTU);
    for lost in 1..4 {
        pair.send_all(A);
        pair.wait(pair.terms.patience()); // takes the last try but for the first time
        pair.send_all(A);
        pair.tell_ack(0x100 + lost, Syndrome::Nak(Nak::Sequence)).unwrap();
        assert_eq!(pair.ends[A].sent, [], "the packets before it got through");
    }
}

#[test]
fn a_second_sequence_refusal_before_anything_was_sent_again_takes_no_try() {
    let mut pair = Pair::with(Terms { retry_count: 1, ..Terms::default() });
    pair.post(A, 0, Op::Send, 4 * MTU);
    pair.send_all(A);
    for _ in 0..5 {
        pair.tell_ack(0x100, Syndrome::Nak(Nak::Sequence)).unwrap();
    }
    assert_eq!(pair.ends[A].sent, []);
    assert_eq!(pair.send_all(A).len(), 4);
}

#[test]
fn a_peer_without_receives_is_tried_one_and_rnr_retry_times() {
    for op in [Op::Send, Op::SendImm(1), Op::SendInvalidate(1), Op::WriteImm(PLACE, 1)] {
        for rnr_retry in 0..7 {
            let mut pair = Pair::with(Terms { rnr_retry, ..Terms::default() });
            pair.post(A, 0, op, 10);
            pair.post(A, 1, Op::Write(PLACE), 10);
            let mut tries = 0;
            while pair.ends[A].sent.is_empty() {
                let packets = pair.send_all(A);
                tries += packets.iter().filter(|packet| psn(packet) == 0x100).count();
                pair.arrive_all(B, &packets);
                for answer in pair.send_all(B) {
                    assert_eq!((psn(&answer), syndrome(&answer)), (0x100, Syndrome::RnrNak(5)));
                    pair.arrive(A, &answer).unwrap();
                }
                pair.go_to(pair.next_deadline().min(pair.now + Duration::from_secs(1)));
            }
            assert_eq!(tries, usize::from(rnr_retry) + 1, "{op:?}");
            assert_eq!(pair.ends[A].sent, [(0, Status::RnrRetryExceeded), (1, Flushed)]);
            assert_eq!(pair.ends[B].qp.state(), State::Rts, "the peer knows nothing of it");
            assert_eq!(pair.ends[B].host.done, []);
        }
    }
}

#[test]
fn with_seven_a_peer_without_receives_is_tried_without_end() {
    let mut pair = Pair::with(Terms { rnr_retry: 7, ..Terms::default() });
    pair.post(A, 0, Op::Send, 10);
    for _ in 0..100 {
        pair.exchange();
        pair.go_to(pair.next_deadline());
    }
    assert_eq!(pair.ends[A].qp.stats().rnr_received, 100);
    assert_eq!(pair.ends[B].qp.stats().rnr_sent, 100);
    pair.ends[B].host.add_receive(0, 10);
    pair.assert_all_succeed(1);
}

#[test]
fn a_peer_that_is_not_ready_is_left_alone_for_the_coded_time() {
    // From the facts, in hundredths of a millisecond.
    const TIMES: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    for (code, time) in (0..).zip(TIMES) {
        let mut pair = Pair::with(Terms { min_rnr_timer: code, ..Terms::default() });
        let wait = Duration::from_micros(10 * time);
        pair.post(A, 0, Op::Send, 10);
        pair.exchange();
        let resume = pair.now + wait;
        assert_eq!(pair.next_deadline(), resume, "code {code}");
        pair.go_to(Instant::from_nanos(resume.as_nanos() - 1));
        assert_eq!(pair.send_all(A), []);
        pair.go_to(resume);
        assert_eq!(pair.send_all(A).len(), 1);
    }
}

#[test]
fn a_first_packet_waits_for_a_receive_but_a_write_with_immediate_only_at_its_end() {
    let mut pair = Pair::new();
    pair.post(A, 0, Op::WriteImm(PLACE, 1), 3 * MTU);
    let packets = pair.send_all(A);
    assert_eq!(pair.arrive_all(B, &packets), [Ok(()), Ok(()), Err(Discard::Busy)]);
    let told = pair.send_all(B);
    assert_eq!((psn(&told[0]), syndrome(&told[0])), (0x102, Syndrome::RnrNak(5)));
    pair.arrive(A, &told[0]).unwrap();
    pair.ends[B].host.add_receive(0, 0);
    pair.go_to(pair.next_deadline());
    assert_eq!(psns(&pair.pass(A)), [0x102], "it goes on from there");
    pair.assert_all_succeed(1);
    let mut pair = Pair::new();
    pair.post(A, 0, Op::Send, 3 * MTU);
    let packets = pair.send_all(A);
    let outcomes = pair.arrive_all(B, &packets);
    assert_eq!(outcomes, [Err(Discard::Busy), Err(Discard::Gap), Err(Discard::Gap)]);
}

#[test]
fn not_ready_said_twice_takes_one_try() {
    let mut pair = Pair::with(Terms { rnr_retry: 1, ..Terms::default() });
    pair.post(A, 0, Op::Send, 10);
    pair.send_all(A);
    for _ in 0..3 {
        pair.tell_ack(0x100, Syndrome::RnrNak(1)).unwrap();
    }
    assert_eq!(pair.ends[A].sent, []);
}

#[test]
fn not_ready_acknowledges_what_is_before_it() {
    let mut pair = Pair::with_receives(Terms::default(), 1);
    pair.post(A, 0, Op::Send, 10);
    pair.post(A, 1, Op::Atomic(PLACE, ADD), 8);
    pair.post(A, 2, Op::Send, 10);
    pair.exchange();
    assert_eq!(pair.ends[A].sent, [(0, Success), (1, Success)]);
    pair.ends[B].host.add_receive(1, 10);
    pair.assert_all_succeed(3);
}

#[test]
fn silence_after_waiting_for_a_receive_ends_too() {
    let mut pair = Pair::with(Terms { rnr_retry: 7, retry_count: 2, ..Terms::default() });
    pair.post(A, 0, Op::Send, 10);
    pair.exchange();
    let mut tries = 0;
    while pair.ends[A].sent.is_empty() {
        pair.go_to(pair.next_deadline());
        tries += pair.send_all(A).len();
    }
    assert_eq!((tries, &pair.ends[A].sent[..]), (3, &[(0, Status::RetryExceeded)][..]));
}

#[test]
fn packets_lost_but_once_each_do_no_harm() {
    for (op, len) in one_of_each(4) {
        let mut pair = Pair::with_receives(Terms::default(), 4);
        (0..4).for_each(|id| pair.post(A, id, op, len));
        let mut lost = std::collections::BTreeSet::new();
        while pair.ends[A].qp.outstanding() > 0 {
            let mut quiet = true;
            for from in [A, B] {
                for packet in pair.send_all(from) {
                    quiet = false;
                    if !lost.insert((from, psn(&packet))) {
                        let _ = pair.arrive(1 - from, &packet);
                    }
                }
            }
            if quiet {
                pair.go_to(pair.next_deadline());
            }
        }
        pair.assert_all_succeed(4);
    }
}

#[test]
fn progress_gives_the_tries_for_receives_back_too() {
    let mut pair = Pair::with(Terms { rnr_retry: 1, ..Terms::default() });
    for id in 0..4 {
        pair.post(A, id, Op::Send, 10);
        pair.exchange(); // takes the only try
        pair.ends[B].host.add_receive(id, 10);
        pair.assert_all_succeed(id + 1);
    }
}
