//! Accesses to a peer's memory that a GPU executes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::ShmPeer;
use crate::sync::revocation;

/// Accesses of a GPU in progress to what two rows stand for.
#[derive(Debug)]
#[must_use = "the access ends when the guard is dropped"]
pub struct DeviceAccess {
    peer: Arc<ShmPeer>,
    /// Index of its word.
    at: usize,
    rows: [u32; 2],
    generations: [u64; 2],
}

impl DeviceAccess {
    /// An access that was announced in the word with this index.
    pub(super) fn new(
        peer: Arc<ShmPeer>,
        at: usize,
        rows: [u32; 2],
        generations: [u64; 2],
    ) -> Self {
        Self { peer, at, rows, generations }
    }

    /// Whether another access to these rows is covered by it: the rows are still open.
    pub fn covers(&self, peer: &Arc<ShmPeer>, rows: [u32; 2], generations: [u64; 2]) -> bool {
        Arc::ptr_eq(&self.peer, peer)
            && (self.rows, self.generations) == (rows, generations)
            && self.is_open()
    }

    /// Whether the rows are still open, and the owner is there.
    pub fn is_open(&self) -> bool {
        !self.peer.is_gone() && self.rows.map(|row| self.peer.generation(row)) == self.generations
    }

    /// Counts an access of this length, for the owner's counters.
    pub fn count(&self, bytes: u64) {
        let Self { peer, .. } = self;
        // The thread that runs the engine is the only writer.
        let add = |total: &AtomicU64, shared: &AtomicU64, more: u64| {
            let sum = total.load(Ordering::Relaxed).wrapping_add(more);
            total.store(sum, Ordering::Relaxed);
            shared.store(sum, Ordering::Relaxed);
        };
        let [shared_accesses, shared_bytes] = peer.control.access_counts();
        add(&peer.accesses, shared_accesses, 1);
        add(&peer.bytes, shared_bytes, bytes);
    }
}

impl Drop for DeviceAccess {
    fn drop(&mut self) {
        revocation::leave(self.peer.control.device_access_words()[self.at]);
    }
}
