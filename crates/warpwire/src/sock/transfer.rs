//! Streams and listeners: bytes between rings and the operating system's sockets.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, SocketFlags, sockopt};

use super::agent::{Agent, LINGER_TIMEOUT, QUANTUM};
use super::layout::{host_state, record, state};
use super::socket::SocketRole;
use crate::error::Result;

/// Connections accepted from a listener per turn.
const ACCEPT_BATCH: u32 = 64;

impl Agent {
    /// Serves a socket for one turn; true if more work may be left.
    pub(super) fn serve(&mut self, index: u16) -> Result<bool> {
        let socket = &self.sockets[usize::from(index)];
        if !socket.open {
            return Ok(false);
        }
        match socket.role {
            SocketRole::Listener => self.accept_some(index),
            SocketRole::Datagram => self.serve_datagrams(index),
            SocketRole::Stream if socket.is_warp => self.serve_warp(index),
            SocketRole::Stream => self.serve_stream(index),
        }
    }

    fn serve_stream(&mut self, index: u16) -> Result<bool> {
        if self.sockets[usize::from(index)].has(state::CONNECTING) {
            self.finish_connecting(index)?;
        }
        if !self.is_connected(index) {
            return Ok(false);
        }
        let more = self.send_some(index)? | self.receive_some(index)?;
        self.finish(index)?;
        Ok(more && self.sockets[usize::from(index)].open)
    }

    /// Completes a connect in progress: connected or failed.
    pub(super) fn finish_connecting(&mut self, index: u16) -> Result<()> {
        let socket = &mut self.sockets[usize::from(index)];
        let Some(fd) = &socket.fd else { return Ok(()) };
        if !socket.writable {
            return Ok(());
        }
        match sockopt::socket_error(fd) {
            // epoll may report a new descriptor as hung up before connect was tried.
            Ok(Ok(())) if rustix::net::getpeername(fd).is_err() => {
                socket.writable = false;
                return Ok(());
            }
            Ok(Ok(())) if socket.is_warp => {
                socket.readable = true;
                return self.begin_connecting(index);
            }
            Ok(Ok(())) => {
                socket.flags = socket.flags & !state::CONNECTING | state::CONNECTED;
                (socket.readable, socket.writable) = (true, true);
                self.counters.connected.fetch_add(1, Ordering::Relaxed);
            }
            Ok(Err(errno)) | Err(errno) => {
                socket.fail(Some(errno), Some(errno));
                self.drop_descriptor(index);
            }
        }
        self.publish_state(index)
    }

    /// Copies from the send ring to the peer.
    fn send_some(&mut self, index: u16) -> Result<bool> {
        let socket = &mut self.sockets[usize::from(index)];
        let (unsent, ring, at) = (socket.unsent(), socket.send_ring, socket.taken);
        let Some(fd) = socket.fd.as_ref().filter(|_| socket.writable && unsent > 0) else {
            return Ok(false);
        };
        let piece = &mut self.bounce[..(unsent as usize).min(QUANTUM)];
        self.shared_area.fetch(ring, at, piece)?;
        match rustix::net::send(fd, piece, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(count) => {
                socket.taken += count as u64;
                // Progress restarts the linger timeout.
                if socket.closing.is_some() {
                    socket.closing = Some(std::time::Instant::now() + LINGER_TIMEOUT);
                }
                self.counters.sent.fetch_add(count as u64, Ordering::Relaxed);
                let (taken, more) = (socket.taken, socket.unsent() > 0);
                self.shared_area.store_word(index, host_state::TAKEN, taken)?;
                Ok(more)
            }
            Err(Errno::AGAIN | Errno::INTR) => {
                socket.writable = false;
                Ok(false)
            }
            Err(errno) => {
                // Bytes that arrived before the failure are still received.
                socket.fail(None, Some(errno));
                socket.taken = socket.sent;
                socket.readable = true;
                self.publish_state(index)?;
                Ok(true)
            }
        }
    }

    /// Copies from the peer to the receive ring.
    fn receive_some(&mut self, index: u16) -> Result<bool> {
        let socket = &mut self.sockets[usize::from(index)];
        let wanted =
            if socket.discard_input { QUANTUM } else { (socket.room() as usize).min(QUANTUM) };
        let ended = socket.has(state::RECEIVE_END) && !socket.discard_input;
        let may = socket.readable && wanted > 0 && !ended && socket.closing.is_none();
        let Some(fd) = socket.fd.as_ref().filter(|_| may) else { return Ok(false) };
        match rustix::net::recv(fd, &mut self.bounce[..wanted], RecvFlags::DONTWAIT) {
            Ok((0, _)) => {
                socket.flags |= state::RECEIVE_END;
                socket.discard_input = false;
                self.publish_state(index)?;
                Ok(false)
            }
            Ok(_) if socket.discard_input => Ok(true),
            Ok((count, _)) => {
                self.shared_area.put(
                    socket.receive_ring,
                    socket.received,
                    &self.bounce[..count],
                )?;
                socket.received += count as u64;
                // A short read has emptied the queue, unless urgent data stopped it or the end of
                // the stream follows.
                socket.readable = count == wanted || socket.read_until_empty;
                self.counters.received.fetch_add(count as u64, Ordering::Relaxed);
                let (received, more) = (socket.received, socket.readable && socket.room() > 0);
                self.shared_area.store_word(index, host_state::RECEIVED, received)?;
                Ok(more)
            }
            Err(Errno::AGAIN | Errno::INTR) => {
                socket.readable = false;
                Ok(false)
            }
            Err(errno) => {
                socket.fail(Some(errno), Some(errno));
                socket.taken = socket.sent;
                self.drop_descriptor(index);
                self.publish_state(index)?;
                Ok(false)
            }
        }
    }

    /// Completes a pending shutdown or close once the send ring is empty.
    pub(super) fn finish(&mut self, index: u16) -> Result<()> {
        let socket = &mut self.sockets[usize::from(index)];
        let done = socket.unsent() == 0 || socket.has(state::SEND_END) || socket.fd.is_none();
        if socket.closing.is_some() && (done || socket.sockopts.abort) {
            return self.release_socket(index);
        }
        if socket.shut_send && done && !socket.has(state::SEND_END) {
            if let Some(fd) = &socket.fd {
                // Fails if the peer is gone, which receiving reports.
                let _ = rustix::net::shutdown(fd, Shutdown::Write);
            }
            socket.flags |= state::SEND_END;
            self.publish_state(index)?;
        }
        Ok(())
    }

    /// Accepts connections that wait at a listener.
    fn accept_some(&mut self, index: u16) -> Result<bool> {
        self.reap_accepted(index);
        for _ in 0..ACCEPT_BATCH {
            let socket = &self.sockets[usize::from(index)];
            let may = socket.readable && socket.room() >= record::LEN && socket.closing.is_none();
            let Some(fd) = socket.fd.as_ref().filter(|_| may) else { return Ok(false) };
            let is_warp = socket.is_warp;
            // `warp` connections need a slot only after their hello.
            if self.vacant.is_empty() && !is_warp {
                self.retry_later(index);
                return Ok(false);
            }
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match rustix::net::acceptfrom_with(fd, flags) {
                Ok((connection, peer)) => {
                    let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
                    if is_warp {
                        self.add_pending(index, connection, peer);
                    } else if !self.accept_connection(index, connection, peer)? {
                        self.retry_later(index);
                        return Ok(false);
                    }
                }
                Err(Errno::AGAIN) => {
                    self.sockets[usize::from(index)].readable = false;
                    return Ok(false);
                }
                // The connection was closed while it waited.
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => {}
                Err(errno) => {
                    // Out of descriptors or memory: retry later.
                    tracing::warn!(%errno, "cannot accept a connection");
                    self.retry_later(index);
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Forgets queued connections that kernels have accepted.
    pub(super) fn reap_accepted(&mut self, index: u16) {
        let socket = &mut self.sockets[usize::from(index)];
        let left = ((socket.received - socket.consumed) / record::LEN) as usize;
        while socket.waiting.len() > left {
            socket.waiting.pop_front();
        }
    }

    /// Creates a socket for an accepted connection and queues it at its listener. False if the
    /// connection was dropped.
    fn accept_connection(
        &mut self,
        listener: u16,
        connection: OwnedFd,
        peer: Option<SocketAddr>,
    ) -> Result<bool> {
        let Some(index) = self.alloc_socket()? else { return Ok(false) };
        let (sockopts, v6) =
            (self.sockets[usize::from(listener)].sockopts, self.sockets[usize::from(listener)].v6);
        let socket = &mut self.sockets[usize::from(index)];
        (socket.sockopts, socket.v6) = (sockopts, v6);
        if sockopts.no_delay {
            // Failure costs latency only.
            let _ = sockopt::set_tcp_nodelay(&connection, true);
        }
        socket.fd = Some(connection);
        (socket.readable, socket.writable) = (true, true);
        socket.flags = state::CONNECTED;
        if let Err(errno) = self.alloc_rings(index).and_then(|()| self.watch(index)) {
            tracing::warn!(%errno, "no rings for an accepted connection; it is reset");
            self.sockets[usize::from(index)].sockopts.abort = true;
            self.release_socket(index)?;
            return Ok(false);
        }
        self.publish_socket(index)?;
        self.enqueue_accepted(listener, index, peer)?;
        Ok(true)
    }
}
