//! Loom model: revocation and the biased mutex built on it.
//!
//! `src/sync/revocation.rs` and `src/sync/biased.rs` are compiled here a second time, with loom's
//! primitives instead of the real ones. Loom runs each closure in every interleaving that the
//! memory model allows.
#![allow(clippy::unwrap_used, unsafe_code, dead_code)]

mod primitives {
    //! `src/sync/primitives.rs` with loom's primitives.
    use std::cell::{Cell, UnsafeCell};

    pub(super) use loom::sync::atomic::{AtomicU64, Ordering};

    pub(super) const MIN_BIAS_STREAK: u32 = 1;
    pub(super) const MAX_BIAS_STREAK: u32 = 1;

    /// Loom has no asymmetric fence (`membarrier`): here each side has a fence of its own.
    pub(super) fn light() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    pub(super) fn heavy() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    pub(super) fn prepare() {}

    pub(super) fn pause(_spins: u32) {
        loom::thread::yield_now();
    }

    loom::thread_local!(static NUMBER: Cell<u64> = Cell::new(1));

    /// Threads other than the first, which has number 1, call this before they lock.
    pub(super) fn set_this_thread(number: u64) {
        NUMBER.with(|mine| mine.set(number));
    }

    pub(super) fn this_thread() -> u64 {
        NUMBER.with(Cell::get)
    }

    type Guard<'a> = loom::sync::MutexGuard<'a, ()>;

    /// Loom's mutex without a scoped guard: the guard is stored until `unlock`.
    pub(super) struct RawLock {
        mutex: Box<loom::sync::Mutex<()>>,
        guard: UnsafeCell<Option<Guard<'static>>>,
    }

    // SAFETY: only the thread that holds the lock accesses the guard.
    unsafe impl Sync for RawLock {}
    // SAFETY: as above.
    unsafe impl Send for RawLock {}

    impl RawLock {
        pub(super) fn new() -> Self {
            Self { mutex: Box::new(loom::sync::Mutex::new(())), guard: UnsafeCell::new(None) }
        }

        fn keep(&self, guard: Guard<'_>) {
            // SAFETY: the mutex is boxed, so it does not move, and it outlives the guard beside it:
            // every test unlocks.
            let guard = unsafe { std::mem::transmute::<Guard<'_>, Guard<'static>>(guard) };
            // SAFETY: this thread holds the lock.
            unsafe { *self.guard.get() = Some(guard) };
        }

        pub(super) fn lock(&self) {
            self.keep(self.mutex.lock().unwrap());
        }

        pub(super) fn try_lock(&self) -> bool {
            self.mutex.try_lock().map(|guard| self.keep(guard)).is_ok()
        }

        pub(super) unsafe fn unlock(&self) {
            // SAFETY: the caller holds the lock.
            drop(unsafe { (*self.guard.get()).take() });
        }
    }

    pub(super) struct SyncCell<T>(loom::cell::UnsafeCell<T>);

    impl<T> SyncCell<T> {
        pub(super) fn new(value: T) -> Self {
            Self(loom::cell::UnsafeCell::new(value))
        }

        pub(super) unsafe fn get(&self) -> &T {
            // SAFETY: the caller excludes concurrent writers; loom checks that.
            self.0.with(|value| unsafe { &*value })
        }

        #[allow(clippy::mut_from_ref)]
        pub(super) unsafe fn get_mut(&self) -> &mut T {
            // SAFETY: the caller has exclusive access; loom checks that.
            self.0.with_mut(|value| unsafe { &mut *value })
        }
    }
}

#[path = "../src/sync/biased.rs"]
mod biased;
#[path = "../src/sync/revocation.rs"]
mod revocation;

use biased::BiasedMutex;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use primitives::{AtomicU64, Ordering, heavy, light, set_this_thread};
use revocation::{enter, leave, revoke, wait_for_exit};

struct Shared {
    announcement: AtomicU64,
    states: [AtomicU64; 2],
    memory: UnsafeCell<u64>,
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            announcement: AtomicU64::new(0),
            states: [AtomicU64::new(1), AtomicU64::new(1)],
            memory: UnsafeCell::new(0),
        })
    }

    fn access(&self, token: u64) {
        let announce = |announcement: &AtomicU64| {
            announcement.store(token, Ordering::Release);
            light();
        };
        let open = || self.states.iter().all(|state| state.load(Ordering::Acquire) == 1);
        if enter(&self.announcement, announce, open) {
            self.memory.with_mut(|_| ());
            leave(&self.announcement);
        }
    }
}

/// A user accesses the memory twice, while the owner revokes one of the two permissions that the
/// user needs and then accesses the memory itself. The model fails when two accesses race.
fn race(revoked: usize, waits: bool) {
    loom::model(move || {
        let shared = Shared::new();
        let theirs = shared.clone();
        let user = thread::spawn(move || (1..=2).for_each(|token| theirs.access(token)));
        revoke(&shared.states[revoked], heavy);
        if waits {
            wait_for_exit(
                &shared.announcement,
                |_| true,
                || {
                    thread::yield_now();
                    true
                },
            );
        }
        shared.memory.with_mut(|_| ());
        user.join().unwrap();
    });
}

#[test]
fn no_user_is_inside_after_revocation() {
    race(0, true);
    race(1, true);
}

/// The model detects a missing wait: user and owner then access the memory concurrently.
#[test]
#[should_panic(expected = "Causality violation")]
fn the_model_finds_an_owner_that_does_not_wait() {
    race(0, false);
}

#[test]
fn an_exited_user_is_not_waited_for() {
    loom::model(|| {
        let announcement = AtomicU64::new(9);
        let mut asked = 0;
        wait_for_exit(
            &announcement,
            |token| token == 9,
            || {
                asked += 1;
                asked < 10
            },
        );
        assert_eq!(asked, 10);
        wait_for_exit(&announcement, |_| false, || panic!("waits for an irrelevant access"));
    });
}

/// `threads` threads each take the lock `rounds` times; every acquisition makes that thread the
/// owner. The counter must not miss an increment. With three threads, loom's preemption bound of 2
/// keeps the search short; without it, it takes about a day.
fn contend(threads: u64, rounds: u64, try_only: bool) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = (threads > 2).then_some(2);
    model.check(move || {
        let lock = Arc::new(BiasedMutex::new(0_u64));
        let add = move |lock: &BiasedMutex<u64>| match try_only {
            true => lock.try_lock().map_or(0, |mut held| {
                *held += 1;
                1
            }),
            false => {
                *lock.lock() += 1;
                1
            }
        };
        let others: Vec<_> = (2..=threads)
            .map(|number| {
                let lock = lock.clone();
                thread::spawn(move || {
                    set_this_thread(number);
                    (0..rounds).map(|_| add(&lock)).sum::<u64>()
                })
            })
            .collect();
        let mine: u64 = (0..rounds).map(|_| add(&lock)).sum();
        let theirs: u64 = others.into_iter().map(|other| other.join().unwrap()).sum();
        assert_eq!(*lock.lock(), mine + theirs);
    });
}

#[test]
fn two_alternating_owners_exclude_each_other() {
    // Two rounds take seconds, so `quick` runs one.
    let rounds = testkit::Effort::choose([1, 2, 2]);
    contend(2, rounds, false);
    contend(2, rounds, true);
}

/// A preempted owner may lose the ownership while it enters, and resume after another thread has
/// become the owner. With `try_lock` only: two threads that wait would yield to each other for ever
/// in the model.
#[test]
fn three_alternating_owners_exclude_each_other() {
    contend(3, 2, true);
}
