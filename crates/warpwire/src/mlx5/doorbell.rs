//! Doorbells and doorbell records: producer and consumer indices.

use super::{SEGMENT_LEN, array, be16, be32, wqebbs};

/// A value stored to a send doorbell: the first eight bytes of a control segment.
///
/// Writers differ. rdma-core, UCX and libgdsync store those of the last WQE posted; NVSHMEM, DOCA
/// and UCX's device code store the index of the next free WQEBB, with size 0.
/// [`producer`](Doorbell::producer) handles both.
///
/// ```
/// use warpwire::mlx5::Doorbell;
/// let of_entry = Doorbell::parse([0, 0, 6, 0x12, 0, 1, 0x23, 4]); // the WQE at 6, 4 segments
/// let of_kernel = Doorbell::parse([0, 0, 7, 0, 0, 1, 0x23, 0]); // the next free WQEBB is 7
/// assert_eq!((of_entry.producer(), of_kernel.producer()), (7, 7));
/// assert_eq!(Doorbell::next(0x123, 7), [0, 0, 7, 0, 0, 1, 0x23, 0]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doorbell {
    /// WQEBB index, modulo 2^16.
    pub index: u16,
    /// Queue pair number, 24 bits.
    pub qpn: u32,
    /// Segments of the WQE at that index; 0 if the WQEBB is free.
    pub segments: u8,
}

impl Doorbell {
    /// Parses a doorbell; any value is valid.
    #[inline]
    pub fn parse(bytes: [u8; 8]) -> Self {
        let qpn_ds = be32(&bytes, 4);
        Self { index: be16(&bytes, 1), qpn: qpn_ds >> 8, segments: (qpn_ds & 0x3f) as u8 }
    }

    /// The doorbell value for a producer index, as device code writes it.
    pub fn next(qpn: u32, producer: u16) -> [u8; 8] {
        let word = (u64::from(producer) << 40) | u64::from(qpn << 8);
        word.to_be_bytes()
    }

    /// The doorbell value for a WQE, as CPUs write it: the start of its control segment.
    pub fn of(control: &[u8; SEGMENT_LEN]) -> [u8; 8] {
        array(control, 0)
    }

    /// The producer index: the next free WQEBB, modulo 2^16.
    #[inline]
    pub const fn producer(&self) -> u16 {
        self.index.wrapping_add(wqebbs(self.segments))
    }
}

/// The doorbell record of a queue pair: two words in memory.
///
/// ```
/// use warpwire::mlx5::DoorbellRecord;
/// let dbrec = DoorbellRecord::parse([0, 0, 0, 3, 0, 0, 0, 7]);
/// assert_eq!((dbrec.receive, dbrec.send), (3, 7));
/// assert_eq!(DoorbellRecord::word(7), [0, 0, 0, 7]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoorbellRecord {
    /// Receives posted, modulo 2^16.
    pub receive: u16,
    /// Next free WQEBB of the send queue, modulo 2^16.
    pub send: u16,
}

impl DoorbellRecord {
    /// Byte offset of the receive queue's word.
    pub const RECEIVE: usize = 0;
    /// Byte offset of the send queue's word.
    pub const SEND: usize = 4;

    /// Parses a record; any value is valid.
    pub fn parse(bytes: [u8; 8]) -> Self {
        Self { receive: be16(&bytes, 2), send: be16(&bytes, 6) }
    }

    /// Encodes either word.
    pub fn word(counter: u16) -> [u8; 4] {
        u32::from(counter).to_be_bytes()
    }
}

/// The producer index of a send queue, from its doorbell and its record: the value that is furthest
/// ahead of the consumer, but by no more than the queue's length `wqebbs`.
///
/// Neither suffices alone. DOCA rings before it writes the record, and again after it, with the
/// same value; NVSHMEM's proxy never writes the send word of the record; a stream without 64-bit
/// stores writes the doorbell in two halves. A value that is out of bounds is stale, torn or wrong,
/// and is ignored.
///
/// A torn doorbell may be in bounds and still too far ahead: see
/// [`ControlSegment::is_at`](super::ControlSegment::is_at).
///
/// ```
/// use warpwire::mlx5::producer;
/// assert_eq!(producer(5, 64, Some(7), 5), 7); // the doorbell came first
/// assert_eq!(producer(5, 64, Some(5), 7), 7); // the record came first
/// assert_eq!(producer(5, 64, Some(3), 5), 5); // a stale doorbell
/// assert_eq!(producer(0xffff, 64, Some(2), 0), 2); // past the wrap
/// ```
#[inline]
pub const fn producer(consumer: u16, wqebbs: u32, doorbell: Option<u16>, dbrec: u16) -> u16 {
    let by_record = bounded_advance(consumer, wqebbs, dbrec);
    let by_doorbell = match doorbell {
        Some(value) => bounded_advance(consumer, wqebbs, value),
        None => 0,
    };
    let furthest = if by_doorbell > by_record { by_doorbell } else { by_record };
    consumer.wrapping_add(furthest)
}

/// Distance of `value` ahead of the consumer; 0 if it exceeds the queue's length.
const fn bounded_advance(consumer: u16, wqebbs: u32, value: u16) -> u16 {
    let distance = value.wrapping_sub(consumer);
    if distance as u32 <= wqebbs { distance } else { 0 }
}

/// Producer index of one send queue, with the values last seen.
///
/// [`producer`] sees current values only and cannot know that a value has been unchanged for a lap
/// of 2^16: a record that is never written would look like new work once per lap. This type ignores
/// values that have not changed.
///
/// ```
/// use warpwire::mlx5::ProducerTracker;
/// let mut known = ProducerTracker::starting_at(0);
/// assert_eq!(known.refresh(0, 64, Some(3), 0), 3);
/// // Almost a lap later, with a record that stays unchanged.
/// let mut known = ProducerTracker::starting_at(0xfffe);
/// known.refresh(0xfffe, 64, Some(0xfffe), 0xfffe);
/// assert_eq!(known.refresh(0xfffe, 64, Some(0xffff), 0xfffe), 0xffff);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProducerTracker {
    at: u16,
    doorbell: u16,
    dbrec: u16,
}

impl ProducerTracker {
    /// State for a queue whose doorbell and record both hold `wqe_index`; 0 for a new queue.
    pub const fn starting_at(wqe_index: u16) -> Self {
        Self { at: wqe_index, doorbell: wqe_index, dbrec: wqe_index }
    }

    /// Work before this index was consumed in another way.
    pub const fn skip_to(&mut self, wqe_index: u16) {
        self.at = wqe_index;
    }

    /// Updates the producer index from the doorbell and the record, and returns it. It never
    /// decreases.
    #[inline]
    pub const fn refresh(
        &mut self,
        consumer: u16,
        wqebbs: u32,
        doorbell: Option<u16>,
        dbrec: u16,
    ) -> u16 {
        let changed = match doorbell {
            Some(value) if value != self.doorbell => {
                self.doorbell = value;
                Some(value)
            }
            _ => None,
        };
        let changed_record = if dbrec == self.dbrec { consumer } else { dbrec };
        self.dbrec = dbrec;
        // The previous index is a third candidate; the consumer never passes it.
        let candidate = producer(consumer, wqebbs, changed, changed_record);
        self.at = producer(consumer, wqebbs, Some(candidate), self.at);
        self.at
    }
}

/// Arming of a completion queue: the second word of its doorbell record, and the first of its
/// doorbell.
///
/// ```
/// use warpwire::mlx5::CqArm;
/// let arm = CqArm { sequence: 2, solicited_only: true, consumer: 0x12_3456 };
/// assert_eq!(arm.word(), [0x21, 0x12, 0x34, 0x56]);
/// assert_eq!(CqArm::parse(arm.word()), arm);
/// assert_eq!(arm.doorbell(9), [0x21, 0x12, 0x34, 0x56, 0, 0, 0, 9]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqArm {
    /// Two bits that advance with each event, so that re-arming is a change.
    pub sequence: u8,
    /// Whether only solicited completions and errors generate an event.
    pub solicited_only: bool,
    /// Consumer index, modulo 2^24.
    pub consumer: u32,
}

impl CqArm {
    const SOLICITED: u32 = 1 << 24;
    const CONSUMER: u32 = 0xff_ffff;

    /// Parses the word; any value is valid.
    pub fn parse(bytes: [u8; 4]) -> Self {
        let word = u32::from_be_bytes(bytes);
        Self {
            sequence: (word >> 28) as u8 & 3,
            solicited_only: word & Self::SOLICITED != 0,
            consumer: word & Self::CONSUMER,
        }
    }

    /// Encodes the word.
    pub fn word(&self) -> [u8; 4] {
        let solicited = if self.solicited_only { Self::SOLICITED } else { 0 };
        let sequence = u32::from(self.sequence & 3) << 28;
        (sequence | solicited | (self.consumer & Self::CONSUMER)).to_be_bytes()
    }

    /// The doorbell value for completion queue `cqn`.
    pub fn doorbell(&self, cqn: u32) -> [u8; 8] {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&self.word());
        bytes[4..].copy_from_slice(&cqn.to_be_bytes());
        bytes
    }

    /// The consumer index in the first word of a doorbell record, modulo 2^24.
    pub fn consumed(bytes: [u8; 4]) -> u32 {
        u32::from_be_bytes(bytes) & Self::CONSUMER
    }

    /// Encodes that word.
    pub fn consumed_word(consumer: u32) -> [u8; 4] {
        (consumer & Self::CONSUMER).to_be_bytes()
    }
}
