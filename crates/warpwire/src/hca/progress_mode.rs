//! Who drives the engine: the threads that poll, a thread that steps in when they do not, or a thread of its own.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::HcaInner;
use super::event::{EventFd, wait_any};
use crate::error::{Error, Result};
use crate::sync::asymmetric_fence;

/// Who drives an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ProgressMode {
    /// Whoever polls; and when nobody does, a thread that otherwise sleeps. No thread stands between a program that
    /// polls and the wire, and peers are answered all the same.
    #[default]
    Auto,
    /// Whoever polls, and nobody else: a program that does not poll answers nobody. For tests that want to decide
    /// each step.
    Manual,
    /// A thread of its own that spins for so long after the last work before it sleeps. Needed where a stream or a
    /// kernel rings the doorbell, which wakes nobody.
    Thread {
        /// How long it spins.
        spin: Duration,
        /// The processor that it keeps to.
        core: Option<usize>,
    },
}

/// How long doorbells that nobody announces may stay unseen while the engine sleeps: at least, and at most. In between
/// it is a small part of the time for which nothing has happened, so that rest costs next to nothing.
const MIN_DOORBELL_POLL_INTERVAL: Duration = Duration::from_micros(50);
const MAX_DOORBELL_POLL_INTERVAL: Duration = Duration::from_millis(4);
const DOORBELL_POLL_DIVISOR: u32 = 32;
/// The longest sleep.
const MAX_SLEEP: Duration = Duration::from_secs(1);
/// How long a guard looks for more before it sleeps: packets come in bursts, and waking costs as much as many steps.
const FALLBACK_SPIN: Duration = Duration::from_micros(50);
/// How long a guard stays away after it has seen somebody poll.
const FALLBACK_BACKOFF: Duration = Duration::from_millis(1);

/// What a sleeping thread is woken by.
#[derive(Debug)]
pub(super) struct Waker {
    signal: EventFd,
    asleep: AtomicBool,
    /// A guard stays away, as somebody polls.
    backing_off: AtomicBool,
    /// Somebody who polled is about to sleep.
    fallback_requested: AtomicBool,
    stop: AtomicBool,
    /// Steps that were driven by pollers.
    pub(super) poller_steps: AtomicU64,
}

impl Waker {
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            signal: EventFd::new()?,
            asleep: AtomicBool::new(false),
            backing_off: AtomicBool::new(false),
            fallback_requested: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            poller_steps: AtomicU64::new(0),
        })
    }

    /// Work came: wakes the thread if it sleeps.
    #[inline]
    pub(super) fn wake(&self) {
        // The work must be seen by a thread that falls asleep after this looks, or its sleep by this.
        asymmetric_fence::light();
        if self.asleep.load(Ordering::Relaxed) {
            self.signal.raise();
        }
    }

    /// A poller has made a step, under the engine's lock, and taken the link's notice away from a thread that sleeps:
    /// let it look again. It set its mark before it last had the lock, so that the mark is seen_steps here.
    #[inline]
    pub(super) fn on_poller_step(&self) {
        if self.asleep.load(Ordering::Relaxed) {
            self.signal.raise();
        }
    }

    /// Somebody who may have polled is about to sleep: a guard that stays away because of that comes at once.
    pub(super) fn wake_fallback(&self) {
        self.fallback_requested.store(true, Ordering::SeqCst);
        if self.backing_off.load(Ordering::SeqCst) {
            self.signal.raise();
        }
    }

    fn back_off(&self) {
        self.backing_off.store(true, Ordering::SeqCst);
        if !self.fallback_requested.load(Ordering::SeqCst) {
            let _ = wait_any(&[self.signal.as_fd()], FALLBACK_BACKOFF);
        }
        self.backing_off.store(false, Ordering::SeqCst);
        self.signal.take();
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.signal.raise();
    }
}

/// Starts the thread that the drive asks for.
pub(super) fn start(shared: &Arc<HcaInner>, progress_mode: ProgressMode) -> Result<()> {
    let (is_fallback, spin, core) = match progress_mode {
        ProgressMode::Manual => return Ok(()),
        ProgressMode::Auto => (true, FALLBACK_SPIN, None),
        ProgressMode::Thread { spin, core } => (false, spin, core),
    };
    let link_fd = shared.engine.lock().link().wait_fd().map(|fd| fd.try_clone_to_owned());
    let link_fd = link_fd.transpose().map_err(|why| Error::os("copy a file descriptor", &why))?;
    let thread = Thread {
        shared: Arc::downgrade(shared),
        waker: shared.waker.clone(),
        link_fd,
        is_fallback,
        spin,
        seen_steps: 0,
        idle_since: None,
    };
    let run = move || {
        if let Some(core) = core {
            pin(core);
        }
        thread.run();
    };
    let started = std::thread::Builder::new().name("warpwire-hca".to_owned()).spawn(run);
    started.map(drop).map_err(|why| Error::os("start the engine's thread", &why))
}

/// Keeps the thread to a processor; one that does not exist is left alone, as the drive still works.
fn pin(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    if core < rustix::thread::CpuSet::MAX_CPU {
        set.set(core);
        if let Err(why) = rustix::thread::sched_setaffinity(None, &set) {
            tracing::warn!(core, %why, "the engine's thread is not pinned");
        }
    }
}

struct Thread {
    shared: Weak<HcaInner>,
    waker: Arc<Waker>,
    link_fd: Option<OwnedFd>,
    is_fallback: bool,
    spin: Duration,
    /// The pollers' steps when we last looked.
    seen_steps: u64,
    /// Since when nothing has happened.
    idle_since: Option<Instant>,
}

impl Thread {
    fn run(mut self) {
        while !self.waker.stop.load(Ordering::Acquire) {
            let Some(shared) = self.shared.upgrade() else { return };
            let steps = self.waker.poller_steps.load(Ordering::Relaxed);
            let fallback_requested = self.waker.fallback_requested.swap(false, Ordering::SeqCst);
            if self.is_fallback
                && std::mem::replace(&mut self.seen_steps, steps) != steps
                && !fallback_requested
            {
                drop(shared);
                self.waker.back_off();
                continue;
            }
            match shared.step() {
                Ok(progress) if !progress.is_idle() => self.idle_since = None,
                Ok(_) if self.should_spin() => std::hint::spin_loop(),
                Ok(_) => self.sleep(shared),
                Err(why) => {
                    tracing::error!(%why, "the engine stops");
                    return;
                }
            }
        }
    }

    fn should_spin(&mut self) -> bool {
        self.spin > Duration::ZERO && self.idle_for() < self.spin
    }

    /// For how long nothing has happened.
    fn idle_for(&mut self) -> Duration {
        self.idle_since.get_or_insert_with(Instant::now).elapsed()
    }

    /// Sleeps until a packet comes, somebody rings, or a timer is due.
    fn sleep(&mut self, mut shared: Arc<HcaInner>) {
        self.waker.asleep.store(true, Ordering::SeqCst);
        asymmetric_fence::heavy();
        loop {
            // Once more, now that everybody knows: what came in between is seen here, or wakes us.
            if !shared.step().is_ok_and(|progress| progress.is_idle()) {
                self.idle_since = None;
                break;
            }
            let wait = shared.sleep_duration(MAX_SLEEP, MAX_SLEEP);
            drop(shared);
            // Somebody else's wake-up ends it; a timer, or a doorbell that wakes nobody, only makes another step.
            match self.idle_wait(wait) {
                Some(still) => shared = still,
                None => break,
            }
        }
        self.waker.asleep.store(false, Ordering::SeqCst);
        self.waker.signal.take();
    }

    /// Waits for so long; `None` if somebody woke us, or the device is gone. Doorbells that are watched are looked at
    /// now and then, and end the wait when they were rung.
    fn idle_wait(&mut self, wait: Duration) -> Option<Arc<HcaInner>> {
        let (start, mut remaining) = (Instant::now(), wait);
        while remaining > Duration::ZERO {
            let poll_doorbell = self.shared.upgrade()?.polled_doorbells.load(Ordering::Relaxed) > 0;
            let poll_interval = self.idle_for() / DOORBELL_POLL_DIVISOR;
            let poll_interval =
                poll_interval.clamp(MIN_DOORBELL_POLL_INTERVAL, MAX_DOORBELL_POLL_INTERVAL);
            let fds = [Some(self.waker.signal.as_fd()), self.link_fd.as_ref().map(AsFd::as_fd)];
            let fds: Vec<_> = fds.into_iter().flatten().collect();
            let slice = if poll_doorbell { poll_interval.min(remaining) } else { remaining };
            if wait_any(&fds, slice).unwrap_or(true) {
                return None;
            }
            let shared = self.shared.upgrade()?;
            if poll_doorbell && shared.engine.lock().core.any_doorbell_rung() {
                return Some(shared);
            }
            remaining = wait.saturating_sub(start.elapsed());
        }
        self.shared.upgrade()
    }
}
