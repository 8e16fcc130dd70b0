//! Packets between processes of one machine, through ring buffers that both map: no system call
//! unless a receiver sleeps.
//!
//! A link listens on a unix socket named after its address. To open a flow, the sender connects,
//! creates a ring in memory, passes it over the socket, and may write to it immediately. A ring has
//! one direction; the peer opens its own ring for the other one. All flows to one peer share one
//! ring.
//!
//! # Copies
//! The sender fills packets directly in the ring: its memory is sealed against all other writers,
//! so a `&mut [u8]` into it is sound. The receiver copies each packet out before it uses it:
//! otherwise the sender could change a header between check and use, and a `&[u8]` to memory that
//! changes is not a valid reference. The copy moves the cache lines from the other core, which has
//! to happen anyway.
//!
//! # When a ring is full
//! [`ReserveError::Full`] until the peer has read, which it does not signal: senders try again.
//!
//! # When a peer exits
//! Packets that a sender left in its ring are still received. Packets to a peer that has exited are
//! dropped and counted (`no_peer`), as on every other link, not rejected: the queue pair above has
//! its own retransmission timer, and once a process binds the same address again, the flow
//! reconnects to it.

mod access_tag;
#[doc(hidden)]
pub mod exports;
mod handshake;
mod incoming;
mod names;
mod options;
mod ring;
mod sys;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use warpwire_proto::wire::icrc::IcrcPrefix;
use warpwire_proto::wire::packet::ICRC_LEN;

pub use options::{ENV_VAR, ShmOptions};
pub(crate) use sys::peer_credentials;

use super::flows::{FlowId, Flows};
use super::{
    Corruption, Counters, Flushed, Frame, Link, LinkKind, LinkPath, MIN_PACKET, ReserveError,
    SimdCrc32,
};
use crate::error::{Error, Kind as ErrorKind, Result};
use crate::sync::asymmetric_fence;
use crate::units;
use exports::{ExportTable, ShmPeer};
use handshake::RingHello;
use incoming::{Incoming, epoll_add, epoll_token};
use names::{Listener, Names, Namespace};
use ring::{NoRoom, Writer};
use sys::{ControlPage, SealedMapping};

/// Maximum number of packets per flush.
const BATCH: u64 = 256;
/// Port range for links bound to port 0 of an address that does not belong to this machine, for
/// which the kernel assigns no port.
const ANY_PORTS: std::ops::RangeInclusive<u16> = 0xc000..=0xffff;
/// Time between attempts to reconnect to a peer that has exited.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(10);
/// Free UDP ports to try if the name of each is taken by a link that chose it explicitly.
const MAX_PORT_ATTEMPTS: usize = 64;
/// Number of packets without space after which the sender checks that the peer is alive; an engine
/// tries again every millisecond at the least.
const FULL_CHECK_INTERVAL: u32 = 64;
/// The maximum packet length that an ICRC can cover: the IPv4 length field has 16 bits.
const MAX_ICRC_PACKET: usize = 65_507;

/// A link between processes of one machine.
///
/// ```
/// use warpwire::link::{Link, Shm, ShmOptions};
/// let mut alice = Shm::bind("127.0.0.1:0".parse().unwrap(), ShmOptions::default())?;
/// let mut bob = Shm::bind("127.0.0.1:0".parse().unwrap(), ShmOptions::default())?;
/// let to_bob = alice.open(bob.local(), 0)?;
/// alice.reserve(to_bob, 24).unwrap()[12..17].copy_from_slice(b"hello");
/// alice.commit();
/// assert_eq!(alice.flush()?.sent, 1);
/// let received = bob.receive(&mut |frame| {
///     assert_eq!(frame.from, alice.local());
///     assert_eq!(&frame.bytes[12..17], b"hello");
/// })?;
/// assert_eq!(received, 1);
/// # Ok::<(), warpwire::Error>(())
/// ```
pub struct Shm {
    local: SocketAddr,
    names: Names,
    options: ShmOptions,
    /// An epoll instance over the listener, all connections, and the eventfd of the receiving side.
    poll: OwnedFd,
    flows: Flows<Flow>,
    outgoing: Vec<Option<Outgoing>>,
    /// Rings with packets that are committed but not published.
    dirty: Vec<usize>,
    reserved: Option<Reserved>,
    /// Buffer for packets to peers that have exited.
    sink: Box<[u8]>,
    /// The peer of some ring has exited.
    peer_lost: Cell<bool>,
    /// In a `RefCell` because `wait_fd`, which has no exclusive access, also accepts connections: a
    /// new connection alone must not wake the caller.
    incoming: RefCell<Incoming>,
    append_icrc: bool,
    /// Request direct access to the memory of peers.
    wants_direct: bool,
    counters: Counters,
    /// The UDP port of the same number, bound as long as the link exists, if the link chose the
    /// number. Last: the name is free before the port.
    _port: Option<OwnedFd>,
}

/// Connections rejected and rings terminated since the link was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RejectCounters {
    /// Connections from another user.
    pub untrusted: u64,
    /// Connections that use another protocol version.
    pub wrong_version: u64,
    /// Connections with an invalid first message or invalid memory.
    pub malformed: u64,
    /// Connections beyond the limit of a link.
    pub too_many: u64,
    /// Rings with invalid contents; the packets left in them are lost.
    pub broken: u64,
}

struct Flow {
    ring: usize,
    from: SocketAddr,
    to: SocketAddr,
    icrc_prefix: IcrcPrefix,
}

struct Reserved {
    flow: FlowId,
    len: usize,
    /// The peer has exited: the packet will be dropped.
    sink: bool,
}

/// A ring to send through.
struct Outgoing {
    peer: SocketAddr,
    from: SocketAddr,
    /// The namespace in which the peer was found, for reconnecting.
    namespace: Namespace,
    shm_peer: Arc<ShmPeer>,
    writer: Writer,
    /// Number of flows that use the ring.
    flows: usize,
    dirty: bool,
    gone: Cell<bool>,
    /// The process that now listens under the peer's address is not trusted.
    untrusted: bool,
    retry: Instant,
    /// Consecutive packets that found no space.
    refused: u32,
}

impl Outgoing {
    /// Marks the peer as lost or misbehaving, and closes the connection.
    fn mark_gone(&self) {
        // What the peer has said before its end counts: it may have accepted the ring.
        self.shm_peer.poll_control();
        self.shm_peer.disconnect();
        self.gone.set(true);
    }

    /// Whether the peer closed the connection without having read a packet, or cannot be connected
    /// to again.
    fn is_refused(&self) -> bool {
        self.gone.get() && (self.untrusted || !self.shm_peer.is_accepted())
    }
}

impl Drop for Outgoing {
    /// Other owners may hold the peer too: mark it as disconnected now.
    fn drop(&mut self) {
        self.shm_peer.disconnect();
    }
}

impl Shm {
    /// Listens for peers under `address`; port 0 selects a port that is free for UDP as well. The
    /// address is a name and need not belong to this machine; a link on an unspecified address
    /// (`0.0.0.0`, `::`) is found under every address with its port.
    ///
    /// # Errors
    /// `Busy` if another link has the address.
    pub fn bind(address: SocketAddr, options: ShmOptions) -> Result<Self> {
        options.check()?;
        let names = Names::new(Namespace::Shm, options.directory.as_deref());
        let failed = |source: io::Error| bind_error(address, &source);
        let (listener, local, port) = listen(&names, address).map_err(failed)?;
        Self::listening(listener, local, options, names, port)
    }

    /// Listens under the address of a UDP socket that the caller owns.
    pub(super) fn bind_with_udp(address: SocketAddr, options: ShmOptions) -> Result<Self> {
        let names = Names::new(Namespace::Auto, options.directory.as_deref());
        let listener = names.listen(address).map_err(|source| bind_error(address, &source))?;
        Self::listening(listener, address, options, names, None)
    }

    fn listening(
        listener: Listener,
        local: SocketAddr,
        options: ShmOptions,
        names: Names,
        port: Option<OwnedFd>,
    ) -> Result<Self> {
        let options = options.rounded();
        // Done now, because it may take milliseconds, before peers connect.
        asymmetric_fence::prepare_global();
        let failed = |source: io::Error| bind_error(local, &source);
        let poll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|code| failed(code.into()))?;
        let incoming =
            Incoming::new(&poll, listener, local, &options).map_err(|code| failed(code.into()))?;
        Ok(Self {
            local,
            names,
            poll,
            flows: Flows::new(),
            outgoing: Vec::new(),
            dirty: Vec::new(),
            reserved: None,
            sink: vec![0; options.max_packet].into_boxed_slice(),
            options,
            peer_lost: Cell::new(false),
            incoming: RefCell::new(incoming),
            append_icrc: false,
            wants_direct: false,
            counters: Counters::default(),
            _port: port,
        })
    }

    /// Rejected connections and terminated rings, by cause.
    ///
    /// ```
    /// use warpwire::link::Shm;
    /// let link = Shm::bind("127.0.0.1:0".parse().unwrap(), "max_packet=4140".parse()?)?;
    /// assert_eq!(link.rejects().untrusted, 0);
    /// # Ok::<(), warpwire::Error>(())
    /// ```
    pub fn rejects(&self) -> RejectCounters {
        self.incoming.borrow().rejects
    }

    /// Whether the peer of a flow refused the connection: it has read none of the packets.
    pub(super) fn is_refused(&self, flow: FlowId) -> bool {
        let ring = self.flows.get(flow).and_then(|flow| self.outgoing.get(flow.ring)?.as_ref());
        ring.is_some_and(Outgoing::is_refused)
    }

    /// Whether the shared directory names this peer, which may be in another network namespace.
    pub(super) fn is_in_directory(&self, peer: SocketAddr) -> bool {
        self.names.has_file(self.local, peer)
    }

    /// Whether the peer of some ring has exited or refused the connection.
    #[inline]
    pub(super) fn has_lost_peers(&self) -> bool {
        self.peer_lost.get()
    }

    /// Number of rings through which peers send to this link.
    pub(super) fn senders(&mut self) -> usize {
        self.incoming.get_mut().count()
    }

    /// The ring to this peer, created if there is none.
    fn ring_to(&mut self, peer: SocketAddr) -> Result<usize> {
        let same = |known: &Option<Outgoing>| {
            known.as_ref().is_some_and(|known| known.peer == peer && !known.gone.get())
        };
        if let Some(at) = self.outgoing.iter().position(same) {
            return Ok(at);
        }
        let from = self.source(peer);
        let (namespace, shm_peer, writer) =
            self.handshake(from, peer, None).map_err(|source| self.open_error(peer, &source))?;
        let made = Outgoing {
            peer,
            from,
            namespace,
            shm_peer,
            writer,
            flows: 0,
            dirty: false,
            gone: Cell::new(false),
            untrusted: false,
            retry: Instant::now(),
            refused: 0,
        };
        if let Some(free) = self.outgoing.iter().position(Option::is_none) {
            self.outgoing[free] = Some(made);
            return Ok(free);
        }
        self.outgoing.push(Some(made));
        // Capacity for all of them, so that a flush never allocates.
        self.dirty.reserve(self.outgoing.len());
        Ok(self.outgoing.len() - 1)
    }

    /// The address under which the peer sees this link. Linux sends to a local address from that
    /// same address.
    fn source(&self, peer: SocketAddr) -> SocketAddr {
        let ip = if self.local.ip().is_unspecified() { peer.ip() } else { self.local.ip() };
        SocketAddr::new(ip, self.local.port())
    }

    /// Connects to the peer and passes it a new ring.
    fn handshake(
        &self,
        from: SocketAddr,
        peer: SocketAddr,
        only: Option<Namespace>,
    ) -> io::Result<(Namespace, Arc<ShmPeer>, Writer)> {
        let (socket, namespace) = self.names.connect(self.local, peer, only)?;
        if !handshake::is_trusted(socket.as_fd())? {
            return Err(Errno::PERM.into());
        }
        let size = self.options.ring;
        let ((memory, ring), (control, page)) = (SealedMapping::new(size)?, ControlPage::new()?);
        let wants_direct = self.wants_direct;
        RingHello { from, to: peer, ring: size, wants_direct }.send_on(&socket, &ring, &page)?;
        // The socket delivers the peer's exports, and its end.
        epoll_add(&self.poll, &socket, EventFlags::IN | EventFlags::RDHUP)?;
        let writer = Writer::new(memory, control, size);
        Ok((namespace, ShmPeer::new(from, socket, &page)?, writer))
    }

    /// Handles events on the sockets.
    fn poll_sockets(&self, incoming: &mut Incoming) {
        incoming.poll_sockets(&self.poll, &mut |which| {
            let ours = |known: &&Outgoing| epoll_token(&known.shm_peer.socket) == which;
            if let Some(known) = self.outgoing.iter().flatten().find(ours)
                && !known.shm_peer.poll_control()
            {
                let _ = epoll::delete(&self.poll, &known.shm_peer.socket);
                known.mark_gone();
                self.peer_lost.set(true);
            }
        });
    }

    /// As [`Shm::poll_sockets`], out of line: the cold path of `receive`.
    #[cold]
    fn poll_sockets_now(&self) {
        self.poll_sockets(&mut self.incoming.borrow_mut());
    }

    /// Tries to reconnect to peers that have exited.
    #[cold]
    fn reconnect_lost(&mut self) {
        let now = Instant::now();
        let mut peer_lost = false;
        for at in 0..self.outgoing.len() {
            let Some(known) = &self.outgoing[at] else { continue };
            if !known.gone.get() {
                continue;
            }
            if known.retry > now {
                peer_lost = true;
                continue;
            }
            let made = self.handshake(known.from, known.peer, Some(known.namespace));
            let Some(known) = &mut self.outgoing[at] else { continue };
            match made {
                Ok((_, shm_peer, writer)) => {
                    let _ = epoll::delete(&self.poll, &known.shm_peer.socket);
                    (known.shm_peer, known.writer) = (shm_peer, writer);
                    known.gone.set(false);
                }
                Err(why) => {
                    known.untrusted = Errno::from_io_error(&why) == Some(Errno::PERM);
                    peer_lost = true;
                }
            }
            // Also after a success: the peer may refuse the new connection.
            known.retry = now + RECONNECT_INTERVAL;
        }
        self.peer_lost.set(peer_lost);
    }

    /// Handles a packet that found no space: checks from time to time whether the peer is alive.
    /// Returns whether it has exited.
    #[cold]
    fn no_room(&mut self, ring: usize, why: NoRoom) -> bool {
        let Some(known) = self.outgoing.get_mut(ring).and_then(Option::as_mut) else { return true };
        known.refused = known.refused.wrapping_add(1);
        let check_alive = why == NoRoom::Ring && known.refused.is_multiple_of(FULL_CHECK_INTERVAL);
        if why == NoRoom::Broken || check_alive && !known.shm_peer.poll_control() {
            known.mark_gone();
            self.peer_lost.set(true);
        }
        known.gone.get()
    }

    /// Publishes the committed packets of all rings and returns their number.
    #[inline]
    fn publish_dirty(&mut self) -> usize {
        let mut sent = 0;
        for at in self.dirty.drain(..) {
            if let Some(known) = self.outgoing.get_mut(at).and_then(Option::as_mut) {
                sent += publish(known, &self.peer_lost, &mut self.counters);
            }
        }
        sent as usize
    }

    #[cold]
    fn open_error(&self, peer: SocketAddr, source: &io::Error) -> Error {
        let what = format!("open a flow to {peer} through shared memory");
        let on = format!("shm {}", self.local);
        match Errno::from_io_error(source) {
            Some(Errno::CONNREFUSED) => Error::new(ErrorKind::Unavailable, what)
                .on(on)
                .why("no process of this machine listens under that address")
                .fix("start the peer first, or use UDP"),
            Some(Errno::PERM) => Error::new(ErrorKind::PermissionDenied, what)
                .on(on)
                .why("the listening process runs as another user, or as one unknown here")
                .fix("run both as one user that this user namespace maps, or use UDP"),
            Some(Errno::AGAIN) => Error::new(ErrorKind::Busy, what)
                .on(on)
                .why("too many connections are waiting for the peer to accept them")
                .fix("retry after the peer has received"),
            Some(Errno::INVAL) => Error::new(ErrorKind::Unsupported, what)
                .on(on)
                .why("the kernel cannot seal memory (F_SEAL_FUTURE_WRITE, Linux 5.1)")
                .fix("use UDP"),
            _ => Error::os(what, source).on(on),
        }
    }
}

/// Publishes the packets of a ring and returns their number.
fn publish(known: &mut Outgoing, peer_lost: &Cell<bool>, counters: &mut Counters) -> u64 {
    known.dirty = false;
    let (packets, bytes) = (known.writer.packets, known.writer.bytes);
    if known.gone.get() {
        counters.drops.no_peer += packets;
        (known.writer.packets, known.writer.bytes) = (0, 0);
        return 0;
    }
    if known.writer.publish() {
        counters.calls += 1;
        if !handshake::wake(&known.shm_peer.socket) {
            known.mark_gone();
            peer_lost.set(true);
        }
    }
    counters.sent += packets;
    counters.sent_bytes += bytes;
    packets
}

impl Link for Shm {
    fn path(&self) -> LinkPath {
        let append_icrc =
            if self.append_icrc { "with" } else { "without (memory does not corrupt packets)" };
        let why = format!(
            "memory shared with other processes of this machine; rings of {}, packets up to {} \
             bytes {append_icrc} ICRC, built in the ring and copied out; {} senders connected",
            units::bytes(self.options.ring as u64),
            self.max_packet(),
            self.incoming.borrow().count(),
        );
        LinkPath { kind: LinkKind::Shm, local: self.local, why }
    }

    fn local(&self) -> SocketAddr {
        self.local
    }

    fn max_packet(&self) -> usize {
        if self.append_icrc {
            self.options.max_packet.min(MAX_ICRC_PACKET)
        } else {
            self.options.max_packet
        }
    }

    /// The peer must be listening; it may exit and return later.
    fn open(&mut self, peer: SocketAddr, _label: u32) -> Result<FlowId> {
        super::check_peer(self.local, peer)?;
        let ring = self.ring_to(peer)?;
        let from = self.source(peer);
        if let Some(known) = &mut self.outgoing[ring] {
            known.flows += 1;
        }
        Ok(self.flows.insert(Flow {
            ring,
            from,
            to: peer,
            icrc_prefix: IcrcPrefix::new(from, peer),
        }))
    }

    fn close(&mut self, flow: FlowId) {
        let Some(flow) = self.flows.remove(flow) else { return };
        let Some(slot) = self.outgoing.get_mut(flow.ring) else { return };
        let Some(known) = slot else { return };
        known.flows -= 1;
        if known.flows == 0 {
            // The ring is dropped with its last flow; publish its packets first.
            publish(known, &self.peer_lost, &mut self.counters);
            let _ = epoll::delete(&self.poll, &known.shm_peer.socket);
            *slot = None;
            self.dirty.retain(|at| *at != flow.ring);
        }
    }

    #[inline]
    fn reserve(
        &mut self,
        flow: FlowId,
        len: usize,
    ) -> std::result::Result<&mut [u8], ReserveError> {
        if !(MIN_PACKET..=self.max_packet()).contains(&len) {
            return Err(ReserveError::Length);
        }
        let Some(known) = self.flows.get_mut(flow) else { return Err(ReserveError::Closed) };
        let ring = known.ring;
        let Some(out) = self.outgoing.get_mut(ring).and_then(Option::as_mut) else {
            return Err(ReserveError::Closed);
        };
        self.reserved = None;
        let mut sink = out.gone.get();
        if !sink {
            if out.writer.packets >= BATCH {
                return Err(ReserveError::Full);
            }
            if let Err(why) = out.writer.reserve(len) {
                sink = self.no_room(ring, why);
                if !sink {
                    return Err(ReserveError::Full);
                }
            }
        }
        self.reserved = Some(Reserved { flow, len, sink });
        if sink {
            return self.sink.get_mut(..len).ok_or(ReserveError::Length);
        }
        let out =
            self.outgoing.get_mut(ring).and_then(Option::as_mut).ok_or(ReserveError::Closed)?;
        Ok(out.writer.reserved_mut())
    }

    #[inline]
    fn commit_corrupted(&mut self, corruption: Corruption) -> Option<Frame<'_>> {
        let Reserved { flow, len, sink } = self.reserved.take()?;
        let Flow { ring, from, to, icrc_prefix } = self.flows.get_mut(flow)?;
        let (from, to) = (*from, *to);
        let out = self.outgoing.get_mut(*ring)?.as_mut()?;
        let packet = if sink { self.sink.get_mut(..len)? } else { out.writer.reserved_mut() };
        if self.append_icrc {
            let icrc = icrc_prefix.icrc::<SimdCrc32>(0, packet)?;
            packet[len - ICRC_LEN..].copy_from_slice(&icrc.to_le_bytes());
        }
        let left = corruption.apply(packet);
        let bytes = if sink {
            self.counters.drops.no_peer += 1;
            self.sink.get(..left)?
        } else {
            if !out.dirty {
                out.dirty = true;
                self.dirty.push(*ring);
            }
            out.writer.commit(left, self.append_icrc)
        };
        Some(Frame {
            from,
            to,
            bytes,
            traffic_class: Frame::TRAFFIC_CLASS,
            hop_limit: Frame::HOP_LIMIT,
            identification: 0,
            has_icrc: self.append_icrc,
        })
    }

    #[inline]
    fn has_room(&mut self, flow: FlowId, len: usize) -> std::result::Result<(), ReserveError> {
        if !(MIN_PACKET..=self.max_packet()).contains(&len) {
            return Err(ReserveError::Length);
        }
        self.reserved = None;
        let Some(ring) = self.flows.get_mut(flow).map(|flow| flow.ring) else {
            return Err(ReserveError::Closed);
        };
        let Some(Some(out)) = self.outgoing.get_mut(ring) else {
            return Err(ReserveError::Closed);
        };
        if out.gone.get() {
            return Ok(()); // the packet will be dropped
        }
        if out.writer.packets >= BATCH {
            return Err(ReserveError::Full);
        }
        match out.writer.has_room(len) {
            Err(why) if !self.no_room(ring, why) => Err(ReserveError::Full),
            _ => Ok(()),
        }
    }

    #[inline]
    fn publish(&mut self) {
        self.publish_dirty();
    }

    #[inline]
    fn flush(&mut self) -> Result<Flushed> {
        self.reserved = None;
        let sent = self.publish_dirty();
        if self.peer_lost.get() {
            self.reconnect_lost();
        }
        Ok(Flushed { sent, waiting: 0 })
    }

    #[inline]
    fn receive(&mut self, take: &mut dyn FnMut(Frame<'_>)) -> Result<usize> {
        let incoming = self.incoming.get_mut();
        let was_armed = incoming.was_armed();
        if incoming.is_poll_due() {
            self.poll_sockets_now();
        }
        let delivered = self.incoming.get_mut().receive(&mut self.counters, take);
        if delivered > 0 || !was_armed {
            return Ok(delivered);
        }
        // Woken, but not by a packet: by a connection, or by the end of one.
        self.poll_sockets_now();
        Ok(self.incoming.get_mut().receive(&mut self.counters, take))
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        let mut incoming = self.incoming.borrow_mut();
        self.poll_sockets(&mut incoming);
        incoming.arm();
        Some(self.poll.as_fd())
    }

    fn install_exports(
        &mut self,
        export_table: &Arc<ExportTable>,
    ) -> std::result::Result<(), &'static str> {
        self.wants_direct = true;
        self.incoming.get_mut().export_table = Some(export_table.clone());
        Ok(())
    }

    fn direct_peer(&self, flow: FlowId) -> std::result::Result<Arc<ShmPeer>, &'static str> {
        let ring = self.flows.get(flow).and_then(|flow| self.outgoing.get(flow.ring)?.as_ref());
        ring.map(|ring| ring.shm_peer.clone()).ok_or("the flow is closed")
    }

    /// From now on packets have at most 65 507 bytes: the ICRC covers an IP header, which cannot
    /// express more.
    fn force_icrc(&mut self) {
        self.append_icrc = true;
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

/// Listens under the address; with port 0, under a free port, which is then bound for UDP as well.
fn listen(
    names: &Names,
    address: SocketAddr,
) -> io::Result<(Listener, SocketAddr, Option<OwnedFd>)> {
    if address.port() != 0 {
        return Ok((names.listen(address)?, address, None));
    }
    for _ in 0..MAX_PORT_ATTEMPTS {
        let Some((port, address)) = names::reserve_port(address.ip()) else { break };
        match names.listen(address) {
            Ok(listener) => return Ok((listener, address, Some(port))),
            Err(source) if source.kind() == io::ErrorKind::AddrInUse => {}
            Err(source) => return Err(source),
        }
    }
    // Processes start at different ports, so that they rarely try one that is taken.
    let (first, count) = (*ANY_PORTS.start(), ANY_PORTS.len() as u32);
    let start = std::process::id().wrapping_mul(40_503) % count;
    for step in 0..count {
        let port = first + ((start + step) % count) as u16;
        let address = SocketAddr::new(address.ip(), port);
        match names.listen(address) {
            Ok(listener) => return Ok((listener, address, None)),
            Err(source) if source.kind() == io::ErrorKind::AddrInUse => {}
            Err(source) => return Err(source),
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

#[cold]
fn bind_error(address: SocketAddr, source: &io::Error) -> Error {
    let what = "bind a shared-memory link";
    if source.kind() == io::ErrorKind::AddrInUse {
        return Error::new(ErrorKind::Busy, what)
            .on(address.to_string())
            .why("another link has this address")
            .fix("choose another port (0 for any free one), or stop the process that uses it");
    }
    Error::os(what, source).on(address.to_string())
}
