//! ConnectX's queue formats: work queue entries, completions, doorbells, as bytes and nothing else.
//!
//! The software HCA consumes these queues, and so do real NICs: a CPU, a CUDA stream or a kernel posts
//! the same bytes to either. Whoever filled them is not trusted. Reading takes any bytes whatever and
//! gives a meaning or a reason; nothing here panics, allocates or touches memory that is not passed in.
//!
//! | type | what it is |
//! |---|---|
//! | [`Builder`], [`EncodedWqe`] | a send queue entry, written |
//! | [`Wqe`], [`Work`], [`WqePayload`] | a send queue entry, read; [`WqeError`] says why not |
//! | [`AddressVector`] | whom a datagram is for |
//! | [`Receive`], [`SrqEntry`] | entries of receive queues |
//! | [`Cqe`], [`CqeTail`] | completions, both ways |
//! | [`Status`] | how work ended, with its syndrome |
//! | [`Doorbell`], [`DoorbellRecord`], [`producer`], [`ProducerTracker`] | how far a queue is filled |
//! | [`CqArm`] | how far a completion queue is emptied, and who wants to be woken |
//!
//! # Byte order
//! Every number of more than one byte is big-endian. Immediate values and inline payload are bytes, and
//! stay as they are.
//!
//! # What is not looked at
//! Device code leaves reserved fields, the signature, and the immediate of operations that have none
//! uninitialised. None of them is ever checked.

mod address;
mod atomic;
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
pub use atomic::{Atomic, AtomicWidth};
pub use builder::{Builder, EncodedWqe, Scratch, WqeTooLong, send_queue_wqebbs};
pub use cqe::{
    Cqe, CqeError, CqeOutcome, CqeTail, EMPTY, EncodedCqe, Origin, Queue, RecvKind, Sent,
    collapsed_is_done, collapsed_latest, owner_bit,
};
pub use doorbell::{CqArm, Doorbell, DoorbellRecord, ProducerTracker, producer};
pub use opcode::Opcode;
pub use receive::{Receive, Segments, SrqEntry, receive_stride};
pub use status::Status;
pub use wqe::{
    ControlSegment, CqUpdate, Data, DataSegment, DataSegments, FenceMode, Remote, SendKind, Wait,
    Work, Wqe, WqeError, WqePayload,
};

/// The unit that entries are counted in: the `DS` field.
pub const SEGMENT: usize = 16;
/// The unit that send queues are counted in.
pub const WQEBB_LEN: usize = 64;
/// The most segments in one entry: `DS` has six bits.
pub const MAX_SEGMENTS: usize = 63;
/// Room for the largest entry.
pub const MAX_WQE_LEN: usize = 1024;
/// The most blocks of a send queue: with more, pollers could not tell an index from one a lap later.
pub const MAX_SEND_WQEBBS: u32 = 32_768;
/// The key that names no memory and ends lists of segments.
pub const INVALID_KEY: u32 = 0x100;
/// The longest message of a reliable connection.
pub const MAX_MESSAGE_LEN: u64 = 1 << 31;
/// Where, in a page of doorbell registers, the first one for send queues lies.
pub const BLUEFLAME_OFFSET: usize = 0x800;
/// The second half of a send doorbell. Some writers use the halves in turn, so both must be watched.
pub const BLUEFLAME_BUFFER_LEN: usize = 256;
/// Where, in such a page, completion queues are armed.
pub const CQ_DOORBELL_OFFSET: usize = 0x20;

/// How many blocks an entry of so many segments takes.
///
/// ```
/// use warpwire::mlx5::wqebbs;
/// assert_eq!([wqebbs(0), wqebbs(1), wqebbs(4), wqebbs(5)], [0, 1, 1, 2]);
/// ```
pub const fn wqebbs(segments: u8) -> u16 {
    (segments as u16).div_ceil(4)
}

/// The big-endian number of 16 bits at `at`; zero where the bytes end before.
fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

/// The same with 32 bits.
fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

/// The same with 64 bits.
fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

/// The `N` bytes at `at`; zeros where the bytes end before. Callers ask inside fixed formats only, so
/// that the zeros are never seen, and nothing can panic.
#[inline]
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

/// Puts `value` at `at`, if it fits there; as with [`array`], it does.
#[inline]
fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    if let Some(slot) = bytes.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) {
        *slot = value;
    }
}
