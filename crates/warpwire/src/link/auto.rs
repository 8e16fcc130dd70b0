//! Shared memory where the peer is on this machine, UDP elsewhere: one address, and each flow takes the better way.
//!
//! A flow goes through shared memory if the peer's address is one of this machine's, a process listens there under
//! that address, and it is this user's or root's. A link that has UDP too is found before one that only has the same
//! name: a port of one is not a port of the other. Otherwise it goes through UDP, and
//! [`flow_path`](crate::link::Link::flow_path) says why. The choice is made when the flow is opened, and stays: packets
//! of one flow do not overtake each other on two ways. Each direction is chosen by its own sender.

use std::cell::Cell;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};

use super::flows::{FlowId, Flows};
use super::{
    Arrival, Counters, Flushed, Frame, Kind, Link, Offer, Path, Peer, Refused, Shm, Spoil, Udp,
    check_peer, shm, udp,
};
use crate::error::{Error, Result};
use crate::mem::SharedBytes;

/// While packets come through shared memory, the UDP socket, which costs a system call to look at, is looked at once
/// in so many calls at least.
const SELDOM: u32 = 32;

/// A UDP socket and a shared-memory link with the same address.
///
/// ```
/// use warpwire::link::{Auto, Kind, Link, shm, udp};
/// let any = "127.0.0.1:0".parse().unwrap();
/// let mut alice = Auto::bind(any, udp::Options::default(), shm::Options::default())?;
/// let bob = Auto::bind(any, udp::Options::default(), shm::Options::default())?;
/// let to_bob = alice.open(bob.local(), 0)?;
/// assert_eq!(alice.flow_path(to_bob).kind, Kind::Shm);
/// assert!(alice.largest_to(to_bob) > 65_536);
/// let to_nobody = alice.open("127.0.0.1:9".parse().unwrap(), 0)?;
/// let path = alice.flow_path(to_nobody);
/// assert_eq!(path.kind, Kind::Udp);
/// assert!(path.why.contains("no process of this machine listens"));
/// # Ok::<(), warpwire::Error>(())
/// ```
pub struct Auto {
    udp: Udp,
    /// Or why there is none.
    shm: std::result::Result<Shm, String>,
    flows: Flows<Flow>,
    /// Where the last packet was reserved.
    last: Way,
    /// Both links' descriptors.
    poll: OwnedFd,
    /// Calls of receive until UDP is looked at, and between its looks.
    until: u32,
    between: u32,
    /// Somebody slept: either link may have woken it.
    slept: Cell<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Udp,
    Shm,
}

struct Flow {
    way: Way,
    inner: FlowId,
    why: String,
}

impl Auto {
    /// Binds both links to `address`; port 0 stands for any that is free. Where shared memory cannot be had, UDP does it
    /// alone, and the path says why.
    ///
    /// # Errors
    /// If the UDP socket cannot be bound.
    pub fn bind(address: SocketAddr, udp: udp::Options, shm: shm::Options) -> Result<Self> {
        let udp = Udp::bind(address, udp)?;
        let shm = Shm::bind_beside_udp(udp.local(), shm).map_err(|source| source.to_string());
        let watched = || -> rustix::io::Result<OwnedFd> {
            let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            let links = [udp.wait_fd(), shm.as_ref().ok().and_then(Link::wait_fd)];
            for link in links.into_iter().flatten() {
                epoll::add(&poll, link, EventData::new_u64(0), EventFlags::IN)?;
            }
            Ok(poll)
        };
        let poll = watched().map_err(|source| {
            Error::os("watch a link's descriptors", &source.into()).on(address.to_string())
        })?;
        Ok(Self {
            udp,
            shm,
            flows: Flows::new(),
            last: Way::Udp,
            poll,
            until: 0,
            between: 1,
            slept: Cell::new(true),
        })
    }

    /// The links, those that there are.
    fn links(&self) -> impl Iterator<Item = &dyn Link> {
        let shm = self.shm.as_ref().ok().map(|shm| shm as &dyn Link);
        shm.into_iter().chain([&self.udp as &dyn Link])
    }

    fn link(&mut self, way: Way) -> &mut dyn Link {
        match (way, &mut self.shm) {
            (Way::Shm, Ok(shm)) => shm,
            _ => &mut self.udp,
        }
    }

    /// Opens a flow through shared memory, or says why not.
    fn open_shm(&mut self, peer: SocketAddr, label: u32) -> std::result::Result<FlowId, String> {
        let shm = self.shm.as_mut().map_err(|why| why.clone())?;
        if !udp::is_ours(peer.ip()) {
            return Err("its address is not one of this machine's".to_owned());
        }
        shm.open(peer, label).map_err(|source| source.reason().to_owned())
    }

    /// Whether this call looks at UDP: always while UDP brings packets or nobody sends through memory, else less and less.
    #[inline]
    fn looks_at_udp(&mut self) -> bool {
        if self.until > 0 {
            self.until -= 1;
            return false;
        }
        true
    }

    /// Takes what came through memory; tells how much, and whether to look at UDP, too.
    #[inline]
    fn receive_by_shm(&mut self, take: &mut dyn FnMut(Frame<'_>)) -> Result<(usize, bool)> {
        let (mut delivered, mut senders) = (0, 0);
        if let Ok(shm) = &mut self.shm {
            delivered = shm.receive(take)?;
            senders = shm.senders();
        }
        let looks = self.looks_at_udp() || self.slept.get() || senders == 0;
        if looks {
            self.slept.set(false);
        }
        Ok((delivered, looks))
    }

    /// UDP brought so much, which is returned: that says when to look again.
    #[inline]
    fn looked_at_udp(&mut self, more: usize) -> usize {
        self.between = if more > 0 { 1 } else { (self.between * 2).min(SELDOM) };
        self.until = self.between - 1;
        more
    }
}

impl Link for Auto {
    fn path(&self) -> Path {
        let mut why = format!("by flow: UDP ({})", self.udp.path().why);
        match &self.shm {
            Ok(shm) => why += &format!(", or shm ({})", shm.path().why),
            Err(reason) => why += &format!("; never shm: {reason}"),
        }
        Path { kind: Kind::Auto, local: self.local(), why }
    }

    fn flow_path(&self, flow: FlowId) -> Path {
        let Some(flow) = self.flows.get(flow) else { return self.path() };
        let mut path = match (flow.way, &self.shm) {
            (Way::Shm, Ok(shm)) => shm.flow_path(flow.inner),
            _ => self.udp.flow_path(flow.inner),
        };
        path.why = format!("{}; {}", flow.why, path.why);
        path
    }

    fn local(&self) -> SocketAddr {
        self.udp.local()
    }

    fn largest(&self) -> usize {
        self.links().map(Link::largest).min().unwrap_or_default()
    }

    fn largest_to(&self, flow: FlowId) -> usize {
        match (self.flows.get(flow), &self.shm) {
            (Some(Flow { way: Way::Shm, inner, .. }), Ok(shm)) => shm.largest_to(*inner),
            (Some(Flow { inner, .. }), _) => self.udp.largest_to(*inner),
            (None, _) => self.largest(),
        }
    }

    fn open(&mut self, peer: SocketAddr, label: u32) -> Result<FlowId> {
        check_peer(self.local(), peer)?;
        let flow = match self.open_shm(peer, label) {
            Ok(inner) => {
                let why = "the peer is a process of this machine".to_owned();
                Flow { way: Way::Shm, inner, why }
            }
            Err(why) => {
                let inner = self.udp.open(peer, label)?;
                Flow { way: Way::Udp, inner, why: format!("not through shared memory: {why}") }
            }
        };
        Ok(self.flows.insert(flow))
    }

    fn close(&mut self, flow: FlowId) {
        if let Some(Flow { way, inner, .. }) = self.flows.remove(flow) {
            self.link(way).close(inner);
        }
    }

    #[inline]
    fn reserve(&mut self, flow: FlowId, len: usize) -> std::result::Result<&mut [u8], Refused> {
        let Some(Flow { way, inner, .. }) = self.flows.get_mut(flow) else {
            return Err(Refused::Closed);
        };
        let (way, inner) = (*way, *inner);
        self.last = way;
        match (way, &mut self.shm) {
            (Way::Shm, Ok(shm)) => shm.reserve(inner, len),
            _ => self.udp.reserve(inner, len),
        }
    }

    #[inline]
    fn commit_spoiled(&mut self, spoil: Spoil) -> Option<Frame<'_>> {
        match (self.last, &mut self.shm) {
            (Way::Shm, Ok(shm)) => shm.commit_spoiled(spoil),
            _ => self.udp.commit_spoiled(spoil),
        }
    }

    #[inline]
    fn commit_lent(&mut self, headers: usize, payload: &SharedBytes<'_>) -> bool {
        match (self.last, &mut self.shm) {
            (Way::Shm, Ok(shm)) => shm.commit_lent(headers, payload),
            _ => self.udp.commit_lent(headers, payload),
        }
    }

    #[inline]
    fn flush(&mut self) -> Result<Flushed> {
        let mut flushed = self.udp.flush()?;
        if let Ok(shm) = &mut self.shm {
            let more = shm.flush()?;
            flushed.sent += more.sent;
            flushed.waiting += more.waiting;
        }
        Ok(flushed)
    }

    #[inline]
    fn receive(&mut self, take: &mut dyn FnMut(Frame<'_>)) -> Result<usize> {
        let (delivered, looks) = self.receive_by_shm(take)?;
        if !looks {
            return Ok(delivered);
        }
        let more = self.udp.receive(take)?;
        Ok(delivered + self.looked_at_udp(more))
    }

    #[inline]
    fn receive_unread(&mut self, take: &mut dyn FnMut(Arrival<'_>)) -> Result<usize> {
        let (delivered, looks) = self.receive_by_shm(&mut |frame| take(Arrival::Read(frame)))?;
        if !looks {
            return Ok(delivered);
        }
        let more = self.udp.receive_unread(take)?;
        Ok(delivered + self.looked_at_udp(more))
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.slept.set(true);
        if let Ok(shm) = &self.shm {
            shm.wait_fd();
        }
        Some(self.poll.as_fd())
    }

    fn wakes_in(&self) -> Option<Duration> {
        self.links().filter_map(Link::wakes_in).min()
    }

    fn always_seal(&mut self) {
        self.udp.always_seal();
        if let Ok(shm) = &mut self.shm {
            shm.always_seal();
        }
    }

    fn offer(&mut self, offer: &Arc<Offer>) -> std::result::Result<(), &'static str> {
        match &mut self.shm {
            Ok(shm) => shm.offer(offer),
            Err(_) => Err("there is no shared memory on this link"),
        }
    }

    fn peer(&self, flow: FlowId) -> std::result::Result<Arc<Peer>, &'static str> {
        match (self.flows.get(flow), &self.shm) {
            (Some(Flow { way: Way::Shm, inner, .. }), Ok(shm)) => shm.peer(*inner),
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
    use crate::link::tests::{receive, send};

    fn bind() -> Auto {
        let any = "127.0.0.1:0".parse().unwrap();
        Auto::bind(any, udp::Options::default(), shm::Options::default()).unwrap()
    }

    #[test]
    fn each_flow_takes_its_way_and_knows_why() {
        let (mut one, mut two) = (bind(), bind());
        let mut plain = Udp::bind("127.0.0.1:0".parse().unwrap(), udp::Options::default()).unwrap();
        let (near, far) = (one.open(two.local(), 0).unwrap(), one.open(plain.local(), 0).unwrap());
        assert_eq!(one.flow_path(near).kind, Kind::Shm);
        assert_eq!(one.flow_path(far).kind, Kind::Udp);
        assert!(one.flow_path(far).why.contains("no process of this machine listens"));
        assert!(one.largest_to(near) > one.largest_to(far));
        assert_eq!(one.largest(), one.largest_to(far));
        // A reservation on one way is forgotten by the next on the other.
        one.reserve(near, 64).unwrap();
        send(&mut one, far, 64, 1);
        assert!(one.commit().is_none());
        let largest = one.largest_to(near);
        send(&mut one, near, largest, 2);
        assert_eq!(one.flush().unwrap(), Flushed { sent: 2, waiting: 0 });
        assert_eq!(receive(&mut two, 1)[0].1.len(), largest - 4);
        assert_eq!(receive(&mut plain, 1).len(), 1);
        one.close(near);
        assert_eq!(one.reserve(near, 64).err(), Some(Refused::Closed));
        assert_eq!(one.counters().sent, 2);
    }

    #[test]
    fn both_ways_are_heard_while_the_other_is_busy() {
        let (mut sink, mut near) = (bind(), bind());
        let mut far = Udp::bind("127.0.0.1:0".parse().unwrap(), udp::Options::default()).unwrap();
        let (by_memory, by_udp) =
            (near.open(sink.local(), 0).unwrap(), far.open(sink.local(), 0).unwrap());
        for round in 0..20 {
            send(&mut far, by_udp, 64, round);
            far.flush().unwrap();
            let mut heard = false;
            for _ in 0..2 * SELDOM {
                send(&mut near, by_memory, 64, round);
                near.flush().unwrap();
                let far = far.local();
                sink.receive(&mut |frame| heard |= frame.from == far).unwrap();
            }
            assert!(heard, "round {round}");
        }
        assert_eq!(sink.counters().received, u64::from(20 * (2 * SELDOM + 1)));
    }

    #[test]
    fn without_shared_memory_udp_does_it_alone() {
        let free = Udp::bind("127.0.0.1:0".parse().unwrap(), udp::Options::default()).unwrap();
        let address = free.local();
        let _taken = Shm::bind_beside_udp(address, shm::Options::default()).unwrap();
        drop(free);
        let mut one =
            Auto::bind(address, udp::Options::default(), shm::Options::default()).unwrap();
        let mut two = bind();
        assert!(one.path().why.contains("never shm: "), "{}", one.path());
        let flow = one.open(two.local(), 0).unwrap();
        assert_eq!(one.flow_path(flow).kind, Kind::Udp);
        assert!(one.flow_path(flow).why.contains("another link has that name"));
        send(&mut one, flow, 64, 1);
        one.flush().unwrap();
        assert_eq!(receive(&mut two, 1).len(), 1);
    }

    #[test]
    fn a_link_of_the_same_name_without_udp_is_not_taken_for_the_peer() {
        let (mut one, mut two) = (bind(), bind());
        let mut stranger = Shm::bind(two.local(), shm::Options::default()).unwrap();
        let flow = one.open(two.local(), 0).unwrap();
        assert_eq!(one.flow_path(flow).kind, Kind::Shm);
        send(&mut one, flow, 64, 1);
        one.flush().unwrap();
        assert_eq!(receive(&mut two, 1).len(), 1);
        assert_eq!(stranger.receive(&mut |_| ()).unwrap(), 0);
        // Nor when the peer has gone: its packets are lost until one of its sort comes back.
        let address = two.local();
        drop(two);
        let start = std::time::Instant::now();
        while one.counters().drops.no_peer < 100 {
            send(&mut one, flow, 64, 1);
            one.flush().unwrap();
            one.receive(&mut |_| ()).unwrap();
            std::thread::sleep(Duration::from_micros(500));
            assert!(start.elapsed() < Duration::from_secs(20), "{:?}", one.counters());
        }
        assert_eq!(stranger.receive(&mut |_| ()).unwrap(), 0);
        let mut back =
            Auto::bind(address, udp::Options::default(), shm::Options::default()).unwrap();
        while back.receive(&mut |_| ()).unwrap() == 0 {
            send(&mut one, flow, 64, 1);
            one.flush().unwrap();
            assert!(start.elapsed() < Duration::from_secs(20), "{:?}", one.counters());
        }
        // The other way round: who was there first does not matter.
        let free = Udp::bind("127.0.0.1:0".parse().unwrap(), udp::Options::default()).unwrap();
        let address = free.local();
        drop(free);
        let mut stranger = Shm::bind(address, shm::Options::default()).unwrap();
        let mut three =
            Auto::bind(address, udp::Options::default(), shm::Options::default()).unwrap();
        let flow = one.open(three.local(), 0).unwrap();
        send(&mut one, flow, 64, 2);
        one.flush().unwrap();
        assert_eq!(receive(&mut three, 1).len(), 1);
        assert_eq!(stranger.receive(&mut |_| ()).unwrap(), 0);
    }

    #[test]
    fn a_link_alone_and_one_beside_udp_meet() {
        let (mut auto, any) = (bind(), "127.0.0.1:0".parse().unwrap());
        let mut alone = Shm::bind(any, shm::Options::default()).unwrap();
        let (there, back) =
            (auto.open(alone.local(), 0).unwrap(), alone.open(auto.local(), 0).unwrap());
        assert_eq!(auto.flow_path(there).kind, Kind::Shm);
        send(&mut auto, there, 64, 1);
        auto.flush().unwrap();
        assert_eq!(receive(&mut alone, 1).len(), 1);
        send(&mut alone, back, 64, 2);
        alone.flush().unwrap();
        assert_eq!(receive(&mut auto, 1).len(), 1);
        // A port that memory has is no longer free for UDP.
        Udp::bind(alone.local(), udp::Options::default()).err().unwrap();
        let freed = alone.local();
        drop(alone);
        Udp::bind(freed, udp::Options::default()).unwrap();
    }
}
