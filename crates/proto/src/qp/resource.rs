//! The peer's last reads and atomics: responses to send, and to send again.
//!
//! A requester has at most `max_dest_rd_atomic` of them outstanding, so a ring of that many records
//! holds every request that may still be retransmitted. Responses are sent in the order of the
//! requests: the oldest record with packets to send is first. A duplicate request only moves a
//! record's position back; an atomic is never executed again.

use alloc::boxed::Box;
use alloc::vec;

use super::host::{FollowingReads, Remote};
use crate::psn::Psn;

/// So many bytes of following reads are enough to read ahead.
const MAX_FOLLOWING: u32 = 1 << 20;

/// The operation that was requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RdAtomicOp {
    Read {
        at: Remote,
        len: u32,
    },
    /// An atomic, with the previous value.
    Atomic {
        before: u64,
    },
}

/// A request that was executed, and the progress of its response. Packets are counted from its
/// first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resource {
    pub first: Psn,
    pub packets: u32,
    pub requested: RdAtomicOp,
    /// Where the current run of responses started: that packet is a "first" on the wire.
    pub start: u32,
    /// The next packet to send; equal to `stop` when there is none.
    pub next: u32,
    pub stop: u32,
    /// How many times the response was sent completely. While it is 0 the peer cannot have finished
    /// with the request.
    times_sent: u8,
}

impl Resource {
    pub fn was_sent(&self) -> bool {
        self.times_sent > 0
    }

    fn is_pending(&self) -> bool {
        self.next != self.stop
    }

    /// The length of this read, if it was not answered yet and continues where another one ends.
    fn continues(&self, before: &Self) -> Option<u32> {
        let (RdAtomicOp::Read { at, len }, RdAtomicOp::Read { at: before_at, len: before_len }) =
            (self.requested, before.requested)
        else {
            return None;
        };
        let continues = at == before_at.forward(before_len)
            && self.first == before.first.add(before.packets)
            && !self.was_sent();
        continues.then_some(len)
    }

    fn covers(&self, psn: Psn) -> bool {
        let index = psn.distance_from(self.first);
        index >= 0 && index < self.packets as i32
    }
}

/// The ring of records. Positions are free-running; the capacity is a power of two, so that they
/// may wrap.
#[derive(Debug)]
pub(super) struct ResourceRing {
    records: Box<[Option<Resource>]>,
    /// How many records are kept.
    limit: u32,
    /// The position of the next record.
    end: u32,
    /// The oldest record with packets to send; `end` when there is none.
    pending: u32,
}

impl ResourceRing {
    pub(super) fn new(capacity: u8) -> Self {
        let records = vec![None; usize::from(capacity).next_power_of_two()].into();
        Self { records, limit: u32::from(capacity), end: 0, pending: 0 }
    }

    /// A ring of another capacity with the newest records of this one.
    pub(super) fn resized(&self, capacity: u8) -> Self {
        let mut ring = Self::new(capacity);
        let kept = self.limit.min(ring.limit);
        (ring.end, ring.pending) = (self.end, self.end.wrapping_sub(kept));
        for back in 1..=kept {
            let position = self.end.wrapping_sub(back);
            let slot = ring.slot(position);
            ring.records[slot] = self.records[self.slot(position)];
        }
        ring.skip_done();
        ring
    }

    pub(super) fn footprint(&self) -> usize {
        size_of_val(&*self.records)
    }

    fn slot(&self, position: u32) -> usize {
        position as usize & (self.records.len() - 1)
    }

    /// Whether another request fits: the record that is evicted must have been answered.
    pub(super) fn has_room(&self) -> bool {
        let evicted = &self.records[self.slot(self.end.wrapping_sub(self.limit))];
        self.limit > 0 && evicted.as_ref().is_none_or(Resource::was_sent)
    }

    /// Adds a request that was just executed and whose response is due.
    pub(super) fn push(&mut self, first: Psn, packets: u32, requested: RdAtomicOp) {
        let slot = self.slot(self.end);
        let was_pending = self.pending != self.end;
        let (start, next, stop) = (0, 0, packets);
        self.records[slot] =
            Some(Resource { first, packets, requested, start, next, stop, times_sent: 0 });
        self.end = self.end.wrapping_add(1);
        // The evicted record may have been the oldest with packets to send (again).
        let oldest = self.end.wrapping_sub(self.limit);
        if was_pending && (self.pending.wrapping_sub(oldest) as i32) < 0 {
            self.pending = oldest;
            self.skip_done();
        }
    }

    /// The record whose packet is sent next.
    pub(super) fn pending(&mut self) -> Option<&mut Resource> {
        if self.pending == self.end {
            return None;
        }
        let slot = self.slot(self.pending);
        self.records[slot].as_mut()
    }

    /// The reads behind the pending one that continue where it ends, and were not answered yet.
    pub(super) fn following(&self) -> FollowingReads {
        let Some(mut before) = self.record(self.pending) else {
            return FollowingReads::default();
        };
        let mut following = FollowingReads { len: 0, last: before.first };
        let mut position = self.pending.wrapping_add(1);
        while let Some(next) = self.record(position)
            && let Some(len) = next.continues(before)
            && following.len < MAX_FOLLOWING
        {
            following = FollowingReads { len: following.len + len, last: next.first };
            (before, position) = (next, position.wrapping_add(1));
        }
        following
    }

    fn record(&self, position: u32) -> Option<&Resource> {
        if position == self.end { None } else { self.records[self.slot(position)].as_ref() }
    }

    /// Advances the pending record by one packet.
    pub(super) fn sent(&mut self) {
        if let Some(record) = self.pending() {
            record.next += 1;
            if !record.is_pending() {
                record.times_sent = record.times_sent.saturating_add(1);
                self.skip_done();
            }
        }
    }

    /// Undoes [`sent`](Self::sent) for this PSN, the last one sent of its record.
    pub(super) fn undo_sent(&mut self, psn: Psn) {
        let oldest = self.end.wrapping_sub(self.limit);
        for back in 1..=self.limit {
            let position = self.end.wrapping_sub(back);
            let slot = self.slot(position);
            let Some(record) = &mut self.records[slot] else { continue };
            if !record.covers(psn) {
                continue;
            }
            let index = psn.distance_from(record.first) as u32;
            if index + 1 == record.next {
                if !record.is_pending() {
                    record.times_sent = record.times_sent.saturating_sub(1);
                }
                record.next = index;
                self.mark_pending(position, oldest);
            }
            return;
        }
    }

    /// Stops sending the oldest pending record until it is requested again.
    pub(super) fn skip(&mut self) {
        if let Some(record) = self.pending() {
            record.stop = record.next;
            self.skip_done();
        }
    }

    /// The memory of the oldest pending record is gone: stops it, and drops those behind it, which
    /// the peer will not be told about. Those before it are kept, because their responses may have
    /// been lost; and so is this one, whose first packets may have been.
    pub(super) fn deny(&mut self) {
        let Some(record) = self.pending() else { return };
        (record.stop, record.times_sent) = (record.next, record.times_sent.max(1));
        while self.end != self.pending.wrapping_add(1) {
            self.end = self.end.wrapping_sub(1);
            let slot = self.slot(self.end);
            self.records[slot] = None;
        }
        self.pending = self.end;
    }

    fn skip_done(&mut self) {
        while self.pending != self.end {
            if self.records[self.slot(self.pending)].as_ref().is_some_and(Resource::is_pending) {
                return;
            }
            self.pending = self.pending.wrapping_add(1);
        }
    }

    /// The peer requests `packets` packets from `psn` on again; `matches` checks the record and the
    /// packet's index in it. Returns whether the record exists.
    pub(super) fn replay(
        &mut self,
        psn: Psn,
        packets: u32,
        matches: impl Fn(&Resource, u32) -> bool,
    ) -> bool {
        let oldest = self.end.wrapping_sub(self.limit);
        for back in 1..=self.limit {
            let position = self.end.wrapping_sub(back);
            let slot = self.slot(position);
            let Some(record) = &mut self.records[slot] else { continue };
            if !record.covers(psn) {
                continue;
            }
            let index = psn.distance_from(record.first) as u32;
            if packets > record.packets - index || !matches(record, index) {
                return false;
            }
            let until = index + packets;
            if record.is_pending() {
                record.stop = record.stop.max(until);
            } else {
                (record.next, record.stop) = (until, until);
            }
            if index < record.next {
                (record.start, record.next) = (index, index);
            }
            self.mark_pending(position, oldest);
            return true;
        }
        false
    }

    /// Marks a record as having packets to send.
    fn mark_pending(&mut self, position: u32, oldest: u32) {
        let from_oldest = |at: u32| at.wrapping_sub(oldest);
        if self.pending == self.end || from_oldest(position) < from_oldest(self.pending) {
            self.pending = position;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_follow_if_they_continue() {
        let mut ring = ResourceRing::new(8);
        assert_eq!(ring.following(), FollowingReads::default());
        let at = |address| Remote { address, rkey: 7 };
        let mut psn = Psn::new(0xff_fffe);
        let mut push = |ring: &mut ResourceRing, at: Remote, len: u32| {
            let first = psn;
            ring.push(psn, len / 4096, RdAtomicOp::Read { at, len });
            psn = psn.add(len / 4096);
            first
        };
        let first = push(&mut ring, at(0x1000), 8192);
        assert_eq!(ring.following(), FollowingReads { len: 0, last: first });
        push(&mut ring, at(0x3000), 4096);
        let last = push(&mut ring, at(0x4000), 4096);
        // Another key, and an address that was read before.
        push(&mut ring, Remote { address: 0x5000, rkey: 8 }, 4096);
        let again = push(&mut ring, at(0x4000), 4096);
        assert_eq!(ring.following(), FollowingReads { len: 8192, last });
        // Two packets of the first, one of the second.
        (0..3).for_each(|_| ring.sent());
        assert_eq!(ring.following(), FollowingReads { len: 0, last });
        (0..2).for_each(|_| ring.sent());
        assert_eq!(ring.following(), FollowingReads { len: 0, last: again });
        // An atomic is in between.
        ring.push(again.add(1), 1, RdAtomicOp::Atomic { before: 0 });
        ring.push(again.add(2), 1, RdAtomicOp::Read { at: at(0x5000), len: 4096 });
        assert_eq!(ring.following(), FollowingReads { len: 0, last: again });
    }
}
