//! The receiving side: connections taken up, rings read, sleepers woken.

use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use warpwire_proto::wire::icrc::Cover;
use warpwire_proto::wire::packet::ICRC_LEN;

use super::grant::{Offer, Seat};
use super::meet::{self, Heard, Hello};
use super::ring::{Found, Reader};
use super::sys::{Control, Theirs};
use super::{Options, Refusals};
use crate::link::{Counters, Frame, SHORTEST, Simd};

/// How many packets a receive takes at most.
const BATCH: usize = 64;
/// Events and connections that are seen to at once; the rest next time.
const AT_ONCE: usize = 16;
/// Connections of others to us; more are turned away.
const MOST: usize = 4096;
/// A wait that does not wait.
const NOT_AT_ALL: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A ring that somebody sends to us through.
struct Ring {
    /// Shared with its seat, which outlives the ring until the sender has let go.
    socket: Arc<OwnedFd>,
    reader: Reader,
    from: SocketAddr,
    to: SocketAddr,
    cover: Cover,
    /// It may reach memory of ours by itself.
    seat: Option<Seat>,
    /// The sender is gone; what it left is still read.
    ended: bool,
    /// Its contents make no sense; nothing more is read.
    broken: bool,
}

/// What a link receives by.
pub(super) struct Incoming {
    local: SocketAddr,
    /// The link's own, once more.
    poll: OwnedFd,
    listener: OwnedFd,
    /// Kept for connections that come when the process has no descriptor left.
    spare: Option<OwnedFd>,
    /// Written when there was something to read already as somebody went to sleep.
    event: OwnedFd,
    signalled: bool,
    /// Somebody went to sleep, and rings are armed.
    armed: bool,
    /// Connected, and silent so far.
    guests: Vec<OwnedFd>,
    rings: Vec<Ring>,
    /// The ring whose turn is next.
    turn: usize,
    calls: u32,
    /// How many calls go by before the sockets are seen to.
    attend: u32,
    buffer: Box<[u8]>,
    /// What senders may reach by themselves.
    pub offer: Option<Arc<Offer>>,
    pub refusals: Refusals,
}

impl Ring {
    /// Reads what came over its socket; false if the sender is gone.
    fn attend(&self) -> bool {
        match &self.seat {
            Some(seat) => seat.attend(&self.socket),
            None => meet::read(&self.socket, |_, _| ()),
        }
    }
}

/// Has a descriptor watched under its own number.
pub(super) fn watch(poll: &OwnedFd, socket: &OwnedFd, flags: EventFlags) -> rustix::io::Result<()> {
    epoll::add(poll, socket, EventData::new_u64(number(socket)), flags)
}

pub(super) fn number(socket: &OwnedFd) -> u64 {
    socket.as_raw_fd() as u64
}

impl Incoming {
    pub(super) fn new(
        poll: &OwnedFd,
        listener: OwnedFd,
        local: SocketAddr,
        options: &Options,
    ) -> rustix::io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        watch(poll, &listener, EventFlags::IN)?;
        watch(poll, &event, EventFlags::IN)?;
        Ok(Self {
            local,
            poll: rustix::io::fcntl_dupfd_cloexec(poll, 0)?,
            listener,
            spare: rustix::io::fcntl_dupfd_cloexec(poll, 0).ok(),
            event,
            signalled: false,
            armed: false,
            guests: Vec::new(),
            rings: Vec::new(),
            turn: 0,
            calls: options.attend,
            attend: options.attend,
            buffer: vec![0; options.largest].into_boxed_slice(),
            offer: None,
            refusals: Refusals::default(),
        })
    }

    /// How many send to us.
    pub(super) fn count(&self) -> usize {
        self.rings.len()
    }

    /// Whether it is time to see to the sockets, although nobody slept.
    #[inline]
    pub(super) fn is_due(&mut self) -> bool {
        self.calls += 1;
        self.calls > self.attend
    }

    /// Whether somebody slept, or was about to, since the last call. Nobody does any more.
    #[inline]
    pub(super) fn slept(&mut self) -> bool {
        let slept = std::mem::take(&mut self.armed);
        if slept {
            self.rings.iter().for_each(|ring| ring.reader.disarm());
        }
        slept
    }

    /// Sees to the sockets, with one system call when nothing happened; `gone` hears of descriptors that are not ours.
    pub(super) fn tend(&mut self, poll: &OwnedFd, gone: &mut dyn FnMut(u64)) {
        self.calls = 0;
        if self.signalled {
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
            self.signalled = false;
        }
        // Twice: a connection that is taken up may have brought its hello already.
        for _ in 0..2 {
            let mut room = [MaybeUninit::<epoll::Event>::uninit(); AT_ONCE];
            let waited = epoll::wait(poll, &mut room[..], Some(&NOT_AT_ALL));
            let happened = waited.as_ref().is_ok_and(|(events, _)| !events.is_empty());
            for event in waited.map_or_else(|_| [].iter(), |(events, _)| events.iter()) {
                let which = event.data;
                self.see_to(poll, which.u64(), gone);
            }
            if !happened {
                break;
            }
        }
        // After the end was seen: what was published before it shows now.
        let before = self.rings.len();
        self.rings.retain(|ring| !ring.ended || !ring.reader.is_empty());
        if self.rings.len() < before {
            self.turn = 0;
        }
    }

    fn see_to(&mut self, poll: &OwnedFd, which: u64, gone: &mut dyn FnMut(u64)) {
        if which == number(&self.listener) {
            self.accept(poll);
        } else if let Some(at) = self.guests.iter().position(|guest| number(guest) == which) {
            self.hear(poll, at);
        } else if let Some(ring) = self.rings.iter_mut().find(|ring| number(&ring.socket) == which)
        {
            if !ring.attend() {
                ring.ended = true;
                let _ = epoll::delete(poll, &ring.socket);
            }
        } else {
            gone(which);
        }
    }

    fn accept(&mut self, poll: &OwnedFd) {
        for _ in 0..AT_ONCE {
            let guest = match meet::accept(&self.listener) {
                Ok(guest) => guest,
                Err(Errno::MFILE | Errno::NFILE) => return self.turn_away(),
                Err(_) => return,
            };
            if !meet::is_trusted(guest.as_fd()).unwrap_or(false) {
                self.refusals.strangers += 1;
            } else if self.guests.len() + self.rings.len() >= MOST
                || watch(poll, &guest, EventFlags::IN).is_err()
            {
                self.refusals.too_many += 1;
            } else {
                self.guests.push(guest);
            }
        }
    }

    /// There is no descriptor for a connection. The one that is kept for that takes it up, to end it: its sender must know, and
    /// one that waits for ever would not let us sleep.
    #[cold]
    pub(super) fn turn_away(&mut self) {
        self.spare = None;
        if meet::accept(&self.listener).is_ok() {
            self.refusals.too_many += 1;
        }
        self.spare = rustix::io::fcntl_dupfd_cloexec(&self.poll, 0).ok();
    }

    /// The first message of a connection makes a ring of it, or ends it.
    fn hear(&mut self, poll: &OwnedFd, at: usize) {
        let (hello, files) = match meet::hear(&self.guests[at]) {
            Heard::Nothing => return,
            Heard::Hello(hello, files) => (hello, files),
            other => {
                match other {
                    Heard::Version => self.refusals.versions += 1,
                    Heard::Nonsense => self.refusals.malformed += 1,
                    _ => {}
                }
                self.guests.swap_remove(at);
                return;
            }
        };
        let socket = self.guests.swap_remove(at);
        let [ring, page] = files;
        let memory = Theirs::open(&ring, hello.ring);
        let (Ok(memory), Ok(control), true) =
            (memory, Control::open(&page), self.is_for_us(&hello))
        else {
            self.refusals.malformed += 1;
            let _ = epoll::delete(poll, &socket);
            return;
        };
        let Hello { from, to, ring, reaches } = hello;
        // Where that fails, packets do it.
        let socket = Arc::new(socket);
        let offer = self.offer.as_ref().filter(|_| reaches);
        let seat = offer.and_then(|offer| offer.admit(&page, &socket).ok());
        self.rings.push(Ring {
            socket,
            reader: Reader::new(memory, control, ring),
            from,
            to,
            cover: Cover::new(from, to),
            seat,
            ended: false,
            broken: false,
        });
    }

    fn is_for_us(&self, hello: &Hello) -> bool {
        let Hello { from, to, .. } = hello;
        let here = to.ip() == self.local.ip() || self.local.ip().is_unspecified();
        let known = from.port() != 0 && from.is_ipv4() == self.local.is_ipv4();
        here && known && to.port() == self.local.port() && to.is_ipv4() == from.is_ipv4()
    }

    /// Takes packets out of the rings, in turn.
    #[inline]
    pub(super) fn receive(
        &mut self,
        counters: &mut Counters,
        take: &mut dyn FnMut(Frame<'_>),
    ) -> usize {
        let count = self.rings.len();
        let (mut delivered, mut seen, mut broken) = (0, 0, false);
        for step in 0..count {
            let mut at = self.turn + step;
            if at >= count {
                at -= count;
            }
            let Some(ring) = self.rings.get_mut(at) else { break };
            let Ring { reader, from, to, cover, broken: bad, .. } = ring;
            let taken = reader.take(BATCH - seen, &mut self.buffer, |found| {
                seen += 1;
                let Some((bytes, sealed)) = check(&found, cover, counters) else { return };
                delivered += 1;
                counters.received += 1;
                counters.received_bytes += bytes.len() as u64;
                let (from, to) = (*from, *to);
                take(Frame { from, to, bytes, marked: false, identification: 0, sealed });
            });
            *bad = taken.is_err();
            broken |= *bad;
            if seen >= BATCH {
                self.turn = if at + 1 < count { at + 1 } else { 0 };
                break;
            }
        }
        if broken {
            self.remove_broken();
        }
        delivered
    }

    /// Ends the rings whose contents make no sense: their senders see the socket close.
    #[cold]
    fn remove_broken(&mut self) {
        let before = self.rings.len();
        for ring in self.rings.iter().filter(|ring| ring.broken) {
            let _ = epoll::delete(&self.poll, &ring.socket);
        }
        self.rings.retain(|ring| !ring.broken);
        self.refusals.broken += (before - self.rings.len()) as u64;
        self.turn = 0;
    }

    /// Has the senders wake us, and makes the descriptor readable if there is something already.
    pub(super) fn arm(&mut self) {
        self.armed = true;
        let mut something = false;
        for ring in &self.rings {
            something |= ring.reader.arm();
        }
        if something && !self.signalled {
            self.signalled = true;
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }
}

/// Packets that a fault spoiled are found like any others.
#[inline]
fn check<'a>(
    found: &Found<'a>,
    cover: &mut Cover,
    counters: &mut Counters,
) -> Option<(&'a [u8], bool)> {
    let Found::Packet(bytes, sealed) = *found else {
        counters.drops.long += 1;
        return None;
    };
    if bytes.len() < SHORTEST {
        counters.drops.short += 1;
        return None;
    }
    if sealed {
        let carried = bytes.last_chunk::<ICRC_LEN>().map(|bytes| u32::from_le_bytes(*bytes));
        if carried != cover.icrc::<Simd>(0, bytes) {
            counters.drops.icrc += 1;
            return None;
        }
    }
    Some((bytes, sealed))
}
