//! Several things at once: devices that talk to themselves, many answers outstanding, many threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use warpwire::error::Kind as ErrorKind;
use warpwire::verbs::{
    Atomic, Completion, Drive, Mtu, Op, QpOptions, ReceiveRequest, Request, Status,
};

use crate::verbs::fixture::{Fixture, Kind, connect, same, soon};
use testkit::cases;

cases!(Fixture; CASES:
    a_device_talks_to_itself,
    many_answers_outstanding,
    both_directions_at_once,
    threads_share_a_queue_pair,
);
cases!(Fixture; ONCE: memory_that_moves, one_turn_each);

/// Two queue pairs of one device, and one that is its own peer.
fn a_device_talks_to_itself(fixture: &Fixture) {
    let world = fixture.world();
    let end = &world.a;
    let (one, two) = (world.side(end, QpOptions::default()), world.side(end, QpOptions::default()));
    connect(&one.qp, &two.qp);
    let narcissus = world.side(end, QpOptions::default());
    narcissus.qp.connect(&narcissus.qp.offer()).unwrap();
    let memory = fixture.host(end, 1 << 17);
    let wanted = memory.pattern(0, 50_000, 1);
    for (from, to) in [(&one, &two), (&two, &one), (&narcissus, &narcissus)] {
        memory.write(60_000, &vec![0; 50_000]);
        to.qp
            .post_receive(&[ReceiveRequest { id: 4, data: &[memory.mr.sge(60_000, 50_000)] }])
            .unwrap();
        let data = [memory.mr.sge(0, 50_000)];
        let word = [memory.mr.sge(120_000, 8)];
        let add = Op::Atomic(memory.mr.remote(120_008), Atomic::FetchAdd { add: 1 });
        let work = [
            Request::new(1, Op::Send).with(&data),
            Request::new(2, Op::Read(memory.mr.remote(60_000))).with(&data),
            Request::new(3, add).with(&word),
        ];
        from.qp.post_send(&work).unwrap();
        for id in 1..=3 {
            world.done(&from.sends, id);
        }
        world.done(&to.receives, 4);
        same(&memory.read(0, 50_000), &wanted, "what went round");
    }
    assert_eq!(memory.word(120_008), 3);
}

/// More reads and atomics than may be outstanding, among writes and messages: each answer finds its own work.
fn many_answers_outstanding(fixture: &Fixture) {
    for max_rd_atomic in [1, 2, 16] {
        let world = fixture.world();
        let options = QpOptions { max_rd_atomic, ..QpOptions::default() };
        let joined = world.join(options);
        let (near, far) = (fixture.host(&world.a, 1 << 20), fixture.host(&world.b, 1 << 20));
        let wanted = far.pattern(0, 100 * 9000, 3);
        for n in 0..100u64 {
            let (at, len) = (n * 9000, 1 + n as u32 * 89);
            let read = Op::Read(far.mr.remote(at));
            let add = Op::Atomic(far.mr.remote(1_000_000), Atomic::FetchAdd { add: n });
            let (into, word) = ([near.mr.sge(at, len)], [near.mr.sge(1_000_000 + n * 8, 8)]);
            let request = if n % 5 == 4 {
                Request::new(n, add).with(&word)
            } else {
                Request::new(n, read).with(&into)
            };
            joined.a.qp.post_send(&[request]).unwrap();
            if n % 7 == 0 {
                joined.a.qp.post_send(&[Request::new(n, Op::Nop)]).unwrap();
            }
        }
        let mut sum = 0;
        for n in 0..100u64 {
            world.done(&joined.a.sends, n);
            if n % 7 == 0 {
                world.done(&joined.a.sends, n);
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

/// Each is requester and responder of large transfers at the same time.
fn both_directions_at_once(fixture: &Fixture) {
    let world = fixture.world();
    let joined = world.join(QpOptions::default());
    let ends = [&world.a, &world.b];
    let memory = ends.map(|end| fixture.host(end, 1 << 20));
    let half = 1 << 19;
    let wanted = [0, 1].map(|n: usize| memory[n].pattern(0, half, n as u64));
    for (n, side) in [&joined.a, &joined.b].into_iter().enumerate() {
        let data = [memory[n].mr.sge(0, half as u32)];
        let write = Request::new(1, Op::Write(memory[1 - n].mr.remote(half as u64))).with(&data);
        let read = Request::new(2, Op::Read(memory[1 - n].mr.remote(0))).with(&data);
        use warpwire::verbs::Fence;
        let strongest = if fixture.which.has_device() { Fence::Reads } else { Fence::All };
        side.qp.post_send(&[write, read.fenced(strongest)]).unwrap();
    }
    for side in [&joined.a, &joined.b] {
        world.done(&side.sends, 1);
    }
    for n in 0..2 {
        same(&memory[n].read(half as u64, half), &wanted[1 - n], "what the other wrote");
    }
    for side in [&joined.a, &joined.b] {
        world.done(&side.sends, 2);
    }
}

/// Threads post to one queue pair and poll one completion queue, all at once: nothing is lost or told twice.
fn threads_share_a_queue_pair(fixture: &Fixture) {
    const EACH: u64 = 300;
    for drive in [Drive::Guarded, Drive::Inline] {
        let world = fixture.driven(drive);
        let joined = world.join(QpOptions { send_depth: 16, timeout: 17, ..QpOptions::default() });
        let far = fixture.host(&world.b, 4096);
        let near = fixture.host(&world.a, 4096);
        let seen: Vec<AtomicU64> = (0..4 * EACH).map(|_| AtomicU64::new(0)).collect();
        let left = AtomicU64::new(4 * EACH);
        let start = Instant::now();
        let poll = || {
            let mut done = [Completion::EMPTY; 4];
            let count = joined.a.sends.poll(&mut done).unwrap();
            for done in &done[..count] {
                assert!(done.is_success(), "{done:?}");
                seen[done.id as usize].fetch_add(1, Ordering::Relaxed);
                left.fetch_sub(1, Ordering::Relaxed);
            }
            world.b.context.hca().poll().unwrap();
            assert!(start.elapsed() < soon());
        };
        std::thread::scope(|scope| {
            for n in 0..4 {
                let (joined, near, far, poll) = (&joined, &near, &far, &poll);
                scope.spawn(move || {
                    for turn in 0..EACH {
                        let add = Op::Atomic(far.mr.remote(0), Atomic::FetchAdd { add: 1 });
                        let data = [near.mr.sge(n * 8, 8)];
                        let request = Request::new(n * EACH + turn, add).with(&data);
                        while let Err(why) = joined.a.qp.post_send(&[request]) {
                            assert_eq!(why.kind(), &ErrorKind::Busy);
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

/// Device memory moves under traffic: it waits, and no byte is wrong.
fn memory_that_moves(fixture: &Fixture) {
    let control = fixture.control();
    for kind in [Kind::Window, Kind::Engine, Kind::Staged] {
        let world = fixture.world();
        let joined = world.join(QpOptions::default());
        let near = fixture.memory(&world.a, kind, 1 << 20, crate::verbs::fixture::ALL);
        let far = fixture.memory(&world.b, kind, 1 << 20, crate::verbs::fixture::ALL);
        for round in 0..6u64 {
            let len = 900_000 + round as u32;
            let wanted = near.pattern(0, len as usize, round);
            let data = [near.mr.sge(0, len)];
            let write = Request::new(1, Op::Write(far.mr.remote(round))).with(&data);
            let read = Request::new(2, Op::Read(far.mr.remote(round))).with(&data);
            joined.a.qp.post_send(&[write, read]).unwrap();
            let mut one = [Completion::EMPTY];
            let (mut done, mut turn) = (0, false);
            let start = Instant::now();
            while done < 2 {
                (0..3).for_each(|_| world.step());
                turn = !turn;
                let moves = if turn { &near } else { &far };
                control.relocate(moves.allocation()).unwrap();
                if joined.a.sends.poll(&mut one).unwrap() == 1 {
                    assert_eq!(one[0].status, Status::Success);
                    done += 1;
                }
                assert!(start.elapsed() < soon());
            }
            same(&far.read(round, len as usize), &wanted, "a write to memory that moves");
            same(&near.read(0, len as usize), &wanted, "a read into memory that moves");
        }
    }
}

/// A large transfer does not keep a small one waiting until it is done.
fn one_turn_each(fixture: &Fixture) {
    let world = fixture.world();
    let options = || QpOptions { mtu: Mtu::new(1024), ..QpOptions::default() };
    let (large, small) = (world.join(options()), world.join(options()));
    let (near, far) = (fixture.host(&world.a, 16 << 20), fixture.host(&world.b, 16 << 20));
    let data = [near.mr.sge(0, 16 << 20)];
    large.a.qp.post_send(&[Request::new(1, Op::Write(far.mr.remote(0))).with(&data)]).unwrap();
    for id in 0..20 {
        small
            .a
            .qp
            .post_send(&[Request::new(id, Op::Write(far.mr.remote(0))).inline(b"x")])
            .unwrap();
        world.done(&small.a.sends, id);
    }
    let mut one = [Completion::EMPTY];
    assert_eq!(
        large.a.sends.poll(&mut one).unwrap(),
        0,
        "twenty small ones are done before the large one"
    );
    world.done(&large.a.sends, 1);
    world.drive_for(Duration::ZERO);
}
