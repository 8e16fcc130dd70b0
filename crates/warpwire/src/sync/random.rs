//! Unpredictable numbers, for what strangers must not guess: queue pair numbers, keys, sequence
//! numbers.

use std::hash::{BuildHasher, RandomState};

/// 64 bits that other processes cannot predict: a keyed hash (SipHash), whose key comes from the
/// operating system.
pub(crate) fn random_u64() -> u64 {
    RandomState::new().hash_one(0_u8)
}

#[cfg(test)]
mod tests {
    use super::random_u64;

    #[test]
    fn numbers_differ_in_every_bit() {
        let numbers: Vec<u64> = (0..64).map(|_| random_u64()).collect();
        let both = |bit: u32| [0, 1].map(|value| numbers.iter().any(|n| n >> bit & 1 == value));
        assert!((0..64).all(|bit| both(bit) == [true, true]), "{numbers:x?}");
    }
}
