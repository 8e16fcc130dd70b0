//! Sending and receiving datagrams.

use std::net::SocketAddr;

use rustix::io::Errno;

use super::stream::Readable;
use super::{Sock, SockResult, Sockets, device_state, state};
use crate::sock::layout::{ADDRESS_LEN, address_bytes, address_from, record};

/// Maximum payload of a UDP datagram over IPv4.
const MAX_DATAGRAM: usize = 65_507;

impl Sockets<'_> {
    /// Sends one datagram to `to`, or to the connected peer. `EMSGSIZE` if it is longer than 65507
    /// bytes or than the send ring.
    pub fn send_to(&self, socket: Sock, bytes: &[u8], to: Option<SocketAddr>) -> SockResult<usize> {
        let socket_ref = self.socket_ref(socket)?;
        let snapshot = self.load_snapshot(socket_ref)?;
        if !snapshot.has(state::DATAGRAM) {
            return Err(Errno::ISCONN.into());
        }
        if to.is_none() && !snapshot.has(state::CONNECTED) {
            return Err(Errno::DESTADDRREQ.into());
        }
        let ring = self.send_ring(socket_ref)?;
        let footprint = (record::LEN + bytes.len() as u64).next_multiple_of(record::LEN);
        if bytes.len() > MAX_DATAGRAM || footprint > ring.1 {
            return Err(Errno::MSGSIZE.into());
        }
        self.wait(self.wait_limit(socket_ref, device_state::SEND_TIMEOUT)?, || {
            let snapshot = self.load_snapshot(socket_ref)?;
            if let Some(errno) = snapshot.send_error() {
                return Err(errno.into());
            }
            if snapshot.has(state::SEND_END) || snapshot.flags & device_state::SHUT_SEND != 0 {
                return Err(Errno::PIPE.into());
            }
            if !self.has_room_hint(socket_ref, &snapshot, footprint)?
                || self.try_lock(socket_ref, device_state::SEND_LOCK)?.is_none()
            {
                return Ok(None);
            }
            self.with_lock(socket_ref, device_state::SEND_LOCK, || {
                if self.room(socket_ref)? < footprint {
                    return Ok(None);
                }
                let sent = self.sent(socket_ref)?;
                let mut header = [0; record::LEN as usize];
                header[..4].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
                header[record::ADDRESS as usize..].copy_from_slice(&address_bytes(to));
                self.copy_in(ring, sent, &header)?;
                self.copy_in(ring, sent + record::LEN, bytes)?;
                self.publish_sent(socket_ref, sent + footprint)?;
                Ok(Some(bytes.len()))
            })
        })
    }

    /// Receives one datagram and its sender's address. Bytes that do not fit are discarded. An
    /// error reported by the network, such as `ECONNREFUSED`, is returned once.
    pub fn recv_from(
        &self,
        socket: Sock,
        into: &mut [u8],
    ) -> SockResult<(usize, Option<SocketAddr>)> {
        let socket_ref = self.socket_ref(socket)?;
        if !self.load_snapshot(socket_ref)?.has(state::DATAGRAM) {
            return self.recv(socket, into).map(|count| (count, None));
        }
        self.wait(self.wait_limit(socket_ref, device_state::RECEIVE_TIMEOUT)?, || {
            match self.readable(socket_ref)? {
                None => return Ok(None),
                Some(Readable::End) => return Ok(Some((0, None))),
                Some(Readable::Data) => {}
            }
            if self.try_lock(socket_ref, device_state::RECEIVE_LOCK)?.is_none() {
                return Ok(None);
            }
            self.with_lock(socket_ref, device_state::RECEIVE_LOCK, || {
                let consumed = self.consumed(socket_ref)?;
                if self.load_snapshot(socket_ref)?.received == consumed {
                    return Ok(None);
                }
                let ring = self.receive_ring(socket_ref)?;
                let mut header = [0; record::LEN as usize];
                self.copy_out(ring, consumed, &mut header)?;
                let word = |at: usize| {
                    u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
                };
                let (len, error) = (u64::from(word(0)), word(4));
                let count = into.len().min(len as usize);
                self.copy_out(ring, consumed + record::LEN, &mut into[..count])?;
                let footprint = (record::LEN + len).next_multiple_of(record::LEN);
                self.publish_consumed(socket_ref, consumed + footprint)?;
                if error != 0 {
                    return Err(Errno::from_raw_os_error(error as i32).into());
                }
                let mut address = [0; ADDRESS_LEN];
                address.copy_from_slice(&header[record::ADDRESS as usize..]);
                Ok(Some((count, address_from(&address))))
            })
        })
    }
}
