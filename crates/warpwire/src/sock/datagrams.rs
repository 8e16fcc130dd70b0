//! Datagrams between rings and the operating system's sockets. Each is a record, its bytes, and
//! padding up to the alignment of the next record.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::agent::Agent;
use super::layout::{ADDRESS_LEN, address_bytes, address_from, host_state, record, state};
use crate::error::Result;

/// Maximum length of a UDP datagram.
const MAX_DATAGRAM: u64 = 65_535;
/// Datagrams moved in each direction per turn.
const MAX_BATCH: u32 = 16;

/// Bytes of a ring that a datagram occupies.
const fn footprint(len: u64) -> u64 {
    (record::LEN + len).next_multiple_of(record::LEN)
}

impl Agent {
    pub(super) fn serve_datagrams(&mut self, index: u16) -> Result<bool> {
        let (mut more_out, mut more_in) = (true, true);
        for _ in 0..MAX_BATCH {
            more_out = more_out && self.send_datagram(index)?;
            more_in = more_in && self.receive_datagram(index)?;
        }
        self.finish(index)?;
        Ok((more_out || more_in) && self.sockets[usize::from(index)].open)
    }

    fn send_datagram(&mut self, index: u16) -> Result<bool> {
        let socket = &mut self.sockets[usize::from(index)];
        let unsent = socket.unsent();
        let (ring, at) = (socket.send_ring, socket.taken);
        let Some(fd) = socket.fd.as_ref().filter(|_| socket.writable && unsent > 0) else {
            return Ok(false);
        };
        let mut header = [0; record::LEN as usize];
        self.shared_area.fetch(ring, at, &mut header)?;
        let len = u64::from(u32::from_le_bytes([header[0], header[1], header[2], header[3]]));
        if len > MAX_DATAGRAM || footprint(len) > unsent {
            // The record is incomplete or corrupt, so nothing after it in this ring can be trusted.
            socket.fail(Some(Errno::INVAL), Some(Errno::INVAL));
            socket.taken = socket.sent;
            self.counters.misused.fetch_add(1, Ordering::Relaxed);
            self.drop_descriptor(index);
            self.publish_state(index)?;
            return Ok(false);
        }
        let bytes = &mut self.bounce[..len as usize];
        self.shared_area.fetch(ring, at + record::LEN, bytes)?;
        let mut address = [0; ADDRESS_LEN];
        address.copy_from_slice(&header[record::ADDRESS as usize..]);
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let outcome = match address_from(&address) {
            Some(to) => rustix::net::sendto(fd, bytes, flags, &to),
            None => rustix::net::send(fd, bytes, flags),
        };
        let failed = match outcome {
            Ok(_) => None,
            Err(Errno::AGAIN | Errno::INTR) => {
                socket.writable = false;
                return Ok(false);
            }
            Err(errno) => Some(errno),
        };
        socket.taken += footprint(len);
        let taken = socket.taken;
        self.shared_area.store_word(index, host_state::TAKEN, taken)?;
        self.counters.sent.fetch_add(len, Ordering::Relaxed);
        match failed {
            Some(errno) => self.report_error(index, errno),
            None => Ok(true),
        }
    }

    fn receive_datagram(&mut self, index: u16) -> Result<bool> {
        let socket = &mut self.sockets[usize::from(index)];
        let (room, size) = (socket.room(), socket.receive_ring.1);
        let may = socket.readable && !socket.has(state::RECEIVE_END) && socket.closing.is_none();
        let Some(fd) = socket.fd.as_ref().filter(|_| may) else { return Ok(false) };
        // Only a datagram that fits is taken out of the socket's queue.
        if room < footprint(MAX_DATAGRAM) {
            let nothing: &mut [u8] = &mut [];
            let look = RecvFlags::PEEK | RecvFlags::TRUNC | RecvFlags::DONTWAIT;
            match rustix::net::recv(fd, nothing, look) {
                Ok((_, len)) if footprint(len as u64) > size => {
                    // Larger than the ring: drop it.
                    let _ = rustix::net::recv(fd, &mut self.bounce[..1], RecvFlags::DONTWAIT);
                    self.counters.dropped.fetch_add(1, Ordering::Relaxed);
                    return Ok(true);
                }
                Ok((_, len)) if footprint(len as u64) > room => return Ok(false),
                Ok(_) => {}
                Err(Errno::AGAIN | Errno::INTR) => {
                    socket.readable = false;
                    return Ok(false);
                }
                // The peek has cleared the socket's error, so it must be reported now.
                Err(errno) => return self.report_error(index, errno),
            }
        }
        let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
        match rustix::net::recvfrom(fd, &mut self.bounce[..MAX_DATAGRAM as usize], flags) {
            Ok((len, _, from)) => {
                let from = from.and_then(|from| SocketAddr::try_from(from).ok());
                self.put_datagram(index, len, 0, from)?;
                self.counters.received.fetch_add(len as u64, Ordering::Relaxed);
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => {
                socket.readable = false;
                Ok(false)
            }
            Err(errno) => self.report_error(index, errno),
        }
    }

    /// Stores a record, and `len` bytes of the bounce buffer, into the receive ring.
    fn put_datagram(
        &mut self,
        index: u16,
        len: usize,
        error: u32,
        from: Option<SocketAddr>,
    ) -> Result<()> {
        let mut header = [0; record::LEN as usize];
        header[..4].copy_from_slice(&(len as u32).to_le_bytes());
        header[4..8].copy_from_slice(&error.to_le_bytes());
        header[record::ADDRESS as usize..].copy_from_slice(&address_bytes(from));
        let socket = &mut self.sockets[usize::from(index)];
        let (ring, at) = (socket.receive_ring, socket.received);
        self.shared_area.put(ring, at, &header)?;
        self.shared_area.put(ring, at + record::LEN, &self.bounce[..len])?;
        socket.received += footprint(len as u64);
        let received = socket.received;
        self.shared_area.store_word(index, host_state::RECEIVED, received)
    }

    /// Reports an errno that does not end the socket, such as `ECONNREFUSED`, as a record without
    /// bytes. It is dropped if the ring has no room.
    fn report_error(&mut self, index: u16, errno: Errno) -> Result<bool> {
        if self.sockets[usize::from(index)].room() >= record::LEN {
            self.put_datagram(index, 0, errno.raw_os_error() as u32, None)?;
        }
        Ok(true)
    }
}
