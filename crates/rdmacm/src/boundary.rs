//! The boundary to C: errno, and pointers of C.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};

use crate::abi::{CmId, Sockaddr};
use crate::id::Id;

/// The result of a call: an errno value if it failed.
pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// A positive errno value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) c_int);

pub(crate) const INVALID: Errno = Errno(libc::EINVAL);
pub(crate) const UNSUPPORTED: Errno = Errno(libc::EOPNOTSUPP);
pub(crate) const NO_DEVICE: Errno = Errno(libc::ENODEV);

impl From<rustix::io::Errno> for Errno {
    fn from(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Sets this thread's `errno`.
pub(crate) fn set_errno(Errno(errno): Errno) {
    warpwire_cabi::set_errno(errno);
}

/// Runs a call. After a panic, and in a forked child, it is `EIO`.
#[inline]
fn run<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    warpwire_cabi::guard("rdmacm", call).unwrap_or(Err(Errno(libc::EIO)))
}

/// For calls that return 0, or -1 with `errno`.
pub(crate) fn status(call: impl FnOnce() -> Result<()>) -> c_int {
    match run(call) {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
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

/// For calls that return nothing.
pub(crate) fn nothing(call: impl FnOnce()) {
    let _ = run(|| {
        call();
        Ok(())
    });
}

/// An argument that must not be null.
pub(crate) fn some<T>(argument: Option<T>) -> Result<T> {
    argument.ok_or(INVALID)
}

/// A new object for C, which owns it until it is destroyed.
pub(crate) fn give<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(object))
}

/// Takes an object back from C.
pub(crate) fn take<A, T>(object: *mut A) -> Option<Box<T>> {
    // SAFETY: null, or a pointer from `give` of this type, whose beginning is `A`; the program has
    // not passed it to another call that takes it.
    (!object.is_null()).then(|| unsafe { Box::from_raw(object.cast()) })
}

/// An object of this library in a structure of C.
pub(crate) fn object<'a, A, T>(pointer: *const A) -> Option<&'a T> {
    // SAFETY: null, or an object of this library whose beginning is the C structure.
    unsafe { pointer.cast::<T>().as_ref() }
}

/// An id that the service names in events.
#[derive(Clone, Copy)]
pub(crate) struct IdPtr(pub(crate) *const Id);

// SAFETY: the pointer is used by threads of the program only, as C uses it.
unsafe impl Send for IdPtr {}

impl IdPtr {
    pub(crate) const NONE: Self = Self(std::ptr::null());

    pub(crate) fn get<'a>(self) -> Option<&'a Id> {
        object(self.0)
    }

    pub(crate) fn abi(self) -> *const CmId {
        self.0.cast()
    }
}

/// An address that C passes.
pub(crate) fn address(address: *const libc::sockaddr) -> Option<Sockaddr> {
    if address.is_null() {
        return None;
    }
    let mut copy = Sockaddr::EMPTY;
    // SAFETY: an address has the size that its family implies.
    unsafe {
        let len = match c_int::from((*address).sa_family) {
            libc::AF_INET => size_of::<libc::sockaddr_in>(),
            libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
            _ => return None,
        };
        std::ptr::copy_nonoverlapping(address.cast(), copy.0.as_mut_ptr(), len);
    }
    Some(copy)
}

/// Bytes that C passes; null has none.
pub(crate) fn bytes<'a>(data: *const u8, len: usize) -> &'a [u8] {
    if data.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: the program passes this many bytes, and keeps them during the call.
    unsafe { std::slice::from_raw_parts(data, len) }
}

pub(crate) fn text<'a>(text: *const c_char) -> Option<&'a CStr> {
    // SAFETY: null, or a C string of the program.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
}
