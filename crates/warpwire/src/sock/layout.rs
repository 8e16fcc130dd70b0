//! Layout of the memory that the host and the kernels of a GPU share. `include/warpwire/sock.cuh`
//! defines the same structures and asserts their sizes; the suite `tests/sock` runs both.
//!
//! There are three areas of memory, each with one writer:
//!
//! | area | writer | memory | contents |
//! |---|---|---|---|
//! | host area | the host | device with a window, else pinned | see below |
//! | kernel area | kernels | pinned | requests, [`device_counters`] words, send rings |
//! | device states | kernels | device | request ticket, slot laps, [`device_state`] lines |
//!
//! The host area contains the [`table`], the [`heartbeat`], replies, [`host_state`] lines and
//! receive rings. No side reads across PCIe: each polls local memory, and only stores cross the
//! bus.
//!
//! `warp` sockets have the same lines and rings. `RECEIVED` and `TAKEN` in their host state are
//! written by the peer's HCA. Their kernels post work themselves, and need three more areas, with
//! one slot per connection:
//!
//! | area | writer | memory | contents |
//! |---|---|---|---|
//! | queues | kernels | pinned | send queue entries and doorbell |
//! | polled | host, HCA | device with a window, else pinned | [`qp_descriptor`], completions |
//! | QP slots | kernels | device | [QP handle](crate::stream::kernel::layout) and [`peer`] |

use std::net::SocketAddr;

use crate::link;
pub use crate::link::{ADDRESS_LEN, address_from};

/// Version of the layout; headers and kernels compare it.
pub const VERSION: u32 = 4;

/// The table: addresses and sizes of everything else. Kernels get its address only.
pub mod table {
    /// Version of the layout: 32 bits.
    pub const VERSION: u64 = 0;
    /// Number of sockets: 32 bits.
    pub const SOCKETS: u64 = 4;
    /// Number of request slots, a power of two: 32 bits.
    pub const SLOTS: u64 = 8;
    /// The host counts as dead after this many milliseconds without a heartbeat: 32 bits.
    pub const HEARTBEAT_TIMEOUT: u64 = 12;
    /// Address of the [`host_state`](super::host_state) lines.
    pub const HOST_STATES: u64 = 16;
    /// Address of the [`device_counters`](super::device_counters) words.
    pub const DEVICE_COUNTERS: u64 = 24;
    /// Address of the [`device_state`](super::device_state) lines.
    pub const DEVICE_STATES: u64 = 32;
    /// Address of the requests.
    pub const REQUESTS: u64 = 40;
    /// Address of the replies.
    pub const REPLIES: u64 = 48;
    /// Address of the slot laps, 64 bits per request slot: how often the slot was used and freed.
    pub const SLOT_LAPS: u64 = 56;
    /// Address of the ticket counter of requests, 64 bits.
    pub const TICKET: u64 = 64;
    /// Address of the [`heartbeat`](super::heartbeat).
    pub const HEARTBEAT: u64 = 72;
    /// Address of the [`qp_slot`](super::qp_slot)s.
    pub const QP_SLOTS: u64 = 80;
    /// Length in bytes.
    pub const LEN: u64 = 128;
}

/// The host's heartbeat.
pub mod heartbeat {
    /// Incremented every 20 ms by the host: 64 bits.
    pub const COUNT: u64 = 0;
    /// 1 once the host has ended: 32 bits.
    pub const CLOSED: u64 = 8;
    /// Length in bytes.
    pub const LEN: u64 = 128;
}

/// The state of one socket, written by the host.
pub mod host_state {
    /// The [`state`](super::state) word: 64 bits.
    pub const STATE: u64 = 0;
    /// Total bytes put into the receive ring; `warp`: written by the peer's HCA.
    pub const RECEIVED: u64 = 8;
    /// Total bytes taken from the send ring; `warp`: written by the peer's HCA.
    pub const TAKEN: u64 = 16;
    /// Address of the receive ring.
    pub const RECEIVE_RING: u64 = 24;
    /// Address of the send ring.
    pub const SEND_RING: u64 = 32;
    /// Size of the receive ring, a power of two: 32 bits.
    pub const RECEIVE_SIZE: u64 = 40;
    /// Size of the send ring, a power of two: 32 bits.
    pub const SEND_SIZE: u64 = 44;
    /// `warp`: address of the [`qp_descriptor`](super::qp_descriptor); 0 before there is one.
    pub const QP_DESCRIPTOR: u64 = 48;
    /// `warp`: number of consumed bytes after which the peer is notified: 32 bits.
    pub const REPORT_AT: u64 = 56;
    /// Length in bytes.
    pub const LEN: u64 = 64;
}

/// One socket's counters, written by kernels: the lower halves of two totals in one word. The host
/// compares it with the last value it saw, so the word is the doorbell as well.
pub mod device_counters {
    /// Bytes put into the send ring: 32 bits.
    pub const SENT: u64 = 0;
    /// Bytes taken from the receive ring: 32 bits.
    pub const CONSUMED: u64 = 4;
    /// Length in bytes.
    pub const LEN: u64 = 8;
}

/// The state of one socket that only kernels use.
pub mod device_state {
    /// The generation of the open handle; 0 once it is closed: 32 bits.
    pub const GENERATION: u64 = 0;
    /// [`NON_BLOCKING`], the directions that were shut down, [`WARP`] and [`FIN`]: 32 bits.
    pub const FLAGS: u64 = 4;
    /// Total bytes put into the send ring.
    pub const SENT: u64 = 8;
    /// Total bytes taken from the receive ring.
    pub const CONSUMED: u64 = 16;
    /// Lock of the sending direction: [`UNLOCKED`], [`LOCKED`], [`SPAN_OUT`] or [`CLOSED`], 32
    /// bits.
    pub const SEND_LOCK: u64 = 24;
    /// Lock of the receiving direction: 32 bits.
    pub const RECEIVE_LOCK: u64 = 28;
    /// Timeout of send and connect in nanoseconds; 0 means none.
    pub const SEND_TIMEOUT: u64 = 32;
    /// Timeout of receive and accept in nanoseconds; 0 means none.
    pub const RECEIVE_TIMEOUT: u64 = 40;
    /// `warp`: total bytes consumed that were reported to the peer.
    pub const REPORTED: u64 = 48;
    /// `warp`: lock for posting: [`UNLOCKED`] or [`LOCKED`], 32 bits.
    pub const POST_LOCK: u64 = 56;
    /// `warp`: index of the [`qp_slot`](super::qp_slot) plus one; 0 until it is initialised: 32
    /// bits.
    pub const QP_SLOT: u64 = 60;
    /// Length in bytes.
    pub const LEN: u64 = 64;

    /// Flag: calls do not block.
    pub const NON_BLOCKING: u32 = 1;
    /// Flag: the sending direction is shut down.
    pub const SHUT_SEND: u32 = 2;
    /// Flag: the receiving direction is shut down.
    pub const SHUT_RECEIVE: u32 = 4;
    /// Flag: a `warp` socket.
    pub const WARP: u32 = 8;
    /// Flag: FIN was posted to the peer.
    pub const FIN: u32 = 16;

    /// Lock state: free.
    pub const UNLOCKED: u32 = 0;
    /// Lock state: a group of threads copies.
    pub const LOCKED: u32 = 1;
    /// Lock state: a span is reserved or borrowed.
    pub const SPAN_OUT: u32 = 2;
    /// Lock state: the socket is closed.
    pub const CLOSED: u32 = 3;
}

/// Bits of a socket's state word.
pub mod state {
    /// Mask of the handle's generation; 0 if the socket is not open.
    pub const GENERATION: u64 = 0xffff;
    /// Bit position of the errno of receiving, 8 bits.
    pub const RECEIVE_ERROR: u32 = 16;
    /// Bit position of the errno of sending, 8 bits.
    pub const SEND_ERROR: u32 = 24;
    /// A datagram socket: the rings hold records.
    pub const DATAGRAM: u64 = 1 << 32;
    /// A listener.
    pub const LISTENING: u64 = 1 << 33;
    /// A connection is being established.
    pub const CONNECTING: u64 = 1 << 34;
    /// The socket has a peer.
    pub const CONNECTED: u64 = 1 << 35;
    /// Nothing follows the bytes received so far.
    pub const RECEIVE_END: u64 = 1 << 36;
    /// Nothing more can be sent.
    pub const SEND_END: u64 = 1 << 37;
    /// A `warp` socket.
    pub const WARP: u64 = 1 << 38;
    /// Close resets the connection.
    pub const RESET_ON_CLOSE: u64 = 1 << 39;
}

/// What a kernel needs to post to a connection's queue pair, written by the host.
pub mod qp_descriptor {
    /// The constant part of the queue pair's handle.
    pub const CONSTANTS: u64 = 0;
    /// The [`peer`](super::peer)'s addresses and keys.
    pub const PEER: u64 = 128;
    /// Length in bytes.
    pub const LEN: u64 = 192;
}

/// The peer's memory that may be written, and its keys: part of a [`qp_descriptor`] and of a
/// [`qp_slot`].
pub mod peer {
    /// Address of the peer's receive ring.
    pub const RING: u64 = 0;
    /// Address of the peer's word `received`.
    pub const RECEIVED: u64 = 8;
    /// Address of the peer's word `taken`.
    pub const TAKEN: u64 = 16;
    /// Rkey of the ring: 32 bits, as all that follow.
    pub const RING_KEY: u64 = 24;
    /// Rkey of the word `received`.
    pub const RECEIVED_KEY: u64 = 28;
    /// Rkey of the word `taken`.
    pub const TAKEN_KEY: u64 = 32;
    /// Size of the ring, a power of two and a multiple of our `SEND_SIZE`.
    pub const RING_SIZE: u64 = 36;
    /// Lkey of our own send ring.
    pub const SEND_KEY: u64 = 40;
    /// Index of the QP slot.
    pub const QP_SLOT: u64 = 44;
    /// Length in bytes.
    pub const LEN: u64 = 64;
}

/// A queue pair's state that only kernels use.
pub mod qp_slot {
    /// The queue pair's handle.
    pub const HANDLE: u64 = 0;
    /// The [`peer`](super::peer)'s addresses and keys.
    pub const PEER: u64 = crate::stream::kernel::layout::LEN;
    /// Length in bytes.
    pub const LEN: u64 = 1280;
    const _: () = assert!(PEER + super::peer::LEN <= LEN);
}

/// A request of a kernel to the host.
pub mod request {
    /// The ticket plus one, written last.
    pub const NUMBER: u64 = 0;
    /// The [`RequestOp`](super::RequestOp): 32 bits.
    pub const OP: u64 = 8;
    /// The socket's handle: 32 bits.
    pub const HANDLE: u64 = 12;
    /// The argument of the operation: 64 bits.
    pub const VALUE: u64 = 16;
    /// The [`SockOption`](super::SockOption): 32 bits.
    pub const OPTION: u64 = 24;
    /// An address: family (16 bits: 4, 6, or 0 for none), port (16 bits), scope (32 bits), 16
    /// bytes.
    pub const ADDRESS: u64 = 32;
    /// `Close` only, in the bytes of the address: total bytes sent. Used for `warp` sockets.
    pub const SENT: u64 = 40;
    /// `Close` only: total bytes taken from the receive ring.
    pub const CONSUMED: u64 = 48;
    /// Length in bytes.
    pub const LEN: u64 = 64;
}

/// The host's reply to a request.
pub mod reply {
    /// The request's number, written last.
    pub const NUMBER: u64 = 0;
    /// The result: 0 or more, or a negated errno.
    pub const RESULT: u64 = 8;
    /// An address, if the operation returns one.
    pub const ADDRESS: u64 = 16;
    /// Length in bytes.
    pub const LEN: u64 = 64;
}

/// The header of a datagram in a ring, or an accepted connection in a listener's ring. Records are
/// aligned to their length.
pub mod record {
    /// Datagram: its length; connection: its handle. 32 bits.
    pub const VALUE: u64 = 0;
    /// Datagram: an errno instead of data, or 0. 32 bits.
    pub const ERROR: u64 = 4;
    /// The address of the sender, the destination or the connected peer.
    pub const ADDRESS: u64 = 8;
    /// Length in bytes.
    pub const LEN: u64 = 32;
}

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RequestOp {
    /// Create a socket. The value is the IP version (4 or 6) and, from bit 8, the kind (1: stream,
    /// 2: datagram, 3: `warp` stream). `ESOCKTNOSUPPORT` for any other kind.
    Socket = 1,
    /// Bind to an address.
    Bind,
    /// Accept connections; the value is the backlog.
    Listen,
    /// Connect to an address.
    Connect,
    /// Shut down a direction; the value is 0 for receiving, 1 for sending, 2 for both.
    Shutdown,
    /// Close. `warp`: the value is the number of work requests that kernels have posted.
    Close,
    /// Set an option to the value.
    SetOption,
    /// Get an option.
    GetOption,
    /// Get the local address.
    LocalName,
    /// Get the peer's address.
    PeerName,
    /// `warp`: abort the connection with the errno in the value, because the peer violated the
    /// protocol or cannot be reached.
    Fail,
}

impl RequestOp {
    /// The operation with this number.
    pub fn from_raw(number: u32) -> Option<Self> {
        use RequestOp::{
            Bind, Close, Connect, Fail, GetOption, Listen, LocalName, PeerName, SetOption,
            Shutdown, Socket,
        };
        let all = [
            Socket, Bind, Listen, Connect, Shutdown, Close, SetOption, GetOption, LocalName,
            PeerName, Fail,
        ];
        all.into_iter().find(|op| *op as u32 == number)
    }
}

/// A socket option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum SockOption {
    /// 1: calls that would block return `EAGAIN`. Default 0.
    NonBlocking = 1,
    /// Timeout of send and connect in nanoseconds; 0, the default, means none.
    SendTimeout,
    /// Timeout of receive and accept in nanoseconds; 0, the default, means none.
    ReceiveTimeout,
    /// Size of the send ring in bytes, rounded up to a power of two. Set it before connecting, or
    /// before a datagram socket is used.
    SendBuffer,
    /// Size of the receive ring in bytes, as [`SendBuffer`](Self::SendBuffer).
    ReceiveBuffer,
    /// Send small segments without delay (`TCP_NODELAY`): 0 or 1. Default 1.
    NoDelay,
    /// 0: close resets the connection and discards unsent bytes. Negative, the default: they are
    /// sent first. Positive values are refused.
    Linger,
    /// The errno that ended the socket, or 0. Read-only.
    Error,
    /// `SO_REUSEADDR`: 0 or 1. Default 1.
    ReuseAddress,
    /// `SO_KEEPALIVE`: 0 or 1.
    KeepAlive,
    /// `SO_BROADCAST`: 0 or 1.
    Broadcast,
    /// `IPV6_V6ONLY`: 0 or 1.
    V6Only,
}

impl SockOption {
    /// The option with this number.
    pub fn from_raw(number: u32) -> Option<Self> {
        use SockOption::{
            Broadcast, Error, KeepAlive, Linger, NoDelay, NonBlocking, ReceiveBuffer,
            ReceiveTimeout, ReuseAddress, SendBuffer, SendTimeout, V6Only,
        };
        let all = [
            NonBlocking,
            SendTimeout,
            ReceiveTimeout,
            SendBuffer,
            ReceiveBuffer,
            NoDelay,
            Linger,
            Error,
            ReuseAddress,
            KeepAlive,
            Broadcast,
            V6Only,
        ];
        all.into_iter().find(|setting| *setting as u32 == number)
    }
}

/// Event bits of `poll`, with Linux's values.
pub mod events {
    /// Data or a connection is waiting, or the end of the stream was reached.
    pub const IN: u16 = 0x1;
    /// Sending would not block.
    pub const OUT: u16 = 0x4;
    /// The socket has failed. Always reported.
    pub const ERR: u16 = 0x8;
    /// Both directions have ended. Always reported.
    pub const HUP: u16 = 0x10;
    /// The socket is not open. Always reported.
    pub const NVAL: u16 = 0x20;
    /// The peer has ended its sending direction.
    pub const RDHUP: u16 = 0x2000;
}

/// A handle: the slot index, with the generation from bit 16.
pub const fn handle(index: u16, generation: u16) -> i32 {
    (generation as i32) << 16 | index as i32
}

/// The slot index and the generation of a handle.
pub const fn split_handle(handle: i32) -> (u16, u16) {
    ((handle & 0xffff) as u16, (handle >> 16) as u16)
}

/// Encodes an address as kernels read it; `None` has family 0.
pub fn address_bytes(address: Option<SocketAddr>) -> [u8; ADDRESS_LEN] {
    address.map_or([0; ADDRESS_LEN], link::address_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_address_is_none() {
        assert_eq!(address_from(&address_bytes(None)), None);
        let some = "[::1]:9".parse().ok();
        assert_eq!(address_from(&address_bytes(some)), some);
    }

    #[test]
    fn handles_are_never_negative() {
        assert_eq!(split_handle(handle(7, 9)), (7, 9));
        assert!(handle(u16::MAX, 0x7fff) > 0);
    }

    #[test]
    fn unknown_numbers_are_none() {
        assert_eq!(RequestOp::from_raw(RequestOp::PeerName as u32), Some(RequestOp::PeerName));
        assert_eq!(RequestOp::from_raw(0), None);
        assert_eq!(RequestOp::from_raw(12), None);
        assert_eq!(SockOption::from_raw(SockOption::V6Only as u32), Some(SockOption::V6Only));
        assert_eq!(SockOption::from_raw(99), None);
    }
}
