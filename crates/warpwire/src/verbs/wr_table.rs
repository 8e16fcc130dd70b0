//! Per-queue bookkeeping of outstanding work: work request ids, WQE sizes, and how far each queue
//! is free.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Outstanding work of one queue pair. WQEBB indices are 64 bits wide and do not wrap.
#[derive(Debug)]
pub(crate) struct WrTable {
    wqebbs: u32,
    /// Work request ids and sizes in WQEBBs, by the first WQEBB of each WQE.
    pub send_wr_ids: Box<[AtomicU64]>,
    pub send_wqe_sizes: Box<[AtomicU8]>,
    /// End of the posted WQEBBs.
    pub posted: AtomicU64,
    /// End of the WQEBBs that are free again.
    pub freed: AtomicU64,
    pub recv_wr_ids: Box<[AtomicU64]>,
    pub receives_posted: AtomicU32,
    pub receives_completed: AtomicU32,
}

impl WrTable {
    /// Tables for a send queue of `wqebbs` and a receive queue of `receives` entries, both powers
    /// of two; `receives` may be 0.
    pub(super) fn new(wqebbs: u32, receives: u32) -> Self {
        let words = |count: u32| (0..count).map(|_| AtomicU64::new(0)).collect();
        Self {
            wqebbs,
            send_wr_ids: words(wqebbs),
            send_wqe_sizes: (0..wqebbs).map(|_| AtomicU8::new(0)).collect(),
            posted: AtomicU64::new(0),
            freed: AtomicU64::new(0),
            recv_wr_ids: words(receives),
            receives_posted: AtomicU32::new(0),
            receives_completed: AtomicU32::new(0),
        }
    }

    /// Frees all WQEBBs up to the WQE that a completion names; returns its work request id.
    pub(super) fn complete_send(&self, counter: u16) -> u64 {
        let freed = self.freed.load(Ordering::Relaxed);
        let wqe_index = freed + u64::from(counter.wrapping_sub(freed as u16));
        let slot = (wqe_index & u64::from(self.wqebbs - 1)) as usize;
        let size = self.send_wqe_sizes[slot].load(Ordering::Relaxed);
        let id = self.send_wr_ids[slot].load(Ordering::Relaxed);
        // Streams and kernels may fill the queue themselves, and completions are not trusted: only
        // WQEBBs that were posted here are freed.
        let posted = self.posted.load(Ordering::Acquire);
        if wqe_index < posted {
            // A forged counter may name the middle of a WQE, with a stale size: cap it.
            self.freed.store((wqe_index + u64::from(size)).min(posted), Ordering::Release);
        }
        id
    }

    /// Frees the oldest receive; returns the work request id of the one that completed.
    pub(super) fn complete_receive(&self, counter: u16) -> u64 {
        let Some(last) = self.recv_wr_ids.len().checked_sub(1) else { return 0 };
        let id = self.recv_wr_ids[usize::from(counter) & last].load(Ordering::Relaxed);
        let completed = self.receives_completed.load(Ordering::Relaxed);
        // Completions are not trusted: never more than were posted.
        if completed != self.receives_posted.load(Ordering::Acquire) {
            self.receives_completed.store(completed.wrapping_add(1), Ordering::Release);
        }
        id
    }

    /// Empties the tables, with the queues.
    pub(super) fn clear(&self) {
        for word in [&self.posted, &self.freed] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [&self.receives_posted, &self.receives_completed] {
            word.store(0, Ordering::Relaxed);
        }
    }
}
