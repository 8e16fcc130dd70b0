//! Fork and exit.
//!
//! Every call in a forked child is refused. A program that exits first sends what it owes its
//! peers, as a NIC would have: they must not take its end for a failure.
#![allow(unsafe_code)]

use std::sync::Once;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use warpwire::host::ElfNote;
use warpwire::verbs;
use warpwire_cabi::process::{is_forked_child, watch_forks};

use crate::capture;

/// By this note `warpwire doctor` recognizes the library; `readelf -n` prints it.
#[used]
#[unsafe(link_section = ".note.warpwire")]
static VERSION_NOTE: ElfNote = ElfNote::new(env!("CARGO_PKG_VERSION"));

/// The devices that are open.
static OPEN: Mutex<Vec<(u64, verbs::Context)>> = Mutex::new(Vec::new());
/// How long an exit waits for packets to leave.
const EXIT_DEADLINE: Duration = Duration::from_millis(200);

extern "C" fn on_exit() {
    if is_forked_child() {
        return;
    }
    // Another thread may hold the lock, and does not matter any more.
    let Some(open) = OPEN.try_lock() else { return };
    let start = Instant::now();
    for (_, context) in open.iter() {
        let left = EXIT_DEADLINE.saturating_sub(start.elapsed());
        context.soft().inspect(|hca| hca.flush(left));
    }
    capture::finish();
}

/// Adds an open device; returns a number for [`remove`].
pub(crate) fn add(context: &verbs::Context) -> u64 {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        watch_forks();
        // SAFETY: the function stays mapped until the end of the process: the library is linked
        // with `-z nodelete`. The call may fail for lack of memory, and it is then not called.
        unsafe { libc::atexit(on_exit) };
    });
    let mut open = OPEN.lock();
    let number = open.last().map_or(0, |(last, _)| last + 1);
    open.push((number, context.clone()));
    number
}

/// Removes a device that is closed.
pub(crate) fn remove(number: u64) {
    OPEN.lock().retain(|(known, _)| *known != number);
}
