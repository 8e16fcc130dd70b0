//! The exported functions: they check pointers, and never unwind into C.
//!
//! Each returns 0 or a positive errno value, and does not write to its output pointers on failure.
//! All may be called from any thread at any time, on one session or several.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use warpwire::host::ElfNote;

use crate::abi::{self, Handle, Info, InfoV2, Session, map, mapping, pin};
use crate::errno::Result;
use crate::log::{self, Level};
use crate::session;

/// By this note `warpwire doctor` recognizes the library; `readelf -n` prints it.
#[used]
#[unsafe(link_section = ".note.warpwire")]
static VERSION_NOTE: ElfNote = ElfNote::new(env!("CARGO_PKG_VERSION"));

/// Runs one call. A panic, which is a defect of this library, becomes `EIO`.
pub(crate) fn guard(call: impl FnOnce() -> Result<()>) -> c_int {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => 0,
        Ok(Err(errno)) => errno,
        Err(payload) => {
            // Dropping a panic payload may panic.
            std::mem::forget(payload);
            log::line(Level::Error, || "internal error (a panic); please report it");
            libc::EIO
        }
    }
}

fn out<T>(pointer: *mut T) -> Result<NonNull<T>> {
    NonNull::new(pointer).ok_or(libc::EINVAL)
}

fn number(session: Session) -> u64 {
    session.addr() as u64
}

/// Opens a session; null if device memory cannot be mapped on this machine.
#[unsafe(no_mangle)]
pub extern "C" fn gdr_open() -> Session {
    let mut opened = std::ptr::null_mut();
    guard(|| {
        opened = std::ptr::without_provenance_mut(session::open()? as usize);
        Ok(())
    });
    opened
}

/// Closes a session: waits for calls in progress, and unpins all memory that it has pinned.
#[unsafe(no_mangle)]
pub extern "C" fn gdr_close(g: Session) -> c_int {
    guard(|| session::close(number(g)))
}

/// Pins device memory; the tokens are ignored, as in gdrcopy since persistent mappings.
///
/// # Safety
/// `handle` is null or valid for a write; the memory stays allocated during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_pin_buffer(
    g: Session,
    addr: c_ulong,
    size: usize,
    _p2p_token: u64,
    _va_space: u32,
    handle: *mut Handle,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { gdr_pin_buffer_v2(g, addr, size, pin::DEFAULT, handle) }
}

/// Pins device memory.
///
/// # Safety
/// `handle` is null or valid for a write; the memory stays allocated during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_pin_buffer_v2(
    g: Session,
    addr: c_ulong,
    size: usize,
    flags: u32,
    handle: *mut Handle,
) -> c_int {
    guard(|| {
        let out = out(handle)?;
        let h = session::pin(number(g), addr, size as u64, flags)?;
        // SAFETY: guaranteed by the caller; not null.
        unsafe { out.write(Handle { h }) };
        Ok(())
    })
}

/// Unpins, mapped or not; the handle is invalid from then on.
#[unsafe(no_mangle)]
pub extern "C" fn gdr_unpin_buffer(g: Session, handle: Handle) -> c_int {
    guard(|| session::unpin(number(g), handle.h))
}

/// Whether the memory was freed by its owner: always 0.
///
/// # Safety
/// `flag` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_get_callback_flag(
    g: Session,
    handle: Handle,
    flag: *mut c_int,
) -> c_int {
    guard(|| {
        let out = out(flag)?;
        let value = session::callback_flag(number(g), handle.h)?;
        // SAFETY: guaranteed by the caller; not null.
        unsafe { out.write(value) };
        Ok(())
    })
}

/// Describes a pin, in the layout of gdrcopy 2.4 and before.
///
/// # Safety
/// `info` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_get_info(g: Session, handle: Handle, info: *mut Info) -> c_int {
    guard(|| {
        let out = out(info)?;
        let value = session::info(number(g), handle.h)?.first;
        // SAFETY: guaranteed by the caller; not null.
        unsafe { out.write(value) };
        Ok(())
    })
}

/// Describes a pin.
///
/// # Safety
/// `info` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_get_info_v2(g: Session, handle: Handle, info: *mut InfoV2) -> c_int {
    guard(|| {
        let out = out(info)?;
        let value = session::info(number(g), handle.h)?;
        // SAFETY: guaranteed by the caller; not null.
        unsafe { out.write(value) };
        Ok(())
    })
}

/// Maps a pin with the platform's default type.
///
/// # Safety
/// `va` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_map(
    g: Session,
    handle: Handle,
    va: *mut *mut c_void,
    size: usize,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { gdr_map_v2(g, handle, va, size, map::DEFAULT) }
}

/// Maps a pin: the pointer corresponds to `info.va`.
///
/// # Safety
/// `va` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_map_v2(
    g: Session,
    handle: Handle,
    va: *mut *mut c_void,
    size: usize,
    flags: c_int,
) -> c_int {
    guard(|| {
        let out = out(va)?;
        let base = session::map(number(g), handle.h, size as u64, flags)?;
        // SAFETY: guaranteed by the caller; not null.
        unsafe { out.write(std::ptr::with_exposed_provenance_mut(base)) };
        Ok(())
    })
}

/// Unmaps a pin.
#[unsafe(no_mangle)]
pub extern "C" fn gdr_unmap(g: Session, handle: Handle, va: *mut c_void, size: usize) -> c_int {
    guard(|| session::unmap(number(g), handle.h, va.addr(), size as u64))
}

/// Copies to a mapping, and flushes write-combining buffers towards the device.
///
/// # Safety
/// `h_ptr` is null or valid for reads of `size` bytes, and does not overlap the mapping.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_copy_to_mapping(
    handle: Handle,
    map_d_ptr: *mut c_void,
    h_ptr: *const c_void,
    size: usize,
) -> c_int {
    guard(|| {
        session::copy(handle.h, map_d_ptr.addr(), size, h_ptr.is_null(), |window, offset| {
            // SAFETY: guaranteed by the caller; not null, and not longer than a window.
            let from = unsafe { std::slice::from_raw_parts(h_ptr.cast(), size) };
            window.write(offset, from)
        })
    })
}

/// Copies from a mapping.
///
/// # Safety
/// `h_ptr` is null or valid for writes of `size` bytes, and does not overlap the mapping.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_copy_from_mapping(
    handle: Handle,
    h_ptr: *mut c_void,
    map_d_ptr: *const c_void,
    size: usize,
) -> c_int {
    guard(|| {
        session::copy(handle.h, map_d_ptr.addr(), size, h_ptr.is_null(), |window, offset| {
            // SAFETY: guaranteed by the caller; not null, and not longer than a window.
            let into = unsafe { std::slice::from_raw_parts_mut(h_ptr.cast(), size) };
            window.read(offset, into)
        })
    })
}

/// The version of this library: 2.6.
///
/// # Safety
/// Both pointers are null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_runtime_get_version(major: *mut c_int, minor: *mut c_int) {
    for (pointer, value) in [(major, abi::VERSION.0), (minor, abi::VERSION.1)] {
        if let Some(out) = NonNull::new(pointer) {
            // SAFETY: guaranteed by the caller; not null.
            unsafe { out.write(value) };
        }
    }
}

/// The version of the emulated driver, for clients that query it: 2.6.
///
/// # Safety
/// Both pointers are null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_driver_get_version(
    g: Session,
    major: *mut c_int,
    minor: *mut c_int,
) -> c_int {
    guard(|| {
        let (to_major, to_minor) = (out(major)?, out(minor)?);
        let version = session::driver_version(number(g))?;
        // SAFETY: guaranteed by the caller; not null.
        unsafe { to_major.write(version.0) };
        // SAFETY: as above.
        unsafe { to_minor.write(version.1) };
        Ok(())
    })
}

/// The value of a library attribute on this machine.
///
/// # Safety
/// `v` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_get_attribute(g: Session, attr: c_uint, v: *mut c_int) -> c_int {
    guard(|| {
        let out = out(v)?;
        let value = session::attribute(number(g), attr)?;
        // SAFETY: guaranteed by the caller; not null.
        unsafe { out.write(value) };
        Ok(())
    })
}

/// The name of a mapping type, a static string.
///
/// # Safety
/// `pstr` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_get_mapping_type_string(
    mapping_type: c_uint,
    pstr: *mut *const c_char,
) -> c_int {
    guard(|| {
        let out = out(pstr)?;
        let name: &'static CStr = match mapping_type {
            mapping::NONE => c"None",
            mapping::WRITE_COMBINING => c"Write Combining",
            mapping::CACHED => c"Caching",
            mapping::DEVICE => c"Device",
            _ => return Err(libc::EINVAL),
        };
        // SAFETY: guaranteed by the caller; not null.
        unsafe { out.write(name.as_ptr()) };
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_does_not_cross_the_boundary() {
        assert_eq!(guard(|| panic!("a defect")), libc::EIO);
        assert_eq!(guard(|| Err(libc::EINVAL)), libc::EINVAL);
        assert_eq!(guard(|| Ok(())), 0);
    }
}
