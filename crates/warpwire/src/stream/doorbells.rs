//! What a stream writes to ring a doorbell and what it waits for: addresses and values, the same
//! for the software HCA's queues and a ConnectX's.

use crate::error::Result;
use crate::hca::CQE_LEN;
use crate::mem::{Allocation, Condition, MemOp, Word};
use crate::mlx5::{Doorbell, DoorbellRecord, EMPTY_CQE_BYTE, Queue, owner_bit};

/// The two words that announce work to a device, as integers in native byte order whose store gives
/// the device's bytes.
///
/// ```
/// use warpwire::stream::DoorbellValues;
/// let values = DoorbellValues::next(0x123, 7);
/// assert_eq!(values.dbrec.to_ne_bytes(), [0, 0, 0, 7]);
/// assert_eq!(values.doorbell.to_ne_bytes(), [0, 0, 7, 0, 0, 1, 0x23, 0]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoorbellValues {
    /// The send word of the doorbell record.
    pub dbrec: u32,
    /// The doorbell register.
    pub doorbell: u64,
}

impl DoorbellValues {
    /// Announces that `producer` is the next free WQEBB of queue pair `qpn`.
    pub fn next(qpn: u32, producer: u16) -> Self {
        Self {
            dbrec: u32::from_ne_bytes(DoorbellRecord::word(producer)),
            doorbell: u64::from_ne_bytes(Doorbell::next(qpn, producer)),
        }
    }
}

/// The word of a CQE that a stream waits for, and the condition.
///
/// The word is the last four bytes: the counter, and the byte with the owner bit, which alternates
/// from lap to lap and so shows whether the entry has been written. Error CQEs have it too, so that
/// they end the wait as well.
///
/// ```
/// use warpwire::mem::Condition;
/// use warpwire::stream::CqeWait;
/// let first = CqeWait::for_cqe(3, 8, true);
/// assert_eq!(
///     (first.offset, first.condition, first.value),
///     (3 * 64 + 60, Condition::Nor, 0xfeff_ffff)
/// );
/// let a_lap_later = CqeWait::for_cqe(11, 8, true);
/// assert_eq!((a_lap_later.offset, a_lap_later.condition), (first.offset, Condition::And));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqeWait {
    /// Byte offset of the word from the start of the queue.
    pub offset: u64,
    /// How the word is compared.
    pub condition: Condition,
    /// The operand of the comparison.
    pub value: u32,
}

impl CqeWait {
    /// The owner bit in a CQE's last word, as a little-endian processor reads it.
    const OWNER: u32 = 0x0100_0000;
    /// Lower bound of the last word of a written CQE of an even lap, in serial number (wrapping)
    /// order: error CQEs have the opcodes 13 and 14 and come before successful ones, with 0 to 4.
    /// Opcodes in between are never written.
    const MIN_WRITTEN: u32 = 0xd000_0000;
    /// The content of a slot before a CQE of an even lap is written to it, on devices without NOR:
    /// less than [`MIN_WRITTEN`](Self::MIN_WRITTEN).
    const UNWRITTEN: [u8; 4] = [EMPTY_CQE_BYTE, EMPTY_CQE_BYTE, EMPTY_CQE_BYTE, 0x81];

    /// The wait for CQE `number` of a queue with `entries` entries. Without NOR, slots of even laps
    /// must hold their [`reset_value`](Self::reset_value) first.
    pub fn for_cqe(number: u64, entries: u64, has_nor: bool) -> Self {
        let offset = (number & (entries - 1)) * CQE_LEN + 60;
        let (condition, value) = match (owner_bit(number, entries), has_nor) {
            (true, _) => (Condition::And, Self::OWNER),
            (false, true) => (Condition::Nor, !Self::OWNER),
            (false, false) => (Condition::AtLeast, Self::MIN_WRITTEN),
        };
        Self { offset, condition, value }
    }

    /// The value that must be stored at [`offset`](Self::offset) before the device may write that
    /// CQE; `None` where the entry of the previous lap is distinct already.
    pub fn reset_value(number: u64, entries: u64, has_nor: bool) -> Option<u32> {
        let needs = !has_nor && !owner_bit(number, entries);
        needs.then(|| u32::from_ne_bytes(Self::UNWRITTEN))
    }

    /// A word that ends the wait for that CQE: the last word of an error CQE. Written by the CPU
    /// when the device is lost.
    pub fn synthetic_error(queue: Queue, number: u64, entries: u64) -> u32 {
        let code = match queue {
            Queue::Send => 13,
            Queue::Receive => 14,
        };
        let own = code << 4 | u8::from(owner_bit(number, entries));
        u32::from_ne_bytes([EMPTY_CQE_BYTE, EMPTY_CQE_BYTE, 0, own])
    }
}

/// Which words a stream writes to ring the doorbell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DoorbellMode {
    /// The doorbell record only, with one store: the software HCA polls both words, and either is
    /// enough.
    #[default]
    DoorbellRecord,
    /// The doorbell record, then the doorbell register: hardware needs both.
    RecordAndDoorbell,
}

/// The words that a stream writes to ring the doorbell of one queue pair.
///
/// After each doorbell the stream writes a word that belongs to the request, which shows that the
/// doorbell was rung: the next stream to post may be another one. The CPU writes the same value
/// when it releases streams, so that the two never disagree.
#[derive(Debug)]
pub(super) struct DoorbellWords {
    number: u32,
    dbrec: Word,
    doorbell: Option<Word>,
    rung_words: Box<[Word]>,
}

impl DoorbellWords {
    pub(super) fn new(
        number: u32,
        dbrec: Word,
        doorbell: Option<Word>,
        rung_words: Box<[Word]>,
    ) -> Self {
        Self { number, dbrec, doorbell, rung_words }
    }

    /// The word of that request, and its value once the doorbell has been rung.
    fn rung_word(&self, number: u64) -> (&Word, u32) {
        let slot = number & (self.rung_words.len() as u64 - 1);
        (&self.rung_words[slot as usize], number.wrapping_add(1) as u32)
    }

    /// Rings the doorbell for that request and all WQEBBs before `producer`. A stream's write is
    /// ordered after everything before it, so no fence is needed.
    pub(super) fn ring(&self, number: u64, producer: u64, ops: &mut Vec<MemOp>) {
        let values = DoorbellValues::next(self.number, producer as u16);
        ops.push(MemOp::Write { word: self.dbrec.clone(), value: values.dbrec.into() });
        if let Some(doorbell) = &self.doorbell {
            ops.push(MemOp::Write { word: doorbell.clone(), value: values.doorbell });
        }
        let (word, value) = self.rung_word(number);
        ops.push(MemOp::Write { word: word.clone(), value: value.into() });
    }

    /// Makes a stream wait until another stream has rung the doorbell for that request.
    pub(super) fn wait_until_rung(&self, number: u64, ops: &mut Vec<MemOp>) {
        let (word, value) = self.rung_word(number);
        let (word, condition) = (word.clone(), Condition::AtLeast);
        ops.push(MemOp::Wait { word, condition, value: value.into() });
    }

    /// Whether the doorbell has been rung for that request.
    pub(super) fn is_rung(&self, number: u64) -> bool {
        let (word, value) = self.rung_word(number);
        // Our own pinned memory is always readable. The word may already hold the value of a later
        // request in the same slot.
        let seen = word.load().unwrap_or(0) as u32;
        seen.wrapping_sub(value) as i32 >= 0
    }

    /// Stores the value that the request's stream stores after its doorbell.
    pub(super) fn mark_rung(&self, number: u64) {
        let (word, value) = self.rung_word(number);
        let _ = word.store(value.into());
    }

    /// Marks all requests before `end` as rung.
    pub(super) fn mark_rung_before(&self, end: u64) {
        for number in end.saturating_sub(self.rung_words.len() as u64)..end {
            self.mark_rung(number);
        }
    }
}

/// The words of one completion queue that streams wait for.
#[derive(Debug)]
pub(super) struct CqeTails {
    words: Box<[Word]>,
    has_nor: bool,
}

impl CqeTails {
    /// `begin` is the byte offset of the queue in `memory`.
    pub(super) fn new(
        (memory, begin): (&Allocation, u64),
        entries: u32,
        has_nor: bool,
    ) -> Result<Self> {
        let word = |slot| memory.word32(begin + u64::from(slot) * CQE_LEN + 60);
        let words = (0..entries).map(word).collect::<Result<_>>()?;
        Ok(Self { words, has_nor })
    }

    pub(super) fn entries(&self) -> u64 {
        self.words.len() as u64
    }

    /// The wait for CQE `number`.
    pub(super) fn wait(&self, number: u64) -> MemOp {
        let CqeWait { condition, value, .. } =
            CqeWait::for_cqe(number, self.entries(), self.has_nor);
        let word = self.words[(number & (self.entries() - 1)) as usize].clone();
        MemOp::Wait { word, condition, value: value.into() }
    }

    /// The byte offset and value to be stored before the device may write CQE `number`, if any.
    pub(super) fn reset_store(&self, number: u64) -> Option<(u64, u32)> {
        let value = CqeWait::reset_value(number, self.entries(), self.has_nor)?;
        Some(((number & (self.entries() - 1)) * CQE_LEN + 60, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::WordWidth;
    use crate::mlx5::{Cqe, CqeOutcome, CqeTail, Origin, RecvKind, Status, WqeOpcode};

    fn cqe(outcome: CqeOutcome, counter: u16) -> Cqe {
        Cqe { outcome, qpn: 0x123, user_index: 0, counter, solicited: true, timestamp: 0 }
    }

    /// All CQEs that a device may write.
    fn outcomes() -> Vec<CqeOutcome> {
        let arrivals = [
            RecvKind::Send,
            RecvKind::SendImm([1; 4]),
            RecvKind::SendInvalidate(7),
            RecvKind::WriteImm([2; 4]),
        ];
        let origin = Origin::default();
        let received = arrivals.into_iter().map(|recv_kind| CqeOutcome::Received {
            recv_kind,
            bytes: 1,
            origin,
        });
        let failed = [Queue::Send, Queue::Receive].map(|queue| CqeOutcome::Failed {
            queue,
            status: Status::Flushed,
            vendor: 0,
            opcode: WqeOpcode::Nop,
        });
        let sent = CqeOutcome::Sent { opcode: WqeOpcode::RdmaWrite, bytes: 0 };
        received.chain(failed).chain([sent]).collect()
    }

    #[test]
    fn only_a_written_cqe_ends_the_wait() {
        const ENTRIES: u64 = 4;
        for has_nor in [true, false] {
            let mut slot = u32::from_ne_bytes([EMPTY_CQE_BYTE; 4]);
            for lap in 0..6 {
                let number = lap * ENTRIES + 1;
                slot = CqeWait::reset_value(number, ENTRIES, has_nor).unwrap_or(slot);
                let CqeWait { offset, condition, value } =
                    CqeWait::for_cqe(number, ENTRIES, has_nor);
                assert_eq!(offset, 64 + 60);
                let holds =
                    |word: u32| condition.holds(WordWidth::Bits32, word.into(), u64::from(value));
                assert!(!holds(slot), "lap {lap}, {has_nor}: {slot:#x}");
                let owner = owner_bit(number, ENTRIES);
                assert!(
                    !CqeTail::parse(slot.to_ne_bytes()).is_owned(owner),
                    "the CPU would take it"
                );
                for outcome in outcomes() {
                    for counter in [0, 1, 0x7fff, 0xffff] {
                        let tail = cqe(outcome, counter).encode(owner).tail_word();
                        assert!(holds(tail), "lap {lap}, {has_nor}: {outcome:?} {tail:#x}");
                        slot = tail;
                    }
                }
                for queue in [Queue::Send, Queue::Receive] {
                    let synthetic_error = CqeWait::synthetic_error(queue, number, ENTRIES);
                    assert!(holds(synthetic_error));
                    assert!(CqeTail::parse(synthetic_error.to_ne_bytes()).is_owned(owner));
                }
            }
        }
    }

    /// Recorded from the queues of a ConnectX: a fetch-and-add at WQEBB 6 of queue pair 0x123, one
    /// WQEBB long.
    #[test]
    fn values_match_recorded_queues() {
        let values = DoorbellValues::next(0x123, 7);
        assert_eq!(values.dbrec.to_ne_bytes(), [0, 0, 0, 7]);
        assert_eq!(values.doorbell.to_ne_bytes(), [0, 0, 7, 0, 0, 1, 0x23, 0]);
        // The index in the doorbell record has 16 bits and wraps.
        let wrapped = DoorbellValues::next(0x123, 65_536_u64 as u16);
        assert_eq!(wrapped.dbrec, 0);
        // libgdsync's waits: odd laps AND 0x01000000, even laps NOR of its complement.
        assert_eq!(CqeWait::for_cqe(0, 4, true).value, 0xfeff_ffff);
        assert_eq!(CqeWait::for_cqe(4, 4, true).value, 0x0100_0000);
    }
}
