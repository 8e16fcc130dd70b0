//! ICRC verification for packets from a UDP socket, without access to their IP header.
//!
//! Every header field that the ICRC covers is known except the IPv4 identification. The checker
//! predicts it from the sender's previous packets (the usual case: one CRC); if the prediction is
//! wrong, it solves for the identification, because the CRC is linear.
//!
//! Solving uses 16 bits of the ICRC for the identification and leaves 16 as a check. Warpwire's
//! senders use small identifications, so a small one is accepted immediately (25 bits are left as a
//! check), and so is one that closely follows the last. The first packet of a sender may have any
//! value, because it may be the only one: rxe rejects a request once and is silent from then on. If
//! a sender has only used small values, its first two large ones are dropped: they are more likely
//! corruption.

use std::net::{IpAddr, SocketAddr};

use warpwire_proto::wire::icrc::{IcrcPrefix, IpIdSolver};
use warpwire_proto::wire::packet::ICRC_LEN;

use crate::link::SimdCrc32;

/// Exclusive limit of small identifications: Linux segments a buffer into at most this many
/// packets.
const MAX_SMALL_ID: u16 = 128;
/// Number of large identifications after which a sender is known to use them.
const MIN_LARGE_IDS: u8 = 2;
/// Number of cached senders, indexed by a hash of the address; a collision evicts.
const SENDERS: usize = 256;
/// Number of packet lengths with a cached solver.
const LENGTHS: usize = 64;

/// What is known about a sender.
#[derive(Clone)]
struct SenderState {
    from: SocketAddr,
    to: IpAddr,
    icrc_prefix: IcrcPrefix,
    /// The last identification.
    last: u16,
    /// The increment from packet to packet, 0 or 1.
    step: u16,
    /// Number of large identifications seen.
    large_ids: u8,
    /// No valid packet has been received yet.
    is_new: bool,
}

pub(super) struct IcrcChecker {
    port: u16,
    senders: Vec<Option<SenderState>>,
    lengths: Vec<IpIdSolver>,
}

impl IcrcChecker {
    /// A checker for packets sent to this address.
    pub(super) fn new(local: SocketAddr) -> Self {
        Self {
            port: local.port(),
            senders: vec![None; SENDERS],
            lengths: (0..LENGTHS).map(IpIdSolver::new).collect(),
        }
    }

    /// The identification for which the packet's ICRC is valid; `None` if there is none.
    pub(super) fn check(&mut self, from: SocketAddr, to: IpAddr, packet: &[u8]) -> Option<u16> {
        let carried = carried(packet)?;
        let sender = sender(&mut self.senders, self.port, from, to)?;
        let guess = sender.last.wrapping_add(sender.step);
        let computed = sender.icrc_prefix.icrc::<SimdCrc32>(guess, packet)?;
        if computed == carried {
            sender.last = guess;
            sender.is_new = false;
            return Some(guess);
        }
        if from.is_ipv6() {
            return None;
        }
        let ip_id_solver = self.lengths.get_mut(packet.len() % LENGTHS)?;
        if ip_id_solver.len() != packet.len() {
            *ip_id_solver = IpIdSolver::new(packet.len());
        }
        let found = ip_id_solver.solve(guess, carried ^ computed)?;
        let advance = found.wrapping_sub(sender.last);
        if found >= MAX_SMALL_ID && sender.is_new && has_valid_bth(packet) {
            sender.large_ids = MIN_LARGE_IDS;
        }
        if found >= MAX_SMALL_ID && advance >= MAX_SMALL_ID && sender.large_ids < MIN_LARGE_IDS {
            sender.large_ids += 1;
            return None;
        }
        sender.is_new = false;
        sender.step = match advance {
            step @ 0..=1 => step,
            _ => sender.step,
        };
        sender.last = found;
        Some(found)
    }
}

#[inline]
fn carried(packet: &[u8]) -> Option<u32> {
    packet.last_chunk::<ICRC_LEN>().map(|bytes| u32::from_le_bytes(*bytes))
}

/// The state of a sender; evicts another one from the slot if needed.
#[inline]
fn sender(
    senders: &mut [Option<SenderState>],
    port: u16,
    from: SocketAddr,
    to: IpAddr,
) -> Option<&mut SenderState> {
    let slot = senders.get_mut(slot_of(from))?;
    if !slot.as_ref().is_some_and(|known| known.from == from && known.to == to) {
        let icrc_prefix = IcrcPrefix::new(from, SocketAddr::new(to, port));
        *slot = Some(SenderState {
            from,
            to,
            icrc_prefix,
            last: 0,
            step: 0,
            large_ids: 0,
            is_new: true,
        });
    }
    slot.as_mut()
}

/// Whether the BTH has the version and the partition key that every packet has: 20 more bits of
/// check in addition to the ICRC's.
fn has_valid_bth(packet: &[u8]) -> bool {
    matches!(packet, [_, second, 0x7f | 0xff, 0xff, ..] if second & 0x0f == 0)
}

fn slot_of(from: SocketAddr) -> usize {
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

    fn packet_with_icrc(id: u16, len: usize) -> Vec<u8> {
        let mut packet = vec![0x5a; len];
        packet[1..4].copy_from_slice(&[0x40, 0xff, 0xff]);
        let mut icrc_prefix = IcrcPrefix::new(from(), SocketAddr::new(to(), 4791));
        let icrc = icrc_prefix.icrc::<SimdCrc32>(id, &packet).unwrap();
        packet[len - 4..].copy_from_slice(&icrc.to_le_bytes());
        packet
    }

    fn from() -> SocketAddr {
        "192.0.2.1:50000".parse().unwrap()
    }

    fn here() -> SocketAddr {
        SocketAddr::new(to(), 4791)
    }

    fn to() -> IpAddr {
        "192.0.2.2".parse().unwrap()
    }

    #[test]
    fn small_identifications_are_found_in_any_order() {
        let mut checker = IcrcChecker::new(here());
        for id in [0, 0, 1, 2, 3, 0, 1, 2, 0, 0, 17, 127, 0] {
            for len in [16, 60, 1064, 4140] {
                assert_eq!(checker.check(from(), to(), &packet_with_icrc(id, len)), Some(id));
            }
        }
    }

    #[test]
    fn a_counting_sender_costs_one_crc_per_packet() {
        let mut checker = IcrcChecker::new(here());
        for id in 0..100 {
            assert_eq!(checker.check(from(), to(), &packet_with_icrc(id, 100)), Some(id));
        }
        let sender = checker.senders[slot_of(from())].as_ref().unwrap();
        assert_eq!((sender.last, sender.step), (99, 1));
    }

    #[test]
    fn the_first_packet_of_a_sender_may_have_any_identification() {
        // rxe reports a rejection once. If it were dropped, the requester would wait in vain.
        let mut checker = IcrcChecker::new(here());
        for id in [0xabcd, 0xabcf, 0x1234, 9, 0x8000] {
            assert_eq!(
                checker.check(from(), to(), &packet_with_icrc(id, 100)),
                Some(id),
                "{id:#x}"
            );
        }
    }

    #[test]
    fn a_first_packet_with_an_invalid_bth_is_rejected() {
        let mut checker = IcrcChecker::new(here());
        let mut packet = packet_with_icrc(0xabcd, 100);
        packet[2] = 0x12;
        let mut icrc_prefix = IcrcPrefix::new(from(), SocketAddr::new(to(), 4791));
        let icrc = icrc_prefix.icrc::<SimdCrc32>(0xabcd, &packet).unwrap();
        packet[96..].copy_from_slice(&icrc.to_le_bytes());
        assert_eq!(checker.check(from(), to(), &packet), None);
    }

    #[test]
    fn two_large_ids_are_dropped_after_small_ones() {
        let mut checker = IcrcChecker::new(here());
        let ids = [0, 0xabcd, 5, 0xabce, 0xabcf, 0x1234];
        let found = ids.map(|id| checker.check(from(), to(), &packet_with_icrc(id, 100)));
        assert_eq!(found, [Some(0), None, Some(5), None, Some(0xabcf), Some(0x1234)]);
    }

    #[test]
    fn a_counter_that_leaves_the_small_ids_in_small_steps_is_followed() {
        let mut checker = IcrcChecker::new(here());
        for id in (3..1000).step_by(7) {
            assert_eq!(checker.check(from(), to(), &packet_with_icrc(id, 100)), Some(id));
        }
    }

    #[test]
    fn corruption_is_detected_whatever_the_sender_did_before() {
        let mut checker = IcrcChecker::new(here());
        for id in [0, 0xabcd, 0xabce, 0xabcf, 0xabd0] {
            let _ = checker.check(from(), to(), &packet_with_icrc(id, 200));
        }
        let mut packet = packet_with_icrc(7, 200);
        for bit in 5 * 8..200 * 8 {
            packet[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(checker.check(from(), to(), &packet), None, "bit {bit}");
            packet[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(checker.check(from(), to(), &packet), Some(7));
    }

    #[test]
    fn packets_that_are_too_short_are_rejected() {
        let mut checker = IcrcChecker::new(here());
        for len in 0..16 {
            assert_eq!(checker.check(from(), to(), &[0; 16][..len]), None);
        }
    }
}
