//! One direction of a link with faults: what happens to each packet, and the packets that are held back.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::plan::Plan;
use crate::link::Spoil;

/// How many packets are held back at most; more are lost, as in a switch.
pub(super) const HELD: usize = 1024;
/// How many later packets overtake one, at most.
const OVERTAKERS: u32 = 8;
/// A packet that waits to be overtaken waits no longer than this, in nanoseconds.
const PATIENCE: u64 = 1_000_000;

/// A generator of random numbers whose whole state is one word (splitmix64).
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

/// What happens to one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fate {
    pub lost: bool,
    pub twice: bool,
    pub spoil: Spoil,
    pub when: When,
}

/// When a packet goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    Now,
    /// At this time, in nanoseconds.
    At(u64),
    /// When packet number `turn` has passed, or at the time `at` if it does not come.
    Overtaken {
        turn: u64,
        at: u64,
    },
}

/// Packets held back, with what `T` says about each.
pub(super) struct Lane<T> {
    dice: Dice,
    /// How many packets have come.
    count: u64,
    /// When the last byte so far has gone through, at the plan's rate.
    busy_until: u64,
    slots: Vec<Held<T>>,
    free: Vec<usize>,
    /// By time, and by number among equals.
    timed: BinaryHeap<Reverse<(u64, u64, usize)>>,
    /// Those that wait to be overtaken, by their turn.
    overtaken: BinaryHeap<Reverse<(u64, u64, usize)>>,
    largest: usize,
}

pub(super) struct Held<T> {
    pub bytes: Box<[u8]>,
    pub len: usize,
    pub about: Option<T>,
    at: u64,
}

impl<T> Lane<T> {
    pub(super) fn new(seed: u64, largest: usize) -> Self {
        Self {
            dice: Dice(seed),
            count: 0,
            busy_until: 0,
            slots: Vec::with_capacity(HELD),
            free: Vec::with_capacity(HELD),
            timed: BinaryHeap::with_capacity(HELD),
            overtaken: BinaryHeap::with_capacity(HELD),
            largest,
        }
    }

    /// Decides over the next packet. Draws the same number of times for each, so that one fault's rate does not
    /// change where another strikes.
    pub(super) fn decide(&mut self, plan: &Plan, now: u64, len: usize) -> Fate {
        self.count += 1;
        let draws = [(); 5].map(|()| self.dice.next());
        let halves = |word: u64| (word as u32, (word >> 32) as u32);
        let (loss, dup) = halves(draws[0]);
        let (reorder, corrupt) = halves(draws[1]);
        let (cut, place) = halves(draws[2]);
        let (gap, bit) = halves(draws[3]);
        let spoil = if plan.corrupt.hits(corrupt) {
            Spoil::Flip(damaged_bit(bit, len))
        } else if plan.cut.hits(cut) {
            Spoil::Cut(1 + place as usize % len.saturating_sub(1).max(1))
        } else {
            Spoil::No
        };
        let jitter = u64::try_from(plan.jitter.as_nanos()).unwrap_or(u64::MAX);
        let delay = u64::try_from(plan.delay.as_nanos()).unwrap_or(u64::MAX);
        let mut at = now.saturating_add(delay);
        if jitter > 0 {
            at = at.saturating_add(draws[4] % jitter);
        }
        if let Some(rate) = plan.rate {
            // A packet that finds no place is lost, and takes nobody's time.
            let full = self.free.is_empty() && self.slots.len() == HELD;
            let takes = if full { 0 } else { len as u64 * 1_000_000_000 / rate.max(1) };
            self.busy_until = self.busy_until.max(now).saturating_add(takes);
            at = at.max(self.busy_until.saturating_add(delay));
        }
        let when = if plan.reorder.hits(reorder) {
            let turn = self.count + 1 + u64::from(gap % OVERTAKERS);
            When::Overtaken { turn, at: at.saturating_add(PATIENCE) }
        } else if at > now {
            When::At(at)
        } else {
            When::Now
        };
        Fate { lost: plan.loss.hits(loss), twice: plan.dup.hits(dup), spoil, when }
    }

    /// Whether a packet that goes now would overtake one that should have gone.
    pub(super) fn has_due(&self, now: u64) -> bool {
        self.timed.peek().is_some_and(|Reverse((at, ..))| *at <= now)
    }

    /// Holds a packet back; false if too many are, or if it is longer than the buffers.
    pub(super) fn hold(&mut self, bytes: &[u8], about: T, when: When) -> bool {
        if bytes.len() > self.largest {
            return false;
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            // The first packets make their buffers; from then on buffers are used again.
            None if self.slots.len() < HELD => {
                let bytes = vec![0; self.largest].into_boxed_slice();
                self.slots.push(Held { bytes, len: 0, about: None, at: 0 });
                self.slots.len() - 1
            }
            None => return false,
        };
        let held = &mut self.slots[slot];
        held.bytes[..bytes.len()].copy_from_slice(bytes);
        held.len = bytes.len();
        held.about = Some(about);
        match when {
            When::Now => self.timed.push(Reverse((0, self.count, slot))),
            When::At(at) => self.timed.push(Reverse((at, self.count, slot))),
            When::Overtaken { turn, at } => {
                held.at = at;
                self.overtaken.push(Reverse((turn, self.count, slot)));
            }
        }
        true
    }

    /// The next packet that is due, if any, to be given back by [`Lane::release`].
    pub(super) fn due(&mut self, now: u64) -> Option<usize> {
        if let Some(Reverse((at, _, slot))) = self.timed.peek()
            && *at <= now
        {
            return Some(*slot);
        }
        let Reverse((turn, number, slot)) = *self.overtaken.peek()?;
        let late = self.slots.get(slot).is_some_and(|held| held.at <= now);
        if turn > self.count && !late {
            return None;
        }
        // From here on it is one among those whose time has come.
        self.overtaken.pop();
        self.timed.push(Reverse((0, number, slot)));
        Some(slot)
    }

    pub(super) fn held(&self, slot: usize) -> Option<&Held<T>> {
        self.slots.get(slot)
    }

    /// The packet that was due has gone.
    pub(super) fn release(&mut self, slot: usize) {
        self.timed.pop();
        self.free.push(slot);
    }

    /// The time at which something will be due.
    pub(super) fn next(&self) -> Option<u64> {
        let timed = self.timed.peek().map(|Reverse((at, ..))| *at);
        let waits = |Reverse((_, _, slot)): &Reverse<(u64, u64, usize)>| self.slots.get(*slot);
        let overtaken = self.overtaken.peek().and_then(waits).map(|held| held.at);
        timed.into_iter().chain(overtaken).min()
    }
}

/// A bit that the ICRC covers, or of the ICRC: any but the byte that switches may change.
fn damaged_bit(draw: u32, len: usize) -> u32 {
    const VARIANT: u32 = 4;
    let bits = (len as u32 * 8).max(1);
    let bit = draw % bits;
    if bit / 8 == VARIANT { (bit + 8) % bits } else { bit }
}
