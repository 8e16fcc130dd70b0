//! Device addresses, and range arithmetic that cannot overflow.

use std::fmt;

use crate::error::{Error, Kind, Result};
use crate::units;

/// An address in a device's address space.
///
/// A plain number to pass to the device, a NIC or another library. The CPU never dereferences it.
///
/// ```
/// use warpwire::mem::DeviceAddr;
/// let address = DeviceAddr::new(0x7f00_0000_1000);
/// assert_eq!(address.checked_add(0x10).unwrap().raw(), 0x7f00_0000_1010);
/// assert!(DeviceAddr::new(u64::MAX).checked_add(1).is_none());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DeviceAddr(u64);

impl DeviceAddr {
    /// Wraps a raw address, such as one from another library.
    pub const fn new(raw: u64) -> Self {
        Self(raw)
    }

    /// The raw address, for a kernel, a work request or another library.
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// The address plus `offset` bytes, or `None` on overflow.
    pub const fn checked_add(self, offset: u64) -> Option<Self> {
        match self.0.checked_add(offset) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }

    /// Whether the address is a multiple of `unit` bytes.
    pub const fn is_aligned_to(self, unit: u64) -> bool {
        self.0.is_multiple_of(unit)
    }
}

impl fmt::Display for DeviceAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Debug for DeviceAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceAddr({:#x})", self.0)
    }
}

/// Checks that `offset..offset + len` is inside the `total` bytes of `object`.
#[inline]
pub(crate) fn check_range(offset: u64, len: u64, total: u64, object: &'static str) -> Result<()> {
    if is_inside(offset, len, total) {
        return Ok(());
    }
    Err(out_of_range(offset, len, total, object))
}

#[cold]
fn out_of_range(offset: u64, len: u64, total: u64, object: &'static str) -> Error {
    range_error(offset, len, total, object.to_owned())
}

/// Of the `len` bytes at `start`, at least one: how many of the last share an aligned 8-byte word.
#[inline]
pub(crate) fn last_word_len(start: u64, len: u64) -> u64 {
    (start.wrapping_add(len).wrapping_sub(1) % 8 + 1).min(len)
}

/// Whether `offset..offset + len` is inside `total` bytes, without overflow.
#[inline]
pub(crate) fn is_inside(offset: u64, len: u64, total: u64) -> bool {
    offset.checked_add(len).is_some_and(|end| end <= total)
}

#[cold]
pub(crate) fn range_error(offset: u64, len: u64, total: u64, object: String) -> Error {
    let what = format!("access {} at offset {offset}", units::bytes(len));
    Error::new(Kind::OutOfRange, what)
        .on(object)
        .why(format!("it has {total} bytes"))
        .fix("keep offset + length within the allocation")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_end_inside_and_never_wrap() {
        assert!(check_range(0, 8, 8, "x").is_ok());
        assert!(check_range(8, 0, 8, "x").is_ok());
        for (offset, len) in [(1, 8), (9, 0), (u64::MAX, 2), (2, u64::MAX)] {
            let error = check_range(offset, len, 8, "x").unwrap_err();
            assert_eq!(error.kind(), &Kind::OutOfRange);
        }
    }
}
