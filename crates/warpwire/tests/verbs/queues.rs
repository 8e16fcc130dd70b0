//! Queues that fill up, wrap and are shared; all kinds of completion queues; WQEs written by other
//! writers.

use std::time::Duration;

use warpwire::hca::QueueMemory;
use warpwire::mlx5::{self, Builder, Doorbell, DoorbellRecord, Scratch, WqeOpcode};
use warpwire::verbs::{
    AsyncEvent, Completion, Cq, CqOptions, PostError, ProgressMode, Qp, QpAttributes, QpOptions,
    ReceiveRequest, Remote, SendRequest, SrqOptions, State, Status, WrOp,
};

use crate::verbs::fixture::{Fixture, QpPair, TestQp, Testbed, connect, same, test_timeout};
use testkit::cases;

cases!(Fixture; CASES:
    unsignaled_chains,
    a_full_ring_is_busy,
    receive_queues_wrap,
    many_queue_pairs_share_an_srq,
    two_queue_pairs_on_one_completion_queue,
);
cases!(Fixture; ONCE:
    indices_wrap_at_sixteen_bits,
    receive_counters_wrap_at_sixteen_bits,
    limits_of_shared_receives,
    shared_receives_outlive_their_users,
    a_shared_receive_in_use,
    last_wqe_reached_is_reported,
    an_overrun_fails_its_users,
    ignored_overruns,
    a_collapsed_queue,
    queues_in_device_memory,
    wqes_of_other_writers,
    only_the_first_error,
    a_thread_that_holds_a_batch_cannot_post_beside_it,
);

fn unsignaled_chains(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default().with_signal_all(false).with_send_depth(16));
    let far = fixture.host(&testbed.b, 4096);
    for round in 0..50u64 {
        let mut batch = conn.a.qp.batch().unwrap();
        for n in 0..15 {
            let at = far.mr.remote(n * 8);
            let bytes = (round * 100 + n).to_ne_bytes();
            batch.push(&SendRequest::new(n, WrOp::Write(at)).inline(&bytes).unsignaled()).unwrap();
        }
        batch.push(&SendRequest::new(99, WrOp::Write(far.mr.remote(200))).inline(b"last")).unwrap();
        batch.post();
        testbed.done(&conn.a.sends, 99);
        assert!((0..15).all(|n| far.word(n * 8) == round * 100 + n));
    }
    testbed.expect_no_completion(&conn.a.sends);
    // A dropped batch posts nothing.
    let mut batch = conn.a.qp.batch().unwrap();
    batch.push(&SendRequest::new(5, WrOp::Write(far.mr.remote(0))).inline(b"never")).unwrap();
    drop(batch);
    conn.a.qp.post_send(&[SendRequest::new(6, WrOp::Nop)]).unwrap();
    testbed.done(&conn.a.sends, 6);
    assert_eq!(far.word(0), 4900);
}

/// The lock of a send queue is not reentrant: the thread would wait for itself.
fn a_thread_that_holds_a_batch_cannot_post_beside_it(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let mut batch = conn.a.qp.batch().unwrap();
    let refused = conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Nop)]).unwrap_err();
    assert_eq!(refused, PostError::BatchHeld);
    assert!(refused.to_string().contains("holds a batch"), "{refused}");
    assert_eq!(conn.a.qp.batch().unwrap_err(), PostError::BatchHeld);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| conn.a.qp.post_send(&[SendRequest::new(3, WrOp::Nop)]));
        batch.push(&SendRequest::new(2, WrOp::Nop)).unwrap();
        batch.post();
        other.join().unwrap().unwrap();
    });
    conn.a.qp.post_send(&[SendRequest::new(4, WrOp::Nop)]).unwrap();
    for id in [2, 3, 4] {
        testbed.done(&conn.a.sends, id);
    }
}

fn a_full_ring_is_busy(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default().with_send_depth(4).with_receive_depth(4));
    for round in 0..20u64 {
        let mut posted = 0;
        let refused = loop {
            match conn.a.qp.post_send(&[SendRequest::new(round * 1000 + posted, WrOp::Nop)]) {
                Ok(()) => posted += 1,
                Err(why) => break why,
            }
        };
        assert_eq!(refused, PostError::Full);
        assert!((4..=64).contains(&posted));
        for n in 0..posted {
            testbed.done(&conn.a.sends, round * 1000 + n);
        }
        // All requests are posted, or none.
        let many = vec![SendRequest::new(0, WrOp::Nop); posted as usize + 1];
        assert_eq!(conn.a.qp.post_send(&many), Err(PostError::Full));
        testbed.step();
        let mut one = [Completion::EMPTY];
        assert_eq!(conn.a.sends.poll(&mut one).unwrap(), 0, "part of a rejected batch was posted");
    }
    let four = [ReceiveRequest { id: 1, data: &[] }; 4];
    conn.b.qp.post_receive(&four[..3]).unwrap();
    assert_eq!(conn.b.qp.post_receive(&four[..2]), Err(PostError::Full));
    conn.b.qp.post_receive(&four[..1]).unwrap();
    assert_eq!(conn.b.qp.post_receive(&four[..1]), Err(PostError::Full));
    let srq = testbed
        .b
        .context
        .create_srq(&testbed.b.pd, SrqOptions::default().with_depth(3).with_max_sge(1))
        .unwrap();
    srq.post_receive(&four[..3]).unwrap();
    assert_eq!(srq.post_receive(&four[..1]), Err(PostError::Full));
}

/// The 16-bit counters of doorbell and doorbell record wrap. Near each wrap the engine runs for 22
/// ms, so that a misread counter would show.
fn indices_wrap_at_sixteen_bits(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default().with_signal_all(false).with_max_inline_data(20));
    let far = fixture.host(&testbed.b, 4096);
    let nop = SendRequest::new(1, WrOp::Nop).unsignaled();
    let mut posted = 0u64;
    while posted < 2 * 65_536 + 300 {
        let near_the_end = posted % 65_536 > 65_536 - 200 || posted % 65_536 < 30;
        let count = if near_the_end { 9 } else { 100 };
        let mut requests = vec![nop; count];
        let value = posted.to_ne_bytes();
        requests.push(SendRequest::new(posted, WrOp::Write(far.mr.remote(8))).inline(&value));
        conn.a.qp.post_send(&requests).unwrap();
        testbed.done(&conn.a.sends, posted);
        assert_eq!(far.word(8), posted);
        posted += requests.len() as u64;
        if near_the_end {
            conn.a.qp.post_receive(&[]).unwrap(); // rings without new WQEs
            testbed.poll_for(Duration::from_millis(22));
            assert_eq!(conn.a.qp.state().unwrap(), State::Rts, "at WQEBB {posted}");
        }
    }
}

fn exchange(conn: &QpPair, rounds: u64, depth: u64) {
    let post = |id| conn.b.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
    (0..depth).for_each(post);
    let mut done = [Completion::EMPTY; 32];
    let (mut sent, mut acknowledged, mut received) = (0, 0, 0);
    while received < rounds {
        while sent < rounds && sent < acknowledged + depth {
            let imm = (sent as u32).to_be_bytes();
            conn.a.qp.post_send(&[SendRequest::new(sent, WrOp::SendImm(imm))]).unwrap();
            sent += 1;
        }
        acknowledged += conn.a.sends.poll(&mut done).unwrap() as u64;
        let count = conn.b.receives.poll(&mut done).unwrap();
        for arrived in &done[..count] {
            let imm = warpwire::verbs::CompletionKind::ReceiveImm((received as u32).to_be_bytes());
            assert_eq!(
                (arrived.id, arrived.kind, arrived.status),
                (received, imm, Status::Success)
            );
            post(received + depth);
            received += 1;
        }
    }
}

fn receive_queues_wrap(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default().with_receive_depth(8));
    exchange(&conn, 500, 8);
}

fn receive_counters_wrap_at_sixteen_bits(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default().with_receive_depth(32));
    exchange(&conn, 66_000, 32);
}

/// Twenty queue pairs share one SRQ of 15 slots; all messages arrive whole, and slots are reused.
fn many_queue_pairs_share_an_srq(fixture: &Fixture) {
    const PAIRS: usize = 20;
    let testbed = fixture.testbed();
    let end = &testbed.b;
    let srq = end
        .context
        .create_srq(&end.pd, SrqOptions::default().with_depth(15).with_max_sge(2))
        .unwrap();
    let memory = fixture.host(end, 64 * 16_384);
    let cq = end.context.create_cq(64).unwrap();
    let post = |slot: u64| {
        let data = [memory.mr.sge(slot * 16_384, 3000), memory.mr.sge(slot * 16_384 + 8192, 7000)];
        srq.post_receive(&[ReceiveRequest { id: slot, data: &data }]).unwrap();
    };
    (0..15).for_each(post);
    // More messages are in flight than receives are posted, so senders get RNR NAKs. On an emulated
    // processor, twenty senders that retry after 10 µs leave no time for anything else (3 messages
    // per second); code 20 stands for 10 ms.
    let min_rnr_timer = if end.is_device() { 20 } else { QpOptions::default().min_rnr_timer };
    let mut pairs = Vec::new();
    for _ in 0..PAIRS {
        let options = QpOptions::default().with_srq(srq.clone()).with_min_rnr_timer(min_rnr_timer);
        let a = testbed.test_qp(&testbed.a, QpOptions::default());
        let qp = end.context.create_qp(&end.pd, &cq, &cq, options).unwrap();
        assert!(qp.post_receive(&[]).unwrap_err().to_string().contains("SRQ"));
        connect(&a.qp, &qp);
        pairs.push((a, qp));
    }
    let near = fixture.host(&testbed.a, 1 << 16);
    let wanted = near.pattern(0, 10_000, 5);
    let mut done = [Completion::EMPTY];
    let (mut sent, mut received) = (0, 0);
    let start = std::time::Instant::now();
    while received < 600 {
        assert!(start.elapsed() < test_timeout() * 3, "{received} of {sent} messages arrived");
        while sent < 600 && sent < received + 40 {
            let len = 1 + (sent * 397) % 10_000;
            let request = SendRequest::new(sent as u64, WrOp::Send);
            let (test_qp, _) = &pairs[sent % PAIRS];
            test_qp.qp.post_send(&[request.with(&[near.mr.sge(0, len as u32)])]).unwrap();
            sent += 1;
        }
        for (test_qp, _) in &pairs {
            while test_qp.sends.poll(&mut done).unwrap() == 1 {
                assert!(done[0].is_success(), "{:?}", done[0]);
            }
        }
        while cq.poll(&mut done).unwrap() == 1 {
            let (slot, len) = (done[0].id, done[0].len as usize);
            assert!(done[0].is_success() && pairs.iter().any(|(_, qp)| qp.number() == done[0].qpn));
            let first = len.min(3000);
            same(&memory.read(slot * 16_384, first), &wanted[..first], "a shared receive");
            let rest = memory.read(slot * 16_384 + 8192, len - first);
            same(&rest, &wanted[first..len], "a shared receive's second range");
            post(slot);
            received += 1;
        }
    }
}

/// A connected pair whose second queue pair uses an SRQ.
fn sharing(testbed: &Testbed, depth: u32) -> (warpwire::verbs::Srq, QpPair) {
    let end = &testbed.b;
    let srq = end
        .context
        .create_srq(&end.pd, SrqOptions::default().with_depth(depth).with_max_sge(1))
        .unwrap();
    let options = QpOptions::default().with_srq(srq.clone());
    let conn = testbed.join_with(QpOptions::default(), options);
    testbed.b.async_events();
    (srq, conn)
}

fn send(testbed: &Testbed, test_qp: &TestQp) {
    test_qp.qp.post_send(&[SendRequest::new(0, WrOp::Send)]).unwrap();
    testbed.done(&test_qp.sends, 0);
}

fn limits_of_shared_receives(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let (srq, conn) = sharing(&testbed, 8);
    srq.post_receive(&[ReceiveRequest { id: 0, data: &[] }; 6]).unwrap();
    srq.arm(4);
    let async_events = || {
        testbed
            .b
            .async_events()
            .into_iter()
            .filter(|e| matches!(e, AsyncEvent::LimitReached { .. }))
            .count()
    };
    send(&testbed, &conn.a);
    send(&testbed, &conn.a);
    assert_eq!(async_events(), 0, "four receives left are not fewer than four");
    send(&testbed, &conn.a);
    testbed.until("a limit event", || testbed.b.context.events().wait(Duration::ZERO).unwrap());
    assert_eq!(async_events(), 1);
    send(&testbed, &conn.a);
    assert_eq!(async_events(), 0, "reported more than once");
    srq.arm(4);
    assert_eq!(async_events(), 1, "the limit was already passed when armed");
    srq.arm(1);
    srq.arm(0);
    send(&testbed, &conn.a);
    send(&testbed, &conn.a);
    assert_eq!(async_events(), 0, "an event after disarming");
}

/// SRQ slots are returned, whatever happens to the queue pairs that used them and to their
/// completions.
fn shared_receives_outlive_their_users(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let end = &testbed.b;
    let srq = end
        .context
        .create_srq(&end.pd, SrqOptions::default().with_depth(7).with_max_sge(1))
        .unwrap();
    let cq = end.context.create_cq(16).unwrap();
    for round in 0..40 {
        let options = QpOptions::default().with_srq(srq.clone());
        let test_qp = testbed.test_qp(&testbed.a, QpOptions::default());
        let qp = end.context.create_qp(&end.pd, &cq, &cq, options).unwrap();
        connect(&test_qp.qp, &qp);
        srq.post_receive(&[ReceiveRequest { id: round, data: &[] }; 3]).unwrap();
        (0..3).for_each(|_| send(&testbed, &test_qp));
        if round % 2 == 0 {
            qp.modify(&QpAttributes::new(State::Reset)).unwrap();
        }
        drop(qp); // with three unread completions
    }
    testbed.expect_no_completion(&cq);
}

/// A queue pair is reset or destroyed in the middle of a message: the next queue pair gets its
/// receive.
fn a_shared_receive_in_use(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let end = &testbed.b;
    let near = fixture.host(&testbed.a, 1 << 20);
    let far = fixture.host(end, 1 << 20);
    let srq = end
        .context
        .create_srq(&end.pd, SrqOptions::default().with_depth(1).with_max_sge(1))
        .unwrap();
    let options = QpOptions::default().with_srq(srq.clone());
    let data = [near.mr.sge(0, 1 << 20)];
    let buffer = [far.mr.sge(0, 1 << 20)];
    srq.post_receive(&[ReceiveRequest { id: 1, data: &buffer }]).unwrap();
    for round in 0..4 {
        let conn = testbed.join_with(QpOptions::default(), options.clone());
        conn.a.qp.post_send(&[SendRequest::new(2, WrOp::Send).with(&data)]).unwrap();
        let begun = || conn.b.qp.stats().unwrap().packets_received > 0;
        testbed.until("the first packet of a message", begun);
        if round % 2 == 0 {
            conn.b.qp.modify(&QpAttributes::new(State::Reset)).unwrap();
        }
    }
    let conn = testbed.join_with(QpOptions::default(), options);
    let wanted = near.pattern(0, 1 << 20, 4);
    conn.a.qp.post_send(&[SendRequest::new(2, WrOp::Send).with(&data)]).unwrap();
    testbed.done(&conn.a.sends, 2);
    testbed.done(&conn.b.receives, 1);
    same(&far.read(0, 1 << 20), &wanted, "the receive of a destroyed queue pair");
    srq.post_receive(&[ReceiveRequest { id: 1, data: &buffer }]).unwrap();
}

fn last_wqe_reached_is_reported(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let (srq, conn) = sharing(&testbed, 8);
    srq.post_receive(&[ReceiveRequest { id: 0, data: &[] }; 5]).unwrap();
    send(&testbed, &conn.a);
    testbed.done(&conn.b.receives, 0);
    conn.b.qp.modify(&QpAttributes::new(State::Err)).unwrap();
    testbed.expect_no_completion(&conn.b.receives); // shared receives are not flushed
    let qpn = conn.b.qp.number();
    assert_eq!(testbed.b.async_events(), [AsyncEvent::LastReceiveReached { qpn }]);
    // Another queue pair can still use the SRQ.
    let options = QpOptions::default().with_srq(srq.clone());
    let other = testbed.join_with(QpOptions::default(), options);
    (0..4).for_each(|_| send(&testbed, &other.a));
}

fn two_queue_pairs_on_one_completion_queue(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let cq = testbed.a.context.create_cq(256).unwrap();
    let mut peers = Vec::new();
    for _ in 0..2 {
        let qp =
            testbed.a.context.create_qp(&testbed.a.pd, &cq, &cq, QpOptions::default()).unwrap();
        let peer = testbed.test_qp(&testbed.b, QpOptions::default());
        connect(&qp, &peer.qp);
        peers.push((qp, peer));
    }
    let mut counts = [[0; 2]; 2];
    for id in 0..50 {
        for (qp, peer) in &peers {
            qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
            peer.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
            qp.post_send(&[SendRequest::new(id, WrOp::Send)]).unwrap();
            peer.qp.post_send(&[SendRequest::new(id, WrOp::Send)]).unwrap();
        }
    }
    for _ in 0..200 {
        let done = testbed.next(&cq);
        let which = usize::from(done.qpn == peers[1].0.number());
        let count = &mut counts[which][usize::from(done.is_receive())];
        assert_eq!(
            (done.id, done.is_success()),
            (*count, true),
            "completions of a queue out of order"
        );
        *count += 1;
    }
    assert_eq!(counts, [[50; 2]; 2]);
}

/// A full CQ that is not polled raises one overrun event and fails its users; other queue pairs
/// keep working.
fn an_overrun_fails_its_users(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let bystander = testbed.join(QpOptions::default());
    let cq = testbed.a.context.create_cq(4).unwrap();
    let other_cq = testbed.a.context.create_cq(64).unwrap();
    let qp = |sends: &Cq, receives: &Cq| {
        let qp = testbed
            .a
            .context
            .create_qp(&testbed.a.pd, sends, receives, QpOptions::default())
            .unwrap();
        let peer = testbed.test_qp(&testbed.b, QpOptions::default());
        connect(&qp, &peer.qp);
        (qp, peer)
    };
    let users: [(Qp, TestQp); 3] = [qp(&cq, &other_cq), qp(&other_cq, &cq), qp(&cq, &cq)];
    let other_user = qp(&other_cq, &other_cq);
    let nops: Vec<_> = (0..10).map(|id| SendRequest::new(id, WrOp::Nop)).collect();
    users[0].0.post_send(&nops).unwrap();
    testbed.until("an overrun", || testbed.a.context.events().wait(Duration::ZERO).unwrap());
    testbed.poll_for(Duration::from_millis(2));
    let async_events = testbed.a.async_events();
    let overruns =
        async_events.iter().filter(|e| **e == AsyncEvent::CqOverrun { cqn: cq.number() }).count();
    assert_eq!(overruns, 1, "{async_events:?}");
    for (user, _) in &users {
        assert_eq!(user.state().unwrap(), State::Err);
    }
    let mut done = [Completion::EMPTY; 16];
    assert_eq!(cq.poll(&mut done).unwrap(), 4, "the CQEs before the overrun");
    assert!(done[..4].iter().zip(0..).all(|(done, id)| done.id == id && done.is_success()));
    users[0].0.post_send(&nops).unwrap();
    testbed.poll_for(Duration::from_millis(2));
    assert_eq!(cq.poll(&mut done).unwrap(), 0, "a CQE after the overrun");
    assert_eq!(other_user.0.state().unwrap(), State::Rts);
    testbed.check_traffic(&bystander);
}

fn ignored_overruns(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let options = CqOptions::default().with_entries(4).with_ignore_overrun(true);
    let cq = testbed.a.context.create_cq_with(options).unwrap();
    let qp = testbed.a.context.create_qp(&testbed.a.pd, &cq, &cq, QpOptions::default()).unwrap();
    let peer = testbed.test_qp(&testbed.b, QpOptions::default());
    connect(&qp, &peer.qp);
    testbed.a.async_events();
    for count in 1..=10u16 {
        qp.post_send(&[SendRequest::new(0, WrOp::Nop)]).unwrap();
        testbed.poll_for(Duration::from_millis(1));
        let slot = u64::from(count - 1) % 4;
        let tail = cq.memory().unwrap().bytes().load_u32(slot * 64 + 60).unwrap();
        let tail = mlx5::CqeTail::parse(tail.to_ne_bytes());
        assert_eq!((tail.counter, tail.owner), (count - 1, (count - 1) / 4 % 2 == 1));
    }
    assert_eq!((testbed.a.async_events(), qp.state().unwrap()), (vec![], State::Rts));
}

fn a_collapsed_queue(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let options = CqOptions::default()
        .with_entries(1)
        .with_collapsed(true)
        .with_ignore_overrun(true)
        .with_memory(None)
        .with_manual_release(false);
    let cq = testbed.a.context.create_cq_with(options).unwrap();
    let qp = testbed.a.context.create_qp(&testbed.a.pd, &cq, &cq, QpOptions::default()).unwrap();
    let peer = testbed.test_qp(&testbed.b, QpOptions::default());
    connect(&qp, &peer.qp);
    let latest = |reserved| {
        let tail = cq.memory().unwrap().bytes().load_u32(60).unwrap();
        mlx5::collapsed_latest(reserved, mlx5::CqeTail::parse(tail.to_ne_bytes()).counter)
    };
    assert_eq!(latest(0), None);
    for count in 1..=20u64 {
        qp.post_send(&[SendRequest::new(0, WrOp::Nop)]).unwrap();
        testbed.until("the counter", || latest(count) == Some(count - 1));
    }
}

/// Queues, doorbell records and doorbells behind a window of a simulated GPU, and in its pinned
/// memory.
fn queues_in_device_memory(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let gpu = fixture.gpu();
    let (a, b) = (QpOptions::default(), QpOptions::default().with_max_send_sge(5));
    let behind = |len: u64| {
        let memory = gpu.alloc(len).unwrap();
        QueueMemory::window(memory.window().unwrap())
    };
    let options =
        CqOptions::default().with_entries(64).with_memory(behind(Cq::required_memory(64)));
    let cq = testbed.a.context.create_cq_with(options).unwrap();
    let memory = Some(behind(Qp::required_memory(&a).unwrap()));
    let qp = testbed.a.context.create_qp(&testbed.a.pd, &cq, &cq, a.with_memory(memory)).unwrap();
    let pinned = gpu.alloc_pinned(Qp::required_memory(&b).unwrap()).unwrap();
    let memory = Some(QueueMemory::pinned(pinned).unwrap());
    let peer = testbed.test_qp(&testbed.b, b.with_memory(memory));
    connect(&qp, &peer.qp);
    let far = fixture.host(&testbed.b, 4096);
    for id in 0..300 {
        qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
        qp.post_send(&[
            SendRequest::new(id, WrOp::Write(far.mr.remote(8))).inline(&id.to_ne_bytes())
        ])
        .unwrap();
        testbed.done(&cq, id);
        assert_eq!(far.word(8), id);
        peer.qp.post_send(&[SendRequest::new(id, WrOp::Send)]).unwrap();
        testbed.done(&cq, id);
        testbed.done(&peer.sends, id);
    }
    let short = QpOptions::default().with_memory(behind(64));
    assert!(testbed.a.context.create_qp(&testbed.a.pd, &cq, &cq, short).is_err());
    let short = CqOptions::default().with_entries(64).with_memory(behind(64));
    assert!(testbed.a.context.create_cq_with(short).is_err());
}

/// Writes a WQE into a send queue of `wqebbs` WQEBBs.
fn put(qp: &Qp, index: u16, wqebbs: u64, entry: &[u8]) {
    let (memory, layout) = qp.queues().unwrap();
    let slot = u64::from(index) % wqebbs;
    memory.bytes().write(layout.send + slot * 64, entry).unwrap();
}

/// Ways in which streams and kernels post: the last WQE's first bytes as the doorbell, in either
/// BlueFlame buffer; the doorbell alone; the doorbell record alone; the doorbell before the WQE.
/// The engine is not notified in any of them.
fn wqes_of_other_writers(fixture: &Fixture) {
    let progress_mode = ProgressMode::Thread { spin: Duration::ZERO, core: None };
    let testbed = fixture.with_progress(progress_mode);
    let conn = testbed.join(QpOptions::default().with_poll_doorbell(true));
    let qp = &conn.a.qp;
    let far = fixture.host(&testbed.b, 4096);
    let (memory, layout) = qp.queues().unwrap();
    let Remote { address, rkey } = far.mr.remote(8);
    let mut scratch = Scratch::default();
    for index in 0..60u16 {
        let value = u64::from(index) + 1000;
        let entry = Builder::new(&mut scratch, WqeOpcode::RdmaWrite, index, qp.number());
        let entry =
            entry.signaled().remote(address, rkey).inline(&value.to_ne_bytes()).finish().unwrap();
        let (doorbell, next) = (entry.doorbell(), Doorbell::next(qp.number(), index + 1));
        let method = index % 5;
        if method != 4 {
            put(qp, index, 1 << 15, entry.bytes());
        }
        let store = |at: u64, value: [u8; 8]| {
            memory.bytes().store_u64(at, u64::from_ne_bytes(value)).unwrap()
        };
        match method {
            0 => store(layout.doorbell, doorbell),
            1 => store(layout.doorbell + 256, doorbell),
            2 => store(layout.doorbell, next),
            3 => memory
                .bytes()
                .store_u32(layout.dbrec + 4, u32::from_ne_bytes(DoorbellRecord::word(index + 1)))
                .unwrap(),
            _ => {
                store(layout.doorbell, next);
                std::thread::sleep(Duration::from_micros(300));
                put(qp, index, 1 << 15, entry.bytes());
            }
        }
        let done = conn.a.sends.wait_next(Duration::from_secs(5)).unwrap().expect("a completion");
        assert!(done.is_success(), "{index}: {done:?}");
        assert_eq!(far.word(8), value);
    }
}

/// A WQE may request a completion for the first error only.
fn only_the_first_error(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default().with_signal_all(false));
    let qp = &conn.a.qp;
    let (memory, layout) = qp.queues().unwrap();
    let mut scratch = Scratch::default();
    for index in 0..4u16 {
        let entry = Builder::new(&mut scratch, WqeOpcode::RdmaWrite, index, qp.number());
        let mut bytes = entry.remote(0, 0).inline(b"x").finish().unwrap().bytes().to_vec();
        bytes[11] |= 1 << 2; // completion mode: first error only
        put(qp, index, 1 << 15, &bytes);
    }
    let word = u32::from_ne_bytes(DoorbellRecord::word(4));
    memory.bytes().store_u32(layout.dbrec + 4, word).unwrap();
    testbed.a.context.soft().unwrap().ring(qp.number());
    assert_eq!(testbed.next(&conn.a.sends).status, Status::RemoteAccess);
    testbed.expect_no_completion(&conn.a.sends);
}
