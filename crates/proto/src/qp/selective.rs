//! Selective repeat: what both ends remember about packets that did not arrive in order.
//!
//! Between two ends that negotiated it ([`QpAttributes::selective_repeat`]), the host keeps packets
//! that arrive behind a missing one (requests at the responder, responses at the requester), and
//! they are handled when their turn comes, exactly as if they arrived then. So nothing is placed,
//! executed or completed out of order. As in IRN (SIGCOMM 2018), the NAK for a gap says which
//! packets behind it have arrived; the requester sends the others again.
//!
//! A packet counts as lost when one that was sent after it has arrived, in the order of
//! transmissions and not of PSNs, as in RACK (RFC 8985): so the loss of a retransmission is noticed
//! without a timeout as well.
//!
//! [`QpAttributes::selective_repeat`]: super::QpAttributes::selective_repeat

use super::host::{Host, HostStatus, Source};
use super::requester::{ConnParams, Entry, Requester, Segment};
use super::work::{SendOp, Status};
use super::{DiscardReason, Payload, RxPacket, Stats, Transmit, completer};
use crate::psn::Psn;
use crate::time::Instant;
use crate::wire::ext::Sack;
use crate::wire::{Extension, Opcode};

/// How many packets may be in flight: PSNs are told apart by their low bits. A NAK tells of the
/// first 256 behind the missing one; of the others the sender hears when that one has arrived.
pub(super) const SPAN: u32 = 1024;

/// Slots of a host for held packets: see [`Host::hold`].
pub const HOLD_SLOTS: u32 = 2 * SPAN;

/// A set of PSNs less than [`SPAN`] apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PsnSet([u64; SPAN as usize / 64]);

impl PsnSet {
    fn bit(psn: Psn) -> (usize, u64) {
        let at = psn.value() % SPAN;
        (at as usize / 64, 1 << (at % 64))
    }

    pub(super) fn contains(&self, psn: Psn) -> bool {
        let (word, bit) = Self::bit(psn);
        self.0[word] & bit != 0
    }

    /// Returns whether it was not in the set.
    pub(super) fn insert(&mut self, psn: Psn) -> bool {
        let (word, bit) = Self::bit(psn);
        let is_new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        is_new
    }

    /// Returns whether it was in the set.
    pub(super) fn remove(&mut self, psn: Psn) -> bool {
        let (word, bit) = Self::bit(psn);
        let was_in = self.0[word] & bit != 0;
        self.0[word] &= !bit;
        was_in
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0 == [0; SPAN as usize / 64]
    }

    fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// The first element from `psn` on.
    fn first_from(&self, psn: Psn) -> Option<Psn> {
        (0..SPAN).map(|step| psn.add(step)).find(|psn| self.contains(*psn))
    }

    /// The elements behind `psn`, as they are sent.
    pub(super) fn behind(&self, psn: Psn) -> Sack {
        let mut sack = Sack::default();
        for step in (1..Sack::SPAN).filter(|step| self.contains(psn.add(*step))) {
            sack.insert(step);
        }
        sack
    }
}

/// The PSNs from `first` up to, and without, `end`.
pub(super) fn psns(first: Psn, end: Psn) -> impl Iterator<Item = Psn> {
    (0..end.distance_from(first).max(0) as u32).map(move |step| first.add(step))
}

/// What a requester remembers about the PSNs in flight. A PSN is in at most one of the sets.
#[derive(Debug)]
pub(super) struct Recovery {
    /// Requests that the peer holds.
    acked: PsnSet,
    /// PSNs to request, or to send, again.
    lost: PsnSet,
    /// Responses that our host holds.
    held: PsnSet,
    /// The number of each PSN's last transmission, by its low bits.
    order: [u32; SPAN as usize],
    /// The number of the next transmission, and of the latest one that is known to have arrived.
    next: u32,
    newest: u32,
}

impl Recovery {
    pub(super) fn new() -> Self {
        let (acked, lost, held) = (PsnSet::default(), PsnSet::default(), PsnSet::default());
        // Numbers compare on a circle: everything is sent after `newest`.
        Self { acked, lost, held, order: [0; SPAN as usize], next: 1, newest: 0 }
    }

    fn order(&self, psn: Psn) -> u32 {
        self.order[(psn.value() % SPAN) as usize]
    }

    /// A packet with this many PSNs is sent.
    #[inline(never)] // without selective repeat it is a branch
    pub(super) fn on_sent(&mut self, psn: Psn, count: u32) {
        for step in 0..count {
            self.order[(psn.add(step).value() % SPAN) as usize] = self.next;
        }
        self.next = self.next.wrapping_add(1);
    }

    fn on_delivered(&mut self, psn: Psn) {
        let order = self.order(psn);
        if order.wrapping_sub(self.newest) as i32 > 0 {
            self.newest = order;
        }
    }

    /// Whether it was sent before the latest that has arrived, or `with` it.
    fn is_overtaken(&self, psn: Psn, with: bool) -> bool {
        (self.newest.wrapping_sub(self.order(psn)) as i32) >= i32::from(!with)
    }

    fn lose(&mut self, psn: Psn) -> bool {
        self.acked.remove(psn);
        self.lost.insert(psn)
    }

    /// How many PSNs are not in flight, although they are neither acknowledged nor unsent.
    fn absent(&self) -> u32 {
        self.acked.count() + self.lost.count() + self.held.count()
    }
}

impl Requester {
    /// Packets in flight: sent, and neither arrived nor lost, as far as we know.
    #[inline]
    pub(super) fn in_flight(&self) -> u32 {
        (self.next.distance_from(self.unacked) as u32).saturating_sub(self.absent)
    }

    /// Whether there are packets to send again, other than by going back.
    #[inline]
    pub(super) fn has_lost(&self) -> bool {
        self.absent > 0 && self.selective.as_ref().is_some_and(|known| !known.lost.is_empty())
    }

    /// Everything before `psn` is acknowledged. Returns how many of those already were.
    #[cold]
    #[inline(never)]
    pub(super) fn forget_until(&mut self, psn: Psn) -> u32 {
        let Some(known) = &mut self.selective else { return 0 };
        let mut acked = 0;
        for psn in psns(self.unacked, psn).take(SPAN as usize) {
            known.on_delivered(psn);
            acked += u32::from(known.acked.remove(psn));
            known.lost.remove(psn);
            known.held.remove(psn);
        }
        self.absent = known.absent();
        acked
    }

    /// Everything from `unacked` on is sent again. Responses that are held stay valid.
    #[cold]
    #[inline(never)]
    pub(super) fn forget_requests(&mut self) {
        if let Some(known) = &mut self.selective {
            (known.acked, known.lost) = (PsnSet::default(), PsnSet::default());
            self.absent = known.absent();
        }
    }

    /// Sends this PSN again, and nothing else; false without selective repeat.
    pub(super) fn lose(&mut self, psn: Psn) -> bool {
        let Some(known) = &mut self.selective else { return false };
        known.lose(psn);
        self.absent = known.absent();
        true
    }

    /// Everything from `from` on that is not known to have arrived is sent again. That PSN in any
    /// case: the peer may have refused it since it reported it (RNR).
    #[cold]
    #[inline(never)]
    pub(super) fn lose_from(&mut self, params: &ConnParams, from: Psn) {
        let Some(mut known) = self.selective.take() else { return };
        self.for_each_request(params, from, self.next, |_, piece, end| {
            if !known.acked.contains(piece) || piece == from {
                for psn in psns(piece, end) {
                    if !known.held.contains(psn) {
                        known.lose(psn);
                    }
                }
            }
        });
        self.absent = known.absent();
        self.selective = Some(known);
    }

    /// Calls `each` with every packet from `from` up to `until`: its entry, its first PSN, and the
    /// one behind its last.
    fn for_each_request(
        &self,
        params: &ConnParams,
        from: Psn,
        until: Psn,
        mut each: impl FnMut(&Entry, Psn, Psn),
    ) {
        let mut position = self.tail;
        while position != self.started {
            let entry = self.entry(position);
            position = position.wrapping_add(1);
            if entry.work.op.is_local() || entry.end().distance_from(from) <= 0 {
                continue;
            }
            let begin = later(entry.first, from);
            if begin.distance_from(until) >= 0 {
                return;
            }
            let mut at = begin;
            while at.distance_from(earlier(entry.end(), until)) < 0 {
                let index = at.distance_from(entry.first) as u32;
                let end = match entry.work.op {
                    SendOp::Read(_) => at.add(params.read_chunk - index % params.read_chunk),
                    _ => at.next(),
                };
                let end = earlier(end, entry.end());
                each(entry, at, end);
                at = end;
            }
        }
    }

    /// The peer misses the packet with this PSN, and says which ones behind it have arrived.
    #[cold]
    #[inline(never)]
    pub(super) fn on_selective_nak(
        &mut self,
        now: Instant,
        params: &ConnParams,
        psn: Psn,
        sack: &Sack,
        stats: &mut Stats,
    ) -> completer::Outcome {
        self.ack_until(psn);
        let Some(mut known) = self.selective.take() else { return completer::Outcome::Accepted };
        let (mut highest, mut count) = (psn, 0);
        for step in (1..Sack::SPAN).filter(|step| sack.contains(*step)) {
            let arrived = psn.add(step);
            // What was not sent cannot have arrived, whatever the peer says.
            if arrived.distance_from(self.next) >= 0
                || arrived.distance_from(self.unacked) >= SPAN as i32
            {
                break;
            }
            highest = arrived;
            if !known.held.contains(arrived) && known.acked.insert(arrived) {
                known.lost.remove(arrived);
                known.on_delivered(arrived);
                count += 1;
                let measured = self.rto.on_delivered(now, arrived);
                self.signals.round_trip = measured.or(self.signals.round_trip);
            }
        }
        // A read that the peer holds is not executed yet: none of its data is in flight.
        self.for_each_request(params, psn, self.next, |_, first, end| {
            if known.acked.contains(first) {
                for psn in psns(first.next(), end) {
                    known.lost.remove(psn);
                    known.acked.insert(psn);
                }
            }
        });
        let mut lost = 0;
        self.for_each_request(params, psn, highest, |_, first, end| {
            if !known.acked.contains(first) && known.is_overtaken(first, false) {
                lost += psns(first, end).filter(|psn| known.lose(*psn)).count();
            }
        });
        self.selective = Some(known);
        lost += self.find_lost_responses(params, psn, false);
        if count > 0 {
            self.signals.acked += count;
            self.rto.on_answer();
            self.restart_timer(now, params);
        }
        self.after_loss(now, params, lost, stats);
        completer::Outcome::Accepted
    }

    /// Data that was requested before what has arrived, and is not here. `with`: or in the same
    /// request. Returns how many packets.
    fn find_lost_responses(&mut self, params: &ConnParams, until: Psn, with: bool) -> usize {
        let Some(mut known) = self.selective.take() else { return 0 };
        let mut lost = 0;
        self.for_each_request(params, self.unacked, until, |entry, first, end| {
            if entry.work.op.awaits_response() {
                for psn in psns(first, earlier(end, until)) {
                    if !known.held.contains(psn) && known.is_overtaken(psn, with) {
                        lost += usize::from(known.lose(psn));
                    }
                }
            }
        });
        self.absent = known.absent();
        self.selective = Some(known);
        lost
    }

    /// Counts a loss, and starts the timer: nothing else may cause an answer.
    fn after_loss(&mut self, now: Instant, params: &ConnParams, lost: usize, stats: &mut Stats) {
        let Some(known) = &self.selective else { return };
        self.absent = known.absent();
        if lost == 0 {
            return;
        }
        stats.lost += lost as u64;
        if self.rto.sampled().is_some_and(|psn| known.lost.contains(psn)) {
            self.rto.forget_sample();
        }
        self.report_loss();
        self.ack_due = self.next;
        self.restart_timer(now, params);
    }

    /// A response arrived before an earlier one: the host keeps it, and what is missing is
    /// requested again.
    #[cold]
    #[inline(never)]
    pub(super) fn hold_response<H: Host>(
        &mut self,
        now: Instant,
        params: &ConnParams,
        rx: &RxPacket<'_>,
        host: &mut H,
        stats: &mut Stats,
    ) -> completer::Outcome {
        let Some(known) = &mut self.selective else { return completer::GAP };
        let psn = rx.headers.psn;
        let is_positive = match rx.headers.extension {
            Extension::Aeth(aeth) | Extension::AethAtomic(aeth, _) => aeth.syndrome.is_ack(),
            Extension::AethSack(..) => false,
            _ => rx.headers.opcode == Opcode::ReadResponseMiddle,
        };
        // What was given up by going back is requested again in any case.
        let is_expected = psn.distance_from(self.next) < 0
            && psn.distance_from(self.unacked) < SPAN as i32
            && is_positive;
        let mut outcome = completer::GAP;
        if psn.distance_from(self.next) < 0 {
            known.on_delivered(psn);
        }
        if is_expected && known.held.contains(psn) {
            outcome = completer::Outcome::Dropped(DiscardReason::StaleResponse);
        } else if is_expected && host.hold(SPAN + psn.value() % SPAN) {
            known.held.insert(psn);
            known.lost.remove(psn);
            known.acked.remove(psn);
            stats.held += 1;
            outcome = completer::Outcome::Accepted;
        } else if is_expected {
            known.lose(psn);
        }
        if matches!(rx.headers.extension, Extension::Aeth(aeth) if aeth.syndrome.is_rnr()) {
            // The peer dropped that request, and we cannot wait: data before it is missing.
            self.lose_from(params, psn);
        }
        let lost = self.find_lost_responses(params, psn, true);
        stats.response_gaps += u64::from(lost > 0);
        self.after_loss(now, params, lost, stats);
        outcome
    }

    /// The slot of a held response whose turn it is; it is no longer held.
    pub(super) fn take_held(&mut self) -> Option<u32> {
        let known = self.selective.as_ref().filter(|known| !known.held.is_empty())?;
        let first = known.held.first_from(self.unacked)?;
        let mut position = self.tail;
        while position != self.started {
            let entry = self.entry(position);
            let is_missing = entry.work.op.awaits_response() && entry.end() != self.unacked;
            if is_missing && first.distance_from(later(entry.first, self.unacked)) > 0 {
                return None;
            }
            if is_missing {
                break;
            }
            position = position.wrapping_add(1);
        }
        let known = self.selective.as_mut()?;
        known.held.remove(first);
        self.absent = known.absent();
        Some(SPAN + first.value() % SPAN)
    }

    /// Puts the first lost request into `packet`; returns whether it may be sent. `Err` fails the
    /// queue pair.
    #[cold]
    #[inline(never)]
    pub(super) fn resend<H: Host>(
        &mut self,
        now: Instant,
        params: &ConnParams,
        host: &mut H,
        stats: &mut Stats,
        packet: &mut Transmit,
    ) -> Result<bool, Status> {
        let in_flight = self.in_flight();
        if in_flight >= self.allowance && self.may_wait_for_room(in_flight) {
            self.blocked_by_path = true;
            return Ok(false);
        }
        if self.probing && in_flight > 0 {
            return Ok(false);
        }
        let Some(mut known) = self.selective.take() else { return Ok(false) };
        let outcome = self.resend_first(&mut known, params, host, packet);
        if let Ok(Some((psn, end))) = outcome {
            for psn in psns(psn, end) {
                known.lost.remove(psn);
            }
            known.on_sent(psn, end.distance_from(psn) as u32);
            stats.resent += 1;
        }
        self.absent = known.absent();
        self.selective = Some(known);
        let Some((_, end)) = outcome? else { return Ok(false) };
        self.since_ack_request = 0;
        if end.distance_from(self.ack_due) > 0 {
            self.ack_due = end;
        }
        if self.deadline == Instant::NEVER {
            self.restart_timer(now, params);
        }
        Ok(true)
    }

    /// Fills `packet`; returns its first PSN, and the one behind its last.
    fn resend_first<H: Host>(
        &self,
        known: &mut Recovery,
        params: &ConnParams,
        host: &mut H,
        packet: &mut Transmit,
    ) -> Result<Option<(Psn, Psn)>, Status> {
        let Some(psn) = known.lost.first_from(self.unacked) else { return Ok(None) };
        let mut position = self.tail;
        while position != self.started && self.entry(position).end().distance_from(psn) <= 0 {
            position = position.wrapping_add(1);
        }
        let entry = self.entry(position);
        if position == self.started || psn.distance_from(entry.first) < 0 {
            known.lost.remove(psn); // not a packet of ours
            return Ok(None);
        }
        let index = psn.distance_from(entry.first) as u32;
        let headers = &mut packet.headers;
        let segment = match entry.work.op {
            SendOp::Read(at) => {
                let missing = (1..SPAN).find(|step| !known.lost.contains(psn.add(*step)));
                Segment::read(entry, index, missing.unwrap_or(SPAN), params, at, headers)
            }
            _ => Segment::at(entry, index, params, headers),
        };
        packet.payload = None;
        if segment.len > 0 {
            let from = Source::SendWr { id: entry.work.id, offset: segment.offset };
            match host.fetch(from, segment.len, headers.len()) {
                HostStatus::Ready => {}
                HostStatus::Denied if position == self.tail => return Err(Status::LocalProtection),
                // A denied fetch fails in queue order, once everything before it is acknowledged.
                HostStatus::Retry | HostStatus::Denied => return Ok(None),
            }
            packet.payload = Some(Payload { from, len: segment.len });
        }
        let end = psn.add(segment.psn_count);
        headers.solicited = end == entry.end() && entry.work.solicited && segment.can_solicit;
        headers.destination_qp = params.destination;
        headers.psn = psn;
        headers.ack_request = true;
        Ok(Some((psn, end)))
    }
}

fn later(one: Psn, other: Psn) -> Psn {
    if one.distance_from(other) > 0 { one } else { other }
}

fn earlier(one: Psn, other: Psn) -> Psn {
    if one.distance_from(other) < 0 { one } else { other }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn a_set_wraps_with_the_psns() {
        let mut set = PsnSet::default();
        let last = Psn::new(0xff_ffff);
        for psn in [last, last.add(3), last.add(200)] {
            assert!(set.insert(psn) && !set.insert(psn) && set.contains(psn));
        }
        assert_eq!((set.count(), set.first_from(last.next())), (3, Some(last.add(3))));
        assert!(set.remove(last) && !set.remove(last));
        let sack = set.behind(last.add(1));
        let behind: Vec<u32> = (1..Sack::SPAN).filter(|step| sack.contains(*step)).collect();
        assert_eq!(behind, [2, 199]);
        assert!(!sack.contains(0) && !sack.contains(SPAN) && !sack.contains(u32::MAX));
    }

    #[test]
    fn transmissions_overtake_in_their_own_order() {
        let mut known = Recovery::new();
        let [a, b] = [Psn::new(5), Psn::new(6)];
        known.on_sent(a, 1);
        known.on_sent(b, 1);
        known.on_delivered(b);
        assert!(known.is_overtaken(a, false) && !known.is_overtaken(b, false));
        known.on_sent(a, 1);
        assert!(!known.is_overtaken(a, true) && known.is_overtaken(b, true));
    }
}
