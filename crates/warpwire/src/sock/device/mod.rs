//! The calls of `include/warpwire/sock.cuh` for block functions of the simulated GPU: the same protocol on the same memory.
//!
//! A call gives what it promises or a [`Failure`]: an errno, or the [`Fault`] of a block that touched memory that is not
//! there. Errnos mean what they mean everywhere; these are told apart:
//! - `EAGAIN`: the socket is non-blocking, and the call would have to wait;
//! - `ETIMEDOUT`: it waited for as long as it may ([`Setting::SendTimeout`], [`Setting::ReceiveTimeout`]), or the peer did
//!   not answer;
//! - `ECONNABORTED`: the host is gone.

mod control;
mod datagram;
mod poll;
mod span;
mod stream;
mod wait;
mod warp;

use std::fmt;

use rustix::io::Errno;

pub use super::layout::Setting;
use super::layout::{self, desk, inbox, outbox, state, table};
use super::warp::ENDED;
use crate::mem::DeviceAddr;
use crate::mem::sim::{Block, Fault};

pub use poll::Polled;
pub use span::Span;

/// Why a call failed.
#[derive(Clone, Debug)]
pub enum Failure {
    /// With an errno, as a socket does.
    Errno(Errno),
    /// The block itself faulted.
    Fault(Fault),
}

/// What a call gives.
pub type Outcome<T> = Result<T, Failure>;

impl Failure {
    /// The errno, if it is one.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Errno(errno) => Some(*errno),
            Self::Fault(_) => None,
        }
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl From<Failure> for Fault {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Errno(errno) => Self::new(format!("a socket call failed: {errno}")),
            Failure::Fault(fault) => fault,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Errno(errno) => errno.fmt(f),
            Self::Fault(fault) => fault.fmt(f),
        }
    }
}

/// The family of a socket's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4 = 4,
    /// IPv6.
    V6 = 6,
}

/// What a socket carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A stream of bytes: TCP.
    Stream = 1,
    /// Datagrams: UDP.
    Datagram = 2,
    /// A stream of bytes of the family `warp`: RDMA between the two ends' rings.
    WarpStream = 3,
}

/// Which direction ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Receiving.
    Receive = 0,
    /// Sending.
    Send = 1,
    /// Both.
    Both = 2,
}

/// A socket's handle. The one of a closed socket is refused by every call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sock(i32);

impl Sock {
    /// The handle as a number of 0 or more, to be kept in device memory.
    pub fn raw(self) -> i32 {
        self.0
    }

    /// The handle of that number; any number is safe to try.
    pub fn from_raw(handle: i32) -> Self {
        Self(handle)
    }
}

/// Sockets as a block uses them.
pub struct Sockets<'a> {
    block: &'a Block<'a>,
    sockets: u32,
    slots: u32,
    silence_ms: u32,
    inbox: u64,
    outbox: u64,
    desks: u64,
    requests: u64,
    replies: u64,
    turns: u64,
    ticket: u64,
    pulse: u64,
    berths: u64,
}

fn at(address: u64) -> DeviceAddr {
    DeviceAddr::new(address)
}

/// A socket's lines, found by its handle.
#[derive(Clone, Copy)]
struct Place {
    handle: i32,
    generation: u16,
    inbox: u64,
    outbox: u64,
    desk: u64,
}

/// The part of an inbox line that calls look at.
#[derive(Clone, Copy)]
struct Seen {
    state: u64,
    received: u64,
    taken: u64,
    flags: u32,
}

impl Seen {
    fn has(&self, flag: u64) -> bool {
        self.state & flag != 0
    }

    /// Whether it is a stream of the family `warp`, whose counters the peer writes.
    fn is_warp(&self) -> bool {
        self.state & (state::WARP | state::LISTENING) == state::WARP
    }

    fn receive_error(&self) -> Option<Errno> {
        errno(self.state >> state::RECEIVE_ERROR)
    }

    fn send_error(&self) -> Option<Errno> {
        errno(self.state >> state::SEND_ERROR)
    }
}

fn errno(bits: u64) -> Option<Errno> {
    match (bits & 0xff) as i32 {
        0 => None,
        number => Some(Errno::from_raw_os_error(number)),
    }
}

impl<'a> Sockets<'a> {
    /// The sockets of the table at that address, which [`SockHost::table`](super::SockHost::table) gave.
    pub fn open(block: &'a Block<'a>, table_at: DeviceAddr) -> Result<Self, Fault> {
        let base = table_at.raw();
        let word = |offset: u64| block.load_u64(at(base + offset));
        let half = |offset: u64| block.load_u32(at(base + offset));
        let version = half(table::VERSION)?;
        if version != layout::VERSION {
            return Err(Fault::new(format!("a table of sockets of version {version}")));
        }
        Ok(Self {
            block,
            sockets: half(table::SOCKETS)?,
            slots: half(table::SLOTS)?,
            silence_ms: half(table::SILENCE)?,
            inbox: word(table::INBOX)?,
            outbox: word(table::OUTBOX)?,
            desks: word(table::DESKS)?,
            requests: word(table::REQUESTS)?,
            replies: word(table::REPLIES)?,
            turns: word(table::TURNS)?,
            ticket: word(table::TICKET)?,
            pulse: word(table::PULSE)?,
            berths: word(table::BERTHS)?,
        })
    }

    fn place(&self, socket: Sock) -> Outcome<Place> {
        let (index, generation) = layout::parts(socket.0);
        if socket.0 < 0 || u32::from(index) >= self.sockets || generation == 0 {
            return Err(Errno::BADF.into());
        }
        let number = u64::from(index);
        Ok(Place {
            handle: socket.0,
            generation,
            inbox: self.inbox + number * inbox::LEN,
            outbox: self.outbox + number * outbox::LEN,
            desk: self.desks + number * desk::LEN,
        })
    }

    /// Looks at a socket: at its state first, so that the counters are not older.
    fn look(&self, place: Place) -> Outcome<Seen> {
        let open = self.block.load_u32(at(place.desk + desk::GENERATION))?;
        let state = self.block.load_u64(at(place.inbox + inbox::STATE))?;
        let generation = u64::from(place.generation);
        if u64::from(open) != generation || state & state::GENERATION != generation {
            return Err(Errno::BADF.into());
        }
        let mut seen = Seen {
            state,
            received: self.block.load_u64(at(place.inbox + inbox::RECEIVED))?,
            taken: self.block.load_u64(at(place.inbox + inbox::TAKEN))?,
            flags: self.block.load_u32(at(place.desk + desk::FLAGS))?,
        };
        // The peer itself says that it ends.
        if seen.is_warp() && seen.received & ENDED != 0 {
            seen.received &= !ENDED;
            seen.state |= state::RECEIVE_END;
        }
        Ok(seen)
    }

    /// The ring of a direction: its address and its size.
    fn ring(&self, place: Place, address: u64, size: u64) -> Outcome<(u64, u64)> {
        let begin = self.block.load_u64(at(place.inbox + address))?;
        let size = u64::from(self.block.load_u32(at(place.inbox + size))?);
        Ok((begin, size))
    }

    fn receive_ring(&self, place: Place) -> Outcome<(u64, u64)> {
        self.ring(place, inbox::RECEIVE_RING, inbox::RECEIVE_SIZE)
    }

    fn send_ring(&self, place: Place) -> Outcome<(u64, u64)> {
        self.ring(place, inbox::SEND_RING, inbox::SEND_SIZE)
    }

    /// Copies out of a ring from counter `from` on.
    fn copy_out(&self, ring: (u64, u64), from: u64, into: &mut [u8]) -> Outcome<()> {
        let place = from & (ring.1 - 1);
        let first = into.len().min((ring.1 - place) as usize);
        self.block.read(at(ring.0 + place), &mut into[..first])?;
        if first < into.len() {
            self.block.read(at(ring.0), &mut into[first..])?;
        }
        Ok(())
    }

    /// Copies into a ring from counter `to` on.
    fn copy_in(&self, ring: (u64, u64), to: u64, from: &[u8]) -> Outcome<()> {
        let place = to & (ring.1 - 1);
        let first = from.len().min((ring.1 - place) as usize);
        self.block.write(at(ring.0 + place), &from[..first])?;
        if first < from.len() {
            self.block.write(at(ring.0), &from[first..])?;
        }
        Ok(())
    }

    /// Says what was sent: on the desk, and to the host, or to the peer by writing it there.
    fn publish_sent(&self, place: Place, sent: u64) -> Outcome<()> {
        let before = self.sent(place)?;
        self.block.store_u64(at(place.desk + desk::SENT), sent)?;
        if self.is_warp(place)? {
            return self.post_sent(place, before, sent);
        }
        Ok(self.block.store_u32(at(place.outbox + outbox::SENT), sent as u32)?)
    }

    fn is_warp(&self, place: Place) -> Outcome<bool> {
        Ok(self.block.load_u32(at(place.desk + desk::FLAGS))? & desk::WARP != 0)
    }

    /// Says what was consumed of a stream or of datagrams: to the host, or to the peer.
    fn publish_consumed(&self, place: Place, consumed: u64) -> Outcome<()> {
        if self.is_warp(place)? {
            self.block.store_u64(at(place.desk + desk::CONSUMED), consumed)?;
            return self.report(place, consumed);
        }
        self.tell_consumed(place, consumed)
    }

    /// Tells the host what was consumed.
    fn tell_consumed(&self, place: Place, consumed: u64) -> Outcome<()> {
        self.block.store_u64(at(place.desk + desk::CONSUMED), consumed)?;
        Ok(self.block.store_u32(at(place.outbox + outbox::CONSUMED), consumed as u32)?)
    }

    fn sent(&self, place: Place) -> Outcome<u64> {
        Ok(self.block.load_u64(at(place.desk + desk::SENT))?)
    }

    fn consumed(&self, place: Place) -> Outcome<u64> {
        Ok(self.block.load_u64(at(place.desk + desk::CONSUMED))?)
    }

    /// Makes the desk of a socket that this block alone knows.
    fn take_desk(&self, place: Place) -> Outcome<()> {
        self.block.write(at(place.desk + 8), &[0; desk::LEN as usize - 8])?;
        let state = self.block.load_u64(at(place.inbox + inbox::STATE))?;
        let flags = if state & state::WARP != 0 { desk::WARP } else { 0 };
        self.block.store_u32(at(place.desk + desk::FLAGS), flags)?;
        Ok(self.block.store_u32(at(place.desk + desk::GENERATION), u32::from(place.generation))?)
    }
}
