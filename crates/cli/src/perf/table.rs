//! Tables in perftest's format, and the JSON report.

use serde::{Deserialize, Serialize};
use warpwire::hca::QpTotals;

use super::control::EndpointInfo;
use super::test::{Metric, Test};

/// Figures of one size.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(super) bytes: u64,
    pub(super) iterations: u64,
    #[serde(flatten)]
    pub(super) figures: Figures,
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

    /// From a nonempty list of times in nanoseconds.
    pub(super) fn lat(times: &mut [u32]) -> Self {
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
            p99_us: at(0.99),
            p999_us: at(0.999),
        }
    }
}

impl Row {
    pub(super) fn new(bytes: u64, iterations: u64, figures: Figures) -> Self {
        Self { bytes, iterations, figures, verified: false }
    }

    pub(super) fn render(&self, gbits: bool) -> String {
        let mut text = format!(" {:<10} {:<12}", self.bytes, self.iterations);
        match &self.figures {
            Figures::Bw { peak_mb_s, average_mb_s, mpps, .. } => {
                let scale = if gbits { MB * 8.0 / 1e9 } else { 1.0 };
                let (peak, average) = (peak_mb_s * scale, average_mb_s * scale);
                text += &format!(" {peak:<18.2} {average:<18.2} {mpps:.6}");
            }
            Figures::Lat { min_us, max_us, typical_us, avg_us, stdev_us, p99_us, p999_us } => {
                text += &format!(
                    " {min_us:<12.2} {max_us:<12.2} {typical_us:<15.2} {avg_us:<12.2} \
                     {stdev_us:<14.2} {p99_us:<11.2} {p999_us:.2}"
                );
            }
        }
        text + "\n"
    }
}

/// The report of `--json`.
#[derive(Serialize)]
pub(crate) struct Report {
    pub(super) test: Test,
    pub(super) local: EndpointInfo,
    pub(super) remote: EndpointInfo,
    pub(super) rows: Vec<Row>,
    /// Counters of this side's device.
    /// `None` on hardware.
    pub(super) counters: Option<QpTotals>,
}

pub(super) fn rule() -> String {
    format!("{}\n", "-".repeat(107))
}

/// The heading: the test, addresses, links and memory of both sides.
pub(super) fn head(test: &Test, local: &EndpointInfo, remote: &EndpointInfo) -> String {
    let metric = match test.metric {
        Metric::Bw => "bandwidth",
        Metric::Lat => "latency",
    };
    let mut text = rule();
    text += &format!("                    RDMA {} {metric} test\n", test.verb.name());
    let mtu = format!("{}[B]", local.mtu.min(remote.mtu));
    text += &format!(" Number of qps   : {:<14} Transport type  : RoCEv2\n", test.qps);
    text += &format!(" Connection type : {:<14} Mtu             : {mtu}\n", "RC");
    let depth = match test.metric {
        Metric::Bw => test.depth,
        Metric::Lat => 1,
    };
    let verified = if test.verify { "yes" } else { "no (--no-verify)" };
    text += &format!(" TX depth        : {depth:<14} Data verified   : {verified}\n");
    text += &rule();
    for (name, info) in [("local", local), ("remote", remote)] {
        let EndpointInfo { qpn, psn, rkey, address, .. } = info;
        text += &format!(
            " {name:<6} address: QPN {qpn:#06x} PSN {psn:#08x} RKey {rkey:#010x} \
             VAddr {address:#018x}\n"
        );
    }
    for (name, info) in [("local", local), ("remote", remote)] {
        text += &format!(" {name:<6} link   : {}\n", info.link);
        let path = match info.path == info.memory || info.memory == "host" {
            true => info.path.clone(),
            false => format!("{}, by {}", info.memory, info.path),
        };
        text += &format!(" {name:<6} memory : {path}; registered by {}\n", info.registered);
        for why in &info.why {
            text += &format!("                : {why}\n");
        }
    }
    text + &rule()
}

/// The column titles.
pub(super) fn columns(metric: Metric, gbits: bool) -> String {
    match (metric, gbits) {
        (Metric::Bw, false) => {
            " #bytes     #iterations  BW peak[MB/s]      BW average[MB/s]   MsgRate[Mpps]\n"
                .to_owned()
        }
        (Metric::Bw, true) => {
            " #bytes     #iterations  BW peak[Gb/s]      BW average[Gb/s]   MsgRate[Mpps]\n"
                .to_owned()
        }
        (Metric::Lat, _) => {
            " #bytes     #iterations  t_min[usec]  t_max[usec]  t_typical[usec] t_avg[usec]  \
             t_stdev[usec]  99%[usec]   99.9%[usec]\n"
                .to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_align_with_their_columns() {
        let row = Row::new(65536, 5000, Figures::bw(65536, 16_000.0, 32_000.0)).render(false);
        let words: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(words, ["65536", "5000", "2000.00", "1000.00", "0.016000"]);
        let head = columns(Metric::Bw, false);
        assert_eq!(head.find("BW peak"), row.find("2000.00"));
        assert_eq!(head.find("MsgRate"), row.find("0.016"));
        let row = Row::new(65536, 5000, Figures::bw(65536, 16_000.0, 32_000.0)).render(true);
        assert!(row.contains(" 8.39 "), "{row}");
    }

    #[test]
    fn latencies_become_percentiles() {
        let mut times: Vec<u32> = (1..=1000).rev().map(|us| us * 1000).collect();
        let Figures::Lat { min_us, max_us, typical_us, avg_us, p99_us, p999_us, .. } =
            Figures::lat(&mut times)
        else {
            panic!("expected latency figures")
        };
        assert_eq!((min_us, max_us, typical_us, avg_us), (1.0, 1000.0, 500.0, 500.5));
        assert_eq!((p99_us, p999_us), (990.0, 999.0));
        let row = Row::new(2, 1000, Figures::lat(&mut times)).render(false);
        let head = columns(Metric::Lat, false);
        assert_eq!(head.find("t_typical"), row.find("500.00"));
        assert_eq!(head.find("99.9%"), row.find("999.00"));
    }
}
