//! Work that is posted, and how it ends.

use super::host::{Atomic, Remote};
use crate::wire::Opcode;

/// What posted work does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrOp {
    /// Send into a receive of the peer.
    Send,
    /// Send, with four bytes that arrive in the completion.
    SendImm(u32),
    /// Send, and invalidate a key of the peer.
    SendInvalidate(u32),
    /// Write into the peer's memory.
    Write(Remote),
    /// Write, then complete a receive of the peer with four bytes.
    WriteImm(Remote, u32),
    /// Read from the peer's memory.
    Read(Remote),
    /// Run an atomic on a word of the peer's memory.
    Atomic(Remote, Atomic),
    /// Nothing that the peer would see: completes in its turn.
    Local,
    /// Work that the host found wrong: fails in its turn, with this status.
    Bad(Status),
}

impl WrOp {
    /// Whether it waits for data of the peer rather than for an acknowledgement.
    pub(super) fn awaits_response(&self) -> bool {
        matches!(self, Self::Read(_) | Self::Atomic(..))
    }

    /// The opcode of its packets that are neither the first nor the last.
    #[inline]
    pub(super) fn middle(&self) -> Opcode {
        match self {
            Self::Write(_) | Self::WriteImm(..) => Opcode::WriteMiddle,
            _ => Opcode::SendMiddle,
        }
    }

    /// Whether no packet is sent for it.
    pub(super) fn is_local(&self) -> bool {
        matches!(self, Self::Local | Self::Bad(_))
    }
}

/// What work waits for before it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fence {
    /// Nothing but its turn.
    None,
    /// All earlier reads and atomics.
    Reads,
    /// All earlier work.
    All,
}

/// Work to post.
///
/// ```
/// use warpwire_proto::qp::{Fence, WrOp, SendWr};
/// let work = SendWr { fence: Fence::Reads, ..SendWr::new(7, WrOp::Send, 4096) };
/// assert!(work.signaled);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendWr {
    /// The host's name for it; comes back in [`Source::SendWr`](super::Source::Work) and in the completion.
    pub id: u64,
    /// What to do.
    pub op: WrOp,
    /// How many bytes; those of its word for an atomic.
    pub len: u32,
    /// Whether the user wants to see its success. It is reported in any case, with this flag.
    pub signaled: bool,
    /// What it waits for before it begins.
    pub fence: Fence,
    /// The peer's completion should wake who waits for solicited ones.
    pub solicited: bool,
}

impl SendWr {
    /// Signaled work without fence.
    pub const fn new(id: u64, op: WrOp, len: u32) -> Self {
        Self { id, op, len, signaled: true, fence: Fence::None, solicited: false }
    }
}

/// How work ended. The names are those of verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// As it should.
    Success,
    /// A message is longer than the receive's buffers.
    LocalLength,
    /// The work makes no sense.
    LocalOperation,
    /// Our own key, range or right is wrong.
    LocalProtection,
    /// The queue pair failed before this work was done.
    Flushed,
    /// The peer's answer makes no sense.
    BadResponse,
    /// The peer's access to our memory failed in a message that had taken a receive.
    LocalAccess,
    /// The peer finds the request senseless, or does not allow it on this queue pair.
    RemoteInvalidRequest,
    /// The peer does not allow access to that memory.
    RemoteAccess,
    /// The peer could not do it.
    RemoteOperation,
    /// No answer, however often we tried.
    RetryExceeded,
    /// The peer had no receive, however often we tried.
    RnrRetryExceeded,
}

/// The end of posted work. Completions come in the order of posting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendCompletion {
    /// The host's name for the work.
    pub id: u64,
    /// How it ended.
    pub status: Status,
    /// Whether the user wanted to see success.
    pub signaled: bool,
}

/// What came with a message that a receive was used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveKind {
    /// Data alone.
    Data,
    /// Data and four bytes.
    Imm(u32),
    /// Data; this key of ours was invalidated.
    Invalidated(u32),
    /// Four bytes; the data went into memory that the peer named.
    WriteImm(u32),
}

/// The end of a receive. They come in the order in which they were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveCompletion {
    /// The host's name for the receive.
    pub id: u64,
    /// How it ended.
    pub status: Status,
    /// The length of the message.
    pub len: u32,
    /// What came with it.
    pub kind: ReceiveKind,
    /// Whether the peer wants the receiver woken.
    pub solicited: bool,
    /// Who sent it, where that is not known from the connection: datagrams.
    pub source_qp: u32,
}

/// Something that befell the queue pair rather than one work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QpEvent {
    /// The first request came in before we were told to send.
    Established,
    /// The send queue is drained.
    Drained,
    /// The peer's request was senseless or not allowed: the queue pair failed.
    RequestError,
    /// The peer reached for memory that it may not access: the queue pair failed.
    AccessError,
    /// We could not do what the peer asked: the queue pair failed.
    Fatal,
}

/// What a queue pair has to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Posted work ended.
    Sent(SendCompletion),
    /// A receive ended.
    Received(ReceiveCompletion),
    /// Something befell the queue pair.
    Async(QpEvent),
}

/// Why work was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostError {
    /// The queue is full: take completions, then try again.
    Full,
    /// Work is not taken in this state.
    State(super::State),
    /// Longer than 2^31 bytes, or an atomic that is not 8, or a datagram longer than the MTU.
    Length(u32),
}

impl core::fmt::Display for PostError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Full => f.write_str("the send queue is full; take completions first"),
            Self::State(state) => write!(f, "a queue pair in {state} takes no work"),
            Self::Length(len) => write!(f, "{len} bytes are not a length that this work can have"),
        }
    }
}

impl core::error::Error for PostError {}
