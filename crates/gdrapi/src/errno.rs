//! Errors as positive errno values.

use std::ffi::c_int;

use warpwire::error::{Error, Kind};

/// A positive errno value.
pub(crate) type Errno = c_int;

/// The result of the internal functions.
pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// The errno value closest to an error.
pub(crate) fn of(error: &Error) -> Errno {
    match error.kind() {
        Kind::OutOfMemory => libc::ENOMEM,
        Kind::Busy => libc::EBUSY,
        Kind::Unavailable => libc::ENODEV,
        Kind::Unsupported => libc::ENOTSUP,
        Kind::Timeout => libc::ETIMEDOUT,
        Kind::PermissionDenied => libc::EACCES,
        Kind::StreamFailed | Kind::DeviceLost | Kind::Cuda(_) => libc::EIO,
        Kind::Os(errno) if *errno > 0 => *errno,
        _ => libc::EINVAL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_maps_to_a_positive_errno() {
        let of = |kind| of(&Error::new(kind, "x"));
        assert_eq!(of(Kind::NotDeviceMemory), libc::EINVAL);
        assert_eq!(of(Kind::OutOfMemory), libc::ENOMEM);
        assert_eq!(of(Kind::Os(libc::EMFILE)), libc::EMFILE);
        assert_eq!(of(Kind::Os(-1)), libc::EINVAL);
        assert_eq!(of(Kind::Cuda(999)), libc::EIO);
    }
}
