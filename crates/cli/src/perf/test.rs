//! The test description that both sides exchange.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use warpwire::units;
use warpwire::verbs::{GRH_LEN, Service};

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

/// Transport service of the queue pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum Connection {
    /// Reliable connection
    #[default]
    #[value(name = "RC")]
    Rc,
    /// Unreliable connection: send and write, without retransmission
    #[value(name = "UC")]
    Uc,
    /// Unreliable datagram: send only, up to the MTU, without retransmission
    #[value(name = "UD")]
    Ud,
}

impl Connection {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rc => "RC",
            Self::Uc => "UC",
            Self::Ud => "UD",
        }
    }

    pub(super) fn service(self) -> Service {
        match self {
            Self::Rc => Service::Rc,
            Self::Uc => Service::Uc,
            Self::Ud => Service::Ud,
        }
    }

    /// Messages may be lost.
    pub(super) fn is_lossy(self) -> bool {
        self != Self::Rc
    }
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
    /// Both sides send (or read) at the same time; bandwidth is the sum.
    #[serde(default)]
    pub(super) bidirectional: bool,
    #[serde(default)]
    pub(super) connection: Connection,
    /// Both sides sleep until a completion event instead of polling.
    #[serde(default)]
    pub(super) events: bool,
    /// Max bytes that are sent inline.
    #[serde(default)]
    pub(super) inline: Option<u32>,
    /// Messages per signaled one.
    #[serde(default)]
    pub(super) cq_mod: Option<u32>,
    /// Measures the size again and again, until one side is interrupted.
    #[serde(default)]
    pub(super) endless: bool,
}

/// Max bytes of inline data in a latency test, unless `-I` is given.
const INLINE: u32 = 64;
/// Max value of `-I`; more does not fit into a WQE.
pub(super) const MAX_INLINE: u32 = 512;

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
        (self.max_size() + self.header()).next_multiple_of(64)
    }

    /// Bytes before each received message.
    pub(super) fn header(&self) -> u64 {
        match self.connection {
            Connection::Ud => GRH_LEN.into(),
            Connection::Rc | Connection::Uc => 0,
        }
    }

    /// Max bytes of a message that is sent inline.
    pub(super) fn inline(&self) -> u32 {
        self.inline.unwrap_or(if self.metric == Metric::Lat { INLINE } else { 0 })
    }

    /// Removes sizes that a datagram cannot have; false if there were any.
    pub(super) fn limit_sizes(&mut self, mtu: u32) -> bool {
        let (mtu, before) = (u64::from(mtu), self.sizes.len());
        if self.connection != Connection::Ud {
            return true;
        }
        self.sizes.retain(|size| *size <= mtu);
        let fits = self.sizes.len() == before;
        if self.sizes.is_empty() {
            self.sizes.push(mtu);
        }
        fits
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
        let request = REQUEST + u64::from(self.inline());
        let requests = u64::from(self.depth.max(64)).checked_mul(request)?;
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
            && self.iterations != Some(0)
            && self.inline.is_none_or(|bytes| bytes <= MAX_INLINE)
            && self.cq_mod != Some(0)
            && self.seconds.is_none_or(|seconds| seconds > 0.0 && seconds <= 86_400.0)
            && (!self.endless || self.seconds.is_some());
        if !fine {
            return Err("the peer requests an invalid test".to_owned());
        }
        self.check_combination().map_err(str::to_owned)
    }

    /// What cannot be measured together.
    pub(super) fn check_combination(&self) -> Result<(), &'static str> {
        let reads = matches!(self.verb, Verb::Read | Verb::Atomic);
        match self.connection {
            Connection::Uc if reads => Err("UC has no reads and atomics: use -c RC"),
            Connection::Ud if self.verb != Verb::Send => Err("UD has sends only: use -c RC or UC"),
            _ if self.bidirectional && self.metric == Metric::Lat => {
                Err("latency is measured one message at a time: omit -b")
            }
            _ if self.metric == Metric::Lat && self.qps > 1 => {
                Err("latency is measured on one queue pair: omit -q")
            }
            _ if self.events && self.metric == Metric::Lat && self.verb == Verb::Write => Err(
                "write latency polls memory, which raises no event: omit -e, or measure send lat",
            ),
            _ => Ok(()),
        }
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
            bidirectional: false,
            connection: Connection::Rc,
            events: false,
            inline: None,
            cq_mod: None,
            endless: false,
        }
    }

    #[test]
    fn datagrams_fit_into_the_mtu() {
        let mut test = Test { verb: Verb::Send, sizes: vec![2, 64, 4096, 8192], ..test() };
        assert!(test.limit_sizes(4096), "RC has no such limit");
        test.connection = Connection::Ud;
        assert!(!test.limit_sizes(4096));
        assert_eq!(test.sizes, [2, 64, 4096]);
        assert!(test.limit_sizes(4096));
        assert_eq!((test.header(), test.stride()), (40, 4160));
        test.sizes = vec![65536];
        assert!(!test.limit_sizes(1024));
        assert_eq!(test.sizes, [1024]);
    }

    #[test]
    fn combinations_that_are_not_possible() {
        let lat = Test { metric: Metric::Lat, qps: 1, ..test() };
        assert!(lat.check().is_ok());
        for (wrong, why) in [
            (Test { verb: Verb::Read, connection: Connection::Uc, ..test() }, "UC has no reads"),
            (Test { verb: Verb::Atomic, connection: Connection::Uc, ..test() }, "UC has no reads"),
            (Test { verb: Verb::Write, connection: Connection::Ud, ..test() }, "sends only"),
            (Test { bidirectional: true, ..lat.clone() }, "omit -b"),
            (Test { events: true, ..lat.clone() }, "omit -e"),
            (Test { qps: 2, ..lat.clone() }, "omit -q"),
        ] {
            let error = wrong.check().unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        assert!(Test { events: true, verb: Verb::Send, ..lat }.check().is_ok());
        assert!(Test { connection: Connection::Uc, bidirectional: true, ..test() }.check().is_ok());
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
                let test = Test { verb, metric, bidirectional: true, ..modest.clone() };
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
            Test { inline: Some(MAX_INLINE + 1), ..test() },
            Test { cq_mod: Some(0), ..test() },
            Test { seconds: Some(f64::NAN), ..test() },
            Test { seconds: Some(-1.0), ..test() },
            Test { endless: true, seconds: None, ..test() },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    }
}
