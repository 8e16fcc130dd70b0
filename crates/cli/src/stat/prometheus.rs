//! Counters in Prometheus' text exposition format, version 0.0.4.

use std::fmt::Write;

use warpwire::hca::QpTotals;
use warpwire::hca::publish::{DeviceStats, ProcessStats};

/// A family of samples: its name, whether it only grows, and what it counts.
struct Family<T> {
    name: &'static str,
    help: &'static str,
    value: fn(&T) -> f64,
}

/// Counters of devices. Names are those of NIC counters: tx, rx; units are in the name.
const DEVICE_COUNTERS: &[Family<DeviceStats>] = &[
    Family {
        name: "warpwire_direct_operations_total",
        help: "Writes, reads and atomics in memory of other processes, without packets.",
        value: |device| device.direct.operations as f64,
    },
    Family {
        name: "warpwire_direct_bytes_total",
        help: "Bytes written to and read from memory of other processes, without packets.",
        value: |device| device.direct.bytes as f64,
    },
    Family {
        name: "warpwire_direct_by_peers_bytes_total",
        help: "Bytes that other processes wrote to and read from this one, without packets.",
        value: |device| device.direct.bytes_by_peers as f64,
    },
    Family {
        name: "warpwire_completions_total",
        help: "Completions.",
        value: |device| device.completions as f64,
    },
    Family {
        name: "warpwire_link_syscalls_total",
        help: "System calls of the link.",
        value: |device| device.calls as f64,
    },
];

const DEVICE_GAUGES: &[Family<DeviceStats>] = &[
    Family {
        name: "warpwire_queue_pairs",
        help: "Existing queue pairs.",
        value: |device| device.queue_pairs as f64,
    },
    Family {
        name: "warpwire_device_uptime_seconds",
        help: "Time since the device was opened.",
        value: |device| device.seconds,
    },
];

/// Counters of queue pairs; `{}` is `warpwire`, or `warpwire_qp` for single ones.
const QP_COUNTERS: &[Family<QpTotals>] = &[
    Family {
        name: "tx_bytes_total",
        help: "Payload bytes sent in packets.",
        value: |it| it.bytes_sent as f64,
    },
    Family {
        name: "rx_bytes_total",
        help: "Payload bytes received in packets.",
        value: |it| it.bytes_received as f64,
    },
    Family { name: "tx_packets_total", help: "Packets sent.", value: |it| it.packets_sent as f64 },
    Family {
        name: "rx_packets_total",
        help: "Packets received.",
        value: |it| it.packets_received as f64,
    },
    Family {
        name: "retransmits_total",
        help: "Requests sent again.",
        value: |it| it.resent as f64,
    },
    Family {
        name: "timeouts_total",
        help: "Expiries of the retransmission timer.",
        value: |it| it.timeouts as f64,
    },
    Family {
        name: "sequence_errors_total",
        help: "Sequence-error NAKs, sent and received.",
        value: |it| it.sequence_errors as f64,
    },
    Family {
        name: "rnr_naks_total",
        help: "RNR NAKs, sent and received: the receiver had no receive posted.",
        value: |it| it.rnr_naks as f64,
    },
    Family {
        name: "discarded_packets_total",
        help: "Packets that queue pairs discarded.",
        value: |it| it.discarded as f64,
    },
];

/// The counters of these processes, also of single queue pairs if wanted.
pub(super) fn render(processes: &[ProcessStats], with_qps: bool) -> String {
    let mut text = String::new();
    begin(&mut text, "warpwire_processes", "gauge", "Processes that publish counters.");
    sample(&mut text, "warpwire_processes", &[], processes.len() as f64);
    let devices: Vec<_> = processes
        .iter()
        .flat_map(|process| {
            process.devices.iter().map(move |device| (labels(process, device), device))
        })
        .collect();
    for (families, kind) in [(DEVICE_COUNTERS, "counter"), (DEVICE_GAUGES, "gauge")] {
        for Family { name, help, value } in families {
            begin(&mut text, name, kind, help);
            for (labels, device) in &devices {
                sample(&mut text, name, labels, value(device));
            }
        }
    }
    for Family { name, help, value } in QP_COUNTERS {
        let name = format!("warpwire_{name}");
        begin(&mut text, &name, "counter", help);
        for (labels, device) in &devices {
            sample(&mut text, &name, labels, value(&device.pairs));
        }
    }
    let name = "warpwire_dropped_packets_total";
    begin(&mut text, name, "counter", "Packets dropped by the link, the device or a queue pair.");
    for (labels, device) in &devices {
        for (reason, count) in &device.dropped {
            let labels = [&labels[..], &[("reason", reason.clone())]].concat();
            sample(&mut text, name, &labels, *count as f64);
        }
    }
    for Family { name, help, value } in QP_COUNTERS.iter().filter(|_| with_qps) {
        let name = format!("warpwire_qp_{name}");
        begin(&mut text, &name, "counter", help);
        for (labels, device) in &devices {
            for qp in &device.qps {
                let labels =
                    [&labels[..], &[("qpn", qp.qpn.to_string()), ("service", qp.service.clone())]]
                        .concat();
                sample(&mut text, &name, &labels, value(&qp.totals));
            }
        }
    }
    text
}

type Label = (&'static str, String);

fn labels(process: &ProcessStats, device: &DeviceStats) -> Vec<Label> {
    vec![
        ("pid", process.pid.to_string()),
        ("program", process.program.clone()),
        ("device", format!("hca{}", device.number)),
    ]
}

fn begin(text: &mut String, name: &str, kind: &str, help: &str) {
    // Writing to a string cannot fail.
    let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
}

fn sample(text: &mut String, name: &str, labels: &[Label], value: f64) {
    let quoted = |(name, value): &Label| {
        let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        format!("{name}=\"{value}\"")
    };
    let labels: Vec<String> = labels.iter().map(quoted).collect();
    let labels =
        if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
    let _ = writeln!(text, "{name}{labels} {value}");
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use warpwire::hca::{DirectStats, QpStats};

    use super::*;

    fn process(program: &str) -> ProcessStats {
        let pairs = QpTotals { bytes_sent: 7, resent: 2, ..QpTotals::default() };
        let qp =
            QpStats { qpn: 17, service: "RC".to_owned(), state: "RTS".to_owned(), totals: pairs };
        let device = DeviceStats {
            number: 0,
            link: String::new(),
            seconds: 1.5,
            queue_pairs: 1,
            pairs,
            direct: DirectStats::default(),
            completions: u64::MAX,
            steps: 0,
            calls: 0,
            dropped: BTreeMap::from([("icrc".to_owned(), 3)]),
            engines: Vec::new(),
            qps: vec![qp],
        };
        let devices = vec![device.clone(), DeviceStats { number: 1, ..device }];
        ProcessStats { warpwire: 1, pid: 42, program: program.to_owned(), devices }
    }

    /// A strict parser of the format: HELP, then TYPE, then all samples of a family together; names
    /// and labels are valid, no series comes twice, counters end in _total.
    fn parse(text: &str) -> BTreeMap<String, f64> {
        let is_name = |name: &str| {
            let ok = |c: char| c.is_ascii_alphanumeric() || c == '_';
            !name.is_empty()
                && name.chars().all(ok)
                && !name.starts_with(|c: char| c.is_ascii_digit())
        };
        let (mut helped, mut typed, mut seen) = (None, None, BTreeSet::new());
        let mut samples = BTreeMap::new();
        assert!(text.ends_with('\n'));
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').unwrap();
                assert!(
                    is_name(name) && !help.is_empty() && seen.insert(name.to_owned()),
                    "{line}"
                );
                (helped, typed) = (Some(name.to_owned()), None);
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert_eq!(helped.as_deref(), Some(name), "{line}");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
                assert!(["counter", "gauge"].contains(&kind), "{line}");
                typed = Some(name.to_owned());
            } else {
                let (series, value) = line.rsplit_once(' ').unwrap();
                let name = series.split('{').next().unwrap();
                assert_eq!(typed.as_deref(), Some(name), "{line}");
                if let Some(labels) = series.strip_prefix(name).filter(|labels| !labels.is_empty())
                {
                    check_labels(labels);
                }
                let old = samples.insert(series.to_owned(), value.parse().unwrap());
                assert_eq!(old, None, "{line}");
            }
        }
        samples
    }

    /// `{name="value",…}`, with escapes.
    fn check_labels(labels: &str) {
        let mut rest = labels.strip_prefix('{').unwrap().strip_suffix('}').unwrap();
        loop {
            let (name, after) = rest.split_once("=\"").unwrap();
            assert!(name.chars().all(|c| c.is_ascii_lowercase()), "{labels}");
            let mut chars = after.char_indices();
            let end = loop {
                match chars.next().unwrap() {
                    (_, '\\') => assert!(matches!(chars.next(), Some((_, '\\' | '"' | 'n')))),
                    (end, '"') => break end,
                    (_, other) => assert_ne!(other, '\n'),
                }
            };
            match after[end + 1..].strip_prefix(',') {
                Some(more) => rest = more,
                None => return assert_eq!(&after[end + 1..], "", "{labels}"),
            }
        }
    }

    #[test]
    fn samples_are_valid() {
        let text = render(&[process("a\\b\"c"), ProcessStats { pid: 43, ..process("x") }], true);
        let samples = parse(&text);
        let of = |name: &str, labels: &str| samples.get(&format!("{name}{labels}")).copied();
        let first = r#"{pid="42",program="a\\b\"c",device="hca1"}"#;
        assert_eq!(of("warpwire_tx_bytes_total", first), Some(7.0));
        assert_eq!(of("warpwire_retransmits_total", first), Some(2.0));
        assert_eq!(of("warpwire_device_uptime_seconds", first), Some(1.5));
        assert_eq!(of("warpwire_completions_total", first), Some(u64::MAX as f64));
        let drops = r#"{pid="43",program="x",device="hca0",reason="icrc"}"#;
        assert_eq!(of("warpwire_dropped_packets_total", drops), Some(3.0));
        let qp = r#"{pid="43",program="x",device="hca0",qpn="17",service="RC"}"#;
        assert_eq!(of("warpwire_qp_tx_bytes_total", qp), Some(7.0));
        assert_eq!(of("warpwire_processes", ""), Some(2.0));
        assert!(parse(&render(&[process("x")], false)).keys().all(|key| !key.contains("qpn")));
    }

    #[test]
    fn no_process_is_no_error() {
        assert_eq!(parse(&render(&[], true)).len(), 1);
    }
}
