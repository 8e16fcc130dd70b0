//! Seeded random numbers, and tests that run for many seeds.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// A small generator (xorshift64*): the same sequence for the same seed on every machine.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Any seed is valid, including 0.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        (self.next_u64() >> 16) % bound.max(1)
    }
}

/// Pseudo-random bytes, different for each seed.
pub fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut bytes = vec![0; len.next_multiple_of(8)];
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&rng.next_u64().to_le_bytes()));
    bytes.truncate(len);
    bytes
}

/// The bytes of `first`, `first + step`, and so on: `count` words.
// Not a closure for each word: the tests that call this are not optimized.
pub fn ascending_words(first: u64, step: u64, count: usize) -> Vec<u8> {
    let word = |index| first.wrapping_add(step.wrapping_mul(index));
    (0..count as u64).flat_map(|index| word(index).to_le_bytes()).collect()
}

/// Runs a test for each seed, or only for the one in `WARPWIRE_SEED`. A failure prints the seed and
/// how to replay it.
pub fn for_each_seed(seeds: Range<u64>, mut run: impl FnMut(u64)) {
    let only = std::env::var("WARPWIRE_SEED").ok().map(|seed| {
        seed.parse::<u64>().unwrap_or_else(|_| panic!("WARPWIRE_SEED={seed}: not a number"))
    });
    for seed in only.map_or(seeds, |seed| seed..seed + 1) {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| run(seed))) {
            eprintln!(
                "seed {seed} failed; replay it with WARPWIRE_SEED={seed} and the test's name"
            );
            resume_unwind(payload);
        }
    }
}

/// Asserts that bytes are equal; reports the first difference instead of printing megabytes.
#[track_caller]
pub fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "length of {what}");
    if let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) {
        let (len, found, expected) = (found.len(), found[at], expected[at]);
        panic!("{what}: byte {at} of {len} is {found:#x}, not {expected:#x}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_ascend() {
        let bytes = ascending_words(u64::MAX, 3, 3);
        let words: Vec<_> =
            bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
        assert_eq!(words, [u64::MAX, 2, 5]);
        assert_eq!(ascending_words(1, 1, 0), []);
    }

    #[test]
    fn numbers_are_reproducible_and_bounded() {
        let draw = |seed| {
            let mut rng = Rng::new(seed);
            [(); 50].map(|()| rng.below(10))
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
        assert!(draw(0).iter().all(|number| *number < 10));
        assert_eq!(Rng::new(1).below(0), 0);
    }

    #[test]
    #[should_panic(expected = "boom at 5")]
    fn a_failing_seed_fails_the_test() {
        for_each_seed(0..9, |seed| assert!(seed != 5, "boom at {seed}"));
    }

    #[test]
    #[should_panic(expected = "it: byte 1 of 3 is 0x2, not 0x9")]
    fn the_first_difference_is_reported() {
        assert_same(&[1, 2, 3], &[1, 9, 9], "it");
    }
}
