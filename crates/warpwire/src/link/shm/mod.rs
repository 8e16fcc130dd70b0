//! Packets between processes of one machine, through memory that both map: no system call while nobody sleeps.
//!
//! A link listens on a unix socket named after its address. Who opens a flow to it connects, makes a
//! ring in memory, passes it along, and writes at once. A ring has one direction; the way back is the peer's own to
//! open. All flows to one peer share one ring.
//!
//! # Copies
//! The sender fills packets in place: its memory is sealed so that nobody else can ever write it, and a `&mut [u8]`
//! into it is what it says. The receiver copies each packet out before anyone looks at it: the sender could change it
//! under the reader's eyes otherwise, after a header was checked and before it is used, and a `&[u8]` of memory that changes is no
//! valid reference at all. The copy brings the lines over from the other core, which somebody must do anyway.
//!
//! # When a ring is full
//! [`ReserveError::Full`], until the peer has read; [`Link::poll_delay`] says to look again soon, because nobody signals room.
//!
//! # When a peer goes
//! What a sender left in its ring is still read. Packets to a peer that is gone are lost and counted (`no_peer`), as
//! they are on every other link, rather than refused: the queue pair above has its own timer, and when a process takes
//! up the same address again, the flow reaches it without anyone's doing.

mod access_tag;
pub mod exports;
mod handshake;
mod incoming;
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

pub use options::{ENV_VAR, Options};

use super::flows::{FlowId, Flows};
use super::{
    Corruption, Counters, Flushed, Frame, Link, LinkKind, LinkPath, MIN_PACKET, ReserveError,
    SimdCrc32,
};
use crate::error::{Error, Kind as ErrorKind, Result};
use crate::sync::asymmetric_fence;
use crate::units;
use exports::{ExportTable, ShmPeer};
use handshake::{Namespace, RingHello};
use incoming::{Incoming, epoll_add, epoll_token};
use ring::{NoRoom, Writer};
use sys::{ControlPage, SealedMapping};

/// How many packets go with one flush.
const BATCH: u64 = 256;
/// Ports that are given to links that ask for any, where the kernel has none to give because the address is not this machine's.
const ANY_PORTS: std::ops::RangeInclusive<u16> = 0xc000..=0xffff;
/// How long until a peer that is gone is looked for again.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(10);
/// So many free UDP ports are tried whose name somebody has who chose it.
const MAX_PORT_ATTEMPTS: usize = 64;
/// A sender that finds a ring full looks again after this.
const FULL_RETRY_DELAY: Duration = Duration::from_micros(20);
/// After so many packets in a row without room, whether the peer still lives is asked.
const FULL_CHECK_INTERVAL: u32 = 1024;
/// The longest packet that an ICRC can cover: IPv4's length has sixteen bits.
const MAX_ICRC_PACKET: usize = 65_507;

/// A link between processes of one machine.
///
/// ```
/// use warpwire::link::{Link, Shm, shm::Options};
/// let mut alice = Shm::bind("127.0.0.1:0".parse().unwrap(), Options::default())?;
/// let mut bob = Shm::bind("127.0.0.1:0".parse().unwrap(), Options::default())?;
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
    namespace: Namespace,
    /// The UDP port of the same number, held while the link lives, if the number was ours to choose.
    _port: Option<OwnedFd>,
    options: Options,
    /// Everything that may wake us: the listener, connections both ways, the receiving side's own event.
    poll: OwnedFd,
    flows: Flows<Flow>,
    outgoing: Vec<Option<Outgoing>>,
    /// The rings with packets that are committed and not published.
    dirty: Vec<usize>,
    reserved: Option<Reserved>,
    /// Where packets are built whose peer is gone.
    sink: Box<[u8]>,
    /// A peer may be gone.
    peer_lost: Cell<bool>,
    /// The last packet found its ring full.
    ring_full: bool,
    /// Connections are taken up by `wait_fd` too, which has no exclusive access: a new one is nothing to wake up for.
    incoming: RefCell<Incoming>,
    append_icrc: bool,
    /// We would reach memory of peers by ourselves.
    wants_direct: bool,
    counters: Counters,
}

/// Connections that were turned away, and rings that were ended, since the link was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RejectCounters {
    /// Connections of another user, who is not root.
    pub untrusted: u64,
    /// Connections that speak another version.
    pub wrong_version: u64,
    /// Connections whose first message, or whose memory, was not what it must be.
    pub malformed: u64,
    /// Connections beyond the number that a link keeps.
    pub too_many: u64,
    /// Rings whose contents made no sense; what was left in them is lost.
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
    /// The peer is gone: the packet is built to be lost.
    sink: bool,
}

/// A ring that we send through.
struct Outgoing {
    peer: SocketAddr,
    from: SocketAddr,
    /// The sort of name that it was found under, and is looked for again if it goes.
    namespace: Namespace,
    shm_peer: Arc<ShmPeer>,
    writer: Writer,
    /// How many flows use it.
    flows: usize,
    dirty: bool,
    gone: Cell<bool>,
    retry: Instant,
    /// Packets in a row that had no room.
    refused: u32,
}

impl Outgoing {
    /// The peer is gone, or of no use.
    fn mark_gone(&self) {
        self.shm_peer.disconnect();
        self.gone.set(true);
    }
}

impl Drop for Outgoing {
    /// Others may hold the peer too; that it is over is told at once.
    fn drop(&mut self) {
        self.shm_peer.disconnect();
    }
}

impl Shm {
    /// Listens for peers under `address`; port 0 stands for any that is free, for UDP too. The address is a name and need not be
    /// one of this machine's; an unspecified one (`0.0.0.0`, `::`) is met under every address with its port.
    ///
    /// # Errors
    /// `Busy` if another process has that name.
    pub fn bind(address: SocketAddr, options: Options) -> Result<Self> {
        let failed = |source: io::Error| bind_error(address, &source);
        let (listener, local, port) = listen(address).map_err(failed)?;
        Self::listening(listener, local, options, Namespace::Shm, port)
    }

    /// Listens beside a UDP socket that has this address.
    pub(super) fn bind_with_udp(address: SocketAddr, options: Options) -> Result<Self> {
        let listener = handshake::listen(address, Namespace::Auto)
            .map_err(|source| bind_error(address, &source))?;
        Self::listening(listener, address, options, Namespace::Auto, None)
    }

    fn listening(
        listener: OwnedFd,
        local: SocketAddr,
        options: Options,
        namespace: Namespace,
        port: Option<OwnedFd>,
    ) -> Result<Self> {
        let options = options.rounded();
        // Asked for now, as it may take milliseconds: peers that come find it done.
        asymmetric_fence::prepare_global();
        let failed = |source: io::Error| bind_error(local, &source);
        let poll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|code| failed(code.into()))?;
        let incoming =
            Incoming::new(&poll, listener, local, &options).map_err(|code| failed(code.into()))?;
        Ok(Self {
            local,
            namespace,
            _port: port,
            options,
            poll,
            flows: Flows::new(),
            outgoing: Vec::new(),
            dirty: Vec::new(),
            reserved: None,
            sink: vec![0; options.max_packet].into_boxed_slice(),
            peer_lost: Cell::new(false),
            ring_full: false,
            incoming: RefCell::new(incoming),
            append_icrc: false,
            wants_direct: false,
            counters: Counters::default(),
        })
    }

    /// Who was turned away, and why.
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

    /// How many rings others send to us through.
    pub(super) fn senders(&mut self) -> usize {
        self.incoming.get_mut().count()
    }

    /// The ring to this peer, made if there is none.
    fn ring_to(&mut self, peer: SocketAddr) -> Result<usize> {
        let same = |known: &Option<Outgoing>| {
            known.as_ref().is_some_and(|known| known.peer == peer && !known.gone.get())
        };
        if let Some(at) = self.outgoing.iter().position(same) {
            return Ok(at);
        }
        let from = self.source(peer);
        let (namespace, shm_peer, writer) = self
            .handshake(from, peer, &self.namespace.search_order())
            .map_err(|source| self.open_error(peer, &source))?;
        let made = Outgoing {
            peer,
            from,
            namespace,
            shm_peer,
            writer,
            flows: 0,
            dirty: false,
            gone: Cell::new(false),
            retry: Instant::now(),
            refused: 0,
        };
        if let Some(free) = self.outgoing.iter().position(Option::is_none) {
            self.outgoing[free] = Some(made);
            return Ok(free);
        }
        self.outgoing.push(Some(made));
        // Room for each, so that a flush never allocates.
        self.dirty.reserve(self.outgoing.len());
        Ok(self.outgoing.len() - 1)
    }

    /// The address that the peer sees us under. Linux sends to an address of this machine from that same address.
    fn source(&self, peer: SocketAddr) -> SocketAddr {
        let ip = if self.local.ip().is_unspecified() { peer.ip() } else { self.local.ip() };
        SocketAddr::new(ip, self.local.port())
    }

    /// Connects to the peer, and gives it a new ring.
    fn handshake(
        &self,
        from: SocketAddr,
        peer: SocketAddr,
        names: &[Namespace],
    ) -> io::Result<(Namespace, Arc<ShmPeer>, Writer)> {
        let (socket, namespace) = handshake::connect(peer, names)?;
        if !handshake::is_trusted(socket.as_fd())? {
            return Err(Errno::PERM.into());
        }
        let size = self.options.ring;
        let ((memory, ring), (control, page)) = (SealedMapping::new(size)?, ControlPage::new()?);
        let wants_direct = self.wants_direct;
        RingHello { from, to: peer, ring: size, wants_direct }.send_on(&socket, &ring, &page)?;
        // What it offers comes from there, and its end.
        epoll_add(&self.poll, &socket, EventFlags::IN | EventFlags::RDHUP)?;
        let writer = Writer::new(memory, control, size);
        Ok((namespace, ShmPeer::new(from, socket, &page)?, writer))
    }

    /// Sees to the sockets.
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

    /// As [`Shm::poll_sockets`], out of the way of those who look often.
    #[cold]
    fn poll_sockets_now(&self) {
        self.poll_sockets(&mut self.incoming.borrow_mut());
    }

    /// Looks for the peers that are gone.
    #[cold]
    fn reconnect_lost(&mut self) {
        let now = Instant::now();
        let mut peer_lost = false;
        for at in 0..self.outgoing.len() {
            let Some(known) = &self.outgoing[at] else { continue };
            if !known.gone.get() {
                continue;
            }
            let again = || self.handshake(known.from, known.peer, &[known.namespace]).ok();
            let shm_peer = if known.retry <= now { again() } else { None };
            let Some(known) = &mut self.outgoing[at] else { continue };
            match shm_peer {
                Some((_, shm_peer, writer)) => {
                    let _ = epoll::delete(&self.poll, &known.shm_peer.socket);
                    (known.shm_peer, known.writer) = (shm_peer, writer);
                    known.gone.set(false);
                }
                None => {
                    if known.retry <= now {
                        known.retry = now + RECONNECT_INTERVAL;
                    }
                    peer_lost = true;
                }
            }
        }
        self.peer_lost.set(peer_lost);
    }

    /// A packet found no room: whether the batch or the peer is to blame, and whether the peer lives.
    #[cold]
    fn no_room(&mut self, ring: usize, why: NoRoom) -> bool {
        let Some(known) = self.outgoing.get_mut(ring).and_then(Option::as_mut) else { return true };
        known.refused = known.refused.wrapping_add(1);
        self.ring_full |= why == NoRoom::Ring;
        let asks = why == NoRoom::Ring && known.refused.is_multiple_of(FULL_CHECK_INTERVAL);
        if why == NoRoom::Broken || asks && !known.shm_peer.poll_control() {
            known.mark_gone();
            self.peer_lost.set(true);
        }
        known.gone.get()
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
                .why("the process that listens there is another user's, and not root's")
                .fix("run both as one user, or use UDP"),
            Some(Errno::AGAIN) => Error::new(ErrorKind::Busy, what)
                .on(on)
                .why("too many connections wait for the peer to take them up")
                .fix("try again when it has received"),
            Some(Errno::INVAL) => Error::new(ErrorKind::Unsupported, what)
                .on(on)
                .why("this kernel does not seal memory against writers (F_SEAL_FUTURE_WRITE, Linux 5.1)")
                .fix("use UDP"),
            _ => Error::os(what, source).on(on),
        }
    }
}

/// Publishes a ring's packets, and returns how many went.
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
            if self.append_icrc { "with" } else { "without (memory does not damage packets)" };
        let why = format!(
            "memory shared with other processes of this machine; rings of {}, packets up to {} bytes {append_icrc} ICRC, \
             filled in place and copied out; {} peers send to us",
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

    /// The peer must listen already; later it may go and come again.
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
            // The ring goes with its last flow, and what was committed before that.
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
        self.ring_full = false;
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
            marked: false,
            identification: 0,
            has_icrc: self.append_icrc,
        })
    }

    #[inline]
    fn flush(&mut self) -> Result<Flushed> {
        self.reserved = None;
        let mut sent = 0;
        for at in self.dirty.drain(..) {
            if let Some(known) = self.outgoing.get_mut(at).and_then(Option::as_mut) {
                sent += publish(known, &self.peer_lost, &mut self.counters) as usize;
            }
        }
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
        // Woken, and by no packet: a connection, or an end.
        self.poll_sockets_now();
        Ok(self.incoming.get_mut().receive(&mut self.counters, take))
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        let mut incoming = self.incoming.borrow_mut();
        self.poll_sockets(&mut incoming);
        incoming.arm();
        Some(self.poll.as_fd())
    }

    fn poll_delay(&self) -> Option<Duration> {
        self.ring_full.then_some(FULL_RETRY_DELAY)
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

    /// From now on packets are at most 65 507 bytes: IP, whose header the ICRC covers, knows no longer ones.
    fn force_icrc(&mut self) {
        self.append_icrc = true;
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

/// Listens under the address, or under any free port of it, which is then held for UDP too.
fn listen(address: SocketAddr) -> io::Result<(OwnedFd, SocketAddr, Option<OwnedFd>)> {
    if address.port() != 0 {
        return Ok((handshake::listen(address, Namespace::Shm)?, address, None));
    }
    for _ in 0..MAX_PORT_ATTEMPTS {
        let Some((port, address)) = handshake::reserve_port(address.ip()) else { break };
        match handshake::listen(address, Namespace::Shm) {
            Ok(listener) => return Ok((listener, address, Some(port))),
            Err(source) if source.kind() == io::ErrorKind::AddrInUse => {}
            Err(source) => return Err(source),
        }
    }
    // Processes begin at different ports, so that they rarely try one that is taken.
    let (first, count) = (*ANY_PORTS.start(), ANY_PORTS.len() as u32);
    let start = std::process::id().wrapping_mul(40_503) % count;
    for step in 0..count {
        let port = first + ((start + step) % count) as u16;
        let address = SocketAddr::new(address.ip(), port);
        match handshake::listen(address, Namespace::Shm) {
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
            .why("another link has that name")
            .fix("choose another port (0 for any), or stop who has it");
    }
    Error::os(what, source).on(address.to_string())
}
