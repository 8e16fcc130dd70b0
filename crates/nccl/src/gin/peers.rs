//! The TCP connections to the other ranks, after set-up: they carry registrations, and tell that a
//! rank has ended, at once if its process was killed.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use serde::{Deserialize, Serialize};

use crate::connect::LIMIT;
use crate::frames::{Frames, ReadError};
use crate::result::{Failure, REMOTE, Result};

/// Ranks that one look reads from.
const PER_LOOK: usize = 16;
/// Between two looks while a call waits for other ranks.
const PAUSE: Duration = Duration::from_micros(100);
/// A machine that fails without a word is noticed after about 15 s.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_COUNT: u32 = 5;

/// A message of a rank. Registrations are collective: all ranks make them in the same order.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Message {
    /// Memory of this rank.
    Region { sequence: u64, address: u64, len: u64, rkey: u32 },
    /// This rank could not register its memory.
    Refused { sequence: u64, why: String },
    /// This rank closes its communicator.
    Goodbye,
}

/// Whether a rank lives; read on the data path.
pub(super) struct RankState {
    state: AtomicU8,
    /// Its end was reported: NCCL polls, and its log is to have one line.
    is_reported: AtomicBool,
}

const ALIVE: u8 = 0;
const CLOSED: u8 = 1;
const LOST: u8 = 2;
const FAILED: u8 = 3;

impl RankState {
    pub(super) const fn new() -> Self {
        Self { state: AtomicU8::new(ALIVE), is_reported: AtomicBool::new(false) }
    }

    #[inline]
    pub(super) fn is_alive(&self) -> bool {
        self.state.load(Ordering::Acquire) == ALIVE
    }

    fn set(&self, state: u8) {
        // The first reason stays.
        let _ = self.state.compare_exchange(ALIVE, state, Ordering::AcqRel, Ordering::Acquire);
    }

    pub(super) fn fail(&self) {
        self.set(FAILED);
    }

    /// Whether it ended without having closed its communicator.
    pub(super) fn has_failed(&self) -> bool {
        matches!(self.state.load(Ordering::Acquire), LOST | FAILED)
    }

    /// Why operations with this rank fail.
    #[cold]
    pub(super) fn failure(&self, rank: usize) -> Failure {
        if self.is_reported.swap(true, Ordering::Relaxed) {
            return Failure::repeated(REMOTE);
        }
        let why = match self.state.load(Ordering::Acquire) {
            CLOSED => "has closed its communicator",
            LOST => "has ended: its connection is closed",
            _ => "is not reachable any more: its connection has failed",
        };
        Failure::new(REMOTE, format!("rank {rank} {why}"))
    }
}

struct Peer {
    frames: Frames,
    messages: VecDeque<Message>,
}

pub(super) struct Peers {
    /// By rank; `None` for this one.
    peers: Vec<Option<Peer>>,
    /// Registrations so far.
    pub sequence: u64,
    next_look: usize,
}

impl Peers {
    pub(super) fn new(streams: Vec<Option<Frames>>) -> Self {
        let peers = streams.into_iter().map(|stream| {
            stream.map(|frames| {
                keep_alive(&frames);
                Peer { frames, messages: VecDeque::new() }
            })
        });
        Self { peers: peers.collect(), sequence: 0, next_look: 0 }
    }

    /// Looks whether some of the ranks live; the next call looks at others.
    #[cold]
    pub(super) fn look(&mut self, states: &[RankState]) {
        for _ in 0..self.peers.len().min(PER_LOOK) {
            self.next_look = (self.next_look + 1) % self.peers.len();
            self.read(self.next_look, &states[self.next_look]);
        }
    }

    /// Takes what a rank has sent.
    fn read(&mut self, rank: usize, state: &RankState) {
        let Some(Some(peer)) = self.peers.get_mut(rank) else { return };
        while state.is_alive() {
            match peer.frames.read::<Message>() {
                Ok(None) => break,
                Ok(Some(Message::Goodbye)) => state.set(CLOSED),
                Ok(Some(message)) => peer.messages.push_back(message),
                Err(ReadError::Closed) => state.set(LOST),
                Err(ReadError::Malformed(_)) => state.fail(),
            }
        }
    }

    fn write(&mut self, rank: usize, state: &RankState) {
        if let Some(Some(peer)) = self.peers.get_mut(rank)
            && state.is_alive()
            && peer.frames.flush().is_err()
        {
            // What it has sent before it ended counts.
            self.read(rank, state);
            state.set(LOST);
        }
    }

    /// Sends a message to all ranks, and returns one of each of the others.
    ///
    /// # Errors
    /// If a rank ends before its message has arrived.
    pub(super) fn exchange(
        &mut self,
        message: &Message,
        states: &[RankState],
    ) -> Result<Vec<Option<Message>>> {
        for peer in self.peers.iter_mut().flatten() {
            peer.frames.queue(message)?;
        }
        let deadline = Instant::now() + LIMIT;
        let mut received = vec![None; self.peers.len()];
        loop {
            let mut missing = None;
            for (rank, state) in states.iter().enumerate() {
                self.write(rank, state);
                if received[rank].is_none() {
                    self.read(rank, state);
                    let Some(Some(peer)) = self.peers.get_mut(rank) else { continue };
                    received[rank] = peer.messages.pop_front();
                    if received[rank].is_none() {
                        missing = Some(rank);
                        if !state.is_alive() {
                            return Err(state.failure(rank));
                        }
                    }
                }
            }
            let is_written = self.peers.iter().flatten().all(|peer| peer.frames.is_flushed());
            match missing {
                None if is_written || states.iter().any(|state| !state.is_alive()) => {
                    return Ok(received);
                }
                Some(rank) if Instant::now() > deadline => {
                    let text = format!("rank {rank} did not register memory within {LIMIT:?}");
                    return Err(Failure::new(REMOTE, text));
                }
                _ => std::thread::sleep(PAUSE),
            }
        }
    }

    /// Tells all ranks that this one closes.
    pub(super) fn say_goodbye(&mut self, states: &[RankState]) {
        for (rank, state) in states.iter().enumerate() {
            if let Some(Some(peer)) = self.peers.get_mut(rank) {
                // A rank that is gone does not care.
                let _ = peer.frames.queue(&Message::Goodbye);
            }
            self.write(rank, state);
        }
    }

    /// Whether another rank lives and has not said goodbye.
    pub(super) fn are_some_alive(&mut self, states: &[RankState]) -> bool {
        let mut some = false;
        for (rank, state) in states.iter().enumerate() {
            if self.peers.get(rank).is_some_and(Option::is_some) {
                self.read(rank, state);
                some |= state.is_alive();
            }
        }
        some
    }
}

/// Only the time until a failed machine is noticed suffers without.
fn keep_alive(frames: &Frames) {
    let stream = frames.stream();
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE);
    let _ = sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL);
    let _ = sockopt::set_tcp_keepcnt(stream, KEEPALIVE_COUNT);
}
