//! The primitives below `revocation` and `biased`. `tests/loom_sync.rs` compiles those with loom's
//! types instead of these.
#![allow(unsafe_code)]

use std::cell::{Cell, UnsafeCell};

use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;

pub(super) use super::asymmetric_fence::{heavy, light, prepare};
pub(super) use super::backoff::pause;
pub(super) use std::sync::atomic::{AtomicU64, Ordering};

/// Consecutive acquisitions that make a thread the owner of a [`BiasedMutex`](super::BiasedMutex):
/// `MIN_BIAS_STREAK` at first, up to `MAX_BIAS_STREAK` after repeated revocations, so that the
/// heavy fence of a revocation stays small beside what the bias saved.
pub(super) const MIN_BIAS_STREAK: u32 = 64;
pub(super) const MAX_BIAS_STREAK: u32 = 4096;

/// A process-wide unique number of the calling thread, never zero.
#[inline]
pub(crate) fn this_thread() -> u64 {
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

/// A lock without a guard type.
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
    /// The caller holds the lock.
    pub(super) unsafe fn unlock(&self) {
        // SAFETY: the caller holds it.
        unsafe { self.0.unlock() };
    }
}

/// Interior mutability without checks; the callers provide exclusion.
pub(super) struct SyncCell<T>(UnsafeCell<T>);

impl<T> SyncCell<T> {
    pub(super) fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// # Safety
    /// No thread changes the value while the reference lives.
    #[inline]
    pub(super) unsafe fn get(&self) -> &T {
        // SAFETY: the caller guarantees it.
        unsafe { &*self.0.get() }
    }

    /// # Safety
    /// No other reference to the value exists while this one lives.
    #[inline]
    #[allow(clippy::mut_from_ref)] // as `UnsafeCell::get`, with the contract above
    pub(super) unsafe fn get_mut(&self) -> &mut T {
        // SAFETY: the caller guarantees it.
        unsafe { &mut *self.0.get() }
    }
}
