//! Who waits for which completion, and how the CPU knows how far they are.
//!
//! A stream that comes to a wait writes a word before it, and another after it. The first lets the watchdog count from
//! when the stream came; the second lets the CPU give the completion's place back to the device only when nobody looks
//! at it any more. Where the stream rings the same queue pair just before or just after, the word of that ring says as
//! much, and no other is written.

use std::time::Instant;

use super::doorbells::DoorbellWords;
use super::failure::Waiter;
use super::ticket::Ticket;
use crate::error::{Error, Kind, Result};
use crate::mem::{Allocation, MemOp, Word};
use crate::mlx5::Queue;

/// What says that a stream has come to a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProgressMarker {
    /// It writes the slot's word there.
    Word,
    /// It rings for this request there.
    Ring(u64),
    /// Nobody wants to know.
    Unknown,
}

#[derive(Debug)]
struct Slot {
    ticket: Ticket,
    /// What its words hold when the stream has come by.
    generation: u32,
    /// The stream's number; set when it is posted.
    stream: Option<u64>,
    arrived: ProgressMarker,
    passed: ProgressMarker,
    /// When the stream was first seen to wait here.
    since: Option<Instant>,
    live: bool,
}

/// The waits of one queue pair that are prepared or posted, and not over.
#[derive(Debug)]
pub(super) struct Waits {
    slots: Box<[Slot]>,
    words: Box<[[Word; 2]]>,
    free: Vec<u32>,
    live: Vec<u32>,
}

/// Bytes of pinned memory that a wait needs.
pub(super) const WORDS_LEN: u64 = 8;

impl Waits {
    pub(super) fn new(memory: &Allocation, count: u32, qpn: u32) -> Result<Self> {
        let words = (0..count).map(|at| {
            let at = u64::from(at) * WORDS_LEN;
            Ok([memory.word32(at)?, memory.word32(at + 4)?])
        });
        let empty_slot = || Slot {
            ticket: Ticket { qpn, queue: Queue::Send, number: 0 },
            generation: 0,
            stream: None,
            arrived: ProgressMarker::Unknown,
            passed: ProgressMarker::Unknown,
            since: None,
            live: false,
        };
        Ok(Self {
            slots: (0..count).map(|_| empty_slot()).collect(),
            words: words.collect::<Result<_>>()?,
            free: (0..count).rev().collect(),
            live: Vec::with_capacity(count as usize),
        })
    }

    /// Takes a slot for a wait that is being prepared.
    pub(super) fn add_wait(&mut self, ticket: Ticket) -> Result<u32> {
        let at = self.free.pop().ok_or_else(|| too_many(ticket, self.slots.len()))?;
        let slot = &mut self.slots[at as usize];
        let generation = slot.generation.wrapping_add(1);
        *slot = Slot {
            ticket,
            generation,
            stream: None,
            arrived: ProgressMarker::Unknown,
            passed: ProgressMarker::Unknown,
            since: None,
            live: true,
        };
        self.live.push(at);
        Ok(at)
    }

    /// A stream will wait there; its operations around the wait.
    pub(super) fn post(
        &mut self,
        slot: u32,
        stream: u64,
        arrived: ProgressMarker,
        passed: ProgressMarker,
    ) -> [Option<MemOp>; 2] {
        let words = &self.words[slot as usize];
        let slot = &mut self.slots[slot as usize];
        (slot.stream, slot.arrived, slot.passed) = (Some(stream), arrived, passed);
        let value = u64::from(slot.generation);
        [(arrived, &words[0]), (passed, &words[1])].map(|(marker, word)| {
            (marker == ProgressMarker::Word).then(|| MemOp::Write { word: word.clone(), value })
        })
    }

    /// As if it had not been posted.
    pub(super) fn unpost(&mut self, slot: u32) {
        self.slots[slot as usize].stream = None;
    }

    /// Gives a slot back whose wait is over or will never be.
    pub(super) fn release_wait(&mut self, slot: u32) -> Ticket {
        if let Some(at) = self.live.iter().position(|live| *live == slot) {
            self.live.swap_remove(at);
            self.slots[slot as usize].live = false;
            self.free.push(slot);
        }
        self.slots[slot as usize].ticket
    }

    fn has_reached(&self, slot: u32, point: usize, doorbells: &DoorbellWords) -> bool {
        let Slot { generation, arrived, passed, .. } = &self.slots[slot as usize];
        match [arrived, passed][point] {
            ProgressMarker::Word => {
                let word = &self.words[slot as usize][point];
                word.load().is_ok_and(|seen| seen == u64::from(*generation))
            }
            ProgressMarker::Ring(number) => doorbells.is_rung(*number),
            ProgressMarker::Unknown => false,
        }
    }

    /// Lets go of all that streams have passed; each ticket is given to `on_passed`.
    pub(super) fn reap(&mut self, doorbells: &DoorbellWords, mut on_passed: impl FnMut(Ticket)) {
        let mut at = 0;
        while let Some(slot) = self.live.get(at).copied() {
            if self.slots[slot as usize].stream.is_some() && self.has_reached(slot, 1, doorbells) {
                on_passed(self.release_wait(slot));
            } else {
                at += 1;
            }
        }
    }

    /// The waits that streams have been told of and are not known to have passed.
    pub(super) fn posted(&self) -> impl Iterator<Item = (u32, Ticket)> {
        let slots = self.live.iter().map(|slot| (*slot, &self.slots[*slot as usize]));
        slots.filter(|(_, slot)| slot.stream.is_some()).map(|(at, slot)| (at, slot.ticket))
    }

    /// Notes since when the stream waits here, if it does; `is_complete` says whether the completion is.
    pub(super) fn update_since(
        &mut self,
        slot: u32,
        doorbells: &DoorbellWords,
        is_complete: bool,
        now: Instant,
    ) -> Option<Instant> {
        let waits = !is_complete && self.has_reached(slot, 0, doorbells);
        let slot = &mut self.slots[slot as usize];
        slot.since = if waits { slot.since.or(Some(now)) } else { None };
        slot.since
    }

    /// Everybody who waits, for people to read. `is_there` says of which tickets the completion has come.
    pub(super) fn waiters(&self, device: &str, is_there: impl Fn(Ticket) -> bool) -> Vec<Waiter> {
        let now = Instant::now();
        let waiter = |slot: u32| {
            let Slot { ticket, stream, since, .. } = &self.slots[slot as usize];
            let stream = format!("{device} stream {}", (*stream)?);
            let waited = since.map(|since| now.saturating_duration_since(since));
            (!is_there(*ticket)).then_some(Waiter { stream, ticket: *ticket, waited })
        };
        self.live.iter().filter_map(|slot| waiter(*slot)).collect()
    }
}

#[cold]
fn too_many(ticket: Ticket, limit: usize) -> Error {
    Error::new(Kind::Busy, format!("wait for {ticket}"))
        .why(format!("{limit} waits are on their way"))
        .fix("let streams go on and call poll, or make the queue pair with more waits")
}
