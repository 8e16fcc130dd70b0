//! Memory that is paged out at any time, on links that lose nothing: everything arrives without the
//! help of a timer.

use core::time::Duration;

use testkit::{Effort, for_each_seed};
use warpwire_proto::qp::Status;

use crate::sim::link::Faults;
use crate::sim::net::Network;
use crate::sim::plan::{MIXES, add_work, params};
use crate::sim::random::Random;

fn run_seed(seed: u64) {
    let mut random = Random::new(seed);
    let mut net = Network::new(random.next(), 2);
    let delay = Duration::from_nanos(random.pick(&[0, 500, 5_000, 100_000]));
    net.link(0, 1, Faults { delay, ..Faults::default() });
    let mut params = params(&mut random);
    // 4 seconds: longer than everything else may take.
    (params.timeout, params.retry_count, params.rnr_retry) = (20, 0, 7);
    params.page_faults = random.pick(&[20, 100, 300, 500]);
    params.selective = [random.chance(500); 2];
    let conns = net.connect(0, 1, params);
    let max_len = params.mtu * random.pick(&[1, 4, 20]);
    for (node, conn) in [(0, conns[0]), (1, conns[1])] {
        let count = random.between(0, 12) as usize;
        let mix_of_ops = random.pick(&MIXES);
        add_work(&mut net, (node, conn), count, max_len, mix_of_ops);
        (0..random.pick(&[1, 4, 32])).for_each(|_| net.conn(node, conn).app.post_receive());
    }
    net.run();
    net.drain();
    super::check_counts(&net);
    for conn in net.nodes.iter().flat_map(|node| &node.conns) {
        assert_eq!(conn.qp.stats().timeouts, 0, "{:?}", conn.qp.stats());
        for planned in &conn.app.plan {
            assert_eq!(planned.status, Some(Status::Success));
        }
    }
}

/// `WARPWIRE_SEED=n` runs a single seed, `WARPWIRE_SEEDS=n` sets their number.
#[test]
fn page_faults_need_no_timer() {
    for_each_seed(0..Effort::pick("WARPWIRE_SEEDS", [400, 2000, 50_000]), run_seed);
}
