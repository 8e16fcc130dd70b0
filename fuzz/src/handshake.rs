//! Fuzzes the handshake of a warp socket: arbitrary bytes from the peer, split arbitrarily.
//!
//! Invariants: nothing panics, memory stays small, and a failed handshake stays failed.

use warpwire::sock::warp::{Handshake, Hello, MAX_LINE, RemoteAddr};
use warpwire::verbs::QpEndpoint;

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let Some((&step, rest)) = bytes.split_first() else { return };
    let endpoint = QpEndpoint {
        address: "127.0.0.1:4791".parse().expect("an address"),
        qpn: 1,
        psn: 2,
        mtu: 1024,
        max_rd_atomic: 1,
        source_port: 4791,
        lid: 0,
        gid: 0,
        mtu_on_host: 0,
        selective_repeat: true,
    };
    let remote_addr = |address| RemoteAddr { address, rkey: 1 };
    let mine = Hello {
        endpoint,
        ring: remote_addr(4096),
        ring_size: 4096,
        received: remote_addr(8),
        taken: remote_addr(16),
        window: None,
    };
    let mut handshake = Handshake::new(&mine).expect("a valid hello");
    handshake.sent(usize::MAX);
    let mut failed = false;
    for piece in rest.chunks(usize::from(step).max(1)) {
        let taken = handshake.take(piece);
        assert!(!failed || taken.is_err());
        failed |= taken.is_err();
        if let Some(peer) = handshake.peer() {
            assert!(peer.check().is_ok());
            handshake.mark_ready();
        }
        assert!(handshake.to_send().len() <= 2 * MAX_LINE);
        handshake.sent(piece.len());
        assert!(!(failed && handshake.is_done()));
    }
}
