//! Entries of receive queues and of shared receive queues.

use super::wqe::{Data, INLINE, WqeError};
use super::{INVALID_KEY, SEGMENT, be16, be32, put};

/// How many bytes an entry of a receive queue takes that may name so many ranges; `None` if no entry may
/// name so many.
///
/// ```
/// use warpwire::mlx5::receive_stride;
/// assert_eq!([receive_stride(0), receive_stride(1), receive_stride(3)], [Some(16), Some(16), Some(64)]);
/// assert_eq!(receive_stride(u32::MAX), None);
/// ```
pub fn receive_stride(ranges: u32) -> Option<u32> {
    ranges.max(1).checked_mul(SEGMENT as u32)?.checked_next_power_of_two()
}

/// An entry of a receive queue: ranges of local memory that a message is scattered to.
///
/// A range of no bytes under the invalid key ends the list; what lies behind it is left over from earlier
/// entries.
///
/// ```
/// use warpwire::mlx5::Receive;
/// let mut entry = [0xff; 64];
/// Receive::write(&mut entry, &[(64, 0x5678, 0x1000), (32, 0x5678, 0x2000)]).unwrap();
/// let receive = Receive::parse(&entry).unwrap();
/// assert_eq!(receive.len(), 96);
/// assert_eq!(receive.segments().map(|data| data.address).collect::<Vec<_>>(), [0x1000, 0x2000]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Receive<'a> {
    segments: &'a [[u8; SEGMENT]],
    len: u64,
}

impl<'a> Receive<'a> {
    /// Reads an entry from a copy of its bytes.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WqeError> {
        let segments = Segments { rest: bytes.as_chunks().0 };
        let mut len = 0;
        for segment in segments.clone().raw() {
            if be32(segment, 0) & INLINE != 0 {
                return Err(WqeError::InlineTarget);
            }
            len += u64::from(Data::parse(segment).len);
        }
        Ok(Self { segments: segments.rest, len })
    }

    /// Fills `entry` with these ranges (length, key, address) and, where there is room, the end of the list.
    /// Says whether they fit; empty ones are left out.
    #[must_use = "nothing was written if the ranges do not fit"]
    pub fn write(entry: &mut [u8], ranges: &[(u32, u32, u64)]) -> Option<()> {
        let (places, _) = entry.as_chunks_mut::<SEGMENT>();
        let full = || ranges.iter().filter(|(len, ..)| *len != 0);
        if full().count() > places.len() || full().any(|(len, ..)| len & INLINE != 0) {
            return None;
        }
        let end = (0, INVALID_KEY, 0);
        for (slot, (len, lkey, address)) in places.iter_mut().zip(full().chain([&end])) {
            put(slot, 0, len.to_be_bytes());
            put(slot, 4, lkey.to_be_bytes());
            put(slot, 8, address.to_be_bytes());
        }
        Some(())
    }

    /// How many bytes it has room for.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has room for none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its ranges, in order, without empty ones.
    pub const fn segments(&self) -> Segments<'a> {
        Segments { rest: self.segments }
    }
}

/// The ranges of a [`Receive`], one after the other.
#[derive(Clone, Debug)]
pub struct Segments<'a> {
    rest: &'a [[u8; SEGMENT]],
}

impl<'a> Segments<'a> {
    /// The segments before the end of the list.
    fn raw(self) -> impl Iterator<Item = &'a [u8; SEGMENT]> {
        self.rest.iter().take_while(|segment| !is_end(segment))
    }
}

impl Iterator for Segments<'_> {
    type Item = Data;

    fn next(&mut self) -> Option<Data> {
        loop {
            let (first, rest) = self.rest.split_first()?;
            if is_end(first) {
                self.rest = &[];
                return None;
            }
            self.rest = rest;
            let data = Data::parse(first);
            if data.len != 0 {
                return Some(data);
            }
        }
    }
}

fn is_end(segment: &[u8; SEGMENT]) -> bool {
    be32(segment, 0) == 0 && be32(segment, 4) == INVALID_KEY
}

/// An entry of a shared receive queue: a link to the next, and a [`Receive`].
///
/// ```
/// use warpwire::mlx5::SrqEntry;
/// let mut entry = [0; 32];
/// SrqEntry::write(&mut entry, 7, &[(64, 0x5678, 0x1000)]).unwrap();
/// let read = SrqEntry::parse(&entry).unwrap();
/// assert_eq!((read.next, read.receive.len()), (7, 64));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct SrqEntry<'a> {
    /// The slot of the entry that follows. The caller masks it: it may be any number.
    pub next: u16,
    /// What it is for.
    pub receive: Receive<'a>,
}

impl<'a> SrqEntry<'a> {
    /// Reads an entry from a copy of its bytes.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WqeError> {
        let (header, rest) = bytes.split_first_chunk::<SEGMENT>().ok_or(WqeError::Truncated)?;
        Ok(Self { next: be16(header, 2), receive: Receive::parse(rest)? })
    }

    /// Fills `entry`, as [`Receive::write`] does.
    #[must_use = "nothing was written if the ranges do not fit"]
    pub fn write(entry: &mut [u8], next: u16, ranges: &[(u32, u32, u64)]) -> Option<()> {
        let (header, rest) = entry.split_first_chunk_mut::<SEGMENT>()?;
        Receive::write(rest, ranges)?;
        *header = [0; SEGMENT];
        put(header, 2, next.to_be_bytes());
        Some(())
    }
}
