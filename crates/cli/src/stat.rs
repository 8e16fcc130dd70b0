//! `warpwire stat`: live counters of the software HCAs of running processes.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use warpwire::hca::publish::{self, DeviceStats, ProcessStats};
use warpwire::hca::{DirectStats, EngineStats, QpTotals};
use warpwire::units;

use crate::output::{self, Failure};

/// Show live counters of the devices of running processes
///
/// Every process that uses the software HCA answers queries by the same user or root, at no cost
/// between queries (WARPWIRE_STAT=0 in its environment turns this off). Prints a line per device
/// and interval: rates of the last interval, and totals of errors (resent, timeouts, not ready,
/// lost). A device with several engines has another line per engine.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Process id; optional if only one process publishes counters
    #[arg(conflicts_with = "all")]
    pid: Option<u32>,

    /// Show all processes that this user may query
    #[arg(long)]
    all: bool,

    /// Print totals once, instead of rates until the process exits
    #[arg(long)]
    once: bool,

    /// Time between lines, 0.05 to 3600
    #[arg(short = 'i', long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    interval: f64,

    /// Exit after N lines per device
    #[arg(short = 'c', long, value_name = "N", conflicts_with = "once")]
    count: Option<u64>,

    /// Print JSON, an object per device and line: {"pid": …, "device": …, "totals": {…},
    /// "engines": […], "per_second": {…}, …}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire stat                    the only process that publishes counters
  warpwire stat 4711 -i 5          a line every five seconds
  warpwire stat --all --once       totals of all processes
  warpwire stat --json | jq -c '[.per_second.bytes_sent, .totals.resent]'";

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.05..=3600.0).contains(&number) => Ok(number),
        _ => Err("write a number of seconds from 0.05 to 3600".to_owned()),
    }
}

/// One output line: a device at one time.
#[derive(Serialize)]
struct Line<'a> {
    pid: u32,
    program: &'a str,
    device: u64,
    link: &'a str,
    queue_pairs: usize,
    totals: &'a QpTotals,
    direct: &'a DirectStats,
    completions: u64,
    dropped: &'a BTreeMap<String, u64>,
    /// Totals of each engine.
    engines: &'a [EngineStats],
    /// `None` without an earlier snapshot of the device, as with `--once`.
    per_second: Option<Rates>,
}

#[derive(Clone, Copy, Serialize)]
struct Rates {
    packets_sent: f64,
    bytes_sent: f64,
    packets_received: f64,
    bytes_received: f64,
    completions: f64,
    direct: f64,
    direct_bytes: f64,
}

/// Counters of a device, or of one of its engines, at one time.
#[derive(Clone, Copy)]
struct Snapshot {
    when: Instant,
    pairs: QpTotals,
    completions: u64,
    direct: [u64; 2],
}

impl Snapshot {
    fn of(device: &DeviceStats) -> Self {
        let DirectStats { operations, bytes, .. } = device.direct;
        let (pairs, completions) = (device.pairs, device.completions);
        Self { when: Instant::now(), pairs, completions, direct: [operations, bytes] }
    }

    fn of_engine(&EngineStats { pairs, completions, .. }: &EngineStats) -> Self {
        Self { when: Instant::now(), pairs, completions, direct: [0; 2] }
    }

    fn rates(&self, now: &Self) -> Rates {
        let time = (now.when - self.when).as_secs_f64().max(1e-3);
        let rate = |then: u64, now: u64| now.saturating_sub(then) as f64 / time;
        let (then, pairs) = (&self.pairs, &now.pairs);
        Rates {
            packets_sent: rate(then.packets_sent, pairs.packets_sent),
            bytes_sent: rate(then.bytes_sent, pairs.bytes_sent),
            packets_received: rate(then.packets_received, pairs.packets_received),
            bytes_received: rate(then.bytes_received, pairs.bytes_received),
            completions: rate(self.completions, now.completions),
            direct: rate(self.direct[0], now.direct[0]),
            direct_bytes: rate(self.direct[1], now.direct[1]),
        }
    }
}

/// The process, the device, and the engine if it is of one.
type Source = (u32, u64, Option<usize>);

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    output::exit_result(run_loop(arguments))
}

/// The process ids to query.
fn choose(arguments: &Arguments) -> Result<Vec<u32>, Failure> {
    if let Some(pid) = arguments.pid {
        return Ok(vec![pid]);
    }
    let found = publish::processes()?;
    match found.as_slice() {
        [] => Err(Failure::Runtime(
            "no process publishes counters; start one that opens a device, as in \
             warpwire perf write bw --local -D 60"
                .to_owned(),
        )),
        [_] => Ok(found),
        _ if arguments.all => Ok(found),
        several => {
            let list: Vec<String> = several.iter().map(u32::to_string).collect();
            Err(Failure::Usage(format!(
                "several processes publish counters: {}; pass one of them, or --all",
                list.join(", ")
            )))
        }
    }
}

fn run_loop(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let mut snapshots: BTreeMap<Source, Snapshot> = BTreeMap::new();
    let mut rounds = 0;
    loop {
        let pids = match choose(arguments) {
            Ok(pids) => pids,
            // The watched processes have exited.
            Err(_) if rounds > 0 => return Ok(ExitCode::SUCCESS),
            Err(failure) => return Err(failure),
        };
        let mut published = Vec::new();
        for pid in pids {
            match publish::query(pid) {
                Ok(one) => published.push(one),
                Err(_) if rounds > 0 && !arguments.all => return Ok(ExitCode::SUCCESS),
                Err(error) if arguments.all => {
                    tracing::info!(pid, %error, "skipped a process that does not answer");
                }
                Err(error) => return Err(error.into()),
            }
        }
        // The first snapshot has no previous one to compute rates from.
        if arguments.once || rounds > 0 {
            print_lines(arguments, &published, &snapshots, rounds)?;
        }
        if arguments.once || arguments.count.is_some_and(|count| rounds >= count) {
            return Ok(ExitCode::SUCCESS);
        }
        for process in &published {
            for device in &process.devices {
                let (pid, number) = (process.pid, device.number);
                snapshots.insert((pid, number, None), Snapshot::of(device));
                for (at, engine) in device.engines.iter().enumerate() {
                    snapshots.insert((pid, number, Some(at)), Snapshot::of_engine(engine));
                }
            }
        }
        rounds += 1;
        std::thread::sleep(Duration::from_secs_f64(arguments.interval));
    }
}

const HEADINGS: [&str; 14] = [
    "pid",
    "program",
    "device",
    "qps",
    "sent",
    "packets",
    "received",
    "packets",
    "direct",
    "done",
    "resent",
    "timeouts",
    "not ready",
    "dropped",
];
/// The column titles are printed again after this many rounds, about a terminal's height.
const PAGE: u64 = 20;

fn print_lines(
    arguments: &Arguments,
    published: &[ProcessStats],
    snapshots: &BTreeMap<Source, Snapshot>,
    round: u64,
) -> Result<(), Failure> {
    let mut text = String::new();
    if !arguments.json && (arguments.once || round % PAGE == 1) {
        text += &cells(HEADINGS.map(str::to_owned));
    }
    for process in published {
        for device in &process.devices {
            let before = snapshots.get(&(process.pid, device.number, None));
            let per_second = before.map(|before| before.rates(&Snapshot::of(device)));
            let line = Line {
                pid: process.pid,
                program: &process.program,
                device: device.number,
                link: &device.link,
                queue_pairs: device.queue_pairs,
                totals: &device.pairs,
                direct: &device.direct,
                completions: device.completions,
                dropped: &device.dropped,
                engines: &device.engines,
                per_second,
            };
            text += &match arguments.json {
                true => serde_json::to_string(&line)
                    .map(|line| line + "\n")
                    .map_err(|why| Failure::Runtime(format!("cannot write JSON: {why}")))?,
                false => row(&line, None),
            };
            if !arguments.json && device.engines.len() > 1 {
                let (nothing, none) = (DirectStats::default(), BTreeMap::new());
                for (at, engine) in device.engines.iter().enumerate() {
                    let before = snapshots.get(&(process.pid, device.number, Some(at)));
                    let line = Line {
                        queue_pairs: engine.queue_pairs,
                        totals: &engine.pairs,
                        direct: &nothing,
                        completions: engine.completions,
                        dropped: &none,
                        per_second: before.map(|it| it.rates(&Snapshot::of_engine(engine))),
                        ..line
                    };
                    text += &row(&line, Some(at));
                }
            }
        }
    }
    output::print(&text).map_err(Failure::Runtime)
}

/// The cells of a device, or of one of its engines.
fn row(line: &Line<'_>, engine: Option<usize>) -> String {
    let count = |number: f64| match number {
        small if small < 1e4 => format!("{small:.0}"),
        large if large < 1e7 => format!("{:.1}k", large / 1e3),
        huge => format!("{:.1}M", huge / 1e6),
    };
    let totals = line.totals;
    let [sent, sent_packets, received, received_packets, direct, done] = match line.per_second {
        Some(rates) => [
            format!("{}/s", units::bytes(rates.bytes_sent as u64)),
            format!("{}/s", count(rates.packets_sent)),
            format!("{}/s", units::bytes(rates.bytes_received as u64)),
            format!("{}/s", count(rates.packets_received)),
            format!("{}/s", units::bytes(rates.direct_bytes as u64)),
            format!("{}/s", count(rates.completions)),
        ],
        None => [
            units::bytes(totals.bytes_sent),
            count(totals.packets_sent as f64),
            units::bytes(totals.bytes_received),
            count(totals.packets_received as f64),
            units::bytes(line.direct.bytes),
            count(line.completions as f64),
        ],
    };
    cells([
        line.pid.to_string(),
        line.program.to_owned(),
        engine.map_or_else(
            || format!("hca{}", line.device),
            |engine| format!("hca{}.{engine}", line.device),
        ),
        line.queue_pairs.to_string(),
        sent,
        sent_packets,
        received,
        received_packets,
        direct,
        done,
        totals.resent.to_string(),
        totals.timeouts.to_string(),
        totals.rnr_naks.to_string(),
        // The numbers of another process: their sum may exceed 64 bits.
        line.dropped.values().fold(0_u64, |sum, count| sum.saturating_add(*count)).to_string(),
    ])
}

fn cells(cells: [String; 14]) -> String {
    const WIDTHS: [usize; 14] = [8, 16, 7, 5, 13, 9, 13, 9, 13, 9, 7, 8, 9, 7];
    let mut text = String::new();
    for (column, (cell, width)) in cells.iter().zip(WIDTHS).enumerate() {
        text += &match column {
            1 | 2 => format!(" {cell:<width$}"),
            _ => format!(" {cell:>width$}"),
        };
    }
    format!("{}\n", text.trim_end())
}
