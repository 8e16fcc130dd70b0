//! Revocation (asymmetric Dekker): takes a resource back from threads that use it without a lock. A
//! user announces itself before it checks whether the resource is open; the owner closes the
//! resource before it checks for users inside.
//!
//! The user stores a token, the owner closes the resource, and between its own store and its load
//! of the other's word each side has a fence, or an [asymmetric fence](super::asymmetric_fence)
//! serves both. So at least one side sees the other: the user finds the resource closed and leaves,
//! or the owner finds the user inside and waits until that access ends. If every access has a token
//! of its own, the owner waits for one access only: the next one finds the resource closed.
//!
//! `tests/loom_sync.rs` explores every order of loads and stores.

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

/// Enters if `is_open` holds after `announce`, which stores the token and contains the fence. The
/// store is a release: an owner that sees this access must have seen the end of the previous one.
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

/// Leaves: a release store, so everything done inside happens before the owner continues.
#[inline]
pub(crate) fn leave<W: AtomicWord>(announcement: &W) {
    announcement.store(0, Ordering::Release);
}

/// Closes the resource; `fence` orders that with announcements. The caller waits for users inside
/// afterwards ([`wait_for_exit`]).
pub(crate) fn revoke<W: AtomicWord>(state: &W, fence: impl FnOnce()) {
    state.store(0, Ordering::Release);
    fence();
}

/// Waits until the announced access ends, if there is one whose token `is_relevant`. `keep_waiting`
/// is called after each unsuccessful check and ends the wait by returning false, when the user no
/// longer exists.
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
