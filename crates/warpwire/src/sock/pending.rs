//! Accepted connections of RDMA streams before their hello. The connecting end sends first: until
//! an accepted connection has sent a valid hello it has no socket, no rings and no queue pair, only
//! a deadline here.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::kinds::{HANDSHAKE_TIMEOUT, flush_handshake, refusal};
use super::warp::{Handshake, MAX_LINE};

/// Maximum number of accepted connections without a hello; one more evicts the oldest.
const MAX_PENDING: usize = 1024;
/// Marks descriptors of pending handshakes in epoll data.
pub(super) const PENDING_BIT: u64 = 1 << 40;

/// An accepted connection without a complete hello.
pub(super) struct PendingConn {
    number: u64,
    pub(super) fd: OwnedFd,
    pub(super) peer: Option<SocketAddr>,
    pub(super) listener: i32,
    pub(super) handshake: Handshake,
    pub(super) deadline: Instant,
}

/// Accepted connections without a socket, oldest first.
#[derive(Default)]
pub(super) struct PendingHandshakes {
    conns: VecDeque<PendingConn>,
    next: u64,
}

impl PendingHandshakes {
    pub(super) fn is_empty(&self) -> bool {
        self.conns.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.conns.len()
    }

    /// The epoll data of the next connection.
    pub(super) fn next_data(&self) -> u64 {
        PENDING_BIT | self.next
    }

    /// Adds a connection that has to send its hello.
    pub(super) fn add(&mut self, listener: i32, fd: OwnedFd, peer: Option<SocketAddr>) {
        if self.conns.len() == MAX_PENDING {
            self.conns.pop_front();
        }
        let (number, deadline) = (self.next, Instant::now() + HANDSHAKE_TIMEOUT);
        self.next = (number + 1) % PENDING_BIT;
        let handshake = Handshake::accepting();
        self.conns.push_back(PendingConn { number, fd, peer, listener, handshake, deadline });
    }

    /// The place of the connection with this epoll data.
    pub(super) fn position(&self, data: u64) -> Option<usize> {
        self.conns.iter().position(|conn| PENDING_BIT | conn.number == data)
    }

    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut PendingConn> {
        self.conns.get_mut(at)
    }

    pub(super) fn remove(&mut self, at: usize) -> Option<PendingConn> {
        self.conns.remove(at)
    }

    /// Drops connections past their deadline.
    pub(super) fn expire(&mut self, now: Instant) {
        self.conns.retain(|conn| conn.deadline > now);
    }

    /// Drops the connections of a closed listener.
    pub(super) fn remove_listener(&mut self, listener: i32) {
        self.conns.retain(|conn| conn.listener != listener);
    }
}

impl PendingConn {
    /// Reads the hello: whether it is complete, or an errno if the connection is to be dropped.
    pub(super) fn read_hello(&mut self, is_hardware: bool) -> Result<bool, Errno> {
        let mut bytes = [0; MAX_LINE];
        while self.handshake.peer().is_none() {
            let count = match rustix::net::recv(&self.fd, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Errno::CONNRESET),
                Ok((count, _)) => count,
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
            };
            let mut taken = self.handshake.take(&bytes[..count]);
            if let (Some(hello), Some(peer), false) =
                (self.handshake.peer(), self.peer, is_hardware)
                && taken.is_ok()
                && let Err(error) = hello.check_address(peer.ip())
            {
                self.handshake.refuse(&error);
                taken = Err(error);
            }
            if let Err(error) = taken {
                // Send the peer the reason, if it still reads.
                let _ = flush_handshake(&mut self.handshake, &self.fd);
                return Err(refusal(&error));
            }
        }
        Ok(true)
    }
}
