//! A revocable slot: a value that many threads use without a lock, until one thread revokes it.
//!
//! The state is one word: the number of guards, whether the slot is open, and a label that `enter`
//! has to match. Entering is one `fetch_add`, whose result decides whether the thread got in.
//!
//! Where several engines use a slot all the time, it has another state per engine (shard), each on
//! a cache line of its own, so that they do not take the line from each other. A transition changes
//! all of them, one after the other, and waits for the guards of all.
//!
//! # Invariants
//! 1. The content is accessed by guards (shared), or by the holder of the transition lock while the
//!    slot is closed and has no guards (exclusive); never both, because `close` waits for the last
//!    guard before it releases the lock.
//! 2. A thread that finds the slot closed does not access the content. Its increment is undone
//!    immediately; the only effect is that a concurrent `close` may wait slightly longer.
#![allow(unsafe_code)]

use std::ops::Deref;

use super::sync::{AtomicU64, ContentCell, Mutex, Ordering, pause};

/// Guards are counted in two counters, selected by the phase bit (as in SRCU): `relabel_and_drain`
/// flips the phase and waits for the old counter to reach zero, however many threads enter
/// meanwhile.
const COUNT_BITS: u32 = 20;
const COUNT: u64 = (1 << COUNT_BITS) - 1;
const COUNTS: u64 = (1 << (2 * COUNT_BITS)) - 1;
const PHASE: u64 = 1 << 40;
const OPEN: u64 = 1 << 41;
/// The 22 bits from here on are the label, whose meaning the owner defines.
const LABEL_SHIFT: u32 = 42;

pub(super) struct RevocableSlot<T> {
    state: AtomicU64,
    /// The states of shards 1, 2, …; shard 0 is `state`.
    shards: Box<[Shard]>,
    transition_lock: Mutex<()>,
    content: ContentCell<T>,
}

/// A state that shares its cache line, and the one that is fetched with it, with nothing.
#[repr(align(128))]
struct Shard(AtomicU64);

// SAFETY: invariant 1: the content is shared between threads (`Sync`), and moved out by one of them
// (`Send`), as with a reader-writer lock.
unsafe impl<T: Send + Sync> Sync for RevocableSlot<T> {}

/// Shared access to the content of a slot, which cannot be taken out until this is dropped.
pub(super) struct SlotGuard<'a, T> {
    state: &'a AtomicU64,
    content: &'a T,
    /// What `enter` added to the state: one, in the counter of the phase at that time.
    increment: u64,
}

impl<T> RevocableSlot<T> {
    /// A closed, empty slot with this label.
    pub(super) fn closed(label: u32) -> Self {
        Self::sharded(label, 0)
    }

    /// The same, with that many shards besides the first.
    pub(super) fn sharded(label: u32, shards: usize) -> Self {
        let state = || AtomicU64::new(u64::from(label) << LABEL_SHIFT);
        Self {
            state: state(),
            shards: (0..shards).map(|_| Shard(state())).collect(),
            transition_lock: Mutex::new(()),
            content: ContentCell::empty(),
        }
    }

    /// The label (22 bits), and whether the slot is open.
    #[inline]
    pub(super) fn peek(&self) -> (u32, bool) {
        decode(self.state.load(Ordering::Acquire))
    }

    /// The states of all shards.
    fn states(&self) -> impl Iterator<Item = &AtomicU64> {
        std::iter::once(&self.state).chain(self.shards.iter().map(|shard| &shard.0))
    }

    /// The state of a shard; of the first if there is no such shard.
    #[inline]
    fn shard(&self, shard: usize) -> &AtomicU64 {
        match shard {
            0 => &self.state,
            shard => self.shards.get(shard - 1).map_or(&self.state, |shard| &shard.0),
        }
    }

    /// Returns a guard if the slot is open and `accepts` its label. Otherwise returns the label,
    /// and whether the slot was open.
    #[inline]
    pub(super) fn enter(
        &self,
        accepts: impl Fn(u32) -> bool,
    ) -> Result<SlotGuard<'_, T>, (u32, bool)> {
        self.enter_shard(0, accepts)
    }

    /// The same, counted in one shard.
    #[inline]
    pub(super) fn enter_shard(
        &self,
        shard: usize,
        accepts: impl Fn(u32) -> bool,
    ) -> Result<SlotGuard<'_, T>, (u32, bool)> {
        let state = self.shard(shard);
        // Read first, so that invalid keys do not dirty a cache line that valid ones use.
        let seen = state.load(Ordering::Relaxed);
        let (label, open) = decode(seen);
        if !open || !accepts(label) {
            return Err((label, open));
        }
        let increment = if seen & PHASE == 0 { 1 } else { 1 << COUNT_BITS };
        let (label, open) = decode(state.fetch_add(increment, Ordering::Acquire));
        if open && accepts(label) {
            // SAFETY: invariant 1: this thread was counted while its shard was open, so no `close`
            // touches the content until `SlotGuard` is dropped, which decrements the counter.
            if let Some(content) = unsafe { self.content.get() } {
                return Ok(SlotGuard { state, content, increment });
            }
        }
        state.fetch_sub(increment, Ordering::Release);
        Err((label, open))
    }

    /// Stores `content` and opens the slot with this label. If the slot is open already, returns
    /// the content as the error.
    pub(super) fn open(&self, label: u32, content: T) -> Result<(), T> {
        let _exclusive = self.transition_lock.lock();
        if self.peek().1 {
            return Err(content);
        }
        // SAFETY: invariant 1: closed, under the lock, and without guards since `close` drained
        // them.
        unsafe { self.content.replace(Some(content)) };
        self.set_label(label, OPEN);
        Ok(())
    }

    /// Closes the slot, waits until no guard is left, and takes the content out. Deadlocks if the
    /// calling thread holds a guard.
    pub(super) fn close(&self, label: u32) -> Option<T> {
        let _exclusive = self.transition_lock.lock();
        self.set_label(label, 0);
        self.states().for_each(|state| drain(state, COUNTS));
        // SAFETY: invariant 1: closed, under the lock, and without guards.
        unsafe { self.content.replace(None) }
    }

    /// Changes the label of an open slot, and waits for the guards that entered under the old one.
    /// Returns whether the slot was open under `from`. Deadlocks if the calling thread holds a
    /// guard.
    pub(super) fn relabel_and_drain(&self, from: u32, to: u32) -> bool {
        let _exclusive = self.transition_lock.lock();
        if self.peek() != (from, true) {
            return false;
        }
        self.set_label(to, OPEN);
        // Twice: a thread that read the phase just before it flipped is counted in the other
        // counter.
        for state in self.states() {
            for _ in 0..2 {
                let before = state.fetch_xor(PHASE, Ordering::AcqRel);
                drain(state, if before & PHASE == 0 { COUNT } else { COUNT << COUNT_BITS });
            }
        }
        true
    }

    /// Replaces label and open bit of all shards; counters and phase, which change concurrently,
    /// are preserved.
    fn set_label(&self, label: u32, open: u64) {
        let bits = (u64::from(label) << LABEL_SHIFT) | open;
        let change = |state: u64| Some((state & (COUNTS | PHASE)) | bits);
        for state in self.states() {
            // Cannot fail: the closure never returns `None`.
            let _ = state.fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
        }
    }
}

/// Spins until the counters under the mask are zero.
fn drain(state: &AtomicU64, mask: u64) {
    let mut spins = 0;
    while state.load(Ordering::Acquire) & mask != 0 {
        spins += 1;
        pause(spins);
    }
}

fn decode(state: u64) -> (u32, bool) {
    ((state >> LABEL_SHIFT) as u32, state & OPEN != 0)
}

impl<T> SlotGuard<'_, T> {
    /// Whether a thread has closed the slot and is waiting for this guard to be dropped.
    pub(super) fn is_revoked(&self) -> bool {
        !decode(self.state.load(Ordering::Acquire)).1
    }
}

impl<T> Deref for SlotGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.content
    }
}

impl<T> Drop for SlotGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.state.fetch_sub(self.increment, Ordering::Release);
    }
}
