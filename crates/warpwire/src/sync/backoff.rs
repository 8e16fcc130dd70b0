//! How a thread waits for another one without starving it.
//!
//! A waiter spins for a moment, yields for as long as that costs nothing, and then sleeps, longer the longer it has waited.
//! Yielding is bounded because it is expensive on a busy machine: where another thread is runnable, Linux's scheduler (EEVDF)
//! takes a time slice (some 3 ms) from a thread that yields, so that one that has yielded a thousand times may not run
//! for seconds. A thread that sleeps keeps its claim to the processor.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Looks before the first yield: some microseconds.
const SPINS: u32 = 64;
/// Yields of one wait, if none of them is slow.
const YIELDING: Duration = Duration::from_micros(500);
/// A yield that takes longer has let another thread run.
const SLOW_YIELD: Duration = Duration::from_micros(100);
/// After a slow yield a thread yields no more for this long.
const CONTENDED: Duration = Duration::from_millis(50);
/// Bounds of a sleep. In between it is an eighth of the time that has passed since the wait began.
const MIN_SLEEP: Duration = Duration::from_micros(20);
const MAX_SLEEP: Duration = Duration::from_millis(1);
/// The yields of a wait that keeps no time.
const YIELDS: u32 = 4;

thread_local!(static CONTENDED_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) });

/// The state of one wait.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    looks: u32,
    /// When spinning was over.
    since: Option<Instant>,
}

impl Backoff {
    /// Waits a little before the caller looks again.
    pub(crate) fn snooze(&mut self) {
        if self.looks < SPINS {
            self.looks += 1;
            return std::hint::spin_loop();
        }
        let now = Instant::now();
        let waited = now.duration_since(*self.since.get_or_insert(now));
        if waited < YIELDING && !is_contended(now) {
            yield_from(now);
        } else {
            std::thread::sleep((waited / 8).clamp(MIN_SLEEP, MAX_SLEEP));
        }
    }
}

/// Waits a little, for the `looks`th time: for waits that are short but for preempted threads, and keep no state.
pub(crate) fn pause(looks: u32) {
    match looks {
        0..SPINS => std::hint::spin_loop(),
        _ if looks < SPINS + YIELDS && !is_contended(Instant::now()) => yield_from(Instant::now()),
        _ => {
            let doublings = (looks.saturating_sub(SPINS + YIELDS) / 4).min(8);
            std::thread::sleep((MIN_SLEEP * (1 << doublings)).min(MAX_SLEEP));
        }
    }
}

fn is_contended(now: Instant) -> bool {
    CONTENDED_UNTIL.get().is_some_and(|until| now < until)
}

fn yield_from(now: Instant) {
    std::thread::yield_now();
    let after = Instant::now();
    if after - now > SLOW_YIELD {
        CONTENDED_UNTIL.set(Some(after + CONTENDED));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_sleeps_and_does_not_spin() {
        let start = Instant::now();
        let (mut backoff, mut looks) = (Backoff::default(), 0_u32);
        while start.elapsed() < Duration::from_millis(200) {
            backoff.snooze();
            looks += 1;
        }
        // 500 µs of yields, and then some 300 sleeps; a thread that spins looks millions of times.
        assert!(looks < 20_000, "{looks}");
    }

    #[test]
    fn the_sleep_of_a_stateless_wait_is_bounded() {
        for looks in [0, SPINS, SPINS + YIELDS, 1000, u32::MAX] {
            pause(looks);
        }
    }
}
