//! Fences in pairs of which one side is free: [`light`] keeps the compiler from reordering, [`heavy`] has the kernel put a fence
//! into every thread that is running, and those that are not have had one as they stopped.
//!
//! What both sides of a pair do is as if each had a fence of the strongest sort. Where the kernel cannot do that, or
//! may not by a filter on system calls, each has one.

use std::sync::OnceLock;
use std::sync::atomic::{Ordering, compiler_fence, fence};
use std::time::Duration;

use rustix::thread::{MembarrierCommand as Command, membarrier};

/// Among the threads of this process.
static WITHIN: OnceLock<bool> = OnceLock::new();
/// Among all processes that have asked for it.
static EVERYWHERE: OnceLock<bool> = OnceLock::new();

/// Whether the kernel has taken this process in. The first call with several threads takes some milliseconds.
fn is_ready(known: &OnceLock<bool>, register: Command, raise: Command) -> bool {
    *known.get_or_init(|| membarrier(register).and_then(|()| membarrier(raise)).is_ok())
}

fn is_ready_within() -> bool {
    is_ready(&WITHIN, Command::RegisterPrivateExpedited, Command::PrivateExpedited)
}

/// Whether this process may be the light side, and the heavy one, of pairs with others: [`heavy_everywhere`].
pub(crate) fn is_ready_everywhere() -> bool {
    is_ready(&EVERYWHERE, Command::RegisterGlobalExpedited, Command::GlobalExpedited)
}

/// Makes the light side light from now on; till then it is a fence.
pub(crate) fn prepare() {
    is_ready_within();
}

/// Has the kernel take this process in beforehand.
pub(crate) fn prepare_everywhere() {
    is_ready_everywhere();
}

/// The side that happens all the time.
#[inline]
pub(crate) fn light() {
    match WITHIN.get() {
        Some(true) => compiler_fence(Ordering::SeqCst),
        _ => fence(Ordering::SeqCst),
    }
}

/// The side that happens now and then: microseconds.
#[cold]
pub(crate) fn heavy() {
    // Others may be light because it worked once.
    fence(Ordering::SeqCst);
    if is_ready_within() {
        raise(Command::RegisterPrivateExpedited, Command::PrivateExpedited);
    }
}

/// The heavy side for those in other processes that are light because they were told that this comes.
#[cold]
pub(crate) fn heavy_everywhere() {
    fence(Ordering::SeqCst);
    if is_ready_everywhere() {
        raise(Command::RegisterGlobalExpedited, Command::GlobalExpedited);
    }
}

/// What worked once works, unless a filter on system calls came since, or this is the child of the process that asked.
fn raise(register: Command, raise: Command) {
    let again = || membarrier(register).and_then(|()| membarrier(raise));
    if membarrier(raise).or_else(|_| again()).is_err() {
        // No processor keeps a store to itself for so long, with all the interrupts that fall into it.
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use std::sync::{Arc, Barrier};

    /// Each side stores its word and looks at the other's: one of them must see the other.
    #[test]
    fn of_two_that_store_and_look_one_sees_the_other() {
        prepare();
        let words = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let gate = Arc::new(Barrier::new(2));
        let rounds = 20_000_u32;
        let (theirs, their_gate) = (words.clone(), gate.clone());
        let light_side = std::thread::spawn(move || {
            let look = |round| {
                their_gate.wait();
                theirs[0].store(round, Ordering::Relaxed);
                light();
                theirs[1].load(Ordering::Relaxed)
            };
            (1..=rounds).map(look).collect::<Vec<_>>()
        });
        let look = |round| {
            gate.wait();
            words[1].store(round, Ordering::Relaxed);
            heavy();
            words[0].load(Ordering::Relaxed)
        };
        let seen_by_heavy: Vec<_> = (1..=rounds).map(look).collect();
        let seen_by_light = light_side.join().unwrap();
        for (round, (heavy, light)) in (1..).zip(seen_by_heavy.iter().zip(&seen_by_light)) {
            assert!(*heavy == round || *light == round, "round {round}: neither saw the other");
        }
    }

    /// A filter on system calls may come when others are light already.
    #[test]
    fn a_barrier_that_the_kernel_refuses_ends_all_the_same() {
        let refused = Command::PrivateExpeditedRseq;
        assert!(membarrier(refused).is_err(), "nobody has asked for it");
        raise(refused, refused);
        heavy_everywhere();
    }
}
