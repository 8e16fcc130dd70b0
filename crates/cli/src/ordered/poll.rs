//! `warpwire async poll`: how fast a waiting stream or kernel sees a word change.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use warpwire::mem::{Allocation, Backend, Condition, Device, MemOp, Stream, Window, Word};
use warpwire_apps::pingpong_kernels::{PingPongKernels, Relay};

use super::endpoint::TIMEOUT;
use super::{Failure, Reporter};
use crate::copy::clock::{Series, Times, figure};
use crate::copy::target::{DeviceChoice, iterations};

/// Measure how fast a stream, and a kernel, sees a word change
///
/// A stream waits for a word and then writes a second one, in pinned memory; the CPU changes the
/// first word and polls the second. The first word is in pinned memory, or in GPU memory behind a
/// CPU window. Then a running kernel does the same. Times are round trips in microseconds.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    device: DeviceChoice,

    /// Round trips to time
    #[arg(short = 'n', long, value_name = "N", default_value = "2000", value_parser = iterations)]
    iterations: u32,

    /// Delay before each change of the word, while the stream or kernel waits; up to 100000
    #[arg(short = 'w', long, value_name = "MICROSECONDS", default_value = "0",
        value_parser = clap::value_parser!(u64).range(..=100_000))]
    sleep: u64,

    /// Print JSON: {"device": …, "rows": [{"by": "stream", "word": "pinned", …}]}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire async poll
  warpwire async poll -n 10000 -w 50       change the word after 50 us of waiting";

#[derive(Serialize)]
struct Row {
    by: &'static str,
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
    /// Words that could not be measured, and why.
    missing: Vec<String>,
}

/// Waits enqueued on the stream, or run by one kernel launch, at a time.
const BATCH: u32 = 50;

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let (device, no_cuda) = arguments.device.open()?;
    let reporter = Reporter::for_measurement(arguments.json);
    reporter.print(&format!("# async poll on {} ({})\n", device.label(), device.info().name))?;
    if let Some(why) = no_cuda {
        reporter.print(&format!("# simulated: {why}; the figures do not represent a GPU\n"))?;
    }
    reporter
        .print(&format!("{:<10}{:<12}{:>16}{:>16}\n", "by", "word", "average us", "median us"))?;
    let (mut rows, mut missing) = (Vec::new(), Vec::new());
    let pinned = device.alloc_pinned(64)?.word64(0)?;
    let memory = device.alloc(4096)?;
    let mut targets = vec![("pinned", pinned, None)];
    match memory.window() {
        Ok(window) => targets.push(("device", memory.word64(0)?, Some(window))),
        Err(why) => missing.push(format!("device: {why}")),
    }
    for by in [Waiter::Stream, Waiter::Kernel(PingPongKernels::load(&device)?)] {
        for (name, word, window) in &targets {
            reporter.set_status(format!("a word in {name} memory, by a {}", by.name()));
            let times = measure(&device, arguments, &by, (word, window.as_ref()))?;
            reporter.print(&format!(
                "{:<10}{name:<12}{:>16}{:>16}\n",
                by.name(),
                figure(times.mean_us),
                figure(times.median_us)
            ))?;
            rows.push(Row { by: by.name(), word: name, times });
        }
    }
    for why in &missing {
        reporter.print(&format!("# not measured: {why}\n"))?;
    }
    let simulated = device.info().backend == Backend::Sim;
    let (device, sleep_us) = (device.label(), arguments.sleep);
    reporter.finish(&Report { device, simulated, sleep_us, rows, missing })?;
    Ok(ExitCode::SUCCESS)
}

/// What waits for the word.
enum Waiter {
    Stream,
    Kernel(PingPongKernels),
}

impl Waiter {
    fn name(&self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Kernel(_) => "kernel",
        }
    }

    /// Enqueues waits for 1, 2, … `count` in `word`, each followed by a write of the value to
    /// `answers`.
    fn wait(
        &self,
        stream: &Stream,
        word: &Word,
        answers: &Allocation,
        count: u64,
    ) -> Result<(), Failure> {
        match self {
            Self::Stream => {
                let answer = answers.word64(0)?;
                let round = |value| {
                    let (word, condition) = (word.clone(), Condition::AtLeast);
                    let answer = MemOp::Write { word: answer.clone(), value };
                    [MemOp::Wait { word, condition, value }, answer]
                };
                let ops: Vec<MemOp> = (1..=count).flat_map(round).collect();
                Ok(stream.batch(&ops)?)
            }
            Self::Kernel(kernels) => {
                let relay = Relay { bell: &answers.whole()?, own: word, sends_first: false };
                Ok(kernels.relay(stream, &relay, count, TIMEOUT)?)
            }
        }
    }

    fn check(&self) -> Result<(), Failure> {
        match self {
            Self::Stream => Ok(()),
            Self::Kernel(kernels) => Ok(kernels.check()?),
        }
    }
}

fn measure(
    device: &Device,
    arguments: &Arguments,
    by: &Waiter,
    (word, window): (&Word, Option<&Window>),
) -> Result<Times, Failure> {
    let answers = device.alloc_pinned(128)?;
    let (answer, stream) = (answers.word64(0)?, device.stream()?);
    let mut series = Series::default();
    let mut left = arguments.iterations;
    while left > 0 {
        let count = left.min(BATCH);
        word.store(0)?;
        answer.store(0)?;
        by.wait(&stream, word, &answers, count.into())?;
        std::thread::sleep(Duration::from_micros(200));
        for value in 1..=u64::from(count) {
            pause(Duration::from_micros(arguments.sleep));
            let start = Instant::now();
            match window {
                Some(window) => window.write(0, &value.to_le_bytes())?,
                None => word.store(value)?,
            }
            while answer.load()? < value {
                if start.elapsed() > TIMEOUT {
                    let why = format!("no answer to {value} in {TIMEOUT:?}");
                    return Err(Failure::Runtime(format!("cannot measure a {}: {why}", by.name())));
                }
            }
            series.add(start.elapsed(), 1);
        }
        stream.synchronize(TIMEOUT)?;
        by.check()?;
        left -= count;
    }
    Ok(series.times())
}

fn pause(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}
