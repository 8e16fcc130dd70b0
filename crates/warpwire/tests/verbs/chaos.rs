//! Faults on the way: no byte wrong, no hang, and who survives goes on.

use std::time::Duration;

use warpwire::link::Fault;
use warpwire::verbs::{
    Atomic, Change, Completion, Drive, Op, QpOptions, ReceiveRequest, Request, State, Status,
};

use crate::verbs::fixture::{
    End, Fixture, Joined, KINDS, Kind, Patch, Rng, World, connect, impatient, same,
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
);

const PLAN: &str = "loss=5%,reorder=5%,dup=5%,corrupt=2%,cut=1%";

/// Answers are waited for a short time: losses are many.
fn patient() -> QpOptions {
    QpOptions { timeout: 9, retry_count: 7, ..QpOptions::default() }
}

/// Traffic of every sort on one connection, each piece checked when it is done.
struct Traffic {
    joined: Joined,
    near: Patch,
    far: Patch,
    added: u64,
    rng: Rng,
}

const PART: u64 = 32_768;

impl Traffic {
    fn new(fixture: &Fixture, world: &World, kind: Kind, seed: u64) -> Self {
        Self::with(fixture, world, kind, seed, patient())
    }

    fn with(fixture: &Fixture, world: &World, kind: Kind, seed: u64, options: QpOptions) -> Self {
        let joined = world.join(options);
        let near = fixture.memory(&world.a, kind, 4 * PART, crate::verbs::fixture::ALL);
        let far = fixture.memory(&world.b, kind, 4 * PART, crate::verbs::fixture::ALL);
        Self { joined, near, far, added: 0, rng: Rng::new(seed) }
    }

    /// A write, a read back, a message and a count, all at once; then everything is looked at.
    fn round(&mut self, world: &World) {
        let mut round = self.begin();
        world.until("the end of a round", || self.is_over(&mut round));
        self.check(&round);
    }

    fn begin(&mut self) -> Round {
        let Self { joined, near, far, rng, .. } = self;
        let len = 1 + rng.below(PART - 100) as usize;
        let shift = rng.below(64);
        let wanted = near.pattern(shift, len, rng.next_u64());
        near.write(PART, &vec![0; len]);
        far.write(2 * PART, &vec![0; len]);
        joined
            .b
            .qp
            .post_receive(&[ReceiveRequest { id: 5, data: &[far.mr.sge(2 * PART, len as u32)] }])
            .unwrap();
        let from = [near.mr.sge(shift, len as u32)];
        let back = [near.mr.sge(PART, len as u32)];
        let before = [near.mr.sge(3 * PART, 8)];
        let add = rng.next_u64() >> 32;
        joined
            .a
            .qp
            .post_send(&[
                Request::new(1, Op::Write(far.mr.remote(shift))).with(&from),
                Request::new(2, Op::Read(far.mr.remote(shift))).with(&back),
                Request::new(3, Op::Atomic(far.mr.remote(3 * PART), Atomic::FetchAdd { add }))
                    .with(&before),
                Request::new(4, Op::SendImm([7; 4])).with(&from),
            ])
            .unwrap();
        Round { wanted, shift, add, sent: 0, received: false, failed: None }
    }

    /// Takes what has ended; tells whether all has.
    fn is_over(&self, round: &mut Round) -> bool {
        let mut done = [Completion::EMPTY; 4];
        let count = self.joined.a.sends.poll(&mut done).unwrap();
        for one in &done[..count] {
            round.sent += 1;
            assert_eq!(one.id, round.sent, "in the order of posting");
            if !one.is_success() {
                round.failed = round.failed.or(Some(one.status));
            }
        }
        if !round.received && self.joined.b.receives.poll(&mut done[..1]).unwrap() == 1 {
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
        assert_eq!(*failed, None, "{:?}", self.joined.a.qp.stats());
        let len = wanted.len();
        same(&far.read(*shift, len), wanted, "a write over a bad network");
        same(&near.read(PART, len), wanted, "a read over a bad network");
        same(&far.read(2 * PART, len), wanted, "a message over a bad network");
        assert_eq!(near.word(3 * PART), self.added, "the value before");
        self.added = self.added.wrapping_add(*add);
        assert_eq!(far.word(3 * PART), self.added, "each addition once");
    }

    /// Forgets what is under way, and connects anew.
    fn again(&mut self) {
        for side in [&self.joined.a, &self.joined.b] {
            side.qp.modify(&Change::to(State::Reset)).unwrap();
        }
        connect(&self.joined.a.qp, &self.joined.b.qp);
        self.added = self.far.word(3 * PART); // it was added or not: nobody can know
    }
}

/// A round that has begun.
struct Round {
    wanted: Vec<u8>,
    shift: u64,
    add: u64,
    sent: u64,
    received: bool,
    failed: Option<Status>,
}

/// Many connections over a network that loses, repeats, turns round and damages packets, while either device stands still
/// at times and connections are reset in the middle of their work.
fn a_storm(fixture: &Fixture) {
    // Packets that it takes, at least.
    let goal = Effort::pick("WARPWIRE_STORM", [500, 5000, 200_000]);
    let seed = std::env::var("WARPWIRE_SEED").map_or(42, |seed| seed.parse().unwrap());
    println!("{:?}: a storm of {goal} packets lost, seed {seed}", fixture.which);
    let world = fixture.faulty(PLAN, seed, Drive::Inline);
    let mut rng = Rng::new(seed);
    // So long a wait for answers that a busy machine, with twelve connections' packets in its queues, is no silent peer.
    let options = QpOptions { timeout: 12, ..patient() };
    let mut all: Vec<_> = (0..12)
        .map(|n| {
            let kind = KINDS[n as usize % 3];
            Traffic::with(fixture, &world, kind, seed ^ (n << 8), options.clone())
        })
        .collect();
    let mut rounds: Vec<_> = all.iter_mut().map(Traffic::begin).collect();
    let registered = world.b.context.hca().registry().len();
    let taken = || {
        let ends = [&world.a, &world.b].map(|end| end.context.hca().link_counters().drops.injected);
        ends.iter().sum::<u64>()
    };
    let (mut over, mut given_up) = (0, 0);
    let (mut last, mut next) = (std::time::Instant::now(), std::time::Instant::now());
    while taken() < goal {
        world.step();
        for (traffic, round) in all.iter_mut().zip(&mut rounds) {
            if !traffic.is_over(round) {
                continue;
            }
            match round.failed {
                None => traffic.check(round),
                // Eight tries of one packet may all be lost.
                Some(status) => {
                    assert_eq!(status, Status::RetryExceeded);
                    given_up += 1;
                    traffic.again();
                }
            }
            (over, last) = (over + 1, std::time::Instant::now());
            *round = traffic.begin();
        }
        assert!(last.elapsed() < crate::verbs::fixture::soon(), "it hangs: seed {seed}");
        if std::time::Instant::now() < next {
            continue;
        }
        match rng.below(4) {
            0 => stall(&world.a),
            1 => stall(&world.b),
            _ => {
                let which = rng.below(12) as usize;
                all[which].again();
                rounds[which] = all[which].begin();
            }
        }
        // Not so soon that standing still alone would cost all tries.
        next = std::time::Instant::now() + Duration::from_millis(20 + rng.below(100));
    }
    assert!(given_up <= 2 + over / 500, "{given_up} of {over} rounds were given up");
    assert_eq!(world.b.context.hca().registry().len(), registered);
    assert_eq!(world.a.context.stats().queue_pairs, 12);
    println!("{:?}: {over} rounds, {given_up} given up", fixture.which);
}

/// Only this one is driven, for less time than it takes to lose patience.
fn stall(only: &End) {
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_millis(30) {
        only.context.hca().poll().unwrap();
    }
}

/// A whole device ends in the middle of transfers, its own and its peers'; theirs fail in time, and all else goes on.
fn a_device_that_vanishes(fixture: &Fixture) {
    let mut links = fixture.which.crowd(4).unwrap().into_iter();
    let mut open = || End::open(links.next().unwrap(), fixture.which.options(Drive::Inline));
    let world = World { a: open(), b: open() };
    let beside = world.join(impatient());
    let near = fixture.host(&world.a, 8 << 20);
    for round in 0..2 {
        let pair = World { a: world.a.clone(), b: open() };
        let far = fixture.host(&pair.b, 4 << 20);
        let [ours, theirs] = [0; 2].map(|_| pair.join(impatient()));
        let data = [near.mr.sge(0, 4 << 20)];
        let op = [Op::Write(far.mr.remote(0)), Op::Read(far.mr.remote(0))][round];
        ours.a.qp.post_send(&[Request::new(1, op).with(&data), Request::new(2, Op::Nop)]).unwrap();
        let back = [far.mr.sge(0, 4 << 20)];
        let write = Request::new(3, Op::Write(near.mr.remote(4 << 20))).with(&back);
        theirs.b.qp.post_send(&[write]).unwrap();
        let begun = || {
            let received =
                |side: &crate::verbs::fixture::Side| side.qp.stats().unwrap().packets_received;
            received(&ours.b) > 0 && received(&theirs.a) > 0
        };
        pair.until("transfers that have begun", begun);
        let (Joined { a: survivor, b: one }, Joined { a: listener, b: two }) = (ours, theirs);
        let World { b: gone, .. } = pair;
        drop((one, two, far, gone));
        world.failed(&survivor.sends, 1, Status::RetryExceeded);
        world.failed(&survivor.sends, 2, Status::Flushed);
        world.works(&beside);
        // Who was written to sees nothing of it.
        assert_eq!(listener.qp.state().unwrap(), State::Rts);
        world.quiet(&listener.receives);
    }
    assert_eq!(world.a.context.stats().queue_pairs, 1);
}

fn mixed_traffic_over_a_bad_network(fixture: &Fixture) {
    for (seed, kind) in (0..).zip(KINDS) {
        let world = fixture.faulty(PLAN, seed, Drive::Inline);
        let mut traffic = Traffic::new(fixture, &world, kind, seed);
        for _ in 0..8 {
            traffic.round(&world);
        }
        let stats = world.a.context.stats();
        assert!(stats.pairs.resent > 0, "there were faults: {stats:?}");
    }
}

/// Each seed is another network. `WARPWIRE_SEED` runs that one alone.
fn many_seeds(fixture: &Fixture) {
    let seeds = Effort::pick("WARPWIRE_SEEDS", [10, 60, 1000]);
    for_each_seed(1000..1000 + seeds, |seed| {
        let world = fixture.faulty(PLAN, seed, Drive::Inline);
        let mut several: Vec<_> =
            (0..3).map(|n| Traffic::new(fixture, &world, Kind::Host, seed ^ n)).collect();
        for _ in 0..2 {
            several.iter_mut().for_each(|traffic| traffic.round(&world));
        }
    });
}

/// An engine that gets no processor for longer than an answer may take finds the answer in its link: nothing is missing.
fn an_engine_that_wakes_up_late(fixture: &Fixture) {
    let world = fixture.world();
    let (near, far) = (fixture.host(&world.a, 64), fixture.host(&world.b, 64));
    // 0.26 ms, and not a second try.
    let hasty = QpOptions { timeout: 6, retry_count: 0, ..QpOptions::default() };
    let joined = world.join(hasty);
    for id in 0..20 {
        let data = [near.mr.sge(0, 64)];
        let op = if id % 2 == 0 { Op::Write(far.mr.remote(0)) } else { Op::Read(far.mr.remote(0)) };
        joined.a.qp.post_send(&[Request::new(id, op).with(&data)]).unwrap();
        let hca = |end: &End| end.context.soft().unwrap().poll().unwrap();
        hca(&world.a);
        for _ in 0..3 {
            hca(&world.b);
        }
        std::thread::sleep(Duration::from_millis(1));
        hca(&world.a);
        world.done(&joined.a.sends, id);
    }
    assert_eq!(joined.a.qp.stats().unwrap().timeouts, 0);
}

/// The peer's device ends in the middle of a transfer: that fails in time, and other connections go on.
fn a_peer_that_vanishes(fixture: &Fixture) {
    let world = fixture.world();
    let near = fixture.host(&world.a, 4 << 20);
    let local = world.join(impatient());
    for round in 0..3 {
        let far = fixture.host(&world.b, 4 << 20);
        let doomed = world.join(impatient());
        let data = [near.mr.sge(0, 4 << 20)];
        let op =
            if round % 2 == 0 { Op::Write(far.mr.remote(0)) } else { Op::Read(far.mr.remote(0)) };
        doomed
            .a
            .qp
            .post_send(&[Request::new(1, op).with(&data), Request::new(2, Op::Nop)])
            .unwrap();
        let begun = || doomed.a.qp.stats().unwrap().packets_sent > 0;
        world.until("a transfer that has begun", begun);
        (0..round).for_each(|_| world.step());
        let Joined { a: survivor, b: gone } = doomed;
        drop(gone);
        world.failed(&survivor.sends, 1, Status::RetryExceeded);
        world.failed(&survivor.sends, 2, Status::Flushed);
        world.works(&local);
    }
}

/// Nobody drives the peer for 200 ms: tries are lost, the connection is not.
fn an_engine_that_stalls(fixture: &Fixture) {
    let world = fixture.faulty("loss=1%", 3, Drive::Inline);
    let options = QpOptions { timeout: 14, ..QpOptions::default() };
    let joined = world.join(options);
    let (near, far) = (fixture.host(&world.a, 1 << 20), fixture.host(&world.b, 1 << 20));
    let wanted = near.pattern(0, 1 << 20, 8);
    let data = [near.mr.sge(0, 1 << 20)];
    joined.a.qp.post_send(&[Request::new(1, Op::Write(far.mr.remote(0))).with(&data)]).unwrap();
    world.step();
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_millis(200) {
        world.a.context.hca().poll().unwrap();
    }
    world.done(&joined.a.sends, 1);
    same(&far.read(0, 1 << 20), &wanted, "a write across a stall");
    world.works(&joined);
}

fn a_network_that_is_cut_and_healed(fixture: &Fixture) {
    let [a, b] = fixture.which.ends().unwrap();
    let a = Fault::new(a, "loss=0%,seed=1".parse().unwrap());
    let wire = a.partition();
    let world = World::over(a, b, Drive::Inline);
    let joined = world.join(QpOptions { timeout: 12, ..QpOptions::default() });
    let doomed = world.join(impatient());
    world.works(&joined);
    wire.cut();
    joined.b.qp.post_receive(&[ReceiveRequest { id: 1, data: &[] }]).unwrap();
    joined.a.qp.post_send(&[Request::new(2, Op::Send)]).unwrap();
    doomed.a.qp.post_send(&[Request::new(3, Op::Send)]).unwrap();
    world.failed(&doomed.a.sends, 3, Status::RetryExceeded);
    wire.heal();
    world.done(&joined.a.sends, 2);
    world.done(&joined.b.receives, 1);
    world.works(&joined);
}

/// Four connections, each with threads of its own on both sides, over faults.
fn threads_over_a_bad_network(fixture: &Fixture) {
    let world = fixture.faulty("loss=3%,reorder=3%,dup=3%,corrupt=1%", 7, Drive::Guarded);
    let ends: [&End; 2] = [&world.a, &world.b];
    std::thread::scope(|scope| {
        for n in 0..4u64 {
            // On a busy machine a thread may have to wait for its turn.
            let joined = world.join(QpOptions { timeout: 12, ..patient() });
            let memory = ends.map(|end| fixture.host(end, 1 << 17));
            scope.spawn(move || {
                let [near, far] = memory;
                for round in 0..5 {
                    let wanted = near.pattern(0, 100_000, n * 100 + round);
                    let data = [near.mr.sge(0, 100_000)];
                    let write = Request::new(round, Op::Write(far.mr.remote(n))).with(&data);
                    joined.a.qp.post_send(&[write]).unwrap();
                    let done = joined
                        .a
                        .sends
                        .next(crate::verbs::fixture::soon())
                        .unwrap()
                        .expect("it ends");
                    assert!(
                        done.is_success(),
                        "{done:?} {:?} {:?}",
                        joined.a.qp.stats(),
                        joined.b.qp.stats()
                    );
                    same(&far.read(n, 100_000), &wanted, "a write among threads");
                }
            });
        }
    });
}
