//! Keys: an index of 24 bits, and a tag that changes each time the index is used again.

use std::collections::VecDeque;

use super::table::MAX_SLOTS;
use crate::mlx5::INVALID_KEY;

/// The part of a key that is its tag.
pub(super) const TAG: u32 = 0xff;
/// The index that no key has, so that zero is no key.
const RESERVED_INDEX: u32 = 0;
/// How many indexes rest before one is used again: with their tags, a key comes back after some 65 000
/// registrations at the earliest.
const MIN_QUARANTINED: usize = 256;

/// Which keys are free.
pub(super) struct KeyAllocator {
    /// Indexes from here on were never used.
    next_unused: u32,
    /// Indexes whose registration has ended, with the tag that it had; the longest rested first.
    quarantined: VecDeque<(u32, u8)>,
    pub(super) live: usize,
}

impl Default for KeyAllocator {
    fn default() -> Self {
        Self { next_unused: RESERVED_INDEX + 1, quarantined: VecDeque::new(), live: 0 }
    }
}

impl KeyAllocator {
    pub(super) fn allocate(&mut self) -> Option<u32> {
        let reuse = self.quarantined.len() > MIN_QUARANTINED || self.next_unused == MAX_SLOTS;
        let key = match reuse.then(|| self.quarantined.pop_front()).flatten() {
            Some((index, tag)) => index << 8 | u32::from(next_tag(index, tag)),
            None if self.next_unused < MAX_SLOTS => {
                self.next_unused += 1;
                let index = self.next_unused - 1;
                index << 8 | u32::from(next_tag(index, 0))
            }
            None => return None,
        };
        self.live += 1;
        Some(key)
    }

    pub(super) fn release(&mut self, key: u32) {
        self.live -= 1;
        self.quarantined.push_back((key >> 8, (key & TAG) as u8));
    }
}

/// The tag after `tag`; one key, hardware's own invalid one, is never made.
fn next_tag(index: u32, tag: u8) -> u8 {
    let next = tag.wrapping_add(1);
    if index << 8 | u32::from(next) == INVALID_KEY { next.wrapping_add(1) } else { next }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn keys_rest_wrap_and_never_are_the_invalid_one() {
        let mut keys = KeyAllocator::default();
        let mut recent = VecDeque::new();
        let mut seen_recently = HashSet::new();
        for round in 0..200_000u32 {
            let key = keys.allocate().unwrap();
            assert!(key >> 8 != RESERVED_INDEX && key != INVALID_KEY, "{key:#x}");
            assert!(seen_recently.insert(key), "{key:#x} came back at round {round}");
            recent.push_back(key);
            if recent.len() > 60_000 {
                seen_recently.remove(&recent.pop_front().unwrap());
            }
            keys.release(key);
        }
        assert!(keys.next_unused < 300, "indexes are used again");
        assert_eq!(keys.live, 0);
    }

    #[test]
    fn the_last_index_is_the_last() {
        let mut keys = KeyAllocator { next_unused: MAX_SLOTS - 1, ..KeyAllocator::default() };
        let last = keys.allocate().unwrap();
        assert_eq!(last >> 8, MAX_SLOTS - 1);
        assert_eq!(keys.allocate(), None);
        keys.release(last);
        // No rest when there is no other.
        assert_eq!(keys.allocate(), Some(last + 1));
    }
}
