//! Bytes between rings and the operating system's sockets: streams and listeners.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, SocketFlags, sockopt};

use super::agent::{Agent, LINGER_TIMEOUT, QUANTUM};
use super::layout::{host_state, record, state};
use super::socket::SocketRole;
use crate::error::Result;

/// Connections accepted before it is another socket's turn.
const ACCEPT_BATCH: u32 = 64;

impl Agent {
    /// Does a piece of what a socket has to do; true if more may be left.
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

    /// A connection that was being made stands, or has failed.
    pub(super) fn finish_connecting(&mut self, index: u16) -> Result<()> {
        let socket = &mut self.sockets[usize::from(index)];
        let Some(fd) = &socket.fd else { return Ok(()) };
        if !socket.writable {
            return Ok(());
        }
        match sockopt::socket_error(fd) {
            // A descriptor that was just made may be told of as hung up, before anything was tried.
            Ok(Ok(())) if rustix::net::getpeername(fd).is_err() => {
                socket.writable = false;
                return Ok(());
            }
            Ok(Ok(())) if socket.is_warp => {
                socket.readable = true;
                return self.begin_handshake(index, &[]);
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

    /// From the send ring to the peer.
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
                // Whoever takes bytes is given time for the rest.
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
                // What came before the failure is still received.
                socket.fail(None, Some(errno));
                socket.taken = socket.sent;
                socket.readable = true;
                self.publish_state(index)?;
                Ok(true)
            }
        }
    }

    /// From the peer to the receive ring.
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
                // A short read has emptied the queue, unless its end comes next.
                socket.readable = count == wanted || socket.end_seen;
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

    /// Ends what was to end once the send ring is empty.
    pub(super) fn finish(&mut self, index: u16) -> Result<()> {
        let socket = &mut self.sockets[usize::from(index)];
        let done = socket.unsent() == 0 || socket.has(state::SEND_END) || socket.fd.is_none();
        if socket.closing.is_some() && (done || socket.sockopts.abort) {
            return self.release_socket(index);
        }
        if socket.shut_send && done && !socket.has(state::SEND_END) {
            if let Some(fd) = &socket.fd {
                // It fails if the peer is gone, of which receiving tells.
                let _ = rustix::net::shutdown(fd, Shutdown::Write);
            }
            socket.flags |= state::SEND_END;
            self.publish_state(index)?;
        }
        Ok(())
    }

    /// Takes connections that wait at a listener.
    fn accept_some(&mut self, index: u16) -> Result<bool> {
        self.reap_accepted(index);
        for _ in 0..ACCEPT_BATCH {
            let socket = &self.sockets[usize::from(index)];
            let may = socket.readable && socket.room() >= record::LEN && socket.closing.is_none();
            let Some(fd) = socket.fd.as_ref().filter(|_| may) else { return Ok(false) };
            let is_warp = socket.is_warp;
            // Those of the family `warp` need a place when they have spoken.
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
                // One that went away while it waited is nobody's business.
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => {}
                Err(errno) => {
                    // No descriptors or no memory: later.
                    tracing::warn!(%errno, "a connection could not be accepted");
                    self.retry_later(index);
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Connections that kernels have taken are theirs.
    pub(super) fn reap_accepted(&mut self, index: u16) {
        let socket = &mut self.sockets[usize::from(index)];
        let left = ((socket.received - socket.consumed) / record::LEN) as usize;
        while socket.waiting.len() > left {
            socket.waiting.pop_front();
        }
    }

    /// Makes a socket of an accepted connection, and hands it to whoever accepts next. False if it had to be let go.
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
            // It costs speed where it cannot be set, and nothing else.
            let _ = sockopt::set_tcp_nodelay(&connection, true);
        }
        socket.fd = Some(connection);
        (socket.readable, socket.writable) = (true, true);
        socket.flags = state::CONNECTED;
        if let Err(errno) = self.alloc_rings(index).and_then(|()| self.watch(index)) {
            tracing::warn!(%errno, "an accepted connection got no rings, and was reset");
            self.sockets[usize::from(index)].sockopts.abort = true;
            self.release_socket(index)?;
            return Ok(false);
        }
        self.publish_socket(index)?;
        self.enqueue_accepted(listener, index, peer)?;
        Ok(true)
    }
}
