//! NCCL's log.
#![allow(unsafe_code)]

use std::ffi::{CString, c_int, c_ulong};
use std::fmt::Display;

use parking_lot::RwLock;

use crate::abi::Logger;

const WARN: c_int = 2;
const INFO: c_int = 3;
/// Subsystems: all; INIT and NET.
const ALL: c_ulong = !0;
const INIT_NET: c_ulong = 1 | 16;

static LOGGER: RwLock<Option<Logger>> = RwLock::new(None);

/// From now on, lines go to this function.
pub(crate) fn set(logger: Option<Logger>) {
    *LOGGER.write() = logger;
}

/// A line that users see unless they disabled the log (`NCCL_DEBUG=WARN`, or more).
#[cold]
pub(crate) fn warn(text: impl Display) {
    line(WARN, ALL, &text);
}

/// A line of `NCCL_DEBUG=INFO`.
#[cold]
pub(crate) fn info(text: impl Display) {
    line(INFO, INIT_NET, &text);
}

fn line(level: c_int, subsystems: c_ulong, text: &dyn Display) {
    let Some(logger) = *LOGGER.read() else { return };
    let text = format!("NET/Warpwire : {text}").replace('\0', "");
    let Ok(text) = CString::new(text) else { return };
    // SAFETY: NCCL's function, which lives as long as NCCL does; all strings end with a zero, and
    // the format takes one string.
    unsafe {
        logger(level, subsystems, c"net_warpwire".as_ptr(), 0, c"%s".as_ptr(), text.as_ptr());
    }
}
