//! Where and when figures were measured, and whether the machine was too busy for them to mean
//! anything.

use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;

/// Load per CPU above which figures are called unreliable: more tasks want to run than there are
/// CPUs. Two polling processes of an earlier run alone do not exceed it.
const MAX_LOAD: f64 = 1.1;
/// Share of CPU time that a hypervisor may take away during a measurement.
const MAX_STEAL: f64 = 0.03;
/// Shorter measurements say nothing about the share: the kernel counts in ticks of 10 ms.
const MIN_TICKS: u64 = 20;

/// The machine of a measurement, as reports have it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    /// Start of the measurement in UTC, as in 2025-01-31T12:00:00Z.
    pub(crate) date: String,
    pub(crate) host: String,
    /// Of this command.
    pub(crate) version: &'static str,
    pub(crate) cpus: usize,
    /// Average number of runnable tasks in the minute before the start; `None` without `/proc`.
    pub(crate) load: Option<f64>,
    /// CPU time that the hypervisor took away during the measurement, in percent.
    pub(crate) steal_percent: Option<f64>,
    #[serde(skip)]
    ticks: Option<Ticks>,
}

/// CPU time of the whole machine since boot, from `/proc/stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ticks {
    total: u64,
    steal: u64,
}

impl Ticks {
    fn now() -> Option<(Self, usize)> {
        parse_stat(&std::fs::read_to_string("/proc/stat").ok()?)
    }
}

/// The first line of `/proc/stat`, and the number of CPUs that have a line of their own.
fn parse_stat(text: &str) -> Option<(Ticks, usize)> {
    let all = text.lines().next()?.strip_prefix("cpu ")?;
    let fields: Vec<u64> = all.split_whitespace().map_while(|word| word.parse().ok()).collect();
    // user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user.
    let steal = *fields.get(7)?;
    let total = fields.iter().take(8).fold(0_u64, |sum, ticks| sum.saturating_add(*ticks));
    let is_cpu = |line: &&str| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    Some((Ticks { total, steal }, text.lines().filter(is_cpu).count()))
}

fn parse_load(text: &str) -> Option<f64> {
    text.split_whitespace().next()?.parse().ok().filter(|load: &f64| load.is_finite())
}

impl Machine {
    /// The machine now, at the start of a measurement.
    pub(crate) fn now() -> Self {
        let load = std::fs::read_to_string("/proc/loadavg").ok();
        let stat = Ticks::now();
        // The load is of all CPUs, so affinity and cgroups of this process do not count.
        let cpus = stat.map(|(_, cpus)| cpus).filter(|cpus| *cpus > 0);
        let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self {
            date: utc(seconds.as_secs()),
            host: host(),
            version: env!("CARGO_PKG_VERSION"),
            cpus: cpus.unwrap_or_else(|| {
                std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
            }),
            load: load.and_then(|text| parse_load(&text)),
            steal_percent: None,
            ticks: stat.map(|(ticks, _)| ticks),
        }
    }

    /// The line for a machine that is too busy at the start; `None` if it is not.
    pub(crate) fn load_warning(&self) -> Option<String> {
        let (load, cpus) = (self.load?, self.cpus);
        let is_busy = load > MAX_LOAD * cpus as f64;
        is_busy.then(|| format!("# load {load:.1} on {cpus} CPUs: figures are unreliable"))
    }

    /// Ends the measurement; returns the line for a machine whose hypervisor took CPU time away.
    pub(crate) fn finish(&mut self) -> Option<String> {
        let (before, (now, _)) = (self.ticks?, Ticks::now()?);
        self.set_steal(before, now)
    }

    fn set_steal(&mut self, before: Ticks, now: Ticks) -> Option<String> {
        let total = now.total.checked_sub(before.total).filter(|total| *total >= MIN_TICKS)?;
        let share = now.steal.saturating_sub(before.steal) as f64 / total as f64;
        self.steal_percent = Some(share * 100.0);
        let percent = share * 100.0;
        (share > MAX_STEAL).then(|| {
            format!("# the hypervisor took {percent:.0} % of the CPU time: figures are unreliable")
        })
    }
}

/// Name of this machine.
pub(crate) fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Seconds since 1970 as a date in UTC.
fn utc(seconds: u64) -> String {
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    // Gregorian calendar in years that begin on 1 March, so that a leap day is a year's last.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, later) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + later;
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// CPU time of this process, beside the time that passes.
pub(crate) struct CpuMeter {
    start: Instant,
    used: Duration,
}

impl CpuMeter {
    pub(crate) fn start() -> Self {
        Self { start: Instant::now(), used: used() }
    }

    /// CPU time used since the start in percent of one CPU: above 100 with several threads.
    pub(crate) fn percent(&self) -> f64 {
        let passed = self.start.elapsed().as_secs_f64().max(1e-9);
        used().saturating_sub(self.used).as_secs_f64() / passed * 100.0
    }
}

/// CPU time of all threads of this process.
fn used() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(load: f64, cpus: usize) -> Machine {
        Machine { load: Some(load), cpus, ..Machine::now() }
    }

    #[test]
    fn dates_are_of_the_gregorian_calendar() {
        for (seconds, wanted) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
        ] {
            assert_eq!(utc(seconds), wanted);
        }
    }

    #[test]
    fn busy_machines_are_told_apart() {
        assert_eq!(
            machine(7.5, 2).load_warning().as_deref(),
            Some("# load 7.5 on 2 CPUs: figures are unreliable")
        );
        assert_eq!(machine(2.0, 2).load_warning(), None);
        assert_eq!(machine(7.5, 16).load_warning(), None);
        assert_eq!(Machine { load: None, ..machine(0.0, 1) }.load_warning(), None);
    }

    #[test]
    fn steal_is_a_share_of_the_measurement() {
        let mut machine = machine(0.0, 2);
        let before = Ticks { total: 1000, steal: 50 };
        let short = Ticks { total: 1010, steal: 60 };
        assert_eq!((machine.set_steal(before, short), machine.steal_percent), (None, None));
        let some = machine.set_steal(before, Ticks { total: 1200, steal: 70 });
        assert!(some.is_some_and(|line| line.contains("took 10 %")));
        assert_eq!(machine.steal_percent, Some(10.0));
        assert_eq!(machine.set_steal(before, Ticks { total: 1200, steal: 51 }), None);
        // Counters that fall, as after a CPU went offline.
        assert_eq!(machine.set_steal(before, Ticks { total: 10, steal: 0 }), None);
    }

    #[test]
    fn proc_files_are_parsed() {
        let stat = "cpu  10 0 20 30 1 2 3 4 0 0\ncpu0 5 0 0\ncpu1 5 0 0\nintr 7\ncpufreq 1\n";
        assert_eq!(parse_stat(stat), Some((Ticks { total: 70, steal: 4 }, 2)));
        for wrong in ["", "cpu", "cpu  1 2 3", "intr 1\n"] {
            assert_eq!(parse_stat(wrong), None, "{wrong:?}");
        }
        assert_eq!(parse_load("0.52 0.58 0.59 1/467 12345\n"), Some(0.52));
        assert_eq!(parse_load("nan 0"), None);
        assert_eq!(parse_load(""), None);
    }

    #[test]
    fn cpu_time_is_of_this_process() {
        let meter = CpuMeter::start();
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(20) {}
        assert!(meter.percent() > 0.0);
    }
}
