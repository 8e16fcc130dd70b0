//! Goodput and retransmissions over loss, delay, MTU, depth and operation, as a snapshot: it shows
//! changes for better or worse.

use core::time::Duration;
use std::fmt::Write as _;

use testkit::Effort;
use warpwire_proto::qp::{Fence, Status, TransportOptions};

use crate::sim::link::Faults;
use crate::sim::net::{ConnParams, Network};
use crate::sim::plan::{OpMix, add_work};

const LOSSES: [u32; 4] = [0, 10, 50, 200];
const MESSAGES: usize = 96;

/// One cell: MB/s of virtual time, and packets sent per packet needed without loss.
fn cell(mix_of_ops: OpMix, mtu: u32, depth: u32, delay: u64, loss: u32) -> String {
    let mut net = Network::new(7, 2);
    let delay = Duration::from_micros(delay);
    net.link(0, 1, Faults { loss, delay, bandwidth: 12_500_000_000, ..Faults::default() });
    let options = TransportOptions::default().with_send_depth(depth);
    // A timeout longer than the queueing delay, but short enough not to dominate the result.
    let params = ConnParams {
        options,
        mtu,
        timeout: 9,
        retry_count: 7,
        rd_atomic: 16,
        ..ConnParams::default()
    };
    let conns = net.connect(0, 1, params);
    add_work(&mut net, (0, conns[0]), MESSAGES, 32 << 10, mix_of_ops);
    for planned in &mut net.conn(0, conns[0]).app.plan {
        planned.work.fence = Fence::None; // they would dominate the result
    }
    for _ in 0..MESSAGES {
        net.conn(1, conns[1]).app.post_receive();
    }
    net.run();
    let plan = &net.nodes[0].conns[0].app.plan;
    let done = plan.iter().filter(|planned| planned.status == Some(Status::Success));
    let bytes: u64 = done.clone().map(|planned| u64::from(planned.work.len)).sum();
    let needed: u64 = plan.iter().map(|p| u64::from(p.work.len.div_ceil(mtu).max(1))).sum();
    let sent: u64 = net.nodes.iter().map(|node| node.conns[0].qp.stats().packets_sent).sum();
    let failed = MESSAGES - done.count();
    let seconds = net.now.as_nanos() as f64 / 1e9;
    let rate = bytes as f64 / 1e6 / seconds;
    let mark = if failed > 0 { "!" } else { " " };
    format!("{rate:>9.1} {:>6.2}{mark}", sent as f64 / needed as f64)
}

/// A line of the table.
fn row((mix_of_ops, (mtu, depth), delay): (OpMix, (u32, u32), u64)) -> String {
    let mut row = format!("{:<7} {mtu:>4} {depth:>4} {delay:>6}    ", format!("{mix_of_ops:?}"));
    for loss in LOSSES {
        row += &cell(mix_of_ops, mtu, depth, delay, loss);
    }
    row
}

/// `cargo test` looks at every fourth line.
#[test]
fn the_matrix_stays_as_it_is() {
    let mut rows = Vec::new();
    for mix_of_ops in [OpMix::Sends, OpMix::Writes, OpMix::Reads, OpMix::Atomics] {
        for size in [(256, 16), (1024, 1), (1024, 16), (4096, 1), (4096, 16)] {
            rows.extend([1, 20].map(|delay| (mix_of_ops, size, delay)));
        }
    }
    if Effort::current() == Effort::Quick {
        let snapshot = include_str!("snapshots/proto__sim__matrix__the_matrix_stays_as_it_is.snap");
        for row in rows.into_iter().step_by(4).map(row) {
            assert!(snapshot.lines().any(|line| line.trim_end() == row.trim_end()), "new: {row}");
        }
        return;
    }
    let mut table = String::from(
        "MB/s of virtual time and packets sent for each needed, at 12.5 GB/s; ! where work failed\n\
         mix     MTU depth delay us ",
    );
    for loss in LOSSES {
        let _ = write!(table, "  loss {:>4.1} %    ", f64::from(loss) / 10.0);
    }
    for row in rows.into_iter().map(row) {
        let _ = write!(table, "\n{row}");
    }
    insta::assert_snapshot!(table);
}
