//! `warpwire::ibv` in the guest: by itself on rxe, and against our software HCA here.

use crate::lab::{Bench, Case, cases};
use crate::{failures, operations, queues};

cases!(two_queue_pairs_of_one_device, devices_are_listed);

/// Cases of the other rooms that are held once more, with our own verbs at the other end.
const BOTH_WAYS: [&str; 17] = [
    "we_write",
    "they_write",
    "we_read",
    "they_read",
    "we_send",
    "they_send",
    "immediates",
    "atomics",
    "long_messages",
    "fences",
    "inline_data",
    "they_invalidate_a_key",
    "they_use_a_wrong_key",
    "nobody_receives_at_all",
    "several_queue_pairs",
    "their_shared_receives",
    "events",
];

pub fn both_ways() -> Vec<&'static Case> {
    let all = || operations::CASES.iter().chain(failures::CASES).chain(queues::CASES);
    let found: Vec<_> = all().filter(|case| BOTH_WAYS.contains(&case.name)).collect();
    assert_eq!(found.len(), BOTH_WAYS.len(), "a case has another name now");
    found
}

/// `tests/ibv`, as a whole: every operation, events, datagrams, what is refused.
fn two_queue_pairs_of_one_device(bench: &Bench) {
    let (status, text) = bench.start("WARPWIRE_IBV_DEVICE=rxe0 /job/ibv-suite").outcome();
    assert_eq!(status, 0, "{text}");
    let summary = text.lines().find(|line| line.starts_with("test result: ok.")).unwrap_or(&text);
    assert!(summary.contains(" 0 failed") && !summary.contains(" 0 passed"), "{text}");
    for skipped in text.lines().filter(|line| line.contains("skipped:")) {
        eprintln!("{skipped}");
    }
}

/// The command, where there is a device.
fn devices_are_listed(bench: &Bench) {
    let text = bench.start("/job/warpwire devices -v").end();
    for part in ["rxe0", "RoCE v2", "active", "eth0", "max_qps", "soft"] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    let json = bench.start("/job/warpwire devices --json").end();
    let value: serde_json::Value = serde_json::from_str(&json).unwrap();
    let device = &value["devices"][0];
    assert_eq!((&device["name"], &device["driver"]), (&"rxe0".into(), &"rxe".into()), "{json}");
    assert_eq!(device["ports"][0]["state"], "active", "{json}");
    assert_eq!(value["unavailable"], serde_json::Value::Null, "{json}");
}
