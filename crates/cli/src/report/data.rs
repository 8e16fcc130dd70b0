//! What a report says, as JSON: `--json` prints it, `--from` reads it.

use serde::{Deserialize, Serialize};

/// Version of this format; `--from` refuses others.
pub(crate) const FORMAT: u32 = 1;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) format: u32,
    /// When the first measurement began: UTC, as in 2026-11-13T08:30:00Z.
    pub(crate) date: String,
    /// Output of `warpwire --version`.
    pub(crate) version: String,
    /// The command line of this report.
    pub(crate) command: String,
    pub(crate) seconds: f64,
    pub(crate) machine: Machine,
    pub(crate) verdicts: Vec<Verdict>,
    pub(crate) figures: Vec<Figure>,
    /// Figures of `bench/peers --json`, if they were given.
    pub(crate) peers: Option<Peers>,
}

/// Facts of the machine as pairs of name and value, and how busy it was.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) host: String,
    pub(crate) cores: usize,
    pub(crate) facts: Vec<(String, String)>,
    /// Part of the CPU time that other processes used just before the first measurement, 0 to 1.
    pub(crate) busy: Option<f64>,
}

/// A verdict of `warpwire doctor`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Verdict {
    pub(crate) capability: String,
    pub(crate) answer: String,
    pub(crate) text: String,
}

/// The plot that a figure belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// Half a round trip of an RDMA write, in microseconds.
    Latency,
    /// RDMA writes with many in flight, in GB/s (10^9 bytes).
    Bandwidth,
    /// Copies by the CPU into device memory, in GB/s.
    CopyTo,
    /// Copies by the CPU out of device memory, in GB/s.
    CopyFrom,
    /// Round trips of messages sent by CPU threads, streams, graphs and kernels, in microseconds.
    RoundTrip,
}

impl Kind {
    #[cfg(test)]
    pub(crate) const ALL: [Self; 5] =
        [Self::Latency, Self::Bandwidth, Self::CopyTo, Self::CopyFrom, Self::RoundTrip];

    pub(crate) fn unit(self) -> &'static str {
        match self {
            Self::Latency | Self::RoundTrip => "µs",
            Self::Bandwidth | Self::CopyTo | Self::CopyFrom => "GB/s",
        }
    }
}

/// One line of a plot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) kind: Kind,
    pub(crate) name: String,
    /// Whether another project's program was measured.
    pub(crate) peer: bool,
    /// The command that makes it.
    pub(crate) command: String,
    pub(crate) points: Vec<Point>,
    /// Why there are no points.
    pub(crate) skipped: Option<String>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Point {
    pub(crate) bytes: u64,
    /// In the unit of the kind: the median of latencies, the mean of bandwidths.
    pub(crate) value: f64,
    /// Least and 99th percentile, of latencies that have them.
    pub(crate) range: Option<(f64, f64)>,
}

/// The part of `bench/peers --json` that a page shows.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Peers {
    /// Heads of the columns.
    pub(crate) columns: Vec<String>,
    /// Where and how it was measured.
    pub(crate) setting: String,
    pub(crate) rows: Vec<PeerRow>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PeerRow {
    pub(crate) name: String,
    /// `net` or `mem`.
    pub(crate) kind: String,
    /// Whether it is Warpwire.
    pub(crate) ours: bool,
    /// Samples per column, of all rounds.
    pub(crate) samples: Vec<Vec<f64>>,
    /// Why it has none.
    pub(crate) skipped: Option<String>,
}
