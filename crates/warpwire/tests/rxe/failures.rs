//! What must fail fails on both sides as verbs have it, whoever began.

use std::time::Duration;

use warpwire::verbs::{
    Access, AsyncEvent, Atomic, Op, ReceiveRequest, Remote, Request, State, Status,
};

use crate::rxe::lab::Bench;
use crate::rxe::peer::{ERROR_STATE, LOCAL_AND_REMOTE_READ, Post};
use crate::rxe::world::{Terms, World};
use testkit::cases;

cases!(Bench; CASES:
    we_use_a_wrong_key,
    they_use_a_wrong_key,
    we_lack_the_right,
    they_lack_the_right,
    we_reach_too_far,
    they_reach_too_far,
    misaligned_atomics,
    receives_that_are_too_short,
    nobody_receives_for_a_while,
    nobody_receives_at_all,
    the_peer_is_gone,
    the_wire_is_cut,
    the_wire_is_mended,
    work_after_a_failure_is_flushed,
);

/// Our work fails with that status, theirs is in the error state afterwards.
fn we_fail(world: &mut World, op: Op, len: u32, status: Status) {
    let range = [world.near.mr.sge(0, len)];
    world.post(Request::new(1, op).with(&range));
    world.failed(1, status);
    world.state_becomes(State::Err);
    assert_eq!(world.peer.state(0), ERROR_STATE);
}

/// Their work fails with that status, ours is in the error state afterwards and says so.
fn they_fail(world: &mut World, post: Post<'_>, status: Status) {
    let far = world.far;
    world.peer.post(&far, post);
    world.peer.failed(post.id, status);
    world.state_becomes(State::Err);
    let news: Vec<AsyncEvent> = std::iter::from_fn(|| world.context.next_event()).collect();
    assert!(!news.is_empty(), "the device says what befell the queue pair");
}

fn we_use_a_wrong_key(bench: &Bench) {
    type Make = fn(Remote) -> Op;
    let ops: [(Make, u32); 3] = [
        (Op::Write, 5000),
        (Op::Read, 5000),
        (|at| Op::Atomic(at, Atomic::FetchAdd { add: 1 }), 8),
    ];
    for (make, len) in ops {
        let mut world = World::open(bench, Terms::default());
        let Remote { address, rkey } = world.far.remote(0);
        we_fail(&mut world, make(Remote { address, rkey: rkey ^ 0x55 }), len, Status::RemoteAccess);
    }
}

fn they_use_a_wrong_key(bench: &Bench) {
    for (op, len) in [("write", 5000), ("read", 5000), ("fadd", 8), ("cas", 8)] {
        let mut world = World::open(bench, Terms::default());
        let Remote { address, rkey } = world.near.mr.remote(0);
        let wrong = Remote { address, rkey: rkey ^ 0x55 };
        they_fail(&mut world, Post::new(1, op).from(0, len).at(wrong), Status::RemoteAccess);
    }
}

fn we_lack_the_right(bench: &Bench) {
    let mut world = World::open(bench, Terms::default());
    let readable = world.peer.memory(4096, LOCAL_AND_REMOTE_READ);
    let range = [world.near.mr.sge(0, 64)];
    world.post(Request::new(7, Op::Read(readable.remote(0))).with(&range));
    world.done(7);
    we_fail(&mut world, Op::Write(readable.remote(0)), 64, Status::RemoteAccess);
}

fn they_lack_the_right(bench: &Bench) {
    let mut world = World::open(bench, Terms::default());
    let memory = warpwire::mr::HostMemory::new(4096).unwrap();
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let mr = world.context.register(&world.pd, memory, access).unwrap();
    let far = world.far;
    world.peer.post(&far, Post::new(7, "read").from(0, 64).at(mr.remote(0)));
    world.peer.done(7);
    they_fail(&mut world, Post::new(1, "write").from(0, 64).at(mr.remote(0)), Status::RemoteAccess);
}

fn we_reach_too_far(bench: &Bench) {
    let mut world = World::open(bench, Terms::default());
    let last = world.far.remote((1 << 18) - 63);
    we_fail(&mut world, Op::Write(last), 64, Status::RemoteAccess);
    drop(world);
    let mut world = World::open(bench, Terms::default());
    let last = world.far.remote((1 << 18) - 4999);
    we_fail(&mut world, Op::Read(last), 5000, Status::RemoteAccess);
}

fn they_reach_too_far(bench: &Bench) {
    for (op, len) in [("write", 64), ("read", 5000)] {
        let mut world = World::open(bench, Terms::default());
        let last = world.near.mr.remote((1 << 18) - u64::from(len) + 1);
        they_fail(&mut world, Post::new(1, op).from(0, len).at(last), Status::RemoteAccess);
    }
}

fn misaligned_atomics(bench: &Bench) {
    let mut world = World::open(bench, Terms::default());
    let op = Op::Atomic(world.far.remote(4), Atomic::FetchAdd { add: 1 });
    we_fail(&mut world, op, 8, Status::RemoteInvalidRequest);
    // Theirs does not even begin: rxe refuses it when it is posted.
    let at = world.near.mr.remote(4).address;
    let answer =
        world.peer.ask(&format!("post 0 1 fadd 0 0 8 {at} {} 1 0 0", world.near.mr.rkey()));
    assert_eq!(answer, "error ibv_post_send: Invalid argument");
}

fn receives_that_are_too_short(bench: &Bench) {
    for len in [100, 3000] {
        let mut world = World::open(bench, Terms::default());
        let far = world.far;
        world.peer.receive(0, 5, &far, 0, len - 1);
        let range = [world.near.mr.sge(0, len)];
        world.post(Request::new(1, Op::Send).with(&range));
        // The request is at fault, and InfiniBand has the responder say so. rxe of Linux 6.1 says that it is its own.
        let completion = world.next();
        let statuses = [Status::RemoteInvalidRequest, Status::RemoteOperation];
        assert!(completion.id == 1 && statuses.contains(&completion.status), "{completion:?}");
        world.state_becomes(State::Err);
        assert_eq!(world.peer.state(0), ERROR_STATE);
        drop(world);
        let mut world = World::open(bench, Terms::default());
        world.receive(5, 0, len - 1);
        they_fail(&mut world, Post::new(1, "send").from(0, len), Status::RemoteInvalidRequest);
        world.failed(5, Status::LocalLength);
    }
}

fn nobody_receives_for_a_while(bench: &Bench) {
    const WHILE: Duration = Duration::from_millis(150);
    let mut world = World::open(bench, Terms::default());
    let far = world.far;
    world.near.fill(0, 3000, 1);
    let range = [world.near.mr.sge(0, 3000)];
    for op in [Op::Send, Op::WriteImm(far.remote(0), [1, 2, 3, 4])] {
        world.post(Request::new(1, op).with(&range));
        std::thread::sleep(WHILE);
        assert_eq!(world.cq.next(Duration::ZERO).unwrap(), None);
        world.peer.receive(0, 2, &far, 0, 3000);
        world.done(1);
        world.peer.done(2);
        world.peer.check(&far, 0, 3000, 1);
    }
    assert!(world.qp().stats().unwrap().rnr_received > 0);

    world.peer.fill(&far, 0, 3000, 2);
    for op in ["send", "write_imm"] {
        let at = world.near.mr.remote(0);
        world.peer.post(&far, Post::new(3, op).from(0, 3000).at(at));
        std::thread::sleep(WHILE);
        world.peer.quiet();
        world.receive(4, 0, 3000);
        world.peer.done(3);
        world.done(4);
        world.near.check(0, 3000, 2);
    }
    assert!(world.qp().stats().unwrap().rnr_sent > 0);
}

fn nobody_receives_at_all(bench: &Bench) {
    let terms = Terms { rnr_retry: 2, ..Terms::default() };
    let world = World::open(bench, terms.clone());
    world.post(Request::new(1, Op::Send).inline(b"hello"));
    world.failed(1, Status::RnrRetryExceeded);
    drop(world);
    let mut world = World::open(bench, terms);
    let far = world.far;
    world.peer.post(&far, Post::new(2, "send").from(0, 5));
    world.peer.failed(2, Status::RnrRetryExceeded);
}

/// With little patience on either side.
fn impatient() -> Terms {
    Terms { timeout: 10, retry: 3, ..Terms::default() }
}

fn the_peer_is_gone(bench: &Bench) {
    let mut world = World::open(bench, impatient());
    world.works();
    world.peer.ok("destroy 0");
    world.post(Request::new(1, Op::Send).inline(b"hello"));
    world.failed(1, Status::RetryExceeded);

    drop(world);
    let mut world = World::open(bench, impatient());
    let far = world.far;
    world.works();
    world.qps.clear();
    world.peer.post(&far, Post::new(2, "send").from(0, 5));
    world.peer.failed(2, Status::RetryExceeded);
}

fn the_wire_is_cut(bench: &Bench) {
    let mut world = World::open(bench, impatient());
    let far = world.far;
    world.works();
    world.partition.cut();
    let range = [world.near.mr.sge(0, 5000)];
    world.post(Request::new(1, Op::Read(far.remote(0))).with(&range));
    let at = world.near.mr.remote(0);
    world.peer.post(&far, Post::new(2, "read").from(0, 5000).at(at));
    world.failed(1, Status::RetryExceeded);
    world.peer.failed(2, Status::RetryExceeded);
}

fn the_wire_is_mended(bench: &Bench) {
    let mut world = World::open(bench, Terms::default());
    let far = world.far;
    world.works();
    world.near.fill(0, 5000, 1);
    world.peer.fill(&far, 10_000, 5000, 2);
    world.partition.cut();
    let range = [world.near.mr.sge(0, 5000)];
    world.post(Request::new(1, Op::Write(far.remote(0))).with(&range));
    let at = world.near.mr.remote(10_000);
    world.peer.post(&far, Post::new(2, "write").from(10_000, 5000).at(at));
    std::thread::sleep(Duration::from_millis(200));
    world.peer.quiet();
    assert_eq!(world.cq.next(Duration::ZERO).unwrap(), None);
    world.partition.heal();
    world.done(1);
    world.peer.done(2);
    world.near.check(10_000, 5000, 2);
    world.peer.check(&far, 0, 5000, 1);
    assert!(world.qp().stats().unwrap().timeouts > 0);
}

fn work_after_a_failure_is_flushed(bench: &Bench) {
    let world = World::open(bench, Terms::default());
    let far = world.far;
    let wrong = Remote { rkey: far.rkey ^ 1, ..far.remote(0) };
    let range = [world.near.mr.sge(0, 64)];
    world.qp().post_receive(&[ReceiveRequest { id: 9, data: &[] }]).unwrap();
    let good = Request::new(3, Op::Write(far.remote(0))).with(&range);
    let first = Request { id: 1, ..good };
    world.qp().post_send(&[first, Request::new(2, Op::Write(wrong)).with(&range), good]).unwrap();
    world.done(1);
    world.failed(2, Status::RemoteAccess);
    world.failed(3, Status::Flushed);
    world.failed(9, Status::Flushed);
}
