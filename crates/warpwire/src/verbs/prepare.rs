//! Prepared work: WQEs that are in the send queue before any doorbell announces them. A stream
//! rings the doorbell later, or the work is removed again.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::post::{SendBatch, SendRequest, overwrite_with_nop, ring_doorbell};
use super::qp::Qp;
use crate::error::{Error, Kind, Result};

impl Qp {
    /// Writes a request to the send queue without a doorbell; returns its WQEBBs, whose indices do
    /// not wrap. While prepared work is pending, nothing may be posted in any other way.
    pub(crate) fn prepare(&self, request: &SendRequest<'_>) -> Result<Range<u64>> {
        if let Some(core) = self.soft_core() {
            let mut batch = SendBatch::new(core);
            batch.push(request)?;
            return Ok(batch.commit_unrung());
        }
        let direct_qp = self.direct_verbs().ok_or_else(no_direct_verbs)?;
        self.check_hardware_state()?;
        let mut batch = direct_qp.begin();
        batch.push(request)?;
        Ok(batch.commit_unrung())
    }

    /// Rings the doorbell for all WQEBBs before `wqe_index`.
    pub(crate) fn ring_doorbell_to(&self, wqe_index: u64) {
        if let Some(direct_qp) = self.direct_verbs() {
            return direct_qp.ring_doorbell_to(wqe_index);
        }
        let Some(core) = self.soft_core() else { return };
        let state = core.send.lock();
        ring_doorbell(core, wqe_index);
        drop(state);
        core.engine.ring(core.number);
    }

    /// Removes the WQEBBs from `wqe_index` on, which no doorbell has announced.
    pub(crate) fn unpost_to(&self, wqe_index: u64) {
        if let Some(direct_qp) = self.direct_verbs() {
            return direct_qp.unpost_to(wqe_index);
        }
        let Some(core) = self.soft_core() else { return };
        let mut state = core.send.lock();
        state.producer = wqe_index;
        core.wr_table.posted.store(wqe_index, Ordering::Release);
    }

    /// Replaces work that no doorbell has announced by a NOP, which completes in order.
    pub(crate) fn overwrite_with_nop(&self, wqebbs: Range<u64>) {
        if let Some(direct_qp) = self.direct_verbs() {
            return direct_qp.overwrite_with_nop(wqebbs);
        }
        let Some(core) = self.soft_core() else { return };
        overwrite_with_nop(core, &mut core.send.lock().scratch, wqebbs);
    }
}

#[cold]
fn no_direct_verbs() -> Error {
    Error::new(Kind::Unsupported, "prepare a send")
        .why("the queue pair does not use direct verbs")
        .fix("set QpOptions::poll_doorbell on an mlx5 device, or use the software HCA")
}
