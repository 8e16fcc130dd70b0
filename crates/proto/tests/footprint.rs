//! Memory footprint of a queue pair.

use warpwire_proto::qp::{Mtu, RcQp, TransportOptions, Ud};

#[test]
fn footprint_matches_the_documentation() {
    // The figures of docs/protocol.md: a queue pair's fixed part, and the bytes per send queue
    // entry.
    let one = RcQp::new(1, TransportOptions::default().with_send_depth(1));
    let many = RcQp::new(1, TransportOptions::default().with_send_depth(1024));
    let each = (many.footprint() - one.footprint()) / 1023;
    assert!(one.footprint() <= 1024, "{}", one.footprint());
    assert_eq!(each, 80);
    let datagrams = Ud::new(1, Mtu::new(4096).unwrap(), 1024);
    assert!(datagrams.footprint() <= 1024 * 64 + 512, "{}", datagrams.footprint());
}
