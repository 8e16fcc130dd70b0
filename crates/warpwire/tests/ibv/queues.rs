//! Shared receive queues, completion events, and lifetimes.

use std::time::Duration;

use warpwire::ibv::{AsyncEvent, QpOptions, ReceiveRequest, SendRequest, WrOp};

use crate::ibv::testbed::{Testbed, test_timeout};
use testkit::cases;

cases!(CASES:
    shared_receives,
    a_shared_queue_that_runs_low,
    completion_events,
    solicited_events,
    children_keep_their_parents_alive,
);

fn shared_receives() {
    let testbed = Testbed::unconnected(|options| options);
    let srq = testbed.pd.create_srq(16, 1).unwrap();
    let with_srq =
        QpOptions { srq: Some(srq.clone()), gid_index: testbed.gid_index, ..QpOptions::default() };
    let plain = QpOptions { gid_index: testbed.gid_index, ..QpOptions::default() };
    let pair = |options: &QpOptions| {
        testbed.pd.create_qp(&testbed.b.cq, &testbed.b.cq, options.clone()).unwrap()
    };
    let receivers = [pair(&with_srq), pair(&with_srq)];
    let senders = [(); 2]
        .map(|()| testbed.pd.create_qp(&testbed.a.cq, &testbed.a.cq, plain.clone()).unwrap());
    for (sender, receiver) in senders.iter().zip(&receivers) {
        sender.connect(&receiver.endpoint().unwrap()).unwrap();
        receiver.connect(&sender.endpoint().unwrap()).unwrap();
    }
    let places = [0, 1, 2, 3].map(|n| [testbed.b.mr.sge(n * 100, 100)]);
    let receives: Vec<_> =
        places.iter().enumerate().map(|(n, data)| ReceiveRequest { id: n as u64, data }).collect();
    srq.post_receive(&receives).unwrap();
    for (n, sender) in [0, 1, 1, 0].into_iter().enumerate() {
        let text = [n as u8 + 1; 10];
        senders[sender].post_send(&[SendRequest::new(50, WrOp::Send).inline(&text)]).unwrap();
        testbed.a.done(50);
        let received = testbed.b.done(n as u64);
        assert_eq!((received.qpn, received.len), (receivers[sender].number(), 10));
        let mut bytes = [0; 10];
        testbed.b.memory.bytes().read(n as u64 * 100, &mut bytes).unwrap();
        assert_eq!(bytes, text);
    }
    // A queue pair with an SRQ has no receive queue of its own.
    let refused = receivers[0].post_receive(&receives).unwrap_err();
    assert!(refused.error.to_string().contains("to the SRQ"), "{refused}");
}

fn a_shared_queue_that_runs_low() {
    let testbed = Testbed::unconnected(|options| options);
    let srq = testbed.pd.create_srq(16, 1).unwrap();
    let options =
        QpOptions { srq: Some(srq.clone()), gid_index: testbed.gid_index, ..QpOptions::default() };
    let receiver = testbed.pd.create_qp(&testbed.b.cq, &testbed.b.cq, options).unwrap();
    testbed.a.qp.connect(&receiver.endpoint().unwrap()).unwrap();
    receiver.connect(&testbed.a.qp.endpoint().unwrap()).unwrap();
    let buffer = [testbed.b.mr.sge(0, 100)];
    let receive = ReceiveRequest { id: 1, data: &buffer };
    srq.post_receive(&[receive; 4]).unwrap();
    srq.arm(3).unwrap();
    while testbed.context.next_event().unwrap().is_some() {}
    for _ in 0..3 {
        testbed.a.post(SendRequest::new(2, WrOp::Send).inline(b"one less"));
        testbed.a.done(2);
        testbed.b.done(1);
    }
    let start = std::time::Instant::now();
    loop {
        match testbed.context.next_event().unwrap() {
            Some(AsyncEvent::LimitReached { srqn: number }) => {
                break assert_eq!(number, srq.number());
            }
            Some(other) => eprintln!("also: {other:?}"),
            None => std::thread::sleep(Duration::from_millis(5)),
        }
        assert!(start.elapsed() < test_timeout(), "no event");
    }
}

fn completion_events() {
    let testbed = Testbed::new();
    let short = Duration::from_millis(50);
    assert!(!testbed.b.cq.wait_event(short).unwrap(), "an event without arming");
    testbed.b.cq.arm(false).unwrap();
    assert!(!testbed.b.cq.wait_event(short).unwrap(), "an event without a completion");
    testbed.b.receive(1, 0, 64);
    testbed.a.post(SendRequest::new(2, WrOp::Send).inline(b"wake"));
    assert!(testbed.b.cq.wait_event(test_timeout()).unwrap());
    testbed.b.done(1);
    testbed.a.done(2);
    // One event per arming.
    testbed.check_traffic();
    while testbed.b.cq.wait_event(short).unwrap() {}
    assert!(!testbed.b.cq.take_event().unwrap());
}

fn solicited_events() {
    let testbed = Testbed::new();
    let short = Duration::from_millis(50);
    for n in 0..2 {
        testbed.b.receive(n, 0, 64);
    }
    testbed.b.cq.arm(true).unwrap();
    testbed.a.post(SendRequest::new(10, WrOp::Send).inline(b"do not wake"));
    testbed.a.done(10);
    assert!(!testbed.b.cq.wait_event(short).unwrap());
    testbed.a.post(SendRequest::new(11, WrOp::Send).inline(b"wake").solicited());
    assert!(testbed.b.cq.wait_event(test_timeout()).unwrap());
    testbed.a.done(11);
    testbed.b.done(0);
    testbed.b.done(1);
}

/// Handles are dropped in the worst order; those that are left still work.
fn children_keep_their_parents_alive() {
    let testbed = Testbed::new();
    let Testbed { context, pd, a, b, .. } = testbed;
    drop(context);
    drop(pd);
    b.receive(1, 0, 64);
    a.post(SendRequest::new(2, WrOp::Send).inline(b"hello"));
    a.done(2);
    b.done(1);
    let crate::ibv::testbed::TestQp { qp, cq, memory, mr } = a;
    drop(cq);
    drop(memory);
    // The registration keeps its memory alive, and the queue pair its completion queue.
    b.receive(3, 0, 64);
    qp.post_send(&[SendRequest::new(4, WrOp::Send).with(&[mr.sge(0, 8)])]).unwrap();
    assert_eq!(b.done(3).len, 8);
    drop(mr);
    drop(qp);
}
