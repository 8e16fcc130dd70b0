//! Packet sequence numbers: 24 bits, compared modulo 2^24.
//!
//! A receiver classifies every packet as *expected*, *duplicate* (behind) or *gap* (ahead) by its
//! signed distance from the expected number. Half of the circle is behind, half ahead, so fewer
//! than 2^23 packets may be outstanding.

use core::fmt;

/// Bits in a sequence number.
pub const BITS: u32 = 24;
const MASK: u32 = (1 << BITS) - 1;

/// A 24-bit packet sequence number.
///
/// It has no [`Ord`]: in circular arithmetic "less than" is not transitive. Use the
/// [distance](Psn::distance_from).
///
/// ```
/// use warpwire_proto::Psn;
/// let last = Psn::new(0xff_ffff);
/// assert_eq!(last.next(), Psn::new(0));
/// assert_eq!(last.next().distance_from(last), 1);
/// assert_eq!(last.distance_from(last.next()), -1);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

impl Psn {
    /// The low 24 bits of `value`; on the wire the upper 8 belong to other fields.
    pub const fn new(value: u32) -> Self {
        Self(value & MASK)
    }

    /// The number as an integer below 2^24.
    pub const fn value(self) -> u32 {
        self.0
    }

    /// The next number; 0xffffff is followed by 0.
    #[must_use]
    pub const fn next(self) -> Self {
        self.add(1)
    }

    /// The previous number; 0 is preceded by 0xffffff.
    #[must_use]
    pub const fn previous(self) -> Self {
        self.add(MASK)
    }

    /// The number `count` packets later.
    #[must_use]
    pub const fn add(self, count: u32) -> Self {
        Self::new(self.0.wrapping_add(count))
    }

    /// The signed distance from `other` to `self` (negative: `self` is behind), the shorter way
    /// round: between -2^23 and 2^23 - 1.
    pub const fn distance_from(self, other: Self) -> i32 {
        // Move the 24-bit difference to the top of the word, so that the arithmetic shift extends
        // its sign.
        ((self.0.wrapping_sub(other.0) << (32 - BITS)) as i32) >> (32 - BITS)
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "psn {:#08x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn upper_bits_are_dropped() {
        assert_eq!(Psn::new(0xab12_3456).value(), 0x12_3456);
    }

    #[test]
    fn the_far_side_of_the_circle_is_behind() {
        let start = Psn::new(0);
        assert_eq!(Psn::new(0x7f_ffff).distance_from(start), 0x7f_ffff);
        assert_eq!(Psn::new(0x80_0000).distance_from(start), -0x80_0000);
        assert_eq!(Psn::new(0xff_ffff).distance_from(start), -1);
    }

    proptest! {
        #[test]
        fn distance_undoes_add(start in 0u32..1 << 24, step in 0u32..1 << 23) {
            let from = Psn::new(start);
            prop_assert_eq!(from.add(step).distance_from(from), step as i32);
            prop_assert_eq!(from.distance_from(from.add(step)), -(step as i32));
        }
    }
}
