//! Every failure releases the waiting streams and is reported with its cause.

use std::time::{Duration, Instant};

use warpwire::error::Kind;
use warpwire::mem::Condition;
use warpwire::stream::Descriptors;
use warpwire::verbs::{QpOptions, Remote, SendRequest, Status, WrOp};

use crate::stream::fixture::*;
use testkit::cases;

cases!(Fixture; CASES:
    an_error_completion_releases_the_stream,
    work_posted_after_a_failure_is_flushed,
    a_lost_peer_releases_sending_streams,
    a_silent_peer_releases_receiving_streams,
    the_timeout_starts_when_the_stream_reaches_the_wait,
    streams_that_wait_for_each_other_are_released,
    a_dropped_queue_pair_releases_its_streams,
    an_aborted_queue_pair_releases_its_streams,
);

fn an_error_completion_releases_the_stream(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, b] = fixture.pair(&testbed);
    let (near, far) = (fixture.memory(&testbed.a, 64), fixture.memory(&testbed.b, 64));
    let (stream, other) = (fixture.stream(), fixture.stream());
    post_receives(&b, &far, 1, 8);
    b.wait_receive(&other).unwrap();
    let nowhere = Remote { address: 0x10, rkey: 0x00de_ad00 };
    let request = SendRequest::new(77, WrOp::Write(nowhere));
    let ticket = a.queue(&stream, &request.with(&[near.sge(0, 8)])).unwrap();
    a.wait_send(&stream, ticket).unwrap();
    sync(&stream);
    let failure = a.failure().expect("the write failed");
    assert_eq!(failure.status, Some(Status::RemoteAccess), "{failure}");
    assert_eq!((failure.id, failure.ticket), (Some(77), Some(ticket)));
    // The peer's queue pair fails as well, and streams that wait there are released.
    sync(&other);
    assert!(b.failure().is_some());
    // Further work is refused for the same reason.
    let refused = a.queue(&stream, &nop(1)).unwrap_err();
    assert_eq!(refused.to_string(), failure.error.to_string());
    // The failed completion can be polled.
    let done = next(&a);
    assert_eq!((done.id, done.status), (77, Status::RemoteAccess));
    // Waits for completed work still return immediately.
    a.wait_send(&stream, ticket).unwrap();
    sync(&stream);
}

fn work_posted_after_a_failure_is_flushed(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, _b] = fixture.pair(&testbed);
    let near = fixture.memory(&testbed.a, 64);
    let streams = [fixture.stream(), fixture.stream(), fixture.stream()];
    let [begin, gate] = [(); 2].map(|()| fixture.word64());
    let nowhere = Remote { address: 0x10, rkey: 0x00de_ad00 };
    let bad = SendRequest::new(1, WrOp::Write(nowhere));
    // Nothing can be queued after the failure.
    streams[0].wait_value(&begin, Condition::AtLeast, 1).unwrap();
    a.queue(&streams[0], &bad.with(&[near.sge(0, 8)])).unwrap();
    // The second stream has not reached its request when the first request fails.
    streams[1].wait_value(&gate, Condition::AtLeast, 1).unwrap();
    let late = a.queue(&streams[1], &nop(2)).unwrap();
    let last = a.queue(&streams[2], &nop(3)).unwrap();
    a.wait_send(&streams[0], late).unwrap();
    a.wait_send(&streams[2], last).unwrap();
    begin.store(1).unwrap();
    sync(&streams[0]);
    let failure = a.failure().unwrap();
    assert_eq!(failure.id, Some(1), "{failure}");
    gate.store(1).unwrap();
    streams.iter().for_each(sync);
    let all: Vec<_> = (0..3).map(|_| next(&a)).map(|done| (done.id, done.status)).collect();
    let flushed = Status::Flushed;
    assert_eq!(all, [(1, Status::RemoteAccess), (2, flushed), (3, flushed)]);
}

fn short_retries() -> QpOptions {
    // 4.096 µs · 2^10 per transmission, three transmissions.
    QpOptions::default().with_timeout(10).with_retry_count(2)
}

fn a_lost_peer_releases_sending_streams(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let options = fixture.options().with_qp(short_retries());
    let [a, b] = fixture.pair_with(&testbed, &options);
    let near = fixture.memory(&testbed.a, 64);
    post_receives(&a, &near, 2, 8);
    drop((b, testbed.b));
    let streams = [fixture.stream(), fixture.stream(), fixture.stream()];
    let ticket = a.queue(&streams[0], &SendRequest::new(5, WrOp::Send).inline(&[1; 8])).unwrap();
    a.wait_send(&streams[0], ticket).unwrap();
    a.wait_send(&streams[1], ticket).unwrap();
    a.wait_receive(&streams[2]).unwrap();
    streams.iter().for_each(sync);
    let failure = a.failure().unwrap();
    assert_eq!(failure.status, Some(Status::RetryExceeded), "{failure}");
    assert_eq!(failure.id, Some(5));
    assert!(failure.to_string().contains("peer"), "{failure}");
}

fn a_silent_peer_releases_receiving_streams(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let wait_timeout = Duration::from_secs(1);
    let options = fixture.options().with_wait_timeout(wait_timeout);
    let [a, b] = fixture.pair_with(&testbed, &options);
    let near = fixture.memory(&testbed.a, 64);
    post_receives(&a, &near, 2, 8);
    drop((b, testbed.b));
    let streams = [fixture.stream(), fixture.stream()];
    let start = Instant::now();
    a.wait_receive(&streams[0]).unwrap();
    let second = a.wait_receive(&streams[1]).unwrap();
    streams.iter().for_each(sync);
    assert!(start.elapsed() >= wait_timeout, "{:?}", start.elapsed());
    let failure = a.failure().unwrap();
    assert_eq!(failure.error.kind(), &Kind::Timeout, "{failure}");
    assert_eq!(failure.waiters.len(), 2, "{failure}");
    let waiter = failure.waiters.iter().find(|waiter| waiter.ticket == second).unwrap();
    assert_eq!(waiter.stream, streams[1].label());
    assert!(waiter.waited.is_some_and(|waited| waited >= wait_timeout / 2), "{failure}");
    for _ in 0..2 {
        assert_eq!(next(&a).status, Status::Flushed);
    }
}

fn the_timeout_starts_when_the_stream_reaches_the_wait(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let wait_timeout = Duration::from_millis(1500);
    let options = fixture.options().with_wait_timeout(wait_timeout);
    let [a, b] = fixture.pair_with(&testbed, &options);
    let near = fixture.memory(&testbed.a, 64);
    post_receives(&a, &near, 1, 8);
    let (stream, gate) = (fixture.stream(), fixture.word64());
    stream.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    a.wait_receive(&stream).unwrap();
    // Longer than the timeout, but the stream has not reached the wait yet.
    std::thread::sleep(wait_timeout + Duration::from_millis(300));
    assert!(a.failure().is_none());
    gate.store(1).unwrap();
    assert_blocked(&stream);
    b.post_now(&SendRequest::new(1, WrOp::Send).inline(&[1; 8])).unwrap();
    sync(&stream);
    assert!(a.failure().is_none());
}

fn streams_that_wait_for_each_other_are_released(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let wait_timeout = Duration::from_millis(200);
    let options = fixture.options().with_wait_timeout(wait_timeout);
    let [a, _b] = fixture.pair_with(&testbed, &options);
    let (first, second, gate) = (fixture.stream(), fixture.stream(), fixture.word64());
    // A deadlock: the first stream waits for a request of the second, which waits for a word that
    // the first writes afterwards.
    second.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    let ticket = a.queue(&second, &nop(1)).unwrap();
    let mut list = Descriptors::on(&first);
    list.wait_send(&a, ticket).unwrap();
    list.write_value(&gate, 1).unwrap();
    list.post().unwrap();
    sync(&first);
    sync(&second);
    let failure = a.failure().unwrap();
    assert_eq!(failure.error.kind(), &Kind::Timeout, "{failure}");
    assert_eq!(failure.waiters[0].stream, first.label());
}

fn a_dropped_queue_pair_releases_its_streams(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, _b] = fixture.pair(&testbed);
    let near = fixture.memory(&testbed.a, 64);
    post_receives(&a, &near, 2, 8);
    let (waiting, later, gate) = (fixture.stream(), fixture.stream(), fixture.word64());
    a.wait_receive(&waiting).unwrap();
    later.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    let ticket = a.queue(&later, &nop(1)).unwrap();
    a.wait_send(&later, ticket).unwrap();
    a.wait_receive(&later).unwrap();
    assert_blocked(&waiting);
    drop(a);
    sync(&waiting);
    // This stream reaches its waits after the queue pair was dropped.
    gate.store(1).unwrap();
    sync(&later);
}

fn an_aborted_queue_pair_releases_its_streams(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, _b] = fixture.pair(&testbed);
    let near = fixture.memory(&testbed.a, 64);
    post_receives(&a, &near, 1, 8);
    let stream = fixture.stream();
    let ticket = a.wait_receive(&stream).unwrap();
    assert_blocked(&stream);
    a.abort();
    sync(&stream);
    let failure = a.failure().unwrap();
    assert!(failure.to_string().contains("the application aborted"), "{failure}");
    assert_eq!(failure.waiters[0].ticket, ticket);
    a.abort();
}
