//! Datagrams of the family `warp` on the host: between rings and the [`Office`] of a socket, in the records that UDP's have.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::agent::Agent;
use super::datagrams::{AT_ONCE, Outgoing, footprint};
use super::layout::state;
use super::requests::{DONE, Outcome};
use super::warp::Office;
use crate::error::Result;

/// How long a kernel's datagrams wait behind one for whose name too many wait. A name that is there answers sooner; one that
/// is not must not hold up those to others.
const PATIENCE: Duration = Duration::from_millis(50);

impl Agent {
    /// Gives a socket what it needs for datagrams of the family.
    pub(super) fn open_office(&mut self, index: u16) -> std::result::Result<(), Errno> {
        let socket = &mut self.sockets[usize::from(index)];
        let fd = socket.fd.as_ref().ok_or(Errno::INVAL)?;
        let name = UdpSocket::from(rustix::io::fcntl_dupfd_cloexec(fd, 0)?);
        socket.office = Some(Box::new(Office::new(name, PATIENCE, &mut self.fabric)?));
        Ok(())
    }

    /// Lets go of it.
    pub(super) fn close_office(&mut self, index: u16) {
        self.count_dropped(index, true);
        self.sockets[usize::from(index)].office = None;
    }

    pub(super) fn bind_office(
        &mut self,
        index: u16,
        address: Option<SocketAddr>,
    ) -> Result<Outcome> {
        let address = self.with_address(index, address).map(|(_, address)| address);
        let Some(office) = &mut self.sockets[usize::from(index)].office else {
            return Ok(Err(Errno::INVAL));
        };
        let bound = address.and_then(|address| office.bind(address, &mut self.fabric));
        // How long a datagram may be depends on the device.
        self.tell_line(index)?;
        Ok(bound.map(|()| (0, None)))
    }

    pub(super) fn connect_office(
        &mut self,
        index: u16,
        address: Option<SocketAddr>,
    ) -> Result<Outcome> {
        let address = self.with_address(index, address).map(|(_, address)| address);
        let socket = &mut self.sockets[usize::from(index)];
        let Some(office) = &mut socket.office else { return Ok(Err(Errno::INVAL)) };
        if let Err(errno) = address.and_then(|address| office.connect(address, &mut self.fabric)) {
            return Ok(Err(errno));
        }
        socket.flags |= state::CONNECTED;
        self.counters.connected.fetch_add(1, Ordering::Relaxed);
        self.tell_line(index)?;
        self.queue(index);
        Ok(DONE)
    }

    pub(super) fn office_peer(&self, index: u16) -> Outcome {
        let office = self.sockets[usize::from(index)].office.as_ref();
        let peer = office.and_then(|office| office.peer()).ok_or(Errno::NOTCONN)?;
        Ok((0, Some(peer)))
    }

    /// Does a piece of what such a socket has to do; true if more may be left.
    pub(super) fn serve_office(&mut self, index: u16) -> Result<bool> {
        let now = Instant::now();
        let socket = &mut self.sockets[usize::from(index)];
        let Some(office) = &mut socket.office else { return Ok(false) };
        let mut more = office.pump(now, &mut self.fabric);
        // What comes from now on is told.
        office.arm();
        let (mut more_out, mut more_in) = (true, true);
        for _ in 0..AT_ONCE {
            more_out = more_out && self.send_by_office(index, now)?;
            more_in = more_in && self.receive_by_office(index)?;
        }
        more |= more_out || more_in;
        self.tell_failures(index)?;
        self.count_dropped(index, false);
        self.finish(index)?;
        let socket = &mut self.sockets[usize::from(index)];
        let Some(office) = socket.office.as_ref().filter(|_| socket.open) else { return Ok(false) };
        // Questions are asked again, and nobody announces when.
        if office.next_due().is_some() || socket.closing.is_some() {
            self.look_again_at(index);
        }
        Ok(more)
    }

    fn send_by_office(&mut self, index: u16, now: Instant) -> Result<bool> {
        let Some(Outgoing { len, to }) = self.fetch_datagram(index)? else { return Ok(false) };
        let Some(office) = &mut self.sockets[usize::from(index)].office else { return Ok(false) };
        let bytes = &self.bounce[..len as usize];
        match office.send(now, to, bytes, &mut self.fabric) {
            Ok(true) => self.datagram_taken(index, len, None),
            // Its device, or a name, keeps it waiting: either is heard of.
            Ok(false) => {
                self.look_again_at(index);
                Ok(false)
            }
            Err(errno) => {
                self.counters.dropped.fetch_add(1, Ordering::Relaxed);
                self.datagram_taken(index, len, Some(errno))
            }
        }
    }

    fn receive_by_office(&mut self, index: u16) -> Result<bool> {
        let socket = &mut self.sockets[usize::from(index)];
        let (room, size) = (socket.room(), socket.receive_ring.1);
        let may = !socket.has(state::RECEIVE_END) && socket.closing.is_none();
        let Some(office) = socket.office.as_mut().filter(|_| may) else { return Ok(false) };
        // What does not fit now stays where it is, until those places are full too.
        match office.next_len() {
            None => return Ok(false),
            Some(len) if footprint(len as u64) > size => {
                // It will never fit.
                office.drop_next();
                return Ok(true);
            }
            Some(len) if footprint(len as u64) > room => return Ok(false),
            Some(_) => {}
        }
        let Some((len, from)) = office.take_next(&mut self.bounce) else { return Ok(false) };
        self.put_datagram(index, len, 0, Some(from))?;
        self.counters.received.fetch_add(len as u64, Ordering::Relaxed);
        Ok(true)
    }

    /// Tells a kernel of names that nobody has.
    fn tell_failures(&mut self, index: u16) -> Result<()> {
        let next =
            |agent: &mut Self| agent.sockets[usize::from(index)].office.as_mut()?.take_failure();
        while let Some(errno) = next(self) {
            self.tell_error(index, errno)?;
        }
        Ok(())
    }

    /// Counts what was lost; what found no receive too, if that is wanted: it takes a while.
    pub(super) fn count_dropped(&mut self, index: u16, counts_missed: bool) {
        if let Some(office) = &mut self.sockets[usize::from(index)].office {
            let dropped = office.take_dropped(counts_missed);
            self.counters.dropped.fetch_add(dropped, Ordering::Relaxed);
        }
    }
}
