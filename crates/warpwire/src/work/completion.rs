//! Completions, as programs read them.

use std::net::SocketAddr;

use crate::mlx5::{Status, WqeOpcode};

/// What completed. A failed completion reports only whether it was a send or a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompletionKind {
    /// A work request of the send queue. Hardware does not report whether a send or a write carried
    /// immediate data.
    Send(WqeOpcode),
    /// A receive that took a message.
    Receive,
    /// A receive that took a message with immediate data (network byte order).
    ReceiveImm([u8; 4]),
    /// A receive that took a message which invalidated this rkey (send with invalidate).
    ReceiveInvalidate(u32),
    /// A receive consumed by an RDMA write with immediate data.
    WriteImm([u8; 4]),
    /// A failed work request of the send queue.
    SendFailed,
    /// A failed receive.
    ReceiveFailed,
}

/// The sender of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramSender {
    /// The sending queue pair's number.
    pub qpn: u32,
    /// The source address. NICs send from any UDP port and listen on 4791; a software HCA sends
    /// from the port that it listens on.
    ///
    /// Hardware does not report it in the completion: there it is unspecified (`[::]:0`), and the
    /// GRH in the first 40 bytes of the receive has it ([`Grh::parse`](crate::verbs::Grh::parse)).
    pub address: SocketAddr,
}

/// The result of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The `id` of the work request (`wr_id`).
    pub id: u64,
    /// Success, or why it failed.
    pub status: Status,
    /// The kind of work that completed.
    pub kind: CompletionKind,
    /// Bytes received: of a message, a read, or an atomic. Of a datagram including the [40 bytes of
    /// the GRH](crate::verbs::GRH_LEN). For reads and atomics hardware may report 0.
    pub len: u32,
    /// The local queue pair's number.
    pub qpn: u32,
    /// Whether the sender set the solicited-event bit. Hardware does not report it.
    pub solicited: bool,
    /// The sender of a datagram; `None` on connected queue pairs.
    pub sender: Option<DatagramSender>,
    /// The vendor's error syndrome; 0 if there is none.
    pub vendor_error: u32,
}

impl Completion {
    /// An empty entry for the array that a poll fills.
    pub const EMPTY: Self = Self {
        id: 0,
        status: Status::Success,
        kind: CompletionKind::Receive,
        len: 0,
        qpn: 0,
        solicited: false,
        sender: None,
        vendor_error: 0,
    };

    /// Whether the work request succeeded.
    pub fn is_success(&self) -> bool {
        self.status == Status::Success
    }

    /// Whether it completes a receive.
    pub fn is_receive(&self) -> bool {
        !matches!(self.kind, CompletionKind::Send(_) | CompletionKind::SendFailed)
    }
}
