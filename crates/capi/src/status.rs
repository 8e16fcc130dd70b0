//! Errors as numbers, and the last one of each thread as text.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use warpwire::Error;
use warpwire::error::Kind;
use warpwire_cabi::process;

use crate::abi::ErrorInfo;

pub(crate) const OK: c_int = 0;
pub(crate) const IN_PROGRESS: c_int = 1;
const INTERNAL: c_int = -20;

/// Every status of the header.
pub const STATUSES: [(c_int, &CStr); 22] = [
    (OK, c"WW_OK"),
    (IN_PROGRESS, c"WW_IN_PROGRESS"),
    (-1, c"WW_INVALID_ARGUMENT"),
    (-2, c"WW_OUT_OF_RANGE"),
    (-3, c"WW_MISALIGNED"),
    (-4, c"WW_OUT_OF_MEMORY"),
    (-5, c"WW_NOT_DEVICE_MEMORY"),
    (-6, c"WW_FREED"),
    (-7, c"WW_BUSY"),
    (-8, c"WW_UNAVAILABLE"),
    (-9, c"WW_UNSUPPORTED"),
    (-10, c"WW_TIMEOUT"),
    (-11, c"WW_CANCELLED"),
    (-12, c"WW_STREAM_FAILED"),
    (-13, c"WW_DEVICE_LOST"),
    (-14, c"WW_STALE"),
    (-15, c"WW_PEER_LOST"),
    (-16, c"WW_PERMISSION_DENIED"),
    (-17, c"WW_MALFORMED"),
    (-18, c"WW_OS_ERROR"),
    (-19, c"WW_CUDA_ERROR"),
    (INTERNAL, c"WW_INTERNAL"),
];

/// Status and code of an error.
fn numbers(error: &Error) -> (c_int, c_int) {
    let status = match error.kind() {
        Kind::InvalidArgument => -1,
        Kind::OutOfRange => -2,
        Kind::Misaligned => -3,
        Kind::OutOfMemory => -4,
        Kind::NotDeviceMemory => -5,
        Kind::Freed => -6,
        Kind::Busy => -7,
        Kind::Unavailable => -8,
        Kind::Unsupported => -9,
        Kind::Timeout => -10,
        Kind::Cancelled => -11,
        Kind::StreamFailed => -12,
        Kind::DeviceLost => -13,
        Kind::Stale => -14,
        Kind::PeerLost => -15,
        Kind::PermissionDenied => -16,
        Kind::Malformed => -17,
        Kind::Os(errno) => return (-18, *errno),
        Kind::Cuda(code) => return (-19, *code),
        _ => INTERNAL,
    };
    (status, 0)
}

/// The last failure of a thread: its texts, and what the program reads.
struct LastError {
    _texts: [CString; 4],
    info: Box<ErrorInfo>,
}

impl LastError {
    fn new((status, code): (c_int, c_int), texts: [String; 4]) -> Self {
        let texts = texts.map(c_string);
        let [message, what, why, fix] = texts.each_ref().map(|text| text.as_ptr());
        let info = Box::new(ErrorInfo { status, code, message, what, why, fix });
        Self { _texts: texts, info }
    }

    fn of(error: &Error) -> Self {
        let fix = error.advice().unwrap_or_default().to_owned();
        let parts = [error.to_string(), error.what().into_owned(), error.reason().to_owned(), fix];
        Self::new(numbers(error), parts)
    }
}

/// A text for C; a NUL in it, which none should have, becomes a space.
pub(crate) fn c_string(text: String) -> CString {
    CString::new(text).unwrap_or_else(|inner| {
        let bytes = inner.into_vec().into_iter().map(|byte| if byte == 0 { b' ' } else { byte });
        CString::new(bytes.collect::<Vec<_>>()).unwrap_or_default()
    })
}

thread_local! {
    static LAST: RefCell<Option<LastError>> = const { RefCell::new(None) };
}

/// What a thread without failure reads.
const NO_ERROR: ErrorInfo = ErrorInfo {
    status: OK,
    code: 0,
    message: c"".as_ptr(),
    what: c"".as_ptr(),
    why: c"".as_ptr(),
    fix: c"".as_ptr(),
};

/// The last failure of this thread.
pub(crate) fn last() -> *const ErrorInfo {
    // Without a value while the thread ends.
    let last = LAST.try_with(|last| last.borrow().as_ref().map(|last| &raw const *last.info));
    last.ok().flatten().unwrap_or(const { &NO_ERROR })
}

/// Records a failure; returns its status.
#[cold]
pub(crate) fn fail(error: &Error) -> c_int {
    let last = LastError::of(error);
    let status = last.info.status;
    // While the thread ends, nothing can be recorded; the status remains.
    let _ = LAST.try_with(|slot| slot.replace(Some(last)));
    status
}

/// Runs a call of a program: its number, or the status of its failure. A panic, which is a defect
/// of this library, stops here.
pub(crate) fn guard(call: impl FnOnce() -> Result<c_int, Error>) -> c_int {
    process::watch_forks();
    if process::is_forked_child() {
        return fail(
            &Error::new(Kind::Unsupported, "use the library")
                .why("this process was forked from one that uses it, and has none of its threads")
                .fix("call exec in the child, or use the library there only"),
        );
    }
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(number)) => number,
        Ok(Err(error)) => fail(&error),
        Err(payload) => {
            // Dropping a panic payload may panic.
            std::mem::forget(payload);
            internal_error()
        }
    }
}

#[cold]
fn internal_error() -> c_int {
    let what = "complete the call";
    let (why, fix) = ("internal error (a panic)", "please report it");
    let message = format!("cannot {what}: {why}; {fix}");
    let parts = [message, what.to_owned(), why.to_owned(), fix.to_owned()];
    let _ = LAST.try_with(|slot| slot.replace(Some(LastError::new((INTERNAL, 0), parts))));
    INTERNAL
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_internal_error() {
        assert_eq!(guard(|| Ok(7)), 7);
        assert_eq!(guard(|| panic!("a defect")), INTERNAL);
        assert_eq!(guard(|| Err(Error::new(Kind::Busy, "wait"))), -7);
    }

    #[test]
    fn statuses_are_numbered_without_gaps() {
        for (index, (number, _)) in STATUSES.iter().enumerate().skip(2) {
            assert_eq!(*number, 1 - index as c_int);
        }
    }

    #[test]
    fn texts_for_c_contain_no_nul() {
        assert_eq!(c_string("a\0b".into()).as_c_str(), c"a b");
    }
}
