//! `warpwire copy api`: time to open and close CPU windows.

use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use serde::Serialize;

use super::clock::{Bin, Series, Times, figure};
use super::target::{Bench, Setting, Target, iterations, size};
use super::{Failure, Reporter};

/// Measure the time to open and to close a CPU window, by size
///
/// Opens and closes CPU windows of doubling size onto one allocation of device memory, and prints a
/// histogram of the times to open the largest. The first window of a process takes longer, because
/// the driver's mapping is then verified on scratch memory; it has its own line. Times are medians
/// in microseconds.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    target: Target,

    /// Max window size
    #[arg(short = 's', long, value_name = "SIZE", default_value = "16MiB", value_parser = size)]
    size: u64,

    /// Timed repetitions per size
    #[arg(short = 'n', long, value_name = "N", default_value = "100", value_parser = iterations)]
    iterations: u32,

    /// Warm-up repetitions per size
    #[arg(short = 'w', long, value_name = "N", default_value = "10")]
    warmup: u32,

    /// Print JSON: {"setting": {…}, "first_us": …,
    /// "rows": [{"size": …, "open": {…}, "close": {…}, …}]}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire copy api
  warpwire copy api -s 1GiB -n 1000
  warpwire copy api --json | jq '.rows[] | [.size, .open.median_us]'";

/// Smallest window of the table: a GPU page.
const MIN_SIZE: u64 = 64 << 10;

#[derive(Serialize)]
struct Outcome {
    setting: Setting,
    first_us: f64,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    size: u64,
    open: Times,
    close: Times,
    histogram: Vec<Bin>,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let bench = arguments.target.open(arguments.size)?;
    let setting = bench.setting();
    let reporter = Reporter::for_measurement(arguments.json);
    reporter.print(&setting.heading("api"))?;
    let first_us = bench.first_window.as_secs_f64() * 1e6;
    let first = figure(first_us);
    reporter.print(&format!("# first window of this process: {first} us\n"))?;
    reporter.print("# median us\n")?;
    reporter.print(&format!("{:>12} {:>10} {:>10}\n", "Size(B)", "open", "close"))?;
    let mut rows = Vec::new();
    for size in sizes(arguments.size) {
        reporter.set_status(format!("windows of {size} bytes"));
        let row = measure(&bench, size, arguments)?;
        let (open, close) = (figure(row.open.median_us), figure(row.close.median_us));
        reporter.print(&format!("{size:>12} {open:>10} {close:>10}\n"))?;
        rows.push(row);
    }
    if let Some(last) = rows.last() {
        reporter.print(&histogram(last))?;
    }
    reporter.finish(&Outcome { setting, first_us, rows })?;
    Ok(ExitCode::SUCCESS)
}

/// Doubles from [`MIN_SIZE`]; ends with `max_size`, which need not be a power of two.
fn sizes(max_size: u64) -> Vec<u64> {
    let doubling = (0..).map(|step| MIN_SIZE << step).take_while(|size| *size < max_size);
    doubling.chain([max_size]).collect()
}

fn measure(bench: &Bench, size: u64, arguments: &Arguments) -> Result<Row, Failure> {
    let (mut open, mut close) = (Series::default(), Series::default());
    for round in 0..arguments.warmup.saturating_add(arguments.iterations) {
        let start = Instant::now();
        let window = bench.memory.window_with(0, size, &bench.options)?;
        let opened = start.elapsed();
        let start = Instant::now();
        drop(window);
        let closed = start.elapsed();
        if round >= arguments.warmup {
            open.add(opened, 1);
            close.add(closed, 1);
        }
    }
    let histogram = open.histogram();
    Ok(Row { size, open: open.times(), close: close.times(), histogram })
}

fn histogram(row: &Row) -> String {
    let mut text = format!("Histogram of the time to open {} bytes (us)\n", row.size);
    for Bin { from_us, to_us, count } in &row.histogram {
        let (from, to) = (figure(*from_us), figure(*to_us));
        text += &format!("[{from:>10} - {to:>10}] {count:>8}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_end_with_the_max() {
        assert_eq!(sizes(100), [100]);
        assert_eq!(sizes(65_536), [65_536]);
        assert_eq!(sizes(200_000), [65_536, 131_072, 200_000]);
    }
}
