//! The link between a client's memory and its registration. It is severed exactly once, by the
//! client's invalidation or by deregistration, whichever comes first.

use super::sync::Mutex;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// The registration is being set up.
    Pending,
    /// The registration is live under this key.
    Live(u32),
    /// The memory was taken back, or the registration has ended.
    Revoked,
}

pub(super) struct InvalidationLink(Mutex<State>);

impl InvalidationLink {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State::Pending))
    }

    /// Runs `publish`, which assigns the key. Returns `None` without running it if the memory has
    /// been revoked.
    pub(super) fn bind<E>(
        &self,
        publish: impl FnOnce() -> Result<u32, E>,
    ) -> Option<Result<u32, E>> {
        let mut state = self.0.lock();
        if *state != State::Pending {
            return None;
        }
        let key = publish();
        if let Ok(key) = key {
            *state = State::Live(key);
        }
        Some(key)
    }

    /// Runs `rekey`, which moves the registration to another key, and returns that. Returns `None`
    /// without running it if the memory has been revoked.
    pub(super) fn rebind(&self, rekey: impl FnOnce() -> u32) -> Option<u32> {
        let mut state = self.0.lock();
        let State::Live(_) = *state else { return None };
        let key = rekey();
        *state = State::Live(key);
        Some(key)
    }

    /// Revokes the memory. If the registration is live, `tear_down` detaches it from its key under
    /// the lock: deregistration and concurrent revocations wait for it, so that the key cannot be
    /// reallocated meanwhile.
    pub(super) fn revoke<R>(&self, tear_down: impl FnOnce(u32) -> Option<R>) -> Option<R> {
        let mut state = self.0.lock();
        let before = std::mem::replace(&mut *state, State::Revoked);
        match before {
            State::Live(key) => tear_down(key),
            State::Pending | State::Revoked => None,
        }
    }

    /// Marks the registration as ended; later revocations do nothing.
    pub(super) fn end(&self) {
        *self.0.lock() = State::Revoked;
    }
}
