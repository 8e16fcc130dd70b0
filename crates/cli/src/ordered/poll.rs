//! `warpwire async poll`

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use warpwire::mem::{Backend, Condition, Device, MemOp, Window, Word};

use super::end::PATIENCE;
use super::{Failure, Screen};
use crate::copy::clock::{Series, Times, figure};
use crate::copy::target::{DeviceChoice, iterations};

/// How fast a stream sees a word change
///
/// A stream waits for a word, and then writes another, in pinned memory; the CPU changes the first, and looks at the
/// second. The first lies in pinned memory, or in the GPU's memory behind a CPU window.
#[derive(Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    device: DeviceChoice,

    /// How often
    #[arg(short = 'n', long, value_name = "N", default_value = "2000", value_parser = iterations)]
    iterations: u32,

    /// Microseconds for which the stream has waited when the word changes
    #[arg(short = 'w', long, value_name = "MICROSECONDS", default_value = "0", value_parser = clap::value_parser!(u64).range(..=100_000))]
    sleep: u64,

    /// Print JSON: {"device": …, "rows": [{"word": "pinned", …}]}
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    word: &'static str,
    #[serde(flatten)]
    times: Times,
}

#[derive(Serialize)]
struct Report {
    device: String,
    simulated: bool,
    sleep_us: u64,
    rows: Vec<Row>,
    /// Ways that could not be measured, and why.
    missing: Vec<String>,
}

/// How many waits are on the stream at once.
const BATCH: u32 = 50;

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let (device, no_cuda) = arguments.device.open()?;
    let screen = Screen::new(arguments.json);
    screen.say(&format!("# Warpwire async poll: {} ({})\n", device.label(), device.info().name))?;
    if let Some(why) = no_cuda {
        screen.say(&format!("# simulated: {why}; the figures say nothing about a GPU\n"))?;
    }
    screen.say(&format!("{:<12}{:>16}{:>16}\n", "word", "average us", "median us"))?;
    let (mut rows, mut missing) = (Vec::new(), Vec::new());
    let pinned = device.alloc_pinned(64)?.word64(0)?;
    let memory = device.alloc(4096)?;
    let mut ways = vec![("pinned", pinned, None)];
    match memory.window() {
        Ok(window) => ways.push(("device", memory.word64(0)?, Some(window))),
        Err(why) => missing.push(format!("device: {why}")),
    }
    for (name, word, window) in ways {
        screen.working(format!("a word in {name} memory"));
        let times = measure(&device, arguments, &word, window.as_ref())?;
        screen.say(&format!(
            "{name:<12}{:>16}{:>16}\n",
            figure(times.mean_us),
            figure(times.median_us)
        ))?;
        rows.push(Row { word: name, times });
    }
    for why in &missing {
        screen.say(&format!("# not measured: {why}\n"))?;
    }
    let simulated = device.info().backend == Backend::Sim;
    let (device, sleep_us) = (device.label(), arguments.sleep);
    screen.finish(&Report { device, simulated, sleep_us, rows, missing })?;
    Ok(ExitCode::SUCCESS)
}

fn measure(
    device: &Device,
    arguments: &Arguments,
    word: &Word,
    window: Option<&Window>,
) -> Result<Times, Failure> {
    let answer = device.alloc_pinned(64)?.word64(0)?;
    let stream = device.stream()?;
    word.store(0)?;
    answer.store(0)?;
    let mut series = Series::default();
    let mut round = 0;
    while round < u64::from(arguments.iterations) {
        let until = (round + u64::from(BATCH)).min(arguments.iterations.into());
        let ops: Vec<MemOp> = (round + 1..=until)
            .flat_map(|value| {
                let wait = MemOp::Wait { word: word.clone(), condition: Condition::AtLeast, value };
                [wait, MemOp::Write { word: answer.clone(), value }]
            })
            .collect();
        stream.batch(&ops)?;
        std::thread::sleep(Duration::from_micros(200));
        for value in round + 1..=until {
            pause(Duration::from_micros(arguments.sleep));
            let start = Instant::now();
            match window {
                Some(window) => window.write(0, &value.to_le_bytes())?,
                None => word.store(value)?,
            }
            while answer.load()? < value {
                if start.elapsed() > PATIENCE {
                    let why = format!("no answer to {value} in {PATIENCE:?}");
                    return Err(Failure::Broken(format!("cannot watch a stream: {why}")));
                }
            }
            series.add(start.elapsed(), 1);
        }
        round = until;
    }
    stream.synchronize(PATIENCE)?;
    Ok(series.times())
}

fn pause(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}
