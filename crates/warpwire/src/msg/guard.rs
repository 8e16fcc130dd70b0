//! The lock of a communicator's state.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use parking_lot::{Condvar, MutexGuard};

use super::entries::Wakers;
use super::state::State;

/// The locked state. Wakers of tasks are foreign code: waking or dropping one may drop a request,
/// which takes the lock. So they are woken, and dropped, after the lock was released.
pub(super) struct StateGuard<'a> {
    // Dropped in this order.
    guard: MutexGuard<'a, State>,
    wakers: Wakers,
}

impl<'a> StateGuard<'a> {
    pub fn new(guard: MutexGuard<'a, State>) -> Self {
        Self { guard, wakers: Wakers::default() }
    }

    /// Releases the lock while `run` runs.
    pub fn unlocked<T>(&mut self, run: impl FnOnce() -> T) -> T {
        let wakers = self.guard.entries.take_wakers();
        MutexGuard::unlocked(&mut self.guard, || {
            drop(wakers);
            run()
        })
    }

    /// Sleeps until `condition` is notified, at most for `timeout`.
    pub fn wait_for(&mut self, condition: &Condvar, timeout: Duration) {
        if self.guard.entries.has_wakers() {
            // What was notified meanwhile would be missed: the caller looks again instead.
            self.unlocked(|| ());
        } else {
            condition.wait_for(&mut self.guard, timeout);
        }
    }
}

impl Deref for StateGuard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.guard
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.guard
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        self.wakers = self.guard.entries.take_wakers();
    }
}
