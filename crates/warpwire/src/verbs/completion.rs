//! Converts CQEs to work completions.

use std::net::SocketAddr;

use crate::mlx5::{Cqe, CqeOutcome, Queue, RecvKind, SendCqe, Status, gid_address};
use crate::work::{Completion, CompletionKind, DatagramSender};

impl Completion {
    /// A send work request that succeeded: the fast path.
    #[inline]
    pub(super) fn sent(sent: &SendCqe, id: u64) -> Self {
        let SendCqe { opcode, bytes: len, qpn, .. } = *sent;
        let (status, kind) = (Status::Success, CompletionKind::Send(opcode));
        Self { id, status, kind, len, qpn, solicited: false, sender: None, vendor_error: 0 }
    }

    #[inline]
    pub(super) fn of(cqe: &Cqe, id: u64) -> Self {
        let (status, kind, len) = match cqe.outcome {
            CqeOutcome::Sent { opcode, bytes } => {
                (Status::Success, CompletionKind::Send(opcode), bytes)
            }
            CqeOutcome::Received { recv_kind, bytes, .. } => {
                let kind = match recv_kind {
                    RecvKind::Send => CompletionKind::Receive,
                    RecvKind::SendImm(imm) => CompletionKind::ReceiveImm(imm),
                    RecvKind::SendInvalidate(key) => CompletionKind::ReceiveInvalidate(key),
                    RecvKind::WriteImm(imm) => CompletionKind::WriteImm(imm),
                };
                (Status::Success, kind, bytes)
            }
            CqeOutcome::Failed { queue: Queue::Send, status, .. } => {
                (status, CompletionKind::SendFailed, 0)
            }
            CqeOutcome::Failed { queue: Queue::Receive, status, .. } => {
                (status, CompletionKind::ReceiveFailed, 0)
            }
        };
        let sender = match cqe.outcome {
            CqeOutcome::Received { origin, .. } if origin.has_grh => {
                let address = SocketAddr::new(gid_address(origin.gid), origin.port);
                Some(DatagramSender { qpn: origin.qpn, address })
            }
            _ => None,
        };
        let vendor_error = match cqe.outcome {
            CqeOutcome::Failed { vendor, .. } => u32::from(vendor),
            _ => 0,
        };
        let Cqe { qpn, solicited, .. } = *cqe;
        Self { id, status, kind, len, qpn, solicited, sender, vendor_error }
    }
}
