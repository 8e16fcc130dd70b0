//! Requests under way: a table with as many places as there may be at a time.

use super::buffer::BufferSlice;
use super::header::{Channel, MAX_SLICES, RemoteRange};
use super::request::Outcome;
use crate::error::{Error, Result};
use crate::verbs::Atomic;

/// What a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestKind {
    /// A place that is free.
    Free,
    Send,
    Receive,
    Put,
    Get,
}

/// A change to a word of the peer, after what was put before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WordUpdate {
    /// So many of these bytes are written.
    Write([u8; 8], u8),
    Atomic(Atomic),
}

/// Which messages a receive takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// Those with this tag.
    Tag(u32),
    /// Any.
    Any,
}

impl From<u32> for Match {
    fn from(tag: u32) -> Self {
        Self::Tag(tag)
    }
}

impl Match {
    pub(super) fn matches(self, tag: u32) -> bool {
        self == Self::Any || self == Self::Tag(tag)
    }
}

/// A request.
#[derive(Debug)]
pub(super) struct Entry {
    generation: u32,
    pub kind: RequestKind,
    pub peer: usize,
    pub channel: Channel,
    /// Of a message that is sent, or that was matched.
    pub tag: u32,
    /// Of a receive.
    pub wants: Match,
    pub slices: Vec<BufferSlice>,
    /// All parts together.
    pub total: u64,
    /// How long the message is that came.
    pub arrived: u64,
    /// Where the peer's data lies, or goes.
    pub remote: Vec<RemoteRange>,
    /// For how many bytes of parts and ranges work was posted.
    pub posted: u64,
    /// Work that the device has not given back.
    pub in_flight: u32,
    /// What the sender of a message that is fetched calls it.
    pub sender_id: u64,
    /// The peer has nothing more to say: it has fetched the message.
    pub peer_done: bool,
    pub word_update: Option<(WordUpdate, u64, u32)>,
    /// Why it will fail, once the device has given all work back.
    pub failure: Option<Error>,
    pub outcome: Option<Result<Outcome>>,
    /// Nobody asks for the outcome.
    pub detached: bool,
}

impl Entry {
    fn new() -> Self {
        Self {
            generation: 0,
            kind: RequestKind::Free,
            peer: 0,
            channel: Channel::User,
            tag: 0,
            wants: Match::Any,
            slices: Vec::with_capacity(MAX_SLICES),
            total: 0,
            arrived: 0,
            remote: Vec::with_capacity(MAX_SLICES),
            posted: 0,
            in_flight: 0,
            sender_id: 0,
            peer_done: false,
            word_update: None,
            failure: None,
            outcome: None,
            detached: false,
        }
    }

    /// What it is, for errors.
    pub fn name(&self) -> String {
        let peer = self.peer;
        match self.kind {
            RequestKind::Free | RequestKind::Send => format!("send to rank {peer}"),
            RequestKind::Receive => format!("receive from rank {peer}"),
            RequestKind::Put => format!("put to rank {peer}"),
            RequestKind::Get => format!("get from rank {peer}"),
        }
    }
}

/// The table. Nothing is allocated after it was made.
#[derive(Debug)]
pub(super) struct Entries {
    slots: Vec<Entry>,
    free: Vec<u32>,
    /// How many requests have ended, ever.
    pub ended: u64,
}

impl Entries {
    pub fn new(count: u32) -> Self {
        let slots = (0..count).map(|_| Entry::new()).collect();
        Self { slots, free: (0..count).rev().collect(), ended: 0 }
    }

    /// A place for a request; nothing if all are taken.
    pub fn add(&mut self, kind: RequestKind, peer: usize, slices: &[BufferSlice]) -> Option<u32> {
        let index = self.free.pop()?;
        let entry = &mut self.slots[index as usize];
        entry.kind = kind;
        entry.peer = peer;
        entry.channel = Channel::User;
        entry.slices.clear();
        entry.slices.extend(slices.iter().cloned());
        entry.total = slices.iter().map(|slice| slice.len).sum();
        entry.remote.clear();
        (entry.arrived, entry.posted, entry.in_flight) = (0, 0, 0);
        (entry.peer_done, entry.detached) = (false, false);
        (entry.word_update, entry.failure, entry.outcome) = (None, None, None);
        Some(index)
    }

    pub fn get(&mut self, index: u32) -> &mut Entry {
        &mut self.slots[index as usize]
    }

    pub fn generation(&self, index: u32) -> u32 {
        self.slots[index as usize].generation
    }

    /// What a peer calls it.
    pub fn id(&self, index: u32) -> u64 {
        u64::from(self.generation(index)) << 32 | u64::from(index)
    }

    /// The request that a peer calls so.
    pub fn by_id(&self, id: u64) -> Option<u32> {
        let (index, generation) = (id as u32, (id >> 32) as u32);
        let entry = self.slots.get(index as usize)?;
        (entry.generation == generation && entry.kind != RequestKind::Free).then_some(index)
    }

    /// Those of a peer that have no outcome.
    pub fn open_of(&self, peer: usize) -> impl Iterator<Item = u32> {
        let open = move |entry: &Entry| {
            entry.kind != RequestKind::Free && entry.peer == peer && entry.outcome.is_none()
        };
        let count = self.slots.len() as u32;
        (0..count).filter(move |index| open(&self.slots[*index as usize]))
    }

    /// It has ended; its memory is no longer used.
    pub fn finish(&mut self, index: u32, outcome: Result<Outcome>) {
        let entry = self.get(index);
        if entry.outcome.is_some() {
            return;
        }
        entry.outcome = Some(outcome);
        entry.slices.clear();
        let detached = entry.detached;
        self.ended += 1;
        if detached {
            self.release(index);
        }
    }

    /// The outcome is known or not wanted: the place is free.
    pub fn release(&mut self, index: u32) {
        let entry = self.get(index);
        entry.kind = RequestKind::Free;
        entry.generation = entry.generation.wrapping_add(1);
        entry.slices.clear();
        (entry.outcome, entry.failure) = (None, None);
        self.free.push(index);
    }
}
