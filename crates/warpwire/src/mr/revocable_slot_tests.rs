//! Revocable slots under real threads. `tests/loom_registration.rs` explores all interleavings of a
//! few steps.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::revocable_slot::RevocableSlot;

#[test]
fn a_slot_opens_once_and_returns_its_content() {
    let revocable_slot = RevocableSlot::closed(3);
    assert_eq!(revocable_slot.enter(|_| true).err(), Some((3, false)));
    revocable_slot.open(4, "here").unwrap();
    assert_eq!(revocable_slot.open(5, "there"), Err("there"));
    assert_eq!(*revocable_slot.enter(|label| label == 4).ok().unwrap(), "here");
    assert_eq!(revocable_slot.enter(|label| label == 5).err(), Some((4, true)));
    assert!(revocable_slot.relabel_and_drain(4, 5) && !revocable_slot.relabel_and_drain(4, 6));
    assert_eq!(revocable_slot.close(6), Some("here"));
    assert_eq!(revocable_slot.close(7), None);
    assert_eq!(revocable_slot.peek(), (7, false));
}

#[test]
fn a_transition_changes_all_shards() {
    let revocable_slot = RevocableSlot::sharded(3, 2);
    let enter =
        |shard, wanted| revocable_slot.enter_shard(shard, |label| label == wanted).map(drop);
    for shard in 0..4 {
        assert_eq!(enter(shard, 3), Err((3, false)));
    }
    revocable_slot.open(4, "here").unwrap();
    for shard in 0..4 {
        assert_eq!((enter(shard, 4), enter(shard, 5)), (Ok(()), Err((4, true))));
    }
    assert!(revocable_slot.relabel_and_drain(4, 5));
    for shard in 0..4 {
        assert_eq!((enter(shard, 4), enter(shard, 5)), (Err((5, true)), Ok(())));
    }
    let guard = revocable_slot.enter_shard(2, |_| true).ok().unwrap();
    assert!(!guard.is_revoked());
    drop(guard);
    assert_eq!(revocable_slot.close(6), Some("here"));
    for shard in 0..4 {
        assert_eq!(enter(shard, 6), Err((6, false)));
    }
}

#[test]
fn no_guard_is_left_when_the_content_is_taken() {
    /// Set to `false` once it was taken out of the slot.
    struct Guarded(AtomicBool);
    let (revocable_slot, stop) = (RevocableSlot::sharded(0, 2), AtomicBool::new(false));
    let uses = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let (revocable_slot, stop, uses) = (&revocable_slot, &stop, &uses);
        // The last one has no shard of its own.
        for shard in 0..4 {
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    if let Ok(guard) = revocable_slot.enter_shard(shard, |_| true) {
                        let guard: &Guarded = &guard;
                        for _ in 0..10 {
                            assert!(guard.0.load(Ordering::Relaxed), "used after it was taken");
                        }
                        uses.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        for round in 0..3000 {
            let before = uses.load(Ordering::Relaxed);
            assert!(revocable_slot.open(round, Guarded(AtomicBool::new(true))).is_ok());
            // In every 16th round wait until a thread has entered; otherwise close immediately.
            while round % 16 == 0 && uses.load(Ordering::Relaxed) == before {
                std::thread::yield_now();
            }
            let taken = revocable_slot.close(round).unwrap();
            taken.0.store(false, Ordering::Relaxed);
        }
        stop.store(true, Ordering::Relaxed);
    });
}
