//! Sending and receiving datagrams.

use std::net::SocketAddr;

use rustix::io::Errno;

use super::stream::Ready;
use super::{Outcome, Sock, Sockets, desk, state};
use crate::sock::layout::{ADDRESS_LEN, address_bytes, address_from, record};

/// The longest datagram that UDP carries over IPv4.
const LONGEST: usize = 65_507;

impl Sockets<'_> {
    /// Sends one datagram to an address, or to the peer. `EMSGSIZE` if it fits into no datagram, or not into the ring.
    pub fn send_to(&self, socket: Sock, bytes: &[u8], to: Option<SocketAddr>) -> Outcome<usize> {
        let place = self.place(socket)?;
        let seen = self.look(place)?;
        if !seen.has(state::DATAGRAM) {
            return Err(Errno::ISCONN.into());
        }
        if to.is_none() && !seen.has(state::CONNECTED) {
            return Err(Errno::DESTADDRREQ.into());
        }
        let ring = self.send_ring(place)?;
        let takes = (record::LEN + bytes.len() as u64).next_multiple_of(record::LEN);
        if bytes.len() > LONGEST || takes > ring.1 {
            return Err(Errno::MSGSIZE.into());
        }
        self.wait(self.patience(place, desk::SEND_TIMEOUT)?, || {
            let seen = self.look(place)?;
            if let Some(errno) = seen.send_error() {
                return Err(errno.into());
            }
            if seen.has(state::SEND_END) || seen.flags & desk::SHUT_SEND != 0 {
                return Err(Errno::PIPE.into());
            }
            if !self.seems_free(place, &seen, takes)?
                || self.try_lock(place, desk::SEND_LOCK)?.is_none()
            {
                return Ok(None);
            }
            self.locked(place, desk::SEND_LOCK, || {
                if self.room(place)? < takes {
                    return Ok(None);
                }
                let sent = self.sent(place)?;
                let mut header = [0; record::LEN as usize];
                header[..4].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
                header[record::ADDRESS as usize..].copy_from_slice(&address_bytes(to));
                self.copy_in(ring, sent, &header)?;
                self.copy_in(ring, sent + record::LEN, bytes)?;
                self.publish_sent(place, sent + takes)?;
                Ok(Some(bytes.len()))
            })
        })
    }

    /// Receives one datagram, and whose it is. What does not fit is lost. An error that the network reported
    /// (`ECONNREFUSED`, say) is told once.
    pub fn recv_from(&self, socket: Sock, into: &mut [u8]) -> Outcome<(usize, Option<SocketAddr>)> {
        let place = self.place(socket)?;
        if !self.look(place)?.has(state::DATAGRAM) {
            return self.recv(socket, into).map(|count| (count, None));
        }
        self.wait(self.patience(place, desk::RECEIVE_TIMEOUT)?, || {
            match self.readable(place)? {
                None => return Ok(None),
                Some(Ready::End) => return Ok(Some((0, None))),
                Some(Ready::Some) => {}
            }
            if self.try_lock(place, desk::RECEIVE_LOCK)?.is_none() {
                return Ok(None);
            }
            self.locked(place, desk::RECEIVE_LOCK, || {
                let consumed = self.consumed(place)?;
                if self.look(place)?.received == consumed {
                    return Ok(None);
                }
                let ring = self.receive_ring(place)?;
                let mut header = [0; record::LEN as usize];
                self.copy_out(ring, consumed, &mut header)?;
                let word = |at: usize| {
                    u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
                };
                let (len, error) = (u64::from(word(0)), word(4));
                let count = into.len().min(len as usize);
                self.copy_out(ring, consumed + record::LEN, &mut into[..count])?;
                let takes = (record::LEN + len).next_multiple_of(record::LEN);
                self.publish_consumed(place, consumed + takes)?;
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
