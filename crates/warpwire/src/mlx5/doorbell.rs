//! Doorbells and doorbell records: how far a queue is filled, and how far it is emptied.

use super::{SEGMENT, array, be16, be32, wqebbs};

/// What was stored to a send doorbell: the first eight bytes of a control segment.
///
/// Writers differ. rdma-core, UCX and libgdsync store those of the last entry posted; NVSHMEM, DOCA and
/// UCX's device code store the next free block, with no size. [`producer`](Doorbell::producer) is right
/// for both.
///
/// ```
/// use warpwire::mlx5::Doorbell;
/// let of_entry = Doorbell::parse([0, 0, 6, 0x12, 0, 1, 0x23, 4]); // entry at wqe_index 6, 4 segments
/// let of_kernel = Doorbell::parse([0, 0, 7, 0, 0, 1, 0x23, 0]); // next free wqe_index is 7
/// assert_eq!((of_entry.producer(), of_kernel.producer()), (7, 7));
/// assert_eq!(Doorbell::next(0x123, 7), [0, 0, 7, 0, 0, 1, 0x23, 0]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doorbell {
    /// The block that it names.
    pub index: u16,
    /// The queue pair.
    pub qpn: u32,
    /// How many segments the entry at that block has; none where it is free.
    pub segments: u8,
}

impl Doorbell {
    /// Reads a doorbell; every eight bytes are one.
    #[inline]
    pub fn parse(bytes: [u8; 8]) -> Self {
        let qpn_ds = be32(&bytes, 4);
        Self { index: be16(&bytes, 1), qpn: qpn_ds >> 8, segments: (qpn_ds & 0x3f) as u8 }
    }

    /// The doorbell that says which block is the next free one, as kernels write it.
    pub fn next(qpn: u32, producer: u16) -> [u8; 8] {
        let word = (u64::from(producer) << 40) | u64::from(qpn << 8);
        word.to_be_bytes()
    }

    /// The doorbell of an entry, as CPUs write it: its own first bytes.
    pub fn of(control: &[u8; SEGMENT]) -> [u8; 8] {
        array(control, 0)
    }

    /// The next free block that it tells of.
    #[inline]
    pub const fn producer(&self) -> u16 {
        self.index.wrapping_add(wqebbs(self.segments))
    }
}

/// A doorbell record of a queue pair: two words in memory.
///
/// ```
/// use warpwire::mlx5::DoorbellRecord;
/// let dbrec = DoorbellRecord::parse([0, 0, 0, 3, 0, 0, 0, 7]);
/// assert_eq!((dbrec.receive, dbrec.send), (3, 7));
/// assert_eq!(DoorbellRecord::word(7), [0, 0, 0, 7]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoorbellRecord {
    /// How many receives were posted, modulo 2^16.
    pub receive: u16,
    /// The next free block of the send queue, modulo 2^16.
    pub send: u16,
}

impl DoorbellRecord {
    /// Where the word of the receive queue lies.
    pub const RECEIVE: usize = 0;
    /// Where the word of the send queue lies.
    pub const SEND: usize = 4;

    /// Reads a record; every eight bytes are one.
    pub fn parse(bytes: [u8; 8]) -> Self {
        Self { receive: be16(&bytes, 2), send: be16(&bytes, 6) }
    }

    /// The bytes of either word.
    pub fn word(counter: u16) -> [u8; 4] {
        u32::from(counter).to_be_bytes()
    }
}

/// The next free block of a send queue, given what its doorbell and its record say: whichever is furthest
/// ahead of the consumer without passing it by more than the queue's `wqebbs`.
///
/// Neither can be trusted alone. DOCA rings before it writes the record, and once more after it, with the
/// same value; NVSHMEM's proxy never writes the record's send word at all; a stream that cannot store
/// 64 bits writes the doorbell in two halves. A value that is out of bounds is old, torn or wrong, and
/// counts for nothing.
///
/// A torn doorbell can still be too far ahead while it is in bounds; see
/// [`ControlSegment::is_at`](super::Control::is_at).
///
/// ```
/// use warpwire::mlx5::producer;
/// assert_eq!(producer(5, 64, Some(7), 5), 7); // the doorbell came first
/// assert_eq!(producer(5, 64, Some(5), 7), 7); // the dbrec came first
/// assert_eq!(producer(5, 64, Some(3), 5), 5); // an old doorbell
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

/// How far `value` is ahead of the consumer, or nothing if that is more than the queue holds.
const fn bounded_advance(consumer: u16, wqebbs: u32, value: u16) -> u16 {
    let distance = value.wrapping_sub(consumer);
    if distance as u32 <= wqebbs { distance } else { 0 }
}

/// The producer of one send queue, as its engine remembers it.
///
/// [`producer`] looks at what doorbell and record say now, and cannot know that a value has not changed for
/// a lap of 2^16: a record that its writer never touches would look like new work once in each. An engine
/// keeps this instead: a value says something only when it changes.
///
/// ```
/// use warpwire::mlx5::ProducerTracker;
/// let mut known = ProducerTracker::starting_at(0);
/// assert_eq!(known.refresh(0, 64, Some(3), 0), 3);
/// // Much later, with a dbrec that nobody has ever written.
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
    /// The producer of a queue whose doorbell and record say `wqe_index`; zero for one that is new.
    pub const fn starting_at(wqe_index: u16) -> Self {
        Self { at: wqe_index, doorbell: wqe_index, dbrec: wqe_index }
    }

    /// Work up to this block was taken by another way.
    pub const fn skip_to(&mut self, wqe_index: u16) {
        self.at = wqe_index;
    }

    /// Looks at the doorbell and the record, and gives the next free block. It never goes back.
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
        // What was known before is one more voice; the consumer never passes it.
        let candidate = producer(consumer, wqebbs, changed, changed_record);
        self.at = producer(consumer, wqebbs, Some(candidate), self.at);
        self.at
    }
}

/// How a completion queue is armed: the second word of its record, and the first of its doorbell.
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
    /// Two bits that advance with each event, so that arming twice is seen.
    pub sequence: u8,
    /// Whether only solicited completions and errors should wake the owner.
    pub solicited_only: bool,
    /// How many completions were consumed, modulo 2^24.
    pub consumer: u32,
}

impl CqArm {
    const SOLICITED: u32 = 1 << 24;
    const CONSUMER: u32 = 0xff_ffff;

    /// Reads the word; every four bytes are one.
    pub fn parse(bytes: [u8; 4]) -> Self {
        let word = u32::from_be_bytes(bytes);
        Self {
            sequence: (word >> 28) as u8 & 3,
            solicited_only: word & Self::SOLICITED != 0,
            consumer: word & Self::CONSUMER,
        }
    }

    /// The word's bytes.
    pub fn word(&self) -> [u8; 4] {
        let solicited = if self.solicited_only { Self::SOLICITED } else { 0 };
        let sequence = u32::from(self.sequence & 3) << 28;
        (sequence | solicited | (self.consumer & Self::CONSUMER)).to_be_bytes()
    }

    /// The eight bytes for the doorbell of completion queue `cqn`.
    pub fn doorbell(&self, cqn: u32) -> [u8; 8] {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&self.word());
        bytes[4..].copy_from_slice(&cqn.to_be_bytes());
        bytes
    }

    /// How many completions a queue's record says were consumed, modulo 2^24: its first word.
    pub fn consumed(bytes: [u8; 4]) -> u32 {
        u32::from_be_bytes(bytes) & Self::CONSUMER
    }

    /// The bytes of that word.
    pub fn consumed_word(consumer: u32) -> [u8; 4] {
        (consumer & Self::CONSUMER).to_be_bytes()
    }
}
