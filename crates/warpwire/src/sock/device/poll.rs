//! Waiting for several sockets.

use std::time::Duration;

use rustix::io::Errno;

use super::wait::WaitLimit;
use super::{Sock, SockError, SockResult, Sockets, state};
use crate::sock::layout::{events, record};

/// One entry of [`Sockets::poll`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollEntry {
    /// The socket.
    pub socket: Sock,
    /// Requested events: bits of [`events`].
    pub events: u16,
    /// Result: the requested events that are ready, and `ERR`, `HUP` and `NVAL` in any case.
    pub revents: u16,
}

impl PollEntry {
    /// Requests `events` of a socket.
    pub fn new(socket: Sock, events: u16) -> Self {
        Self { socket, events, revents: 0 }
    }
}

impl Sockets<'_> {
    /// Waits until an entry has an event or the timeout expires (`None`: no timeout), and returns
    /// the number of entries with events, 0 on timeout. Events that were not requested do not end
    /// the wait.
    pub fn poll(&self, list: &mut [PollEntry], timeout: Option<Duration>) -> SockResult<usize> {
        let wait_limit = match timeout {
            Some(Duration::ZERO) => WaitLimit::None,
            Some(limit) => WaitLimit::Within(limit),
            None => WaitLimit::Unlimited,
        };
        let outcome = self.wait(wait_limit, || {
            let mut count = 0;
            for entry in list.iter_mut() {
                let always = events::ERR | events::HUP | events::NVAL;
                entry.revents = self.ready(entry.socket)? & (entry.events | always);
                count += usize::from(entry.revents != 0);
            }
            Ok((count > 0).then_some(count))
        });
        match outcome {
            Err(SockError::Errno(Errno::AGAIN | Errno::TIMEDOUT)) => Ok(0),
            outcome => outcome,
        }
    }

    /// All current events of a socket.
    fn ready(&self, socket: Sock) -> SockResult<u16> {
        let looked = self
            .socket_ref(socket)
            .and_then(|socket_ref| Ok((socket_ref, self.load_snapshot(socket_ref)?)));
        let (socket_ref, snapshot) = match looked {
            Ok(looked) => looked,
            Err(SockError::Errno(_)) => return Ok(events::NVAL),
            Err(fault) => return Err(fault),
        };
        let mut revents = 0;
        let (no_more, no_send) = (snapshot.has(state::RECEIVE_END), snapshot.has(state::SEND_END));
        // A hint only: the peer's counters are validated under the lock.
        if snapshot.received != self.consumed(socket_ref)? || no_more {
            revents |= events::IN;
        }
        if no_more {
            revents |= events::RDHUP;
        }
        if snapshot.receive_error().or(snapshot.send_error()).is_some() {
            revents |= events::ERR | events::OUT;
        }
        if no_more && no_send {
            revents |= events::HUP;
        }
        let least = if snapshot.has(state::DATAGRAM) { 2 * record::LEN } else { 1 };
        let may_send = snapshot.has(state::CONNECTED | state::DATAGRAM);
        if may_send && !no_send && self.has_room_hint(socket_ref, &snapshot, least)? {
            revents |= events::OUT;
        }
        Ok(revents)
    }
}
