//! What gates are made of. `tests/races.rs` compiles the gates with a model checker's parts in the place of these.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;

pub(super) use crate::sync::pause;
pub(super) use parking_lot::Mutex;
pub(super) use std::sync::atomic::{AtomicU64, Ordering};

/// A value that is shared for a while and then taken by one: who calls says when.
pub(super) struct ContentCell<T>(UnsafeCell<Option<T>>);

impl<T> ContentCell<T> {
    pub(super) fn empty() -> Self {
        Self(UnsafeCell::new(None))
    }

    /// # Safety
    /// Nobody replaces the value while the reference lives.
    pub(super) unsafe fn get(&self) -> Option<&T> {
        // SAFETY: the caller's promise.
        unsafe { (*self.0.get()).as_ref() }
    }

    /// # Safety
    /// Nobody else uses the value now, and no reference to it is alive.
    pub(super) unsafe fn replace(&self, value: Option<T>) -> Option<T> {
        // SAFETY: the caller's promise.
        unsafe { std::mem::replace(&mut *self.0.get(), value) }
    }
}
