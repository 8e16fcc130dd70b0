//! Several queue pairs, shared receive queues, events.

use std::time::Duration;

use warpwire::verbs::{ReceiveRequest, SendRequest, WrOp};

use crate::rxe::lab::{Bench, test_timeout};
use crate::rxe::peer::{PeerPost, SOLICITED};
use crate::rxe::testbed::{ConnParams, Testbed};
use testkit::cases;

cases!(Bench; CASES: several_queue_pairs, our_shared_receives, their_shared_receives, events);

const COUNT: usize = 8;

fn several_queue_pairs(bench: &Bench) {
    const EACH: u64 = 8;
    let mut testbed = Testbed::open(bench, ConnParams { qps: COUNT, ..ConnParams::default() });
    let far = testbed.far;
    let offset = |index: usize, n: u64| (index as u64 * EACH + n) * 2000;
    // All local requests are in flight at the same time, then all of the guest's.
    let mut ids = Vec::new();
    for index in 0..COUNT {
        for n in 0..EACH {
            let id = index as u64 * 100 + n;
            testbed.near.fill(offset(index, n), 1999, id);
            let range = [testbed.near.mr.sge(offset(index, n), 1999)];
            let request = SendRequest::new(id, WrOp::Write(far.remote(offset(index, n))));
            testbed.qps[index].post_send(&[request.with(&range)]).unwrap();
            ids.push(id);
        }
    }
    let mut ended: Vec<u64> = ids
        .iter()
        .map(|_| testbed.next())
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
            testbed.peer.check(&far, offset(index, n), 1999, id);
            let read = PeerPost::new(id, "read").from(130_000 + offset(index, n), 1999);
            let read = read.at(testbed.near.mr.remote(offset(index, n)));
            testbed.peer.post(&far, PeerPost { qp: index, ..read });
        }
    }
    let mut ended: Vec<u64> = ids
        .iter()
        .map(|_| testbed.peer.next())
        .map(|one| {
            assert_eq!(one.status, 0, "{one:?}");
            one.id
        })
        .collect();
    ended.sort_unstable();
    assert_eq!(ended, ids);
    for index in 0..COUNT {
        testbed.peer.check(&far, 130_000 + offset(index, 3), 1999, index as u64 * 100 + 3);
    }
}

fn our_shared_receives(bench: &Bench) {
    let params = ConnParams { qps: 4, shared: [true, false], ..ConnParams::default() };
    let mut testbed = Testbed::open(bench, params);
    let far = testbed.far;
    let srq = testbed.srq.clone().unwrap();
    let post = |testbed: &Testbed, id: u64| {
        let data = [testbed.near.mr.sge(id * 2000, 2000)];
        srq.post_receive(&[ReceiveRequest { id, data: &data }]).unwrap();
    };
    for round in 0..5 {
        for id in 0..4 {
            post(&testbed, id);
        }
        for index in 0..4 {
            let seed = round * 10 + index as u64;
            testbed.peer.fill(&far, index as u64 * 2000, 1500, seed);
            let send = PeerPost::new(seed, "send").from(index as u64 * 2000, 1500);
            testbed.peer.post(&far, PeerPost { qp: index, ..send });
            testbed.peer.done(seed);
            let done = testbed.next();
            assert!(done.is_success() && done.qpn == testbed.qps[index].number(), "{done:?}");
            testbed.near.check(done.id * 2000, 1500, seed);
        }
    }
    // No receive is left: the sender retries until one is posted.
    testbed.peer.post(&far, PeerPost { qp: 2, ..PeerPost::new(77, "send").from(0, 100) });
    testbed.peer.expect_no_completion();
    post(&testbed, 3);
    testbed.peer.done(77);
    testbed.done(3);
    assert!(testbed.qps[2].stats().unwrap().rnr_sent > 0);
}

fn their_shared_receives(bench: &Bench) {
    let params = ConnParams { qps: 4, shared: [false, true], ..ConnParams::default() };
    let mut testbed = Testbed::open(bench, params);
    let far = testbed.far;
    for round in 0..3 {
        for id in 0..4 {
            testbed.peer.receive_shared(id, &far, id * 2000, 2000);
        }
        for index in 0..4 {
            let seed = round * 10 + index as u64;
            testbed.near.fill(0, 1500, seed);
            let range = [testbed.near.mr.sge(0, 1500)];
            let request = SendRequest::new(seed, WrOp::Send).with(&range);
            testbed.qps[index].post_send(&[request]).unwrap();
            testbed.done(seed);
            let done = testbed.peer.next();
            assert_eq!((done.status, done.len), (0, 1500), "{done:?}");
            testbed.peer.check(&far, done.id * 2000, 1500, seed);
        }
    }
}

fn events(bench: &Bench) {
    let mut testbed = Testbed::open(bench, ConnParams::default());
    let far = testbed.far;
    for id in 0..2 {
        testbed.peer.receive(0, id, &far, 0, 100);
        testbed.receive(id, 0, 100);
    }
    // The guest is woken by a solicited message only.
    testbed.peer.ok("arm 1");
    testbed.post(SendRequest::new(10, WrOp::Send).inline(b"quietly"));
    testbed.done(10);
    assert_eq!(testbed.peer.request("event 100"), "none");
    testbed.post(SendRequest::new(11, WrOp::Send).inline(b"loudly").solicited());
    testbed.done(11);
    testbed.peer.ok("event 10000");
    testbed.peer.done(0);
    testbed.peer.done(1);

    testbed.cq.arm(true).unwrap();
    testbed.peer.post(&far, PeerPost::new(20, "send").from(0, 7));
    testbed.peer.done(20);
    assert!(!testbed.cq.wait_event(Duration::from_millis(100)).unwrap());
    testbed.peer.post(&far, PeerPost { flags: SOLICITED, ..PeerPost::new(21, "send").from(0, 6) });
    testbed.peer.done(21);
    assert!(testbed.cq.wait_event(test_timeout()).unwrap());
    assert!(!testbed.done(0).solicited);
    assert!(testbed.done(1).solicited);
}
