//! Fences in pairs of which one side is free: [`light`] keeps the compiler from reordering, [`heavy`] has the kernel put a fence
//! into every thread that is running, and those that are not have had one as they stopped.
//!
//! What both sides of a pair do is as if each had a fence of the strongest sort. Where the kernel cannot do that, or
//! may not by a filter on system calls, each has one.

use std::sync::atomic::{AtomicU8, Ordering, compiler_fence, fence};
use std::sync::{Condvar, Mutex, Once, PoisonError};
use std::time::Duration;

use rustix::thread::{MembarrierCommand as Command, membarrier};

/// What is known of one kind of barrier. It changes once, from `UNKNOWN`.
const UNKNOWN: u8 = 0;
const READY: u8 = 1;
const REFUSED: u8 = 2;

/// How long a device that is opened waits for the kernel. To register a process with several threads
/// takes the kernel an RCU grace period: 10 ms on an idle machine, seconds on one whose processors
/// are all busy. Whoever does not wait that long uses fences until it is done.
const PATIENCE: Duration = Duration::from_millis(100);

/// Among the threads of this process.
static PRIVATE: Registration =
    Registration::new(Command::RegisterPrivateExpedited, Command::PrivateExpedited);
/// Among all processes that have asked for it.
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

    /// Acquire: a light side that finds it ready sees what heavy sides did that found it unknown.
    #[inline]
    fn is_ready(&self) -> bool {
        self.state.load(Ordering::Acquire) == READY
    }

    /// Asks the kernel, in a thread of its own unless that is quick, and waits a while for the answer.
    fn prepare(&'static self) {
        if self.state.load(Ordering::Acquire) != UNKNOWN {
            return;
        }
        self.started.call_once(|| {
            // The kernel need not wait for the threads of a process that has only one.
            let start = || std::thread::Builder::new().spawn(|| self.ask());
            if is_single_threaded() || start().is_err() {
                self.ask();
            }
        });
        let is_unknown = |_: &mut ()| self.state.load(Ordering::Acquire) == UNKNOWN;
        let guard = self.done.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.done.1.wait_timeout_while(guard, PATIENCE, is_unknown));
    }

    fn ask(&self) {
        let answer = membarrier(self.register).and_then(|()| membarrier(self.issue));
        let state = if answer.is_ok() { READY } else { REFUSED };
        let guard = self.done.0.lock();
        // SeqCst: of a heavy side's fence and this, one is first.
        self.state.store(state, Ordering::SeqCst);
        self.done.1.notify_all();
        drop(guard);
    }

    /// Raises a barrier where light sides may rely on it. What worked once works, unless a filter on
    /// system calls came since, or this is the child of the process that asked.
    fn issue(&self) {
        // One that does not find it ready has its fence before the state changes, and a light side
        // that finds it ready looks after that: it sees what the heavy side did.
        if self.state.load(Ordering::SeqCst) != READY {
            return;
        }
        let register_and_issue = || membarrier(self.register).and_then(|()| membarrier(self.issue));
        if membarrier(self.issue).or_else(|_| register_and_issue()).is_err() {
            // No processor keeps a store to itself for so long, with all the interrupts that fall into it.
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn is_single_threaded() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

/// Whether this process may be the light side, and the heavy one, of pairs with others: [`heavy_global`].
pub(crate) fn is_ready_global() -> bool {
    GLOBAL.is_ready()
}

/// Makes the light side light before long; till then it is a fence.
pub(crate) fn prepare() {
    PRIVATE.prepare();
}

/// Has the kernel take this process in beforehand.
pub(crate) fn prepare_global() {
    GLOBAL.prepare();
}

/// The side that happens all the time.
#[inline]
pub(crate) fn light() {
    if PRIVATE.is_ready() {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The side that happens now and then: microseconds.
#[cold]
pub(crate) fn heavy() {
    fence(Ordering::SeqCst);
    PRIVATE.issue();
}

/// The heavy side for those in other processes that are light because they were told that this comes.
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

    /// Each side stores its word and looks at the other's: one of them must see the other.
    #[test]
    fn light_and_heavy_fences_forbid_store_buffering() {
        prepare();
        let words = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let gate = Arc::new(Barrier::new(2));
        let rounds = 20_000_u32;
        let (light_words, their_gate) = (words.clone(), gate.clone());
        let light_side = std::thread::spawn(move || {
            let run_round = |round| {
                their_gate.wait();
                light_words[0].store(round, Ordering::Relaxed);
                light();
                light_words[1].load(Ordering::Relaxed)
            };
            (1..=rounds).map(run_round).collect::<Vec<_>>()
        });
        let run_round = |round| {
            gate.wait();
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

    /// A process that could not register uses fences, and a second call does not ask again.
    #[test]
    fn a_registration_that_the_kernel_refuses_is_known_soon() {
        static REGISTRATION: Registration =
            Registration::new(Command::PrivateExpeditedRseq, Command::PrivateExpeditedSyncCore);
        REGISTRATION.state.store(REFUSED, Ordering::SeqCst);
        let start = std::time::Instant::now();
        REGISTRATION.prepare();
        REGISTRATION.issue();
        assert!(!REGISTRATION.is_ready());
        assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    }

    /// A filter on system calls may come when others are light already.
    #[test]
    fn heavy_fence_survives_a_refused_membarrier() {
        let refused = Command::PrivateExpeditedRseq;
        assert!(membarrier(refused).is_err(), "nobody has asked for it");
        let registration = Registration::new(refused, refused);
        registration.state.store(READY, Ordering::SeqCst);
        registration.issue();
        heavy_global();
    }
}
