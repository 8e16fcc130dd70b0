//! Packets per second through a requester and a responder, on one core.
//!
//! ```text
//! cargo bench -p warpwire-proto --bench qp
//! ```
#![allow(missing_docs)]

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};

mod pump;

use pump::{Pump, WORK, len_of};

fn main() {
    divan::main();
}

const PACKETS: u64 = 4096;

/// Row of `WORK`, MTU, and send queue depth.
const CASES: [(usize, u32, u32); 9] = [
    (0, 256, 64),
    (0, 4096, 1),
    (0, 4096, 64),
    (1, 4096, 64),
    (2, 256, 16),
    (2, 4096, 16),
    (3, 256, 16),
    (3, 4096, 16),
    (4, 4096, 64),
];

#[divan::bench(args = CASES)]
fn packets(bencher: Bencher<'_, '_>, (row, mtu, depth): (usize, u32, u32)) {
    let (_, op, packets) = WORK[row];
    let mut pump = Pump::new(mtu, depth);
    let len = len_of(op, packets, mtu);
    bencher
        .counter(ItemsCount::new(PACKETS))
        .bench_local(|| black_box(pump.run(op, len, black_box(PACKETS))));
}
