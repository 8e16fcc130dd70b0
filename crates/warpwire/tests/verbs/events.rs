//! Completion events and wake-ups: a thread is woken if it armed the queue, and only then.

use std::os::fd::AsFd;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use warpwire::mlx5::{Builder, Doorbell, DoorbellRecord, Scratch, WqeOpcode};
use warpwire::verbs::{
    Completion, Cq, ProgressMode, QpAttributes, QpOptions, ReceiveRequest, SendRequest, State,
    Status, WrOp,
};

use crate::verbs::fixture::{Fixture, Kind, QpPair, TestQp, Testbed, connect, same, test_timeout};
use testkit::{cases, once_within, until};

cases!(Fixture; CASES:
    waiting_threads_are_woken,
    fallback_and_engine_threads_move_bytes,
    ping_pong_without_lost_wakeups,
    several_threads_wait_on_one_queue,
    a_poller_that_goes_to_sleep_is_served_soon,
);
cases!(Fixture; ONCE:
    armed_before_or_after,
    events_taken_before_there_are_any,
    solicited_only,
    the_file_descriptor,
    waits_and_late_wqes_on_a_thread,
    an_idle_device_sleeps,
    a_polled_doorbell_is_noticed,
);

/// A doorbell store to an idle device, as from a stream, is noticed within the polling interval.
fn a_polled_doorbell_is_noticed(fixture: &Fixture) {
    let testbed = fixture.with_progress(ProgressMode::Thread { spin: Duration::ZERO, core: None });
    let conn = testbed.join(QpOptions::default().with_poll_doorbell(true));
    let QpPair { a: test_qp, .. } = &conn;
    let (memory, layout) = test_qp.qp.queues().unwrap();
    let (bytes, mut scratch) = (memory.bytes(), Scratch::default());
    let mut blocks = 0u16..;
    let mut notice = || {
        let block = blocks.next().unwrap();
        test_qp.sends.arm(false).unwrap();
        let number = test_qp.qp.number();
        let entry = Builder::new(&mut scratch, WqeOpcode::Nop, block, number).signaled();
        bytes.write(layout.send + u64::from(block) * 64, entry.finish().unwrap().bytes()).unwrap();
        let dbrec = u32::from_ne_bytes(DoorbellRecord::word(block + 1));
        bytes.store_u32(layout.dbrec + DoorbellRecord::SEND as u64, dbrec).unwrap();
        let doorbell = u64::from_ne_bytes(Doorbell::next(number, block + 1));
        bytes.store_u64(layout.doorbell, doorbell).unwrap();
        assert!(test_qp.sends.wait_event(test_timeout()).unwrap(), "the doorbell was not noticed");
        assert_eq!(drain(&test_qp.sends), 1);
    };
    for rest in [0, 5, 300, 300] {
        std::thread::sleep(Duration::from_millis(rest));
        // Less than the engine's one step per second when idle.
        once_within(Duration::from_millis(500), "a polled doorbell", &mut notice);
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
    assert!(!readable(cq), "an event without arming");
    assert_eq!(drain(cq), 1);
    for round in 0..10 {
        // Armed before the completion.
        cq.arm(false).unwrap();
        assert!(!readable(cq), "round {round}");
        nop(&testbed);
        assert!(readable(cq) && cq.wait_event(Duration::ZERO).unwrap() && !readable(cq));
        nop(&testbed);
        assert!(!readable(cq), "more than one event per arming");
        // Armed after the completion.
        cq.arm(false).unwrap();
        assert!(readable(cq) && cq.take_event() && !cq.take_event());
        assert_eq!(drain(cq), 2);
    }
    // Armed many times without polling.
    nop(&testbed);
    for _ in 0..9 {
        cq.arm(false).unwrap();
        assert!(cq.wait_event(Duration::ZERO).unwrap());
    }
    assert_eq!(drain(cq), 1);
    assert!(!cq.wait_event(Duration::from_millis(1)).unwrap());
}

/// A program that also waits for other things takes the event each time, whether there is one.
fn events_taken_before_there_are_any(fixture: &Fixture) {
    for takes in 0..6 {
        let testbed = fixture.testbed();
        let conn = testbed.join(QpOptions::default());
        let (qp, cq) = (&conn.a.qp, &conn.a.sends);
        for _ in 0..takes {
            cq.arm(false).unwrap();
            assert!(!cq.take_event());
        }
        cq.arm(false).unwrap();
        qp.post_send(&[SendRequest::new(1, WrOp::Nop)]).unwrap();
        testbed.poll_for(Duration::from_millis(1));
        assert!(readable(cq), "no event after {takes} that were taken in vain");
    }
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
    assert!(!readable(cq), "an event for an unsolicited send");
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
    // An error always raises an event.
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
    assert_eq!(cq.wait_next(test_timeout()).unwrap().unwrap().id, 3);
    // Async events have a file descriptor too; rxe reports no such event.
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

/// Blocked threads are woken in both progress modes with a thread.
fn waiting_threads_are_woken(fixture: &Fixture) {
    for progress_mode in
        [ProgressMode::Auto, ProgressMode::Thread { spin: Duration::ZERO, core: None }]
    {
        let testbed = fixture.with_progress(progress_mode);
        let conn = testbed.join(QpOptions::default());
        once_within(Duration::from_millis(500), "a wake-up", || {
            conn.b.qp.post_receive(&[ReceiveRequest { id: 9, data: &[] }]).unwrap();
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| {
                    conn.b.receives.wait_next(test_timeout()).unwrap().expect("a completion")
                });
                std::thread::sleep(Duration::from_millis(30));
                conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Send)]).unwrap();
                assert_eq!(waiter.join().unwrap().id, 9);
            });
            assert_eq!(conn.a.sends.wait_next(test_timeout()).unwrap().unwrap().id, 1);
        });
        assert!(conn.a.sends.wait_next(Duration::from_millis(5)).unwrap().is_none());
    }
}

fn fallback_and_engine_threads_move_bytes(fixture: &Fixture) {
    let progress_modes = [
        ProgressMode::Auto,
        ProgressMode::Thread { spin: Duration::ZERO, core: None },
        ProgressMode::Thread { spin: Duration::from_micros(100), core: Some(0) },
    ];
    for progress_mode in progress_modes {
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
            let done = conn.a.sends.wait_next(test_timeout()).unwrap().expect("a completion");
            assert_eq!((done.id, done.is_success()), (id, true), "{progress_mode:?}");
        }
        same(&far.read(5, len), &wanted, "a write to a device that is not polled");
        same(&near.read(3, len), &wanted, "a read from a device that is not polled");
    }
}

/// Two threads that only block on events: a single lost wake-up stalls this case.
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
                // After a lost wake-up this waits for the whole timeout.
                cq.wait_event(Duration::from_secs(5)).unwrap();
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

/// The fallback thread backs off while an application thread polls. When that thread goes to sleep,
/// the fallback thread must take over without its usual delay.
fn a_poller_that_goes_to_sleep_is_served_soon(fixture: &Fixture) {
    const ROUNDS: usize = 40;
    /// Without a wake-up the fallback thread would take over after 2 ms.
    const LIMIT: Duration = Duration::from_micros(1500);
    let testbed = fixture.with_progress(ProgressMode::Auto);
    let conn = testbed.join(QpOptions::default());
    let QpPair { a, b } = &conn;
    for test_qp in [a, b] {
        for id in 0..16 {
            test_qp.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
        }
    }
    let next = |cq: &Cq| assert!(cq.wait_next(test_timeout()).unwrap().unwrap().is_success());
    let send = |test_qp: &TestQp| {
        test_qp.qp.post_send(&[SendRequest::new(0, WrOp::Send)]).unwrap();
        next(&test_qp.sends);
    };
    let take = |test_qp: &TestQp| {
        next(&test_qp.receives);
        test_qp.qp.post_receive(&[ReceiveRequest { id: 0, data: &[] }]).unwrap();
    };
    // Longer than the other side spins.
    let pause = || std::thread::sleep(Duration::from_micros(200));
    // In turn, the same round trip through channels: what the machine itself takes at the moment.
    let (ask, asked) = mpsc::channel();
    let (answer, answered) = mpsc::channel();
    let rounds = std::thread::scope(|scope| {
        scope.spawn(move || {
            for () in asked {
                pause();
                answer.send(()).unwrap();
                take(b);
                pause();
                send(b);
            }
        });
        let rounds = (0..ROUNDS).map(|_| {
            let start = Instant::now();
            ask.send(()).unwrap();
            answered.recv().unwrap();
            let by_channel = start.elapsed();
            let start = Instant::now();
            send(a);
            take(a);
            (by_channel, start.elapsed())
        });
        let rounds = rounds.collect::<Vec<_>>();
        drop(ask);
        rounds
    });
    let (mut by_channel, mut times): (Vec<_>, Vec<_>) = rounds.into_iter().unzip();
    by_channel.sort_unstable();
    times.sort_unstable();
    // Without a wake-up all are slow; on a busy machine most are.
    let (fast, baseline) = (times[1], by_channel[ROUNDS / 8]);
    assert!(
        fast < LIMIT.max(4 * baseline),
        "all but one of {ROUNDS} rounds took more than {fast:?}, by channel {baseline:?}"
    );
}

/// A sleeping engine thread notices that a WAIT is satisfied, and does not wait forever for a WQE
/// that is never written.
fn waits_and_late_wqes_on_a_thread(fixture: &Fixture) {
    let testbed = fixture.with_progress(ProgressMode::Thread { spin: Duration::ZERO, core: None });
    let mut all = Vec::new();
    once_within(Duration::from_millis(500), "the end of a chain of waits", || {
        // Each queue pair waits for the next one, the worst case for the order of polling.
        all = (0..6).map(|_| testbed.join(QpOptions::default())).collect::<Vec<_>>();
        for pair in all.windows(2) {
            let wait = WrOp::Wait { cqn: pair[1].a.sends.number(), index: 0 };
            pair[0].a.qp.post_send(&[SendRequest::new(1, wait)]).unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
        all[5].a.qp.post_send(&[SendRequest::new(1, WrOp::Nop)]).unwrap();
        let done = all[0].a.sends.wait_next(test_timeout()).unwrap();
        assert!(done.expect("a completion at the end of the chain").is_success());
    });
    // The doorbell announces a WQE that is never written.
    let qp = &all[5].a.qp;
    let (memory, layout) = qp.queues().unwrap();
    let doorbell = warpwire::mlx5::Doorbell::next(qp.number(), 3);
    memory.bytes().store_u64(layout.doorbell, u64::from_ne_bytes(doorbell)).unwrap();
    testbed.a.context.soft().unwrap().ring(qp.number());
    all[5].a.sends.wait_next(test_timeout()).unwrap().expect("the completion of the nop");
    let done = all[5].a.sends.wait_next(test_timeout()).unwrap().expect("an error completion");
    assert_eq!(done.status, Status::LocalQpOperation);
}

/// An idle device makes less than 100 steps per second, and waits end at their timeout.
fn an_idle_device_sleeps(fixture: &Fixture) {
    for progress_mode in
        [ProgressMode::Auto, ProgressMode::Thread { spin: Duration::ZERO, core: None }]
    {
        let testbed = fixture.with_progress(progress_mode);
        let one = testbed.test_qp(&testbed.a, QpOptions::default());
        let two = testbed.test_qp(&testbed.b, QpOptions::default());
        connect(&one.qp, &two.qp);
        // The first time its thread may still be starting.
        until("a device that sleeps", || {
            let before = testbed.a.context.stats().unwrap().steps;
            std::thread::sleep(Duration::from_millis(200));
            testbed.a.context.stats().unwrap().steps - before < 20
        });
        assert!(!one.sends.wait_event(Duration::from_millis(2)).unwrap());
    }
}

/// Three threads wait on one completion queue: each completion wakes one of them, even if one event
/// covers two completions.
fn several_threads_wait_on_one_queue(fixture: &Fixture) {
    const MESSAGES: u64 = 200;
    let testbed = fixture.with_progress(ProgressMode::Auto);
    let conn = testbed.join(QpOptions::default().with_receive_depth(256));
    for id in 0..MESSAGES + 3 {
        conn.b.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
    }
    let left = AtomicU64::new(MESSAGES);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                // Three extra messages wake the threads that are left at the end.
                while left.load(Ordering::Relaxed) > 0 {
                    let start = Instant::now();
                    let done = conn.b.receives.wait_next(Duration::from_secs(5)).unwrap();
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
                conn.a.sends.wait_next(test_timeout()).unwrap().expect("a completion");
            }
            if round % 4 == 0 {
                std::thread::sleep(Duration::from_micros(300)); // until all threads wait
            }
        }
        for _ in 0..3 {
            conn.a.qp.post_send(&[SendRequest::new(9, WrOp::Send)]).unwrap();
        }
    });
}
