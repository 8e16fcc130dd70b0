//! Shared memory for peers on this machine, UDP for all others, under one address.
//!
//! A flow uses shared memory if the peer's address belongs to this machine, or is listed in a
//! directory that containers share, a process listens on shared memory under that address, and that
//! process runs as this user. A peer that also has UDP
//! is preferred over a shared-memory-only link of the same name, because the port of one is not the
//! port of the other. Otherwise the flow uses UDP, and
//! [`flow_path`](crate::link::Link::flow_path) reports why. Each direction is chosen by its sender.
//!
//! The listener accepts a connection when it next polls, and may refuse it: it has no descriptors
//! left, or too many connections. Until it has accepted, packets wait in the ring. When it refuses,
//! it has read none of them, and the flow moves to UDP for good; the protocol sends the packets
//! again. Packets of one flow thus cannot overtake each other on two transports.

use std::cell::Cell;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};

use super::flows::{FlowId, Flows};
use super::{
    Corruption, Counters, ExportTable, Flushed, Frame, Link, LinkKind, LinkPath, ReserveError, Shm,
    ShmOptions, ShmPeer, Udp, UdpOptions, check_peer, udp,
};
use crate::error::{Error, Result};

/// Maximum number of calls of `receive` between two polls of the UDP socket while packets arrive
/// through shared memory: each poll costs a system call.
const MAX_UDP_POLL_INTERVAL: u32 = 32;

/// A UDP socket and a shared-memory link with the same address.
///
/// ```
/// use warpwire::link::{Auto, Link, LinkKind, ShmOptions, UdpOptions};
/// let any = "127.0.0.1:0".parse().unwrap();
/// let mut alice = Auto::bind(any, UdpOptions::default(), ShmOptions::default())?;
/// let bob = Auto::bind(any, UdpOptions::default(), ShmOptions::default())?;
/// let to_bob = alice.open(bob.local(), 0)?;
/// assert_eq!(alice.flow_path(to_bob).kind, LinkKind::Shm);
/// assert!(alice.max_packet_to(to_bob) > 65_536);
/// let to_absent = alice.open("127.0.0.1:9".parse().unwrap(), 0)?;
/// let path = alice.flow_path(to_absent);
/// assert_eq!(path.kind, LinkKind::Udp);
/// assert!(path.why.contains("no process of this machine listens"));
/// # Ok::<(), warpwire::Error>(())
/// ```
pub struct Auto {
    /// The link, or the reason why there is none. Before `udp`: who gets a port that was freed gets
    /// its name in shared memory too.
    shm: std::result::Result<Shm, String>,
    udp: Udp,
    flows: Flows<Flow>,
    /// The transport of the last reservation.
    last: Transport,
    /// An epoll instance over the descriptors of both links.
    poll: OwnedFd,
    /// Calls of `receive` until the next UDP poll, and between two polls.
    udp_poll_countdown: u32,
    udp_poll_interval: u32,
    /// The caller asked for a descriptor to wait on: either link may have made it readable.
    wait_requested: Cell<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    Udp,
    Shm,
}

struct Flow {
    transport: Transport,
    inner: FlowId,
    why: String,
    peer: SocketAddr,
    label: u32,
}

impl Auto {
    /// Binds both links to `address`; port 0 selects a free port. If shared memory is unavailable,
    /// all flows use UDP, and the path reports why.
    ///
    /// # Errors
    /// If the UDP socket cannot be bound, or the shared directory does not exist.
    pub fn bind(address: SocketAddr, udp: UdpOptions, shm: ShmOptions) -> Result<Self> {
        shm.check()?;
        let udp = Udp::bind(address, udp)?;
        let shm = Shm::bind_with_udp(udp.local(), shm).map_err(|source| source.to_string());
        let make_epoll = || -> rustix::io::Result<OwnedFd> {
            let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            let links = [udp.wait_fd(), shm.as_ref().ok().and_then(Link::wait_fd)];
            for link in links.into_iter().flatten() {
                epoll::add(&poll, link, EventData::new_u64(0), EventFlags::IN)?;
            }
            Ok(poll)
        };
        let poll = make_epoll().map_err(|source| {
            Error::os("create an epoll instance for a link", &source.into()).on(address.to_string())
        })?;
        Ok(Self {
            udp,
            shm,
            flows: Flows::new(),
            last: Transport::Udp,
            poll,
            udp_poll_countdown: 0,
            udp_poll_interval: 1,
            wait_requested: Cell::new(true),
        })
    }

    /// The links that exist.
    fn links(&self) -> impl Iterator<Item = &dyn Link> {
        let shm = self.shm.as_ref().ok().map(|shm| shm as &dyn Link);
        shm.into_iter().chain([&self.udp as &dyn Link])
    }

    fn link(&mut self, transport: Transport) -> &mut dyn Link {
        match (transport, &mut self.shm) {
            (Transport::Shm, Ok(shm)) => shm,
            _ => &mut self.udp,
        }
    }

    /// Moves flows whose peer refused shared memory to UDP.
    #[cold]
    fn leave_refused(&mut self) {
        let Self { udp, shm: Ok(shm), flows, .. } = self else { return };
        for flow in flows.iter_mut() {
            if flow.transport != Transport::Shm || !shm.is_refused(flow.inner) {
                continue;
            }
            // A socket that has sent to this peer's machine before fails only for lack of memory;
            // the next flush tries again.
            let Ok(inner) = udp.open(flow.peer, flow.label) else { continue };
            shm.close(flow.inner);
            tracing::debug!(peer = %flow.peer, "the peer refused shared memory; UDP is used");
            (flow.transport, flow.inner) = (Transport::Udp, inner);
            flow.why = "no shared memory: the peer refused the connection (it has no descriptors \
                        or connections left, or runs as another user)"
                .to_owned();
        }
    }

    /// Opens a flow through shared memory, or returns the reason why not.
    fn open_shm(&mut self, peer: SocketAddr, label: u32) -> std::result::Result<FlowId, String> {
        let shm = self.shm.as_mut().map_err(|why| why.clone())?;
        if !udp::is_local_address(peer.ip()) && !shm.is_in_directory(peer) {
            return Err("its address does not belong to this machine".to_owned());
        }
        shm.open(peer, label).map_err(|source| source.reason().to_owned())
    }

    /// Whether this call polls UDP: always while UDP packets arrive or no peer sends through shared
    /// memory, otherwise with exponential backoff.
    #[inline]
    fn should_poll_udp(&mut self) -> bool {
        if self.udp_poll_countdown > 0 {
            self.udp_poll_countdown -= 1;
            return false;
        }
        true
    }

    /// Receives from shared memory. Returns the number delivered, and whether to poll UDP as well.
    #[inline]
    fn receive_shm(&mut self, take: &mut dyn FnMut(Frame<'_>)) -> Result<(usize, bool)> {
        let (mut delivered, mut senders) = (0, 0);
        if let Ok(shm) = &mut self.shm {
            delivered = shm.receive(take)?;
            senders = shm.senders();
        }
        let polls_udp = self.should_poll_udp() || self.wait_requested.get() || senders == 0;
        if polls_udp {
            self.wait_requested.set(false);
        }
        Ok((delivered, polls_udp))
    }

    /// Adjusts the UDP poll interval to the `more` packets that a poll delivered; returns `more`.
    #[inline]
    fn polled_udp(&mut self, more: usize) -> usize {
        self.udp_poll_interval =
            if more > 0 { 1 } else { (self.udp_poll_interval * 2).min(MAX_UDP_POLL_INTERVAL) };
        self.udp_poll_countdown = self.udp_poll_interval - 1;
        more
    }
}

impl Link for Auto {
    fn path(&self) -> LinkPath {
        let mut why = format!("per flow: UDP ({})", self.udp.path().why);
        match &self.shm {
            Ok(shm) => why += &format!(", or shm ({})", shm.path().why),
            Err(reason) => why += &format!("; no shm: {reason}"),
        }
        LinkPath { kind: LinkKind::Auto, local: self.local(), why }
    }

    fn flow_path(&self, flow: FlowId) -> LinkPath {
        let Some(flow) = self.flows.get(flow) else { return self.path() };
        let mut path = match (flow.transport, &self.shm) {
            (Transport::Shm, Ok(shm)) => shm.flow_path(flow.inner),
            _ => self.udp.flow_path(flow.inner),
        };
        path.why = format!("{}; {}", flow.why, path.why);
        path
    }

    fn local(&self) -> SocketAddr {
        self.udp.local()
    }

    fn max_packet(&self) -> usize {
        self.links().map(Link::max_packet).min().unwrap_or_default()
    }

    fn max_packet_on_host(&self) -> usize {
        self.links().map(Link::max_packet_on_host).min().unwrap_or_default()
    }

    fn max_packet_to(&self, flow: FlowId) -> usize {
        match (self.flows.get(flow), &self.shm) {
            (Some(Flow { transport: Transport::Shm, inner, .. }), Ok(shm)) => {
                shm.max_packet_to(*inner)
            }
            (Some(Flow { inner, .. }), _) => self.udp.max_packet_to(*inner),
            (None, _) => self.max_packet(),
        }
    }

    fn open(&mut self, peer: SocketAddr, label: u32) -> Result<FlowId> {
        check_peer(self.local(), peer)?;
        let (transport, inner, why) = match self.open_shm(peer, label) {
            Ok(inner) => {
                (Transport::Shm, inner, "the peer is a process of this machine".to_owned())
            }
            Err(why) => {
                let inner = self.udp.open(peer, label)?;
                (Transport::Udp, inner, format!("no shared memory: {why}"))
            }
        };
        Ok(self.flows.insert(Flow { transport, inner, why, peer, label }))
    }

    fn close(&mut self, flow: FlowId) {
        if let Some(Flow { transport, inner, .. }) = self.flows.remove(flow) {
            self.link(transport).close(inner);
        }
    }

    #[inline]
    fn has_room(&mut self, flow: FlowId, len: usize) -> std::result::Result<(), ReserveError> {
        let Some(Flow { transport, inner, .. }) = self.flows.get_mut(flow) else {
            return Err(ReserveError::Closed);
        };
        match (*transport, &mut self.shm) {
            (Transport::Shm, Ok(shm)) => shm.has_room(*inner, len),
            _ => self.udp.has_room(*inner, len),
        }
    }

    #[inline]
    fn reserve(
        &mut self,
        flow: FlowId,
        len: usize,
    ) -> std::result::Result<&mut [u8], ReserveError> {
        let Some(Flow { transport, inner, .. }) = self.flows.get_mut(flow) else {
            return Err(ReserveError::Closed);
        };
        let (transport, inner) = (*transport, *inner);
        self.last = transport;
        match (transport, &mut self.shm) {
            (Transport::Shm, Ok(shm)) => shm.reserve(inner, len),
            _ => self.udp.reserve(inner, len),
        }
    }

    #[inline]
    fn commit_corrupted(&mut self, corruption: Corruption) -> Option<Frame<'_>> {
        match (self.last, &mut self.shm) {
            (Transport::Shm, Ok(shm)) => shm.commit_corrupted(corruption),
            _ => self.udp.commit_corrupted(corruption),
        }
    }

    fn can_congest(&self, flow: FlowId) -> bool {
        match self.flows.get(flow) {
            Some(Flow { transport: Transport::Udp, inner, .. }) => self.udp.can_congest(*inner),
            _ => false,
        }
    }

    #[inline]
    fn flush(&mut self) -> Result<Flushed> {
        if self.shm.as_ref().is_ok_and(Shm::has_lost_peers) {
            self.leave_refused();
        }
        let mut flushed = self.udp.flush()?;
        if let Ok(shm) = &mut self.shm {
            let more = shm.flush()?;
            flushed.sent += more.sent;
            flushed.waiting += more.waiting;
        }
        Ok(flushed)
    }

    #[inline]
    fn publish(&mut self) {
        if let Ok(shm) = &mut self.shm {
            shm.publish();
        }
    }

    #[inline]
    fn receive(&mut self, take: &mut dyn FnMut(Frame<'_>)) -> Result<usize> {
        let (delivered, polls_udp) = self.receive_shm(take)?;
        if !polls_udp {
            return Ok(delivered);
        }
        let more = self.udp.receive(take)?;
        Ok(delivered + self.polled_udp(more))
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.wait_requested.set(true);
        if let Ok(shm) = &self.shm {
            shm.wait_fd();
        }
        Some(self.poll.as_fd())
    }

    fn poll_delay(&self) -> Option<Duration> {
        self.links().filter_map(Link::poll_delay).min()
    }

    fn force_icrc(&mut self) {
        self.udp.force_icrc();
        if let Ok(shm) = &mut self.shm {
            shm.force_icrc();
        }
    }

    fn install_exports(
        &mut self,
        export_table: &Arc<ExportTable>,
    ) -> std::result::Result<(), &'static str> {
        match &mut self.shm {
            Ok(shm) => shm.install_exports(export_table),
            Err(_) => Err("this link has no shared memory"),
        }
    }

    fn direct_peer(&self, flow: FlowId) -> std::result::Result<Arc<ShmPeer>, &'static str> {
        match (self.flows.get(flow), &self.shm) {
            (Some(Flow { transport: Transport::Shm, inner, .. }), Ok(shm)) => {
                shm.direct_peer(*inner)
            }
            _ => Err("the peer is reached by UDP"),
        }
    }

    fn counters(&self) -> Counters {
        self.links().map(Link::counters).fold(Counters::default(), |sum, more| sum + more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::tests::{receive, send, wait};

    /// Binds a port that was just freed: a child that another test is starting has a copy of all
    /// descriptors until it executes its program.
    fn bind_again<L>(bind: impl Fn() -> Result<L>) -> L {
        let mut link = None;
        testkit::until("the port is free", || {
            link = bind().ok();
            link.is_some()
        });
        link.unwrap()
    }

    fn bind_auto_again(address: SocketAddr) -> Auto {
        bind_again(|| Auto::bind(address, UdpOptions::default(), ShmOptions::default()))
    }

    fn bind() -> Auto {
        let any = "127.0.0.1:0".parse().unwrap();
        Auto::bind(any, UdpOptions::default(), ShmOptions::default()).unwrap()
    }

    #[test]
    fn each_flow_has_its_transport_and_the_reason() {
        let (mut one, mut two) = (bind(), bind());
        let mut plain = Udp::bind("127.0.0.1:0".parse().unwrap(), UdpOptions::default()).unwrap();
        let (near, far) = (one.open(two.local(), 0).unwrap(), one.open(plain.local(), 0).unwrap());
        assert_eq!(one.flow_path(near).kind, LinkKind::Shm);
        assert_eq!(one.flow_path(far).kind, LinkKind::Udp);
        assert!(one.flow_path(far).why.contains("no process of this machine listens"));
        assert!(one.max_packet_to(near) > one.max_packet_to(far));
        assert_eq!(one.max_packet(), one.max_packet_to(far));
        // A reservation on one transport is discarded by the next one on the other.
        one.reserve(near, 64).unwrap();
        send(&mut one, far, 64, 1);
        assert!(one.commit().is_none());
        let max_packet = one.max_packet_to(near);
        send(&mut one, near, max_packet, 2);
        assert_eq!(one.flush().unwrap(), Flushed { sent: 2, waiting: 0 });
        assert_eq!(receive(&mut two, 1)[0].1.len(), max_packet - 4);
        assert_eq!(receive(&mut plain, 1).len(), 1);
        one.close(near);
        assert_eq!(one.reserve(near, 64).err(), Some(ReserveError::Closed));
        assert_eq!(one.counters().sent, 2);
    }

    #[test]
    fn both_transports_are_polled_while_the_other_is_busy() {
        let (mut sink, mut near) = (bind(), bind());
        let mut far = Udp::bind("127.0.0.1:0".parse().unwrap(), UdpOptions::default()).unwrap();
        let (by_memory, by_udp) =
            (near.open(sink.local(), 0).unwrap(), far.open(sink.local(), 0).unwrap());
        for round in 0..20 {
            send(&mut far, by_udp, 64, round);
            far.flush().unwrap();
            testkit::until("the packet has arrived", || wait(&sink.udp, Duration::ZERO));
            let mut received = false;
            for _ in 0..2 * MAX_UDP_POLL_INTERVAL {
                send(&mut near, by_memory, 64, round);
                near.flush().unwrap();
                let far = far.local();
                sink.receive(&mut |frame| received |= frame.from == far).unwrap();
            }
            assert!(received, "round {round}");
        }
        assert_eq!(sink.counters().received, u64::from(20 * (2 * MAX_UDP_POLL_INTERVAL + 1)));
    }

    #[test]
    fn without_shared_memory_all_flows_use_udp() {
        let free = Udp::bind("127.0.0.1:0".parse().unwrap(), UdpOptions::default()).unwrap();
        let address = free.local();
        let _taken = Shm::bind_with_udp(address, ShmOptions::default()).unwrap();
        drop(free);
        let mut one = bind_auto_again(address);
        let mut two = bind();
        assert!(one.path().why.contains("no shm: "), "{}", one.path());
        let flow = one.open(two.local(), 0).unwrap();
        assert_eq!(one.flow_path(flow).kind, LinkKind::Udp);
        assert!(one.flow_path(flow).why.contains("another link has this address"));
        send(&mut one, flow, 64, 1);
        one.flush().unwrap();
        assert_eq!(receive(&mut two, 1).len(), 1);
    }

    #[test]
    fn a_shm_only_link_of_the_same_name_is_not_taken_for_the_peer() {
        let (mut one, mut two) = (bind(), bind());
        let mut stranger = Shm::bind(two.local(), ShmOptions::default()).unwrap();
        let flow = one.open(two.local(), 0).unwrap();
        assert_eq!(one.flow_path(flow).kind, LinkKind::Shm);
        send(&mut one, flow, 64, 1);
        one.flush().unwrap();
        assert_eq!(receive(&mut two, 1).len(), 1);
        assert_eq!(stranger.receive(&mut |_| ()).unwrap(), 0);
        // Nor after the peer has exited: its packets are dropped until an auto link binds the
        // address.
        let address = two.local();
        drop(two);
        let limit = testkit::deadline(Duration::from_secs(20));
        let start = std::time::Instant::now();
        while one.counters().drops.no_peer < 100 {
            send(&mut one, flow, 64, 1);
            one.flush().unwrap();
            one.receive(&mut |_| ()).unwrap();
            std::thread::sleep(Duration::from_micros(500));
            assert!(start.elapsed() < limit, "{:?}", one.counters());
        }
        assert_eq!(stranger.receive(&mut |_| ()).unwrap(), 0);
        let mut back = bind_auto_again(address);
        while back.receive(&mut |_| ()).unwrap() == 0 {
            send(&mut one, flow, 64, 1);
            one.flush().unwrap();
            assert!(start.elapsed() < limit, "{:?}", one.counters());
        }
        // The order in which the two links were bound does not matter.
        let free = Udp::bind("127.0.0.1:0".parse().unwrap(), UdpOptions::default()).unwrap();
        let address = free.local();
        drop(free);
        let mut stranger = bind_again(|| Shm::bind(address, ShmOptions::default()));
        let mut three = bind_auto_again(address);
        let flow = one.open(three.local(), 0).unwrap();
        send(&mut one, flow, 64, 2);
        one.flush().unwrap();
        assert_eq!(receive(&mut three, 1).len(), 1);
        assert_eq!(stranger.receive(&mut |_| ()).unwrap(), 0);
    }

    #[test]
    fn a_shm_link_and_an_auto_link_connect() {
        let (mut auto, any) = (bind(), "127.0.0.1:0".parse().unwrap());
        let mut shm_only = Shm::bind(any, ShmOptions::default()).unwrap();
        let (there, back) =
            (auto.open(shm_only.local(), 0).unwrap(), shm_only.open(auto.local(), 0).unwrap());
        assert_eq!(auto.flow_path(there).kind, LinkKind::Shm);
        send(&mut auto, there, 64, 1);
        auto.flush().unwrap();
        assert_eq!(receive(&mut shm_only, 1).len(), 1);
        send(&mut shm_only, back, 64, 2);
        shm_only.flush().unwrap();
        assert_eq!(receive(&mut auto, 1).len(), 1);
        // A port bound by a shared-memory link is not free for UDP.
        Udp::bind(shm_only.local(), UdpOptions::default()).err().unwrap();
        let freed = shm_only.local();
        drop(shm_only);
        bind_again(|| Udp::bind(freed, UdpOptions::default()));
    }
}
