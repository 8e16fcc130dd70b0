//! Keys: a 24-bit index and an 8-bit tag that is incremented each time the index is reused.
//!
//! A key is all that a packet needs to access memory, once it has reached a queue pair. Strangers
//! must not guess it: each index begins with a random tag, and the lower 16 bits of indexes are
//! masked (exclusive or) with a random number of the registry. Tables stay dense all the same.

use std::collections::VecDeque;

use super::table::MAX_SLOTS;
use crate::mlx5::INVALID_KEY;
use crate::sync::random_u64;

/// Mask of the tag in a key.
pub(super) const TAG: u32 = 0xff;
/// Never allocated, so that zero is not a valid key.
const RESERVED_INDEX: u32 = 0;
/// Quarantine: this many freed indexes are kept back before the oldest is reused. With 256 tags per
/// index, the same key value recurs after some 65 000 registrations at the earliest.
const MIN_QUARANTINED: usize = 256;

pub(super) struct KeyAllocator {
    mask: KeyMask,
    /// Indexes from this one on were never allocated.
    next_unused: u32,
    /// Freed indexes with their last tag, oldest first.
    quarantined: VecDeque<(u32, u8)>,
    pub(super) live: usize,
}

/// Masks indexes in keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyMask(u32);

impl KeyMask {
    pub(super) fn random() -> Self {
        Self(random_u64() as u32 & 0xffff)
    }

    /// The index of a key.
    #[inline]
    pub(super) fn index(self, key: u32) -> u32 {
        key >> 8 ^ self.0
    }

    fn key(self, index: u32, tag: u8) -> u32 {
        (index ^ self.0) << 8 | u32::from(tag)
    }

    /// The key with the tag after `tag`. Skips zero, and the key that ConnectX reserves as invalid.
    fn next_key(self, index: u32, tag: u8) -> u32 {
        let next = self.key(index, tag.wrapping_add(1));
        if matches!(next, 0 | INVALID_KEY) { self.key(index, tag.wrapping_add(2)) } else { next }
    }
}

impl KeyAllocator {
    pub(super) fn new(mask: KeyMask) -> Self {
        Self { mask, next_unused: RESERVED_INDEX + 1, quarantined: VecDeque::new(), live: 0 }
    }

    pub(super) fn allocate(&mut self) -> Option<u32> {
        let reuse = self.quarantined.len() > MIN_QUARANTINED || self.next_unused == MAX_SLOTS;
        let key = match reuse.then(|| self.quarantined.pop_front()).flatten() {
            Some((index, tag)) => self.mask.next_key(index, tag),
            None if self.next_unused < MAX_SLOTS => {
                self.next_unused += 1;
                self.mask.next_key(self.next_unused - 1, random_u64() as u8)
            }
            None => return None,
        };
        self.live += 1;
        Some(key)
    }

    pub(super) fn release(&mut self, key: u32) {
        self.live -= 1;
        self.quarantined.push_back((self.mask.index(key), (key & TAG) as u8));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn keys_are_quarantined_wrap_and_skip_the_invalid_key() {
        // With these masks index 1 is 0 in keys, and one of the next ones that of the invalid key.
        for mask in [0, 1, 0xffff, INVALID_KEY >> 8 & 0xffff ^ 7] {
            keys_are_quarantined(KeyMask(mask));
        }
    }

    fn keys_are_quarantined(mask: KeyMask) {
        let mut keys = KeyAllocator::new(mask);
        let mut recent = VecDeque::new();
        let mut seen_recently = HashSet::new();
        for round in 0..200_000u32 {
            let key = keys.allocate().unwrap();
            assert!(mask.index(key) != RESERVED_INDEX, "{key:#x}");
            assert!(key != 0 && key != INVALID_KEY, "{key:#x}");
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
        let mask = KeyMask(0x1234);
        let mut keys = KeyAllocator { next_unused: MAX_SLOTS - 1, ..KeyAllocator::new(mask) };
        let last = keys.allocate().unwrap();
        assert_eq!(mask.index(last), MAX_SLOTS - 1);
        assert_eq!(keys.allocate(), None);
        keys.release(last);
        // No quarantine when no other index is free.
        assert_eq!(keys.allocate(), Some(mask.next_key(MAX_SLOTS - 1, (last & TAG) as u8)));
    }

    #[test]
    fn first_keys_of_two_registries_differ() {
        let first = |_| KeyAllocator::new(KeyMask::random()).allocate().unwrap();
        let keys: HashSet<u32> = (0..16).map(first).collect();
        assert!(keys.len() >= 15, "{keys:x?}");
    }
}
