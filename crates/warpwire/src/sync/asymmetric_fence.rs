//! Asymmetric fences (`membarrier(2)`): [`light`] only keeps the compiler from reordering,
//! [`heavy`] has the kernel execute a full fence on every CPU that runs a thread of the process.
//! Threads that are not running had one when they were scheduled out.
//!
//! A light and a heavy side together order memory as two SeqCst fences would. Where the kernel
//! lacks `membarrier`, or a seccomp filter forbids it, both sides are SeqCst fences.

use std::sync::atomic::{AtomicU8, Ordering, compiler_fence, fence};
use std::sync::{Condvar, Mutex, Once, PoisonError};
use std::time::Duration;

use rustix::thread::{MembarrierCommand as Command, membarrier};

/// The state of one kind of barrier. It changes once, from `UNKNOWN`.
const UNKNOWN: u8 = 0;
const READY: u8 = 1;
const REFUSED: u8 = 2;

/// How long `prepare` waits for the kernel. Registering a process with several threads takes an RCU
/// grace period: 10 ms on an idle machine, seconds on one whose CPUs are all busy. Until the
/// registration is done, both sides use fences.
const REGISTRATION_WAIT: Duration = Duration::from_millis(100);

/// Between the threads of this process.
static PRIVATE: Registration =
    Registration::new(Command::RegisterPrivateExpedited, Command::PrivateExpedited);
/// Between all processes that have registered for it.
static GLOBAL: Registration =
    Registration::new(Command::RegisterGlobalExpedited, Command::GlobalExpedited);

/// The registration of this process for one kind of barrier.
struct Registration {
    state: AtomicU8,
    register: Command,
    issue: Command,
    started: Once,
    done: (Mutex<()>, Condvar),
}

impl Registration {
    const fn new(register: Command, issue: Command) -> Self {
        let (state, started) = (AtomicU8::new(UNKNOWN), Once::new());
        Self { state, register, issue, started, done: (Mutex::new(()), Condvar::new()) }
    }

    /// Acquire: a light side that sees `READY` also sees the stores of heavy sides that saw
    /// `UNKNOWN`.
    #[inline]
    fn is_ready(&self) -> bool {
        self.state.load(Ordering::Acquire) == READY
    }

    /// Registers with the kernel, in another thread unless that is fast. The first call waits up to
    /// `REGISTRATION_WAIT` for the result, later ones do not.
    fn prepare(&'static self) {
        let mut is_first = false;
        self.started.call_once(|| {
            is_first = true;
            // A process with a single thread needs no grace period.
            let start = || super::thread::spawn("warpwire-fence", || self.register_now());
            if is_single_threaded() || start().is_err() {
                self.register_now();
            }
        });
        if is_first {
            let is_unknown = |_: &mut ()| self.state.load(Ordering::Acquire) == UNKNOWN;
            let guard = self.done.0.lock().unwrap_or_else(PoisonError::into_inner);
            drop(self.done.1.wait_timeout_while(guard, REGISTRATION_WAIT, is_unknown));
        }
    }

    fn register_now(&self) {
        let answer = membarrier(self.register).and_then(|()| membarrier(self.issue));
        let state = if answer.is_ok() { READY } else { REFUSED };
        let guard = self.done.0.lock();
        // SeqCst: totally ordered with the fences of heavy sides.
        self.state.store(state, Ordering::SeqCst);
        self.done.1.notify_all();
        drop(guard);
    }

    /// Issues the barrier if light sides may rely on it. A call that has worked keeps working,
    /// unless a seccomp filter was installed since, or this is a forked child of the registered
    /// process.
    fn issue(&self) {
        // A heavy side that does not see `READY` executed its fence before the state changed, and a
        // light side that sees `READY` loads after that: it sees the heavy side's store.
        if self.state.load(Ordering::SeqCst) != READY {
            return;
        }
        let register_and_issue = || membarrier(self.register).and_then(|()| membarrier(self.issue));
        if membarrier(self.issue).or_else(|_| register_and_issue()).is_err() {
            // No CPU keeps a store in its store buffer for 20 ms, with all the interrupts in
            // between.
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn is_single_threaded() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

/// Whether this process may be a light or a heavy side of pairs across processes: [`heavy_global`].
pub(crate) fn is_ready_global() -> bool {
    GLOBAL.is_ready()
}

/// Registers for [`light`] and [`heavy`] within this process; until that is done `light` is a
/// fence.
pub(crate) fn prepare() {
    PRIVATE.prepare();
}

/// Registers for [`heavy_global`].
pub(crate) fn prepare_global() {
    GLOBAL.prepare();
}

/// The hot side.
#[inline]
pub(crate) fn light() {
    if PRIVATE.is_ready() {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The cold side: some microseconds.
#[cold]
pub(crate) fn heavy() {
    fence(Ordering::SeqCst);
    PRIVATE.issue();
}

/// The cold side towards other processes, whose light sides rely on it because this process
/// published that it is registered.
#[cold]
pub(crate) fn heavy_global() {
    fence(Ordering::SeqCst);
    GLOBAL.issue();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use std::sync::{Arc, Barrier};

    /// Each side stores its word and loads the other's: at least one must see the other's store.
    #[test]
    fn light_and_heavy_fences_forbid_store_buffering() {
        prepare();
        let words = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let barrier = Arc::new(Barrier::new(2));
        let rounds = 20_000_u32;
        let (light_words, light_barrier) = (words.clone(), barrier.clone());
        let light_side = std::thread::spawn(move || {
            let run_round = |round| {
                light_barrier.wait();
                light_words[0].store(round, Ordering::Relaxed);
                light();
                light_words[1].load(Ordering::Relaxed)
            };
            (1..=rounds).map(run_round).collect::<Vec<_>>()
        });
        let run_round = |round| {
            barrier.wait();
            words[1].store(round, Ordering::Relaxed);
            heavy();
            words[0].load(Ordering::Relaxed)
        };
        let seen_by_heavy: Vec<_> = (1..=rounds).map(run_round).collect();
        let seen_by_light = light_side.join().unwrap();
        for (round, (heavy, light)) in (1..).zip(seen_by_heavy.iter().zip(&seen_by_light)) {
            assert!(*heavy == round || *light == round, "round {round}: neither saw the other");
        }
    }

    /// A process that could not register uses fences.
    #[test]
    fn refused_registration_is_never_ready() {
        static REGISTRATION: Registration =
            Registration::new(Command::PrivateExpeditedRseq, Command::PrivateExpeditedRseq);
        REGISTRATION.prepare();
        let state = || REGISTRATION.state.load(Ordering::SeqCst);
        testkit::until("the kernel has answered", || state() == REFUSED);
        REGISTRATION.issue();
        assert!(!REGISTRATION.is_ready());
    }

    /// Only the first call waits: the thread that would answer is not there after a fork.
    #[test]
    fn registration_without_an_answer_is_waited_for_once() {
        static REGISTRATION: Registration =
            Registration::new(Command::PrivateExpeditedRseq, Command::PrivateExpeditedRseq);
        REGISTRATION.started.call_once(|| {});
        let start = std::time::Instant::now();
        (0..1000).for_each(|_| REGISTRATION.prepare());
        assert!(start.elapsed() < 100 * REGISTRATION_WAIT, "{:?}", start.elapsed());
        assert!(!REGISTRATION.is_ready());
    }

    /// A seccomp filter may be installed after light sides have come to rely on the barrier.
    #[test]
    fn heavy_fence_survives_a_refused_membarrier() {
        let refused = Command::PrivateExpeditedRseq;
        assert!(membarrier(refused).is_err(), "this process has not registered for it");
        let registration = Registration::new(refused, refused);
        registration.state.store(READY, Ordering::SeqCst);
        registration.issue();
        heavy_global();
    }
}
