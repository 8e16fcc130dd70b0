//! Gates under real threads. `tests/races.rs` tries every order of a few steps instead.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::gate::Gate;

#[test]
fn a_gate_opens_once_and_gives_its_content_back() {
    let gate = Gate::closed(3);
    assert_eq!(gate.enter(|_| true).err(), Some((3, false)));
    gate.open(4, "here").unwrap();
    assert_eq!(gate.open(5, "there"), Err("there"));
    assert_eq!(*gate.enter(|label| label == 4).ok().unwrap(), "here");
    assert_eq!(gate.enter(|label| label == 5).err(), Some((4, true)));
    assert!(gate.turn(4, 5) && !gate.turn(4, 6));
    assert_eq!(gate.close(6), Some("here"));
    assert_eq!(gate.close(7), None);
    assert_eq!(gate.peek(), (7, false));
}

#[test]
fn nobody_is_inside_when_the_content_comes_out() {
    /// Says so when it is used after it was taken.
    struct Guarded(AtomicBool);
    let (gate, stop) = (Gate::closed(0), AtomicBool::new(false));
    let uses = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    if let Ok(inside) = gate.enter(|_| true) {
                        let inside: &Guarded = &inside;
                        for _ in 0..10 {
                            assert!(inside.0.load(Ordering::Relaxed), "used after it was taken");
                        }
                        uses.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        for round in 0..3000 {
            let before = uses.load(Ordering::Relaxed);
            assert!(gate.open(round, Guarded(AtomicBool::new(true))).is_ok());
            // Now and then until somebody is in, else at once.
            while round % 16 == 0 && uses.load(Ordering::Relaxed) == before {
                std::thread::yield_now();
            }
            let taken = gate.close(round).unwrap();
            taken.0.store(false, Ordering::Relaxed);
        }
        stop.store(true, Ordering::Relaxed);
    });
}
