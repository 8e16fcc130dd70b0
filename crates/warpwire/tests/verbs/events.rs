//! Waking: who sleeps is woken when he asked for it, and only then.

use std::os::fd::AsFd;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use warpwire::mlx5::{Builder, Doorbell, DoorbellRecord, Opcode, Scratch};
use warpwire::verbs::{
    Completion, Cq, ProgressMode, QpAttributes, QpOptions, ReceiveRequest, SendRequest, State,
    Status, WrOp,
};

use crate::verbs::fixture::{Fixture, Kind, QpPair, TestQp, Testbed, connect, same, test_timeout};
use testkit::cases;

cases!(Fixture; CASES:
    sleepers_are_woken,
    guards_and_threads_move_bytes,
    ping_pong_without_lost_wakeups,
    several_sleep_on_one_queue,
    who_polls_and_then_sleeps_is_served_soon,
);
cases!(Fixture; ONCE:
    armed_before_or_after,
    solicited_only,
    the_file_descriptor,
    waits_and_late_entries_on_a_thread,
    an_idle_device_sleeps,
    a_doorbell_that_wakes_nobody,
);

/// A stream rings a device that has been at rest: it is seen, soon enough.
fn a_doorbell_that_wakes_nobody(fixture: &Fixture) {
    let testbed = fixture.with_progress(ProgressMode::Thread { spin: Duration::ZERO, core: None });
    let conn = testbed.join(QpOptions { poll_doorbell: true, ..QpOptions::default() });
    let QpPair { a: test_qp, .. } = &conn;
    let (memory, layout) = test_qp.qp.queues();
    let (bytes, mut scratch) = (memory.bytes(), Scratch::default());
    for (block, rest) in (0u16..).zip([0, 5, 300, 300]) {
        std::thread::sleep(Duration::from_millis(rest));
        test_qp.sends.arm(false).unwrap();
        let number = test_qp.qp.number();
        let entry = Builder::new(&mut scratch, Opcode::Nop, block, number).signaled();
        bytes.write(layout.send + u64::from(block) * 64, entry.finish().unwrap().bytes()).unwrap();
        let dbrec = u32::from_ne_bytes(DoorbellRecord::word(block + 1));
        bytes.store_u32(layout.dbrec + DoorbellRecord::SEND as u64, dbrec).unwrap();
        let doorbell = u64::from_ne_bytes(Doorbell::next(number, block + 1));
        bytes.store_u64(layout.doorbell, doorbell).unwrap();
        let start = Instant::now();
        assert!(test_qp.sends.wait(test_timeout()).unwrap(), "nobody saw it");
        // Once a second a thread at rest makes a step in any case.
        assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
        assert_eq!(drain(&test_qp.sends), 1);
    }
}

fn readable(fd: impl AsFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)).unwrap() == 1
}

fn drain(cq: &Cq) -> usize {
    let mut done = [Completion::EMPTY; 8];
    cq.poll(&mut done).unwrap()
}

fn armed_before_or_after(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let (qp, cq) = (&conn.a.qp, &conn.a.sends);
    let nop = |testbed: &Testbed| {
        qp.post_send(&[SendRequest::new(1, WrOp::Nop)]).unwrap();
        testbed.poll_for(Duration::from_millis(1));
    };
    nop(&testbed);
    assert!(!readable(cq), "nobody asked");
    assert_eq!(drain(cq), 1);
    for round in 0..10 {
        // Before the completion.
        cq.arm(false).unwrap();
        assert!(!readable(cq), "round {round}");
        nop(&testbed);
        assert!(readable(cq) && cq.wait(Duration::ZERO).unwrap() && !readable(cq));
        nop(&testbed);
        assert!(!readable(cq), "one event for each arming");
        // After it.
        cq.arm(false).unwrap();
        assert!(readable(cq) && cq.take_event() && !cq.take_event());
        assert_eq!(drain(cq), 2);
    }
    // Armed many times, read never.
    nop(&testbed);
    for _ in 0..9 {
        cq.arm(false).unwrap();
        assert!(cq.wait(Duration::ZERO).unwrap());
    }
    assert_eq!(drain(cq), 1);
    assert!(!cq.wait(Duration::from_millis(1)).unwrap());
}

fn solicited_only(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let (from, cq) = (&conn.a.qp, &conn.b.receives);
    for id in 0..20 {
        conn.b.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
    }
    let send = |request: SendRequest<'_>| {
        from.post_send(&[request]).unwrap();
        testbed.done(&conn.a.sends, request.id);
    };
    cq.arm(true).unwrap();
    send(SendRequest::new(1, WrOp::Send));
    assert!(!readable(cq), "not solicited");
    send(SendRequest::new(2, WrOp::Send).solicited());
    assert!(readable(cq) && cq.take_event());
    let (first, second) = (testbed.next(cq), testbed.next(cq));
    assert_eq!((first.solicited, second.solicited), (false, !testbed.b.is_device()));
    let far = fixture.memory(&testbed.b, Kind::Host, 4096, crate::verbs::fixture::ALL);
    cq.arm(true).unwrap();
    send(SendRequest::new(3, WrOp::WriteImm(far.mr.remote(0), [0; 4])).inline(b"x"));
    assert!(!readable(cq));
    send(SendRequest::new(4, WrOp::WriteImm(far.mr.remote(0), [0; 4])).inline(b"x").solicited());
    assert!(readable(cq) && cq.take_event());
    assert_eq!(drain(cq), 2);
    // An error always counts.
    cq.arm(true).unwrap();
    conn.b.qp.modify(&QpAttributes::new(State::Err)).unwrap();
    testbed.poll_for(Duration::from_millis(1));
    assert!(readable(cq));
    assert_eq!(testbed.next(cq).status, Status::Flushed);
}

fn the_file_descriptor(fixture: &Fixture) {
    let progress_mode = ProgressMode::Thread { spin: Duration::ZERO, core: None };
    let testbed = fixture.with_progress(progress_mode);
    let conn = testbed.join(QpOptions::default());
    let cq = &conn.b.receives;
    conn.b.qp.post_receive(&[ReceiveRequest { id: 3, data: &[] }]).unwrap();
    cq.arm(false).unwrap();
    conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Send)]).unwrap();
    let fd = cq.as_fd();
    let wait = Timespec { tv_sec: 10, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&wait)).unwrap(), 1);
    assert!(cq.take_event());
    assert_eq!(cq.next(test_timeout()).unwrap().unwrap().id, 3);
    // News have one too; rxe has none of this sort.
    if testbed.b.is_device() {
        return assert!(!readable(testbed.b.context.events()));
    }
    testbed.b.async_events();
    let events = testbed.b.context.events();
    assert!(!readable(events));
    conn.a
        .qp
        .post_send(&[SendRequest::new(
            1,
            WrOp::Write(warpwire::verbs::Remote { address: 0, rkey: 0 }),
        )
        .inline(b"x")])
        .unwrap();
    assert!(events.wait(test_timeout()).unwrap());
    assert_eq!(testbed.b.async_events().len(), 1);
    assert!(!readable(events));
}

/// Threads that sleep until they are woken, under either drive that wakes.
fn sleepers_are_woken(fixture: &Fixture) {
    for progress_mode in
        [ProgressMode::Auto, ProgressMode::Thread { spin: Duration::ZERO, core: None }]
    {
        let testbed = fixture.with_progress(progress_mode);
        let conn = testbed.join(QpOptions::default());
        conn.b.qp.post_receive(&[ReceiveRequest { id: 9, data: &[] }]).unwrap();
        let start = Instant::now();
        std::thread::scope(|scope| {
            let sleeper =
                scope.spawn(|| conn.b.receives.next(test_timeout()).unwrap().expect("it comes"));
            std::thread::sleep(Duration::from_millis(30));
            conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Send)]).unwrap();
            assert_eq!(sleeper.join().unwrap().id, 9);
        });
        assert!(
            start.elapsed() < Duration::from_millis(500),
            "{progress_mode:?}: {:?}",
            start.elapsed()
        );
        assert_eq!(conn.a.sends.next(test_timeout()).unwrap().unwrap().id, 1);
        assert!(conn.a.sends.next(Duration::from_millis(5)).unwrap().is_none());
    }
}

fn guards_and_threads_move_bytes(fixture: &Fixture) {
    let drives = [
        ProgressMode::Auto,
        ProgressMode::Thread { spin: Duration::ZERO, core: None },
        ProgressMode::Thread { spin: Duration::from_micros(100), core: Some(0) },
    ];
    for progress_mode in drives {
        let testbed = fixture.with_progress(progress_mode);
        let conn = testbed.join(QpOptions::default());
        let (near, far) = (fixture.host(&testbed.a, 1 << 21), fixture.host(&testbed.b, 1 << 21));
        let len = (1 << 20) + 77;
        let wanted = near.pattern(3, len, 4);
        let range = [near.mr.sge(3, len as u32)];
        let write = SendRequest::new(1, WrOp::Write(far.mr.remote(5))).with(&range);
        let read = SendRequest::new(2, WrOp::Read(far.mr.remote(5))).with(&range);
        conn.a.qp.post_send(&[write, read]).unwrap();
        for id in 1..=2 {
            let done = conn.a.sends.next(test_timeout()).unwrap().expect("it ends");
            assert_eq!((done.id, done.is_success()), (id, true), "{progress_mode:?}");
        }
        same(&far.read(5, len), &wanted, "a write with nobody polling there");
        same(&near.read(3, len), &wanted, "a read with nobody polling there");
    }
}

/// Two threads that only ever sleep on events: if one wake-up is lost, this stands still.
fn ping_pong_without_lost_wakeups(fixture: &Fixture) {
    const ROUNDS: u64 = 300;
    for progress_mode in
        [ProgressMode::Auto, ProgressMode::Thread { spin: Duration::from_micros(20), core: None }]
    {
        let testbed = fixture.with_progress(progress_mode);
        let conn = testbed.join(QpOptions::default());
        let QpPair { a, b } = &conn;
        for test_qp in [a, b] {
            for id in 0..16 {
                test_qp.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
            }
        }
        let wait = |cq: &Cq| {
            let start = Instant::now();
            let mut one = [Completion::EMPTY];
            loop {
                if cq.poll(&mut one).unwrap() == 1 {
                    assert!(one[0].is_success(), "{:?}", one[0]);
                    return;
                }
                cq.arm(false).unwrap();
                // A lost one would cost all of this time.
                cq.wait(Duration::from_secs(5)).unwrap();
                assert!(start.elapsed() < Duration::from_secs(4), "a wake-up was lost");
            }
        };
        std::thread::scope(|scope| {
            for (test_qp, begins) in [(a, true), (b, false)] {
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        if round > 0 || !begins {
                            wait(&test_qp.receives);
                            test_qp
                                .qp
                                .post_receive(&[ReceiveRequest { id: 0, data: &[] }])
                                .unwrap();
                        }
                        test_qp.qp.post_send(&[SendRequest::new(round, WrOp::Send)]).unwrap();
                        wait(&test_qp.sends);
                    }
                });
            }
        });
    }
}

/// A guard stays away while somebody polls; whoever goes to sleep after that must not wait for it to look again.
fn who_polls_and_then_sleeps_is_served_soon(fixture: &Fixture) {
    const ROUNDS: usize = 40;
    /// A guard that is not called comes after 2 ms.
    const LIMIT: Duration = Duration::from_micros(1500);
    let testbed = fixture.with_progress(ProgressMode::Auto);
    let conn = testbed.join(QpOptions::default());
    let QpPair { a, b } = &conn;
    for test_qp in [a, b] {
        for id in 0..16 {
            test_qp.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
        }
    }
    let next = |cq: &Cq| assert!(cq.next(test_timeout()).unwrap().unwrap().is_success());
    let send = |test_qp: &TestQp| {
        test_qp.qp.post_send(&[SendRequest::new(0, WrOp::Send)]).unwrap();
        next(&test_qp.sends);
    };
    let take = |test_qp: &TestQp| {
        next(&test_qp.receives);
        test_qp.qp.post_receive(&[ReceiveRequest { id: 0, data: &[] }]).unwrap();
    };
    let mut times = std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                take(b);
                // Longer than the other polls.
                std::thread::sleep(Duration::from_micros(200));
                send(b);
            }
        });
        let rounds = (0..ROUNDS).map(|_| {
            let start = Instant::now();
            send(a);
            take(a);
            start.elapsed()
        });
        rounds.collect::<Vec<_>>()
    });
    times.sort_unstable();
    let quarter = times[ROUNDS / 4];
    let any_thread = testkit::wakeup_time();
    if quarter >= LIMIT && any_thread > LIMIT / 4 {
        testkit::skip(&format!("the machine is busy: any thread wakes up after {any_thread:?}"));
    }
    assert!(quarter < LIMIT, "a quarter of the rounds took more than {quarter:?}");
}

/// A thread that has gone to sleep sees that a wait is over, and does not wait for ever for an entry that is torn.
fn waits_and_late_entries_on_a_thread(fixture: &Fixture) {
    let testbed = fixture.with_progress(ProgressMode::Thread { spin: Duration::ZERO, core: None });
    // A chain: each queue pair waits for the one before it, in the order in which that is worst.
    let all: Vec<_> = (0..6).map(|_| testbed.join(QpOptions::default())).collect();
    for pair in all.windows(2) {
        let wait = WrOp::Wait { cqn: pair[1].a.sends.number(), index: 0 };
        pair[0].a.qp.post_send(&[SendRequest::new(1, wait)]).unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    let start = Instant::now();
    all[5].a.qp.post_send(&[SendRequest::new(1, WrOp::Nop)]).unwrap();
    let done = all[0].a.sends.next(test_timeout()).unwrap().expect("the chain ends");
    assert!(done.is_success());
    assert!(start.elapsed() < Duration::from_millis(300), "{:?}", start.elapsed());
    // The doorbell promises an entry that never comes.
    let qp = &all[5].a.qp;
    let (memory, layout) = qp.queues();
    let doorbell = warpwire::mlx5::Doorbell::next(qp.number(), 3);
    memory.bytes().store_u64(layout.doorbell, u64::from_ne_bytes(doorbell)).unwrap();
    let start = Instant::now();
    testbed.a.context.hca().ring(qp.number());
    all[5].a.sends.next(test_timeout()).unwrap().expect("the first one's");
    let done = all[5].a.sends.next(test_timeout()).unwrap().expect("an end");
    assert_eq!(done.status, Status::LocalQpOperation);
    assert!(start.elapsed() < Duration::from_millis(300), "{:?}", start.elapsed());
}

/// With nothing to do, a device makes a few steps a second at most, and a sleeper's time ends when it should.
fn an_idle_device_sleeps(fixture: &Fixture) {
    for progress_mode in
        [ProgressMode::Auto, ProgressMode::Thread { spin: Duration::ZERO, core: None }]
    {
        let testbed = fixture.with_progress(progress_mode);
        let one = testbed.test_qp(&testbed.a, QpOptions::default());
        let two = testbed.test_qp(&testbed.b, QpOptions::default());
        connect(&one.qp, &two.qp);
        std::thread::sleep(Duration::from_millis(20));
        let before = testbed.a.context.stats().steps;
        std::thread::sleep(Duration::from_millis(200));
        let steps = testbed.a.context.stats().steps - before;
        assert!(steps < 20, "{progress_mode:?}: {steps} steps");
        assert!(!one.sends.wait(Duration::from_millis(2)).unwrap());
    }
}

/// Three threads wait for completions of one queue: each completion wakes somebody, also when one event stood for two.
fn several_sleep_on_one_queue(fixture: &Fixture) {
    const MESSAGES: u64 = 200;
    let testbed = fixture.with_progress(ProgressMode::Auto);
    let conn = testbed.join(QpOptions { receive_depth: 256, ..QpOptions::default() });
    for id in 0..MESSAGES + 3 {
        conn.b.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
    }
    let left = AtomicU64::new(MESSAGES);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                // The last ones are woken by three more messages.
                while left.load(Ordering::Relaxed) > 0 {
                    let start = Instant::now();
                    let done = conn.b.receives.next(Duration::from_secs(5)).unwrap();
                    assert!(done.is_some_and(|done| done.is_success()), "a wake-up was lost");
                    assert!(start.elapsed() < Duration::from_secs(4));
                    let _ = left
                        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
                }
            });
        }
        for round in 0..MESSAGES / 2 {
            let two =
                [SendRequest::new(0, WrOp::Send).unsignaled(), SendRequest::new(1, WrOp::Send)];
            conn.a.qp.post_send(&two).unwrap();
            for _ in 0..2 {
                conn.a.sends.next(test_timeout()).unwrap().expect("it ends");
            }
            if round % 4 == 0 {
                std::thread::sleep(Duration::from_micros(300)); // all are asleep
            }
        }
        for _ in 0..3 {
            conn.a.qp.post_send(&[SendRequest::new(9, WrOp::Send)]).unwrap();
        }
    });
}
