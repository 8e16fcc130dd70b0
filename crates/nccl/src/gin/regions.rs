//! Symmetric memory: what each rank registered, found by a number that kernels carry. The number
//! comes back from GPU memory, so it is looked up and never used as a pointer.

use warpwire::verbs::{Mr, Remote, Sge};

use super::abi::Id;
use crate::result::{Failure, INVALID_ARGUMENT, Result};

/// Memory of one rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankRegion {
    pub remote: Remote,
    pub len: u64,
}

/// A collective registration.
pub(super) struct Region {
    pub mr: Mr,
    pub ranks: Box<[RankRegion]>,
}

struct Entry {
    /// Counts the registrations of this place, so that an old number is not taken for a new one.
    generation: u64,
    region: Option<Region>,
}

/// The registrations of a communicator.
pub(super) struct Regions {
    /// Tells communicators of this process apart.
    number: u64,
    entries: Vec<Entry>,
}

/// Bits of a number: place + 1, generation, communicator. Kernels carry 63 bits.
const PLACE_BITS: u32 = 24;
const GENERATION_BITS: u32 = 20;
const NUMBER_BITS: u32 = 18;
const _: () = assert!(PLACE_BITS + GENERATION_BITS + NUMBER_BITS < 63);

const fn mask(bits: u32) -> u64 {
    (1 << bits) - 1
}

impl Regions {
    pub(super) fn new(number: u64) -> Self {
        Self { number: number & mask(NUMBER_BITS), entries: Vec::new() }
    }

    fn id(&self, place: usize, generation: u64) -> Id {
        let high = self.number << GENERATION_BITS | generation & mask(GENERATION_BITS);
        std::ptr::without_provenance((high << PLACE_BITS | (place as u64 + 1)) as usize)
    }

    pub(super) fn insert(&mut self, region: Region) -> Id {
        let free = self.entries.iter().position(|entry| entry.region.is_none());
        let place = free.unwrap_or(self.entries.len());
        if place == self.entries.len() {
            self.entries.push(Entry { generation: 0, region: None });
        }
        let entry = &mut self.entries[place];
        (entry.generation, entry.region) = (entry.generation + 1, Some(region));
        let generation = entry.generation;
        self.id(place, generation)
    }

    #[inline]
    fn place(&self, id: Id) -> Option<usize> {
        let bits = id.addr() as u64;
        let place = (bits & mask(PLACE_BITS)).checked_sub(1)? as usize;
        let entry = self.entries.get(place)?;
        (self.id(place, entry.generation) == id).then_some(place)
    }

    #[inline]
    pub(super) fn get(&self, id: Id) -> Result<&Region> {
        let found = self.place(id).and_then(|place| self.entries[place].region.as_ref());
        found.ok_or_else(|| unknown(id))
    }

    pub(super) fn remove(&mut self, id: Id) -> Result<Region> {
        let place = self.place(id).ok_or_else(|| unknown(id))?;
        self.entries[place].region.take().ok_or_else(|| unknown(id))
    }

    pub(super) fn clear(&mut self) -> Vec<Region> {
        self.entries.drain(..).filter_map(|entry| entry.region).collect()
    }
}

impl Region {
    /// `len` bytes of this rank's memory, from `offset` on: address and key.
    #[inline]
    pub(super) fn local(&self, offset: u64, len: u64) -> Result<Sge> {
        check(offset, len, self.mr.len())?;
        Ok(self.mr.sge(offset, 0))
    }

    /// `len` bytes of a rank's memory.
    #[inline]
    pub(super) fn remote(&self, rank: u32, offset: u64, len: u64) -> Result<Remote> {
        let region = self.ranks.get(rank as usize).copied();
        let Some(RankRegion { remote, len: size }) = region else {
            return Err(Failure::new(INVALID_ARGUMENT, format!("there is no rank {rank}")));
        };
        check(offset, len, size)?;
        Ok(Remote { address: remote.address.wrapping_add(offset), rkey: remote.rkey })
    }

    /// The 64-bit word at `offset` of a rank's memory.
    #[inline]
    pub(super) fn word(&self, rank: u32, offset: u64) -> Result<Remote> {
        let word = self.remote(rank, offset, size_of::<u64>() as u64)?;
        if !word.address.is_multiple_of(size_of::<u64>() as u64) {
            let text = format!("a signal at offset {offset}, which is not aligned to 8 bytes");
            return Err(Failure::new(INVALID_ARGUMENT, text));
        }
        Ok(word)
    }
}

#[inline]
fn check(offset: u64, len: u64, size: u64) -> Result {
    match offset.checked_add(len).is_some_and(|end| end <= size) {
        true => Ok(()),
        false => Err(outside(offset, len, size)),
    }
}

#[cold]
fn outside(offset: u64, len: u64, size: u64) -> Failure {
    let text = format!("{len} bytes at offset {offset} of memory of {size} bytes");
    Failure::new(INVALID_ARGUMENT, text)
}

#[cold]
fn unknown(id: Id) -> Failure {
    let text = format!("{:#x} is no memory that is registered here", id.addr());
    Failure::new(INVALID_ARGUMENT, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use warpwire::link::Hub;
    use warpwire::mr::HostMemory;
    use warpwire::verbs::{Access, Context};

    fn context() -> Context {
        Context::open(Hub::new().endpoint("10.0.0.1:4791".parse().unwrap()).unwrap()).unwrap()
    }

    fn region(context: &Context) -> Region {
        let memory = HostMemory::new(4096).unwrap();
        let mr = context.register(&context.alloc_pd(), memory, Access::ALL).unwrap();
        let one = RankRegion { remote: mr.remote(0), len: mr.len() };
        Region { mr, ranks: vec![one, RankRegion { len: 64, ..one }].into() }
    }

    #[test]
    fn numbers_of_other_times_and_communicators_are_refused() {
        let context = context();
        let (mut regions, mut others) = (Regions::new(1), Regions::new(2));
        let (first, other) = (regions.insert(region(&context)), others.insert(region(&context)));
        let second = regions.insert(region(&context));
        assert!(first != second && first != other && !first.is_null());
        assert!(first.addr() < 1 << 63);
        assert!(regions.get(first).is_ok() && regions.get(other).is_err());
        regions.remove(first).unwrap();
        assert!(regions.get(first).is_err() && regions.remove(first).is_err());
        let third = regions.insert(region(&context));
        assert!(third != first && regions.get(first).is_err() && regions.get(third).is_ok());
        for bits in [0, 1, 99, usize::MAX, second.addr() + 1, second.addr() | 1 << 62] {
            let id: Id = std::ptr::without_provenance(bits);
            assert!(regions.get(id).is_err_and(|why| why.code == INVALID_ARGUMENT), "{bits:#x}");
        }
        assert_eq!(regions.clear().len(), 2);
        assert!(regions.get(second).is_err());
    }

    #[test]
    fn ranges_end_with_the_memory() {
        let region = region(&context());
        let base = region.mr.iova();
        assert_eq!(region.local(4095, 1).unwrap().address, base + 4095);
        assert_eq!(region.remote(1, 60, 4).unwrap().address, base + 60);
        assert_eq!(region.word(1, 56).unwrap().address, base + 56);
        for refused in [
            region.local(4095, 2).map(|_| ()),
            region.local(u64::MAX, 1).map(|_| ()),
            region.local(1, u64::MAX).map(|_| ()),
            region.remote(1, 60, 5).map(|_| ()),
            region.remote(2, 0, 1).map(|_| ()),
            region.word(1, 57).map(|_| ()),
            region.word(1, 4).map(|_| ()),
            region.word(1, 64).map(|_| ()),
        ] {
            assert_eq!(refused.unwrap_err().code, INVALID_ARGUMENT);
        }
    }
}
