//! Simulated device memory for C tests. No header declares these functions, and they fail unless
//! `WARPWIRE_GDRAPI_SIM=1` is set.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_ulong, c_void};

use warpwire::mem::{self, Allocation};

use crate::api::guard;
use crate::errno::{self, Result};
use crate::process::Process;

/// The environment variable that makes the library accept simulated device addresses.
pub const ENV_VAR: &str = "WARPWIRE_GDRAPI_SIM";

/// Whether simulated device addresses are accepted.
pub(crate) fn is_on() -> bool {
    std::env::var_os(ENV_VAR).is_some_and(|value| value == "1")
}

fn allocate(size: u64) -> Result<u64> {
    if !is_on() {
        return Err(libc::ENOTSUP);
    }
    let memory = mem::open("sim:0").and_then(|gpu| gpu.alloc(size));
    let memory = memory.map_err(|error| errno::of(&error))?;
    let address = memory.address().raw();
    Process::get().simulated.lock().insert(address, memory);
    Ok(address)
}

/// The allocation that contains `address`, and the offset in it.
fn find(address: u64) -> Result<(Allocation, u64)> {
    if !is_on() {
        return Err(libc::ENOTSUP);
    }
    let simulated = Process::get().simulated.lock();
    let (start, memory) = simulated.range(..=address).next_back().ok_or(libc::EINVAL)?;
    Ok((memory.clone(), address - start))
}

/// The caller's bytes.
///
/// # Safety
/// `pointer` is null or valid for reads of `size` bytes while the slice is used.
unsafe fn bytes<'a>(pointer: *const c_void, size: usize) -> Result<&'a [u8]> {
    if pointer.is_null() || isize::try_from(size).is_err() {
        return Err(libc::EINVAL);
    }
    // SAFETY: guaranteed by the caller; not null, and not longer than a slice may be.
    Ok(unsafe { std::slice::from_raw_parts(pointer.cast(), size) })
}

/// The caller's bytes, to be written.
///
/// # Safety
/// `pointer` is null or valid for writes of `size` bytes while the slice is used.
unsafe fn bytes_mut<'a>(pointer: *mut c_void, size: usize) -> Result<&'a mut [u8]> {
    if pointer.is_null() || isize::try_from(size).is_err() {
        return Err(libc::EINVAL);
    }
    // SAFETY: guaranteed by the caller; not null, and not longer than a slice may be.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer.cast(), size) })
}

/// Allocates simulated device memory; returns 0 on failure.
#[unsafe(no_mangle)]
pub extern "C" fn warpwire_sim_alloc(size: usize) -> c_ulong {
    let mut address = 0;
    guard(|| {
        address = allocate(size as u64)?;
        Ok(())
    });
    address
}

/// Frees memory by the address that `warpwire_sim_alloc` returned.
#[unsafe(no_mangle)]
pub extern "C" fn warpwire_sim_free(address: c_ulong) -> c_int {
    guard(|| {
        let (_, 0) = find(address)? else { return Err(libc::EINVAL) };
        let memory = Process::get().simulated.lock().remove(&address).ok_or(libc::EINVAL)?;
        memory.free().map_err(|error| errno::of(&error))
    })
}

/// Copies simulated device memory to `into`, as the device's own copy engine would.
///
/// # Safety
/// `into` is valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpwire_sim_read(
    address: c_ulong,
    into: *mut c_void,
    size: usize,
) -> c_int {
    guard(|| {
        let (memory, offset) = find(address)?;
        // SAFETY: guaranteed by the caller.
        let into = unsafe { bytes_mut(into, size) }?;
        memory.read(offset, into).map_err(|error| errno::of(&error))
    })
}

/// Copies `from` to simulated device memory, as the device's own copy engine would.
///
/// # Safety
/// `from` is valid for reads of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpwire_sim_write(
    address: c_ulong,
    from: *const c_void,
    size: usize,
) -> c_int {
    guard(|| {
        let (memory, offset) = find(address)?;
        // SAFETY: guaranteed by the caller.
        let from = unsafe { bytes(from, size) }?;
        memory.write(offset, from).map_err(|error| errno::of(&error))
    })
}
