//! RDMA streams (the `warp` family) on the host: handshake over TCP, supervision and release. Their
//! data bypasses the service thread.
//!
//! 1. Everything that is created for a connection belongs to it alone and is released with it: QP
//!    slot, queue pair, registrations.
//! 2. The TCP connection shows that the peer is alive. It is closed after everything that was sent
//!    has arrived, or reset.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::{Common, Progress, Rings};
use crate::error::{Error, Kind, Result};
use crate::mlx5::Status;
use crate::sock::device_cache::ConnResources;
use crate::sock::layout::state;
use crate::sock::resources::{RdmaState, Resources};
use crate::sock::warp::{FIN, Handshake, Hello, MAX_LINE};

/// Time limit of a handshake.
pub(in crate::sock) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The listener that accepted a connection, until it is queued there, and its peer's address.
#[derive(Clone, Copy, Debug)]
pub(in crate::sock) struct Parent {
    pub(in crate::sock) listener: i32,
    pub(in crate::sock) peer: Option<SocketAddr>,
}

/// An RDMA stream, connected or not.
pub(in crate::sock) struct RdmaSocket {
    pub(in crate::sock) rings: Rings,
    /// Usable bytes of the send ring, the minimum of it and the peer's receive ring.
    send_window: u64,
    /// Maximum number of bytes that the peer keeps in flight or unread.
    peer_window: u64,
    /// The slot of the queue pair. Like the rings, it is kept until the socket is closed: a kernel
    /// may be posting when the connection fails.
    qp_slot: Option<u32>,
    conn_resources: Option<ConnResources>,
    handshake: Option<Handshake>,
    /// When the handshake must be complete.
    deadline: Option<Instant>,
    pub(in crate::sock) parent: Option<Parent>,
    /// The peer has closed in an orderly way.
    peer_closed: bool,
    /// How many work requests its kernels had posted when they closed it.
    posted: u64,
}

impl Default for RdmaSocket {
    fn default() -> Self {
        Self {
            rings: Rings::default(),
            send_window: 0,
            peer_window: u64::MAX,
            qp_slot: None,
            conn_resources: None,
            handshake: None,
            deadline: None,
            parent: None,
            peer_closed: false,
            posted: 0,
        }
    }
}

impl RdmaSocket {
    /// A connection that a listener has accepted.
    pub(in crate::sock) fn accepted(parent: Parent) -> Self {
        Self { parent: Some(parent), ..Self::default() }
    }

    /// Publishes the whole host state to kernels.
    pub(super) fn publish(&self, common: &Common, resources: &Resources) -> Result<()> {
        let attached = self.conn_resources.as_ref().zip(resources.qp_slots.as_ref());
        let qp_descriptor = attached.map_or(0, |(conn_resources, qp_slots)| {
            qp_slots.qp_descriptor_addr(conn_resources.qp_slot)
        });
        let (send_window, peer_window) = (self.send_window, self.peer_window);
        let state = RdmaState { send_window, peer_window, qp_descriptor };
        resources.publish(common, &self.rings, Some(state))
    }

    /// Connects TCP; the handshake follows.
    pub(super) fn connect(
        &mut self,
        common: &mut Common,
        address: Option<SocketAddr>,
        resources: &mut Resources,
    ) -> std::result::Result<(), Errno> {
        let tried_before = common.errno() != 0;
        common.prepare_to_connect()?;
        if tried_before {
            self.send_window = 0;
        }
        resources.alloc_rings(&mut self.rings, &common.options)?;
        let connected = common.connect_stream(address)?;
        common.flags |= state::CONNECTING;
        common.readable |= connected;
        common.writable = connected;
        Ok(())
    }

    /// Serves a stream: handshake, hang-up, close.
    pub(super) fn serve(
        &mut self,
        common: &mut Common,
        resources: &mut Resources,
    ) -> Result<Progress> {
        if common.has(state::CONNECTING) {
            return if self.handshake.is_none() {
                self.finish_connecting(common, resources)
            } else {
                self.drive_handshake(common, resources)
            };
        }
        if common.has(state::CONNECTED) && common.readable {
            let progress = self.check_hangup(common, resources)?;
            if progress != Progress::Idle {
                return Ok(progress);
            }
        }
        Ok(self.poll_close(common))
    }

    /// Completes a connect of TCP in progress, and sends our hello.
    fn finish_connecting(
        &mut self,
        common: &mut Common,
        resources: &mut Resources,
    ) -> Result<Progress> {
        match common.poll_connect() {
            None => Ok(Progress::Idle),
            Some(Ok(())) => {
                common.readable = true;
                let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
                self.begin_handshake(common, Handshake::accepting(), deadline, resources)
            }
            Some(Err(errno)) => {
                common.fail(Some(errno), Some(errno));
                common.close_descriptor();
                resources.publish_state(common)?;
                Ok(Progress::Idle)
            }
        }
    }

    /// Allocates the queue pair and sends our hello. The deadline is that of the whole handshake.
    pub(in crate::sock) fn begin_handshake(
        &mut self,
        common: &mut Common,
        mut handshake: Handshake,
        deadline: Instant,
        resources: &mut Resources,
    ) -> Result<Progress> {
        let hello = self.attach(common, resources);
        match hello.and_then(|hello| handshake.introduce(&hello)) {
            Ok(()) => {
                (self.handshake, self.deadline) = (Some(handshake), Some(deadline));
                self.publish(common, resources)?;
                self.drive_handshake(common, resources)
            }
            Err(error) => {
                tracing::warn!(%error, "no queue pair for a connection; it is reset");
                self.abort(common, Errno::NOBUFS, resources)
            }
        }
    }

    /// Creates the connection's queue pair and registrations.
    fn attach(&mut self, common: &Common, resources: &mut Resources) -> Result<Hello> {
        let conn_memory = resources.conn_memory(common, &self.rings)?;
        let missing = |why: &'static str| Error::new(Kind::OutOfMemory, "connect").why(why);
        let local = common.local_address();
        let local = local.ok_or_else(|| missing("the connection has no local address"))?;
        let qp_slots = resources.qp_slots.as_mut();
        let qp_slots = qp_slots.ok_or_else(|| missing("the family `warp` is disabled"))?;
        let qp_slot = self.qp_slot.or_else(|| qp_slots.take()).ok_or_else(|| {
            missing("all queue pairs are in use")
                .fix("raise SockOptions::warp_sockets, or close sockets that have failed")
        })?;
        self.qp_slot = Some(qp_slot);
        let device_cache = &mut resources.device_cache;
        let conn_resources =
            ConnResources::new(device_cache, qp_slots, qp_slot, local, conn_memory)?;
        let hello = conn_resources.hello();
        self.conn_resources = Some(conn_resources);
        Ok(hello)
    }

    /// Releases the connection's queue pair and registrations.
    pub(in crate::sock) fn detach(&mut self) {
        (self.handshake, self.deadline, self.conn_resources) = (None, None, None);
    }

    /// The same, and the slot of the queue pair.
    pub(super) fn release(&mut self, resources: &mut Resources) {
        self.detach();
        if let (Some(qp_slot), Some(qp_slots)) = (self.qp_slot.take(), resources.qp_slots.as_mut())
        {
            qp_slots.release(qp_slot);
        }
    }

    /// Continues the handshake with the bytes that can be read now.
    fn drive_handshake(
        &mut self,
        common: &mut Common,
        resources: &mut Resources,
    ) -> Result<Progress> {
        let outcome = self.try_handshake(common, resources);
        let is_late = self.deadline.is_some_and(|deadline| Instant::now() > deadline);
        match outcome {
            Ok(true) => self.establish(common, resources),
            Ok(false) if is_late => self.abort(common, Errno::TIMEDOUT, resources),
            Ok(false) => Ok(Progress::Retry),
            Err(errno) => self.abort(common, errno, resources),
        }
    }

    /// True when the handshake is complete.
    fn try_handshake(
        &mut self,
        common: &mut Common,
        resources: &Resources,
    ) -> std::result::Result<bool, Errno> {
        let mut bytes = [0; MAX_LINE];
        let mut count = 0;
        loop {
            let (Some(handshake), Some(fd)) = (&mut self.handshake, &common.fd) else {
                return Ok(false);
            };
            flush_handshake(handshake, fd)?;
            if let Err(error) = handshake.take(&bytes[..count]) {
                // Send the peer the reason, if it still reads.
                let _ = flush_handshake(handshake, fd);
                return Err(refusal(&error));
            }
            if let Some(peer_hello) = handshake.peer().copied()
                && !handshake.is_ready()
            {
                self.connect_qp(common, &peer_hello, resources)?;
                count = 0;
                continue;
            }
            if handshake.is_done() {
                return Ok(true);
            }
            match rustix::net::recv(fd, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Errno::CONNRESET),
                Ok((got, _)) => count = got,
                Err(Errno::INTR) => count = 0,
                Err(Errno::AGAIN) => {
                    common.readable = false;
                    return Ok(false);
                }
                Err(errno) => return Err(errno),
            }
        }
    }

    /// The peer's hello is complete: connects the queue pair.
    fn connect_qp(
        &mut self,
        common: &Common,
        peer_hello: &Hello,
        resources: &Resources,
    ) -> std::result::Result<(), Errno> {
        // Both sizes are powers of two, so where the usable part of our ring does not wrap, the
        // peer's does not either.
        self.send_window = self.rings.send.1.min(peer_hello.ring_size);
        self.peer_window = peer_hello.window.unwrap_or(u64::MAX);
        let (Some(conn_resources), Some(qp_slots)) = (&self.conn_resources, &resources.qp_slots)
        else {
            return Err(Errno::NOBUFS);
        };
        let peer = common.peer_address().ok_or(Errno::CONNRESET)?;
        // The address of a NIC may differ from that of the TCP connection.
        let checked = match resources.device_cache.is_hardware() {
            true => Ok(()),
            false => peer_hello.check_address(peer.ip()),
        };
        let connected = checked
            .and_then(|()| conn_resources.connect_qp(qp_slots, peer_hello))
            .and_then(|()| self.publish(common, resources));
        let Some(handshake) = &mut self.handshake else { return Err(Errno::NOBUFS) };
        match connected {
            Ok(()) => {
                handshake.mark_ready();
                Ok(())
            }
            Err(error) => {
                tracing::warn!(%error, "cannot connect a queue pair");
                handshake.refuse(&error);
                if let Some(fd) = &common.fd {
                    let _ = flush_handshake(handshake, fd);
                }
                Err(Errno::PROTO)
            }
        }
    }

    /// The handshake is complete: publishes the connection to kernels.
    fn establish(&mut self, common: &mut Common, resources: &Resources) -> Result<Progress> {
        (self.handshake, self.deadline) = (None, None);
        common.flags = common.flags & !state::CONNECTING | state::CONNECTED;
        resources.counters.warp.open(common.index, common.generation);
        resources.publish_state(common)?;
        Ok(Progress::Established)
    }

    /// The TCP connection is readable after the handshake: end of stream, reset, or a protocol
    /// error.
    fn check_hangup(&mut self, common: &mut Common, resources: &mut Resources) -> Result<Progress> {
        let Some(fd) = &common.fd else { return Ok(Progress::Idle) };
        match rustix::net::recv(fd, &mut [0; 1], RecvFlags::DONTWAIT | RecvFlags::PEEK) {
            Ok((0, _)) => {
                common.readable = false;
                if resources.shared_area.received(common.index)? & FIN == 0 {
                    return self.abort(common, Errno::CONNRESET, resources);
                }
                self.peer_closed = true;
                common.flags |= state::RECEIVE_END | state::SEND_END;
                resources.publish_state(common)?;
                Ok(Progress::Idle)
            }
            Ok(_) => self.abort(common, Errno::PROTO, resources),
            Err(Errno::AGAIN | Errno::INTR) => {
                common.readable = false;
                Ok(Progress::Idle)
            }
            Err(errno) => self.abort(common, errno, resources),
        }
    }

    /// Aborts the connection: `errno` here, a reset at the peer. It is released if no kernel has
    /// its handle.
    pub(in crate::sock) fn abort(
        &mut self,
        common: &mut Common,
        errno: Errno,
        resources: &mut Resources,
    ) -> Result<Progress> {
        // During the handshake: no reset, so that the peer can still read a refusal.
        let is_connected = common.has(state::CONNECTED);
        if self.parent.is_some() {
            common.options.abort = is_connected;
            return Ok(Progress::Release);
        }
        common.fail(Some(errno), Some(errno));
        let before = std::mem::replace(&mut common.options.abort, is_connected);
        common.close_descriptor();
        common.options.abort = before;
        resources.publish_state(common)?;
        self.detach();
        Ok(if common.closing.is_some() { Progress::Release } else { Progress::Idle })
    }

    /// A kernel aborts its connection, with this errno if it is one of those that kernels report.
    pub(in crate::sock) fn give_up(
        &mut self,
        common: &mut Common,
        errno: u64,
        resources: &mut Resources,
    ) -> Result<Progress> {
        let errno = match i32::try_from(errno).map(Errno::from_raw_os_error) {
            Ok(errno @ (Errno::PROTO | Errno::TIMEDOUT)) => errno,
            _ => Errno::CONNRESET,
        };
        if !common.has(state::CONNECTED) || self.peer_closed {
            return Ok(Progress::Idle);
        }
        // If the queue pair has failed, its status gives the better reason.
        let progress = self.check_queue_pair(common, resources)?;
        if progress == Progress::Idle && common.errno() == 0 && !self.peer_closed {
            return self.abort(common, errno, resources);
        }
        Ok(progress)
    }

    /// Checks the queue pair of a connection for failure.
    pub(in crate::sock) fn check_queue_pair(
        &mut self,
        common: &mut Common,
        resources: &mut Resources,
    ) -> Result<Progress> {
        let is_connected = common.has(state::CONNECTED);
        let attached = self.conn_resources.as_ref().filter(|_| is_connected);
        let Some(failure) = attached.and_then(ConnResources::failure) else {
            return Ok(Progress::Idle);
        };
        // After an orderly close the peer's queue pair is gone too.
        let progress = self.check_hangup(common, resources)?;
        if progress != Progress::Idle || self.peer_closed || common.errno() != 0 {
            return Ok(progress);
        }
        tracing::debug!(index = common.index, ?failure, "a queue pair has failed");
        let errno = match failure {
            Some(Status::RetryExceeded) => Errno::TIMEDOUT,
            _ => Errno::CONNRESET,
        };
        self.abort(common, errno, resources)
    }

    /// Shuts down directions here; the kernel notifies the peer.
    pub(super) fn shut_down(
        &mut self,
        common: &mut Common,
        receiving: bool,
        sending: bool,
        resources: &Resources,
    ) -> Result<Progress> {
        common.flags |= if receiving { state::RECEIVE_END } else { 0 };
        common.flags |= if sending { state::SEND_END } else { 0 };
        resources.publish_state(common)?;
        Ok(Progress::Idle)
    }

    /// What kernels have posted is delivered first.
    pub(super) fn close(&mut self, common: &Common, posted: u64) -> Progress {
        if !common.has(state::CONNECTED) {
            return Progress::Release;
        }
        self.posted = posted;
        self.poll_close(common)
    }

    /// Releases a closed socket once all its posted work has completed.
    pub(super) fn poll_close(&self, common: &Common) -> Progress {
        let is_done = self.peer_closed
            || common.options.abort
            || self.conn_resources.as_ref().is_none_or(|qp| qp.is_drained(self.posted));
        if common.closing.is_some() && is_done { Progress::Release } else { Progress::Idle }
    }
}

/// Sends pending handshake bytes until the socket would block.
pub(in crate::sock) fn flush_handshake(
    handshake: &mut Handshake,
    fd: &OwnedFd,
) -> std::result::Result<(), Errno> {
    while !handshake.to_send().is_empty() {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(fd, handshake.to_send(), flags) {
            Ok(count) => handshake.sent(count),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(()),
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// The errno that kernels get for a failed handshake.
pub(in crate::sock) fn refusal(error: &Error) -> Errno {
    // Info only: any program can connect to the port.
    tracing::info!(%error, "handshake failed");
    match error.kind() {
        Kind::PeerLost => Errno::CONNREFUSED,
        _ => Errno::PROTO,
    }
}
