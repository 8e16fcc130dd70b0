//! Zero-copy access: spans of the rings themselves.

use super::stream::Readable;
use super::{DeviceAddr, Sock, SockResult, Sockets, at, device_state, state};
use rustix::io::Errno;

/// A contiguous part of a ring that the block owns until it commits or consumes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSpan {
    /// Device address of the first byte.
    pub address: DeviceAddr,
    /// Length in bytes; 0 at the end of the stream, and then there is nothing to consume.
    pub len: u64,
}

impl Sockets<'_> {
    /// Borrows up to `max_len` received bytes in the ring; blocks as [`recv`](Sockets::recv) does.
    /// End it with [`consume`](Sockets::consume). Streams only (`EOPNOTSUPP`).
    pub fn borrow(&self, socket: Sock, max_len: u64) -> SockResult<RingSpan> {
        let socket_ref = self.socket_ref(socket)?;
        if self.load_snapshot(socket_ref)?.has(state::DATAGRAM) {
            return Err(Errno::OPNOTSUPP.into());
        }
        self.wait(self.wait_limit(socket_ref, device_state::RECEIVE_TIMEOUT)?, || {
            match self.readable(socket_ref)? {
                None => return Ok(None),
                Some(Readable::End) => {
                    return Ok(Some(RingSpan { address: DeviceAddr::new(0), len: 0 }));
                }
                Some(Readable::Data) => {}
            }
            if self.try_lock(socket_ref, device_state::RECEIVE_LOCK)?.is_none() {
                return Ok(None);
            }
            let (begin, size) = self.receive_ring(socket_ref)?;
            let consumed = self.consumed(socket_ref)?;
            let looked = self
                .load_snapshot(socket_ref)
                .and_then(|snapshot| self.available(socket_ref, &snapshot));
            let available = match looked {
                Ok(available) => available,
                Err(failure) => {
                    self.unlock(socket_ref, device_state::RECEIVE_LOCK)?;
                    return Err(failure);
                }
            };
            let from = consumed & (size - 1);
            let len = available.min(size - from).min(max_len);
            if len == 0 {
                self.unlock(socket_ref, device_state::RECEIVE_LOCK)?;
                return Ok(None);
            }
            self.block.store_u32(
                at(socket_ref.device_state + device_state::RECEIVE_LOCK),
                device_state::SPAN_OUT,
            )?;
            Ok(Some(RingSpan { address: at(begin + from), len }))
        })
    }

    /// Ends a borrowed span: the first `used` bytes are consumed, the others are received again.
    pub fn consume(&self, socket: Sock, used: u64) -> SockResult<()> {
        let socket_ref = self.socket_ref(socket)?;
        let snapshot = self.load_snapshot(socket_ref)?;
        self.check_span(socket_ref.device_state + device_state::RECEIVE_LOCK)?;
        let consumed = self.consumed(socket_ref)?;
        if used > snapshot.received.wrapping_sub(consumed) {
            return Err(Errno::INVAL.into());
        }
        self.publish_consumed(socket_ref, consumed + used)?;
        self.unlock(socket_ref, device_state::RECEIVE_LOCK)
    }

    /// Reserves up to `max_len` bytes of the send ring; blocks as [`send`](Sockets::send) does. End
    /// it with [`commit`](Sockets::commit). Streams only (`EOPNOTSUPP`).
    pub fn reserve(&self, socket: Sock, max_len: u64) -> SockResult<RingSpan> {
        let socket_ref = self.socket_ref(socket)?;
        if self.load_snapshot(socket_ref)?.has(state::DATAGRAM) {
            return Err(Errno::OPNOTSUPP.into());
        }
        self.wait(self.wait_limit(socket_ref, device_state::SEND_TIMEOUT)?, || {
            let snapshot = self.check_sendable(socket_ref)?;
            if snapshot.has(state::CONNECTING)
                || !self.has_room_hint(socket_ref, &snapshot, 1)?
                || self.try_lock(socket_ref, device_state::SEND_LOCK)?.is_none()
            {
                return Ok(None);
            }
            let (begin, size) = self.send_ring(socket_ref)?;
            let from = self.sent(socket_ref)? & (size - 1);
            let room = match self.room(socket_ref) {
                Ok(room) => room,
                Err(failure) => {
                    self.unlock(socket_ref, device_state::SEND_LOCK)?;
                    return Err(failure);
                }
            };
            let len = room.min(size - from).min(max_len);
            if len == 0 {
                self.unlock(socket_ref, device_state::SEND_LOCK)?;
                return Ok(None);
            }
            self.block.store_u32(
                at(socket_ref.device_state + device_state::SEND_LOCK),
                device_state::SPAN_OUT,
            )?;
            Ok(Some(RingSpan { address: at(begin + from), len }))
        })
    }

    /// Sends the first `filled` bytes of the reserved span; 0 only ends the reservation.
    pub fn commit(&self, socket: Sock, filled: u64) -> SockResult<()> {
        let socket_ref = self.socket_ref(socket)?;
        let snapshot = self.load_snapshot(socket_ref)?;
        self.check_span(socket_ref.device_state + device_state::SEND_LOCK)?;
        let room = match self.room(socket_ref) {
            Ok(room) => room,
            // The peer has stopped reading or violated the protocol: nothing will be sent.
            Err(failure) => {
                self.unlock(socket_ref, device_state::SEND_LOCK)?;
                return Err(failure);
            }
        };
        if filled > room {
            return Err(Errno::INVAL.into());
        }
        // FIN carries the final length, so nothing can be sent after it.
        if snapshot.is_warp() && snapshot.flags & device_state::FIN != 0 {
            self.unlock(socket_ref, device_state::SEND_LOCK)?;
            return Err(Errno::PIPE.into());
        }
        if filled > 0 {
            self.publish_sent(socket_ref, self.sent(socket_ref)? + filled)?;
        }
        self.unlock(socket_ref, device_state::SEND_LOCK)
    }

    /// `EINVAL` if no span is out in this direction.
    fn check_span(&self, lock: u64) -> SockResult<()> {
        match self.block.load_u32(at(lock))? {
            device_state::SPAN_OUT => Ok(()),
            _ => Err(Errno::INVAL.into()),
        }
    }
}
