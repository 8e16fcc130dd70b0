//! Hosts that share a bottleneck: a queue with a rate that drops what does not fit (drop-tail), and
//! marks packets above a threshold if ECN is on. Queue pairs to one host share the window of a
//! path, as in the software HCA.

use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};

use testkit::Effort;
use warpwire_proto::Instant;
use warpwire_proto::congestion::{FixedWindow, Path, PathSignals};
use warpwire_proto::qp::{SendOp, SendWr, Stats, Status, TransportOptions};

use crate::sim::link::Faults;
use crate::sim::net::{ConnParams, Network};
use crate::sim::node::PlannedWr;
use crate::sim::random::{Random, mix};
use crate::sim::tcp::TcpFlow;

/// A queue in front of a line.
#[derive(Clone, Debug)]
pub struct Bottleneck {
    /// Bytes per second.
    pub rate: u64,
    /// Bytes that the queue holds.
    pub queue: u64,
    /// Packets are marked while the queue is longer.
    pub mark_above: Option<u64>,
    free_at: Instant,
    pub carried: u64,
    pub dropped: u64,
    pub marked: u64,
}

impl Bottleneck {
    pub fn new(rate: u64, queue: u64, mark_above: Option<u64>) -> Self {
        let free_at = Instant::default();
        Self { rate, queue, mark_above, free_at, carried: 0, dropped: 0, marked: 0 }
    }

    /// When a packet leaves the line, and whether it was marked; `None` if it was dropped.
    pub fn enqueue(&mut self, now: Instant, len: usize) -> Option<(Instant, bool)> {
        let backlog = (self.free_at - now).as_nanos() as u64 * self.rate / 1_000_000_000;
        if backlog + len as u64 > self.queue {
            self.dropped += 1;
            return None;
        }
        let is_marked = self.mark_above.is_some_and(|threshold| backlog > threshold);
        self.carried += 1;
        self.marked += u64::from(is_marked);
        let time = Duration::from_nanos(len as u64 * 1_000_000_000 / self.rate);
        self.free_at = self.free_at.max(now) + time;
        Some((self.free_at, is_marked))
    }

    /// When the last packet of the queue leaves the line.
    pub fn busy_until(&self, now: Instant) -> Instant {
        self.free_at.max(now)
    }
}

/// The way from one host to another, and the queue pairs that wait for room on it.
#[derive(Debug)]
struct SimPath {
    path: Path,
    waiting: VecDeque<usize>,
}

impl SimPath {
    fn new(fixed_window: Option<u32>) -> Self {
        let fixed = |window| Path::new(Box::new(FixedWindow(window)));
        Self { path: fixed_window.map_or_else(Path::default, fixed), waiting: VecDeque::new() }
    }
}

/// Paths by their ends, and the bottlenecks that packets pass.
#[derive(Debug)]
pub struct Congestion {
    paths: BTreeMap<(usize, usize), SimPath>,
    pub bottlenecks: Vec<Bottleneck>,
    /// Which bottleneck lies between two hosts.
    route: BTreeMap<(usize, usize), usize>,
    pub tcp: Vec<TcpFlow>,
    /// The window of all paths, instead of one that adapts.
    pub fixed_window: Option<u32>,
}

impl Congestion {
    pub fn new(bottlenecks: Vec<Bottleneck>, route: BTreeMap<(usize, usize), usize>) -> Self {
        let (tcp, fixed_window) = (Vec::new(), None);
        Self { paths: BTreeMap::new(), bottlenecks, route, tcp, fixed_window }
    }

    fn path(&mut self, from: usize, to: usize) -> &mut SimPath {
        self.paths.entry((from, to)).or_insert_with(|| SimPath::new(self.fixed_window))
    }
}

impl Network {
    /// Before a queue pair transmits: limits what it may have in flight.
    pub fn admit(&mut self, node: usize, conn: usize) {
        let Some(congestion) = &mut self.congestion else { return };
        let state = &mut self.nodes[node].conns[conn];
        let path = &mut congestion.path(node, state.peer.0).path;
        path.add_mtu(state.qp.mtu().bytes());
        let room = path.room();
        state.qp.set_allowance(state.path_in_flight.saturating_add(room));
    }

    /// Follows every call into a queue pair: reports to its path what it saw, and lets others send.
    pub fn update_path(&mut self, node: usize, conn: usize) {
        let Some(congestion) = &mut self.congestion else { return };
        let state = &mut self.nodes[node].conns[conn];
        let at = congestion.path(node, state.peer.0);
        if state.qp.take_blocked_by_path() && !state.waits {
            state.waits = true;
            at.waiting.push_back(conn);
        }
        let (in_flight, signals) = (state.qp.in_flight(), state.qp.take_path_signals());
        if in_flight != state.path_in_flight || signals != PathSignals::default() {
            at.path.set_in_flight(state.path_in_flight, in_flight);
            state.path_in_flight = in_flight;
            at.path.on_signals(self.now, &signals);
        }
        // Also if nothing has changed: one that had nothing to send leaves its room to the next.
        let count = (at.path.room() as usize).min(at.waiting.len());
        let woken: Vec<usize> = at.waiting.drain(..count).collect();
        for other in woken {
            self.nodes[node].conns[other].waits = false;
            self.schedule_poll(node, other);
        }
    }

    /// Queue pairs wait only while there is no room, or while one is going to be polled.
    pub fn check_waiting(&self, node: usize, peer: usize) {
        let Some(congestion) = &self.congestion else { return };
        let Some(at) = congestion.paths.get(&(node, peer)) else { return };
        let users = || self.nodes[node].conns.iter().filter(|conn| conn.peer.0 == peer);
        assert!(
            at.waiting.is_empty() || at.path.room() == 0 || users().any(|conn| conn.poll_scheduled),
            "queue pairs {:?} wait although there is room: {:?}",
            at.waiting,
            at.path
        );
        let in_flight: u32 = users().map(|conn| conn.qp.in_flight()).sum();
        assert_eq!(at.path.in_flight(), in_flight, "what the queue pairs have in flight");
    }

    /// A packet enters the network; `None` if the bottleneck has no room for it.
    pub fn enqueue(&mut self, from: usize, to: usize, len: usize) -> Option<(Instant, bool)> {
        let now = self.now;
        let Some(congestion) = &mut self.congestion else { return Some((now, false)) };
        match congestion.route.get(&(from, to)) {
            Some(at) => congestion.bottlenecks[*at].enqueue(now, len),
            None => Some((now, false)),
        }
    }

    pub fn run_until(&mut self, end: Instant) {
        while self.now < end && self.step() {}
    }

    /// Adds `count` requests of `len` bytes each, and the receives that they need.
    pub fn add_stream(&mut self, node: usize, conn: usize, kind: StreamKind, count: u64, len: u32) {
        let (peer_node, peer_conn) = self.conn(node, conn).peer;
        let rkey = 0x1000 + peer_conn as u32;
        for id in 0..count {
            let name = mix(self.random.next());
            let mut range = |name| {
                let address = self.nodes[peer_node].memory.range(len, name);
                warpwire_proto::qp::Remote { address, rkey }
            };
            let op = match kind {
                StreamKind::Writes => SendOp::Write(range(0)),
                StreamKind::Sends => SendOp::Send,
                StreamKind::Reads => SendOp::Read(range(name)),
            };
            let work = SendWr::new(id, op, len);
            let planned = PlannedWr { work, name, read: Vec::new(), result: None, status: None };
            self.conn(node, conn).app.plan.push(planned);
            if kind == StreamKind::Sends {
                self.conn(peer_node, peer_conn).app.post_receive();
            }
        }
    }

    /// Bytes of completed work of a node. None of its work may have failed.
    pub fn completed_bytes(&self, node: usize) -> u64 {
        let plans = self.nodes[node].conns.iter().flat_map(|conn| &conn.app.plan);
        let done = plans.filter_map(|planned| Some((planned.status?, planned.work.len)));
        done.map(|(status, len)| {
            assert_eq!(status, Status::Success, "work failed");
            u64::from(len)
        })
        .sum()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    Writes,
    Sends,
    Reads,
}

/// Wire bytes of a packet with 1024 bytes of payload, roughly.
const PACKET: u64 = 1070;
const MESSAGE: u32 = 8 << 10;

#[derive(Debug)]
struct Scenario {
    senders: usize,
    /// All of them send to one host, or each to its own.
    incast: bool,
    per_sender: usize,
    kind: StreamKind,
    rate: u64,
    /// Packets that fit on the way without a queue, and into the queue.
    on_the_way: u64,
    queue: u64,
    ecn: bool,
}

impl Scenario {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0xc0_96e5);
        let senders = random.between(4, 12) as usize;
        let queue = 20 * senders as u64;
        Self {
            senders,
            incast: random.chance(400),
            per_sender: random.pick(&[1, 4, 16, 32]),
            kind: random.pick(&[StreamKind::Writes, StreamKind::Sends, StreamKind::Reads]),
            rate: random.pick(&[12_500_000, 25_000_000, 125_000_000]),
            on_the_way: queue / random.pick(&[1, 2, 8]),
            queue,
            ecn: seed % 2 == 1,
        }
    }

    /// The time that a packet takes there and back through a full queue.
    fn round_trip(&self) -> Duration {
        self.time((self.on_the_way + self.queue) * PACKET)
    }

    fn time(&self, bytes: u64) -> Duration {
        Duration::from_nanos(bytes * 1_000_000_000 / self.rate)
    }

    fn build(&self, seed: u64, rounds: u32) -> Network {
        let receivers = if self.incast { 1 } else { self.senders };
        let mut net = Network::new(seed, self.senders + receivers);
        let mark_above = self.ecn.then_some(self.queue * PACKET / 3);
        let bottleneck = Bottleneck::new(self.rate, self.queue * PACKET, mark_above);
        let mut route = BTreeMap::new();
        let delay = self.time(self.on_the_way * PACKET) / 2;
        let params = ConnParams {
            mtu: 1024,
            timeout: 17,
            selective: [true; 2],
            options: TransportOptions::default().with_send_depth(16),
            ..ConnParams::default()
        };
        let volume =
            self.rate * u64::try_from(self.round_trip().as_micros()).unwrap() * u64::from(rounds)
                / 1_000_000;
        let each = volume * 3 / (self.senders * self.per_sender) as u64 / u64::from(MESSAGE) + 20;
        for sender in 0..self.senders {
            let receiver = self.senders + if self.incast { 0 } else { sender };
            net.link(sender, receiver, Faults { delay, ..Faults::default() });
            route.insert((sender, receiver), 0);
            route.insert((receiver, sender), 1);
            for _ in 0..self.per_sender {
                let conns = net.connect(sender, receiver, params);
                net.add_stream(sender, conns[0], self.kind, each, MESSAGE);
            }
        }
        net.congestion = Some(Congestion::new(vec![bottleneck; 2], route));
        net
    }

    /// Packets with data that were sent so far, and those of them that were sent again.
    fn packets(&self, net: &Network) -> (u64, u64) {
        let at = usize::from(self.kind == StreamKind::Reads);
        let bottleneck = &net.congestion.as_ref().unwrap().bottlenecks[at];
        let conns = net.nodes[..self.senders].iter().flat_map(|node| &node.conns);
        let stats = conns.map(|conn| conn.qp.stats());
        let sent = bottleneck.carried + bottleneck.dropped;
        let again = match self.kind {
            // All but what was new, and what is on its way: that hardly changes.
            StreamKind::Reads => {
                let used = |stats: &Stats| stats.packets_received - stats.drops.iter().sum::<u64>();
                sent - stats.map(used).sum::<u64>()
            }
            _ => stats.map(|stats| stats.resent).sum(),
        };
        (sent, again)
    }
}

/// One network: after a third of the time the windows have settled; then at most 3 % are sent
/// again, nothing fails, the line is busy, and hosts get similar shares.
fn share_a_bottleneck(seed: u64) {
    const ROUNDS: u32 = 240;
    /// Shares of two hosts differ at most by this factor.
    const FAIRNESS: f64 = 4.0;
    let scenario = Scenario::new(seed);
    let mut net = scenario.build(seed, ROUNDS);
    let end = Instant::default() + scenario.round_trip() * ROUNDS;
    let middle = Instant::default() + scenario.round_trip() * (ROUNDS / 3);
    net.start();
    net.run_until(middle);
    let before: Vec<u64> = (0..scenario.senders).map(|node| net.completed_bytes(node)).collect();
    let (sent_before, again_before) = scenario.packets(&net);
    net.run_until(end);
    let (sent, again) = scenario.packets(&net);
    let share = |node: usize| net.completed_bytes(node) - before[node];
    let shares: Vec<u64> = (0..scenario.senders).map(share).collect();
    let goodput = shares.iter().sum::<u64>() as f64 / (end - middle).as_secs_f64();
    let resent = again.saturating_sub(again_before) as f64 / (sent - sent_before) as f64;
    let (low, high) = (*shares.iter().min().unwrap(), *shares.iter().max().unwrap());
    let ratio = high as f64 / low.max(1) as f64;
    let used = goodput / scenario.rate as f64;
    let bottlenecks = &net.congestion.as_ref().unwrap().bottlenecks;
    let timeouts: u64 =
        net.nodes.iter().flat_map(|n| &n.conns).map(|c| c.qp.stats().timeouts).sum();
    println!(
        "seed {seed}: {used:.2} of the line, {:.2} % resent, shares within {ratio:.1}, \
         {timeouts} timeouts, {:?} {scenario:?}",
        resent * 100.0,
        bottlenecks.iter().map(|b| (b.carried, b.dropped, b.marked)).collect::<Vec<_>>()
    );
    assert!(resent < 0.03, "seed {seed}: {:.1} % resent", resent * 100.0);
    assert!(ratio <= FAIRNESS, "seed {seed}: shares {shares:?}");
    assert!(used > 0.7, "seed {seed}: {used:.2} of the line is used");
}

/// `WARPWIRE_NETWORKS=n` sets their number.
#[test]
fn hosts_share_a_bottleneck() {
    for seed in 0..Effort::pick("WARPWIRE_NETWORKS", [2, 5, 100]) {
        share_a_bottleneck(seed);
    }
}
