//! Posting receives.

use std::sync::atomic::Ordering;

use super::qp::Core;
use super::queues::QueueAccess;
use super::wr_table::WrTable;
use crate::error::{Error, Kind, Result};
use crate::mlx5::{self, DoorbellRecord};
use crate::work::ReceiveRequest;

/// The most ranges in a receive.
pub(super) const MAX_RECV_SGE: usize = 16;

impl ReceiveRequest<'_> {
    /// The ranges as the queue's format has them: length, key, address.
    pub(super) fn sges(&self) -> ([(u32, u32, u64); MAX_RECV_SGE], usize) {
        let mut sges = [(0, 0, 0); MAX_RECV_SGE];
        for (slot, sge) in sges.iter_mut().zip(self.data) {
            *slot = (sge.len, sge.lkey, sge.address);
        }
        (sges, self.data.len())
    }
}

/// Posts receives to a queue pair's own queue, all or none.
pub(super) fn post(core: &Core, requests: &[ReceiveRequest<'_>]) -> Result<()> {
    let _only = core.receive.lock();
    fill(core, &core.wr_table, requests)?;
    // A queue pair that has failed gives them back at once; one that works looks when a message comes.
    core.hca.ring(core.number);
    Ok(())
}

/// Writes receives, and tells the device of them by the record. Nobody else does so meanwhile.
pub(super) fn fill<Q: QueueAccess>(
    queues: &Q,
    wr_table: &WrTable,
    requests: &[ReceiveRequest<'_>],
) -> Result<()> {
    let posted = wr_table.receives_posted.load(Ordering::Relaxed);
    let entries = wr_table.recv_wr_ids.len() as u32;
    let waiting = posted.wrapping_sub(wr_table.receives_completed.load(Ordering::Acquire));
    if waiting as usize + requests.len() > entries as usize {
        return Err(full(queues.number()));
    }
    let (bytes, begin, stride) = queues.receive();
    let mut next = posted;
    for request in requests {
        let mut entry = [0; MAX_RECV_SGE * 16];
        let stride = (stride as usize).min(entry.len());
        let (sges, count) = request.sges();
        let fits = sges.get(..count).and_then(|r| mlx5::Receive::write(&mut entry[..stride], r));
        fits.ok_or_else(|| too_many(request, stride / 16))?;
        let slot = next & (entries - 1);
        bytes.write(begin + u64::from(slot) * stride as u64, &entry[..stride])?;
        wr_table.recv_wr_ids[slot as usize].store(request.id, Ordering::Relaxed);
        next = next.wrapping_add(1);
    }
    wr_table.receives_posted.store(next, Ordering::Release);
    let word = u32::from_ne_bytes(DoorbellRecord::word(next as u16));
    let (dbrec, at) = queues.dbrec();
    dbrec.store_u32(at + DoorbellRecord::RECEIVE as u64, word)
}

#[cold]
pub(super) fn full(number: u32) -> Error {
    Error::new(Kind::Busy, "post a receive")
        .on(format!("queue {number:#x}"))
        .why("the receive queue is full")
        .fix("take completions first, or make it deeper")
}

#[cold]
pub(super) fn too_many(request: &ReceiveRequest<'_>, max: usize) -> Error {
    let why =
        format!("it names {} ranges, and may name {max}, each below 2 GiB", request.data.len());
    Error::new(Kind::InvalidArgument, "post a receive")
        .why(why)
        .fix("make the queue with more ranges")
}
