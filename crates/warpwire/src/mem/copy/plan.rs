//! The copy plan: the fastest method by size and direction, measured once per device.

use std::collections::HashMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::super::allocation::{Allocation, MemoryKind};
use super::super::device::{Backend, Device};
use super::super::window::Window;
use super::Routine;
use super::copier::StagedReader;
use super::staging::StagingOptions;
use crate::error::{Error, Kind, Result};
use crate::units;

/// Environment variable that overrides the plan: `write=64KiB,read=512` are the maximum sizes
/// copied through the window, per direction.
pub const ENV_VAR: &str = "WARPWIRE_COPY";

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CopyDirection {
    /// From the host to the device.
    Write,
    /// From the device to the host.
    Read,
}

/// Method of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CopyMethod {
    /// CPU stores or loads through a window.
    Window,
    /// Stores of several threads through a window.
    Threads,
    /// The copy agent, if one runs.
    Agent,
    /// The device's copy engine, directly from or to the caller's buffer.
    Engine,
    /// The copy engine to pinned memory, double-buffered: the CPU copies out of it concurrently.
    Staged,
}

impl fmt::Display for CopyMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Window => "window",
            Self::Threads => "threads",
            Self::Agent => "agent",
            Self::Engine => "engine",
            Self::Staged => "staged",
        })
    }
}

/// Measured times for one size and direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CopySample {
    /// Direction of the copy.
    pub direction: CopyDirection,
    /// Length in bytes.
    pub len: u64,
    /// Microseconds through the window, if measured.
    pub window_us: Option<f64>,
    /// Microseconds with the copy engine.
    pub engine_us: f64,
    /// Microseconds with the copy engine through pinned memory, if measured.
    #[serde(default)]
    pub staged_us: Option<f64>,
    /// Microseconds through the window with several threads, if measured.
    #[serde(default)]
    pub threads_us: Option<f64>,
}

/// The size ranges in which each method is the fastest on a device.
///
/// ```
/// use warpwire::mem::copy::{CopyDirection, CopyPlan, CopyMethod};
/// let plan = CopyPlan::with_thresholds(65_536, 512);
/// assert_eq!(plan.method(CopyDirection::Write, 4096), CopyMethod::Window);
/// assert_eq!(plan.method(CopyDirection::Read, 4096), CopyMethod::Engine);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CopyPlan {
    /// Maximum length of a write through the window.
    window_writes: u64,
    /// Maximum length of a read through the window.
    window_reads: u64,
    /// Minimum length of a read through pinned memory, if overridden.
    staged_reads: Option<u64>,
    /// The measurements that it is based on; empty if the plan was set explicitly.
    samples: Vec<CopySample>,
}

/// The measured sizes. Thresholds between them are interpolated.
const SIZES: [u64; 14] = [
    64,
    256,
    1 << 10,
    2 << 10,
    4 << 10,
    8 << 10,
    16 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    4 << 20,
];
const MAX_SAMPLE_LEN: u64 = SIZES[SIZES.len() - 1];
/// Below this, reads are not worth staging.
const MIN_STAGED_READ: u64 = 32 << 10;
/// Below this, a write is over before the threads have started.
const MIN_PARALLEL_WRITE: u64 = 8 << 20;
/// A method that needs extra threads or memory must take at most this fraction of the time.
const WIN_RATIO: f64 = 0.85;
/// Maximum time to measure one method at one size.
const SAMPLE_BUDGET: Duration = Duration::from_millis(4);
impl CopyPlan {
    /// A plan with given maximum lengths for copies through the window.
    pub fn with_thresholds(window_writes: u64, window_reads: u64) -> Self {
        Self { window_writes, window_reads, staged_reads: None, samples: Vec::new() }
    }

    /// Sets the minimum length of reads through pinned memory.
    #[must_use]
    pub fn with_min_staged_read(mut self, len: u64) -> Self {
        self.staged_reads = Some(len);
        self
    }

    /// The plan for a device: from `WARPWIRE_COPY`, from an earlier measurement (by this process,
    /// or in the user's cache directory), or measured now.
    pub fn for_device(device: &Device) -> Result<Arc<Self>> {
        static KNOWN: Mutex<Option<HashMap<String, Arc<CopyPlan>>>> = Mutex::new(None);
        if let Some(plan) = Self::from_env()? {
            return Ok(Arc::new(plan));
        }
        let name = cache_name(device);
        let mut known = KNOWN.lock();
        let known = known.get_or_insert_default();
        if let Some(plan) = known.get(&name) {
            return Ok(plan.clone());
        }
        let plan = match Self::load(device) {
            Some(plan) => plan,
            None => {
                let plan = Self::calibrate(device)?;
                plan.save(device);
                plan
            }
        };
        let plan = Arc::new(plan);
        known.insert(name, plan.clone());
        Ok(plan)
    }

    fn from_env() -> Result<Option<Self>> {
        let Ok(text) = std::env::var(ENV_VAR) else { return Ok(None) };
        if text.trim().is_empty() {
            return Ok(None);
        }
        Self::parse(&text).map(Some)
    }

    fn parse(text: &str) -> Result<Self> {
        let malformed = |why: String| {
            Error::new(Kind::Malformed, "read the copy plan")
                .on(ENV_VAR)
                .why(why)
                .fix("give the maximum sizes for the window, like write=64KiB,read=512")
        };
        let mut plan = Self::with_thresholds(0, 0);
        for setting in text.split(',') {
            let (key, value) = setting
                .split_once('=')
                .ok_or_else(|| malformed(format!("{setting:?} is not of the form key=value")))?;
            let size = units::parse_bytes(value)?;
            match key.trim() {
                "write" => plan.window_writes = size,
                "read" => plan.window_reads = size,
                other => return Err(malformed(format!("there is no setting {other:?}"))),
            }
        }
        Ok(plan)
    }

    /// Measures a device. Takes well under a second.
    pub fn calibrate(device: &Device) -> Result<Self> {
        let memory = device.alloc_kind(MAX_SAMPLE_LEN, MemoryKind::Vmm)?;
        // Without a window there is no choice.
        let Ok(window) = memory.window() else { return Ok(Self::with_thresholds(0, 0)) };
        let mut samples = Vec::new();
        let window_writes = measure(CopyDirection::Write, &memory, &window, &mut samples)?;
        let window_reads = measure(CopyDirection::Read, &memory, &window, &mut samples)?;
        Ok(Self { window_writes, window_reads, staged_reads: None, samples })
    }

    /// The method for a copy of `len` bytes without an agent.
    #[inline]
    pub fn method(&self, direction: CopyDirection, len: u64) -> CopyMethod {
        let threshold = match direction {
            CopyDirection::Write => self.window_writes,
            CopyDirection::Read => self.window_reads,
        };
        match direction {
            CopyDirection::Write if len >= MIN_PARALLEL_WRITE && self.parallel_wins() => {
                CopyMethod::Threads
            }
            _ if len <= threshold => CopyMethod::Window,
            CopyDirection::Read if self.staging_wins(len) => CopyMethod::Staged,
            _ => CopyMethod::Engine,
        }
    }

    /// Maximum length of a write through the window by one thread, regardless of the measurements.
    pub(super) fn max_window_write(&self) -> u64 {
        self.window_writes.min(MIN_PARALLEL_WRITE - 1)
    }

    /// Maximum length of a copy through the window by one thread.
    pub(crate) fn max_window_copy(&self, direction: CopyDirection) -> u64 {
        match direction {
            CopyDirection::Write => self.max_window_write(),
            CopyDirection::Read => self.window_reads,
        }
    }

    /// Whether several threads were clearly faster at the maximum measured size; larger writes gain
    /// more.
    fn parallel_wins(&self) -> bool {
        let mut writes = self.samples.iter().filter(|s| s.direction == CopyDirection::Write);
        let last = writes.next_back().and_then(|s| s.threads_us.zip(s.window_us));
        last.is_some_and(|(threads, window)| threads < window * WIN_RATIO)
    }

    /// Whether staging was clearly faster at the next larger measured size. Beyond the maximum
    /// measured size it is not used: there the CPU's copy costs more than the driver's own staging.
    fn staging_wins(&self, len: u64) -> bool {
        if let Some(from) = self.staged_reads {
            return len >= from;
        }
        let mut reads = self.samples.iter().filter(|s| s.direction == CopyDirection::Read);
        let next = reads.find(|s| s.len >= len);
        next.is_some_and(|s| s.staged_us.is_some_and(|staged| staged < s.engine_us * WIN_RATIO))
    }

    /// The lengths of reads for which an agent with the given latency (in microseconds, for a small
    /// read) is the fastest method: from where the window takes longer, up to where the engine's
    /// bandwidth outweighs its start-up cost.
    pub(super) fn agent_reads(&self, latency: f64) -> Option<RangeInclusive<u64>> {
        const MAX_AGENT_READ: u64 = 512 << 10;
        // Without measurements: the value found on the machines tested.
        const DEFAULT_MIN_AGENT_READ: u64 = 3 << 10;
        let mut reads =
            self.samples.iter().filter(|s| s.direction == CopyDirection::Read).peekable();
        if reads.peek().is_none() {
            return Some(DEFAULT_MIN_AGENT_READ..=MAX_AGENT_READ);
        }
        let slower = |s: &&CopySample| s.window_us.is_none_or(|window| window > latency);
        let engine_slower = |s: &CopySample| s.engine_us > latency;
        match reads.find(slower) {
            Some(sample) if engine_slower(sample) => Some(sample.len / 2 + 1..=MAX_AGENT_READ),
            _ => None,
        }
    }

    fn load(device: &Device) -> Option<Self> {
        let text = std::fs::read_to_string(cache_file(device)?).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Saves the plan for later processes; if that fails, they measure again.
    fn save(&self, device: &Device) {
        let Some(file) = cache_file(device) else { return };
        let kept = file.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| {
            // Written to a temporary file and renamed, so that no reader sees a partial file.
            let fresh = file.with_extension(format!("{}.tmp", std::process::id()));
            std::fs::write(&fresh, serde_json::to_string_pretty(self)?)?;
            std::fs::rename(&fresh, &file)
        });
        if let Err(error) = kept {
            tracing::debug!(%error, file = %file.display(), "the copy plan was not saved");
        }
    }

    /// Measures again, ignoring an earlier measurement, and saves the result.
    pub fn recalibrate(device: &Device) -> Result<Self> {
        let plan = Self::calibrate(device)?;
        plan.save(device);
        Ok(plan)
    }
}

/// What a plan depends on: the library version, the device, and the CPU's copy routines.
fn cache_name(device: &Device) -> String {
    let info = device.info();
    let (stores, loads) = (Routine::for_stores(), Routine::for_loads());
    let version = env!("CARGO_PKG_VERSION");
    format!("copy-{version}-{}-{stores}-{loads}", info.uuid)
}

/// Cache file of a plan; `None` for simulated GPUs, which differ in each process.
fn cache_file(device: &Device) -> Option<PathBuf> {
    if device.info().backend == Backend::Sim {
        return None;
    }
    let folder = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
    folder
        .is_absolute()
        .then(|| folder.join("warpwire").join(format!("{}.json", cache_name(device))))
}

/// Number of threads for parallel writes, at most 4: more gain nothing on the bus.
pub(super) fn threads() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT
        .get_or_init(|| std::thread::available_parallelism().map_or(1, |count| count.get().min(4)))
}

/// Measures the methods at each size until the window is clearly slower, and returns the threshold.
fn measure(
    direction: CopyDirection,
    memory: &Allocation,
    window: &Window,
    samples: &mut Vec<CopySample>,
) -> Result<u64> {
    let mut buffer = vec![1; MAX_SAMPLE_LEN as usize];
    // The cost of window reads grows steeply with their size, and the driver's varies from run to
    // run: near the threshold the engine is the safer choice.
    let margin = match direction {
        CopyDirection::Write => 1.0,
        CopyDirection::Read => 0.75,
    };
    let staged_reader = StagedReader::new(memory, StagingOptions::default())?;
    let mut threshold = 0;
    let mut window_is_slower = false;
    let mut before: Option<(u64, f64)> = None;
    for len in SIZES {
        let part = &mut buffer[..len as usize];
        let engine = median(|| match direction {
            CopyDirection::Write => memory.write(0, part),
            CopyDirection::Read => memory.read(0, part),
        })?;
        let through_window = if window_is_slower {
            None
        } else {
            Some(median(|| match direction {
                CopyDirection::Write => window.write(0, part),
                CopyDirection::Read => window.read(0, part),
            })?)
        };
        let staged_us = match direction {
            CopyDirection::Read if len >= MIN_STAGED_READ => {
                let whole = memory.region(0, len)?;
                Some(median(|| staged_reader.read(&whole, part, &|| false))?)
            }
            _ => None,
        };
        let threads_us = match direction {
            CopyDirection::Write if len == MAX_SAMPLE_LEN && !window_is_slower && threads() > 1 => {
                Some(median(|| window.write_parallel(threads(), 0, part))?)
            }
            _ => None,
        };
        let (window_us, engine_us) = (through_window, engine);
        samples.push(CopySample { direction, len, window_us, engine_us, staged_us, threads_us });
        let Some(through_window) = through_window else { continue };
        let ratio = through_window / (engine * margin);
        if ratio <= 1.0 {
            threshold = len;
        } else if let Some((last, last_ratio)) = before.filter(|(_, ratio)| *ratio <= 1.0) {
            threshold = crossover((last, last_ratio), (len, ratio));
        }
        // Twice as slow and growing: larger sizes only get worse.
        window_is_slower = ratio > 2.0;
        before = Some((len, ratio));
    }
    Ok(if window_is_slower { threshold } else { u64::MAX })
}

/// The size at which the ratio is 1, interpolated linearly between logarithms.
fn crossover((small, under): (u64, f64), (large, over): (u64, f64)) -> u64 {
    let share = under.ln().abs() / (under.ln().abs() + over.ln().abs()).max(1e-9);
    let (from, to) = ((small as f64).ln(), (large as f64).ln());
    (from + (to - from) * share).exp() as u64
}

/// The median time of a copy in microseconds, over as many runs as the budget allows.
pub(super) fn median(mut copy: impl FnMut() -> Result<()>) -> Result<f64> {
    const MIN_RUNS: usize = 5;
    const MAX_RUNS: usize = 400;
    copy()?;
    let start = Instant::now();
    let mut times = Vec::with_capacity(MAX_RUNS);
    while times.len() < MIN_RUNS || (start.elapsed() < SAMPLE_BUDGET && times.len() < MAX_RUNS) {
        let before = Instant::now();
        copy()?;
        times.push(before.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

impl fmt::Display for CopyPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threshold = |len: u64| match len {
            0 => "never".to_owned(),
            u64::MAX => "always".to_owned(),
            len => format!("up to {}", units::bytes(len)),
        };
        writeln!(f, "writes through the window: {}", threshold(self.window_writes))?;
        writeln!(f, "reads through the window:  {}", threshold(self.window_reads))?;
        if self.samples.is_empty() {
            return Ok(());
        }
        let heads = ["window us", "engine us", "staged us", "threads us"];
        let [window, engine, staged, threads] = heads;
        writeln!(
            f,
            "\n{:<6}{:>9}{window:>11}{engine:>11}{staged:>11}{threads:>12}  used",
            "", "size"
        )?;
        for sample in &self.samples {
            let CopySample { direction, len, window_us, engine_us, staged_us, threads_us } = sample;
            let name = match direction {
                CopyDirection::Write => "write",
                CopyDirection::Read => "read",
            };
            let time = |us: &Option<f64>| us.map_or("-".to_owned(), |us| format!("{us:.2}"));
            let (window, staged, threads) = (time(window_us), time(staged_us), time(threads_us));
            let (size, method) = (units::bytes(*len), self.method(*direction, *len));
            write!(f, "{name:<6}{size:>9}{window:>11}{engine_us:>11.2}{staged:>11}")?;
            writeln!(f, "{threads:>12}  {method}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_parse_and_errors_name_them() {
        let plan = CopyPlan::parse("write=128KiB, read=1KiB").unwrap();
        assert_eq!(plan, CopyPlan::with_thresholds(128 << 10, 1 << 10));
        for text in ["write", "write=much", "copy=1", "write=1,,"] {
            assert!(CopyPlan::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_threshold_is_the_crossover() {
        assert_eq!(crossover((1024, 0.5), (4096, 2.0)), 2047);
        let near = crossover((1024, 0.9), (4096, 4.0));
        assert!((1024..1400).contains(&near), "{near}");
    }

    fn sample(len: u64, window_us: f64, engine_us: f64, staged_us: Option<f64>) -> CopySample {
        let (direction, window_us) = (CopyDirection::Read, Some(window_us));
        CopySample { direction, len, window_us, engine_us, staged_us, threads_us: None }
    }

    #[test]
    fn agent_and_staging_are_chosen_where_they_are_faster() {
        let samples = vec![
            sample(1 << 10, 1.0, 8.0, None),
            sample(4 << 10, 4.0, 9.0, None),
            sample(64 << 10, 70.0, 16.0, Some(12.0)),
            sample(1 << 20, 1000.0, 120.0, Some(150.0)),
        ];
        let plan = CopyPlan { samples, ..CopyPlan::with_thresholds(0, 0) };
        assert_eq!(plan.method(CopyDirection::Read, 40 << 10), CopyMethod::Staged);
        assert_eq!(plan.method(CopyDirection::Read, 65 << 10), CopyMethod::Engine);
        assert_eq!(plan.method(CopyDirection::Read, 1 << 30), CopyMethod::Engine);
        assert_eq!(plan.agent_reads(3.4), Some(2049..=512 << 10));
        assert_eq!(plan.agent_reads(1e6), None, "an agent slower than the rest serves nothing");
    }

    #[test]
    fn methods_change_at_the_threshold() {
        let plan = CopyPlan::with_thresholds(1000, 100);
        assert_eq!(plan.method(CopyDirection::Write, 1000), CopyMethod::Window);
        assert_eq!(plan.method(CopyDirection::Write, 1001), CopyMethod::Engine);
        assert_eq!(plan.agent_reads(3.0), Some(3 << 10..=512 << 10));
        let staged = plan.clone().with_min_staged_read(5000);
        assert_eq!(staged.method(CopyDirection::Read, 4999), CopyMethod::Engine);
        assert_eq!(staged.method(CopyDirection::Read, 5000), CopyMethod::Staged);
        assert!(plan.to_string().contains("up to 1000 B"));
    }
}
