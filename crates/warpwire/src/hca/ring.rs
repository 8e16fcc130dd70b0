//! The queues as the engine sees them: ring buffers in memory that a program, a stream or a kernel
//! fills or empties.
//!
//! Nothing read here is trusted: positions are taken modulo the ring, counts are bounded by it, and
//! WQEs are copied out before they are parsed.

use std::time::Duration;

use warpwire_proto::Instant;

use super::memory::QueueMemory;
use crate::mlx5::{
    BLUEFLAME_BUFFER_LEN, ControlSegment, Doorbell, DoorbellRecord, MAX_WQE_LEN, ProducerTracker,
    SEGMENT_LEN, WQEBB_LEN,
};

/// How long a WQE may be announced by a doorbell without being visible before it counts as torn. A
/// doorbell may overtake the WQE, and a writer may be preempted between the two halves of a
/// doorbell; neither takes that long, not even on a busy machine.
const WQE_ARRIVAL_TIMEOUT: Duration = Duration::from_millis(300);

/// How often an engine without other work looks for it.
pub(super) const WQE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Offsets of the parts of a queue pair in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpLayout {
    /// The receive queue.
    pub receive: u64,
    /// The send queue.
    pub send: u64,
    /// The doorbell record: two words.
    pub dbrec: u64,
    /// The doorbell: two BlueFlame buffers, 256 bytes apart, of which the first eight bytes are
    /// read.
    pub doorbell: u64,
}

/// A send queue, consumed by the engine.
#[derive(Debug)]
pub(super) struct SendRing {
    memory: QueueMemory,
    layout: QpLayout,
    wqebbs: u32,
    /// Index of the next WQEBB, without wrap-around; posters count its low 16 bits.
    consumer: u64,
    producer: ProducerTracker,
    /// The producer index in each doorbell buffer at the last refresh.
    halves: [u16; 2],
    producer_index: u16,
    /// Copies of WQEs at the time they were taken: a poster may overwrite the queue, work in
    /// progress must not change.
    copies: Box<[u8]>,
    /// Since when the next WQE has been missing.
    missing_since: Option<Instant>,
}

/// A WQE that was taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct TakenWqe {
    /// Index of its first WQEBB, without wrap-around.
    pub wqe_index: u64,
    pub control: ControlSegment,
    /// It never became visible, or is longer than what the doorbell announced.
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

    /// Restarts at index 0, as if nothing had been posted.
    pub(super) fn reset(&mut self) {
        (self.consumer, self.producer_index, self.missing_since) = (0, 0, None);
        self.halves = [0; 2];
        self.producer = ProducerTracker::starting_at(0);
    }

    /// Reads the doorbell and its record; returns whether there are WQEs to take.
    pub(super) fn refresh(&mut self) -> bool {
        let bytes = self.memory.bytes();
        let word = |at: u64| {
            // Fails only if the memory is gone: then nothing is posted.
            let raw = bytes.load_u64(self.layout.doorbell + at).unwrap_or(0);
            Doorbell::parse(raw.to_ne_bytes()).producer()
        };
        let dbrec = bytes.load_u32(self.layout.dbrec + DoorbellRecord::SEND as u64).unwrap_or(0);
        let dbrec = u32::from_be(dbrec) as u16;
        let consumer = self.consumer as u16;
        let halves = [word(0), word(BLUEFLAME_BUFFER_LEN as u64)];
        // A doorbell buffer counts only when it changes: an unused one would look new once per lap.
        let [first, second] = std::mem::replace(&mut self.halves, halves);
        let changed = (halves[0] != first).then_some(halves[0]);
        self.producer_index = self.producer.refresh(consumer, self.wqebbs, changed, dbrec);
        if halves[1] != second {
            let changed = Some(halves[1]);
            self.producer_index = self.producer.refresh(consumer, self.wqebbs, changed, dbrec);
        }
        self.producer_index != consumer
    }

    /// Takes the next WQE, if the doorbell announced one and it is visible.
    pub(super) fn take(&mut self, now: Instant) -> Option<TakenWqe> {
        let index = self.consumer as u16;
        let available = self.producer_index.wrapping_sub(index);
        if available == 0 {
            return None;
        }
        // Read once: what is executed must be what was checked, even if the queue changes
        // meanwhile.
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
        let len = usize::from(control.segments) * SEGMENT_LEN;
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

    /// The copy of a WQE that was taken and is in progress, followed by unrelated bytes.
    pub(super) fn copy(&self, wqe_index: u64) -> &[u8] {
        let at = self.copy_at(wqe_index);
        &self.copies[at..at + MAX_WQE_LEN]
    }

    /// Whether the next WQE has been missing for too long.
    fn missing_expired(&mut self, now: Instant) -> bool {
        let since = *self.missing_since.get_or_insert(now);
        now - since >= WQE_ARRIVAL_TIMEOUT
    }

    /// Whether an announced WQE is missing, so that the queue must be checked again soon.
    pub(super) fn is_wqe_missing(&self) -> bool {
        self.missing_since.is_some()
    }

    /// Whether the WQE with this index would be the next: nothing posted before is pending.
    pub(super) fn is_at(&self, wqe_index: u64) -> bool {
        self.consumer == wqe_index && self.producer_index == wqe_index as u16
    }

    /// Skips the next WQEBB, whose work was handed over without a WQE.
    pub(super) fn skip_one(&mut self) {
        self.consumer += 1;
        self.producer_index = self.consumer as u16;
        self.producer.skip_to(self.producer_index);
    }

    /// Restarts the timeout at the next check, which has the current time.
    pub(super) fn reset_missing(&mut self) {
        self.missing_since = None;
    }

    fn copy_at(&self, wqe_index: u64) -> usize {
        (wqe_index as usize & (self.wqebbs as usize - 1)) * WQEBB_LEN
    }
}

/// Copies from the queue at `start`, from byte `at` of it, wrapping around at its end.
#[inline]
fn copy_wrapping(memory: &QueueMemory, start: u64, wqebbs: u32, at: usize, into: &mut [u8]) {
    let until_wrap = (wqebbs as usize * WQEBB_LEN - at).min(into.len());
    let (head, tail) = into.split_at_mut(until_wrap);
    let bytes = memory.bytes();
    // Fails only if the memory is gone; what `into` had is then rejected as a WQE.
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

/// Maximum length of a receive WQE in bytes; further segments are ignored.
pub(super) const MAX_RECV_WQE_LEN: usize = 16 * SEGMENT_LEN;

/// A receive that was taken: its index, and a copy of its WQE.
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

    /// Restarts at index 0, as if nothing had been posted.
    pub(super) fn reset(&mut self) {
        self.consumer = 0;
    }

    /// Receives posted and not taken.
    pub(super) fn waiting(&self) -> u32 {
        let dbrec =
            self.memory.bytes().load_u32(self.layout.dbrec + DoorbellRecord::RECEIVE as u64);
        let posted = u32::from_be(dbrec.unwrap_or(0)) as u16;
        let count = u32::from(posted.wrapping_sub(self.consumer));
        // A count beyond the capacity is invalid, so nothing behind it can be trusted.
        if count <= self.entries { count } else { 0 }
    }

    /// Takes the next receive, if there is one.
    pub(super) fn take(&mut self) -> Option<TakenReceive> {
        if self.waiting() == 0 {
            return None;
        }
        let counter = self.consumer;
        let slot = u32::from(counter) & (self.entries - 1);
        let mut taken =
            TakenReceive { counter, entry: [0; MAX_RECV_WQE_LEN], len: self.stride as usize };
        let at = self.layout.receive + u64::from(slot) * u64::from(self.stride);
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
    /// The entry to be taken next.
    head: u16,
    taken: u16,
    /// Entries that were taken and returned unused; they are taken first.
    returned: Vec<u16>,
}

impl SharedReceiveQueue {
    pub(super) fn new(memory: QueueMemory, dbrec: u64, entries: u32, stride: u32) -> Self {
        Self { memory, dbrec, entries, stride, head: 0, taken: 0, returned: Vec::new() }
    }

    /// Receives posted and not taken.
    pub(super) fn waiting(&self) -> u32 {
        let dbrec = self.memory.bytes().load_u32(self.dbrec).unwrap_or(0);
        let count = u32::from((u32::from_be(dbrec) as u16).wrapping_sub(self.taken));
        let listed = if count <= self.entries { count } else { 0 };
        listed + self.returned.len() as u32
    }

    /// Returns a receive that was taken and not used.
    pub(super) fn release(&mut self, slot: u16) {
        self.returned.push(slot);
    }

    /// Takes the next receive, if there is one.
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

    /// A copy of an entry, and the index of the next one.
    fn entry(&self, slot: u16) -> (TakenReceive, u16) {
        let mut header = [0; SEGMENT_LEN];
        let at = u64::from(slot) * u64::from(self.stride);
        let bytes = self.memory.bytes();
        let _ = bytes.read(at, &mut header);
        let len = (self.stride as usize - SEGMENT_LEN).min(MAX_RECV_WQE_LEN);
        let mut taken = TakenReceive { counter: slot, entry: [0; MAX_RECV_WQE_LEN], len };
        let _ = bytes.read(at + SEGMENT_LEN as u64, &mut taken.entry[..len]);
        (taken, u16::from_be_bytes([header[2], header[3]]))
    }
}
