//! A lock that costs next to nothing to the thread that has it nearly always.
//!
//! A queue pair, a completion queue, an engine: any thread may use them, and mostly one does. Such a thread becomes the
//! lock's owner, and from then on it says that it is inside and looks whether it still owns it, by a store and a load.
//! Whoever else comes takes that back by a [barrier](super::barrier), waits until the owner is outside, and from then on all share
//! an ordinary lock, until one of them has had it often enough in a row.
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
/// So many threads may be a lock's owner, one after another, again and again.
pub(super) const OWNER_SLOTS: usize = 1 << OWNER_SLOT_BITS;
const OWNER_SLOT_BITS: u32 = 2;

/// See the module.
pub(crate) struct BiasedMutex<T> {
    /// The thread that needs no lock, with its seat; 0 if there is none. Changed under `slow` only.
    owner: AtomicU64,
    /// Whether the owner is inside. Each thread has a word of its own, for good: one that was owner may wake up in the middle of
    /// coming in, when another has long been owner, and must not unsay what that one says.
    inside: [AtomicU64; OWNER_SLOTS],
    /// For everybody else.
    slow: RawLock,
    bias: SyncCell<BiasState>,
    value: SyncCell<T>,
}

/// Who has the lock when nobody owns it.
struct BiasState {
    /// Who had it last, and how often in a row.
    last: u64,
    streak: u32,
    /// The streak that makes an owner.
    needed: u32,
    /// The threads that have been owners, each in its seat.
    owner_threads: [u64; OWNER_SLOTS],
}

// SAFETY: as for a mutex: one thread at a time gets at the value, and may take it away.
unsafe impl<T: Send> Send for BiasedMutex<T> {}
// SAFETY: as above. The owner is inside, or another that holds `slow`, has found no owner and waited for the former
// one's leaving: never both, by what `revocation` promises.
unsafe impl<T: Send> Sync for BiasedMutex<T> {}

impl<T> BiasedMutex<T> {
    pub(crate) fn new(value: T) -> Self {
        prepare();
        Self::with_owner_threads(value, [0; OWNER_SLOTS])
    }

    /// A lock that nobody ever owns: for what a thread of its own uses all the time, which others disturb all the time.
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

    /// Takes the lock, waiting for it if need be. Whoever has it already waits for ever.
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        match self.enter() {
            Some(inside) => Guard::owned(self, inside),
            None => self.lock_slow(),
        }
    }

    /// The value, of a lock that nobody else can have.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        // SAFETY: this is borrowed for as long.
        unsafe { self.value.get_mut() }
    }

    /// Takes the lock if nobody has it.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        match self.enter() {
            Some(inside) => Some(Guard::owned(self, inside)),
            None => self.try_lock_slow(),
        }
    }

    /// Goes in as its owner; returns the word that says so.
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
            // Nobody is kept out meanwhile: least of all the former owner, who may have to run on this very core to leave.
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

    /// To be called by who has just locked `slow`; unlocks it if the former owner is still inside.
    fn finish_lock_slow(&self) -> Option<Guard<'_, T>> {
        self.revoke_bias();
        // Acquire: what former owners did inside is done.
        if self.inside.iter().all(|inside| inside.load(Ordering::Acquire) == 0) {
            return Some(Guard::slow(self));
        }
        // SAFETY: the caller has locked it.
        unsafe { self.slow.unlock() };
        None
    }

    /// Takes the lock back from its owner, if it has one: it may still be inside, and does not come again. To be called by who
    /// has `slow`.
    fn revoke_bias(&self) {
        if self.owner.load(Ordering::Relaxed) != 0 {
            revocation::revoke(&self.owner, heavy);
            // SAFETY: of those who have `slow`, here and in `unlock_slow`, there is one at a time.
            let bias = unsafe { self.bias.get_mut() };
            bias.streak = 0;
            bias.needed = (bias.needed * 4).min(MAX_BIAS_STREAK);
        }
    }

    /// Counts a turn that was shared, and ends it.
    #[inline(never)]
    fn unlock_slow(&self) {
        // SAFETY: a guard of this sort has `slow`, and as it ends here, nobody has the lock by it any more.
        unsafe {
            self.bias.get_mut().record_acquisition(&self.owner);
            self.slow.unlock();
        }
    }
}

impl<T> fmt::Debug for BiasedMutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Biased(owner: {})", self.owner.load(Ordering::Relaxed) >> OWNER_SLOT_BITS)
    }
}

/// The lock, held; by one thread, which cannot hand it on. Two words, so that it stays in registers.
pub(crate) struct Guard<'a, T> {
    lock: &'a BiasedMutex<T>,
    /// The owner's word; none where the lock is shared.
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
        // SAFETY: nobody else has a guard while this one lives.
        unsafe { self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and this one is borrowed for as long.
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
    /// One more turn; makes whoever came often enough the owner.
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
