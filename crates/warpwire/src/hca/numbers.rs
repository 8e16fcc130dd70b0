//! Numbers of queue pairs: 24 bits, of which the lower ones are the index of the engine's slot.
//!
//! | bits | numbers of an ordinary device | numbers of a device with a [`QpnSlot`] |
//! |---|---|---|
//! | 23 | 0 | 1 |
//! | 22..16 | generation: how often the index was used, and one | slot, upper part |
//! | 15..12 | index, upper part | slot, lower part |
//! | 11..0 | index, lower part | index |
//!
//! On a device with several engines, the highest bits of the index name the engine.
//!
//! A number is all that a stranger on the network needs, besides a sequence number, to end a
//! connection. So it cannot be guessed: indices are masked (exclusive or) with a random number of
//! the device, and the generation begins at a random one. A number alone tells which kind it is,
//! and its masked index.

use std::fmt;

use crate::sync::random_u64;

/// Set in numbers that carry a [`QpnSlot`].
const SLOT_FLAG: u32 = 1 << 23;
const SLOT_SHIFT: u32 = 12;
const SLOT_INDEX_MASK: u32 = (1 << SLOT_SHIFT) - 1;

/// Queue pairs of one engine, at most.
pub(super) const MAX_QPS: u32 = 1 << 16;

/// Names one of up to 2047 devices that share an IP address: all numbers of the device's queue
/// pairs carry it. A peer that knows such a number and the address can derive the UDP port.
///
/// ```
/// use warpwire::hca::QpnSlot;
/// let slot = QpnSlot::new(5).unwrap();
/// assert_eq!((QpnSlot::of(0x80_5010), QpnSlot::of(0x10)), (Some(slot), None));
/// assert_eq!((slot.index(), QpnSlot::new(2047)), (5, None));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct QpnSlot(u16);

impl fmt::Debug for QpnSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QpnSlot({})", self.0)
    }
}

impl QpnSlot {
    /// Number of slots. One less than fits, because InfiniBand reserves the largest number.
    pub const COUNT: u16 = (1 << 11) - 1;

    /// The slot with this index; `None` from [`COUNT`](Self::COUNT) on.
    pub const fn new(index: u16) -> Option<Self> {
        if index < Self::COUNT { Some(Self(index)) } else { None }
    }

    /// The slot in a queue pair's number; `None` if the number has none.
    pub const fn of(number: u32) -> Option<Self> {
        if number & SLOT_FLAG == 0 {
            return None;
        }
        Some(Self(((number & !SLOT_FLAG) >> SLOT_SHIFT) as u16 & ((1 << 11) - 1)))
    }

    /// Its index, below [`COUNT`](Self::COUNT).
    pub const fn index(self) -> u16 {
        self.0
    }
}

/// How often an index was used since some random number: 1 to 127. Never 0, because InfiniBand
/// reserves the smallest numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Generation(u8);

impl Generation {
    const MAX: u8 = 127;

    pub(super) fn random() -> Self {
        Self(random_u64() as u8 % Self::MAX + 1)
    }

    pub(super) fn advance(&mut self) {
        self.0 = self.0 % Self::MAX + 1;
    }
}

/// How an engine numbers its queue pairs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbering {
    slot: Option<QpnSlot>,
    /// Exclusive-ored with indices. All engines of a device have the same mask.
    mask: u32,
    /// The engine.
    engine: u32,
    /// Bits of an index below those that name the engine.
    index_bits: u32,
}

impl Numbering {
    /// Numbers with this slot, or without one, that other processes cannot guess: those of the
    /// first of `engines` engines.
    pub(super) fn random(slot: Option<QpnSlot>, engines: u32) -> Self {
        Self::with_mask(slot, engines, random_u64() as u32)
    }

    fn with_mask(slot: Option<QpnSlot>, engines: u32, mask: u32) -> Self {
        let indices = index_mask(slot.is_some());
        let engine_bits = engines.max(1).next_power_of_two().ilog2();
        let index_bits = indices.count_ones().saturating_sub(engine_bits);
        Self { slot, mask: mask & indices, engine: 0, index_bits }
    }

    /// Those of another engine of the device.
    pub(super) const fn of_engine(self, engine: u32) -> Self {
        Self { engine, ..self }
    }

    /// Queue pairs of one engine, at most.
    pub(super) const fn max_qps(self) -> u32 {
        1 << self.index_bits
    }

    /// An index is used again only if at least this many are free. Numbers with a slot have no room
    /// for a generation, so their indices are used again as late as possible.
    pub(super) const fn min_free(self) -> usize {
        match self.slot {
            None => 256,
            Some(_) => usize::MAX,
        }
    }

    /// The number of the queue pair at `index`.
    pub(super) fn number(self, index: u32, generation: Generation) -> u32 {
        let local = (self.engine << self.index_bits | index) ^ self.mask;
        match self.slot {
            None => u32::from(generation.0) << 16 | local,
            Some(slot) => SLOT_FLAG | u32::from(slot.0) << SLOT_SHIFT | local,
        }
    }

    /// The index of a number of this engine; any number gives one.
    #[inline]
    pub(super) const fn index(self, number: u32) -> u32 {
        self.unmasked(number) & (self.max_qps() - 1)
    }

    /// The engine of a number of this device; any number gives one, which need not exist.
    #[inline]
    pub(super) const fn engine_of(self, number: u32) -> u32 {
        self.unmasked(number) >> self.index_bits
    }

    const fn unmasked(self, number: u32) -> u32 {
        (qp_row(number) ^ self.mask) & index_mask(self.slot.is_some())
    }
}

/// The row of a queue pair in its device's export table: the masked index.
#[inline]
pub(super) const fn qp_row(number: u32) -> u32 {
    number & index_mask(number & SLOT_FLAG != 0)
}

/// The bits of an index in a number.
#[inline]
const fn index_mask(has_slot: bool) -> u32 {
    if has_slot { SLOT_INDEX_MASK } else { MAX_QPS - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_indices_are_inverse() {
        let slots = [None, QpnSlot::new(0), QpnSlot::new(1234), QpnSlot::new(2046)];
        for (slot, engines) in
            slots.map(|slot| (slot, 1)).into_iter().chain([(None, 3), (None, 16)])
        {
            for mask in [0, 1, 0x0fff, 0xffff, 0x1234_5678, random_u64() as u32] {
                for engine in 0..engines {
                    let numbering = Numbering::with_mask(slot, engines, mask).of_engine(engine);
                    check_inverse(numbering, slot, engine);
                }
            }
        }
    }

    fn check_inverse(numbering: Numbering, slot: Option<QpnSlot>, engine: u32) {
        for index in [0, 1, 777, numbering.max_qps() - 1] {
            for generation in [1, 2, 126, 127].map(Generation) {
                let number = numbering.number(index, generation);
                assert!((0x10..0xff_ffff).contains(&number), "{number:#x}");
                assert_eq!(numbering.index(number), index, "{number:#x}");
                assert_eq!(numbering.engine_of(number), engine, "{number:#x}");
                assert_eq!(QpnSlot::of(number), slot, "{number:#x}");
                assert!(qp_row(number) < MAX_QPS);
            }
        }
    }

    #[test]
    fn engines_of_a_device_share_the_numbers() {
        for (engines, each) in [(1, 1 << 16), (2, 1 << 15), (3, 1 << 14), (4, 1 << 14)] {
            let first = Numbering::random(None, engines);
            assert_eq!(first.max_qps(), each);
            let mut seen = std::collections::HashSet::new();
            for engine in 0..engines {
                let numbering = first.of_engine(engine);
                let all = (0..each).map(|index| numbering.number(index, Generation(7)));
                assert!(all.into_iter().all(|number| seen.insert(number)));
            }
        }
    }

    #[test]
    fn generations_repeat_as_late_as_possible() {
        let mut generation = Generation::random();
        let seen: std::collections::HashSet<u8> = (0..127)
            .map(|_| {
                generation.advance();
                generation.0
            })
            .collect();
        assert!(seen.len() == 127 && !seen.contains(&0) && !seen.contains(&128));
    }

    #[test]
    fn numbers_of_two_devices_differ() {
        let first = |_| Numbering::random(None, 1).number(0, Generation::random());
        let numbers: std::collections::HashSet<u32> = (0..16).map(first).collect();
        assert!(numbers.len() >= 15, "{numbers:x?}");
    }
}
