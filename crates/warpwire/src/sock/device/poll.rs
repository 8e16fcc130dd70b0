//! Waiting for several sockets at once.

use std::time::Duration;

use rustix::io::Errno;

use super::wait::Patience;
use super::{Failure, Outcome, Sock, Sockets, state};
use crate::sock::layout::{events, record};

/// A socket that is waited for, for what, and what was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Polled {
    /// The socket.
    pub socket: Sock,
    /// What is asked for: bits of [`events`].
    pub events: u16,
    /// What there is: what was asked for, and `ERR`, `HUP` and `NVAL` unasked.
    pub found: u16,
}

impl Polled {
    /// Asks for `events` of a socket.
    pub fn new(socket: Sock, events: u16) -> Self {
        Self { socket, events, found: 0 }
    }
}

impl Sockets<'_> {
    /// Waits until there is something to tell of one of them, or the time is over (`None`: no end), and returns of how
    /// many there is. What was not asked for ends no wait.
    pub fn poll(&self, list: &mut [Polled], timeout: Option<Duration>) -> Outcome<usize> {
        let patience = match timeout {
            Some(Duration::ZERO) => Patience::None,
            Some(limit) => Patience::For(limit),
            None => Patience::Ever,
        };
        let outcome = self.wait(patience, || {
            let mut count = 0;
            for entry in list.iter_mut() {
                let always = events::ERR | events::HUP | events::NVAL;
                entry.found = self.ready(entry.socket)? & (entry.events | always);
                count += usize::from(entry.found != 0);
            }
            Ok((count > 0).then_some(count))
        });
        match outcome {
            Err(Failure::Errno(Errno::AGAIN | Errno::TIMEDOUT)) => Ok(0),
            outcome => outcome,
        }
    }

    /// Everything that there is to tell of a socket.
    fn ready(&self, socket: Sock) -> Outcome<u16> {
        let looked = self.place(socket).and_then(|place| Ok((place, self.look(place)?)));
        let (place, seen) = match looked {
            Ok(found) => found,
            Err(Failure::Errno(_)) => return Ok(events::NVAL),
            Err(fault) => return Err(fault),
        };
        let mut found = 0;
        let (no_more, no_send) = (seen.has(state::RECEIVE_END), seen.has(state::SEND_END));
        // What the peer says of its counters is judged by who has the lock.
        if seen.received != self.consumed(place)? || no_more {
            found |= events::IN;
        }
        if no_more {
            found |= events::RDHUP;
        }
        if seen.receive_error().or(seen.send_error()).is_some() {
            found |= events::ERR | events::OUT;
        }
        if no_more && no_send {
            found |= events::HUP;
        }
        let least = if seen.has(state::DATAGRAM) { 2 * record::LEN } else { 1 };
        let may_send = seen.has(state::CONNECTED | state::DATAGRAM);
        if may_send && !no_send && self.seems_free(place, &seen, least)? {
            found |= events::OUT;
        }
        Ok(found)
    }
}
