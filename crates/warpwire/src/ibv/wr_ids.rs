//! Work request ids: the mapping between the program's ids and those of the library.
//!
//! libibverbs carries one 64-bit id from a request to its completion, and failed completions have
//! little else: not even whether it was a send or a receive. So the library is given ids of our
//! own, which name the queue, a generation counter and an index into a ring of the program's ids:
//!
//! | bits | field |
//! |---|---|
//! | 62–63 | [`WrQueue`] |
//! | 42–61 | index of the queue in the [`WrIdRegistry`] |
//! | 32–41 | generation |
//! | 0–31 | counter within the queue, or SRQ slot |
//!
//! The rings also tell how full a queue is, independently of the provider. Ids of queues that were
//! reset or destroyed do not resolve, because their generation differs.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use crate::error::{Error, Kind, Result};

/// Maximum number of requests per library call.
pub(super) const CHUNK: usize = 16;

/// The queue that an id belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WrQueue {
    Send = 0,
    Receive = 1,
    Srq = 2,
}

const QUEUE_SHIFT: u32 = 62;
const INDEX_SHIFT: u32 = 42;
const INDEX_BITS: u32 = 20;
const GENERATION_SHIFT: u32 = 32;
const GENERATION_MASK: u32 = 0x3ff;

/// A decoded id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WrTag {
    pub(super) queue: WrQueue,
    index: u32,
    generation: u32,
    counter: u32,
}

impl WrTag {
    fn encode(&self) -> u64 {
        (self.queue as u64) << QUEUE_SHIFT
            | u64::from(self.index) << INDEX_SHIFT
            | u64::from(self.generation) << GENERATION_SHIFT
            | u64::from(self.counter)
    }

    fn decode(word: u64) -> Option<Self> {
        let queue = match word >> QUEUE_SHIFT {
            0 => WrQueue::Send,
            1 => WrQueue::Receive,
            2 => WrQueue::Srq,
            _ => return None,
        };
        Some(Self {
            queue,
            index: (word >> INDEX_SHIFT) as u32 & ((1 << INDEX_BITS) - 1),
            generation: (word >> GENERATION_SHIFT) as u32 & GENERATION_MASK,
            counter: word as u32,
        })
    }
}

/// The queue of an id; `None` if it is not one of ours.
pub(super) fn queue_of(wr_id: u64) -> Option<WrQueue> {
    WrTag::decode(wr_id).map(|wr_id| wr_id.queue)
}

/// All ids of the queue that this one belongs to.
pub(super) fn queue_wr_ids(wr_id: u64) -> Range<u64> {
    let first = wr_id & !u64::from(u32::MAX);
    first..first + (1 << 32)
}

/// Whether `wr_id` was assigned before `other`, or is the same id. The 32-bit counters wrap.
pub(super) fn is_at_or_before(wr_id: u64, other: u64) -> bool {
    (other as u32).wrapping_sub(wr_id as u32) < 1 << 31
}

/// Id tables of all queues of a device.
#[derive(Debug, Default)]
pub(super) struct WrIdRegistry(Mutex<Vec<RegistrySlot>>);

#[derive(Debug, Default)]
struct RegistrySlot {
    /// Generation of the next queue in this slot: ids of earlier ones do not resolve.
    generation: u32,
    queue_entry: Option<Arc<QueueEntry>>,
}

impl WrIdRegistry {
    /// Registers a queue.
    fn add(&self, create: impl FnOnce(u32, u32) -> QueueEntry) -> Result<Arc<QueueEntry>> {
        let mut entries = self.0.lock();
        let free =
            entries.iter().position(|entry| entry.queue_entry.is_none()).unwrap_or(entries.len());
        if free >= 1 << INDEX_BITS {
            return Err(Error::new(Kind::OutOfMemory, "create a queue")
                .why(format!("the context has {} queues already", 1 << INDEX_BITS))
                .fix("destroy some of them, or open the device again"));
        }
        if free == entries.len() {
            entries.push(RegistrySlot::default());
        }
        let entry = &mut entries[free];
        let queue_entry = Arc::new(create(free as u32, entry.generation));
        entry.queue_entry = Some(queue_entry.clone());
        Ok(queue_entry)
    }

    pub(super) fn add_qp(
        &self,
        capacities: [u32; 2],
        with_receives: bool,
    ) -> Result<Arc<QueueEntry>> {
        self.add(|index, generation| {
            let receives = if with_receives { capacities[1] } else { 0 };
            QueueEntry {
                index,
                generation: generation.into(),
                send: WrIdRing::new(capacities[0]),
                receive: WrIdRing::new(receives),
                slots: Mutex::default(),
            }
        })
    }

    pub(super) fn add_srq(&self, room: u32) -> Result<Arc<QueueEntry>> {
        self.add(|index, generation| QueueEntry {
            index,
            generation: generation.into(),
            send: WrIdRing::new(0),
            receive: WrIdRing::new(0),
            slots: Mutex::new(Slots {
                wr_ids: vec![0; room as usize].into(),
                free: (0..room).rev().collect(),
            }),
        })
    }

    /// Unregisters a queue.
    pub(super) fn remove(&self, queue_entry: &QueueEntry) {
        if let Some(entry) = self.0.lock().get_mut(queue_entry.index as usize) {
            entry.generation = next_generation(queue_entry.generation.load(Ordering::Relaxed));
            entry.queue_entry = None;
        }
    }

    /// Locks the registry, to resolve several completions.
    pub(super) fn reader(&self) -> Reader<'_> {
        Reader(self.0.lock())
    }
}

fn next_generation(generation: u32) -> u32 {
    generation.wrapping_add(1) & GENERATION_MASK
}

/// The locked registry.
pub(super) struct Reader<'a>(MutexGuard<'a, Vec<RegistrySlot>>);

impl Reader<'_> {
    /// Resolves the id of completed work: its queue, and the program's id. Frees its entry. `None`
    /// if the queue was reset or destroyed.
    pub(super) fn completed(&self, wr_id: u64) -> Option<(WrQueue, u64)> {
        let wr_id = WrTag::decode(wr_id)?;
        let queue_entry = self.0.get(wr_id.index as usize)?.queue_entry.as_deref()?;
        if queue_entry.generation.load(Ordering::Acquire) != wr_id.generation {
            return None;
        }
        let id = match wr_id.queue {
            WrQueue::Send => queue_entry.send.completed(wr_id.counter)?,
            WrQueue::Receive => queue_entry.receive.completed(wr_id.counter)?,
            WrQueue::Srq => queue_entry.slots.lock().completed(wr_id.counter)?,
        };
        Some((wr_id.queue, id))
    }
}

/// Ids of a queue pair's rings, or of a shared receive queue's slots.
#[derive(Debug)]
pub(super) struct QueueEntry {
    index: u32,
    generation: AtomicU32,
    pub(super) send: WrIdRing,
    pub(super) receive: WrIdRing,
    slots: Mutex<Slots>,
}

impl QueueEntry {
    /// Empties the rings and starts a new generation.
    pub(super) fn reset(&self) {
        let (_send, _receive) = (self.send.post_lock.lock(), self.receive.post_lock.lock());
        let next = next_generation(self.generation.load(Ordering::Relaxed));
        self.generation.store(next, Ordering::Release);
        for ring in [&self.send, &self.receive] {
            ring.posted.store(0, Ordering::Relaxed);
            ring.completed.store(0, Ordering::Relaxed);
        }
    }

    /// All ids of the current generation, per queue.
    pub(super) fn wr_ids(&self) -> [Range<u64>; 3] {
        let queues = [WrQueue::Send, WrQueue::Receive, WrQueue::Srq];
        queues.map(|queue| queue_wr_ids(self.tag(queue).encode()))
    }

    fn tag(&self, queue: WrQueue) -> WrTag {
        let generation = self.generation.load(Ordering::Relaxed);
        WrTag { queue, index: self.index, generation, counter: 0 }
    }

    /// Locks the send queue, to assign ids.
    pub(super) fn alloc_send(&self) -> RingAllocator<'_> {
        self.send.begin(|| self.tag(WrQueue::Send))
    }

    /// The same for receives.
    pub(super) fn alloc_receive(&self) -> RingAllocator<'_> {
        self.receive.begin(|| self.tag(WrQueue::Receive))
    }

    /// The same for receives of a shared receive queue.
    pub(super) fn alloc_srq(&self) -> SlotAllocator<'_> {
        let tag = self.tag(WrQueue::Srq);
        SlotAllocator { slots: self.slots.lock(), tag, pending: [0; CHUNK], count: 0 }
    }
}

/// Ids of a queue whose work completes in order.
#[derive(Debug)]
pub(super) struct WrIdRing {
    post_lock: Mutex<()>,
    /// The program's ids, by counter. Length: a power of two, at least `room`.
    wr_ids: Box<[AtomicU64]>,
    room: u64,
    posted: AtomicU64,
    completed: AtomicU64,
}

impl WrIdRing {
    fn new(room: u32) -> Self {
        let len = if room == 0 { 0 } else { room.next_power_of_two() };
        Self {
            post_lock: Mutex::new(()),
            wr_ids: (0..len).map(|_| AtomicU64::new(0)).collect(),
            room: room.into(),
            posted: AtomicU64::new(0),
            completed: AtomicU64::new(0),
        }
    }

    fn begin(&self, tag: impl FnOnce() -> WrTag) -> RingAllocator<'_> {
        let post_lock = self.post_lock.lock();
        let next = self.posted.load(Ordering::Relaxed);
        RingAllocator { ring: self, _guard: post_lock, tag: tag(), next }
    }

    /// Completes this work and all before it.
    fn completed(&self, counter: u32) -> Option<u64> {
        let id = self.wr_ids.get(counter as usize & self.wr_ids.len().checked_sub(1)?)?;
        let id = id.load(Ordering::Relaxed);
        let completed = self.completed.load(Ordering::Relaxed);
        let ahead = counter.wrapping_sub(completed as u32);
        // Another thread may have resolved a later completion first, which counted this one.
        if ahead < 1 << 31 {
            self.completed.fetch_max(completed + u64::from(ahead) + 1, Ordering::AcqRel);
        }
        Some(id)
    }
}

/// Assigns ids, in posting order.
pub(super) trait WrIdAllocator {
    /// Number of requests that the queue has room for.
    fn room(&self) -> usize;
    /// Assigns an id to the next request, for the program's id `id`. There must be room.
    fn assign(&mut self, id: u64) -> u64;
    /// Of the ids assigned since the last call, the first `count` were posted; the rest are freed.
    fn posted(&mut self, count: usize);
}

/// Assigns ids of a queue whose work completes in order.
#[derive(Debug)]
pub(super) struct RingAllocator<'a> {
    ring: &'a WrIdRing,
    _guard: MutexGuard<'a, ()>,
    tag: WrTag,
    next: u64,
}

impl WrIdAllocator for RingAllocator<'_> {
    #[inline]
    fn room(&self) -> usize {
        let used = self.next.saturating_sub(self.ring.completed.load(Ordering::Acquire));
        self.ring.room.saturating_sub(used) as usize
    }

    #[inline]
    fn assign(&mut self, id: u64) -> u64 {
        let mask = self.ring.wr_ids.len().wrapping_sub(1);
        if let Some(entry) = self.ring.wr_ids.get(self.next as usize & mask) {
            entry.store(id, Ordering::Relaxed);
        }
        let counter = self.next as u32;
        self.next += 1;
        WrTag { counter, ..self.tag }.encode()
    }

    #[inline]
    fn posted(&mut self, count: usize) {
        let before = self.ring.posted.load(Ordering::Relaxed);
        self.next = before + count as u64;
        self.ring.posted.store(self.next, Ordering::Release);
    }
}

/// Ids of a shared receive queue, whose receives complete in any order.
#[derive(Debug, Default)]
struct Slots {
    wr_ids: Box<[u64]>,
    free: Vec<u32>,
}

impl Slots {
    fn completed(&mut self, slot: u32) -> Option<u64> {
        let id = *self.wr_ids.get(slot as usize)?;
        // The device completes each receive once; surplus completions are ignored.
        if self.free.len() < self.wr_ids.len() {
            self.free.push(slot);
        }
        Some(id)
    }
}

/// Assigns ids of a shared receive queue.
pub(super) struct SlotAllocator<'a> {
    slots: MutexGuard<'a, Slots>,
    tag: WrTag,
    pending: [u32; CHUNK],
    count: usize,
}

impl WrIdAllocator for SlotAllocator<'_> {
    fn room(&self) -> usize {
        self.slots.free.len()
    }

    fn assign(&mut self, id: u64) -> u64 {
        let slot = self.slots.free.pop().unwrap_or(u32::MAX);
        if let Some(entry) = self.slots.wr_ids.get_mut(slot as usize) {
            *entry = id;
        }
        if let Some(entry) = self.pending.get_mut(self.count) {
            *entry = slot;
            self.count += 1;
        }
        WrTag { counter: slot, ..self.tag }.encode()
    }

    fn posted(&mut self, count: usize) {
        for at in (count..self.count).rev() {
            let slot = self.pending[at];
            self.slots.free.push(slot);
        }
        self.count = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wr_tag_round_trips() {
        for queue in [WrQueue::Send, WrQueue::Receive, WrQueue::Srq] {
            let wr_id = WrTag { queue, index: 0xf_abcd, generation: 0x3fe, counter: 0xffff_fff0 };
            assert_eq!(WrTag::decode(wr_id.encode()), Some(wr_id));
        }
        assert_eq!(WrTag::decode(u64::MAX), None);
    }

    #[test]
    fn wr_ids_identify_their_queue() {
        let registry = WrIdRegistry::default();
        let [one, two] = [(); 2].map(|()| registry.add_qp([4, 4], true).unwrap());
        let first = one.alloc_send().assign(1);
        let other = two.alloc_send().assign(1);
        assert!(one.wr_ids().iter().any(|wr_ids| wr_ids.contains(&first)));
        assert!(!one.wr_ids().iter().any(|wr_ids| wr_ids.contains(&other)));
        assert!(
            queue_wr_ids(first).contains(&(first + 7)) && queue_of(first) == Some(WrQueue::Send)
        );
        assert!(is_at_or_before(first, first) && is_at_or_before(first, first + 1));
        assert!(!is_at_or_before(first + 1, first));
        let last = queue_wr_ids(first).end - 1;
        assert!(is_at_or_before(last, first) && !is_at_or_before(first, last));
        let before = one.wr_ids();
        one.reset();
        assert!(one.wr_ids().iter().zip(&before).all(|(now, then)| now.start >= then.end));
    }

    #[test]
    fn completed_wr_ids_free_their_entries() {
        let registry = WrIdRegistry::default();
        let queue_entry = registry.add_qp([4, 2], true).unwrap();
        let mut allocator = queue_entry.alloc_send();
        let wr_ids: Vec<u64> = (10..14).map(|id| allocator.assign(id)).collect();
        assert_eq!(allocator.room(), 0);
        allocator.posted(4);
        drop(allocator);
        // The third completes: the two before it were unsignaled, and are complete too.
        assert_eq!(registry.reader().completed(wr_ids[2]), Some((WrQueue::Send, 12)));
        assert_eq!(queue_entry.alloc_send().room(), 3);
        assert_eq!(registry.reader().completed(wr_ids[3]), Some((WrQueue::Send, 13)));
        assert_eq!((queue_entry.alloc_send().room(), queue_entry.alloc_receive().room()), (4, 2));
    }

    #[test]
    fn rejected_requests_release_their_entries() {
        let registry = WrIdRegistry::default();
        let queue_entry = registry.add_qp([4, 4], true).unwrap();
        let mut allocator = queue_entry.alloc_receive();
        for id in 0..3 {
            allocator.assign(id);
        }
        allocator.posted(1);
        assert_eq!(allocator.room(), 3);
        let again = allocator.assign(7);
        allocator.posted(1);
        drop(allocator);
        assert_eq!(registry.reader().completed(again), Some((WrQueue::Receive, 7)));
    }

    #[test]
    fn wr_ids_of_reset_or_removed_queues_are_rejected() {
        let registry = WrIdRegistry::default();
        let queue_entry = registry.add_qp([4, 4], true).unwrap();
        let mut allocator = queue_entry.alloc_send();
        let old = allocator.assign(1);
        allocator.posted(1);
        drop(allocator);
        queue_entry.reset();
        assert_eq!(registry.reader().completed(old), None);
        assert_eq!(queue_entry.alloc_send().room(), 4);
        let mut allocator = queue_entry.alloc_send();
        let new = allocator.assign(2);
        allocator.posted(1);
        drop(allocator);
        registry.remove(&queue_entry);
        assert_eq!(registry.reader().completed(new), None);
        // The next queue in the same slot has another generation.
        let successor = registry.add_qp([4, 4], true).unwrap();
        assert_eq!(successor.index, queue_entry.index);
        assert_eq!(registry.reader().completed(new), None);
        assert_eq!(registry.reader().completed(u64::MAX), None);
    }

    #[test]
    fn shared_receives_complete_in_any_order() {
        let registry = WrIdRegistry::default();
        let queue_entry = registry.add_srq(3).unwrap();
        let mut allocator = queue_entry.alloc_srq();
        let wr_ids: Vec<u64> = (10..13).map(|id| allocator.assign(id)).collect();
        assert_eq!(allocator.room(), 0);
        allocator.posted(2);
        assert_eq!(allocator.room(), 1);
        drop(allocator);
        assert_eq!(registry.reader().completed(wr_ids[1]), Some((WrQueue::Srq, 11)));
        assert_eq!(registry.reader().completed(wr_ids[0]), Some((WrQueue::Srq, 10)));
        assert_eq!(queue_entry.alloc_srq().room(), 3);
    }

    #[test]
    fn counters_wrap() {
        let registry = WrIdRegistry::default();
        let queue_entry = registry.add_qp([4, 4], true).unwrap();
        for counter in [&queue_entry.send.posted, &queue_entry.send.completed] {
            counter.store(u64::from(u32::MAX) - 1, Ordering::Relaxed);
        }
        let mut allocator = queue_entry.alloc_send();
        let wr_ids: Vec<u64> = (0..4).map(|id| allocator.assign(id)).collect();
        allocator.posted(4);
        drop(allocator);
        for (id, wr_id) in wr_ids.into_iter().enumerate() {
            assert_eq!(registry.reader().completed(wr_id), Some((WrQueue::Send, id as u64)));
        }
        assert_eq!(queue_entry.alloc_send().room(), 4);
    }
}
