//! The boundary to C: errno.

use std::ffi::c_int;

use warpwire::Error;
use warpwire::error::Kind;
use warpwire::verbs::PostError;

use crate::log;

/// The result of a call: an errno value if it failed.
pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// A positive errno value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) c_int);

pub(crate) const INVALID: Errno = Errno(libc::EINVAL);
pub(crate) const UNSUPPORTED: Errno = Errno(libc::EOPNOTSUPP);

impl From<Error> for Errno {
    #[cold]
    fn from(error: Error) -> Self {
        let errno = match error.kind() {
            Kind::OutOfMemory | Kind::Busy => libc::ENOMEM,
            Kind::Unavailable | Kind::Unsupported => libc::EOPNOTSUPP,
            Kind::PermissionDenied => libc::EACCES,
            Kind::NotDeviceMemory => libc::EFAULT,
            Kind::DeviceLost | Kind::StreamFailed | Kind::PeerLost => libc::EIO,
            Kind::Os(errno) => *errno,
            _ => libc::EINVAL,
        };
        log::line(|| &error);
        Self(errno)
    }
}

impl From<PostError> for Errno {
    fn from(error: PostError) -> Self {
        match error {
            // Programs post until the queue is full: nothing is logged or allocated.
            PostError::Full => Self(libc::ENOMEM),
            other => Error::from(other).into(),
        }
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }
}

/// Sets this thread's `errno`.
pub(crate) fn set_errno(Errno(errno): Errno) {
    warpwire_cabi::set_errno(errno);
}

/// Runs a call. After a panic, and in a forked child, it is `EIO`.
#[inline]
fn run<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    warpwire_cabi::guard("ibverbs", call).unwrap_or(Err(Errno(libc::EIO)))
}

/// For calls that return 0 or an errno value; `errno` is set as well, because programs print it.
#[inline]
pub(crate) fn status(call: impl FnOnce() -> Result<()>) -> c_int {
    match run(call) {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            errno.0
        }
    }
}

/// For calls that return a pointer, or null with `errno`.
pub(crate) fn pointer<T>(call: impl FnOnce() -> Result<*mut T>) -> *mut T {
    run(call).unwrap_or_else(|errno| {
        set_errno(errno);
        std::ptr::null_mut()
    })
}

/// For calls that return a number, or -1 with `errno`.
#[inline]
pub(crate) fn count(call: impl FnOnce() -> Result<c_int>) -> c_int {
    run(call).unwrap_or_else(|errno| {
        set_errno(errno);
        -1
    })
}

/// For calls that return nothing.
pub(crate) fn nothing(call: impl FnOnce()) {
    let _ = run(|| {
        call();
        Ok(())
    });
}

/// An argument that must not be null.
#[inline]
pub(crate) fn some<T>(argument: Option<T>) -> Result<T> {
    argument.ok_or(INVALID)
}

/// A new object for C, which owns it until it is destroyed.
pub(crate) fn give<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(object))
}
