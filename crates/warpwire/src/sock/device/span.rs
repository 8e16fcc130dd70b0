//! Without a copy: spans of the rings themselves.

use super::stream::Ready;
use super::{DeviceAddr, Outcome, Sock, Sockets, at, desk, state};
use rustix::io::Errno;

/// A piece of a ring that the block has for itself until it gives it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where it begins.
    pub address: DeviceAddr,
    /// How long it is; 0 at the end of the stream, and then there is nothing to give back.
    pub len: u64,
}

impl Sockets<'_> {
    /// Borrows bytes that were received, at most `most`, where they lie; waits as [`recv`](Sockets::recv) does.
    /// Afterwards [`give_back`](Sockets::give_back) says how many are done with. Streams only.
    pub fn borrow(&self, socket: Sock, most: u64) -> Outcome<Span> {
        let place = self.place(socket)?;
        if self.look(place)?.has(state::DATAGRAM) {
            return Err(Errno::OPNOTSUPP.into());
        }
        self.wait(self.patience(place, desk::RECEIVE_TIMEOUT)?, || {
            match self.readable(place)? {
                None => return Ok(None),
                Some(Ready::End) => return Ok(Some(Span { address: DeviceAddr::new(0), len: 0 })),
                Some(Ready::Some) => {}
            }
            if self.try_lock(place, desk::RECEIVE_LOCK)?.is_none() {
                return Ok(None);
            }
            let (begin, size) = self.receive_ring(place)?;
            let consumed = self.consumed(place)?;
            let looked = self.look(place).and_then(|seen| self.available(place, &seen));
            let available = match looked {
                Ok(available) => available,
                Err(failure) => {
                    self.unlock(place, desk::RECEIVE_LOCK)?;
                    return Err(failure);
                }
            };
            let from = consumed & (size - 1);
            let len = available.min(size - from).min(most);
            if len == 0 {
                self.unlock(place, desk::RECEIVE_LOCK)?;
                return Ok(None);
            }
            self.block.store_u32(at(place.desk + desk::RECEIVE_LOCK), desk::SPAN)?;
            Ok(Some(Span { address: at(begin + from), len }))
        })
    }

    /// Gives a borrowed span back: its first `used` bytes are done with, the others come again.
    pub fn give_back(&self, socket: Sock, used: u64) -> Outcome<()> {
        let place = self.place(socket)?;
        let seen = self.look(place)?;
        self.check_span(place.desk + desk::RECEIVE_LOCK)?;
        let consumed = self.consumed(place)?;
        if used > seen.received.wrapping_sub(consumed) {
            return Err(Errno::INVAL.into());
        }
        self.publish_consumed(place, consumed + used)?;
        self.unlock(place, desk::RECEIVE_LOCK)
    }

    /// Reserves a piece of the send ring, at most `most` bytes, to be filled; waits as [`send`](Sockets::send) does.
    /// Afterwards [`commit`](Sockets::commit) sends from its beginning. Streams only.
    pub fn reserve(&self, socket: Sock, most: u64) -> Outcome<Span> {
        let place = self.place(socket)?;
        if self.look(place)?.has(state::DATAGRAM) {
            return Err(Errno::OPNOTSUPP.into());
        }
        self.wait(self.patience(place, desk::SEND_TIMEOUT)?, || {
            let seen = self.may_send(place)?;
            if seen.has(state::CONNECTING)
                || !self.seems_free(place, &seen, 1)?
                || self.try_lock(place, desk::SEND_LOCK)?.is_none()
            {
                return Ok(None);
            }
            let (begin, size) = self.send_ring(place)?;
            let from = self.sent(place)? & (size - 1);
            let room = match self.room(place) {
                Ok(room) => room,
                Err(failure) => {
                    self.unlock(place, desk::SEND_LOCK)?;
                    return Err(failure);
                }
            };
            let len = room.min(size - from).min(most);
            if len == 0 {
                self.unlock(place, desk::SEND_LOCK)?;
                return Ok(None);
            }
            self.block.store_u32(at(place.desk + desk::SEND_LOCK), desk::SPAN)?;
            Ok(Some(Span { address: at(begin + from), len }))
        })
    }

    /// Sends the first `filled` bytes of the reserved span; 0 sends nothing and only ends the reservation.
    pub fn commit(&self, socket: Sock, filled: u64) -> Outcome<()> {
        let place = self.place(socket)?;
        let seen = self.look(place)?;
        self.check_span(place.desk + desk::SEND_LOCK)?;
        let room = match self.room(place) {
            Ok(room) => room,
            // The peer reads no more, or lies: nothing will be sent.
            Err(failure) => {
                self.unlock(place, desk::SEND_LOCK)?;
                return Err(failure);
            }
        };
        if filled > room {
            return Err(Errno::INVAL.into());
        }
        // What the peer was told is not changed.
        if seen.is_warp() && seen.flags & desk::ENDED != 0 {
            self.unlock(place, desk::SEND_LOCK)?;
            return Err(Errno::PIPE.into());
        }
        if filled > 0 {
            self.publish_sent(place, self.sent(place)? + filled)?;
        }
        self.unlock(place, desk::SEND_LOCK)
    }

    /// `EINVAL` if no span of that lock is out.
    fn check_span(&self, lock: u64) -> Outcome<()> {
        match self.block.load_u32(at(lock))? {
            desk::SPAN => Ok(()),
            _ => Err(Errno::INVAL.into()),
        }
    }
}
