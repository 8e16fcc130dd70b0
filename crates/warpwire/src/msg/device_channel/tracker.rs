//! What is under way on a lane: completions come in order, so that a number says what has ended.

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
    /// The number of the next request.
    next: u64,
    /// All before it have ended.
    ended: u64,
    /// All before it are posted, or were given up.
    posted: u64,
    /// Memory that is used, with the number of the request that uses it.
    in_use: VecDeque<(u64, BufferSlice)>,
    /// How long messages were that came, by number, and whether they came well; as many as can be under way, twice.
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

    /// The number of the next request; it is taken by [`begin`](Self::begun).
    pub fn next(&self, queue: Queue) -> u64 {
        self.sides[side(queue)].next
    }

    /// The next request is posted, with this memory.
    pub fn begin(&mut self, queue: Queue, slices: &[BufferSlice]) -> u64 {
        let side = &mut self.sides[side(queue)];
        let number = side.next;
        side.next += 1;
        side.in_use.extend(slices.iter().map(|slice| (number, slice.clone())));
        number
    }

    /// A request that was prepared is posted.
    pub fn posted(&mut self, number: u64) {
        self.sides[side(Queue::Send)].posted = number + 1;
    }

    /// Whether requests that are posted have not ended.
    pub fn is_busy(&self) -> bool {
        let sends = &self.sides[side(Queue::Send)];
        sends.ended < sends.posted
    }

    /// Whether receives are posted to which nothing has come.
    pub fn awaits_messages(&self) -> bool {
        let receives = &self.sides[side(Queue::Receive)];
        receives.ended < receives.next
    }

    /// Takes completions.
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

    /// Whether a request has ended: how long its message was, and whether it ended well. A length that was not asked
    /// for in time is not known any more.
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

/// A send, a receive, a put or a get of a lane. Dropped, it goes on; its memory is kept until then.
#[must_use = "a stream waits for it only if it is told to"]
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
        write!(f, "LaneRequest(rank {}, {})", self.rank, self.ticket)
    }
}

impl ChannelRequest {
    /// It is on its stream.
    pub(super) fn note_posted(&self) {
        if let Some(Some(peer)) = self.device_channel.peers.get(self.rank) {
            peer.tracker.lock().posted(self.number);
        }
    }

    /// What streams and [`StreamQp`] call it.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// What became of it, if it has ended. Never blocks.
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
            // What a failed connection does not give back has failed too.
            None if peer.stream.failure().is_some() => Err(self.failure()),
            None => Ok(None),
        }
    }

    /// Waits, on the CPU, until it has ended.
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
                return Err(error.why(format!("it has not ended in {} s", timeout.as_secs_f64())));
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
