//! What programs call their work, and how a completion leads back to it.
//!
//! libibverbs carries one number from a request to its completion, and of work that failed tells hardly more: not even
//! whether it was to be sent or received. So that number is ours, and says which queue it belongs to and where in a
//! ring of the program's own numbers to look. The same rings tell how full a queue is, whatever the provider counts,
//! and completions of queues that are gone or were reset lead nowhere.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use crate::error::{Error, Kind, Result};

/// How many requests are handed over in one call of the library's.
pub(super) const CHUNK: usize = 16;

/// Which queue a number belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Send = 0,
    Receive = 1,
    Shared = 2,
}

const SIDE_SHIFT: u32 = 62;
const INDEX_SHIFT: u32 = 42;
const INDEX_BITS: u32 = 20;
const GENERATION_SHIFT: u32 = 32;
const GENERATION_MASK: u32 = 0x3ff;

/// What a number says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Number {
    pub(super) side: Side,
    index: u32,
    generation: u32,
    counter: u32,
}

impl Number {
    fn encode(&self) -> u64 {
        (self.side as u64) << SIDE_SHIFT
            | u64::from(self.index) << INDEX_SHIFT
            | u64::from(self.generation) << GENERATION_SHIFT
            | u64::from(self.counter)
    }

    fn decode(word: u64) -> Option<Self> {
        let side = match word >> SIDE_SHIFT {
            0 => Side::Send,
            1 => Side::Receive,
            2 => Side::Shared,
            _ => return None,
        };
        Some(Self {
            side,
            index: (word >> INDEX_SHIFT) as u32 & ((1 << INDEX_BITS) - 1),
            generation: (word >> GENERATION_SHIFT) as u32 & GENERATION_MASK,
            counter: word as u32,
        })
    }
}

/// Which side work with that number is of.
pub(super) fn side_of(number: u64) -> Option<Side> {
    Number::decode(number).map(|number| number.side)
}

/// All numbers of the queue that this one is of.
pub(super) fn all_of_queue(number: u64) -> Range<u64> {
    let first = number & !u64::from(u32::MAX);
    first..first + (1 << 32)
}

/// Whether the first of two numbers of one queue was given before the other, or is the same. Counters go round.
pub(super) fn is_not_after(number: u64, other: u64) -> bool {
    (other as u32).wrapping_sub(number as u32) < 1 << 31
}

/// The rings of all queues of a device.
#[derive(Debug, Default)]
pub(super) struct Shelf(Mutex<Vec<Place>>);

#[derive(Debug, Default)]
struct Place {
    /// Of the next one here: numbers of the one before lead nowhere.
    generation: u32,
    book: Option<Arc<Book>>,
}

impl Shelf {
    /// Puts a new book on the shelf.
    fn add(&self, make: impl FnOnce(u32, u32) -> Book) -> Result<Arc<Book>> {
        let mut places = self.0.lock();
        let free = places.iter().position(|place| place.book.is_none()).unwrap_or(places.len());
        if free >= 1 << INDEX_BITS {
            return Err(Error::new(Kind::OutOfMemory, "make a queue")
                .why(format!("there are {} already", 1 << INDEX_BITS))
                .fix("end some of them, or open the device once more"));
        }
        if free == places.len() {
            places.push(Place::default());
        }
        let place = &mut places[free];
        let book = Arc::new(make(free as u32, place.generation));
        place.book = Some(book.clone());
        Ok(book)
    }

    pub(super) fn add_pair(&self, rooms: [u32; 2], with_receives: bool) -> Result<Arc<Book>> {
        self.add(|index, generation| {
            let receives = if with_receives { rooms[1] } else { 0 };
            Book {
                index,
                generation: generation.into(),
                send: Lane::new(rooms[0]),
                receive: Lane::new(receives),
                slots: Mutex::default(),
            }
        })
    }

    pub(super) fn add_shared(&self, room: u32) -> Result<Arc<Book>> {
        self.add(|index, generation| Book {
            index,
            generation: generation.into(),
            send: Lane::new(0),
            receive: Lane::new(0),
            slots: Mutex::new(Slots {
                ids: vec![0; room as usize].into(),
                free: (0..room).rev().collect(),
            }),
        })
    }

    /// Takes a book off the shelf: its queue is no more.
    pub(super) fn remove(&self, book: &Book) {
        if let Some(place) = self.0.lock().get_mut(book.index as usize) {
            place.generation = next_generation(book.generation.load(Ordering::Relaxed));
            place.book = None;
        }
    }

    /// Finds what several completions are about; the shelf stays as it is meanwhile.
    pub(super) fn reader(&self) -> Reader<'_> {
        Reader(self.0.lock())
    }
}

fn next_generation(generation: u32) -> u32 {
    generation.wrapping_add(1) & GENERATION_MASK
}

/// A look at the shelf.
pub(super) struct Reader<'a>(MutexGuard<'a, Vec<Place>>);

impl Reader<'_> {
    /// The work with that number has ended: which side it was of, and what the program called it. `None` if nobody
    /// wants to know any more.
    pub(super) fn ended(&self, number: u64) -> Option<(Side, u64)> {
        let number = Number::decode(number)?;
        let book = self.0.get(number.index as usize)?.book.as_deref()?;
        if book.generation.load(Ordering::Acquire) != number.generation {
            return None;
        }
        let id = match number.side {
            Side::Send => book.send.ended(number.counter)?,
            Side::Receive => book.receive.ended(number.counter)?,
            Side::Shared => book.slots.lock().ended(number.counter)?,
        };
        Some((number.side, id))
    }
}

/// The rings of a queue pair, or the slots of a shared receive queue.
#[derive(Debug)]
pub(super) struct Book {
    index: u32,
    generation: AtomicU32,
    pub(super) send: Lane,
    pub(super) receive: Lane,
    slots: Mutex<Slots>,
}

impl Book {
    /// The queues are empty again: what was posted before is forgotten.
    pub(super) fn reset(&self) {
        let (_send, _receive) = (self.send.only.lock(), self.receive.only.lock());
        let next = next_generation(self.generation.load(Ordering::Relaxed));
        self.generation.store(next, Ordering::Release);
        for lane in [&self.send, &self.receive] {
            lane.posted.store(0, Ordering::Relaxed);
            lane.ended.store(0, Ordering::Relaxed);
        }
    }

    /// All numbers that its work may have, until it is reset.
    pub(super) fn numbers(&self) -> [Range<u64>; 3] {
        let sides = [Side::Send, Side::Receive, Side::Shared];
        sides.map(|side| all_of_queue(self.stamp(side).encode()))
    }

    fn stamp(&self, side: Side) -> Number {
        let generation = self.generation.load(Ordering::Relaxed);
        Number { side, index: self.index, generation, counter: 0 }
    }

    /// Begins to name work of the send queue, which nobody else does meanwhile.
    pub(super) fn name_sends(&self) -> InOrder<'_> {
        self.send.begin(|| self.stamp(Side::Send))
    }

    /// The same, of receives.
    pub(super) fn name_receives(&self) -> InOrder<'_> {
        self.receive.begin(|| self.stamp(Side::Receive))
    }

    /// The same, of receives of a shared queue.
    pub(super) fn name_shared(&self) -> InSlots<'_> {
        let stamp = self.stamp(Side::Shared);
        InSlots { slots: self.slots.lock(), stamp, pending: [0; CHUNK], count: 0 }
    }
}

/// A queue whose work ends in its order.
#[derive(Debug)]
pub(super) struct Lane {
    only: Mutex<()>,
    /// What the program called the work, by its counter. A power of two, at least the queue's room.
    ids: Box<[AtomicU64]>,
    room: u64,
    posted: AtomicU64,
    ended: AtomicU64,
}

impl Lane {
    fn new(room: u32) -> Self {
        let len = if room == 0 { 0 } else { room.next_power_of_two() };
        Self {
            only: Mutex::new(()),
            ids: (0..len).map(|_| AtomicU64::new(0)).collect(),
            room: room.into(),
            posted: AtomicU64::new(0),
            ended: AtomicU64::new(0),
        }
    }

    fn begin(&self, stamp: impl FnOnce() -> Number) -> InOrder<'_> {
        let only = self.only.lock();
        let next = self.posted.load(Ordering::Relaxed);
        InOrder { lane: self, _only: only, stamp: stamp(), next }
    }

    /// That work has ended, and all before it.
    fn ended(&self, counter: u32) -> Option<u64> {
        let id = self.ids.get(counter as usize & self.ids.len().checked_sub(1)?)?;
        let id = id.load(Ordering::Relaxed);
        let ended = self.ended.load(Ordering::Relaxed);
        let ahead = counter.wrapping_sub(ended as u32);
        // One that another thread took later may have come first here: then it is counted.
        if ahead < 1 << 31 {
            self.ended.fetch_max(ended + u64::from(ahead) + 1, Ordering::AcqRel);
        }
        Some(id)
    }
}

/// Gives work its numbers, in the order in which it is posted.
pub(super) trait Naming {
    /// For how much work there is room.
    fn room(&self) -> usize;
    /// The number of the next work, which the program calls `id`. There must be room.
    fn name(&mut self, id: u64) -> u64;
    /// Of what was named since the last time, the first so many were posted.
    fn posted(&mut self, count: usize);
}

/// Names work that ends in its order.
#[derive(Debug)]
pub(super) struct InOrder<'a> {
    lane: &'a Lane,
    _only: MutexGuard<'a, ()>,
    stamp: Number,
    next: u64,
}

impl Naming for InOrder<'_> {
    #[inline]
    fn room(&self) -> usize {
        let used = self.next.saturating_sub(self.lane.ended.load(Ordering::Acquire));
        self.lane.room.saturating_sub(used) as usize
    }

    #[inline]
    fn name(&mut self, id: u64) -> u64 {
        let mask = self.lane.ids.len().wrapping_sub(1);
        if let Some(place) = self.lane.ids.get(self.next as usize & mask) {
            place.store(id, Ordering::Relaxed);
        }
        let counter = self.next as u32;
        self.next += 1;
        Number { counter, ..self.stamp }.encode()
    }

    #[inline]
    fn posted(&mut self, count: usize) {
        let before = self.lane.posted.load(Ordering::Relaxed);
        self.next = before + count as u64;
        self.lane.posted.store(self.next, Ordering::Release);
    }
}

/// Places of receives that whichever queue pair needs one takes: they end in any order.
#[derive(Debug, Default)]
struct Slots {
    ids: Box<[u64]>,
    free: Vec<u32>,
}

impl Slots {
    fn ended(&mut self, slot: u32) -> Option<u64> {
        let id = *self.ids.get(slot as usize)?;
        // Each is given back once: more than there are were not the device's doing.
        if self.free.len() < self.ids.len() {
            self.free.push(slot);
        }
        Some(id)
    }
}

/// Names receives of a shared queue.
pub(super) struct InSlots<'a> {
    slots: MutexGuard<'a, Slots>,
    stamp: Number,
    pending: [u32; CHUNK],
    count: usize,
}

impl Naming for InSlots<'_> {
    fn room(&self) -> usize {
        self.slots.free.len()
    }

    fn name(&mut self, id: u64) -> u64 {
        let slot = self.slots.free.pop().unwrap_or(u32::MAX);
        if let Some(place) = self.slots.ids.get_mut(slot as usize) {
            *place = id;
        }
        if let Some(place) = self.pending.get_mut(self.count) {
            *place = slot;
            self.count += 1;
        }
        Number { counter: slot, ..self.stamp }.encode()
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
    fn numbers_say_what_was_put_into_them() {
        for side in [Side::Send, Side::Receive, Side::Shared] {
            let number = Number { side, index: 0xf_abcd, generation: 0x3fe, counter: 0xffff_fff0 };
            assert_eq!(Number::decode(number.encode()), Some(number));
        }
        assert_eq!(Number::decode(u64::MAX), None);
    }

    #[test]
    fn numbers_of_a_queue_are_told_from_others() {
        let shelf = Shelf::default();
        let [one, two] = [(); 2].map(|()| shelf.add_pair([4, 4], true).unwrap());
        let first = one.name_sends().name(1);
        let other = two.name_sends().name(1);
        assert!(one.numbers().iter().any(|numbers| numbers.contains(&first)));
        assert!(!one.numbers().iter().any(|numbers| numbers.contains(&other)));
        assert!(all_of_queue(first).contains(&(first + 7)) && side_of(first) == Some(Side::Send));
        assert!(is_not_after(first, first) && is_not_after(first, first + 1));
        assert!(!is_not_after(first + 1, first));
        let last = all_of_queue(first).end - 1;
        assert!(is_not_after(last, first) && !is_not_after(first, last));
        let before = one.numbers();
        one.reset();
        assert!(one.numbers().iter().zip(&before).all(|(now, then)| now.start >= then.end));
    }

    #[test]
    fn work_is_found_by_its_number_and_makes_room_as_it_ends() {
        let shelf = Shelf::default();
        let book = shelf.add_pair([4, 2], true).unwrap();
        let mut naming = book.name_sends();
        let numbers: Vec<u64> = (10..14).map(|id| naming.name(id)).collect();
        assert_eq!(naming.room(), 0);
        naming.posted(4);
        drop(naming);
        // The third ends: the two before it made no completion, and are done.
        assert_eq!(shelf.reader().ended(numbers[2]), Some((Side::Send, 12)));
        assert_eq!(book.name_sends().room(), 3);
        assert_eq!(shelf.reader().ended(numbers[3]), Some((Side::Send, 13)));
        assert_eq!((book.name_sends().room(), book.name_receives().room()), (4, 2));
    }

    #[test]
    fn what_was_refused_keeps_no_room() {
        let shelf = Shelf::default();
        let book = shelf.add_pair([4, 4], true).unwrap();
        let mut naming = book.name_receives();
        for id in 0..3 {
            naming.name(id);
        }
        naming.posted(1);
        assert_eq!(naming.room(), 3);
        let again = naming.name(7);
        naming.posted(1);
        drop(naming);
        assert_eq!(shelf.reader().ended(again), Some((Side::Receive, 7)));
    }

    #[test]
    fn numbers_of_queues_that_were_reset_or_are_gone_lead_nowhere() {
        let shelf = Shelf::default();
        let book = shelf.add_pair([4, 4], true).unwrap();
        let mut naming = book.name_sends();
        let old = naming.name(1);
        naming.posted(1);
        drop(naming);
        book.reset();
        assert_eq!(shelf.reader().ended(old), None);
        assert_eq!(book.name_sends().room(), 4);
        let mut naming = book.name_sends();
        let new = naming.name(2);
        naming.posted(1);
        drop(naming);
        shelf.remove(&book);
        assert_eq!(shelf.reader().ended(new), None);
        // The next one in its place has a generation of its own.
        let heir = shelf.add_pair([4, 4], true).unwrap();
        assert_eq!(heir.index, book.index);
        assert_eq!(shelf.reader().ended(new), None);
        assert_eq!(shelf.reader().ended(u64::MAX), None);
    }

    #[test]
    fn shared_receives_end_in_any_order() {
        let shelf = Shelf::default();
        let book = shelf.add_shared(3).unwrap();
        let mut naming = book.name_shared();
        let numbers: Vec<u64> = (10..13).map(|id| naming.name(id)).collect();
        assert_eq!(naming.room(), 0);
        naming.posted(2);
        assert_eq!(naming.room(), 1);
        drop(naming);
        assert_eq!(shelf.reader().ended(numbers[1]), Some((Side::Shared, 11)));
        assert_eq!(shelf.reader().ended(numbers[0]), Some((Side::Shared, 10)));
        assert_eq!(book.name_shared().room(), 3);
    }

    #[test]
    fn counters_wrap() {
        let shelf = Shelf::default();
        let book = shelf.add_pair([4, 4], true).unwrap();
        for counter in [&book.send.posted, &book.send.ended] {
            counter.store(u64::from(u32::MAX) - 1, Ordering::Relaxed);
        }
        let mut naming = book.name_sends();
        let numbers: Vec<u64> = (0..4).map(|id| naming.name(id)).collect();
        naming.posted(4);
        drop(naming);
        for (id, number) in numbers.into_iter().enumerate() {
            assert_eq!(shelf.reader().ended(number), Some((Side::Send, id as u64)));
        }
        assert_eq!(book.name_sends().room(), 4);
    }
}
