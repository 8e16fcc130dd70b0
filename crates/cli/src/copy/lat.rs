//! `warpwire copy lat`: latency of copies by size, direction and method.

use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use warpwire::mem::copy::{Copier, CopyDirection, CopyMethod, CopyPlan, Routine};
use warpwire::mem::{Allocation, CopyAgent, Region};
use warpwire::units;
use warpwire_apps::pattern;

use super::clock::{Series, Times, figure};
use super::target::{Bench, Setting, Target, iterations};
use super::{Failure, Reporter};

/// Measure the latency of copies by size, in both directions
///
/// For each size: `best`, the library's choice, with the method it uses; `window`, a plain loop of
/// the widest loads or stores through the CPU window; `engine`, the driver's copy (cuMemcpy), from
/// and to pageable host memory; with --agent, `agent`, the resident kernel, from and to pinned host
/// memory. Each as median and min, in microseconds. The last column is best divided by the better
/// of engine and window, of the medians. The columns of a row are measured in alternating passes,
/// and the data that `best` copied is verified.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    target: Target,

    /// Max size, 4 to 64MiB
    #[arg(short = 's', long, value_name = "SIZE", default_value = "16MiB", value_parser = limit)]
    size: u64,

    /// Max number of writes to time per figure
    #[arg(short = 'w', long, value_name = "N", default_value = "10000", value_parser = iterations)]
    writes: u32,

    /// Max number of reads to time per figure
    #[arg(short = 'r', long, value_name = "N", default_value = "1000", value_parser = iterations)]
    reads: u32,

    /// Also copy at unaligned device and host addresses
    #[arg(long)]
    odd: bool,

    /// Show the window with each kind of copy instructions of this CPU
    #[arg(long)]
    routines: bool,

    /// Start the copy agent (a resident kernel), show it, and let `best` use it
    #[arg(long)]
    agent: bool,

    /// Use cold caches: start each copy elsewhere in 256 MiB of host memory
    #[arg(short = 'C', long)]
    cold: bool,

    /// Accepted for compatibility with gdrcopy; the engine is always measured
    #[arg(short = 'c', hide = true)]
    engine: bool,

    /// Print JSON: {"setting": {…}, "rows": [{"test": …, "size": …, "cells": [{…}], "ratio": …}]}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire copy lat
  warpwire copy lat -s 64MiB --odd --agent
  warpwire copy lat -s 4KiB --routines           which instructions copy fastest
  warpwire copy lat --json | jq '[.rows[].ratio] | max'";

const MIN_SIZE: u64 = 4;
const MAX_SIZE: u64 = 64 << 20;
/// Offsets of unaligned copies, on the device and on the host.
const ODD: (u64, usize) = (13, 3);
/// More than the caches of a CPU hold.
const COLD: usize = 256 << 20;
/// Alternating passes over the columns of a row.
const PASSES: u32 = 3;

fn limit(text: &str) -> Result<u64, String> {
    let size = units::parse_bytes(text).map_err(|error| error.to_string())?;
    if (MIN_SIZE..=MAX_SIZE).contains(&size) {
        return Ok(size);
    }
    Err("the max size must be between 4 and 64MiB".to_owned())
}

#[derive(Serialize)]
struct Outcome {
    setting: Setting,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    test: String,
    size: u64,
    odd: bool,
    /// The method that `best` used.
    method: CopyMethod,
    cells: Vec<Cell>,
    ratio: f64,
}

#[derive(Serialize)]
struct Cell {
    column: String,
    #[serde(flatten)]
    times: Times,
}

/// A copy method with its own column.
#[derive(Clone, Copy, PartialEq)]
enum Column {
    Best,
    Window,
    Routine(Routine),
    Engine,
    Agent,
}

impl Column {
    fn name(self) -> String {
        match self {
            Self::Best => "best".to_owned(),
            Self::Window => "window".to_owned(),
            Self::Routine(routine) => routine.to_string(),
            Self::Engine => "engine".to_owned(),
            Self::Agent => "agent".to_owned(),
        }
    }
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let buffer_len = arguments.size + 64;
    let bench = arguments.target.open(buffer_len)?;
    let setting = bench.setting();
    let reporter = Reporter::for_measurement(arguments.json);
    reporter.print(&setting.heading("lat"))?;
    reporter.set_status("starting");
    let plan = CopyPlan::for_device(&bench.device)?;
    let agent = arguments.agent.then(|| CopyAgent::start(&bench.device)).transpose()?;
    let columns = columns(arguments);
    let runner = Runner {
        copier: Copier::with(&bench.memory, plan, agent.clone())?,
        pinned: agent.as_ref().map(|_| bench.device.alloc_pinned(buffer_len)).transpose()?,
        agent,
        bench: &bench,
    };
    let buffer_len = if arguments.cold { COLD } else { 0 }.max(buffer_len as usize);
    let mut host = HostBuffer { buffer: vec![0; buffer_len], at: 0, cold: arguments.cold };
    reporter.print(&heading(&columns))?;
    let mut rows = Vec::new();
    for direction in [CopyDirection::Write, CopyDirection::Read] {
        for odd in [false, true] {
            if odd && !arguments.odd {
                continue;
            }
            for size in sizes(arguments.size) {
                let point = TestPoint { direction, size, odd };
                reporter.set_status(format!("{} {size}", point.test()));
                let row = runner.row(&point, &columns, &mut host, arguments)?;
                reporter.print(&line(&row))?;
                rows.push(row);
            }
        }
    }
    reporter.finish(&Outcome { setting, rows })?;
    Ok(ExitCode::SUCCESS)
}

fn columns(arguments: &Arguments) -> Vec<Column> {
    let mut columns = vec![Column::Best];
    match arguments.routines {
        true => columns.extend(Routine::available().into_iter().map(Column::Routine)),
        false => columns.push(Column::Window),
    }
    columns.push(Column::Engine);
    if arguments.agent {
        columns.push(Column::Agent);
    }
    columns
}

/// Doubles from [`MIN_SIZE`]; ends with `max_size`, which need not be a power of two.
fn sizes(max_size: u64) -> Vec<u64> {
    let doubling = (0..).map(|step| MIN_SIZE << step).take_while(|size| *size < max_size);
    doubling.chain([max_size]).collect()
}

fn heading(columns: &[Column]) -> String {
    let mut text = format!("# us: median and min\n{:<20} {:>9}", "Test", "Size(B)");
    for column in columns {
        text += &format!(" {:>8} {:>8}", column.name(), "min");
    }
    text + &format!("  {:<6} {:>6}\n", "method", "ratio")
}

fn line(row: &Row) -> String {
    let mut text = format!("{:<20} {:>9}", row.test, row.size);
    for Cell { times, .. } in &row.cells {
        text += &format!(" {:>8} {:>8}", figure(times.median_us), figure(times.min_us));
    }
    text + &format!("  {:<6} {:>6}\n", row.method, figure(row.ratio))
}

/// The copy that one row measures.
struct TestPoint {
    direction: CopyDirection,
    size: u64,
    odd: bool,
}

impl TestPoint {
    fn test(&self) -> String {
        let name = match self.direction {
            CopyDirection::Write => "copy_to_window",
            CopyDirection::Read => "copy_from_window",
        };
        if self.odd { format!("{name}_odd") } else { name.to_owned() }
    }

    /// Offsets on the device and on the host.
    fn offsets(&self) -> (u64, usize) {
        if self.odd { ODD } else { (0, 0) }
    }
}

/// The host side of the copies.
struct HostBuffer {
    buffer: Vec<u8>,
    at: usize,
    cold: bool,
}

impl HostBuffer {
    /// The next slice to copy from or to.
    fn next_slice(&mut self, point: &TestPoint) -> &mut [u8] {
        let (len, shift) = (point.size as usize, point.offsets().1);
        if self.cold {
            self.at = (self.at + len.next_multiple_of(4096)) % (self.buffer.len() - len - shift);
            self.at -= self.at % 64;
        }
        &mut self.buffer[self.at + shift..][..len]
    }
}

/// Everything needed to measure a row.
struct Runner<'a> {
    bench: &'a Bench,
    copier: Copier,
    agent: Option<Arc<CopyAgent>>,
    /// Host memory of the agent's copies.
    pinned: Option<Allocation>,
}

impl Runner<'_> {
    fn row(
        &self,
        point: &TestPoint,
        columns: &[Column],
        host: &mut HostBuffer,
        arguments: &Arguments,
    ) -> Result<Row, Failure> {
        let times = match point.direction {
            CopyDirection::Write => arguments.writes,
            CopyDirection::Read => arguments.reads,
        };
        let regions = self.regions(point)?;
        let mut all = vec![Series::default(); columns.len()];
        for _ in 0..PASSES {
            for (column, series) in columns.iter().zip(&mut all) {
                let act = || self.copy(*column, point, host.next_slice(point), regions.as_ref());
                series.run(times.div_ceil(PASSES), act)?;
            }
        }
        self.verify(point)?;
        let cells: Vec<Cell> = columns
            .iter()
            .zip(&all)
            .map(|(column, series)| Cell { column: column.name(), times: series.times() })
            .collect();
        let others = columns.iter().zip(&cells).filter(|(column, _)| {
            matches!(column, Column::Window | Column::Routine(_) | Column::Engine)
        });
        let best_other = others.map(|(_, cell)| cell.times.median_us).fold(f64::INFINITY, f64::min);
        let best = cells.first().map_or(f64::NAN, |cell| cell.times.median_us);
        let method = self.copier.method(point.direction, point.size);
        let (test, size, odd) = (point.test(), point.size, point.odd);
        Ok(Row { test, size, odd, method, cells, ratio: best / best_other })
    }

    /// Device and host regions of the agent's copies, with the same offset modulo 16.
    fn regions(&self, point: &TestPoint) -> Result<Option<(Region, Region)>, Failure> {
        let Some(pinned) = &self.pinned else { return Ok(None) };
        let at = point.offsets().0;
        let device = self.bench.memory.region(at, point.size)?;
        Ok(Some((device, pinned.region(at, point.size)?)))
    }

    fn copy(
        &self,
        column: Column,
        point: &TestPoint,
        host: &mut [u8],
        regions: Option<&(Region, Region)>,
    ) -> warpwire::Result<()> {
        let window = &self.bench.window;
        let at = point.offsets().0;
        match (column, point.direction) {
            (Column::Best, CopyDirection::Write) => self.copier.write(at, host),
            (Column::Best, CopyDirection::Read) => self.copier.read(at, host),
            (Column::Window, CopyDirection::Write) => window.write(at, host),
            (Column::Window, CopyDirection::Read) => window.read(at, host),
            (Column::Routine(routine), CopyDirection::Write) => {
                window.write_with(routine, at, host)
            }
            (Column::Routine(routine), CopyDirection::Read) => window.read_with(routine, at, host),
            (Column::Engine, CopyDirection::Write) => self.bench.engine_write(at, host),
            (Column::Engine, CopyDirection::Read) => self.bench.engine_read(at, host),
            (Column::Agent, direction) => match (&self.agent, regions, direction) {
                (Some(agent), Some((device, pinned)), CopyDirection::Write) => {
                    agent.copy(device, pinned)
                }
                (Some(agent), Some((device, pinned)), CopyDirection::Read) => {
                    agent.copy(pinned, device)
                }
                _ => Ok(()),
            },
        }
    }

    /// Copies a pattern with `best`, and verifies it with the engine.
    fn verify(&self, point: &TestPoint) -> Result<(), Failure> {
        let (at, len) = (point.offsets().0, point.size as usize);
        let (mut wanted, mut found) = (vec![0; len], vec![0; len]);
        pattern::fill_bytes(&mut wanted, point.size, 0);
        // The driver's last copy may still be in flight and must not land after ours.
        self.bench.engine_finish()?;
        match point.direction {
            CopyDirection::Write => {
                self.copier.write(at, &wanted)?;
                self.bench.memory.read(at, &mut found)?;
            }
            CopyDirection::Read => {
                self.bench.memory.write(at, &wanted)?;
                self.copier.read(at, &mut found)?;
            }
        }
        if found == wanted {
            return Ok(());
        }
        Err(Failure::Runtime(format!("wrong data: {} of {} bytes", point.test(), point.size)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_double_up_to_the_max() {
        assert_eq!(sizes(4), [4]);
        assert_eq!(sizes(33), [4, 8, 16, 32, 33]);
        assert_eq!(sizes(MAX_SIZE).last(), Some(&MAX_SIZE));
    }

    #[test]
    fn cold_slices_stay_inside_the_buffer() {
        let mut host = HostBuffer { buffer: vec![0; 100_000], at: 0, cold: true };
        let point = TestPoint { direction: CopyDirection::Read, size: 9000, odd: true };
        for _ in 0..200 {
            assert_eq!(host.next_slice(&point).len(), 9000);
        }
    }
}
