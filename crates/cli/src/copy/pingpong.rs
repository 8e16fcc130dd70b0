//! `warpwire copy pingpong`

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use warpwire::mem::{Allocation, Window, Word};
use warpwire_apps::pingpong::PingPong;

use super::clock::{Series, Times, figure};
use super::target::{Bench, Setting, Target, iterations};
use super::{Failure, Screen};

/// Round trips CPU to GPU to CPU
///
/// A kernel polls a word of its own memory, which the CPU writes through a window, and answers into pinned
/// host memory, which the CPU polls. Beside it the same with the first word in pinned host memory too, so
/// that the kernel polls across PCIe. The two take turns.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    target: Target,

    /// How many bytes the words have: 4 or 8
    #[arg(short = 's', long, value_name = "SIZE", default_value = "4", value_parser = width)]
    size: u64,

    /// How many round trips to time, each way
    #[arg(short = 't', long, value_name = "N", default_value = "3000", value_parser = iterations)]
    iterations: u32,

    /// How many before the clock runs, in each turn
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

/// No answer takes as long.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often the two ways take turns.
const TURNS: u32 = 3;

fn width(text: &str) -> Result<u64, String> {
    match text {
        "4" => Ok(4),
        "8" => Ok(8),
        _ => Err("words have 4 or 8 bytes".to_owned()),
    }
}

#[derive(Serialize)]
struct Outcome {
    setting: Setting,
    bytes: u64,
    window: Times,
    pinned: Times,
    /// Window to pinned, by the medians.
    ratio: f64,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let bench = arguments.target.open(64)?;
    let setting = bench.setting();
    let screen = Screen::new(arguments.json);
    screen.say(&setting.heading("pingpong"))?;
    screen.say(&format!("# words of {} bytes\n", arguments.size))?;
    let kernel = PingPong::load(&bench.device)?;
    let (mut window, mut pinned) = (Series::default(), Series::default());
    let asked = bench.device.alloc_pinned(64)?;
    for turn in 0..TURNS {
        screen.working(format!("turn {} of {TURNS}", turn + 1));
        let rounds = arguments.iterations.div_ceil(TURNS);
        let go = |asked: Asked<'_>, series: &mut Series| {
            trips(&bench, &kernel, &asked, arguments, rounds, series)
        };
        go(Asked::Window(&bench.window, &bench.memory), &mut window)?;
        go(Asked::Pinned(&asked), &mut pinned)?;
    }
    let (window, pinned) = (window.times(), pinned.times());
    let ratio = window.median_us / pinned.median_us;
    for (name, times) in [("window", &window), ("pinned", &pinned)] {
        let (min, median) = (figure(times.min_us), figure(times.median_us));
        screen.say(&format!(
            "{name}: Round-trip latency per iteration is (min) {min}, (median) {median} us\n"
        ))?;
    }
    screen.say(&format!("ratio:  {} (window to pinned, medians)\n", figure(ratio)))?;
    screen.finish(&Outcome { setting, bytes: arguments.size, window, pinned, ratio })?;
    Ok(ExitCode::SUCCESS)
}

/// Where the CPU asks.
enum Asked<'a> {
    Window(&'a Window, &'a Allocation),
    Pinned(&'a Allocation),
}

fn word(memory: &Allocation, bytes: u64) -> warpwire::Result<Word> {
    if bytes == 4 { memory.word32(0) } else { memory.word64(0) }
}

/// Starts the kernel and asks it round by round; each round is one group of the series.
fn trips(
    bench: &Bench,
    kernel: &PingPong,
    asked: &Asked<'_>,
    arguments: &Arguments,
    rounds: u32,
    series: &mut Series,
) -> Result<(), Failure> {
    let bytes = arguments.size;
    let (Asked::Window(_, memory) | Asked::Pinned(memory)) = asked;
    let (ask, answer) = (word(memory, bytes)?, word(&bench.device.alloc_pinned(64)?, bytes)?);
    ask.store(0)?;
    answer.store(0)?;
    let stream = bench.device.stream()?;
    let all = u64::from(arguments.warmup) + u64::from(rounds);
    kernel.start(&stream, &ask, &answer, all)?;
    let mut before = Instant::now();
    for round in 1..=all {
        match asked {
            Asked::Window(window, _) => window.write(0, &round.to_le_bytes()[..bytes as usize])?,
            Asked::Pinned(_) => ask.store(round)?,
        }
        await_answer(&answer, round, before)?;
        let now = Instant::now();
        if round > u64::from(arguments.warmup) {
            series.add(now - before, 1);
        }
        before = now;
    }
    stream.synchronize(PATIENCE)?;
    Ok(())
}

fn await_answer(answer: &Word, round: u64, asked: Instant) -> Result<(), Failure> {
    const LOOKS: u32 = 100_000;
    loop {
        for _ in 0..LOOKS {
            // No pause between the looks: it would be part of the time.
            if answer.load()? >= round {
                return Ok(());
            }
        }
        if asked.elapsed() > PATIENCE {
            return Err(Failure::Broken(format!(
                "cannot play ping-pong: no answer to round {round} in {PATIENCE:?}"
            )));
        }
        std::thread::yield_now();
    }
}
