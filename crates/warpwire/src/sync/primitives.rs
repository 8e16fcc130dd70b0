//! What doors and locks are made of. `tests/doors.rs` compiles them with a model checker's parts in the place of these.
#![allow(unsafe_code)]

use std::cell::{Cell, UnsafeCell};

use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;

pub(super) use super::asymmetric_fence::{heavy, light, prepare};
pub(super) use super::backoff::pause;
pub(super) use std::sync::atomic::{AtomicU64, Ordering};

/// Who has a lock so often in a row becomes its owner: the first time, and when owners were disturbed often. Then the barrier is
/// lost in what it saved.
pub(super) const MIN_BIAS_STREAK: u32 = 64;
pub(super) const MAX_BIAS_STREAK: u32 = 4096;

/// A number of this thread's own, never zero.
#[inline]
pub(super) fn this_thread() -> u64 {
    thread_local!(static NUMBER: Cell<u64> = const { Cell::new(0) });
    #[cold]
    fn choose(number: &Cell<u64>) {
        static LAST: AtomicU64 = AtomicU64::new(0);
        number.set(LAST.fetch_add(1, Ordering::Relaxed) + 1);
    }
    NUMBER.with(|number| {
        if number.get() == 0 {
            choose(number);
        }
        number.get()
    })
}

/// A lock without a guard: whoever has it unlocks it.
pub(super) struct RawLock(RawMutex);

impl RawLock {
    pub(super) fn new() -> Self {
        Self(RawMutex::INIT)
    }

    pub(super) fn lock(&self) {
        self.0.lock();
    }

    pub(super) fn try_lock(&self) -> bool {
        self.0.try_lock()
    }

    /// # Safety
    /// The caller has it.
    pub(super) unsafe fn unlock(&self) {
        // SAFETY: the caller's promise.
        unsafe { self.0.unlock() };
    }
}

/// A value that one uses at a time: who calls says who.
pub(super) struct SyncCell<T>(UnsafeCell<T>);

impl<T> SyncCell<T> {
    pub(super) fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// # Safety
    /// Nobody changes the value while the reference lives.
    #[inline]
    pub(super) unsafe fn get(&self) -> &T {
        // SAFETY: the caller's promise.
        unsafe { &*self.0.get() }
    }

    /// # Safety
    /// Nobody else uses the value while the reference lives.
    #[inline]
    #[allow(clippy::mut_from_ref)] // as a cell's
    pub(super) unsafe fn get_mut(&self) -> &mut T {
        // SAFETY: the caller's promise.
        unsafe { &mut *self.0.get() }
    }
}
