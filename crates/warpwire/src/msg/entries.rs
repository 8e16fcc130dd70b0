//! Requests under way: a table with as many places as there may be at a time.

use super::buffer::Part;
use super::header::{Channel, MOST_PARTS, Range};
use super::request::Outcome;
use crate::error::{Error, Result};
use crate::verbs::Atomic;

/// What a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// A place that is free.
    Free,
    Send,
    Receive,
    Put,
    Get,
}

/// A change to a word of the peer, after what was put before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notice {
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
    pub(super) fn takes(self, tag: u32) -> bool {
        self == Self::Any || self == Self::Tag(tag)
    }
}

/// A request.
#[derive(Debug)]
pub(super) struct Entry {
    generation: u32,
    pub what: What,
    pub peer: usize,
    pub channel: Channel,
    /// Of a message that is sent, or that was matched.
    pub tag: u32,
    /// Of a receive.
    pub wants: Match,
    pub parts: Vec<Part>,
    /// All parts together.
    pub total: u64,
    /// How long the message is that came.
    pub arrived: u64,
    /// Where the peer's data lies, or goes.
    pub remote: Vec<Range>,
    /// For how many bytes of parts and ranges work was posted.
    pub posted: u64,
    /// Work that the device has not given back.
    pub in_flight: u32,
    /// What the sender of a message that is fetched calls it.
    pub sender_id: u64,
    /// The peer has nothing more to say: it has fetched the message.
    pub settled: bool,
    pub notice: Option<(Notice, u64, u32)>,
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
            what: What::Free,
            peer: 0,
            channel: Channel::User,
            tag: 0,
            wants: Match::Any,
            parts: Vec::with_capacity(MOST_PARTS),
            total: 0,
            arrived: 0,
            remote: Vec::with_capacity(MOST_PARTS),
            posted: 0,
            in_flight: 0,
            sender_id: 0,
            settled: false,
            notice: None,
            failure: None,
            outcome: None,
            detached: false,
        }
    }

    /// What it is, for errors.
    pub fn name(&self) -> String {
        let peer = self.peer;
        match self.what {
            What::Free | What::Send => format!("send to rank {peer}"),
            What::Receive => format!("receive from rank {peer}"),
            What::Put => format!("put to rank {peer}"),
            What::Get => format!("get from rank {peer}"),
        }
    }
}

/// The table. Nothing is allocated after it was made.
#[derive(Debug)]
pub(super) struct Entries {
    places: Vec<Entry>,
    free: Vec<u32>,
    /// How many requests have ended, ever.
    pub ended: u64,
}

impl Entries {
    pub fn new(count: u32) -> Self {
        let places = (0..count).map(|_| Entry::new()).collect();
        Self { places, free: (0..count).rev().collect(), ended: 0 }
    }

    /// A place for a request; nothing if all are taken.
    pub fn add(&mut self, what: What, peer: usize, parts: &[Part]) -> Option<u32> {
        let index = self.free.pop()?;
        let entry = &mut self.places[index as usize];
        entry.what = what;
        entry.peer = peer;
        entry.channel = Channel::User;
        entry.parts.clear();
        entry.parts.extend(parts.iter().cloned());
        entry.total = parts.iter().map(|part| part.len).sum();
        entry.remote.clear();
        (entry.arrived, entry.posted, entry.in_flight) = (0, 0, 0);
        (entry.settled, entry.detached) = (false, false);
        (entry.notice, entry.failure, entry.outcome) = (None, None, None);
        Some(index)
    }

    pub fn get(&mut self, index: u32) -> &mut Entry {
        &mut self.places[index as usize]
    }

    pub fn generation(&self, index: u32) -> u32 {
        self.places[index as usize].generation
    }

    /// What a peer calls it.
    pub fn id(&self, index: u32) -> u64 {
        u64::from(self.generation(index)) << 32 | u64::from(index)
    }

    /// The request that a peer calls so.
    pub fn by_id(&self, id: u64) -> Option<u32> {
        let (index, generation) = (id as u32, (id >> 32) as u32);
        let entry = self.places.get(index as usize)?;
        (entry.generation == generation && entry.what != What::Free).then_some(index)
    }

    /// Those of a peer that have no outcome.
    pub fn open_of(&self, peer: usize) -> impl Iterator<Item = u32> {
        let open = move |entry: &Entry| {
            entry.what != What::Free && entry.peer == peer && entry.outcome.is_none()
        };
        let count = self.places.len() as u32;
        (0..count).filter(move |index| open(&self.places[*index as usize]))
    }

    /// It has ended; its memory is no longer used.
    pub fn finish(&mut self, index: u32, outcome: Result<Outcome>) {
        let entry = self.get(index);
        if entry.outcome.is_some() {
            return;
        }
        entry.outcome = Some(outcome);
        entry.parts.clear();
        let detached = entry.detached;
        self.ended += 1;
        if detached {
            self.release(index);
        }
    }

    /// The outcome is known or not wanted: the place is free.
    pub fn release(&mut self, index: u32) {
        let entry = self.get(index);
        entry.what = What::Free;
        entry.generation = entry.generation.wrapping_add(1);
        entry.parts.clear();
        (entry.outcome, entry.failure) = (None, None);
        self.free.push(index);
    }
}
