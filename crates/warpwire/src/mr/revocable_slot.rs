//! A gate: a value that many threads use without a lock, until somebody takes it away.
//!
//! The state is one word: how many are inside, whether the gate is open, and a label that those who come
//! must know. Coming in is one addition, and what it returns says whether the comer is in.
//!
//! # Invariants
//! 1. The content is touched by those inside (shared) and by holders of the lock while the gate is closed
//!    and nobody is inside (alone); never both, because a closer waits for the last one inside before it
//!    lets go of the lock.
//! 2. Who finds the gate closed goes away without touching the content; its addition, undone at once, may
//!    make a closer wait a moment longer, and nothing else.
#![allow(unsafe_code)]

use std::ops::Deref;

use super::sync::{AtomicU64, ContentCell, Mutex, Ordering, pause};

/// Those inside are counted in two numbers, of which the phase says which one grows: who turns the gate
/// waits for the other to become zero, however many come in meanwhile.
const COUNT_BITS: u32 = 20;
const COUNT: u64 = (1 << COUNT_BITS) - 1;
const COUNTS: u64 = (1 << (2 * COUNT_BITS)) - 1;
const PHASE: u64 = 1 << 40;
const OPEN: u64 = 1 << 41;
/// For the owner's own use.
const LABEL_SHIFT: u32 = 42;

/// A value behind a gate.
pub(super) struct RevocableSlot<T> {
    state: AtomicU64,
    transition_lock: Mutex<()>,
    content: ContentCell<T>,
}

// SAFETY: invariant 1: the content is shared between threads, and taken out by one of them, as in a lock.
unsafe impl<T: Send + Sync> Sync for RevocableSlot<T> {}

/// Somebody inside: the content stays until this is dropped.
pub(super) struct SlotGuard<'a, T> {
    revocable_slot: &'a RevocableSlot<T>,
    content: &'a T,
    /// One, in the number that counts this one.
    increment: u64,
}

impl<T> RevocableSlot<T> {
    /// A closed gate with that label.
    pub(super) fn closed(label: u32) -> Self {
        Self {
            state: AtomicU64::new(u64::from(label) << LABEL_SHIFT),
            transition_lock: Mutex::new(()),
            content: ContentCell::empty(),
        }
    }

    /// The label (22 bits), and whether the gate is open.
    #[inline]
    pub(super) fn peek(&self) -> (u32, bool) {
        decode(self.state.load(Ordering::Acquire))
    }

    /// Goes in, if the gate is open and its label pleases `accepts`; else gives the label that was there
    /// and whether the gate was open.
    #[inline]
    pub(super) fn enter(
        &self,
        accepts: impl Fn(u32) -> bool,
    ) -> Result<SlotGuard<'_, T>, (u32, bool)> {
        // A look first, so that wrong keys do not write to a line that right ones use.
        let seen = self.state.load(Ordering::Relaxed);
        let (label, open) = decode(seen);
        if !open || !accepts(label) {
            return Err((label, open));
        }
        let increment = if seen & PHASE == 0 { 1 } else { 1 << COUNT_BITS };
        let (label, open) = decode(self.state.fetch_add(increment, Ordering::Acquire));
        if open && accepts(label) {
            // SAFETY: invariant 1: counted while open, so that no closer touches the content until the
            // count is given back, which `SlotGuard` does when it is dropped.
            if let Some(content) = unsafe { self.content.get() } {
                return Ok(SlotGuard { revocable_slot: self, content, increment });
            }
        }
        self.state.fetch_sub(increment, Ordering::Release);
        Err((label, open))
    }

    /// Puts `content` behind the gate and opens it with that label. An open gate gives the content back.
    pub(super) fn open(&self, label: u32, content: T) -> Result<(), T> {
        let _exclusive = self.transition_lock.lock();
        if self.peek().1 {
            return Err(content);
        }
        // SAFETY: invariant 1: closed, under the lock, and nobody inside since the closer waited.
        unsafe { self.content.replace(Some(content)) };
        self.set_label(label, OPEN);
        Ok(())
    }

    /// Closes the gate, waits until nobody is inside, and takes the content out. Who is inside must not
    /// call this: it would wait for itself.
    pub(super) fn close(&self, label: u32) -> Option<T> {
        let _exclusive = self.transition_lock.lock();
        self.set_label(label, 0);
        self.drain(COUNTS);
        // SAFETY: invariant 1: closed, under the lock, and nobody inside.
        unsafe { self.content.replace(None) }
    }

    /// Gives an open gate another label, and waits until those are gone who came in under the old one.
    /// Says whether the gate was open under `from`. Who is inside must not call this.
    pub(super) fn relabel_and_drain(&self, from: u32, to: u32) -> bool {
        let _exclusive = self.transition_lock.lock();
        if self.peek() != (from, true) {
            return false;
        }
        self.set_label(to, OPEN);
        // Twice: who looked at the phase just before it changed counts in the number that is not waited for.
        for _ in 0..2 {
            let before = self.state.fetch_xor(PHASE, Ordering::AcqRel);
            self.drain(if before & PHASE == 0 { COUNT } else { COUNT << COUNT_BITS });
        }
        true
    }

    /// Changes label and open bit, and leaves the rest as it is, which others change meanwhile.
    fn set_label(&self, label: u32, open: u64) {
        let bits = (u64::from(label) << LABEL_SHIFT) | open;
        let change = |state: u64| Some((state & (COUNTS | PHASE)) | bits);
        // The closure always has an answer.
        let _ = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
    }

    /// Waits until the numbers under the mask are zero.
    fn drain(&self, mask: u64) {
        let mut spins = 0;
        while self.state.load(Ordering::Acquire) & mask != 0 {
            spins += 1;
            pause(spins);
        }
    }
}

fn decode(state: u64) -> (u32, bool) {
    ((state >> LABEL_SHIFT) as u32, state & OPEN != 0)
}

impl<T> SlotGuard<'_, T> {
    /// Whether somebody has closed the gate and waits until this one leaves.
    pub(super) fn is_revoked(&self) -> bool {
        !self.revocable_slot.peek().1
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
        self.revocable_slot.state.fetch_sub(self.increment, Ordering::Release);
    }
}
