//! The end of work, as programs read it.

use std::net::SocketAddr;

use super::datagram::Sender;
use crate::mlx5::{Arrival, Cqe, Opcode, Outcome, Queue, Status, gid_address};

/// What ended. On failure only the side is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionKind {
    /// Work of the send queue.
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
    /// [40 bytes](super::ROUTE_LEN) before it.
    pub len: u32,
    /// The queue pair.
    pub qpn: u32,
    /// Whether the peer asked for its receiver to be woken.
    pub solicited: bool,
    /// Who sent it, if it is a datagram.
    pub sender: Option<Sender>,
}

impl Completion {
    /// Whether it ended as it should.
    pub fn is_success(&self) -> bool {
        self.status == Status::Success
    }

    /// Whether it is the end of a receive.
    pub fn is_receive(&self) -> bool {
        !matches!(self.kind, CompletionKind::Send(_) | CompletionKind::SendFailed)
    }

    #[inline]
    pub(super) fn of(cqe: &Cqe, id: u64) -> Self {
        let (status, kind, len) = match cqe.outcome {
            Outcome::Sent { opcode, bytes } => {
                (Status::Success, CompletionKind::Send(opcode), bytes)
            }
            Outcome::Received { arrival, bytes, .. } => {
                let kind = match arrival {
                    Arrival::Send => CompletionKind::Receive,
                    Arrival::SendImm(imm) => CompletionKind::ReceiveImm(imm),
                    Arrival::SendInvalidate(key) => CompletionKind::ReceiveInvalidate(key),
                    Arrival::WriteImm(imm) => CompletionKind::WriteImm(imm),
                };
                (Status::Success, kind, bytes)
            }
            Outcome::Failed { queue: Queue::Send, status, .. } => {
                (status, CompletionKind::SendFailed, 0)
            }
            Outcome::Failed { queue: Queue::Receive, status, .. } => {
                (status, CompletionKind::ReceiveFailed, 0)
            }
        };
        let sender = match cqe.outcome {
            Outcome::Received { origin, .. } if origin.has_grh => {
                let address = SocketAddr::new(gid_address(origin.gid), origin.port);
                Some(Sender { qpn: origin.qpn, address })
            }
            _ => None,
        };
        Self { id, status, kind, len, qpn: cqe.qpn, solicited: cqe.solicited, sender }
    }
}
