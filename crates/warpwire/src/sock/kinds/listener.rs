//! Listeners, of TCP and of RDMA streams. The receive ring holds records of accepted connections.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::{Common, Ring, Rings};
use crate::error::Result;
use crate::sock::layout::{Record, address_bytes, record};
use crate::sock::resources::Resources;

/// A listener.
pub(in crate::sock) struct Listener {
    pub(super) rings: Rings,
    /// Whether its connections are RDMA streams, which become sockets after their hello only.
    pub(in crate::sock) is_rdma: bool,
    /// Handles of connections that no kernel has accepted yet.
    pub(in crate::sock) waiting: VecDeque<i32>,
    /// Number of connections in the handshake of RDMA streams.
    pub(in crate::sock) pending_accepts: u64,
}

/// The outcome of one accept.
pub(in crate::sock) enum Accept {
    Connection(OwnedFd, Option<SocketAddr>),
    /// The connection was closed while it waited; another one may follow.
    Aborted,
    /// No connection is waiting, or the ring has no room.
    Nothing,
    /// A slot, a descriptor or memory is lacking.
    Lacking,
}

impl Listener {
    pub(in crate::sock) fn new(ring: Ring, is_rdma: bool) -> Self {
        Self {
            rings: Rings::new(ring, (0, 0)),
            is_rdma,
            waiting: VecDeque::new(),
            pending_accepts: 0,
        }
    }

    /// Forgets connections that kernels have accepted.
    pub(in crate::sock) fn reap_accepted(&mut self) {
        let left = ((self.rings.received - self.rings.consumed) / record::LEN) as usize;
        while self.waiting.len() > left {
            self.waiting.pop_front();
        }
    }

    /// Whether the ring has room for one more connection after all that are in the handshake.
    pub(in crate::sock) fn has_room(&self) -> bool {
        self.rings.room() >= (self.pending_accepts + 1) * record::LEN
    }

    /// Accepts the next connection. `has_slot` is whether the socket table has a free slot.
    pub(in crate::sock) fn accept(&self, common: &mut Common, has_slot: bool) -> Accept {
        let may = common.readable && self.rings.room() >= record::LEN && common.closing.is_none();
        let Some(fd) = common.fd.as_ref().filter(|_| may) else { return Accept::Nothing };
        // RDMA streams need a slot only after their hello.
        if !has_slot && !self.is_rdma {
            return Accept::Lacking;
        }
        match rustix::net::acceptfrom_with(fd, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
            Ok((connection, peer)) => {
                let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
                Accept::Connection(connection, peer)
            }
            Err(Errno::AGAIN) => {
                common.readable = false;
                Accept::Nothing
            }
            Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => Accept::Aborted,
            Err(errno) => {
                tracing::warn!(%errno, "cannot accept a connection");
                Accept::Lacking
            }
        }
    }

    /// Puts a connection into the ring, for a kernel to accept.
    pub(in crate::sock) fn enqueue(
        &mut self,
        common: &Common,
        connection: i32,
        peer: Option<SocketAddr>,
        resources: &Resources,
    ) -> Result<()> {
        let entry = Record { value: connection as u32, error: 0, address: address_bytes(peer) };
        let (ring, at) = (self.rings.receive, self.rings.received);
        resources.shared_area.put(ring, at, &entry.encode())?;
        self.rings.received += record::LEN;
        self.waiting.push_back(connection);
        resources.publish_received(common, &self.rings)?;
        resources.counters.accepted.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
