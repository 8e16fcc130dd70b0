//! Queue pairs that share the window of a path over a network that reorders and loses packets: all
//! work completes.

use core::time::Duration;
use std::collections::BTreeMap;

use testkit::{Effort, for_each_seed};
use warpwire_proto::qp::{Status, TransportOptions};

use crate::sim::congested::{Bottleneck, Congestion};
use crate::sim::link::Faults;
use crate::sim::net::{ConnParams, Network};
use crate::sim::plan::{MIXES, add_work};
use crate::sim::random::Random;

/// Up to 64 queue pairs between two hosts. The window is often smaller than their number, and those
/// that wait for room in it may have nothing to send when their turn comes: what they took for lost
/// was late, and has been acknowledged meanwhile.
fn build(seed: u64) -> Network {
    let mut random = Random::new(seed ^ 0x5a_7e0f);
    let mut net = Network::new(random.next(), 2);
    net.link(
        0,
        1,
        Faults {
            loss: random.pick(&[0, 0, 10, 50]),
            reorder: random.pick(&[20, 50, 200]),
            duplicate: random.pick(&[0, 0, 20]),
            mark: random.pick(&[0, 0, 50]),
            delay: Duration::from_nanos(random.pick(&[500, 5_000, 100_000])),
            jitter: Duration::from_nanos(random.pick(&[0, 200, 20_000])),
            ..Faults::default()
        },
    );
    let bottleneck = Bottleneck::new(random.pick(&[12_500_000, 1_250_000_000]), 300_000, None);
    let route = BTreeMap::from([((0, 1), 0), ((1, 0), 1)]);
    let mut congestion = Congestion::new(vec![bottleneck; 2], route);
    congestion.fixed_window = random.pick(&[None, Some(1), Some(2), Some(5)]);
    net.congestion = Some(congestion);
    let params = ConnParams {
        mtu: random.pick(&[256, 1024]),
        timeout: 17,
        selective: [random.chance(800); 2],
        options: TransportOptions::default().with_send_depth(random.pick(&[1, 4, 32])),
        poll_delay: Duration::from_nanos(random.pick(&[0, 1_000, 30_000])),
        page_faults: random.pick(&[0, 0, 20]),
        ..ConnParams::default()
    };
    let mix_of_ops = random.pick(&MIXES);
    let max_len = params.mtu * random.pick(&[1, 4, 20]);
    for _ in 0..random.pick(&[1, 2, 8, 16, 64]) {
        let conns = net.connect(0, 1, params);
        let count = random.between(1, 12) as usize;
        add_work(&mut net, (0, conns[0]), count, max_len, mix_of_ops);
        for _ in 0..random.pick(&[4, 32]) {
            net.conn(1, conns[1]).app.post_receive();
        }
    }
    net
}

fn run_seed(seed: u64) {
    let mut net = build(seed);
    net.run();
    net.drain();
    let plans = net.nodes.iter().flat_map(|node| &node.conns).flat_map(|conn| &conn.app.plan);
    for planned in plans {
        assert_eq!(planned.status, Some(Status::Success));
    }
}

/// `WARPWIRE_SEED=n` runs a single seed, `WARPWIRE_SEEDS=n` sets their number.
#[test]
fn work_on_a_shared_path_completes() {
    for_each_seed(0..Effort::pick("WARPWIRE_SEEDS", [100, 500, 5000]), run_seed);
}
