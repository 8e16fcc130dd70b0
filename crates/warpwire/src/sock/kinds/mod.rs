//! The kinds of sockets. Each is a struct with its own state and behaviour: how it connects, what
//! one turn of service does, how it shuts down and closes. What all have is in [`Common`].
//!
//! A kind knows nothing of other sockets. Its methods return a [`Progress`], by which the service
//! thread queues, retries or releases it.

mod common;
mod listener;
mod rdma;
mod rings;
mod tcp;
mod udp;

use std::collections::VecDeque;
use std::net::SocketAddr;

use rustix::io::Errno;
use rustix::net::Shutdown;

pub(super) use common::{Common, SockOpts, new_descriptor};
pub(super) use listener::{Accept, Listener};
pub(super) use rdma::{HANDSHAKE_TIMEOUT, Parent, RdmaSocket, flush_handshake, refusal};
pub(super) use rings::{Ring, Rings};
pub(super) use tcp::TcpSocket;
pub(super) use udp::UdpSocket;

use super::layout::state;
use super::resources::Resources;
use crate::error::Result;

/// What the service thread does with a socket next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// An event, a request or a counter announces more work.
    Idle,
    /// More work may be left: serve it again.
    More,
    /// No event announces what it waits for: it belongs on the retry list.
    Retry,
    /// The handshake of an RDMA stream is complete.
    Established,
    /// Its slot can be freed.
    Release,
}

/// The outcome of a call: the errno is the kernel's, an [`Error`](crate::Error) the service's.
pub(super) type CallResult<T> = Result<std::result::Result<T, Errno>>;

/// The state of one kind of socket.
#[derive(Default)]
pub(super) enum Socket {
    #[default]
    Vacant,
    /// Accepts TCP connections, of TCP or RDMA streams.
    Listener(Listener),
    Tcp(TcpSocket),
    Udp(UdpSocket),
    /// A stream of the `warp` family.
    Rdma(Box<RdmaSocket>),
}

/// A slot of the socket table.
pub(super) struct Slot {
    pub(super) common: Common,
    pub(super) socket: Socket,
}

/// The outcome of polling a socket's device counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CounterUpdate {
    Same,
    Changed,
    Impossible,
}

/// What is left of a socket whose resources were released.
#[derive(Default)]
pub(super) struct Released {
    /// Handles of a listener's connections that no kernel has accepted.
    pub(super) unaccepted: VecDeque<i32>,
    /// The listener that has accepted an RDMA stream and still waits for its handshake.
    pub(super) parent: Option<Parent>,
}

impl Slot {
    pub(super) fn vacant(index: u16) -> Self {
        Self { common: Common::vacant(index), socket: Socket::Vacant }
    }

    pub(super) fn rings(&self) -> Option<&Rings> {
        match &self.socket {
            Socket::Vacant => None,
            Socket::Listener(listener) => Some(&listener.rings),
            Socket::Tcp(tcp) => Some(&tcp.rings),
            Socket::Udp(udp) => Some(&udp.rings),
            Socket::Rdma(rdma) => Some(&rdma.rings),
        }
    }

    pub(super) fn rings_mut(&mut self) -> Option<&mut Rings> {
        match &mut self.socket {
            Socket::Vacant => None,
            Socket::Listener(listener) => Some(&mut listener.rings),
            Socket::Tcp(tcp) => Some(&mut tcp.rings),
            Socket::Udp(udp) => Some(&mut udp.rings),
            Socket::Rdma(rdma) => Some(&mut rdma.rings),
        }
    }

    /// Takes over the device counters.
    #[inline]
    pub(super) fn update_counters(&mut self, word: u64) -> CounterUpdate {
        let may_send = match self.socket {
            Socket::Vacant | Socket::Listener(_) => false,
            Socket::Udp(_) => true,
            Socket::Tcp(_) | Socket::Rdma(_) => self.common.has(state::CONNECTED),
        };
        let Some(rings) = self.rings_mut() else { return CounterUpdate::Same };
        if rings.is_current(word) {
            CounterUpdate::Same
        } else if rings.update(word, may_send) {
            CounterUpdate::Changed
        } else {
            CounterUpdate::Impossible
        }
    }

    /// Publishes the whole host state to kernels.
    pub(super) fn publish(&self, resources: &Resources) -> Result<()> {
        match (&self.socket, self.rings()) {
            (Socket::Rdma(rdma), _) => rdma.publish(&self.common, resources),
            (_, Some(rings)) => resources.publish(&self.common, rings, None),
            (_, None) => Ok(()),
        }
    }

    /// Starts to connect a stream, or sets the peer of a datagram socket.
    pub(super) fn connect(
        &mut self,
        address: Option<SocketAddr>,
        resources: &mut Resources,
    ) -> std::result::Result<(), Errno> {
        match &mut self.socket {
            Socket::Vacant => Err(Errno::BADF),
            Socket::Listener(_) => Err(Errno::OPNOTSUPP),
            Socket::Tcp(tcp) => tcp.connect(&mut self.common, address, resources),
            Socket::Udp(udp) => udp.connect(&mut self.common, address, resources),
            Socket::Rdma(rdma) => rdma.connect(&mut self.common, address, resources),
        }?;
        // Not earlier: epoll reports an unconnected descriptor as hung up.
        resources.watch(&mut self.common)
    }

    /// Serves one turn. Listeners are served by the service thread, as they create sockets.
    pub(super) fn serve(&mut self, resources: &mut Resources) -> Result<Progress> {
        match &mut self.socket {
            Socket::Vacant | Socket::Listener(_) => Ok(Progress::Idle),
            Socket::Tcp(tcp) => tcp.serve(&mut self.common, resources),
            Socket::Udp(udp) => udp.serve(&mut self.common, resources),
            Socket::Rdma(rdma) => rdma.serve(&mut self.common, resources),
        }
    }

    /// Shuts down directions of a connected socket.
    pub(super) fn shut_down(
        &mut self,
        receiving: bool,
        sending: bool,
        resources: &Resources,
    ) -> CallResult<Progress> {
        if !self.common.has(state::CONNECTED) {
            return Ok(Err(Errno::NOTCONN));
        }
        let common = &mut self.common;
        match &mut self.socket {
            // Neither is ever connected.
            Socket::Vacant | Socket::Listener(_) => Ok(Err(Errno::NOTCONN)),
            Socket::Tcp(tcp) => tcp.shut_down(common, receiving, sending, resources).map(Ok),
            Socket::Udp(udp) => udp.shut_down(common, receiving, sending, resources).map(Ok),
            Socket::Rdma(rdma) => rdma.shut_down(common, receiving, sending, resources).map(Ok),
        }
    }

    /// Closes: [`Progress::Release`] unless something is left to send. `posted` is the number of
    /// work requests that kernels have posted to an RDMA stream.
    pub(super) fn close(&mut self, posted: u64, resources: &Resources) -> Result<Progress> {
        self.common.linger();
        match &mut self.socket {
            Socket::Vacant | Socket::Listener(_) => Ok(Progress::Release),
            Socket::Tcp(tcp) => tcp.close(&mut self.common, resources),
            Socket::Udp(udp) => udp.close(&mut self.common, resources),
            Socket::Rdma(rdma) => Ok(rdma.close(&self.common, posted)),
        }
    }

    /// Whether a closed socket can be freed now, where no event announces it.
    pub(super) fn poll_close(&self) -> Progress {
        match &self.socket {
            Socket::Rdma(rdma) => rdma.poll_close(&self.common),
            _ => Progress::Idle,
        }
    }

    /// Fails the socket and resets its connection. Its slot stays until its kernel closes it.
    pub(super) fn reset(&mut self, errno: Errno, resources: &mut Resources) -> Result<()> {
        self.common.fail(Some(errno), Some(errno));
        self.common.options.abort = true;
        self.common.close_descriptor();
        if let Socket::Rdma(rdma) = &mut self.socket {
            rdma.detach();
        }
        resources.publish_state(&self.common)
    }

    /// Releases what the socket has; its slot is vacant afterwards.
    pub(super) fn release(&mut self, resources: &mut Resources) -> Released {
        // In this order: after an orderly close the peer must see the end before its work requests
        // fail.
        self.common.close_descriptor();
        let mut released = Released::default();
        if let Socket::Rdma(rdma) = &mut self.socket {
            rdma.release(resources);
            released.parent = rdma.parent.take();
            let (index, generation) = (self.common.index, self.common.generation);
            resources.counters.warp.close(index, generation, None);
        }
        if let Some(rings) = self.rings_mut() {
            resources.free_rings(rings);
        }
        if let Socket::Listener(listener) = &mut self.socket {
            released.unaccepted = std::mem::take(&mut listener.waiting);
        }
        self.socket = Socket::Vacant;
        (self.common.open, self.common.closing) = (false, None);
        released
    }
}

/// Completes a pending shutdown or close of a socket whose bytes the host sends, once the send ring
/// is empty.
fn finish_sending(
    common: &mut Common,
    rings: &Rings,
    shut_send: bool,
    resources: &Resources,
) -> Result<Progress> {
    let done = rings.unsent() == 0 || common.has(state::SEND_END) || common.fd.is_none();
    if common.closing.is_some() && (done || common.options.abort) {
        return Ok(Progress::Release);
    }
    if shut_send && done && !common.has(state::SEND_END) {
        if let Some(fd) = &common.fd {
            // Fails if the peer is gone, which receiving reports.
            let _ = rustix::net::shutdown(fd, Shutdown::Write);
        }
        common.flags |= state::SEND_END;
        resources.publish_state(common)?;
    }
    Ok(Progress::Idle)
}

/// The progress of a turn that `finished` ends.
fn after_turn(more: bool, finished: Progress) -> Progress {
    if more && finished != Progress::Release { Progress::More } else { finished }
}
