//! Posting receives: WQEs are written to the receive queue and announced by the doorbell record.

use std::sync::atomic::Ordering;

use super::qp::Core;
use super::queues::QueueAccess;
use super::wr_table::WrTable;
use crate::mlx5::{self, DoorbellRecord};
use crate::work::{PostError, PostResult, ReceiveRequest};

/// Maximum number of scatter-gather entries of a receive.
pub(super) const MAX_RECV_SGE: usize = 16;

impl ReceiveRequest<'_> {
    /// The scatter-gather entries in the order of a WQE: length, lkey, address.
    pub(super) fn sges(&self) -> ([(u32, u32, u64); MAX_RECV_SGE], usize) {
        let mut sges = [(0, 0, 0); MAX_RECV_SGE];
        for (slot, sge) in sges.iter_mut().zip(self.data) {
            *slot = (sge.len, sge.lkey, sge.address);
        }
        (sges, self.data.len())
    }
}

/// Posts all receives to a queue pair's own queue, or none.
pub(super) fn post(core: &Core, requests: &[ReceiveRequest<'_>]) -> PostResult {
    let _only = core.receive.lock();
    fill(core, &core.wr_table, requests)?;
    core.engine.ring_receives(core.number);
    Ok(())
}

/// Writes receives and updates the doorbell record. The caller holds the lock of the receive queue.
pub(super) fn fill<Q: QueueAccess>(
    queues: &Q,
    wr_table: &WrTable,
    requests: &[ReceiveRequest<'_>],
) -> PostResult {
    let posted = wr_table.receives_posted.load(Ordering::Relaxed);
    let entries = wr_table.recv_wr_ids.len() as u32;
    let waiting = posted.wrapping_sub(wr_table.receives_completed.load(Ordering::Acquire));
    if waiting as usize + requests.len() > entries as usize {
        return Err(PostError::Full);
    }
    let (bytes, begin, stride) = queues.receive();
    let mut next = posted;
    for request in requests {
        let mut entry = [0; MAX_RECV_SGE * 16];
        let stride = (stride as usize).min(entry.len());
        let (sges, count) = request.sges();
        let fits = sges.get(..count).and_then(|r| mlx5::ReceiveWqe::write(&mut entry[..stride], r));
        fits.ok_or_else(|| too_many(request, stride / 16))?;
        let slot = next & (entries - 1);
        let written = bytes.write(begin + u64::from(slot) * stride as u64, &entry[..stride]);
        written.map_err(|error| PostError::device(&error))?;
        wr_table.recv_wr_ids[slot as usize].store(request.id, Ordering::Relaxed);
        next = next.wrapping_add(1);
    }
    wr_table.receives_posted.store(next, Ordering::Release);
    let word = u32::from_ne_bytes(DoorbellRecord::word(next as u16));
    let (dbrec, at) = queues.dbrec();
    let rung = dbrec.store_u32(at + DoorbellRecord::RECEIVE as u64, word);
    rung.map_err(|error| PostError::device(&error))
}

#[cold]
pub(super) fn too_many(request: &ReceiveRequest<'_>, max: usize) -> PostError {
    PostError::TooManySge { count: request.data.len() as u32, max: max as u32 }
}
