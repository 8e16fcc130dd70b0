//! The times of single messages: a histogram, and all of them in the order of measurement.

use serde::{Deserialize, Serialize};

use super::Arguments;
use super::table::{Row, figure};

/// Times in nanoseconds, in the order of measurement.
pub(super) type Samples = Vec<u32>;

/// Messages whose time is at least `from_us`, and less than `to_us`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Bin {
    pub(super) from_us: f64,
    pub(super) to_us: f64,
    pub(super) count: u64,
}

/// Lower ends of the bins of a decade.
const STEPS: [f64; 6] = [1.0, 1.5, 2.0, 3.0, 5.0, 7.0];
/// Columns of the longest bar.
const BAR: usize = 40;

/// Bins from that of the shortest time to that of the longest, of equal width on a logarithmic
/// scale, or nearly so.
fn histogram(times: &[u32]) -> Vec<Bin> {
    let edge = |number: usize| {
        let decade = 10_f64.powi((number / STEPS.len()) as i32);
        // The first edge is 1 ns.
        STEPS[number % STEPS.len()] * decade / 1e3
    };
    let mut counts = [0_u64; 64];
    for time in times {
        let us = f64::from(*time) / 1e3;
        let bin = (1..counts.len()).find(|bin| us < edge(*bin)).unwrap_or(counts.len());
        counts[bin - 1] += 1;
    }
    let first = counts.iter().position(|count| *count > 0).unwrap_or(0);
    let last = counts.iter().rposition(|count| *count > 0).map_or(first, |last| last + 1);
    let bin = |bin: usize| Bin { from_us: edge(bin), to_us: edge(bin + 1), count: counts[bin] };
    (first..last).map(bin).collect()
}

/// Adds what `-H` and `-U` ask for to a row.
pub(super) fn add(row: Row, samples: &[u32], arguments: &Arguments) -> Row {
    // The server has no samples.
    let wanted = |flag: bool| flag && !samples.is_empty();
    Row {
        histogram: wanted(arguments.report_histogram).then(|| histogram(samples)),
        times_us: wanted(arguments.report_unsorted)
            .then(|| samples.iter().map(|time| f64::from(*time) / 1e3).collect()),
        ..row
    }
}

/// The text of `-H` and `-U`; empty without them.
pub(super) fn render(row: &Row, arguments: &Arguments) -> String {
    if arguments.csv {
        return String::new();
    }
    let mut text = String::new();
    if let Some(bins) = &row.histogram {
        let total = bins.iter().map(|bin| bin.count).sum::<u64>().max(1);
        let max = bins.iter().map(|bin| bin.count).max().unwrap_or(1).max(1);
        text +=
            &format!("#  {:>9} {:>9} {:>10} {:>7}\n", "from[us]", "to[us]", "messages", "up to");
        let mut below = 0;
        for Bin { from_us, to_us, count } in bins {
            below += count;
            let share = below as f64 / total as f64 * 100.0;
            let bar = "#".repeat((count * BAR as u64).div_ceil(max) as usize);
            let (from, to) = (figure(*from_us), figure(*to_us));
            let line = format!("#  {from:>9} {to:>9} {count:>10} {share:>6.2}% {bar}");
            text += line.trim_end();
            text.push('\n');
        }
    }
    if let Some(times) = &row.times_us {
        text += "#, usec\n";
        for (number, time) in times.iter().enumerate() {
            text += &format!("{}, {time:.3}\n", number + 1);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_is_in_one_bin() {
        let times = [5000, 5001, 6999, 7000, 10_000, 14_999, 15_000, 900_000];
        let bins = histogram(&times);
        assert_eq!(bins.iter().map(|bin| bin.count).sum::<u64>(), times.len() as u64);
        assert_eq!((bins[0].from_us, bins[0].to_us, bins[0].count), (5.0, 7.0, 3));
        assert_eq!((bins[1].count, bins[2].count, bins[3].count), (1, 2, 1));
        let last = bins.last().unwrap();
        assert!((last.from_us..last.to_us).contains(&900.0), "{last:?}");
        assert!(bins.is_sorted_by(|a, b| a.to_us == b.from_us), "{bins:?}");
    }

    #[test]
    fn extreme_times_have_bins() {
        let bins = histogram(&[0, u32::MAX]);
        assert_eq!((bins[0].count, bins.last().unwrap().count), (1, 1));
        assert_eq!(histogram(&[]), []);
    }
}
