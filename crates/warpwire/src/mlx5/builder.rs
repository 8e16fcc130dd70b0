//! Send queue entries, written.

use std::fmt;

use super::address::AddressVector;
use super::atomic::{Atomic, AtomicWidth};
use super::opcode::Opcode;
use super::wqe::{FenceMode, INLINE, MASKED_EIGHT, MASKED_FOUR, field};
use super::{MAX_SEGMENTS, MAX_SEND_WQEBBS, MAX_WQE_LEN, SEGMENT, WQEBB_LEN, put, wqebbs};

/// Bytes in which a [`Builder`] works. A poster keeps one: nothing in it is cleared between entries.
#[derive(Clone)]
pub struct Scratch(pub(super) [u8; MAX_WQE_LEN]);

impl Default for Scratch {
    fn default() -> Self {
        Self([0; MAX_WQE_LEN])
    }
}

/// The entry would have more segments than one may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WqeTooLong;

impl fmt::Display for WqeTooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the entry would have more than {MAX_SEGMENTS} segments of {SEGMENT} bytes")
    }
}

impl std::error::Error for WqeTooLong {}

/// Writes one send queue entry, segment by segment, in the order in which the operation wants them.
///
/// ```
/// use warpwire::mlx5::{Builder, Opcode, Scratch};
/// let mut scratch = Scratch::default();
/// let image = Builder::new(&mut scratch, Opcode::RdmaWrite, 5, 0x123)
///     .signaled()
///     .remote(0x7f00_0000_1000, 0x1234)
///     .data(256, 0x5678, 0x7fee_0000_2000)
///     .finish()?;
/// assert_eq!((image.segments().len(), image.wqebbs()), (3, 1));
/// assert_eq!(image.doorbell(), [0, 0, 5, 8, 0, 1, 0x23, 3]);
/// # Ok::<(), warpwire::mlx5::WqeTooLong>(())
/// ```
#[must_use = "an entry is complete when it is finished"]
pub struct Builder<'s> {
    scratch: &'s mut Scratch,
    segments: usize,
    full: bool,
}

impl<'s> Builder<'s> {
    /// An entry that begins at block `index` of the queue pair `qpn`.
    pub fn new(scratch: &'s mut Scratch, opcode: Opcode, index: u16, qpn: u32) -> Self {
        let mut control = [0; SEGMENT];
        put(&mut control, field::INDEX, index.to_be_bytes());
        control[field::OPCODE] = opcode.code();
        put(&mut control, field::QPN_DS, (qpn << 8).to_be_bytes());
        put(&mut scratch.0, 0, control);
        Self { scratch, segments: 1, full: false }
    }

    /// Success makes a completion too.
    pub fn signaled(self) -> Self {
        self.flag(2 << 2)
    }

    /// The peer's completion wakes its owner.
    pub fn solicited(self) -> Self {
        self.flag(1 << 1)
    }

    /// It waits before it begins.
    pub fn fence(self, fence: FenceMode) -> Self {
        self.flag(fence.bits() << 5)
    }

    fn flag(self, bits: u8) -> Self {
        self.scratch.0[field::FLAGS] |= bits;
        self
    }

    /// Four bytes for the peer.
    pub fn imm(self, imm: [u8; 4]) -> Self {
        put(&mut self.scratch.0, field::IMM, imm);
        self
    }

    /// The key of the peer that a send invalidates.
    pub fn invalidate(self, rkey: u32) -> Self {
        self.imm(rkey.to_be_bytes())
    }

    /// Memory of the peer.
    pub fn remote(self, address: u64, rkey: u32) -> Self {
        let mut segment = [0; SEGMENT];
        put(&mut segment, 0, address.to_be_bytes());
        put(&mut segment, 8, rkey.to_be_bytes());
        self.push(segment)
    }

    /// Whom a datagram is for.
    pub fn address(self, to: &AddressVector) -> Self {
        let bytes = to.encode();
        let (segments, _) = bytes.as_chunks::<SEGMENT>();
        segments.iter().fold(self, |builder, segment| builder.push(*segment))
    }

    /// The operands of an atomic operation, and the modifier that masked ones need.
    pub fn atomic(self, op: &Atomic) -> Self {
        match *op {
            Atomic::CompareSwap { compare, swap } => {
                self.operands(AtomicWidth::Eight, &[swap, compare])
            }
            Atomic::FetchAdd { add } => self.operands(AtomicWidth::Eight, &[add, 0]),
            Atomic::MaskedCompareSwap { width, compare, swap, compare_mask, swap_mask } => {
                self.masked(width).operands(width, &[swap, compare, swap_mask, compare_mask])
            }
            Atomic::MaskedFetchAdd { width, add, boundary } => {
                self.masked(width).operands(width, &[add, boundary])
            }
        }
    }

    fn masked(self, width: AtomicWidth) -> Self {
        self.scratch.0[field::OPMOD] = match width {
            AtomicWidth::Four => MASKED_FOUR,
            AtomicWidth::Eight => MASKED_EIGHT,
        };
        self
    }

    /// Operands one after the other, in whole segments.
    fn operands(self, width: AtomicWidth, values: &[u64]) -> Self {
        let size = width.bytes() as usize;
        values.chunks(SEGMENT / size).fold(self, |builder, values| {
            let mut segment = [0; SEGMENT];
            for (slot, value) in segment.chunks_exact_mut(size).zip(values) {
                let value = value.to_be_bytes();
                slot.copy_from_slice(&value[value.len() - size..]);
            }
            builder.push(segment)
        })
    }

    /// A range of local memory. Ranges of no bytes are left out: hardware would not take them for empty.
    pub fn data(self, len: u32, lkey: u32, address: u64) -> Self {
        if len == 0 {
            return self;
        }
        if len & INLINE != 0 {
            return self.overflow();
        }
        let mut segment = [0; SEGMENT];
        put(&mut segment, 0, len.to_be_bytes());
        put(&mut segment, 4, lkey.to_be_bytes());
        put(&mut segment, 8, address.to_be_bytes());
        self.push(segment)
    }

    /// Bytes in the entry itself.
    pub fn inline(self, bytes: &[u8]) -> Self {
        self.inline_with(bytes.len(), |slot| slot.copy_from_slice(bytes))
    }

    /// `len` bytes in the entry itself, which `fill` writes in place: they may come from several buffers.
    pub fn inline_with(mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> Self {
        let start = self.segments * SEGMENT;
        let Some(count) = len.checked_add(4).map(|bytes| bytes.div_ceil(SEGMENT)) else {
            return self.overflow();
        };
        if count > MAX_SEGMENTS - self.segments {
            return self.overflow();
        }
        let slot = &mut self.scratch.0[start..start + count * SEGMENT];
        slot[..4].copy_from_slice(&(INLINE | len as u32).to_be_bytes());
        fill(&mut slot[4..4 + len]);
        slot[4 + len..].fill(0);
        self.segments += count;
        self
    }

    /// What the queue waits for.
    pub fn wait(self, cqn: u32, index: u32) -> Self {
        let mut segment = [0; SEGMENT];
        put(&mut segment, 8, index.to_be_bytes());
        put(&mut segment, 12, cqn.to_be_bytes());
        self.push(segment)
    }

    fn push(mut self, segment: [u8; SEGMENT]) -> Self {
        if self.segments == MAX_SEGMENTS {
            return self.overflow();
        }
        put(&mut self.scratch.0, self.segments * SEGMENT, segment);
        self.segments += 1;
        self
    }

    #[cold]
    fn overflow(mut self) -> Self {
        self.full = true;
        self
    }

    /// The entry, if it did not become too long.
    pub fn finish(self) -> Result<EncodedWqe<'s>, WqeTooLong> {
        if self.full {
            return Err(WqeTooLong);
        }
        let segments = self.segments as u8;
        self.scratch.0[field::QPN_DS + 3] = segments;
        Ok(EncodedWqe { bytes: &self.scratch.0[..self.segments * SEGMENT] })
    }
}

/// A finished entry. The caller puts its segments into the ring, which may end between any two of them.
#[derive(Clone, Copy, Debug)]
pub struct EncodedWqe<'s> {
    bytes: &'s [u8],
}

impl<'s> EncodedWqe<'s> {
    /// All of it.
    pub const fn bytes(&self) -> &'s [u8] {
        self.bytes
    }

    /// Its segments, each of which lies in the ring in one piece.
    pub fn segments(&self) -> &'s [[u8; SEGMENT]] {
        self.bytes.as_chunks().0
    }

    /// How many blocks of the ring it takes.
    pub fn wqebbs(&self) -> u16 {
        wqebbs((self.bytes.len() / SEGMENT) as u8)
    }

    /// Its first eight bytes, which are also how its writer rings the doorbell.
    pub fn doorbell(&self) -> [u8; 8] {
        super::array(self.bytes, 0)
    }
}

/// How many blocks a send queue needs for `requests` entries of so many ranges, or so many inline bytes,
/// each; `None` if that is more than a queue may have.
///
/// Room is left for a masked compare and swap, the longest entry around one range; rdma-core leaves more,
/// for operations that this HCA does not have. A datagram's address takes two segments more than a write's: add 32
/// to its inline bytes.
///
/// ```
/// use warpwire::mlx5::send_queue_wqebbs;
/// assert_eq!(send_queue_wqebbs(100, 1, 28), Some(256));
/// assert_eq!(send_queue_wqebbs(1, 1, 1 << 20), None);
/// ```
pub fn send_queue_wqebbs(requests: u32, ranges: u32, inline: u32) -> Option<u32> {
    // Control, remote and two segments of operands.
    const OVERHEAD: u64 = 4;
    let inline = (u64::from(inline) + 4).div_ceil(SEGMENT as u64) + 2;
    let segments = inline.max(u64::from(ranges.max(1)) + OVERHEAD);
    if segments > MAX_SEGMENTS as u64 {
        return None;
    }
    let per_entry = segments.div_ceil((WQEBB_LEN / SEGMENT) as u64);
    let wqebbs = per_entry.checked_mul(u64::from(requests.max(1)))?.checked_next_power_of_two()?;
    u32::try_from(wqebbs).ok().filter(|wqebbs| *wqebbs <= MAX_SEND_WQEBBS)
}
