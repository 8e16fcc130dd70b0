//! The engine's part of UC queue pairs: transmit and receive.

use std::time::Duration;

use warpwire_proto::Instant;
use warpwire_proto::qp::RxPacket;
use warpwire_proto::wire::Transport;

use super::transmit::{BUDGET, BUDGET_BYTES, MAX_PACKET_OVERHEAD, TxOutcome, gather};
use super::{Core, Engine, is_from};
use crate::hca::host::HostView;
use crate::hca::protocol::Protocol;
use crate::hca::qpc::QpContext;
use crate::hca::stats::DropReason;
use crate::link::{Frame, ReserveError};

/// How long a packet waits for room on its link, for a peer that waits for a CPU. Without a bound,
/// work for a peer that stopped draining would never complete: there are no ACKs whose absence
/// would fail it.
const TX_TIMEOUT: Duration = Duration::from_secs(1);

impl Engine {
    /// Sends packets of a queue pair until its budget is spent.
    pub(super) fn transmit_unreliable(&mut self, now: Instant, index: u32) -> (usize, TxOutcome) {
        let Core { qpcs, registry, srqs, totals, .. } = &mut self.core;
        let Some(Some(qpc)) = qpcs.get_mut(index as usize) else { return (0, TxOutcome::Done) };
        let QpContext { qp: Protocol::Unreliable(unreliable), qp_memory, flow, active, .. } =
            &mut **qpc
        else {
            return (0, TxOutcome::Done);
        };
        let Some(flow) = *flow else {
            *active = false;
            return (0, TxOutcome::Done);
        };
        let max_len = unreliable.uc.mtu().bytes() as usize + MAX_PACKET_OVERHEAD;
        let max_len = max_len.min(self.link.max_packet());
        let (mut count, mut bytes) = (0, 0);
        let outcome = loop {
            if count == BUDGET || bytes >= BUDGET_BYTES {
                break TxOutcome::More;
            }
            let lost = match self.link.reserve(flow, max_len) {
                Ok(_) => {
                    unreliable.full_since = None;
                    None
                }
                Err(ReserveError::Full) if unreliable.should_wait(now, TX_TIMEOUT) => {
                    break TxOutcome::LinkFull;
                }
                Err(ReserveError::Full) => Some(DropReason::NoRoom),
                Err(_) => Some(DropReason::NoFlow),
            };
            let mut view = HostView { qp_memory, registry, srqs, payload: &[], packet: &[] };
            let Some(packet) = unreliable.uc.poll_transmit(&mut view) else {
                break TxOutcome::Done;
            };
            count += 1;
            if let Some(reason) = lost {
                totals.count_drop(reason);
                continue;
            }
            let len = packet.payload.map_or(0, |payload| payload.len as usize);
            let wire_len = packet.headers.wire_len(len);
            let Ok(slot) = self.link.reserve(flow, wire_len) else {
                totals.count_drop(DropReason::TooLong);
                continue;
            };
            let Some(at) = packet.headers.emit(slot, len) else { continue };
            if let Some(payload) = packet.payload
                && gather(qp_memory, registry, payload, &mut slot[at..at + len]).is_err()
            {
                totals.count_drop(DropReason::MemoryGone);
                continue;
            }
            self.link.commit();
            bytes += wire_len;
        };
        if matches!(outcome, TxOutcome::Done) {
            *active = false;
        }
        self.core.post_process(now, index);
        (count, outcome)
    }
}

impl Core {
    /// Handles a packet for a UC queue pair.
    pub(super) fn on_unreliable(
        &mut self,
        now: Instant,
        index: u32,
        transport: &Transport<'_>,
        frame: &Frame<'_>,
    ) {
        let Core { qpcs, registry, srqs, totals, .. } = self;
        let Some(Some(qpc)) = qpcs.get_mut(index as usize) else { return };
        let QpContext { qp: Protocol::Unreliable(unreliable), qp_memory, .. } = &mut **qpc else {
            return;
        };
        if !unreliable.uc.path().is_some_and(|path| is_from(path, frame.from)) {
            return totals.count_drop(DropReason::WrongPeer);
        }
        totals.packets_received += 1;
        let (headers, payload) = (transport.headers(), transport.payload());
        let payload_len = payload.len() as u32;
        let rx = RxPacket { headers: &headers, payload_len, marked: frame.is_marked() };
        let mut view = HostView { qp_memory, registry, srqs, payload, packet: &[] };
        // Discarded packets are counted by the queue pair.
        let _ = unreliable.uc.handle_packet(&rx, &mut view);
        self.post_process(now, index);
    }
}
