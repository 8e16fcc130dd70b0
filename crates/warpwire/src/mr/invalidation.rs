//! The tie between a client's memory and its registration: cut once, by whoever comes first.

use super::sync::Mutex;

/// Where a registration stands with the memory below it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// It is being made.
    Pending,
    /// It has this key.
    Live(u32),
    /// The memory is gone, or the registration has ended.
    Revoked,
}

pub(super) struct InvalidationLink(Mutex<State>);

impl InvalidationLink {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State::Pending))
    }

    /// Lets `publish` give the registration its key, unless the memory is gone by now.
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

    /// The memory goes away. If the registration is alive, `tear_down` takes it off its key, alone: its end, and
    /// others who cut, wait until that is done, so that the key is not in other hands meanwhile.
    pub(super) fn revoke<R>(&self, tear_down: impl FnOnce(u32) -> Option<R>) -> Option<R> {
        let mut state = self.0.lock();
        let before = std::mem::replace(&mut *state, State::Revoked);
        match before {
            State::Live(key) => tear_down(key),
            State::Pending | State::Revoked => None,
        }
    }

    /// The registration ends: nobody cuts any more.
    pub(super) fn end(&self) {
        *self.0.lock() = State::Revoked;
    }
}
