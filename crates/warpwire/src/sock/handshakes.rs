//! `warp` connections on the host: handshake over TCP, supervision and release. Their data bypasses
//! this thread.
//!
//! 1. The connecting end sends first. Until an accepted connection has sent a valid hello it has no
//!    socket, no rings and no queue pair: it waits in [`PendingHandshakes`], with a deadline.
//! 2. Everything that is created for a connection belongs to it alone and is released with it: QP
//!    slot, queue pair, registrations.
//! 3. The TCP connection shows that the peer is alive. It is closed after everything that was sent
//!    has arrived, or reset.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::agent::Agent;
use super::device_cache::ConnResources;
use super::layout::{address_bytes, host_state, record, state};
use super::socket::SocketRole;
use super::warp::{FIN, Handshake, MAX_LINE};
use crate::error::{Error, Kind, Result};
use crate::mlx5::Status;

/// Time limit of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of accepted connections without a hello; one more evicts the oldest.
const MAX_PENDING: usize = 1024;
/// Marks descriptors of pending handshakes in epoll data.
pub(super) const PENDING_BIT: u64 = 1 << 40;

/// The `warp` part of a socket.
#[derive(Default)]
pub(super) struct WarpState {
    pub(super) conn_resources: Option<ConnResources>,
    pub(super) handshake: Option<Handshake>,
    /// When the handshake must be complete.
    pub(super) deadline: Option<Instant>,
    /// The listener that accepted it, until it is queued there, and its peer's address.
    pub(super) parent: Option<(i32, Option<SocketAddr>)>,
    /// The peer has closed in an orderly way.
    pub(super) peer_closed: bool,
    /// How many work requests its kernels had posted when they closed it.
    pub(super) posted: u64,
    /// Listener: number of its connections in the handshake.
    pub(super) pending_accepts: u64,
}

/// An accepted connection without a complete hello.
struct PendingConn {
    number: u64,
    fd: OwnedFd,
    peer: Option<SocketAddr>,
    listener: i32,
    handshake: Handshake,
    deadline: Instant,
}

/// Accepted connections without a socket, oldest first.
#[derive(Default)]
pub(super) struct PendingHandshakes {
    conns: std::collections::VecDeque<PendingConn>,
    next: u64,
}

impl PendingHandshakes {
    pub(super) fn is_empty(&self) -> bool {
        self.conns.is_empty()
    }

    /// Drops the connections of a closed listener.
    pub(super) fn remove_listener(&mut self, listener: i32) {
        self.conns.retain(|conn| conn.listener != listener);
    }
}

impl PendingConn {
    /// Reads the hello: whether it is complete, or an errno if the connection is to be dropped.
    fn read_hello(&mut self, is_hardware: bool) -> std::result::Result<bool, Errno> {
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

impl Agent {
    /// Adds an accepted connection that has to send its hello.
    pub(super) fn add_pending(&mut self, listener: u16, fd: OwnedFd, peer: Option<SocketAddr>) {
        let listener = self.sockets[usize::from(listener)].handle(listener);
        let number = self.pending.next;
        if let Err(errno) = self.watch_descriptor(&fd, PENDING_BIT | number) {
            tracing::warn!(%errno, "cannot watch an accepted connection; it is closed");
            return;
        }
        if self.pending.conns.len() == MAX_PENDING {
            self.pending.conns.pop_front();
        }
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        self.pending.next = (number + 1) % PENDING_BIT;
        let handshake = Handshake::accepting();
        self.pending.conns.push_back(PendingConn {
            number,
            fd,
            peer,
            listener,
            handshake,
            deadline,
        });
    }

    /// epoll reports an event of a pending connection.
    pub(super) fn on_pending_event(&mut self, number: u64) -> Result<()> {
        let at = self.pending.conns.iter().position(|conn| conn.number == number);
        match at {
            Some(at) => self.try_promote(at).map(|_| ()),
            None => Ok(()),
        }
    }

    /// Reads a pending connection and promotes it if its hello is complete; false if it stays
    /// pending.
    fn try_promote(&mut self, at: usize) -> Result<bool> {
        let is_hardware = self.device_cache.is_hardware();
        let Some(conn) = self.pending.conns.get_mut(at) else { return Ok(false) };
        let handle = conn.listener;
        match conn.read_hello(is_hardware) {
            Ok(false) => return Ok(false),
            Err(_) => {
                self.pending.conns.remove(at);
                return Ok(true);
            }
            Ok(true) => {}
        }
        let Ok(listener) = self.find(handle) else {
            self.pending.conns.remove(at);
            return Ok(true);
        };
        let socket = &self.sockets[usize::from(listener)];
        if socket.room() < (socket.warp.pending_accepts + 1) * record::LEN || self.vacant.is_empty()
        {
            // The retry timer tries again.
            return Ok(false);
        }
        let Some(conn) = self.pending.conns.remove(at) else { return Ok(false) };
        self.promote(listener, conn)?;
        Ok(true)
    }

    /// Periodic: drops pending connections past the handshake deadline and retries those that
    /// lacked a slot.
    pub(super) fn expire_pending(&mut self, now: Instant) -> Result<()> {
        self.pending.conns.retain(|conn| conn.deadline > now);
        let mut at = 0;
        while at < self.pending.conns.len() {
            at += usize::from(!self.try_promote(at)?);
        }
        Ok(())
    }

    /// Creates a socket for a connection that has sent its hello.
    fn promote(&mut self, listener: u16, conn: PendingConn) -> Result<()> {
        let Some(index) = self.alloc_socket()? else { return Ok(()) };
        let parent = &mut self.sockets[usize::from(listener)];
        let (sockopts, v6) = (parent.sockopts, parent.v6);
        parent.warp.pending_accepts += 1;
        let socket = &mut self.sockets[usize::from(index)];
        (socket.sockopts, socket.v6, socket.is_warp) = (sockopts, v6, true);
        socket.fd = Some(conn.fd);
        (socket.readable, socket.writable) = (true, true);
        socket.flags = state::CONNECTING;
        socket.warp.parent = Some((conn.listener, conn.peer));
        let ready = self.alloc_rings(index).and_then(|()| self.rewatch(index));
        if let Err(errno) = ready {
            tracing::warn!(%errno, "no rings for an accepted connection; it is reset");
            return self.abort_connection(index, errno);
        }
        self.begin_handshake(index, conn.handshake, conn.deadline)
    }

    /// TCP is connected: allocates the queue pair and sends our hello.
    pub(super) fn begin_connecting(&mut self, index: u16) -> Result<()> {
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        self.begin_handshake(index, Handshake::accepting(), deadline)
    }

    /// Allocates the queue pair and sends our hello. The deadline is that of the whole handshake.
    fn begin_handshake(
        &mut self,
        index: u16,
        mut handshake: Handshake,
        deadline: Instant,
    ) -> Result<()> {
        let introduced = self.attach(index).and_then(|hello| handshake.introduce(&hello));
        let socket = &mut self.sockets[usize::from(index)];
        match introduced {
            Ok(()) => {
                socket.warp.handshake = Some(handshake);
                socket.warp.deadline = Some(deadline);
                self.publish_socket(index)?;
                self.drive_handshake(index)
            }
            Err(error) => {
                tracing::warn!(%error, "no queue pair for a connection; it is reset");
                self.abort_connection(index, Errno::NOBUFS)
            }
        }
    }

    /// Creates a connection's queue pair and registrations.
    fn attach(&mut self, index: u16) -> Result<super::warp::Hello> {
        let conn_memory = self.conn_memory(index)?;
        let socket = &self.sockets[usize::from(index)];
        let local = socket.fd.as_ref().and_then(|fd| rustix::net::getsockname(fd).ok());
        let local = local.and_then(|name| SocketAddr::try_from(name).ok());
        let missing = |why: &'static str| Error::new(Kind::OutOfMemory, "connect").why(why);
        let local = local.ok_or_else(|| missing("the connection has no local address"))?;
        let qp_slots = self.qp_slots.as_mut();
        let qp_slots = qp_slots.ok_or_else(|| missing("the family `warp` is disabled"))?;
        let qp_slot = qp_slots.take().ok_or_else(|| {
            missing("all queue pairs are in use").fix("raise SockOptions::warp_sockets")
        })?;
        match ConnResources::new(&mut self.device_cache, qp_slots, qp_slot, local, conn_memory) {
            Ok(conn_resources) => {
                let hello = conn_resources.hello();
                self.sockets[usize::from(index)].warp.conn_resources = Some(conn_resources);
                Ok(hello)
            }
            Err(error) => {
                qp_slots.release(qp_slot);
                Err(error)
            }
        }
    }

    /// Releases a connection's queue pair and registrations.
    pub(super) fn detach(&mut self, index: u16) {
        let socket = &mut self.sockets[usize::from(index)];
        socket.warp.handshake = None;
        socket.warp.deadline = None;
        if let (Some(conn_resources), Some(qp_slots)) =
            (socket.warp.conn_resources.take(), self.qp_slots.as_mut())
        {
            let qp_slot = conn_resources.qp_slot;
            drop(conn_resources);
            qp_slots.release(qp_slot);
        }
    }

    /// Serves a stream: handshake, hang-up, close.
    pub(super) fn serve_warp(&mut self, index: u16) -> Result<bool> {
        let socket = &self.sockets[usize::from(index)];
        if socket.has(state::CONNECTING) {
            if socket.warp.handshake.is_none() {
                self.finish_connecting(index)?;
            } else {
                self.drive_handshake(index)?;
            }
            return Ok(false);
        }
        if socket.has(state::CONNECTED) && socket.readable {
            self.check_hangup(index)?;
        }
        self.finish_warp(index)?;
        Ok(false)
    }

    /// Continues a handshake with the bytes that can be read now.
    fn drive_handshake(&mut self, index: u16) -> Result<()> {
        let outcome = self.try_handshake(index);
        let socket = &self.sockets[usize::from(index)];
        let is_late = socket.warp.deadline.is_some_and(|deadline| Instant::now() > deadline);
        match outcome {
            Ok(true) => self.establish(index),
            Ok(false) if is_late => self.abort_connection(index, Errno::TIMEDOUT),
            Ok(false) => {
                self.retry_later(index);
                Ok(())
            }
            Err(errno) => self.abort_connection(index, errno),
        }
    }

    /// True when the handshake is complete.
    fn try_handshake(&mut self, index: u16) -> std::result::Result<bool, Errno> {
        let mut bytes = [0; MAX_LINE];
        let mut count = 0;
        loop {
            let socket = &mut self.sockets[usize::from(index)];
            let (Some(handshake), Some(fd)) = (&mut socket.warp.handshake, &socket.fd) else {
                return Ok(false);
            };
            flush_handshake(handshake, fd)?;
            if let Err(error) = handshake.take(&bytes[..count]) {
                // Send the peer the reason, if it still reads.
                let _ = flush_handshake(handshake, fd);
                return Err(refusal(&error));
            }
            if let Some(peer_hello) = handshake.peer().copied()
                && !handshake.is_ready()
            {
                self.connect_qp(index, &peer_hello)?;
                count = 0;
                continue;
            }
            if handshake.is_done() {
                return Ok(true);
            }
            match rustix::net::recv(fd, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Errno::CONNRESET),
                Ok((got, _)) => count = got,
                Err(Errno::INTR) => count = 0,
                Err(Errno::AGAIN) => {
                    socket.readable = false;
                    return Ok(false);
                }
                Err(errno) => return Err(errno),
            }
        }
    }

    /// The peer's hello is complete: connects the queue pair.
    fn connect_qp(
        &mut self,
        index: u16,
        peer_hello: &super::warp::Hello,
    ) -> std::result::Result<(), Errno> {
        let socket = &mut self.sockets[usize::from(index)];
        // Both sizes are powers of two, so where the usable part of our ring does not wrap, the
        // peer's does not either.
        socket.send_window = socket.send_ring.1.min(peer_hello.ring_size);
        socket.peer_window = peer_hello.window.unwrap_or(u64::MAX);
        let (Some(conn_resources), Some(qp_slots)) = (&socket.warp.conn_resources, &self.qp_slots)
        else {
            return Err(Errno::NOBUFS);
        };
        let peer = socket.fd.as_ref().and_then(|fd| rustix::net::getpeername(fd).ok().flatten());
        let peer = peer.and_then(|name| SocketAddr::try_from(name).ok());
        let checked = match peer {
            Some(peer) if !self.device_cache.is_hardware() => peer_hello.check_address(peer.ip()),
            Some(_) => Ok(()),
            None => return Err(Errno::CONNRESET),
        };
        let connected = checked
            .and_then(|()| conn_resources.connect_qp(qp_slots, peer_hello))
            .and_then(|()| self.publish_socket(index));
        let socket = &mut self.sockets[usize::from(index)];
        let Some(handshake) = &mut socket.warp.handshake else { return Err(Errno::NOBUFS) };
        match connected {
            Ok(()) => {
                handshake.mark_ready();
                Ok(())
            }
            Err(error) => {
                tracing::warn!(%error, "cannot connect a queue pair");
                handshake.refuse(&error);
                if let Some(fd) = &socket.fd {
                    let _ = flush_handshake(handshake, fd);
                }
                Err(Errno::PROTO)
            }
        }
    }

    /// The handshake is complete: publishes the connection to kernels.
    fn establish(&mut self, index: u16) -> Result<()> {
        let socket = &mut self.sockets[usize::from(index)];
        (socket.warp.handshake, socket.warp.deadline) = (None, None);
        socket.flags = socket.flags & !state::CONNECTING | state::CONNECTED;
        self.counters.warp.open(index, socket.generation);
        self.publish_state(index)?;
        let parent = self.sockets[usize::from(index)].warp.parent.take();
        let Some((listener, peer)) = parent else {
            self.counters.connected.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        };
        let Ok(listener) = self.find(listener) else {
            // The listener is closed.
            self.sockets[usize::from(index)].sockopts.abort = true;
            return self.release_socket(index);
        };
        self.sockets[usize::from(listener)].warp.pending_accepts -= 1;
        self.enqueue_accepted(listener, index, peer)
    }

    /// Queues a connection at its listener.
    pub(super) fn enqueue_accepted(
        &mut self,
        listener: u16,
        index: u16,
        peer: Option<SocketAddr>,
    ) -> Result<()> {
        let mut entry = [0; record::LEN as usize];
        let handle = self.sockets[usize::from(index)].handle(index);
        entry[..4].copy_from_slice(&handle.to_le_bytes());
        entry[record::ADDRESS as usize..].copy_from_slice(&address_bytes(peer));
        let socket = &mut self.sockets[usize::from(listener)];
        self.shared_area.put(socket.receive_ring, socket.received, &entry)?;
        socket.received += record::LEN;
        socket.waiting.push_back(handle);
        let received = socket.received;
        self.shared_area.store_word(listener, host_state::RECEIVED, received)?;
        self.counters.accepted.fetch_add(1, Ordering::Relaxed);
        self.queue(index);
        Ok(())
    }

    /// The TCP connection is readable after the handshake: end of stream, reset, or a protocol
    /// error.
    fn check_hangup(&mut self, index: u16) -> Result<()> {
        let socket = &mut self.sockets[usize::from(index)];
        let Some(fd) = &socket.fd else { return Ok(()) };
        match rustix::net::recv(fd, &mut [0; 1], RecvFlags::DONTWAIT | RecvFlags::PEEK) {
            Ok((0, _)) => {
                socket.readable = false;
                if self.shared_area.received(index)? & FIN == 0 {
                    return self.abort_connection(index, Errno::CONNRESET);
                }
                let socket = &mut self.sockets[usize::from(index)];
                socket.warp.peer_closed = true;
                socket.flags |= state::RECEIVE_END | state::SEND_END;
                self.publish_state(index)
            }
            Ok(_) => self.abort_connection(index, Errno::PROTO),
            Err(Errno::AGAIN | Errno::INTR) => {
                socket.readable = false;
                Ok(())
            }
            Err(errno) => self.abort_connection(index, errno),
        }
    }

    /// Aborts a connection: `errno` here, a reset at the peer. It is released if no kernel has its
    /// handle.
    pub(super) fn abort_connection(&mut self, index: u16, errno: Errno) -> Result<()> {
        let socket = &mut self.sockets[usize::from(index)];
        // During the handshake: no reset, so that the peer can still read a refusal.
        let is_connected = socket.has(state::CONNECTED);
        if let Some((listener, _)) = socket.warp.parent.take() {
            socket.sockopts.abort = is_connected;
            if let Ok(listener) = self.find(listener) {
                self.sockets[usize::from(listener)].warp.pending_accepts -= 1;
            }
            return self.release_socket(index);
        }
        socket.fail(Some(errno), Some(errno));
        let before = std::mem::replace(&mut socket.sockopts.abort, is_connected);
        self.drop_descriptor(index);
        self.sockets[usize::from(index)].sockopts.abort = before;
        self.publish_state(index)?;
        self.detach(index);
        if self.sockets[usize::from(index)].closing.is_some() {
            return self.release_socket(index);
        }
        Ok(())
    }

    /// A kernel aborts its connection; returns the errno that is recorded.
    pub(super) fn give_up(&mut self, index: u16, errno: u64) -> Result<Errno> {
        let errno = match i32::try_from(errno).map(Errno::from_raw_os_error) {
            Ok(errno @ (Errno::PROTO | Errno::TIMEDOUT)) => errno,
            _ => Errno::CONNRESET,
        };
        let socket = &mut self.sockets[usize::from(index)];
        if socket.is_warp && socket.has(state::CONNECTED) && !socket.warp.peer_closed {
            // If the queue pair has failed, its status gives the better reason.
            self.check_queue_pair(index)?;
            let socket = &self.sockets[usize::from(index)];
            if socket.errno() == 0 && !socket.warp.peer_closed {
                self.abort_connection(index, errno)?;
            }
        }
        Ok(errno)
    }

    /// Releases a closed socket once all its posted work has completed.
    pub(super) fn finish_warp(&mut self, index: u16) -> Result<()> {
        let socket = &self.sockets[usize::from(index)];
        if !(socket.open && socket.is_warp) || socket.closing.is_none() {
            return Ok(());
        }
        let WarpState { conn_resources, peer_closed, posted, .. } = &socket.warp;
        let is_done = *peer_closed
            || socket.sockopts.abort
            || conn_resources
                .as_ref()
                .is_none_or(|conn_resources| conn_resources.is_drained(*posted));
        if is_done { self.release_socket(index) } else { Ok(()) }
    }

    /// Checks the queue pairs of all connections for failure.
    pub(super) fn check_queue_pairs(&mut self) -> Result<()> {
        for index in 0..self.used_up_to {
            self.check_queue_pair(index)?;
        }
        Ok(())
    }

    fn check_queue_pair(&mut self, index: u16) -> Result<()> {
        let socket = &self.sockets[usize::from(index)];
        let is_connected =
            socket.open && socket.role == SocketRole::Stream && socket.has(state::CONNECTED);
        let Some(conn_resources) = socket.warp.conn_resources.as_ref().filter(|_| is_connected)
        else {
            return Ok(());
        };
        let Some(failure) = conn_resources.failure() else { return Ok(()) };
        // After an orderly close the peer's queue pair is gone too.
        self.check_hangup(index)?;
        let socket = &self.sockets[usize::from(index)];
        if !socket.open || socket.warp.peer_closed || socket.errno() != 0 {
            return Ok(());
        }
        tracing::debug!(index, ?failure, "a queue pair has failed");
        self.abort_connection(
            index,
            match failure {
                Some(Status::RetryExceeded) => Errno::TIMEDOUT,
                _ => Errno::CONNRESET,
            },
        )
    }
}

/// Sends pending handshake bytes until the socket would block.
fn flush_handshake(handshake: &mut Handshake, fd: &OwnedFd) -> std::result::Result<(), Errno> {
    while !handshake.to_send().is_empty() {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(fd, handshake.to_send(), flags) {
            Ok(count) => handshake.sent(count),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(()),
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// The errno that kernels get for a failed handshake.
fn refusal(error: &Error) -> Errno {
    // Info only: any program can connect to the port.
    tracing::info!(%error, "handshake failed");
    match error.kind() {
        Kind::PeerLost => Errno::CONNREFUSED,
        _ => Errno::PROTO,
    }
}
