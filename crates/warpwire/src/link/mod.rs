//! Packet transports: RoCEv2 packets over process memory, shared memory or UDP, behind one trait.
//!
//! A [`Link`] carries packets from the base transport header (BTH) through the ICRC. The link owns
//! the IP and UDP headers in front of them, and with them the ICRC, which covers those headers: the
//! caller fills all of a packet but its last four bytes, the link appends the ICRC, and the
//! receiving link verifies it.
//!
//! | link | transport |
//! |---|---|
//! | [`loopback`] | endpoints of one process; packets are handed over without a copy |
//! | [`shm`] | processes of one machine, through ring buffers that both map |
//! | [`auto`] | [`shm`] if the peer is a process of this machine that listens there, else [`udp`] |
//! | [`udp`] | a UDP socket, with GSO, GRO and batched system calls where the kernel has them |
//! | [`fault`] | wraps any link: loss, duplication, reordering, corruption, delay, from one seed |
//! | [`pcap`] | wraps any link: a capture for Wireshark |
//!
//! # Cost
//! The hot path allocates, locks and formats nothing per packet, and a batch costs at most one
//! system call; slow work is done when a link or a flow is opened. Long packets (UDP on loopback
//! addresses) cost one system call to send and two to receive, and save one copy on each side. The
//! other exception is opt-in: a capture locks its file.
//!
//! # Example
//! ```
//! use warpwire::link::{Hub, Link};
//! let hub = Hub::new();
//! let mut alice = hub.endpoint("10.0.0.1:4791".parse().unwrap())?;
//! let mut bob = hub.endpoint("10.0.0.2:4791".parse().unwrap())?;
//! let to_bob = alice.open(bob.local(), 0)?;
//! // A packet: 12 bytes of BTH, 5 of payload, 3 of pad, 4 for the ICRC.
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

use warpwire_proto::wire::ip::{ECN_CAPABLE, ECN_MARKED, ECN_MASK};
use warpwire_proto::wire::packet::{BTH_LEN, ICRC_LEN, MAX_HEADERS_LEN};

#[doc(hidden)]
pub use address::{ADDRESS_LEN, address_bytes, address_from};
pub use auto::Auto;
pub use crc::SimdCrc32;
pub use fault::FaultInjector;
pub use flows::FlowId;
pub use loopback::{Hub, Loopback, LoopbackOptions};
pub use pcap::{Capture, Tap};
#[doc(hidden)]
pub use shm::exports::{DeviceAccess, ExportTable, ShmPeer};
pub use shm::{Shm, ShmOptions};
pub use udp::{Udp, UdpOptions};

use crate::error::{Error, Kind as ErrorKind, Result};

/// The minimum packet length: a BTH and an ICRC.
pub const MIN_PACKET: usize = BTH_LEN + ICRC_LEN;
/// The maximum RoCEv2 packet length: 4096 bytes of payload behind the longest headers.
pub const MAX_ROCE_PACKET: usize = MAX_HEADERS_LEN + 4096 + ICRC_LEN;

/// A packet transport.
///
/// Call sequence: [`open`](Link::open) one flow per peer; then [`reserve`](Link::reserve), fill and
/// [`commit`](Link::commit) each packet, and [`flush`](Link::flush) once per batch. Call
/// [`receive`](Link::receive) to poll, and [`wait_fd`](Link::wait_fd) to sleep until packets
/// arrive.
///
/// Packets of one flow arrive in commit order if the network keeps the order; there is no ordering
/// between flows.
pub trait Link: Send {
    /// The kind of link, with the offloads that it uses and the reason for each that it does not.
    fn path(&self) -> LinkPath;

    /// The transport of one flow and the reason for it: a link may have several transports.
    fn flow_path(&self, flow: FlowId) -> LinkPath {
        let _ = flow;
        self.path()
    }

    /// The address that peers send to.
    fn local(&self) -> SocketAddr;

    /// The maximum packet length, from the BTH through the ICRC, that is carried unfragmented on
    /// every flow.
    fn max_packet(&self) -> usize;

    /// The maximum packet length on this flow: at least [`max_packet`](Link::max_packet).
    fn max_packet_to(&self, flow: FlowId) -> usize {
        let _ = flow;
        self.max_packet()
    }

    /// The maximum packet length to peers at this link's own IP address: at least
    /// [`max_packet`](Link::max_packet), because packets that stay on the machine do not pass the
    /// interface.
    fn max_packet_on_host(&self) -> usize {
        self.max_packet()
    }

    /// Prepares to send to `peer`: one flow per queue pair. Slow; meant for setup.
    ///
    /// `label` distinguishes the queue pairs to one peer. Links that can choose the source port may
    /// derive it from the label (switches hash flows by that port); a UDP socket has one source
    /// port and ignores it.
    ///
    /// # Errors
    /// If the address is not reachable from this link, with the reason.
    fn open(&mut self, peer: SocketAddr, label: u32) -> Result<FlowId>;

    /// Closes a flow. Packets already committed are still sent if there is space for them; closing
    /// a closed flow has no effect.
    fn close(&mut self, flow: FlowId);

    /// Reserves a buffer for one packet of `len` bytes, from the BTH through the ICRC. The caller
    /// fills all but the last four bytes (their content is undefined) and then commits. The next
    /// `reserve` or `flush` discards an uncommitted reservation.
    ///
    /// # Errors
    /// [`ReserveError::Full`] is transient: flush and retry. It is distinct from a closed flow or
    /// an invalid length, for which a retry cannot succeed; hence not an `Option`.
    fn reserve(&mut self, flow: FlowId, len: usize)
    -> std::result::Result<&mut [u8], ReserveError>;

    /// Whether a packet of up to `len` bytes can be reserved, for callers that do not know its
    /// length yet. Discards an uncommitted reservation.
    ///
    /// # Errors
    /// As for [`reserve`](Link::reserve).
    fn has_room(&mut self, flow: FlowId, len: usize) -> std::result::Result<(), ReserveError> {
        self.reserve(flow, len).map(drop)
    }

    /// Appends the ICRC to the reserved packet and queues it. Returns the packet as it will appear
    /// on the wire, for captures; `None` if nothing was reserved, or if an injected fault dropped
    /// the packet.
    fn commit(&mut self) -> Option<Frame<'_>> {
        self.commit_corrupted(Corruption::Intact)
    }

    /// As [`commit`](Link::commit), but corrupts the packet after the ICRC was appended.
    /// [`FaultInjector`] needs this: the ICRC is computed below it, and the receiver's check must
    /// detect the corruption.
    fn commit_corrupted(&mut self, corruption: Corruption) -> Option<Frame<'_>>;

    /// Sends the committed packets. Packets that cannot be sent yet are kept, and
    /// [`Flushed::waiting`] counts them; packets that can never be sent are dropped and counted.
    ///
    /// # Errors
    /// If the link has failed permanently. Backpressure from the network is not an error.
    fn flush(&mut self) -> Result<Flushed>;

    /// Sends the committed packets now if that costs little: less than it costs to build the next
    /// one. Otherwise [`flush`](Link::flush) does.
    fn publish(&mut self) {}

    /// Receives up to one batch of packets and returns the number delivered. Each has a valid ICRC,
    /// or needs none; others were dropped and counted. All other headers are unvalidated, and the
    /// sender is not authenticated.
    ///
    /// # Errors
    /// If the link has failed permanently.
    fn receive(&mut self, take: &mut dyn FnMut(Frame<'_>)) -> Result<usize>;

    /// Whether packets of a flow can be lost to congestion, so that senders must control it.
    fn can_congest(&self, flow: FlowId) -> bool {
        let _ = flow;
        false
    }

    /// A file descriptor that is readable when packets are ready to be received. Call this again
    /// before each wait: the loopback and shared-memory links signal only after it was called.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>>;

    /// The time until the link needs a flush and a receive even without traffic (for example for a
    /// packet that a fault delays).
    fn poll_delay(&self) -> Option<Duration> {
        None
    }

    /// Makes a link append ICRCs that it otherwise omits because its packets stay in memory.
    /// [`FaultInjector`] calls this.
    fn force_icrc(&mut self) {}

    /// Lets peers on this machine access exported memory directly, bypassing the link, and prepares
    /// direct access to theirs. Call before any flow is opened.
    ///
    /// # Errors
    /// The reason why there is no direct access: the link carries packets only, or it wraps another
    /// link and must see every packet.
    fn install_exports(
        &mut self,
        export_table: &Arc<ExportTable>,
    ) -> std::result::Result<(), &'static str> {
        let _ = export_table;
        Err("this link carries packets only")
    }

    /// The peer of a flow, for direct access to the memory that it exports; or the reason why there
    /// is none.
    fn direct_peer(&self, flow: FlowId) -> std::result::Result<Arc<ShmPeer>, &'static str> {
        let _ = flow;
        Err("this link carries packets only")
    }

    /// Opens another link like this one, with the same IP address and options and another port, for
    /// another engine of the same device. Only UDP links, and those that wrap one, can.
    ///
    /// # Errors
    /// [`Kind::Unsupported`](ErrorKind::Unsupported) if a device on this link has only one engine;
    /// else as for opening the first.
    fn sibling(&self) -> Result<Box<dyn Link>> {
        let path = self.path();
        Err(Error::new(ErrorKind::Unsupported, "open a link for another engine")
            .on(format!("{} {}", path.kind, path.local))
            .why("a device on a link of this kind has one engine")
            .fix("ask for one engine, or use a UDP link"))
    }

    /// Traffic and drops since the link was created.
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

    fn max_packet_on_host(&self) -> usize {
        (**self).max_packet_on_host()
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

    fn has_room(&mut self, flow: FlowId, len: usize) -> std::result::Result<(), ReserveError> {
        (**self).has_room(flow, len)
    }

    fn commit_corrupted(&mut self, corruption: Corruption) -> Option<Frame<'_>> {
        (**self).commit_corrupted(corruption)
    }

    fn can_congest(&self, flow: FlowId) -> bool {
        (**self).can_congest(flow)
    }

    fn flush(&mut self) -> Result<Flushed> {
        (**self).flush()
    }

    fn publish(&mut self) {
        (**self).publish();
    }

    fn receive(&mut self, take: &mut dyn FnMut(Frame<'_>)) -> Result<usize> {
        (**self).receive(take)
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

    fn sibling(&self) -> Result<Box<dyn Link>> {
        (**self).sibling()
    }

    fn counters(&self) -> Counters {
        (**self).counters()
    }
}

/// A packet with the relevant fields of its IP and UDP headers.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// Sender. Queue pairs match its IP address; the port is chosen by the sender.
    pub from: SocketAddr,
    /// Destination: an address of this link, as the sender used it.
    pub to: SocketAddr,
    /// The packet from the BTH through the ICRC.
    pub bytes: &'a [u8],
    /// The traffic class that it arrived with, including the ECN bits. In memory, where there is no
    /// IP header: what a network would have delivered.
    pub traffic_class: u8,
    /// Time to live or hop limit that it arrived with; in memory as above.
    pub hop_limit: u8,
    /// The IPv4 identification covered by the ICRC: known to the sender, inferred by the receiver.
    pub identification: u16,
    /// Whether the last four bytes are an ICRC. Packets that stay in memory may omit it.
    pub has_icrc: bool,
}

impl Frame<'_> {
    /// The traffic class of packets that are sent: capable of ECN.
    pub(crate) const TRAFFIC_CLASS: u8 = ECN_CAPABLE;
    /// The hop limit of packets that are sent: Linux's default.
    pub(crate) const HOP_LIMIT: u8 = 64;

    /// Whether congestion was experienced on the path (ECN CE).
    pub fn is_marked(&self) -> bool {
        self.traffic_class & ECN_MASK == ECN_MARKED
    }
}

/// Why a packet could not be reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveError {
    /// The batch is full: flush first. If packets are still waiting after a flush, the network is
    /// applying backpressure: retry later.
    Full,
    /// The flow is closed, or was never open on this link.
    Closed,
    /// The packet is longer than [`Link::max_packet_to`] or shorter than [`MIN_PACKET`].
    Length,
}

impl fmt::Display for ReserveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "the batch is full",
            Self::Closed => "the flow is closed",
            Self::Length => "the link does not carry packets of this length",
        })
    }
}

impl std::error::Error for ReserveError {}

/// How to corrupt a packet after its ICRC was appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corruption {
    /// No corruption.
    Intact,
    /// Flip this bit, counted from the start of the packet, modulo its length in bits.
    FlipBit(u32),
    /// Truncate to this many bytes, at least one.
    Truncate(usize),
}

impl Corruption {
    /// Corrupts the packet and returns its new length.
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

/// The result of a flush.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flushed {
    /// Packets sent by this call.
    pub sent: usize,
    /// Packets kept because there is no space for them yet; the next flush retries.
    pub waiting: usize,
}

/// The kind of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinkKind {
    /// Endpoints within the process.
    Loopback,
    /// A UDP socket.
    Udp,
    /// Ring buffers in memory shared between processes.
    Shm,
    /// Shared memory or UDP, chosen per flow.
    Auto,
    /// No link: an RDMA device of this machine.
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

/// The transport in use, and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkPath {
    /// The kind of the innermost link, below fault injection and captures.
    pub kind: LinkKind,
    /// The address that peers send to.
    pub local: SocketAddr,
    /// Human-readable: what is in use, what is not, and why not.
    pub why: String,
}

impl fmt::Display for LinkPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.kind, self.local, self.why)
    }
}

/// Traffic counters since the link was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets sent.
    pub sent: u64,
    /// Bytes of the packets sent, from the BTH through the ICRC.
    pub sent_bytes: u64,
    /// Packets delivered to the caller.
    pub received: u64,
    /// Bytes of the packets delivered, from the BTH through the ICRC.
    pub received_bytes: u64,
    /// Received packets that the kernel had coalesced with others (GRO).
    pub coalesced: u64,
    /// System calls that moved packets, in both directions.
    pub calls: u64,
    /// Packets lost in this link, by cause.
    pub drops: Drops,
}

/// Packets lost in a link, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drops {
    /// Received with a wrong ICRC.
    pub icrc: u64,
    /// Received with an ICRC that fits an IP identification which no other packet of the host
    /// confirmed in time: the first packet of a host, not followed by another, or a damaged one.
    pub unverified: u64,
    /// Received, but shorter than [`MIN_PACKET`].
    pub short: u64,
    /// Received, but longer than the link carries.
    pub long: u64,
    /// Lost because a receive buffer was full.
    pub overrun: u64,
    /// Not sent: no peer has the address.
    pub no_peer: u64,
    /// Not sent: the kernel rejected the packet permanently.
    pub refused: u64,
    /// Dropped by fault injection.
    pub injected: u64,
}

impl Counters {
    /// Counts a packet that is delivered; returns 1.
    #[inline]
    fn count_received(&mut self, packet: &[u8]) -> usize {
        self.received += 1;
        self.received_bytes += packet.len() as u64;
        1
    }
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
            calls: self.calls + other.calls,
            drops: Drops {
                icrc: self.drops.icrc + other.drops.icrc,
                unverified: self.drops.unverified + other.drops.unverified,
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
    /// The sum over all causes.
    pub fn total(&self) -> u64 {
        let Self { icrc, unverified, short, long, overrun, no_peer, refused, injected } = *self;
        icrc + unverified + short + long + overrun + no_peer + refused + injected
    }
}

/// Rejects peer addresses that no link can send to.
fn check_peer(local: SocketAddr, peer: SocketAddr) -> Result<()> {
    let why = if peer.port() == 0 {
        "port 0 cannot be sent to"
    } else if peer.ip().is_unspecified() {
        "it is the wildcard for every address, not a destination"
    } else if peer.ip().is_multicast() {
        "it is a multicast address, and a queue pair has one peer"
    } else if peer.is_ipv4() != local.is_ipv4() {
        "the link's own address has the other IP version"
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::InvalidArgument, format!("open a flow to {peer}"))
        .on(local.to_string())
        .why(why)
        .fix("give the peer's own address and port, of the same IP version as the link's"))
}
