//! Baseline of a round trip, without an HCA: a CPU thread relays words between two streams, or
//! between two kernels.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use warpwire::mem::{Allocation, Backend, Condition, Device, MemOp, Stream, Window, Word};
use warpwire_apps::pingpong_kernels::{PingPongKernels, Relay};

use crate::copy::clock::figure;
use crate::output::Failure;

/// Longer than a working device takes for all rounds.
const TIMEOUT: Duration = Duration::from_secs(20);
const ROUNDS: u64 = 100;
/// The kernel launch is part of the measured time; more rounds amortize it.
const KERNEL_ROUNDS: u64 = 2000;
/// Attempts per figure; the best one counts. The simulated GPU's figures mean nothing, so it makes
/// only one attempt with each kind of memory.
const ATTEMPTS: u32 = 10;
const SIM_ATTEMPTS: u32 = 2;

/// Round trips with only a relay thread in between, in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Baseline {
    /// Between two streams, with stream memory operations.
    pub(crate) stream_us: f64,
    /// Between two running kernels.
    pub(crate) kernel_us: f64,
}

impl Baseline {
    /// The best of several attempts, with words in pinned memory and in device memory: which of the
    /// two streams and kernels see sooner depends on the machine.
    pub(crate) fn measure(device: &Device) -> Result<Self, Failure> {
        let kernels = PingPongKernels::load(device)?;
        let mut best = [Duration::MAX; 2];
        let attempts = match device.info().backend {
            Backend::Cuda => ATTEMPTS,
            Backend::Sim => SIM_ATTEMPTS,
        };
        for at in 0..attempts {
            let pinned = at % 2 == 0;
            best[0] = best[0].min(between_streams(device, pinned)?);
            best[1] = best[1].min(between_kernels(device, &kernels, pinned)?);
        }
        let [stream_us, kernel_us] = best.map(|time| time.as_secs_f64() * 1e6);
        Ok(Self { stream_us, kernel_us })
    }

    /// The baseline of a GPU; `None` of the simulated one, whose threads share the CPU with all
    /// else: its baseline bounds nothing.
    pub(crate) fn of_device(device: &Device) -> Result<Option<Self>, Failure> {
        match device.info().backend {
            Backend::Cuda => Self::measure(device).map(Some),
            Backend::Sim => Ok(None),
        }
    }

    /// The baseline of a mode, by its name; `None` for the CPU's modes.
    pub(crate) fn of(&self, mode: &str) -> Option<f64> {
        match mode {
            "stream" | "graph" => Some(self.stream_us),
            "kernel" => Some(self.kernel_us),
            _ => None,
        }
    }

    /// The line below a table.
    pub(crate) fn line(&self) -> String {
        format!(
            "# baseline (relay thread, no HCA): {} us between streams, {} us between kernels\n",
            figure(self.stream_us),
            figure(self.kernel_us)
        )
    }
}

/// A round trip divided by its baseline.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Ratio {
    pub(crate) mode: String,
    pub(crate) ratio: f64,
}

/// Ratios of `(mode, microseconds)` round trips; modes without a baseline are left out.
pub(crate) fn ratios<'a>(
    baseline: &Baseline,
    round_trips: impl IntoIterator<Item = (&'a str, f64)>,
) -> Vec<Ratio> {
    let ratio = |(mode, us): (&str, f64)| {
        let ratio = us / baseline.of(mode)?;
        Some(Ratio { mode: mode.to_owned(), ratio })
    };
    round_trips.into_iter().filter_map(ratio).collect()
}

/// The ratios as a line of text; empty if there are none.
pub(crate) fn ratio_line(bytes: u64, ratios: &[Ratio]) -> String {
    if ratios.is_empty() {
        return String::new();
    }
    let each: Vec<_> = ratios
        .iter()
        .map(|Ratio { mode, ratio }| format!("{mode} {} x its baseline", figure(*ratio)))
        .collect();
    format!("# {bytes} bytes: {}\n", each.join(", "))
}

/// The words of one side: it writes `bell`, and waits for `answer`.
struct RelayPort {
    doorbells: Allocation,
    bell: Word,
    /// The round number of a kernel, valid when its `bell` has changed.
    value: Word,
    answer: Word,
    /// CPU window onto `answer`; `None` if that is in pinned memory.
    window: Option<Window>,
}

impl RelayPort {
    fn new(device: &Device, pinned: bool) -> Result<Self, Failure> {
        let doorbells = device.alloc_pinned(128)?;
        let (bell, value) = (doorbells.word64(0)?, doorbells.word64(64)?);
        let memory = device.alloc(4096)?;
        let (answer, window) = match memory.window() {
            Ok(window) if !pinned => (memory.word64(0)?, Some(window)),
            _ => (device.alloc_pinned(64)?.word64(0)?, None),
        };
        bell.store(0)?;
        answer.store(0)?;
        Ok(Self { doorbells, bell, value, answer, window })
    }

    fn forward(&self, value: u64) -> Result<(), Failure> {
        match &self.window {
            Some(window) => Ok(window.write(0, &value.to_le_bytes())?),
            None => Ok(self.answer.store(value)?),
        }
    }
}

fn between_streams(device: &Device, pinned: bool) -> Result<Duration, Failure> {
    let ports = [RelayPort::new(device, pinned)?, RelayPort::new(device, pinned)?];
    let ring = |port: &RelayPort, value| MemOp::Write { word: port.bell.clone(), value };
    let wait = |word: &Word, value| {
        let (word, condition) = (word.clone(), Condition::AtLeast);
        MemOp::Wait { word, condition, value }
    };
    let (mut ping, mut pong) = (Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        ping.extend([ring(&ports[0], round), wait(&ports[0].answer, round)]);
        pong.extend([wait(&ports[1].answer, round), ring(&ports[1], round)]);
    }
    let enqueue = |streams: &[Stream; 2]| -> Result<(), Failure> {
        streams[1].batch(&pong)?;
        Ok(streams[0].batch(&ping)?)
    };
    Ok(gated(device, &ports, |port| port.bell.load(), enqueue)? / ROUNDS as u32)
}

fn between_kernels(
    device: &Device,
    kernels: &PingPongKernels,
    pinned: bool,
) -> Result<Duration, Failure> {
    let ports = [RelayPort::new(device, pinned)?, RelayPort::new(device, pinned)?];
    let rounds = match device.info().backend {
        Backend::Cuda => KERNEL_ROUNDS,
        Backend::Sim => ROUNDS,
    };
    let enqueue = |streams: &[Stream; 2]| -> Result<(), Failure> {
        for at in [1, 0] {
            let RelayPort { doorbells, answer, .. } = &ports[at];
            let relay = Relay { bell: &doorbells.whole()?, own: answer, sends_first: at == 0 };
            kernels.relay(&streams[at], &relay, rounds, TIMEOUT)?;
        }
        Ok(())
    };
    let took = gated(device, &ports, |port| port.value.load(), enqueue)?;
    kernels.check()?;
    Ok(took / rounds as u32)
}

/// Runs two streams that start when a gate word is set, with a relay thread between them; returns
/// the time from opening the gate until the first stream is done.
fn gated(
    device: &Device,
    ports: &[RelayPort; 2],
    read_value: fn(&RelayPort) -> warpwire::Result<u64>,
    begin: impl FnOnce(&[Stream; 2]) -> Result<(), Failure>,
) -> Result<Duration, Failure> {
    let gate = device.alloc_pinned(64)?.word64(0)?;
    gate.store(0)?;
    let streams = [device.stream()?, device.stream()?];
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let relay = scope.spawn(|| relay(ports, read_value, &done));
        let run = || -> Result<Duration, Failure> {
            streams[0].wait_value(&gate, Condition::AtLeast, 1)?;
            begin(&streams)?;
            std::thread::sleep(Duration::from_millis(2));
            let start = Instant::now();
            gate.store(1)?;
            streams[0].synchronize(TIMEOUT)?;
            let took = start.elapsed();
            streams[1].synchronize(TIMEOUT)?;
            Ok(took)
        };
        let took = run();
        done.store(true, Ordering::Relaxed);
        let relayed = relay.join().unwrap_or_else(|_| {
            Err(Failure::Runtime(
                "cannot measure the baseline: the relay thread panicked".to_owned(),
            ))
        });
        relayed.and(took)
    })
}

/// Forwards each side's value to the other when its bell changes, until `done` is set.
fn relay(
    ports: &[RelayPort; 2],
    read_value: fn(&RelayPort) -> warpwire::Result<u64>,
    done: &AtomicBool,
) -> Result<(), Failure> {
    let mut last = [0; 2];
    while !done.load(Ordering::Relaxed) {
        for at in 0..2 {
            let doorbell_value = ports[at].bell.load()?;
            if doorbell_value != last[at] {
                last[at] = doorbell_value;
                ports[at ^ 1].forward(read_value(&ports[at])?)?;
            }
        }
        std::hint::spin_loop();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The simulated GPU measures one, though it means nothing there.
    #[test]
    fn words_are_relayed_between_streams_and_between_kernels() {
        let device = warpwire::mem::open("sim:0").unwrap();
        let baseline = Baseline::measure(&device).unwrap_or_else(|why| panic!("{why:?}"));
        assert!(baseline.stream_us > 0.0 && baseline.kernel_us > 0.0, "{baseline:?}");
        assert!(Baseline::of_device(&device).unwrap_or_else(|why| panic!("{why:?}")).is_none());
        let found = ratios(&baseline, [("cpu", 1.0), ("stream", 2.0 * baseline.stream_us)]);
        assert_eq!(found.len(), 1);
        assert!((found[0].ratio - 2.0).abs() < 1e-9 && found[0].mode == "stream");
        assert!(ratio_line(8, &found).contains("stream 2.00 x its baseline"));
    }
}
