//! Packet sequence numbers: 24 bits, compared on a circle.
//!
//! A receiver sorts every packet into *expected*, *duplicate* (behind) or *gap* (ahead) by the signed
//! distance from the number that it expects. Half of the circle is behind, half ahead, so a window of
//! outstanding packets must stay under 2^23.

use core::fmt;

/// Bits in a sequence number.
pub const BITS: u32 = 24;
const MASK: u32 = (1 << BITS) - 1;

/// A 24-bit packet sequence number.
///
/// It has no [`Ord`]: on a circle "less than" is not transitive. Ask for the [distance](Psn::distance_from).
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
    /// The number with the low 24 bits of `value`; the upper 8 share their word with other fields on the wire.
    pub const fn new(value: u32) -> Self {
        Self(value & MASK)
    }

    /// The number as an integer below 2^24.
    pub const fn value(self) -> u32 {
        self.0
    }

    /// The following number; after 0xffffff comes 0.
    #[must_use]
    pub const fn next(self) -> Self {
        self.add(1)
    }

    /// The number before; before 0 comes 0xffffff.
    #[must_use]
    pub const fn previous(self) -> Self {
        self.add(MASK)
    }

    /// The number `count` packets further on.
    #[must_use]
    pub const fn add(self, count: u32) -> Self {
        Self::new(self.0.wrapping_add(count))
    }

    /// How far `self` lies ahead of `other` (negative: behind), by the shorter way round:
    /// between -2^23 and 2^23 - 1.
    pub const fn distance_from(self, other: Self) -> i32 {
        // Move the 24-bit difference to the top of the word, so that the arithmetic shift extends its sign.
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
