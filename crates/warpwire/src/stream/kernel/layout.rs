//! The handle of a kernel queue pair: `struct Qp` of `include/warpwire/verbs.cuh`, which asserts
//! the same offsets.

/// The layout version, as in `verbs.cuh`.
pub const VERSION: u32 = 2;

/// Value of [`queue::FAILURE`] while no work has failed.
pub const NO_FAILURE: u64 = u64::MAX;

/// Byte offsets of the constant fields.
pub mod field {
    /// Device address of the send queue.
    pub const SEND_QUEUE: u64 = 0;
    /// Device address of the receive queue.
    pub const RECEIVE_QUEUE: u64 = 8;
    /// Device address of the doorbell record.
    pub const DBREC: u64 = 16;
    /// Device address of the doorbell register.
    pub const DOORBELL: u64 = 24;
    /// Device address of the send CQ.
    pub const SEND_CQ: u64 = 32;
    /// Device address of the receive CQ.
    pub const RECEIVE_CQ: u64 = 40;
    /// Address of the memory for discarded atomic results.
    pub const SINK: u64 = 48;
    /// Number of WQEBBs of the send queue minus one: 32 bits, as are all that follow.
    pub const SEND_MASK: u64 = 56;
    /// Number of entries of the receive queue minus one.
    pub const RECEIVE_MASK: u64 = 60;
    /// The queue pair number.
    pub const NUMBER: u64 = 64;
    /// Size of a receive queue entry in bytes.
    pub const RECEIVE_STRIDE: u64 = 68;
    /// The lkey of the sink.
    pub const SINK_LKEY: u64 = 72;
    /// [`DBREC_FIRST`](super::DBREC_FIRST), [`SINGLE_POSTER`](super::SINGLE_POSTER) and
    /// [`DIRECT_ATOMICS`](super::DIRECT_ATOMICS).
    pub const FLAGS: u64 = 76;
    /// The version of this layout.
    pub const VERSION: u64 = 80;
    /// Device address of the table of memory that kernels access by themselves; 0 if there is none:
    /// 64 bits.
    pub const DIRECT: u64 = 88;
}

/// Flag: write the doorbell record before the doorbell register. ConnectX needs both; the software
/// HCA polls the doorbell register alone.
pub const DBREC_FIRST: u32 = 1;

/// Flag: only one thread posts at a time.
pub const SINGLE_POSTER: u32 = 2;

/// Flag: kernels apply atomic operations by themselves too.
pub const DIRECT_ATOMICS: u32 = 4;

/// Offset of the send queue's counters.
pub const SEND: u64 = 128;
/// Offset of the receive queue's counters.
pub const RECEIVE: u64 = 640;

/// Byte offsets of one queue's counters, from [`SEND`] or [`RECEIVE`]. Counters written by
/// different threads are on different cache lines.
pub mod queue {
    /// Number of entries reserved by threads.
    pub const RESERVED: u64 = 0;
    /// Twice the number of entries filled without a gap; plus one while a thread rings the
    /// doorbell.
    pub const PUBLISHED: u64 = 128;
    /// Number of entries whose completion has been observed, without a gap.
    pub const COMPLETED: u64 = 256;
    /// The first failure: index of the entry << 8 | syndrome.
    pub const FAILURE: u64 = 264;
    /// Ends all waits if not zero: 32 bits, a negated status code.
    pub const CLOSED: u64 = 272;
    /// Number of receives consumed in order by `next_receive`.
    pub const TAKEN: u64 = 384;
    /// Size in bytes.
    pub const LEN: u64 = 512;
}

/// Size of the handle in bytes.
pub const LEN: u64 = 1152;
/// Offset, behind the handle, at which the library's kernels report their first failure: kernel id
/// and status.
pub const REPORT: u64 = LEN;
/// Size of handle and report in bytes.
pub const TOTAL: u64 = LEN + 128;
/// Offset, behind the handle, of the table of memory that kernels access by themselves.
pub const TABLE: u64 = TOTAL;

const _: () = assert!(SEND + queue::LEN == RECEIVE && RECEIVE + queue::LEN == LEN);

/// The constant fields of a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Constants {
    /// Device address of the send queue.
    pub send_queue: u64,
    /// Device address of the receive queue.
    pub receive_queue: u64,
    /// Device address of the doorbell record.
    pub dbrec: u64,
    /// Device address of the doorbell register.
    pub doorbell: u64,
    /// Device address of the send CQ.
    pub send_cq: u64,
    /// Device address of the receive CQ.
    pub receive_cq: u64,
    /// Address of the memory for discarded atomic results.
    pub sink: u64,
    /// Number of WQEBBs of the send queue minus one.
    pub send_mask: u32,
    /// Number of entries of the receive queue minus one.
    pub receive_mask: u32,
    /// The queue pair number.
    pub number: u32,
    /// Size of a receive queue entry in bytes.
    pub receive_stride: u32,
    /// The lkey of the sink.
    pub sink_lkey: u32,
    /// [`DBREC_FIRST`], [`SINGLE_POSTER`] and [`DIRECT_ATOMICS`].
    pub flags: u32,
    /// Device address of the table of memory that kernels access by themselves; 0 if there is none.
    pub direct: u64,
}

impl Constants {
    /// The initial bytes of the handle, with all counters zero. Devices and hosts are
    /// little-endian.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; TOTAL as usize];
        let mut put = |at: u64, value: &[u8]| {
            bytes[at as usize..at as usize + value.len()].copy_from_slice(value);
        };
        for (at, address) in [
            (field::SEND_QUEUE, self.send_queue),
            (field::RECEIVE_QUEUE, self.receive_queue),
            (field::DBREC, self.dbrec),
            (field::DOORBELL, self.doorbell),
            (field::SEND_CQ, self.send_cq),
            (field::RECEIVE_CQ, self.receive_cq),
            (field::SINK, self.sink),
            (field::DIRECT, self.direct),
            (SEND + queue::FAILURE, NO_FAILURE),
            (RECEIVE + queue::FAILURE, NO_FAILURE),
        ] {
            put(at, &address.to_le_bytes());
        }
        for (at, word) in [
            (field::SEND_MASK, self.send_mask),
            (field::RECEIVE_MASK, self.receive_mask),
            (field::NUMBER, self.number),
            (field::RECEIVE_STRIDE, self.receive_stride),
            (field::SINK_LKEY, self.sink_lkey),
            (field::FLAGS, self.flags),
            (field::VERSION, VERSION),
        ] {
            put(at, &word.to_le_bytes());
        }
        bytes
    }
}
