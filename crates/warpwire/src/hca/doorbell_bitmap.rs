//! Which doorbells have been rung: one bit per queue pair, so that the engine need not read every
//! doorbell.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::numbers::MAX_QPS;

/// A bit per queue pair. A poster sets it after it rang the doorbell; the engine takes all bits
/// that are set.
pub(super) struct DoorbellBitmap {
    words: Box<[AtomicU64]>,
    /// How many words are in use.
    used: AtomicUsize,
    /// One bit per word, in groups of 64 words: most words are zero and need not be read.
    groups: Box<[AtomicU64]>,
}

const WORDS: usize = MAX_QPS as usize / 64;

impl std::fmt::Debug for DoorbellBitmap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DoorbellBitmap({} words)", self.used.load(Ordering::Relaxed))
    }
}

impl DoorbellBitmap {
    pub(super) fn new() -> Self {
        let words = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        Self { words: words(WORDS), used: AtomicUsize::new(0), groups: words(WORDS / 64) }
    }

    /// Grows to at least `qpcs` queue pairs.
    pub(super) fn grow_to(&self, qpcs: usize) {
        self.used.fetch_max(qpcs.div_ceil(64).min(WORDS), Ordering::Relaxed);
    }

    /// Sets the bit of a queue pair.
    #[inline]
    pub(super) fn ring(&self, index: u32) {
        let word = index as usize / 64;
        if let (Some(bits), Some(group)) = (self.words.get(word), self.groups.get(word / 64)) {
            bits.fetch_or(1 << (index % 64), Ordering::Release);
            group.fetch_or(1 << (word % 64), Ordering::Release);
        }
    }

    /// Takes and clears all bits.
    #[inline]
    pub(super) fn take(&self, mut each: impl FnMut(u32)) {
        let groups = self.used.load(Ordering::Relaxed).div_ceil(64);
        for (at, group) in self.groups.iter().take(groups).enumerate() {
            // A plain load first: a swap would take the cache line away from the posters.
            if group.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut set = group.swap(0, Ordering::AcqRel);
            while set != 0 {
                let word = at * 64 + set.trailing_zeros() as usize;
                set &= set - 1;
                let mut bits = self.words[word].swap(0, Ordering::AcqRel);
                while bits != 0 {
                    each(word as u32 * 64 + bits.trailing_zeros());
                    bits &= bits - 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rung_doorbell_is_taken_once() {
        let doorbell_bitmap = DoorbellBitmap::new();
        doorbell_bitmap.grow_to(10_000);
        for index in [0, 63, 64, 4095, 4096, 9999] {
            doorbell_bitmap.ring(index);
            doorbell_bitmap.ring(index);
        }
        let mut found = Vec::new();
        doorbell_bitmap.take(|index| found.push(index));
        assert_eq!(found, [0, 63, 64, 4095, 4096, 9999]);
        doorbell_bitmap.take(|index| panic!("{index} again"));
        doorbell_bitmap.ring(u32::MAX); // out of range: ignored
    }
}
