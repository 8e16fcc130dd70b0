//! A library inside of a foreign program: its children, its signals, and panics, which stop here.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::log;

/// Set in a child that was forked after [`watch_forks`].
static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// Whether this is a forked child. It has its parent's objects, but none of the threads that serve
/// them, and shares sockets with the parent: every call in it is refused.
#[inline]
pub fn is_forked_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

extern "C" fn on_fork() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// From now on, forked children are noticed.
pub fn watch_forks() {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        // SAFETY: the function stays mapped: the libraries are linked with `-z nodelete`. The call
        // may fail for lack of memory, and the handler is then not called.
        unsafe { libc::pthread_atfork(None, None, Some(on_fork)) };
    });
}

/// Runs a call of a program: `None` in a forked child, or after a panic, which is a defect of the
/// library.
#[inline]
pub fn guard<T>(library: &str, call: impl FnOnce() -> T) -> Option<T> {
    if is_forked_child() {
        // What the call owns, such as an object to be destroyed, stays as it was: to drop it would
        // take locks, which a thread of the parent may have held when this process was forked.
        std::mem::forget(call);
        return None;
    }
    catch_unwind(AssertUnwindSafe(call))
        .map_err(|payload| {
            // Dropping a panic payload may panic.
            std::mem::forget(payload);
            log::line(library, || "internal error (a panic); please report it");
        })
        .ok()
}

/// Sets this thread's `errno`.
pub fn set_errno(errno: c_int) {
    // SAFETY: glibc returns a valid pointer to the thread's own variable.
    unsafe { *libc::__errno_location() = errno };
}

/// Whether a system call that a signal has interrupted would be restarted by the kernel: if all
/// handlers of this process were installed so (`SA_RESTART`). Waiting for an event is a `read` in
/// rdma-core, and follows that rule; here it is a system call that never restarts.
#[cold]
pub fn restarts_system_calls() -> bool {
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
