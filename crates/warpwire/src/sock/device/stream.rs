//! Accept, send and receive.

use std::net::SocketAddr;

use rustix::io::Errno;

use super::{Sock, SockResult, SocketRef, Sockets, StateSnapshot, at, device_state, state};
use crate::sock::layout::{ADDRESS_LEN, address_from, record};

/// What a receive would return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readable {
    Data,
    End,
}

impl Sockets<'_> {
    /// Accepts a connection of a listener; blocks until there is one.
    pub fn accept(&self, listener: Sock) -> SockResult<(Sock, Option<SocketAddr>)> {
        let socket_ref = self.socket_ref(listener)?;
        let mut entry = [0; record::LEN as usize];
        self.wait(self.wait_limit(socket_ref, device_state::RECEIVE_TIMEOUT)?, || {
            let snapshot = self.load_snapshot(socket_ref)?;
            if !snapshot.has(state::LISTENING) {
                return Err(Errno::INVAL.into());
            }
            if let Some(errno) = snapshot.receive_error() {
                return Err(errno.into());
            }
            if snapshot.received == self.consumed(socket_ref)?
                || self.try_lock(socket_ref, device_state::RECEIVE_LOCK)?.is_none()
            {
                return Ok(None);
            }
            self.with_lock(socket_ref, device_state::RECEIVE_LOCK, || {
                // Another block may have been faster, or more connections may have arrived.
                let (snapshot, consumed) =
                    (self.load_snapshot(socket_ref)?, self.consumed(socket_ref)?);
                if snapshot.received == consumed {
                    return Ok(None);
                }
                self.copy_out(self.receive_ring(socket_ref)?, consumed, &mut entry)?;
                self.publish_consumed_to_host(socket_ref, consumed + record::LEN)?;
                Ok(Some(()))
            })
        })?;
        let socket = Sock(i32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]));
        self.init_device_state(self.socket_ref(socket)?)?;
        let mut address = [0; ADDRESS_LEN];
        address.copy_from_slice(&entry[record::ADDRESS as usize..]);
        Ok((socket, address_from(&address)))
    }

    /// Sends bytes. A blocking socket sends all of them; if it fails or times out after a part, the
    /// length of that part is returned. A datagram socket sends one datagram to its peer.
    pub fn send(&self, socket: Sock, bytes: &[u8]) -> SockResult<usize> {
        let socket_ref = self.socket_ref(socket)?;
        if self.load_snapshot(socket_ref)?.has(state::DATAGRAM) {
            return self.send_to(socket, bytes, None);
        }
        let wait_limit = self.wait_limit(socket_ref, device_state::SEND_TIMEOUT)?;
        let mut done = 0;
        loop {
            let part = self.wait(wait_limit, || self.try_send(socket_ref, &bytes[done..]));
            match part {
                Ok(count) => done += count,
                Err(failure) if done == 0 || failure.errno().is_none() => return Err(failure),
                Err(_) => return Ok(done),
            }
            if done == bytes.len() {
                return Ok(done);
            }
        }
    }

    /// Copies as much as fits into the ring; `None` if nothing does, or another block holds the
    /// lock.
    fn try_send(&self, socket_ref: SocketRef, bytes: &[u8]) -> SockResult<Option<usize>> {
        let snapshot = self.check_sendable(socket_ref)?;
        if snapshot.has(state::CONNECTING) {
            return Ok(None);
        }
        if bytes.is_empty() {
            return Ok(Some(0));
        }
        if !self.has_room_hint(socket_ref, &snapshot, 1)?
            || self.try_lock(socket_ref, device_state::SEND_LOCK)?.is_none()
        {
            return Ok(None);
        }
        self.with_lock(socket_ref, device_state::SEND_LOCK, || {
            let count = bytes.len().min(self.room(socket_ref)? as usize);
            if count == 0 {
                return Ok(None);
            }
            let (sent, part) = (self.sent(socket_ref)?, &bytes[..count]);
            if snapshot.is_warp() && self.store_sent(socket_ref, sent, part)? {
                let counter = at(socket_ref.device_state + device_state::SENT);
                self.block.store_u64(counter, sent + count as u64)?;
                return Ok(Some(count));
            }
            self.copy_in(self.send_ring(socket_ref)?, sent, part)?;
            self.publish_sent(socket_ref, sent + count as u64)?;
            Ok(Some(count))
        })
    }

    /// A snapshot of a stream that may send or is still connecting; otherwise the errno.
    pub(super) fn check_sendable(&self, socket_ref: SocketRef) -> SockResult<StateSnapshot> {
        let snapshot = self.load_snapshot(socket_ref)?;
        if let Some(errno) = snapshot.send_error() {
            return Err(errno.into());
        }
        if snapshot.has(state::SEND_END) || snapshot.flags & device_state::SHUT_SEND != 0 {
            return Err(Errno::PIPE.into());
        }
        if !snapshot.has(state::CONNECTED | state::CONNECTING) {
            return Err(Errno::NOTCONN.into());
        }
        Ok(snapshot)
    }

    /// Free bytes of the send ring. The caller holds the lock.
    pub(super) fn room(&self, socket_ref: SocketRef) -> SockResult<u64> {
        let snapshot = self.load_snapshot(socket_ref)?;
        let size = self.send_ring(socket_ref)?.1;
        Ok(size - self.outstanding(socket_ref, &snapshot, size)?)
    }

    /// Whether the send ring seems to have `needs` free bytes. A hint: other blocks may send at the
    /// same time, and the peer's counter is not validated.
    pub(super) fn has_room_hint(
        &self,
        socket_ref: SocketRef,
        snapshot: &StateSnapshot,
        needs: u64,
    ) -> SockResult<bool> {
        let outstanding = self.sent(socket_ref)?.wrapping_sub(snapshot.taken);
        Ok(self.send_ring(socket_ref)?.1.wrapping_sub(outstanding) >= needs)
    }

    /// Receives up to `into.len()` bytes; blocks until there are some. 0 at the end of the stream.
    /// A datagram socket receives one datagram; bytes that do not fit are discarded.
    pub fn recv(&self, socket: Sock, into: &mut [u8]) -> SockResult<usize> {
        let socket_ref = self.socket_ref(socket)?;
        if self.load_snapshot(socket_ref)?.has(state::DATAGRAM) {
            return self.recv_from(socket, into).map(|(count, _)| count);
        }
        if into.is_empty() {
            return Ok(0);
        }
        self.wait(self.wait_limit(socket_ref, device_state::RECEIVE_TIMEOUT)?, || {
            match self.readable(socket_ref)? {
                None => return Ok(None),
                Some(Readable::End) => return Ok(Some(0)),
                Some(Readable::Data) => {}
            }
            if self.try_lock(socket_ref, device_state::RECEIVE_LOCK)?.is_none() {
                return Ok(None);
            }
            self.with_lock(socket_ref, device_state::RECEIVE_LOCK, || {
                let snapshot = self.load_snapshot(socket_ref)?;
                let consumed = self.consumed(socket_ref)?;
                let count = into.len().min(self.available(socket_ref, &snapshot)? as usize);
                if count == 0 {
                    return Ok(None);
                }
                self.copy_out(self.receive_ring(socket_ref)?, consumed, &mut into[..count])?;
                self.publish_consumed(socket_ref, consumed + count as u64)?;
                Ok(Some(count))
            })
        })
    }

    /// Receives until `into` is full or the stream ends or fails; returns the number of bytes
    /// received.
    pub fn recv_all(&self, socket: Sock, into: &mut [u8]) -> SockResult<usize> {
        let mut done = 0;
        while done < into.len() {
            match self.recv(socket, &mut into[done..]) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(failure) if done == 0 || failure.errno().is_none() => return Err(failure),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Whether data seems to be available, or the end of the stream is reached; `None` if neither.
    pub(super) fn readable(&self, socket_ref: SocketRef) -> SockResult<Option<Readable>> {
        let snapshot = self.load_snapshot(socket_ref)?;
        if snapshot.received != self.consumed(socket_ref)? {
            return Ok(Some(Readable::Data));
        }
        if snapshot.flags & device_state::SHUT_RECEIVE != 0 {
            return Ok(Some(Readable::End));
        }
        if let Some(errno) = snapshot.receive_error() {
            return Err(errno.into());
        }
        if snapshot.has(state::RECEIVE_END) {
            return Ok(Some(Readable::End));
        }
        if !snapshot.has(state::CONNECTED | state::CONNECTING | state::DATAGRAM) {
            return Err(Errno::NOTCONN.into());
        }
        Ok(None)
    }
}
