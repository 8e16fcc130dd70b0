//! Deadlines for tests, on machines of any speed and load.

use std::sync::{OnceLock, mpsc};
use std::time::{Duration, Instant};

/// Children inherit what their parent measured.
const ENV_VAR: &str = "WARPWIRE_SLOWDOWN";
/// Iterations of the loop that is timed, and what one of them takes on an idle server CPU of 2020.
const ITERATIONS: u64 = 10_000_000;
const REFERENCE: Duration = Duration::from_nanos(2);

/// How much longer than on an idle machine of our own a thread takes here for the same work: 1 or
/// more. Measured once per process tree with all cores busy (some 20 ms of CPU time per core):
/// other processes count by the wall-clock time that they take away, an emulator by its speed.
fn slowdown() -> f64 {
    static MEASURED: OnceLock<f64> = OnceLock::new();
    *MEASURED.get_or_init(|| {
        let inherited = std::env::var(ENV_VAR).ok().and_then(|text| text.parse().ok());
        inherited.unwrap_or_else(measure).max(1.0)
    })
}

/// The variable that tells a child process what was measured here.
pub(crate) fn inherit() -> (&'static str, String) {
    (ENV_VAR, slowdown().to_string())
}

/// How long a thread that spins for a moment and then sleeps takes to answer another one here and
/// now: the lower quartile of 40 rounds. A test that judges wake-ups compares with it, and does not judge where it is long: then
/// other processes have the cores.
pub fn wakeup_time() -> Duration {
    const ROUNDS: usize = 40;
    // The scheduler lets those wait who used the processor: so does who polls before it sleeps.
    let wait = |from: &mpsc::Receiver<()>| {
        let start = Instant::now();
        loop {
            match from.try_recv() {
                Err(mpsc::TryRecvError::Empty) if start.elapsed() < Duration::from_micros(50) => {}
                Err(mpsc::TryRecvError::Empty) => return from.recv().is_ok(),
                ended => return ended.is_ok(),
            }
        }
    };
    let ((to, from), (back, from_echo)) = (mpsc::channel::<()>(), mpsc::channel());
    let echo_thread = std::thread::spawn(move || {
        while wait(&from) {
            std::thread::sleep(Duration::from_micros(200));
            let _ = back.send(());
        }
    });
    let mut times: Vec<Duration> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            to.send(()).unwrap();
            wait(&from_echo);
            start.elapsed().saturating_sub(Duration::from_micros(200))
        })
        .collect();
    drop(to);
    echo_thread.join().unwrap();
    times.sort_unstable();
    times[ROUNDS / 4]
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

/// `time`, as it would be on an idle machine, for this one: the limit after which a test calls a
/// wait hopeless. Not for waits that a test expects to run out.
pub fn deadline(time: Duration) -> Duration {
    time.mul_f64(slowdown())
}

/// Waits for a condition, for at most 30 s of an idle machine's time; `what` names it if it never
/// holds.
#[track_caller]
pub fn until(what: &str, holds: impl FnMut() -> bool) {
    until_within(deadline(Duration::from_secs(30)), what, holds);
}

#[track_caller]
fn until_within(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < limit, "after {limit:?} still not: {what}");
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
    #[should_panic(expected = "after 5ms still not: pigs fly")]
    fn a_wait_in_vain_names_its_condition() {
        until_within(Duration::from_millis(5), "pigs fly", || false);
    }

    #[test]
    fn a_wait_ends_when_its_condition_holds() {
        let mut looks = 0;
        until("three looks", || {
            looks += 1;
            looks == 3
        });
        assert_eq!(looks, 3);
    }
}
