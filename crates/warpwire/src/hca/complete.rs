//! Builds CQEs from the completions that the protocol reports.

use warpwire_proto::qp::{ReceiveCompletion, ReceiveKind, SendCompletion};

use super::qpc::QpContext;
use crate::mlx5::{CqUpdate, Cqe, CqeOutcome, Queue, RecvKind, SendCqe, Status, WqeOpcode};

#[inline]
fn cqe(qpc: &QpContext, outcome: CqeOutcome, counter: u16) -> Cqe {
    let (qpn, user_index) = (qpc.qp.number(), qpc.user_index);
    Cqe { outcome, qpn, user_index, counter, solicited: false, timestamp: 0 }
}

/// The CQE of an inline write.
#[inline]
pub(super) fn fast_write_cqe(qpc: &QpContext, wqe_index: u64) -> SendCqe {
    let (qpn, user_index) = (qpc.qp.number(), qpc.user_index);
    SendCqe { opcode: WqeOpcode::RdmaWrite, bytes: 0, qpn, user_index, counter: wqe_index as u16 }
}

/// The CQE of posted work; `None` if it succeeded and is unsignaled.
pub(super) fn sent(qpc: &mut QpContext, completion: &SendCompletion) -> Option<Cqe> {
    let work = qpc.qp_memory.wr_state(completion.id);
    // The index of the WQE's first WQEBB, as the poster counts.
    let counter = completion.id as u16;
    let opcode = work.opcode;
    if completion.status == Status::Success {
        let fetches = matches!(
            opcode,
            WqeOpcode::RdmaRead
                | WqeOpcode::CompareSwap
                | WqeOpcode::FetchAdd
                | WqeOpcode::MaskedCompareSwap
                | WqeOpcode::MaskedFetchAdd
        );
        let bytes = if fetches { work.len } else { 0 };
        return completion.signaled.then(|| cqe(qpc, CqeOutcome::Sent { opcode, bytes }, counter));
    }
    // `OnFirstError` suppresses all CQEs after the first error of the queue pair.
    let silent = std::mem::replace(&mut qpc.error_reported, true)
        && work.cq_update == CqUpdate::OnFirstError;
    let failed =
        CqeOutcome::Failed { queue: Queue::Send, status: completion.status, vendor: 0, opcode };
    (!silent).then(|| cqe(qpc, failed, counter))
}

/// The CQE of a receive.
pub(super) fn received(qpc: &QpContext, receive_completion: &ReceiveCompletion) -> Cqe {
    let counter = receive_completion.id as u16;
    if receive_completion.status != Status::Success {
        let (queue, status) = (Queue::Receive, receive_completion.status);
        let failed = CqeOutcome::Failed { queue, status, vendor: 0, opcode: WqeOpcode::Nop };
        return cqe(qpc, failed, counter);
    }
    let recv_kind = match receive_completion.kind {
        ReceiveKind::Data => RecvKind::Send,
        ReceiveKind::Imm(imm) => RecvKind::SendImm(imm.to_be_bytes()),
        ReceiveKind::Invalidated(key) => RecvKind::SendInvalidate(key),
        ReceiveKind::WriteImm(imm) => RecvKind::WriteImm(imm.to_be_bytes()),
    };
    let origin = qpc.qp.origin(receive_completion.source_qp);
    let outcome = CqeOutcome::Received { recv_kind, bytes: receive_completion.len, origin };
    Cqe { solicited: receive_completion.solicited, ..cqe(qpc, outcome, counter) }
}

/// The CQE of a receive that was flushed unused.
pub(super) fn flushed(qpc: &QpContext, counter: u16) -> Cqe {
    let (queue, status) = (Queue::Receive, Status::Flushed);
    cqe(qpc, CqeOutcome::Failed { queue, status, vendor: 0, opcode: WqeOpcode::Nop }, counter)
}
