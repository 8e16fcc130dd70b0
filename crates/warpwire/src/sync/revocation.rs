//! How something is taken back from those who use it without asking: the visitor says that it goes in before it looks
//! whether it may, and the owner shuts before it looks whether somebody is inside.
//!
//! The visitor stores the name of its visit, the owner shuts what it takes back, and between its own store and its look at the
//! other's word each has a fence, or one of them a [barrier](super::barrier) for both. So at least one of the two sees the other: the
//! visitor finds it shut and goes, or the owner finds it inside and waits until that visit is over. An owner
//! waits for one visit only, as far as visits have names of their own: the next one finds it shut.
//!
//! `tests/doors.rs` tries every order of loads and stores.

use super::primitives::{AtomicU64, Ordering};

/// A word that both sides share.
pub(crate) trait AtomicWord {
    fn load(&self, ordering: Ordering) -> u64;
    fn store(&self, value: u64, ordering: Ordering);
}

impl AtomicWord for AtomicU64 {
    #[inline]
    fn load(&self, ordering: Ordering) -> u64 {
        AtomicU64::load(self, ordering)
    }

    #[inline]
    fn store(&self, value: u64, ordering: Ordering) {
        AtomicU64::store(self, value, ordering);
    }
}

/// Goes in, if `is_open` says so after `announce`, which stores the name of the visit and has the fence: a store that
/// releases, as an owner that sees this visit must have seen the end of the one before.
#[inline]
pub(crate) fn enter<W: AtomicWord>(
    announcement: &W,
    announce: impl FnOnce(&W),
    is_open: impl FnOnce() -> bool,
) -> bool {
    announce(announcement);
    if is_open() {
        return true;
    }
    announcement.store(0, Ordering::Release);
    false
}

/// Goes out: everything that was done inside is done.
#[inline]
pub(crate) fn leave<W: AtomicWord>(announcement: &W) {
    announcement.store(0, Ordering::Release);
}

/// Shuts; `fence` orders that with what visitors announce. Whoever is inside is waited for afterwards.
pub(crate) fn revoke<W: AtomicWord>(state: &W, fence: impl FnOnce()) {
    state.store(0, Ordering::Release);
    fence();
}

/// Waits until the visit is over, if there is one that `is_relevant` us. `keep_waiting` is asked each time that it is not,
/// and ends the wait when the visitor is no more.
pub(crate) fn wait_for_exit<W: AtomicWord>(
    announcement: &W,
    is_relevant: impl FnOnce(u64) -> bool,
    mut keep_waiting: impl FnMut() -> bool,
) {
    let token = announcement.load(Ordering::Acquire);
    if token == 0 || !is_relevant(token) {
        return;
    }
    while announcement.load(Ordering::Acquire) == token && keep_waiting() {}
}
