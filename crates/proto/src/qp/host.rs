//! What a queue pair requires from the owner of the memory and the receive queue.

use core::ops::BitOr;

use crate::psn::Psn;

/// Remote access rights, of memory and of a queue pair. Local access is checked by the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Access(u8);

impl Access {
    /// No remote access.
    pub const NONE: Self = Self(0);
    /// RDMA write.
    pub const REMOTE_WRITE: Self = Self(1);
    /// RDMA read.
    pub const REMOTE_READ: Self = Self(2);
    /// Atomics.
    pub const REMOTE_ATOMIC: Self = Self(4);
    /// All of the above.
    pub const ALL: Self = Self(7);

    /// Whether all rights of `other` are included.
    pub const fn contains(self, other: Self) -> bool {
        other.0 & !self.0 == 0
    }
}

impl BitOr for Access {
    type Output = Self;

    fn bitor(self, more: Self) -> Self {
        Self(self.0 | more.0)
    }
}

/// The host's answer to a memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum HostStatus {
    /// The access was made, or is permitted.
    Ready,
    /// Not possible at this time (the page is not resident, the data is in transit). The peer gets
    /// an RNR NAK; our own sending pauses until the next poll.
    Retry,
    /// The key, the range or the access right is wrong.
    Denied,
}

/// An address in registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Remote {
    /// The address, in the address space of the registration (iova).
    pub address: u64,
    /// The registration's key.
    pub key: u32,
}

impl Remote {
    /// The address `bytes` further on. It wraps; the host, which checks the range, then denies it.
    #[must_use]
    pub const fn forward(self, bytes: u32) -> Self {
        Self { address: self.address.wrapping_add(bytes as u64), key: self.key }
    }
}

/// A receive that the host took from its queue for a message that starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receive {
    /// The host's identifier; returned in [`Target::Receive`] and in the completion.
    pub id: u64,
    /// Capacity of its buffers in bytes.
    pub capacity: u32,
}

/// The width of a masked atomic. Other atomics have eight bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 4 bytes.
    Four,
    /// 8 bytes.
    Eight,
}

/// An atomic on a word in host byte order. The masked ones are ConnectX's; their wire format is
/// defined in [`wire`](crate::wire), and other implementations do not understand it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Store `swap` if the value is `compare`.
    CompareSwap {
        /// The expected value.
        compare: u64,
        /// The value to store.
        swap: u64,
    },
    /// Add, wrapping.
    FetchAdd {
        /// The value to add.
        add: u64,
    },
    /// Store the bits of `swap` under `swap_mask` if those under `compare_mask` equal `compare`'s.
    MaskedCompareSwap {
        /// The width of the word.
        width: Width,
        /// The expected value.
        compare: u64,
        /// The value to store.
        swap: u64,
        /// The bits to compare.
        compare_mask: u64,
        /// The bits to store.
        swap_mask: u64,
    },
    /// Add, with no carry out of the bits that are set in `boundary`.
    MaskedFetchAdd {
        /// The width of the word.
        width: Width,
        /// The value to add.
        add: u64,
        /// The bits at which carries stop.
        boundary: u64,
    },
}

impl Atomic {
    /// The width of the word in bytes.
    pub const fn len(&self) -> u32 {
        match self {
            Self::MaskedCompareSwap { width: Width::Four, .. }
            | Self::MaskedFetchAdd { width: Width::Four, .. } => 4,
            _ => 8,
        }
    }

    /// Always false: atomics have 4 or 8 bytes.
    pub const fn is_empty(&self) -> bool {
        false
    }
}

/// Where the payload of a received packet is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// In a receive's buffers.
    Receive {
        /// The receive.
        id: u64,
        /// Offset in the message in bytes.
        offset: u32,
    },
    /// In the first 40 bytes of a receive: not payload, but the GRH with the datagram's sender.
    Grh {
        /// The receive.
        id: u64,
    },
    /// In memory that the peer named.
    Remote(Remote),
    /// In the buffers of one of our reads.
    Response {
        /// The work request.
        id: u64,
        /// Offset in the message in bytes.
        offset: u32,
    },
}

/// Where the payload of a packet to send is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// From the buffers of a posted work request.
    SendWr {
        /// The work request.
        id: u64,
        /// Offset in the message in bytes.
        offset: u32,
    },
    /// From memory that the peer reads.
    Remote {
        /// The first byte.
        at: Remote,
        /// Bytes of the request from here to its end.
        left: u32,
        /// The PSN of the request. Data may be read ahead within a request, but not for the next
        /// one.
        request: Psn,
    },
}

/// The owner of memory, keys and receives, as a queue pair sees it.
///
/// The protocol decides which bytes move, and in which order; the host moves them. Each call is
/// made while a packet is handled or polled, and its result decides how that continues. The host
/// knows the received packet, because it passed the headers in.
pub trait Host {
    /// Takes the next receive from the queue; `None` if it is empty: the peer then gets an RNR NAK.
    fn take_receive(&mut self) -> Option<Receive>;

    /// Whether the peer may access `len` bytes at `at` in this way. Called when a message starts,
    /// and again when its first packet is retransmitted after an RNR NAK.
    fn may_access(&mut self, access: Access, at: Remote, len: u32) -> HostStatus;

    /// Places `len` bytes of payload of the received packet.
    fn place(&mut self, to: Target, len: u32) -> HostStatus;

    /// Executes an atomic, and returns the previous value. Called exactly once for each atomic of
    /// the peer that succeeds.
    fn execute(&mut self, at: Remote, atomic: Atomic) -> Result<u64, HostStatus>;

    /// Invalidates a local key (send with invalidate).
    fn invalidate(&mut self, key: u32) -> HostStatus;

    /// Stores the result of one of our atomics.
    fn store_result(&mut self, id: u64, value: u64) -> HostStatus;

    /// Reads `len` bytes of payload, or checks that they can be read now: on `Ready` the packet is
    /// returned by the call that is in progress. Its headers will be `headers_len` long, for a host
    /// that copies the payload right behind them.
    fn fetch(&mut self, from: Source, len: u32, headers_len: usize) -> HostStatus;
}
