//! Any bytes as what a peer says before a warp socket is connected, in any pieces.
//!
//! What must hold whatever comes: nothing panics, memory stays small, and what failed stays failed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use warpwire::sock::warp::{Handshake, Hello, LONGEST_LINE, Spot};
use warpwire::verbs::Offer;

fuzz_target!(|bytes: &[u8]| {
    let Some((&step, rest)) = bytes.split_first() else { return };
    let offer = Offer {
        address: "127.0.0.1:4791".parse().expect("an address"),
        qpn: 1,
        psn: 2,
        mtu: 1024,
        max_rd_atomic: 1,
        lid: 0,
        gid: 0,
    };
    let spot = |address| Spot { address, rkey: 1 };
    let mine = Hello {
        offer,
        ring: spot(4096),
        ring_size: 4096,
        received: spot(8),
        taken: spot(16),
        window: None,
    };
    let mut end = Handshake::new(&mine).expect("a hello in order");
    end.sent(usize::MAX);
    let mut failed = false;
    for piece in rest.chunks(usize::from(step).max(1)) {
        let taken = end.take(piece);
        assert!(!failed || taken.is_err());
        failed |= taken.is_err();
        if let Some(peer) = end.peer() {
            assert!(peer.check().is_ok());
            end.met();
        }
        assert!(end.to_send().len() <= 2 * LONGEST_LINE);
        end.sent(piece.len());
        assert!(!(failed && end.is_done()));
    }
});
