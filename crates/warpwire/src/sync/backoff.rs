//! Backoff: how a thread waits for another one without starving it.
//!
//! A waiter spins briefly, yields while that is cheap, and then sleeps, longer the longer it has
//! waited. Yielding is bounded because it is expensive on a busy machine: where another thread is
//! runnable, Linux's scheduler (EEVDF) charges a thread that yields a time slice (some 3 ms), so
//! that one that has yielded a thousand times may not run for seconds. A thread that sleeps keeps
//! its claim to the CPU.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Iterations before the first yield: some microseconds.
const SPINS: u32 = 64;
/// Total time spent yielding in one wait, if no yield is slow.
const YIELD_BUDGET: Duration = Duration::from_micros(500);
/// A yield that takes longer has let another thread run.
const SLOW_YIELD: Duration = Duration::from_micros(100);
/// After a slow yield a thread does not yield for this long.
const CONTENDED_PERIOD: Duration = Duration::from_millis(50);
/// Bounds of a sleep. In between it is an eighth of the time since the wait began.
const MIN_SLEEP: Duration = Duration::from_micros(20);
const MAX_SLEEP: Duration = Duration::from_millis(1);
/// Yields of a stateless wait ([`pause`]).
const YIELDS: u32 = 4;

thread_local!(static CONTENDED_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) });

#[derive(Debug, Default)]
pub(crate) struct Backoff {
    checks: u32,
    /// When spinning ended.
    since: Option<Instant>,
}

impl Backoff {
    /// Waits before the caller's next check.
    pub(crate) fn snooze(&mut self) {
        if self.checks < SPINS {
            self.checks += 1;
            return std::hint::spin_loop();
        }
        let now = Instant::now();
        let waited = now.duration_since(*self.since.get_or_insert(now));
        if waited < YIELD_BUDGET && !is_contended(now) {
            yield_from(now);
        } else {
            std::thread::sleep((waited / 8).clamp(MIN_SLEEP, MAX_SLEEP));
        }
    }
}

/// Stateless backoff before check number `checks`: for waits that are short unless a thread is
/// preempted.
pub(crate) fn pause(checks: u32) {
    match checks {
        0..SPINS => std::hint::spin_loop(),
        _ if checks < SPINS + YIELDS && !is_contended(Instant::now()) => yield_from(Instant::now()),
        _ => {
            let doublings = (checks.saturating_sub(SPINS + YIELDS) / 4).min(8);
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
        CONTENDED_UNTIL.set(Some(after + CONTENDED_PERIOD));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_sleeps_and_does_not_spin() {
        let start = Instant::now();
        let (mut backoff, mut checks) = (Backoff::default(), 0_u32);
        while start.elapsed() < Duration::from_millis(200) {
            backoff.snooze();
            checks += 1;
        }
        // 500 µs of yields, and then some 300 sleeps; a spinning thread would check millions of
        // times.
        assert!(checks < 20_000, "{checks}");
    }

    #[test]
    fn the_sleep_of_a_stateless_wait_is_bounded() {
        for checks in [0, SPINS, SPINS + YIELDS, 1000, u32::MAX] {
            pause(checks);
        }
    }
}
