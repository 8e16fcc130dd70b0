//! The thread that serves the kernels of one GPU: it takes their requests, watches their outboxes, and moves bytes between
//! rings and the operating system's sockets.
//!
//! Its rules:
//! 1. It never waits for a kernel or for a peer. What cannot go on is left, and taken up when its cause changes.
//! 2. What a kernel says is checked: a wrong counter resets that socket, a wrong request gets an errno.
//! 3. A socket is served a piece at a time, and goes to the end of the list if more is to be done.
//! 4. A place is used again only when its kernel has closed it and nothing of it is left to send.

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use super::SockOptions;
use super::arena::{self, Arena};
use super::berths::Berths;
use super::fabric::{Fabric, Shores};
use super::ground::Ground;
use super::layout::{inbox, parts, state};
use super::ledger::Ledger;
use super::meeting::{CRADLE, Nursery};
use super::socket::{Ring, Socket};
use crate::error::{Error, Result};
use crate::verbs::Context;

/// Bytes moved for a socket before it is another's turn. A datagram fits.
pub(super) const PIECE: usize = 128 << 10;
/// Events taken from the operating system at once.
const EVENTS: usize = 256;
/// How often it says that it lives.
const BEAT_INTERVAL: Duration = Duration::from_millis(20);
/// The shortest and the longest sleep while there are sockets; in between, a part of the time for which nothing happened.
const SHORTEST_NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_millis(1);
/// The sleep while there are none.
const REST: Duration = Duration::from_millis(4);
const NAP_PART: u32 = 16;
/// How often it looks at outboxes and requests between two looks at the operating system.
const LOOKS: u32 = 4;
/// How long a closed socket may take to send what it still has without getting rid of a single byte.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(60);
/// The event that only wakes.
const WAKE: u64 = u64::MAX;
/// How often those are looked at who wait for something that nobody announces.
const RETRY: Duration = Duration::from_millis(10);
/// How often queue pairs are asked whether they still work.
const CHECK: Duration = Duration::from_millis(100);

/// What the agent has done, for whoever asks.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) open: AtomicU64,
    pub(super) requests: AtomicU64,
    pub(super) accepted: AtomicU64,
    pub(super) connected: AtomicU64,
    pub(super) received: AtomicU64,
    pub(super) sent: AtomicU64,
    pub(super) dropped: AtomicU64,
    pub(super) misused: AtomicU64,
    /// Bytes of the family `warp`.
    pub(super) warp: Ledger,
}

/// How the agent is told to end.
#[derive(Debug, Default)]
pub(super) struct Ending {
    pub(super) stop: AtomicBool,
    /// As if the thread had died: it says nothing to anybody.
    pub(super) vanish: AtomicBool,
}

pub(super) struct Agent {
    pub(super) ground: Arc<Ground>,
    pub(super) options: SockOptions,
    pub(super) sockets: Vec<Socket>,
    /// Places that nobody has, the one that was left longest ago first.
    pub(super) vacant: VecDeque<u16>,
    /// No place from here on was ever used.
    pub(super) used_up_to: u16,
    pub(super) berths: Option<Berths>,
    pub(super) fabric: Fabric,
    pub(super) nursery: Nursery,
    pub(super) receive_arena: Arena,
    pub(super) send_arena: Arena,
    poll: OwnedFd,
    /// Sockets with something to do.
    to_serve: VecDeque<u16>,
    /// Listeners that wait for a place, a ring or a descriptor, and closed sockets that wait for their peers.
    pub(super) waiting: Vec<u16>,
    pub(super) bounce: Vec<u8>,
    pub(super) next_request: u64,
    pub(super) counters: Arc<Counters>,
    pub(super) ending: Arc<Ending>,
    beat: u64,
}

impl Agent {
    pub(super) fn new(
        ground: Arc<Ground>,
        options: SockOptions,
        (berths, context): (Option<Berths>, Option<Context>),
        wake: &OwnedFd,
        counters: Arc<Counters>,
        ending: Arc<Ending>,
    ) -> Result<Self> {
        let failed = |errno: Errno| Error::os("watch sockets", &errno.into());
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        epoll::add(&poll, wake, EventData::new_u64(WAKE), EventFlags::IN).map_err(failed)?;
        let (receive_arena, send_arena) = Ground::arenas(&options);
        let places = options.sockets as u16;
        Ok(Self {
            sockets: (0..places).map(|_| Socket::vacant()).collect(),
            vacant: (0..places).collect(),
            used_up_to: 0,
            berths,
            fabric: Fabric::new(context),
            nursery: Nursery::default(),
            receive_arena,
            send_arena,
            poll,
            to_serve: VecDeque::with_capacity(usize::from(places)),
            waiting: Vec::with_capacity(usize::from(places)),
            bounce: vec![0; PIECE],
            next_request: 0,
            counters,
            ending,
            beat: 0,
            ground,
            options,
        })
    }

    /// Serves until it is told to stop, or until the shared memory fails.
    pub(super) fn run(mut self) {
        let outcome = self.serve_all();
        if self.ending.vanish.load(Ordering::Acquire) {
            return;
        }
        if let Err(error) = outcome {
            tracing::error!(%error, "sockets of kernels are not served any more");
        }
        // Peers of connections that nobody closed are not told of an end, but of a death.
        for index in 0..self.used_up_to {
            if self.sockets[usize::from(index)].is_warp {
                self.sockets[usize::from(index)].wishes.abort = true;
                self.drop_descriptor(index);
                self.unmoor(index);
            }
        }
        // If that fails, kernels find that the beat has stopped.
        if let Err(error) = self.ground.close() {
            tracing::error!(%error, "kernels could not be told that their sockets end");
        }
    }

    fn serve_all(&mut self) -> Result<()> {
        let start = Instant::now();
        let (mut last_work, mut last_beat, mut last_retry, mut last_check) =
            (start, start, start, start);
        self.ground.beat(1)?;
        while !self.ending.stop.load(Ordering::Acquire) {
            let mut worked = false;
            for _ in 0..LOOKS {
                worked |= self.take_requests()?;
                worked |= self.look_at_outboxes()?;
                worked |= self.serve_some()?;
            }
            let now = Instant::now();
            if worked {
                last_work = now;
            }
            worked |= self.take_events(self.nap(now - last_work))?;
            if worked {
                last_work = now;
            }
            if now - last_beat >= BEAT_INTERVAL {
                last_beat = now;
                self.beat += 1;
                self.ground.beat(self.beat + 1)?;
            }
            if now - last_retry >= RETRY && !(self.waiting.is_empty() && self.nursery.is_empty()) {
                last_retry = now;
                self.retry(now)?;
            }
            if now - last_check >= CHECK && self.berths.is_some() {
                last_check = now;
                self.check_queue_pairs()?;
            }
        }
        Ok(())
    }

    /// How long to sleep after nothing has happened for so long.
    fn nap(&self, idle: Duration) -> Duration {
        if !self.to_serve.is_empty() || idle < self.options.spin {
            Duration::ZERO
        } else if self.vacant.len() == self.sockets.len() {
            (idle / NAP_PART).clamp(SHORTEST_NAP, REST)
        } else {
            (idle / NAP_PART).clamp(SHORTEST_NAP, LONGEST_NAP)
        }
    }

    fn look_at_outboxes(&mut self) -> Result<bool> {
        let mut worked = false;
        for index in 0..self.used_up_to {
            worked |= self.look_at(index)?;
        }
        Ok(worked)
    }

    /// Sees what kernels have sent and consumed on one socket.
    #[inline]
    pub(super) fn look_at(&mut self, index: u16) -> Result<bool> {
        let word = self.ground.outbox(index)?;
        let socket = &mut self.sockets[usize::from(index)];
        if word as u32 == socket.sent as u32 && (word >> 32) as u32 == socket.consumed as u32 {
            return Ok(false);
        }
        if socket.hear(word) {
            self.queue(index);
            return Ok(true);
        }
        self.misused(index)
    }

    /// A kernel has written nonsense: that socket ends, and no other.
    #[cold]
    fn misused(&mut self, index: u16) -> Result<bool> {
        let socket = &mut self.sockets[usize::from(index)];
        if !socket.open || socket.errno() == i64::from(Errno::INVAL.raw_os_error()) {
            return Ok(false);
        }
        tracing::warn!(index, "a kernel wrote a counter that cannot be; its socket is reset");
        socket.fail(Some(Errno::INVAL), Some(Errno::INVAL));
        socket.wishes.abort = true;
        self.drop_descriptor(index);
        self.unmoor(index);
        self.tell_state(index)?;
        // Who sees it counted finds the kernel told.
        self.counters.misused.fetch_add(1, Ordering::Release);
        Ok(true)
    }

    /// Puts a socket on the list of those to be served.
    pub(super) fn queue(&mut self, index: u16) {
        let socket = &mut self.sockets[usize::from(index)];
        if !socket.queued {
            socket.queued = true;
            self.to_serve.push_back(index);
        }
    }

    /// Serves everybody once who stands on the list now.
    fn serve_some(&mut self) -> Result<bool> {
        let count = self.to_serve.len();
        for _ in 0..count {
            let Some(index) = self.to_serve.pop_front() else { break };
            self.sockets[usize::from(index)].queued = false;
            if self.serve(index)? {
                self.queue(index);
            }
        }
        Ok(count > 0)
    }

    /// Takes what the operating system has to say.
    fn take_events(&mut self, nap: Duration) -> Result<bool> {
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
        let timeout = Timespec { tv_sec: 0, tv_nsec: nap.as_nanos() as _ };
        let events = match epoll::wait(&self.poll, &mut room[..], Some(&timeout)) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return Ok(false),
            Err(errno) => return Err(Error::os("watch sockets", &errno.into())),
        };
        let mut worked = false;
        for event in events {
            let data = event.data.u64();
            if data == WAKE {
                continue;
            }
            if data & CRADLE != 0 {
                self.hear_cradle(data & !CRADLE)?;
                worked = true;
                continue;
            }
            let (index, generation) = parts(data as i32);
            let Some(socket) = self.sockets.get_mut(usize::from(index)) else { continue };
            if socket.generation != generation || socket.fd.is_none() {
                continue;
            }
            let flags = event.flags;
            let ended = EventFlags::ERR | EventFlags::HUP | EventFlags::RDHUP;
            socket.readable |= flags.intersects(EventFlags::IN | ended);
            socket.writable |=
                flags.intersects(EventFlags::OUT | EventFlags::ERR | EventFlags::HUP);
            socket.end_seen |= flags.intersects(ended);
            self.queue(index);
            worked = true;
        }
        Ok(worked)
    }

    /// Watches a descriptor.
    pub(super) fn watch_descriptor(
        &self,
        fd: &OwnedFd,
        data: u64,
    ) -> std::result::Result<(), Errno> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&self.poll, fd, EventData::new_u64(data), flags)
    }

    /// Watches a descriptor as a socket's that was watched as something else.
    pub(super) fn watch_anew(&mut self, index: u16) -> std::result::Result<(), Errno> {
        let socket = &self.sockets[usize::from(index)];
        if let Some(fd) = &socket.fd {
            epoll::delete(&self.poll, fd)?;
        }
        self.watch(index)
    }

    /// Watches a socket's descriptor, if it is not watched already.
    pub(super) fn watch(&mut self, index: u16) -> std::result::Result<(), Errno> {
        let socket = &mut self.sockets[usize::from(index)];
        let data = socket.handle(index) as u64;
        let Some(fd) = socket.fd.as_ref().filter(|_| !socket.watched) else { return Ok(()) };
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&self.poll, fd, EventData::new_u64(data), flags)?;
        socket.watched = true;
        Ok(())
    }

    /// Puts a socket on the list of those that are looked at now and then.
    pub(super) fn look_again_at(&mut self, index: u16) {
        let socket = &mut self.sockets[usize::from(index)];
        if !socket.listed {
            socket.listed = true;
            self.waiting.push(index);
        }
    }

    /// Looks after those that wait for something that nobody announces.
    fn retry(&mut self, now: Instant) -> Result<()> {
        self.rock(now)?;
        let waiting = std::mem::take(&mut self.waiting);
        for index in waiting {
            let socket = &mut self.sockets[usize::from(index)];
            socket.listed = false;
            if socket.closing.is_some_and(|until| now > until) {
                // Its peer takes nothing: the rest is lost, and the peer is told by a reset.
                socket.wishes.abort = true;
                self.vacate(index)?;
            } else if socket.closing.is_some() {
                self.finish_warp(index)?;
                if self.sockets[usize::from(index)].closing.is_some() {
                    self.look_again_at(index);
                }
            } else {
                self.queue(index);
            }
        }
        Ok(())
    }

    /// Takes a place for a new socket: nobody has its handle yet.
    pub(super) fn take_place(&mut self) -> Result<Option<u16>> {
        let Some(index) = self.vacant.pop_front() else { return Ok(None) };
        self.used_up_to = self.used_up_to.max(index + 1);
        self.ground.clear_outbox(index)?;
        let old = &self.sockets[usize::from(index)];
        let (generation, queued, listed) = (old.generation % 0x7fff + 1, old.queued, old.listed);
        let socket = &mut self.sockets[usize::from(index)];
        *socket = Socket::vacant();
        (socket.open, socket.generation) = (true, generation);
        (socket.queued, socket.listed) = (queued, listed);
        socket.wishes.receive_size = self.options.ring;
        socket.wishes.send_size = self.options.ring;
        self.counters.open.fetch_add(1, Ordering::Relaxed);
        Ok(Some(index))
    }

    /// Gives a socket its rings, of the sizes that it wants.
    pub(super) fn give_rings(&mut self, index: u16) -> std::result::Result<(), Errno> {
        let wishes = self.sockets[usize::from(index)].wishes;
        if self.sockets[usize::from(index)].receive_ring.1 == 0 {
            let receive = take_ring(&mut self.receive_arena, wishes.receive_size)?;
            match take_ring(&mut self.send_arena, wishes.send_size) {
                Ok(send) => {
                    let socket = &mut self.sockets[usize::from(index)];
                    (socket.receive_ring, socket.send_ring) = (receive, send);
                }
                Err(errno) => {
                    self.receive_arena.give(receive.0, receive.1);
                    return Err(errno);
                }
            }
        }
        Ok(())
    }

    /// What a device may reach of a socket.
    pub(super) fn shores(&self, index: u16) -> Result<Shores> {
        let socket = &self.sockets[usize::from(index)];
        self.ground.shores(index, socket.receive_ring, socket.send_ring)
    }

    /// Takes the rings back.
    pub(super) fn take_rings(&mut self, index: u16) {
        let socket = &mut self.sockets[usize::from(index)];
        let (receive, send) = (socket.receive_ring, socket.send_ring);
        (socket.receive_ring, socket.send_ring) = ((0, 0), (0, 0));
        if receive.1 != 0 {
            self.receive_arena.give(receive.0, receive.1);
        }
        if send.1 != 0 {
            self.send_arena.give(send.0, send.1);
        }
    }

    /// Tells kernels everything about a socket.
    pub(super) fn tell_line(&self, index: u16) -> Result<()> {
        let socket = &self.sockets[usize::from(index)];
        let rings = self.ground.ring_addresses(socket.receive_ring.0, socket.send_ring.0);
        let moored = socket.warp.moored.as_ref().zip(self.berths.as_ref());
        let wire = moored.map_or(0, |(moored, berths)| berths.wire_at(moored.berth));
        self.ground.tell_all(index, &socket.line(rings, wire))
    }

    /// Tells kernels its state.
    pub(super) fn tell_state(&self, index: u16) -> Result<()> {
        self.ground.tell(index, inbox::STATE, self.sockets[usize::from(index)].state())
    }

    /// Closes the descriptor, by a reset if that is wanted.
    pub(super) fn drop_descriptor(&mut self, index: u16) {
        let socket = &mut self.sockets[usize::from(index)];
        if let Some(fd) = socket.fd.take()
            && socket.wishes.abort
            // Where it cannot be set the peer sees an ordinary end.
            && let Err(errno) = rustix::net::sockopt::set_socket_linger(&fd, Some(Duration::ZERO))
        {
            tracing::debug!(%errno, "a connection could not be reset");
        }
        socket.watched = false;
        (socket.readable, socket.writable) = (false, false);
    }

    /// Lets go of a place: its kernel has closed it, or never knew of it.
    pub(super) fn vacate(&mut self, index: u16) -> Result<()> {
        // In this order: a peer that is left in good order must not see its work fail before it sees the end.
        self.drop_descriptor(index);
        self.unmoor(index);
        self.take_rings(index);
        let handle = self.sockets[usize::from(index)].handle(index);
        if self.sockets[usize::from(index)].is_warp {
            self.nursery.forget(handle);
            self.counters.warp.close(index, self.sockets[usize::from(index)].generation, None);
        }
        let socket = &mut self.sockets[usize::from(index)];
        socket.open = false;
        socket.closing = None;
        (socket.sent, socket.consumed, socket.taken, socket.received) = (0, 0, 0, 0);
        let orphans = std::mem::take(&mut socket.waiting);
        self.ground.clear_outbox(index)?;
        self.tell_state(index)?;
        self.vacant.push_back(index);
        self.counters.open.fetch_sub(1, Ordering::Relaxed);
        for orphan in orphans {
            self.vacate(orphan)?;
        }
        Ok(())
    }

    /// The socket that a handle names.
    pub(super) fn find(&self, handle: i32) -> std::result::Result<u16, Errno> {
        let (index, generation) = parts(handle);
        let socket = self.sockets.get(usize::from(index));
        match socket {
            Some(socket)
                if socket.open && socket.closing.is_none() && socket.generation == generation =>
            {
                Ok(index)
            }
            _ => Err(Errno::BADF),
        }
    }

    /// Whether a stream's connection stands.
    pub(super) fn is_connected(&self, index: u16) -> bool {
        self.sockets[usize::from(index)].has(state::CONNECTED)
    }
}

fn take_ring(area: &mut Arena, size: u64) -> std::result::Result<Ring, Errno> {
    let size = arena::rounded(size).ok_or(Errno::NOBUFS)?;
    area.take(size).map(|at| (at, size)).ok_or(Errno::NOBUFS)
}
