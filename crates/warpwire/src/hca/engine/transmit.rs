//! The engine's transmit side: what is due goes to the link, each queue pair in its turn.

use warpwire_proto::Instant;
use warpwire_proto::qp::{Payload, Pending, Source, Transmit};
use warpwire_proto::wire::packet::{BTH_LEN, ICRC_LEN};

use super::{Core, Engine};
use crate::error::Result;
use crate::hca::host::HostView;
use crate::hca::protocol::Protocol;
use crate::hca::qpc::{QpContext, QpMemory};
use crate::hca::stats::DropReason;
use crate::link::ReserveError;
use crate::mr::{AccessDenied, Registry};

/// How many packets, and how many bytes, a queue pair may send before the next one is served.
pub(super) const BUDGET: usize = 32;
pub(super) const BUDGET_BYTES: usize = 128 << 10;
/// Maximum bytes around a payload: the headers of a write with immediate, and the ICRC. A payload
/// of the full MTU needs no padding.
pub(in crate::hca) const MAX_PACKET_OVERHEAD: usize = BTH_LEN + 20 + ICRC_LEN;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TxOutcome {
    Done,
    More,
    LinkFull,
}

impl Engine {
    pub(super) fn transmit(&mut self, now: Instant) -> Result<usize> {
        let mut sent = 0;
        self.core.full = 0;
        // Each queue pair that is in the list now is served once.
        for _ in 0..self.core.active.len() {
            let Some(index) = self.core.active.pop_front() else { break };
            let (mut count, mut outcome) = self.transmit_one(now, index);
            if outcome == TxOutcome::LinkFull && self.link.flush()?.waiting == 0 {
                // Those before it had filled the batch. Its turn is now: in the next step it would
                // have the same ones before it.
                let (more, again) = self.transmit_one(now, index);
                (count, outcome) = (count + more, again);
            }
            sent += count;
            match outcome {
                TxOutcome::Done => {}
                TxOutcome::More => self.core.requeue(index),
                TxOutcome::LinkFull => {
                    self.core.requeue(index);
                    self.core.on_link_full(now, index);
                    // The link is full for all peers; the next in the list is the first to retry.
                    if self.link.flush()?.waiting > 0 {
                        self.core.full = 0;
                        return Ok(sent);
                    }
                    // Otherwise only this peer's queue is full: no head-of-line blocking of the
                    // others.
                    self.core.full += 1;
                }
            }
        }
        self.link.flush()?;
        Ok(sent)
    }

    /// Sends what was just posted, if no other queue pair waits to send: the peer has it earlier
    /// than if the next step sent it.
    pub(in crate::hca) fn transmit_posted(&mut self, now: Instant, index: u32) {
        if self.acks_immediately || self.core.active.len() != 1 || self.core.active[0] != index {
            return;
        }
        self.core.active.clear();
        if self.transmit_one(now, index).1 != TxOutcome::Done {
            self.core.requeue(index);
        }
        // If the link has failed, the next step reports it.
        let _ = self.link.flush();
    }

    pub(super) fn transmit_one(&mut self, now: Instant, index: u32) -> (usize, TxOutcome) {
        let Core { qpcs, registry, srqs, totals, paths, .. } = &mut self.core;
        let Some(Some(qpc)) = qpcs.get_mut(index as usize) else { return (0, TxOutcome::Done) };
        let QpContext { qp: Protocol::Connected(qp), qp_memory, flow, active, path_use, .. } =
            &mut **qpc
        else {
            return match qpc.qp {
                Protocol::Unreliable(_) => self.transmit_unreliable(now, index),
                _ => self.transmit_datagrams(now, index),
            };
        };
        let Some(flow) = *flow else {
            *active = false;
            return (0, TxOutcome::Done);
        };
        path_use.admit(paths, qp);
        let max_len = qp.mtu().bytes() as usize + MAX_PACKET_OVERHEAD;
        let max_len = max_len.min(self.link.max_packet_to(flow));
        let (mut count, mut bytes, mut packet) = (0, 0, Transmit::new());
        let mut has_requests = false;
        let outcome = loop {
            if count == BUDGET || bytes >= BUDGET_BYTES {
                break TxOutcome::More;
            }
            match qp.pending(now) {
                Pending::Nothing => break TxOutcome::Done,
                // The peer's program may be waiting for the requests; an ACK only frees resources.
                Pending::Responses if has_requests => {
                    has_requests = false;
                    self.link.publish();
                }
                Pending::Responses => {}
                Pending::Requests => has_requests = true,
            }
            match self.link.has_room(flow, max_len) {
                Ok(()) => {}
                Err(ReserveError::Full) => break TxOutcome::LinkFull,
                Err(_) => {
                    totals.count_drop(DropReason::NoFlow);
                    break TxOutcome::Done;
                }
            }
            let mut view = HostView { qp_memory, registry, srqs, payload: &[], packet: &[] };
            if !qp.transmit_into(now, &mut view, &mut packet) {
                break TxOutcome::Done;
            }
            let len = packet.payload.map_or(0, |payload| payload.len as usize);
            let wire_len = packet.headers.wire_len(len);
            let Ok(slot) = self.link.reserve(flow, wire_len) else {
                totals.count_drop(DropReason::TooLong);
                continue;
            };
            let Some(at) = packet.headers.emit(slot, len) else { continue };
            // Fails if the memory was deregistered or evicted since the packet was built.
            let part = &mut slot[at..at + len];
            if let Some(payload) = packet.payload
                && let Err(denied) = gather(qp_memory, registry, payload, part)
            {
                totals.count_drop(DropReason::MemoryGone);
                // If the next attempt will see the same, the packet is built again then. If the
                // copy fails for another reason, the packet counts as lost: its retries run out and
                // the work fails.
                if denied.is_transient() || denied == AccessDenied::Gone {
                    qp.undo_transmit(&packet);
                    qp_memory.retry_soon = true;
                    break TxOutcome::Done;
                }
                continue;
            }
            self.link.commit();
            count += 1;
            bytes += wire_len;
        };
        if matches!(outcome, TxOutcome::Done) {
            *active = false;
            path_use.wait_if_blocked(paths, qp, index);
        }
        if std::mem::take(&mut qp_memory.resets_faults) {
            registry.reset_fault_state();
        }
        self.core.post_process(now, index);
        (count, outcome)
    }
}

pub(super) fn gather(
    qp_memory: &mut QpMemory,
    registry: &Registry,
    payload: Payload,
    into: &mut [u8],
) -> std::result::Result<(), AccessDenied> {
    match payload.from {
        Source::SendWr { id, offset } => qp_memory.gather(registry, id, offset, into),
        Source::Remote { at, left, request, following } => {
            qp_memory.gather_read_response(registry, at, left, request, following, into)
        }
    }
}
