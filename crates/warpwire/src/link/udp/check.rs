//! ICRC verification for packets from a UDP socket, without access to their IP header.
//!
//! Every header field that the ICRC covers is known except the IPv4 identification and the flag
//! "don't fragment". The checker predicts both from the sender's previous packets (the usual case:
//! one CRC). If the prediction is wrong, it solves for them, because the CRC is linear.
//!
//! A solution alone would leave 15 bits of the ICRC as a check, so it must also be plausible. It is
//! 1. a small identification: Warpwire's senders, as all Linux sockets that forbid fragmentation,
//!    use 0, and count from 0 in a segmented run. The flag is that of the packets before;
//! 2. or a small step ahead of the last one that was used by any sender of that address: a counter
//!    of a host (rxe). Linux lets that counter jump by up to one per tick while it is idle;
//! 3. or that of the last packet that was not plausible, or a small step ahead of it: the counter
//!    has jumped;
//! 4. or that of a packet that was dropped before and is sent again: the same bytes with another
//!    identification;
//! 5. or that of a sender's first packet, or of an acknowledgement without data, if the counter of
//!    its host is not known yet. rxe rejects a request once and is silent from then on, and may
//!    stall if its first request is lost, so that these must not be dropped. An acknowledgement
//!    has few bits: all damage of up to two is detected.
//!
//! Other packets are dropped. So a sender loses one packet when its counter jumps, and one whose
//! identifications are random sends each packet twice. The probability that a damaged packet passes
//! is 2^-26 (rule 1; 2^-25 for the first packet), 2^-26 or after idle time up to 2^-22 (rule 2),
//! 2^-25 directly after a packet that was dropped (rule 3), 2^-39 (rule 4), 2^-15 (rule 5, beyond
//! two bits).

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use warpwire_proto::wire::icrc::{Crc32, IcrcPrefix, IpIdSolver};
use warpwire_proto::wire::packet::{BTH_LEN, ICRC_LEN};

use super::send::PACKETS;
use crate::link::SimdCrc32;

/// Exclusive limit of small identifications: that of a run's packets.
const MAX_SMALL_ID: u16 = PACKETS as u16;
/// How far a counter may advance between two packets of a host in a row, and how far packets may
/// overtake one another.
const MAX_STEP: u16 = 64;
const MAX_REORDERING: u16 = 16;
/// How far it may advance while idle, in addition: one per tick, of at least a millisecond.
const MAX_IDLE_STEP: u128 = 1024;
/// Number of cached senders and hosts, indexed by a hash of the address; a collision evicts.
const SENDERS: usize = 256;
const HOSTS: usize = 64;
/// Number of dropped packets that are remembered: more than a peer has in flight.
const DROPPED: usize = 256;
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
    /// Its identifications come from the counter of its host.
    counts: bool,
    /// A valid packet has been received.
    is_known: bool,
}

/// The counter of a host, which all its senders share.
#[derive(Clone)]
struct HostCounter {
    from: IpAddr,
    last: u16,
    at: Instant,
    /// The last identification that was not plausible.
    jumped_to: Option<u16>,
    /// A valid packet has been received from any of its senders.
    is_known: bool,
}

impl HostCounter {
    /// Whether the counter may be at `found` now. Before the first packet nothing is known.
    fn may_be_at(&self, found: u16, now: Instant) -> bool {
        let idle = now.saturating_duration_since(self.at).as_millis().min(MAX_IDLE_STEP);
        let ahead = found.wrapping_sub(self.last);
        self.is_known && (ahead <= MAX_STEP + idle as u16 || ahead.wrapping_neg() <= MAX_REORDERING)
    }

    fn has_jumped_to(&self, found: u16) -> bool {
        self.jumped_to.is_some_and(|to| found.wrapping_sub(to) <= MAX_STEP)
    }
}

pub(super) struct IcrcChecker {
    port: u16,
    senders: Vec<Option<SenderState>>,
    hosts: Vec<Option<HostCounter>>,
    lengths: Vec<IpIdSolver>,
    dropped: DroppedPackets,
}

impl IcrcChecker {
    /// A checker for packets sent to this address.
    pub(super) fn new(local: SocketAddr) -> Self {
        Self {
            port: local.port(),
            senders: vec![None; SENDERS],
            hosts: vec![None; HOSTS],
            lengths: (0..LENGTHS).map(IpIdSolver::new).collect(),
            dropped: DroppedPackets { digests: [0; DROPPED], next: 0 },
        }
    }

    /// The identification for which the packet's ICRC is valid; `None` if there is none, or if it
    /// is not plausible.
    #[inline]
    pub(super) fn check(&mut self, from: SocketAddr, to: IpAddr, packet: &[u8]) -> Option<u16> {
        let carried = carried(packet)?;
        let sender = sender(&mut self.senders, self.port, from, to)?;
        let guess = match sender.counts {
            false => sender.last.wrapping_add(sender.step),
            true => host(&mut self.hosts, from.ip())?.last.wrapping_add(1),
        };
        let computed = sender.icrc_prefix.icrc::<SimdCrc32>(guess, packet)?;
        if computed != carried {
            return self.solve(from, to, packet, guess, carried ^ computed, Instant::now());
        }
        sender.last = guess;
        sender.is_known = true;
        if sender.counts {
            let host = host(&mut self.hosts, from.ip())?;
            (host.last, host.at, host.jumped_to) = (guess, Instant::now(), None);
        }
        Some(guess)
    }

    /// As `check`, for a packet whose identification is not `guess`: the ICRC computed with it
    /// differs by `difference`.
    #[inline(never)]
    fn solve(
        &mut self,
        from: SocketAddr,
        to: IpAddr,
        packet: &[u8],
        guess: u16,
        difference: u32,
        now: Instant,
    ) -> Option<u16> {
        if from.is_ipv6() {
            return None;
        }
        let solver = self.lengths.get_mut(packet.len() % LENGTHS)?;
        if solver.len() != packet.len() {
            *solver = IpIdSolver::new(packet.len());
        }
        let (found, flag_differs) = solver.solve(guess, difference)?;
        let sender = sender(&mut self.senders, self.port, from, to)?;
        let host = host(&mut self.hosts, from.ip())?;
        let is_small = found < MAX_SMALL_ID;
        // A sender does not change its mind about fragmentation from packet to packet.
        let same_flags = !flag_differs || !sender.is_known;
        let digest = digest(from, packet);
        let plausible = same_flags && (is_small || host.may_be_at(found, now))
            || host.has_jumped_to(found)
            || self.dropped.contains(digest)
            || !host.is_known && (!sender.is_known || is_bare_acknowledgement(packet));
        if !plausible {
            host.jumped_to = Some(found);
            self.dropped.add(digest);
            return None;
        }
        if flag_differs {
            sender.icrc_prefix.toggle_dont_fragment();
        }
        sender.counts = !is_small || sender.counts && host.may_be_at(found, now);
        match found.wrapping_sub(sender.last) {
            step @ 0..=1 if !sender.counts => sender.step = step,
            _ => {}
        }
        (sender.last, sender.is_known) = (found, true);
        if sender.counts {
            let is_late = host.is_known && host.last.wrapping_sub(found) <= MAX_REORDERING;
            host.last = if is_late { host.last } else { found };
            (host.at, host.jumped_to, host.is_known) = (now, None, true);
        }
        Some(found)
    }
}

/// Digests of the last packets that were dropped because their identification was not plausible.
struct DroppedPackets {
    digests: [u32; DROPPED],
    next: usize,
}

impl DroppedPackets {
    fn contains(&self, digest: u32) -> bool {
        self.digests.contains(&digest)
    }

    fn add(&mut self, digest: u32) {
        self.digests[self.next] = digest;
        self.next = (self.next + 1) % DROPPED;
    }
}

/// A digest of the sender and of everything that a repeated packet has in common with the first:
/// all but the congestion bits, the request for an acknowledgement, and the ICRC.
fn digest(from: SocketAddr, packet: &[u8]) -> u32 {
    let Some((bth, rest)) = packet.split_first_chunk::<BTH_LEN>() else { return 0 };
    let rest = rest.get(..rest.len().saturating_sub(ICRC_LEN)).unwrap_or_default();
    let mut bth = *bth;
    (bth[4], bth[8]) = (0, bth[8] & 0x7f);
    let state = SimdCrc32::update(hash(from.ip()) as u32 ^ u32::from(from.port()) << 16, &bth);
    SimdCrc32::update(state, rest)
}

/// Whether this is an ACK or a NAK without data, in the default partition, and with nothing set
/// that such a packet does not have.
fn is_bare_acknowledgement(packet: &[u8]) -> bool {
    const LEN: usize = BTH_LEN + 4 + ICRC_LEN;
    packet.len() == LEN && matches!(packet, [0x11, 0 | 0x40, 0x7f | 0xff, 0xff, _, _, _, _, 0, ..])
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
    let index = hash(from.ip()).wrapping_mul(31).wrapping_add(usize::from(from.port())) % SENDERS;
    let slot = senders.get_mut(index)?;
    if !slot.as_ref().is_some_and(|known| known.from == from && known.to == to) {
        let icrc_prefix = IcrcPrefix::new(from, SocketAddr::new(to, port));
        let (last, step, counts, is_known) = (0, 0, false, false);
        *slot = Some(SenderState { from, to, icrc_prefix, last, step, counts, is_known });
    }
    slot.as_mut()
}

/// The counter of a host; evicts another one from the slot if needed.
#[inline]
fn host(hosts: &mut [Option<HostCounter>], from: IpAddr) -> Option<&mut HostCounter> {
    let slot = hosts.get_mut(hash(from) % HOSTS)?;
    if slot.as_ref().is_none_or(|known| known.from != from) {
        let at = Instant::now();
        *slot = Some(HostCounter { from, last: 0, at, jumped_to: None, is_known: false });
    }
    slot.as_mut()
}

#[inline]
fn hash(address: IpAddr) -> usize {
    let fold = |octets: &[u8]| {
        octets
            .iter()
            .fold(0_usize, |sum, byte| sum.wrapping_mul(31).wrapping_add(usize::from(*byte)))
    };
    match address {
        IpAddr::V4(address) => fold(&address.octets()),
        IpAddr::V6(address) => fold(&address.octets()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A packet with the ICRC for this identification, and with or without "don't fragment".
    fn built(from: SocketAddr, id: u16, dont_fragment: bool, bytes: &[u8]) -> Vec<u8> {
        let mut packet = bytes.to_vec();
        let mut icrc_prefix = IcrcPrefix::new(from, here());
        if !dont_fragment {
            icrc_prefix.toggle_dont_fragment();
        }
        let icrc = icrc_prefix.icrc::<SimdCrc32>(id, &packet).unwrap();
        *packet.last_chunk_mut::<4>().unwrap() = icrc.to_le_bytes();
        packet
    }

    /// The bytes of a request with this number.
    fn request(number: u32, len: usize) -> Vec<u8> {
        let mut packet = vec![0x5a; len];
        packet[..4].copy_from_slice(&[4, 0x40, 0xff, 0xff]);
        packet[8..12].copy_from_slice(&number.to_be_bytes());
        packet
    }

    fn packet_with_icrc(id: u16, len: usize) -> Vec<u8> {
        built(from(), id, true, &request(u32::from(id), len))
    }

    fn acknowledgement(from: SocketAddr, id: u16, syndrome: u8) -> Vec<u8> {
        let head = [0x11, 0, 0xff, 0xff, 0, 0, 0, 0x12, 0, 0, 1, 0x23, syndrome, 0, 0, 1];
        built(from, id, true, &[&head[..], &[0; 4]].concat())
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

    fn checked(ids: &[u16]) -> Vec<Option<u16>> {
        let mut checker = IcrcChecker::new(here());
        ids.iter().map(|id| checker.check(from(), to(), &packet_with_icrc(*id, 100))).collect()
    }

    #[test]
    fn small_identifications_are_found_in_any_order() {
        let mut checker = IcrcChecker::new(here());
        for id in [0, 0, 1, 2, 3, 0, 1, 2, 0, 0, 17, 63, 0] {
            for len in [16, 60, 1064, 4140] {
                assert_eq!(checker.check(from(), to(), &packet_with_icrc(id, len)), Some(id));
            }
        }
    }

    #[test]
    fn a_counting_sender_costs_one_crc_per_packet() {
        let mut checker = IcrcChecker::new(here());
        for id in 0..60 {
            assert_eq!(checker.check(from(), to(), &packet_with_icrc(id, 100)), Some(id));
        }
        let known = sender(&mut checker.senders, 4791, from(), to()).unwrap();
        assert_eq!((known.last, known.step), (59, 1));
    }

    #[test]
    fn a_counter_that_jumps_costs_one_packet() {
        let all = checked(&[5, 0x9000, 0x9001, 0x9003, 0x9003 + MAX_STEP, 0x1234, 0x1236, 0x1237]);
        let some = |id| Some(id);
        let wanted = [
            some(5),
            None,
            some(0x9001),
            some(0x9003),
            some(0x9003 + MAX_STEP),
            None,
            some(0x1236),
            some(0x1237),
        ];
        assert_eq!(all, wanted);
        // Packets that overtake one another do not move the counter back.
        let overtaken = checked(&[0x9000, 0x9001, 0x9005, 0x9003, 0x9004, 0x9006, 0x9006 - 40]);
        assert_eq!(
            overtaken.iter().map(Option::is_some).collect::<Vec<_>>(),
            [true, true, true, true, true, true, false]
        );
    }

    #[test]
    fn a_counter_that_leaves_the_small_ids_in_small_steps_is_followed() {
        let ids: Vec<u16> = (3..1000).step_by(7).collect();
        // It is not known as a counter before it exceeds the small ones: one packet is lost.
        assert_eq!(checked(&ids).iter().filter(|found| found.is_none()).count(), 1);
    }

    #[test]
    fn a_counter_may_advance_while_it_is_idle() {
        let mut checker = IcrcChecker::new(here());
        for id in [700, 701] {
            let _ = checker.check(from(), to(), &packet_with_icrc(id, 100));
        }
        let counter = host(&mut checker.hosts, from().ip()).unwrap();
        let now = counter.at;
        assert!(!counter.may_be_at(701 + MAX_STEP + 400, now));
        assert!(counter.may_be_at(701 + MAX_STEP + 400, now + Duration::from_millis(400)));
        assert!(!counter.may_be_at(701 + MAX_STEP + 400, now + Duration::from_millis(399)));
        let long = now + Duration::from_secs(1000);
        assert!(counter.may_be_at(701 + MAX_STEP + 1024, long));
        assert!(!counter.may_be_at(701 + MAX_STEP + 1025, long));
    }

    #[test]
    fn the_senders_of_a_host_share_its_counter() {
        let mut checker = IcrcChecker::new(here());
        let ports = [50_000, 50_001, 50_002].map(|port| SocketAddr::new(from().ip(), port));
        let mut lost = 0;
        for id in 0x7000..0x7100 {
            let port = ports[usize::from(id) % 3];
            let packet = built(port, id, true, &request(u32::from(id), 100));
            lost += u32::from(checker.check(port, to(), &packet) != Some(id));
        }
        assert_eq!(lost, 0);
    }

    #[test]
    fn random_identifications_need_every_packet_twice() {
        let mut checker = IcrcChecker::new(here());
        assert_eq!(checker.check(from(), to(), &packet_with_icrc(0, 100)), Some(0));
        for (number, ids) in
            [[0x9000, 0xa123], [0xb456, 0x8200], [0xffff, 0x4444]].iter().enumerate()
        {
            let sent = ids.map(|id| built(from(), id, true, &request(number as u32, 100)));
            assert_eq!(checker.check(from(), to(), &sent[0]), None);
            // The repeated packet may request an acknowledgement.
            let mut again = request(number as u32, 100);
            again[8] |= 0x80;
            let again = built(from(), ids[1], true, &again);
            assert_eq!(checker.check(from(), to(), &again), Some(ids[1]), "{number}");
        }
    }

    #[test]
    fn the_first_packet_of_a_host_may_have_any_identification() {
        assert_eq!(checked(&[0xabcd, 0xabce, 0x1234]), [Some(0xabcd), Some(0xabce), None]);
        // rxe reports a rejection once. If it were dropped, the requester would wait in vain.
        let mut checker = IcrcChecker::new(here());
        let nak = acknowledgement(from(), 0xabcd, 0x62);
        assert_eq!(checker.check(from(), to(), &nak), Some(0xabcd));
        // Then its counter is known, for all of its ports.
        let port = SocketAddr::new(from().ip(), 50_001);
        assert_eq!(checker.check(port, to(), &acknowledgement(port, 0xabd0, 0x62)), Some(0xabd0));
        assert_eq!(checker.check(port, to(), &acknowledgement(port, 0x1234, 0x62)), None);
        // A request of a sender that is known, or another partition, is not believed.
        let known = || {
            let mut checker = IcrcChecker::new(here());
            assert_eq!(checker.check(from(), to(), &packet_with_icrc(0, 20)), Some(0));
            checker
        };
        assert_eq!(known().check(from(), to(), &packet_with_icrc(0xabcd, 20)), None);
        assert_eq!(
            known().check(from(), to(), &acknowledgement(from(), 0xabcd, 0x62)),
            Some(0xabcd)
        );
        for (at, byte) in [(0, 0x12), (1, 0x20), (2, 0x12), (8, 0x80)] {
            let mut checker = known();
            let mut other = acknowledgement(from(), 0xabcd, 0x62);
            other[at] = byte;
            let other = built(from(), 0xabcd, true, &other);
            assert_eq!(checker.check(from(), to(), &other), None, "byte {at}");
        }
    }

    #[test]
    fn two_wrong_bits_of_an_acknowledgement_are_detected_without_its_identification() {
        let packet = acknowledgement(from(), 0, 0x62);
        let mut icrc_prefix = IcrcPrefix::new(from(), here());
        // The difference that each bit makes; those of byte 4 are not covered.
        let effects: Vec<u32> = (0..packet.len() * 8)
            .filter(|bit| bit / 8 != 4)
            .map(|bit| {
                let mut flipped = packet.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                carried(&flipped).unwrap() ^ icrc_prefix.icrc::<SimdCrc32>(0, &flipped).unwrap()
            })
            .collect();
        let solver = IpIdSolver::new(packet.len());
        for (a, one) in effects.iter().enumerate() {
            assert_eq!(solver.solve(0, *one), None);
            for two in &effects[a + 1..] {
                assert_eq!(solver.solve(0, one ^ two), None);
            }
        }
    }

    #[test]
    fn packets_without_dont_fragment_are_accepted() {
        let mut checker = IcrcChecker::new(here());
        for id in [0, 0, 1, 2, 0] {
            let packet = built(from(), id, false, &request(u32::from(id), 100));
            assert_eq!(checker.check(from(), to(), &packet), Some(id));
        }
        // A sender that changes its mind loses one packet.
        for (number, wanted) in [None, Some(0), Some(0)].into_iter().enumerate() {
            let packet = built(from(), 0, true, &request(number as u32, 100));
            assert_eq!(checker.check(from(), to(), &packet), wanted, "{number}");
        }
        let found: Vec<_> = (0x9000..0x9004)
            .map(|id| built(from(), id, false, &request(u32::from(id), 100)))
            .map(|packet| checker.check(from(), to(), &packet).is_some())
            .collect();
        assert_eq!(found, [false, true, true, true]);
    }

    #[test]
    fn a_packet_as_captured_without_dont_fragment_is_accepted() {
        let (from, to) = ("10.77.0.1:57345".parse().unwrap(), "10.77.0.2".parse().unwrap());
        let packet = [
            0x04, 0x00, 0xff, 0xff, 0x00, 0x01, 0x00, 0x10, 0x80, 0x70, 0x00, 0x00, 0x78, 0x78,
            0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0x78,
            0xf6, 0x11, 0x8b, 0xbd,
        ];
        let mut checker = IcrcChecker::new(SocketAddr::new(to, 4791));
        assert_eq!(checker.check(from, to, &packet), Some(0));
    }

    /// Payload that was damaged so that the ICRC fits another identification.
    #[test]
    fn damage_that_fits_another_identification_is_rejected() {
        let mut checker = IcrcChecker::new(here());
        let ids = [0xabcb, 0xabcc, 0xabcd];
        let _ = ids.map(|id| checker.check(from(), to(), &packet_with_icrc(id, 100)));
        let mut packet = packet_with_icrc(0xabce, 100);
        let mut icrc_prefix = IcrcPrefix::new(from(), here());
        // The payload changes at will; its last four bytes restore the ICRC of another one.
        packet[40] ^= 1;
        let wrong = icrc_prefix.icrc::<SimdCrc32>(0x1111, &packet).unwrap();
        packet[96..].copy_from_slice(&wrong.to_le_bytes());
        assert_eq!(checker.check(from(), to(), &packet), None);
        assert_eq!(checker.check(from(), to(), &packet_with_icrc(0xabce, 100)), Some(0xabce));
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
    fn random_damage_does_not_pass() {
        let mut checker = IcrcChecker::new(here());
        for id in [0x7000, 0x7001] {
            let _ = checker.check(from(), to(), &packet_with_icrc(id, 64));
        }
        let packet = packet_with_icrc(0x7002, 64);
        let mut random = 88_172_645_463_325_252_u64;
        for round in 0..200_000 {
            let mut damaged = packet.clone();
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let at = 12 + (random >> 40) as usize % 40;
            for (byte, change) in damaged[at..at + 8].iter_mut().zip(random.to_le_bytes()) {
                *byte ^= change;
            }
            assert_eq!(checker.check(from(), to(), &damaged), None, "round {round}");
        }
        assert_eq!(checker.check(from(), to(), &packet), Some(0x7002));
    }

    #[test]
    fn packets_that_are_too_short_are_rejected() {
        let mut checker = IcrcChecker::new(here());
        for len in 0..16 {
            assert_eq!(checker.check(from(), to(), &[0; 16][..len]), None);
        }
    }
}
