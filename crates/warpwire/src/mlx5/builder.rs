//! Writing send WQEs.

use std::fmt;

use super::address::AddressVector;
use super::opcode::WqeOpcode;
use super::wqe::{FenceMode, INLINE, MASKED_EIGHT, MASKED_FOUR, bind_field, field};
use super::{Access, Atomic, AtomicWidth, MwBind, MwType};
use super::{MAX_SEGMENTS, MAX_SEND_WQEBBS, MAX_WQE_LEN, SEGMENT_LEN, WQEBB_LEN, put, wqebbs};

/// Scratch buffer of a [`Builder`]. A poster keeps one; it is not cleared between WQEs.
#[derive(Clone)]
pub struct Scratch(pub(super) [u8; MAX_WQE_LEN]);

impl Default for Scratch {
    fn default() -> Self {
        Self([0; MAX_WQE_LEN])
    }
}

/// The WQE would have more than [`MAX_SEGMENTS`] segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WqeTooLong;

impl fmt::Display for WqeTooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the WQE would have more than {MAX_SEGMENTS} segments of {SEGMENT_LEN} bytes")
    }
}

impl std::error::Error for WqeTooLong {}

/// Writes one send WQE, segment by segment, in the order that the operation requires: control,
/// address vector or remote address, operands, data.
///
/// ```
/// use warpwire::mlx5::{Builder, WqeOpcode, Scratch};
/// let mut scratch = Scratch::default();
/// let wqe = Builder::new(&mut scratch, WqeOpcode::RdmaWrite, 5, 0x123)
///     .signaled()
///     .remote(0x7f00_0000_1000, 0x1234)
///     .data(256, 0x5678, 0x7fee_0000_2000)
///     .finish()?;
/// assert_eq!((wqe.segments().len(), wqe.wqebbs()), (3, 1));
/// assert_eq!(wqe.doorbell(), [0, 0, 5, 8, 0, 1, 0x23, 3]);
/// # Ok::<(), warpwire::mlx5::WqeTooLong>(())
/// ```
#[must_use = "a WQE is complete when it is finished"]
pub struct Builder<'s> {
    scratch: &'s mut Scratch,
    segments: usize,
    full: bool,
}

impl<'s> Builder<'s> {
    /// A WQE that starts at WQEBB `index` of queue pair `qpn`.
    pub fn new(scratch: &'s mut Scratch, opcode: WqeOpcode, index: u16, qpn: u32) -> Self {
        let mut control = [0; SEGMENT_LEN];
        put(&mut control, field::INDEX, index.to_be_bytes());
        control[field::OPCODE] = opcode.code();
        put(&mut control, field::QPN_DS, (qpn << 8).to_be_bytes());
        put(&mut scratch.0, 0, control);
        Self { scratch, segments: 1, full: false }
    }

    /// Requests a completion on success too.
    pub fn signaled(self) -> Self {
        self.flag(2 << 2)
    }

    /// Sets the solicited event bit: the peer's receive completion generates an event.
    pub fn solicited(self) -> Self {
        self.flag(1 << 1)
    }

    /// Sets the fence mode.
    pub fn fence(self, fence: FenceMode) -> Self {
        self.flag(fence.bits() << 5)
    }

    fn flag(self, bits: u8) -> Self {
        self.scratch.0[field::FLAGS] |= bits;
        self
    }

    /// Sets the immediate data.
    pub fn imm(self, imm: [u8; 4]) -> Self {
        put(&mut self.scratch.0, field::IMM, imm);
        self
    }

    /// Sets the rkey that a send invalidates at the peer.
    pub fn invalidate(self, rkey: u32) -> Self {
        self.imm(rkey.to_be_bytes())
    }

    /// Appends the remote address segment.
    pub fn remote(self, address: u64, rkey: u32) -> Self {
        let mut segment = [0; SEGMENT_LEN];
        put(&mut segment, 0, address.to_be_bytes());
        put(&mut segment, 8, rkey.to_be_bytes());
        self.push(segment)
    }

    /// Appends the address vector of a UD message.
    pub fn address(self, to: &AddressVector) -> Self {
        let bytes = to.encode();
        let (segments, _) = bytes.as_chunks::<SEGMENT_LEN>();
        segments.iter().fold(self, |builder, segment| builder.push(*segment))
    }

    /// Appends the operands of an atomic, and sets the opmod of masked ones.
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

    /// Appends operands, packed into whole segments.
    fn operands(self, width: AtomicWidth, values: &[u64]) -> Self {
        let size = width.bytes() as usize;
        values.chunks(SEGMENT_LEN / size).fold(self, |builder, values| {
            let mut segment = [0; SEGMENT_LEN];
            for (slot, value) in segment.chunks_exact_mut(size).zip(values) {
                let value = value.to_be_bytes();
                slot.copy_from_slice(&value[value.len() - size..]);
            }
            builder.push(segment)
        })
    }

    /// Appends a data segment. Empty ones are omitted, because hardware may take length 0 for 2
    /// GiB. A length of 2 GiB or more makes [`finish`](Self::finish) fail.
    pub fn data(self, len: u32, lkey: u32, address: u64) -> Self {
        if len == 0 {
            return self;
        }
        if len & INLINE != 0 {
            return self.overflow();
        }
        let mut segment = [0; SEGMENT_LEN];
        put(&mut segment, 0, len.to_be_bytes());
        put(&mut segment, 4, lkey.to_be_bytes());
        put(&mut segment, 8, address.to_be_bytes());
        self.push(segment)
    }

    /// Appends inline data.
    pub fn inline(self, bytes: &[u8]) -> Self {
        self.inline_with(bytes.len(), |slot| slot.copy_from_slice(bytes))
    }

    /// Appends `len` bytes of inline data, written by `fill`, so that they may come from several
    /// buffers.
    pub fn inline_with(mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> Self {
        let start = self.segments * SEGMENT_LEN;
        let Some(count) = len.checked_add(4).map(|bytes| bytes.div_ceil(SEGMENT_LEN)) else {
            return self.overflow();
        };
        if count > MAX_SEGMENTS - self.segments {
            return self.overflow();
        }
        let slot = &mut self.scratch.0[start..start + count * SEGMENT_LEN];
        slot[..4].copy_from_slice(&(INLINE | len as u32).to_be_bytes());
        fill(&mut slot[4..4 + len]);
        slot[4 + len..].fill(0);
        self.segments += count;
        self
    }

    /// Appends the segment of a WAIT: completion queue and completion index.
    pub fn wait(self, cqn: u32, index: u32) -> Self {
        let mut segment = [0; SEGMENT_LEN];
        put(&mut segment, 8, index.to_be_bytes());
        put(&mut segment, 12, cqn.to_be_bytes());
        self.push(segment)
    }

    /// Appends the two segments of a BIND_MW, in ConnectX-3's format.
    pub fn bind(self, bind: &MwBind) -> Self {
        let access = bind_field::RIGHTS
            .iter()
            .filter(|(right, _)| bind.access.contains(*right))
            .fold(0, |set, (_, bit)| set | bit);
        let type_2 = if bind.kind == MwType::Type2 { bind_field::TYPE_2 } else { 0 };
        let zero_based = bind.access.contains(Access::ZERO_BASED);
        let options = type_2 | if zero_based { bind_field::ZERO_BASED } else { 0 };
        let mut segments = [[0; SEGMENT_LEN]; 2];
        put(&mut segments[0], 0, access.to_be_bytes());
        put(&mut segments[0], 4, options.to_be_bytes());
        put(&mut segments[0], 8, bind.rkey.to_be_bytes());
        put(&mut segments[0], 12, bind.lkey.to_be_bytes());
        put(&mut segments[1], 0, bind.address.to_be_bytes());
        put(&mut segments[1], 8, bind.len.to_be_bytes());
        segments.into_iter().fold(self, Self::push)
    }

    /// Appends the two segments of a LOCAL_INVAL, in ConnectX-3's format.
    pub fn local_invalidate(self, rkey: u32) -> Self {
        let mut segment = [0; SEGMENT_LEN];
        put(&mut segment, 8, rkey.to_be_bytes());
        self.push(segment).push([0; SEGMENT_LEN])
    }

    fn push(mut self, segment: [u8; SEGMENT_LEN]) -> Self {
        if self.segments == MAX_SEGMENTS {
            return self.overflow();
        }
        put(&mut self.scratch.0, self.segments * SEGMENT_LEN, segment);
        self.segments += 1;
        self
    }

    #[cold]
    fn overflow(mut self) -> Self {
        self.full = true;
        self
    }

    /// Completes the WQE; fails if it became too long.
    pub fn finish(self) -> Result<EncodedWqe<'s>, WqeTooLong> {
        if self.full {
            return Err(WqeTooLong);
        }
        let segments = self.segments as u8;
        self.scratch.0[field::QPN_DS + 3] = segments;
        Ok(EncodedWqe { bytes: &self.scratch.0[..self.segments * SEGMENT_LEN] })
    }
}

/// A finished WQE. The caller copies its segments into the ring, which may wrap between any two of
/// them.
#[derive(Clone, Copy, Debug)]
pub struct EncodedWqe<'s> {
    bytes: &'s [u8],
}

impl<'s> EncodedWqe<'s> {
    /// All bytes, a multiple of 16.
    pub const fn bytes(&self) -> &'s [u8] {
        self.bytes
    }

    /// Its segments, each of which is contiguous in the ring.
    pub fn segments(&self) -> &'s [[u8; SEGMENT_LEN]] {
        self.bytes.as_chunks().0
    }

    /// WQEBBs that it takes.
    pub fn wqebbs(&self) -> u16 {
        wqebbs((self.bytes.len() / SEGMENT_LEN) as u8)
    }

    /// Its first eight bytes, which are also the doorbell value for this WQE.
    pub fn doorbell(&self) -> [u8; 8] {
        super::array(self.bytes, 0)
    }
}

/// Length in WQEBBs, a power of two, of a send queue for `requests` WQEs, each with up to `max_sge`
/// data segments or `inline` bytes; `None` if that exceeds [`MAX_SEND_WQEBBS`] or a WQE would be
/// too long.
///
/// Each WQE leaves room for a masked compare-and-swap, the longest operation with one data segment.
/// rdma-core reserves more, for operations that this HCA does not have. A UD address vector takes
/// two segments more than a remote address: add 32 to `inline`.
///
/// ```
/// use warpwire::mlx5::send_queue_wqebbs;
/// assert_eq!(send_queue_wqebbs(100, 1, 28), Some(256));
/// assert_eq!(send_queue_wqebbs(1, 1, 1 << 20), None);
/// ```
pub fn send_queue_wqebbs(requests: u32, max_sge: u32, inline: u32) -> Option<u32> {
    // Control, remote address and two segments of operands.
    const OVERHEAD: u64 = 4;
    let inline = (u64::from(inline) + 4).div_ceil(SEGMENT_LEN as u64) + 2;
    let segments = inline.max(u64::from(max_sge.max(1)) + OVERHEAD);
    if segments > MAX_SEGMENTS as u64 {
        return None;
    }
    let per_entry = segments.div_ceil((WQEBB_LEN / SEGMENT_LEN) as u64);
    let wqebbs = per_entry.checked_mul(u64::from(requests.max(1)))?.checked_next_power_of_two()?;
    u32::try_from(wqebbs).ok().filter(|wqebbs| *wqebbs <= MAX_SEND_WQEBBS)
}
