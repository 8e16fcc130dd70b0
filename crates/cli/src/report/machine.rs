//! Facts of this machine, from files and from `warpwire topo`.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::data::Machine;
use super::spawn;
use crate::output::Failure;

/// How long the CPU time of other processes is watched.
const WATCH: Duration = Duration::from_millis(300);

pub(crate) fn look() -> Result<Machine, Failure> {
    let busy = busy();
    let uname = rustix::system::uname();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let host = uname.nodename().to_string_lossy().into_owned();
    let mut facts = vec![
        ("CPU".to_owned(), format!("{}, {cores} cores", cpu_model())),
        ("Memory".to_owned(), memory()),
        ("Linux".to_owned(), uname.release().to_string_lossy().into_owned()),
        ("Distribution".to_owned(), distribution()),
    ];
    let topology: Value = serde_json::from_str(&spawn::own(&["topo", "--json"])?)
        .map_err(|why| Failure::Runtime(format!("warpwire topo --json: {why}")))?;
    facts.push(("GPUs".to_owned(), names(&topology["gpus"])));
    facts.push(("NICs".to_owned(), names(&topology["nics"])));
    Ok(Machine { host, cores, facts, busy })
}

/// `GPU0 NVIDIA H200, GPU1 …`; `none`.
fn names(list: &Value) -> String {
    let one = |item: &Value| {
        let words = ["label", "name"].iter().filter_map(|field| item[*field].as_str());
        words.collect::<Vec<_>>().join(" ")
    };
    let all: Vec<_> = list.as_array().into_iter().flatten().map(one).collect();
    if all.is_empty() { "none".to_owned() } else { all.join(", ") }
}

fn cpu_model() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    model.map_or(std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

fn memory() -> String {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kilobytes = total.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kilobytes.map_or("unknown".to_owned(), |count| warpwire::units::bytes(count << 10))
}

fn distribution() -> String {
    let release = ["/etc/os-release", "/usr/lib/os-release"];
    let text = release.iter().find_map(|path| std::fs::read_to_string(path).ok());
    let text = text.unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.map_or("unknown".to_owned(), |name| name.trim_matches('"').to_owned())
}

/// Part of all CPU time that is used while this process sleeps.
fn busy() -> Option<f64> {
    let before = CpuTime::now()?;
    std::thread::sleep(WATCH);
    CpuTime::now()?.since(before)
}

/// All CPUs' time since boot, in clock ticks.
#[derive(Clone, Copy)]
struct CpuTime {
    idle: u64,
    all: u64,
}

impl CpuTime {
    fn now() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/stat").ok()?)
    }

    /// `cpu user nice system idle iowait …`; user time includes that of guests, which follow steal.
    fn parse(text: &str) -> Option<Self> {
        let words = text.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
        let ticks: Vec<u64> = words.take(8).map_while(|word| word.parse().ok()).collect();
        let idle = ticks.get(3)? + ticks.get(4)?;
        Some(Self { idle, all: ticks.iter().sum() })
    }

    fn since(self, before: Self) -> Option<f64> {
        let all = self.all.checked_sub(before.all).filter(|all| *all > 0)?;
        let idle = self.idle.saturating_sub(before.idle).min(all);
        Some(1.0 - idle as f64 / all as f64)
    }
}

/// Whether a shell would find this program.
pub(crate) fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| is_executable(&folder.join(program)))
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

/// Now, in UTC.
pub(crate) fn utc_now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    utc(seconds)
}

/// Seconds since 1970 as a date of the Gregorian calendar: `2026-11-13T08:30:00Z`.
fn utc(seconds: u64) -> String {
    let (mut days, rest) = (seconds / 86_400, seconds % 86_400);
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    let (month, day) = (month + 1, days + 1);
    format!("{year}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_709_251_199), "2024-02-29T23:59:59Z");
        assert_eq!(utc(4_107_542_400), "2100-03-01T00:00:00Z");
    }

    #[test]
    fn busy_part_of_the_cpus() {
        let at = |text: &str| CpuTime::parse(text);
        let before = at("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2\n").unwrap();
        let after = at("cpu  150 0 125 775 150 0 0 0 9 9\n").unwrap();
        assert_eq!(after.since(before), Some(1.0 - 125.0 / 200.0));
        assert_eq!(before.since(before), None);
        assert!(at("intr 5").is_none() && at("cpu  1 2").is_none() && at("").is_none());
    }

    #[test]
    fn names_of_devices() {
        let list = serde_json::json!([{"label": "GPU0", "name": "H200"}, {"name": "eth0"}]);
        assert_eq!(names(&list), "GPU0 H200, eth0");
        assert_eq!(names(&Value::Null), "none");
    }
}
