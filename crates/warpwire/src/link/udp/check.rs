//! Whether a packet that came through a UDP socket has the right ICRC, although its IP header is out of sight.
//!
//! Everything in the header is known but IPv4's identification. It is guessed from what the sender did before (the
//! usual case: one CRC); where the guess is wrong, the ICRC itself tells it, because the CRC is linear.
//!
//! A solution takes sixteen of the ICRC's bits for the identification and leaves sixteen as a check. Our own
//! senders use small identifications, so that a small one is taken at once (25 bits are left as a check), and so is
//! one that follows closely on the last. A sender's first packet may have any, because it may be its only one: rxe
//! refuses a request once, and is silent from then on. A sender that began small must show large ones twice
//! before they count: its packets were damaged rather.

use std::net::{IpAddr, SocketAddr};

use warpwire_proto::wire::icrc::{IcrcPrefix, IpIdSolver};
use warpwire_proto::wire::packet::ICRC_LEN;

use super::loopback;
use crate::link::SimdCrc32;

/// Linux cuts at most this many packets out of one buffer.
const MAX_SMALL_ID: u16 = 128;
/// So many large identifications make a sender one that has them.
const MIN_LARGE_IDS: u8 = 2;
/// Senders that are remembered, by a hash of their address: two that meet in one place forget each other.
const SENDERS: usize = 256;
/// Lengths whose solution is prepared.
const LENGTHS: usize = 64;

/// What is remembered of a sender.
#[derive(Clone)]
struct SenderState {
    from: SocketAddr,
    to: IpAddr,
    icrc_prefix: IcrcPrefix,
    last: u16,
    /// What it adds from packet to packet.
    step: u16,
    /// How many large identifications it has shown.
    large_ids: u8,
    /// None of its packets was right so far.
    is_new: bool,
    /// Its last long packet went without an ICRC.
    without_icrc: bool,
}

pub(super) struct IcrcChecker {
    port: u16,
    /// All senders are of this machine.
    is_loopback: bool,
    senders: Vec<Option<SenderState>>,
    lengths: Vec<IpIdSolver>,
}

impl IcrcChecker {
    /// For packets that come to this address.
    pub(super) fn new(local: SocketAddr) -> Self {
        Self {
            port: local.port(),
            is_loopback: local.ip().is_loopback(),
            senders: vec![None; SENDERS],
            lengths: (0..LENGTHS).map(IpIdSolver::new).collect(),
        }
    }

    /// Whether it is a packet of this machine that goes without an ICRC: see `loopback.rs`.
    #[inline]
    pub(super) fn is_without_icrc(&mut self, from: SocketAddr, to: IpAddr, packet: &[u8]) -> bool {
        let len = packet.len();
        loopback::exceeds_roce(len)
            && self.is_loopback
            && self.has_header_checksum(from, to, len, packet, packet)
    }

    /// Whether a long packet of this machine, of which these are the beginning and the end, has the sum that stands in the place of an ICRC.
    pub(super) fn has_header_checksum(
        &mut self,
        from: SocketAddr,
        to: IpAddr,
        len: usize,
        head: &[u8],
        tail: &[u8],
    ) -> bool {
        let Some(sender) = sender(&mut self.senders, self.port, from, to) else { return false };
        let sum = loopback::header_checksum(&mut sender.icrc_prefix, len, head);
        sender.without_icrc = from.ip().is_loopback() && sum.is_some() && sum == carried(tail);
        sender.without_icrc
    }

    /// Whether a packet of that length, of which only the beginning is known, will most likely be one of those.
    #[inline]
    pub(super) fn likely_without_icrc(&self, from: SocketAddr, to: IpAddr, len: usize) -> bool {
        let known = self.senders.get(slot_of(from)).and_then(Option::as_ref);
        let of_sender =
            |known: &SenderState| known.without_icrc && known.from == from && known.to == to;
        loopback::exceeds_roce(len) && self.is_loopback && known.is_some_and(of_sender)
    }

    /// The identification that makes the packet's ICRC right; `None` if none does.
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

/// What is known of a sender, or the place for it.
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
            without_icrc: false,
        });
    }
    slot.as_mut()
}

/// Whether the base header has the version and the partition that every packet has: 20 bits that chance would have to
/// guess, on top of the ICRC's.
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
    fn a_counting_sender_costs_one_computation() {
        let mut checker = IcrcChecker::new(here());
        for id in 0..100 {
            assert_eq!(checker.check(from(), to(), &packet_with_icrc(id, 100)), Some(id));
        }
        let sender = checker.senders[slot_of(from())].as_ref().unwrap();
        assert_eq!((sender.last, sender.step), (99, 1));
    }

    #[test]
    fn the_first_packet_of_a_sender_may_have_any_identification() {
        // rxe tells of a refusal once. Were it dropped, the requester would wait in vain.
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
    fn a_stranger_does_not_pass_by_chance() {
        let mut checker = IcrcChecker::new(here());
        let mut packet = packet_with_icrc(0xabcd, 100);
        packet[2] = 0x12;
        let mut icrc_prefix = IcrcPrefix::new(from(), SocketAddr::new(to(), 4791));
        let icrc = icrc_prefix.icrc::<SimdCrc32>(0xabcd, &packet).unwrap();
        packet[96..].copy_from_slice(&icrc.to_le_bytes());
        assert_eq!(checker.check(from(), to(), &packet), None);
    }

    #[test]
    fn a_sender_that_began_small_must_prove_large_ones() {
        let mut checker = IcrcChecker::new(here());
        let ids = [0, 0xabcd, 5, 0xabce, 0xabcf, 0x1234];
        let found = ids.map(|id| checker.check(from(), to(), &packet_with_icrc(id, 100)));
        assert_eq!(found, [Some(0), None, Some(5), None, Some(0xabcf), Some(0x1234)]);
    }

    #[test]
    fn a_sender_that_counts_slowly_out_of_the_small_ones_is_followed() {
        let mut checker = IcrcChecker::new(here());
        for id in (3..1000).step_by(7) {
            assert_eq!(checker.check(from(), to(), &packet_with_icrc(id, 100)), Some(id));
        }
    }

    #[test]
    fn damage_is_found_whatever_the_sender_did_before() {
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
    fn packets_that_are_too_short_are_no_packets() {
        let mut checker = IcrcChecker::new(here());
        for len in 0..16 {
            assert_eq!(checker.check(from(), to(), &[0; 16][..len]), None);
        }
    }

    #[test]
    fn a_short_sum_counts_for_long_packets_of_this_machine_only() {
        let loopback: SocketAddr = "127.0.0.1:4791".parse().unwrap();
        let short = |from: SocketAddr, to: SocketAddr, len: usize| {
            let mut packet = vec![0x5a; len];
            let (head, tail) = packet.split_at_mut(12);
            loopback::write_header_checksum(&mut IcrcPrefix::new(from, to), len, head, tail)
                .unwrap();
            packet
        };
        let mut checker = IcrcChecker::new(loopback);
        let long = short(loopback, loopback, 5000);
        assert!(checker.is_without_icrc(loopback, loopback.ip(), &long));
        assert_eq!(checker.check(loopback, loopback.ip(), &long), None, "it is no ICRC");
        for at in (0..12).chain([4996, 4999]).filter(|at| *at != 4) {
            let mut damaged = long.clone();
            damaged[at] ^= 1;
            assert!(!checker.is_without_icrc(loopback, loopback.ip(), &damaged), "byte {at}");
        }
        assert!(!checker.is_without_icrc(loopback, loopback.ip(), &long[..4996]), "cut");
        assert!(
            !checker.is_without_icrc("127.0.0.2:4791".parse().unwrap(), loopback.ip(), &long),
            "whose"
        );
        assert!(
            !checker.is_without_icrc(loopback, loopback.ip(), &short(loopback, loopback, 1000)),
            "short ones"
        );
        assert!(
            !checker.is_without_icrc(from(), loopback.ip(), &short(from(), loopback, 5000)),
            "from outside"
        );
        let mut outside = IcrcChecker::new(here());
        assert!(!outside.is_without_icrc(from(), to(), &short(from(), here(), 5000)), "elsewhere");
    }
}
