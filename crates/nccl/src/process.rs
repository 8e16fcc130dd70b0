//! Fork and exit.
//!
//! Every call in a forked child is refused. A program that exits without closing its communicators
//! first sends what it owes its peers: they must not take its end for a failure.
#![allow(unsafe_code)]

use std::sync::Once;
use std::time::{Duration, Instant};

use warpwire_cabi::process::{is_forked_child, watch_forks};

use crate::devices;

/// How long an exit waits for packets to leave.
const EXIT_DEADLINE: Duration = Duration::from_millis(200);

extern "C" fn on_exit() {
    if is_forked_child() {
        return;
    }
    let start = Instant::now();
    for context in devices::open_engines() {
        let left = EXIT_DEADLINE.saturating_sub(start.elapsed());
        context.soft().inspect(|hca| hca.flush(left));
    }
}

/// Installs both handlers, once.
pub(crate) fn watch() {
    static HANDLERS: Once = Once::new();
    HANDLERS.call_once(|| {
        watch_forks();
        // SAFETY: the function stays mapped until the end of the process: the library is linked
        // with `-z nodelete`. The call may fail for lack of memory, and it is then not called.
        unsafe { libc::atexit(on_exit) };
    });
}
