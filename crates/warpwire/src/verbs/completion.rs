//! The end of work, as programs read it.

use std::net::SocketAddr;

use crate::mlx5::{Arrival, Cqe, Outcome, Queue, Sent, Status, gid_address};
use crate::work::{Completion, CompletionKind, Sender};

impl Completion {
    /// The end of posted work that has succeeded.
    #[inline]
    pub(super) fn sent(sent: &Sent, id: u64) -> Self {
        let Sent { opcode, bytes: len, qpn, .. } = *sent;
        let (status, kind) = (Status::Success, CompletionKind::Send(opcode));
        Self { id, status, kind, len, qpn, solicited: false, sender: None, vendor_error: 0 }
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
        let vendor_error = match cqe.outcome {
            Outcome::Failed { vendor, .. } => u32::from(vendor),
            _ => 0,
        };
        let Cqe { qpn, solicited, .. } = *cqe;
        Self { id, status, kind, len, qpn, solicited, sender, vendor_error }
    }
}
