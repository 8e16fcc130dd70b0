//! Frames in and out: RoCEv2 packets through memory or through UDP, behind one trait.
//!
//! A [`Link`] carries packets from the base transport header through the ICRC. What stands in front of them (IP, UDP)
//! is the link's business, and with it the ICRC, which covers those headers: the caller fills a packet but for its
//! last four bytes, the link seals it; what is received has been checked.
//!
//! | link | what it is |
//! |---|---|
//! | [`loopback`] | endpoints of one process, packets change hands without being copied |
//! | [`shm`] | processes of one machine, through memory that both map |
//! | [`auto`] | [`shm`] where the peer is on this machine and can be met there, [`udp`] elsewhere |
//! | [`udp`] | a UDP socket, with segmentation and receive offload and batched calls where the kernel has them |
//! | [`fault`] | around any link: loss, duplication, reordering, damage, delay, from one seed |
//! | [`pcap`] | around any link: a capture that Wireshark opens |
//!
//! # Cost
//! Nothing is allocated, locked or formatted per packet, and a batch costs at most one system call: everything that
//! takes longer happens when a link or a flow is opened. Long packets, which UDP has on loopback addresses, cost one to send and two to receive, and spare a
//! copy each. The other exceptions are asked for: a capture locks its file.
//!
//! # Example
//! ```
//! use warpwire::link::{Hub, Link};
//! let hub = Hub::new();
//! let mut alice = hub.endpoint("10.0.0.1:4791".parse().unwrap())?;
//! let mut bob = hub.endpoint("10.0.0.2:4791".parse().unwrap())?;
//! let to_bob = alice.open(bob.local(), 0)?;
//! // A packet: twelve bytes of base header, five of payload, three of pad, four for the ICRC.
//! alice.reserve(to_bob, 24).unwrap()[12..17].copy_from_slice(b"hello");
//! alice.commit();
//! alice.flush()?;
//! let received = bob.receive(&mut |frame| {
//!     assert_eq!(frame.from, "10.0.0.1:4791".parse().unwrap());
//!     assert_eq!(&frame.bytes[12..17], b"hello");
//! })?;
//! assert_eq!(received, 1);
//! # Ok::<(), warpwire::Error>(())
//! ```

mod address;
pub mod auto;
mod crc;
pub mod fault;
mod flows;
pub mod loopback;
pub mod pcap;
pub mod shm;
#[cfg(test)]
mod tests;
pub mod udp;

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use warpwire_proto::wire::packet::{BTH_LEN, ICRC_LEN, MAX_HEADERS_LEN};

pub use address::{ADDRESS_LEN, address_bytes, address_from};
pub use auto::Auto;
pub use crc::SimdCrc32;
pub use fault::FaultInjector;
pub use flows::FlowId;
pub use loopback::{Hub, Loopback};
pub use pcap::{Capture, Tap};
pub use shm::Shm;
pub use shm::exports::{ExportTable, ShmPeer};
pub use udp::Udp;

use crate::error::{Error, Kind as ErrorKind, Result};
use crate::mem::SharedBytes;

/// The shortest packet: a base header and an ICRC.
pub const MIN_PACKET: usize = BTH_LEN + ICRC_LEN;
/// The longest packet that RoCEv2 knows: 4096 bytes of payload behind the longest headers.
pub const MAX_ROCE_PACKET: usize = MAX_HEADERS_LEN + 4096 + ICRC_LEN;

/// From this length on, a payload is better lent than copied: a packet that is lent goes by a system call of its own.
pub const MIN_ZERO_COPY: usize = 16 << 10;

/// A way for packets in and out.
///
/// The order of calls: [`open`](Link::open) a flow per peer once; then [`reserve`](Link::reserve), fill,
/// [`commit`](Link::commit) for each packet, [`flush`](Link::flush) per batch; [`receive`](Link::receive) whenever
/// there may be something, and [`wait_fd`](Link::wait_fd) to sleep until there is.
///
/// Packets of one flow arrive in the order of their commits, if the network keeps it; nothing is promised across
/// flows.
pub trait Link: Send {
    /// What this link is, and why: which offloads it uses, and which it does not and for what reason.
    fn path(&self) -> LinkPath;

    /// Which way the packets of one flow take, and why: a link may have several.
    fn flow_path(&self, flow: FlowId) -> LinkPath {
        let _ = flow;
        self.path()
    }

    /// The address that peers send to.
    fn local(&self) -> SocketAddr;

    /// The longest packet, from the base header through the ICRC, that goes through whole.
    fn max_packet(&self) -> usize;

    /// The longest packet that goes through whole on this flow: [`max_packet`](Link::largest), or more.
    fn max_packet_to(&self, flow: FlowId) -> usize {
        let _ = flow;
        self.max_packet()
    }

    /// Makes ready to send to `peer`: one flow per queue pair. Slow, for setup.
    ///
    /// `label` tells the queue pairs to one peer apart, for links that can choose a source port by it (switches
    /// spread flows by that port). A UDP socket has one source port, and does not.
    ///
    /// # Errors
    /// If nothing can be sent to this address from here, with the reason.
    fn open(&mut self, peer: SocketAddr, label: u32) -> Result<FlowId>;

    /// Ends a flow. What was committed before still goes out, if there is room for it by now; a flow that is closed
    /// already is left alone.
    fn close(&mut self, flow: FlowId);

    /// Room for one packet of `len` bytes, from the base header through the ICRC. The caller fills all but the last
    /// four bytes (what stands in them is undefined) and then commits. A reservation is forgotten by the next one, or
    /// by a flush.
    ///
    /// # Errors
    /// [`ReserveError::Full`] is a status: flush, and try again once that went through. It differs from a flow that is
    /// closed or a packet that is too long, for which trying again is of no use: hence not an `Option`.
    fn reserve(&mut self, flow: FlowId, len: usize)
    -> std::result::Result<&mut [u8], ReserveError>;

    /// Seals the packet that was reserved, and queues it. Returns it as it will appear on the wire, for captures;
    /// `None` if there was none, or if a fault took it.
    fn commit(&mut self) -> Option<Frame<'_>> {
        self.commit_corrupted(Corruption::Intact)
    }

    /// As [`commit`](Link::commit), and spoils the packet after it was sealed, so that its ICRC is wrong: what
    /// [`FaultInjector`] damages must be found by the receiver's check, and the seal lies below it.
    fn commit_corrupted(&mut self, corruption: Corruption) -> Option<Frame<'_>>;

    /// Sends the packet that was reserved, at once and behind all that was committed before, with a payload that stays where
    /// it lies: the caller has filled the headers, which end where the payload would begin, and the pad. That spares the copy into the packet, and is
    /// worth it for long payloads ([`MIN_ZERO_COPY`]). The link is done with the memory when this returns.
    ///
    /// `false` is no failure, and most links say nothing else: the packet is still reserved. Fill in the payload and
    /// [`commit`](Link::commit) it, which also waits where there is no room.
    ///
    /// The payload is looked at once: if somebody changes it meanwhile, some mixture goes out, as from a copy.
    fn commit_zero_copy(&mut self, headers: usize, payload: &SharedBytes<'_>) -> bool {
        let _ = (headers, payload);
        false
    }

    /// Hands over what was committed. What cannot go now is kept, and the return value says how much; what can never
    /// go is dropped and counted.
    ///
    /// # Errors
    /// If the link is beyond repair. A network that says "wait" is not an error.
    fn flush(&mut self) -> Result<Flushed>;

    /// Takes up to a batch of packets, and returns how many were delivered. Each has the right ICRC, or needs none; others were
    /// dropped and counted. Their other headers are unchecked, and anyone may have sent them.
    ///
    /// # Errors
    /// If the link is beyond repair.
    fn receive(&mut self, take: &mut dyn FnMut(Frame<'_>)) -> Result<usize>;

    /// As [`receive`](Link::receive), but payloads of long packets may be left where they are until they are asked for: whoever knows where
    /// one belongs has it put there at once, which spares a copy. Most links hand over everything as it is.
    ///
    /// # Errors
    /// If the link is beyond repair.
    fn receive_deferred(&mut self, take: &mut dyn FnMut(ReceivedPacket<'_>)) -> Result<usize> {
        self.receive(&mut |frame| take(ReceivedPacket::Read(frame)))
    }

    /// A file descriptor that is readable when there is something to receive. To be asked for anew before each wait:
    /// the loopback link signals only when somebody asked.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>>;

    /// When the link has something to do by itself (a packet held back by a fault): flush and receive by then.
    fn poll_delay(&self) -> Option<Duration> {
        None
    }

    /// Asks a link that leaves the ICRC out, because its packets stay in memory or on this machine, to put it in. [`FaultInjector`] asks.
    fn force_icrc(&mut self) {}

    /// Lets peers of this machine reach memory by themselves, past the link, and prepares to do so at theirs. To be called before
    /// flows are opened.
    ///
    /// # Errors
    /// Why this link does not: it has no such way, or wraps another that must see every packet.
    fn install_exports(
        &mut self,
        export_table: &Arc<ExportTable>,
    ) -> std::result::Result<(), &'static str> {
        let _ = export_table;
        Err("this sort of link has packets only")
    }

    /// The peer of a flow, as far as it lets us reach its memory; or why it does not.
    fn direct_peer(&self, flow: FlowId) -> std::result::Result<Arc<ShmPeer>, &'static str> {
        let _ = flow;
        Err("this sort of link has packets only")
    }

    /// What came and went so far.
    fn counters(&self) -> Counters;
}

impl<L: Link + ?Sized> Link for Box<L> {
    fn path(&self) -> LinkPath {
        (**self).path()
    }

    fn flow_path(&self, flow: FlowId) -> LinkPath {
        (**self).flow_path(flow)
    }

    fn local(&self) -> SocketAddr {
        (**self).local()
    }

    fn max_packet(&self) -> usize {
        (**self).max_packet()
    }

    fn max_packet_to(&self, flow: FlowId) -> usize {
        (**self).max_packet_to(flow)
    }

    fn open(&mut self, peer: SocketAddr, label: u32) -> Result<FlowId> {
        (**self).open(peer, label)
    }

    fn close(&mut self, flow: FlowId) {
        (**self).close(flow);
    }

    fn reserve(
        &mut self,
        flow: FlowId,
        len: usize,
    ) -> std::result::Result<&mut [u8], ReserveError> {
        (**self).reserve(flow, len)
    }

    fn commit_corrupted(&mut self, corruption: Corruption) -> Option<Frame<'_>> {
        (**self).commit_corrupted(corruption)
    }

    fn commit_zero_copy(&mut self, headers: usize, payload: &SharedBytes<'_>) -> bool {
        (**self).commit_zero_copy(headers, payload)
    }

    fn flush(&mut self) -> Result<Flushed> {
        (**self).flush()
    }

    fn receive(&mut self, take: &mut dyn FnMut(Frame<'_>)) -> Result<usize> {
        (**self).receive(take)
    }

    fn receive_deferred(&mut self, take: &mut dyn FnMut(ReceivedPacket<'_>)) -> Result<usize> {
        (**self).receive_deferred(take)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        (**self).wait_fd()
    }

    fn poll_delay(&self) -> Option<Duration> {
        (**self).poll_delay()
    }

    fn force_icrc(&mut self) {
        (**self).force_icrc();
    }

    fn install_exports(
        &mut self,
        export_table: &Arc<ExportTable>,
    ) -> std::result::Result<(), &'static str> {
        (**self).install_exports(export_table)
    }

    fn direct_peer(&self, flow: FlowId) -> std::result::Result<Arc<ShmPeer>, &'static str> {
        (**self).direct_peer(flow)
    }

    fn counters(&self) -> Counters {
        (**self).counters()
    }
}

/// A packet on its way, with what its IP and UDP headers say.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// Who sent it. Queue pairs are told apart by its IP address; the port is the sender's choice.
    pub from: SocketAddr,
    /// Whom it was sent to: this link, under the address that the sender used.
    pub to: SocketAddr,
    /// From the base header through the ICRC.
    pub bytes: &'a [u8],
    /// A switch marked it: congestion (ECN CE).
    pub marked: bool,
    /// The IPv4 identification that the ICRC covers: known when sending, found when receiving.
    pub identification: u16,
    /// Whether the last four bytes are an ICRC; packets that stay in memory, or on this machine, may go without.
    pub has_icrc: bool,
}

/// What [`Link::receive_deferred`] delivers.
///
/// ```
/// use warpwire::link::{ReceivedPacket, Link, Udp, udp::Options};
/// let mut alice = Udp::bind("127.0.0.1:0".parse().unwrap(), Options::default())?;
/// let mut bob = Udp::bind("127.0.0.1:0".parse().unwrap(), Options::default())?;
/// let to_bob = alice.open(bob.local(), 0)?;
/// for _ in 0..2 {
///     alice.reserve(to_bob, 20_000).unwrap().fill(7);
///     alice.commit();
///     alice.flush()?;
/// }
/// let mut lengths = Vec::new();
/// while lengths.len() < 2 {
///     bob.receive_deferred(&mut |arrival| match arrival {
///         ReceivedPacket::Read(frame) => lengths.push(frame.bytes.len()),
///         ReceivedPacket::Deferred(packet) => lengths.extend(packet.pending_payload.read().map(<[u8]>::len)),
///     })?;
/// }
/// assert_eq!(lengths, [20_000, 20_000]);
/// # Ok::<(), warpwire::Error>(())
/// ```
pub enum ReceivedPacket<'a> {
    /// A packet.
    Read(Frame<'a>),
    /// The beginning of one.
    Deferred(Deferred<'a>),
}

/// A packet that has been read as far as its headers go. It is gone when whoever it was handed to is done with it.
pub struct Deferred<'a> {
    /// The packet, as far as it has been read: all of its headers, and more.
    pub head: Frame<'a>,
    /// How long it is in truth, from the base header through the ICRC.
    pub len: usize,
    /// Where the link keeps it.
    pub pending_payload: &'a mut dyn PendingPayload,
}

/// A packet that a link still has. It can be had once, in one of these ways.
pub trait PendingPayload {
    /// All of it, as [`Link::receive`] would have delivered it. `None` if it was not right: it has been dropped and counted.
    fn read(&mut self) -> Option<&[u8]>;

    /// Puts its payload, which stands behind `headers` bytes and is as long as `into`, there; the last bytes become visible last. If it fails, the packet
    /// was not right, and has been dropped and counted: there is anything in that memory then.
    fn read_into(&mut self, headers: usize, into: &SharedBytes<'_>) -> bool;
}

/// Why a packet has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveError {
    /// The batch is full: flush first. If that leaves packets waiting, the network is not ready: come back later.
    Full,
    /// The flow is closed, or was never open on this link.
    Closed,
    /// The packet is longer than [`Link::max_packet_to`] says, or shorter than [`MIN_PACKET`].
    Length,
}

impl fmt::Display for ReserveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "the batch is full",
            Self::Closed => "the flow is closed",
            Self::Length => "the packet's length is not one that the link carries",
        })
    }
}

impl std::error::Error for ReserveError {}

/// What to do to a packet after it was sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corruption {
    /// Nothing.
    Intact,
    /// Flip this bit, counted from the packet's beginning and modulo its length.
    FlipBit(u32),
    /// Keep this many bytes of it, at least one.
    Truncate(usize),
}

impl Corruption {
    /// Does it, and returns the length that is left.
    fn apply(self, packet: &mut [u8]) -> usize {
        match self {
            Self::Intact => packet.len(),
            Self::FlipBit(bit) => {
                let bit = bit as usize % (packet.len() * 8).max(1);
                if let Some(byte) = packet.get_mut(bit / 8) {
                    *byte ^= 1 << (bit % 8);
                }
                packet.len()
            }
            Self::Truncate(len) => len.clamp(1, packet.len().max(1)),
        }
    }
}

/// What became of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flushed {
    /// Packets handed over by this call.
    pub sent: usize,
    /// Packets kept, because there is no room for them now; the next flush tries again.
    pub waiting: usize,
}

/// Which link it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// Within the process.
    Loopback,
    /// A UDP socket.
    Udp,
    /// Memory shared between processes.
    Shm,
    /// Shared memory or UDP, by flow.
    Auto,
    /// None: an RDMA device of the machine.
    Hardware,
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Loopback => "loopback",
            Self::Udp => "udp",
            Self::Shm => "shm",
            Self::Auto => "auto",
            Self::Hardware => "hardware",
        })
    }
}

/// Which way packets take, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkPath {
    /// Which link it is, below faults and captures.
    pub kind: LinkKind,
    /// The address that peers send to.
    pub local: SocketAddr,
    /// For people: what is in use, what is not, and why not.
    pub why: String,
}

impl fmt::Display for LinkPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.kind, self.local, self.why)
    }
}

/// What came and went since the link was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets handed over.
    pub sent: u64,
    /// Their bytes, from the base header through the ICRC.
    pub sent_bytes: u64,
    /// Packets delivered to the caller.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Those of them that came joined with others, by the kernel's receive offload.
    pub coalesced: u64,
    /// Packets sent whose payload was lent: the kernel took it from where it lay.
    pub zero_copy_sent: u64,
    /// Packets received whose payload the kernel put where it belongs.
    pub direct_placed: u64,
    /// System calls that moved packets, both ways.
    pub calls: u64,
    /// Packets lost in this link, by reason.
    pub drops: Drops,
}

/// Packets that were lost in a link, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drops {
    /// Received with a wrong ICRC.
    pub icrc: u64,
    /// Received, and shorter than a packet can be.
    pub short: u64,
    /// Received, and longer than the link carries.
    pub long: u64,
    /// Received faster than they were taken: a buffer was full.
    pub overrun: u64,
    /// To be sent, and nobody has the address.
    pub no_peer: u64,
    /// To be sent, and the kernel refused them for good.
    pub refused: u64,
    /// Taken by a fault, on purpose.
    pub injected: u64,
}

impl std::ops::Add for Counters {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            sent: self.sent + other.sent,
            sent_bytes: self.sent_bytes + other.sent_bytes,
            received: self.received + other.received,
            received_bytes: self.received_bytes + other.received_bytes,
            coalesced: self.coalesced + other.coalesced,
            zero_copy_sent: self.zero_copy_sent + other.zero_copy_sent,
            direct_placed: self.direct_placed + other.direct_placed,
            calls: self.calls + other.calls,
            drops: Drops {
                icrc: self.drops.icrc + other.drops.icrc,
                short: self.drops.short + other.drops.short,
                long: self.drops.long + other.drops.long,
                overrun: self.drops.overrun + other.drops.overrun,
                no_peer: self.drops.no_peer + other.drops.no_peer,
                refused: self.drops.refused + other.drops.refused,
                injected: self.drops.injected + other.drops.injected,
            },
        }
    }
}

impl Drops {
    /// All of them.
    pub fn total(&self) -> u64 {
        let Self { icrc, short, long, overrun, no_peer, refused, injected } = *self;
        icrc + short + long + overrun + no_peer + refused + injected
    }
}

/// Refuses peers that no link can send to.
fn check_peer(local: SocketAddr, peer: SocketAddr) -> Result<()> {
    let why = if peer.port() == 0 {
        "port 0 is not an address to send to"
    } else if peer.ip().is_unspecified() {
        "it stands for every address, and is none to send to"
    } else if peer.ip().is_multicast() {
        "it is a group's address, and queue pairs talk to one peer"
    } else if peer.is_ipv4() != local.is_ipv4() {
        "the link's own address is of the other IP version"
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::InvalidArgument, format!("open a flow to {peer}"))
        .on(local.to_string())
        .why(why)
        .fix("give the peer's own address and port, of the same IP version as the link's"))
}
