//! The test description that both sides exchange.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use warpwire::units;

use super::endpoint::Role;

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

    /// Memory that a side of this test needs, in bytes: buffers, queues, and what the device keeps
    /// per queue pair. `None` if it exceeds 64 bits.
    pub(super) fn memory(&self, role: Role) -> Option<u64> {
        /// A request with an inline payload, its completion, and the device's state of it.
        const REQUEST: u64 = 512;
        const RECEIVE: u64 = 256;
        const PER_QP: u64 = 64 << 10;
        let (sends, takes) = self.uses(role);
        let buffers = self.stride().checked_mul(u64::from(sends) + u64::from(takes))?;
        let requests = u64::from(self.depth.max(64)).checked_mul(REQUEST)?;
        let receives = u64::from(self.receives(role)).checked_mul(RECEIVE)?;
        let each = buffers.checked_add(requests)?.checked_add(receives)?.checked_add(PER_QP)?;
        each.checked_mul(u64::from(self.qps))
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

    /// As [`check`](Self::check), and that the server's memory does not exceed `max_memory` bytes.
    pub(super) fn check_for_server(&self, max_memory: u64) -> Result<(), String> {
        self.check()?;
        match self.memory(Role::Server) {
            Some(needed) if needed <= max_memory => Ok(()),
            needed => Err(format!(
                "the test needs {} of memory, and the server allows {}; give the client a smaller \
                 -s, -q or -t, or the server --max-memory",
                units::bytes(needed.unwrap_or(u64::MAX)),
                units::bytes(max_memory)
            )),
        }
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
    fn memory_is_bounded_before_it_is_allocated() {
        let modest = Test { sizes: vec![64 << 10], qps: 1, depth: 128, ..test() };
        let needed = modest.memory(Role::Server).unwrap();
        assert!((64 << 10..1 << 20).contains(&needed), "{needed}");
        assert!(modest.check_for_server(needed).is_ok());
        let error = modest.check_for_server(needed - 1).unwrap_err();
        assert!(error.contains("--max-memory"), "{error}");
        // Valid sizes and counts whose product is not: a line of 171 bytes asks for 4 TiB.
        let large = Test { sizes: vec![1 << 30], qps: 4096, ..test() };
        assert!(large.check().is_ok() && large.memory(Role::Server) > Some(4 << 40));
        assert!(large.check_for_server(1 << 40).is_err());
        let deep = Test { sizes: vec![8], qps: 4096, depth: 8192, ..test() };
        assert!(deep.check_for_server(4 << 30).is_err());
        let beyond = Test { sizes: vec![u64::MAX - 64], qps: 4096, ..test() };
        assert_eq!(beyond.memory(Role::Server), None);
        assert!(beyond.check_for_server(u64::MAX).is_err());
        for verb in [Verb::Write, Verb::Read, Verb::Send, Verb::Atomic] {
            for metric in [Metric::Bw, Metric::Lat] {
                let test = Test { verb, metric, ..modest.clone() };
                assert!(test.memory(Role::Server) > Some(64 << 10), "{test:?}");
            }
        }
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
