//! Random scenarios from one seed.

use core::time::Duration;

use warpwire_proto::qp::{Atomic, AtomicWidth, Fence, Remote, SendOp, SendWr, TransportOptions};

use crate::sim::link::Faults;
use crate::sim::net::{ConnParams, Network, SimEvent};
use crate::sim::node::PlannedWr;
use crate::sim::random::{Random, mix};

/// Operations to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpMix {
    Sends,
    Writes,
    Reads,
    Atomics,
    Everything,
}

pub const MIXES: [OpMix; 5] =
    [OpMix::Sends, OpMix::Writes, OpMix::Reads, OpMix::Atomics, OpMix::Everything];

/// Adds `count` requests of that mix to a connection's plan, with memory at the peer for each.
pub fn add_work(
    net: &mut Network,
    at: (usize, usize),
    count: usize,
    max_len: u32,
    mix_of_ops: OpMix,
) {
    let (node, conn) = at;
    let (peer_node, peer_conn) = net.conn(node, conn).peer;
    let key = 0x1000 + peer_conn as u32;
    // Counters that all connections of the peer's node may share.
    let counter = match net.nodes[peer_node].memory.bytes.len() {
        0 => net.nodes[peer_node].memory.range(64, 1),
        _ => crate::sim::node::BASE,
    };
    for _ in 0..count {
        let id = net.conn(node, conn).app.plan.len() as u64;
        let mut random = Random::new(net.random.next());
        let name = mix(random.next());
        let len = match random.below(8) {
            0 => 0,
            1 => random.between(1, 16) as u32,
            _ => random.between(1, u64::from(max_len)) as u32,
        };
        let op_index = match mix_of_ops {
            OpMix::Sends => random.below(3),
            OpMix::Writes => 3 + random.below(2),
            OpMix::Reads => 5,
            OpMix::Atomics => 6 + random.below(4),
            OpMix::Everything => random.below(11),
        };
        let memory = &mut net.nodes[peer_node].memory;
        let mut remote_range =
            |len: u32, name: u64| Remote { address: memory.range(len, name), rkey: key };
        let word = Remote { address: counter + 8 * random.below(8), rkey: key };
        let imm = random.next() as u32;
        let (op, len) = match op_index {
            0 => (SendOp::Send, len),
            1 => (SendOp::SendImm(imm), len),
            2 => (SendOp::SendInvalidate(imm), len),
            3 => (SendOp::Write(remote_range(len, 0)), len),
            4 => (SendOp::WriteImm(remote_range(len, 0), imm), len),
            5 => (SendOp::Read(remote_range(len, name)), len),
            6 => (SendOp::Atomic(word, Atomic::FetchAdd { add: random.below(1000) }), 8),
            7 => {
                let (compare, swap) = (random.below(3), random.below(3));
                (SendOp::Atomic(word, Atomic::CompareSwap { compare, swap }), 8)
            }
            8 => {
                let (add, boundary) = (random.next(), random.next());
                let width = AtomicWidth::Eight;
                (SendOp::Atomic(word, Atomic::MaskedFetchAdd { width, add, boundary }), 8)
            }
            9 => {
                let [compare, swap, compare_mask, swap_mask] = [(); 4].map(|()| random.next());
                let width = AtomicWidth::Eight;
                let atomic =
                    Atomic::MaskedCompareSwap { width, compare, swap, compare_mask, swap_mask };
                (SendOp::Atomic(word, atomic), 8)
            }
            _ => (SendOp::Local, 0),
        };
        let solicited = random.chance(200) && crate::sim::node::takes_receive(&op);
        let fence = random.pick(&[Fence::Reads, Fence::All]);
        let fence = if random.chance(100) { fence } else { Fence::None };
        let work = SendWr { fence, solicited, ..SendWr::new(id, op, len) };
        let planned = PlannedWr { work, name, read: Vec::new(), result: None, status: None };
        net.conn(node, conn).app.plan.push(planned);
    }
}

/// Failures that a random scenario may end with.
#[derive(Clone, Copy, Debug)]
pub struct Expect {
    /// A node fails, or a link is cut permanently.
    pub failure_injected: bool,
    /// The loss is so high that all retries may fail.
    pub may_exhaust_retries: bool,
    /// Receives may be missing for longer than the RNR retries last.
    pub may_exhaust_rnr: bool,
}

/// Bytes per second of a link with long queueing delays.
const SLOW: u64 = 100_000_000;

pub fn faults(random: &mut Random) -> Faults {
    let mut some = |max: u64| if random.chance(500) { 0 } else { random.below(max + 1) as u32 };
    let mut faults = Faults {
        loss: some(200),
        duplicate: some(100),
        reorder: some(100),
        corrupt: some(50),
        truncate: some(20),
        mark: some(50),
        ..Faults::default()
    };
    faults.delay = Duration::from_nanos(random.pick(&[0, 500, 5_000, 100_000]));
    faults.jitter = Duration::from_nanos(random.pick(&[0, 0, 200, 20_000]));
    faults.bandwidth = random.pick(&[0, 0, 12_500_000_000, SLOW]);
    faults
}

pub fn params(random: &mut Random) -> ConnParams {
    let mut psn = || match random.below(3) {
        0 => 0xff_ffff - random.below(300) as u32,
        1 => 0,
        _ => random.next() as u32 & 0xff_ffff,
    };
    let psn = [psn(), psn()];
    ConnParams {
        options: TransportOptions::default()
            .with_send_depth(random.pick(&[1, 2, 7, 32, 128]))
            .with_window(random.pick(&[1, 2, 8, 64, 256]))
            .with_read_chunk(random.pick(&[1, 3, 16, 64])),
        mtu: random.pick(&[256, 256, 512, 1024, 4096]),
        psn,
        timeout: random.pick(&[8, 10, 12]),
        retry_count: random.pick(&[7, 7, 7, 7, 0, 1, 3]),
        rnr_retry: random.pick(&[7, 7, 7, 3]),
        min_rnr_timer: random.pick(&[1, 1, 6, 12]),
        rd_atomic: random.pick(&[1, 2, 4, 16]),
        receive_delay: Duration::from_nanos(random.pick(&[0, 0, 2_000, 300_000])),
        page_faults: random.pick(&[0, 0, 0, 20, 100]),
        poll_delay: Duration::from_nanos(random.pick(&[0, 1_000, 30_000])),
        selective: random.pick(&[[true; 2], [true; 2], [false; 2], [true, false], [false, true]]),
        hold_failures: random.pick(&[0, 0, 0, 200]),
        ..ConnParams::default()
    }
}

/// Builds the network of a seed: two to four nodes, one to six connections, work in both
/// directions.
pub fn build(seed: u64) -> (Network, Expect) {
    let mut random = Random::new(seed);
    let nodes = random.pick(&[2, 2, 2, 3, 4]);
    let mut net = Network::new(random.next(), nodes);
    let mut expect =
        Expect { failure_injected: false, may_exhaust_retries: false, may_exhaust_rnr: false };
    let mut slow = false;
    for a in 0..nodes {
        for b in a + 1..nodes {
            let faults = faults(&mut random);
            expect.may_exhaust_retries |= faults.loss_per_mille() > 50;
            slow |= faults.bandwidth == SLOW;
            net.link(a, b, faults);
        }
    }
    for _ in 0..random.between(1, if nodes == 2 { 2 } else { 6 }) {
        let a = random.below(nodes as u64) as usize;
        let b = (a + 1 + random.below(nodes as u64 - 1) as usize) % nodes;
        let mut params = params(&mut random);
        if slow {
            params.timeout = 16; // longer than a full window takes on such a link
        }
        expect.may_exhaust_rnr |= params.rnr_retry != 7;
        // With any loss, a small number of retries may all be lost.
        expect.may_exhaust_retries |= params.retry_count < 7 && !net.clean;
        let conns = net.connect(a, b, params);
        let mix_of_ops = random.pick(&MIXES);
        let max_len = params.mtu * random.pick(&[1, 4, 20]);
        for (node, conn) in [(a, conns[0]), (b, conns[1])] {
            let count = random.between(0, 25) as usize;
            add_work(&mut net, (node, conn), count, max_len, mix_of_ops);
            for _ in 0..random.pick(&[1, 4, 32]) {
                net.conn(node, conn).app.post_receive();
            }
        }
    }
    inject_failure(&mut net, &mut random, &mut expect);
    (net, expect)
}

/// In some scenarios a node fails, or a link is cut temporarily or permanently.
fn inject_failure(net: &mut Network, random: &mut Random, expect: &mut Expect) {
    let when =
        |random: &mut Random| warpwire_proto::Instant::from_nanos(random.between(1, 3_000_000));
    match random.below(20) {
        0 => {
            (expect.failure_injected, net.clean) = (true, false);
            net.at(when(random), SimEvent::NodeFails { node: 0 });
        }
        1 => {
            (expect.failure_injected, net.clean) = (true, false);
            net.at(when(random), SimEvent::Cut { from: 0, to: 1, cut: true });
        }
        3 => {
            // The send queue is drained and resumed, which loses nothing.
            let (start, conn) = (when(random), random.below(net.nodes[0].conns.len() as u64 + 1));
            if let Some(conn) = (conn as usize).checked_sub(1) {
                net.at(start, SimEvent::Pause { node: 0, conn });
                let rest = Duration::from_micros(random.between(1, 3000));
                net.at(start + rest, SimEvent::Resume { node: 0, conn });
            }
        }
        2 => {
            net.clean = false;
            expect.may_exhaust_retries |= net.nodes[0].conns.iter().any(|conn| conn.few_retries);
            // Shorter than the retries last: all work must succeed.
            let start = when(random);
            let heal = start + Duration::from_millis(2);
            net.at(start, SimEvent::Cut { from: 1, to: 0, cut: true });
            net.at(heal, SimEvent::Cut { from: 1, to: 0, cut: false });
        }
        _ => {}
    }
}
