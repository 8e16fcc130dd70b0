//! Errors, versions, blocks, and the diagnosis.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};

use warpwire::Error;
use warpwire::error::Kind;
use warpwire::host::System;
use warpwire_doctor::{Evidence, Report};

use crate::abi::ErrorInfo;
use crate::status::{self, OK, STATUSES, guard};
use crate::{block, pointer};

/// The last failure of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn ww_last_error() -> *const ErrorInfo {
    status::last()
}

/// The name of a status.
#[unsafe(no_mangle)]
pub extern "C" fn ww_status_name(status: c_int) -> *const c_char {
    let known = STATUSES.iter().find(|(number, _)| *number == status);
    known.map_or(c"unknown status", |(_, name)| name).as_ptr()
}

/// The version of this library.
#[unsafe(no_mangle)]
pub extern "C" fn ww_version() -> u32 {
    const VERSION: u32 = {
        let parts = [
            number(env!("CARGO_PKG_VERSION_MAJOR")),
            number(env!("CARGO_PKG_VERSION_MINOR")),
            number(env!("CARGO_PKG_VERSION_PATCH")),
        ];
        parts[0] * 10_000 + parts[1] * 100 + parts[2]
    };
    VERSION
}

/// A decimal number, at compile time.
const fn number(text: &str) -> u32 {
    let (mut value, mut at) = (0, 0);
    while at < text.len() {
        value = value * 10 + (text.as_bytes()[at] - b'0') as u32;
        at += 1;
    }
    value
}

/// Frees a block.
///
/// # Safety
/// It is null, or was returned by a function of this library and not freed before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_free(block: *mut c_void) {
    // SAFETY: guaranteed by the caller.
    unsafe { block::free(block) };
}

/// What this machine can do, as JSON.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_doctor(json: *mut *mut c_char) -> c_int {
    guard(|| {
        let out = pointer::out(json, "json")?;
        let report = Report::of(&Evidence::gather(System::live())?);
        let text = serde_json::to_string_pretty(&report)
            .map_err(|why| Error::new(Kind::Malformed, "write the report").why(why.to_string()))?;
        let text = block::bytes(text.as_bytes())?;
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(text.cast()) };
        Ok(OK)
    })
}
