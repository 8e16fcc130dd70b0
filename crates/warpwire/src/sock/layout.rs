//! What the host and the kernels of a GPU share, byte by byte. `include/warpwire/sock.cuh` has the same, and asserts its
//! sizes; the suite `tests/sock` runs both.
//!
//! Three areas of memory, by who writes them:
//!
//! | area | written by | lies in | holds |
//! |---|---|---|---|
//! | host side | the host | device memory behind a window; pinned without one | [`table`], [`heartbeat`], replies, [`host_state`] lines, receive rings |
//! | kernel side | kernels | pinned memory | requests, [`device_counters`] words, send rings |
//! | desks | kernels | device memory | the ticket of requests, turns, [`device_state`] lines |
//!
//! So nobody reads across PCIe: each side looks at memory that is near, and what crosses are stores.
//!
//! Sockets of the family `warp` have the same lines and rings. Of their inbox, the peer's device writes `RECEIVED` and `TAKEN`; their
//! kernels post by themselves, and need three areas more, one piece of each for every such socket:
//!
//! | area | written by | lies in | holds |
//! |---|---|---|---|
//! | queues | kernels | pinned memory | entries of the send queue, its doorbell |
//! | watched | the host, the device | device memory behind a window; pinned without one | [`qp_descriptor`] lines, completions |
//! | berths | kernels | device memory | the queue pair's [handle](crate::stream::kernel::layout), and what its [`peer`] said |

use std::net::SocketAddr;

use crate::link;
pub use crate::link::{ADDRESS_LEN, address_from};

/// The version of all this, which headers compare.
pub const VERSION: u32 = 4;

/// The table: where everything is. A kernel gets its address, and nothing else.
pub mod table {
    /// The layout's version: 32 bits.
    pub const VERSION: u64 = 0;
    /// How many sockets there are: 32 bits.
    pub const SOCKETS: u64 = 4;
    /// How many requests fit at a time, a power of two: 32 bits.
    pub const SLOTS: u64 = 8;
    /// After how many milliseconds without a beat the host counts as dead: 32 bits.
    pub const HEARTBEAT_TIMEOUT: u64 = 12;
    /// Address of the inbox lines.
    pub const HOST_STATES: u64 = 16;
    /// Address of the outbox words.
    pub const DEVICE_COUNTERS: u64 = 24;
    /// Address of the desks.
    pub const DEVICE_STATES: u64 = 32;
    /// Address of the requests.
    pub const REQUESTS: u64 = 40;
    /// Address of the replies.
    pub const REPLIES: u64 = 48;
    /// Address of the turns, 64 bits for each request.
    pub const SLOT_LAPS: u64 = 56;
    /// Address of the ticket, 64 bits.
    pub const TICKET: u64 = 64;
    /// Address of the pulse.
    pub const HEARTBEAT: u64 = 72;
    /// Address of the [`qp_slot`](super::berth)s.
    pub const QP_SLOTS: u64 = 80;
    /// How long it is.
    pub const LEN: u64 = 128;
}

/// The pulse: whether the host lives.
pub mod heartbeat {
    /// Grows while the host lives: 64 bits.
    pub const COUNT: u64 = 0;
    /// 1 when the host has ended: 32 bits.
    pub const CLOSED: u64 = 8;
    /// How long it is.
    pub const LEN: u64 = 128;
}

/// One socket's line of the host side.
pub mod host_state {
    /// [`state`](super::state): 64 bits.
    pub const STATE: u64 = 0;
    /// Bytes that the host has put into the receive ring, ever.
    pub const RECEIVED: u64 = 8;
    /// Bytes that the host has taken from the send ring, ever.
    pub const TAKEN: u64 = 16;
    /// Address of the receive ring.
    pub const RECEIVE_RING: u64 = 24;
    /// Address of the send ring.
    pub const SEND_RING: u64 = 32;
    /// Its size, a power of two: 32 bits.
    pub const RECEIVE_SIZE: u64 = 40;
    /// The send ring's: 32 bits.
    pub const SEND_SIZE: u64 = 44;
    /// Family `warp`: address of its [`qp_descriptor`](super::wire) line; 0 before there is one.
    pub const QP_DESCRIPTOR: u64 = 48;
    /// Family `warp`: when so many bytes were taken that the peer does not know of, it is told: 32 bits.
    pub const REPORT_AT: u64 = 56;
    /// How long it is.
    pub const LEN: u64 = 64;
}

/// One socket's word of the kernel side: the lower halves of two counters. The host compares it with what it saw last,
/// so it is the doorbell too.
pub mod device_counters {
    /// Bytes put into the send ring: 32 bits.
    pub const SENT: u64 = 0;
    /// Bytes taken from the receive ring: 32 bits.
    pub const CONSUMED: u64 = 4;
    /// How long it is.
    pub const LEN: u64 = 8;
}

/// One socket's line that only kernels use.
pub mod device_state {
    /// The generation of the handle that is open; 0 when it was closed: 32 bits.
    pub const GENERATION: u64 = 0;
    /// [`NON_BLOCKING`] and what was shut down: 32 bits.
    pub const FLAGS: u64 = 4;
    /// Bytes put into the send ring, ever.
    pub const SENT: u64 = 8;
    /// Bytes taken from the receive ring, ever.
    pub const CONSUMED: u64 = 16;
    /// Who sends: [`UNLOCKED`] and so on, 32 bits.
    pub const SEND_LOCK: u64 = 24;
    /// Who receives: 32 bits.
    pub const RECEIVE_LOCK: u64 = 28;
    /// How long sending and connecting may wait, in nanoseconds; 0 is for ever.
    pub const SEND_TIMEOUT: u64 = 32;
    /// How long receiving and accepting may wait.
    pub const RECEIVE_TIMEOUT: u64 = 40;
    /// Family `warp`: bytes of which the peer knows that they were taken from the receive ring.
    pub const REPORTED: u64 = 48;
    /// Family `warp`: who posts: [`UNLOCKED`] or [`LOCKED`], 32 bits.
    pub const POST_LOCK: u64 = 56;
    /// Family `warp`: the number of its [`qp_slot`](super::berth) plus one, once that is made: 32 bits.
    pub const QP_SLOT: u64 = 60;
    /// How long it is.
    pub const LEN: u64 = 64;

    /// Flag: calls do not wait.
    pub const NON_BLOCKING: u32 = 1;
    /// Flag: nothing more is sent.
    pub const SHUT_SEND: u32 = 2;
    /// Flag: nothing more is received.
    pub const SHUT_RECEIVE: u32 = 4;
    /// Flag: a socket of the family `warp`.
    pub const WARP: u32 = 8;
    /// Flag: the peer was told that no more will come.
    pub const FIN: u32 = 16;

    /// A lock that nobody has.
    pub const UNLOCKED: u32 = 0;
    /// Somebody copies.
    pub const LOCKED: u32 = 1;
    /// A span is out: reserved, or borrowed.
    pub const SPAN_OUT: u32 = 2;
    /// The socket is closed.
    pub const CLOSED: u32 = 3;
}

/// The state of a socket, as the host tells it.
pub mod state {
    /// The generation of the handle: 0 for nobody's.
    pub const GENERATION: u64 = 0xffff;
    /// Where the errno of receiving stands.
    pub const RECEIVE_ERROR: u32 = 16;
    /// Where the errno of sending stands.
    pub const SEND_ERROR: u32 = 24;
    /// Records, not a stream.
    pub const DATAGRAM: u64 = 1 << 32;
    /// It accepts.
    pub const LISTENING: u64 = 1 << 33;
    /// A connection is being made.
    pub const CONNECTING: u64 = 1 << 34;
    /// There is a peer.
    pub const CONNECTED: u64 = 1 << 35;
    /// Nothing comes after what has been received.
    pub const RECEIVE_END: u64 = 1 << 36;
    /// Nothing more is taken.
    pub const SEND_END: u64 = 1 << 37;
    /// Of the family `warp`.
    pub const WARP: u64 = 1 << 38;
    /// Closing it resets the connection.
    pub const RESET_ON_CLOSE: u64 = 1 << 39;
}

/// What a kernel needs to post by itself, as the host tells it.
pub mod qp_descriptor {
    /// The part of the queue pair's handle that never changes.
    pub const CONSTANTS: u64 = 0;
    /// What the [`peer`](super::peer) said.
    pub const PEER: u64 = 128;
    /// How long it is.
    pub const LEN: u64 = 192;
}

/// Where the peer may be written to, and how: part of a [`qp_descriptor`] line, and of a [`qp_slot`].
pub mod peer {
    /// Address of its receive ring.
    pub const RING: u64 = 0;
    /// Address of its word `received`.
    pub const RECEIVED: u64 = 8;
    /// Address of its word `taken`.
    pub const TAKEN: u64 = 16;
    /// The ring's key: 32 bits, as all that follow.
    pub const RING_KEY: u64 = 24;
    /// The key of the word `received`.
    pub const RECEIVED_KEY: u64 = 28;
    /// The key of the word `taken`.
    pub const TAKEN_KEY: u64 = 32;
    /// The ring's size, a power of two, and a multiple of our send ring's.
    pub const RING_SIZE: u64 = 36;
    /// The key of our own send ring.
    pub const SEND_KEY: u64 = 40;
    /// The number of the berth.
    pub const QP_SLOT: u64 = 44;
    /// How long it is.
    pub const LEN: u64 = 64;
}

/// A queue pair as kernels keep it.
pub mod qp_slot {
    /// Its handle.
    pub const HANDLE: u64 = 0;
    /// What the [`peer`](super::peer) said.
    pub const PEER: u64 = crate::stream::kernel::layout::LEN;
    /// How long it is.
    pub const LEN: u64 = 1280;
    const _: () = assert!(PEER + super::peer::LEN <= LEN);
}

/// A request of a kernel.
pub mod request {
    /// Its ticket plus one, written last.
    pub const NUMBER: u64 = 0;
    /// [`RequestOp`](super::Op): 32 bits.
    pub const OP: u64 = 8;
    /// The handle: 32 bits.
    pub const HANDLE: u64 = 12;
    /// What the operation wants beside it.
    pub const VALUE: u64 = 16;
    /// An option's number: 32 bits.
    pub const OPTION: u64 = 24;
    /// An address: family (16 bits: 4, 6, or 0 for none), port (16 bits), scope (32 bits), 16 bytes.
    pub const ADDRESS: u64 = 32;
    /// Of a `Close`, where no address is: bytes sent, ever. It counts in the family `warp`.
    pub const SENT: u64 = 40;
    /// Of a `Close`: bytes taken from the receive ring, ever.
    pub const CONSUMED: u64 = 48;
    /// How long it is.
    pub const LEN: u64 = 64;
}

/// The host's answer to a request.
pub mod reply {
    /// The request's number, written last.
    pub const NUMBER: u64 = 0;
    /// What the call returns: 0 or more, or the negative of an errno.
    pub const RESULT: u64 = 8;
    /// An address.
    pub const ADDRESS: u64 = 16;
    /// How long it is.
    pub const LEN: u64 = 64;
}

/// What stands before each datagram, and is all of an accepted connection. Records begin at multiples of their length.
pub mod record {
    /// Datagram: its length; connection: its handle. 32 bits.
    pub const VALUE: u64 = 0;
    /// Datagram: an errno in place of bytes, or 0. 32 bits.
    pub const ERROR: u64 = 4;
    /// Whose it is, or whose it shall be.
    pub const ADDRESS: u64 = 8;
    /// How long it is.
    pub const LEN: u64 = 32;
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RequestOp {
    /// A new socket: the value is the version of IP (4 or 6) and, 8 bits further up, the kind (1 a stream, 2 datagrams, 3 a
    /// stream of the family `warp`). `ESOCKTNOSUPPORT` for any other kind.
    Socket = 1,
    /// Give it an address.
    Bind,
    /// Accept connections; the value is how many may wait.
    Listen,
    /// Connect to an address.
    Connect,
    /// End a direction: 0 receiving, 1 sending, 2 both.
    Shutdown,
    /// Let go of it. Family `warp`: the value is how many operations its kernels have posted.
    Close,
    /// Set an option.
    SetOption,
    /// What an option is.
    GetOption,
    /// Its own address.
    LocalName,
    /// Its peer's address.
    PeerName,
    /// Family `warp`: its kernel gives the connection up, and the value is the errno: the peer lies, or cannot be reached.
    Fail,
}

impl RequestOp {
    /// The operation of that number.
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

/// What can be set on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum SockOption {
    /// Calls that would wait return EAGAIN: 0 or 1.
    NonBlocking = 1,
    /// How long sending and connecting wait, in nanoseconds; 0 is for ever.
    SendTimeout,
    /// How long receiving and accepting wait.
    ReceiveTimeout,
    /// Bytes of the send ring: set before connecting, or before a datagram socket is used.
    SendBuffer,
    /// Bytes of the receive ring.
    ReceiveBuffer,
    /// Send small pieces at once: 0 or 1; on unless told otherwise.
    NoDelay,
    /// 0: closing resets the connection and throws away what is not sent. Below 0, the default: it is sent first.
    Linger,
    /// The errno that ended it, or 0. To read only.
    Error,
    /// A listener may take an address of which old connections remain: 0 or 1; on unless told otherwise.
    ReuseAddress,
    /// Ask silent peers whether they live: 0 or 1.
    KeepAlive,
    /// Datagrams may go to broadcast addresses: 0 or 1.
    Broadcast,
    /// A socket of IPv6 leaves IPv4 alone: 0 or 1.
    V6Only,
}

impl SockOption {
    /// The setting of that number.
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

/// Bits of `poll`, as Linux has them.
pub mod events {
    /// Something can be received or accepted, or the end of the stream was reached.
    pub const IN: u16 = 0x1;
    /// Something can be sent.
    pub const OUT: u16 = 0x4;
    /// It failed. Told unasked.
    pub const ERR: u16 = 0x8;
    /// Both directions have ended. Told unasked.
    pub const HUP: u16 = 0x10;
    /// No such socket. Told unasked.
    pub const NVAL: u16 = 0x20;
    /// The peer has ended its direction.
    pub const RDHUP: u16 = 0x2000;
}

/// A handle is its socket's place, and the generation above it.
pub const fn handle(index: u16, generation: u16) -> i32 {
    (generation as i32) << 16 | index as i32
}

/// The place and the generation that a handle names.
pub const fn split_handle(handle: i32) -> (u16, u16) {
    ((handle & 0xffff) as u16, (handle >> 16) as u16)
}

/// Writes an address, or none (its family is 0 then), as kernels read it.
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
    fn unknown_numbers_are_nothing() {
        assert_eq!(RequestOp::from_raw(RequestOp::PeerName as u32), Some(RequestOp::PeerName));
        assert_eq!(RequestOp::from_raw(0), None);
        assert_eq!(RequestOp::from_raw(12), None);
        assert_eq!(SockOption::from_raw(SockOption::V6Only as u32), Some(SockOption::V6Only));
        assert_eq!(SockOption::from_raw(99), None);
    }
}
