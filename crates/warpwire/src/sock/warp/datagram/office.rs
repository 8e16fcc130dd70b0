//! A datagram socket's whole business, for kernels' agent and for CPU programs: its name, its queue pairs, who is asked for,
//! what waits. It never blocks; whoever has it calls [`pump`](Office::pump) when its descriptor is readable, and when
//! something is due.
//!
//! Its rules:
//! 1. The name is that of a UDP socket, over which nothing goes but questions and answers.
//! 2. Each name that is asked for is asked by a UDP socket of its own, connected to it: so the operating system tells which of
//!    our addresses reaches it, lets nobody else answer, and says if nobody is there.
//! 3. A datagram for a name that is being asked for is parked, and others go on. What does not fit there waits with its sender for
//!    as long as that one bears (kernels, whose other datagrams wait behind it: a moment); then it is lost, and counted.
//! 4. Datagrams to one name keep their order: none goes while another is parked for the same.
//! 5. A queue pair is on the device that has the socket's address. A socket without one (bound to any address) has one for each
//!    address of this machine by which peers reach it, up to [`MOST_DOCKS`].

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::dock::Dock;
use super::resolver::{Due, Found, Resolver, is_same};
use super::words::{Card, LONGEST_DATAGRAM, WORDS_LEN, Words};
use crate::error::{Error, Kind, Result};
use crate::verbs::{AddressHandle, Context};

/// How many addresses of this machine a socket may be reached by.
const MOST_DOCKS: usize = 4;
/// How many datagrams may wait for names in all, and for one of them.
const MOST_PARKED: usize = 256;
const MOST_PARKED_FOR_ONE: usize = 64;
/// How many failures are remembered that nobody was told of.
const MOST_FAILURES: usize = 16;
/// Events taken at once, how often, and words heard for one of them before it is somebody else's turn.
const EVENTS: usize = 16;
const ROUNDS: usize = 4;
const WORDS_AT_ONCE: usize = 64;
/// What an event is about; the rest of its number says which.
const NAME: u64 = 0;
const KNOCK: u64 = 1 << 32;
const DOCK: u64 = 2 << 32;

/// What comes of a call: an errno, else.
type Outcome<T> = std::result::Result<T, Errno>;

/// Who has devices.
pub(crate) trait Devices {
    /// The device for sockets at that address of ours.
    fn device(&mut self, local: SocketAddr) -> Result<Context>;
}

/// What an office has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) sent: u64,
    pub(crate) received: u64,
    pub(crate) dropped: u64,
    pub(crate) strange: u64,
}

/// How a peer is reached: from which queue pair of ours, and how its device knows the peer.
#[derive(Clone, Debug)]
struct Reach {
    dock: usize,
    handle: AddressHandle,
}

/// Somebody who is asked for.
struct Knock {
    to: SocketAddr,
    number: u32,
    udp: UdpSocket,
}

/// A datagram that waits until its name is known.
struct Parked {
    to: SocketAddr,
    bytes: Box<[u8]>,
}

pub(crate) struct Office {
    /// None when it is closed.
    name: Option<UdpSocket>,
    is_v6: bool,
    /// Our name; port 0 before there is one.
    local: SocketAddr,
    peer: Option<SocketAddr>,
    poll: OwnedFd,
    /// How long a sender may be kept waiting because too many wait for a name.
    patience: Duration,
    docks: Vec<Option<Dock>>,
    /// The queue pair that is looked at first.
    turn: usize,
    names: Resolver<Reach>,
    knocks: Vec<Knock>,
    knocked: u32,
    parked: VecDeque<Parked>,
    failures: VecDeque<Errno>,
    tally: Tally,
    /// How many of those that were dropped are known elsewhere.
    told: u64,
    random: (RandomState, u64),
}

impl Office {
    /// Behind that UDP socket, which may have a name already.
    pub(crate) fn new(
        name: UdpSocket,
        patience: Duration,
        devices: &mut dyn Devices,
    ) -> Outcome<Self> {
        name.set_nonblocking(true).map_err(|why| os_errno(&why))?;
        let local = name.local_addr().map_err(|why| os_errno(&why))?;
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&poll, &name, EventData::new_u64(NAME), EventFlags::IN)?;
        let mut office = Self {
            name: Some(name),
            is_v6: local.is_ipv6(),
            local,
            peer: None,
            poll,
            patience,
            docks: Vec::new(),
            turn: 0,
            names: Resolver::new(),
            knocks: Vec::new(),
            knocked: 0,
            parked: VecDeque::new(),
            failures: VecDeque::new(),
            tally: Tally::default(),
            told: 0,
            random: (RandomState::new(), 0),
        };
        office.settle(devices)?;
        Ok(office)
    }

    fn name(&self) -> Outcome<&UdpSocket> {
        self.name.as_ref().ok_or(Errno::BADF)
    }

    /// Gives up its name and all else, whoever may still look at it.
    pub(crate) fn close(&mut self) {
        self.count_missed();
        self.name = None;
        self.docks.clear();
        self.knocks.clear();
        self.parked.clear();
        self.names = Resolver::new();
    }

    /// Gives it a name; port 0 is any that is free.
    pub(crate) fn bind(&mut self, at: SocketAddr, devices: &mut dyn Devices) -> Outcome<()> {
        rustix::net::bind(self.name()?, &at)?;
        self.settle(devices)
    }

    /// Learns the name; one with an address has its queue pair at once, so that who binds hears of what is wrong.
    fn settle(&mut self, devices: &mut dyn Devices) -> Outcome<()> {
        self.local = self.name()?.local_addr().map_err(|why| os_errno(&why))?;
        if self.local.port() != 0 && !self.local.ip().is_unspecified() {
            self.dock_at(self.local, devices)?;
        }
        Ok(())
    }

    /// Names the peer: datagrams of others are not received any more.
    pub(crate) fn connect(&mut self, to: SocketAddr, devices: &mut dyn Devices) -> Outcome<()> {
        self.check(to)?;
        let (udp, to) = self.reach(to)?;
        if self.local.port() == 0 {
            let mut local = udp.local_addr().map_err(|why| os_errno(&why))?;
            local.set_port(0);
            self.bind(local, devices)?;
        }
        self.peer = Some(to);
        Ok(())
    }

    pub(crate) fn local(&self) -> SocketAddr {
        self.local
    }

    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// The longest datagram that can be sent; some peers take less.
    pub(crate) fn longest(&self) -> usize {
        let docks = self.docks.iter().flatten().map(Dock::longest);
        docks.min().unwrap_or(LONGEST_DATAGRAM)
    }

    /// Whether one may send there.
    fn check(&self, to: SocketAddr) -> Outcome<()> {
        if to.is_ipv6() != self.is_v6 {
            return Err(Errno::AFNOSUPPORT);
        }
        if to.port() == 0 {
            return Err(Errno::INVAL);
        }
        let is_many = match to.ip().to_canonical() {
            IpAddr::V4(ip) => ip.is_multicast() || ip.is_broadcast(),
            IpAddr::V6(ip) => ip.is_multicast(),
        };
        if is_many { Err(Errno::OPNOTSUPP) } else { Ok(()) }
    }

    /// A UDP socket that is connected to that name, and the name as it is on the network.
    fn reach(&self, to: SocketAddr) -> Outcome<(UdpSocket, SocketAddr)> {
        let family = if self.is_v6 { AddressFamily::INET6 } else { AddressFamily::INET };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let udp = rustix::net::socket_with(family, SocketType::DGRAM, flags, None)?;
        if !self.local.ip().is_unspecified() {
            let mut local = self.local;
            local.set_port(0);
            rustix::net::bind(&udp, &local)?;
        }
        rustix::net::connect(&udp, &to)?;
        let udp = UdpSocket::from(udp);
        let to = udp.peer_addr().map_err(|why| os_errno(&why))?;
        Ok((udp, to))
    }

    /// The queue pair at that address of ours.
    fn dock_at(&mut self, local: SocketAddr, devices: &mut dyn Devices) -> Outcome<usize> {
        if let Some(at) = self.dock_of(local.ip()) {
            return Ok(at);
        }
        let at = self.docks.iter().position(Option::is_none).unwrap_or(self.docks.len());
        if at >= MOST_DOCKS {
            return Err(Errno::NOBUFS);
        }
        let qkey = self.any_number() as u32 >> 1;
        let dock = devices.device(local).and_then(|device| Dock::new(&device, local.ip(), qkey));
        let dock = dock.and_then(|dock| dock.arm().map(|()| dock)).map_err(|error| {
            tracing::warn!(%error, %local, "datagrams have no queue pair");
            errno(&error)
        })?;
        epoll::add(&self.poll, &dock, EventData::new_u64(DOCK | at as u64), EventFlags::IN)?;
        if at == self.docks.len() {
            self.docks.push(None);
        }
        self.docks[at] = Some(dock);
        Ok(at)
    }

    fn dock_of(&self, local: IpAddr) -> Option<usize> {
        let is_it = |dock: &Option<Dock>| {
            dock.as_ref().is_some_and(|dock| dock.address() == local.to_canonical())
        };
        self.docks.iter().position(is_it)
    }

    fn any_number(&mut self) -> u64 {
        self.random.1 += 1;
        self.random.0.hash_one(self.random.1)
    }

    /// Sends a datagram, to the peer if nobody is named; false if there is no room for it now.
    pub(crate) fn send(
        &mut self,
        now: Instant,
        to: Option<SocketAddr>,
        bytes: &[u8],
        devices: &mut dyn Devices,
    ) -> Outcome<bool> {
        let to = to.or(self.peer).ok_or(Errno::DESTADDRREQ)?;
        self.check(to)?;
        if bytes.len() > self.longest() {
            return Err(Errno::MSGSIZE);
        }
        if self.local.port() == 0 {
            let any: IpAddr = if self.is_v6 { [0_u16; 8].into() } else { [0_u8; 4].into() };
            self.bind((any, 0).into(), devices)?;
        }
        if self.parked.iter().any(|parked| parked.to == to) {
            return Ok(self.park(now, to, bytes));
        }
        match self.names.find(now, to) {
            Found::Known { card, reach, is_stale } => {
                if is_stale && self.names.may_ask() {
                    // What is known is good for a while.
                    let _ = self.ask(now, to);
                }
                self.post(&card, &reach, bytes)
            }
            Found::Asked => Ok(self.park(now, to, bytes)),
            Found::Unknown if !self.names.may_ask() => Ok(false),
            Found::Unknown => {
                self.ask(now, to)?;
                Ok(self.park(now, to, bytes))
            }
        }
    }

    fn post(&mut self, card: &Card, reach: &Reach, bytes: &[u8]) -> Outcome<bool> {
        if bytes.len() > card.longest as usize {
            return Err(Errno::MSGSIZE);
        }
        let port = self.local.port();
        let dock = self.docks.get_mut(reach.dock).and_then(Option::as_mut);
        let dock = dock.ok_or(Errno::NETDOWN)?;
        if !dock.has_room() {
            dock.drain();
        }
        let sent = dock.send((&reach.handle, card), port, bytes).map_err(|error| {
            tracing::warn!(%error, "a datagram could not be posted");
            Errno::IO
        })?;
        self.tally.sent += u64::from(sent);
        Ok(sent)
    }

    /// Keeps a datagram until its name is known; false if its sender must keep it.
    fn park(&mut self, now: Instant, to: SocketAddr, bytes: &[u8]) -> bool {
        let for_one = self.parked.iter().filter(|parked| parked.to == to).count();
        if for_one < MOST_PARKED_FOR_ONE && self.parked.len() < MOST_PARKED {
            self.parked.push_back(Parked { to, bytes: bytes.into() });
            return true;
        }
        let is_lost = self.names.asked_for(now, to).is_some_and(|age| age >= self.patience);
        self.tally.dropped += u64::from(is_lost);
        is_lost
    }

    /// Begins to ask for a name.
    fn ask(&mut self, now: Instant, to: SocketAddr) -> Outcome<()> {
        let (udp, asked) = self.reach(to)?;
        let nonce = self.any_number();
        let number = self.knocked;
        epoll::add(
            &self.poll,
            &udp,
            EventData::new_u64(KNOCK | u64::from(number)),
            EventFlags::IN,
        )?;
        if self.names.ask(now, to, asked, nonce) {
            self.knocked = number.wrapping_add(1);
            self.knocks.push(Knock { to, number, udp });
            self.do_what_is_due(now);
        }
        Ok(())
    }

    fn do_what_is_due(&mut self, now: Instant) {
        while let Some(due) = self.names.due(now) {
            match due {
                Due::Ask { to, words } => {
                    let knock = self.knocks.iter().find(|knock| knock.to == to);
                    // It is asked again before long; a refusal is heard where answers are.
                    let _ = knock.map(|knock| knock.udp.send(&words.bytes()));
                }
                Due::GivenUp { to } => self.give_up(to, Errno::HOSTUNREACH),
            }
        }
    }

    /// Nobody has that name: what waits for it is lost, and whoever calls next is told.
    fn give_up(&mut self, to: SocketAddr, errno: Errno) {
        self.names.forget(to);
        self.knocks.retain(|knock| knock.to != to);
        let before = self.parked.len();
        self.parked.retain(|parked| parked.to != to);
        self.tally.dropped += (before - self.parked.len()) as u64;
        self.fail(errno);
    }

    fn fail(&mut self, errno: Errno) {
        if self.failures.len() < MOST_FAILURES {
            self.failures.push_back(errno);
        }
    }

    /// A failure that nobody was told of yet.
    pub(crate) fn take_failure(&mut self) -> Option<Errno> {
        self.failures.pop_front()
    }

    /// Does what there is to do; true if more may be left.
    pub(crate) fn pump(&mut self, now: Instant, devices: &mut dyn Devices) -> bool {
        let mut more = true;
        for _ in 0..ROUNDS {
            let mut room = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
            let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
            let mut numbers = [NAME; EVENTS];
            let count = match epoll::wait(&self.poll, &mut room[..], Some(&zero)) {
                Ok((events, _)) => {
                    numbers.iter_mut().zip(&*events).for_each(|(to, from)| *to = from.data.u64());
                    events.len()
                }
                // It is tried again.
                Err(_) => 0,
            };
            for number in &numbers[..count] {
                match number & !u64::from(u32::MAX) {
                    KNOCK => self.hear_knock(now, *number as u32, devices),
                    DOCK => self.hear_dock(*number as u32 as usize),
                    _ => self.hear_name(devices),
                }
            }
            if count == 0 {
                more = false;
                break;
            }
        }
        self.do_what_is_due(now);
        self.mend();
        self.let_go(now);
        more
    }

    fn hear_dock(&mut self, at: usize) {
        if let Some(dock) = self.docks.get_mut(at).and_then(Option::as_mut) {
            dock.take_event();
            dock.drain();
        }
    }

    /// Lets go of queue pairs that have failed. Whoever asks for us, or is sent to, finds another.
    fn mend(&mut self) {
        let is_broken = |dock: &Option<Dock>| dock.as_ref().is_some_and(Dock::is_broken);
        while let Some(at) = self.docks.iter().position(is_broken) {
            self.count_missed();
            self.docks[at] = None;
            self.names.forget_known();
        }
    }

    /// Answers those who ask for us.
    fn hear_name(&mut self, devices: &mut dyn Devices) {
        // One byte more than words have: what is longer is none.
        let mut bytes = [0; WORDS_LEN + 1];
        for _ in 0..WORDS_AT_ONCE {
            let Ok(heard) = self.name().map(|name| name.recv_from(&mut bytes)) else { return };
            let Ok((count, from)) = heard else { return };
            let Ok(Words::Question { nonce, asked }) = Words::read(&bytes[..count]) else {
                self.tally.strange += 1;
                continue;
            };
            match self.dock_for(asked, from, devices) {
                Some(card) => {
                    let words = Words::Answer { nonce, asked, card };
                    // Who hears nothing asks again.
                    let _ = self.name().map(|name| name.send_to(&words.bytes(), from));
                }
                None => self.tally.strange += 1,
            }
        }
    }

    /// How we are reached at the address that was asked, if it is ours.
    fn dock_for(
        &mut self,
        asked: SocketAddr,
        from: SocketAddr,
        devices: &mut dyn Devices,
    ) -> Option<Card> {
        if !self.local.ip().is_unspecified() {
            let at = is_same(self.local, asked).then(|| self.dock_at(self.local, devices));
            return at?.ok().and_then(|at| self.docks[at].as_ref()).map(Dock::card);
        }
        if asked.port() != self.local.port() {
            return None;
        }
        let at = match self.dock_of(asked.ip()) {
            Some(at) => at,
            // A device is opened only for the address by which we reach who asks.
            None => {
                let local = self.reach(from).ok()?.0.local_addr().ok()?;
                let is_ours = local.ip().to_canonical() == asked.ip().to_canonical();
                is_ours.then(|| self.dock_at(local, devices).ok())??
            }
        };
        self.docks[at].as_ref().map(Dock::card)
    }

    /// Somebody who was asked for may have answered.
    fn hear_knock(&mut self, now: Instant, number: u32, devices: &mut dyn Devices) {
        let mut bytes = [0; WORDS_LEN + 1];
        for _ in 0..WORDS_AT_ONCE {
            let Some(knock) = self.knocks.iter().find(|knock| knock.number == number) else {
                return;
            };
            let (to, local) = (knock.to, knock.udp.local_addr());
            let heard = match knock.udp.recv(&mut bytes) {
                Ok(count) => Words::read(&bytes[..count]),
                Err(why) if why.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(why) if why.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(why) => return self.give_up(to, os_errno(&why)),
            };
            let Ok(Words::Answer { nonce, asked, card }) = heard else {
                self.tally.strange += 1;
                continue;
            };
            if self.names.answered(nonce, asked) != Some(to) {
                self.tally.strange += 1;
                continue;
            }
            self.knocks.retain(|knock| knock.number != number);
            if self.names.confirm(now, to, &card) {
                return;
            }
            let learnt = local
                .map_err(|why| os_errno(&why))
                .and_then(|local| self.learn(now, to, asked, card, local, devices));
            return match learnt {
                Ok(()) => {}
                Err(errno) => self.give_up(to, errno),
            };
        }
    }

    fn learn(
        &mut self,
        now: Instant,
        to: SocketAddr,
        asked: SocketAddr,
        card: Card,
        local: SocketAddr,
        devices: &mut dyn Devices,
    ) -> Outcome<()> {
        let at = self.dock_at(local, devices)?;
        let dock = self.docks[at].as_ref().ok_or(Errno::NETDOWN)?;
        let mut device = SocketAddr::new(asked.ip().to_canonical(), card.port);
        if let (SocketAddr::V6(device), SocketAddr::V6(to)) = (&mut device, to) {
            device.set_scope_id(to.scope_id());
        }
        let handle = dock.handle(device).map_err(|error| {
            tracing::warn!(%error, %to, "a peer of datagrams cannot be reached");
            Errno::HOSTUNREACH
        })?;
        self.names.learn(now, to, card, Reach { dock: at, handle });
        Ok(())
    }

    /// Sends what was parked, as far as its names are known.
    fn let_go(&mut self, now: Instant) {
        let mut at = 0;
        while let Some(Parked { to, .. }) = self.parked.get(at) {
            let to = *to;
            let is_behind = self.parked.iter().take(at).any(|before| before.to == to);
            let found = if is_behind { Found::Asked } else { self.names.find(now, to) };
            let outcome = match found {
                Found::Known { card, reach, .. } => {
                    let bytes = std::mem::take(&mut self.parked[at].bytes);
                    let outcome = self.post(&card, &reach, &bytes);
                    self.parked[at].bytes = bytes;
                    outcome
                }
                Found::Asked => Ok(false),
                // What was known has grown too old, or its queue pair has failed.
                Found::Unknown if self.names.may_ask() => self.ask(now, to).map(|()| false),
                Found::Unknown => Ok(false),
            };
            match outcome {
                Ok(false) => at += 1,
                Ok(true) => drop(self.parked.remove(at)),
                Err(errno) => {
                    self.parked.remove(at);
                    self.tally.dropped += 1;
                    self.fail(errno);
                }
            }
        }
    }

    /// The oldest datagram of the next queue pair that has one: which, who sent it, and how long it is.
    fn first(&mut self) -> Option<(usize, SocketAddr, usize)> {
        let count = self.docks.len();
        for turn in 0..count {
            let at = (self.turn + turn) % count;
            while let Some(first) = self.docks[at].as_ref().and_then(Dock::first) {
                if self.peer.is_none_or(|peer| is_same(peer, first.from)) {
                    return Some((at, first.from, first.len));
                }
                self.tally.strange += 1;
                self.take_from(at, &mut []);
            }
        }
        None
    }

    fn take_from(&mut self, at: usize, into: &mut [u8]) {
        if let Some(dock) = self.docks[at].as_mut()
            && let Err(error) = dock.take_first(into)
        {
            tracing::error!(%error, "a datagram could not be read");
        }
    }

    /// Looks at what has come: the length of the next datagram.
    pub(crate) fn next_len(&mut self) -> Option<usize> {
        if let Some((_, _, len)) = self.first() {
            return Some(len);
        }
        self.docks.iter_mut().flatten().for_each(Dock::drain);
        self.first().map(|(_, _, len)| len)
    }

    /// Takes the next datagram, as far as it fits: its whole length, and who sent it.
    pub(crate) fn take_next(&mut self, into: &mut [u8]) -> Option<(usize, SocketAddr)> {
        self.next_len()?;
        let (at, from, len) = self.first()?;
        self.take_from(at, into);
        self.turn = at + 1;
        self.tally.received += 1;
        Some((len, self.as_seen(from)))
    }

    /// Throws the next datagram away: it fits nowhere.
    pub(crate) fn drop_next(&mut self) {
        if let Some((at, _, _)) = self.first() {
            self.take_from(at, &mut []);
            self.tally.dropped += 1;
        }
    }

    /// An address as a socket of this family has it.
    fn as_seen(&self, from: SocketAddr) -> SocketAddr {
        match from {
            SocketAddr::V4(v4) if self.is_v6 => (v4.ip().to_ipv6_mapped(), v4.port()).into(),
            other => other,
        }
    }

    /// Asks for an event when something comes or goes; at once if something has.
    pub(crate) fn arm(&mut self) {
        for dock in self.docks.iter().flatten() {
            // One that cannot be asked is found to have failed.
            let _ = dock.arm();
        }
    }

    /// When something is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.names.next_due()
    }

    /// Whether one more datagram would be taken.
    pub(crate) fn has_room(&self) -> bool {
        let is_parking = self.parked.len() < MOST_PARKED_FOR_ONE;
        is_parking && self.names.may_ask() && self.docks.iter().flatten().all(Dock::has_room)
    }

    /// Whether a queue pair has failed, of which pumping lets go.
    pub(crate) fn is_broken(&self) -> bool {
        self.docks.iter().flatten().any(Dock::is_broken)
    }

    /// Whether somebody should be told of something.
    pub(crate) fn has_failed(&self) -> bool {
        !self.failures.is_empty()
    }

    /// Whether everything that was sent is gone, or lost.
    pub(crate) fn is_idle(&mut self) -> bool {
        self.docks.iter_mut().flatten().for_each(Dock::drain);
        self.parked.is_empty() && self.docks.iter().flatten().all(Dock::is_idle)
    }

    /// Whether datagrams wait for names, or for room.
    pub(crate) fn has_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    fn count_missed(&mut self) {
        for dock in self.docks.iter_mut().flatten() {
            self.tally.dropped += dock.take_missed();
            self.tally.strange += std::mem::take(&mut dock.strange);
        }
    }

    /// How many were dropped since this was last asked; those for which there was no receive only if they are to be counted,
    /// which takes a while.
    pub(crate) fn take_dropped(&mut self, counts_missed: bool) -> u64 {
        if counts_missed {
            self.count_missed();
        }
        let before = std::mem::replace(&mut self.told, self.tally.dropped);
        self.tally.dropped - before
    }

    /// What it has counted.
    pub(crate) fn tally(&mut self) -> Tally {
        self.count_missed();
        self.tally
    }
}

impl AsFd for Office {
    /// Readable when there is something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }
}

impl std::fmt::Debug for Office {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "datagrams at {}", self.local)
    }
}

fn os_errno(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

/// What a program is told of a device that cannot be had.
fn errno(error: &Error) -> Errno {
    match error.kind() {
        Kind::Os(number) => Errno::from_raw_os_error(*number),
        Kind::InvalidArgument => Errno::ADDRNOTAVAIL,
        Kind::PermissionDenied => Errno::ACCESS,
        Kind::OutOfMemory => Errno::NOBUFS,
        _ => Errno::NETDOWN,
    }
}
