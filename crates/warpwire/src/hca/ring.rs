//! The queues as the engine sees them: rings in memory that somebody else fills or empties.
//!
//! Nothing that is read here is trusted: positions are taken modulo the ring, counts are bounded by it, and entries
//! are copied out before they are looked at.

use std::time::Duration;

use warpwire_proto::Instant;

use super::memory::QueueMemory;
use crate::mlx5::{
    BLUEFLAME_BUFFER_LEN, ControlSegment, Doorbell, DoorbellRecord, MAX_WQE_LEN, ProducerTracker,
    SEGMENT, WQEBB_LEN,
};

/// How long an entry may be promised by a doorbell and not be there, before it counts as wrong. Doorbells may
/// overtake what they tell of, and whoever stores one in two halves may lose his turn in between; not for that long.
pub(super) const WQE_ARRIVAL_TIMEOUT: Duration = Duration::from_millis(20);

/// Where the parts of a queue pair lie in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpLayout {
    /// The receive queue.
    pub receive: u64,
    /// The send queue.
    pub send: u64,
    /// The doorbell record: two words.
    pub dbrec: u64,
    /// The doorbell: eight bytes, and eight more 256 bytes behind.
    pub doorbell: u64,
}

/// A send queue, consumed by the engine.
#[derive(Debug)]
pub(super) struct SendRing {
    memory: QueueMemory,
    layout: QpLayout,
    wqebbs: u32,
    /// The block that is consumed next, counted without end; its low 16 bits are what writers count.
    consumer: u64,
    producer: ProducerTracker,
    /// What either half of the doorbell said when it was last looked at.
    halves: [u16; 2],
    producer_index: u16,
    /// Entries as they were when they were taken: the queue may change, they must not.
    copies: Box<[u8]>,
    /// Since when the next entry has been missing.
    missing_since: Option<Instant>,
}

/// An entry that was taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct TakenWqe {
    /// Its first block, counted without end.
    pub wqe_index: u64,
    pub control: ControlSegment,
    /// It never appeared, or is longer than the queue says.
    pub torn: bool,
}

impl SendRing {
    pub(super) fn new(memory: QueueMemory, layout: QpLayout, wqebbs: u32) -> Self {
        let bytes = wqebbs as usize * WQEBB_LEN + MAX_WQE_LEN;
        Self {
            memory,
            layout,
            wqebbs,
            consumer: 0,
            producer: ProducerTracker::starting_at(0),
            halves: [0; 2],
            producer_index: 0,
            copies: vec![0; bytes].into(),
            missing_since: None,
        }
    }

    /// Begins anew, as if nothing had ever been posted.
    pub(super) fn reset(&mut self) {
        (self.consumer, self.producer_index, self.missing_since) = (0, 0, None);
        self.halves = [0; 2];
        self.producer = ProducerTracker::starting_at(0);
    }

    /// Looks at the doorbell and its record; tells whether there are entries to take.
    pub(super) fn refresh(&mut self) -> bool {
        let bytes = self.memory.bytes();
        let word = |at: u64| {
            // Out of range only if the memory went away: nothing is there then.
            let raw = bytes.load_u64(self.layout.doorbell + at).unwrap_or(0);
            Doorbell::parse(raw.to_ne_bytes()).producer()
        };
        let dbrec = bytes.load_u32(self.layout.dbrec + DoorbellRecord::SEND as u64).unwrap_or(0);
        let dbrec = u32::from_be(dbrec) as u16;
        let consumer = self.consumer as u16;
        let halves = [word(0), word(BLUEFLAME_BUFFER_LEN as u64)];
        // Each half speaks only when it changes: one that nobody rings would look like news once a lap.
        let [first, second] = std::mem::replace(&mut self.halves, halves);
        let changed = (halves[0] != first).then_some(halves[0]);
        self.producer_index = self.producer.refresh(consumer, self.wqebbs, changed, dbrec);
        if halves[1] != second {
            let changed = Some(halves[1]);
            self.producer_index = self.producer.refresh(consumer, self.wqebbs, changed, dbrec);
        }
        self.producer_index != consumer
    }

    /// Takes the next entry, if the doorbell promised one and it is there.
    pub(super) fn take(&mut self, now: Instant) -> Option<TakenWqe> {
        let index = self.consumer as u16;
        let available = self.producer_index.wrapping_sub(index);
        if available == 0 {
            return None;
        }
        // Read once: what is obeyed must be what was looked at, whatever the queue says by now.
        let mut first = [0; WQEBB_LEN];
        let at = self.copy_at(self.consumer);
        copy_wrapping(&self.memory, self.layout.send, self.wqebbs, at, &mut first);
        let control = ControlSegment::parse(first.first_chunk()?);
        let is_complete = control.is_at(index) && control.wqebbs() <= available;
        if !is_complete && !self.missing_expired(now) {
            return None;
        }
        self.missing_since = None;
        let wqe_index = self.consumer;
        let wqebbs = control.wqebbs().min(available);
        let len = usize::from(control.segments) * SEGMENT;
        if len <= MAX_WQE_LEN && is_complete {
            let Self { memory, layout, wqebbs, copies, .. } = self;
            let (near, far) = copies[at..at + len].split_at_mut(len.min(WQEBB_LEN));
            near.copy_from_slice(&first[..near.len()]);
            if !far.is_empty() {
                let next = (at + WQEBB_LEN) % (*wqebbs as usize * WQEBB_LEN);
                copy_wrapping(memory, layout.send, *wqebbs, next, far);
            }
        }
        self.consumer += u64::from(wqebbs);
        Some(TakenWqe { wqe_index, control, torn: !is_complete })
    }

    /// The copy of an entry that was taken and is not done, with whatever lies behind it.
    pub(super) fn copy(&self, wqe_index: u64) -> &[u8] {
        let at = self.copy_at(wqe_index);
        &self.copies[at..at + MAX_WQE_LEN]
    }

    /// Whether the next entry has been missing for too long.
    fn missing_expired(&mut self, now: Instant) -> bool {
        let since = *self.missing_since.get_or_insert(now);
        now - since >= WQE_ARRIVAL_TIMEOUT
    }

    /// Whether a promised entry is missing: somebody must look again soon.
    pub(super) fn is_wqe_missing(&self) -> bool {
        self.missing_since.is_some()
    }

    /// Whether the entry of this number would be the next: nothing that was posted before waits.
    pub(super) fn is_at(&self, wqe_index: u64) -> bool {
        self.consumer == wqe_index && self.producer_index == wqe_index as u16
    }

    /// Passes over the next block, whose work was handed over without an entry.
    pub(super) fn skip_one(&mut self) {
        self.consumer += 1;
        self.producer_index = self.consumer as u16;
        self.producer.skip_to(self.producer_index);
    }

    /// Begins to wait anew at the next look, whose time is the right one.
    pub(super) fn reset_missing(&mut self) {
        self.missing_since = None;
    }

    fn copy_at(&self, wqe_index: u64) -> usize {
        (wqe_index as usize & (self.wqebbs as usize - 1)) * WQEBB_LEN
    }
}

/// Copies from the queue at `start`, `at` bytes into it, going on at its beginning where it ends.
#[inline]
fn copy_wrapping(memory: &QueueMemory, start: u64, wqebbs: u32, at: usize, into: &mut [u8]) {
    let until_wrap = (wqebbs as usize * WQEBB_LEN - at).min(into.len());
    let (head, tail) = into.split_at_mut(until_wrap);
    let bytes = memory.bytes();
    // As above: what cannot be read stays as it is, and is refused as an entry.
    let _ = bytes.read(start + at as u64, head);
    if !tail.is_empty() {
        let _ = bytes.read(start, tail);
    }
}

/// A receive queue, consumed by the engine.
#[derive(Debug)]
pub(super) struct ReceiveRing {
    memory: QueueMemory,
    layout: QpLayout,
    entries: u32,
    stride: u32,
    consumer: u16,
}

/// The longest entry of a receive queue: more ranges than that are not taken.
pub(super) const MAX_RECV_WQE_LEN: usize = 16 * SEGMENT;

/// A receive that was taken: its number, and a copy of its entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct TakenReceive {
    pub counter: u16,
    pub entry: [u8; MAX_RECV_WQE_LEN],
    pub len: usize,
}

impl ReceiveRing {
    pub(super) fn new(memory: QueueMemory, layout: QpLayout, entries: u32, stride: u32) -> Self {
        Self { memory, layout, entries, stride, consumer: 0 }
    }

    /// Begins anew, as if nothing had ever been posted.
    pub(super) fn reset(&mut self) {
        self.consumer = 0;
    }

    /// How many are posted and not taken.
    pub(super) fn waiting(&self) -> u32 {
        let dbrec =
            self.memory.bytes().load_u32(self.layout.dbrec + DoorbellRecord::RECEIVE as u64);
        let posted = u32::from_be(dbrec.unwrap_or(0)) as u16;
        let count = u32::from(posted.wrapping_sub(self.consumer));
        // More than there is room for is no count; nothing is there that could be trusted.
        if count <= self.entries { count } else { 0 }
    }

    /// Takes the next, if there is one.
    pub(super) fn take(&mut self) -> Option<TakenReceive> {
        if self.waiting() == 0 {
            return None;
        }
        let counter = self.consumer;
        let place = u32::from(counter) & (self.entries - 1);
        let mut taken =
            TakenReceive { counter, entry: [0; MAX_RECV_WQE_LEN], len: self.stride as usize };
        let at = self.layout.receive + u64::from(place) * u64::from(self.stride);
        let _ = self.memory.bytes().read(at, &mut taken.entry[..self.stride as usize]);
        self.consumer = self.consumer.wrapping_add(1);
        Some(taken)
    }
}

/// A shared receive queue: a list, linked through its entries.
#[derive(Debug)]
pub(super) struct SharedReceiveQueue {
    memory: QueueMemory,
    dbrec: u64,
    entries: u32,
    stride: u32,
    /// The slot that is taken next.
    head: u16,
    taken: u16,
    /// Slots that were taken and came back unused: they go first.
    returned: Vec<u16>,
}

impl SharedReceiveQueue {
    pub(super) fn new(memory: QueueMemory, dbrec: u64, entries: u32, stride: u32) -> Self {
        Self { memory, dbrec, entries, stride, head: 0, taken: 0, returned: Vec::new() }
    }

    /// How many are posted and not taken.
    pub(super) fn waiting(&self) -> u32 {
        let dbrec = self.memory.bytes().load_u32(self.dbrec).unwrap_or(0);
        let count = u32::from((u32::from_be(dbrec) as u16).wrapping_sub(self.taken));
        let listed = if count <= self.entries { count } else { 0 };
        listed + self.returned.len() as u32
    }

    /// A receive that was taken will not be used: it serves the next who takes one.
    pub(super) fn release(&mut self, slot: u16) {
        self.returned.push(slot);
    }

    /// Takes the next, if there is one.
    pub(super) fn take(&mut self) -> Option<TakenReceive> {
        if let Some(slot) = self.returned.pop() {
            return Some(self.entry(slot).0);
        }
        if self.waiting() == 0 {
            return None;
        }
        let (taken, next) = self.entry(self.head & (self.entries - 1) as u16);
        self.head = next;
        self.taken = self.taken.wrapping_add(1);
        Some(taken)
    }

    /// What lies in that slot, and which is the next.
    fn entry(&self, slot: u16) -> (TakenReceive, u16) {
        let mut header = [0; SEGMENT];
        let at = u64::from(slot) * u64::from(self.stride);
        let bytes = self.memory.bytes();
        let _ = bytes.read(at, &mut header);
        let len = (self.stride as usize - SEGMENT).min(MAX_RECV_WQE_LEN);
        let mut taken = TakenReceive { counter: slot, entry: [0; MAX_RECV_WQE_LEN], len };
        let _ = bytes.read(at + SEGMENT as u64, &mut taken.entry[..len]);
        (taken, u16::from_be_bytes([header[2], header[3]]))
    }
}
