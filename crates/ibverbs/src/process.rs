//! Fork and exit.
//!
//! A child of `fork` has its parent's objects, but none of the threads that serve them, and shares
//! sockets and shared memory with the parent: every call in it is refused. A program that exits
//! first sends what it owes its peers, as a NIC would have: they must not take its end for a
//! failure.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use warpwire::verbs;

use crate::capture;

/// Set in a child that was forked after a device was opened.
static IS_CHILD: AtomicBool = AtomicBool::new(false);
/// The devices that are open.
static OPEN: Mutex<Vec<(u64, verbs::Context)>> = Mutex::new(Vec::new());
/// How long an exit waits for packets to leave.
const EXIT_DEADLINE: Duration = Duration::from_millis(200);
/// How long a step of another thread may take.
const EXIT_PAUSE: Duration = Duration::from_micros(200);

#[inline]
pub(crate) fn is_forked_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

extern "C" fn on_fork() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

extern "C" fn on_exit() {
    if is_forked_child() {
        return;
    }
    // Another thread may hold the lock, and does not matter any more.
    let Some(open) = OPEN.try_lock() else { return };
    let start = Instant::now();
    for (_, context) in open.iter() {
        // Two idle steps in a row. A step also counts as idle while another thread is making one,
        // which the pause lets it finish: waiting for it could hang an exit in a signal handler.
        let mut idle_steps = 0;
        while idle_steps < 2 && start.elapsed() < EXIT_DEADLINE {
            let is_busy = context
                .soft()
                .is_some_and(|hca| hca.poll().is_ok_and(|progress| !progress.is_idle()));
            idle_steps = if is_busy { 0 } else { idle_steps + 1 };
            if idle_steps == 1 {
                std::thread::sleep(EXIT_PAUSE);
            }
        }
    }
    capture::finish();
}

/// Adds an open device; returns a number for [`remove`].
pub(crate) fn add(context: &verbs::Context) -> u64 {
    static HANDLERS: Once = Once::new();
    HANDLERS.call_once(|| {
        // SAFETY: both functions stay mapped until the end of the process: the library is linked
        // with `-z nodelete`. Both may fail for lack of memory, and are then not called.
        unsafe {
            libc::pthread_atfork(None, None, Some(on_fork));
            libc::atexit(on_exit);
        }
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

/// Whether a system call that a signal has interrupted would be restarted by the kernel: if all
/// handlers of this process were installed so (`SA_RESTART`). Waiting for an event is a `read` with
/// a NIC, and follows that rule; here it is a system call that never restarts.
#[cold]
pub(crate) fn restarts_system_calls() -> bool {
    (1..libc::SIGRTMAX()).all(|signal| {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: the kernel fills in the structure; a number without signal leaves it zero.
        let action = unsafe {
            libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
            action.assume_init()
        };
        let has_handler =
            action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN;
        !has_handler || action.sa_flags & libc::SA_RESTART != 0
    })
}
