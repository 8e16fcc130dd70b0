//! A whole scenario from one seed.

use core::time::Duration;

use warpwire_proto::qp::{Atomic, Fence, Op, Options, Remote, Width, Work};

use crate::sim::link::Faults;
use crate::sim::net::{Happening, Net, Terms};
use crate::sim::node::Planned;
use crate::sim::random::{Random, mix};

/// What work there is to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    Sends,
    Writes,
    Reads,
    Atomics,
    Everything,
}

pub const MIXES: [Mix; 5] = [Mix::Sends, Mix::Writes, Mix::Reads, Mix::Atomics, Mix::Everything];

/// Adds `count` works of that mix to a side's plan, with memory at the peer for each.
pub fn add_work(net: &mut Net, at: (usize, usize), count: usize, longest: u32, what: Mix) {
    let (node, side) = at;
    let (peer_node, peer_side) = net.side(node, side).peer;
    let key = 0x1000 + peer_side as u32;
    // Counters that every side of the peer's node may share.
    let counter = match net.nodes[peer_node].memory.bytes.len() {
        0 => net.nodes[peer_node].memory.range(64, 1),
        _ => crate::sim::node::BASE,
    };
    for _ in 0..count {
        let id = net.side(node, side).app.plan.len() as u64;
        let mut random = Random::new(net.random.next());
        let name = mix(random.next());
        let len = match random.below(8) {
            0 => 0,
            1 => random.between(1, 16) as u32,
            _ => random.between(1, u64::from(longest)) as u32,
        };
        let sort = match what {
            Mix::Sends => random.below(3),
            Mix::Writes => 3 + random.below(2),
            Mix::Reads => 5,
            Mix::Atomics => 6 + random.below(4),
            Mix::Everything => random.below(11),
        };
        let memory = &mut net.nodes[peer_node].memory;
        let mut place = |len: u32, name: u64| Remote { address: memory.range(len, name), key };
        let word = Remote { address: counter + 8 * random.below(8), key };
        let imm = random.next() as u32;
        let (op, len) = match sort {
            0 => (Op::Send, len),
            1 => (Op::SendImm(imm), len),
            2 => (Op::SendInvalidate(imm), len),
            3 => (Op::Write(place(len, 0)), len),
            4 => (Op::WriteImm(place(len, 0), imm), len),
            5 => (Op::Read(place(len, name)), len),
            6 => (Op::Atomic(word, Atomic::FetchAdd { add: random.below(1000) }), 8),
            7 => {
                let (compare, swap) = (random.below(3), random.below(3));
                (Op::Atomic(word, Atomic::CompareSwap { compare, swap }), 8)
            }
            8 => {
                let (add, boundary) = (random.next(), random.next());
                let width = Width::Eight;
                (Op::Atomic(word, Atomic::MaskedFetchAdd { width, add, boundary }), 8)
            }
            9 => {
                let [compare, swap, compare_mask, swap_mask] = [(); 4].map(|()| random.next());
                let width = Width::Eight;
                let atomic =
                    Atomic::MaskedCompareSwap { width, compare, swap, compare_mask, swap_mask };
                (Op::Atomic(word, atomic), 8)
            }
            _ => (Op::Local, 0),
        };
        let solicited = random.chance(200) && crate::sim::node::takes_receive(&op);
        let fence = random.pick(&[Fence::Reads, Fence::All]);
        let fence = if random.chance(100) { fence } else { Fence::None };
        let work = Work { fence, solicited, ..Work::new(id, op, len) };
        let planned = Planned { work, name, read: Vec::new(), result: None, status: None };
        net.side(node, side).app.plan.push(planned);
    }
}

/// What a random scenario may end with.
#[derive(Clone, Copy, Debug)]
pub struct Expect {
    /// A node dies, or a link is cut for good.
    pub doomed: bool,
    /// So much is lost that all tries may fail.
    pub may_exhaust: bool,
    /// Receives may be missing for longer than the peer waits.
    pub may_starve: bool,
}

/// Bytes in a second of a link on which packets queue for long.
const SLOW: u64 = 100_000_000;

pub fn faults(random: &mut Random) -> Faults {
    let mut some = |most: u64| if random.chance(500) { 0 } else { random.below(most + 1) as u32 };
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

pub fn terms(random: &mut Random) -> Terms {
    let mut psn = || match random.below(3) {
        0 => 0xff_ffff - random.below(300) as u32,
        1 => 0,
        _ => random.next() as u32 & 0xff_ffff,
    };
    let psn = [psn(), psn()];
    Terms {
        options: Options {
            send_depth: random.pick(&[1, 2, 7, 32, 128]),
            window: random.pick(&[1, 2, 8, 64, 256]),
            read_chunk: random.pick(&[1, 3, 16, 64]),
            line_rate: random.pick(&[None, None, Some(1_000_000_000)]),
        },
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
        ..Terms::default()
    }
}

/// Builds the network of a seed: two to four nodes, one to six connections, work in both directions.
pub fn build(seed: u64) -> (Net, Expect) {
    let mut random = Random::new(seed);
    let nodes = random.pick(&[2, 2, 2, 3, 4]);
    let mut net = Net::new(random.next(), nodes);
    let mut expect = Expect { doomed: false, may_exhaust: false, may_starve: false };
    let mut slow = false;
    for a in 0..nodes {
        for b in a + 1..nodes {
            let faults = faults(&mut random);
            expect.may_exhaust |= faults.harm() > 50;
            slow |= faults.bandwidth == SLOW;
            net.link(a, b, faults);
        }
    }
    for _ in 0..random.between(1, if nodes == 2 { 2 } else { 6 }) {
        let a = random.below(nodes as u64) as usize;
        let b = (a + 1 + random.below(nodes as u64 - 1) as usize) % nodes;
        let mut terms = terms(&mut random);
        if slow {
            terms.timeout = 16; // longer than a full window waits for such a link
        }
        expect.may_starve |= terms.rnr_retry != 7;
        // Where something is lost at all, few tries may all be lost.
        expect.may_exhaust |= terms.retry_count < 7 && !net.clean;
        let sides = net.connect(a, b, terms);
        let what = random.pick(&MIXES);
        let longest = terms.mtu * random.pick(&[1, 4, 20]);
        for (node, side) in [(a, sides[0]), (b, sides[1])] {
            let count = random.between(0, 25) as usize;
            add_work(&mut net, (node, side), count, longest, what);
            for _ in 0..random.pick(&[1, 4, 32]) {
                net.side(node, side).app.make_receive();
            }
        }
    }
    doom(&mut net, &mut random, &mut expect);
    (net, expect)
}

/// In some scenarios a node dies, or a link is cut for a while or for good.
fn doom(net: &mut Net, random: &mut Random, expect: &mut Expect) {
    let when =
        |random: &mut Random| warpwire_proto::Instant::from_nanos(random.between(1, 3_000_000));
    match random.below(20) {
        0 => {
            (expect.doomed, net.clean) = (true, false);
            net.at(when(random), Happening::Dies { node: 0 });
        }
        1 => {
            (expect.doomed, net.clean) = (true, false);
            net.at(when(random), Happening::Cut { from: 0, to: 1, cut: true });
        }
        3 => {
            // The send queue pauses: nothing is lost by that.
            let (start, side) = (when(random), random.below(net.nodes[0].sides.len() as u64 + 1));
            if let Some(side) = (side as usize).checked_sub(1) {
                net.at(start, Happening::Pause { node: 0, side });
                let rest = Duration::from_micros(random.between(1, 3000));
                net.at(start + rest, Happening::Resume { node: 0, side });
            }
        }
        2 => {
            net.clean = false;
            expect.may_exhaust |= net.nodes[0].sides.iter().any(|side| side.few_tries);
            // Shorter than the tries last: all must come through.
            let start = when(random);
            let heal = start + Duration::from_millis(2);
            net.at(start, Happening::Cut { from: 1, to: 0, cut: true });
            net.at(heal, Happening::Cut { from: 1, to: 0, cut: false });
        }
        _ => {}
    }
}
