//! The thread of the service.
#![allow(unsafe_code)]

use warpwire_cabi::process::watch_forks;

use crate::boundary::Result;

/// Starts a thread that no signal of the program is delivered to.
pub(crate) fn start_thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    watch_forks();
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
