//! Work that lies in a send queue before the device is told of it: somebody else rings, or it is taken back.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::post::{SendBatch, SendRequest, overwrite_with_nop, ring_doorbell};
use super::qp::Qp;
use crate::error::{Error, Kind, Result};

impl Qp {
    /// Writes work into the send queue and tells nobody; returns the blocks that it takes, counted without end. As
    /// long as some of it waits, nothing may be posted in any other way.
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

    /// Tells the device of everything up to that block.
    pub(crate) fn ring_doorbell_to(&self, wqe_index: u64) {
        if let Some(direct_qp) = self.direct_verbs() {
            return direct_qp.ring_doorbell_to(wqe_index);
        }
        let Some(core) = self.soft_core() else { return };
        let state = core.send.lock();
        ring_doorbell(core, wqe_index);
        drop(state);
        core.hca.ring(core.number);
    }

    /// Gives everything from that block on back: nobody was told of it.
    pub(crate) fn unpost_to(&self, wqe_index: u64) {
        if let Some(direct_qp) = self.direct_verbs() {
            return direct_qp.unpost_to(wqe_index);
        }
        let Some(core) = self.soft_core() else { return };
        let mut state = core.send.lock();
        state.producer = wqe_index;
        core.wr_table.posted.store(wqe_index, Ordering::Release);
    }

    /// Makes work that nobody was told of do nothing; it completes in its turn.
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
    Error::new(Kind::Unsupported, "prepare work")
        .why("the queues of this device are its provider's")
        .fix("make the queue pair with QpOptions::watched, on an mlx5 device, or use the software HCA")
}
