//! How memory is taken back from a process that reaches it by itself: the visitor says where it goes before it looks
//! whether it may, and the owner shuts before it looks whether somebody is inside.
//!
//! The visitor stores the name of what it enters, the owner shuts what it takes back, and between its own store and its look at the
//! other's word each has a fence that all fences are ordered with. So at least one of the two sees the other: the
//! visitor finds it shut and goes, or the owner finds it inside and waits until that visit is over. A visit has a number, so that an owner
//! waits for one visit only: the next one finds it shut.
//!
//! The functions are the same for the model in the tests below, which tries every order of loads and stores.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A word that two processes share.
pub(super) trait Word {
    fn load(&self, ordering: Ordering) -> u64;
    fn store(&self, value: u64, ordering: Ordering);
    /// A fence of the strongest sort.
    fn fence();
    /// Stores the name of a visit, with that fence behind it: loads that follow, of the strongest ordering too, are
    /// ordered with the fences of others.
    fn announce(&self, visit: u64);
}

impl Word for AtomicU64 {
    #[inline]
    fn load(&self, ordering: Ordering) -> u64 {
        AtomicU64::load(self, ordering)
    }

    #[inline]
    fn store(&self, value: u64, ordering: Ordering) {
        AtomicU64::store(self, value, ordering);
    }

    #[inline]
    fn fence() {
        fence(Ordering::SeqCst);
    }

    #[inline]
    fn announce(&self, visit: u64) {
        // Between the fence of the owner and loads of this ordering that follow, such a store is as good as a fence, and
        // costs half as much.
        AtomicU64::store(self, visit, Ordering::SeqCst);
    }
}

/// So many bits name a row of the table.
pub(super) const ROW_BITS: u32 = 17;
const ROW: u64 = (1 << ROW_BITS) - 1;
const INSIDE: u64 = 1 << 63;

/// The name of a visit that needs two rows, with its number.
#[inline]
pub(super) fn name(number: u64, rows: [u32; 2]) -> u64 {
    let [first, second] = rows.map(|row| u64::from(row) & ROW);
    INSIDE | (number << (2 * ROW_BITS)) & !INSIDE | first << ROW_BITS | second
}

/// Whether a visit needs that row.
fn needs(visit: u64, row: u32) -> bool {
    let row = u64::from(row);
    visit & INSIDE != 0 && (visit & ROW == row || visit >> ROW_BITS & ROW == row)
}

/// Goes in, if `is_open` says so; it must look with loads of the strongest ordering.
#[inline]
pub(super) fn enter<W: Word>(visitor: &W, visit: u64, is_open: impl FnOnce() -> bool) -> bool {
    // An owner that sees this visit has seen the end of the one before.
    visitor.announce(visit);
    if is_open() {
        return true;
    }
    visitor.store(0, Ordering::Release);
    false
}

/// Goes out: everything that was done inside is done.
#[inline]
pub(super) fn leave<W: Word>(visitor: &W) {
    visitor.store(0, Ordering::Release);
}

/// Shuts a row; whoever is inside is waited for afterwards.
pub(super) fn shut<W: Word>(state: &W) {
    state.store(0, Ordering::Release);
    W::fence();
}

/// Waits until the visit is over that needs this row, if one does. `keeps_waiting` is asked each time that it is not,
/// and ends the wait when the visitor is no more.
pub(super) fn wait_out<W: Word>(visitor: &W, row: u32, mut keeps_waiting: impl FnMut() -> bool) {
    let visit = visitor.load(Ordering::Acquire);
    if !needs(visit, row) {
        return;
    }
    while visitor.load(Ordering::Acquire) == visit && keeps_waiting() {}
}

#[cfg(test)]
mod tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic as model;
    use loom::thread;

    use super::*;

    impl Word for model::AtomicU64 {
        fn load(&self, ordering: Ordering) -> u64 {
            model::AtomicU64::load(self, ordering)
        }

        fn store(&self, value: u64, ordering: Ordering) {
            model::AtomicU64::store(self, value, ordering);
        }

        fn fence() {
            model::fence(Ordering::SeqCst);
        }

        // The model takes accesses of the strongest ordering for weaker ones than they are.
        fn announce(&self, visit: u64) {
            model::AtomicU64::store(self, visit, Ordering::Release);
            Self::fence();
        }
    }

    const ROWS: [u32; 2] = [3, 70_000];

    struct Shared {
        visitor: model::AtomicU64,
        states: [model::AtomicU64; 2],
        memory: UnsafeCell<u64>,
    }

    /// A visitor comes twice, while the owner takes one of the two rows back and then has the memory for itself. The
    /// model fails when both are at the memory at once, or when one does not see what the other did before.
    fn race(taken_back: usize) {
        loom::model(move || {
            let shared = Arc::new(Shared {
                visitor: model::AtomicU64::new(0),
                states: [model::AtomicU64::new(1), model::AtomicU64::new(1)],
                memory: UnsafeCell::new(0),
            });
            let visits = {
                let shared = shared.clone();
                thread::spawn(move || {
                    for number in 1..=2 {
                        let open =
                            || shared.states.iter().all(|state| state.load(Ordering::Acquire) == 1);
                        if enter(&shared.visitor, name(number, ROWS), open) {
                            shared.memory.with_mut(|_| ());
                            leave(&shared.visitor);
                        }
                    }
                })
            };
            shut(&shared.states[taken_back]);
            wait_out(&shared.visitor, ROWS[taken_back], || {
                thread::yield_now();
                true
            });
            shared.memory.with_mut(|_| ());
            visits.join().unwrap();
        });
    }

    #[test]
    fn nobody_is_inside_what_was_taken_back_in_any_order_of_events() {
        race(0);
        race(1);
    }

    /// The model sees what is missing: without waiting, both are at the memory.
    #[test]
    #[should_panic(expected = "Causality violation")]
    fn the_model_finds_an_owner_that_does_not_wait() {
        loom::model(|| {
            let shared = Arc::new((
                model::AtomicU64::new(0),
                model::AtomicU64::new(1),
                UnsafeCell::new(0_u64),
            ));
            let visits = {
                let shared = shared.clone();
                thread::spawn(move || {
                    let open = || shared.1.load(Ordering::Acquire) == 1;
                    if enter(&shared.0, name(1, ROWS), open) {
                        shared.2.with_mut(|_| ());
                        leave(&shared.0);
                    }
                })
            };
            shut(&shared.1);
            shared.2.with_mut(|_| ());
            visits.join().unwrap();
        });
    }

    #[test]
    fn a_visit_needs_its_rows_and_no_other() {
        for number in [0, 1, u64::MAX] {
            let visit = name(number, ROWS);
            assert!(needs(visit, 3) && needs(visit, 70_000));
            assert!(!needs(visit, 0) && !needs(visit, 4) && !needs(0, 0));
        }
        assert_ne!(name(1, ROWS), name(2, ROWS));
    }

    #[test]
    fn who_is_no_more_is_not_waited_for() {
        let visitor = AtomicU64::new(name(9, ROWS));
        let mut asked = 0;
        wait_out(&visitor, 3, || {
            asked += 1;
            asked < 10
        });
        assert_eq!(asked, 10);
        wait_out(&visitor, 5, || panic!("nobody is there"));
    }
}
