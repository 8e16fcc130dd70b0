//! What work is called until it has ended.

use std::fmt;

use crate::mlx5::Queue;

/// The name of one request or receive of one [`StreamQp`](super::StreamQp): its number among those of its queue, from 0
/// on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    pub(super) qpn: u32,
    pub(super) queue: Queue,
    pub(super) number: u64,
}

impl Ticket {
    /// The queue that it is of.
    pub fn queue(&self) -> Queue {
        self.queue
    }

    /// Its number in that queue.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The one that comes so many after it: receives that are posted together have numbers one after the other.
    #[must_use]
    pub fn after(&self, count: u64) -> Self {
        Self { number: self.number + count, ..*self }
    }
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.queue {
            Queue::Send => "request",
            Queue::Receive => "receive",
        };
        write!(f, "{what} {} of queue pair {:#x}", self.number, self.qpn)
    }
}

/// The place of a queue in arrays of two.
pub(super) const fn side(queue: Queue) -> usize {
    match queue {
        Queue::Send => 0,
        Queue::Receive => 1,
    }
}
