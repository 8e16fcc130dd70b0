//! Devices with several engines: queues are spread over them, and those that are shared work as on
//! one.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Barrier;
use std::time::Duration;

use warpwire::error::Kind as ErrorKind;
use warpwire::hca::MAX_ENGINES;
use warpwire::link::{Hub, Link, Shm, ShmOptions, Udp, UdpOptions};
use warpwire::verbs::{
    AsyncEvent, Completion, Context, Cq, EngineStats, GRH_LEN, HcaOptions, ProgressMode, Qp,
    QpOptions, QpnSlot, ReceiveRequest, Remote, SendRequest, Service, SrqOptions, State, Status,
    WrOp,
};

use crate::verbs::fixture::{
    ENGINES, Endpoint, Fixture, QpPair, Testbed, connect, same, test_timeout,
};
use testkit::cases;

cases!(Fixture; CASES:
    queue_pairs_are_spread,
    threads_use_an_engine_each,
    queue_pairs_that_share_a_queue_are_on_one_engine,
    completions_of_two_engines_in_one_queue,
    an_overrun_fails_users_on_all_engines,
    a_wait_for_another_engine,
    a_shared_receive_queue_moves_with_its_limit,
    datagrams_between_engines,
    deregistration_ends_the_access_of_all_engines,
    engines_that_were_left_are_used_again,
    a_sleeping_engine_is_woken,
    a_device_with_one_engine_reaches_one_with_several,
    a_number_of_engines_that_is_not_possible,
    links_with_one_engine,
);

fn engines(end: &Endpoint) -> Vec<EngineStats> {
    end.context.stats().unwrap().engines
}

fn port(qp: &Qp) -> u16 {
    qp.endpoint().address.port()
}

/// Queue pairs with completion queues of their own: as many per engine as `each`.
fn pairs(testbed: &Testbed, each: usize) -> Vec<QpPair> {
    (0..each * ENGINES as usize).map(|_| testbed.join(QpOptions::default())).collect()
}

/// A queue pair whose sends and receives complete in these queues.
fn qp_on(end: &Endpoint, sends: &Cq, receives: &Cq, options: QpOptions) -> Qp {
    end.context.create_qp(&end.pd, sends, receives, options).unwrap()
}

/// The peer of a queue pair with one of its own.
fn peer_of(testbed: &Testbed, qp: &Qp) -> (Qp, Cq) {
    let cq = testbed.b.context.create_cq(64).unwrap();
    let peer = qp_on(&testbed.b, &cq, &cq, QpOptions::default());
    connect(qp, &peer);
    (peer, cq)
}

fn queue_pairs_are_spread(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let pairs = pairs(&testbed, 2);
    for end in [&testbed.a, &testbed.b] {
        let each: Vec<usize> = engines(end).iter().map(|engine| engine.queue_pairs).collect();
        assert_eq!(each, [2; ENGINES as usize]);
        assert_eq!(end.context.soft().unwrap().engines(), ENGINES as usize);
        let ports: HashSet<u16> = engines(end).iter().map(|engine| engine.local.port()).collect();
        assert_eq!(ports.len(), ENGINES as usize, "an own socket each");
        let path = end.context.path().to_string();
        assert!(path.contains(&format!("{ENGINES} engines, also on ports")), "{path}");
    }
    let numbers: HashSet<u32> = pairs.iter().map(|pair| pair.a.qp.number()).collect();
    assert_eq!(numbers.len(), pairs.len());
    for pair in &pairs {
        let local = engines(&testbed.a).into_iter().map(|engine| engine.local);
        assert!(local.into_iter().any(|local| local == pair.a.qp.endpoint().address));
        assert_eq!(pair.a.qp.path().unwrap().local, pair.a.qp.endpoint().address);
        testbed.check_traffic(pair);
    }
    // Every engine has worked, and the device's counters are the sums.
    for end in [&testbed.a, &testbed.b] {
        let stats = end.context.stats().unwrap();
        assert!(stats.engines.iter().all(|engine| engine.pairs.packets_sent >= 4), "{stats:#?}");
        let sum = |of: fn(&EngineStats) -> u64| stats.engines.iter().map(of).sum::<u64>();
        assert_eq!(sum(|engine| engine.pairs.packets_sent), stats.pairs.packets_sent);
        assert_eq!(sum(|engine| engine.completions), stats.completions);
        assert_eq!(stats.completions, 2 * pairs.len() as u64);
        assert_eq!(end.context.soft().unwrap().link_counters().sent, stats.pairs.packets_sent);
    }
}

/// Each thread posts and polls on an engine of its own, at the same time.
fn threads_use_an_engine_each(fixture: &Fixture) {
    const LEN: usize = 200_000;
    for mode in [
        ProgressMode::Auto,
        ProgressMode::Manual,
        ProgressMode::Thread { spin: Duration::from_micros(100), core: None },
    ] {
        let testbed = fixture.with_progress(mode);
        let pairs = pairs(&testbed, 1);
        let from = fixture.host(&testbed.a, (pairs.len() * LEN) as u64);
        let to = fixture.host(&testbed.b, (pairs.len() * LEN) as u64);
        let wanted = from.pattern(0, pairs.len() * LEN, 5);
        let start = Barrier::new(pairs.len());
        let write = |index: usize, pair: &QpPair| {
            start.wait();
            let at = (index * LEN) as u64;
            let remote = Remote { address: to.mr.iova() + at, rkey: to.mr.rkey() };
            let range = [from.mr.sge(at, LEN as u32)];
            for id in 0..5 {
                let request = SendRequest::new(id, WrOp::Write(remote)).with(&range);
                pair.a.qp.post_send(&[request]).unwrap();
            }
            for id in 0..5 {
                testbed.done(&pair.a.sends, id);
            }
        };
        std::thread::scope(|scope| {
            for (index, pair) in pairs.iter().enumerate() {
                let write = &write;
                scope.spawn(move || write(index, pair));
            }
        });
        same(&to.read(0, pairs.len() * LEN), &wanted, "what four engines wrote");
    }
}

fn queue_pairs_that_share_a_queue_are_on_one_engine(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let end = &testbed.a;
    let cq = || end.context.create_cq(64).unwrap();
    // The first one's engine is that of all that follow.
    let (shared, alone) = (cq(), cq());
    let first = qp_on(end, &shared, &shared, QpOptions::default());
    let other = qp_on(end, &alone, &alone, QpOptions::default());
    assert_ne!(port(&first), port(&other));
    for _ in 0..3 {
        let (send, receive) = (cq(), cq());
        assert_eq!(port(&qp_on(end, &shared, &receive, QpOptions::default())), port(&first));
        assert_eq!(port(&qp_on(end, &send, &shared, QpOptions::default())), port(&first));
    }
    // A shared receive queue decides before completion queues do.
    let srq = end.context.create_srq(&end.pd, SrqOptions::default()).unwrap();
    let options = QpOptions::default().with_srq(Some(srq));
    let receiver = qp_on(end, &alone, &alone, options.clone());
    assert_eq!(port(&receiver), port(&other));
    assert_eq!(port(&qp_on(end, &cq(), &cq(), options.clone())), port(&other));
    assert_eq!(port(&qp_on(end, &shared, &shared, options)), port(&other));
}

/// A queue pair whose completion queues are on different engines is on one of them; both write to
/// the shared queue, and no completion is lost, doubled or out of order.
fn completions_of_two_engines_in_one_queue(fixture: &Fixture) {
    const COUNT: u64 = 200;
    for mode in [ProgressMode::Manual, ProgressMode::Auto] {
        let testbed = fixture.with_progress(mode);
        let [one, two] = [(); 2].map(|()| testbed.a.context.create_cq(1024).unwrap());
        let on_one = qp_on(&testbed.a, &one, &one, QpOptions::default());
        let on_two = qp_on(&testbed.a, &two, &two, QpOptions::default());
        let across = qp_on(&testbed.a, &one, &two, QpOptions::default());
        assert_ne!(port(&on_one), port(&on_two));
        assert!([port(&on_one), port(&on_two)].contains(&port(&across)));
        let back = qp_on(&testbed.a, &two, &one, QpOptions::default());
        let sources = [&on_one, &on_two, &across, &back];
        let _peers = sources.map(|qp| peer_of(&testbed, qp));
        let post = |qp: &Qp| {
            for id in 0..COUNT {
                let start = std::time::Instant::now();
                while qp.post_send(&[SendRequest::new(id, WrOp::Write(NOWHERE))]).is_err() {
                    assert!(start.elapsed() < test_timeout());
                    std::thread::yield_now();
                }
            }
        };
        let mut next = sources.map(|qp| (qp.number(), 0));
        std::thread::scope(|scope| {
            for qp in sources {
                scope.spawn(move || post(qp));
            }
            let mut found = [Completion::EMPTY; 16];
            testbed.until("all completions", || {
                for cq in [&one, &two] {
                    let count = cq.poll(&mut found).unwrap();
                    for done in &found[..count] {
                        let of = next.iter_mut().find(|(qpn, _)| *qpn == done.qpn).unwrap();
                        assert_eq!((done.id, done.status), (of.1, Status::Success));
                        of.1 += 1;
                    }
                }
                next.iter().all(|(_, count)| *count == COUNT)
            });
        });
        // The queue grows with completions of both in it.
        for qp in sources {
            qp.post_send(&[SendRequest::new(9, WrOp::Write(NOWHERE))]).unwrap();
        }
        testbed.until("the writes end", || {
            testbed.a.context.stats().unwrap().completions == 4 * (COUNT + 1)
        });
        one.resize(4096).unwrap();
        for cq in [&one, &one, &two, &two] {
            testbed.done(cq, 9);
        }
    }
}

/// A write of no bytes needs no memory.
const NOWHERE: Remote = Remote { address: 0, rkey: 0 };

fn an_overrun_fails_users_on_all_engines(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [one, two] = [(); 2].map(|()| testbed.a.context.create_cq(4).unwrap());
    let roomy = testbed.a.context.create_cq(64).unwrap();
    let on_one = qp_on(&testbed.a, &one, &one, QpOptions::default());
    let on_two = qp_on(&testbed.a, &two, &two, QpOptions::default());
    // Both engines write to `one` now.
    let across = qp_on(&testbed.a, &roomy, &two, QpOptions::default());
    let both = qp_on(&testbed.a, &roomy, &one, QpOptions::default());
    let srq = testbed.a.context.create_srq(&testbed.a.pd, SrqOptions::default()).unwrap();
    let options = QpOptions::default().with_srq(Some(srq));
    let on_srq = qp_on(&testbed.a, &two, &two, options.clone());
    let far_user = qp_on(&testbed.a, &one, &one, options);
    assert_eq!(port(&far_user), port(&on_srq));
    assert_ne!(port(&far_user), port(&on_one));
    let _peers = [&on_one, &far_user, &both, &across].map(|qp| peer_of(&testbed, qp));
    for id in 0..5 {
        on_one.post_send(&[SendRequest::new(id, WrOp::Nop)]).unwrap();
    }
    testbed.until("an overrun", || on_one.state().unwrap() == State::Err);
    // The other engine's user fails when it has something to report.
    far_user.post_send(&[SendRequest::new(7, WrOp::Nop)]).unwrap();
    testbed.until("the other user", || far_user.state().unwrap() == State::Err);
    assert_eq!(both.state().unwrap(), State::Err);
    assert_eq!((on_two.state().unwrap(), across.state().unwrap()), (State::Reset, State::Rts));
    let events = testbed.a.async_events();
    let overruns = events.iter().filter(|e| matches!(e, AsyncEvent::CqOverrun { .. })).count();
    assert_eq!(overruns, 1, "{events:?}");
}

/// A send queue waits for a completion of another engine's queue, whether or not threads poll.
fn a_wait_for_another_engine(fixture: &Fixture) {
    let thread = ProgressMode::Thread { spin: Duration::ZERO, core: None };
    for mode in [ProgressMode::Manual, ProgressMode::Auto, thread] {
        let testbed = fixture.with_progress(mode);
        let [first, second] = [(); 2].map(|()| testbed.join(QpOptions::default()));
        assert_ne!(port(&first.a.qp), port(&second.a.qp));
        let wait = WrOp::Wait { cqn: first.a.sends.number(), index: 1 };
        second.a.qp.post_send(&[SendRequest::new(1, wait)]).unwrap();
        second.a.qp.post_send(&[SendRequest::new(2, WrOp::Nop)]).unwrap();
        first.a.qp.post_send(&[SendRequest::new(3, WrOp::Nop)]).unwrap();
        testbed.done(&first.a.sends, 3);
        testbed.expect_no_completion(&second.a.sends);
        first.a.qp.post_send(&[SendRequest::new(4, WrOp::Nop)]).unwrap();
        for id in [1, 2] {
            let done = match mode {
                ProgressMode::Manual => testbed.next(&second.a.sends),
                // Nothing runs the first engine but its own thread.
                _ => second.a.sends.wait_next(test_timeout()).unwrap().unwrap(),
            };
            assert_eq!((done.id, done.status), (id, Status::Success));
        }
        testbed.done(&first.a.sends, 4);
    }
}

/// Receives and a limit that were there before the first queue pair.
fn a_shared_receive_queue_moves_with_its_limit(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let _first_engines = [(); 2].map(|()| testbed.join(QpOptions::default()));
    let srq = testbed.b.context.create_srq(&testbed.b.pd, SrqOptions::default()).unwrap();
    srq.post_receive(&[1, 2].map(|id| ReceiveRequest { id, data: &[] })).unwrap();
    srq.arm(2);
    let options = QpOptions::default().with_srq(Some(srq.clone()));
    let conn = testbed.join_with(QpOptions::default(), options);
    let busy = engines(&testbed.b).iter().filter(|engine| engine.queue_pairs > 0).count();
    assert_eq!((busy, srq.limit()), (3, 2));
    for id in [1, 2] {
        conn.a.qp.post_send(&[SendRequest::new(9, WrOp::Send)]).unwrap();
        testbed.done(&conn.b.receives, id);
    }
    let limit = AsyncEvent::LimitReached { srqn: srq.number() };
    assert_eq!(testbed.b.async_events().iter().filter(|event| **event == limit).count(), 1);
    assert_eq!(srq.limit(), 0);
}

/// Datagram queue pairs have the address of their engine, and a reply to the sender reaches it.
fn datagrams_between_engines(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let options = QpOptions::default().with_service(Service::Ud);
    let uds: Vec<_> = (0..ENGINES)
        .map(|_| {
            let ends = [&testbed.a, &testbed.b].map(|end| testbed.test_qp(end, options.clone()));
            ends.iter().for_each(|end| end.qp.activate_ud(7).unwrap());
            ends
        })
        .collect();
    let buffer = fixture.host(&testbed.b, 64);
    let answers = fixture.host(&testbed.a, 64);
    for (index, [_, to]) in uds.iter().enumerate() {
        // From each engine of `a` to each one of `b`.
        let handle = testbed.a.context.create_address_handle(to.qp.endpoint().address).unwrap();
        for [from, _] in &uds {
            let data = [buffer.mr.sge(0, 64)];
            to.qp.post_receive(&[ReceiveRequest { id: 1, data: &data }]).unwrap();
            let request = SendRequest::new(2, WrOp::Send).to(&handle, to.qp.number(), 7);
            from.qp.post_send(&[request.inline(&[index as u8; 8])]).unwrap();
            testbed.done(&from.sends, 2);
            let received = testbed.done(&to.receives, 1);
            assert_eq!(buffer.read(u64::from(GRH_LEN), 8), [index as u8; 8]);
            let sender = received.sender.unwrap();
            assert_eq!(sender.address, from.qp.endpoint().address);
            let data = [answers.mr.sge(0, 64)];
            from.qp.post_receive(&[ReceiveRequest { id: 3, data: &data }]).unwrap();
            let back = testbed.b.context.create_address_handle(sender.address).unwrap();
            let request = SendRequest::new(4, WrOp::Send).to(&back, sender.qpn, 7);
            to.qp.post_send(&[request.inline(b"back")]).unwrap();
            testbed.done(&to.sends, 4);
            testbed.done(&from.receives, 3);
        }
    }
}

/// Once a region is deregistered, no engine writes to its memory.
fn deregistration_ends_the_access_of_all_engines(fixture: &Fixture) {
    const LEN: u64 = 1 << 20;
    let testbed = fixture.with_progress(ProgressMode::Auto);
    let pairs = pairs(&testbed, 1);
    let from = fixture.host(&testbed.a, LEN);
    from.pattern(0, LEN as usize, 3);
    let memory = warpwire::mr::HostMemory::new(LEN).unwrap();
    let mr = testbed.b.context.register(&testbed.b.pd, memory.clone(), crate::verbs::fixture::ALL);
    let mr = mr.unwrap();
    let remote = Remote { address: mr.iova(), rkey: mr.rkey() };
    for pair in &pairs {
        for id in 0..50 {
            let range = [from.mr.sge(0, LEN as u32)];
            let request = SendRequest::new(id, WrOp::Write(remote)).with(&range);
            pair.a.qp.post_send(&[request]).unwrap();
        }
    }
    for pair in &pairs {
        testbed.done(&pair.a.sends, 0);
    }
    drop(mr);
    memory.bytes().fill(0, LEN, &[0]).unwrap();
    // What is still on its way is refused, on each engine; one more, if all had arrived.
    for pair in &pairs {
        let range = [from.mr.sge(0, LEN as u32)];
        let request = SendRequest::new(50, WrOp::Write(remote)).with(&range);
        pair.a.qp.post_send(&[request]).unwrap();
        let failed = std::iter::repeat_with(|| testbed.next(&pair.a.sends));
        let status = failed.map(|done| done.status).find(|status| *status != Status::Success);
        assert_eq!(status, Some(Status::RemoteAccess));
    }
    let mut found = vec![1; LEN as usize];
    memory.bytes().read(0, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0), "written after the deregistration");
}

fn engines_that_were_left_are_used_again(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let mut all = pairs(&testbed, 2);
    let left = port(&all[1].a.qp);
    all.retain(|pair| port(&pair.a.qp) != left);
    let count = |end: &Endpoint| {
        let engines = engines(end).into_iter();
        engines.map(|engine| (engine.local.port() == left, engine.queue_pairs)).collect::<Vec<_>>()
    };
    assert!(count(&testbed.a).contains(&(true, 0)));
    for _ in 0..2 {
        let conn = testbed.join(QpOptions::default());
        assert_eq!(port(&conn.a.qp), left);
        testbed.check_traffic(&conn);
        all.push(conn);
    }
    assert!(count(&testbed.a).iter().all(|(_, queue_pairs)| *queue_pairs == 2));
}

/// An engine that nothing polls answers by its own thread, also while another one is polled.
fn a_sleeping_engine_is_woken(fixture: &Fixture) {
    let testbed = fixture.with_progress(ProgressMode::Auto);
    let pairs = pairs(&testbed, 1);
    let to = fixture.host(&testbed.b, 64);
    let remote = Remote { address: to.mr.iova(), rkey: to.mr.rkey() };
    for round in 0..3_u64 {
        for pair in &pairs {
            let request = SendRequest::new(round, WrOp::Write(remote));
            pair.a.qp.post_send(&[request.inline(&round.to_ne_bytes())]).unwrap();
            // Only this queue's engine of `a` is polled, and none of `b`.
            let done = pair.a.sends.wait_next(test_timeout()).unwrap().unwrap();
            assert_eq!((done.id, done.status), (round, Status::Success));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(to.word(0), 2);
}

fn a_device_with_one_engine_reaches_one_with_several(fixture: &Fixture) {
    let [a, b] = fixture.test_link.ends().unwrap();
    let options = fixture.test_link.options(ProgressMode::Manual);
    let testbed = Testbed {
        a: Endpoint::open(a, options.with_engines(1)),
        b: Endpoint::open(b, options.with_engines(3)),
    };
    let pairs = pairs(&testbed, 1);
    assert_eq!((engines(&testbed.a).len(), engines(&testbed.b).len()), (1, 3));
    pairs.iter().for_each(|pair| testbed.check_traffic(pair));
    let busy: Vec<_> = engines(&testbed.b).iter().map(|engine| engine.queue_pairs).collect();
    assert_eq!(busy, [2, 1, 1]);
}

fn udp(address: &str) -> Udp {
    Udp::bind(address.parse().unwrap(), UdpOptions::default()).unwrap()
}

fn a_number_of_engines_that_is_not_possible(_: &Fixture) {
    let open = |engines| {
        let options = HcaOptions::default().with_engines(engines);
        Context::open_with(udp("127.0.0.1:0"), options)
    };
    for engines in [0, MAX_ENGINES + 1, u32::MAX] {
        let refused = open(engines).unwrap_err();
        assert_eq!(refused.kind(), &ErrorKind::InvalidArgument, "{refused}");
        assert!(refused.to_string().contains("ask for 1 to 16"), "{refused}");
    }
    assert_eq!(open(MAX_ENGINES).unwrap().stats().unwrap().engines.len(), MAX_ENGINES as usize);
    let slot = HcaOptions::default().with_engines(2).with_qpn_slot(QpnSlot::new(3));
    let refused = Context::open_with(udp("127.0.0.1:0"), slot).unwrap_err();
    assert_eq!(refused.kind(), &ErrorKind::InvalidArgument, "{refused}");
    assert!(refused.to_string().contains("omit the slot"), "{refused}");
}

fn links_with_one_engine(_: &Fixture) {
    let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let hub = Hub::new();
    let shm = Shm::bind(address, ShmOptions::default()).unwrap();
    // An address of its own: other tests use RoCEv2's port, too.
    let own = format!("127.{}.77.1:4791", 1 + std::process::id() % 250);
    let links: [(Box<dyn Link>, &str); 3] = [
        (Box::new(shm), "use a UDP link"),
        (Box::new(hub.endpoint("10.0.0.1:4791".parse().unwrap()).unwrap()), "use a UDP link"),
        (Box::new(udp(&own)), "bind the link to port 0"),
    ];
    for (link, fix) in links {
        let refused = Context::open_with(link, HcaOptions::default().with_engines(4)).unwrap_err();
        assert_eq!(refused.kind(), &ErrorKind::Unsupported, "{refused}");
        let text = refused.to_string();
        assert!(text.contains(fix) && text.contains("4 engines"), "{text}");
    }
}
