//! How a message is split over the queue pairs of a connection. Both ends compute it from the size.

/// Parts begin at multiples of this, the payload of a packet.
const ALIGNMENT: u64 = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stripes {
    lanes: usize,
    /// Minimum bytes of a part.
    min: u64,
}

impl Stripes {
    /// `lanes` is at least 1, `min` at least 1.
    pub(crate) fn new(lanes: usize, min: u64) -> Self {
        Self { lanes: lanes.max(1), min: min.max(1) }
    }

    /// How many parts a message has, and the length of all but the last. An empty message has one.
    #[inline]
    pub(crate) fn split(&self, size: u64) -> (usize, u64) {
        if size <= self.min || self.lanes == 1 {
            return (1, size);
        }
        let even = size.div_ceil(self.lanes as u64);
        let part = even.max(self.min).next_multiple_of(ALIGNMENT);
        (size.div_ceil(part) as usize, part)
    }

    /// The lane of part `part` of a message. Messages begin at different lanes, so that small ones
    /// use all of them.
    #[inline]
    pub(crate) fn lane(&self, sequence: u64, entry: usize, part: usize) -> usize {
        (sequence as usize).wrapping_add(entry).wrapping_add(part) % self.lanes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_message_and_lanes_differ() {
        testkit::for_each_seed(0..200, |seed| {
            let mut rng = testkit::Rng::new(seed);
            let lanes = 1 + rng.below(8) as usize;
            let stripes = Stripes::new(lanes, 1 << rng.below(20));
            let bits = 1 + rng.below(31);
            let size = rng.below(1 << bits);
            let (count, part) = stripes.split(size);
            assert!((1..=lanes).contains(&count), "{stripes:?} {size}: {count}");
            let last = size - part * (count as u64 - 1);
            assert!(last <= part && (size == 0 || last > 0), "{stripes:?} {size}: {part}");
            let mut used: Vec<usize> = (0..count).map(|at| stripes.lane(seed, 3, at)).collect();
            used.sort_unstable();
            used.dedup();
            assert_eq!(used.len(), count);
        });
    }

    #[test]
    fn small_messages_are_whole() {
        let stripes = Stripes::new(4, 65536);
        assert_eq!(stripes.split(0), (1, 0));
        assert_eq!(stripes.split(65536), (1, 65536));
        assert_eq!(stripes.split(65537), (2, 65536));
        assert_eq!(stripes.split(1 << 20), (4, 1 << 18));
        assert_eq!(stripes.split(1 << 31), (4, 1 << 29));
        assert_eq!(Stripes::new(1, 1).split(1 << 31), (1, 1 << 31));
    }
}
