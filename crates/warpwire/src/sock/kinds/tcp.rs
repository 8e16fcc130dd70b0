//! TCP streams: bytes between the rings and a socket of the operating system.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::{Common, Progress, Rings, after_turn, finish_sending};
use crate::error::Result;
use crate::sock::layout::state;
use crate::sock::resources::{QUANTUM, Resources};

/// A TCP stream, connected or not.
#[derive(Default)]
pub(in crate::sock) struct TcpSocket {
    pub(in crate::sock) rings: Rings,
    /// Its kernel reads no more: input is discarded.
    discard_input: bool,
    /// Shut down the sending direction once the ring is empty.
    shut_send: bool,
}

impl TcpSocket {
    pub(super) fn connect(
        &mut self,
        common: &mut Common,
        address: Option<SocketAddr>,
        resources: &mut Resources,
    ) -> std::result::Result<(), Errno> {
        common.prepare_to_connect()?;
        resources.alloc_rings(&mut self.rings, &common.options)?;
        if common.connect_stream(address)? {
            common.set_connected(resources);
        } else {
            common.flags |= state::CONNECTING;
            common.writable = false;
        }
        Ok(())
    }

    pub(super) fn serve(
        &mut self,
        common: &mut Common,
        resources: &mut Resources,
    ) -> Result<Progress> {
        if common.has(state::CONNECTING) {
            finish_connecting(common, resources)?;
        }
        if !common.has(state::CONNECTED) {
            return Ok(Progress::Idle);
        }
        let more = self.send_some(common, resources)? | self.receive_some(common, resources)?;
        let finished = finish_sending(common, &self.rings, self.shut_send, resources)?;
        Ok(after_turn(more, finished))
    }

    /// Sends from the ring to the peer.
    fn send_some(&mut self, common: &mut Common, resources: &mut Resources) -> Result<bool> {
        let unsent = self.rings.unsent();
        let Some(fd) = common.fd.as_ref().filter(|_| common.writable && unsent > 0) else {
            return Ok(false);
        };
        let from = (self.rings.send, self.rings.taken);
        match resources.send(fd, from, unsent.min(QUANTUM), None)? {
            Ok(count) => {
                self.rings.taken += count as u64;
                // Progress restarts the linger timeout.
                if common.closing.is_some() {
                    common.linger();
                }
                resources.counters.sent.fetch_add(count as u64, Ordering::Relaxed);
                resources.publish_taken(common, &self.rings)?;
                Ok(self.rings.unsent() > 0)
            }
            Err(Errno::AGAIN | Errno::INTR) => {
                common.writable = false;
                Ok(false)
            }
            Err(errno) => {
                // Bytes that arrived before the failure are still received.
                common.fail(None, Some(errno));
                self.rings.taken = self.rings.sent;
                common.readable = true;
                resources.publish_state(common)?;
                Ok(true)
            }
        }
    }

    /// Receives from the peer into the ring.
    fn receive_some(&mut self, common: &mut Common, resources: &mut Resources) -> Result<bool> {
        if self.discard_input {
            return self.discard_some(common, resources);
        }
        let wanted = self.rings.room().min(QUANTUM);
        let may = common.readable
            && wanted > 0
            && !common.has(state::RECEIVE_END)
            && common.closing.is_none();
        let Some(fd) = common.fd.as_ref().filter(|_| may) else { return Ok(false) };
        let into = (self.rings.receive, self.rings.received);
        match resources.receive(fd, into, wanted, RecvFlags::empty())? {
            Ok((0, _)) => {
                common.flags |= state::RECEIVE_END;
                resources.publish_state(common)?;
                Ok(false)
            }
            Ok((count, _)) => {
                self.rings.received += count as u64;
                // A short read has emptied the queue, unless urgent data stopped it or the end of
                // the stream follows.
                common.readable = count as u64 == wanted || common.read_until_empty;
                resources.counters.received.fetch_add(count as u64, Ordering::Relaxed);
                resources.publish_received(common, &self.rings)?;
                Ok(common.readable && self.rings.room() > 0)
            }
            Err(Errno::AGAIN | Errno::INTR) => {
                common.readable = false;
                Ok(false)
            }
            Err(errno) => self.receive_failed(common, errno, resources),
        }
    }

    /// Receives what its kernel no longer reads, so that the peer does not block on a full ring.
    fn discard_some(&mut self, common: &mut Common, resources: &mut Resources) -> Result<bool> {
        let may = common.readable && common.closing.is_none();
        let Some(fd) = common.fd.as_ref().filter(|_| may) else { return Ok(false) };
        match rustix::net::recv(fd, &mut resources.bounce[..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => {
                self.discard_input = false;
                Ok(false)
            }
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::INTR) => {
                common.readable = false;
                Ok(false)
            }
            Err(errno) => self.receive_failed(common, errno, resources),
        }
    }

    /// The connection has failed, in both directions.
    fn receive_failed(
        &mut self,
        common: &mut Common,
        errno: Errno,
        resources: &Resources,
    ) -> Result<bool> {
        common.fail(Some(errno), Some(errno));
        self.rings.taken = self.rings.sent;
        common.close_descriptor();
        resources.publish_state(common)?;
        Ok(false)
    }

    pub(super) fn shut_down(
        &mut self,
        common: &mut Common,
        receiving: bool,
        sending: bool,
        resources: &Resources,
    ) -> Result<Progress> {
        if receiving {
            // Further input is discarded, so that the peer does not block on a full ring.
            self.discard_input |= !common.has(state::RECEIVE_END);
            common.flags |= state::RECEIVE_END;
        }
        self.shut_send |= sending;
        resources.publish_state(common)?;
        let finished = finish_sending(common, &self.rings, self.shut_send, resources)?;
        Ok(after_turn(true, finished))
    }

    /// What was sent is delivered first.
    pub(super) fn close(&mut self, common: &mut Common, resources: &Resources) -> Result<Progress> {
        let sends_on =
            common.fd.is_some() && self.rings.unsent() > 0 && common.has(state::CONNECTED);
        if !sends_on {
            return Ok(Progress::Release);
        }
        let finished = finish_sending(common, &self.rings, self.shut_send, resources)?;
        Ok(after_turn(true, finished))
    }
}

/// Completes a connect in progress: connected or failed.
fn finish_connecting(common: &mut Common, resources: &Resources) -> Result<()> {
    match common.poll_connect() {
        None => return Ok(()),
        Some(Ok(())) => {
            common.set_connected(resources);
        }
        Some(Err(errno)) => {
            common.fail(Some(errno), Some(errno));
            common.close_descriptor();
        }
    }
    resources.publish_state(common)
}
