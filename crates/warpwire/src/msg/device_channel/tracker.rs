//! Requests in flight on a device channel. Completions are in order, so a single counter records
//! which requests have completed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Inner;
use crate::error::{Error, Kind, Result};
use crate::mlx5::Queue;
use crate::msg::buffer::BufferSlice;
use crate::msg::request::Outcome;
use crate::stream::{StreamQp, Ticket};
use crate::verbs::Completion;

/// One queue of a connection.
struct QueueTracker {
    /// Number of the next request.
    next: u64,
    /// All requests before this one have completed.
    ended: u64,
    /// All requests before this one are posted or cancelled.
    posted: u64,
    /// Memory in use, with the number of the request that uses it.
    in_use: VecDeque<(u64, BufferSlice)>,
    /// Length of received messages and whether they succeeded, by number; twice the queue depth.
    received: Box<[(u32, bool)]>,
}

pub(super) struct CompletionTracker {
    sides: [QueueTracker; 2],
}

const fn side(queue: Queue) -> usize {
    match queue {
        Queue::Send => 0,
        Queue::Receive => 1,
    }
}

impl CompletionTracker {
    pub fn new(depth: u32) -> Self {
        let depth = depth.next_power_of_two() as usize;
        let side = || QueueTracker {
            next: 0,
            ended: 0,
            posted: 0,
            in_use: VecDeque::with_capacity(depth),
            received: vec![(0, true); 2 * depth].into(),
        };
        Self { sides: [side(), side()] }
    }

    /// Number of the next request, which [`begin`](Self::begin) takes.
    pub fn next(&self, queue: Queue) -> u64 {
        self.sides[side(queue)].next
    }

    /// Takes the next number, and keeps the request's memory alive until it has completed.
    pub fn begin(&mut self, queue: Queue, slices: &[BufferSlice]) -> u64 {
        let side = &mut self.sides[side(queue)];
        let number = side.next;
        side.next += 1;
        side.in_use.extend(slices.iter().map(|slice| (number, slice.clone())));
        number
    }

    /// Records that a prepared request is posted.
    pub fn posted(&mut self, number: u64) {
        self.sides[side(Queue::Send)].posted = number + 1;
    }

    /// Whether posted requests have not completed.
    pub fn is_busy(&self) -> bool {
        let sends = &self.sides[side(Queue::Send)];
        sends.ended < sends.posted
    }

    /// Whether posted receives have not been matched by a message.
    pub fn awaits_messages(&self) -> bool {
        let receives = &self.sides[side(Queue::Receive)];
        receives.ended < receives.next
    }

    /// Polls completions.
    pub fn take(&mut self, qp: &StreamQp) -> Result<()> {
        let mut some = [Completion::EMPTY; 16];
        loop {
            let count = qp.poll(&mut some)?;
            for completion in &some[..count] {
                let queue = if completion.is_receive() { Queue::Receive } else { Queue::Send };
                let side = &mut self.sides[side(queue)];
                let slot = completion.id as usize & (side.received.len() - 1);
                side.received[slot] = (completion.len, completion.is_success());
                side.ended = completion.id + 1;
                while side.in_use.front().is_some_and(|(number, _)| *number < side.ended) {
                    side.in_use.pop_front();
                }
            }
            if count < some.len() {
                return Ok(());
            }
        }
    }

    /// If a request has completed: the length of its message, and whether it succeeded. Older
    /// lengths are overwritten, and then unknown.
    fn ended(&self, queue: Queue, number: u64) -> Option<(Option<u32>, bool)> {
        let side = &self.sides[side(queue)];
        if number >= side.ended {
            return None;
        }
        let kept = side.ended - number <= side.received.len() as u64;
        let (len, good) = side.received[number as usize & (side.received.len() - 1)];
        Some(if kept { (Some(len), good) } else { (None, true) })
    }
}

/// A send, receive, put or get of a device channel. Dropping it does not cancel it; its memory
/// stays alive until it has completed.
#[must_use = "streams wait for it only with `wait_on_stream`"]
#[derive(Clone)]
pub struct ChannelRequest {
    pub(super) device_channel: Arc<Inner>,
    pub(super) rank: usize,
    pub(super) queue: Queue,
    pub(super) number: u64,
    pub(super) ticket: Ticket,
    pub(super) len: u64,
}

impl std::fmt::Debug for ChannelRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ChannelRequest(rank {}, {})", self.rank, self.ticket)
    }
}

impl ChannelRequest {
    /// Records that the request is on its stream.
    pub(super) fn note_posted(&self) {
        if let Some(Some(peer)) = self.device_channel.peers.get(self.rank) {
            peer.tracker.lock().posted(self.number);
        }
    }

    /// The request's ticket in its [`StreamQp`].
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Returns the result if the request has completed. Never blocks.
    pub fn test(&self) -> Result<Option<Outcome>> {
        let peer = self.device_channel.peer(self.rank, "wait for")?;
        let mut tracker = peer.tracker.lock();
        tracker.take(&peer.stream)?;
        let ended = tracker.ended(self.queue, self.number);
        drop(tracker);
        match ended {
            Some((len, true)) => {
                let len = match self.queue {
                    Queue::Receive => len.map_or(self.len, u64::from),
                    Queue::Send => self.len,
                };
                Ok(Some(Outcome { peer: self.rank, tag: 0, len }))
            }
            Some((_, false)) => Err(self.failure()),
            // Requests that a failed connection never flushes have failed too.
            None if peer.stream.failure().is_some() => Err(self.failure()),
            None => Ok(None),
        }
    }

    /// Blocks the calling thread until the request has completed.
    pub fn wait(&self, timeout: Duration) -> Result<Outcome> {
        const SPIN: Duration = Duration::from_micros(50);
        let start = Instant::now();
        loop {
            if let Some(outcome) = self.test()? {
                return Ok(outcome);
            }
            let waited = start.elapsed();
            if waited >= timeout {
                let error = Error::new(Kind::Timeout, self.what());
                return Err(
                    error.why(format!("it did not complete in {} s", timeout.as_secs_f64()))
                );
            }
            match waited > SPIN {
                true => std::thread::sleep((waited / 16).min(Duration::from_micros(500))),
                false => std::hint::spin_loop(),
            }
        }
    }

    fn what(&self) -> String {
        match self.queue {
            Queue::Send => format!("send to rank {} from a stream", self.rank),
            Queue::Receive => format!("receive from rank {} on a stream", self.rank),
        }
    }

    #[cold]
    fn failure(&self) -> Error {
        let device_channel = super::DeviceChannel(self.device_channel.clone());
        let unknown = || Error::new(Kind::StreamFailed, self.what());
        device_channel.failure(self.rank).unwrap_or_else(unknown).during(self.what())
    }
}
