//! Completions: what the protocol reports, in the form in which it is written.

use warpwire_proto::qp::{Carried, Completion, Receipt, Status as WireStatus};

use super::pair::Pair;
use crate::mlx5::{Arrival, Completions, Cqe, Opcode, Outcome, Queue, Sent, Status};

/// The status as verbs have it.
pub(super) fn status(status: WireStatus) -> Status {
    match status {
        WireStatus::Success => Status::Success,
        WireStatus::LocalLength => Status::LocalLength,
        WireStatus::LocalOperation => Status::LocalQpOperation,
        WireStatus::LocalProtection => Status::LocalProtection,
        WireStatus::Flushed => Status::Flushed,
        WireStatus::BadResponse => Status::BadResponse,
        WireStatus::LocalAccess => Status::LocalAccess,
        WireStatus::RemoteInvalidRequest => Status::RemoteInvalidRequest,
        WireStatus::RemoteAccess => Status::RemoteAccess,
        WireStatus::RemoteOperation => Status::RemoteOperation,
        WireStatus::RetryExceeded => Status::RetryExceeded,
        WireStatus::RnrRetryExceeded => Status::RnrRetryExceeded,
    }
}

#[inline]
fn cqe(pair: &Pair, outcome: Outcome, counter: u16) -> Cqe {
    let (qpn, user_index) = (pair.qp.number(), pair.user_index);
    Cqe { outcome, qpn, user_index, counter, solicited: false, timestamp: 0 }
}

/// The completion of a write that was done as it was posted.
#[inline]
pub(super) fn written(pair: &Pair, block: u64) -> Sent {
    let (qpn, user_index) = (pair.qp.number(), pair.user_index);
    Sent { opcode: Opcode::RdmaWrite, bytes: 0, qpn, user_index, counter: block as u16 }
}

/// The completion of posted work; none if it succeeded and nobody wants to know.
pub(super) fn sent(pair: &mut Pair, completion: &Completion) -> Option<Cqe> {
    let work = pair.side.underway(completion.id);
    // The first block of the entry, as its writer counts.
    let counter = completion.id as u16;
    let opcode = work.opcode;
    if completion.status == WireStatus::Success {
        let fetches = matches!(
            opcode,
            Opcode::RdmaRead
                | Opcode::CompareSwap
                | Opcode::FetchAdd
                | Opcode::MaskedCompareSwap
                | Opcode::MaskedFetchAdd
        );
        let bytes = if fetches { work.len } else { 0 };
        return completion.signaled.then(|| cqe(pair, Outcome::Sent { opcode, bytes }, counter));
    }
    // "Only the first error" asks for silence once the queue pair has failed.
    let silent =
        std::mem::replace(&mut pair.told, true) && work.completions == Completions::OnFirstError;
    let failed = Outcome::Failed {
        queue: Queue::Send,
        status: status(completion.status),
        vendor: 0,
        opcode,
    };
    (!silent).then(|| cqe(pair, failed, counter))
}

/// The completion of a receive.
pub(super) fn received(pair: &Pair, receipt: &Receipt) -> Cqe {
    let counter = receipt.id as u16;
    if receipt.status != WireStatus::Success {
        let (queue, status) = (Queue::Receive, status(receipt.status));
        let failed = Outcome::Failed { queue, status, vendor: 0, opcode: Opcode::Nop };
        return cqe(pair, failed, counter);
    }
    let arrival = match receipt.carried {
        Carried::Data => Arrival::Send,
        Carried::Imm(imm) => Arrival::SendImm(imm.to_be_bytes()),
        Carried::Invalidated(key) => Arrival::SendInvalidate(key),
        Carried::WriteImm(imm) => Arrival::WriteImm(imm.to_be_bytes()),
    };
    let origin = pair.qp.origin(receipt.source_qp);
    let outcome = Outcome::Received { arrival, bytes: receipt.len, origin };
    Cqe { solicited: receipt.solicited, ..cqe(pair, outcome, counter) }
}

/// The completion of a receive that was never used.
pub(super) fn flushed(pair: &Pair, counter: u16) -> Cqe {
    let (queue, status) = (Queue::Receive, Status::Flushed);
    cqe(pair, Outcome::Failed { queue, status, vendor: 0, opcode: Opcode::Nop }, counter)
}
