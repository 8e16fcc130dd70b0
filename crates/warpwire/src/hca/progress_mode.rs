//! Progress: which threads run the engine. Polling threads, a fallback thread that takes over when
//! nothing polls, or a dedicated thread.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::event::{EventFd, wait_any};
use super::shared::EngineShared;
use crate::error::{Error, Result};
use crate::sync::asymmetric_fence;

/// Which threads run the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ProgressMode {
    /// Threads that poll; and when none does, a fallback thread that otherwise sleeps. A polling
    /// program sends and receives without a hand-off to another thread, and peers get responses
    /// even while nothing polls.
    #[default]
    Auto,
    /// Only threads that poll: while the program does not poll, peers get no answer. For tests that
    /// control each step.
    Manual,
    /// A dedicated thread that spins for `spin` after the last work before it sleeps. Needed where
    /// a stream or a kernel rings the doorbell, which wakes no thread.
    Thread {
        /// How long it spins without work.
        spin: Duration,
        /// The CPU to pin it to; with several engines, the first of as many, one per thread. If
        /// that fails it runs unpinned.
        core: Option<usize>,
    },
}

impl ProgressMode {
    /// The mode of a library inside of another program, from an environment variable: `auto`,
    /// `thread` (which spins for `spin`), or microseconds to spin. Empty: a thread if there are at
    /// least 4 cores, because peers expect answers while the program does not poll, as from a NIC,
    /// and a thread that spins gives them soonest; else `auto`. `None` if the text is no such mode.
    ///
    /// ```
    /// use std::time::Duration;
    /// use warpwire::verbs::ProgressMode;
    /// let spin = Duration::from_micros(200);
    /// let thread = ProgressMode::Thread { spin, core: None };
    /// assert_eq!(ProgressMode::from_setting("thread", spin), Some(thread));
    /// assert_eq!(ProgressMode::from_setting("200", Duration::ZERO), Some(thread));
    /// assert_eq!(ProgressMode::from_setting("fast", spin), None);
    /// ```
    pub fn from_setting(text: &str, spin: Duration) -> Option<Self> {
        let thread = |spin| Some(Self::Thread { spin, core: None });
        match text {
            "" => match std::thread::available_parallelism() {
                Ok(cores) if cores.get() >= 4 => thread(spin),
                _ => Some(Self::Auto),
            },
            "auto" => Some(Self::Auto),
            "thread" => thread(spin),
            micros => thread(Duration::from_micros(micros.parse::<u32>().ok()?.into())),
        }
    }
}

/// How often a sleeping engine polls doorbells that are rung without a notification: bounds of the
/// interval. In between it is 1/32 of the idle time, so that an idle engine costs next to nothing.
const MIN_DOORBELL_POLL_INTERVAL: Duration = Duration::from_micros(50);
const MAX_DOORBELL_POLL_INTERVAL: Duration = Duration::from_millis(4);
const DOORBELL_POLL_DIVISOR: u32 = 32;
/// Upper bound of one sleep.
const MAX_SLEEP: Duration = Duration::from_secs(1);
/// How long the fallback thread spins before it sleeps: packets come in bursts, and a wake-up costs
/// as much as many steps.
const FALLBACK_SPIN: Duration = Duration::from_micros(50);
/// How long the fallback thread backs off after it has seen a thread poll.
const FALLBACK_BACKOFF: Duration = Duration::from_millis(1);

/// Wakes the engine's thread.
// Pollers write to it with each step, so it shares no cache line with another engine's.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Waker {
    signal: EventFd,
    asleep: AtomicBool,
    /// The fallback thread backs off because another thread polls.
    backing_off: AtomicBool,
    /// A poller is about to block.
    fallback_requested: AtomicBool,
    stop: AtomicBool,
    /// Steps made by pollers.
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

    /// Wakes the engine's thread if it sleeps, after work was published.
    #[inline]
    pub(super) fn wake(&self) {
        // Either a thread that falls asleep after this load sees the work, or this load sees that
        // it sleeps.
        asymmetric_fence::light();
        if self.asleep.load(Ordering::Relaxed) {
            self.signal.raise();
        }
    }

    /// A poller has made a step under the engine's lock, and may have consumed the link's
    /// notification that a sleeping thread waits for: wakes that thread to check again. It set
    /// `asleep` before it last held the lock, so a relaxed load sees it.
    #[inline]
    pub(super) fn on_poller_step(&self) {
        if self.asleep.load(Ordering::Relaxed) {
            self.signal.raise();
        }
    }

    /// A poller is about to block: ends the back-off of the fallback thread.
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

/// Starts the thread that the mode requires for engine `number` of a device.
pub(super) fn start(
    shared: &Arc<EngineShared>,
    progress_mode: ProgressMode,
    number: usize,
) -> Result<()> {
    let (is_fallback, spin, core) = match progress_mode {
        ProgressMode::Manual => return Ok(()),
        ProgressMode::Auto => (true, FALLBACK_SPIN, None),
        ProgressMode::Thread { spin, core } => {
            (false, spin, core.map(|core| core.saturating_add(number)))
        }
    };
    let link_fd = shared.engine.lock().link().wait_fd().map(|fd| fd.try_clone_to_owned());
    let link_fd = link_fd
        .transpose()
        .map_err(|why| Error::os("duplicate the link's file descriptor", &why))?;
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
    let started = crate::sync::thread::spawn("warpwire-hca", run);
    started.map_err(|why| Error::os("start the engine's thread", &why))
}

/// Pins the calling thread to a CPU. Failure is only logged: the engine works without.
fn pin(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    if core < rustix::thread::CpuSet::MAX_CPU {
        set.set(core);
        if let Err(why) = rustix::thread::sched_setaffinity(None, &set) {
            tracing::warn!(core, %why, "cannot pin the engine's thread");
        }
    }
}

struct Thread {
    shared: Weak<EngineShared>,
    waker: Arc<Waker>,
    link_fd: Option<OwnedFd>,
    is_fallback: bool,
    spin: Duration,
    /// `poller_steps` at the last check.
    seen_steps: u64,
    /// When the engine became idle.
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
                Ok(progress) if !progress.is_waiting() => self.idle_since = None,
                Ok(_) if self.should_spin() => std::hint::spin_loop(),
                Ok(_) => self.sleep(shared),
                Err(why) => {
                    tracing::error!(%why, "the link failed; the engine stops");
                    return;
                }
            }
        }
    }

    fn should_spin(&mut self) -> bool {
        self.spin > Duration::ZERO && self.idle_for() < self.spin
    }

    fn idle_for(&mut self) -> Duration {
        self.idle_since.get_or_insert_with(Instant::now).elapsed()
    }

    /// Sleeps until a packet arrives, a doorbell is rung, or a timer is due.
    fn sleep(&mut self, mut shared: Arc<EngineShared>) {
        self.waker.asleep.store(true, Ordering::SeqCst);
        asymmetric_fence::heavy();
        loop {
            // One more step now that `asleep` is visible: work that came in between is found here,
            // or wakes this thread.
            if !shared.step().is_ok_and(|progress| progress.is_waiting()) {
                self.idle_since = None;
                break;
            }
            let wait = shared.sleep_duration(MAX_SLEEP, MAX_SLEEP);
            drop(shared);
            // A wake-up ends the loop; a timer or a polled doorbell only makes another step.
            match self.idle_wait(wait) {
                Some(still) => shared = still,
                None => break,
            }
        }
        self.waker.asleep.store(false, Ordering::SeqCst);
        self.waker.signal.take();
    }

    /// Waits up to `wait`; `None` if the thread was woken or the device is gone. Polled doorbells
    /// are checked at intervals and end the wait when rung.
    fn idle_wait(&mut self, wait: Duration) -> Option<Arc<EngineShared>> {
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
