//! Work requests.

use warpwire_proto::qp::{Atomic, Fence, MwBind, Remote};

/// A scatter-gather entry: a range of registered memory. Laid out as libibverbs' `ibv_sge`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// The first byte's address, in the address space of the registration (iova).
    pub address: u64,
    /// Length in bytes, below 2^31.
    pub len: u32,
    /// The local key of the registration.
    pub lkey: u32,
}

/// The operation of a send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrOp {
    /// Send a message.
    Send,
    /// Send a message with immediate data (network byte order).
    SendImm([u8; 4]),
    /// Send a message, and invalidate this rkey of the peer.
    SendInvalidate(u32),
    /// RDMA write.
    Write(Remote),
    /// RDMA write with immediate data: also consumes a receive of the peer, which completes with
    /// it.
    WriteImm(Remote, [u8; 4]),
    /// RDMA read.
    Read(Remote),
    /// Atomically change a word of the peer's memory; the previous value is written to the
    /// request's memory. Masked and four-byte atomics are not supported by libibverbs.
    Atomic(Remote, Atomic),
    /// Bind a memory window, on a connected queue pair. Later work of the queue may send its new
    /// rkey. Fails with [`Status::MwBind`](warpwire_proto::qp::Status::MwBind). Software HCA only.
    BindMw(MwBind),
    /// Invalidate the rkey of a memory window of type 2 that this queue pair has bound, or end
    /// remote use of a registration. When it completes, no more bytes are read or written through
    /// the key. Software HCA only.
    LocalInvalidate(u32),
    /// No operation: completes in queue order. libibverbs has none; there it is a write of zero
    /// bytes.
    Nop,
    /// Hold the send queue until a completion queue has produced the completion with this index.
    /// Not supported by libibverbs.
    Wait {
        /// The completion queue's number.
        cqn: u32,
        /// The completion's index, counted from 0.
        index: u32,
    },
    /// Read local memory and discard the data: data placed before is visible when this completes.
    /// Not supported by libibverbs.
    Dump,
}

/// The destination of a datagram; `A` is the device's address handle.
#[derive(Debug)]
pub struct Destination<'a, A> {
    /// The peer's address handle.
    pub handle: &'a A,
    /// The destination queue pair's number.
    pub qpn: u32,
    /// The destination's Q_Key. With the top bit set, the sending queue pair's own Q_Key is sent
    /// instead.
    pub qkey: u32,
}

// By hand: derived, it would require `A: Clone`.
impl<A> Clone for Destination<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Destination<'_, A> {}

/// A work request for the send queue; `A` is the device's address handle, used by datagrams.
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
    /// The program's identifier, returned in the completion (`wr_id`).
    pub id: u64,
    /// The operation.
    pub op: WrOp,
    /// The memory to send from, or to read into.
    pub data: &'a [Sge],
    /// Bytes copied into the WQE itself when it is posted, instead of `data`.
    pub inline: Option<&'a [u8]>,
    /// Whether success produces a completion; ignored if the queue pair signals all work.
    pub signaled: bool,
    /// Whether to set the solicited-event bit: the peer's completion then wakes waiters armed for
    /// solicited events.
    pub solicited: bool,
    /// Which earlier work it waits for.
    pub fence: Fence,
    /// The destination, on datagram queue pairs.
    pub destination: Option<Destination<'a, A>>,
}

impl<A> Clone for SendRequest<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for SendRequest<'_, A> {}

impl<'a, A> SendRequest<'a, A> {
    /// Signaled work without data.
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

    /// Sets the memory to send from, or to read into.
    #[must_use]
    pub const fn with(self, data: &'a [Sge]) -> Self {
        Self { data, ..self }
    }

    /// Sends these bytes inline: they are copied when the request is posted.
    #[must_use]
    pub const fn inline(self, bytes: &'a [u8]) -> Self {
        Self { inline: Some(bytes), ..self }
    }

    /// Produces no completion on success.
    #[must_use]
    pub const fn unsignaled(self) -> Self {
        Self { signaled: false, ..self }
    }

    /// Sets the solicited-event bit.
    #[must_use]
    pub const fn solicited(self) -> Self {
        Self { solicited: true, ..self }
    }

    /// Sets the fence.
    #[must_use]
    pub const fn fenced(self, fence: Fence) -> Self {
        Self { fence, ..self }
    }

    /// Sets the destination of a datagram.
    #[must_use]
    pub const fn to(self, handle: &'a A, qpn: u32, qkey: u32) -> Self {
        Self { destination: Some(Destination { handle, qpn, qkey }), ..self }
    }
}

/// A work request for a receive queue.
///
/// ```
/// use warpwire::verbs::{ReceiveRequest, Sge};
/// let range = Sge { address: 0x1000, len: 64, lkey: 7 };
/// let receive = ReceiveRequest { id: 1, data: &[range] };
/// assert_eq!(receive.data[0].len, 64);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ReceiveRequest<'a> {
    /// The program's identifier, returned in the completion (`wr_id`).
    pub id: u64,
    /// The memory for the message.
    pub data: &'a [Sge],
}
