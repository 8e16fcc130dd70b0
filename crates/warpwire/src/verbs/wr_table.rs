//! What a queue pair keeps of its work until that has ended: what the program called it, and which places are free again.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// The work of one queue pair whose queues are written to here.
#[derive(Debug)]
pub(crate) struct WrTable {
    wqebbs: u32,
    /// What the program called the work, and how many blocks it takes, by its first block.
    pub send_wr_ids: Box<[AtomicU64]>,
    pub send_wqe_sizes: Box<[AtomicU8]>,
    /// The block up to which the device was told of work, counted without end.
    pub posted: AtomicU64,
    /// The block up to which the send queue is free again, counted without end.
    pub freed: AtomicU64,
    pub recv_wr_ids: Box<[AtomicU64]>,
    pub receives_posted: AtomicU32,
    pub receives_completed: AtomicU32,
}

impl WrTable {
    /// For queues with so many blocks and entries, which are powers of two; a queue pair may have no receives of its own.
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

    /// Work ended: everything up to it is free again. Returns what the program called it.
    pub(super) fn complete_send(&self, counter: u16) -> u64 {
        let freed = self.freed.load(Ordering::Relaxed);
        let wqe_index = freed + u64::from(counter.wrapping_sub(freed as u16));
        let slot = (wqe_index & u64::from(self.wqebbs - 1)) as usize;
        let size = self.send_wqe_sizes[slot].load(Ordering::Relaxed);
        let id = self.send_wr_ids[slot].load(Ordering::Relaxed);
        // Others may fill the queue by themselves, and anything may lie in a completion: what was not posted here
        // frees nothing here.
        let posted = self.posted.load(Ordering::Acquire);
        if wqe_index < posted {
            // A completion may name a block in the middle of an entry, with the size of an older one.
            self.freed.store((wqe_index + u64::from(size)).min(posted), Ordering::Release);
        }
        id
    }

    /// A receive ended. Returns what the program called it.
    pub(super) fn complete_receive(&self, counter: u16) -> u64 {
        let Some(last) = self.recv_wr_ids.len().checked_sub(1) else { return 0 };
        let id = self.recv_wr_ids[usize::from(counter) & last].load(Ordering::Relaxed);
        let completed = self.receives_completed.load(Ordering::Relaxed);
        // As above.
        if completed != self.receives_posted.load(Ordering::Acquire) {
            self.receives_completed.store(completed.wrapping_add(1), Ordering::Release);
        }
        id
    }

    /// Forgets all work: the queues are empty again.
    pub(super) fn clear(&self) {
        for word in [&self.posted, &self.freed] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [&self.receives_posted, &self.receives_completed] {
            word.store(0, Ordering::Relaxed);
        }
    }
}
