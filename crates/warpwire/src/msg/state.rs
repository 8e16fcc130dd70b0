//! The messaging protocol: posting work, and handling completions. All of it runs under one lock,
//! in the threads that wait.

use std::sync::Weak;

use super::entries::{Entries, RequestKind};
use super::header::HEADER_LEN;
use super::peer::{Area, ControlOp, HeaderUse, Peer, Source, Unexpected};
use super::request::Outcome;
use crate::error::{Error, Kind, Result};
use crate::verbs::{Completion, Cq, QpAttributes, State as QpState, Status};

/// The upper byte of a completion's id: what it belongs to.
pub(super) const RECEIVE: u64 = 1 << 56;
pub(super) const HEADER_SENT: u64 = 2 << 56;
pub(super) const FETCHED: u64 = 3 << 56;
pub(super) const MOVED: u64 = 4 << 56;
/// A word write of the application that belongs to no request.
pub(super) const STANDALONE_WORD: u64 = 5 << 56;

/// How a rank was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Loss {
    /// It announced that it leaves; all that it sent before has arrived.
    pub left: bool,
    /// Its connections are closed: it no longer acknowledges.
    pub broken: bool,
    /// It was the last remaining peer.
    pub all: bool,
}

/// Notified when a rank is lost.
pub(super) trait OnLost: Send + Sync {
    /// Called for each lost rank, with the communicator's lock held.
    fn lost(&self, rank: usize, loss: Loss);

    /// Whether posted work to ranks that are still reachable is in flight.
    fn is_busy(&self) -> bool;
}

/// The protocol state of a communicator.
pub(super) struct State {
    pub rank: usize,
    pub entries: Entries,
    pub peers: Vec<Peer>,
    pub area: Area,
    /// Maximum length of a message of this rank to itself that is copied until a receive matches.
    pub eager: u64,
    /// Maximum number of such copies.
    pub max_buffered: u32,
    /// Maximum number of queued requests to a peer.
    pub queue: u32,
    /// A thread is blocked in `poll` on behalf of all waiters (leader/followers).
    pub has_leader: bool,
    /// Number of waiters that the leader wakes.
    pub followers: u32,
    pub scratch: Vec<u8>,
    /// Device channels that exist.
    pub hooks: Vec<Weak<dyn OnLost>>,
}

impl State {
    pub fn new(rank: usize, peers: Vec<Peer>, area: Area, requests: u32, queue: u32) -> Self {
        let eager = area.slot - HEADER_LEN as u64;
        let max_buffered = area.receives;
        Self {
            rank,
            entries: Entries::new(requests),
            peers,
            eager,
            max_buffered,
            queue,
            has_leader: false,
            followers: 0,
            scratch: vec![0; area.slot as usize],
            area,
            hooks: Vec::new(),
        }
    }

    /// Polls completions and posts what they make possible.
    pub fn progress(&mut self, cq: &Cq) -> Result<()> {
        let mut some = [Completion::EMPTY; 32];
        loop {
            let count = cq.poll(&mut some)?;
            for completion in &some[..count] {
                self.completed(completion);
            }
            if count < some.len() {
                return Ok(());
            }
        }
    }

    pub(super) fn completed(&mut self, completion: &Completion) {
        let rank = (completion.id >> 32 & 0xff_ffff) as usize;
        let value = completion.id as u32;
        let failed = !completion.is_success();
        if failed && !self.peers[rank].is_broken {
            self.fail_peer(rank, status_error(rank, completion.status));
        }
        match completion.id & (0xff << 56) {
            RECEIVE if failed => {}
            RECEIVE => self.arrived(rank, value, completion),
            HEADER_SENT => self.header_sent(rank, value),
            FETCHED => {
                self.peers[rank].control_work -= 1;
                self.moved(rank, value);
            }
            MOVED => {
                self.peers[rank].user_work -= 1;
                self.moved(rank, value);
            }
            STANDALONE_WORD => self.peers[rank].user_work -= 1,
            _ => {}
        }
        self.pump(rank);
    }

    /// A piece of a transfer has completed or was flushed.
    pub(super) fn moved(&mut self, rank: usize, index: u32) {
        let broken = self.broken(rank);
        let entry = self.entries.get(index);
        entry.in_flight -= 1;
        if broken.is_some() && entry.failure.is_none() {
            entry.failure = broken;
        }
        self.complete_if_done(index);
    }

    pub(super) fn broken(&self, rank: usize) -> Option<Error> {
        let peer = &self.peers[rank];
        peer.end.clone().filter(|_| peer.is_broken)
    }

    /// Sets a request's outcome if none of its work is in flight.
    pub(super) fn complete_if_done(&mut self, index: u32) {
        let entry = self.entries.get(index);
        if entry.in_flight > 0 || entry.outcome.is_some() {
            return;
        }
        if let Some(failure) = entry.failure.take() {
            let error = failure.during(entry.name());
            self.entries.finish(index, Err(error));
            return;
        }
        let (peer, tag) = (entry.peer, entry.tag);
        let len = match entry.kind {
            RequestKind::Receive => entry.arrived,
            _ => entry.total,
        };
        let complete = match entry.kind {
            RequestKind::Free => return,
            RequestKind::Send => entry.peer_done,
            RequestKind::Receive => entry.posted == entry.arrived && entry.peer_done,
            RequestKind::Put | RequestKind::Get => {
                entry.posted == entry.total && entry.word_update.is_none()
            }
        };
        if !complete {
            return;
        }
        if entry.kind == RequestKind::Receive && !entry.remote.is_empty() {
            let id = entry.sender_id;
            self.peers[peer].control_queue.push_back(ControlOp::Done(id));
        }
        self.entries.finish(index, Ok(Outcome { peer, tag, len }));
    }

    pub(super) fn header_sent(&mut self, rank: usize, header_slot: u32) {
        let broken = self.broken(rank);
        let peer = &mut self.peers[rank];
        let used =
            std::mem::replace(&mut peer.header_uses[header_slot as usize], HeaderUse::Nothing);
        peer.headers.push(header_slot);
        match used {
            HeaderUse::Control => peer.control_work -= 1,
            _ => peer.user_work -= 1,
        }
        if let HeaderUse::Eager(index) | HeaderUse::Rendezvous(index) = used {
            let entry = self.entries.get(index);
            entry.in_flight -= 1;
            if broken.is_some() && entry.failure.is_none() {
                entry.failure = broken;
            }
            entry.peer_done |= matches!(used, HeaderUse::Eager(_));
            self.complete_if_done(index);
        }
    }

    /// Starts a send whose entry is set up.
    pub fn send(&mut self, rank: usize, index: u32) {
        if rank == self.rank {
            return self.send_own(index);
        }
        self.peers[rank].send_queue.push_back(index);
        self.pump(rank);
    }

    pub(super) fn send_own(&mut self, index: u32) {
        let rank = self.rank;
        let buffered = |message: &&Unexpected| matches!(message.from, Source::Buffered(_));
        let buffered = self.peers[rank].unexpected.iter().filter(buffered).count();
        let entry = self.entries.get(index);
        let (channel, tag, len) = (entry.channel, entry.tag, entry.total);
        let mut from = Source::SelfSend(index);
        if len <= self.eager && buffered < self.max_buffered as usize {
            let mut bytes = vec![0; len as usize].into_boxed_slice();
            let mut at = 0;
            let mut copied = Ok(());
            for slice in &entry.slices {
                let end = at + slice.len as usize;
                copied = copied.and_then(|()| slice.buffer.read(slice.offset, &mut bytes[at..end]));
                at = end;
            }
            if let Err(why) = copied {
                entry.failure = Some(why);
                return self.complete_if_done(index);
            }
            entry.peer_done = true;
            self.complete_if_done(index);
            from = Source::Buffered(bytes);
        }
        self.take(rank, Unexpected { channel, tag, len, from });
    }

    /// Starts a receive whose entry is set up: takes an unexpected message, or waits.
    pub fn receive(&mut self, rank: usize, index: u32) {
        let (channel, wants) = {
            let entry = self.entries.get(index);
            (entry.channel, entry.wants)
        };
        let fits = |message: &Unexpected| message.channel == channel && wants.matches(message.tag);
        let peer = &mut self.peers[rank];
        match peer.unexpected.iter().position(fits) {
            Some(at) => {
                if let Some(message) = peer.unexpected.remove(at) {
                    self.deliver(rank, index, message);
                }
                self.pump(rank);
            }
            None => match &peer.end {
                Some(why) => {
                    self.entries.get(index).failure = Some(why.clone());
                    self.complete_if_done(index);
                }
                None => peer.receives.push_back(index),
            },
        }
    }

    /// Cancels a receive; false if a message has been matched to it.
    pub fn cancel(&mut self, index: u32) -> bool {
        let rank = self.entries.get(index).peer;
        let waiting = self.peers[rank].receives.iter().position(|known| *known == index);
        waiting.and_then(|at| self.peers[rank].receives.remove(at)).is_some()
    }

    /// The peer has left, for this reason; requests in flight may still succeed.
    pub fn mark_left(&mut self, rank: usize, why: Error) {
        if self.peers[rank].end.is_some() {
            return;
        }
        self.peers[rank].end = Some(why.clone());
        self.peers[rank].has_left = true;
        self.notify_hooks(rank);
        self.peers[rank].receives.clear();
        self.peers[rank].send_queue.clear();
        let open: Vec<u32> = self.entries.open_of(rank).collect();
        for index in open {
            let entry = self.entries.get(index);
            let posted = entry.in_flight > 0 && entry.posted >= entry.total;
            let may_complete = match entry.kind {
                RequestKind::Receive => !entry.remote.is_empty(),
                RequestKind::Send => posted && entry.remote.is_empty(),
                _ => posted && entry.word_update.is_none(),
            };
            if !may_complete {
                entry.failure.get_or_insert(why.clone());
                self.complete_if_done(index);
            }
        }
    }

    /// The peer died, or its connection failed: all requests to it fail with this cause.
    pub fn fail_peer(&mut self, rank: usize, why: Error) {
        let peer = &mut self.peers[rank];
        if peer.is_broken || rank == self.rank {
            return;
        }
        let why = peer.end.get_or_insert(why).clone();
        peer.is_broken = true;
        peer.receives.clear();
        peer.send_queue.clear();
        peer.control_queue.clear();
        if let Some(qp) = &peer.qp {
            // Flushes all work requests, and thereby the requests that wait for them.
            let _ = qp.modify(&QpAttributes::new(QpState::Err));
        }
        let open: Vec<u32> = self.entries.open_of(rank).collect();
        for index in open {
            self.entries.get(index).failure.get_or_insert(why.clone());
            self.complete_if_done(index);
        }
        self.notify_hooks(rank);
    }

    /// This rank has left: its messages to itself fail too.
    pub fn fail_own(&mut self, why: Error) {
        let rank = self.rank;
        let peer = &mut self.peers[rank];
        peer.end.get_or_insert(why.clone());
        peer.receives.clear();
        peer.unexpected.clear();
        let open: Vec<u32> = self.entries.open_of(rank).collect();
        for index in open {
            self.entries.get(index).failure.get_or_insert(why.clone());
            self.complete_if_done(index);
        }
    }

    /// How a rank was lost; `None` if it was not.
    pub fn loss(&self, rank: usize) -> Option<Loss> {
        let Peer { end, has_left, is_broken, .. } = &self.peers[rank];
        end.as_ref()?;
        let mut others = self.peers.iter().enumerate().filter(|(other, _)| *other != self.rank);
        let all = others.all(|(_, peer)| peer.end.is_some());
        Some(Loss { left: *has_left, broken: *is_broken, all })
    }

    fn notify_hooks(&mut self, rank: usize) {
        self.hooks.retain(|hook| hook.strong_count() > 0);
        let Some(loss) = self.loss(rank) else { return };
        self.hooks.iter().filter_map(Weak::upgrade).for_each(|hook| hook.lost(rank, loss));
    }

    /// Whether work to ranks that are still reachable is in flight.
    pub fn is_busy(&self) -> bool {
        let busy = |peer: &Peer| {
            let work = peer.user_work + peer.control_work;
            !peer.is_broken && (work > 0 || !peer.control_queue.is_empty())
        };
        let mut hooks = self.hooks.iter().filter_map(Weak::upgrade);
        self.peers.iter().any(busy) || hooks.any(|hook| hook.is_busy())
    }
}

pub(super) fn id_of(kind: u64, rank: usize, value: u32) -> u64 {
    kind | (rank as u64) << 32 | u64::from(value)
}

#[cold]
fn status_error(rank: usize, status: Status) -> Error {
    let error = Error::new(Kind::PeerLost, format!("reach rank {rank}"));
    match status {
        Status::RetryExceeded => {
            error.why(format!("rank {rank} does not answer")).fix("check that its machine is up")
        }
        Status::RemoteAccess => error
            .why(format!("rank {rank} rejected the access to its memory"))
            .fix("call RmaWindow::close on all ranks before freeing memory"),
        Status::LocalProtection => error
            .why("local memory was freed during a transfer")
            .fix("keep it until the request has completed"),
        other => error.why(format!("the connection to rank {rank} has failed: {other:?}")),
    }
}
