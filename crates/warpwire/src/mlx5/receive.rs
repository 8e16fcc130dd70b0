//! WQEs of receive queues and SRQs.

use super::wqe::{Data, INLINE, WqeError};
use super::{INVALID_KEY, SEGMENT_LEN, be16, be32, put};

/// Size in bytes, a power of two, of a receive WQE with up to `max_sge` data segments; `None` if
/// that overflows.
///
/// ```
/// use warpwire::mlx5::receive_stride;
/// assert_eq!([0, 1, 3].map(receive_stride), [Some(16), Some(16), Some(64)]);
/// assert_eq!(receive_stride(u32::MAX), None);
/// ```
pub fn receive_stride(max_sge: u32) -> Option<u32> {
    max_sge.max(1).checked_mul(SEGMENT_LEN as u32)?.checked_next_power_of_two()
}

/// A receive WQE: data segments that a message is scattered to.
///
/// A segment of length 0 with the invalid lkey terminates the list; the bytes behind it are stale.
///
/// ```
/// use warpwire::mlx5::ReceiveWqe;
/// let mut entry = [0xff; 64];
/// ReceiveWqe::write(&mut entry, &[(64, 0x5678, 0x1000), (32, 0x5678, 0x2000)]).unwrap();
/// let receive = ReceiveWqe::parse(&entry).unwrap();
/// assert_eq!(receive.len(), 96);
/// assert_eq!(receive.segments().map(|data| data.address).collect::<Vec<_>>(), [0x1000, 0x2000]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ReceiveWqe<'a> {
    segments: &'a [[u8; SEGMENT_LEN]],
    len: u64,
}

impl<'a> ReceiveWqe<'a> {
    /// Parses a copy of the WQE: the ring itself may change at any time.
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

    /// Writes data segments (length, lkey, address) and, if there is room, the terminator. Empty
    /// ones are omitted. `None`, and nothing written, if they do not fit or one is 2 GiB or longer.
    #[must_use = "nothing was written if the segments do not fit"]
    pub fn write(entry: &mut [u8], ranges: &[(u32, u32, u64)]) -> Option<()> {
        let (slots, _) = entry.as_chunks_mut::<SEGMENT_LEN>();
        let nonempty = || ranges.iter().filter(|(len, ..)| *len != 0);
        if nonempty().count() > slots.len() || nonempty().any(|(len, ..)| len & INLINE != 0) {
            return None;
        }
        let end = (0, INVALID_KEY, 0);
        for (slot, (len, lkey, address)) in slots.iter_mut().zip(nonempty().chain([&end])) {
            put(slot, 0, len.to_be_bytes());
            put(slot, 4, lkey.to_be_bytes());
            put(slot, 8, address.to_be_bytes());
        }
        Some(())
    }

    /// Total length of the buffers in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether the total length is 0.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its data segments in order, without empty ones.
    pub const fn segments(&self) -> Segments<'a> {
        Segments { rest: self.segments }
    }
}

/// Iterator over the data segments of a [`ReceiveWqe`].
#[derive(Clone, Debug)]
pub struct Segments<'a> {
    rest: &'a [[u8; SEGMENT_LEN]],
}

impl<'a> Segments<'a> {
    /// The segments before the terminator.
    fn raw(self) -> impl Iterator<Item = &'a [u8; SEGMENT_LEN]> {
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

fn is_end(segment: &[u8; SEGMENT_LEN]) -> bool {
    be32(segment, 0) == 0 && be32(segment, 4) == INVALID_KEY
}

/// A WQE of a shared receive queue: a link to the next one, and a [`ReceiveWqe`].
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
    /// Slot of the next WQE. Any value is possible: the caller masks it.
    pub next: u16,
    /// The data segments.
    pub receive: ReceiveWqe<'a>,
}

impl<'a> SrqEntry<'a> {
    /// Parses a copy of the WQE: the ring itself may change at any time.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WqeError> {
        let (header, rest) = bytes.split_first_chunk::<SEGMENT_LEN>().ok_or(WqeError::Truncated)?;
        Ok(Self { next: be16(header, 2), receive: ReceiveWqe::parse(rest)? })
    }

    /// Writes the link and the data segments, as [`ReceiveWqe::write`] does.
    #[must_use = "nothing was written if the segments do not fit"]
    pub fn write(entry: &mut [u8], next: u16, ranges: &[(u32, u32, u64)]) -> Option<()> {
        let (header, rest) = entry.split_first_chunk_mut::<SEGMENT_LEN>()?;
        ReceiveWqe::write(rest, ranges)?;
        *header = [0; SEGMENT_LEN];
        put(header, 2, next.to_be_bytes());
        Some(())
    }
}
