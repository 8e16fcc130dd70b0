//! A biased mutex: nearly free for the one thread that takes it almost always.
//!
//! Any thread may use a queue pair, a completion queue or an engine, but usually one does. That
//! thread becomes the owner of the lock; from then on it locks by a store (its announcement) and a
//! load (whether it still owns the lock), ordered by the light side of an [asymmetric
//! fence](super::asymmetric_fence). Any other thread revokes the ownership with the heavy side and
//! waits until the owner has left. All threads then share an ordinary lock until one of them has
//! taken it often enough in a row.
#![allow(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use super::primitives::{
    AtomicU64, MAX_BIAS_STREAK, MIN_BIAS_STREAK, Ordering, RawLock, SyncCell, heavy, light, pause,
    prepare, this_thread,
};
use super::revocation;

const ENTERED: u64 = 1;
/// How many different threads may ever become owner of one lock; each keeps its slot for good.
pub(super) const OWNER_SLOTS: usize = 1 << OWNER_SLOT_BITS;
const OWNER_SLOT_BITS: u32 = 2;

pub(crate) struct BiasedMutex<T> {
    /// The owning thread's number and its slot; 0 if there is no owner. Changed only under `slow`.
    owner: AtomicU64,
    /// Whether the owner is inside. Each thread has a word of its own, for good: a preempted former
    /// owner may resume inside `enter` after the ownership moved, and must not clear the new
    /// owner's announcement.
    inside: [AtomicU64; OWNER_SLOTS],
    /// Taken by all threads but the owner.
    slow: RawLock,
    bias: SyncCell<BiasState>,
    value: SyncCell<T>,
}

/// Accounting of acquisitions through `slow`; accessed only under it.
struct BiasState {
    /// The thread that took it last, and how many times in a row.
    last: u64,
    streak: u32,
    /// The streak at which a thread becomes owner.
    needed: u32,
    /// The threads that have been owners, by slot; 0 for a free slot.
    owner_threads: [u64; OWNER_SLOTS],
}

// SAFETY: as for a mutex: one thread at a time accesses the value, and may move it out.
unsafe impl<T: Send> Send for BiasedMutex<T> {}
// SAFETY: as above. Either the owner is inside, or a thread that holds `slow`, found no owner and
// saw the former owner leave: never both, by the guarantee of `revocation`.
unsafe impl<T: Send> Sync for BiasedMutex<T> {}

impl<T> BiasedMutex<T> {
    pub(crate) fn new(value: T) -> Self {
        prepare();
        Self::with_owner_threads(value, [0; OWNER_SLOTS])
    }

    /// A lock without owners: for state that a dedicated thread and others use in turn, where every
    /// bias would be revoked soon.
    pub(crate) fn unbiased(value: T) -> Self {
        Self::with_owner_threads(value, [u64::MAX; OWNER_SLOTS])
    }

    fn with_owner_threads(value: T, owner_threads: [u64; OWNER_SLOTS]) -> Self {
        let bias = BiasState { last: 0, streak: 0, needed: MIN_BIAS_STREAK, owner_threads };
        Self {
            owner: AtomicU64::new(0),
            inside: std::array::from_fn(|_| AtomicU64::new(0)),
            slow: RawLock::new(),
            bias: SyncCell::new(bias),
            value: SyncCell::new(value),
        }
    }

    /// Takes the lock, waiting for it if necessary. Not reentrant: a thread that already holds it
    /// deadlocks.
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        match self.enter() {
            Some(inside) => Guard::owned(self, inside),
            None => self.lock_slow(),
        }
    }

    /// The value, without locking: the borrow excludes other users.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        // SAFETY: `self` is borrowed exclusively for the lifetime of the reference.
        unsafe { self.value.get_mut() }
    }

    /// Takes the lock if it is free; never waits.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        match self.enter() {
            Some(inside) => Some(Guard::owned(self, inside)),
            None => self.try_lock_slow(),
        }
    }

    /// Enters as the owner; returns the word to be cleared on leaving. `None` if this thread does
    /// not own the lock, or already holds it.
    #[inline]
    fn enter(&self) -> Option<&AtomicU64> {
        let owner = self.owner.load(Ordering::Relaxed);
        if owner >> OWNER_SLOT_BITS != this_thread() {
            return None;
        }
        let inside = self.slot(owner);
        let announce = |inside: &AtomicU64| {
            inside.store(ENTERED, Ordering::Release);
            light();
        };
        let is_outside = inside.load(Ordering::Relaxed) == 0;
        (is_outside
            && revocation::enter(inside, announce, || self.owner.load(Ordering::Acquire) == owner))
        .then_some(inside)
    }

    #[inline]
    fn slot(&self, owner: u64) -> &AtomicU64 {
        &self.inside[owner as usize % OWNER_SLOTS]
    }

    #[inline(never)]
    fn lock_slow(&self) -> Guard<'_, T> {
        loop {
            self.slow.lock();
            if let Some(guard) = self.finish_lock_slow() {
                return guard;
            }
            // `slow` is free meanwhile: the former owner may have to run on this very core in order
            // to leave.
            for inside in &self.inside {
                let mut spins = 0_u32;
                revocation::wait_for_exit(
                    inside,
                    |_| true,
                    || {
                        pause(spins);
                        spins = spins.saturating_add(1);
                        true
                    },
                );
            }
        }
    }

    #[inline(never)]
    fn try_lock_slow(&self) -> Option<Guard<'_, T>> {
        self.slow.try_lock().then(|| self.finish_lock_slow()).flatten()
    }

    /// Called with `slow` just locked; unlocks it if a former owner is still inside.
    fn finish_lock_slow(&self) -> Option<Guard<'_, T>> {
        self.revoke_bias();
        // Acquire: what former owners did inside happens before.
        if self.inside.iter().all(|inside| inside.load(Ordering::Acquire) == 0) {
            return Some(Guard::slow(self));
        }
        // SAFETY: the caller has locked it.
        unsafe { self.slow.unlock() };
        None
    }

    /// Revokes the ownership, if there is an owner; the owner may still be inside, but does not
    /// enter again. Called with `slow` held.
    fn revoke_bias(&self) {
        if self.owner.load(Ordering::Relaxed) != 0 {
            revocation::revoke(&self.owner, heavy);
            // SAFETY: `bias` is accessed only with `slow` held, here and in `unlock_slow`.
            let bias = unsafe { self.bias.get_mut() };
            bias.streak = 0;
            bias.needed = (bias.needed * 4).min(MAX_BIAS_STREAK);
        }
    }

    /// Counts an acquisition through `slow`, and releases it.
    #[inline(never)]
    fn unlock_slow(&self) {
        // SAFETY: a guard of this kind holds `slow`, and it ends here.
        unsafe {
            self.bias.get_mut().record_acquisition(&self.owner);
            self.slow.unlock();
        }
    }
}

impl<T> fmt::Debug for BiasedMutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = self.owner.load(Ordering::Relaxed) >> OWNER_SLOT_BITS;
        write!(f, "BiasedMutex(owner: {owner})")
    }
}

/// The held lock. Not `Send`. Two words, so that it stays in registers.
pub(crate) struct Guard<'a, T> {
    lock: &'a BiasedMutex<T>,
    /// The owner's announcement; `None` if the lock was taken through `slow`.
    inside: Option<&'a AtomicU64>,
    _not_send: PhantomData<*const ()>,
}

impl<'a, T> Guard<'a, T> {
    #[inline]
    fn owned(lock: &'a BiasedMutex<T>, inside: &'a AtomicU64) -> Self {
        Self { lock, inside: Some(inside), _not_send: PhantomData }
    }

    fn slow(lock: &'a BiasedMutex<T>) -> Self {
        Self { lock, inside: None, _not_send: PhantomData }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: no other guard exists while this one lives.
        unsafe { self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and this guard is borrowed exclusively.
        unsafe { self.lock.value.get_mut() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        match self.inside {
            Some(inside) => revocation::leave(inside),
            None => self.lock.unlock_slow(),
        }
    }
}

impl BiasState {
    /// Counts one acquisition; the thread becomes owner once its streak is long enough and it has,
    /// or finds, a slot.
    fn record_acquisition(&mut self, owner: &AtomicU64) {
        let me = this_thread();
        if self.last != me {
            (self.last, self.streak) = (me, 0);
        }
        self.streak = self.streak.saturating_add(1);
        if self.streak < self.needed {
            return;
        }
        let slot = self.owner_threads.iter().position(|thread| *thread == me || *thread == 0);
        if let Some(slot) = slot {
            self.owner_threads[slot] = me;
            owner.store(me << OWNER_SLOT_BITS | slot as u64, Ordering::Release);
        }
    }
}
