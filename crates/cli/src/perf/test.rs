//! The test description that both sides exchange.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The operation that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verb {
    /// The client writes the server's memory
    Write,
    /// The client reads the server's memory
    Read,
    /// The client sends messages, the server posts receives
    Send,
    /// The client does 8-byte fetch-and-add on the server's memory
    Atomic,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Metric {
    /// Bandwidth
    Bw,
    /// Latency
    Lat,
}

impl Verb {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
            Self::Send => "send",
            Self::Atomic => "atomic",
        }
    }
}

impl Metric {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Bw => "bw",
            Self::Lat => "lat",
        }
    }
}

/// A test; serialized for the peer and for `--json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Test {
    pub(super) verb: Verb,
    pub(super) metric: Metric,
    pub(super) sizes: Vec<u64>,
    pub(super) iterations: Option<u32>,
    pub(super) seconds: Option<f64>,
    pub(super) qps: u32,
    pub(super) depth: u32,
    pub(super) verify: bool,
}

/// Max bytes per size without -n and -D.
const MAX_TOTAL_BYTES: u64 = 4 << 30;

impl Test {
    /// Name on the command line, as in `write bw`.
    pub(super) fn name(&self) -> String {
        format!("{} {}", self.verb.name(), self.metric.name())
    }

    pub(super) fn max_size(&self) -> u64 {
        self.sizes.iter().copied().max().unwrap_or(8).max(8)
    }

    /// Distance between the memories of two queue pairs, a multiple of 64.
    pub(super) fn stride(&self) -> u64 {
        self.max_size().next_multiple_of(64)
    }

    /// Messages of that size per queue pair; unlimited with `-D`.
    pub(super) fn iterations(&self, size: u64) -> u64 {
        let default = match self.metric {
            Metric::Bw => 5000,
            Metric::Lat => 1000,
        };
        match (self.iterations, self.seconds) {
            (_, Some(_)) => u64::MAX,
            (Some(count), None) => count.into(),
            (None, None) => default.min(MAX_TOTAL_BYTES / size).max(16),
        }
    }

    /// Whether both sides send messages.
    pub(super) fn is_ping_pong(&self) -> bool {
        self.metric == Metric::Lat && matches!(self.verb, Verb::Write | Verb::Send)
    }

    /// Validates a test received from the peer, before memory is allocated for it.
    pub(super) fn check(&self) -> Result<(), String> {
        let fine = !self.sizes.is_empty()
            && self.sizes.len() <= 64
            && self.sizes.iter().all(|size| (1..=super::MAX_SIZE).contains(size))
            && (1..=4096).contains(&self.qps)
            && (1..=8192).contains(&self.depth)
            && self.iterations != Some(0);
        if fine { Ok(()) } else { Err("the peer requests an invalid test".to_owned()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test() -> Test {
        Test {
            verb: Verb::Write,
            metric: Metric::Bw,
            sizes: vec![2, 1 << 30],
            iterations: None,
            seconds: None,
            qps: 2,
            depth: 16,
            verify: true,
        }
    }

    #[test]
    fn large_messages_get_fewer_iterations() {
        let test = test();
        assert_eq!((test.iterations(2), test.iterations(1 << 30)), (5000, 16));
        assert_eq!((test.max_size(), test.stride()), (1 << 30, 1 << 30));
        assert_eq!(Test { iterations: Some(7), ..test.clone() }.iterations(1 << 30), 7);
        assert_eq!(Test { seconds: Some(1.0), ..test }.iterations(2), u64::MAX);
    }

    #[test]
    fn invalid_tests_are_refused() {
        assert!(test().check().is_ok());
        for wrong in [
            Test { sizes: vec![], ..test() },
            Test { sizes: vec![0], ..test() },
            Test { sizes: vec![1 << 40], ..test() },
            Test { qps: 0, ..test() },
            Test { depth: 1 << 20, ..test() },
            Test { iterations: Some(0), ..test() },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    }
}
