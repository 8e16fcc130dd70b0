//! ConnectX (mlx5) queue formats: WQEs, CQEs, doorbells. Plain encoding and decoding of bytes.
//!
//! The software HCA and real NICs consume the same queues, so a CPU, a CUDA stream or a kernel
//! posts the same bytes to either. Queue contents are not trusted: parsing accepts any bytes and
//! returns a value or a reason. Nothing here panics, allocates or accesses memory that is not
//! passed in.
//!
//! | type | what it is |
//! |---|---|
//! | [`Builder`], [`EncodedWqe`] | writing a send WQE |
//! | [`Wqe`], [`Work`], [`WqePayload`] | parsing a send WQE; [`WqeError`] if it is invalid |
//! | [`AddressVector`] | destination of a UD message |
//! | [`ReceiveWqe`], [`SrqEntry`] | WQEs of receive queues and SRQs |
//! | [`Cqe`], [`CqeTail`] | CQEs, written and parsed |
//! | [`CqeSyndrome`] | a completion's status as a CQE encodes it |
//! | [`Doorbell`], [`DoorbellRecord`] | producer index of a queue, as written by its poster |
//! | [`producer`], [`ProducerTracker`] | producer index of a queue, as seen by its consumer |
//! | [`CqArm`] | consumer index of a completion queue, and its arming |
//!
//! # Byte order
//! Numbers are big-endian. Immediate data and inline payload are bytes and stay as they are.
//!
//! # Ignored fields
//! Device code leaves reserved fields, the signature, and the immediate of operations without one
//! uninitialised. None of them is checked.

mod address;
mod builder;
mod cqe;
mod doorbell;
mod opcode;
mod receive;
mod status;
#[cfg(test)]
mod tests;
mod wqe;

pub use address::{ADDRESS_SEGMENTS, AddressVector, gid_address};
pub use builder::{Builder, EncodedWqe, Scratch, WqeTooLong, send_queue_wqebbs};
pub use cqe::{
    Cqe, CqeError, CqeOutcome, CqeTail, EMPTY_CQE_BYTE, EncodedCqe, Origin, Queue, RecvKind,
    SendCqe, collapsed_is_done, collapsed_latest, owner_bit,
};
pub use doorbell::{CqArm, Doorbell, DoorbellRecord, ProducerTracker, producer};
pub use opcode::WqeOpcode;
pub use receive::{ReceiveWqe, Segments, SrqEntry, receive_stride};
pub use status::CqeSyndrome;
use warpwire_proto::qp::Access;
pub use warpwire_proto::qp::{Atomic, AtomicWidth, Fence, MwBind, MwType, Remote, Status};
pub use wqe::{
    ControlSegment, CqUpdate, Data, DataSegment, DataSegments, FenceMode, SendKind, Wait, Work,
    Wqe, WqeError, WqePayload,
};

/// Length of a WQE segment in bytes: the unit of the `DS` field.
pub const SEGMENT_LEN: usize = 16;
/// Length of a WQE basic block (WQEBB) in bytes: the unit of send queue indices.
pub const WQEBB_LEN: usize = 64;
/// Maximum number of segments of a WQE: `DS` has six bits.
pub const MAX_SEGMENTS: usize = 63;
/// Buffer size in bytes for the longest WQE.
pub const MAX_WQE_LEN: usize = 1024;
/// Maximum length of a send queue in WQEBBs: with more, a poller could not tell a 16-bit index from
/// that of the next lap.
pub const MAX_SEND_WQEBBS: u32 = 32_768;
/// The invalid lkey, which terminates lists of data segments.
pub const INVALID_KEY: u32 = 0x100;
/// Maximum message length of a reliable connection in bytes.
pub const MAX_MESSAGE_LEN: u64 = 1 << 31;
/// Offset of the first send doorbell (BlueFlame register) in a UAR page.
pub const BLUEFLAME_OFFSET: usize = 0x800;
/// Offset of the second buffer of a BlueFlame register. Some writers alternate between the two, so
/// both must be polled.
pub const BLUEFLAME_BUFFER_LEN: usize = 256;
/// Offset of the CQ doorbell in a UAR page, which arms completion queues.
pub const CQ_DOORBELL_OFFSET: usize = 0x20;

/// WQEBBs that a WQE of `segments` segments takes.
///
/// ```
/// use warpwire::mlx5::wqebbs;
/// assert_eq!([wqebbs(0), wqebbs(1), wqebbs(4), wqebbs(5)], [0, 1, 1, 2]);
/// ```
pub const fn wqebbs(segments: u8) -> u16 {
    (segments as u16).div_ceil(4)
}

/// The big-endian 16-bit number at `at`; 0 beyond the end.
fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

/// The big-endian 32-bit number at `at`; 0 beyond the end.
fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

/// The big-endian 64-bit number at `at`; 0 beyond the end.
fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

/// The `N` bytes at `at`; zeros beyond the end. Callers stay within fixed formats, so the zeros are
/// never seen, and nothing can panic.
#[inline]
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

/// Stores `value` at `at` if it fits, which callers ensure as for [`array`].
#[inline]
fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    if let Some(slot) = bytes.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) {
        *slot = value;
    }
}
