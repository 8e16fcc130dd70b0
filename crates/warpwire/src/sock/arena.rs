//! Buddy allocator for rings: power-of-two blocks of one area.

use std::collections::BTreeSet;

/// The smallest block, in bytes.
pub(super) const MIN_BLOCK: u64 = 4096;

/// Allocates and frees blocks of an area. A block is aligned to its length.
pub(super) struct Arena {
    /// Start offsets of the free blocks of `MIN_BLOCK << n` bytes, by `n`.
    free: Vec<BTreeSet<u64>>,
}

/// The length of the block that holds `len` bytes; `None` on overflow.
pub(super) fn rounded(len: u64) -> Option<u64> {
    len.max(MIN_BLOCK).checked_next_power_of_two()
}

fn order(len: u64) -> usize {
    (len / MIN_BLOCK).trailing_zeros() as usize
}

impl Arena {
    /// An area of `len` bytes, a multiple of [`MIN_BLOCK`].
    pub(super) fn new(len: u64) -> Self {
        let mut arena = Self { free: Vec::new() };
        let mut at = 0;
        while len - at >= MIN_BLOCK {
            // The largest block that is aligned at this offset and does not exceed the area.
            let aligned = if at == 0 { u64::MAX } else { 1 << at.trailing_zeros() };
            let fits = 1 << (len - at).ilog2();
            let piece = fits.min(aligned);
            arena.put(at, order(piece));
            at += piece;
        }
        arena
    }

    /// Takes a block of `len` bytes, a length that [`rounded`] returned; `None` if none is free.
    pub(super) fn take(&mut self, len: u64) -> Option<u64> {
        let wanted = order(len);
        let found = (wanted..self.free.len()).find(|order| !self.free[*order].is_empty())?;
        let at = self.free[found].pop_first()?;
        for smaller in wanted..found {
            self.put(at + (MIN_BLOCK << smaller), smaller);
        }
        Some(at)
    }

    /// Frees a block and merges it with its free buddies.
    pub(super) fn release(&mut self, mut at: u64, len: u64) {
        let mut order = order(len);
        while self.free.get_mut(order).is_some_and(|free| free.remove(&(at ^ MIN_BLOCK << order))) {
            at &= !(MIN_BLOCK << order);
            order += 1;
        }
        self.put(at, order);
    }

    fn put(&mut self, at: u64, order: usize) {
        if self.free.len() <= order {
            self.free.resize_with(order + 1, BTreeSet::new);
        }
        self.free[order].insert(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn freed_blocks_merge_again() {
        let mut arena = Arena::new(7 * MIN_BLOCK);
        let mut pieces: Vec<_> = std::iter::from_fn(|| arena.take(MIN_BLOCK)).collect();
        pieces.sort_unstable();
        assert_eq!(pieces, (0..7).map(|n| n * MIN_BLOCK).collect::<Vec<_>>());
        for piece in pieces {
            arena.release(piece, MIN_BLOCK);
        }
        assert_eq!(arena.take(4 * MIN_BLOCK), Some(0));
        assert_eq!(arena.take(4 * MIN_BLOCK), None, "only three blocks remain");
        assert_eq!(arena.take(2 * MIN_BLOCK), Some(4 * MIN_BLOCK));
    }

    #[test]
    fn lengths_are_rounded_up() {
        assert_eq!(rounded(1), Some(4096));
        assert_eq!(rounded(4097), Some(8192));
        assert_eq!(rounded(u64::MAX), None);
    }

    proptest! {
        #[test]
        fn blocks_never_overlap(
            steps in proptest::collection::vec((0u32..5, any::<bool>()), 1..200),
        ) {
            let mut arena = Arena::new(64 * MIN_BLOCK);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (order, release) in steps {
                let len = MIN_BLOCK << order;
                if release && !held.is_empty() {
                    let (at, len) = held.swap_remove(order as usize % held.len());
                    arena.release(at, len);
                } else if let Some(at) = arena.take(len) {
                    prop_assert!(at % len == 0 && at + len <= 64 * MIN_BLOCK);
                    let apart = |&(other, theirs): &(u64, u64)| {
                        at + len <= other || other + theirs <= at
                    };
                    prop_assert!(held.iter().all(apart));
                    held.push((at, len));
                }
            }
        }
    }
}
