//! Work to post.

use crate::mlx5::Atomic;

/// A range of registered memory. It lies in memory as libibverbs reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// Where it begins, in the registration's addresses.
    pub address: u64,
    /// How many bytes; below 2^31.
    pub len: u32,
    /// The registration's key.
    pub lkey: u32,
}

/// A place in the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The address, in the registration's addresses.
    pub address: u64,
    /// The registration's key.
    pub rkey: u32,
}

/// What work waits for before it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Fence {
    /// Nothing but its turn.
    #[default]
    None,
    /// All earlier reads and atomics.
    Reads,
    /// All earlier work. libibverbs has no such fence.
    All,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrOp {
    /// Send a message.
    Send,
    /// Send a message with four bytes beside it.
    SendImm([u8; 4]),
    /// Send a message, and invalidate a key of the peer.
    SendInvalidate(u32),
    /// Write to the peer's memory.
    Write(Remote),
    /// Write, then complete a receive of the peer with four bytes.
    WriteImm(Remote, [u8; 4]),
    /// Read from the peer's memory.
    Read(Remote),
    /// Change a word of the peer's memory; the value before comes into the request's memory. Masked atomics, and those
    /// of four bytes, are not for libibverbs.
    Atomic(Remote, Atomic),
    /// Nothing; it completes in its turn. libibverbs has none: there it is a write of no bytes.
    Nop,
    /// Hold the queue until that completion queue has made the completion with that number. Not for libibverbs.
    Wait {
        /// The completion queue's number.
        cqn: u32,
        /// The completion's number, from 0 on.
        index: u32,
    },
    /// Read memory of our own and let it go: what was placed before is visible when it completes. Not for libibverbs.
    Dump,
}

/// Whom a datagram is for; `A` is what a device knows a peer by.
#[derive(Debug)]
pub struct Destination<'a, A> {
    /// The peer.
    pub handle: &'a A,
    /// Its queue pair.
    pub qpn: u32,
    /// The key of that queue pair. With the upper bit set, the sender's own key goes along.
    pub qkey: u32,
}

// By hand: a reference may be copied whatever it refers to.
impl<A> Clone for Destination<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Destination<'_, A> {}

/// Work to post; `A` is what a device knows the peers of datagrams by.
///
/// ```
/// use warpwire::verbs::{WrOp, SendRequest, Sge};
/// let range = Sge { address: 0x1000, len: 64, lkey: 7 };
/// let request = SendRequest::new(1, WrOp::Send).with(std::slice::from_ref(&range)).solicited();
/// assert_eq!(request.data.len(), 1);
/// let small = SendRequest::new(2, WrOp::Send).inline(b"hello");
/// assert_eq!(small.inline, Some(&b"hello"[..]));
/// ```
#[derive(Debug)]
pub struct SendRequest<'a, A> {
    /// What the program calls it.
    pub id: u64,
    /// What to do.
    pub op: WrOp,
    /// The memory that it sends from, or fetches into.
    pub data: &'a [Sge],
    /// Bytes that go into the entry itself, instead of memory.
    pub inline: Option<&'a [u8]>,
    /// Whether success makes a completion, where the queue pair does not ask for all.
    pub signaled: bool,
    /// Whether the peer's completion should wake its owner.
    pub solicited: bool,
    /// What it waits for.
    pub fence: Fence,
    /// Whom a message of a datagram queue pair is for.
    pub destination: Option<Destination<'a, A>>,
}

impl<A> Clone for SendRequest<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for SendRequest<'_, A> {}

impl<'a, A> SendRequest<'a, A> {
    /// Signaled work without memory.
    pub const fn new(id: u64, op: WrOp) -> Self {
        Self {
            id,
            op,
            data: &[],
            inline: None,
            signaled: true,
            solicited: false,
            fence: Fence::None,
            destination: None,
        }
    }

    /// With this memory.
    #[must_use]
    pub const fn with(self, data: &'a [Sge]) -> Self {
        Self { data, ..self }
    }

    /// With these bytes, which are copied when it is posted.
    #[must_use]
    pub const fn inline(self, bytes: &'a [u8]) -> Self {
        Self { inline: Some(bytes), ..self }
    }

    /// Without a completion if it succeeds.
    #[must_use]
    pub const fn unsignaled(self) -> Self {
        Self { signaled: false, ..self }
    }

    /// Wakes the peer.
    #[must_use]
    pub const fn solicited(self) -> Self {
        Self { solicited: true, ..self }
    }

    /// Behind a fence.
    #[must_use]
    pub const fn fenced(self, fence: Fence) -> Self {
        Self { fence, ..self }
    }

    /// To that queue pair of that peer, as a datagram.
    #[must_use]
    pub const fn to(self, handle: &'a A, qpn: u32, qkey: u32) -> Self {
        Self { destination: Some(Destination { handle, qpn, qkey }), ..self }
    }
}

/// A receive to post.
///
/// ```
/// use warpwire::verbs::{ReceiveRequest, Sge};
/// let range = Sge { address: 0x1000, len: 64, lkey: 7 };
/// let receive = ReceiveRequest { id: 1, data: &[range] };
/// assert_eq!(receive.data[0].len, 64);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ReceiveRequest<'a> {
    /// What the program calls it.
    pub id: u64,
    /// Where the message goes.
    pub data: &'a [Sge],
}
