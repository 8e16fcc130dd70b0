//! A growable table of slots with stable addresses, in segments allocated on first use.

use std::sync::OnceLock;

use super::registration::Registration;
use super::revocable_slot::RevocableSlot;

/// Slots in each of the first two segments; every later segment doubles the one before it.
const FIRST_SEGMENT_LEN: u32 = 256;
const SEGMENTS: usize = 17;
/// A key has 24 bits of index.
pub(super) const MAX_SLOTS: u32 = 1 << 24;

/// One registration's slot, on cache lines of its own to avoid false sharing.
#[repr(align(64))]
pub(super) struct Slot(pub(super) RevocableSlot<Registration>);

pub(super) struct Table {
    segments: [OnceLock<Box<[Slot]>>; SEGMENTS],
    /// Shards of each slot, besides the first.
    shards: usize,
}

impl Table {
    pub(super) fn new(shards: usize) -> Self {
        Self { segments: Default::default(), shards }
    }

    /// The slot at `index`, if its segment has been allocated.
    #[inline]
    pub(super) fn get(&self, index: u32) -> Option<&Slot> {
        let (segment, at) = locate(index);
        self.segments.get(segment)?.get()?.get(at)
    }

    /// The slot at `index`, allocating its segment if necessary. `None` beyond `MAX_SLOTS`.
    pub(super) fn get_or_alloc(&self, index: u32) -> Option<&Slot> {
        let (segment, at) = locate(index);
        let size = FIRST_SEGMENT_LEN as usize >> usize::from(segment != 0) << segment;
        let slot = || Slot(RevocableSlot::sharded(0, self.shards));
        let new = || (0..size).map(|_| slot()).collect();
        self.segments.get(segment)?.get_or_init(new).get(at)
    }
}

/// The segment of an index, and the position in it.
#[inline]
fn locate(index: u32) -> (usize, usize) {
    match (index / FIRST_SEGMENT_LEN).checked_ilog2() {
        None => (0, index as usize),
        Some(power) => (power as usize + 1, (index - (FIRST_SEGMENT_LEN << power)) as usize),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_has_its_own_slot() {
        let mut expected = (0, 0);
        for index in 0..20_000 {
            assert_eq!(locate(index), expected, "{index}");
            let size = if expected.0 == 0 { 256 } else { 256 << (expected.0 - 1) };
            expected = if expected.1 + 1 == size {
                (expected.0 + 1, 0)
            } else {
                (expected.0, expected.1 + 1)
            };
        }
        assert_eq!(locate(MAX_SLOTS - 1).0, SEGMENTS - 1);
        let table = Table::new(2);
        assert!(table.get(5).is_none());
        for index in [0, 255, 256, 511, 512, 1023, 5000] {
            assert!(table.get_or_alloc(index).is_some() && table.get(index).is_some(), "{index}");
        }
        assert!(table.get_or_alloc(u32::MAX).is_none());
    }
}
