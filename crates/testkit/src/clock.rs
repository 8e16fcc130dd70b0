//! Deadlines for tests on machines of any speed and load.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Set for child processes, so that they do not measure again.
const ENV_VAR: &str = "WARPWIRE_SLOWDOWN";
/// Iterations of the timed loop, and the time of one on an idle server CPU of 2020.
const ITERATIONS: u64 = 10_000_000;
const REFERENCE: Duration = Duration::from_nanos(2);

/// The factor, at least 1, by which a thread is slower here than on an idle reference machine.
/// Measured once per process tree with all cores busy (some 20 ms of CPU time per core): load from
/// other processes counts by the wall-clock time that it takes, an emulator by its speed.
fn slowdown() -> f64 {
    static MEASURED: OnceLock<f64> = OnceLock::new();
    *MEASURED.get_or_init(|| {
        let inherited = std::env::var(ENV_VAR).ok().and_then(|text| text.parse().ok());
        inherited.unwrap_or_else(measure).max(1.0)
    })
}

/// The variable that passes the measured factor to a child process.
pub(crate) fn inherit() -> (&'static str, String) {
    (ENV_VAR, slowdown().to_string())
}

fn measure() -> f64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let times = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(time_loop)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let slowest = times.into_iter().max().unwrap_or_default();
    slowest.as_secs_f64() / (REFERENCE.as_secs_f64() * ITERATIONS as f64)
}

/// Wall-clock time of the loop on this thread.
fn time_loop() -> Duration {
    let (start, mut word) = (Instant::now(), 1_u64);
    for _ in 0..ITERATIONS {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
    }
    std::hint::black_box(word);
    start.elapsed()
}

/// Scales `time`, a duration on an idle machine, to this machine: the limit after which a test
/// gives up a wait. Not for waits that a test expects to time out.
pub fn deadline(time: Duration) -> Duration {
    time.mul_f64(slowdown())
}

/// The exponent of a retransmission timeout (4.096 us * 2^exponent) that is enough on an idle
/// machine, scaled to this machine as a [`deadline`] is. For peers that need a CPU to answer: not
/// for tests that count retries.
pub fn timeout_exponent(exponent: u8) -> u8 {
    exponent + slowdown().log2().ceil() as u8
}

/// Waits until a condition holds, for at most 30 s on an idle machine; `what` names it in the panic
/// message.
#[track_caller]
pub fn until(what: &str, holds: impl FnMut() -> bool) {
    until_within(deadline(Duration::from_secs(30)), what, holds);
}

/// Repeats an action until it takes less than `limit` once, at most ten times: load makes some
/// attempts slow, a lost wake-up makes all.
#[track_caller]
pub fn once_within(limit: Duration, what: &str, mut action: impl FnMut()) {
    let mut times = Vec::new();
    for _ in 0..10 {
        let start = Instant::now();
        action();
        let time = start.elapsed();
        if time < limit {
            return;
        }
        times.push(time);
    }
    panic!("{what} never took less than {limit:?}: {times:?}");
}

#[track_caller]
fn until_within(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < limit, "timed out after {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_never_shrink() {
        assert!(slowdown() >= 1.0);
        assert!(deadline(Duration::from_secs(3)) >= Duration::from_secs(3));
    }

    #[test]
    fn timeouts_never_shrink() {
        assert!((12..=12 + slowdown() as u8).contains(&timeout_exponent(12)));
    }

    #[test]
    #[should_panic(expected = "timed out after 5ms: pigs fly")]
    fn a_timeout_names_its_condition() {
        until_within(Duration::from_millis(5), "pigs fly", || false);
    }

    #[test]
    fn one_fast_attempt_is_enough() {
        let mut attempts = 0;
        once_within(Duration::from_millis(5), "the second attempt", || {
            attempts += 1;
            std::thread::sleep(Duration::from_millis(if attempts == 1 { 6 } else { 0 }));
        });
        assert!(attempts > 1);
    }

    #[test]
    #[should_panic(expected = "sleep never took less than 1ms")]
    fn no_fast_attempt_is_a_failure() {
        let sleep = || std::thread::sleep(Duration::from_millis(1));
        once_within(Duration::from_millis(1), "sleep", sleep);
    }

    #[test]
    fn until_returns_when_the_condition_holds() {
        let mut polls = 0;
        until("three polls", || {
            polls += 1;
            polls == 3
        });
        assert_eq!(polls, 3);
    }
}
