//! Layout of the memory that the two ends of a connection write for each other: descriptors of
//! receives in the sender's memory, words of arrived parts in the receiver's.

use crate::abi::MAX_RECVS;
use crate::lanes::MAX_LANES;

/// Groups of receives that are outstanding at a time. NCCL wants 32.
pub(crate) const SLOTS: usize = 64;
/// Bytes of a descriptor.
pub(crate) const ENTRY_LEN: usize = 64;
/// A slot is its descriptors, and a cache line with the marker.
const SLOT_LEN: u64 = (MAX_RECVS * ENTRY_LEN + 64) as u64;
/// Bytes of the ring of descriptors.
pub(crate) const RING_LEN: u64 = SLOTS as u64 * SLOT_LEN;
/// Number of words: one per receive and lane.
pub(crate) const WORDS: usize = SLOTS * MAX_RECVS * MAX_LANES;
/// A word has the size in its lower bits, and the sequence number above.
const SIZE_BITS: u32 = 40;

/// The slot of a group.
#[inline]
pub(crate) fn slot(sequence: u64) -> usize {
    (sequence % SLOTS as u64) as usize
}

/// Offset of a slot's descriptors in the ring.
#[inline]
pub(crate) fn entries_at(slot: usize) -> u64 {
    slot as u64 * SLOT_LEN
}

/// Offset of a slot's marker in the ring.
#[inline]
pub(crate) fn marker_at(slot: usize) -> u64 {
    entries_at(slot) + (MAX_RECVS * ENTRY_LEN) as u64
}

/// The marker of a group: its sequence number, counted from 1, and the number of its receives.
#[inline]
pub(crate) fn marker(sequence: u64, count: usize) -> u64 {
    (sequence + 1) << 8 | count as u64
}

/// The number of receives, if the marker is that of this group; 0 or too many if the peer is
/// broken.
#[inline]
pub(crate) fn marked(marker: u64, sequence: u64) -> Option<usize> {
    (marker >> 8 == sequence + 1).then_some((marker & 0xff) as usize)
}

/// Index of the word of a part.
#[inline]
pub(crate) fn word_at(slot: usize, entry: usize, lane: usize) -> usize {
    (slot * MAX_RECVS + entry) * MAX_LANES + lane
}

/// The word that follows the parts of a message; never 0.
#[inline]
pub(crate) fn word(sequence: u64, size: u64) -> u64 {
    stamp(sequence) << SIZE_BITS | size & ((1 << SIZE_BITS) - 1)
}

/// The size in a word, if it is that of this group.
#[inline]
pub(crate) fn size_in(word: u64, sequence: u64) -> Option<u64> {
    (word >> SIZE_BITS == stamp(sequence)).then_some(word & ((1 << SIZE_BITS) - 1))
}

/// 24 bits, not all zero.
#[inline]
fn stamp(sequence: u64) -> u64 {
    sequence & 0x7f_ffff | 0x80_0000
}

/// A receive that the peer has posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub address: u64,
    pub size: u64,
    pub tag: i32,
    /// For each lane.
    pub rkeys: [u32; MAX_LANES],
}

impl Descriptor {
    pub(crate) const EMPTY: Self = Self { address: 0, size: 0, tag: 0, rkeys: [0; MAX_LANES] };

    #[inline]
    pub(crate) fn bytes(&self) -> [u8; ENTRY_LEN] {
        let mut bytes = [0; ENTRY_LEN];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.size.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.tag.to_le_bytes());
        for (to, rkey) in bytes[24..].chunks_exact_mut(4).zip(self.rkeys) {
            to.copy_from_slice(&rkey.to_le_bytes());
        }
        bytes
    }

    #[inline]
    pub(crate) fn parse(bytes: &[u8; ENTRY_LEN]) -> Self {
        let word = |at: usize| {
            let field = bytes[at..].first_chunk().copied().unwrap_or_default();
            u64::from_le_bytes(field)
        };
        let half = |at: usize| {
            let field = bytes[at..].first_chunk().copied().unwrap_or_default();
            u32::from_le_bytes(field)
        };
        let rkeys = std::array::from_fn(|lane| half(24 + 4 * lane));
        Self { address: word(0), size: word(8), tag: half(16) as i32, rkeys }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_survive_the_trip() {
        let rkeys = [1, 2, 3, 4, 5, 6, 7, u32::MAX];
        let one = Descriptor { address: u64::MAX, size: 1 << 40, tag: -5, rkeys };
        assert_eq!(Descriptor::parse(&one.bytes()), one);
        assert_eq!(Descriptor::parse(&[0; ENTRY_LEN]), Descriptor::EMPTY);
    }

    #[test]
    fn markers_and_words_belong_to_one_group() {
        for sequence in [0, 1, 63, 64, 0x7f_ffff, 0x80_0000, 1 << 40] {
            assert_eq!(marked(marker(sequence, 8), sequence), Some(8));
            assert_eq!(marked(marker(sequence, 8), sequence + SLOTS as u64), None);
            assert_eq!(marked(0, sequence), None);
            for size in [0, 1, 1 << 31] {
                assert_eq!(size_in(word(sequence, size), sequence), Some(size));
                assert_eq!(size_in(word(sequence, size), sequence + SLOTS as u64), None);
            }
            assert_eq!(size_in(0, sequence), None);
        }
    }

    #[test]
    fn nothing_overlaps() {
        assert!(marker_at(0) >= entries_at(0) + (MAX_RECVS * ENTRY_LEN) as u64);
        assert!(marker_at(0) + 8 <= entries_at(1));
        assert!(marker_at(SLOTS - 1) + 8 <= RING_LEN);
        assert_eq!(word_at(SLOTS - 1, MAX_RECVS - 1, MAX_LANES - 1), WORDS - 1);
    }
}
