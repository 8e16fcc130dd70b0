//! Loom model: access, invalidation and deregistration of a memory region, concurrently.
//!
//! The library's `RevocableSlot` and `InvalidationLink` are compiled here a second time, with
//! loom's atomics, locks and cells instead of the real ones. Loom runs each closure in every
//! interleaving that the memory model allows.
#![allow(clippy::unwrap_used, unsafe_code, dead_code)]

mod sync {
    //! `src/mr/sync.rs` with loom's primitives.
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering};

    pub(super) fn pause(_spins: u32) {
        loom::thread::yield_now();
    }

    pub(super) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(super) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(super) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }
    }

    pub(super) struct ContentCell<T>(loom::cell::UnsafeCell<Option<T>>);

    impl<T> ContentCell<T> {
        pub(super) fn empty() -> Self {
            Self(loom::cell::UnsafeCell::new(None))
        }

        pub(super) unsafe fn get(&self) -> Option<&T> {
            // SAFETY: the caller excludes concurrent writers; loom checks that.
            self.0.with(|value| unsafe { (*value).as_ref() })
        }

        pub(super) unsafe fn replace(&self, new: Option<T>) -> Option<T> {
            // SAFETY: the caller has exclusive access; loom checks that.
            self.0.with_mut(|value| unsafe { std::mem::replace(&mut *value, new) })
        }
    }
}

#[path = "../src/mr/invalidation.rs"]
mod invalidation;
#[path = "../src/mr/revocable_slot.rs"]
mod revocable_slot;

use invalidation::InvalidationLink;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use revocable_slot::RevocableSlot;

const LIVE: u32 = 1;
const GONE: u32 = 2;
const ENDED: u32 = 3;
const NEW: u32 = 4;

/// Memory that users inside the slot read, and that the thread which removes it overwrites. Loom
/// fails the test when the two accesses race.
struct Memory(UnsafeCell<u32>);

// SAFETY: the slot orders all accesses; loom checks that.
unsafe impl Sync for Memory {}

impl Memory {
    fn new() -> Self {
        Self(UnsafeCell::new(7))
    }

    fn touch(&self) {
        // SAFETY: no thread overwrites it during an access; loom checks that.
        assert_eq!(self.0.with(|value| unsafe { *value }), 7);
    }

    fn poison(self) {
        // SAFETY: it was removed from the slot, so no access is left; loom checks that.
        self.0.with_mut(|value| unsafe { *value = 0 });
    }
}

struct Slot {
    revocable_slot: RevocableSlot<Memory>,
    invalidation: InvalidationLink,
}

fn registered() -> Arc<Slot> {
    let slot =
        Slot { revocable_slot: RevocableSlot::closed(0), invalidation: InvalidationLink::new() };
    let publish = || slot.revocable_slot.open(LIVE, Memory::new()).map(|()| LIVE).map_err(|_| ());
    assert_eq!(slot.invalidation.bind(publish), Some(Ok(LIVE)));
    Arc::new(slot)
}

fn access(slot: &Slot, label: u32) -> bool {
    match slot.revocable_slot.enter(|seen| seen == label) {
        Ok(inside) => {
            inside.touch();
            true
        }
        Err(_) => false,
    }
}

/// A memory client invalidates its memory. Returns whether this call removed the memory.
fn invalidate(slot: &Slot) -> bool {
    let taken = slot.invalidation.revoke(|_| slot.revocable_slot.close(GONE));
    taken.map(Memory::poison).is_some()
}

/// The owner deregisters. Returns whether this call removed the memory.
fn deregister(slot: &Slot) -> bool {
    slot.invalidation.end();
    slot.revocable_slot.close(ENDED).map(Memory::poison).is_some()
}

#[test]
fn memory_is_removed_once_and_never_during_an_access() {
    loom::model(|| {
        let slot = registered();
        let user = thread::spawn({
            let slot = slot.clone();
            move || {
                access(&slot, LIVE);
            }
        });
        let client = thread::spawn({
            let slot = slot.clone();
            move || invalidate(&slot)
        });
        let deregistered = deregister(&slot);
        let invalidated = client.join().unwrap();
        assert!(deregistered != invalidated, "removed exactly once");
        user.join().unwrap();
        assert!(!access(&slot, LIVE));
    });
}

/// Users of two engines, and a thread that removes the memory.
#[test]
fn memory_is_never_removed_during_an_access_in_any_shard() {
    loom::model(|| {
        let slot = Arc::new(RevocableSlot::sharded(0, 1));
        assert!(slot.open(LIVE, Memory::new()).is_ok());
        let touch = |slot: &RevocableSlot<Memory>, shard| {
            slot.enter_shard(shard, |label| label == LIVE).map(|inside| inside.touch()).is_ok()
        };
        let user = thread::spawn({
            let slot = slot.clone();
            move || {
                touch(&slot, 1);
            }
        });
        let other = thread::spawn({
            let slot = slot.clone();
            move || {
                touch(&slot, 0);
            }
        });
        slot.close(ENDED).map(Memory::poison).unwrap();
        assert!(!touch(&slot, 0) && !touch(&slot, 1));
        user.join().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn after_an_invalidation_no_access_succeeds() {
    loom::model(|| {
        let slot = registered();
        let clients: Vec<_> = (0..2)
            .map(|_| {
                let slot = slot.clone();
                thread::spawn(move || {
                    let removed = invalidate(&slot);
                    // Whichever client removed it, the removal is complete when either returns.
                    assert!(!access(&slot, LIVE));
                    removed
                })
            })
            .collect();
        let removed: Vec<_> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        assert_ne!(removed[0], removed[1]);
        assert!(!deregister(&slot));
    });
}

#[test]
fn a_late_invalidation_never_hits_the_next_owner_of_the_slot() {
    loom::model(|| {
        let slot = registered();
        let client = thread::spawn({
            let slot = slot.clone();
            move || invalidate(&slot)
        });
        deregister(&slot);
        // The slot is reused, with another invalidation link.
        assert!(slot.revocable_slot.open(NEW, Memory::new()).is_ok());
        assert!(access(&slot, NEW));
        client.join().unwrap();
        assert!(access(&slot, NEW), "the slot's next owner lost its memory");
    });
}

#[test]
fn memory_invalidated_before_its_key_is_published_gets_no_key() {
    loom::model(|| {
        let slot = Arc::new(Slot {
            revocable_slot: RevocableSlot::closed(0),
            invalidation: InvalidationLink::new(),
        });
        let client = thread::spawn({
            let slot = slot.clone();
            move || invalidate(&slot)
        });
        let publish =
            || slot.revocable_slot.open(LIVE, Memory::new()).map(|()| LIVE).map_err(|_| ());
        let bound = slot.invalidation.bind(publish).is_some();
        let taken = client.join().unwrap();
        assert_eq!(bound, taken);
        assert!(!access(&slot, LIVE));
    });
}

#[test]
fn relabelling_returns_after_the_last_access_by_a_peer() {
    loom::model(|| {
        let slot = registered();
        let peer = thread::spawn({
            let slot = slot.clone();
            move || {
                access(&slot, LIVE);
            }
        });
        assert!(slot.revocable_slot.relabel_and_drain(LIVE, NEW));
        // Peers have left: state that only peers access may be changed now.
        assert!(!access(&slot, LIVE) && access(&slot, NEW));
        peer.join().unwrap();
    });
}
