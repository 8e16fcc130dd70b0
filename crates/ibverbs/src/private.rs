//! The interface between rdma-core's library and its providers. Vendors' libraries (libmlx5,
//! libefa), which programs link for their extensions, do not load without these symbols. They find
//! no device of their own here, and call none of them.

use std::ffi::{c_int, c_void};

use crate::boundary::{UNSUPPORTED, set_errno};

/// Commands to a kernel driver that does not exist.
pub(crate) extern "C" fn refuse() -> c_int {
    set_errno(UNSUPPORTED);
    UNSUPPORTED.0
}

/// Devices of a provider.
pub(crate) extern "C" fn null() -> *mut c_void {
    set_errno(UNSUPPORTED);
    std::ptr::null_mut()
}

/// Registration of a provider, and its log lines.
pub(crate) extern "C" fn ignore() {}
