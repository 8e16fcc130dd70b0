//! Timing of short calls.

use std::time::{Duration, Instant};

use serde::Serialize;
use warpwire::Result;

/// Calls are timed in so many groups, since one call may be shorter than the clock's own reading.
const GROUPS: u32 = 100;
const WARM_UPS: u32 = 10;
/// Calls that take less are timed one by one; others in groups of at least this long, so that the clock's
/// own time is lost in them.
const GROUP: Duration = Duration::from_micros(2);
/// A series ends when this has passed, however many calls were asked for.
const BUDGET: Duration = Duration::from_millis(100);

/// Between short calls.
const PAUSE: Duration = Duration::from_nanos(500);

/// What reading the clock twice takes by itself.
fn clock_cost() -> Duration {
    let mut costs: Vec<_> = (0..1001).map(|_| Instant::now().elapsed()).collect();
    costs.sort();
    costs[500]
}

/// The times of a call, in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Times {
    pub(crate) median_us: f64,
    pub(crate) min_us: f64,
    pub(crate) mean_us: f64,
    /// How many calls that rests on.
    pub(crate) calls: u64,
}

/// Measurements of one call, which may be taken in several goes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series {
    /// Microseconds a call, group by group.
    groups: Vec<f64>,
    total: Duration,
    calls: u64,
}

impl Series {
    /// Calls `act` so many times, or for as long as there is time, after warming up.
    pub(super) fn run(&mut self, times: u32, mut act: impl FnMut() -> Result<()>) -> Result<()> {
        let start = Instant::now();
        let mut warm_ups = 0;
        while warm_ups < WARM_UPS && (warm_ups == 0 || start.elapsed() < BUDGET / 4) {
            act()?;
            warm_ups += 1;
        }
        let each = start.elapsed() / warm_ups;
        if each > BUDGET {
            // One more would tell no more.
            self.add(each, 1);
            return Ok(());
        }
        if each < GROUP {
            return self.run_spaced(times, act);
        }
        let calls_in = |time: Duration| {
            u32::try_from(time.as_nanos() / each.as_nanos().max(1)).unwrap_or(u32::MAX)
        };
        let group =
            times.div_ceil(GROUPS).min(calls_in(BUDGET / GROUPS)).max(calls_in(GROUP)).max(1);
        let (start, mut done) = (Instant::now(), 0);
        while done < times && (done == 0 || start.elapsed() < BUDGET) {
            let count = group.min(times - done);
            let before = Instant::now();
            for _ in 0..count {
                act()?;
            }
            self.add(before.elapsed(), count);
            done += count;
        }
        Ok(())
    }

    /// Times short calls one by one, with pauses between them. Back to back they would queue up behind each
    /// other on the bus, and show its rate, not the time that a caller waits.
    fn run_spaced(&mut self, times: u32, mut act: impl FnMut() -> Result<()>) -> Result<()> {
        let clock = clock_cost();
        let start = Instant::now();
        for _ in 0..times {
            let before = Instant::now();
            act()?;
            let took = before.elapsed();
            // No call takes nothing: what is left is at least the clock's smallest step.
            self.add(took.saturating_sub(clock).max(Duration::from_nanos(1)), 1);
            while before.elapsed() < took + PAUSE {
                std::hint::spin_loop();
            }
            if start.elapsed() > BUDGET {
                break;
            }
        }
        Ok(())
    }

    /// Adds what so many calls took.
    pub(crate) fn add(&mut self, took: Duration, calls: u32) {
        self.groups.push(microseconds(took) / f64::from(calls.max(1)));
        self.total += took;
        self.calls += u64::from(calls);
    }

    pub(crate) fn times(&self) -> Times {
        let mut sorted = self.groups.clone();
        sorted.sort_by(f64::total_cmp);
        Times {
            median_us: sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN),
            min_us: sorted.first().copied().unwrap_or(f64::NAN),
            mean_us: microseconds(self.total) / self.calls.max(1) as f64,
            calls: self.calls,
        }
    }

    /// How the groups' times are spread: ten equal steps from the least to the most, and how many fell
    /// into each.
    pub(super) fn histogram(&self) -> Vec<Bin> {
        const BINS: usize = 10;
        let shortest = self.groups.iter().copied().fold(f64::INFINITY, f64::min);
        let longest = self.groups.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let width = (longest - shortest) / BINS as f64;
        let edge = |bin: usize| shortest + width * bin as f64;
        let mut bins: Vec<Bin> = (0..BINS)
            .map(|bin| Bin { from_us: edge(bin), to_us: edge(bin + 1), count: 0 })
            .collect();
        for time in &self.groups {
            let bin = ((time - shortest) / width.max(1e-12)) as usize;
            bins[bin.min(BINS - 1)].count += 1;
        }
        bins
    }
}

/// One step of a histogram.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Bin {
    pub(super) from_us: f64,
    pub(super) to_us: f64,
    pub(super) count: usize,
}

fn microseconds(took: Duration) -> f64 {
    took.as_secs_f64() * 1e6
}

/// A time or a ratio with about three figures that mean something.
pub(crate) fn figure(value: f64) -> String {
    match value.abs() {
        small if small < 1.0 => format!("{value:.3}"),
        middle if middle < 100.0 => format!("{value:.2}"),
        _ => format!("{value:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(times: &[u64]) -> Series {
        let mut series = Series::default();
        times.iter().for_each(|us| series.add(Duration::from_micros(*us), 1));
        series
    }

    #[test]
    fn times_are_of_the_calls() {
        let times = series(&[5, 1, 3]).times();
        assert_eq!((times.median_us, times.min_us, times.mean_us, times.calls), (3.0, 1.0, 3.0, 3));
        let mut grouped = Series::default();
        grouped.add(Duration::from_micros(100), 50);
        assert_eq!(grouped.times().median_us, 2.0);
    }

    #[test]
    fn histograms_hold_every_time() {
        let bins = series(&[1, 2, 3, 11]).histogram();
        let counts: Vec<usize> = bins.iter().map(|bin| bin.count).collect();
        assert_eq!(counts, [1, 1, 1, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(series(&[7, 7]).histogram()[0].count, 2);
    }

    #[test]
    fn a_series_ends_in_time() {
        let (mut calls, mut series) = (0, Series::default());
        let act = || {
            calls += 1;
            std::thread::sleep(Duration::from_millis(1));
            Ok(())
        };
        series.run(1_000_000, act).unwrap();
        assert!(calls < 1000 && series.times().calls > 0, "{calls} calls");
        assert!(series.times().min_us >= 1000.0);
    }
}
