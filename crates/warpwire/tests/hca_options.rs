//! Options of the software HCA that concern several devices on one address, and ACKs of queue pairs
//! that end.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::HashSet;
use std::time::Duration;

use warpwire::link::{Hub, Udp, UdpOptions};
use warpwire::mr::HostMemory;
use warpwire::verbs::{
    Access, AsyncEvent, Completion, Context, Cq, CqOptions, HcaOptions, ProgressMode, Qp,
    QpAttributes, QpOptions, QpnSlot, ReceiveRequest, SendRequest, Service, SrqOptions, State,
    Status, WrOp,
};

const WAIT: Duration = Duration::from_secs(20);

/// A context with a connected queue pair, its completion queue and the peer's.
fn pair(options: HcaOptions) -> [(Context, Qp, Cq); 2] {
    let hub = Hub::new();
    let sides = ["10.0.0.1:4791", "10.0.0.2:4791"].map(|address| {
        let link = hub.endpoint(address.parse().unwrap()).unwrap();
        let context = Context::open_with(link, options).unwrap();
        let cq = context.create_cq(16).unwrap();
        // The whole retry time is 8 × 0.27 s: a lost ACK fails the sender soon, and a thread that
        // waits for a CPU does not.
        let options = QpOptions::default().with_timeout(16);
        let qp = context.create_qp(&context.alloc_pd(), &cq, &cq, options).unwrap();
        (context, qp, cq)
    });
    sides[0].1.connect(&sides[1].1.endpoint()).unwrap();
    sides[1].1.connect(&sides[0].1.endpoint()).unwrap();
    sides
}

/// A queue pair that ends as soon as its last receive was polled has acknowledged it.
fn acknowledged_before_the_end(options: HcaOptions, end: fn(Qp)) {
    for round in 0..20 {
        let [(_a, sender, sent), (b, receiver, received)] = pair(options);
        let memory = HostMemory::new(64).unwrap();
        let mr = b.register(&b.alloc_pd(), memory, Access::LOCAL_WRITE).unwrap();
        // A message without data needs no memory of the right domain.
        receiver.post_receive(&[ReceiveRequest { id: 1, data: &[mr.sge(0, 0)] }]).unwrap();
        sender.post_send(&[SendRequest::new(2, WrOp::Send)]).unwrap();
        assert_eq!(received.wait_next(WAIT).unwrap().map(|done| done.id), Some(1));
        end(receiver);
        let done = sent.wait_next(WAIT).unwrap().expect("the send ends");
        assert_eq!((done.id, done.status), (2, Status::Success), "round {round}");
    }
}

/// The first ones in the list fill the link's batch of packets. The others have their turn in the
/// same step: in the next one, the same ones would come first.
#[test]
fn no_queue_pair_loses_its_turn_to_those_before_it() {
    let link = Udp::bind("127.0.0.1:0".parse().unwrap(), UdpOptions::default()).unwrap();
    let manual = HcaOptions::default().with_progress_mode(ProgressMode::Manual);
    let context = Context::open_with(link, manual).unwrap();
    let (pd, idle) = (context.alloc_pd(), context.create_cq(1).unwrap());
    let to = context.create_address_handle(context.path().local).unwrap();
    // Datagrams, which no window limits.
    let qps = [(); 5].map(|()| {
        let cq = context.create_cq(64).unwrap();
        let options = QpOptions::default().with_service(Service::Ud);
        let qp = context.create_qp(&pd, &cq, &cq, options).unwrap();
        qp.activate_ud(7).unwrap();
        let request = SendRequest::new(1, WrOp::Send).to(&to, 0x77, 7);
        qp.post_send(&[request.inline(b"small"); 40]).unwrap();
        (qp, cq)
    });
    assert_eq!(idle.poll(&mut [Completion::EMPTY]).unwrap(), 0);
    let sent = qps.each_ref().map(|(qp, _)| qp.stats().unwrap().packets_sent);
    assert!(sent.iter().all(|count| *count >= 32), "{sent:?}");
}

#[test]
fn a_destroyed_queue_pair_has_acknowledged() {
    acknowledged_before_the_end(HcaOptions::default(), drop);
}

#[test]
fn a_queue_pair_that_is_reset_or_failed_has_acknowledged() {
    let reset = |qp: Qp| {
        qp.modify(&QpAttributes::new(State::Reset)).unwrap();
        std::mem::forget(qp);
    };
    let fail = |qp: Qp| {
        qp.modify(&QpAttributes::new(State::Err)).unwrap();
        std::mem::forget(qp);
    };
    acknowledged_before_the_end(HcaOptions::default(), reset);
    acknowledged_before_the_end(HcaOptions::default(), fail);
}

#[test]
fn immediate_acks_leave_with_the_completion() {
    for _ in 0..20 {
        let options = HcaOptions::default().with_immediate_acks(true);
        let [(_a, sender, _sent), (b, receiver, received)] = pair(options);
        receiver.post_receive(&[ReceiveRequest { id: 1, data: &[] }]).unwrap();
        sender.post_send(&[SendRequest::new(2, WrOp::Send)]).unwrap();
        assert!(received.wait_next(WAIT).unwrap().is_some());
        // Reading the counters waits for the end of a step, and makes none.
        assert_eq!(b.stats().unwrap().pairs.packets_sent, 1);
    }
}

#[test]
fn a_completion_queue_grows_with_completions_in_it() {
    for (before, unread) in [(0, 0), (0, 4), (3, 1), (5, 3), (9, 4)] {
        let [(a, sender, sent), (_b, receiver, received)] = pair(HcaOptions::default());
        let (cq, theirs) = (a.create_cq(4).unwrap(), a.create_cq(4).unwrap());
        drop((sender, sent, receiver, received, theirs));
        let qp = a.create_qp(&a.alloc_pd(), &cq, &cq, QpOptions::default()).unwrap();
        qp.connect(&qp.endpoint()).unwrap();
        let mut next = 0..;
        let mut post = |count: u64| {
            for id in next.by_ref().take(count as usize) {
                qp.post_send(&[SendRequest::new(id, WrOp::Nop)]).unwrap();
            }
        };
        let mut expected = 0..;
        let mut poll = |count: u64| {
            for id in expected.by_ref().take(count as usize) {
                let done = cq.wait_next(WAIT).unwrap().expect("it completes");
                assert_eq!((done.id, done.status), (id, Status::Success));
            }
        };
        for _ in 0..before {
            post(1);
            poll(1);
        }
        post(unread);
        let start = std::time::Instant::now();
        while a.stats().unwrap().completions < before + unread && start.elapsed() < WAIT {
            a.soft().unwrap().poll().unwrap();
        }
        cq.resize(50).unwrap();
        assert_eq!(cq.entries(), 64);
        // As many more as fit: more than before.
        post(64 - unread);
        poll(64);
        post(64);
        poll(64);
        // An armed queue stays armed.
        cq.arm(false).unwrap();
        cq.resize(100).unwrap();
        assert!(!cq.take_event());
        post(1);
        assert!(cq.wait_event(WAIT).unwrap());
        poll(1);
        // Smaller is no change, and refused if completions would not fit.
        cq.resize(1).unwrap();
        assert_eq!(cq.entries(), 128);
        post(2);
        let start = std::time::Instant::now();
        while a.stats().unwrap().completions < before + 64 + 64 + 1 + 2 && start.elapsed() < WAIT {
            a.soft().unwrap().poll().unwrap();
        }
        let refused = cq.resize(1).unwrap_err();
        assert!(refused.to_string().contains("2 completions that were not polled"), "{refused}");
        cq.resize(2).unwrap();
        poll(2);
    }
}

#[test]
fn a_completion_queue_does_not_grow_without_bound_or_under_a_stream() {
    let [(a, _qp, cq), _] = pair(HcaOptions::default());
    for entries in [0, (1 << 22) + 1, u32::MAX] {
        let refused = cq.resize(entries).unwrap_err();
        assert_eq!(refused.kind(), &warpwire::error::Kind::InvalidArgument, "{refused}");
    }
    let options = CqOptions::default().with_manual_release(true);
    let refused = a.create_cq_with(options).unwrap().resize(512).unwrap_err();
    assert_eq!(refused.kind(), &warpwire::error::Kind::Unsupported, "{refused}");
}

#[test]
fn the_limit_of_a_shared_receive_queue_can_be_read() {
    let [(a, ..), _] = pair(HcaOptions::default());
    let srq = a.create_srq(&a.alloc_pd(), SrqOptions::default()).unwrap();
    assert_eq!(srq.limit(), 0);
    for id in 0..3 {
        srq.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
    }
    srq.arm(2);
    assert_eq!(srq.limit(), 2);
    srq.arm(4); // more than are posted: the event comes at once
    assert_eq!(srq.limit(), 0);
    assert!(matches!(a.next_event(), Some(AsyncEvent::LimitReached { .. })));
}

#[test]
fn numbers_carry_the_slot_and_are_reused_late() {
    let hub = Hub::new();
    let slot = QpnSlot::new(0x5a5).unwrap();
    let options = HcaOptions::default().with_qpn_slot(slot);
    let link = hub.endpoint("10.0.0.1:4791".parse().unwrap()).unwrap();
    let context = Context::open_with(link, options).unwrap();
    let (pd, cq) = (context.alloc_pd(), context.create_cq(4).unwrap());
    let small = QpOptions::default().with_send_depth(1).with_receive_depth(1);
    let create = || context.create_qp(&pd, &cq, &cq, small.clone());

    // One number after the other, none of them twice.
    let mut numbers = HashSet::new();
    for _ in 0..4096 {
        let qp = create().unwrap();
        assert_eq!(QpnSlot::of(qp.number()), Some(slot));
        assert!(numbers.insert(qp.number()), "{:#x} again", qp.number());
    }
    assert!(numbers.contains(&create().unwrap().number()), "the oldest is used again");
    // As many at a time as there are numbers, and no more.
    let all: Vec<Qp> = (0..4096).map(|_| create().unwrap()).collect();
    let refused = create().unwrap_err();
    assert!(refused.to_string().contains("its maximum of 4096"), "{refused}");
    assert_eq!(all.iter().map(Qp::number).collect::<HashSet<_>>(), numbers);
}

#[test]
fn devices_with_slots_and_ordinary_ones_are_peers() {
    let hub = Hub::new();
    let slots = [QpnSlot::new(7), None];
    let sides = ["10.0.0.1:4791", "10.0.0.2:4791"].iter().zip(slots).map(|(address, qpn_slot)| {
        let link = hub.endpoint(address.parse().unwrap()).unwrap();
        let options = HcaOptions::default().with_qpn_slot(qpn_slot);
        let context = Context::open_with(link, options).unwrap();
        let cq = context.create_cq(16).unwrap();
        let qp = context.create_qp(&context.alloc_pd(), &cq, &cq, QpOptions::default()).unwrap();
        (context, qp, cq)
    });
    let sides: Vec<_> = sides.collect();
    for (from, to) in [(0, 1), (1, 0)] {
        sides[from].1.connect(&sides[to].1.endpoint()).unwrap();
    }
    for (from, to) in [(0, 1), (1, 0)] {
        sides[to].1.post_receive(&[ReceiveRequest { id: 1, data: &[] }]).unwrap();
        sides[from].1.post_send(&[SendRequest::new(2, WrOp::Send)]).unwrap();
        let sent = sides[from].2.wait_next(WAIT).unwrap().unwrap();
        let received = sides[to].2.wait_next(WAIT).unwrap().unwrap();
        assert_eq!((sent.status, sent.qpn), (Status::Success, sides[from].1.number()));
        assert_eq!((received.status, received.qpn), (Status::Success, sides[to].1.number()));
    }
}

/// A thread that makes step after step does not delay the end of a process.
#[test]
fn a_flush_takes_its_turn_beside_a_thread_that_spins() {
    let spin = Duration::from_secs(60);
    let options =
        HcaOptions::default().with_progress_mode(ProgressMode::Thread { spin, core: None });
    let link = Hub::new().endpoint("10.0.0.1:4791".parse().unwrap()).unwrap();
    let context = Context::open_with(link, options).unwrap();
    let flush = || context.soft().unwrap().flush(WAIT);
    testkit::once_within(Duration::from_millis(100), "a flush", flush);
}
