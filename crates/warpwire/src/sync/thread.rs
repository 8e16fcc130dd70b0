//! Threads of the library.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

/// Starts a thread that runs until `run` returns and receives no signals: handlers belong to the
/// program's own threads, which may rely on being interrupted.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let _blocked = BlockedSignals::all();
    // The new thread inherits the mask.
    std::thread::Builder::new().name(name.to_owned()).spawn(run).map(drop)
}

/// All signals are blocked in this thread; dropping it restores the previous mask.
struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    fn all() -> Self {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: both point to memory for a set; the first call fills the one, the second the
        // other. They fail only for arguments that are wrong here.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            Self(before.assume_init())
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set was filled in by `all`.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut())
        };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    #[test]
    fn threads_of_the_library_block_all_signals_and_the_caller_none() {
        let blocked = || {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
            u64::from_str_radix(mask.trim(), 16).unwrap()
        };
        let before = blocked();
        let (report, reports) = channel();
        super::spawn("signals", move || report.send(blocked()).unwrap()).unwrap();
        let in_thread = reports.recv().unwrap();
        // SIGHUP, SIGINT, SIGTERM, SIGALRM, SIGCHLD; glibc keeps two real-time signals for itself.
        for signal in [1, 2, 15, 14, 17] {
            assert_ne!(in_thread & 1 << (signal - 1), 0, "signal {signal} is not blocked");
        }
        assert_eq!(blocked(), before);
    }
}
