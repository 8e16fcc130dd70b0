//! The service thread accepts connections of listeners and creates sockets for them.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::net::sockopt;

use super::kinds::{Accept, Parent, Progress, RdmaSocket, Socket, TcpSocket};
use super::layout::state;
use super::pending::PendingConn;
use super::service::ServiceThread;
use crate::error::Result;

/// Connections accepted from a listener per turn.
const ACCEPT_BATCH: u32 = 64;

impl ServiceThread {
    /// Accepts connections that wait at a listener.
    pub(super) fn accept_some(&mut self, index: u16) -> Result<Progress> {
        if let Socket::Listener(listener) = &mut self.sockets[index].socket {
            listener.reap_accepted();
        }
        for _ in 0..ACCEPT_BATCH {
            let has_slot = self.sockets.has_vacant();
            let slot = &mut self.sockets[index];
            let Socket::Listener(listener) = &slot.socket else { return Ok(Progress::Idle) };
            let is_rdma = listener.is_rdma;
            match listener.accept(&mut slot.common, has_slot) {
                Accept::Connection(connection, peer) if is_rdma => {
                    self.add_pending(index, connection, peer);
                }
                Accept::Connection(connection, peer) => {
                    if !self.accept_tcp(index, connection, peer)? {
                        return Ok(Progress::Retry);
                    }
                }
                Accept::Aborted => {}
                Accept::Nothing => return Ok(Progress::Idle),
                Accept::Lacking => return Ok(Progress::Retry),
            }
        }
        Ok(Progress::More)
    }

    /// Creates a socket for an accepted TCP connection and queues it at its listener. False if the
    /// connection was dropped.
    fn accept_tcp(
        &mut self,
        listener: u16,
        connection: OwnedFd,
        peer: Option<SocketAddr>,
    ) -> Result<bool> {
        let parent = &self.sockets[listener].common;
        let (options, v6) = (parent.options, parent.v6);
        let Some(index) = self.open_slot(options)? else { return Ok(false) };
        if options.no_delay {
            // Failure costs latency only.
            let _ = sockopt::set_tcp_nodelay(&connection, true);
        }
        let slot = &mut self.sockets[index];
        (slot.common.v6, slot.common.fd) = (v6, Some(connection));
        (slot.common.readable, slot.common.writable) = (true, true);
        slot.common.flags = state::CONNECTED;
        let mut tcp = TcpSocket::default();
        let ready = self
            .resources
            .alloc_rings(&mut tcp.rings, &options)
            .and_then(|()| self.resources.watch(&mut slot.common));
        slot.socket = Socket::Tcp(tcp);
        if let Err(errno) = ready {
            tracing::warn!(%errno, "no rings for an accepted connection; it is reset");
            slot.common.options.abort = true;
            self.release(index)?;
            return Ok(false);
        }
        slot.publish(&self.resources)?;
        self.enqueue_accepted(listener, index, peer)?;
        Ok(true)
    }

    /// Queues a connection at its listener, and for its first turn of service.
    fn enqueue_accepted(
        &mut self,
        listener: u16,
        index: u16,
        peer: Option<SocketAddr>,
    ) -> Result<()> {
        let handle = self.sockets[index].common.handle();
        let slot = &mut self.sockets[listener];
        if let Socket::Listener(listener) = &mut slot.socket {
            listener.enqueue(&slot.common, handle, peer, &self.resources)?;
        }
        self.queue(index);
        Ok(())
    }

    /// Adds an accepted connection that has to send its hello.
    fn add_pending(&mut self, listener: u16, fd: OwnedFd, peer: Option<SocketAddr>) {
        if let Err(errno) = self.resources.watch_descriptor(&fd, self.pending.next_data()) {
            tracing::warn!(%errno, "cannot watch an accepted connection; it is closed");
            return;
        }
        self.pending.add(self.sockets[listener].common.handle(), fd, peer);
    }

    /// epoll reports an event of a pending connection.
    pub(super) fn on_pending_event(&mut self, data: u64) -> Result<()> {
        match self.pending.position(data) {
            Some(at) => self.try_promote(at).map(|_| ()),
            None => Ok(()),
        }
    }

    /// Reads a pending connection and promotes it if its hello is complete; false if it stays
    /// pending.
    fn try_promote(&mut self, at: usize) -> Result<bool> {
        let is_hardware = self.resources.device_cache.is_hardware();
        let Some(conn) = self.pending.get_mut(at) else { return Ok(false) };
        let handle = conn.listener;
        match conn.read_hello(is_hardware) {
            Ok(false) => return Ok(false),
            Err(_) => {
                self.pending.remove(at);
                return Ok(true);
            }
            Ok(true) => {}
        }
        let has_slot = self.sockets.has_vacant();
        let Some((listener, parent)) = self.sockets.listener(handle) else {
            self.pending.remove(at);
            return Ok(true);
        };
        if !parent.has_room() || !has_slot {
            // The retry timer tries again.
            return Ok(false);
        }
        let Some(conn) = self.pending.remove(at) else { return Ok(false) };
        self.promote(listener, conn)?;
        Ok(true)
    }

    /// Periodic: drops pending connections past the handshake deadline and retries those that
    /// lacked a slot.
    pub(super) fn expire_pending(&mut self, now: Instant) -> Result<()> {
        self.pending.expire(now);
        let mut at = 0;
        while at < self.pending.len() {
            at += usize::from(!self.try_promote(at)?);
        }
        Ok(())
    }

    /// Creates a socket for a connection that has sent its hello.
    fn promote(&mut self, listener: u16, conn: PendingConn) -> Result<()> {
        let slot = &mut self.sockets[listener];
        let (options, v6) = (slot.common.options, slot.common.v6);
        let Some(index) = self.open_slot(options)? else { return Ok(()) };
        if let Socket::Listener(parent) = &mut self.sockets[listener].socket {
            parent.pending_accepts += 1;
        }
        let slot = &mut self.sockets[index];
        (slot.common.v6, slot.common.fd) = (v6, Some(conn.fd));
        (slot.common.readable, slot.common.writable) = (true, true);
        slot.common.flags = state::CONNECTING | state::WARP;
        let mut rdma = RdmaSocket::accepted(Parent { listener: conn.listener, peer: conn.peer });
        let (common, resources) = (&mut slot.common, &mut self.resources);
        let ready = resources
            .alloc_rings(&mut rdma.rings, &options)
            .and_then(|()| resources.rewatch(common));
        let progress = match ready {
            Ok(()) => rdma.begin_handshake(common, conn.handshake, conn.deadline, resources),
            Err(errno) => {
                tracing::warn!(%errno, "no rings for an accepted connection; it is reset");
                rdma.abort(common, errno, resources)
            }
        };
        slot.socket = Socket::Rdma(Box::new(rdma));
        self.apply(index, progress?)
    }

    /// The handshake of an RDMA stream is complete: it is connected, or queued at its listener.
    pub(super) fn on_established(&mut self, index: u16) -> Result<()> {
        let Socket::Rdma(rdma) = &mut self.sockets[index].socket else { return Ok(()) };
        let Some(Parent { listener, peer }) = rdma.parent.take() else {
            self.resources.counters.connected.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        };
        let Some((listener, parent)) = self.sockets.listener(listener) else {
            // The listener is closed.
            self.sockets[index].common.options.abort = true;
            return self.release(index);
        };
        parent.pending_accepts -= 1;
        self.enqueue_accepted(listener, index, peer)
    }
}
