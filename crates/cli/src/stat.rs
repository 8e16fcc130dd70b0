//! `warpwire stat`: live counters of the software HCAs of running processes.

mod prometheus;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use warpwire::hca::publish::{self, DeviceStats, ProcessStats};
use warpwire::hca::{DirectStats, EngineStats, QpStats, QpTotals};

use crate::output::{self, Failure};

/// Show live counters of the devices of running processes
///
/// Every process that uses the software HCA answers queries by the same user or root, at no cost
/// between queries (WARPWIRE_STAT=0 in its environment turns this off). Prints a line per device
/// and interval: rates of the last interval, and totals of errors. A device with several engines
/// has another line per engine.
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Arguments {
    /// Process id; optional if only one process publishes counters
    #[arg(conflicts_with = "all")]
    pid: Option<u32>,

    /// Show all processes that this user may query
    #[arg(long)]
    all: bool,

    /// Print a line per queue pair, of the first 1024 of each device
    #[arg(long)]
    qps: bool,

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

    /// Print the totals of all processes, or of one, in Prometheus' text format
    #[arg(long, conflicts_with_all = ["json", "once", "count", "interval"])]
    prometheus: bool,

    /// Print the legend below the table
    #[arg(short = 'v', long, conflicts_with_all = ["json", "prometheus"])]
    verbose: bool,
}

const AFTER_HELP: &str = "\
Columns (per second, or totals with --once; k, M, G are powers of 1000):
  out, in            payload bytes sent and received in packets
  direct             bytes written to and read from other processes' memory, without packets
  pkts out, pkts in  packets sent and received
  done               completions
  resent             requests sent again, since the device was opened, as all that follow
  tmouts             expiries of the retransmission timer
  rnr                RNR NAKs sent and received: the receiver had no receive posted
  drop               packets dropped by link, device or queue pair; --json has the reasons

Examples:
  warpwire stat                    the only process that publishes counters
  warpwire stat 4711 -i 5          a line every five seconds
  warpwire stat 4711 --qps         a line per queue pair
  warpwire stat --all --once       totals of all processes
  warpwire stat --prometheus       totals of all processes, for a scraper
  warpwire stat --json | jq -c '[.per_second.bytes_sent, .totals.resent]'";

/// The legend, out of the help.
fn legend() -> String {
    let lines = AFTER_HELP.lines().take_while(|line| !line.is_empty());
    lines.map(|line| format!("# {line}\n")).collect()
}

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
    /// With `--qps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    qps: Option<Vec<QpLine<'a>>>,
    /// `None` without an earlier snapshot of the device, as with `--once`.
    per_second: Option<Rates>,
}

/// A queue pair at one time.
#[derive(Serialize)]
struct QpLine<'a> {
    #[serde(flatten)]
    stats: &'a QpStats,
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

    fn of_qp(QpStats { totals, .. }: &QpStats) -> Self {
        Self { when: Instant::now(), pairs: *totals, completions: 0, direct: [0; 2] }
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

/// The process, the device, and the part of it.
type Source = (u32, u64, Part);

/// A part of a device that has counters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Whole,
    Engine(usize),
    Qp(u32),
}

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
        _ if arguments.all || arguments.prometheus => Ok(found),
        several => {
            let list: Vec<String> = several.iter().map(u32::to_string).collect();
            Err(Failure::Usage(format!(
                "several processes publish counters: {}; pass one of them, or --all",
                list.join(", ")
            )))
        }
    }
}

/// The counters of all processes that answer, or of one that must.
fn print_prometheus(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let found = match arguments.pid {
        Some(pid) => vec![publish::query(pid)?],
        None => {
            publish::processes()?.into_iter().filter_map(|it| publish::query(it).ok()).collect()
        }
    };
    output::print(&prometheus::render(&found, arguments.qps)).map_err(Failure::Runtime)?;
    Ok(ExitCode::SUCCESS)
}

fn run_loop(arguments: &Arguments) -> Result<ExitCode, Failure> {
    if arguments.prometheus {
        return print_prometheus(arguments);
    }
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
                snapshots.insert((pid, number, Part::Whole), Snapshot::of(device));
                for (at, engine) in device.engines.iter().enumerate() {
                    let part = Part::Engine(at);
                    snapshots.insert((pid, number, part), Snapshot::of_engine(engine));
                }
                for qp in device.qps.iter().filter(|_| arguments.qps) {
                    snapshots.insert((pid, number, Part::Qp(qp.qpn)), Snapshot::of_qp(qp));
                }
            }
        }
        rounds += 1;
        std::thread::sleep(Duration::from_secs_f64(arguments.interval));
    }
}

const HEADINGS: [&str; 14] = [
    "pid", "program", "device", "qps", "out", "in", "direct", "pkts out", "pkts in", "done",
    "resent", "tmouts", "rnr", "drop",
];
const QP_HEADINGS: [&str; 14] = [
    "pid", "program", "device", "qp", "out", "in", "type", "pkts out", "pkts in", "state",
    "resent", "tmouts", "rnr", "drop",
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
        let headings = if arguments.qps { QP_HEADINGS } else { HEADINGS };
        text += &cells(headings.map(str::to_owned));
    }
    for process in published {
        for device in &process.devices {
            let line = line_of(process, device, snapshots, arguments.qps);
            text += &match (arguments.json, &line.qps) {
                (true, _) => serde_json::to_string(&line)
                    .map(|line| line + "\n")
                    .map_err(|why| Failure::Runtime(format!("cannot write JSON: {why}")))?,
                (false, Some(qps)) => qps.iter().map(|qp| qp_row(&line, qp)).collect(),
                (false, None) => row(&line, None) + &engine_rows(&line, snapshots),
            };
        }
    }
    if arguments.verbose && (arguments.once || round % PAGE == 1) {
        text += &legend();
    }
    output::print(&text).map_err(Failure::Runtime)
}

fn line_of<'a>(
    process: &'a ProcessStats,
    device: &'a DeviceStats,
    snapshots: &BTreeMap<Source, Snapshot>,
    with_qps: bool,
) -> Line<'a> {
    let before = |part: Part| snapshots.get(&(process.pid, device.number, part));
    let qp_line = |stats: &'a QpStats| {
        let before = before(Part::Qp(stats.qpn));
        let per_second = before.map(|before| before.rates(&Snapshot::of_qp(stats)));
        QpLine { stats, per_second }
    };
    Line {
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
        qps: with_qps.then(|| device.qps.iter().map(qp_line).collect()),
        per_second: before(Part::Whole).map(|before| before.rates(&Snapshot::of(device))),
    }
}

/// The lines of a device's engines, if there are several.
fn engine_rows(line: &Line<'_>, snapshots: &BTreeMap<Source, Snapshot>) -> String {
    let (nothing, none) = (DirectStats::default(), BTreeMap::new());
    let mut text = String::new();
    for (at, engine) in line.engines.iter().enumerate().filter(|_| line.engines.len() > 1) {
        let before = snapshots.get(&(line.pid, line.device, Part::Engine(at)));
        let line = Line {
            queue_pairs: engine.queue_pairs,
            totals: &engine.pairs,
            direct: &nothing,
            completions: engine.completions,
            dropped: &none,
            qps: None,
            per_second: before.map(|it| it.rates(&Snapshot::of_engine(engine))),
            ..*line
        };
        text += &row(&line, Some(at));
    }
    text
}

/// A count with three significant digits, in up to 5 columns.
fn short(number: f64) -> String {
    let (mut number, mut unit) = (number.max(0.0), "");
    for next in ["k", "M", "G", "T", "P", "E"] {
        if number < 999.5 {
            break;
        }
        (number, unit) = (number / 1000.0, next);
    }
    match (unit, number) {
        ("", number) => format!("{number:.0}"),
        (unit, number) if number < 9.995 => format!("{number:.2}{unit}"),
        (unit, number) if number < 99.95 => format!("{number:.1}{unit}"),
        (unit, number) => format!("{number:.0}{unit}"),
    }
}

/// Bytes out and in, packets out and in: rates, or totals without an earlier snapshot.
fn traffic(totals: &QpTotals, per_second: Option<Rates>) -> [String; 4] {
    match per_second {
        Some(rates) => {
            [rates.bytes_sent, rates.bytes_received, rates.packets_sent, rates.packets_received]
                .map(short)
        }
        None => {
            [totals.bytes_sent, totals.bytes_received, totals.packets_sent, totals.packets_received]
                .map(|count| short(count as f64))
        }
    }
}

/// The cells of a device, or of one of its engines.
fn row(line: &Line<'_>, engine: Option<usize>) -> String {
    let totals = line.totals;
    let [out, into, packets_out, packets_in] = traffic(totals, line.per_second);
    let (direct, done) = match line.per_second {
        Some(rates) => (rates.direct_bytes, rates.completions),
        None => (line.direct.bytes as f64, line.completions as f64),
    };
    // The numbers of another process: their sum may exceed 64 bits.
    let dropped = line.dropped.values().fold(0_u64, |sum, count| sum.saturating_add(*count));
    cells([
        line.pid.to_string(),
        line.program.to_owned(),
        engine.map_or_else(
            || format!("hca{}", line.device),
            |engine| format!("hca{}.{engine}", line.device),
        ),
        line.queue_pairs.to_string(),
        out,
        into,
        short(direct),
        packets_out,
        packets_in,
        short(done),
        short(totals.resent as f64),
        short(totals.timeouts as f64),
        short(totals.rnr_naks as f64),
        short(dropped as f64),
    ])
}

/// The cells of a queue pair.
fn qp_row(line: &Line<'_>, qp: &QpLine<'_>) -> String {
    let QpStats { qpn, service, state, totals, .. } = qp.stats;
    let [out, into, packets_out, packets_in] = traffic(totals, qp.per_second);
    cells([
        line.pid.to_string(),
        line.program.to_owned(),
        format!("hca{}", line.device),
        format!("{qpn:x}"),
        out,
        into,
        service.clone(),
        packets_out,
        packets_in,
        state.clone(),
        short(totals.resent as f64),
        short(totals.timeouts as f64),
        short(totals.rnr_naks as f64),
        short(totals.discarded as f64),
    ])
}

fn cells(cells: [String; 14]) -> String {
    const WIDTHS: [usize; 14] = [7, 9, 7, 6, 5, 5, 6, 8, 7, 5, 6, 6, 5, 5];
    let pad = |(column, (cell, width)): (usize, (&String, usize))| match column {
        // Names are cut, numbers never are.
        1 | 2 => format!("{:<width$}", cell.chars().take(width).collect::<String>()),
        _ => format!("{cell:>width$}"),
    };
    let line: Vec<String> = cells.iter().zip(WIDTHS).enumerate().map(pad).collect();
    format!("{}\n", line.join(" ").trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_three_digits() {
        for (number, wanted) in [
            (0.0, "0"),
            (999.0, "999"),
            (999.6, "1.00k"),
            (12_345.0, "12.3k"),
            (999_600.0, "1.00M"),
            (1.31e9, "1.31G"),
            (u64::MAX as f64, "18.4E"),
        ] {
            assert_eq!(short(number), wanted);
        }
    }

    #[test]
    fn lines_fit_a_terminal() {
        for headings in [HEADINGS, QP_HEADINGS] {
            let line = cells(headings.map(str::to_owned));
            assert!(line.chars().count() <= 101, "{line}");
        }
        let mut wide: [String; 14] = std::array::from_fn(|_| "1.00k".to_owned());
        (wide[0], wide[1], wide[2]) = ("4194304".to_owned(), "a".repeat(15), "hca10.15".to_owned());
        (wide[3], wide[7]) = ("ffffff".to_owned(), "12.3M".to_owned());
        let line = cells(wide);
        assert!(line.chars().count() <= 101, "{line}");
        assert_eq!(cells(HEADINGS.map(str::to_owned)).len(), line.len(), "{line}");
    }

    #[test]
    fn the_legend_explains_every_column() {
        let legend = legend();
        for heading in &HEADINGS[4..] {
            assert!(legend.contains(heading), "{heading}");
        }
        assert!(legend.lines().all(|line| line.len() <= 100), "{legend}");
    }
}
