//! `libwarpwire_ibpaths.so`: for programs that check `/dev/infiniband/uverbs*` before they use the
//! device that libibverbs listed. A device of this project has no such file, so `stat` and `access`
//! answer for `/dev/null` instead, a character device that everyone may read and write.
//!
//! `/dev/infiniband/rdma_cm` is left alone: where it seems to exist, librdmacm waits for a kernel
//! that is not there. All other paths reach the kernel unchanged.
//!
//! Programs also ask where in the machine a device is, by `realpath` of
//! `/sys/class/infiniband/NAME` (Mooncake, of its grandparent). For a device without such a folder,
//! the answer is the one for Linux's soft-RoCE: among the virtual devices, at no bus.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};

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

const CLASS: &[u8] = b"/sys/class/infiniband/";

/// Where the folder of a device would be if the device were one of Linux's own; `None` if the path
/// is neither that of a device nor of its parents.
fn virtual_folder(path: &[u8]) -> Option<CString> {
    let path = path.strip_prefix(CLASS)?;
    let end = path.iter().position(|byte| *byte == b'/').unwrap_or(path.len());
    let (name, rest) = path.split_at(end);
    if !(1..=63).contains(&name.len()) || name[0] == b'.' {
        return None;
    }
    let folder = match rest.strip_suffix(b"/").unwrap_or(rest) {
        b"" => [b"/sys/devices/virtual/infiniband/", name].concat(),
        b"/.." => b"/sys/devices/virtual/infiniband".to_vec(),
        b"/../.." => b"/sys/devices/virtual".to_vec(),
        _ => return None,
    };
    CString::new(folder).ok()
}

/// Replaces `realpath`.
///
/// # Safety
/// As for `realpath` of libc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realpath(path: *const c_char, resolved: *mut c_char) -> *mut c_char {
    type Call = unsafe extern "C" fn(*const c_char, *mut c_char) -> *mut c_char;
    // SAFETY: libc's function of this name has this type, and is null only where there is none; the
    // rest is guaranteed by the caller.
    let found = unsafe {
        let next = libc::dlsym(libc::RTLD_NEXT, c"realpath".as_ptr());
        std::mem::transmute::<*mut c_void, Option<Call>>(next).map(|next| next(path, resolved))
    };
    let found = found.unwrap_or(std::ptr::null_mut());
    if !found.is_null() || path.is_null() {
        return found;
    }
    // SAFETY: not null, so a C string.
    let folder = virtual_folder(unsafe { CStr::from_ptr(path) }.to_bytes());
    // SAFETY: `resolved` is null or has room for the longest path, of which this is a short one.
    folder.map_or(found, |folder| unsafe {
        match resolved.is_null() {
            true => libc::strdup(folder.as_ptr()),
            false => libc::strcpy(resolved, folder.as_ptr()),
        }
    })
}

/// Replaces `__realpath_chk`, the `realpath` of programs that were built with checks of lengths.
///
/// # Safety
/// As for `realpath` of libc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __realpath_chk(
    path: *const c_char,
    resolved: *mut c_char,
    _: usize,
) -> *mut c_char {
    // SAFETY: guaranteed by the caller.
    unsafe { realpath(path, resolved) }
}
