//! Work requests and completions.

use super::host::{Atomic, Remote};
use crate::wire::Opcode;

/// The operation of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrOp {
    /// Send into a receive of the peer.
    Send,
    /// Send with immediate data.
    SendImm(u32),
    /// Send, and invalidate this rkey of the peer.
    SendInvalidate(u32),
    /// RDMA write.
    Write(Remote),
    /// RDMA write with immediate data, which consumes a receive of the peer.
    WriteImm(Remote, u32),
    /// RDMA read.
    Read(Remote),
    /// An atomic on a word of the peer's memory.
    Atomic(Remote, Atomic),
    /// No packets: completes in queue order.
    Local,
    /// Work that the host found invalid: fails in queue order, with this status.
    Bad(Status),
}

impl WrOp {
    /// Whether it waits for data from the peer rather than for an ACK.
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

/// Which earlier work must have completed before this work starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fence {
    /// None: it starts in queue order.
    None,
    /// All earlier reads and atomics.
    Reads,
    /// All earlier work.
    All,
}

/// A work request for the send queue.
///
/// ```
/// use warpwire_proto::qp::{Fence, WrOp, SendWr};
/// let work = SendWr { fence: Fence::Reads, ..SendWr::new(7, WrOp::Send, 4096) };
/// assert!(work.signaled);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendWr {
    /// The host's identifier; returned in [`Source::SendWr`](super::Source::SendWr) and in the
    /// completion.
    pub id: u64,
    /// The operation.
    pub op: WrOp,
    /// Length in bytes; for an atomic that of its word.
    pub len: u32,
    /// Whether the user wants a completion on success. The completion is reported to the host in
    /// any case, with this flag.
    pub signaled: bool,
    /// Which earlier work it waits for.
    pub fence: Fence,
    /// Solicited event: the peer's completion wakes waiters that are armed for solicited events.
    pub solicited: bool,
}

impl SendWr {
    /// A signaled work request without a fence.
    pub const fn new(id: u64, op: WrOp, len: u32) -> Self {
        Self { id, op, len, signaled: true, fence: Fence::None, solicited: false }
    }
}

/// The status of a completion, named as in verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Success.
    Success,
    /// A message is longer than the receive's buffers.
    LocalLength,
    /// The work request is invalid.
    LocalOperation,
    /// A local key, range or access right is wrong.
    LocalProtection,
    /// The queue pair failed before this work was done.
    Flushed,
    /// The peer's response is invalid.
    BadResponse,
    /// The peer's access to our memory failed in a message that had taken a receive.
    LocalAccess,
    /// The peer rejected the request as invalid, or not allowed on its queue pair.
    RemoteInvalidRequest,
    /// The peer denied access to the memory.
    RemoteAccess,
    /// The peer failed to execute the request.
    RemoteOperation,
    /// All retries timed out without a response.
    RetryExceeded,
    /// The peer had no receive in all retries.
    RnrRetryExceeded,
}

/// The completion of a work request. Completions come in the order of posting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendCompletion {
    /// The host's identifier of the work request.
    pub id: u64,
    /// Success, or why it failed.
    pub status: Status,
    /// Whether the user wants a completion on success.
    pub signaled: bool,
}

/// What a message that consumed a receive carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveKind {
    /// Data only.
    Data,
    /// Data and immediate data.
    Imm(u32),
    /// Data; this local key was invalidated.
    Invalidated(u32),
    /// Immediate data of an RDMA write; the data was placed in memory that the peer named.
    WriteImm(u32),
}

/// The completion of a receive, in the order in which receives were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveCompletion {
    /// The host's identifier of the receive.
    pub id: u64,
    /// Success, or why it failed.
    pub status: Status,
    /// The length of the message in bytes; of a datagram including the GRH.
    pub len: u32,
    /// What the message carried.
    pub kind: ReceiveKind,
    /// Whether the sender set the solicited-event bit.
    pub solicited: bool,
    /// The sender's queue pair number, of datagrams; 0 on connections.
    pub source_qp: u32,
}

/// An event of the queue pair rather than of one work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QpEvent {
    /// The first request arrived while the queue pair was in RTR.
    Established,
    /// The send queue has drained.
    Drained,
    /// The peer's request was invalid or not allowed; the queue pair failed.
    RequestError,
    /// The peer accessed memory without the right to; the queue pair failed.
    AccessError,
    /// A request of the peer failed for a local reason; the queue pair failed.
    Fatal,
}

/// The output of [`Qp::poll_event`](super::Qp::poll_event).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A work request completed.
    Sent(SendCompletion),
    /// A receive completed.
    Received(ReceiveCompletion),
    /// An event of the queue pair.
    Async(QpEvent),
}

/// Why work was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostError {
    /// The queue is full: poll completions, then retry.
    Full,
    /// The queue pair accepts no work in this state.
    State(super::State),
    /// Longer than 2^31 bytes or 2^23 - 1 packets, an atomic of another width, or a datagram longer
    /// than the MTU.
    Length(u32),
}

impl core::fmt::Display for PostError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Full => f.write_str("the send queue is full; poll completions first"),
            Self::State(state) => write!(f, "a queue pair in {state} accepts no work"),
            Self::Length(len) => write!(f, "{len} bytes is not a valid length for this work"),
        }
    }
}

impl core::error::Error for PostError {}
