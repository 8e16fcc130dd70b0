//! `warpwire report`: the measurements that fit this machine, as one HTML page.

mod data;
mod machine;
mod measure;
mod page;
mod peers;
mod plot;
mod spawn;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;

use crate::output::{self, Failure};
use data::{FORMAT, Figure, Kind, Peers, Report};

/// Measure this machine and write one HTML page with tables and plots
///
/// The page has the machine, doctor's verdicts, latency and bandwidth of RDMA writes by size over
/// shared memory, UDP and RDMA devices, copies to and from GPU memory, and round trips of messages
/// sent by streams and kernels, each with the command that makes it. ucx_perftest, fi_pingpong and
/// perftest are measured beside it if they are installed. Everything is in the one file, which
/// loads nothing.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// File to write [default: warpwire-report.html; with --json none]
    #[arg(long, short, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Measure for about ten seconds, up to 64 KiB, instead of most of a minute up to 4 MiB
    #[arg(long, conflicts_with = "long")]
    quick: bool,

    /// Measure each size for half a second: some minutes
    #[arg(long)]
    long: bool,

    /// GPU: cuda:N or sim:N [default: the first CUDA device, else sim:0]
    #[arg(long, short, value_name = "DEVICE")]
    device: Option<String>,

    /// Do not measure programs of other projects
    #[arg(long)]
    no_peers: bool,

    /// Show these figures of other projects, which `bench/peers --json` has written, instead of
    /// measuring them
    #[arg(long, value_name = "FILE", conflicts_with = "no_peers")]
    peers: Option<PathBuf>,

    /// Measure nothing: make the page of what `report --json` has written, here or elsewhere
    #[arg(long, value_name = "FILE",
        conflicts_with_all = ["quick", "long", "device", "no_peers", "peers"])]
    from: Option<PathBuf>,

    /// Print JSON: {"machine": {…}, "verdicts": […], "figures": [{"kind": …, "points": […]}, …]}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire report
  warpwire report --quick --no-peers --out report.html
  warpwire report --long --device cuda:0
  warpwire report --json | jq '.figures[] | [.name, .kind, .points[-1].value]'
  warpwire report --from elsewhere.json --out elsewhere.html";

const DEFAULT_OUT: &str = "warpwire-report.html";

/// How long and how far measurements go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Seconds per size of `perf`.
    seconds: f64,
    /// The largest size.
    max: u64,
    /// Round trips, copies and messages, where a number is given instead of seconds.
    repeats: u32,
}

impl Effort {
    const QUICK: Self = Self { seconds: 0.01, max: 64 << 10, repeats: 50 };
    const NORMAL: Self = Self { seconds: 0.05, max: 4 << 20, repeats: 500 };
    const LONG: Self = Self { seconds: 0.5, max: 8 << 20, repeats: 5000 };
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    output::exit_result(make(arguments))
}

fn make(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let out = match (&arguments.out, arguments.json) {
        (Some(out), _) => Some(out.clone()),
        (None, true) => None,
        (None, false) => Some(PathBuf::from(DEFAULT_OUT)),
    };
    // Before measurements that take a minute.
    out.as_deref().map_or(Ok(()), check_writable)?;
    let report = match &arguments.from {
        Some(file) => read(file)?,
        None => measured(arguments)?,
    };
    if let Some(out) = &out {
        let page = page::html(&report);
        replace(out, &page)?;
        if !arguments.json {
            let text = summary(&report, out, page.len());
            output::print(&text).map_err(Failure::Runtime)?;
        }
    }
    if arguments.json {
        output::print_json(&report).map_err(Failure::Runtime)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measured(arguments: &Arguments) -> Result<Report, Failure> {
    let peers = arguments.peers.as_deref().map(read_peers).transpose()?;
    let effort = match (arguments.quick, arguments.long) {
        (true, _) => Effort::QUICK,
        (_, true) => Effort::LONG,
        _ => Effort::NORMAL,
    };
    let started = Instant::now();
    let date = machine::utc_now();
    let version = spawn::own(&["--version"])?.trim().to_owned();
    progress("looking at the machine");
    let machine = machine::look()?;
    let verdicts = measure::verdicts()?;
    let mut figures = measure::all(effort, arguments.device.as_deref(), progress)?;
    if !arguments.no_peers && peers.is_none() {
        figures.extend(peers::all(effort, progress));
    }
    Ok(Report {
        format: FORMAT,
        date,
        version,
        command: command_line(),
        seconds: started.elapsed().as_secs_f64(),
        machine,
        verdicts,
        figures,
        peers,
    })
}

/// A line on standard error; it may be closed.
fn progress(what: &str) {
    let _ = writeln!(std::io::stderr(), "report: {what}");
}

fn command_line() -> String {
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    std::iter::once("warpwire".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

fn cannot_write(out: &Path, why: &dyn std::fmt::Display) -> Failure {
    Failure::Usage(format!(
        "cannot write {}: {why}; pass --out FILE in a folder that exists and is yours",
        out.display()
    ))
}

/// The name under which the page is written, before it replaces `out`.
fn temporary(out: &Path) -> PathBuf {
    let mut name = out.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    out.with_file_name(name)
}

fn check_writable(out: &Path) -> Result<(), Failure> {
    if out.is_dir() {
        return Err(cannot_write(out, &"it is a folder"));
    }
    if out.file_name().is_none() {
        return Err(cannot_write(out, &"it names no file"));
    }
    let probe = temporary(out);
    std::fs::write(&probe, "").map_err(|why| cannot_write(out, &why))?;
    std::fs::remove_file(&probe).map_err(|why| cannot_write(out, &why))
}

/// By rename, so that no browser loads half of a page.
fn replace(out: &Path, page: &str) -> Result<(), Failure> {
    let new = temporary(out);
    let written = std::fs::write(&new, page).and_then(|()| std::fs::rename(&new, out));
    written.map_err(|why| {
        let _ = std::fs::remove_file(&new);
        cannot_write(out, &why)
    })
}

fn read_json(file: &Path, what: &str) -> Result<serde_json::Value, Failure> {
    let cannot = |why: &dyn std::fmt::Display| {
        Failure::Usage(format!("cannot read {}: {why}; pass a file of `{what}`", file.display()))
    };
    let bytes = std::fs::read(file).map_err(|why| cannot(&why))?;
    serde_json::from_slice(&bytes).map_err(|why| cannot(&why))
}

fn read(file: &Path) -> Result<Report, Failure> {
    let what = "warpwire report --json";
    let value = read_json(file, what)?;
    let cannot = |why: String| {
        Failure::Usage(format!("cannot read {}: {why}; pass a file of `{what}`", file.display()))
    };
    match value["format"].as_u64() {
        Some(format) if format == u64::from(FORMAT) => {}
        Some(format) => {
            let why = format!("its format is {format}, and this command reads format {FORMAT}");
            return Err(cannot(why));
        }
        None => return Err(cannot("it has no number `format`".to_owned())),
    }
    serde_json::from_value(value).map_err(|why| cannot(why.to_string()))
}

fn read_peers(file: &Path) -> Result<Peers, Failure> {
    let what = "bench/peers --json";
    let value = read_json(file, what)?;
    let cannot = |why: String| {
        Failure::Usage(format!("cannot read {}: {why}; pass a file of `{what}`", file.display()))
    };
    let peers: Peers = serde_json::from_value(value).map_err(|why| cannot(why.to_string()))?;
    let columns = peers.columns.len();
    let fits = |row: &data::PeerRow| row.skipped.is_some() || row.samples.len() == columns;
    match peers.rows.iter().find(|row| !fits(row)) {
        Some(row) => Err(cannot(format!("row {:?} has not {columns} columns", row.name))),
        None => Ok(peers),
    }
}

/// What is printed: the best figures, and where the page is.
fn summary(report: &Report, out: &Path, len: usize) -> String {
    let mut text = String::new();
    for headline in headlines(report) {
        let _ = writeln!(text, "{:<44} {}", headline.what, headline.value);
    }
    for figure in report.figures.iter().filter(|figure| figure.points.is_empty()) {
        let why = figure.skipped.as_deref().unwrap_or("it printed no figures");
        let _ = writeln!(text, "not measured: {}: {why}", figure.name);
    }
    let _ = writeln!(text, "{} ({} KB): open it in a browser", out.display(), len.div_ceil(1000));
    text
}

/// A figure for the head of the page.
pub(crate) struct Headline {
    what: String,
    value: String,
}

/// The least latency and the highest bandwidth of each of Warpwire's links.
pub(crate) fn headlines(report: &Report) -> Vec<Headline> {
    let own = report.figures.iter().filter(|figure| !figure.peer);
    let headline = |figure: &Figure| {
        let smallest = figure.points.iter().min_by_key(|point| point.bytes)?;
        let best = figure.points.iter().max_by(|a, b| a.value.total_cmp(&b.value))?;
        let (what, point) = match figure.kind {
            Kind::Latency => ("latency", smallest),
            Kind::Bandwidth => ("bandwidth", best),
            _ => return None,
        };
        let what = format!("{}, {what}, {}", figure.name, page::bytes(point.bytes));
        Some(Headline { what, value: page::value(point.value, figure.kind.unit()) })
    };
    own.filter_map(headline).collect()
}

#[cfg(test)]
mod tests;
