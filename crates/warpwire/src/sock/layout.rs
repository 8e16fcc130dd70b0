//! Layout of the memory that the host and the kernels of a GPU share. `include/warpwire/sock.cuh`
//! defines the same structures and asserts their sizes; the suite `tests/sock` runs both.
//!
//! There are three areas of memory, each with one writer:
//!
//! | area | writer | memory | contents |
//! |---|---|---|---|
//! | host area | the host | device with a window, else pinned | see below |
//! | kernel area | kernels | pinned | see below |
//! | device states | kernels | device | request ticket, slot laps, [`DeviceState`] lines |
//!
//! The host area contains the [`Table`], the [`Heartbeat`], replies, [`HostState`] lines and
//! receive rings; the kernel area requests, [`DeviceCounters`], [activity flags](ACTIVITY_FLAGS)
//! and send rings. Only the flags have two writers: the host clears them. No side reads across
//! PCIe: each polls local memory, and only stores cross the bus.
//!
//! `warp` sockets have the same lines and rings. `RECEIVED` and `TAKEN` in their host state are
//! written by the peer's HCA. Their kernels post work themselves, and need three more areas, with
//! one slot per connection:
//!
//! | area | writer | memory | contents |
//! |---|---|---|---|
//! | queues | kernels | pinned | send queue entries and doorbell |
//! | polled | host, HCA | device with a window, else pinned | [`QpDescriptor`], completions |
//! | QP slots | kernels | device | [QP handle](crate::stream::kernel::layout) and [`PeerMemory`] |

use std::mem::offset_of;
use std::net::SocketAddr;

use crate::link;
pub use crate::link::{ADDRESS_LEN, address_from};

/// Version of the layout; headers and kernels compare it.
pub const VERSION: u32 = 5;

/// Number of activity flags, 32 bits each. A flag belongs to neighbouring sockets; a kernel sets it
/// to 1 after it has changed the [`DeviceCounters`] of one of them, and the host clears it before
/// it reads those counters. So what the host polls does not grow with the number of idle sockets.
///
/// They are words and no bitmap: kernels would need atomic operations on host memory to set a bit,
/// which PCIe may not have.
pub const ACTIVITY_FLAGS: u64 = 128;

/// Log2 of the number of sockets that share an activity flag.
pub const fn activity_shift(sockets: u32) -> u32 {
    let mut shift = 0;
    while (sockets as u64).div_ceil(1 << shift) > ACTIVITY_FLAGS {
        shift += 1;
    }
    shift
}

/// A value with a fixed size and no padding, in the byte order of the GPU, which is little-endian.
trait Plain: Sized {
    fn put(&self, into: &mut [u8]);
    fn get(from: &[u8]) -> Self;
}

macro_rules! plain_words {
    ($($word:ty),*) => {$(
        impl Plain for $word {
            fn put(&self, into: &mut [u8]) {
                into[..size_of::<$word>()].copy_from_slice(&self.to_le_bytes());
            }

            fn get(from: &[u8]) -> Self {
                let mut bytes = [0; size_of::<$word>()];
                bytes.copy_from_slice(&from[..size_of::<$word>()]);
                Self::from_le_bytes(bytes)
            }
        }
    )*};
}

plain_words!(u8, u32, i32, u64, i64);

impl<T: Plain, const N: usize> Plain for [T; N] {
    fn put(&self, into: &mut [u8]) {
        for (item, bytes) in self.iter().zip(into.chunks_exact_mut(size_of::<T>())) {
            item.put(bytes);
        }
    }

    fn get(from: &[u8]) -> Self {
        std::array::from_fn(|at| T::get(&from[at * size_of::<T>()..]))
    }
}

/// Defines a structure of the shared memory, as in the header, and a module with the offsets of its
/// fields for accesses to single words.
macro_rules! shared_struct {
    (
        $(#[$doc:meta])*
        $vis:vis struct $name:ident in $module:ident {
            $($(#[$field_doc:meta])* $field:ident: $type:ty $(= $offset:ident)?,)*
        }
        $($item:item)*
    ) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        $vis struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        const _: () = assert!(
            0 $(+ size_of::<$type>())* == size_of::<$name>(),
            "no padding: the bytes of every field are copied"
        );

        impl Plain for $name {
            fn put(&self, into: &mut [u8]) {
                $(self.$field.put(&mut into[offset_of!($name, $field)..]);)*
            }

            fn get(from: &[u8]) -> Self {
                Self { $($field: Plain::get(&from[offset_of!($name, $field)..]),)* }
            }
        }

        impl $name {
            /// The bytes in memory.
            pub fn encode(&self) -> [u8; size_of::<Self>()] {
                let mut bytes = [0; size_of::<Self>()];
                self.put(&mut bytes);
                bytes
            }

            /// The structure with these bytes in memory.
            pub fn decode(bytes: &[u8; size_of::<Self>()]) -> Self {
                Self::get(bytes)
            }
        }

        #[doc = concat!("Offsets in [`", stringify!($name), "`].")]
        pub mod $module {
            $($(
                #[doc = concat!("Offset of `", stringify!($field), "`.")]
                pub const $offset: u64 = std::mem::offset_of!(super::$name, $field) as u64;
            )?)*
            /// Length in bytes.
            pub const LEN: u64 = size_of::<super::$name>() as u64;
            $($item)*
        }
    };
}

shared_struct! {
    /// The table: addresses and sizes of everything else. Kernels get its address only.
    pub struct Table in table {
        /// [`VERSION`] of the layout.
        version: u32 = VERSION,
        /// Number of sockets.
        sockets: u32 = SOCKETS,
        /// Number of request slots, a power of two.
        slots: u32 = SLOTS,
        /// The host counts as dead after this many milliseconds without a heartbeat.
        heartbeat_timeout: u32 = HEARTBEAT_TIMEOUT,
        /// Address of the [`HostState`] lines.
        host_states: u64 = HOST_STATES,
        /// Address of the [`DeviceCounters`].
        device_counters: u64 = DEVICE_COUNTERS,
        /// Address of the [`DeviceState`] lines.
        device_states: u64 = DEVICE_STATES,
        /// Address of the [`SockRequest`]s.
        requests: u64 = REQUESTS,
        /// Address of the [`SockReply`]s.
        replies: u64 = REPLIES,
        /// Address of the slot laps, 64 bits per request slot: how often the slot was used and
        /// freed.
        slot_laps: u64 = SLOT_LAPS,
        /// Address of the ticket counter of requests, 64 bits.
        ticket: u64 = TICKET,
        /// Address of the [`Heartbeat`].
        heartbeat: u64 = HEARTBEAT,
        /// Address of the [`qp_slot`]s.
        qp_slots: u64 = QP_SLOTS,
        /// Address of the [activity flags](ACTIVITY_FLAGS).
        activity: u64 = ACTIVITY,
        /// See [`activity_shift`].
        activity_shift: u32 = ACTIVITY_SHIFT,
        /// Zero.
        unused: [u32; 7],
    }
}

shared_struct! {
    /// The host's heartbeat, alone in its 128 bytes.
    pub struct Heartbeat in heartbeat {
        /// Incremented every 20 ms by the host.
        count: u64 = COUNT,
        /// 1 once the host has ended.
        closed: u32 = CLOSED,
        /// Zero.
        unused: [u32; 29],
    }
}

shared_struct! {
    /// The state of one socket, written by the host.
    pub struct HostState in host_state {
        /// The [`state`] word.
        state: u64 = STATE,
        /// Total bytes put into the receive ring; `warp`: written by the peer's HCA.
        received: u64 = RECEIVED,
        /// Total bytes taken from the send ring; `warp`: written by the peer's HCA.
        taken: u64 = TAKEN,
        /// Address of the receive ring.
        receive_ring: u64 = RECEIVE_RING,
        /// Address of the send ring.
        send_ring: u64 = SEND_RING,
        /// Size of the receive ring, a power of two.
        receive_size: u32 = RECEIVE_SIZE,
        /// Size of the send ring, a power of two.
        send_size: u32 = SEND_SIZE,
        /// `warp`: address of the [`QpDescriptor`]; 0 before there is one.
        qp_descriptor: u64 = QP_DESCRIPTOR,
        /// `warp`: number of consumed bytes after which the peer is notified.
        report_at: u32 = REPORT_AT,
        /// Zero.
        unused: u32,
    }
}

shared_struct! {
    /// One socket's counters, written by kernels: the lower halves of two totals in one word. The
    /// host compares it with the last value it saw.
    pub struct DeviceCounters in device_counters {
        /// Bytes put into the send ring.
        sent: u32 = SENT,
        /// Bytes taken from the receive ring.
        consumed: u32 = CONSUMED,
    }
}

shared_struct! {
    /// The state of one socket that only kernels use.
    pub struct DeviceState in device_state {
        /// The generation of the open handle; 0 once it is closed.
        generation: u32 = GENERATION,
        /// `NON_BLOCKING`, the directions that were shut down, `WARP` and `FIN`.
        flags: u32 = FLAGS,
        /// Total bytes put into the send ring.
        sent: u64 = SENT,
        /// Total bytes taken from the receive ring.
        consumed: u64 = CONSUMED,
        /// Lock of the sending direction: `UNLOCKED`, `LOCKED`, `SPAN_OUT` or `CLOSED`.
        send_lock: u32 = SEND_LOCK,
        /// Lock of the receiving direction.
        receive_lock: u32 = RECEIVE_LOCK,
        /// Timeout of send and connect in nanoseconds; 0 means none.
        send_timeout: u64 = SEND_TIMEOUT,
        /// Timeout of receive and accept in nanoseconds; 0 means none.
        receive_timeout: u64 = RECEIVE_TIMEOUT,
        /// `warp`: total bytes consumed that were reported to the peer.
        reported: u64 = REPORTED,
        /// `warp`: lock for posting: `UNLOCKED` or `LOCKED`.
        post_lock: u32 = POST_LOCK,
        /// `warp`: index of the [`qp_slot`] plus one; 0 until it is initialised.
        qp_slot: u32 = QP_SLOT,
    }

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

shared_struct! {
    /// The peer's memory that may be written, and its keys: part of a [`QpDescriptor`] and of a
    /// [`qp_slot`].
    pub struct PeerMemory in peer {
        /// Address of the peer's receive ring.
        ring: u64 = RING,
        /// Address of the peer's word `received`.
        received: u64 = RECEIVED,
        /// Address of the peer's word `taken`.
        taken: u64 = TAKEN,
        /// Rkey of the ring.
        ring_key: u32 = RING_KEY,
        /// Rkey of the word `received`.
        received_key: u32 = RECEIVED_KEY,
        /// Rkey of the word `taken`.
        taken_key: u32 = TAKEN_KEY,
        /// Size of the ring, a power of two and a multiple of our `send_size`.
        ring_size: u32 = RING_SIZE,
        /// Lkey of our own send ring.
        send_key: u32 = SEND_KEY,
        /// Index of the QP slot.
        qp_slot: u32 = QP_SLOT,
        /// Zero.
        unused: [u64; 2],
    }
}

shared_struct! {
    /// What a kernel needs to post to a connection's queue pair, written by the host.
    pub struct QpDescriptor in qp_descriptor {
        /// The constant part of the queue pair's handle.
        constants: [u64; 16] = CONSTANTS,
        /// The peer's addresses and keys.
        peer: PeerMemory = PEER,
    }
}

/// A queue pair's state that only kernels use.
pub mod qp_slot {
    /// The queue pair's handle.
    pub const HANDLE: u64 = 0;
    /// The [`PeerMemory`](super::PeerMemory)'s addresses and keys.
    pub const PEER: u64 = crate::stream::kernel::layout::LEN;
    /// Length in bytes, a multiple of the handle's alignment.
    pub const LEN: u64 = (PEER + super::peer::LEN).next_multiple_of(128);
}

shared_struct! {
    /// A request of a kernel to the host.
    pub struct SockRequest in request {
        /// The ticket plus one, written last.
        number: u64 = NUMBER,
        /// The [`RequestOp`].
        op: u32 = OP,
        /// The socket's handle.
        handle: i32 = HANDLE,
        /// The argument of the operation.
        value: u64 = VALUE,
        /// The [`SockOption`].
        option: u32 = OPTION,
        /// Zero.
        unused: u32,
        /// An address: family (16 bits: 4, 6, or 0 for none), port (16 bits), scope (32 bits), 16
        /// bytes.
        address: [u8; ADDRESS_LEN] = ADDRESS,
        /// Zero.
        more: u64,
    }

    /// `Close` only, in the bytes of the address: total bytes sent. Used for `warp` sockets.
    pub const SENT: u64 = ADDRESS + 8;
    /// `Close` only: total bytes taken from the receive ring.
    pub const CONSUMED: u64 = SENT + 8;
}

shared_struct! {
    /// The host's reply to a request.
    pub struct SockReply in reply {
        /// The request's number, written last.
        number: u64 = NUMBER,
        /// The result: 0 or more, or a negated errno.
        result: i64 = RESULT,
        /// An address, if the operation returns one.
        address: [u8; ADDRESS_LEN] = ADDRESS,
        /// Zero.
        unused: [u64; 3],
    }
}

shared_struct! {
    /// The header of a datagram in a ring, or an accepted connection in a listener's ring. Records
    /// are aligned to their length.
    pub struct Record in record {
        /// Datagram: its length; connection: its handle.
        value: u32 = VALUE,
        /// Datagram: an errno instead of data, or 0.
        error: u32 = ERROR,
        /// The address of the sender, the destination or the connected peer.
        address: [u8; ADDRESS_LEN] = ADDRESS,
    }
}

// `sock.cuh` asserts the same sizes.
const _: () = assert!(table::LEN == 128 && heartbeat::LEN == 128 && host_state::LEN == 64);
const _: () = assert!(device_counters::LEN == 8 && device_state::LEN == 64 && peer::LEN == 64);
const _: () = assert!(qp_descriptor::LEN == 192 && qp_slot::LEN == 1280 && record::LEN == 32);
const _: () = assert!(request::LEN == 64 && reply::LEN == 64);

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
    fn structures_are_encoded_field_by_field() {
        let record = Record { value: 0x0403_0201, error: 5, address: address_bytes(None) };
        let bytes = record.encode();
        assert_eq!(bytes[..8], [1, 2, 3, 4, 5, 0, 0, 0]);
        assert_eq!(Record::decode(&bytes), record);
        let peer = PeerMemory { taken: 7, qp_slot: 9, unused: [1, 2], ..PeerMemory::default() };
        let descriptor = QpDescriptor { peer, ..QpDescriptor::default() };
        let bytes = descriptor.encode();
        assert_eq!(bytes[(qp_descriptor::PEER + peer::TAKEN) as usize], 7);
        assert_eq!(bytes[(qp_descriptor::PEER + peer::QP_SLOT) as usize], 9);
        assert_eq!(QpDescriptor::decode(&bytes), descriptor);
        let request = SockRequest { handle: -1, ..SockRequest::default() };
        assert_eq!(SockRequest::decode(&request.encode()).handle, -1);
    }

    #[test]
    fn every_socket_has_an_activity_flag() {
        for sockets in [1, 2, 127, 128, 129, 1000, 1024, 1025, 65_535] {
            let last = u64::from(sockets - 1) >> activity_shift(sockets);
            assert!(last < ACTIVITY_FLAGS, "{sockets}");
        }
        assert_eq!((activity_shift(128), activity_shift(129)), (0, 1));
        assert_eq!((activity_shift(1024), activity_shift(65_535)), (3, 9));
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
