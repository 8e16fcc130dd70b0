//! What a queue pair requires from the owner of the memory and the receive queue.

use super::{Access, MwBind};
use crate::psn::Psn;

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

/// An address in the registered memory of a peer; of our own when the peer names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Remote {
    /// The address, in the address space of the registration (iova).
    pub address: u64,
    /// The remote key of the registration.
    pub rkey: u32,
}

impl Remote {
    /// The address `bytes` further on. It wraps; the host, which checks the range, then denies it.
    #[must_use]
    pub const fn forward(self, bytes: u32) -> Self {
        Self { address: self.address.wrapping_add(bytes as u64), rkey: self.rkey }
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

/// Operand width of an [`Atomic`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicWidth {
    /// 4 bytes; only masked (extended) atomics.
    Four,
    /// 8 bytes.
    Eight,
}

impl AtomicWidth {
    /// Width in bytes.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }
}

/// An atomic operation with its operands, on a word in host byte order. 4-byte operands are in the
/// low half. The masked ones are ConnectX's; their packet format is defined in
/// [`wire`](crate::wire), and other implementations do not understand it.
///
/// ```
/// use warpwire_proto::qp::{Atomic, AtomicWidth};
/// assert_eq!(Atomic::FetchAdd { add: 7 }.apply(u64::MAX), 6);
/// let swap = Atomic::CompareSwap { compare: 1, swap: 9 };
/// assert_eq!((swap.apply(1), swap.apply(2)), (9, 2));
/// // Two 16-bit counters in one word: no carry from the lower into the upper one.
/// let (width, boundary) = (AtomicWidth::Four, 1 << 15);
/// let both = Atomic::MaskedFetchAdd { width, add: 0x0001_0001, boundary };
/// assert_eq!(both.apply(0x0005_ffff), 0x0006_0000);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Stores `swap` if the word equals `compare`.
    CompareSwap {
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Adds `add`, wrapping.
    FetchAdd {
        /// The addend.
        add: u64,
    },
    /// If the word equals `compare` in the bits of `compare_mask`, replaces the bits of `swap_mask`
    /// by those of `swap`.
    MaskedCompareSwap {
        /// Operand width.
        width: AtomicWidth,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
        /// Bits that are compared.
        compare_mask: u64,
        /// Bits that are replaced.
        swap_mask: u64,
    },
    /// Adds `add` field by field: each set bit of `boundary` is the top bit of a field, out of
    /// which nothing is carried.
    MaskedFetchAdd {
        /// Operand width.
        width: AtomicWidth,
        /// The addends, one per field.
        add: u64,
        /// Top bit of each field; all ones make it an exclusive or.
        boundary: u64,
    },
}

impl Atomic {
    /// Operand width; 8 bytes unless masked.
    pub const fn width(&self) -> AtomicWidth {
        match self {
            Self::CompareSwap { .. } | Self::FetchAdd { .. } => AtomicWidth::Eight,
            Self::MaskedCompareSwap { width, .. } | Self::MaskedFetchAdd { width, .. } => *width,
        }
    }

    /// The new value of a word that was `old`.
    #[inline]
    pub const fn apply(&self, old: u64) -> u64 {
        let new = match *self {
            Self::CompareSwap { compare, swap } => {
                if old == compare {
                    swap
                } else {
                    old
                }
            }
            Self::FetchAdd { add } => old.wrapping_add(add),
            Self::MaskedCompareSwap { compare, swap, compare_mask, swap_mask, width } => {
                if narrow((old ^ compare) & compare_mask, width) == 0 {
                    (old & !swap_mask) | (swap & swap_mask)
                } else {
                    old
                }
            }
            // Adding without the top bit of each field carries nothing out of a field. The top bit
            // is then the sum of itself, its addend and the carry into it: an exclusive or.
            Self::MaskedFetchAdd { add, boundary, .. } => {
                (old & !boundary).wrapping_add(add & !boundary) ^ ((old ^ add) & boundary)
            }
        };
        narrow(new, self.width())
    }
}

const fn narrow(value: u64, width: AtomicWidth) -> u64 {
    match width {
        AtomicWidth::Four => value & u32::MAX as u64,
        AtomicWidth::Eight => value,
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
        /// The PSN of the request. Data may be read ahead within a request, and for those that have
        /// arrived behind it, but not for others.
        request: Psn,
        /// With the first packet of a request: the requests that have arrived behind it and
        /// continue where it ends.
        following: FollowingReads,
    },
}

/// Reads that have arrived and continue where another one ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FollowingReads {
    /// Their bytes; 0 if there are none.
    pub len: u32,
    /// The PSN of the last of them; that of the first read if there are none.
    pub last: Psn,
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

    /// Invalidates a local key (send with invalidate, or work of our own).
    fn invalidate(&mut self, key: u32) -> HostStatus;

    /// Binds a memory window, for work of our own.
    fn bind(&mut self, bind: &MwBind) -> HostStatus {
        let _ = bind;
        HostStatus::Denied
    }

    /// Stores the result of one of our atomics.
    fn store_result(&mut self, id: u64, value: u64) -> HostStatus;

    /// Reads `len` bytes of payload, or checks that they can be read now: on `Ready` the packet is
    /// returned by the call that is in progress. Its headers will be `headers_len` long, for a host
    /// that copies the payload right behind them.
    fn fetch(&mut self, from: Source, len: u32, headers_len: usize) -> HostStatus;

    /// Keeps the received packet, headers and payload, in a slot below
    /// [`HOLD_SLOTS`](super::HOLD_SLOTS), until [`RcQp::take_held`](super::RcQp::take_held) names
    /// the slot, or another packet is held there. `false` if that is not possible: the peer then
    /// sends it again. Called with selective repeat only.
    fn hold(&mut self, slot: u32) -> bool {
        let _ = slot;
        false
    }
}
