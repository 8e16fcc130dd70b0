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

use super::door;
use super::parts::{
    AtomicU64, Content, FIRST_STREAK, LONGEST_STREAK, Lock, Ordering, heavy, light, pause, prepare,
    this_thread,
};

const INSIDE: u64 = 1;
/// So many threads may be a lock's owner, one after another, again and again.
pub(super) const SEATS: usize = 1 << SEAT_BITS;
const SEAT_BITS: u32 = 2;

/// See the module.
pub(crate) struct Biased<T> {
    /// The thread that needs no lock, with its seat; 0 if there is none. Changed under `shared` only.
    owner: AtomicU64,
    /// Whether the owner is inside. Each thread has a word of its own, for good: one that was owner may wake up in the middle of
    /// coming in, when another has long been owner, and must not unsay what that one says.
    inside: [AtomicU64; SEATS],
    /// For everybody else.
    shared: Lock,
    turns: Content<Turns>,
    value: Content<T>,
}

/// Who has the lock when nobody owns it.
struct Turns {
    /// Who had it last, and how often in a row.
    last: u64,
    streak: u32,
    /// The streak that makes an owner.
    needed: u32,
    /// The threads that have been owners, each in its seat.
    seats: [u64; SEATS],
}

// SAFETY: as for a mutex: one thread at a time gets at the value, and may take it away.
unsafe impl<T: Send> Send for Biased<T> {}
// SAFETY: as above. The owner is inside, or another that holds `shared`, has found no owner and waited for the former
// one's leaving: never both, by what `door` promises.
unsafe impl<T: Send> Sync for Biased<T> {}

impl<T> Biased<T> {
    pub(crate) fn new(value: T) -> Self {
        prepare();
        Self::with_seats(value, [0; SEATS])
    }

    /// A lock that nobody ever owns: for what a thread of its own uses all the time, which others disturb all the time.
    pub(crate) fn unowned(value: T) -> Self {
        Self::with_seats(value, [u64::MAX; SEATS])
    }

    fn with_seats(value: T, seats: [u64; SEATS]) -> Self {
        let turns = Turns { last: 0, streak: 0, needed: FIRST_STREAK, seats };
        Self {
            owner: AtomicU64::new(0),
            inside: std::array::from_fn(|_| AtomicU64::new(0)),
            shared: Lock::new(),
            turns: Content::new(turns),
            value: Content::new(value),
        }
    }

    /// Takes the lock, waiting for it if need be. Whoever has it already waits for ever.
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        match self.enter() {
            Some(inside) => Guard::owned(self, inside),
            None => self.share(),
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
            None => self.try_share(),
        }
    }

    /// Goes in as its owner; returns the word that says so.
    #[inline]
    fn enter(&self) -> Option<&AtomicU64> {
        let owner = self.owner.load(Ordering::Relaxed);
        if owner >> SEAT_BITS != this_thread() {
            return None;
        }
        let inside = self.seat(owner);
        let announce = |inside: &AtomicU64| {
            inside.store(INSIDE, Ordering::Release);
            light();
        };
        let is_outside = inside.load(Ordering::Relaxed) == 0;
        (is_outside
            && door::enter(inside, announce, || self.owner.load(Ordering::Acquire) == owner))
        .then_some(inside)
    }

    #[inline]
    fn seat(&self, owner: u64) -> &AtomicU64 {
        &self.inside[owner as usize % SEATS]
    }

    #[inline(never)]
    fn share(&self) -> Guard<'_, T> {
        loop {
            self.shared.lock();
            if let Some(guard) = self.finish_sharing() {
                return guard;
            }
            // Nobody is kept out meanwhile: least of all the former owner, who may have to run on this very core to leave.
            for inside in &self.inside {
                let mut looks = 0_u32;
                door::wait_out(
                    inside,
                    |_| true,
                    || {
                        pause(looks);
                        looks = looks.saturating_add(1);
                        true
                    },
                );
            }
        }
    }

    #[inline(never)]
    fn try_share(&self) -> Option<Guard<'_, T>> {
        self.shared.try_lock().then(|| self.finish_sharing()).flatten()
    }

    /// To be called by who has just locked `shared`; unlocks it if the former owner is still inside.
    fn finish_sharing(&self) -> Option<Guard<'_, T>> {
        self.disown();
        // Acquire: what former owners did inside is done.
        if self.inside.iter().all(|inside| inside.load(Ordering::Acquire) == 0) {
            return Some(Guard::shared(self));
        }
        // SAFETY: the caller has locked it.
        unsafe { self.shared.unlock() };
        None
    }

    /// Takes the lock back from its owner, if it has one: it may still be inside, and does not come again. To be called by who
    /// has `shared`.
    fn disown(&self) {
        if self.owner.load(Ordering::Relaxed) != 0 {
            door::shut(&self.owner, heavy);
            // SAFETY: of those who have `shared`, here and in `unshare`, there is one at a time.
            let turns = unsafe { self.turns.get_mut() };
            turns.streak = 0;
            turns.needed = (turns.needed * 4).min(LONGEST_STREAK);
        }
    }

    /// Counts a turn that was shared, and ends it.
    #[inline(never)]
    fn unshare(&self) {
        // SAFETY: a guard of this sort has `shared`, and as it ends here, nobody has the lock by it any more.
        unsafe {
            self.turns.get_mut().count(&self.owner);
            self.shared.unlock();
        }
    }
}

impl<T> fmt::Debug for Biased<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Biased(owner: {})", self.owner.load(Ordering::Relaxed) >> SEAT_BITS)
    }
}

/// The lock, held; by one thread, which cannot hand it on. Two words, so that it stays in registers.
pub(crate) struct Guard<'a, T> {
    lock: &'a Biased<T>,
    /// The owner's word; none where the lock is shared.
    inside: Option<&'a AtomicU64>,
    _of_this_thread: PhantomData<*const ()>,
}

impl<'a, T> Guard<'a, T> {
    #[inline]
    fn owned(lock: &'a Biased<T>, inside: &'a AtomicU64) -> Self {
        Self { lock, inside: Some(inside), _of_this_thread: PhantomData }
    }

    fn shared(lock: &'a Biased<T>) -> Self {
        Self { lock, inside: None, _of_this_thread: PhantomData }
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
            Some(inside) => door::leave(inside),
            None => self.lock.unshare(),
        }
    }
}

impl Turns {
    /// One more turn; makes whoever came often enough the owner.
    fn count(&mut self, owner: &AtomicU64) {
        let me = this_thread();
        if self.last != me {
            (self.last, self.streak) = (me, 0);
        }
        self.streak = self.streak.saturating_add(1);
        if self.streak < self.needed {
            return;
        }
        let seat = self.seats.iter().position(|thread| *thread == me || *thread == 0);
        if let Some(seat) = seat {
            self.seats[seat] = me;
            owner.store(me << SEAT_BITS | seat as u64, Ordering::Release);
        }
    }
}
