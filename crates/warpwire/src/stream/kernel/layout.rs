//! The handle of a queue pair as kernels have it: `struct Qp` of `include/warpwire/verbs.cuh`, which asserts the same places.

/// The version that `verbs.cuh` knows.
pub const VERSION: u32 = 1;

/// The value of [`queue::FAILURE`] while nothing has failed.
pub const NO_FAILURE: u64 = u64::MAX;

/// What never changes, from the beginning of the handle on.
pub mod field {
    /// Device address of the send queue.
    pub const SEND_QUEUE: u64 = 0;
    /// Device address of the receive queue.
    pub const RECEIVE_QUEUE: u64 = 8;
    /// Device address of the doorbell record.
    pub const DBREC: u64 = 16;
    /// Device address of the doorbell.
    pub const DOORBELL: u64 = 24;
    /// Device address of the send side's completions.
    pub const SEND_CQ: u64 = 32;
    /// Device address of the receive side's completions.
    pub const RECEIVE_CQ: u64 = 40;
    /// Where results go that nobody wants.
    pub const SINK: u64 = 48;
    /// How many entries the send queue has, less one: 32 bits, as all that follow.
    pub const SEND_MASK: u64 = 56;
    /// How many entries the receive queue has, less one.
    pub const RECEIVE_MASK: u64 = 60;
    /// The queue pair's number.
    pub const NUMBER: u64 = 64;
    /// How long an entry of the receive queue is.
    pub const RECEIVE_STRIDE: u64 = 68;
    /// The key of the sink.
    pub const SINK_LKEY: u64 = 72;
    /// What the consumer wants.
    pub const FLAGS: u64 = 76;
    /// The version of this layout.
    pub const VERSION: u64 = 80;
}

/// The consumer wants the doorbell record before the doorbell. ConnectX does; the software HCA goes by the doorbell alone.
pub const DBREC_FIRST: u32 = 1;

/// One thread posts at a time.
pub const SINGLE_POSTER: u32 = 2;

/// Where the counters of the send queue begin.
pub const SEND: u64 = 128;
/// Where those of the receive queue begin.
pub const RECEIVE: u64 = 640;

/// The counters of one queue, from [`SEND`] or [`RECEIVE`] on. What different threads write lies on different lines.
pub mod queue {
    /// Entries that were given to threads.
    pub const RESERVED: u64 = 0;
    /// Twice the entries that are filled, without a gap; one more while a thread rings.
    pub const PUBLISHED: u64 = 128;
    /// Entries whose completion was seen, without a gap.
    pub const COMPLETED: u64 = 256;
    /// The first that failed: its number, shifted by 8, and the syndrome.
    pub const FAILURE: u64 = 264;
    /// Ends all waits when it is not zero: 32 bits, the negative of a status.
    pub const CLOSED: u64 = 272;
    /// Receives that were handed out in order.
    pub const TAKEN: u64 = 384;
    /// How long it is.
    pub const LEN: u64 = 512;
}

/// How long the handle is.
pub const LEN: u64 = 1152;
/// Where the library's own kernels report the first failure, behind the handle: the kernel's number and its status.
pub const REPORT: u64 = LEN;
/// How much memory handle and report take.
pub const TOTAL: u64 = LEN + 128;

const _: () = assert!(SEND + queue::LEN == RECEIVE && RECEIVE + queue::LEN == LEN);

/// What never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Constants {
    /// Device address of the send queue.
    pub send_queue: u64,
    /// Device address of the receive queue.
    pub receive_queue: u64,
    /// Device address of the doorbell record.
    pub dbrec: u64,
    /// Device address of the doorbell.
    pub doorbell: u64,
    /// Device address of the send side's completions.
    pub send_cq: u64,
    /// Device address of the receive side's completions.
    pub receive_cq: u64,
    /// Where results go that nobody wants.
    pub sink: u64,
    /// How many entries the send queue has, less one.
    pub send_mask: u32,
    /// How many entries the receive queue has, less one.
    pub receive_mask: u32,
    /// The queue pair's number.
    pub number: u32,
    /// How long an entry of the receive queue is.
    pub receive_stride: u32,
    /// The key of the sink.
    pub sink_lkey: u32,
    /// What the consumer wants.
    pub flags: u32,
}

impl Constants {
    /// The bytes of a handle whose queue pair has done nothing yet. Devices and hosts are little-endian.
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
