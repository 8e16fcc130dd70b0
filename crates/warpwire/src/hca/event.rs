//! Waking: who waits for completions or for news of queue pairs sleeps on a file descriptor.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::error::{Error, Result};
pub use crate::work::AsyncEvent;

/// A file descriptor that becomes readable when it is raised, until it is taken back.
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
    /// Raised already: another system call would say nothing new.
    raised: AtomicBool,
}

impl EventFd {
    /// One that is not raised.
    pub fn new() -> Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|why| Error::os("make an event descriptor", &why.into()))?;
        Ok(Self { fd, raised: AtomicBool::new(false) })
    }

    /// One that somebody else's descriptor is: raised while that is readable. Taking it back does nothing.
    pub(crate) fn of(fd: OwnedFd) -> Self {
        Self { fd, raised: AtomicBool::new(true) }
    }

    /// Raises it.
    pub fn raise(&self) {
        if !self.raised.swap(true, Ordering::AcqRel) {
            // It fails only when the counter is full, and then it is raised.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    /// Takes it back; tells whether it was raised.
    pub fn take(&self) -> bool {
        let mut count = [0; 8];
        // Before the flag: the other way round, a raise in between would be read, and none after it written. One in
        // between is part of what is taken here; its reason is seen by whoever looks after this, as the swap says.
        let was = rustix::io::read(&self.fd, &mut count).is_ok();
        self.raised.swap(false, Ordering::AcqRel);
        was
    }

    /// Waits until it is raised, without taking it back; tells whether it was, in that time.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        wait_any(&[self.fd.as_fd()], timeout)
    }

    /// Waits until that is readable; tells whether it is.
    pub(crate) fn wait_readable(what: &impl AsFd, timeout: Duration) -> Result<bool> {
        wait_any(&[what.as_fd()], timeout)
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Waits until one of them is readable.
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

/// News that wait to be taken. The oldest give way when nobody takes them.
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
