//! Atomic operations on words of the peer's memory: what they carry, and what they do to a word.

/// How wide the word of an [`Atomic`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicWidth {
    /// 4 bytes; masked operations only.
    Four,
    /// 8 bytes.
    Eight,
}

impl AtomicWidth {
    /// How many bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }
}

/// An atomic operation with its operands. Operands of 4-byte operations are in the low half.
///
/// ```
/// use warpwire::mlx5::{Atomic, AtomicWidth};
/// assert_eq!(Atomic::FetchAdd { add: 7 }.apply(u64::MAX), 6);
/// let swap = Atomic::CompareSwap { compare: 1, swap: 9 };
/// assert_eq!((swap.apply(1), swap.apply(2)), (9, 2));
/// // Two counters of 16 bits in one word: what leaves the lower one does not reach the upper one.
/// let both = Atomic::MaskedFetchAdd { width: AtomicWidth::Four, add: 0x0001_0001, boundary: 1 << 15 };
/// assert_eq!(both.apply(0x0005_ffff), 0x0006_0000);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// `swap` takes the place of `compare`.
    CompareSwap {
        /// What must be there.
        compare: u64,
        /// What comes in its place.
        swap: u64,
    },
    /// `add` is added, wrapping.
    FetchAdd {
        /// The addend.
        add: u64,
    },
    /// Where `compare_mask` is set the word must be as `compare`; where `swap_mask` is set it becomes as
    /// `swap`.
    MaskedCompareSwap {
        /// The width of the word.
        width: AtomicWidth,
        /// What must be there.
        compare: u64,
        /// What comes in its place.
        swap: u64,
        /// The bits that are compared.
        compare_mask: u64,
        /// The bits that are replaced.
        swap_mask: u64,
    },
    /// `add` is added; each bit of `boundary` is the highest of a field, and nothing is carried out of it.
    MaskedFetchAdd {
        /// The width of the word.
        width: AtomicWidth,
        /// The addends.
        add: u64,
        /// The highest bit of each field; all ones make it an exclusive or.
        boundary: u64,
    },
}

impl Atomic {
    /// How wide the word is.
    pub const fn width(&self) -> AtomicWidth {
        match self {
            Self::CompareSwap { .. } | Self::FetchAdd { .. } => AtomicWidth::Eight,
            Self::MaskedCompareSwap { width, .. } | Self::MaskedFetchAdd { width, .. } => *width,
        }
    }

    /// What the word becomes, given what it was.
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
            // Without the highest bit of each field no carry leaves a field; that bit is then the sum of
            // itself, its addend and what was carried into it, which is what exclusive or gives.
            Self::MaskedFetchAdd { add, boundary, .. } => {
                (old & !boundary).wrapping_add(add & !boundary) ^ ((old ^ add) & boundary)
            }
        };
        narrow(new, self.width())
    }

    /// What lands in the requester's buffer for the value that was there before: 8 bytes in the host's
    /// order, 4 bytes big-endian, as ConnectX delivers them.
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
