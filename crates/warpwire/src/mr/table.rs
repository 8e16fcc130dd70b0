//! Slots by number, which never move, in pieces that are made when they are first needed.

use std::sync::OnceLock;

use super::registration::Registration;
use super::revocable_slot::RevocableSlot;

/// How many slots the first two pieces have; each one after them has twice as many as the one before.
const FIRST_SEGMENT_LEN: u32 = 256;
const SEGMENTS: usize = 17;
/// Indexes below this exist: a key has 24 bits for them.
pub(super) const MAX_SLOTS: u32 = 1 << 24;

/// A registration behind its gate. Neighbours are not slowed by each other's traffic.
#[repr(align(64))]
pub(super) struct Slot(pub(super) RevocableSlot<Registration>);

#[derive(Default)]
pub(super) struct Table {
    segments: [OnceLock<Box<[Slot]>>; SEGMENTS],
}

impl Table {
    /// The slot of that number, if its piece was made.
    #[inline]
    pub(super) fn get(&self, index: u32) -> Option<&Slot> {
        let (segment, at) = locate(index);
        self.segments.get(segment)?.get()?.get(at)
    }

    /// The slot of that number.
    pub(super) fn get_or_alloc(&self, index: u32) -> Option<&Slot> {
        let (segment, at) = locate(index);
        let size = FIRST_SEGMENT_LEN as usize >> usize::from(segment != 0) << segment;
        let new = || (0..size).map(|_| Slot(RevocableSlot::closed(0))).collect();
        self.segments.get(segment)?.get_or_init(new).get(at)
    }
}

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
    fn every_index_has_a_place_of_its_own() {
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
        let table = Table::default();
        assert!(table.get(5).is_none());
        for index in [0, 255, 256, 511, 512, 1023, 5000] {
            assert!(table.get_or_alloc(index).is_some() && table.get(index).is_some(), "{index}");
        }
        assert!(table.get_or_alloc(u32::MAX).is_none());
    }
}
