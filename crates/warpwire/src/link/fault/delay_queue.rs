//! One direction of fault injection: decides the fate of each packet, and queues the packets that
//! are held back.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::plan::FaultPlan;
use crate::link::Corruption;

/// Maximum number of packets held back; more are dropped, as in a switch.
pub(super) const MAX_HELD: usize = 1024;
/// Maximum number of later packets that overtake one.
const MAX_REORDER_DISTANCE: u32 = 8;
/// Maximum time in nanoseconds that a packet waits to be overtaken.
const REORDER_TIMEOUT_NS: u64 = 1_000_000;

/// A random number generator with one word of state (splitmix64).
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

/// The fate of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Decision {
    pub lost: bool,
    pub duplicate: bool,
    pub corruption: Corruption,
    pub schedule: Schedule,
}

/// When a packet is forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Schedule {
    Now,
    /// At this time, in nanoseconds since the link was created.
    At(u64),
    /// After packet number `after_packet`, or at the time `at` if that packet does not come.
    Reordered {
        after_packet: u64,
        at: u64,
    },
}

/// Packets held back, each with metadata of type `T`.
pub(super) struct DelayQueue<T> {
    rng: SplitMix64,
    /// Number of packets seen.
    count: u64,
    /// When the last byte so far has been transmitted at the plan's rate, in nanoseconds.
    wire_free_at: u64,
    slots: Vec<HeldPacket<T>>,
    free: Vec<usize>,
    /// By time, then by packet number.
    timed: BinaryHeap<Reverse<(u64, u64, usize)>>,
    /// Packets that wait to be overtaken, by the packet number that releases them.
    reordered: BinaryHeap<Reverse<(u64, u64, usize)>>,
    max_packet: usize,
}

pub(super) struct HeldPacket<T> {
    pub bytes: Box<[u8]>,
    pub len: usize,
    pub info: Option<T>,
    at: u64,
}

impl<T> DelayQueue<T> {
    pub(super) fn new(seed: u64, max_packet: usize) -> Self {
        Self {
            rng: SplitMix64(seed),
            count: 0,
            wire_free_at: 0,
            slots: Vec::with_capacity(MAX_HELD),
            free: Vec::with_capacity(MAX_HELD),
            timed: BinaryHeap::with_capacity(MAX_HELD),
            reordered: BinaryHeap::with_capacity(MAX_HELD),
            max_packet,
        }
    }

    /// Decides the fate of the next packet. Consumes the same number of draws for each, so that the
    /// probability of one fault does not change which packets another one affects.
    pub(super) fn decide(&mut self, plan: &FaultPlan, now: u64, len: usize) -> Decision {
        self.count += 1;
        let draws = [(); 5].map(|()| self.rng.next());
        let halves = |word: u64| (word as u32, (word >> 32) as u32);
        let (loss, dup) = halves(draws[0]);
        let (reorder, corrupt) = halves(draws[1]);
        let (cut, cut_at) = halves(draws[2]);
        let (gap, bit) = halves(draws[3]);
        let corruption = if plan.corrupt.hits(corrupt) {
            Corruption::FlipBit(corrupted_bit(bit, len))
        } else if plan.cut.hits(cut) {
            Corruption::Truncate(1 + cut_at as usize % len.saturating_sub(1).max(1))
        } else {
            Corruption::Intact
        };
        let jitter = u64::try_from(plan.jitter.as_nanos()).unwrap_or(u64::MAX);
        let delay = u64::try_from(plan.delay.as_nanos()).unwrap_or(u64::MAX);
        let mut at = now.saturating_add(delay);
        if jitter > 0 {
            at = at.saturating_add(draws[4] % jitter);
        }
        if let Some(rate) = plan.rate {
            // A packet that finds the queue full is dropped, and takes no transmission time.
            let full = self.free.is_empty() && self.slots.len() == MAX_HELD;
            let takes = if full { 0 } else { len as u64 * 1_000_000_000 / rate.max(1) };
            self.wire_free_at = self.wire_free_at.max(now).saturating_add(takes);
            at = at.max(self.wire_free_at.saturating_add(delay));
        }
        let schedule = if plan.reorder.hits(reorder) {
            let after_packet = self.count + 1 + u64::from(gap % MAX_REORDER_DISTANCE);
            Schedule::Reordered { after_packet, at: at.saturating_add(REORDER_TIMEOUT_NS) }
        } else if at > now {
            Schedule::At(at)
        } else {
            Schedule::Now
        };
        Decision { lost: plan.loss.hits(loss), duplicate: plan.dup.hits(dup), corruption, schedule }
    }

    /// Whether a packet forwarded now would overtake one that is due.
    pub(super) fn has_due(&self, now: u64) -> bool {
        self.timed.peek().is_some_and(|Reverse((at, ..))| *at <= now)
    }

    /// Holds a packet back; `false` if the queue is full, or if the packet is longer than the
    /// buffers.
    pub(super) fn enqueue(&mut self, bytes: &[u8], info: T, schedule: Schedule) -> bool {
        if bytes.len() > self.max_packet {
            return false;
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            // Buffers are allocated by the first packets, and reused from then on.
            None if self.slots.len() < MAX_HELD => {
                let bytes = vec![0; self.max_packet].into_boxed_slice();
                self.slots.push(HeldPacket { bytes, len: 0, info: None, at: 0 });
                self.slots.len() - 1
            }
            None => return false,
        };
        let held = &mut self.slots[slot];
        held.bytes[..bytes.len()].copy_from_slice(bytes);
        held.len = bytes.len();
        held.info = Some(info);
        match schedule {
            Schedule::Now => self.timed.push(Reverse((0, self.count, slot))),
            Schedule::At(at) => self.timed.push(Reverse((at, self.count, slot))),
            Schedule::Reordered { after_packet, at } => {
                held.at = at;
                self.reordered.push(Reverse((after_packet, self.count, slot)));
            }
        }
        true
    }

    /// The next packet that is due, to be removed with [`DelayQueue::release`].
    pub(super) fn due(&mut self, now: u64) -> Option<usize> {
        if let Some(Reverse((at, _, slot))) = self.timed.peek()
            && *at <= now
        {
            return Some(*slot);
        }
        let Reverse((after_packet, number, slot)) = *self.reordered.peek()?;
        let late = self.slots.get(slot).is_some_and(|held| held.at <= now);
        if after_packet > self.count && !late {
            return None;
        }
        // From here on it is one of those that are due.
        self.reordered.pop();
        self.timed.push(Reverse((0, number, slot)));
        Some(slot)
    }

    pub(super) fn held(&self, slot: usize) -> Option<&HeldPacket<T>> {
        self.slots.get(slot)
    }

    /// Removes the packet that `due` returned last.
    pub(super) fn release(&mut self, slot: usize) {
        self.timed.pop();
        self.free.push(slot);
    }

    /// The time at which the next packet will be due.
    pub(super) fn next(&self) -> Option<u64> {
        let timed = self.timed.peek().map(|Reverse((at, ..))| *at);
        let waits = |Reverse((_, _, slot)): &Reverse<(u64, u64, usize)>| self.slots.get(*slot);
        let reordered = self.reordered.peek().and_then(waits).map(|held| held.at);
        timed.into_iter().chain(reordered).min()
    }
}

/// A bit that the ICRC covers, or one of the ICRC: any but those of the BTH byte that switches may
/// change.
fn corrupted_bit(draw: u32, len: usize) -> u32 {
    const VARIANT: u32 = 4;
    let bits = (len as u32 * 8).max(1);
    let bit = draw % bits;
    if bit / 8 == VARIANT { (bit + 8) % bits } else { bit }
}
