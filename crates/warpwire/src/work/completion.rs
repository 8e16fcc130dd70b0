//! The end of work, as programs read it.

use std::net::SocketAddr;

use crate::mlx5::{Opcode, Status};

/// What ended. On failure only the side is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionKind {
    /// Work of the send queue. Hardware does not tell whether a message or a write had four bytes beside it.
    Send(Opcode),
    /// A receive that took a message.
    Receive,
    /// A receive that took a message with four bytes beside it.
    ReceiveImm([u8; 4]),
    /// A receive that took a message which invalidated this key.
    ReceiveInvalidate(u32),
    /// A receive that was used up by a write with four bytes.
    WriteImm([u8; 4]),
    /// Work of the send queue that failed.
    SendFailed,
    /// A receive that failed.
    ReceiveFailed,
}

/// Who sent a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramSender {
    /// The queue pair that it came from.
    pub qpn: u32,
    /// The address that it came from. NICs send from any port and listen on 4791; software on this side sends from the
    /// port that it listens on.
    ///
    /// Hardware does not tell it beside the message: there it is unspecified (`[::]:0`), and the first 40 bytes of the
    /// receive tell it ([`Route::parse`](crate::verbs::Route::parse)).
    pub address: SocketAddr,
}

/// The end of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// What the program called it.
    pub id: u64,
    /// How it ended.
    pub status: Status,
    /// What it was.
    pub kind: CompletionKind,
    /// How many bytes came in: of a message, a read, or an atomic. Of a datagram with the
    /// [40 bytes](crate::verbs::GRH_LEN) before it. Of reads and atomics, hardware may tell none.
    pub len: u32,
    /// The queue pair.
    pub qpn: u32,
    /// Whether the peer asked for its receiver to be woken. Hardware does not tell.
    pub solicited: bool,
    /// Who sent it, if it is a datagram.
    pub sender: Option<DatagramSender>,
    /// The vendor's number for what went wrong; 0 where there is none.
    pub vendor_error: u32,
}

impl Completion {
    /// A place for a completion, to be filled by a poll.
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

    /// Whether it ended as it should.
    pub fn is_success(&self) -> bool {
        self.status == Status::Success
    }

    /// Whether it is the end of a receive.
    pub fn is_receive(&self) -> bool {
        !matches!(self.kind, CompletionKind::Send(_) | CompletionKind::SendFailed)
    }
}
