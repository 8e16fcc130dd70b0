//! Primitives that revocable slots are built on. `tests/loom_registration.rs` compiles the slots
//! with loom's types instead.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;

pub(super) use crate::sync::pause;
pub(super) use parking_lot::Mutex;
pub(super) use std::sync::atomic::{AtomicU64, Ordering};

/// An optional value behind an `UnsafeCell`. The caller decides when access is shared and when it
/// is exclusive.
pub(super) struct ContentCell<T>(UnsafeCell<Option<T>>);

impl<T> ContentCell<T> {
    pub(super) fn empty() -> Self {
        Self(UnsafeCell::new(None))
    }

    /// # Safety
    /// No thread calls `replace` while the reference lives.
    pub(super) unsafe fn get(&self) -> Option<&T> {
        // SAFETY: the caller guarantees that no mutable reference exists while this one lives.
        unsafe { (*self.0.get()).as_ref() }
    }

    /// # Safety
    /// No other thread accesses the value during the call, and no reference to it is alive.
    pub(super) unsafe fn replace(&self, value: Option<T>) -> Option<T> {
        // SAFETY: the caller guarantees exclusive access.
        unsafe { std::mem::replace(&mut *self.0.get(), value) }
    }
}
