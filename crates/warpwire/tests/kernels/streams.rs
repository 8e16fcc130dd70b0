//! Work and waits that a stream executes, and graphs of them.

use std::time::{Duration, Instant};

use warpwire::error::Kind;
use warpwire::stream::kernel::{KernelStatus, SignalWait};
use warpwire::verbs::{Remote, Status};

use crate::kernels::fixture::{Fixture, WORD, bytes, short_timeouts, test_timeout};
use testkit::{Effort, cases};

cases!(Fixture; CASES:
    every_call_from_a_stream,
    graphs_replay_as_new_work,
    graphs_of_messages_replay,
    signals_of_32_bits_wrap,
    a_failure_releases_the_stream_and_is_kept,
    a_timeout_releases_the_stream_and_is_kept,
    a_dead_peer_releases_the_stream,
    many_streams_share_a_queue_pair,
);

fn every_call_from_a_stream(fixture: &Fixture) {
    let [a, b] = fixture.ends();
    let (sent, fetched) = (bytes(4096, 3), bytes(4096, 4));
    a.memory.write(0, &sent).unwrap();
    b.memory.write(16384, &fetched).unwrap();
    let [out, back] = [fixture.gpu.stream().unwrap(), fixture.gpu.stream().unwrap()];
    let arrivals = fixture.gpu.alloc(64).unwrap();
    for number in 0..3 {
        b.qp.post_receive_on_stream(&back, b.mr.sge(32768 + 256 * number, 256)).unwrap();
    }
    for number in 0..3 {
        let message = arrivals.region(number * 16, 16).unwrap();
        b.qp.receive_on_stream(&back, Some(&message)).unwrap();
    }
    let word = b.mr.remote(WORD);
    a.qp.put_on_stream(&out, b.mr.remote(0), a.mr.sge(0, 4096)).unwrap();
    a.qp.put_signal_on_stream(&out, b.mr.remote(8192), a.mr.sge(0, 64), word, 5).unwrap();
    a.qp.get_on_stream(&out, a.mr.sge(16384, 4096), b.mr.remote(16384)).unwrap();
    a.qp.fetch_add_on_stream(&out, word, 7, Some(a.mr.sge(24576, 8))).unwrap();
    a.qp.compare_swap_on_stream(&out, word, [12, 99], Some(a.mr.sge(24584, 8))).unwrap();
    a.qp.fetch_add_on_stream(&out, word, 1, None).unwrap();
    a.qp.compare_swap_on_stream(&out, word, [1, 2], None).unwrap();
    a.qp.send_on_stream(&out, a.mr.sge(0, 100)).unwrap();
    a.qp.send_imm_on_stream(&out, a.mr.sge(0, 50), 77).unwrap();
    a.qp.put_imm_on_stream(&out, b.mr.remote(12288), a.mr.sge(0, 16), 88).unwrap();
    a.qp.wait_on_stream(&out).unwrap();
    out.synchronize(test_timeout()).unwrap();
    back.synchronize(test_timeout()).unwrap();
    a.qp.check().unwrap();
    b.qp.check().unwrap();
    assert_eq!((b.read(0, 4096), b.read(8192, 64)), (sent.clone(), sent[..64].to_vec()));
    assert_eq!((a.read(16384, 4096), b.read(32768, 100)), (fetched, sent[..100].to_vec()));
    assert_eq!((a.read64(24576), a.read64(24584), b.word()), (5, 12, 100));
    let mut words = [0; 48];
    arrivals.read(0, &mut words).unwrap();
    let words: Vec<u32> =
        words.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
    assert_eq!(words, [100, 0, 0, 0, 50, 77, 1, 0, 16, 88, 1, 0]);
}

/// Number of replays of a graph.
fn rounds() -> u64 {
    Effort::choose([1000, 2000, 100_000])
}

fn graphs_replay_as_new_work(fixture: &Fixture) {
    let [a, b] = fixture.ends();
    let [out, back] = [fixture.gpu.stream().unwrap(), fixture.gpu.stream().unwrap()];
    let own = |end: &crate::kernels::fixture::Endpoint| end.memory.word64(WORD).unwrap();
    let (at_b, at_a) =
        (SignalWait::new(&own(&b), 0, 3).unwrap(), SignalWait::new(&own(&a), 0, 1).unwrap());
    // Ping-pong, so that neither side runs ahead.
    let ping = out.capture(|stream| {
        a.qp.put_signal_on_stream(stream, b.mr.remote(0), a.mr.sge(0, 8), b.mr.remote(WORD), 3)?;
        a.qp.wait_signal_on_stream(stream, &at_a)
    });
    let pong = back.capture(|stream| {
        b.qp.wait_signal_on_stream(stream, &at_b)?;
        b.qp.put_signal_on_stream(stream, a.mr.remote(8), b.mr.sge(0, 8), a.mr.remote(WORD), 1)
    });
    let (ping, pong) = (ping.unwrap(), pong.unwrap());
    assert_eq!((ping.len(), pong.len()), (2, 2));
    a.memory.write(0, &0xabcd_u64.to_le_bytes()).unwrap();
    let rounds = rounds();
    for _ in 0..rounds {
        out.replay(&ping).unwrap();
        back.replay(&pong).unwrap();
    }
    out.synchronize(test_timeout() * 6).unwrap();
    back.synchronize(test_timeout()).unwrap();
    a.qp.check().unwrap();
    b.qp.check().unwrap();
    assert_eq!((b.word(), a.word()), (3 * rounds, rounds));
    assert_eq!((b.read64(0), a.read64(8)), (0xabcd, 0xabcd));
    for end in [&a, &b] {
        assert_eq!(end.qp.progress().unwrap().posted, 2 * rounds);
    }
}

fn graphs_of_messages_replay(fixture: &Fixture) {
    let [a, b] = fixture.ends();
    let [out, back] = [fixture.gpu.stream().unwrap(), fixture.gpu.stream().unwrap()];
    let rounds = rounds() / 10;
    let send = out.capture(|stream| {
        a.qp.send_imm_on_stream(stream, a.mr.sge(0, 16), 5)?;
        a.qp.wait_on_stream(stream)
    });
    let receive = back.capture(|stream| {
        b.qp.post_receive_on_stream(stream, b.mr.sge(0, 64))?;
        b.qp.receive_on_stream(stream, None)
    });
    let (send, receive) = (send.unwrap(), receive.unwrap());
    for _ in 0..rounds {
        back.replay(&receive).unwrap();
        out.replay(&send).unwrap();
    }
    out.synchronize(test_timeout() * 3).unwrap();
    back.synchronize(test_timeout() * 3).unwrap();
    a.qp.check().unwrap();
    b.qp.check().unwrap();
    assert_eq!(a.qp.progress().unwrap().posted, rounds);
    assert_eq!(b.qp.progress().unwrap().receives_posted, rounds);
}

fn signals_of_32_bits_wrap(fixture: &Fixture) {
    let [a, b] = fixture.ends();
    let [out, back] = [fixture.gpu.stream().unwrap(), fixture.gpu.stream().unwrap()];
    let start = u32::MAX - 1;
    b.memory.write(WORD, &start.to_le_bytes()).unwrap();
    let narrow = b.memory.word32(WORD).unwrap();
    let signal = SignalWait::new(&narrow, start.into(), 1).unwrap();
    for round in 1..=4_u32 {
        a.memory.write(0, &start.wrapping_add(round).to_le_bytes()).unwrap();
        b.qp.wait_signal_on_stream(&back, &signal).unwrap();
        assert!(back.synchronize(Duration::from_millis(5)).is_err());
        a.qp.put_on_stream(&out, b.mr.remote(WORD), a.mr.sge(0, 4)).unwrap();
        back.synchronize(test_timeout()).unwrap();
        out.synchronize(test_timeout()).unwrap();
    }
    b.qp.check().unwrap();
}

fn a_failure_releases_the_stream_and_is_kept(fixture: &Fixture) {
    let [a, b] = fixture.ends();
    let stream = fixture.gpu.stream().unwrap();
    let good = b.mr.remote(0);
    let bad = Remote { rkey: good.rkey ^ 0x100, ..good };
    a.qp.put_on_stream(&stream, good, a.mr.sge(0, 8)).unwrap();
    a.qp.put_on_stream(&stream, bad, a.mr.sge(0, 8)).unwrap();
    a.qp.wait_on_stream(&stream).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    let progress = a.qp.progress().unwrap();
    assert_eq!(progress.failure, Some((1, Status::RemoteAccess)));
    assert_eq!(
        progress.stream_failure,
        Some(("wait for completion", KernelStatus::Failed(Status::RemoteAccess)))
    );
    let error = a.qp.check().unwrap_err();
    assert_eq!(error.kind(), &Kind::StreamFailed, "{error}");
    // Later work ends immediately, and the first cause is kept.
    a.qp.put_on_stream(&stream, good, a.mr.sge(0, 8)).unwrap();
    a.qp.wait_on_stream(&stream).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(a.qp.progress().unwrap().stream_failure, progress.stream_failure);
}

fn a_timeout_releases_the_stream_and_is_kept(fixture: &Fixture) {
    let wait_timeout = Duration::from_millis(30);
    let [a, b] = fixture.ends_with(fixture.options().with_wait_timeout(wait_timeout));
    let stream = fixture.gpu.stream().unwrap();
    let signal = SignalWait::new(&b.memory.word64(WORD).unwrap(), 0, 1).unwrap();
    b.qp.wait_signal_on_stream(&stream, &signal).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    let error = b.qp.check().unwrap_err();
    assert_eq!(error.kind(), &Kind::Timeout, "{error}");
    assert!(error.to_string().contains("wait for a signal"), "{error}");
    let receive = a.qp.receive_on_stream(&stream, None);
    receive.unwrap();
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(
        a.qp.progress().unwrap().stream_failure,
        Some(("wait for a message", KernelStatus::Timeout))
    );
}

fn a_dead_peer_releases_the_stream(fixture: &Fixture) {
    let options = fixture.options().with_connection(short_timeouts());
    let [a, b] = fixture.ends_with(options);
    let remote = b.mr.remote(0);
    drop(b);
    let (stream, start) = (fixture.gpu.stream().unwrap(), Instant::now());
    // More than the queue holds: posts that wait for room are released too.
    for _ in 0..40 {
        a.qp.put_on_stream(&stream, remote, a.mr.sge(0, 8)).unwrap();
    }
    a.qp.wait_on_stream(&stream).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    assert!(start.elapsed() < test_timeout() / 2, "{:?}", start.elapsed());
    assert_eq!(a.qp.progress().unwrap().failure, Some((0, Status::RetryExceeded)));
}

fn many_streams_share_a_queue_pair(fixture: &Fixture) {
    const STREAMS: usize = 6;
    const EACH: usize = 150;
    let [a, b] = fixture.ends();
    let streams: Vec<_> = (0..STREAMS).map(|_| fixture.gpu.stream().unwrap()).collect();
    for _ in 0..EACH {
        for stream in &streams {
            a.qp.fetch_add_on_stream(stream, b.mr.remote(WORD), 1, None).unwrap();
        }
    }
    for stream in &streams {
        a.qp.wait_on_stream(stream).unwrap();
        stream.synchronize(test_timeout()).unwrap();
    }
    a.qp.check().unwrap();
    assert_eq!(b.word(), (STREAMS * EACH) as u64);
}
