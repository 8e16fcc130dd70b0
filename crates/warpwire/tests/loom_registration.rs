//! Access, invalidation and deregistration against each other, in every order that the memory model allows.
//!
//! The library's own gates are compiled here once more, with loom's atomics, locks and cells in the place of the real
//! ones. Loom runs each closure again and again until it has tried every interleaving.
#![allow(clippy::unwrap_used, unsafe_code, dead_code)]

mod sync {
    //! The parts of `src/mr/sync.rs`, as the model checker has them.
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering};

    pub(super) fn pause(_looks: u32) {
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
            // SAFETY: the caller's promise, which loom checks.
            self.0.with(|value| unsafe { (*value).as_ref() })
        }

        pub(super) unsafe fn replace(&self, new: Option<T>) -> Option<T> {
            // SAFETY: as above.
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

/// Memory: those inside read it, who takes it away spoils it. Loom fails when the two meet.
struct Memory(UnsafeCell<u32>);

// SAFETY: what the gate promises, and loom checks.
unsafe impl Sync for Memory {}

impl Memory {
    fn new() -> Self {
        Self(UnsafeCell::new(7))
    }

    fn touch(&self) {
        // SAFETY: nobody spoils it meanwhile, which loom checks.
        assert_eq!(self.0.with(|value| unsafe { *value }), 7);
    }

    fn poison(self) {
        // SAFETY: nobody touches it any more, which loom checks.
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

/// What a client does whose memory goes away; says whether it was the one who took it.
fn invalidate(slot: &Slot) -> bool {
    let taken = slot.invalidation.revoke(|_| slot.revocable_slot.close(GONE));
    taken.map(Memory::poison).is_some()
}

/// What the registration's owner does.
fn deregister(slot: &Slot) -> bool {
    slot.invalidation.end();
    slot.revocable_slot.close(ENDED).map(Memory::poison).is_some()
}

#[test]
fn memory_is_taken_once_and_never_under_a_user() {
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
        let ended = deregister(&slot);
        let invalidated = client.join().unwrap();
        assert!(ended != invalidated, "taken once: {ended} {invalidated}");
        user.join().unwrap();
        assert!(!access(&slot, LIVE));
    });
}

#[test]
fn after_an_invalidation_returns_nobody_gets_in() {
    loom::model(|| {
        let slot = registered();
        let clients: Vec<_> = (0..2)
            .map(|_| {
                let slot = slot.clone();
                thread::spawn(move || {
                    let took = invalidate(&slot);
                    // Whoever of the two did it: it is done when either returns.
                    assert!(!access(&slot, LIVE));
                    took
                })
            })
            .collect();
        let took: Vec<_> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        assert_ne!(took[0], took[1]);
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
        // The index is used again, with another tie.
        assert!(slot.revocable_slot.open(NEW, Memory::new()).is_ok());
        assert!(access(&slot, NEW));
        client.join().unwrap();
        assert!(access(&slot, NEW), "the newcomer was torn down");
    });
}

#[test]
fn memory_that_goes_before_its_key_is_published_gets_none() {
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
fn an_invalidated_key_lets_peers_out_before_it_says_so() {
    loom::model(|| {
        let slot = registered();
        let peer = thread::spawn({
            let slot = slot.clone();
            move || {
                access(&slot, LIVE);
            }
        });
        assert!(slot.revocable_slot.relabel_and_drain(LIVE, NEW));
        // The peer is out: what only peers touch may be changed now.
        assert!(!access(&slot, LIVE) && access(&slot, NEW));
        peer.join().unwrap();
    });
}
