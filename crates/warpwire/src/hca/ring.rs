//! The queues as the engine sees them: rings in memory that somebody else fills or empties.
//!
//! Nothing that is read here is trusted: positions are taken modulo the ring, counts are bounded by it, and entries
//! are copied out before they are looked at.

use std::time::Duration;

use warpwire_proto::Instant;

use super::memory::QueueMemory;
use crate::mlx5::{
    BLOCK, Control, Doorbell, LARGEST_WQE, Producer, Record, SEGMENT, SEND_DOORBELL_OTHER_HALF,
};

/// How long an entry may be promised by a doorbell and not be there, before it counts as wrong. Doorbells may
/// overtake what they tell of, and whoever stores one in two halves may lose his turn in between; not for that long.
pub(super) const NOT_THERE_YET: Duration = Duration::from_millis(20);

/// Where the parts of a queue pair lie in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The receive queue.
    pub receive: u64,
    /// The send queue.
    pub send: u64,
    /// The doorbell record: two words.
    pub record: u64,
    /// The doorbell: eight bytes, and eight more 256 bytes behind.
    pub doorbell: u64,
}

/// A send queue, consumed by the engine.
#[derive(Debug)]
pub(super) struct SendRing {
    memory: QueueMemory,
    layout: Layout,
    blocks: u32,
    /// The block that is consumed next, counted without end; its low 16 bits are what writers count.
    consumer: u64,
    producer: Producer,
    /// What either half of the doorbell said when it was last looked at.
    halves: [u16; 2],
    until: u16,
    /// Entries as they were when they were taken: the queue may change, they must not.
    copies: Box<[u8]>,
    /// Since when the next entry has been missing.
    missing_since: Option<Instant>,
}

/// An entry that was taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    /// Its first block, counted without end.
    pub block: u64,
    pub control: Control,
    /// It never appeared, or is longer than the queue says.
    pub torn: bool,
}

impl SendRing {
    pub(super) fn new(memory: QueueMemory, layout: Layout, blocks: u32) -> Self {
        let bytes = blocks as usize * BLOCK + LARGEST_WQE;
        Self {
            memory,
            layout,
            blocks,
            consumer: 0,
            producer: Producer::starting_at(0),
            halves: [0; 2],
            until: 0,
            copies: vec![0; bytes].into(),
            missing_since: None,
        }
    }

    /// Begins anew, as if nothing had ever been posted.
    pub(super) fn reset(&mut self) {
        (self.consumer, self.until, self.missing_since) = (0, 0, None);
        self.halves = [0; 2];
        self.producer = Producer::starting_at(0);
    }

    /// Looks at the doorbell and its record; tells whether there are entries to take.
    pub(super) fn look(&mut self) -> bool {
        let bytes = self.memory.bytes();
        let word = |at: u64| {
            // Out of range only if the memory went away: nothing is there then.
            let raw = bytes.load_u64(self.layout.doorbell + at).unwrap_or(0);
            Doorbell::parse(raw.to_ne_bytes()).producer()
        };
        let record = bytes.load_u32(self.layout.record + Record::SEND as u64).unwrap_or(0);
        let record = u32::from_be(record) as u16;
        let consumer = self.consumer as u16;
        let halves = [word(0), word(SEND_DOORBELL_OTHER_HALF as u64)];
        // Each half speaks only when it changes: one that nobody rings would look like news once a lap.
        let [first, second] = std::mem::replace(&mut self.halves, halves);
        let news = (halves[0] != first).then_some(halves[0]);
        self.until = self.producer.look(consumer, self.blocks, news, record);
        if halves[1] != second {
            let news = Some(halves[1]);
            self.until = self.producer.look(consumer, self.blocks, news, record);
        }
        self.until != consumer
    }

    /// Takes the next entry, if the doorbell promised one and it is there.
    pub(super) fn take(&mut self, now: Instant) -> Option<Taken> {
        let index = self.consumer as u16;
        let promised = self.until.wrapping_sub(index);
        if promised == 0 {
            return None;
        }
        // Read once: what is obeyed must be what was looked at, whatever the queue says by now.
        let mut first = [0; BLOCK];
        let at = self.copy_at(self.consumer);
        copy_out(&self.memory, self.layout.send, self.blocks, at, &mut first);
        let control = Control::parse(first.first_chunk()?);
        let there = control.is_at(index) && control.blocks() <= promised;
        if !there && !self.has_waited(now) {
            return None;
        }
        self.missing_since = None;
        let block = self.consumer;
        let blocks = control.blocks().min(promised);
        let len = usize::from(control.segments) * SEGMENT;
        if len <= LARGEST_WQE && there {
            let Self { memory, layout, blocks, copies, .. } = self;
            let (near, far) = copies[at..at + len].split_at_mut(len.min(BLOCK));
            near.copy_from_slice(&first[..near.len()]);
            if !far.is_empty() {
                let next = (at + BLOCK) % (*blocks as usize * BLOCK);
                copy_out(memory, layout.send, *blocks, next, far);
            }
        }
        self.consumer += u64::from(blocks);
        Some(Taken { block, control, torn: !there })
    }

    /// The copy of an entry that was taken and is not done, with whatever lies behind it.
    pub(super) fn copy(&self, block: u64) -> &[u8] {
        let at = self.copy_at(block);
        &self.copies[at..at + LARGEST_WQE]
    }

    /// Whether the next entry has been missing for too long.
    fn has_waited(&mut self, now: Instant) -> bool {
        let since = *self.missing_since.get_or_insert(now);
        now - since >= NOT_THERE_YET
    }

    /// Whether a promised entry is missing: somebody must look again soon.
    pub(super) fn is_waiting(&self) -> bool {
        self.missing_since.is_some()
    }

    /// Whether the entry of this number would be the next: nothing that was posted before waits.
    pub(super) fn is_at(&self, block: u64) -> bool {
        self.consumer == block && self.until == block as u16
    }

    /// Passes over the next block, whose work was handed over without an entry.
    pub(super) fn pass(&mut self) {
        self.consumer += 1;
        self.until = self.consumer as u16;
        self.producer.pass_to(self.until);
    }

    /// Begins to wait anew at the next look, whose time is the right one.
    pub(super) fn forget_waiting(&mut self) {
        self.missing_since = None;
    }

    fn copy_at(&self, block: u64) -> usize {
        (block as usize & (self.blocks as usize - 1)) * BLOCK
    }
}

/// Copies from the queue at `start`, `at` bytes into it, going on at its beginning where it ends.
#[inline]
fn copy_out(memory: &QueueMemory, start: u64, blocks: u32, at: usize, into: &mut [u8]) {
    let before_end = (blocks as usize * BLOCK - at).min(into.len());
    let (head, tail) = into.split_at_mut(before_end);
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
    layout: Layout,
    entries: u32,
    stride: u32,
    consumer: u16,
}

/// The longest entry of a receive queue: more ranges than that are not taken.
pub(super) const LONGEST_RECEIVE: usize = 16 * SEGMENT;

/// A receive that was taken: its number, and a copy of its entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct TakenReceive {
    pub counter: u16,
    pub entry: [u8; LONGEST_RECEIVE],
    pub len: usize,
}

impl ReceiveRing {
    pub(super) fn new(memory: QueueMemory, layout: Layout, entries: u32, stride: u32) -> Self {
        Self { memory, layout, entries, stride, consumer: 0 }
    }

    /// Begins anew, as if nothing had ever been posted.
    pub(super) fn reset(&mut self) {
        self.consumer = 0;
    }

    /// How many are posted and not taken.
    pub(super) fn waiting(&self) -> u32 {
        let record = self.memory.bytes().load_u32(self.layout.record + Record::RECEIVE as u64);
        let posted = u32::from_be(record.unwrap_or(0)) as u16;
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
            TakenReceive { counter, entry: [0; LONGEST_RECEIVE], len: self.stride as usize };
        let at = self.layout.receive + u64::from(place) * u64::from(self.stride);
        let _ = self.memory.bytes().read(at, &mut taken.entry[..self.stride as usize]);
        self.consumer = self.consumer.wrapping_add(1);
        Some(taken)
    }
}

/// A shared receive queue: a list, linked through its entries.
#[derive(Debug)]
pub(super) struct SharedRing {
    memory: QueueMemory,
    record: u64,
    entries: u32,
    stride: u32,
    /// The slot that is taken next.
    head: u16,
    taken: u16,
    /// Slots that were taken and came back unused: they go first.
    returned: Vec<u16>,
}

impl SharedRing {
    pub(super) fn new(memory: QueueMemory, record: u64, entries: u32, stride: u32) -> Self {
        Self { memory, record, entries, stride, head: 0, taken: 0, returned: Vec::new() }
    }

    /// How many are posted and not taken.
    pub(super) fn waiting(&self) -> u32 {
        let record = self.memory.bytes().load_u32(self.record).unwrap_or(0);
        let count = u32::from((u32::from_be(record) as u16).wrapping_sub(self.taken));
        let listed = if count <= self.entries { count } else { 0 };
        listed + self.returned.len() as u32
    }

    /// A receive that was taken will not be used: it serves the next who takes one.
    pub(super) fn give_back(&mut self, slot: u16) {
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
        let len = (self.stride as usize - SEGMENT).min(LONGEST_RECEIVE);
        let mut taken = TakenReceive { counter: slot, entry: [0; LONGEST_RECEIVE], len };
        let _ = bytes.read(at + SEGMENT as u64, &mut taken.entry[..len]);
        (taken, u16::from_be_bytes([header[2], header[3]]))
    }
}
