//! What a queue pair asks of whoever owns the memory and the receive queue.

use core::ops::BitOr;

use crate::psn::Psn;

/// What a peer may do to memory, and through a queue pair. Local access is the host's own matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Access(u8);

impl Access {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// Write to it.
    pub const REMOTE_WRITE: Self = Self(1);
    /// Read from it.
    pub const REMOTE_READ: Self = Self(2);
    /// Run atomics on it.
    pub const REMOTE_ATOMIC: Self = Self(4);
    /// Everything.
    pub const ALL: Self = Self(7);

    /// Whether all of `other` is allowed.
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

/// An answer to a question about memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum HostStatus {
    /// It is done, or may be done.
    Ready,
    /// Not at this moment (the page is not there, the data is on its way): ask again. A peer is told to come
    /// again later; our own sending pauses until the next poll.
    Retry,
    /// The key, the range or the right is wrong.
    Denied,
}

/// A place in registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Remote {
    /// The address, in the region's own numbering.
    pub address: u64,
    /// The region's key.
    pub key: u32,
}

impl Remote {
    /// The place `bytes` further on. The address wraps: the host, who checks the range, refuses it.
    #[must_use]
    pub const fn forward(self, bytes: u32) -> Self {
        Self { address: self.address.wrapping_add(bytes as u64), key: self.key }
    }
}

/// A receive that the host took from its queue for a message that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receive {
    /// The host's name for it; comes back in [`Target::Receive`] and in the completion.
    pub id: u64,
    /// How many bytes its buffers hold.
    pub capacity: u32,
}

/// How many bytes an atomic with masks works on. Those without work on eight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// Four.
    Four,
    /// Eight.
    Eight,
}

/// An atomic to execute on a word in the host's byte order. Those with masks are ConnectX's; they go over the wire
/// in a form of our own, which only we understand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Store `swap` if the value is `compare`.
    CompareSwap {
        /// What must be there.
        compare: u64,
        /// What to store.
        swap: u64,
    },
    /// Add, wrapping.
    FetchAdd {
        /// What to add.
        add: u64,
    },
    /// Store the bits of `swap` under `swap_mask` if those under `compare_mask` are `compare`'s.
    MaskedCompareSwap {
        /// On how many bytes.
        width: Width,
        /// What must be there.
        compare: u64,
        /// What to store.
        swap: u64,
        /// Which bits must be there.
        compare_mask: u64,
        /// Which bits to store.
        swap_mask: u64,
    },
    /// Add, with no carry out of the bits that `boundary` marks.
    MaskedFetchAdd {
        /// On how many bytes.
        width: Width,
        /// What to add.
        add: u64,
        /// Where carries stop.
        boundary: u64,
    },
}

impl Atomic {
    /// How many bytes it works on.
    pub const fn len(&self) -> u32 {
        match self {
            Self::MaskedCompareSwap { width: Width::Four, .. }
            | Self::MaskedFetchAdd { width: Width::Four, .. } => 4,
            _ => 8,
        }
    }

    /// Always false.
    pub const fn is_empty(&self) -> bool {
        false
    }
}

/// Where the payload of a packet that came in belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Into a receive's buffers.
    Receive {
        /// Which.
        id: u64,
        /// How many bytes of it lie before.
        offset: u32,
    },
    /// Into the first 40 bytes of a receive: not payload, but who sent the datagram.
    Grh {
        /// Which receive.
        id: u64,
    },
    /// Into memory that the peer named.
    Remote(Remote),
    /// Into the buffers of one of our reads.
    Response {
        /// The work's name.
        id: u64,
        /// How many bytes of it lie before.
        offset: u32,
    },
}

/// Where the payload of a packet that goes out lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// In the buffers of posted work.
    SendWr {
        /// The work's name.
        id: u64,
        /// How many bytes of it lie before.
        offset: u32,
    },
    /// In memory that the peer reads.
    Remote {
        /// Where.
        at: Remote,
        /// How many bytes the request still asks for, these included.
        left: u32,
        /// The number of the request, to tell it from others: data may be fetched ahead, but not for the next.
        request: Psn,
    },
}

/// The owner of memory, keys and receives, as a queue pair sees it.
///
/// The protocol decides *that* bytes move, and in which order; the host moves them. Each call is made while a
/// packet is handled or polled, and the answer decides how it goes on. The host has the packet's bytes at
/// hand: it is the one that passed its headers in.
pub trait Host {
    /// Takes the next receive from the queue; `None` if there is none, and the peer is told to come again.
    fn take_receive(&mut self) -> Option<Receive>;

    /// Whether the peer may access `len` bytes there in that way. Asked when a message begins, and again when
    /// its first packet comes again because something was not ready.
    fn may_access(&mut self, access: Access, at: Remote, len: u32) -> HostStatus;

    /// Places the payload of the packet at hand, `len` bytes of it.
    fn place(&mut self, to: Target, len: u32) -> HostStatus;

    /// Executes an atomic on the word there, and returns what was there before. Asked exactly once for
    /// each atomic of the peer that succeeds.
    fn execute(&mut self, at: Remote, atomic: Atomic) -> Result<u64, HostStatus>;

    /// Makes a key of ours useless to the peer.
    fn invalidate(&mut self, key: u32) -> HostStatus;

    /// Stores the result of one of our atomics.
    fn store_result(&mut self, id: u64, value: u64) -> HostStatus;

    /// Fetches `len` bytes of payload, or tells whether that can be done now: the packet that they belong to
    /// follows at once if the answer is yes. Its headers will be `headers_len` long, for a host that puts the
    /// payload where it goes.
    fn fetch(&mut self, from: Source, len: u32, headers_len: usize) -> HostStatus;
}
