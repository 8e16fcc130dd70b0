//! Failures have the status that verbs prescribe at both ends, whichever end is the requester.

use std::time::Duration;

use warpwire::verbs::{
    Access, AsyncEvent, Atomic, ReceiveRequest, Remote, SendRequest, State, Status, WrOp,
};

use crate::rxe::lab::Bench;
use crate::rxe::peer::{ERROR_STATE, LOCAL_AND_REMOTE_READ, PeerPost};
use crate::rxe::testbed::{ConnParams, Testbed};
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
    receives_are_posted_late,
    no_receive_is_posted,
    the_peer_is_gone,
    the_link_is_cut,
    the_link_is_restored,
    work_after_a_failure_is_flushed,
);

/// Asserts that the local request fails with `status`, and that the guest's queue pair is in the
/// error state.
fn we_fail(testbed: &mut Testbed, op: WrOp, len: u32, status: Status) {
    let range = [testbed.near.mr.sge(0, len)];
    testbed.post(SendRequest::new(1, op).with(&range));
    testbed.failed(1, status);
    testbed.state_becomes(State::Err);
    assert_eq!(testbed.peer.state(0), ERROR_STATE);
}

/// Asserts that the guest's request fails with `status`, and that the local queue pair is in the
/// error state and reports an event.
fn they_fail(testbed: &mut Testbed, post: PeerPost<'_>, status: Status) {
    let far = testbed.far;
    testbed.peer.post(&far, post);
    testbed.peer.failed(post.id, status);
    testbed.state_becomes(State::Err);
    let async_events: Vec<AsyncEvent> =
        std::iter::from_fn(|| testbed.context.next_event()).collect();
    assert!(!async_events.is_empty(), "no async event for the failed queue pair");
}

fn we_use_a_wrong_key(bench: &Bench) {
    type MakeRequest = fn(Remote) -> WrOp;
    let ops: [(MakeRequest, u32); 3] = [
        (WrOp::Write, 5000),
        (WrOp::Read, 5000),
        (|at| WrOp::Atomic(at, Atomic::FetchAdd { add: 1 }), 8),
    ];
    for (make, len) in ops {
        let mut testbed = Testbed::open(bench, ConnParams::default());
        let Remote { address, rkey } = testbed.far.remote(0);
        we_fail(
            &mut testbed,
            make(Remote { address, rkey: rkey ^ 0x55 }),
            len,
            Status::RemoteAccess,
        );
    }
}

fn they_use_a_wrong_key(bench: &Bench) {
    for (op, len) in [("write", 5000), ("read", 5000), ("fadd", 8), ("cas", 8)] {
        let mut testbed = Testbed::open(bench, ConnParams::default());
        let Remote { address, rkey } = testbed.near.mr.remote(0);
        let wrong = Remote { address, rkey: rkey ^ 0x55 };
        they_fail(&mut testbed, PeerPost::new(1, op).from(0, len).at(wrong), Status::RemoteAccess);
    }
}

fn we_lack_the_right(bench: &Bench) {
    let mut testbed = Testbed::open(bench, ConnParams::default());
    let readable = testbed.peer.memory(4096, LOCAL_AND_REMOTE_READ);
    let range = [testbed.near.mr.sge(0, 64)];
    testbed.post(SendRequest::new(7, WrOp::Read(readable.remote(0))).with(&range));
    testbed.done(7);
    we_fail(&mut testbed, WrOp::Write(readable.remote(0)), 64, Status::RemoteAccess);
}

fn they_lack_the_right(bench: &Bench) {
    let mut testbed = Testbed::open(bench, ConnParams::default());
    let memory = warpwire::mr::HostMemory::new(4096).unwrap();
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let mr = testbed.context.register(&testbed.pd, memory, access).unwrap();
    let far = testbed.far;
    testbed.peer.post(&far, PeerPost::new(7, "read").from(0, 64).at(mr.remote(0)));
    testbed.peer.done(7);
    they_fail(
        &mut testbed,
        PeerPost::new(1, "write").from(0, 64).at(mr.remote(0)),
        Status::RemoteAccess,
    );
}

fn we_reach_too_far(bench: &Bench) {
    let mut testbed = Testbed::open(bench, ConnParams::default());
    let last = testbed.far.remote((1 << 18) - 63);
    we_fail(&mut testbed, WrOp::Write(last), 64, Status::RemoteAccess);
    drop(testbed);
    let mut testbed = Testbed::open(bench, ConnParams::default());
    let last = testbed.far.remote((1 << 18) - 4999);
    we_fail(&mut testbed, WrOp::Read(last), 5000, Status::RemoteAccess);
}

fn they_reach_too_far(bench: &Bench) {
    for (op, len) in [("write", 64), ("read", 5000)] {
        let mut testbed = Testbed::open(bench, ConnParams::default());
        let last = testbed.near.mr.remote((1 << 18) - u64::from(len) + 1);
        they_fail(&mut testbed, PeerPost::new(1, op).from(0, len).at(last), Status::RemoteAccess);
    }
}

fn misaligned_atomics(bench: &Bench) {
    let mut testbed = Testbed::open(bench, ConnParams::default());
    let op = WrOp::Atomic(testbed.far.remote(4), Atomic::FetchAdd { add: 1 });
    we_fail(&mut testbed, op, 8, Status::RemoteInvalidRequest);
    // rxe rejects the guest's atomic when it is posted.
    let at = testbed.near.mr.remote(4).address;
    let answer =
        testbed.peer.request(&format!("post 0 1 fadd 0 0 8 {at} {} 1 0 0", testbed.near.mr.rkey()));
    assert_eq!(answer, "error ibv_post_send: Invalid argument");
}

fn receives_that_are_too_short(bench: &Bench) {
    for len in [100, 3000] {
        let mut testbed = Testbed::open(bench, ConnParams::default());
        let far = testbed.far;
        testbed.peer.receive(0, 5, &far, 0, len - 1);
        let range = [testbed.near.mr.sge(0, len)];
        testbed.post(SendRequest::new(1, WrOp::Send).with(&range));
        // The request is invalid, and InfiniBand has the responder report that. rxe of Linux 6.1
        // reports an error of its own instead.
        let completion = testbed.next();
        let statuses = [Status::RemoteInvalidRequest, Status::RemoteOperation];
        assert!(completion.id == 1 && statuses.contains(&completion.status), "{completion:?}");
        testbed.state_becomes(State::Err);
        assert_eq!(testbed.peer.state(0), ERROR_STATE);
        drop(testbed);
        let mut testbed = Testbed::open(bench, ConnParams::default());
        testbed.receive(5, 0, len - 1);
        they_fail(
            &mut testbed,
            PeerPost::new(1, "send").from(0, len),
            Status::RemoteInvalidRequest,
        );
        testbed.failed(5, Status::LocalLength);
    }
}

fn receives_are_posted_late(bench: &Bench) {
    const RECEIVE_DELAY: Duration = Duration::from_millis(150);
    let mut testbed = Testbed::open(bench, ConnParams::default());
    let far = testbed.far;
    testbed.near.fill(0, 3000, 1);
    let range = [testbed.near.mr.sge(0, 3000)];
    for op in [WrOp::Send, WrOp::WriteImm(far.remote(0), [1, 2, 3, 4])] {
        testbed.post(SendRequest::new(1, op).with(&range));
        std::thread::sleep(RECEIVE_DELAY);
        assert_eq!(testbed.cq.wait_next(Duration::ZERO).unwrap(), None);
        testbed.peer.receive(0, 2, &far, 0, 3000);
        testbed.done(1);
        testbed.peer.done(2);
        testbed.peer.check(&far, 0, 3000, 1);
    }
    assert!(testbed.qp().stats().unwrap().rnr_received > 0);

    testbed.peer.fill(&far, 0, 3000, 2);
    for op in ["send", "write_imm"] {
        let at = testbed.near.mr.remote(0);
        testbed.peer.post(&far, PeerPost::new(3, op).from(0, 3000).at(at));
        std::thread::sleep(RECEIVE_DELAY);
        testbed.peer.expect_no_completion();
        testbed.receive(4, 0, 3000);
        testbed.peer.done(3);
        testbed.done(4);
        testbed.near.check(0, 3000, 2);
    }
    assert!(testbed.qp().stats().unwrap().rnr_sent > 0);
}

fn no_receive_is_posted(bench: &Bench) {
    let params = ConnParams { rnr_retry: 2, ..ConnParams::default() };
    let testbed = Testbed::open(bench, params.clone());
    testbed.post(SendRequest::new(1, WrOp::Send).inline(b"hello"));
    testbed.failed(1, Status::RnrRetryExceeded);
    drop(testbed);
    let mut testbed = Testbed::open(bench, params);
    let far = testbed.far;
    testbed.peer.post(&far, PeerPost::new(2, "send").from(0, 5));
    testbed.peer.failed(2, Status::RnrRetryExceeded);
}

/// Short timeouts at both ends, but not for a guest that waits for a CPU.
fn short_timeouts() -> ConnParams {
    ConnParams { timeout: 14, retry: 3, ..ConnParams::default() }
}

fn the_peer_is_gone(bench: &Bench) {
    let mut testbed = Testbed::open(bench, short_timeouts());
    testbed.check_traffic();
    testbed.peer.ok("destroy 0");
    testbed.post(SendRequest::new(1, WrOp::Send).inline(b"hello"));
    testbed.failed(1, Status::RetryExceeded);

    drop(testbed);
    let mut testbed = Testbed::open(bench, short_timeouts());
    let far = testbed.far;
    testbed.check_traffic();
    testbed.qps.clear();
    testbed.peer.post(&far, PeerPost::new(2, "send").from(0, 5));
    testbed.peer.failed(2, Status::RetryExceeded);
}

fn the_link_is_cut(bench: &Bench) {
    let mut testbed = Testbed::open(bench, short_timeouts());
    let far = testbed.far;
    testbed.check_traffic();
    testbed.partition.cut();
    let range = [testbed.near.mr.sge(0, 5000)];
    testbed.post(SendRequest::new(1, WrOp::Read(far.remote(0))).with(&range));
    let at = testbed.near.mr.remote(0);
    testbed.peer.post(&far, PeerPost::new(2, "read").from(0, 5000).at(at));
    testbed.failed(1, Status::RetryExceeded);
    testbed.peer.failed(2, Status::RetryExceeded);
}

fn the_link_is_restored(bench: &Bench) {
    let mut testbed = Testbed::open(bench, ConnParams::default());
    let far = testbed.far;
    testbed.check_traffic();
    testbed.near.fill(0, 5000, 1);
    testbed.peer.fill(&far, 10_000, 5000, 2);
    testbed.partition.cut();
    let range = [testbed.near.mr.sge(0, 5000)];
    testbed.post(SendRequest::new(1, WrOp::Write(far.remote(0))).with(&range));
    let at = testbed.near.mr.remote(10_000);
    testbed.peer.post(&far, PeerPost::new(2, "write").from(10_000, 5000).at(at));
    std::thread::sleep(Duration::from_millis(200));
    testbed.peer.expect_no_completion();
    assert_eq!(testbed.cq.wait_next(Duration::ZERO).unwrap(), None);
    testbed.partition.heal();
    testbed.done(1);
    testbed.peer.done(2);
    testbed.near.check(10_000, 5000, 2);
    testbed.peer.check(&far, 0, 5000, 1);
    assert!(testbed.qp().stats().unwrap().timeouts > 0);
}

fn work_after_a_failure_is_flushed(bench: &Bench) {
    let testbed = Testbed::open(bench, ConnParams::default());
    let far = testbed.far;
    let wrong = Remote { rkey: far.rkey ^ 1, ..far.remote(0) };
    let range = [testbed.near.mr.sge(0, 64)];
    testbed.qp().post_receive(&[ReceiveRequest { id: 9, data: &[] }]).unwrap();
    let good = SendRequest::new(3, WrOp::Write(far.remote(0))).with(&range);
    let first = SendRequest { id: 1, ..good };
    testbed
        .qp()
        .post_send(&[first, SendRequest::new(2, WrOp::Write(wrong)).with(&range), good])
        .unwrap();
    testbed.done(1);
    testbed.failed(2, Status::RemoteAccess);
    testbed.failed(3, Status::Flushed);
    testbed.failed(9, Status::Flushed);
}
