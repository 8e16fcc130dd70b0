//! Intentional faults, and forks.
#![allow(unsafe_code)]

use std::io;

use warpwire::mem::Window;

/// A forked child is killed by SIGALRM after this many seconds.
const TIMEOUT: u32 = 20;

/// How a process exited.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ChildExit {
    Exited(i32),
    Killed(i32),
}

impl ChildExit {
    /// Killed by a memory access fault.
    pub(super) fn is_fault(self) -> bool {
        matches!(self, Self::Killed(libc::SIGSEGV | libc::SIGBUS))
    }

    /// Killed by the alarm.
    pub(super) fn is_timeout(self) -> bool {
        self == Self::Killed(libc::SIGALRM)
    }
}

/// Runs `act` in a forked child, which exits with the returned status.
///
/// Call only in a dedicated child process: the forked child has only this thread, and locks held by
/// other threads stay locked in it.
pub(super) fn run_in_fork(act: impl FnOnce() -> i32) -> io::Result<ChildExit> {
    no_core_dumps();
    // SAFETY: the child runs `act` and calls `_exit` without unwinding into the parent's frames or
    // running its exit handlers; if it hangs on a lock, the alarm kills it.
    let child = unsafe { libc::fork() };
    match child {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // SAFETY: alarm(2) accesses no memory.
            unsafe { libc::alarm(TIMEOUT) };
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).unwrap_or(101);
            // SAFETY: exits the child here; accesses no memory.
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

/// Reads a window in a forked child, which does not inherit the mapping.
pub(super) fn read_in_fork(window: &Window) -> io::Result<ChildExit> {
    let at = window.as_ptr();
    run_in_fork(|| {
        // SAFETY: nothing is mapped there in the child, and the fault, which is what is checked,
        // kills it. If it were mapped, this would read one byte of plain data.
        i32::from(unsafe { at.as_ptr().read_volatile() })
    })
}

/// Closes a window and reads its old address; returns only if no fault occurs.
pub(super) fn read_after_close(window: Window) -> u8 {
    no_core_dumps();
    let at = window.as_ptr();
    drop(window);
    // SAFETY: nothing is mapped there any more, no other thread maps anything, and the fault, which
    // is what is checked, kills this process.
    unsafe { at.as_ptr().read_volatile() }
}

/// Kills this process with SIGALRM after `timeout`.
pub(super) fn kill_after(timeout: std::time::Duration) {
    let seconds = u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX);
    // SAFETY: alarm(2) accesses no memory.
    unsafe { libc::alarm(seconds) };
}

fn no_core_dumps() {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `none` outlives the call. If the call fails, a core file may be left, nothing worse.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &none) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forks_return_their_exit() {
        assert_eq!(run_in_fork(|| 7).unwrap(), ChildExit::Exited(7));
        // SAFETY: raise(3) in a child accesses no memory.
        let killed = run_in_fork(|| unsafe { libc::raise(libc::SIGALRM) }).unwrap();
        assert!(killed.is_timeout() && !killed.is_fault(), "{killed:?}");
    }
}
