//! The calls of `include/warpwire/sock.cuh` for block functions of the simulated GPU: the same
//! protocol on the same memory.
//!
//! A call fails with a [`SockError`]: an errno, or the [`KernelFault`] of a block that accessed
//! invalid memory. Errnos have their usual meaning; in particular:
//! - `EAGAIN`: the socket is non-blocking, and the call would block;
//! - `ETIMEDOUT`: the timeout ([`SockOption::SendTimeout`], [`SockOption::ReceiveTimeout`])
//!   expired, or the peer did not answer;
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

pub use super::layout::SockOption;
use super::layout::{self, device_counters, device_state, host_state, state, table};
use super::warp::FIN;
use crate::mem::DeviceAddr;
use crate::mem::sim::{Block, KernelFault};

pub use poll::PollEntry;
pub use span::RingSpan;

/// Why a call failed.
#[derive(Clone, Debug)]
pub enum SockError {
    /// The call failed with this errno.
    Errno(Errno),
    /// The block itself faulted, for example on invalid memory.
    KernelFault(KernelFault),
}

/// Result of a call.
pub type SockResult<T> = Result<T, SockError>;

impl SockError {
    /// The errno; `None` for a fault of the block.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Errno(errno) => Some(*errno),
            Self::KernelFault(_) => None,
        }
    }
}

impl From<KernelFault> for SockError {
    fn from(fault: KernelFault) -> Self {
        Self::KernelFault(fault)
    }
}

impl From<Errno> for SockError {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl From<SockError> for KernelFault {
    fn from(failure: SockError) -> Self {
        match failure {
            SockError::Errno(errno) => Self::new(format!("a socket call failed: {errno}")),
            SockError::KernelFault(fault) => fault,
        }
    }
}

impl fmt::Display for SockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Errno(errno) => errno.fmt(f),
            Self::KernelFault(fault) => fault.fmt(f),
        }
    }
}

/// Address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4 = 4,
    /// IPv6.
    V6 = 6,
}

/// Kind of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketKind {
    /// A byte stream over TCP.
    Stream = 1,
    /// Datagrams over UDP.
    Datagram = 2,
    /// A byte stream over RDMA, of the `warp` family: the sender writes into the receiver's ring.
    WarpStream = 3,
}

/// Direction to shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShutdownHow {
    /// Receiving.
    Receive = 0,
    /// Sending.
    Send = 1,
    /// Both.
    Both = 2,
}

/// A socket's handle. Every call refuses the handle of a closed socket, as it contains a
/// generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sock(i32);

impl Sock {
    /// The handle as a non-negative number, to be kept in device memory.
    pub fn raw(self) -> i32 {
        self.0
    }

    /// The handle with this number; calls with an invalid one return `EBADF`.
    pub fn from_raw(handle: i32) -> Self {
        Self(handle)
    }
}

/// A block's access to the sockets of a [`SockHost`](super::SockHost).
pub struct Sockets<'a> {
    block: &'a Block<'a>,
    sockets: u32,
    slots: u32,
    heartbeat_timeout_ms: u32,
    host_state: u64,
    device_counters: u64,
    device_states: u64,
    requests: u64,
    replies: u64,
    slot_laps: u64,
    ticket: u64,
    heartbeat: u64,
    qp_slots: u64,
    activity: u64,
    activity_shift: u32,
}

fn at(address: u64) -> DeviceAddr {
    DeviceAddr::new(address)
}

/// Addresses of a socket's lines.
#[derive(Clone, Copy)]
struct SocketRef {
    handle: i32,
    generation: u16,
    host_state: u64,
    device_counters: u64,
    device_state: u64,
}

/// The words of a socket that calls check.
#[derive(Clone, Copy)]
struct StateSnapshot {
    state: u64,
    received: u64,
    taken: u64,
    flags: u32,
}

impl StateSnapshot {
    fn has(&self, flag: u64) -> bool {
        self.state & flag != 0
    }

    /// Whether it is a `warp` stream, whose counters the peer writes.
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
    /// Opens the table at the address that [`SockHost::table`](super::SockHost::table) returned.
    /// Faults if its version differs.
    pub fn open(block: &'a Block<'a>, table_at: DeviceAddr) -> Result<Self, KernelFault> {
        let base = table_at.raw();
        let word = |offset: u64| block.load_u64(at(base + offset));
        let half = |offset: u64| block.load_u32(at(base + offset));
        let version = half(table::VERSION)?;
        if version != layout::VERSION {
            return Err(KernelFault::new(format!(
                "the socket table has unknown version {version}"
            )));
        }
        Ok(Self {
            block,
            sockets: half(table::SOCKETS)?,
            slots: half(table::SLOTS)?,
            heartbeat_timeout_ms: half(table::HEARTBEAT_TIMEOUT)?,
            host_state: word(table::HOST_STATES)?,
            device_counters: word(table::DEVICE_COUNTERS)?,
            device_states: word(table::DEVICE_STATES)?,
            requests: word(table::REQUESTS)?,
            replies: word(table::REPLIES)?,
            slot_laps: word(table::SLOT_LAPS)?,
            ticket: word(table::TICKET)?,
            heartbeat: word(table::HEARTBEAT)?,
            qp_slots: word(table::QP_SLOTS)?,
            activity: word(table::ACTIVITY)?,
            activity_shift: half(table::ACTIVITY_SHIFT)?,
        })
    }

    fn socket_ref(&self, socket: Sock) -> SockResult<SocketRef> {
        let (index, generation) = layout::split_handle(socket.0);
        if socket.0 < 0 || u32::from(index) >= self.sockets || generation == 0 {
            return Err(Errno::BADF.into());
        }
        let number = u64::from(index);
        Ok(SocketRef {
            handle: socket.0,
            generation,
            host_state: self.host_state + number * host_state::LEN,
            device_counters: self.device_counters + number * device_counters::LEN,
            device_state: self.device_states + number * device_state::LEN,
        })
    }

    /// Loads the state before the counters, so that the counters are at least as new. `EBADF` if
    /// the handle is not open.
    fn load_snapshot(&self, socket_ref: SocketRef) -> SockResult<StateSnapshot> {
        let open = self.block.load_u32(at(socket_ref.device_state + device_state::GENERATION))?;
        let state = self.block.load_u64(at(socket_ref.host_state + host_state::STATE))?;
        let generation = u64::from(socket_ref.generation);
        if u64::from(open) != generation || state & state::GENERATION != generation {
            return Err(Errno::BADF.into());
        }
        let mut snapshot = StateSnapshot {
            state,
            received: self.block.load_u64(at(socket_ref.host_state + host_state::RECEIVED))?,
            taken: self.block.load_u64(at(socket_ref.host_state + host_state::TAKEN))?,
            flags: self.block.load_u32(at(socket_ref.device_state + device_state::FLAGS))?,
        };
        // A `warp` peer signals the end of the stream in its counter.
        if snapshot.is_warp() && snapshot.received & FIN != 0 {
            snapshot.received &= !FIN;
            snapshot.state |= state::RECEIVE_END;
        }
        Ok(snapshot)
    }

    /// Address and size of a ring.
    fn ring(&self, socket_ref: SocketRef, address: u64, size: u64) -> SockResult<(u64, u64)> {
        let begin = self.block.load_u64(at(socket_ref.host_state + address))?;
        let size = u64::from(self.block.load_u32(at(socket_ref.host_state + size))?);
        Ok((begin, size))
    }

    fn receive_ring(&self, socket_ref: SocketRef) -> SockResult<(u64, u64)> {
        self.ring(socket_ref, host_state::RECEIVE_RING, host_state::RECEIVE_SIZE)
    }

    fn send_ring(&self, socket_ref: SocketRef) -> SockResult<(u64, u64)> {
        self.ring(socket_ref, host_state::SEND_RING, host_state::SEND_SIZE)
    }

    /// Copies out of a ring from counter `from` on.
    fn copy_out(&self, ring: (u64, u64), from: u64, into: &mut [u8]) -> SockResult<()> {
        let offset = from & (ring.1 - 1);
        let first = into.len().min((ring.1 - offset) as usize);
        self.block.read(at(ring.0 + offset), &mut into[..first])?;
        if first < into.len() {
            self.block.read(at(ring.0), &mut into[first..])?;
        }
        Ok(())
    }

    /// Copies into a ring from counter `to` on.
    fn copy_in(&self, ring: (u64, u64), to: u64, from: &[u8]) -> SockResult<()> {
        let offset = to & (ring.1 - 1);
        let first = from.len().min((ring.1 - offset) as usize);
        self.block.write(at(ring.0 + offset), &from[..first])?;
        if first < from.len() {
            self.block.write(at(ring.0), &from[first..])?;
        }
        Ok(())
    }

    /// Publishes the bytes sent: in the device state, and to the host or, by RDMA, to the peer.
    fn publish_sent(&self, socket_ref: SocketRef, sent: u64) -> SockResult<()> {
        let before = self.sent(socket_ref)?;
        self.block.store_u64(at(socket_ref.device_state + device_state::SENT), sent)?;
        if self.is_warp(socket_ref)? {
            return self.post_sent(socket_ref, before, sent);
        }
        let counter = at(socket_ref.device_counters + device_counters::SENT);
        self.block.store_u32(counter, sent as u32)?;
        self.notify_host(socket_ref)
    }

    /// Sets the socket's activity flag, after its counters.
    fn notify_host(&self, socket_ref: SocketRef) -> SockResult<()> {
        let (index, _) = layout::split_handle(socket_ref.handle);
        let flag = u64::from(index) >> self.activity_shift;
        Ok(self.block.store_u32(at(self.activity + flag * 4), 1)?)
    }

    fn is_warp(&self, socket_ref: SocketRef) -> SockResult<bool> {
        Ok(self.block.load_u32(at(socket_ref.device_state + device_state::FLAGS))?
            & device_state::WARP
            != 0)
    }

    /// Publishes the bytes consumed of a stream or of datagrams: to the host, or to the peer.
    fn publish_consumed(&self, socket_ref: SocketRef, consumed: u64) -> SockResult<()> {
        if self.is_warp(socket_ref)? {
            self.block.store_u64(at(socket_ref.device_state + device_state::CONSUMED), consumed)?;
            return self.report(socket_ref, consumed);
        }
        self.publish_consumed_to_host(socket_ref, consumed)
    }

    /// Publishes the bytes consumed to the host.
    fn publish_consumed_to_host(&self, socket_ref: SocketRef, consumed: u64) -> SockResult<()> {
        self.block.store_u64(at(socket_ref.device_state + device_state::CONSUMED), consumed)?;
        let counter = at(socket_ref.device_counters + device_counters::CONSUMED);
        self.block.store_u32(counter, consumed as u32)?;
        self.notify_host(socket_ref)
    }

    fn sent(&self, socket_ref: SocketRef) -> SockResult<u64> {
        Ok(self.block.load_u64(at(socket_ref.device_state + device_state::SENT))?)
    }

    fn consumed(&self, socket_ref: SocketRef) -> SockResult<u64> {
        Ok(self.block.load_u64(at(socket_ref.device_state + device_state::CONSUMED))?)
    }

    /// Initialises the device state of a socket that only this block knows; the generation last.
    fn init_device_state(&self, socket_ref: SocketRef) -> SockResult<()> {
        self.block.write(at(socket_ref.device_state + 8), &[0; device_state::LEN as usize - 8])?;
        let state = self.block.load_u64(at(socket_ref.host_state + host_state::STATE))?;
        let flags = if state & state::WARP != 0 { device_state::WARP } else { 0 };
        self.block.store_u32(at(socket_ref.device_state + device_state::FLAGS), flags)?;
        Ok(self.block.store_u32(
            at(socket_ref.device_state + device_state::GENERATION),
            u32::from(socket_ref.generation),
        )?)
    }
}
