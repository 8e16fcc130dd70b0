//! `libwarpwire_ibpaths.so`: for programs that check `/dev/infiniband/uverbs*` before they use the
//! device that libibverbs listed. A device of this project has no such file, so `stat` and `access`
//! answer for `/dev/null` instead, a character device that everyone may read and write.
//!
//! `/dev/infiniband/rdma_cm` is left alone: where it seems to exist, librdmacm waits for a kernel
//! that is not there. All other paths reach the kernel unchanged. The functions make the system
//! calls themselves, so the library needs nothing but the kernel.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_long, c_void};

const DEVICES: &[u8] = b"/dev/infiniband/uverbs";

/// The path to ask the kernel for.
///
/// # Safety
/// `path` is null or a C string.
unsafe fn real(path: *const c_char) -> *const c_char {
    // SAFETY: not null, so a C string.
    let is_device =
        !path.is_null() && unsafe { CStr::from_ptr(path) }.to_bytes().starts_with(DEVICES);
    if is_device { c"/dev/null".as_ptr() } else { path }
}

/// # Safety
/// As for `stat` of libc.
unsafe fn file_status(path: *const c_char, status: *mut c_void, flags: c_int) -> c_int {
    // SAFETY: as for `stat`; the kernel's structure is glibc's on 64-bit machines.
    let result: c_long =
        unsafe { libc::syscall(libc::SYS_newfstatat, libc::AT_FDCWD, real(path), status, flags) };
    result as c_int
}

/// Replaces `stat`.
///
/// # Safety
/// As for `stat` of libc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stat(path: *const c_char, status: *mut c_void) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { file_status(path, status, 0) }
}

/// Replaces `stat64`.
///
/// # Safety
/// As for `stat` of libc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stat64(path: *const c_char, status: *mut c_void) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { file_status(path, status, 0) }
}

/// Replaces `__xstat`, the `stat` of programs built for glibc before 2.33.
///
/// # Safety
/// As for `stat` of libc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __xstat(_: c_int, path: *const c_char, status: *mut c_void) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { file_status(path, status, 0) }
}

/// Replaces `__xstat64`.
///
/// # Safety
/// As for `stat` of libc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __xstat64(_: c_int, path: *const c_char, status: *mut c_void) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { file_status(path, status, 0) }
}

/// Replaces `access`.
///
/// # Safety
/// As for `access` of libc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn access(path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { libc::syscall(libc::SYS_faccessat, libc::AT_FDCWD, real(path), mode) as c_int }
}
