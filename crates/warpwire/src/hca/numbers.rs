//! Numbers of queue pairs: 24 bits, of which the lower ones are the index of the engine's slot.
//!
//! | bits | numbers of an ordinary device | numbers of a device with a [`QpnSlot`] |
//! |---|---|---|
//! | 23 | 0 | 1 |
//! | 22..16 | how often the index was used | slot, upper part |
//! | 15..12 | index, upper part | slot, lower part |
//! | 11..0 | index, lower part | index |
//!
//! So a number alone tells which kind it is, and its index.

use std::fmt;

/// The first index: InfiniBand reserves the numbers 0 and 1.
const FIRST_INDEX: u32 = 0x10;
/// Set in numbers that carry a [`QpnSlot`].
const SLOT_FLAG: u32 = 1 << 23;
const SLOT_SHIFT: u32 = 12;
const SLOT_INDEX_MASK: u32 = (1 << SLOT_SHIFT) - 1;
const INDEX_MASK: u32 = MAX_QPS - 1;

/// Numbers of one engine, at most, the reserved ones included.
pub(super) const MAX_QPS: u32 = 1 << 16;

/// Names one of up to 2048 devices that share an IP address: all numbers of the device's queue
/// pairs carry it. A peer that knows such a number and the address can derive the UDP port.
///
/// ```
/// use warpwire::hca::QpnSlot;
/// let slot = QpnSlot::new(5).unwrap();
/// assert_eq!((QpnSlot::of(0x80_5010), QpnSlot::of(0x10)), (Some(slot), None));
/// assert_eq!((slot.index(), QpnSlot::new(2048)), (5, None));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct QpnSlot(u16);

impl fmt::Debug for QpnSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QpnSlot({})", self.0)
    }
}

impl QpnSlot {
    /// Number of slots.
    pub const COUNT: u16 = 1 << 11;

    /// The slot with this index; `None` from [`COUNT`](Self::COUNT) on.
    pub const fn new(index: u16) -> Option<Self> {
        if index < Self::COUNT { Some(Self(index)) } else { None }
    }

    /// The slot in a queue pair's number; `None` if the number has none.
    pub const fn of(number: u32) -> Option<Self> {
        if number & SLOT_FLAG == 0 {
            return None;
        }
        Some(Self(((number & !SLOT_FLAG) >> SLOT_SHIFT) as u16 & (Self::COUNT - 1)))
    }

    /// Its index, below [`COUNT`](Self::COUNT).
    pub const fn index(self) -> u16 {
        self.0
    }
}

/// How an engine numbers its queue pairs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbering(pub(super) Option<QpnSlot>);

impl Numbering {
    /// Queue pairs of one engine, at most.
    pub(super) const fn max_qps(self) -> u32 {
        match self.0 {
            None => MAX_QPS - FIRST_INDEX,
            Some(_) => SLOT_INDEX_MASK + 1 - FIRST_INDEX,
        }
    }

    /// An index is used again only if at least this many are free. Numbers with a slot have no room
    /// for a generation, so their indices are used again as late as possible.
    pub(super) const fn min_free(self) -> usize {
        match self.0 {
            None => 256,
            Some(_) => usize::MAX,
        }
    }

    /// The number of the queue pair at `index`, which was used `generation` times.
    pub(super) fn number(self, index: u32, generation: u8) -> u32 {
        let local = index + FIRST_INDEX;
        match self.0 {
            None => u32::from(generation & 0x7f) << 16 | local,
            Some(slot) => SLOT_FLAG | u32::from(slot.0) << SLOT_SHIFT | local,
        }
    }
}

/// The index of a number; any number gives one.
#[inline]
pub(super) const fn qpn_to_index(number: u32) -> u32 {
    let mask = if number & SLOT_FLAG == 0 { INDEX_MASK } else { SLOT_INDEX_MASK };
    (number & mask).wrapping_sub(FIRST_INDEX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_indices_are_inverse() {
        for slot in [None, QpnSlot::new(0), QpnSlot::new(1234), QpnSlot::new(2047)] {
            let numbering = Numbering(slot);
            for index in [0, 1, 777, numbering.max_qps() - 1] {
                for generation in [0, 1, 127, 128, 255] {
                    let number = numbering.number(index, generation);
                    assert!((FIRST_INDEX..1 << 24).contains(&number), "{number:#x}");
                    assert_eq!(qpn_to_index(number), index, "{number:#x}");
                    assert_eq!(QpnSlot::of(number), slot, "{number:#x}");
                }
            }
        }
        // Reserved and malformed numbers have an index that no engine uses.
        assert!(qpn_to_index(0) >= MAX_QPS && qpn_to_index(0x80_0001) >= MAX_QPS);
        assert_eq!(QpnSlot::of(u32::MAX).map(QpnSlot::index), Some(2047));
    }
}
