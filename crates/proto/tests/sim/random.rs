//! Random numbers from one seed.

/// SplitMix64: small, fast and portable.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x9e37_79b9_7f4a_7c15)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        if end == 0 { 0 } else { self.next() % end }
    }

    pub fn between(&mut self, first: u64, last: u64) -> u64 {
        first + self.below(last - first + 1)
    }

    /// True with probability `per_mille` / 1000.
    pub fn chance(&mut self, per_mille: u32) -> bool {
        per_mille > 0 && self.below(1000) < u64::from(per_mille)
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

pub fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// The byte at offset `at` of the data with seed `name`: what is sent, and what must arrive.
pub fn byte_of(name: u64, at: u32) -> u8 {
    (u64::from(at).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ name >> 7)
        .wrapping_mul(name | 1)
        .to_be_bytes()[1]
}

pub fn bytes_of(name: u64, offset: u32, len: u32) -> impl Iterator<Item = u8> {
    (offset..offset + len).map(move |at| byte_of(name, at))
}
