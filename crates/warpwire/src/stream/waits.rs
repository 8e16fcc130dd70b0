//! Which stream waits for which completion, and how far the stream has come.
//!
//! A stream that reaches a wait writes a word before it and another one after it. The first lets
//! the watchdog measure how long the stream has waited; the second lets the CPU return the CQE slot
//! to the device only after the stream has stopped polling it. Where the stream rings a doorbell of
//! the same queue pair directly before or after the wait, the word of that doorbell serves instead,
//! and no other is written.

use std::time::Instant;

use super::doorbells::DoorbellWords;
use super::failure::Waiter;
use super::ticket::Ticket;
use crate::error::{Error, Kind, Result};
use crate::mem::{Allocation, MemOp, Word};
use crate::mlx5::Queue;

/// What shows that a stream has reached a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProgressMarker {
    /// The stream writes the wait's own word.
    Word,
    /// The stream rings the doorbell for this request.
    Ring(u64),
    /// Not tracked.
    Unknown,
}

#[derive(Debug)]
struct Slot {
    ticket: Ticket,
    /// The value of its words once the stream has reached them.
    generation: u32,
    /// The stream's number; `None` until the wait is posted.
    stream: Option<u64>,
    arrived: ProgressMarker,
    passed: ProgressMarker,
    /// When the stream was first observed waiting here.
    since: Option<Instant>,
    live: bool,
}

/// The waits of one queue pair that are prepared or posted and not yet passed.
#[derive(Debug)]
pub(super) struct Waits {
    slots: Box<[Slot]>,
    words: Box<[[Word; 2]]>,
    free: Vec<u32>,
    live: Vec<u32>,
}

/// Bytes of pinned memory per wait.
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

    /// Allocates a slot for a wait that is being prepared.
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

    /// Posts a wait on a stream; returns the stream's operations before and after the wait.
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

    /// Undoes [`post`](Self::post).
    pub(super) fn unpost(&mut self, slot: u32) {
        self.slots[slot as usize].stream = None;
    }

    /// Frees a slot whose wait is over or was cancelled.
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

    /// Frees all waits that streams have passed; calls `on_passed` with each ticket.
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

    /// The waits that are posted and not known to have been passed.
    pub(super) fn posted(&self) -> impl Iterator<Item = (u32, Ticket)> {
        let slots = self.live.iter().map(|slot| (*slot, &self.slots[*slot as usize]));
        slots.filter(|(_, slot)| slot.stream.is_some()).map(|(at, slot)| (at, slot.ticket))
    }

    /// Updates and returns when the stream started waiting here, if it waits; `is_complete` is
    /// whether the completion has been written.
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

    /// All waiting streams, for error messages. `is_there` returns whether a ticket's
    /// completion has been written.
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
        .why(format!("{limit} waits are in flight, the maximum"))
        .fix("let streams make progress and call poll, or raise StreamQpOptions::waits")
}
