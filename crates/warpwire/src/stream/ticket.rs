//! Identifiers of posted work.

use std::fmt;

use crate::error::{Error, Kind, Result};
use crate::mlx5::Queue;

/// Identifies one request or receive of a [`StreamQp`](super::StreamQp) by its index in its queue,
/// counted from 0 and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    pub(super) qpn: u32,
    pub(super) queue: Queue,
    pub(super) number: u64,
}

impl Ticket {
    /// The queue: requests are in the send queue, receives in the receive queue.
    pub fn queue(&self) -> Queue {
        self.queue
    }

    /// The index in that queue.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Rejects the ticket of a receive.
    pub(super) fn check_send(&self) -> Result<()> {
        match self.queue {
            Queue::Send => Ok(()),
            Queue::Receive => Err(Error::new(Kind::InvalidArgument, format!("wait for {self}"))
                .why("it is not a request")
                .fix("use wait_for, or wait_receive")),
        }
    }

    /// The ticket `count` positions later: receives that are posted together have consecutive
    /// numbers.
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

/// The index of a queue in arrays of two.
pub(super) const fn side(queue: Queue) -> usize {
    match queue {
        Queue::Send => 0,
        Queue::Receive => 1,
    }
}
