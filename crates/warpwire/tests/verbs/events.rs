//! Waking: who sleeps is woken when he asked for it, and only then.

use std::os::fd::AsFd;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use warpwire::mlx5::{Builder, Doorbell, Opcode, Record, Scratch};
use warpwire::verbs::{
    Change, Completion, Cq, Drive, Op, QpOptions, ReceiveRequest, Request, State, Status,
};

use crate::verbs::fixture::{Fixture, Joined, Kind, Side, World, connect, same, soon};
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
    let world = fixture.driven(Drive::Thread { spin: Duration::ZERO, core: None });
    let joined = world.join(QpOptions { watched: true, ..QpOptions::default() });
    let Joined { a: side, .. } = &joined;
    let (memory, layout) = side.qp.queues();
    let (bytes, mut scratch) = (memory.bytes(), Scratch::default());
    for (block, rest) in (0u16..).zip([0, 5, 300, 300]) {
        std::thread::sleep(Duration::from_millis(rest));
        side.sends.arm(false).unwrap();
        let number = side.qp.number();
        let entry = Builder::new(&mut scratch, Opcode::Nop, block, number).signaled();
        bytes.write(layout.send + u64::from(block) * 64, entry.finish().unwrap().bytes()).unwrap();
        let record = u32::from_ne_bytes(Record::word(block + 1));
        bytes.store_u32(layout.record + Record::SEND as u64, record).unwrap();
        let doorbell = u64::from_ne_bytes(Doorbell::next(number, block + 1));
        bytes.store_u64(layout.doorbell, doorbell).unwrap();
        let start = Instant::now();
        assert!(side.sends.wait(soon()).unwrap(), "nobody saw it");
        // Once a second a thread at rest makes a step in any case.
        assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
        assert_eq!(drain(&side.sends), 1);
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
    let world = fixture.world();
    let joined = world.join(QpOptions::default());
    let (qp, cq) = (&joined.a.qp, &joined.a.sends);
    let nop = |world: &World| {
        qp.post_send(&[Request::new(1, Op::Nop)]).unwrap();
        world.drive_for(Duration::from_millis(1));
    };
    nop(&world);
    assert!(!readable(cq), "nobody asked");
    assert_eq!(drain(cq), 1);
    for round in 0..10 {
        // Before the completion.
        cq.arm(false).unwrap();
        assert!(!readable(cq), "round {round}");
        nop(&world);
        assert!(readable(cq) && cq.wait(Duration::ZERO).unwrap() && !readable(cq));
        nop(&world);
        assert!(!readable(cq), "one event for each arming");
        // After it.
        cq.arm(false).unwrap();
        assert!(readable(cq) && cq.take_event() && !cq.take_event());
        assert_eq!(drain(cq), 2);
    }
    // Armed many times, read never.
    nop(&world);
    for _ in 0..9 {
        cq.arm(false).unwrap();
        assert!(cq.wait(Duration::ZERO).unwrap());
    }
    assert_eq!(drain(cq), 1);
    assert!(!cq.wait(Duration::from_millis(1)).unwrap());
}

fn solicited_only(fixture: &Fixture) {
    let world = fixture.world();
    let joined = world.join(QpOptions::default());
    let (from, cq) = (&joined.a.qp, &joined.b.receives);
    for id in 0..20 {
        joined.b.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
    }
    let send = |request: Request<'_>| {
        from.post_send(&[request]).unwrap();
        world.done(&joined.a.sends, request.id);
    };
    cq.arm(true).unwrap();
    send(Request::new(1, Op::Send));
    assert!(!readable(cq), "not solicited");
    send(Request::new(2, Op::Send).solicited());
    assert!(readable(cq) && cq.take_event());
    let (first, second) = (world.next(cq), world.next(cq));
    assert_eq!((first.solicited, second.solicited), (false, !world.b.is_device()));
    let far = fixture.memory(&world.b, Kind::Host, 4096, crate::verbs::fixture::ALL);
    cq.arm(true).unwrap();
    send(Request::new(3, Op::WriteImm(far.mr.remote(0), [0; 4])).inline(b"x"));
    assert!(!readable(cq));
    send(Request::new(4, Op::WriteImm(far.mr.remote(0), [0; 4])).inline(b"x").solicited());
    assert!(readable(cq) && cq.take_event());
    assert_eq!(drain(cq), 2);
    // An error always counts.
    cq.arm(true).unwrap();
    joined.b.qp.modify(&Change::to(State::Err)).unwrap();
    world.drive_for(Duration::from_millis(1));
    assert!(readable(cq));
    assert_eq!(world.next(cq).status, Status::Flushed);
}

fn the_file_descriptor(fixture: &Fixture) {
    let drive = Drive::Thread { spin: Duration::ZERO, core: None };
    let world = fixture.driven(drive);
    let joined = world.join(QpOptions::default());
    let cq = &joined.b.receives;
    joined.b.qp.post_receive(&[ReceiveRequest { id: 3, data: &[] }]).unwrap();
    cq.arm(false).unwrap();
    joined.a.qp.post_send(&[Request::new(1, Op::Send)]).unwrap();
    let fd = cq.as_fd();
    let wait = Timespec { tv_sec: 10, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&wait)).unwrap(), 1);
    assert!(cq.take_event());
    assert_eq!(cq.next(soon()).unwrap().unwrap().id, 3);
    // News have one too; rxe has none of this sort.
    if world.b.is_device() {
        return assert!(!readable(world.b.context.events()));
    }
    world.b.news();
    let events = world.b.context.events();
    assert!(!readable(events));
    joined
        .a
        .qp
        .post_send(&[Request::new(1, Op::Write(warpwire::verbs::Remote { address: 0, rkey: 0 }))
            .inline(b"x")])
        .unwrap();
    assert!(events.wait(soon()).unwrap());
    assert_eq!(world.b.news().len(), 1);
    assert!(!readable(events));
}

/// Threads that sleep until they are woken, under either drive that wakes.
fn sleepers_are_woken(fixture: &Fixture) {
    for drive in [Drive::Guarded, Drive::Thread { spin: Duration::ZERO, core: None }] {
        let world = fixture.driven(drive);
        let joined = world.join(QpOptions::default());
        joined.b.qp.post_receive(&[ReceiveRequest { id: 9, data: &[] }]).unwrap();
        let start = Instant::now();
        std::thread::scope(|scope| {
            let sleeper =
                scope.spawn(|| joined.b.receives.next(soon()).unwrap().expect("it comes"));
            std::thread::sleep(Duration::from_millis(30));
            joined.a.qp.post_send(&[Request::new(1, Op::Send)]).unwrap();
            assert_eq!(sleeper.join().unwrap().id, 9);
        });
        assert!(start.elapsed() < Duration::from_millis(500), "{drive:?}: {:?}", start.elapsed());
        assert_eq!(joined.a.sends.next(soon()).unwrap().unwrap().id, 1);
        assert!(joined.a.sends.next(Duration::from_millis(5)).unwrap().is_none());
    }
}

fn guards_and_threads_move_bytes(fixture: &Fixture) {
    let drives = [
        Drive::Guarded,
        Drive::Thread { spin: Duration::ZERO, core: None },
        Drive::Thread { spin: Duration::from_micros(100), core: Some(0) },
    ];
    for drive in drives {
        let world = fixture.driven(drive);
        let joined = world.join(QpOptions::default());
        let (near, far) = (fixture.host(&world.a, 1 << 21), fixture.host(&world.b, 1 << 21));
        let len = (1 << 20) + 77;
        let wanted = near.pattern(3, len, 4);
        let range = [near.mr.sge(3, len as u32)];
        let write = Request::new(1, Op::Write(far.mr.remote(5))).with(&range);
        let read = Request::new(2, Op::Read(far.mr.remote(5))).with(&range);
        joined.a.qp.post_send(&[write, read]).unwrap();
        for id in 1..=2 {
            let done = joined.a.sends.next(soon()).unwrap().expect("it ends");
            assert_eq!((done.id, done.is_success()), (id, true), "{drive:?}");
        }
        same(&far.read(5, len), &wanted, "a write with nobody polling there");
        same(&near.read(3, len), &wanted, "a read with nobody polling there");
    }
}

/// Two threads that only ever sleep on events: if one wake-up is lost, this stands still.
fn ping_pong_without_lost_wakeups(fixture: &Fixture) {
    const ROUNDS: u64 = 300;
    for drive in [Drive::Guarded, Drive::Thread { spin: Duration::from_micros(20), core: None }] {
        let world = fixture.driven(drive);
        let joined = world.join(QpOptions::default());
        let Joined { a, b } = &joined;
        for side in [a, b] {
            for id in 0..16 {
                side.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
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
            for (side, begins) in [(a, true), (b, false)] {
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        if round > 0 || !begins {
                            wait(&side.receives);
                            side.qp.post_receive(&[ReceiveRequest { id: 0, data: &[] }]).unwrap();
                        }
                        side.qp.post_send(&[Request::new(round, Op::Send)]).unwrap();
                        wait(&side.sends);
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
    let world = fixture.driven(Drive::Guarded);
    let joined = world.join(QpOptions::default());
    let Joined { a, b } = &joined;
    for side in [a, b] {
        for id in 0..16 {
            side.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
        }
    }
    let next = |cq: &Cq| assert!(cq.next(soon()).unwrap().unwrap().is_success());
    let send = |side: &Side| {
        side.qp.post_send(&[Request::new(0, Op::Send)]).unwrap();
        next(&side.sends);
    };
    let take = |side: &Side| {
        next(&side.receives);
        side.qp.post_receive(&[ReceiveRequest { id: 0, data: &[] }]).unwrap();
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
    let world = fixture.driven(Drive::Thread { spin: Duration::ZERO, core: None });
    // A chain: each queue pair waits for the one before it, in the order in which that is worst.
    let all: Vec<_> = (0..6).map(|_| world.join(QpOptions::default())).collect();
    for pair in all.windows(2) {
        let wait = Op::Wait { cqn: pair[1].a.sends.number(), index: 0 };
        pair[0].a.qp.post_send(&[Request::new(1, wait)]).unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    let start = Instant::now();
    all[5].a.qp.post_send(&[Request::new(1, Op::Nop)]).unwrap();
    let done = all[0].a.sends.next(soon()).unwrap().expect("the chain ends");
    assert!(done.is_success());
    assert!(start.elapsed() < Duration::from_millis(300), "{:?}", start.elapsed());
    // The doorbell promises an entry that never comes.
    let qp = &all[5].a.qp;
    let (memory, layout) = qp.queues();
    let doorbell = warpwire::mlx5::Doorbell::next(qp.number(), 3);
    memory.bytes().store_u64(layout.doorbell, u64::from_ne_bytes(doorbell)).unwrap();
    let start = Instant::now();
    world.a.context.hca().ring(qp.number());
    all[5].a.sends.next(soon()).unwrap().expect("the first one's");
    let done = all[5].a.sends.next(soon()).unwrap().expect("an end");
    assert_eq!(done.status, Status::LocalQpOperation);
    assert!(start.elapsed() < Duration::from_millis(300), "{:?}", start.elapsed());
}

/// With nothing to do, a device makes a few steps a second at most, and a sleeper's time ends when it should.
fn an_idle_device_sleeps(fixture: &Fixture) {
    for drive in [Drive::Guarded, Drive::Thread { spin: Duration::ZERO, core: None }] {
        let world = fixture.driven(drive);
        let one = world.side(&world.a, QpOptions::default());
        let two = world.side(&world.b, QpOptions::default());
        connect(&one.qp, &two.qp);
        std::thread::sleep(Duration::from_millis(20));
        let before = world.a.context.stats().steps;
        std::thread::sleep(Duration::from_millis(200));
        let steps = world.a.context.stats().steps - before;
        assert!(steps < 20, "{drive:?}: {steps} steps");
        assert!(!one.sends.wait(Duration::from_millis(2)).unwrap());
    }
}

/// Three threads wait for completions of one queue: each completion wakes somebody, also when one event stood for two.
fn several_sleep_on_one_queue(fixture: &Fixture) {
    const MESSAGES: u64 = 200;
    let world = fixture.driven(Drive::Guarded);
    let joined = world.join(QpOptions { receive_depth: 256, ..QpOptions::default() });
    for id in 0..MESSAGES + 3 {
        joined.b.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
    }
    let left = AtomicU64::new(MESSAGES);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                // The last ones are woken by three more messages.
                while left.load(Ordering::Relaxed) > 0 {
                    let start = Instant::now();
                    let done = joined.b.receives.next(Duration::from_secs(5)).unwrap();
                    assert!(done.is_some_and(|done| done.is_success()), "a wake-up was lost");
                    assert!(start.elapsed() < Duration::from_secs(4));
                    let _ = left
                        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
                }
            });
        }
        for round in 0..MESSAGES / 2 {
            let two = [Request::new(0, Op::Send).unsignaled(), Request::new(1, Op::Send)];
            joined.a.qp.post_send(&two).unwrap();
            for _ in 0..2 {
                joined.a.sends.next(soon()).unwrap().expect("it ends");
            }
            if round % 4 == 0 {
                std::thread::sleep(Duration::from_micros(300)); // all are asleep
            }
        }
        for _ in 0..3 {
            joined.a.qp.post_send(&[Request::new(9, Op::Send)]).unwrap();
        }
    });
}
