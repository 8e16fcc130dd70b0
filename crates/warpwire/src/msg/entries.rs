//! Requests in flight: a table of fixed size.

use std::task::Waker;

use super::buffer::BufferSlice;
use super::header::{Channel, MAX_SLICES, RemoteRange};
use super::request::Outcome;
use crate::error::{Error, Result};
use crate::verbs::Atomic;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestKind {
    /// An unused entry.
    Free,
    Send,
    Receive,
    Put,
    Get,
}

/// An update of a word of the peer, ordered after the preceding put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WordUpdate {
    /// Writes the first n of these bytes.
    Write([u8; 8], u8),
    Atomic(Atomic),
}

/// Which messages a receive accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// Messages with this tag.
    Tag(u32),
    /// Messages with any tag.
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

/// An entry of the table.
#[derive(Debug)]
pub(super) struct Entry {
    generation: u32,
    pub kind: RequestKind,
    pub peer: usize,
    pub channel: Channel,
    /// Tag of a sent or matched message.
    pub tag: u32,
    /// What a receive accepts.
    pub wants: Match,
    pub slices: Vec<BufferSlice>,
    /// Length of all slices.
    pub total: u64,
    /// Length of the message received.
    pub arrived: u64,
    /// The peer's memory: source of a get or a rendezvous message, target of a put.
    pub remote: Vec<RemoteRange>,
    /// Number of bytes for which work requests were posted.
    pub posted: u64,
    /// Work requests posted and not completed.
    pub in_flight: u32,
    /// The sender's id of a rendezvous message.
    pub sender_id: u64,
    /// No more protocol messages are expected from the peer: the message was delivered or read.
    pub peer_done: bool,
    pub word_update: Option<(WordUpdate, u64, u32)>,
    /// Why the request will fail, once no work request is in flight.
    pub failure: Option<Error>,
    pub outcome: Option<Result<Outcome>>,
    /// The handle was dropped: the outcome is discarded.
    pub detached: bool,
    /// The task that waits for the outcome.
    task: Option<Task>,
}

/// A task that waits for a request.
#[derive(Debug)]
struct Task {
    waker: Waker,
    driven_by: Driver,
}

/// What makes progress while tasks wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Driver {
    /// The communicator's thread.
    Thread,
    /// An event loop, which watches the communicator's descriptor.
    #[cfg_attr(not(feature = "tokio"), allow(dead_code))]
    EventLoop,
}

/// Wakers that have left the table, until its lock is released: dropping this wakes them.
#[derive(Debug, Default)]
pub(super) struct Wakers {
    /// Of requests that have ended.
    woken: Vec<Waker>,
    /// Of requests that were dropped, or are awaited by another task.
    replaced: Vec<Waker>,
}

impl Drop for Wakers {
    fn drop(&mut self) {
        self.woken.drain(..).for_each(Waker::wake);
    }
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
            task: None,
        }
    }

    /// The operation, for error messages.
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

/// The table of requests. It allocates no memory after its creation, but for wakers.
#[derive(Debug)]
pub(super) struct Entries {
    slots: Vec<Entry>,
    free: Vec<u32>,
    /// Tasks that the communicator's thread makes progress for.
    driven: u32,
    wakers: Wakers,
    /// Number of requests that have ended since the start.
    pub ended: u64,
}

impl Entries {
    pub fn new(count: u32) -> Self {
        let slots = (0..count).map(|_| Entry::new()).collect();
        let free = (0..count).rev().collect();
        Self { slots, free, driven: 0, wakers: Wakers::default(), ended: 0 }
    }

    /// Allocates an entry; `None` if all are in use.
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

    /// The id of a request in protocol messages: generation counter and index.
    pub fn id(&self, index: u32) -> u64 {
        u64::from(self.generation(index)) << 32 | u64::from(index)
    }

    /// The request with this id, unless it has ended and the entry was reused.
    pub fn by_id(&self, id: u64) -> Option<u32> {
        let (index, generation) = (id as u32, (id >> 32) as u32);
        let entry = self.slots.get(index as usize)?;
        (entry.generation == generation && entry.kind != RequestKind::Free).then_some(index)
    }

    /// The requests to a peer without an outcome.
    pub fn open_of(&self, peer: usize) -> impl Iterator<Item = u32> {
        let open = move |entry: &Entry| {
            entry.kind != RequestKind::Free && entry.peer == peer && entry.outcome.is_none()
        };
        let count = self.slots.len() as u32;
        (0..count).filter(move |index| open(&self.slots[*index as usize]))
    }

    /// Sets the outcome and releases the memory of a request.
    pub fn finish(&mut self, index: u32, outcome: Result<Outcome>) {
        let entry = self.get(index);
        if entry.outcome.is_some() {
            return;
        }
        entry.outcome = Some(outcome);
        entry.slices.clear();
        let detached = entry.detached;
        self.ended += 1;
        let waker = self.take_task(index);
        self.wakers.woken.extend(waker);
        if detached {
            self.release(index);
        }
    }

    /// Frees an entry whose outcome was taken or is not wanted.
    pub fn release(&mut self, index: u32) {
        self.forget_task(index);
        let entry = self.get(index);
        entry.kind = RequestKind::Free;
        entry.generation = entry.generation.wrapping_add(1);
        entry.slices.clear();
        (entry.outcome, entry.failure) = (None, None);
        self.free.push(index);
    }

    /// The task of this waker is woken when the request ends, instead of the task before.
    pub fn set_task(&mut self, index: u32, waker: &Waker, driven_by: Driver) {
        self.driven += u32::from(driven_by == Driver::Thread);
        let entry = &mut self.slots[index as usize];
        if let Some(task) = &mut entry.task
            && task.waker.will_wake(waker)
        {
            self.driven -= u32::from(task.driven_by == Driver::Thread);
            task.driven_by = driven_by;
            return;
        }
        self.forget_task(index);
        self.get(index).task = Some(Task { waker: waker.clone(), driven_by });
    }

    /// No task waits for the request any more.
    pub fn forget_task(&mut self, index: u32) {
        let waker = self.take_task(index);
        self.wakers.replaced.extend(waker);
    }

    fn take_task(&mut self, index: u32) -> Option<Waker> {
        let task = self.get(index).task.take()?;
        self.driven -= u32::from(task.driven_by == Driver::Thread);
        Some(task.waker)
    }

    /// Whether the communicator's thread has to make progress.
    pub fn has_driven_tasks(&self) -> bool {
        self.driven > 0
    }

    /// Wakes all tasks: what they wait for will not happen.
    pub fn wake_tasks(&mut self) {
        for index in 0..self.slots.len() as u32 {
            let waker = self.take_task(index);
            self.wakers.woken.extend(waker);
        }
    }

    /// The wakers that have left the table; dropping them wakes. Not under the lock.
    pub fn take_wakers(&mut self) -> Wakers {
        std::mem::take(&mut self.wakers)
    }

    pub fn has_wakers(&self) -> bool {
        !(self.wakers.woken.is_empty() && self.wakers.replaced.is_empty())
    }
}
