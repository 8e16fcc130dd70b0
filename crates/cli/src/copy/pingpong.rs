//! `warpwire copy pingpong`: round trips between the CPU and a kernel.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use warpwire::mem::{Allocation, Window, Word};
use warpwire_apps::pingpong::PingPong;

use super::clock::{Series, Times, figure};
use super::target::{Bench, Setting, Target, iterations};
use super::{Failure, Reporter};

/// Measure round trips from the CPU to a kernel and back
///
/// A kernel polls a word in device memory, which the CPU writes through a window, and replies in
/// pinned host memory, which the CPU polls. For comparison the same with the first word in pinned
/// host memory, so that the kernel polls across PCIe. The two are measured in alternating passes.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    target: Target,

    /// Size of the words in bytes: 4 or 8
    #[arg(short = 's', long, value_name = "SIZE", default_value = "4", value_parser = width)]
    size: u64,

    /// Round trips to time, of each kind
    #[arg(short = 't', long, value_name = "N", default_value = "3000", value_parser = iterations)]
    iterations: u32,

    /// Warm-up round trips in each pass
    #[arg(short = 'w', long, value_name = "N", default_value = "100")]
    warmup: u32,

    /// Print JSON: {"setting": {…}, "bytes": 4, "window": {…}, "pinned": {…}, "ratio": …}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire copy pingpong
  warpwire copy pingpong -s 8 -t 100000
  warpwire copy pingpong --json | jq .ratio";

/// Longer than any reply takes on a working device.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Number of alternating passes.
const PASSES: u32 = 3;

fn width(text: &str) -> Result<u64, String> {
    match text {
        "4" => Ok(4),
        "8" => Ok(8),
        _ => Err("words are 4 or 8 bytes".to_owned()),
    }
}

#[derive(Serialize)]
struct Outcome {
    setting: Setting,
    bytes: u64,
    window: Times,
    pinned: Times,
    /// Window divided by pinned, of the medians.
    ratio: f64,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let bench = arguments.target.open(64)?;
    let setting = bench.setting();
    let reporter = Reporter::for_measurement(arguments.json);
    reporter.print(&setting.heading("pingpong"))?;
    reporter.print(&format!("# words of {} bytes\n", arguments.size))?;
    let kernel = PingPong::load(&bench.device)?;
    let (mut window, mut pinned) = (Series::default(), Series::default());
    let asked = bench.device.alloc_pinned(64)?;
    for pass in 0..PASSES {
        reporter.set_status(format!("pass {} of {PASSES}", pass + 1));
        let rounds = arguments.iterations.div_ceil(PASSES);
        let go = |asked: PingTarget<'_>, series: &mut Series| {
            round_trips(&bench, &kernel, &asked, arguments, rounds, series)
        };
        go(PingTarget::Window(&bench.window, &bench.memory), &mut window)?;
        go(PingTarget::Pinned(&asked), &mut pinned)?;
    }
    let (window, pinned) = (window.times(), pinned.times());
    let ratio = window.median_us / pinned.median_us;
    for (name, times) in [("window", &window), ("pinned", &pinned)] {
        let (min, median) = (figure(times.min_us), figure(times.median_us));
        reporter.print(&format!(
            "{name}: Round-trip latency per iteration is (min) {min}, (median) {median} us\n"
        ))?;
    }
    reporter.print(&format!("ratio:  {} (window to pinned, medians)\n", figure(ratio)))?;
    reporter.finish(&Outcome { setting, bytes: arguments.size, window, pinned, ratio })?;
    Ok(ExitCode::SUCCESS)
}

/// The word that the CPU writes.
enum PingTarget<'a> {
    Window(&'a Window, &'a Allocation),
    Pinned(&'a Allocation),
}

fn word(memory: &Allocation, bytes: u64) -> warpwire::Result<Word> {
    if bytes == 4 { memory.word32(0) } else { memory.word64(0) }
}

/// Starts the kernel and runs the rounds; each timed round is one group of the series.
fn round_trips(
    bench: &Bench,
    kernel: &PingPong,
    asked: &PingTarget<'_>,
    arguments: &Arguments,
    rounds: u32,
    series: &mut Series,
) -> Result<(), Failure> {
    let bytes = arguments.size;
    let (PingTarget::Window(_, memory) | PingTarget::Pinned(memory)) = asked;
    let (ping, pong) = (word(memory, bytes)?, word(&bench.device.alloc_pinned(64)?, bytes)?);
    ping.store(0)?;
    pong.store(0)?;
    let stream = bench.device.stream()?;
    let all = u64::from(arguments.warmup) + u64::from(rounds);
    kernel.start(&stream, &ping, &pong, all)?;
    let mut before = Instant::now();
    for round in 1..=all {
        match asked {
            PingTarget::Window(window, _) => {
                window.write(0, &round.to_le_bytes()[..bytes as usize])?
            }
            PingTarget::Pinned(_) => ping.store(round)?,
        }
        wait_for_pong(&pong, round, before)?;
        let now = Instant::now();
        if round > u64::from(arguments.warmup) {
            series.add(now - before, 1);
        }
        before = now;
    }
    stream.synchronize(TIMEOUT)?;
    Ok(())
}

fn wait_for_pong(pong: &Word, round: u64, asked: Instant) -> Result<(), Failure> {
    const POLLS: u32 = 100_000;
    loop {
        for _ in 0..POLLS {
            // No pause between loads: it would add to the latency.
            if pong.load()? >= round {
                return Ok(());
            }
        }
        if asked.elapsed() > TIMEOUT {
            return Err(Failure::Runtime(format!(
                "ping-pong failed: no reply to round {round} in {TIMEOUT:?}"
            )));
        }
        std::thread::yield_now();
    }
}
