//! `warpwire::ibv` in the guest: alone on rxe, and against the local software HCA.

use crate::rxe::lab::Bench;
use crate::rxe::{failures, operations, queues};
use testkit::{Case, cases};

cases!(Bench; CASES:
    two_queue_pairs_of_one_device,
    devices_are_listed,
    the_suite_of_verbs_between_us_and_rxe,
    perf_between_devices,
    messages_and_agents_on_rxe;
    full:
    the_suites_of_messages_and_agents_on_rxe,
    the_suite_of_verbs_on_rxe,
    the_suite_of_verbs_between_rxe_and_us,
    between_us_and_rxe_by_ipv6,
);

/// Cases of other modules that also run against `warpwire::ibv` in the guest instead of
/// `verbs-peer.c`.
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
    "no_receive_is_posted",
    "several_queue_pairs",
    "their_shared_receives",
    "events",
];

pub fn both_ways() -> Vec<&'static Case<Bench>> {
    let all = || operations::CASES.iter().chain(failures::CASES).chain(queues::CASES);
    let found: Vec<_> = all().filter(|case| BOTH_WAYS.contains(&case.name)).collect();
    assert_eq!(found.len(), BOTH_WAYS.len(), "a name in the list does not exist");
    found
}

/// All of `tests/ibv`: every operation, events, datagrams, failures.
fn two_queue_pairs_of_one_device(bench: &Bench) {
    suite(bench, "WARPWIRE_IBV_DEVICE=rxe0 WARPWIRE_TEST_SUITE=ibv /job/suites");
}

/// Some cases of `tests/msg` and `tests/agent` on the device.
fn messages_and_agents_on_rxe(bench: &Bench) {
    suite_on_device(bench, "msg", "order_is_kept");
    suite_on_device(bench, "msg", "signals_come_after");
    suite_on_device(bench, "agent", "notifications_after_reads");
}

fn the_suites_of_messages_and_agents_on_rxe(bench: &Bench) {
    suite_on_device(bench, "msg", "");
    suite_on_device(bench, "agent", "");
}

fn suite_on_device(bench: &Bench, name: &str, filter: &str) {
    // Each buffer has a descriptor, and the cases have many.
    let env = format!("WARPWIRE_TEST_DEVICE=rxe0 WARPWIRE_TEST_SUITE={name}");
    suite(bench, &format!("ulimit -n 8192; {env} /job/suites {filter}"));
}

/// `tests/verbs` on the device: both ends are contexts of it.
fn the_suite_of_verbs_on_rxe(bench: &Bench) {
    verbs_suite(bench, "10.79.0.2", "::devices::");
}

/// `tests/verbs` with the software HCA at one end, in its own network namespace of the guest.
fn the_suite_of_verbs_between_us_and_rxe(bench: &Bench) {
    verbs_suite(bench, "10.79.0.2", "soft-to-device::");
}

fn the_suite_of_verbs_between_rxe_and_us(bench: &Bench) {
    verbs_suite(bench, "10.79.0.2", "device-to-soft::");
}

fn between_us_and_rxe_by_ipv6(bench: &Bench) {
    for case in ["arrive", "messages_of_every_length", "replies_reach_the_sender", "atomics"] {
        verbs_suite(bench, "fd79::2", case);
    }
}

fn verbs_suite(bench: &Bench, soft_peer: &str, filter: &str) {
    // A veth pair passes GSO packets unsegmented, and rxe then sees other IP identifications than
    // were sent.
    let segment = "/usr/bin/ip -n soft link set soft1 gso_max_segs 1";
    let soft_peer = format!("WARPWIRE_VERBS_BESIDE=soft,{soft_peer}");
    let soft_peer =
        format!("{soft_peer} WARPWIRE_VERBS_RECORDS={RECORDS} WARPWIRE_TEST_SUITE=verbs");
    let suite_of_verbs = format!("WARPWIRE_VERBS_DEVICE=rxe2 {soft_peer} /job/suites {filter}");
    suite(bench, &format!("mkdir -p {RECORDS}; {segment}; {suite_of_verbs}"));
}

/// Captures of failed cases in the guest: their packets do not pass its network card.
const RECORDS: &str = "/tmp/records";

/// Copies the captures of failed cases out of the guest.
fn fetch_records(bench: &Bench) {
    let names = bench.start(&format!("ls {RECORDS} 2>/dev/null; true")).end();
    for name in names.lines().take(5) {
        let listener = std::net::TcpListener::bind((bench.ours(), 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let file = format!("{RECORDS}/{name}");
        let sent = bench.start(&format!("nc {} {port} < {file}; rm {file}", bench.ours()));
        let mut kept = std::fs::File::create(bench.log(name)).unwrap();
        std::io::copy(&mut listener.accept().unwrap().0, &mut kept).unwrap();
        sent.end();
    }
}

/// `warpwire perf` between two processes over the device, and its errors for unknown devices.
fn perf_between_devices(bench: &Bench) {
    let perf = "/job/warpwire perf write bw --local -s 4096 -n 200 --timeout 30 --device";
    // Standard error may have a note that the guest is busy.
    let errors = "2>/tmp/perf.txt || cat /tmp/perf.txt";
    let text = bench.start(&format!("{perf} rxe0 --json {errors}")).end();
    let value: serde_json::Value =
        serde_json::from_str(&text).unwrap_or_else(|why| panic!("{why}: {text}"));
    let link = value["local"]["link"].as_str().unwrap();
    assert!(link.contains("hardware") && link.contains("rxe0"), "{link}");
    assert_eq!(value["rows"][0]["verified"], true, "{text}");
    let (status, text) = bench.start(&format!("{perf} mlx9_9")).outcome();
    assert!(status != 0 && text.contains("use one of: rxe0"), "{text}");
    let (status, text) = bench.start(&format!("{perf} rxe0 --gid-index 200")).outcome();
    assert!(status != 0 && text.contains("no GID at this index"), "{text}");
}

fn suite(bench: &Bench, command: &str) {
    let (status, text) = bench.start(command).outcome();
    if status != 0 {
        fetch_records(bench);
    }
    assert_eq!(status, 0, "{text}");
    let summary = text.lines().find(|line| line.starts_with("test result: ok.")).unwrap_or(&text);
    assert!(summary.contains(" 0 failed") && !summary.contains(" 0 passed"), "{text}");
    for skipped in text.lines().filter(|line| line.contains("skipped:")) {
        eprintln!("{skipped}");
    }
}

/// `warpwire devices` with a device present.
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
