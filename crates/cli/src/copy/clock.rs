//! Timing of short calls, with the cost of reading the clock taken out.

use std::time::{Duration, Instant};

use serde::Serialize;
use warpwire::Result;

/// Calls are timed in about this many groups: one call may be shorter than reading the clock.
const GROUPS: u32 = 100;
/// Max warm-up calls.
const WARM_UPS: u32 = 10;
/// Calls shorter than this are timed one by one with the clock's cost subtracted; others in groups
/// of at least this long, in which the clock's cost is negligible.
const GROUP: Duration = Duration::from_micros(2);
/// Max time of a series, however many calls were requested.
const BUDGET: Duration = Duration::from_millis(100);

/// Pause between short calls.
const PAUSE: Duration = Duration::from_nanos(500);

/// Median time of reading the clock twice.
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
    /// Number of timed calls.
    pub(crate) calls: u64,
}

/// Measurements of one call, which may be collected in several runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series {
    /// Microseconds per call, one entry per group.
    groups: Vec<f64>,
    total: Duration,
    calls: u64,
}

impl Series {
    /// Calls `act` up to `times` times within [`BUDGET`], after a warm-up.
    pub(super) fn run(&mut self, times: u32, mut act: impl FnMut() -> Result<()>) -> Result<()> {
        let start = Instant::now();
        let mut warm_ups = 0;
        while warm_ups < WARM_UPS && (warm_ups == 0 || start.elapsed() < BUDGET / 4) {
            act()?;
            warm_ups += 1;
        }
        let each = start.elapsed() / warm_ups;
        if each > BUDGET {
            // One call exceeds the budget: the warm-up is the measurement.
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

    /// Times short calls one by one, with pauses between them. Back to back they would queue up on
    /// the bus and show its throughput instead of the caller's latency.
    fn run_spaced(&mut self, times: u32, mut act: impl FnMut() -> Result<()>) -> Result<()> {
        let clock = clock_cost();
        let start = Instant::now();
        for _ in 0..times {
            let before = Instant::now();
            act()?;
            let took = before.elapsed();
            // At least 1 ns: a call never takes zero time.
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

    /// Adds a group of `calls` calls that took `took` in total.
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

    /// Histogram of the groups' times, in ten equal bins from min to max.
    pub(super) fn histogram(&self) -> Vec<Bin> {
        const BINS: usize = 10;
        let min = self.groups.iter().copied().fold(f64::INFINITY, f64::min);
        let max = self.groups.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let width = (max - min) / BINS as f64;
        let edge = |bin: usize| min + width * bin as f64;
        let mut bins: Vec<Bin> = (0..BINS)
            .map(|bin| Bin { from_us: edge(bin), to_us: edge(bin + 1), count: 0 })
            .collect();
        for time in &self.groups {
            let bin = ((time - min) / width.max(1e-12)) as usize;
            bins[bin.min(BINS - 1)].count += 1;
        }
        bins
    }
}

/// One bin of a histogram.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Bin {
    pub(super) from_us: f64,
    pub(super) to_us: f64,
    pub(super) count: usize,
}

fn microseconds(took: Duration) -> f64 {
    took.as_secs_f64() * 1e6
}

/// Formats a time or a ratio with about three significant digits.
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
    fn times_are_per_call() {
        let times = series(&[5, 1, 3]).times();
        assert_eq!((times.median_us, times.min_us, times.mean_us, times.calls), (3.0, 1.0, 3.0, 3));
        let mut grouped = Series::default();
        grouped.add(Duration::from_micros(100), 50);
        assert_eq!(grouped.times().median_us, 2.0);
    }

    #[test]
    fn histograms_count_every_group() {
        let bins = series(&[1, 2, 3, 11]).histogram();
        let counts: Vec<usize> = bins.iter().map(|bin| bin.count).collect();
        assert_eq!(counts, [1, 1, 1, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(series(&[7, 7]).histogram()[0].count, 2);
    }

    #[test]
    fn a_series_stays_within_its_budget() {
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
