//! Accepting, sending and receiving.

use std::net::SocketAddr;

use rustix::io::Errno;

use super::{Outcome, Place, Seen, Sock, Sockets, desk, state};
use crate::sock::layout::{ADDRESS_LEN, address_from, record};

/// What one can receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ready {
    Some,
    End,
}

impl Sockets<'_> {
    /// Takes a connection that waits at a listener, or waits for one.
    pub fn accept(&self, listener: Sock) -> Outcome<(Sock, Option<SocketAddr>)> {
        let place = self.place(listener)?;
        let mut entry = [0; record::LEN as usize];
        self.wait(self.patience(place, desk::RECEIVE_TIMEOUT)?, || {
            let seen = self.look(place)?;
            if !seen.has(state::LISTENING) {
                return Err(Errno::INVAL.into());
            }
            if let Some(errno) = seen.receive_error() {
                return Err(errno.into());
            }
            if seen.received == self.consumed(place)?
                || self.try_lock(place, desk::RECEIVE_LOCK)?.is_none()
            {
                return Ok(None);
            }
            self.locked(place, desk::RECEIVE_LOCK, || {
                // Another block may have been faster, and may have taken more than there was before.
                let (seen, consumed) = (self.look(place)?, self.consumed(place)?);
                if seen.received == consumed {
                    return Ok(None);
                }
                self.copy_out(self.receive_ring(place)?, consumed, &mut entry)?;
                self.tell_consumed(place, consumed + record::LEN)?;
                Ok(Some(()))
            })
        })?;
        let socket = Sock(i32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]));
        self.take_desk(self.place(socket)?)?;
        let mut address = [0; ADDRESS_LEN];
        address.copy_from_slice(&entry[record::ADDRESS as usize..]);
        Ok((socket, address_from(&address)))
    }

    /// Sends bytes. A blocking socket sends all of them, unless its time ends or it fails when some have gone; their
    /// number is returned. A datagram socket sends one datagram, to its peer.
    pub fn send(&self, socket: Sock, bytes: &[u8]) -> Outcome<usize> {
        let place = self.place(socket)?;
        if self.look(place)?.has(state::DATAGRAM) {
            return self.send_to(socket, bytes, None);
        }
        let patience = self.patience(place, desk::SEND_TIMEOUT)?;
        let mut done = 0;
        loop {
            let part = self.wait(patience, || self.try_send(place, &bytes[done..]));
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

    /// Puts what fits into the ring; `None` if nothing does, or another block is at it.
    fn try_send(&self, place: Place, bytes: &[u8]) -> Outcome<Option<usize>> {
        let seen = self.may_send(place)?;
        if seen.has(state::CONNECTING) {
            return Ok(None);
        }
        if bytes.is_empty() {
            return Ok(Some(0));
        }
        if !self.seems_free(place, &seen, 1)? || self.try_lock(place, desk::SEND_LOCK)?.is_none() {
            return Ok(None);
        }
        self.locked(place, desk::SEND_LOCK, || {
            let count = bytes.len().min(self.room(place)? as usize);
            if count == 0 {
                return Ok(None);
            }
            let sent = self.sent(place)?;
            self.copy_in(self.send_ring(place)?, sent, &bytes[..count])?;
            self.publish_sent(place, sent + count as u64)?;
            Ok(Some(count))
        })
    }

    /// Looks at a stream that is to send, and says why it cannot.
    pub(super) fn may_send(&self, place: Place) -> Outcome<Seen> {
        let seen = self.look(place)?;
        if let Some(errno) = seen.send_error() {
            return Err(errno.into());
        }
        if seen.has(state::SEND_END) || seen.flags & desk::SHUT_SEND != 0 {
            return Err(Errno::PIPE.into());
        }
        if !seen.has(state::CONNECTED | state::CONNECTING) {
            return Err(Errno::NOTCONN.into());
        }
        Ok(seen)
    }

    /// Free bytes of the send ring, for who holds the lock.
    pub(super) fn room(&self, place: Place) -> Outcome<u64> {
        let seen = self.look(place)?;
        let size = self.send_ring(place)?.1;
        Ok(size - self.outstanding(place, &seen, size)?)
    }

    /// Whether the send ring seems to have room for so much. It is a hint: other blocks send meanwhile, and a peer may lie.
    pub(super) fn seems_free(&self, place: Place, seen: &Seen, needs: u64) -> Outcome<bool> {
        let outstanding = self.sent(place)?.wrapping_sub(seen.taken);
        Ok(self.send_ring(place)?.1.wrapping_sub(outstanding) >= needs)
    }

    /// Receives what is there, at most as much as `into` holds, or waits for something. 0 is the end of the stream. A
    /// datagram socket receives one datagram; what does not fit is lost.
    pub fn recv(&self, socket: Sock, into: &mut [u8]) -> Outcome<usize> {
        let place = self.place(socket)?;
        if self.look(place)?.has(state::DATAGRAM) {
            return self.recv_from(socket, into).map(|(count, _)| count);
        }
        if into.is_empty() {
            return Ok(0);
        }
        self.wait(self.patience(place, desk::RECEIVE_TIMEOUT)?, || {
            match self.readable(place)? {
                None => return Ok(None),
                Some(Ready::End) => return Ok(Some(0)),
                Some(Ready::Some) => {}
            }
            if self.try_lock(place, desk::RECEIVE_LOCK)?.is_none() {
                return Ok(None);
            }
            self.locked(place, desk::RECEIVE_LOCK, || {
                let seen = self.look(place)?;
                let consumed = self.consumed(place)?;
                let count = into.len().min(self.available(place, &seen)? as usize);
                if count == 0 {
                    return Ok(None);
                }
                self.copy_out(self.receive_ring(place)?, consumed, &mut into[..count])?;
                self.publish_consumed(place, consumed + count as u64)?;
                Ok(Some(count))
            })
        })
    }

    /// Receives until `into` is full, the stream ends or fails; how much came.
    pub fn recv_all(&self, socket: Sock, into: &mut [u8]) -> Outcome<usize> {
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

    /// Whether something seems to be there, or the end; `None` if nothing is there yet.
    pub(super) fn readable(&self, place: Place) -> Outcome<Option<Ready>> {
        let seen = self.look(place)?;
        if seen.received != self.consumed(place)? {
            return Ok(Some(Ready::Some));
        }
        if seen.flags & desk::SHUT_RECEIVE != 0 {
            return Ok(Some(Ready::End));
        }
        if let Some(errno) = seen.receive_error() {
            return Err(errno.into());
        }
        if seen.has(state::RECEIVE_END) {
            return Ok(Some(Ready::End));
        }
        if !seen.has(state::CONNECTED | state::CONNECTING | state::DATAGRAM) {
            return Err(Errno::NOTCONN.into());
        }
        Ok(None)
    }
}
