//! Keys: a 24-bit index and an 8-bit tag that is incremented each time the index is reused.

use std::collections::VecDeque;

use super::table::MAX_SLOTS;
use crate::mlx5::INVALID_KEY;

/// Mask of the tag in a key.
pub(super) const TAG: u32 = 0xff;
/// Never allocated, so that zero is not a valid key.
const RESERVED_INDEX: u32 = 0;
/// Quarantine: this many freed indexes are kept back before the oldest is reused. With 256 tags per
/// index, the same key value recurs after some 65 000 registrations at the earliest.
const MIN_QUARANTINED: usize = 256;

pub(super) struct KeyAllocator {
    /// Indexes from this one on were never allocated.
    next_unused: u32,
    /// Freed indexes with their last tag, oldest first.
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

/// The tag after `tag`. Skips the one key that ConnectX reserves as invalid (`INVALID_KEY`).
fn next_tag(index: u32, tag: u8) -> u8 {
    let next = tag.wrapping_add(1);
    if index << 8 | u32::from(next) == INVALID_KEY { next.wrapping_add(1) } else { next }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn keys_are_quarantined_wrap_and_skip_the_invalid_key() {
        let mut keys = KeyAllocator::default();
        let mut recent = VecDeque::new();
        let mut seen_recently = HashSet::new();
        for round in 0..200_000u32 {
            let key = keys.allocate().unwrap();
            assert!(key >> 8 != RESERVED_INDEX && key != INVALID_KEY, "{key:#x}");
            assert!(seen_recently.insert(key), "{key:#x} was reused in round {round}");
            recent.push_back(key);
            if recent.len() > 60_000 {
                seen_recently.remove(&recent.pop_front().unwrap());
            }
            keys.release(key);
        }
        assert!(keys.next_unused < 300, "indexes are reused");
        assert_eq!(keys.live, 0);
    }

    #[test]
    fn allocation_fails_when_all_indexes_are_live() {
        let mut keys = KeyAllocator { next_unused: MAX_SLOTS - 1, ..KeyAllocator::default() };
        let last = keys.allocate().unwrap();
        assert_eq!(last >> 8, MAX_SLOTS - 1);
        assert_eq!(keys.allocate(), None);
        keys.release(last);
        // No quarantine when no other index is free.
        assert_eq!(keys.allocate(), Some(last + 1));
    }
}
