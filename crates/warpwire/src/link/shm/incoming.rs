//! The receiving side: accepts connections, reads rings, arms wake-ups.

use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use warpwire_proto::wire::icrc::IcrcPrefix;
use warpwire_proto::wire::packet::ICRC_LEN;

use super::exports::{self, ExportTable, ImporterSlot};
use super::handshake::{self, HelloResult, RingHello};
use super::names::Listener;
use super::ring::{Reader, RingItem};
use super::sys::{ControlPage, ReadOnlyMapping};
use super::{RejectCounters, ShmOptions};
use crate::link::{Counters, Frame, MIN_PACKET, SimdCrc32};

/// Maximum number of packets per receive.
const BATCH: usize = 64;
/// Maximum number of events and connections handled per call; the rest are handled by the next one.
const MAX_EVENTS: usize = 16;
/// Maximum number of incoming connections; more are rejected.
const MAX_CONNECTIONS: usize = 4096;
/// A timeout of zero: poll without waiting.
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A ring through which a peer sends to this link.
struct IncomingRing {
    /// Shared with the importer, which outlives the ring until the sender has closed the
    /// connection.
    socket: Arc<OwnedFd>,
    reader: Reader,
    from: SocketAddr,
    to: SocketAddr,
    icrc_prefix: IcrcPrefix,
    /// The sender may access exported memory directly.
    importer_slot: Option<ImporterSlot>,
    /// The sender has exited; packets that it left are still read.
    ended: bool,
    /// The contents are invalid; nothing more is read.
    broken: bool,
}

/// The receiving side of a link.
pub(super) struct Incoming {
    local: SocketAddr,
    /// A duplicate of the link's epoll descriptor.
    poll: OwnedFd,
    listener: Listener,
    /// Reserved for a connection that arrives when the process has no descriptors left.
    spare_fd: Option<OwnedFd>,
    /// An eventfd, written if there are packets already when the caller arms a wait.
    event: OwnedFd,
    signalled: bool,
    /// The caller has armed a wait, and the rings are armed.
    armed: bool,
    /// Accepted connections that have not sent their first message.
    pending: Vec<OwnedFd>,
    rings: Vec<IncomingRing>,
    /// The ring to read next (round robin).
    next_ring: usize,
    /// Calls of `receive` since the sockets were last polled.
    calls: u32,
    /// Maximum number of calls of `receive` between two polls of the sockets.
    control_poll_interval: u32,
    buffer: Box<[u8]>,
    /// Memory that senders may access directly.
    pub export_table: Option<Arc<ExportTable>>,
    pub rejects: RejectCounters,
}

impl IncomingRing {
    /// Handles messages on the socket; `false` if the sender has exited.
    fn poll_control(&self) -> bool {
        match &self.importer_slot {
            Some(importer_slot) => importer_slot.poll_control(&self.socket),
            None => handshake::read(&self.socket, |_, _| ()),
        }
    }
}

/// Adds a descriptor to the epoll instance, with its number as the token.
pub(super) fn epoll_add(
    poll: &OwnedFd,
    socket: &OwnedFd,
    flags: EventFlags,
) -> rustix::io::Result<()> {
    epoll::add(poll, socket, EventData::new_u64(epoll_token(socket)), flags)
}

pub(super) fn epoll_token(socket: &OwnedFd) -> u64 {
    socket.as_raw_fd() as u64
}

impl Incoming {
    pub(super) fn new(
        poll: &OwnedFd,
        listener: Listener,
        local: SocketAddr,
        options: &ShmOptions,
    ) -> rustix::io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll_add(poll, &listener.socket, EventFlags::IN)?;
        epoll_add(poll, &event, EventFlags::IN)?;
        Ok(Self {
            local,
            poll: rustix::io::fcntl_dupfd_cloexec(poll, 0)?,
            listener,
            spare_fd: rustix::io::fcntl_dupfd_cloexec(poll, 0).ok(),
            event,
            signalled: false,
            armed: false,
            pending: Vec::new(),
            rings: Vec::new(),
            next_ring: 0,
            calls: options.control_poll_interval,
            control_poll_interval: options.control_poll_interval,
            buffer: vec![0; options.max_packet].into_boxed_slice(),
            export_table: None,
            rejects: RejectCounters::default(),
        })
    }

    /// Number of senders.
    pub(super) fn count(&self) -> usize {
        self.rings.len()
    }

    /// Whether it is time to poll the sockets although the caller did not wait.
    #[inline]
    pub(super) fn is_poll_due(&mut self) -> bool {
        self.calls += 1;
        self.calls > self.control_poll_interval
    }

    /// Whether a wait was armed since the last call; disarms it.
    #[inline]
    pub(super) fn was_armed(&mut self) -> bool {
        let was_armed = std::mem::take(&mut self.armed);
        if was_armed {
            self.rings.iter().for_each(|ring| ring.reader.disarm());
        }
        was_armed
    }

    /// Polls the sockets, with one system call if there are no events; calls `gone` for events on
    /// descriptors that this side does not know.
    pub(super) fn poll_sockets(&mut self, poll: &OwnedFd, gone: &mut dyn FnMut(u64)) {
        self.calls = 0;
        if self.signalled {
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
            self.signalled = false;
        }
        // Twice: a connection that was just accepted may have sent its hello already.
        for _ in 0..2 {
            let mut room = [MaybeUninit::<epoll::Event>::uninit(); MAX_EVENTS];
            let waited = epoll::wait(poll, &mut room[..], Some(&NO_WAIT));
            let has_events = waited.as_ref().is_ok_and(|(events, _)| !events.is_empty());
            for event in waited.map_or_else(|_| [].iter(), |(events, _)| events.iter()) {
                let which = event.data;
                self.handle_event(poll, which.u64(), gone);
            }
            if !has_events {
                break;
            }
        }
        // After the end of the connection was seen, everything published before it is visible.
        let before = self.rings.len();
        self.rings.retain(|ring| !ring.ended || !ring.reader.is_empty());
        if self.rings.len() < before {
            self.next_ring = 0;
        }
    }

    fn handle_event(&mut self, poll: &OwnedFd, which: u64, gone: &mut dyn FnMut(u64)) {
        if which == epoll_token(&self.listener.socket) {
            self.accept(poll);
        } else if let Some(at) =
            self.pending.iter().position(|connection| epoll_token(connection) == which)
        {
            self.recv_hello(poll, at);
        } else if let Some(ring) =
            self.rings.iter_mut().find(|ring| epoll_token(&ring.socket) == which)
        {
            if !ring.poll_control() {
                ring.ended = true;
                let _ = epoll::delete(poll, &ring.socket);
            }
        } else {
            gone(which);
        }
    }

    fn accept(&mut self, poll: &OwnedFd) {
        for _ in 0..MAX_EVENTS {
            let connection = match handshake::accept(&self.listener.socket) {
                Ok(connection) => connection,
                Err(Errno::MFILE | Errno::NFILE) => return self.reject_without_fd(),
                Err(_) => return,
            };
            if !handshake::is_trusted(connection.as_fd()).unwrap_or(false) {
                self.rejects.untrusted += 1;
            } else if self.pending.len() + self.rings.len() >= MAX_CONNECTIONS
                || epoll_add(poll, &connection, EventFlags::IN).is_err()
            {
                self.rejects.too_many += 1;
            } else {
                self.pending.push(connection);
            }
        }
    }

    /// The process has no descriptor left for a connection. Uses the reserved one to accept and
    /// close it: its sender must notice, and a pending connection would keep the epoll descriptor
    /// readable forever.
    #[cold]
    pub(super) fn reject_without_fd(&mut self) {
        self.spare_fd = None;
        if handshake::accept(&self.listener.socket).is_ok() {
            self.rejects.too_many += 1;
        }
        self.spare_fd = rustix::io::fcntl_dupfd_cloexec(&self.poll, 0).ok();
    }

    /// Reads the first message of a connection, which creates a ring or closes the connection.
    fn recv_hello(&mut self, poll: &OwnedFd, at: usize) {
        let (hello, files) = match handshake::recv_hello(&self.pending[at]) {
            HelloResult::Pending => return,
            HelloResult::RingHello(hello, files) => (hello, files),
            other => {
                match other {
                    HelloResult::WrongVersion => self.rejects.wrong_version += 1,
                    HelloResult::Malformed => self.rejects.malformed += 1,
                    _ => {}
                }
                self.pending.swap_remove(at);
                return;
            }
        };
        let socket = self.pending.swap_remove(at);
        let [ring, page] = files;
        let memory = ReadOnlyMapping::open(&ring, hello.ring);
        let (Ok(memory), Ok(control), true) =
            (memory, ControlPage::open(&page), self.is_for_us(&hello))
        else {
            self.rejects.malformed += 1;
            let _ = epoll::delete(poll, &socket);
            return;
        };
        let RingHello { from, to, ring, wants_direct } = hello;
        // Before any packet is read. A sender that cannot be told uses another transport.
        if !exports::accept(&socket) {
            let _ = epoll::delete(poll, &socket);
            return;
        }
        // If this fails, the sender uses packets only.
        let socket = Arc::new(socket);
        let export_table = self.export_table.as_ref().filter(|_| wants_direct);
        let importer_slot =
            export_table.and_then(|export_table| export_table.add_importer(&page, &socket).ok());
        self.rings.push(IncomingRing {
            socket,
            reader: Reader::new(memory, control, ring),
            from,
            to,
            icrc_prefix: IcrcPrefix::new(from, to),
            importer_slot,
            ended: false,
            broken: false,
        });
    }

    fn is_for_us(&self, hello: &RingHello) -> bool {
        let RingHello { from, to, .. } = hello;
        let here = to.ip() == self.local.ip() || self.local.ip().is_unspecified();
        let known = from.port() != 0 && from.is_ipv4() == self.local.is_ipv4();
        here && known && to.port() == self.local.port() && to.is_ipv4() == from.is_ipv4()
    }

    /// Delivers packets from the rings, round robin.
    #[inline]
    pub(super) fn receive(
        &mut self,
        counters: &mut Counters,
        take: &mut dyn FnMut(Frame<'_>),
    ) -> usize {
        let count = self.rings.len();
        let (mut delivered, mut seen, mut broken) = (0, 0, false);
        for step in 0..count {
            let mut at = self.next_ring + step;
            if at >= count {
                at -= count;
            }
            let Some(ring) = self.rings.get_mut(at) else { break };
            let IncomingRing { reader, from, to, icrc_prefix, broken: bad, .. } = ring;
            let taken = reader.take(BATCH - seen, &mut self.buffer, |item| {
                seen += 1;
                let Some((bytes, has_icrc)) = check(&item, icrc_prefix, counters) else { return };
                delivered += 1;
                counters.received += 1;
                counters.received_bytes += bytes.len() as u64;
                let (from, to) = (*from, *to);
                let (traffic_class, hop_limit) = (Frame::TRAFFIC_CLASS, Frame::HOP_LIMIT);
                let identification = 0;
                take(Frame { from, to, bytes, traffic_class, hop_limit, identification, has_icrc });
            });
            *bad = taken.is_err();
            broken |= *bad;
            if seen >= BATCH {
                self.next_ring = if at + 1 < count { at + 1 } else { 0 };
                break;
            }
        }
        if broken {
            self.remove_broken();
        }
        delivered
    }

    /// Removes rings with invalid contents; their senders see the socket close.
    #[cold]
    fn remove_broken(&mut self) {
        let before = self.rings.len();
        for ring in self.rings.iter().filter(|ring| ring.broken) {
            let _ = epoll::delete(&self.poll, &ring.socket);
        }
        self.rings.retain(|ring| !ring.broken);
        self.rejects.broken += (before - self.rings.len()) as u64;
        self.next_ring = 0;
    }

    /// Requests wake-ups from the senders, and makes the descriptor readable if packets are waiting
    /// already.
    pub(super) fn arm(&mut self) {
        self.armed = true;
        let mut has_packets = false;
        for ring in &self.rings {
            has_packets |= ring.reader.arm();
        }
        if has_packets && !self.signalled {
            self.signalled = true;
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }
}

/// Checks length and ICRC, so that corruption by fault injection is detected as on other links.
#[inline]
fn check<'a>(
    item: &RingItem<'a>,
    icrc_prefix: &mut IcrcPrefix,
    counters: &mut Counters,
) -> Option<(&'a [u8], bool)> {
    let RingItem::Packet(bytes, has_icrc) = *item else {
        counters.drops.long += 1;
        return None;
    };
    if bytes.len() < MIN_PACKET {
        counters.drops.short += 1;
        return None;
    }
    if has_icrc {
        let carried = bytes.last_chunk::<ICRC_LEN>().map(|bytes| u32::from_le_bytes(*bytes));
        if carried != icrc_prefix.icrc::<SimdCrc32>(0, bytes) {
            counters.drops.icrc += 1;
            return None;
        }
    }
    Some((bytes, has_icrc))
}
