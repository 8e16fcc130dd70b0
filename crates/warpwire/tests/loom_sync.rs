//! How things are taken back from those who use them without asking, in every order that the memory model allows.
//!
//! The library's own doors, and the lock that stands on them, are compiled here once more, with loom's parts in the place of the real
//! ones. Loom runs each closure again and again until it has tried every interleaving.
#![allow(clippy::unwrap_used, unsafe_code, dead_code)]

mod primitives {
    //! The parts of `src/sync/primitives.rs`, as the model checker has them.
    use std::cell::{Cell, UnsafeCell};

    pub(super) use loom::sync::atomic::{AtomicU64, Ordering};

    pub(super) const MIN_BIAS_STREAK: u32 = 1;
    pub(super) const MAX_BIAS_STREAK: u32 = 1;

    /// The model knows no barrier that one side raises for both: here each has a fence.
    pub(super) fn light() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    pub(super) fn heavy() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    pub(super) fn prepare() {}

    pub(super) fn pause(_looks: u32) {
        loom::thread::yield_now();
    }

    loom::thread_local!(static NUMBER: Cell<u64> = Cell::new(1));

    /// The threads of a test choose their numbers; the first has 1.
    pub(super) fn call_this_thread(number: u64) {
        NUMBER.with(|mine| mine.set(number));
    }

    pub(super) fn this_thread() -> u64 {
        NUMBER.with(Cell::get)
    }

    type Guard<'a> = loom::sync::MutexGuard<'a, ()>;

    /// Loom's lock, with its guard put aside for whoever unlocks.
    pub(super) struct RawLock {
        mutex: Box<loom::sync::Mutex<()>>,
        guard: UnsafeCell<Option<Guard<'static>>>,
    }

    // SAFETY: the guard is touched by who has the lock.
    unsafe impl Sync for RawLock {}
    // SAFETY: as above.
    unsafe impl Send for RawLock {}

    impl RawLock {
        pub(super) fn new() -> Self {
            Self { mutex: Box::new(loom::sync::Mutex::new(())), guard: UnsafeCell::new(None) }
        }

        fn keep(&self, guard: Guard<'_>) {
            // SAFETY: the mutex stays where it is, and outlives what is kept beside it: each test unlocks.
            let guard = unsafe { std::mem::transmute::<Guard<'_>, Guard<'static>>(guard) };
            // SAFETY: who has the lock touches it.
            unsafe { *self.guard.get() = Some(guard) };
        }

        pub(super) fn lock(&self) {
            self.keep(self.mutex.lock().unwrap());
        }

        pub(super) fn try_lock(&self) -> bool {
            self.mutex.try_lock().map(|guard| self.keep(guard)).is_ok()
        }

        pub(super) unsafe fn unlock(&self) {
            // SAFETY: the caller has the lock.
            drop(unsafe { (*self.guard.get()).take() });
        }
    }

    pub(super) struct SyncCell<T>(loom::cell::UnsafeCell<T>);

    impl<T> SyncCell<T> {
        pub(super) fn new(value: T) -> Self {
            Self(loom::cell::UnsafeCell::new(value))
        }

        pub(super) unsafe fn get(&self) -> &T {
            // SAFETY: the caller's promise, which loom checks.
            self.0.with(|value| unsafe { &*value })
        }

        #[allow(clippy::mut_from_ref)]
        pub(super) unsafe fn get_mut(&self) -> &mut T {
            // SAFETY: as above.
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
use primitives::{AtomicU64, Ordering, call_this_thread, heavy, light};
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

    fn visit(&self, number: u64) {
        let announce = |announcement: &AtomicU64| {
            announcement.store(number, Ordering::Release);
            light();
        };
        let open = || self.states.iter().all(|state| state.load(Ordering::Acquire) == 1);
        if enter(&self.announcement, announce, open) {
            self.memory.with_mut(|_| ());
            leave(&self.announcement);
        }
    }
}

/// A visitor comes twice, while the owner takes one of two things back that it needs, and then has the memory for itself. The
/// model fails when both are at the memory at once, or when one does not see what the other did before.
fn race(revoked: usize, waits: bool) {
    loom::model(move || {
        let shared = Shared::new();
        let theirs = shared.clone();
        let visits = thread::spawn(move || (1..=2).for_each(|number| theirs.visit(number)));
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
        visits.join().unwrap();
    });
}

#[test]
fn nobody_is_inside_what_was_taken_back_in_any_order_of_events() {
    race(0, true);
    race(1, true);
}

/// The model sees what is missing: without waiting, both are at the memory.
#[test]
#[should_panic(expected = "Causality violation")]
fn the_model_finds_an_owner_that_does_not_wait() {
    race(0, false);
}

#[test]
fn who_is_no_more_is_not_waited_for() {
    loom::model(|| {
        let announcement = AtomicU64::new(9);
        let mut asked = 0;
        wait_for_exit(
            &announcement,
            |visit| visit == 9,
            || {
                asked += 1;
                asked < 10
            },
        );
        assert_eq!(asked, 10);
        wait_for_exit(&announcement, |_| false, || panic!("nobody is there"));
    });
}

/// So many threads each come so often to a lock that makes whoever came last its owner; each finds it as the one before left
/// it. Loom's own bound on how often threads are interrupted keeps three of them from taking a day.
fn contend(threads: u64, rounds: u64, tries: bool) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = (threads > 2).then_some(2);
    model.check(move || {
        let lock = Arc::new(BiasedMutex::new(0_u64));
        let add = move |lock: &BiasedMutex<u64>| match tries {
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
                    call_this_thread(number);
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
fn two_that_own_a_lock_in_turn_never_meet() {
    // The second time in some seconds: not in the inner loop.
    let times = testkit::Effort::choose([1, 2, 2]);
    contend(2, times, false);
    contend(2, times, true);
}

/// One may lose the lock in the middle of coming in, and wake up when another has become its owner. (They do not wait: two that do
/// take turns at that for ever in the model.)
#[test]
fn three_that_own_a_lock_in_turn_never_meet() {
    contend(3, 2, true);
}
