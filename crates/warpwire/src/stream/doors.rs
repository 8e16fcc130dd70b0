//! What a stream writes to ring a queue pair, and what it waits for: addresses and values, for the software HCA's queues
//! and for a ConnectX's alike.

use crate::error::Result;
use crate::hca::CQE_LEN;
use crate::mem::{Allocation, Condition, MemOp, Word};
use crate::mlx5::{Doorbell, EMPTY, Queue, Record, owner_bit};

/// The two words that tell a device of work, as numbers whose store on this machine gives their bytes.
///
/// ```
/// use warpwire::stream::Ringing;
/// let ringing = Ringing::next(0x123, 7);
/// assert_eq!(ringing.record.to_ne_bytes(), [0, 0, 0, 7]);
/// assert_eq!(ringing.doorbell.to_ne_bytes(), [0, 0, 7, 0, 0, 1, 0x23, 0]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ringing {
    /// The send word of the doorbell record.
    pub record: u32,
    /// The doorbell.
    pub doorbell: u64,
}

impl Ringing {
    /// That `producer` is the next free block of that queue pair.
    pub fn next(qpn: u32, producer: u16) -> Self {
        Self {
            record: u32::from_ne_bytes(Record::word(producer)),
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
/// use warpwire::stream::Arrived;
/// let first = Arrived::of(3, 8, true);
/// assert_eq!((first.offset, first.condition, first.value), (3 * 64 + 60, Condition::Nor, 0xfeff_ffff));
/// let a_lap_later = Arrived::of(11, 8, true);
/// assert_eq!((a_lap_later.offset, a_lap_later.condition), (first.offset, Condition::And));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// Where the word lies, from the beginning of the queue.
    pub offset: u64,
    /// What is asked of it.
    pub condition: Condition,
    /// The value that it is compared with.
    pub value: u32,
}

impl Arrived {
    /// The owner bit of a completion, in its last word as a processor with little-endian words reads it.
    const OWNER: u32 = 0x0100_0000;
    /// The least that the word of a written completion of an even lap is, counted on a circle: failures have the
    /// opcodes 13 and 14, and come before success, with 0 to 4. What lies in between is never written.
    const LEAST: u32 = 0xd000_0000;
    /// What a place holds before a completion of an even lap is written to it, where there is no NOR: less than that.
    const UNWRITTEN: [u8; 4] = [EMPTY, EMPTY, EMPTY, 0x81];

    /// What tells that the `number`-th completion is there, of a queue with so many entries. Without NOR the places of
    /// even laps must have been [cleared](Self::cleared).
    pub fn of(number: u64, entries: u64, has_nor: bool) -> Self {
        let offset = (number & (entries - 1)) * CQE_LEN + 60;
        let (condition, value) = match (owner_bit(number, entries), has_nor) {
            (true, _) => (Condition::And, Self::OWNER),
            (false, true) => (Condition::Nor, !Self::OWNER),
            (false, false) => (Condition::AtLeast, Self::LEAST),
        };
        Self { offset, condition, value }
    }

    /// What must be stored at [`offset`](Self::offset) before the device may write that completion; nothing where the
    /// entry of the lap before tells them apart.
    pub fn cleared(number: u64, entries: u64, has_nor: bool) -> Option<u32> {
        let needs = !has_nor && !owner_bit(number, entries);
        needs.then(|| u32::from_ne_bytes(Self::UNWRITTEN))
    }

    /// A word that ends the wait for that completion, whoever stores it: a failure without a body.
    pub fn forged(queue: Queue, number: u64, entries: u64) -> u32 {
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
pub enum Ring {
    /// By the doorbell record alone, with one store: the software HCA looks at both, and one is enough.
    #[default]
    Record,
    /// By the record, then the doorbell: what hardware needs.
    RecordAndDoorbell,
}

/// The words that a stream writes to ring one queue pair.
///
/// Behind each ring it writes a word of that request's own, which says that its turn is over: the stream that posts
/// next may be another one. The CPU writes the same when streams must be released, so that the two never disagree.
#[derive(Debug)]
pub(super) struct Doors {
    number: u32,
    record: Word,
    doorbell: Option<Word>,
    turns: Box<[Word]>,
}

impl Doors {
    /// `record` is the doorbell record's send word.
    pub(super) fn new(
        number: u32,
        record: Word,
        doorbell: Option<Word>,
        turns: Box<[Word]>,
    ) -> Self {
        Self { number, record, doorbell, turns }
    }

    /// The word of that request, and what it holds when its stream has rung.
    fn turn(&self, number: u64) -> (&Word, u32) {
        let place = number & (self.turns.len() as u64 - 1);
        (&self.turns[place as usize], number.wrapping_add(1) as u32)
    }

    /// Rings for that request, and everything up to that block. A stream's write comes after everything before it, so
    /// that nothing need stand in between.
    pub(super) fn ring(&self, number: u64, producer: u64, ops: &mut Vec<MemOp>) {
        let ringing = Ringing::next(self.number, producer as u16);
        ops.push(MemOp::Write { word: self.record.clone(), value: ringing.record.into() });
        if let Some(doorbell) = &self.doorbell {
            ops.push(MemOp::Write { word: doorbell.clone(), value: ringing.doorbell });
        }
        let (word, value) = self.turn(number);
        ops.push(MemOp::Write { word: word.clone(), value: value.into() });
    }

    /// Waits until another stream has rung for that request.
    pub(super) fn await_turn(&self, number: u64, ops: &mut Vec<MemOp>) {
        let (word, value) = self.turn(number);
        let (word, condition) = (word.clone(), Condition::AtLeast);
        ops.push(MemOp::Wait { word, condition, value: value.into() });
    }

    /// Whether its stream has rung for that request.
    pub(super) fn is_rung(&self, number: u64) -> bool {
        let (word, value) = self.turn(number);
        // Pinned memory of our own is always readable. Later requests have had their turn later.
        let seen = word.load().unwrap_or(0) as u32;
        seen.wrapping_sub(value) as i32 >= 0
    }

    /// Does what the stream of that request does, or would have done, last.
    pub(super) fn end_turn(&self, number: u64) {
        let (word, value) = self.turn(number);
        let _ = word.store(value.into());
    }

    /// Ends the turn of every request before that one.
    pub(super) fn end_turns(&self, end: u64) {
        for number in end.saturating_sub(self.turns.len() as u64)..end {
            self.end_turn(number);
        }
    }
}

/// The words of one completion queue that streams wait for.
#[derive(Debug)]
pub(super) struct Tails {
    words: Box<[Word]>,
    has_nor: bool,
}

impl Tails {
    /// Of a queue with so many entries, which begins at that place of memory.
    pub(super) fn new(
        (memory, begin): (&Allocation, u64),
        entries: u32,
        has_nor: bool,
    ) -> Result<Self> {
        let word = |place| memory.word32(begin + u64::from(place) * CQE_LEN + 60);
        let words = (0..entries).map(word).collect::<Result<_>>()?;
        Ok(Self { words, has_nor })
    }

    pub(super) fn entries(&self) -> u64 {
        self.words.len() as u64
    }

    /// The wait for the completion of that number.
    pub(super) fn wait(&self, number: u64) -> MemOp {
        let Arrived { condition, value, .. } = Arrived::of(number, self.entries(), self.has_nor);
        let word = self.words[(number & (self.entries() - 1)) as usize].clone();
        MemOp::Wait { word, condition, value: value.into() }
    }

    /// What must be stored, and where, before the device may write that completion.
    pub(super) fn clearing(&self, number: u64) -> Option<(u64, u32)> {
        let value = Arrived::cleared(number, self.entries(), self.has_nor)?;
        Some(((number & (self.entries() - 1)) * CQE_LEN + 60, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Width;
    use crate::mlx5::{Arrival, Cqe, Opcode, Origin, Outcome, Status, Tail};

    fn cqe(outcome: Outcome, counter: u16) -> Cqe {
        Cqe { outcome, qpn: 0x123, user_index: 0, counter, solicited: true, timestamp: 0 }
    }

    /// Everything that a device may write.
    fn outcomes() -> Vec<Outcome> {
        let arrivals = [
            Arrival::Send,
            Arrival::SendImm([1; 4]),
            Arrival::SendInvalidate(7),
            Arrival::WriteImm([2; 4]),
        ];
        let origin = Origin::default();
        let received =
            arrivals.into_iter().map(|arrival| Outcome::Received { arrival, bytes: 1, origin });
        let failed = [Queue::Send, Queue::Receive].map(|queue| Outcome::Failed {
            queue,
            status: Status::Flushed,
            vendor: 0,
            opcode: Opcode::Nop,
        });
        let sent = Outcome::Sent { opcode: Opcode::RdmaWrite, bytes: 0 };
        received.chain(failed).chain([sent]).collect()
    }

    #[test]
    fn every_completion_ends_the_wait_and_nothing_else_does() {
        const ENTRIES: u64 = 4;
        for has_nor in [true, false] {
            let mut place = u32::from_ne_bytes([EMPTY; 4]);
            for lap in 0..6 {
                let number = lap * ENTRIES + 1;
                place = Arrived::cleared(number, ENTRIES, has_nor).unwrap_or(place);
                let Arrived { offset, condition, value } = Arrived::of(number, ENTRIES, has_nor);
                assert_eq!(offset, 64 + 60);
                let holds =
                    |word: u32| condition.holds(Width::Bits32, word.into(), u64::from(value));
                assert!(!holds(place), "lap {lap}, {has_nor}: {place:#x}");
                let owner = owner_bit(number, ENTRIES);
                assert!(!Tail::parse(place.to_ne_bytes()).is_owned(owner), "the CPU sees it too");
                for outcome in outcomes() {
                    for counter in [0, 1, 0x7fff, 0xffff] {
                        let tail = cqe(outcome, counter).encode(owner).tail_word();
                        assert!(holds(tail), "lap {lap}, {has_nor}: {outcome:?} {tail:#x}");
                        place = tail;
                    }
                }
                for queue in [Queue::Send, Queue::Receive] {
                    let forged = Arrived::forged(queue, number, ENTRIES);
                    assert!(holds(forged));
                    assert!(Tail::parse(forged.to_ne_bytes()).is_owned(owner));
                }
            }
        }
    }

    /// Recorded from queues of a ConnectX: a fetch-and-add at block 6 of queue pair 0x123, one block long.
    #[test]
    fn values_are_those_of_recorded_queues() {
        let ringing = Ringing::next(0x123, 7);
        assert_eq!(ringing.record.to_ne_bytes(), [0, 0, 0, 7]);
        assert_eq!(ringing.doorbell.to_ne_bytes(), [0, 0, 7, 0, 0, 1, 0x23, 0]);
        // The ring's index has 16 bits and goes round.
        let wrapped = Ringing::next(0x123, 65_536_u64 as u16);
        assert_eq!(wrapped.record, 0);
        // libgdsync's waits: odd laps AND 0x01000000, even laps NOR of its complement.
        assert_eq!(Arrived::of(0, 4, true).value, 0xfeff_ffff);
        assert_eq!(Arrived::of(4, 4, true).value, 0x0100_0000);
    }
}
