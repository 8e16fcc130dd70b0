//! The process: children of `fork`, and the thread of the service.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::boundary::Result;

/// Set in a child that was forked after the service was started: it has no thread, and shares
/// sockets with its parent, so every call in it is refused.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

pub(crate) fn is_forked_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

extern "C" fn on_fork() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// Starts a thread that no signal of the program is delivered to.
pub(crate) fn start_thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        // SAFETY: the function stays mapped: the library is linked with `-z nodelete`. The call may
        // fail for lack of memory, and the handler is then not called.
        unsafe { libc::pthread_atfork(None, None, Some(on_fork)) };
    });
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: both sets are valid for the calls, which fill them in.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    // A thread inherits the mask of the one that starts it.
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    // SAFETY: the mask that was read above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    started?;
    Ok(())
}

/// Whether a system call that a signal has interrupted would be restarted by the kernel: if all
/// handlers of this process were installed so (`SA_RESTART`). Waiting for an event is a `read` in
/// other librdmacms, and follows that rule; here it is a system call that never restarts.
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
