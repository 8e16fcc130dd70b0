//! Fault injection: no corrupted byte, no hang, and unaffected connections keep working.

use std::time::Duration;

use warpwire::link::FaultInjector;
use warpwire::verbs::{
    Atomic, Completion, Mtu, ProgressMode, QpAttributes, QpEndpoint, QpOptions, ReceiveRequest,
    SendRequest, State, Status, WrOp,
};

use crate::verbs::fixture::{
    Endpoint, Fixture, KINDS, Kind, QpPair, Rng, TestBuffer, Testbed, connect, same, short_timeouts,
};
use testkit::{Effort, cases, for_each_seed};

cases!(Fixture; CASES:
    mixed_traffic_over_a_bad_network,
    a_peer_that_vanishes,
    a_device_that_vanishes,
    a_storm,
);
cases!(Fixture; ONCE:
    many_seeds,
    an_engine_that_stalls,
    an_engine_that_wakes_up_late,
    a_network_that_is_cut_and_healed,
    threads_over_a_bad_network,
    selective_repeat_is_negotiated,
);

const PLAN: &str = "loss=5%,reorder=5%,dup=5%,corrupt=2%,cut=1%";

/// A short ACK timeout (2 ms), because many packets are lost.
fn lossy_options() -> QpOptions {
    QpOptions::default().with_timeout(9).with_retry_count(7)
}

/// Operations of every kind on one connection, each checked when it completes.
struct Traffic {
    conn: QpPair,
    near: TestBuffer,
    far: TestBuffer,
    added: u64,
    rng: Rng,
}

const CHUNK: u64 = 32_768;

impl Traffic {
    fn new(fixture: &Fixture, testbed: &Testbed, kind: Kind, seed: u64) -> Self {
        Self::with(fixture, testbed, kind, seed, lossy_options())
    }

    fn with(
        fixture: &Fixture,
        testbed: &Testbed,
        kind: Kind,
        seed: u64,
        options: QpOptions,
    ) -> Self {
        let conn = testbed.join(options);
        let near = fixture.memory(&testbed.a, kind, 4 * CHUNK, crate::verbs::fixture::ALL);
        let far = fixture.memory(&testbed.b, kind, 4 * CHUNK, crate::verbs::fixture::ALL);
        Self { conn, near, far, added: 0, rng: Rng::new(seed) }
    }

    /// Posts a write, a read of the same range, an atomic and a message together, waits for all,
    /// and checks the results.
    fn round(&mut self, testbed: &Testbed) {
        // All eight transmissions of a packet may be lost.
        for _ in 0..3 {
            let mut round = self.begin();
            testbed.until("a complete round", || self.is_over(&mut round));
            if round.failed != Some(Status::RetryExceeded) {
                return self.check(&round);
            }
            self.reconnect();
        }
        panic!("a connection failed three times in a row");
    }

    fn begin(&mut self) -> Round {
        let Self { conn, near, far, rng, .. } = self;
        let len = 1 + rng.below(CHUNK - 100) as usize;
        let shift = rng.below(64);
        let wanted = near.pattern(shift, len, rng.next_u64());
        near.write(CHUNK, &vec![0; len]);
        far.write(2 * CHUNK, &vec![0; len]);
        conn.b
            .qp
            .post_receive(&[ReceiveRequest { id: 5, data: &[far.mr.sge(2 * CHUNK, len as u32)] }])
            .unwrap();
        let from = [near.mr.sge(shift, len as u32)];
        let back = [near.mr.sge(CHUNK, len as u32)];
        let before = [near.mr.sge(3 * CHUNK, 8)];
        let add = rng.next_u64() >> 32;
        conn.a
            .qp
            .post_send(&[
                SendRequest::new(1, WrOp::Write(far.mr.remote(shift))).with(&from),
                SendRequest::new(2, WrOp::Read(far.mr.remote(shift))).with(&back),
                SendRequest::new(
                    3,
                    WrOp::Atomic(far.mr.remote(3 * CHUNK), Atomic::FetchAdd { add }),
                )
                .with(&before),
                SendRequest::new(4, WrOp::SendImm([7; 4])).with(&from),
            ])
            .unwrap();
        Round { wanted, shift, add, sent: 0, received: false, failed: None }
    }

    /// Polls completions; returns whether the round is complete.
    fn is_over(&self, round: &mut Round) -> bool {
        let mut done = [Completion::EMPTY; 4];
        let count = self.conn.a.sends.poll(&mut done).unwrap();
        for one in &done[..count] {
            round.sent += 1;
            assert_eq!(one.id, round.sent, "completions out of order");
            if !one.is_success() {
                round.failed = round.failed.or(Some(one.status));
            }
        }
        if !round.received && self.conn.b.receives.poll(&mut done[..1]).unwrap() == 1 {
            let arrived = done[0];
            assert_eq!((arrived.id, arrived.status), (5, Status::Success), "{arrived:?}");
            assert_eq!(arrived.len as usize, round.wanted.len());
            round.received = true;
        }
        round.sent == 4 && (round.received || round.failed.is_some())
    }

    fn check(&mut self, round: &Round) {
        let Self { near, far, .. } = self;
        let Round { wanted, shift, add, failed, .. } = round;
        assert_eq!(*failed, None, "{:?}", self.conn.a.qp.stats());
        let len = wanted.len();
        same(&far.read(*shift, len), wanted, "a write over a bad network");
        same(&near.read(CHUNK, len), wanted, "a read over a bad network");
        same(&far.read(2 * CHUNK, len), wanted, "a message over a bad network");
        assert_eq!(near.word(3 * CHUNK), self.added, "the value before the addition");
        self.added = self.added.wrapping_add(*add);
        assert_eq!(far.word(3 * CHUNK), self.added, "each addition is executed once");
    }

    /// Discards work in flight and reconnects.
    fn reconnect(&mut self) {
        for test_qp in [&self.conn.a, &self.conn.b] {
            test_qp.qp.modify(&QpAttributes::new(State::Reset)).unwrap();
        }
        connect(&self.conn.a.qp, &self.conn.b.qp);
        self.added = self.far.word(3 * CHUNK); // it was executed or not
    }
}

/// A posted round.
struct Round {
    wanted: Vec<u8>,
    shift: u64,
    add: u64,
    sent: u64,
    received: bool,
    failed: Option<Status>,
}

/// Many connections over a network that loses, duplicates, reorders and corrupts packets, while
/// either device stalls and connections are reset in the middle of their work.
fn a_storm(fixture: &Fixture) {
    // Minimum number of packets dropped by fault injection.
    let goal = Effort::pick("WARPWIRE_STORM", [500, 1000, 200_000]);
    let seed = std::env::var("WARPWIRE_SEED").map_or(42, |seed| seed.parse().unwrap());
    println!("{:?}: a storm with {goal} dropped packets, seed {seed}", fixture.test_link);
    let testbed = fixture.faulty(PLAN, seed, ProgressMode::Manual);
    let mut rng = Rng::new(seed);
    // Long enough (17 ms on an idle machine) that packets of twelve connections in a queue do not
    // look like an unresponsive peer.
    let options = lossy_options().with_timeout(testkit::timeout_exponent(12));
    let mut all: Vec<_> = (0..12)
        .map(|n| {
            let kind = KINDS[n as usize % 3];
            Traffic::with(fixture, &testbed, kind, seed ^ (n << 8), options.clone())
        })
        .collect();
    let mut rounds: Vec<_> = all.iter_mut().map(Traffic::begin).collect();
    let registered = testbed.b.context.registry().unwrap().len();
    let injected_drops = || {
        let ends = [&testbed.a, &testbed.b]
            .map(|end| end.context.soft().unwrap().link_counters().drops.injected);
        ends.iter().sum::<u64>()
    };
    let (mut over, mut failures) = (0, 0);
    let (mut last, mut next) = (std::time::Instant::now(), std::time::Instant::now());
    while injected_drops() < goal {
        testbed.step();
        for (traffic, round) in all.iter_mut().zip(&mut rounds) {
            if !traffic.is_over(round) {
                continue;
            }
            match round.failed {
                None => traffic.check(round),
                // All eight transmissions of a packet may be lost.
                Some(status) => {
                    assert_eq!(status, Status::RetryExceeded);
                    failures += 1;
                    traffic.reconnect();
                }
            }
            (over, last) = (over + 1, std::time::Instant::now());
            *round = traffic.begin();
        }
        assert!(last.elapsed() < crate::verbs::fixture::test_timeout(), "no progress, seed {seed}");
        if std::time::Instant::now() < next {
            continue;
        }
        match rng.below(4) {
            0 => stall(&testbed.a),
            1 => stall(&testbed.b),
            _ => {
                let index = rng.below(12) as usize;
                all[index].reconnect();
                rounds[index] = all[index].begin();
            }
        }
        // Not so soon that the stalls alone would exhaust the retries.
        next = std::time::Instant::now() + Duration::from_millis(20 + rng.below(100));
    }
    assert!(failures <= 2 + over / 500, "{failures} of {over} rounds failed");
    assert_eq!(testbed.b.context.registry().unwrap().len(), registered);
    assert_eq!(testbed.a.context.stats().unwrap().queue_pairs, 12);
    println!("{:?}: {over} rounds, {failures} failed", fixture.test_link);
}

/// Polls only this device for 30 ms, which is less than the retries last.
fn stall(only: &Endpoint) {
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_millis(30) {
        only.context.soft().unwrap().poll().unwrap();
    }
}

/// A device is closed in the middle of its own and its peers' transfers: the peers' work fails in
/// time, and other connections keep working.
fn a_device_that_vanishes(fixture: &Fixture) {
    let mut links = fixture.test_link.links(4).unwrap().into_iter();
    let mut open =
        || Endpoint::open(links.next().unwrap(), fixture.test_link.options(ProgressMode::Manual));
    let testbed = Testbed { a: open(), b: open() };
    let bystander = testbed.join(short_timeouts());
    let near = fixture.host(&testbed.a, 8 << 20);
    for round in 0..2 {
        let pair = Testbed { a: testbed.a.clone(), b: open() };
        let far = fixture.host(&pair.b, 4 << 20);
        let [ours, theirs] = [0; 2].map(|_| pair.join(short_timeouts()));
        let data = [near.mr.sge(0, 4 << 20)];
        let op = [WrOp::Write(far.mr.remote(0)), WrOp::Read(far.mr.remote(0))][round];
        ours.a
            .qp
            .post_send(&[SendRequest::new(1, op).with(&data), SendRequest::new(2, WrOp::Nop)])
            .unwrap();
        let back = [far.mr.sge(0, 4 << 20)];
        let write = SendRequest::new(3, WrOp::Write(near.mr.remote(4 << 20))).with(&back);
        theirs.b.qp.post_send(&[write]).unwrap();
        let begun = || {
            let received = |test_qp: &crate::verbs::fixture::TestQp| {
                test_qp.qp.stats().unwrap().packets_received
            };
            received(&ours.b) > 0 && received(&theirs.a) > 0
        };
        pair.until("packets of both transfers", begun);
        let (QpPair { a: survivor, b: one }, QpPair { a: responder, b: two }) = (ours, theirs);
        let Testbed { b: gone, .. } = pair;
        drop((one, two, far, gone));
        testbed.failed(&survivor.sends, 1, Status::RetryExceeded);
        testbed.failed(&survivor.sends, 2, Status::Flushed);
        testbed.check_traffic(&bystander);
        // A responder is not affected.
        assert_eq!(responder.qp.state().unwrap(), State::Rts);
        testbed.expect_no_completion(&responder.receives);
    }
    assert_eq!(testbed.a.context.stats().unwrap().queue_pairs, 1);
}

fn mixed_traffic_over_a_bad_network(fixture: &Fixture) {
    for (seed, kind) in (0..).zip(KINDS) {
        let testbed = fixture.faulty(PLAN, seed, ProgressMode::Manual);
        let mut traffic = Traffic::new(fixture, &testbed, kind, seed);
        for _ in 0..8 {
            traffic.round(&testbed);
        }
        let stats = testbed.a.context.stats().unwrap();
        assert!(stats.pairs.resent > 0, "no retransmissions despite faults: {stats:?}");
    }
}

/// Each seed gives another sequence of faults. `WARPWIRE_SEED` runs a single seed.
fn many_seeds(fixture: &Fixture) {
    let seeds = Effort::pick("WARPWIRE_SEEDS", [10, 60, 1000]);
    for_each_seed(1000..1000 + seeds, |seed| {
        let testbed = fixture.faulty(PLAN, seed, ProgressMode::Manual);
        let mut several: Vec<_> =
            (0..3).map(|n| Traffic::new(fixture, &testbed, Kind::Host, seed ^ n)).collect();
        for _ in 0..2 {
            several.iter_mut().for_each(|traffic| traffic.round(&testbed));
        }
    });
}

/// An engine that is not scheduled for longer than the ACK timeout finds the response already in
/// its link and does not retransmit.
fn an_engine_that_wakes_up_late(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let (near, far) = (fixture.host(&testbed.a, 64), fixture.host(&testbed.b, 64));
    // 0.26 ms, and no retry.
    let few_retries = QpOptions::default().with_timeout(6).with_retry_count(0);
    let conn = testbed.join(few_retries);
    for id in 0..20 {
        let data = [near.mr.sge(0, 64)];
        let op =
            if id % 2 == 0 { WrOp::Write(far.mr.remote(0)) } else { WrOp::Read(far.mr.remote(0)) };
        conn.a.qp.post_send(&[SendRequest::new(id, op).with(&data)]).unwrap();
        let hca = |end: &Endpoint| end.context.soft().unwrap().poll().unwrap();
        hca(&testbed.a);
        for _ in 0..3 {
            hca(&testbed.b);
        }
        std::thread::sleep(Duration::from_millis(1));
        hca(&testbed.a);
        testbed.done(&conn.a.sends, id);
    }
    assert_eq!(conn.a.qp.stats().unwrap().timeouts, 0);
}

/// The peer's queue pair is destroyed in the middle of a transfer: the transfer fails in time, and
/// other connections keep working.
fn a_peer_that_vanishes(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let near = fixture.host(&testbed.a, 4 << 20);
    let local = testbed.join(short_timeouts());
    for round in 0..3 {
        let far = fixture.host(&testbed.b, 4 << 20);
        let doomed = testbed.join(short_timeouts());
        let data = [near.mr.sge(0, 4 << 20)];
        let op = if round % 2 == 0 {
            WrOp::Write(far.mr.remote(0))
        } else {
            WrOp::Read(far.mr.remote(0))
        };
        doomed
            .a
            .qp
            .post_send(&[SendRequest::new(1, op).with(&data), SendRequest::new(2, WrOp::Nop)])
            .unwrap();
        let begun = || doomed.a.qp.stats().unwrap().packets_sent > 0;
        testbed.until("the first packet of a transfer", begun);
        (0..round).for_each(|_| testbed.step());
        let QpPair { a: survivor, b: gone } = doomed;
        drop(gone);
        testbed.failed(&survivor.sends, 1, Status::RetryExceeded);
        testbed.failed(&survivor.sends, 2, Status::Flushed);
        testbed.check_traffic(&local);
    }
}

/// The peer is not polled for 200 ms: retries are used up, but the connection survives.
fn an_engine_that_stalls(fixture: &Fixture) {
    let testbed = fixture.faulty("loss=1%", 3, ProgressMode::Manual);
    let options = QpOptions::default().with_timeout(14);
    let conn = testbed.join(options);
    let (near, far) = (fixture.host(&testbed.a, 1 << 20), fixture.host(&testbed.b, 1 << 20));
    let wanted = near.pattern(0, 1 << 20, 8);
    let data = [near.mr.sge(0, 1 << 20)];
    conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Write(far.mr.remote(0))).with(&data)]).unwrap();
    testbed.step();
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_millis(200) {
        testbed.a.context.soft().unwrap().poll().unwrap();
    }
    testbed.done(&conn.a.sends, 1);
    same(&far.read(0, 1 << 20), &wanted, "a write across a stall");
    testbed.check_traffic(&conn);
}

fn a_network_that_is_cut_and_healed(fixture: &Fixture) {
    let [a, b] = fixture.test_link.ends().unwrap();
    let a = FaultInjector::new(a, "loss=0%,seed=1".parse().unwrap());
    let wire = a.partition();
    let testbed = Testbed::over(a, b, ProgressMode::Manual);
    let conn = testbed.join(QpOptions::default().with_timeout(15));
    let doomed = testbed.join(short_timeouts());
    testbed.check_traffic(&conn);
    wire.cut();
    conn.b.qp.post_receive(&[ReceiveRequest { id: 1, data: &[] }]).unwrap();
    conn.a.qp.post_send(&[SendRequest::new(2, WrOp::Send)]).unwrap();
    doomed.a.qp.post_send(&[SendRequest::new(3, WrOp::Send)]).unwrap();
    testbed.failed(&doomed.a.sends, 3, Status::RetryExceeded);
    wire.heal();
    testbed.done(&conn.a.sends, 2);
    testbed.done(&conn.b.receives, 1);
    testbed.check_traffic(&conn);
}

/// Four connections, one thread each, with fallback threads and faults.
fn threads_over_a_bad_network(fixture: &Fixture) {
    let testbed = fixture.faulty("loss=3%,reorder=3%,dup=3%,corrupt=1%", 7, ProgressMode::Auto);
    let ends: [&Endpoint; 2] = [&testbed.a, &testbed.b];
    std::thread::scope(|scope| {
        for n in 0..4u64 {
            // On a busy machine a thread may not be scheduled in time.
            let conn = testbed.join(lossy_options().with_timeout(16));
            let memory = ends.map(|end| fixture.host(end, 1 << 17));
            scope.spawn(move || {
                let [near, far] = memory;
                for round in 0..5 {
                    let wanted = near.pattern(0, 100_000, n * 100 + round);
                    let data = [near.mr.sge(0, 100_000)];
                    let write = SendRequest::new(round, WrOp::Write(far.mr.remote(n))).with(&data);
                    conn.a.qp.post_send(&[write]).unwrap();
                    let done = conn
                        .a
                        .sends
                        .wait_next(crate::verbs::fixture::test_timeout())
                        .unwrap()
                        .expect("a completion");
                    assert!(
                        done.is_success(),
                        "{done:?} {:?} {:?}",
                        conn.a.qp.stats(),
                        conn.b.qp.stats()
                    );
                    same(&far.read(n, 100_000), &wanted, "a write in one of several threads");
                }
            });
        }
    });
}

/// Packets that arrive out of order are kept between two ends that offer it. Whether or not,
/// everything arrives.
fn selective_repeat_is_negotiated(fixture: &Fixture) {
    const LEN: usize = 1 << 19;
    for offered in [[true; 2], [true, false]] {
        let testbed = fixture.faulty("loss=2%", 5, ProgressMode::Manual);
        let options = lossy_options().with_timeout(12).with_mtu(Mtu::new(1024));
        let conn = QpPair {
            a: testbed.test_qp(&testbed.a, options.clone()),
            b: testbed.test_qp(&testbed.b, options),
        };
        let ends = [conn.a.qp.endpoint(), conn.b.qp.endpoint()];
        assert!(ends.iter().all(|end| end.selective_repeat));
        // An end that does not offer it does not use it either, whatever its peer offers.
        let both = offered[0] && offered[1];
        let heard = ends.map(|end| QpEndpoint { selective_repeat: both, ..end });
        conn.a.qp.connect(&heard[1]).unwrap();
        conn.b.qp.connect(&heard[0]).unwrap();
        let len = LEN as u64;
        let (near, far) = (fixture.host(&testbed.a, len), fixture.host(&testbed.b, len));
        let wanted = near.pattern(0, LEN, 9);
        let data = [near.mr.sge(0, LEN as u32)];
        let there = far.mr.remote(0);
        conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Write(there)).with(&data)]).unwrap();
        testbed.done(&conn.a.sends, 1);
        same(&far.read(0, LEN), &wanted, "a write");
        near.pattern(0, LEN, 10);
        conn.a.qp.post_send(&[SendRequest::new(2, WrOp::Read(there)).with(&data)]).unwrap();
        testbed.done(&conn.a.sends, 2);
        same(&near.read(0, LEN), &wanted, "a read");
        let stats = [&conn.a, &conn.b].map(|end| end.qp.stats().unwrap());
        assert_eq!(stats.map(|stats| stats.held > 0), [both; 2], "{offered:?}: {stats:?}");
    }
    // Packets longer than RoCE's are sent within one machine only, and are not kept.
    let testbed = fixture.testbed();
    for (mtu, expected) in [(4096, Some(true)), (8192, None)] {
        let conn = testbed.test_qp(&testbed.a, QpOptions::default().with_mtu(Mtu::new(mtu)));
        let attr = conn.qp.rtr_attr(&conn.qp.endpoint()).unwrap();
        assert_eq!(attr.selective_repeat, expected, "MTU {mtu}");
    }
}
