//! `warpwire copy lat`

use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use warpwire::mem::copy::{Copier, Direction, Plan, Routine, Way};
use warpwire::mem::{Agent, Allocation, Region};
use warpwire::units;
use warpwire_apps::pattern;

use super::clock::{Series, Times, figure};
use super::target::{Bench, Setting, Target, iterations};
use super::{Failure, Screen};

/// Time of copies of every size, both ways
///
/// For each size: `best`, the library's own choice, with the way that it takes; `window`, a plain loop of
/// the widest loads or stores through the CPU window; `engine`, the driver's own copy (cuMemcpy), from and to
/// ordinary host memory; with --agent, `agent`, the resident kernel, from and to pinned host memory. Each as
/// median and least, in microseconds. The last column is best to the better of engine and window, by the
/// medians. The columns of a row take turns, and what `best` moved is compared.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    target: Target,

    /// The largest size, up to 64MiB
    #[arg(short = 's', long, value_name = "SIZE", default_value = "16MiB", value_parser = limit)]
    size: u64,

    /// How many writes to time for each figure, at most
    #[arg(short = 'w', long, value_name = "N", default_value = "10000", value_parser = iterations)]
    writes: u32,

    /// How many reads to time for each figure, at most
    #[arg(short = 'r', long, value_name = "N", default_value = "1000", value_parser = iterations)]
    reads: u32,

    /// Copy at odd addresses too, of the device and of the host
    #[arg(long)]
    odd: bool,

    /// Show the window with each sort of instructions that this processor has
    #[arg(long)]
    routines: bool,

    /// Start the copy agent, show it, and let `best` use it
    #[arg(long)]
    agent: bool,

    /// Begin each copy at another place of 256 MiB of host memory, outside of the processor's caches
    #[arg(short = 'C', long)]
    cold: bool,

    /// As gdrcopy has it; the engine's column is always there
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
  warpwire copy lat -s 4KiB --routines           which instructions copy best
  warpwire copy lat --json | jq '[.rows[].ratio] | max'";

const SMALLEST: u64 = 4;
const LARGEST: u64 = 64 << 20;
/// Where odd copies begin, on the device and on the host.
const ODD: (u64, usize) = (13, 3);
/// More than any processor's caches hold.
const COLD: usize = 256 << 20;
/// How often the columns of a row take turns.
const TURNS: u32 = 3;

fn limit(text: &str) -> Result<u64, String> {
    let size = units::parse_bytes(text).map_err(|error| error.to_string())?;
    if (SMALLEST..=LARGEST).contains(&size) {
        return Ok(size);
    }
    Err("the largest size must be between 4 and 64MiB".to_owned())
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
    /// The way that `best` took.
    way: Way,
    cells: Vec<Cell>,
    ratio: f64,
}

#[derive(Serialize)]
struct Cell {
    column: String,
    #[serde(flatten)]
    times: Times,
}

/// A way to copy that has a column of its own.
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
    let room = arguments.size + 64;
    let bench = arguments.target.open(room)?;
    let setting = bench.setting();
    let screen = Screen::new(arguments.json);
    screen.say(&setting.heading("lat"))?;
    screen.working("starting");
    let plan = Plan::for_device(&bench.device)?;
    let agent = arguments.agent.then(|| Agent::start(&bench.device)).transpose()?;
    let columns = columns(arguments);
    let lab = Lab {
        copier: Copier::with(&bench.memory, plan, agent.clone())?,
        pinned: agent.as_ref().map(|_| bench.device.alloc_pinned(room)).transpose()?,
        agent,
        bench: &bench,
    };
    let room = if arguments.cold { COLD } else { 0 }.max(room as usize);
    let mut host = Host { buffer: vec![0; room], at: 0, cold: arguments.cold };
    screen.say(&heading(&columns))?;
    let mut rows = Vec::new();
    for direction in [Direction::Write, Direction::Read] {
        for odd in [false, true] {
            if odd && !arguments.odd {
                continue;
            }
            for size in sizes(arguments.size) {
                let spot = Spot { direction, size, odd };
                screen.working(format!("{} {size}", spot.test()));
                let row = lab.row(&spot, &columns, &mut host, arguments)?;
                screen.say(&line(&row))?;
                rows.push(row);
            }
        }
    }
    screen.finish(&Outcome { setting, rows })?;
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

/// Doubling from the smallest up to the largest, which need not be a power of two.
fn sizes(largest: u64) -> Vec<u64> {
    let doubling = (0..).map(|step| SMALLEST << step).take_while(|size| *size < largest);
    doubling.chain([largest]).collect()
}

fn heading(columns: &[Column]) -> String {
    let mut text = format!("# us: median and min\n{:<20} {:>9}", "Test", "Size(B)");
    for column in columns {
        text += &format!(" {:>10} {:>10}", column.name(), "min");
    }
    text + &format!("  {:<6} {:>6}\n", "way", "ratio")
}

fn line(row: &Row) -> String {
    let mut text = format!("{:<20} {:>9}", row.test, row.size);
    for Cell { times, .. } in &row.cells {
        text += &format!(" {:>10} {:>10}", figure(times.median_us), figure(times.min_us));
    }
    text + &format!("  {:<6} {:>6}\n", row.way, figure(row.ratio))
}

/// One row's copy.
struct Spot {
    direction: Direction,
    size: u64,
    odd: bool,
}

impl Spot {
    fn test(&self) -> String {
        let name = match self.direction {
            Direction::Write => "copy_to_window",
            Direction::Read => "copy_from_window",
        };
        if self.odd { format!("{name}_odd") } else { name.to_owned() }
    }

    /// Where the copy begins, on the device and on the host.
    fn offsets(&self) -> (u64, usize) {
        if self.odd { ODD } else { (0, 0) }
    }
}

/// The host's side of the copies.
struct Host {
    buffer: Vec<u8>,
    at: usize,
    cold: bool,
}

impl Host {
    /// The next piece to copy from or to.
    fn piece(&mut self, spot: &Spot) -> &mut [u8] {
        let (len, shift) = (spot.size as usize, spot.offsets().1);
        if self.cold {
            self.at = (self.at + len.next_multiple_of(4096)) % (self.buffer.len() - len - shift);
            self.at -= self.at % 64;
        }
        &mut self.buffer[self.at + shift..][..len]
    }
}

/// What a row needs of the devices.
struct Lab<'a> {
    bench: &'a Bench,
    copier: Copier,
    agent: Option<Arc<Agent>>,
    /// The agent's host side.
    pinned: Option<Allocation>,
}

impl Lab<'_> {
    fn row(
        &self,
        spot: &Spot,
        columns: &[Column],
        host: &mut Host,
        arguments: &Arguments,
    ) -> Result<Row, Failure> {
        let times = match spot.direction {
            Direction::Write => arguments.writes,
            Direction::Read => arguments.reads,
        };
        let regions = self.regions(spot)?;
        let mut all = vec![Series::default(); columns.len()];
        for _ in 0..TURNS {
            for (column, series) in columns.iter().zip(&mut all) {
                let act = || self.copy(*column, spot, host.piece(spot), regions.as_ref());
                series.run(times.div_ceil(TURNS), act)?;
            }
        }
        self.verify(spot)?;
        let cells: Vec<Cell> = columns
            .iter()
            .zip(&all)
            .map(|(column, series)| Cell { column: column.name(), times: series.times() })
            .collect();
        let rivals = columns.iter().zip(&cells).filter(|(column, _)| {
            matches!(column, Column::Window | Column::Routine(_) | Column::Engine)
        });
        let rival = rivals.map(|(_, cell)| cell.times.median_us).fold(f64::INFINITY, f64::min);
        let best = cells.first().map_or(f64::NAN, |cell| cell.times.median_us);
        let way = self.copier.way(spot.direction, spot.size);
        let (test, size, odd) = (spot.test(), spot.size, spot.odd);
        Ok(Row { test, size, odd, way, cells, ratio: best / rival })
    }

    /// The agent's two sides, device and host; both at the same distance from a multiple of 16.
    fn regions(&self, spot: &Spot) -> Result<Option<(Region, Region)>, Failure> {
        let Some(pinned) = &self.pinned else { return Ok(None) };
        let at = spot.offsets().0;
        let device = self.bench.memory.region(at, spot.size)?;
        Ok(Some((device, pinned.region(at, spot.size)?)))
    }

    fn copy(
        &self,
        column: Column,
        spot: &Spot,
        host: &mut [u8],
        regions: Option<&(Region, Region)>,
    ) -> warpwire::Result<()> {
        let window = &self.bench.window;
        let at = spot.offsets().0;
        match (column, spot.direction) {
            (Column::Best, Direction::Write) => self.copier.write(at, host),
            (Column::Best, Direction::Read) => self.copier.read(at, host),
            (Column::Window, Direction::Write) => window.write(at, host),
            (Column::Window, Direction::Read) => window.read(at, host),
            (Column::Routine(routine), Direction::Write) => window.write_by(routine, at, host),
            (Column::Routine(routine), Direction::Read) => window.read_by(routine, at, host),
            (Column::Engine, Direction::Write) => self.bench.engine_write(at, host),
            (Column::Engine, Direction::Read) => self.bench.engine_read(at, host),
            (Column::Agent, direction) => match (&self.agent, regions, direction) {
                (Some(agent), Some((device, pinned)), Direction::Write) => {
                    agent.copy(device, pinned)
                }
                (Some(agent), Some((device, pinned)), Direction::Read) => {
                    agent.copy(pinned, device)
                }
                _ => Ok(()),
            },
        }
    }

    /// Has the best way move a pattern, and compares it with what the engine finds.
    fn verify(&self, spot: &Spot) -> Result<(), Failure> {
        let (at, len) = (spot.offsets().0, spot.size as usize);
        let (mut wanted, mut found) = (vec![0; len], vec![0; len]);
        pattern::fill_bytes(&mut wanted, spot.size, 0);
        // The driver's last copy may still be on its way, and must not arrive after ours.
        self.bench.engine_finish()?;
        match spot.direction {
            Direction::Write => {
                self.copier.write(at, &wanted)?;
                self.bench.memory.read(at, &mut found)?;
            }
            Direction::Read => {
                self.bench.memory.write(at, &wanted)?;
                self.copier.read(at, &mut found)?;
            }
        }
        if found == wanted {
            return Ok(());
        }
        Err(Failure::Broken(format!("wrong data: {} of {} bytes", spot.test(), spot.size)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_double_up_to_the_largest() {
        assert_eq!(sizes(4), [4]);
        assert_eq!(sizes(33), [4, 8, 16, 32, 33]);
        assert_eq!(sizes(LARGEST).last(), Some(&LARGEST));
    }

    #[test]
    fn cold_pieces_stay_inside() {
        let mut host = Host { buffer: vec![0; 100_000], at: 0, cold: true };
        let spot = Spot { direction: Direction::Read, size: 9000, odd: true };
        for _ in 0..200 {
            assert_eq!(host.piece(&spot).len(), 9000);
        }
    }
}
