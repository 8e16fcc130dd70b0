//! RoCEv2 over a plain UDP socket, IPv4 or IPv6: no privileges, no kernel module, any network.
//!
//! The socket is not connected and forbids fragmentation. Linux then sets the IPv4 identification
//! to 0, and to 0, 1, 2, … within a segmented run, so the sender knows the value that the ICRC
//! covers. (A connected socket has a counter that user space cannot read.) The receiver infers the
//! identification from the ICRC itself: see `check.rs`.
//!
//! Linux does not combine segmentation (GSO) with an absent UDP checksum, so the checksum stays
//! where segmentation is used; the ICRC treats the checksum field as ones either way.
//!
//! Written on raw system calls instead of `quinn-udp`, which sends one message per call, has no
//! control over checksums, and does not resend a run that a route rejected: here its ICRCs are
//! recomputed and it is sent packet by packet.

mod check;
mod held;
mod options;
mod send;
mod sys;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use warpwire_proto::wire::UDP_PORT;
use warpwire_proto::wire::icrc::IcrcPrefix;
use warpwire_proto::wire::ip::ECN_CAPABLE;

pub use options::{ENV_VAR, UdpOptions};

use super::flows::{FlowId, Flows};
use super::{
    Corruption, Counters, Flushed, Frame, Link, LinkKind, LinkPath, MIN_PACKET, ReserveError,
};
use crate::error::{Error, Kind as ErrorKind, Result};
use crate::host::System;
use crate::units;
use check::{IcrcChecker, Verdict};
use held::Arrival;
use send::{Flow, TxBatch};
use sys::{CallMode, Headers, SockAddr};

/// The default bind address: RoCEv2's port, reachable from this machine only.
pub const ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), UDP_PORT);

/// Maximum length of a message that the kernel coalesced (GRO).
const MAX_GRO_LEN: usize = 1 << 16;
/// Messages per call with and without GRO: fewer with GRO, where each may hold many packets, so
/// that the buffers stay in the cache.
const MESSAGES: (usize, usize) = (16, 64);
/// Number of successive non-empty calls after which several messages are requested per call.
const BATCH_AFTER: u8 = 2;
const IPV4_AND_UDP: usize = 28;
const IPV6_AND_UDP: usize = 48;

/// A UDP socket that carries RoCEv2.
///
/// ```
/// use warpwire::link::{Link, Udp, UdpOptions};
/// let mut alice = Udp::bind("127.0.0.1:0".parse().unwrap(), UdpOptions::default())?;
/// let mut bob = Udp::bind("127.0.0.1:0".parse().unwrap(), UdpOptions::default())?;
/// let to_bob = alice.open(bob.local(), 0)?;
/// alice.reserve(to_bob, 24).unwrap()[..20].fill(7);
/// alice.commit();
/// assert_eq!(alice.flush()?.sent, 1);
/// while bob.receive(&mut |frame| assert_eq!(frame.from, alice.local()))? == 0 {}
/// println!("{}", alice.path());
/// # Ok::<(), warpwire::Error>(())
/// ```
pub struct Udp {
    socket: OwnedFd,
    local: SocketAddr,
    /// The longest packet on any flow.
    socket_max: usize,
    /// The longest packet that leaves through the interface.
    interface_max: usize,
    batch: TxBatch,
    flows: Flows<Flow>,
    incoming: Incoming,
    checker: IcrcChecker,
    counters: Counters,
    setup: SocketSetup,
}

/// The kernel offloads that a UDP link uses; for each one it does not use, the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offloads {
    /// Runs of equal packets pass the network stack as one on transmit (`UDP_SEGMENT`).
    pub segmentation: std::result::Result<(), String>,
    /// Runs of equal packets pass the network stack as one on receive (`UDP_GRO`).
    pub coalescing: std::result::Result<(), String>,
    /// Packets are sent without a UDP checksum.
    pub no_checksum: std::result::Result<(), String>,
}

/// The receive buffers.
struct Incoming {
    headers: Headers,
    buffer: Box<[u8]>,
    /// The length of each slot of the buffer: one message.
    size: usize,
    calls: CallMode,
    /// Successive calls that returned messages; more may be queued.
    busy_calls: u8,
}

/// The requested options, and what the kernel granted.
struct SocketSetup {
    options: UdpOptions,
    gso: io::Result<()>,
    gro: io::Result<()>,
    no_checksum: io::Result<()>,
    receive_buffer: usize,
    send_buffer: usize,
    mtu: Option<(String, u32)>,
}

impl Udp {
    /// Binds to `address`; port 0 selects a free port, 4791 is RoCEv2's.
    ///
    /// Bind to a loopback address ([`ADDRESS`]) unless other machines must reach the link. The
    /// unspecified address (`0.0.0.0`, `::`) works, at a small cost per message: the kernel then
    /// reports the destination address of each.
    ///
    /// # Errors
    /// If the address does not belong to this machine or is in use, with advice.
    pub fn bind(address: SocketAddr, options: UdpOptions) -> Result<Self> {
        let failed = |source: io::Error| bind_error(address, &source);
        let socket = sys::socket(address).map_err(failed)?;
        let fd = socket.as_fd();
        if address.is_ipv6() {
            sys::set(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1).map_err(failed)?;
        }
        sys::bind(fd, address).map_err(failed)?;
        let local = sys::local(fd).map_err(failed)?;
        let setup = configure(fd, local, options).map_err(failed)?;

        let headers = if local.is_ipv4() { IPV4_AND_UDP } else { IPV6_AND_UDP };
        let carried = setup.mtu.as_ref().map_or(usize::MAX, |(_, mtu)| *mtu as usize);
        let carried = carried.saturating_sub(headers).max(MIN_PACKET);
        let max_packet = options.max_packet_or_default();
        let calls = if options.mmsg { CallMode::Batched } else { CallMode::Single };
        // One byte more than the maximum packet, so that longer ones are detected.
        let (count, size) = match setup.gro {
            Ok(()) => (MESSAGES.0, MAX_GRO_LEN),
            Err(_) => (MESSAGES.1, (max_packet + 1).next_multiple_of(64)),
        };
        Ok(Self {
            socket_max: max_packet,
            interface_max: max_packet.min(carried),
            batch: TxBatch::new(max_packet, setup.gso.is_ok(), calls),
            flows: Flows::new(),
            incoming: Incoming {
                headers: Headers::new(count),
                buffer: vec![0; count * size].into_boxed_slice(),
                size,
                calls,
                busy_calls: 0,
            },
            checker: IcrcChecker::new(local),
            counters: Counters::default(),
            socket,
            local,
            setup,
        })
    }

    /// The offloads that the kernel granted; for each one it did not, the reason.
    ///
    /// ```
    /// use warpwire::link::Udp;
    /// let link = Udp::bind("127.0.0.1:0".parse().unwrap(), "gso=off".parse()?)?;
    /// assert_eq!(link.offloads().segmentation, Err("it was turned off".to_owned()));
    /// # Ok::<(), warpwire::Error>(())
    /// ```
    pub fn offloads(&self) -> Offloads {
        let reason_of = |outcome: &io::Result<()>| match outcome {
            Ok(()) => Ok(()),
            Err(why) => Err(why.to_string()),
        };
        let given_up = self.setup.gso.is_ok() && !self.batch.gso;
        Offloads {
            segmentation: if given_up {
                Err("a route refused it".to_owned())
            } else {
                reason_of(&self.setup.gso)
            },
            coalescing: reason_of(&self.setup.gro),
            no_checksum: reason_of(&self.setup.no_checksum),
        }
    }

    /// Delivers the packets of one message: one, or several that the kernel coalesced.
    fn deliver(&mut self, at: usize, take: &mut dyn FnMut(Frame<'_>)) -> usize {
        let Self { incoming, counters, checker, .. } = self;
        let Some(message) = incoming.headers.received(at) else { return 0 };
        let start = at * incoming.size;
        let Some(bytes) = incoming.buffer.get(start..start + message.len.min(incoming.size)) else {
            return 0;
        };
        if message.truncated {
            counters.drops.long += 1;
            return 0;
        }
        if bytes.is_empty() {
            counters.drops.short += 1;
            return 0;
        }
        let segment = if message.segment == 0 { bytes.len() } else { message.segment };
        let (to, port) = (message.to.unwrap_or(self.local.ip()), self.local.port());
        let coalesced = u64::from(segment < bytes.len());
        let mut delivered = 0;
        for packet in bytes.chunks(segment) {
            if packet.len() < MIN_PACKET {
                counters.drops.short += 1;
                continue;
            }
            if packet.len() > self.socket_max {
                counters.drops.long += 1;
                continue;
            }
            let arrival = Arrival {
                from: message.from,
                to,
                traffic_class: message.traffic_class,
                hop_limit: message.hop_limit,
                bytes: packet,
            };
            let verdict = checker.check(message.from, to, packet);
            match verdict {
                Verdict::Valid(id) | Verdict::Confirms(id) => {
                    if matches!(verdict, Verdict::Confirms(_))
                        && let Some((held, solution)) = checker.take_confirmed(message.from.ip())
                    {
                        delivered += counters.count_received(held.bytes);
                        take(held.frame(port, solution.identification));
                    }
                    delivered += counters.count_received(packet);
                    counters.coalesced += coalesced;
                    take(arrival.frame(port, id));
                }
                Verdict::Unsettled(solution) => {
                    counters.drops.unverified += u64::from(checker.hold(&arrival, solution));
                }
                Verdict::Invalid => counters.drops.icrc += 1,
            }
        }
        delivered
    }

    /// Ends the wait of packets that no other packet has confirmed in time.
    #[cold]
    fn expire_held(&mut self, take: &mut dyn FnMut(Frame<'_>)) -> usize {
        let Self { checker, counters, local, .. } = self;
        let (now, mut delivered) = (Instant::now(), 0);
        while let Some((held, solution, is_final)) = checker.expire(now) {
            if is_final {
                delivered += counters.count_received(held.bytes);
                take(held.frame(local.port(), solution.identification));
            } else {
                counters.drops.unverified += 1;
            }
        }
        delivered
    }

    /// Receives with one system call, in this mode.
    fn receive_with(&mut self, now: CallMode, take: &mut dyn FnMut(Frame<'_>)) -> Result<usize> {
        let Incoming { headers, buffer, size, busy_calls, .. } = &mut self.incoming;
        self.counters.calls += 1;
        let received = headers.receive(self.socket.as_fd(), buffer, *size, now);
        *busy_calls = match (&received, now) {
            (Ok(_), CallMode::Single) => busy_calls.saturating_add(1),
            (Ok(2..), CallMode::Batched) => *busy_calls,
            _ => 0,
        };
        match received {
            Ok(count) => Ok((0..count).map(|at| self.deliver(at, take)).sum()),
            Err(source) => self.on_receive_error(&source, now).map(|()| 0),
        }
    }

    /// Handles a failed receive call, in most cases `EAGAIN`.
    fn on_receive_error(&mut self, source: &io::Error, calls: CallMode) -> Result<()> {
        match source.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR) => Ok(()),
            // An ICMP error for a packet sent earlier, possibly on another flow.
            Some(libc::ECONNREFUSED | libc::EHOSTUNREACH | libc::ENETUNREACH) => Ok(()),
            Some(libc::ENOSYS) if calls == CallMode::Batched => {
                self.incoming.calls = CallMode::Single;
                Ok(())
            }
            _ => Err(Error::os("receive packets", source).on(format!("udp {}", self.local))),
        }
    }
}

impl Link for Udp {
    fn path(&self) -> LinkPath {
        let why = self.setup.describe(&self.offloads(), self.local, self.interface_max);
        LinkPath { kind: LinkKind::Udp, local: self.local, why }
    }

    fn local(&self) -> SocketAddr {
        self.local
    }

    fn max_packet(&self) -> usize {
        self.interface_max
    }

    /// Packets to this machine itself do not pass the interface: theirs is the route's limit.
    fn max_packet_to(&self, flow: FlowId) -> usize {
        self.flows.get(flow).map_or(self.interface_max, |flow| flow.max_packet)
    }

    fn max_packet_on_host(&self) -> usize {
        let headers = if self.local.is_ipv4() { IPV4_AND_UDP } else { IPV6_AND_UDP };
        let Ok(route) = Route::find(self.local, self.local) else { return self.interface_max };
        route.mtu.saturating_sub(headers).clamp(self.interface_max, self.socket_max)
    }

    fn open(&mut self, peer: SocketAddr, _label: u32) -> Result<FlowId> {
        super::check_peer(self.local, peer)?;
        let route = Route::find(self.local, peer).map_err(|source| {
            Error::os(format!("open a flow to {peer}"), &source)
                .on(format!("udp {}", self.local))
                .fix("bind the link to an address that has a route to the peer (0.0.0.0 for any)")
        })?;
        let headers = if peer.is_ipv4() { IPV4_AND_UDP } else { IPV6_AND_UDP };
        let fits = route.mtu.saturating_sub(headers);
        if fits < self.interface_max {
            return Err(Error::new(ErrorKind::Unsupported, format!("open a flow to {peer}"))
                .on(format!("udp {}", self.local))
                .why(format!(
                    "the route carries packets of {fits} bytes, but the link uses {}",
                    self.interface_max
                ))
                .fix(format!("set max_packet={fits} in {ENV_VAR} or in the link's options")));
        }
        let from = SocketAddr::new(route.source, self.local.port());
        Ok(self.flows.insert(Flow {
            from,
            to: peer,
            name: SockAddr::from(peer),
            source: self.local.ip().is_unspecified().then_some(route.source),
            icrc_prefix: IcrcPrefix::new(from, peer),
            max_packet: fits.min(self.socket_max),
        }))
    }

    fn close(&mut self, flow: FlowId) {
        // Packets already in the batch hold their own destination.
        self.flows.remove(flow);
    }

    #[inline]
    fn reserve(
        &mut self,
        flow: FlowId,
        len: usize,
    ) -> std::result::Result<&mut [u8], ReserveError> {
        let Some(known) = self.flows.get_mut(flow) else { return Err(ReserveError::Closed) };
        if !(MIN_PACKET..=known.max_packet).contains(&len) {
            return Err(ReserveError::Length);
        }
        self.batch.reserve(flow, len).ok_or(ReserveError::Full)
    }

    #[inline]
    fn commit_corrupted(&mut self, corruption: Corruption) -> Option<Frame<'_>> {
        let flow = self.flows.get_mut(self.batch.reserved()?)?;
        self.batch.commit(flow, corruption)
    }

    fn can_congest(&self, flow: FlowId) -> bool {
        let _ = flow;
        true
    }

    fn flush(&mut self) -> Result<Flushed> {
        Ok(self.batch.flush(self.socket.as_fd(), &mut self.counters))
    }

    fn receive(&mut self, take: &mut dyn FnMut(Frame<'_>)) -> Result<usize> {
        // `recvmsg` has less latency than `recvmmsg` for a caller that polls for single packets.
        let Incoming { busy_calls, calls, .. } = self.incoming;
        let mode = if busy_calls < BATCH_AFTER { CallMode::Single } else { calls };
        let delivered = self.receive_with(mode, take)?;
        if self.checker.next_expiry().is_none() {
            return Ok(delivered);
        }
        Ok(delivered + self.expire_held(take))
    }

    fn poll_delay(&self) -> Option<Duration> {
        let expiry = self.checker.next_expiry()?;
        Some(expiry.saturating_duration_since(Instant::now()))
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    /// RoCEv2's port has no sibling: peers that know only the address send there.
    fn sibling(&self) -> Result<Box<dyn Link>> {
        if self.local.port() == UDP_PORT {
            return Err(Error::new(ErrorKind::Unsupported, "open a link for another engine")
                .on(format!("udp {}", self.local))
                .why("each engine has a port of its own, and peers send to 4791")
                .fix("ask for one engine, or bind the link to port 0 (any free one)"));
        }
        let mut any_port = self.local;
        any_port.set_port(0);
        Ok(Box::new(Self::bind(any_port, self.setup.options)?))
    }

    /// Reads the number of packets lost to a full socket buffer from the kernel here, not per
    /// packet.
    fn counters(&self) -> Counters {
        const DROPS: usize = 8;
        let mut counters = self.counters;
        let info = sys::get_words::<9>(self.socket.as_fd(), libc::SOL_SOCKET, libc::SO_MEMINFO);
        counters.drops.overrun += info.map_or(0, |words| u64::from(words[DROPS]));
        counters
    }
}

/// The kernel's route to a peer.
struct Route {
    source: IpAddr,
    mtu: usize,
}

impl Route {
    /// Looks up the route by connecting a UDP socket, which sends nothing; fails if there is none.
    fn find(local: SocketAddr, peer: SocketAddr) -> io::Result<Self> {
        let socket = sys::socket(peer)?;
        let fd = socket.as_fd();
        let mut any_port = local;
        any_port.set_port(0);
        sys::bind(fd, any_port)?;
        sys::connect(fd, peer)?;
        let mtu = if peer.is_ipv4() {
            sys::get(fd, libc::IPPROTO_IP, libc::IP_MTU)?
        } else {
            sys::get(fd, libc::IPPROTO_IPV6, libc::IPV6_MTU)?
        };
        Ok(Self { source: sys::local(fd)?.ip(), mtu: usize::try_from(mtu).unwrap_or(0) })
    }
}

/// Sets the socket options that the wire format requires, and the offloads.
fn configure(
    fd: BorrowedFd<'_>,
    local: SocketAddr,
    options: UdpOptions,
) -> io::Result<SocketSetup> {
    const ON: i32 = 1;
    let ecn = i32::from(ECN_CAPABLE);
    if local.is_ipv4() {
        // The identification is predictable only if fragmentation is forbidden.
        sys::set(fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?;
        sys::set(fd, libc::IPPROTO_IP, libc::IP_TOS, ecn)?;
        sys::set(fd, libc::IPPROTO_IP, libc::IP_RECVTOS, ON)?;
        sys::set(fd, libc::IPPROTO_IP, libc::IP_RECVTTL, ON)?;
    } else {
        sys::set(fd, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)?;
        sys::set(fd, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, ecn)?;
        sys::set(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, ON)?;
        sys::set(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, ON)?;
        // Hardware sends RoCEv2 without a UDP checksum.
        sys::set(fd, libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, ON)?;
    }
    if local.ip().is_unspecified() {
        let (level, name) = if local.is_ipv4() {
            (libc::IPPROTO_IP, libc::IP_PKTINFO)
        } else {
            (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)
        };
        sys::set(fd, level, name, ON)?;
    }
    let off = || io::Error::other("it was turned off");
    let gso = if options.gso {
        sys::get(fd, libc::SOL_UDP, libc::UDP_SEGMENT).map(drop)
    } else {
        Err(off())
    };
    let gro = if options.gro { sys::set(fd, libc::SOL_UDP, libc::UDP_GRO, ON) } else { Err(off()) };
    let no_checksum = if gso.is_ok() {
        Err(io::Error::other("Linux does not combine it with segmentation"))
    } else if !options.no_checksum {
        Err(off())
    } else if local.is_ipv4() {
        sys::set(fd, libc::SOL_SOCKET, libc::SO_NO_CHECK, ON)
    } else {
        sys::set(fd, libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, ON)
    };
    Ok(SocketSetup {
        gso,
        gro,
        no_checksum,
        receive_buffer: set_buffer_size(fd, libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, options.buffer)?,
        send_buffer: set_buffer_size(fd, libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, options.buffer)?,
        mtu: interface_mtu(local.ip()),
        options,
    })
}

/// Sets a buffer size, exceeding the system limit where permitted; returns the size granted.
fn set_buffer_size(fd: BorrowedFd<'_>, force: i32, ask: i32, bytes: usize) -> io::Result<usize> {
    // The kernel doubles the value for its bookkeeping, and reports the doubled value.
    let wanted = i32::try_from(bytes).unwrap_or(i32::MAX / 2);
    if sys::set(fd, libc::SOL_SOCKET, force, wanted).is_err() {
        sys::set(fd, libc::SOL_SOCKET, ask, wanted)?;
    }
    Ok(usize::try_from(sys::get(fd, libc::SOL_SOCKET, ask)?).unwrap_or(0) / 2)
}

/// The interface that has the address, with its MTU; for the unspecified address, the interface
/// with the smallest MTU of all that are up.
fn interface_mtu(address: IpAddr) -> Option<(String, u32)> {
    let interfaces = System::live().net_interfaces().into_iter();
    let known = interfaces.filter_map(|known| Some((known.is_up(), known.name, known.mtu?)));
    if address.is_unspecified() {
        let up = known.filter(|(up, ..)| *up);
        return up.map(|(_, name, mtu)| (name, mtu)).min_by_key(|(_, mtu)| *mtu);
    }
    let mine = sys::interface_of(address);
    // All of 127.0.0.0/8 belongs to the loopback interface, but only 127.0.0.1 is listed.
    let mine = mine.or_else(|| address.is_loopback().then(|| "lo".to_owned()))?;
    known.map(|(_, name, mtu)| (name, mtu)).find(|(name, _)| *name == mine)
}

/// Whether an address belongs to this machine.
pub(super) fn is_local_address(address: IpAddr) -> bool {
    // All of 127.0.0.0/8 belongs to the loopback interface, but only 127.0.0.1 is listed.
    address.is_loopback() || sys::interface_of(address).is_some()
}

impl SocketSetup {
    fn describe(&self, offloads: &Offloads, local: SocketAddr, max_packet: usize) -> String {
        let item = |name: &str, outcome: &std::result::Result<(), String>| match outcome {
            Ok(()) => format!("{name} on"),
            Err(why) => format!("{name} off ({why})"),
        };
        let mmsg = if self.options.mmsg { Ok(()) } else { Err("it was turned off".to_owned()) };
        let mut parts = vec![
            item("segmentation (UDP_SEGMENT)", &offloads.segmentation),
            item("receive offload (UDP_GRO)", &offloads.coalescing),
            item("batched calls (sendmmsg, recvmmsg)", &mmsg),
            item("sending without UDP checksum", &offloads.no_checksum),
        ];
        let limit = match &self.mtu {
            Some((name, mtu)) => format!(" ({name} carries {mtu})"),
            None => String::new(),
        };
        parts.push(format!("packets up to {max_packet} bytes{limit}"));
        let buffer = |name: &str, granted: usize, setting: &str| {
            let granted_text = units::bytes(granted as u64);
            if granted >= self.options.buffer {
                return format!("{name} buffer {granted_text}");
            }
            let wanted = units::bytes(self.options.buffer as u64);
            format!("{name} buffer {granted_text} of {wanted} (raise net.core.{setting})")
        };
        parts.push(buffer("receive", self.receive_buffer, "rmem_max"));
        parts.push(buffer("send", self.send_buffer, "wmem_max"));
        if local.ip().is_unspecified() {
            parts.push("bound to every address of this machine".to_owned());
        }
        parts.join("; ")
    }
}

#[cold]
fn bind_error(address: SocketAddr, source: &io::Error) -> Error {
    let error = Error::os("bind a UDP link", source).on(address.to_string());
    match source.raw_os_error() {
        Some(libc::EADDRINUSE) => error.fix(
            "choose another port (0 for any free one), or stop the process that uses it (an \
             rxe device uses 4791)",
        ),
        Some(libc::EADDRNOTAVAIL) => {
            error.fix("give an address of this machine: 127.0.0.1, or one that `ip address` lists")
        }
        Some(libc::EACCES) => error.fix("choose a port >= 1024"),
        Some(libc::EAFNOSUPPORT) => error.fix("the kernel lacks this IP version; use the other"),
        _ => error,
    }
}
