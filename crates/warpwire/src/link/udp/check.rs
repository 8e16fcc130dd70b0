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
//! 3. or a small step from that of the last packet that was not plausible, with the same flag: the
//!    counter was not known, or has jumped;
//! 4. or that of a packet that was not plausible before and is sent again: the same bytes with
//!    another identification.
//!
//! Other packets are held, one per host (`held.rs`), until one of three things happens:
//! - A packet of the host is plausible by rule 3. It confirms the held one, and both are delivered
//!   in order. So a host whose counter is not known, or has jumped, loses nothing.
//! - The held packet is sent again (rule 4): the copy is delivered.
//! - [`HOLD_TIME`](super::held::HOLD_TIME) passes. The packet is dropped and counted as
//!   `unverified`. Requests and ACKs are then repeated by their sender, or asked for again, which
//!   is rule 3 or 4. A datagram is lost, as datagrams may be: it was the first of its host, no
//!   packet of the host followed, and 1 in 2^15 of damaged packets cannot be told from it. The next
//!   datagram is compared with it (rule 3) and not lost.
//!
//! One kind of packet is delivered when its time is up: a NAK that ends a connection. rxe sends it
//! once and is silent from then on. The silence is the second opinion: its requester has asked
//! again meanwhile, and a peer whose answer was another one, damaged into such a NAK, would have
//! given it again, which settles its counter and leaves the held packet unconfirmed. What is left
//! is damage of more than two bits in the 16 bytes of a NAK, of which the queue pair checks 11,
//! followed by the silence of the whole host: the connection has failed either way.
//!
//! The probability that a damaged packet passes is 2^-26 (rule 1; 2^-25 for the first packet),
//! 2^-26 or after idle time up to 2^-22 (rule 2), the same after a packet that was not plausible
//! (rule 3, and for the held packet that it confirms), 2^-39 (rule 4).

#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use warpwire_proto::wire::icrc::{Crc32, IcrcPrefix, IpIdSolver};
use warpwire_proto::wire::packet::{BTH_LEN, ICRC_LEN};

use super::held::{Arrival, HeldPackets, Solution};
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
    /// Its packets have the flag "don't fragment".
    dont_fragment: bool,
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
    /// The last packet that was not plausible, and when it came.
    jump: Option<(Solution, Instant)>,
    /// A valid packet has been received from any of its senders.
    is_known: bool,
}

/// Whether a counter that was at `last` some time ago may be at `found` now.
fn may_be_at(last: u16, since: Instant, found: u16, now: Instant) -> bool {
    let idle = now.saturating_duration_since(since).as_millis().min(MAX_IDLE_STEP);
    let ahead = found.wrapping_sub(last);
    ahead <= MAX_STEP + idle as u16 || ahead.wrapping_neg() <= MAX_REORDERING
}

impl HostCounter {
    /// Whether the counter may be at `found` now. Before the first packet nothing is known.
    fn may_be_at(&self, found: u16, now: Instant) -> bool {
        self.is_known && may_be_at(self.last, self.at, found, now)
    }

    fn has_jumped_to(&self, found: u16, dont_fragment: bool, now: Instant) -> bool {
        self.jump.is_some_and(|(to, at)| {
            to.dont_fragment == dont_fragment && may_be_at(to.identification, at, found, now)
        })
    }
}

/// What the checker says about a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Its ICRC is valid, with this identification.
    Valid(u16),
    /// So is that of the packet held for its host, which came before it.
    Confirms(u16),
    /// Valid only if the counter of its host is where nothing confirms it yet: to be held.
    Unsettled(Solution),
    /// Damaged.
    Invalid,
}

pub(super) struct IcrcChecker {
    port: u16,
    senders: Vec<Option<SenderState>>,
    hosts: Vec<Option<HostCounter>>,
    lengths: Vec<IpIdSolver>,
    held: HeldPackets,
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
            held: HeldPackets::default(),
            dropped: DroppedPackets { digests: [0; DROPPED], next: 0 },
        }
    }

    /// Checks a packet from its BTH through its ICRC.
    #[inline]
    pub(super) fn check(&mut self, from: SocketAddr, to: IpAddr, packet: &[u8]) -> Verdict {
        self.predict(from, to, packet).unwrap_or(Verdict::Invalid)
    }

    /// `None` if it is damaged.
    #[inline]
    fn predict(&mut self, from: SocketAddr, to: IpAddr, packet: &[u8]) -> Option<Verdict> {
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
            (host.last, host.at, host.jump) = (guess, Instant::now(), None);
        }
        Some(Verdict::Valid(guess))
    }

    /// As `predict`, for a packet whose identification is not `guess`: the ICRC computed with it
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
    ) -> Option<Verdict> {
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
        let dont_fragment = sender.dont_fragment != flag_differs;
        let digest = digest(from, packet);
        let solution = Solution { identification: found, dont_fragment, digest };
        // A sender does not change its mind about fragmentation from packet to packet.
        let same_flags = !flag_differs || !sender.is_known;
        let expected = same_flags && (is_small || host.may_be_at(found, now));
        let held = self.held.of_host(from.ip());
        let repeats_held = held.is_some_and(|held| held.digest == digest);
        let repeats = repeats_held || self.dropped.contains(digest);
        let has_jumped = host.has_jumped_to(found, dont_fragment, now);
        if !expected && !repeats && !has_jumped {
            host.jump = Some((solution, now));
            return Some(Verdict::Unsettled(solution));
        }
        let confirms = !expected && !repeats && held == host.jump.map(|(held, _)| held);
        sender.settle(found, flag_differs, host.may_be_at(found, now));
        if confirms {
            host.jump = None;
        }
        if sender.counts {
            let is_late = host.is_known && host.last.wrapping_sub(found) <= MAX_REORDERING;
            host.last = if is_late { host.last } else { found };
            (host.at, host.jump, host.is_known) = (now, None, true);
        }
        if repeats_held {
            let _ = self.held.take(from.ip());
        }
        Some(if confirms { Verdict::Confirms(found) } else { Verdict::Valid(found) })
    }

    /// Holds a packet that is not settled; returns whether another one was dropped for it.
    #[cold]
    pub(super) fn hold(&mut self, arrival: &Arrival<'_>, solution: Solution) -> bool {
        let evicted = self.held.hold(arrival, solution, Instant::now());
        if let Some(evicted) = evicted {
            self.dropped.add(evicted.digest);
        }
        evicted.is_some()
    }

    /// Takes the packet of a host that another one has confirmed.
    #[cold]
    pub(super) fn take_confirmed(&mut self, from: IpAddr) -> Option<(Arrival<'_>, Solution)> {
        let (arrival, solution) = self.held.take(from)?;
        let sender = sender(&mut self.senders, self.port, arrival.from, arrival.to)?;
        if !sender.is_known {
            let flag_differs = sender.dont_fragment != solution.dont_fragment;
            sender.settle(solution.identification, flag_differs, true);
        }
        Some((arrival, solution))
    }

    /// When [`expire`](Self::expire) has something to do next.
    #[inline]
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.held.next_expiry()
    }

    /// Takes a packet that was held for long enough, and whether it is to be delivered: the others
    /// are dropped.
    pub(super) fn expire(&mut self, now: Instant) -> Option<(Arrival<'_>, Solution, bool)> {
        let Self { held, senders, hosts, dropped, port, .. } = self;
        let (arrival, solution) = held.take_expired(now)?;
        let host = host(hosts, arrival.from.ip())?;
        let sender = sender(senders, *port, arrival.from, arrival.to)?;
        // Nothing since then has said where the counter is, or that the sender has none.
        let is_last_word = host.jump.is_some_and(|(last, _)| last == solution)
            && (sender.counts || !sender.is_known);
        let is_final = is_final_nak(arrival.bytes) && is_last_word;
        if !is_final {
            dropped.add(solution.digest);
        }
        Some((arrival, solution, is_final))
    }
}

impl SenderState {
    /// A packet with this identification is valid. `fits_counter` is whether the counter of the
    /// host may be there.
    fn settle(&mut self, found: u16, flag_differs: bool, fits_counter: bool) {
        if flag_differs {
            self.icrc_prefix.toggle_dont_fragment();
            self.dont_fragment = !self.dont_fragment;
        }
        self.counts = found >= MAX_SMALL_ID || self.counts && fits_counter;
        match found.wrapping_sub(self.last) {
            step @ 0..=1 if !self.counts => self.step = step,
            _ => {}
        }
        (self.last, self.is_known) = (found, true);
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

/// Whether this is a NAK after which the sender's queue pair is in the error state: without data,
/// in the default partition, and with nothing set that such a packet does not have.
fn is_final_nak(packet: &[u8]) -> bool {
    const LEN: usize = BTH_LEN + 4 + ICRC_LEN;
    let head = matches!(packet, [0x11, 0 | 0x40, 0x7f | 0xff, 0xff, _, _, _, _, 0, ..]);
    // Invalid request, remote access, remote operation, invalid RD request.
    packet.len() == LEN && head && matches!(packet.get(BTH_LEN), Some(0x61..=0x64))
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
        *slot = Some(SenderState {
            from,
            to,
            icrc_prefix,
            dont_fragment: true,
            last: 0,
            step: 0,
            counts: false,
            is_known: false,
        });
    }
    slot.as_mut()
}

/// The counter of a host; evicts another one from the slot if needed.
#[inline]
fn host(hosts: &mut [Option<HostCounter>], from: IpAddr) -> Option<&mut HostCounter> {
    let slot = hosts.get_mut(host_index(from, HOSTS))?;
    if slot.as_ref().is_none_or(|known| known.from != from) {
        let at = Instant::now();
        *slot = Some(HostCounter { from, last: 0, at, jump: None, is_known: false });
    }
    slot.as_mut()
}

/// The slot of a host in a table of this length.
#[inline]
pub(super) fn host_index(host: IpAddr, len: usize) -> usize {
    hash(host) % len
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
