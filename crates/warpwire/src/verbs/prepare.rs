//! Work that lies in a send queue before the device is told of it: somebody else rings, or it is taken back.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::post::{Filling, Request, blank, tell};
use super::qp::Qp;
use crate::error::{Error, Kind, Result};

impl Qp {
    /// Writes work into the send queue and tells nobody; returns the blocks that it takes, counted without end. As
    /// long as some of it waits, nothing may be posted in any other way.
    pub(crate) fn prepare(&self, request: &Request<'_>) -> Result<Range<u64>> {
        if let Some(core) = self.soft_core() {
            let mut batch = Filling::new(core);
            batch.push(request)?;
            return Ok(batch.keep());
        }
        let pair = self.in_place().ok_or_else(not_watched)?;
        self.check_hardware_state()?;
        let mut writing = pair.begin();
        writing.push(request)?;
        Ok(writing.keep())
    }

    /// Tells the device of everything up to that block.
    pub(crate) fn ring_up_to(&self, block: u64) {
        if let Some(pair) = self.in_place() {
            return pair.ring_up_to(block);
        }
        let Some(core) = self.soft_core() else { return };
        let state = core.send.lock();
        tell(core, block);
        drop(state);
        core.hca.ring(core.number);
    }

    /// Gives everything from that block on back: nobody was told of it.
    pub(crate) fn take_back(&self, block: u64) {
        if let Some(pair) = self.in_place() {
            return pair.take_back(block);
        }
        let Some(core) = self.soft_core() else { return };
        let mut state = core.send.lock();
        state.producer = block;
        core.ledger.posted.store(block, Ordering::Release);
    }

    /// Makes work that nobody was told of do nothing; it completes in its turn.
    pub(crate) fn blank(&self, blocks: Range<u64>) {
        if let Some(pair) = self.in_place() {
            return pair.blank(blocks);
        }
        let Some(core) = self.soft_core() else { return };
        blank(core, &mut core.send.lock().scratch, blocks);
    }
}

#[cold]
fn not_watched() -> Error {
    Error::new(Kind::Unsupported, "prepare work")
        .why("the queues of this device are its provider's")
        .fix("make the queue pair with QpOptions::watched, on an mlx5 device, or use the software HCA")
}
