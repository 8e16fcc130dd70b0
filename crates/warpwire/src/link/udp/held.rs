//! Packets that are held until another packet of their host confirms their identification.
//!
//! At most one per host, in a table of fixed size, for [`HOLD_TIME`]; a new one evicts the old one.
//! What a slot has allocated it keeps.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::check::host_index;
use crate::link::Frame;

/// How long a packet is held. A requester that waits for its first response asks again after 34,
/// 101 and 235 ms, so a live peer has said something by then.
pub(super) const HOLD_TIME: Duration = Duration::from_millis(300);
/// Number of slots, indexed by a hash of the host. With packets of 4156 bytes, 66 kB.
const SLOTS: usize = 16;

/// A packet with what the link knows about it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival<'a> {
    pub from: SocketAddr,
    pub to: IpAddr,
    pub traffic_class: u8,
    pub hop_limit: u8,
    pub bytes: &'a [u8],
}

/// What a packet's ICRC says, if the packet is intact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Solution {
    pub identification: u16,
    pub dont_fragment: bool,
    /// Of everything that a repeated packet has in common with this one.
    pub digest: u32,
}

#[derive(Debug)]
struct Slot {
    /// When it was received; `None` if the slot is free.
    since: Option<Instant>,
    solution: Solution,
    from: SocketAddr,
    to: IpAddr,
    traffic_class: u8,
    hop_limit: u8,
    bytes: Vec<u8>,
}

#[derive(Debug, Default)]
pub(super) struct HeldPackets {
    slots: Vec<Slot>,
    count: usize,
}

impl HeldPackets {
    /// Whether nothing is held: the usual case.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Holds a packet; returns the one that lost its place.
    #[cold]
    pub(super) fn hold(
        &mut self,
        arrival: &Arrival<'_>,
        solution: Solution,
        now: Instant,
    ) -> Option<Solution> {
        let Arrival { from, to, traffic_class, hop_limit, bytes } = *arrival;
        if self.slots.is_empty() {
            self.slots.resize_with(SLOTS, || Slot {
                since: None,
                solution,
                from,
                to,
                traffic_class: 0,
                hop_limit: 0,
                bytes: Vec::new(),
            });
        }
        let slot = self.slots.get_mut(host_index(from.ip(), SLOTS))?;
        let evicted = slot.since.replace(now).map(|_| slot.solution);
        (slot.solution, slot.from, slot.to) = (solution, from, to);
        (slot.traffic_class, slot.hop_limit) = (traffic_class, hop_limit);
        slot.bytes.clear();
        slot.bytes.extend_from_slice(bytes);
        self.count += usize::from(evicted.is_none());
        evicted
    }

    /// The packet that is held for a host.
    pub(super) fn of_host(&self, host: IpAddr) -> Option<Solution> {
        let slot = self.slots.get(host_index(host, SLOTS))?;
        (slot.since.is_some() && slot.from.ip() == host).then_some(slot.solution)
    }

    /// Takes the packet that is held for a host. Its bytes stay until another one is held.
    pub(super) fn take(&mut self, host: IpAddr) -> Option<(Arrival<'_>, Solution)> {
        self.of_host(host)?;
        self.count -= 1;
        self.slots.get_mut(host_index(host, SLOTS)).map(Slot::take)
    }

    /// Takes a packet that was held for long enough.
    #[cold]
    pub(super) fn take_expired(&mut self, now: Instant) -> Option<(Arrival<'_>, Solution)> {
        let is_expired = |since| now.saturating_duration_since(since) >= HOLD_TIME;
        let slot = self.slots.iter_mut().find(|slot| slot.since.is_some_and(is_expired))?;
        self.count -= 1;
        Some(slot.take())
    }

    /// When the next packet will have been held for long enough.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        if self.is_empty() {
            return None;
        }
        self.slots.iter().filter_map(|slot| slot.since).min().map(|since| since + HOLD_TIME)
    }
}

impl<'a> Arrival<'a> {
    /// The packet as it is delivered. `port` is the link's.
    pub(super) fn frame(&self, port: u16, identification: u16) -> Frame<'a> {
        let Self { from, to, traffic_class, hop_limit, bytes } = *self;
        let to = SocketAddr::new(to, port);
        Frame { from, to, bytes, traffic_class, hop_limit, identification, has_icrc: true }
    }
}

impl Slot {
    fn take(&mut self) -> (Arrival<'_>, Solution) {
        self.since = None;
        let Self { from, to, traffic_class, hop_limit, solution, .. } = *self;
        (Arrival { from, to, traffic_class, hop_limit, bytes: &self.bytes }, solution)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrival(host: u8, bytes: &[u8]) -> Arrival<'_> {
        let from = SocketAddr::from(([192, 0, 2, host], 50_000));
        let to = IpAddr::from([192, 0, 2, 200]);
        Arrival { from, to, traffic_class: 2, hop_limit: 64, bytes }
    }

    const SOLUTION: Solution = Solution { identification: 7, dont_fragment: true, digest: 1 };

    #[test]
    fn there_is_one_packet_per_host_and_a_limit_on_all() {
        let mut held = HeldPackets::default();
        let (now, bytes) = (Instant::now(), [5; 100]);
        assert!(held.is_empty() && held.next_expiry().is_none());
        assert_eq!(held.hold(&arrival(1, &bytes[..40]), SOLUTION, now), None);
        // The second one of a host.
        assert_eq!(held.hold(&arrival(1, &bytes), SOLUTION, now), Some(SOLUTION));
        for host in 2..=255 {
            let _ = held.hold(&arrival(host, &bytes), SOLUTION, now);
        }
        assert!(held.count <= SLOTS);
        let room: usize = held.slots.iter().map(|slot| slot.bytes.capacity()).sum();
        assert!(room <= SLOTS * 256, "{room}");
        let later = now + HOLD_TIME;
        assert_eq!(held.next_expiry(), Some(later));
        let mut expired = 0;
        while held.take_expired(later).is_some() {
            expired += 1;
        }
        assert!(expired == SLOTS.min(255) && held.is_empty());
    }

    #[test]
    fn a_packet_is_taken_once_by_its_own_host_or_when_it_expires() {
        let mut held = HeldPackets::default();
        let now = Instant::now();
        let _ = held.hold(&arrival(1, &[9; 64]), SOLUTION, now);
        // The same slot, another host.
        assert_eq!(held.of_host(IpAddr::from([192, 0, 2, 1 + SLOTS as u8])), None);
        assert!(held.take_expired(now + HOLD_TIME - Duration::from_millis(1)).is_none());
        let (taken, solution) = held.take(IpAddr::from([192, 0, 2, 1])).unwrap();
        assert_eq!((taken.bytes, solution), (&[9; 64][..], SOLUTION));
        assert!(held.take(IpAddr::from([192, 0, 2, 1])).is_none());
        assert!(held.take_expired(now + HOLD_TIME).is_none() && held.is_empty());
    }
}
