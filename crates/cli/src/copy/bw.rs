//! `warpwire copy bw`: bandwidth of copies of one size.

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use warpwire::mem::copy::{Copier, CopyDirection, CopyMethod};
use warpwire_apps::pattern;

use super::clock::{Series, figure};
use super::target::{Bench, Setting, Target, iterations, size};
use super::{Failure, Reporter};

/// Measure the bandwidth of copies of one size
///
/// Writes to device memory through a CPU window and reads from it, compared with the driver's
/// copies (engine, cuMemcpy) and with the method that the library uses for that size, in GB/s (10^9
/// bytes). All data is verified.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    target: Target,

    /// Size of the allocation
    #[arg(short = 's', long, value_name = "SIZE", default_value = "128KiB", value_parser = size)]
    size: u64,

    /// Bytes per copy [default: from --offset to the end]
    #[arg(short = 'c', long = "copy", value_name = "SIZE", value_parser = size)]
    copy: Option<u64>,

    /// Offset of the copies in the allocation
    #[arg(short = 'o', long, value_name = "OFFSET", default_value = "0", value_parser = offset)]
    offset: u64,

    /// Max number of writes to time
    #[arg(short = 'w', long, value_name = "N", default_value = "10000", value_parser = iterations)]
    writes: u32,

    /// Max number of reads to time
    #[arg(short = 'r', long, value_name = "N", default_value = "1000", value_parser = iterations)]
    reads: u32,

    /// Print JSON: {"setting": {…}, "bytes": …, "write": {…}, "read": {…}}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire copy bw
  warpwire copy bw -s 16MiB -a vmm           memory of cuMemCreate
  warpwire copy bw -s 1MiB -c 4KiB -o 13     4 KiB at an unaligned offset of 1 MiB
  warpwire copy bw --json | jq .write.window_gb_s";

/// Max bytes per copy: the host allocates three times as much.
const MAX_SIZE: u64 = 4 << 30;

fn offset(text: &str) -> Result<u64, String> {
    warpwire::units::parse_bytes(text).map_err(|error| error.to_string())
}

#[derive(Serialize)]
struct Outcome {
    setting: Setting,
    bytes: u64,
    write: Rates,
    read: Rates,
}

/// Rates in GB/s (10⁹ bytes).
#[derive(Serialize)]
struct Rates {
    window_gb_s: f64,
    engine_gb_s: f64,
    best_gb_s: f64,
    /// The method that `best` used.
    best_method: CopyMethod,
    /// Window divided by engine.
    ratio: f64,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let bytes = arguments.copy.unwrap_or(arguments.size.saturating_sub(arguments.offset));
    let fits = arguments.offset.checked_add(bytes).is_some_and(|end| end <= arguments.size);
    if !fits || bytes == 0 {
        let (offset, size) = (arguments.offset, arguments.size);
        return Err(Failure::Usage(format!(
            "cannot copy {bytes} bytes at offset {offset}: {size} bytes are allocated; \
             give a larger --size"
        )));
    }
    let bench = arguments.target.open(arguments.size)?;
    if bytes > MAX_SIZE {
        let max_text = warpwire::units::bytes(MAX_SIZE);
        return Err(Failure::Usage(format!(
            "cannot copy {bytes} bytes at a time: write -c {max_text} or less"
        )));
    }
    let setting = bench.setting();
    let reporter = Reporter::for_measurement(arguments.json);
    reporter.print(&setting.heading("bw"))?;
    reporter.print(&format!(
        "# {bytes} bytes at offset {}; BW is that of the window\n",
        arguments.offset
    ))?;
    let copier = Copier::new(&bench.memory)?;
    let mut host = vec![0; usize::try_from(bytes).unwrap_or(0)];
    let task = Task { bench: &bench, copier: &copier, offset: arguments.offset };
    reporter.set_status("writing");
    let write = task.rates(CopyDirection::Write, &mut host, arguments.writes)?;
    reporter.print(&line("write", &write))?;
    reporter.set_status("reading");
    let read = task.rates(CopyDirection::Read, &mut host, arguments.reads)?;
    reporter.print(&line("read", &read))?;
    reporter.finish(&Outcome { setting, bytes, write, read })?;
    Ok(ExitCode::SUCCESS)
}

fn line(name: &str, rates: &Rates) -> String {
    let Rates { window_gb_s, engine_gb_s, best_gb_s, best_method, ratio } = rates;
    let (window, engine) = (figure(*window_gb_s), figure(*engine_gb_s));
    let (best, ratio) = (figure(*best_gb_s), figure(*ratio));
    format!(
        "{:<9} {window} GB/s  engine: {engine} GB/s  ratio: {ratio}  used: {best_method}, \
         {best} GB/s\n",
        format!("{name} BW:")
    )
}

struct Task<'a> {
    bench: &'a Bench,
    copier: &'a Copier,
    offset: u64,
}

impl Task<'_> {
    fn rates(
        &self,
        direction: CopyDirection,
        host: &mut [u8],
        times: u32,
    ) -> Result<Rates, Failure> {
        let bytes = host.len() as u64;
        let rate = |series: &Series| bytes as f64 / series.times().mean_us / 1e3;
        let mut rates = Vec::new();
        for (seed, method) in ["window", "engine", "best"].into_iter().enumerate() {
            let (mut series, seed) = (Series::default(), seed as u64 + 1);
            self.prepare(direction, host, seed)?;
            series.run(times, || self.copy(method, direction, host))?;
            if !self.is_right(direction, host, seed)? {
                return Err(Failure::Runtime(format!("wrong data after copies by {method}")));
            }
            rates.push(rate(&series));
        }
        let [window_gb_s, engine_gb_s, best_gb_s] = rates[..] else {
            return Err(Failure::Runtime("nothing was measured".to_owned()));
        };
        let best_method = self.copier.method(direction, bytes);
        let ratio = window_gb_s / engine_gb_s;
        Ok(Rates { window_gb_s, engine_gb_s, best_gb_s, best_method, ratio })
    }

    fn copy(
        &self,
        method: &str,
        direction: CopyDirection,
        host: &mut [u8],
    ) -> warpwire::Result<()> {
        let window = &self.bench.window;
        match (method, direction) {
            ("window", CopyDirection::Write) => window.write(self.offset, host),
            ("window", CopyDirection::Read) => window.read(self.offset, host),
            ("engine", CopyDirection::Write) => self.bench.engine_write(self.offset, host),
            ("engine", CopyDirection::Read) => self.bench.engine_read(self.offset, host),
            (_, CopyDirection::Write) => self.copier.write(self.offset, host),
            (_, CopyDirection::Read) => self.copier.read(self.offset, host),
        }
    }

    /// Writes the pattern to the source of the copies.
    fn prepare(&self, direction: CopyDirection, host: &mut [u8], seed: u64) -> Result<(), Failure> {
        pattern::fill_bytes(host, seed, 0);
        if direction == CopyDirection::Read {
            self.bench.memory.write(self.offset, host)?;
            host.fill(0);
        }
        Ok(())
    }

    /// Verifies the destination of the copies.
    fn is_right(&self, direction: CopyDirection, host: &[u8], seed: u64) -> Result<bool, Failure> {
        let mut wanted = vec![0; host.len()];
        pattern::fill_bytes(&mut wanted, seed, 0);
        if direction == CopyDirection::Read {
            return Ok(host == wanted);
        }
        let mut found = vec![0; host.len()];
        self.bench.engine_finish()?;
        self.bench.memory.read(self.offset, &mut found)?;
        Ok(found == wanted)
    }
}
