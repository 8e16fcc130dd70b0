//! Whether a packet that came through a UDP socket has the right ICRC, although its IP header is out of sight.
//!
//! Everything in the header is known but IPv4's identification. It is guessed from what the sender did before (the
//! usual case: one CRC); where the guess is wrong, the ICRC itself tells it, because the CRC is linear.
//!
//! A solution takes sixteen of the ICRC's bits for the identification and leaves sixteen as a check. Our own
//! senders use small identifications, so that a small one is taken at once (25 bits are left as a check); a large one
//! only from a sender that has shown large ones before, as ConnectX and rxe do: its first such packets are dropped,
//! and sent again by its queue pair.

use std::net::{IpAddr, SocketAddr};

use warpwire_proto::wire::icrc::{Cover, Identify};
use warpwire_proto::wire::packet::ICRC_LEN;

use crate::link::Simd;

/// Linux cuts at most this many packets out of one buffer.
const SMALL: u16 = 128;
/// So many large identifications make a sender one that has them.
const PROOF: u8 = 2;
/// Senders that are remembered, by a hash of their address: two that meet in one place forget each other.
const SENDERS: usize = 256;
/// Lengths whose solution is prepared.
const LENGTHS: usize = 64;

/// What is remembered of a sender.
#[derive(Clone)]
struct Sender {
    from: SocketAddr,
    to: IpAddr,
    cover: Cover,
    last: u16,
    /// What it adds from packet to packet.
    step: u16,
    large: u8,
}

pub(super) struct Checker {
    port: u16,
    senders: Vec<Option<Sender>>,
    lengths: Vec<Identify>,
}

impl Checker {
    /// For packets that come to this port.
    pub(super) fn new(port: u16) -> Self {
        Self {
            port,
            senders: vec![None; SENDERS],
            lengths: (0..LENGTHS).map(Identify::new).collect(),
        }
    }

    /// The identification that makes the packet's ICRC right; `None` if none does.
    pub(super) fn check(&mut self, from: SocketAddr, to: IpAddr, packet: &[u8]) -> Option<u16> {
        let carried = packet.last_chunk::<ICRC_LEN>().map(|bytes| u32::from_le_bytes(*bytes))?;
        let place = self.senders.get_mut(place_of(from))?;
        if !place.as_ref().is_some_and(|known| known.from == from && known.to == to) {
            let cover = Cover::new(from, SocketAddr::new(to, self.port));
            *place = Some(Sender { from, to, cover, last: 0, step: 0, large: 0 });
        }
        let sender = place.as_mut()?;
        let guess = sender.last.wrapping_add(sender.step);
        let computed = sender.cover.icrc::<Simd>(guess, packet)?;
        if computed == carried {
            sender.last = guess;
            return Some(guess);
        }
        if from.is_ipv6() {
            return None;
        }
        let identify = self.lengths.get_mut(packet.len() % LENGTHS)?;
        if identify.len() != packet.len() {
            *identify = Identify::new(packet.len());
        }
        let found = identify.solve(guess, carried ^ computed)?;
        if found >= SMALL && sender.large < PROOF {
            sender.large += 1;
            return None;
        }
        sender.step = match found.wrapping_sub(sender.last) {
            step @ 0..=1 => step,
            _ => sender.step,
        };
        sender.last = found;
        Some(found)
    }
}

fn place_of(from: SocketAddr) -> usize {
    let fold = |octets: &[u8]| {
        octets
            .iter()
            .fold(0_usize, |sum, byte| sum.wrapping_mul(31).wrapping_add(usize::from(*byte)))
    };
    let address = match from.ip() {
        IpAddr::V4(address) => fold(&address.octets()),
        IpAddr::V6(address) => fold(&address.octets()),
    };
    (address.wrapping_mul(31).wrapping_add(usize::from(from.port()))) % SENDERS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(id: u16, len: usize) -> Vec<u8> {
        let mut packet = vec![0x5a; len];
        let mut cover = Cover::new(from(), SocketAddr::new(to(), 4791));
        let icrc = cover.icrc::<Simd>(id, &packet).unwrap();
        packet[len - 4..].copy_from_slice(&icrc.to_le_bytes());
        packet
    }

    fn from() -> SocketAddr {
        "192.0.2.1:50000".parse().unwrap()
    }

    fn to() -> IpAddr {
        "192.0.2.2".parse().unwrap()
    }

    #[test]
    fn small_identifications_are_found_in_any_order() {
        let mut checker = Checker::new(4791);
        for id in [0, 0, 1, 2, 3, 0, 1, 2, 0, 0, 17, 127, 0] {
            for len in [16, 60, 1064, 4140] {
                assert_eq!(checker.check(from(), to(), &sealed(id, len)), Some(id));
            }
        }
    }

    #[test]
    fn a_counting_sender_costs_one_computation() {
        let mut checker = Checker::new(4791);
        for id in 0..100 {
            assert_eq!(checker.check(from(), to(), &sealed(id, 100)), Some(id));
        }
        let sender = checker.senders[place_of(from())].as_ref().unwrap();
        assert_eq!((sender.last, sender.step), (99, 1));
    }

    #[test]
    fn large_identifications_need_proof() {
        let mut checker = Checker::new(4791);
        let found = (0xabcd..0xabd0).map(|id| checker.check(from(), to(), &sealed(id, 100)));
        assert_eq!(found.collect::<Vec<_>>(), [None, None, Some(0xabcf)]);
        assert_eq!(checker.check(from(), to(), &sealed(9, 100)), Some(9));
    }

    #[test]
    fn damage_is_found_whatever_the_sender_did_before() {
        let mut checker = Checker::new(4791);
        for id in [0, 0xabcd, 0xabce, 0xabcf, 0xabd0] {
            let _ = checker.check(from(), to(), &sealed(id, 200));
        }
        let mut packet = sealed(7, 200);
        for bit in 5 * 8..200 * 8 {
            packet[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(checker.check(from(), to(), &packet), None, "bit {bit}");
            packet[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(checker.check(from(), to(), &packet), Some(7));
    }

    #[test]
    fn packets_that_are_too_short_are_no_packets() {
        let mut checker = Checker::new(4791);
        for len in 0..16 {
            assert_eq!(checker.check(from(), to(), &[0; 16][..len]), None);
        }
    }
}
