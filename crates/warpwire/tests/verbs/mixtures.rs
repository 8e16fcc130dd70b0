//! Concurrency: loopback connections, many outstanding reads, both directions, several threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use warpwire::verbs::{
    Atomic, Completion, Mtu, PostError, ProgressMode, QpOptions, ReceiveRequest, SendRequest,
    Status, WrOp,
};

use crate::verbs::fixture::{Fixture, Kind, connect, same, test_timeout};
use testkit::cases;

cases!(Fixture; CASES:
    a_device_talks_to_itself,
    many_outstanding_reads_and_atomics,
    both_directions_at_once,
    threads_share_a_queue_pair,
);
cases!(Fixture; ONCE: memory_that_moves, small_transfers_are_not_starved);

/// Two connected queue pairs of one device, and one connected to itself.
fn a_device_talks_to_itself(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let end = &testbed.a;
    let (one, two) =
        (testbed.test_qp(end, QpOptions::default()), testbed.test_qp(end, QpOptions::default()));
    connect(&one.qp, &two.qp);
    let self_connected = testbed.test_qp(end, QpOptions::default());
    self_connected.qp.connect(&self_connected.qp.endpoint()).unwrap();
    let memory = fixture.host(end, 1 << 17);
    let wanted = memory.pattern(0, 50_000, 1);
    for (from, to) in [(&one, &two), (&two, &one), (&self_connected, &self_connected)] {
        memory.write(60_000, &vec![0; 50_000]);
        to.qp
            .post_receive(&[ReceiveRequest { id: 4, data: &[memory.mr.sge(60_000, 50_000)] }])
            .unwrap();
        let data = [memory.mr.sge(0, 50_000)];
        let word = [memory.mr.sge(120_000, 8)];
        let add = WrOp::Atomic(memory.mr.remote(120_008), Atomic::FetchAdd { add: 1 });
        let work = [
            SendRequest::new(1, WrOp::Send).with(&data),
            SendRequest::new(2, WrOp::Read(memory.mr.remote(60_000))).with(&data),
            SendRequest::new(3, add).with(&word),
        ];
        from.qp.post_send(&work).unwrap();
        for id in 1..=3 {
            testbed.done(&from.sends, id);
        }
        testbed.done(&to.receives, 4);
        same(&memory.read(0, 50_000), &wanted, "data sent and read back");
    }
    assert_eq!(memory.word(120_008), 3);
}

/// More reads and atomics than `max_rd_atomic`, with NOPs between them: each response is matched to
/// its request.
fn many_outstanding_reads_and_atomics(fixture: &Fixture) {
    for max_rd_atomic in [1, 2, 16] {
        let testbed = fixture.testbed();
        let options = QpOptions::default().with_max_rd_atomic(max_rd_atomic);
        let conn = testbed.join(options);
        let (near, far) = (fixture.host(&testbed.a, 1 << 20), fixture.host(&testbed.b, 1 << 20));
        let wanted = far.pattern(0, 100 * 9000, 3);
        for n in 0..100u64 {
            let (at, len) = (n * 9000, 1 + n as u32 * 89);
            let read = WrOp::Read(far.mr.remote(at));
            let add = WrOp::Atomic(far.mr.remote(1_000_000), Atomic::FetchAdd { add: n });
            let (into, word) = ([near.mr.sge(at, len)], [near.mr.sge(1_000_000 + n * 8, 8)]);
            let request = if n % 5 == 4 {
                SendRequest::new(n, add).with(&word)
            } else {
                SendRequest::new(n, read).with(&into)
            };
            conn.a.qp.post_send(&[request]).unwrap();
            if n % 7 == 0 {
                conn.a.qp.post_send(&[SendRequest::new(n, WrOp::Nop)]).unwrap();
            }
        }
        let mut sum = 0;
        for n in 0..100u64 {
            testbed.done(&conn.a.sends, n);
            if n % 7 == 0 {
                testbed.done(&conn.a.sends, n);
            }
            let (at, len) = (n * 9000, 1 + n as usize * 89);
            if n % 5 == 4 {
                assert_eq!(near.word(1_000_000 + n * 8), sum);
                sum += n;
            } else {
                same(&near.read(at, len), &wanted[at as usize..][..len], &format!("read {n}"));
            }
        }
    }
}

/// Both ends are requester and responder of large transfers at the same time.
fn both_directions_at_once(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let ends = [&testbed.a, &testbed.b];
    let memory = ends.map(|end| fixture.host(end, 1 << 20));
    let half = 1 << 19;
    let wanted = [0, 1].map(|n: usize| memory[n].pattern(0, half, n as u64));
    for (n, test_qp) in [&conn.a, &conn.b].into_iter().enumerate() {
        let data = [memory[n].mr.sge(0, half as u32)];
        let write =
            SendRequest::new(1, WrOp::Write(memory[1 - n].mr.remote(half as u64))).with(&data);
        let read = SendRequest::new(2, WrOp::Read(memory[1 - n].mr.remote(0))).with(&data);
        use warpwire::verbs::Fence;
        let strongest_fence =
            if fixture.test_link.has_device() { Fence::Reads } else { Fence::All };
        test_qp.qp.post_send(&[write, read.fenced(strongest_fence)]).unwrap();
    }
    for test_qp in [&conn.a, &conn.b] {
        testbed.done(&test_qp.sends, 1);
    }
    for n in 0..2 {
        same(&memory[n].read(half as u64, half), &wanted[1 - n], "data written by the peer");
    }
    for test_qp in [&conn.a, &conn.b] {
        testbed.done(&test_qp.sends, 2);
    }
}

/// Threads concurrently post to one queue pair and poll one completion queue: no completion is lost
/// or reported twice.
fn threads_share_a_queue_pair(fixture: &Fixture) {
    const EACH: u64 = 300;
    for progress_mode in [ProgressMode::Auto, ProgressMode::Manual] {
        let testbed = fixture.with_progress(progress_mode);
        let conn = testbed.join(QpOptions::default().with_send_depth(16).with_timeout(17));
        let far = fixture.host(&testbed.b, 4096);
        let near = fixture.host(&testbed.a, 4096);
        let seen: Vec<AtomicU64> = (0..4 * EACH).map(|_| AtomicU64::new(0)).collect();
        let left = AtomicU64::new(4 * EACH);
        let start = Instant::now();
        let poll = || {
            let mut done = [Completion::EMPTY; 4];
            let count = conn.a.sends.poll(&mut done).unwrap();
            for done in &done[..count] {
                assert!(done.is_success(), "{done:?}");
                seen[done.id as usize].fetch_add(1, Ordering::Relaxed);
                left.fetch_sub(1, Ordering::Relaxed);
            }
            testbed.b.context.soft().map(|hca| hca.poll().unwrap());
            assert!(start.elapsed() < test_timeout());
        };
        std::thread::scope(|scope| {
            for n in 0..4 {
                let (conn, near, far, poll) = (&conn, &near, &far, &poll);
                scope.spawn(move || {
                    for turn in 0..EACH {
                        let add = WrOp::Atomic(far.mr.remote(0), Atomic::FetchAdd { add: 1 });
                        let data = [near.mr.sge(n * 8, 8)];
                        let request = SendRequest::new(n * EACH + turn, add).with(&data);
                        while let Err(why) = conn.a.qp.post_send(&[request]) {
                            assert_eq!(why, PostError::Full);
                            poll();
                        }
                    }
                });
            }
            scope.spawn(|| {
                while left.load(Ordering::Relaxed) > 0 {
                    poll();
                }
            });
        });
        assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        assert_eq!(far.word(0), 4 * EACH);
    }
}

/// Device memory is relocated during transfers: they wait for it, and no byte is wrong.
fn memory_that_moves(fixture: &Fixture) {
    let control = fixture.control();
    for kind in [Kind::Window, Kind::Engine, Kind::Staged] {
        let testbed = fixture.testbed();
        let conn = testbed.join(QpOptions::default());
        let near = fixture.memory(&testbed.a, kind, 1 << 20, crate::verbs::fixture::ALL);
        let far = fixture.memory(&testbed.b, kind, 1 << 20, crate::verbs::fixture::ALL);
        for round in 0..6u64 {
            let len = 900_000 + round as u32;
            let wanted = near.pattern(0, len as usize, round);
            let data = [near.mr.sge(0, len)];
            let write = SendRequest::new(1, WrOp::Write(far.mr.remote(round))).with(&data);
            let read = SendRequest::new(2, WrOp::Read(far.mr.remote(round))).with(&data);
            conn.a.qp.post_send(&[write, read]).unwrap();
            let mut one = [Completion::EMPTY];
            let (mut done, mut turn) = (0, false);
            let start = Instant::now();
            while done < 2 {
                (0..3).for_each(|_| testbed.step());
                turn = !turn;
                let moves = if turn { &near } else { &far };
                control.relocate(moves.allocation()).unwrap();
                if conn.a.sends.poll(&mut one).unwrap() == 1 {
                    assert_eq!(one[0].status, Status::Success);
                    done += 1;
                }
                assert!(start.elapsed() < test_timeout());
            }
            same(&far.read(round, len as usize), &wanted, "a write to memory that moves");
            same(&near.read(0, len as usize), &wanted, "a read into memory that moves");
        }
    }
}

/// A large transfer does not block small ones (no head-of-line blocking between queue pairs).
fn small_transfers_are_not_starved(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let options = || QpOptions::default().with_mtu(Mtu::new(1024));
    let (large, small) = (testbed.join(options()), testbed.join(options()));
    let (near, far) = (fixture.host(&testbed.a, 16 << 20), fixture.host(&testbed.b, 16 << 20));
    let data = [near.mr.sge(0, 16 << 20)];
    large
        .a
        .qp
        .post_send(&[SendRequest::new(1, WrOp::Write(far.mr.remote(0))).with(&data)])
        .unwrap();
    for id in 0..20 {
        small
            .a
            .qp
            .post_send(&[SendRequest::new(id, WrOp::Write(far.mr.remote(0))).inline(b"x")])
            .unwrap();
        testbed.done(&small.a.sends, id);
    }
    let mut one = [Completion::EMPTY];
    assert_eq!(
        large.a.sends.poll(&mut one).unwrap(),
        0,
        "the large write completed before twenty small ones"
    );
    testbed.done(&large.a.sends, 1);
    testbed.poll_for(Duration::ZERO);
}
