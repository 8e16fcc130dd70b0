//! Faults on purpose, and forks.
#![allow(unsafe_code)]

use std::io;

use warpwire::mem::Window;

/// A fork that does not come back is ended after so many seconds.
const TIMEOUT: u32 = 20;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ChildExit {
    Exited(i32),
    Killed(i32),
}

impl ChildExit {
    /// Whether it ended by touching what it may not.
    pub(super) fn is_fault(self) -> bool {
        matches!(self, Self::Killed(libc::SIGSEGV | libc::SIGBUS))
    }

    /// Whether it had to be stopped.
    pub(super) fn is_timeout(self) -> bool {
        self == Self::Killed(libc::SIGALRM)
    }
}

/// Runs `act` in a forked child, which ends with what it returns.
///
/// To be called in a process of its own: the child has this thread alone, and locks that others held stay
/// locked there.
pub(super) fn run_in_fork(act: impl FnOnce() -> i32) -> io::Result<ChildExit> {
    no_core_dumps();
    // SAFETY: the child runs `act` and leaves without unwinding into the parent's frames or running its
    // exit handlers; if it hangs on a lock, the alarm ends it.
    let child = unsafe { libc::fork() };
    match child {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // SAFETY: plain system calls.
            unsafe { libc::alarm(TIMEOUT) };
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).unwrap_or(101);
            // SAFETY: ends the child here.
            unsafe { libc::_exit(code) }
        }
        child => wait_for(child),
    }
}

fn wait_for(child: libc::pid_t) -> io::Result<ChildExit> {
    let mut status = 0;
    loop {
        // SAFETY: `status` is written before the call returns.
        if unsafe { libc::waitpid(child, &mut status, 0) } == child {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(match libc::WIFSIGNALED(status) {
        true => ChildExit::Killed(libc::WTERMSIG(status)),
        false => ChildExit::Exited(libc::WEXITSTATUS(status)),
    })
}

/// Touches a window in a forked child, which does not inherit it.
pub(super) fn read_in_fork(window: &Window) -> io::Result<ChildExit> {
    let at = window.as_ptr();
    run_in_fork(|| {
        // SAFETY: in the child nothing is mapped there, and the read ends it: the fault is what is
        // checked. If it were mapped, it would be one byte of plain data.
        i32::from(unsafe { at.as_ptr().read_volatile() })
    })
}

/// Closes a window and touches where it was; returns only if that is wrongly possible.
pub(super) fn read_after_close(window: Window) -> u8 {
    no_core_dumps();
    let at = window.as_ptr();
    drop(window);
    // SAFETY: nothing is mapped there any more, no other thread maps anything, and the read ends this
    // process: the fault is what is checked.
    unsafe { at.as_ptr().read_volatile() }
}

/// Ends this process after so long, whatever it is at.
pub(super) fn kill_after(timeout: std::time::Duration) {
    let seconds = u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX);
    // SAFETY: a plain system call.
    unsafe { libc::alarm(seconds) };
}

fn no_core_dumps() {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is read during the call. If it fails, a core file is left, and nothing worse.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &none) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forks_tell_how_they_ended() {
        assert_eq!(run_in_fork(|| 7).unwrap(), ChildExit::Exited(7));
        // SAFETY: a plain system call, in a child.
        let killed = run_in_fork(|| unsafe { libc::raise(libc::SIGALRM) }).unwrap();
        assert!(killed.is_timeout() && !killed.is_fault(), "{killed:?}");
    }
}
