//! Work that lies in a send queue before the device is told of it: somebody else rings, or it is taken back.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::post::{Filling, Request, tell};
use super::qp::Qp;
use crate::error::{Error, Kind, Result};
use crate::mlx5::{BLOCK, Builder, MOST_SEGMENTS, Opcode, SEGMENT};

impl Qp {
    /// Writes work into the send queue and tells nobody; returns the blocks that it takes, counted without end. As
    /// long as some of it waits, nothing may be posted in any other way.
    pub(crate) fn prepare(&self, request: &Request<'_>) -> Result<Range<u64>> {
        let core = self.soft_core().ok_or_else(not_soft)?;
        let mut batch = Filling::new(core);
        batch.push(request)?;
        Ok(batch.keep())
    }

    /// Tells the device of everything up to that block.
    pub(crate) fn ring_up_to(&self, block: u64) {
        let Some(core) = self.soft_core() else { return };
        let state = core.send.lock();
        tell(core, block);
        drop(state);
        core.hca.ring(core.number);
    }

    /// Gives everything from that block on back: nobody was told of it.
    pub(crate) fn take_back(&self, block: u64) {
        let Some(core) = self.soft_core() else { return };
        let mut state = core.send.lock();
        state.producer = block;
        core.posted.store(block, Ordering::Release);
    }

    /// Makes work that nobody was told of do nothing; it completes in its turn.
    pub(crate) fn blank(&self, blocks: Range<u64>) {
        let Some(core) = self.soft_core() else { return };
        let mut state = core.send.lock();
        let nothing =
            Builder::new(&mut state.scratch, Opcode::Nop, blocks.start as u16, core.number);
        let Ok(image) = nothing.signaled().finish() else { return };
        let mut control = [0; SEGMENT];
        control.copy_from_slice(image.bytes());
        // As many blocks as before: others may lie behind it.
        let per_block = (BLOCK / SEGMENT) as u64;
        let segments = ((blocks.end - blocks.start) * per_block).min(MOST_SEGMENTS as u64);
        control[7] = segments as u8;
        let place = blocks.start & (u64::from(core.blocks) - 1);
        let _ = core.memory.bytes().write(core.layout.send + place * BLOCK as u64, &control);
    }
}

#[cold]
fn not_soft() -> Error {
    Error::new(Kind::Unsupported, "prepare work")
        .why("the queues of this device are its provider's")
        .fix("use the software HCA")
}
