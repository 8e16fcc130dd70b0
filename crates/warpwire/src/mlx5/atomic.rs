//! Atomic operations: operands and their effect on a word.

/// Operand width of an [`Atomic`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicWidth {
    /// 4 bytes; only masked (extended) atomics.
    Four,
    /// 8 bytes.
    Eight,
}

impl AtomicWidth {
    /// Width in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }
}

/// An atomic operation with its operands. 4-byte operands are in the low half.
///
/// ```
/// use warpwire::mlx5::{Atomic, AtomicWidth};
/// assert_eq!(Atomic::FetchAdd { add: 7 }.apply(u64::MAX), 6);
/// let swap = Atomic::CompareSwap { compare: 1, swap: 9 };
/// assert_eq!((swap.apply(1), swap.apply(2)), (9, 2));
/// // Two 16-bit counters in one word: no carry from the lower into the upper one.
/// let (width, boundary) = (AtomicWidth::Four, 1 << 15);
/// let both = Atomic::MaskedFetchAdd { width, add: 0x0001_0001, boundary };
/// assert_eq!(both.apply(0x0005_ffff), 0x0006_0000);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Stores `swap` if the word equals `compare`.
    CompareSwap {
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Adds `add`, wrapping.
    FetchAdd {
        /// The addend.
        add: u64,
    },
    /// If the word equals `compare` in the bits of `compare_mask`, replaces the bits of `swap_mask`
    /// by those of `swap`.
    MaskedCompareSwap {
        /// Operand width.
        width: AtomicWidth,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
        /// Bits that are compared.
        compare_mask: u64,
        /// Bits that are replaced.
        swap_mask: u64,
    },
    /// Adds `add` field by field: each set bit of `boundary` is the top bit of a field, out of
    /// which nothing is carried.
    MaskedFetchAdd {
        /// Operand width.
        width: AtomicWidth,
        /// The addends, one per field.
        add: u64,
        /// Top bit of each field; all ones make it an exclusive or.
        boundary: u64,
    },
}

impl Atomic {
    /// Operand width; 8 bytes unless masked.
    pub const fn width(&self) -> AtomicWidth {
        match self {
            Self::CompareSwap { .. } | Self::FetchAdd { .. } => AtomicWidth::Eight,
            Self::MaskedCompareSwap { width, .. } | Self::MaskedFetchAdd { width, .. } => *width,
        }
    }

    /// The new value of a word that was `old`.
    #[inline]
    pub const fn apply(&self, old: u64) -> u64 {
        let new = match *self {
            Self::CompareSwap { compare, swap } => {
                if old == compare {
                    swap
                } else {
                    old
                }
            }
            Self::FetchAdd { add } => old.wrapping_add(add),
            Self::MaskedCompareSwap { compare, swap, compare_mask, swap_mask, width } => {
                if narrow((old ^ compare) & compare_mask, width) == 0 {
                    (old & !swap_mask) | (swap & swap_mask)
                } else {
                    old
                }
            }
            // Adding without the top bit of each field carries nothing out of a field. The top bit
            // is then the sum of itself, its addend and the carry into it: an exclusive or.
            Self::MaskedFetchAdd { add, boundary, .. } => {
                (old & !boundary).wrapping_add(add & !boundary) ^ ((old ^ add) & boundary)
            }
        };
        narrow(new, self.width())
    }

    /// The bytes that the requester's buffer receives for the old value, and their number: 8 bytes
    /// in host order or 4 bytes big-endian, as ConnectX delivers them.
    ///
    /// ```
    /// use warpwire::mlx5::{Atomic, AtomicWidth};
    /// let narrow = Atomic::MaskedFetchAdd { width: AtomicWidth::Four, add: 1, boundary: 0 };
    /// assert_eq!(narrow.fetched(0x0102_0304), ([1, 2, 3, 4, 0, 0, 0, 0], 4));
    /// let wide = Atomic::FetchAdd { add: 1 };
    /// assert_eq!(wide.fetched(5), (5u64.to_ne_bytes(), 8));
    /// ```
    pub const fn fetched(&self, old: u64) -> ([u8; 8], usize) {
        match self.width() {
            AtomicWidth::Eight => (old.to_ne_bytes(), 8),
            AtomicWidth::Four => {
                let [a, b, c, d] = (old as u32).to_be_bytes();
                ([a, b, c, d, 0, 0, 0, 0], 4)
            }
        }
    }
}

const fn narrow(value: u64, width: AtomicWidth) -> u64 {
    match width {
        AtomicWidth::Four => value & u32::MAX as u64,
        AtomicWidth::Eight => value,
    }
}
