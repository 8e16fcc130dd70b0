//! Posting receives.

use std::sync::atomic::Ordering;

use super::ledger::Ledger;
use super::qp::Core;
use super::queues::Places;
use crate::error::{Error, Kind, Result};
use crate::mlx5::{self, Record};
use crate::work::ReceiveRequest;

/// The most ranges in a receive.
pub(super) const MOST_RANGES: usize = 16;

impl ReceiveRequest<'_> {
    /// The ranges as the queue's format has them: length, key, address.
    pub(super) fn ranges(&self) -> ([(u32, u32, u64); MOST_RANGES], usize) {
        let mut ranges = [(0, 0, 0); MOST_RANGES];
        for (place, range) in ranges.iter_mut().zip(self.data) {
            *place = (range.len, range.lkey, range.address);
        }
        (ranges, self.data.len())
    }
}

/// Posts receives to a queue pair's own queue, all or none.
pub(super) fn post(core: &Core, requests: &[ReceiveRequest<'_>]) -> Result<()> {
    let _only = core.receive.lock();
    fill(core, &core.ledger, requests)?;
    // A queue pair that has failed gives them back at once; one that works looks when a message comes.
    core.hca.ring(core.number);
    Ok(())
}

/// Writes receives, and tells the device of them by the record. Nobody else does so meanwhile.
pub(super) fn fill<Q: Places>(
    queues: &Q,
    ledger: &Ledger,
    requests: &[ReceiveRequest<'_>],
) -> Result<()> {
    let posted = ledger.receives_posted.load(Ordering::Relaxed);
    let entries = ledger.receive_ids.len() as u32;
    let waiting = posted.wrapping_sub(ledger.receives_ended.load(Ordering::Acquire));
    if waiting as usize + requests.len() > entries as usize {
        return Err(full(queues.number()));
    }
    let (bytes, begin, stride) = queues.receive();
    let mut next = posted;
    for request in requests {
        let mut entry = [0; MOST_RANGES * 16];
        let stride = (stride as usize).min(entry.len());
        let (ranges, count) = request.ranges();
        let fits = ranges.get(..count).and_then(|r| mlx5::Receive::write(&mut entry[..stride], r));
        fits.ok_or_else(|| too_many(request, stride / 16))?;
        let place = next & (entries - 1);
        bytes.write(begin + u64::from(place) * stride as u64, &entry[..stride])?;
        ledger.receive_ids[place as usize].store(request.id, Ordering::Relaxed);
        next = next.wrapping_add(1);
    }
    ledger.receives_posted.store(next, Ordering::Release);
    let word = u32::from_ne_bytes(Record::word(next as u16));
    let (record, at) = queues.record();
    record.store_u32(at + Record::RECEIVE as u64, word)
}

#[cold]
pub(super) fn full(number: u32) -> Error {
    Error::new(Kind::Busy, "post a receive")
        .on(format!("queue {number:#x}"))
        .why("the receive queue is full")
        .fix("take completions first, or make it deeper")
}

#[cold]
pub(super) fn too_many(request: &ReceiveRequest<'_>, most: usize) -> Error {
    let why =
        format!("it names {} ranges, and may name {most}, each below 2 GiB", request.data.len());
    Error::new(Kind::InvalidArgument, "post a receive")
        .why(why)
        .fix("make the queue with more ranges")
}
