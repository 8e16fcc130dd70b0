//! What a stream writes to ring a queue pair, and what it waits for: addresses and values, for the software HCA's queues
//! and for a ConnectX's alike.

use crate::error::Result;
use crate::hca::CQE_LEN;
use crate::mem::{Allocation, Condition, MemOp, Word};
use crate::mlx5::{Doorbell, DoorbellRecord, EMPTY, Queue, owner_bit};

/// The two words that tell a device of work, as numbers whose store on this machine gives their bytes.
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
    /// The doorbell.
    pub doorbell: u64,
}

impl DoorbellValues {
    /// That `producer` is the next free block of that queue pair.
    pub fn next(qpn: u32, producer: u16) -> Self {
        Self {
            dbrec: u32::from_ne_bytes(DoorbellRecord::word(producer)),
            doorbell: u64::from_ne_bytes(Doorbell::next(qpn, producer)),
        }
    }
}

/// The word of a completion that a stream waits for, and what it waits for there.
///
/// The word is the last four bytes: the counter, and the byte with the owner bit, which says by its lap whether the
/// entry is there. Failures have it too, so that they end the wait as well.
///
/// ```
/// use warpwire::mem::Condition;
/// use warpwire::stream::CqeWait;
/// let first = CqeWait::for_cqe(3, 8, true);
/// assert_eq!((first.offset, first.condition, first.value), (3 * 64 + 60, Condition::Nor, 0xfeff_ffff));
/// let a_lap_later = CqeWait::for_cqe(11, 8, true);
/// assert_eq!((a_lap_later.offset, a_lap_later.condition), (first.offset, Condition::And));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqeWait {
    /// Where the word lies, from the beginning of the queue.
    pub offset: u64,
    /// What is asked of it.
    pub condition: Condition,
    /// The value that it is compared with.
    pub value: u32,
}

impl CqeWait {
    /// The owner bit of a completion, in its last word as a processor with little-endian words reads it.
    const OWNER: u32 = 0x0100_0000;
    /// The least that the word of a written completion of an even lap is, counted on a circle: failures have the
    /// opcodes 13 and 14, and come before success, with 0 to 4. What lies in between is never written.
    const MIN_WRITTEN: u32 = 0xd000_0000;
    /// What a place holds before a completion of an even lap is written to it, where there is no NOR: less than that.
    const UNWRITTEN: [u8; 4] = [EMPTY, EMPTY, EMPTY, 0x81];

    /// What tells that the `number`-th completion is there, of a queue with so many entries. Without NOR the places of
    /// even laps must have been [cleared](Self::cleared).
    pub fn for_cqe(number: u64, entries: u64, has_nor: bool) -> Self {
        let offset = (number & (entries - 1)) * CQE_LEN + 60;
        let (condition, value) = match (owner_bit(number, entries), has_nor) {
            (true, _) => (Condition::And, Self::OWNER),
            (false, true) => (Condition::Nor, !Self::OWNER),
            (false, false) => (Condition::AtLeast, Self::MIN_WRITTEN),
        };
        Self { offset, condition, value }
    }

    /// What must be stored at [`offset`](Self::offset) before the device may write that completion; nothing where the
    /// entry of the lap before tells them apart.
    pub fn reset_value(number: u64, entries: u64, has_nor: bool) -> Option<u32> {
        let needs = !has_nor && !owner_bit(number, entries);
        needs.then(|| u32::from_ne_bytes(Self::UNWRITTEN))
    }

    /// A word that ends the wait for that completion, whoever stores it: a failure without a body.
    pub fn synthetic_error(queue: Queue, number: u64, entries: u64) -> u32 {
        let code = match queue {
            Queue::Send => 13,
            Queue::Receive => 14,
        };
        let own = code << 4 | u8::from(owner_bit(number, entries));
        u32::from_ne_bytes([EMPTY, EMPTY, 0, own])
    }
}

/// How a stream rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DoorbellMode {
    /// By the doorbell record alone, with one store: the software HCA looks at both, and one is enough.
    #[default]
    DoorbellRecord,
    /// By the record, then the doorbell: what hardware needs.
    RecordAndDoorbell,
}

/// The words that a stream writes to ring one queue pair.
///
/// Behind each ring it writes a word of that request's own, which says that its turn is over: the stream that posts
/// next may be another one. The CPU writes the same when streams must be released, so that the two never disagree.
#[derive(Debug)]
pub(super) struct DoorbellWords {
    number: u32,
    dbrec: Word,
    doorbell: Option<Word>,
    rung_words: Box<[Word]>,
}

impl DoorbellWords {
    /// `dbrec` is the doorbell record's send word.
    pub(super) fn new(
        number: u32,
        dbrec: Word,
        doorbell: Option<Word>,
        rung_words: Box<[Word]>,
    ) -> Self {
        Self { number, dbrec, doorbell, rung_words }
    }

    /// The word of that request, and what it holds when its stream has rung.
    fn rung_word(&self, number: u64) -> (&Word, u32) {
        let slot = number & (self.rung_words.len() as u64 - 1);
        (&self.rung_words[slot as usize], number.wrapping_add(1) as u32)
    }

    /// Rings for that request, and everything up to that block. A stream's write comes after everything before it, so
    /// that nothing need stand in between.
    pub(super) fn ring(&self, number: u64, producer: u64, ops: &mut Vec<MemOp>) {
        let values = DoorbellValues::next(self.number, producer as u16);
        ops.push(MemOp::Write { word: self.dbrec.clone(), value: values.dbrec.into() });
        if let Some(doorbell) = &self.doorbell {
            ops.push(MemOp::Write { word: doorbell.clone(), value: values.doorbell });
        }
        let (word, value) = self.rung_word(number);
        ops.push(MemOp::Write { word: word.clone(), value: value.into() });
    }

    /// Waits until another stream has rung for that request.
    pub(super) fn wait_until_rung(&self, number: u64, ops: &mut Vec<MemOp>) {
        let (word, value) = self.rung_word(number);
        let (word, condition) = (word.clone(), Condition::AtLeast);
        ops.push(MemOp::Wait { word, condition, value: value.into() });
    }

    /// Whether its stream has rung for that request.
    pub(super) fn is_rung(&self, number: u64) -> bool {
        let (word, value) = self.rung_word(number);
        // Pinned memory of our own is always readable. Later requests have had their turn later.
        let seen = word.load().unwrap_or(0) as u32;
        seen.wrapping_sub(value) as i32 >= 0
    }

    /// Does what the stream of that request does, or would have done, last.
    pub(super) fn mark_rung(&self, number: u64) {
        let (word, value) = self.rung_word(number);
        let _ = word.store(value.into());
    }

    /// Ends the turn of every request before that one.
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
    /// Of a queue with so many entries, which begins at that place of memory.
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

    /// The wait for the completion of that number.
    pub(super) fn wait(&self, number: u64) -> MemOp {
        let CqeWait { condition, value, .. } =
            CqeWait::for_cqe(number, self.entries(), self.has_nor);
        let word = self.words[(number & (self.entries() - 1)) as usize].clone();
        MemOp::Wait { word, condition, value: value.into() }
    }

    /// What must be stored, and where, before the device may write that completion.
    pub(super) fn reset_store(&self, number: u64) -> Option<(u64, u32)> {
        let value = CqeWait::reset_value(number, self.entries(), self.has_nor)?;
        Some(((number & (self.entries() - 1)) * CQE_LEN + 60, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::WordWidth;
    use crate::mlx5::{Cqe, CqeOutcome, CqeTail, Opcode, Origin, RecvKind, Status};

    fn cqe(outcome: CqeOutcome, counter: u16) -> Cqe {
        Cqe { outcome, qpn: 0x123, user_index: 0, counter, solicited: true, timestamp: 0 }
    }

    /// Everything that a device may write.
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
            opcode: Opcode::Nop,
        });
        let sent = CqeOutcome::Sent { opcode: Opcode::RdmaWrite, bytes: 0 };
        received.chain(failed).chain([sent]).collect()
    }

    #[test]
    fn every_completion_ends_the_wait_and_nothing_else_does() {
        const ENTRIES: u64 = 4;
        for has_nor in [true, false] {
            let mut slot = u32::from_ne_bytes([EMPTY; 4]);
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
                assert!(!CqeTail::parse(slot.to_ne_bytes()).is_owned(owner), "the CPU sees it too");
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

    /// Recorded from queues of a ConnectX: a fetch-and-add at block 6 of queue pair 0x123, one block long.
    #[test]
    fn values_are_those_of_recorded_queues() {
        let values = DoorbellValues::next(0x123, 7);
        assert_eq!(values.dbrec.to_ne_bytes(), [0, 0, 0, 7]);
        assert_eq!(values.doorbell.to_ne_bytes(), [0, 0, 7, 0, 0, 1, 0x23, 0]);
        // The ring's index has 16 bits and goes round.
        let wrapped = DoorbellValues::next(0x123, 65_536_u64 as u16);
        assert_eq!(wrapped.dbrec, 0);
        // libgdsync's waits: odd laps AND 0x01000000, even laps NOR of its complement.
        assert_eq!(CqeWait::for_cqe(0, 4, true).value, 0xfeff_ffff);
        assert_eq!(CqeWait::for_cqe(4, 4, true).value, 0x0100_0000);
    }
}
