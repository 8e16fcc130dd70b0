//! The table, the CSV lines and the JSON report.

use serde::{Deserialize, Serialize};
use warpwire::hca::{DirectStats, QpTotals};

use super::Arguments;
use super::control::EndpointInfo;
use super::samples::Bin;
use super::test::{Metric, Test};
use crate::machine::Machine;
use crate::output::{fit, wrap};

/// Figures of one size.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(super) bytes: u64,
    pub(super) iterations: u64,
    #[serde(flatten)]
    pub(super) figures: Figures,
    /// CPU time of this side during the measurement and its warm-up, in percent of one CPU.
    #[serde(default)]
    pub(super) local_cpu_percent: f64,
    #[serde(default)]
    pub(super) remote_cpu_percent: f64,
    /// Messages that did not arrive, warm-up included; `None` where none can be lost, or they are
    /// not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) lost: Option<u64>,
    /// With `-H`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) histogram: Option<Vec<Bin>>,
    /// With `-U`: times of the messages, in the order of measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) times_us: Option<Vec<f64>>,
    /// Received data was compared with what was sent, and is right.
    pub(super) verified: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Figures {
    Bw {
        /// 2^20 bytes per second, as in perftest.
        peak_mb_s: f64,
        average_mb_s: f64,
        peak_gb_s: f64,
        /// 10^9 bits per second.
        average_gbits: f64,
        /// Millions of messages per second.
        mpps: f64,
    },
    Lat {
        min_us: f64,
        max_us: f64,
        typical_us: f64,
        avg_us: f64,
        stdev_us: f64,
        p50_us: f64,
        p90_us: f64,
        p99_us: f64,
        p999_us: f64,
    },
}

const MB: f64 = 1_048_576.0;

impl Figures {
    /// From messages per second: average, and peak.
    pub(super) fn bw(size: u64, average: f64, peak: f64) -> Self {
        let size = size as f64;
        Self::Bw {
            peak_mb_s: peak * size / MB,
            average_mb_s: average * size / MB,
            peak_gb_s: peak * size / 1e9,
            average_gbits: average * size * 8.0 / 1e9,
            mpps: average / 1e6,
        }
    }

    /// Of both directions together.
    pub(super) fn sum(self, other: &Self) -> Self {
        match (self, other) {
            (
                Self::Bw { peak_mb_s, average_mb_s, peak_gb_s, average_gbits, mpps },
                Self::Bw {
                    peak_mb_s: peak_mb_s_2,
                    average_mb_s: average_mb_s_2,
                    peak_gb_s: peak_gb_s_2,
                    average_gbits: average_gbits_2,
                    mpps: mpps_2,
                },
            ) => Self::Bw {
                peak_mb_s: peak_mb_s + peak_mb_s_2,
                average_mb_s: average_mb_s + average_mb_s_2,
                peak_gb_s: peak_gb_s + peak_gb_s_2,
                average_gbits: average_gbits + average_gbits_2,
                mpps: mpps + mpps_2,
            },
            (figures, _) => figures,
        }
    }

    /// From a nonempty list of times in nanoseconds.
    pub(super) fn lat(times: &[u32]) -> Self {
        let mut times = times.to_vec();
        times.sort_unstable();
        let us = |nanoseconds: u32| f64::from(nanoseconds) / 1e3;
        let at = |share: f64| {
            let last = times.len().saturating_sub(1);
            us(times.get((last as f64 * share) as usize).copied().unwrap_or(0))
        };
        let count = times.len().max(1) as f64;
        let avg = times.iter().map(|time| us(*time)).sum::<f64>() / count;
        let spread = times.iter().map(|time| (us(*time) - avg).powi(2)).sum::<f64>() / count;
        Self::Lat {
            min_us: at(0.0),
            max_us: at(1.0),
            typical_us: at(0.5),
            avg_us: avg,
            stdev_us: spread.sqrt(),
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            p999_us: at(0.999),
        }
    }
}

impl Figures {
    /// Titles and values, as in JSON.
    fn named(&self) -> Vec<(&'static str, f64)> {
        match *self {
            Figures::Bw { peak_mb_s, average_mb_s, peak_gb_s, average_gbits, mpps } => vec![
                ("peak_mb_s", peak_mb_s),
                ("average_mb_s", average_mb_s),
                ("peak_gb_s", peak_gb_s),
                ("average_gbits", average_gbits),
                ("mpps", mpps),
            ],
            Figures::Lat {
                min_us,
                max_us,
                typical_us,
                avg_us,
                stdev_us,
                p50_us,
                p90_us,
                p99_us,
                p999_us,
            } => vec![
                ("min_us", min_us),
                ("max_us", max_us),
                ("typical_us", typical_us),
                ("avg_us", avg_us),
                ("stdev_us", stdev_us),
                ("p50_us", p50_us),
                ("p90_us", p90_us),
                ("p99_us", p99_us),
                ("p999_us", p999_us),
            ],
        }
    }
}

impl Row {
    pub(super) fn new(bytes: u64, iterations: u64, figures: Figures) -> Self {
        Self {
            bytes,
            iterations,
            figures,
            local_cpu_percent: 0.0,
            remote_cpu_percent: 0.0,
            lost: None,
            histogram: None,
            times_us: None,
            verified: false,
        }
    }

    fn render(&self, gbits: bool, cpu: bool) -> String {
        let mut text = format!(" {:<10} {:<12}", self.bytes, self.iterations);
        match &self.figures {
            Figures::Bw { peak_mb_s, average_mb_s, mpps, .. } => {
                let scale = if gbits { MB * 8.0 / 1e9 } else { 1.0 };
                let (peak, average) = (peak_mb_s * scale, average_mb_s * scale);
                text += &format!(" {peak:<16.2} {average:<18.2} {mpps:<13.6}");
            }
            // The median stands as the typical one.
            lat @ Figures::Lat { .. } => {
                for (_, us) in lat.named().iter().filter(|(title, _)| *title != "p50_us") {
                    text += &format!(" {:<7}", figure(*us));
                }
            }
        }
        if cpu {
            let (local, remote) = (self.local_cpu_percent, self.remote_cpu_percent);
            text += &format!(" {local:.0}/{remote:.0}");
        }
        let mut text = format!("{}\n", text.trim_end());
        if let Some(lost) = self.lost.filter(|lost| *lost > 0) {
            text += &format!(
                "# {lost} messages, with those of the warm-up, were lost: only RC retransmits\n"
            );
        }
        text
    }

    /// Titles and values, as in JSON.
    fn fields(&self) -> Vec<(&'static str, String)> {
        let mut fields =
            vec![("bytes", self.bytes.to_string()), ("iterations", self.iterations.to_string())];
        let figures = self.figures.named();
        let cpu = [
            ("local_cpu_percent", self.local_cpu_percent),
            ("remote_cpu_percent", self.remote_cpu_percent),
        ];
        let numbers = figures.iter().chain(&cpu).map(|(name, value)| (*name, value.to_string()));
        fields.extend(numbers);
        let lost = self.lost.map_or_else(String::new, |lost| lost.to_string());
        fields.extend([("lost", lost), ("verified", self.verified.to_string())]);
        fields
    }
}

/// Microseconds in up to 7 columns.
pub(super) fn figure(us: f64) -> String {
    match us {
        short if short < 999.995 => format!("{short:.2}"),
        long if long < 99_999.95 => format!("{long:.1}"),
        longer => format!("{longer:.0}"),
    }
}

/// The report of `--json`.
#[derive(Serialize)]
pub(crate) struct Report {
    /// Of this side.
    pub(super) machine: Machine,
    pub(super) test: Test,
    pub(super) local: EndpointInfo,
    pub(super) remote: EndpointInfo,
    pub(super) rows: Vec<Row>,
    /// Counters of this side's device.
    /// `None` on hardware.
    pub(super) counters: Option<QpTotals>,
    /// Its operations without packets, likewise.
    pub(super) direct: Option<DirectStats>,
}

/// How many operations needed no packets, and why the others did; nothing where none was tried.
pub(super) fn direct(stats: &DirectStats) -> String {
    let packets: u64 = stats.not.values().sum();
    if stats.operations + packets == 0 {
        return String::new();
    }
    let mut text = format!("in mapped memory: {} operations", stats.operations);
    if packets > 0 {
        let reasons: Vec<_> =
            stats.not.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
        text += &format!("; as packets: {packets} ({})", reasons.join(", "));
    }
    wrap("# ", "#   ", &text)
}

/// The link without its properties, as in `udp 127.0.0.1:4791`.
pub(super) fn short_link(link: &str) -> &str {
    link.split_once(": ").map_or(link, |(short, _)| short)
}

/// The heading: the test, and memory and link of both sides.
pub(super) fn head(test: &Test, local: &EndpointInfo, remote: &EndpointInfo) -> String {
    let (name, service) = (test.name(), test.connection.name());
    let mtu = local.mtu.min(remote.mtu);
    let plural = if test.qps == 1 { "" } else { "s" };
    let mut parts = vec![service.to_owned(), format!("{} queue pair{plural}", test.qps)];
    if test.metric == Metric::Bw {
        parts.push(format!("{} in flight", test.depth));
    }
    if test.metric == Metric::Lat {
        let trips = if test.is_ping_pong() { "half round trips" } else { "round trips" };
        parts.push(format!("{trips} in usec"));
    }
    parts.push(format!("MTU {mtu}"));
    parts.extend(test.inline.map(|bytes| format!("inline to {bytes}")));
    parts.extend(test.bidirectional.then(|| "both directions".to_owned()));
    parts.extend(test.events.then(|| "events".to_owned()));
    parts.push(if test.verify { "verified" } else { "not verified" }.to_owned());
    let mut text = fit(&format!("# perf {name}: {}", parts.join(", "))) + "\n";
    for (name, info) in [("local:", local), ("remote:", remote)] {
        let memory = match info.path == info.memory || info.memory == "host" {
            true => info.path.clone(),
            false => format!("{} by {}", info.memory, info.path),
        };
        text += &fit(&format!("# {name:<7} {memory}; {}", short_link(&info.link)));
        text.push('\n');
    }
    text
}

/// The rest of the heading, with `-v`.
pub(super) fn details(local: &EndpointInfo, remote: &EndpointInfo) -> String {
    let mut text = String::new();
    for (name, info) in [("local", local), ("remote", remote)] {
        let EndpointInfo { qpn, psn, rkey, address, host, version, .. } = info;
        text += &format!(
            "# {name} address: QPN {qpn:#06x} PSN {psn:#08x} RKey {rkey:#010x} VAddr \
             {address:#018x}\n"
        );
        text += &wrap(&format!("# {name} host: "), "#   ", &format!("{host}, warpwire {version}"));
        text += &wrap(&format!("# {name} link: "), "#   ", &info.link);
        let registered = format!("registered by {}", info.registered);
        let memory = std::iter::once(&registered).chain(&info.why);
        let memory: Vec<&str> = memory.map(String::as_str).collect();
        text += &wrap(&format!("# {name} memory: "), "#   ", &memory.join("; "));
    }
    text
}

/// The column titles; of the CSV lines with `--csv`.
pub(super) fn columns(metric: Metric, arguments: &Arguments) -> String {
    let figures = match metric {
        Metric::Bw => Figures::bw(1, 1.0, 1.0),
        Metric::Lat => Figures::lat(&[1]),
    };
    if arguments.csv {
        let fields = Row::new(1, 1, figures).fields();
        let names: Vec<&str> = fields.iter().map(|(name, _)| *name).collect();
        return names.join(",") + "\n";
    }
    let cpu = if arguments.cpu_util { " CPU l/r[%]" } else { "" };
    let titles = match (metric, arguments.report_gbits) {
        (Metric::Bw, false) => {
            " #bytes     #iterations  BW peak[MB/s]    BW average[MB/s]   MsgRate[Mpps]"
        }
        (Metric::Bw, true) => {
            " #bytes     #iterations  BW peak[Gb/s]    BW average[Gb/s]   MsgRate[Mpps]"
        }
        (Metric::Lat, _) => {
            " #bytes     #iterations  t_min   t_max   t_typ   t_avg   t_stdev 90%     99%     99.9%  "
        }
    };
    format!("{}\n", format!("{titles}{cpu}").trim_end())
}

/// A row, or a CSV line with `--csv`.
pub(super) fn row(row: &Row, arguments: &Arguments) -> String {
    if arguments.csv {
        let values: Vec<String> = row.fields().into_iter().map(|(_, value)| value).collect();
        return values.join(",") + "\n";
    }
    row.render(arguments.report_gbits, arguments.cpu_util)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::arguments_of;

    #[test]
    fn figures_align_with_their_columns() {
        let arguments = arguments_of(&["write", "bw", "--cpu_util"]);
        let bw = Row::new(65536, 5000, Figures::bw(65536, 16_000.0, 32_000.0));
        let text = row(&bw, &arguments);
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words, ["65536", "5000", "2000.00", "1000.00", "0.016000", "0/0"]);
        let head = columns(Metric::Bw, &arguments);
        assert_eq!(head.find("BW peak"), text.find("2000.00"));
        assert_eq!(head.find("MsgRate"), text.find("0.016"));
        assert_eq!(head.find("CPU"), text.find("0/0"));
        let text = row(&bw, &arguments_of(&["write", "bw", "--report_gbits"]));
        assert!(text.contains(" 8.39 "), "{text}");
    }

    #[test]
    fn latencies_become_percentiles() {
        let times: Vec<u32> = (1..=1000).rev().map(|us| us * 1000).collect();
        let Figures::Lat { min_us, max_us, typical_us, avg_us, p90_us, p99_us, p999_us, .. } =
            Figures::lat(&times)
        else {
            panic!("expected latency figures")
        };
        assert_eq!((min_us, max_us, typical_us, avg_us), (1.0, 1000.0, 500.0, 500.5));
        assert_eq!((p90_us, p99_us, p999_us), (900.0, 990.0, 999.0));
        let arguments = arguments_of(&["write", "lat", "--cpu-util"]);
        let lat = Row { local_cpu_percent: 100.0, ..Row::new(2, 1000, Figures::lat(&times)) };
        let text = row(&lat, &arguments);
        let head = columns(Metric::Lat, &arguments);
        for (title, figure) in [("t_typ", "500.00"), ("90%", "900.00"), ("99.9%", "999.00")] {
            assert_eq!(head.find(title), text.find(figure), "{head}{text}");
        }
        assert_eq!(head.find("CPU"), text.find("100/0"), "{head}{text}");
        assert!(head.len() <= 101 && text.len() <= 101, "{head}{text}");
    }

    #[test]
    fn long_times_keep_their_columns() {
        for us in [0.01, 999.99, 999.999, 12_345.678, 99_999.96, 4_294_967.0] {
            assert!(figure(us).len() <= 7, "{us}");
        }
        assert_eq!(figure(1234.56), "1234.6");
    }

    #[test]
    fn csv_lines_have_a_value_per_title() {
        let arguments = arguments_of(&["write", "lat", "--csv"]);
        let head = columns(Metric::Lat, &arguments);
        let line = row(&Row::new(2, 10, Figures::lat(&[1500])), &arguments);
        let (titles, values): (Vec<_>, Vec<_>) =
            (head.trim().split(',').collect(), line.trim().split(',').collect());
        assert_eq!(titles.len(), values.len());
        let at = titles.iter().position(|title| *title == "p90_us").unwrap();
        assert_eq!((values[0], values[at], *values.last().unwrap()), ("2", "1.5", "false"));
    }

    #[test]
    fn both_directions_are_added() {
        let sum = Figures::bw(1 << 20, 2.0, 3.0).sum(&Figures::bw(1 << 20, 5.0, 7.0));
        let Figures::Bw { average_mb_s, peak_mb_s, .. } = sum else { panic!("{sum:?}") };
        assert_eq!((average_mb_s, peak_mb_s), (7.0, 10.0));
    }

    fn info() -> EndpointInfo {
        EndpointInfo {
            link: "udp 127.0.0.1:4791: segmentation on; ".to_owned() + &"much more; ".repeat(40),
            memory: "sim:0".to_owned(),
            path: "window (memfd)".to_owned(),
            why: vec!["why ".repeat(60)],
            registered: "handle".to_owned(),
            qpn: 1,
            psn: 2,
            rkey: 3,
            address: u64::MAX,
            mtu: 4096,
            host: "node1".to_owned(),
            version: "1.2.3".to_owned(),
        }
    }

    #[test]
    fn heads_fit_a_terminal() {
        let arguments =
            arguments_of(&["write", "bw", "-b", "-e", "-I", "64", "-q", "4096", "--no-verify"]);
        let test = arguments.test().unwrap();
        let head = head(&test, &info(), &info());
        assert_eq!(head.lines().count(), 3, "{head}");
        assert!(head.contains("# local:  sim:0 by window (memfd); udp 127.0.0.1:4791\n"), "{head}");
        let details = details(&info(), &info());
        for line in head.lines().chain(details.lines()) {
            assert!(line.starts_with('#') && line.chars().count() <= 100, "{line}");
        }
        assert_eq!(details.matches("more;").count(), 80);
    }
}
