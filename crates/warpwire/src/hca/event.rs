//! Wake-ups: threads block on a file descriptor until completions or asynchronous events arrive.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::error::{Error, Result};
pub use crate::work::AsyncEvent;

/// An eventfd: readable from [`raise`](Self::raise) until [`take`](Self::take).
///
/// ```
/// use std::time::Duration;
/// use warpwire::hca::EventFd;
/// let signal = EventFd::new()?;
/// assert!(!signal.wait(Duration::ZERO)?);
/// signal.raise();
/// assert!(signal.wait(Duration::ZERO)? && signal.take() && !signal.take());
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Debug)]
pub struct EventFd {
    fd: OwnedFd,
    /// Whether it is raised already, which saves the system call.
    raised: AtomicBool,
}

impl EventFd {
    /// Creates one that is not raised.
    pub fn new() -> Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|why| Error::os("create an eventfd", &why.into()))?;
        Ok(Self { fd, raised: AtomicBool::new(false) })
    }

    /// Wraps a foreign descriptor: raised while that is readable; taking it does nothing.
    pub(crate) fn of(fd: OwnedFd) -> Self {
        Self { fd, raised: AtomicBool::new(true) }
    }

    /// Makes it readable.
    pub fn raise(&self) {
        if !self.raised.swap(true, Ordering::AcqRel) {
            // Fails only if the counter is at its maximum, and then it is readable.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    /// Clears it; returns whether it was raised.
    pub fn take(&self) -> bool {
        let mut count = [0; 8];
        // Read before the flag is cleared: in the other order a `raise` in between would be
        // consumed by the read, and later ones would not write. A `raise` between read and swap is
        // part of this `take`; the swap makes what it signals visible to the caller.
        let was = rustix::io::read(&self.fd, &mut count).is_ok();
        self.raised.swap(false, Ordering::AcqRel);
        was
    }

    /// Waits until it is raised, without clearing it; returns whether it was raised within
    /// `timeout`.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        wait_any(&[self.fd.as_fd()], timeout)
    }

    /// Waits until `what` is readable; returns whether it is.
    pub(crate) fn wait_readable(what: &impl AsFd, timeout: Duration) -> Result<bool> {
        wait_any(&[what.as_fd()], timeout)
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Waits until one of at most four descriptors is readable; returns whether one is.
pub(super) fn wait_any(fds: &[BorrowedFd<'_>], timeout: Duration) -> Result<bool> {
    let mut entries = [const { None }; 4];
    for (entry, fd) in entries.iter_mut().zip(fds) {
        *entry = Some(PollFd::new(fd, PollFlags::IN));
    }
    let mut entries: Vec<_> = entries.into_iter().flatten().collect();
    let timeout = rustix::event::Timespec {
        tv_sec: timeout.as_secs().min(1 << 30) as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    match poll(&mut entries, Some(&timeout)) {
        Ok(count) => Ok(count > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(why) => Err(Error::os("wait for an event", &why.into())),
    }
}

/// Pending asynchronous events. When the queue is full, the oldest is dropped.
#[derive(Debug)]
pub(super) struct AsyncEventQueue {
    pending: Mutex<VecDeque<AsyncEvent>>,
    pub(super) signal: EventFd,
}

impl AsyncEventQueue {
    const MAX_PENDING: usize = 4096;

    pub(super) fn new() -> Result<Self> {
        Ok(Self { pending: Mutex::new(VecDeque::with_capacity(64)), signal: EventFd::new()? })
    }

    #[cold]
    pub(super) fn publish(&self, event: AsyncEvent) {
        let mut pending = self.pending.lock();
        if pending.len() == Self::MAX_PENDING {
            pending.pop_front();
        }
        pending.push_back(event);
        self.signal.raise();
    }

    pub(super) fn take(&self) -> Option<AsyncEvent> {
        let mut pending = self.pending.lock();
        let event = pending.pop_front();
        if pending.is_empty() {
            self.signal.take();
        }
        event
    }
}
