//! Work requests and completions.

use super::host::{Atomic, Host, HostStatus, Remote};
use super::window::MwBind;
use crate::wire::Opcode;

/// The operation of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp {
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
    /// Bind a memory window. No packets: executed when it would start, so that later work may send
    /// the new key.
    Bind(MwBind),
    /// Invalidate a key of our own memory. No packets: executed when it would start.
    LocalInvalidate(u32),
    /// No packets: completes in queue order.
    Local,
    /// Work that the host found invalid: fails in queue order, with this status.
    Bad(Status),
}

impl SendOp {
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
        matches!(self, Self::Bind(_) | Self::LocalInvalidate(_) | Self::Local | Self::Bad(_))
    }

    /// Executes work that changes a key. `None` if the host cannot do it now.
    #[cold]
    pub(super) fn change_key<H: Host>(&self, host: &mut H) -> Option<Status> {
        let (done, refused) = match self {
            Self::Bind(bind) => (host.bind(bind), Status::MwBind),
            Self::LocalInvalidate(key) => (host.invalidate(*key), Status::LocalQpOperation),
            _ => (HostStatus::Ready, Status::Success),
        };
        match done {
            HostStatus::Ready => Some(Status::Success),
            HostStatus::Retry => None,
            HostStatus::Denied => Some(refused),
        }
    }
}

/// Which earlier work of the send queue must have completed before this work starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Fence {
    /// None: it starts in queue order.
    #[default]
    None,
    /// All earlier reads and atomics.
    Reads,
    /// All earlier work. libibverbs has no such fence.
    All,
}

/// A work request for the send queue.
///
/// ```
/// use warpwire_proto::qp::{Fence, SendOp, SendWr};
/// let work = SendWr { fence: Fence::Reads, ..SendWr::new(7, SendOp::Send, 4096) };
/// assert!(work.signaled);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendWr {
    /// The host's identifier; returned in [`Source::SendWr`](super::Source::SendWr) and in the
    /// completion.
    pub id: u64,
    /// The operation.
    pub op: SendOp,
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
    pub const fn new(id: u64, op: SendOp, len: u32) -> Self {
        Self { id, op, len, signaled: true, fence: Fence::None, solicited: false }
    }
}

/// Status of a completion; names and numbers are those of `ibv_wc_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Status {
    /// The work succeeded.
    Success = 0,
    /// A message is longer than its receive buffer, or than the maximum.
    LocalLength = 1,
    /// The work request is malformed or not valid on this queue pair.
    LocalQpOperation = 2,
    /// A local buffer is not in a memory region of the QP's domain, or lacks the access right.
    LocalProtection = 4,
    /// Flushed: the queue pair was in the error state before the work was executed.
    Flushed = 5,
    /// A memory window could not be bound.
    MwBind = 6,
    /// The peer sent an unexpected response.
    BadResponse = 7,
    /// An operation of the peer violated the access rights of local memory.
    LocalAccess = 8,
    /// The peer rejected the request as invalid.
    RemoteInvalidRequest = 9,
    /// The peer's memory protection rejected the access: rkey, range or access right.
    RemoteAccess = 10,
    /// The peer failed to execute the operation.
    RemoteOperation = 11,
    /// The transport retries were used up without an answer.
    RetryExceeded = 12,
    /// The RNR retries were used up: the peer had no receive posted.
    RnrRetryExceeded = 13,
    /// The peer aborted the operation.
    RemoteAbort = 16,
    /// Any other error; see the vendor syndrome.
    General = 21,
}

impl core::fmt::Display for Status {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.pad(match self {
            Self::Success => "success",
            Self::LocalLength => "local length error",
            Self::LocalQpOperation => "local QP operation error",
            Self::LocalProtection => "local protection error",
            Self::Flushed => "work request flushed",
            Self::MwBind => "memory window bind error",
            Self::BadResponse => "bad response",
            Self::LocalAccess => "local access error",
            Self::RemoteInvalidRequest => "remote invalid request",
            Self::RemoteAccess => "remote access error",
            Self::RemoteOperation => "remote operation error",
            Self::RetryExceeded => "transport retry counter exceeded",
            Self::RnrRetryExceeded => "receiver-not-ready retry counter exceeded",
            Self::RemoteAbort => "remote aborted",
            Self::General => "general error",
        })
    }
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

/// The output of [`RcQp::poll_event`](super::RcQp::poll_event).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtocolEvent {
    /// A work request completed.
    Sent(SendCompletion),
    /// A receive completed.
    Received(ReceiveCompletion),
    /// An event of the queue pair.
    Async(QpEvent),
}

/// Why work was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendQueueError {
    /// The queue is full: poll completions, then retry.
    Full,
    /// The queue pair accepts no work in this state.
    State(super::State),
    /// Longer than 2^31 bytes or 2^23 - 1 packets, an atomic of another width, or a datagram longer
    /// than the MTU.
    Length(u32),
}

impl core::fmt::Display for SendQueueError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Full => f.write_str("the send queue is full; poll completions first"),
            Self::State(state) => write!(f, "a queue pair in {state} accepts no work"),
            Self::Length(len) => write!(f, "{len} bytes is not a valid length for this work"),
        }
    }
}

impl core::error::Error for SendQueueError {}
