//! Handles. A handle is a number that is used once in the life of the process: one that was
//! released, or never existed, or is of another kind, is found to be so.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use warpwire::Error;
use warpwire::error::{Kind, Result};

use crate::abi::Handle;

/// The objects of one kind. They are cheap to clone: a call works on a clone, so that another
/// thread may release the handle meanwhile.
pub(crate) struct Table<T> {
    /// The handle's type in C.
    kind: &'static str,
    objects: RwLock<BTreeMap<u64, T>>,
}

/// Odd, so that a handle that is mistaken for an address is not one of anything in particular.
static NEXT: AtomicU64 = AtomicU64::new(1);

impl<T: Clone> Table<T> {
    pub(crate) const fn new(kind: &'static str) -> Self {
        Self { kind, objects: RwLock::new(BTreeMap::new()) }
    }

    pub(crate) fn insert(&self, object: T) -> Handle {
        let number = NEXT.fetch_add(2, Ordering::Relaxed);
        self.objects.write().insert(number, object);
        std::ptr::without_provenance_mut(number as usize)
    }

    pub(crate) fn get(&self, handle: Handle) -> Result<T> {
        let found = self.objects.read().get(&(handle.addr() as u64)).cloned();
        found.ok_or_else(|| self.unknown(handle))
    }

    pub(crate) fn remove(&self, handle: Handle) -> Result<T> {
        let found = self.objects.write().remove(&(handle.addr() as u64));
        found.ok_or_else(|| self.unknown(handle))
    }

    #[cold]
    fn unknown(&self, handle: Handle) -> Error {
        let error = Error::new(Kind::InvalidArgument, format!("use a {}", self.kind));
        match handle.is_null() {
            true => error.why("it is NULL"),
            false => error.why("there is no such handle: it was released, or is of another kind"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_valid_until_they_are_released() {
        let (table, other) = (Table::new("ww_test"), Table::new("ww_other"));
        let handle = table.insert(7);
        let another = other.insert(8);
        assert_eq!(table.get(handle).unwrap(), 7);
        for wrong in [std::ptr::null_mut(), another, handle.wrapping_byte_add(1)] {
            let error = table.get(wrong).unwrap_err();
            assert_eq!(error.kind(), &Kind::InvalidArgument);
            assert!(error.to_string().contains("use a ww_test"), "{error}");
        }
        assert_eq!(table.remove(handle).unwrap(), 7);
        assert!(table.get(handle).is_err() && table.remove(handle).is_err());
        assert_ne!(table.insert(9), handle);
    }
}
