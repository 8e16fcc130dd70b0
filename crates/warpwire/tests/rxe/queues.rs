//! Several queue pairs, shared receive queues, events.

use std::time::Duration;

use warpwire::verbs::{Op, ReceiveRequest, Request};

use crate::rxe::lab::{Bench, soon};
use crate::rxe::peer::{Post, SOLICITED};
use crate::rxe::world::{Terms, World};
use testkit::cases;

cases!(Bench; CASES: several_queue_pairs, our_shared_receives, their_shared_receives, events);

const COUNT: usize = 8;

fn several_queue_pairs(bench: &Bench) {
    const EACH: u64 = 8;
    let mut world = World::open(bench, Terms { qps: COUNT, ..Terms::default() });
    let far = world.far;
    let place = |index: usize, n: u64| (index as u64 * EACH + n) * 2000;
    // All of ours are under way at once, and all of theirs.
    let mut ids = Vec::new();
    for index in 0..COUNT {
        for n in 0..EACH {
            let id = index as u64 * 100 + n;
            world.near.fill(place(index, n), 1999, id);
            let range = [world.near.mr.sge(place(index, n), 1999)];
            let request = Request::new(id, Op::Write(far.remote(place(index, n))));
            world.qps[index].post_send(&[request.with(&range)]).unwrap();
            ids.push(id);
        }
    }
    let mut ended: Vec<u64> = ids
        .iter()
        .map(|_| world.next())
        .map(|one| {
            assert!(one.is_success(), "{one:?}");
            one.id
        })
        .collect();
    ended.sort_unstable();
    assert_eq!(ended, ids);
    for index in 0..COUNT {
        for n in 0..EACH {
            let id = index as u64 * 100 + n;
            world.peer.check(&far, place(index, n), 1999, id);
            let read = Post::new(id, "read").from(130_000 + place(index, n), 1999);
            let read = read.at(world.near.mr.remote(place(index, n)));
            world.peer.post(&far, Post { qp: index, ..read });
        }
    }
    let mut ended: Vec<u64> = ids
        .iter()
        .map(|_| world.peer.next())
        .map(|one| {
            assert_eq!(one.status, 0, "{one:?}");
            one.id
        })
        .collect();
    ended.sort_unstable();
    assert_eq!(ended, ids);
    for index in 0..COUNT {
        world.peer.check(&far, 130_000 + place(index, 3), 1999, index as u64 * 100 + 3);
    }
}

fn our_shared_receives(bench: &Bench) {
    let terms = Terms { qps: 4, shared: [true, false], ..Terms::default() };
    let mut world = World::open(bench, terms);
    let far = world.far;
    let srq = world.srq.clone().unwrap();
    let post = |world: &World, id: u64| {
        let data = [world.near.mr.sge(id * 2000, 2000)];
        srq.post_receive(&[ReceiveRequest { id, data: &data }]).unwrap();
    };
    for round in 0..5 {
        for id in 0..4 {
            post(&world, id);
        }
        for index in 0..4 {
            let seed = round * 10 + index as u64;
            world.peer.fill(&far, index as u64 * 2000, 1500, seed);
            let send = Post::new(seed, "send").from(index as u64 * 2000, 1500);
            world.peer.post(&far, Post { qp: index, ..send });
            world.peer.done(seed);
            let done = world.next();
            assert!(done.is_success() && done.qpn == world.qps[index].number(), "{done:?}");
            world.near.check(done.id * 2000, 1500, seed);
        }
    }
    // None is left: the sender waits until one comes.
    world.peer.post(&far, Post { qp: 2, ..Post::new(77, "send").from(0, 100) });
    world.peer.quiet();
    post(&world, 3);
    world.peer.done(77);
    world.done(3);
    assert!(world.qps[2].stats().unwrap().rnr_sent > 0);
}

fn their_shared_receives(bench: &Bench) {
    let terms = Terms { qps: 4, shared: [false, true], ..Terms::default() };
    let mut world = World::open(bench, terms);
    let far = world.far;
    for round in 0..3 {
        for id in 0..4 {
            world.peer.receive_shared(id, &far, id * 2000, 2000);
        }
        for index in 0..4 {
            let seed = round * 10 + index as u64;
            world.near.fill(0, 1500, seed);
            let range = [world.near.mr.sge(0, 1500)];
            let request = Request::new(seed, Op::Send).with(&range);
            world.qps[index].post_send(&[request]).unwrap();
            world.done(seed);
            let done = world.peer.next();
            assert_eq!((done.status, done.len), (0, 1500), "{done:?}");
            world.peer.check(&far, done.id * 2000, 1500, seed);
        }
    }
}

fn events(bench: &Bench) {
    let mut world = World::open(bench, Terms::default());
    let far = world.far;
    for id in 0..2 {
        world.peer.receive(0, id, &far, 0, 100);
        world.receive(id, 0, 100);
    }
    // They are woken by a message that asks for it, and by no other.
    world.peer.ok("arm 1");
    world.post(Request::new(10, Op::Send).inline(b"quietly"));
    world.done(10);
    assert_eq!(world.peer.ask("event 100"), "none");
    world.post(Request::new(11, Op::Send).inline(b"loudly").solicited());
    world.done(11);
    world.peer.ok("event 10000");
    world.peer.done(0);
    world.peer.done(1);

    world.cq.arm(true).unwrap();
    world.peer.post(&far, Post::new(20, "send").from(0, 7));
    world.peer.done(20);
    assert!(!world.cq.wait(Duration::from_millis(100)).unwrap());
    world.peer.post(&far, Post { flags: SOLICITED, ..Post::new(21, "send").from(0, 6) });
    world.peer.done(21);
    assert!(world.cq.wait(soon()).unwrap());
    assert!(!world.done(0).solicited);
    assert!(world.done(1).solicited);
}
