//! The family `warp` on the host: connections are met over TCP, watched, and let go. Bytes go without this thread.
//!
//! 1. Whoever connects speaks first. Until an accepted connection has said its hello it has no socket, no rings and no queue
//!    pair: it waits in the [`Nursery`], for a while.
//! 2. Everything that was made for a connection is its own, and goes with it: berth, queue pair, registrations.
//! 3. The TCP connection is the sign of life. It is closed when everything that was sent has landed, or reset.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::agent::Agent;
use super::fabric::Moored;
use super::layout::{address_bytes, inbox, record, state};
use super::socket::Sort;
use super::warp::{ENDED, Handshake, LONGEST_LINE};
use crate::error::{Error, Kind, Result};
use crate::mlx5::Status;

/// How long two ends may take to meet.
const MEETING: Duration = Duration::from_secs(10);
/// How many accepted connections may be silent at a time; the one that has been so for the longest goes first.
const MOST_SILENT: usize = 1024;
/// Marks descriptors of the nursery among events.
pub(super) const CRADLE: u64 = 1 << 40;

/// What a socket of the family has while it connects, and then.
#[derive(Default)]
pub(super) struct Warp {
    pub(super) moored: Option<Moored>,
    pub(super) handshake: Option<Handshake>,
    /// When the two must have met.
    pub(super) deadline: Option<Instant>,
    /// The listener that accepted it, until a kernel is told, and its peer's address.
    pub(super) parent: Option<(i32, Option<SocketAddr>)>,
    /// Its peer is gone, in good order.
    pub(super) is_left: bool,
    /// How many operations its kernels had posted when they closed it.
    pub(super) posted: u64,
    /// A listener's connections that are being met.
    pub(super) expected: u64,
}

/// An accepted connection that has not said its hello.
struct Cradle {
    number: u64,
    fd: OwnedFd,
    peer: Option<SocketAddr>,
    listener: i32,
    heard: Vec<u8>,
    deadline: Instant,
}

/// Accepted connections without a socket, the oldest first.
#[derive(Default)]
pub(super) struct Nursery {
    cradles: std::collections::VecDeque<Cradle>,
    next: u64,
}

impl Nursery {
    pub(super) fn is_empty(&self) -> bool {
        self.cradles.is_empty()
    }

    /// Those of a listener that has ended go with it.
    pub(super) fn forget(&mut self, listener: i32) {
        self.cradles.retain(|cradle| cradle.listener != listener);
    }
}

/// What came of reading.
enum Heard {
    Hello,
    NotYet,
    Over,
}

impl Cradle {
    fn hear(&mut self) -> Heard {
        let mut bytes = [0; LONGEST_LINE];
        loop {
            if self.heard.contains(&b'\n') || self.heard.len() > LONGEST_LINE {
                return Heard::Hello;
            }
            match rustix::net::recv(&self.fd, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Heard::Over,
                Ok((count, _)) => self.heard.extend_from_slice(&bytes[..count]),
                Err(Errno::AGAIN) => return Heard::NotYet,
                Err(Errno::INTR) => {}
                Err(_) => return Heard::Over,
            }
        }
    }
}

impl Agent {
    /// An accepted connection waits for its hello.
    pub(super) fn lay_down(&mut self, listener: u16, fd: OwnedFd, peer: Option<SocketAddr>) {
        let listener = self.sockets[usize::from(listener)].handle(listener);
        let number = self.nursery.next;
        if let Err(errno) = self.watch_descriptor(&fd, CRADLE | number) {
            tracing::warn!(%errno, "an accepted connection could not be watched, and was closed");
            return;
        }
        if self.nursery.cradles.len() == MOST_SILENT {
            self.nursery.cradles.pop_front();
        }
        let deadline = Instant::now() + MEETING;
        self.nursery.next = (number + 1) % CRADLE;
        let heard = Vec::new();
        self.nursery.cradles.push_back(Cradle { number, fd, peer, listener, heard, deadline });
    }

    /// One of the nursery may have spoken.
    pub(super) fn hear_cradle(&mut self, number: u64) -> Result<()> {
        let at = self.nursery.cradles.iter().position(|cradle| cradle.number == number);
        match at {
            Some(at) => self.try_cradle(at).map(|_| ()),
            None => Ok(()),
        }
    }

    /// Looks at one that waits; false if it stays.
    fn try_cradle(&mut self, at: usize) -> Result<bool> {
        let Some(cradle) = self.nursery.cradles.get_mut(at) else { return Ok(false) };
        let handle = cradle.listener;
        match cradle.hear() {
            Heard::NotYet => return Ok(false),
            Heard::Over => {
                self.nursery.cradles.remove(at);
                return Ok(true);
            }
            Heard::Hello => {}
        }
        let Ok(listener) = self.find(handle) else {
            self.nursery.cradles.remove(at);
            return Ok(true);
        };
        let socket = &self.sockets[usize::from(listener)];
        if socket.room() < (socket.warp.expected + 1) * record::LEN || self.vacant.is_empty() {
            // It is tried again before long.
            return Ok(false);
        }
        let Some(cradle) = self.nursery.cradles.remove(at) else { return Ok(false) };
        self.take_up(listener, cradle)?;
        Ok(true)
    }

    /// Looks after the nursery now and then: who waited for a place may have one, and who is silent for too long goes.
    pub(super) fn rock(&mut self, now: Instant) -> Result<()> {
        self.nursery.cradles.retain(|cradle| cradle.deadline > now);
        let mut at = 0;
        while at < self.nursery.cradles.len() {
            at += usize::from(!self.try_cradle(at)?);
        }
        Ok(())
    }

    /// Makes a socket for a connection that has said its hello.
    fn take_up(&mut self, listener: u16, cradle: Cradle) -> Result<()> {
        let Some(index) = self.take_place()? else { return Ok(()) };
        let parent = &mut self.sockets[usize::from(listener)];
        let (wishes, v6) = (parent.wishes, parent.v6);
        parent.warp.expected += 1;
        let socket = &mut self.sockets[usize::from(index)];
        (socket.wishes, socket.v6, socket.is_warp) = (wishes, v6, true);
        socket.fd = Some(cradle.fd);
        (socket.readable, socket.writable) = (true, true);
        socket.flags = state::CONNECTING;
        socket.warp.parent = Some((cradle.listener, cradle.peer));
        let ready = self.give_rings(index).and_then(|()| self.watch_anew(index));
        if let Err(errno) = ready {
            tracing::warn!(%errno, "an accepted connection got no rings, and was reset");
            return self.part(index, errno);
        }
        self.begin_meeting(index, &cradle.heard)
    }

    /// A TCP connection stands: says hello.
    pub(super) fn begin_meeting(&mut self, index: u16, heard: &[u8]) -> Result<()> {
        let handshake = self.moor(index).and_then(|hello| Handshake::new(&hello));
        let socket = &mut self.sockets[usize::from(index)];
        match handshake {
            Ok(handshake) => {
                socket.warp.handshake = Some(handshake);
                socket.warp.deadline = Some(Instant::now() + MEETING);
                self.tell_line(index)?;
                self.converse(index, heard)
            }
            Err(error) => {
                tracing::warn!(%error, "a connection got no queue pair, and was reset");
                self.part(index, Errno::NOBUFS)
            }
        }
    }

    /// Makes what a connection needs.
    fn moor(&mut self, index: u16) -> Result<super::warp::Hello> {
        let shores = self.shores(index)?;
        let socket = &self.sockets[usize::from(index)];
        let local = socket.fd.as_ref().and_then(|fd| rustix::net::getsockname(fd).ok());
        let local = local.and_then(|name| SocketAddr::try_from(name).ok());
        let missing = |why: &'static str| Error::new(Kind::OutOfMemory, "connect").why(why);
        let local = local.ok_or_else(|| missing("the connection has no address"))?;
        let berths = self.berths.as_mut();
        let berths = berths.ok_or_else(|| missing("no socket may be of the family `warp`"))?;
        let berth = berths.take().ok_or_else(|| {
            missing("all queue pairs are in use").fix("raise SockOptions::warp_sockets")
        })?;
        match Moored::new(&mut self.fabric, berths, berth, local, shores) {
            Ok(moored) => {
                let hello = moored.hello();
                self.sockets[usize::from(index)].warp.moored = Some(moored);
                Ok(hello)
            }
            Err(error) => {
                berths.give(berth);
                Err(error)
            }
        }
    }

    /// Lets go of what a connection needed.
    pub(super) fn unmoor(&mut self, index: u16) {
        let socket = &mut self.sockets[usize::from(index)];
        socket.warp.handshake = None;
        socket.warp.deadline = None;
        if let (Some(moored), Some(berths)) = (socket.warp.moored.take(), self.berths.as_mut()) {
            let berth = moored.berth;
            drop(moored);
            berths.give(berth);
        }
    }

    /// Does what there is to do for a stream of the family.
    pub(super) fn serve_warp(&mut self, index: u16) -> Result<bool> {
        let socket = &self.sockets[usize::from(index)];
        if socket.has(state::CONNECTING) {
            if socket.warp.handshake.is_none() {
                self.finish_connecting(index)?;
            } else {
                self.converse(index, &[])?;
            }
            return Ok(false);
        }
        if socket.has(state::CONNECTED) && socket.readable {
            self.listen_for_the_end(index)?;
        }
        self.finish_warp(index)?;
        Ok(false)
    }

    /// Goes on with a handshake, by what was heard already and by what comes now.
    fn converse(&mut self, index: u16, heard: &[u8]) -> Result<()> {
        let outcome = self.try_converse(index, heard);
        let socket = &self.sockets[usize::from(index)];
        let is_late = socket.warp.deadline.is_some_and(|deadline| Instant::now() > deadline);
        match outcome {
            Ok(true) => self.stand(index),
            Ok(false) if is_late => self.part(index, Errno::TIMEDOUT),
            Ok(false) => {
                self.look_again_at(index);
                Ok(())
            }
            Err(errno) => self.part(index, errno),
        }
    }

    /// True when the two have met.
    fn try_converse(&mut self, index: u16, heard: &[u8]) -> std::result::Result<bool, Errno> {
        let mut bytes = [0; LONGEST_LINE];
        let mut count = heard.len().min(LONGEST_LINE);
        bytes[..count].copy_from_slice(&heard[..count]);
        loop {
            let socket = &mut self.sockets[usize::from(index)];
            let (Some(handshake), Some(fd)) = (&mut socket.warp.handshake, &socket.fd) else {
                return Ok(false);
            };
            say(handshake, fd)?;
            if let Err(error) = handshake.take(&bytes[..count]) {
                // It is told why, if it listens.
                let _ = say(handshake, fd);
                return Err(refusal(&error));
            }
            if let Some(theirs) = handshake.peer().copied()
                && !handshake.has_met()
            {
                self.meet(index, &theirs)?;
                count = 0;
                continue;
            }
            if handshake.is_done() {
                return Ok(true);
            }
            match rustix::net::recv(fd, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Errno::CONNRESET),
                Ok((got, _)) => count = got,
                Err(Errno::INTR) => count = 0,
                Err(Errno::AGAIN) => {
                    socket.readable = false;
                    return Ok(false);
                }
                Err(errno) => return Err(errno),
            }
        }
    }

    /// The peer has said hello: connects the queue pair.
    fn meet(&mut self, index: u16, theirs: &super::warp::Hello) -> std::result::Result<(), Errno> {
        let socket = &mut self.sockets[usize::from(index)];
        // A piece of our ring must not wrap in the peer's where it does not in ours.
        socket.send_window = socket.send_ring.1.min(theirs.ring_size);
        socket.peer_window = theirs.window.unwrap_or(u64::MAX);
        let (Some(moored), Some(berths)) = (&socket.warp.moored, &self.berths) else {
            return Err(Errno::NOBUFS);
        };
        let met = moored.meet(berths, theirs).and_then(|()| self.tell_line(index));
        let socket = &mut self.sockets[usize::from(index)];
        let Some(handshake) = &mut socket.warp.handshake else { return Err(Errno::NOBUFS) };
        match met {
            Ok(()) => {
                handshake.met();
                Ok(())
            }
            Err(error) => {
                tracing::warn!(%error, "a queue pair could not be connected");
                handshake.refuse(&error);
                if let Some(fd) = &socket.fd {
                    let _ = say(handshake, fd);
                }
                Err(Errno::PROTO)
            }
        }
    }

    /// The two have met: kernels are told.
    fn stand(&mut self, index: u16) -> Result<()> {
        let socket = &mut self.sockets[usize::from(index)];
        (socket.warp.handshake, socket.warp.deadline) = (None, None);
        socket.flags = socket.flags & !state::CONNECTING | state::CONNECTED;
        self.counters.warp.open(index, socket.generation);
        self.tell_state(index)?;
        let parent = self.sockets[usize::from(index)].warp.parent.take();
        let Some((listener, peer)) = parent else {
            self.counters.connected.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        };
        let Ok(listener) = self.find(listener) else {
            // Nobody will take it.
            self.sockets[usize::from(index)].wishes.abort = true;
            return self.vacate(index);
        };
        self.sockets[usize::from(listener)].warp.expected -= 1;
        self.announce(listener, index, peer)
    }

    /// Hands a connection to whoever accepts next.
    pub(super) fn announce(
        &mut self,
        listener: u16,
        index: u16,
        peer: Option<SocketAddr>,
    ) -> Result<()> {
        let mut entry = [0; record::LEN as usize];
        let handle = self.sockets[usize::from(index)].handle(index);
        entry[..4].copy_from_slice(&handle.to_le_bytes());
        entry[record::ADDRESS as usize..].copy_from_slice(&address_bytes(peer));
        let socket = &mut self.sockets[usize::from(listener)];
        self.ground.put(socket.receive_ring, socket.received, &entry)?;
        socket.received += record::LEN;
        socket.waiting.push_back(index);
        let received = socket.received;
        self.ground.tell(listener, inbox::RECEIVED, received)?;
        self.counters.accepted.fetch_add(1, Ordering::Relaxed);
        self.queue(index);
        Ok(())
    }

    /// Something came over TCP, where nobody speaks any more: the end, in one way or another.
    fn listen_for_the_end(&mut self, index: u16) -> Result<()> {
        let socket = &mut self.sockets[usize::from(index)];
        let Some(fd) = &socket.fd else { return Ok(()) };
        match rustix::net::recv(fd, &mut [0; 1], RecvFlags::DONTWAIT | RecvFlags::PEEK) {
            Ok((0, _)) => {
                socket.readable = false;
                if self.ground.received(index)? & ENDED == 0 {
                    return self.part(index, Errno::CONNRESET);
                }
                let socket = &mut self.sockets[usize::from(index)];
                socket.warp.is_left = true;
                socket.flags |= state::RECEIVE_END | state::SEND_END;
                self.tell_state(index)
            }
            Ok(_) => self.part(index, Errno::PROTO),
            Err(Errno::AGAIN | Errno::INTR) => {
                socket.readable = false;
                Ok(())
            }
            Err(errno) => self.part(index, errno),
        }
    }

    /// Ends a connection that cannot go on, with that errno here and a reset there. One that no kernel knows just goes.
    pub(super) fn part(&mut self, index: u16, errno: Errno) -> Result<()> {
        let socket = &mut self.sockets[usize::from(index)];
        // While the two meet, a peer may still read why not.
        let stands = socket.has(state::CONNECTED);
        if let Some((listener, _)) = socket.warp.parent.take() {
            socket.wishes.abort = stands;
            if let Ok(listener) = self.find(listener) {
                self.sockets[usize::from(listener)].warp.expected -= 1;
            }
            return self.vacate(index);
        }
        socket.fail(Some(errno), Some(errno));
        let before = std::mem::replace(&mut socket.wishes.abort, stands);
        self.drop_descriptor(index);
        self.sockets[usize::from(index)].wishes.abort = before;
        self.tell_state(index)?;
        self.unmoor(index);
        if self.sockets[usize::from(index)].closing.is_some() {
            return self.vacate(index);
        }
        Ok(())
    }

    /// A kernel gives its connection up.
    pub(super) fn give_up(&mut self, index: u16, errno: u64) -> Result<Errno> {
        let errno = match i32::try_from(errno).map(Errno::from_raw_os_error) {
            Ok(errno @ (Errno::PROTO | Errno::TIMEDOUT)) => errno,
            _ => Errno::CONNRESET,
        };
        let socket = &mut self.sockets[usize::from(index)];
        if socket.is_warp && socket.has(state::CONNECTED) && !socket.warp.is_left {
            // If its queue pair has failed, the reason is known here.
            self.check_queue_pair(index)?;
            let socket = &self.sockets[usize::from(index)];
            if socket.errno() == 0 && !socket.warp.is_left {
                self.part(index, errno)?;
            }
        }
        Ok(errno)
    }

    /// Lets a closed socket go when everything has landed.
    pub(super) fn finish_warp(&mut self, index: u16) -> Result<()> {
        let socket = &self.sockets[usize::from(index)];
        if !(socket.open && socket.is_warp) || socket.closing.is_none() {
            return Ok(());
        }
        let Warp { moored, is_left, posted, .. } = &socket.warp;
        let is_done = *is_left
            || socket.wishes.abort
            || moored.as_ref().is_none_or(|moored| moored.has_ended(*posted));
        if is_done { self.vacate(index) } else { Ok(()) }
    }

    /// Whether queue pairs still work, of all connections.
    pub(super) fn check_queue_pairs(&mut self) -> Result<()> {
        for index in 0..self.used_up_to {
            self.check_queue_pair(index)?;
        }
        Ok(())
    }

    fn check_queue_pair(&mut self, index: u16) -> Result<()> {
        let socket = &self.sockets[usize::from(index)];
        let stands = socket.open && socket.sort == Sort::Stream && socket.has(state::CONNECTED);
        let Some(moored) = socket.warp.moored.as_ref().filter(|_| stands) else { return Ok(()) };
        let Some(failure) = moored.failure() else { return Ok(()) };
        // A peer that has left in good order has taken its queue pair along.
        self.listen_for_the_end(index)?;
        let socket = &self.sockets[usize::from(index)];
        if !socket.open || socket.warp.is_left || socket.errno() != 0 {
            return Ok(());
        }
        tracing::debug!(index, ?failure, "a queue pair has failed");
        self.part(
            index,
            match failure {
                Some(Status::RetryExceeded) => Errno::TIMEDOUT,
                _ => Errno::CONNRESET,
            },
        )
    }
}

/// Sends what waits to be sent, as far as it goes.
fn say(handshake: &mut Handshake, fd: &OwnedFd) -> std::result::Result<(), Errno> {
    while !handshake.to_send().is_empty() {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(fd, handshake.to_send(), flags) {
            Ok(count) => handshake.sent(count),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(()),
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// What kernels are told of a peer that cannot be met.
fn refusal(error: &Error) -> Errno {
    // Anybody may knock.
    tracing::info!(%error, "a peer could not be met");
    match error.kind() {
        Kind::PeerLost => Errno::CONNREFUSED,
        _ => Errno::PROTO,
    }
}
