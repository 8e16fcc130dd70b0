//! UDP sockets: datagrams between the rings and a socket of the operating system. In a ring each is
//! a record, its bytes, and padding up to the alignment of the next record.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::{Common, Progress, Rings, after_turn, finish_sending};
use crate::error::Result;
use crate::sock::layout::{Record, address_bytes, address_from, record, state};
use crate::sock::resources::Resources;

/// Maximum length of a UDP datagram.
const MAX_DATAGRAM: u64 = 65_535;
/// Datagrams moved in each direction per turn.
const MAX_BATCH: u32 = 16;

/// Bytes of a ring that a datagram occupies.
const fn footprint(len: u64) -> u64 {
    (record::LEN + len).next_multiple_of(record::LEN)
}

/// A UDP socket. Its rings are allocated when it is opened.
#[derive(Default)]
pub(in crate::sock) struct UdpSocket {
    pub(in crate::sock) rings: Rings,
    /// Shut down the sending direction once the ring is empty.
    shut_send: bool,
}

impl UdpSocket {
    /// Whether datagrams have passed, so that the rings can no longer be replaced.
    pub(in crate::sock) fn is_used(&self) -> bool {
        self.rings.received != 0 || self.rings.sent != 0
    }

    pub(super) fn connect(
        &mut self,
        common: &mut Common,
        address: Option<SocketAddr>,
        resources: &Resources,
    ) -> std::result::Result<(), Errno> {
        let (fd, address) = common.with_address(address)?;
        rustix::net::connect(fd, &address)?;
        common.set_connected(resources);
        Ok(())
    }

    pub(super) fn serve(
        &mut self,
        common: &mut Common,
        resources: &mut Resources,
    ) -> Result<Progress> {
        let (mut more_out, mut more_in) = (true, true);
        for _ in 0..MAX_BATCH {
            more_out = more_out && self.send_datagram(common, resources)?;
            more_in = more_in && self.receive_datagram(common, resources)?;
        }
        let finished = finish_sending(common, &self.rings, self.shut_send, resources)?;
        Ok(after_turn(more_out || more_in, finished))
    }

    fn send_datagram(&mut self, common: &mut Common, resources: &mut Resources) -> Result<bool> {
        let unsent = self.rings.unsent();
        let (ring, at) = (self.rings.send, self.rings.taken);
        let Some(fd) = common.fd.as_ref().filter(|_| common.writable && unsent > 0) else {
            return Ok(false);
        };
        let mut header = [0; record::LEN as usize];
        resources.shared_area.fetch(ring, at, &mut header)?;
        let header = Record::decode(&header);
        let len = u64::from(header.value);
        if len > MAX_DATAGRAM || footprint(len) > unsent {
            // The record is incomplete or corrupt, so nothing after it in this ring can be trusted.
            common.fail(Some(Errno::INVAL), Some(Errno::INVAL));
            self.rings.taken = self.rings.sent;
            resources.counters.misused.fetch_add(1, Ordering::Relaxed);
            common.close_descriptor();
            resources.publish_state(common)?;
            return Ok(false);
        }
        let to = address_from(&header.address);
        let failed = match resources.send(fd, (ring, at + record::LEN), len, to)? {
            Ok(_) => None,
            Err(Errno::AGAIN | Errno::INTR) => {
                common.writable = false;
                return Ok(false);
            }
            Err(errno) => Some(errno),
        };
        self.rings.taken += footprint(len);
        resources.publish_taken(common, &self.rings)?;
        resources.counters.sent.fetch_add(len, Ordering::Relaxed);
        match failed {
            Some(errno) => self.report_error(common, errno, resources),
            None => Ok(true),
        }
    }

    fn receive_datagram(&mut self, common: &mut Common, resources: &mut Resources) -> Result<bool> {
        let (room, size) = (self.rings.room(), self.rings.receive.1);
        let may = common.readable && !common.has(state::RECEIVE_END) && common.closing.is_none();
        let Some(fd) = common.fd.as_ref().filter(|_| may) else { return Ok(false) };
        // Only a datagram that fits is taken out of the socket's queue.
        if room < footprint(MAX_DATAGRAM) {
            let nothing: &mut [u8] = &mut [];
            let look = RecvFlags::PEEK | RecvFlags::TRUNC | RecvFlags::DONTWAIT;
            match rustix::net::recv(fd, nothing, look) {
                Ok((_, len)) if footprint(len as u64) > size => {
                    // Larger than the ring: drop it.
                    let _ = rustix::net::recv(fd, &mut resources.bounce[..1], RecvFlags::DONTWAIT);
                    resources.counters.dropped.fetch_add(1, Ordering::Relaxed);
                    return Ok(true);
                }
                Ok((_, len)) if footprint(len as u64) > room => return Ok(false),
                Ok(_) => {}
                Err(Errno::AGAIN | Errno::INTR) => {
                    common.readable = false;
                    return Ok(false);
                }
                // The peek has cleared the socket's error, so it must be reported now.
                Err(errno) => return self.report_error(common, errno, resources),
            }
        }
        let into = (self.rings.receive, self.rings.received + record::LEN);
        let most = MAX_DATAGRAM.min(room - record::LEN);
        match resources.receive(fd, into, most, RecvFlags::TRUNC)? {
            Ok((len, _)) if len as u64 > most => {
                // Not the datagram that was looked at: it does not fit.
                resources.counters.dropped.fetch_add(1, Ordering::Relaxed);
                Ok(true)
            }
            Ok((len, from)) => {
                self.put_record(common, len as u64, 0, from, resources)?;
                resources.counters.received.fetch_add(len as u64, Ordering::Relaxed);
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => {
                common.readable = false;
                Ok(false)
            }
            Err(errno) => self.report_error(common, errno, resources),
        }
    }

    /// Stores the record of a datagram whose bytes are in the receive ring behind it.
    fn put_record(
        &mut self,
        common: &Common,
        len: u64,
        error: u32,
        from: Option<SocketAddr>,
        resources: &Resources,
    ) -> Result<()> {
        let header = Record { value: len as u32, error, address: address_bytes(from) };
        let (ring, at) = (self.rings.receive, self.rings.received);
        resources.shared_area.put(ring, at, &header.encode())?;
        self.rings.received += footprint(len);
        resources.publish_received(common, &self.rings)
    }

    /// Reports an errno that does not end the socket, such as `ECONNREFUSED`, as a record without
    /// bytes. It is dropped if the ring has no room.
    fn report_error(
        &mut self,
        common: &Common,
        errno: Errno,
        resources: &Resources,
    ) -> Result<bool> {
        if self.rings.room() >= record::LEN {
            self.put_record(common, 0, errno.raw_os_error() as u32, None, resources)?;
        }
        Ok(true)
    }

    /// Shuts down directions. Datagrams that arrive after receiving was shut down stay in the
    /// operating system's queue, which drops what exceeds it.
    pub(super) fn shut_down(
        &mut self,
        common: &mut Common,
        receiving: bool,
        sending: bool,
        resources: &Resources,
    ) -> Result<Progress> {
        common.flags |= if receiving { state::RECEIVE_END } else { 0 };
        self.shut_send |= sending;
        resources.publish_state(common)?;
        let finished = finish_sending(common, &self.rings, self.shut_send, resources)?;
        Ok(after_turn(true, finished))
    }

    /// What was sent goes out first, connected or not.
    pub(super) fn close(&mut self, common: &mut Common, resources: &Resources) -> Result<Progress> {
        if common.fd.is_none() || self.rings.unsent() == 0 {
            return Ok(Progress::Release);
        }
        let finished = finish_sending(common, &self.rings, self.shut_send, resources)?;
        Ok(after_turn(true, finished))
    }
}
