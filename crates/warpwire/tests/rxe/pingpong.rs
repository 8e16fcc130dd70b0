//! `warpwire pingpong` against `ibv_rc_pingpong`, as client and as server.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::rxe::lab::{Bench, Family};
use testkit::cases;

cases!(Bench; CASES:
    we_are_the_client,
    we_are_the_server,
    memory_of_a_gpu,
    a_faulty_wire,
    a_peer_with_another_size,
);

const COUNT: &str = "30";

/// Message length, MTU, and whether to use completion events (`-e`).
const PARAMS: [(&str, &str, bool); 6] = [
    ("1", "1024", true),
    ("4096", "256", true),
    ("5000", "512", true),
    ("65537", "4096", true),
    ("1024", "1024", false),
    ("20000", "2048", false),
];

/// Command-line arguments for both ends.
fn words(size: &str, mtu: &str, events: bool) -> Vec<String> {
    let mut words: Vec<String> =
        ["-n", COUNT, "-s", size, "-m", mtu].into_iter().map(str::to_owned).collect();
    if events {
        words.push("-e".to_owned());
    }
    words
}

fn ours(bench: &Bench, words: &[String]) -> Command {
    let mut command = Command::new(&bench.lab.command);
    command.arg("pingpong").args(words).args(["--json", "--timeout", "30"]);
    command.arg("--pcap").arg(bench.capture());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn theirs(bench: &Bench, words: &[String]) -> String {
    // Without `timeout` it could wait forever.
    format!("timeout 40 ibv_rc_pingpong -d rxe0 -g {} {}", bench.gid_index(), words.join(" "))
}

/// Arguments for a client: the guest's server, which listens on IPv4 whatever its GID is, and the
/// source address of the local packets.
fn to_server(bench: &Bench) -> [String; 3] {
    let four = bench.lab.bench(Family::V4, String::new()).theirs();
    [four.to_string(), "--from".to_owned(), bench.ours().to_string()]
}

fn report(output: std::process::Output, params: &str) -> Value {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{params}: {text}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["iterations"].to_string(), COUNT);
    report
}

fn we_are_the_client(bench: &Bench) {
    for (size, mtu, events) in PARAMS {
        let words = words(size, mtu, events);
        let peer = bench.start(&theirs(bench, &words));
        let output = ours(bench, &[&to_server(bench)[..], &words].concat()).output().unwrap();
        let report = report(output, &words.join(" "));
        assert_eq!((&report["role"], &report["verified"]), (&"client".into(), &true.into()));
        let text = peer.end();
        assert!(text.contains(&format!("{COUNT} iters in")), "{text}");
    }
}

fn we_are_the_server(bench: &Bench) {
    for (size, mtu, events) in PARAMS {
        let words = words(size, mtu, events);
        let bind = ["--bind".to_owned(), bench.ours().to_string()];
        let server = ours(bench, &[&words[..], &bind].concat()).spawn().unwrap();
        let wait = "for i in 1 2 3 4 5 6 7 8 9; do";
        let client = format!("{} {}", theirs(bench, &words), bench.ours());
        // The server may not be listening yet, so the client retries.
        let peer = bench.start(&format!("{wait} {client} && exit 0; sleep 0.2; done; exit 1"));
        let report = report(server.wait_with_output().unwrap(), &words.join(" "));
        assert_eq!(report["role"], "server");
        peer.end();
    }
}

fn memory_of_a_gpu(bench: &Bench) {
    let words = words("70000", "4096", true);
    let peer = bench.start(&theirs(bench, &words));
    let gpu = ["--mem".to_owned(), "sim:0".to_owned()];
    let words = [&to_server(bench)[..], &gpu, &words].concat();
    assert_eq!(report(ours(bench, &words).output().unwrap(), "sim:0")["verified"], true);
    peer.end();
}

fn a_faulty_wire(bench: &Bench) {
    let words = words("5000", "1024", true);
    let peer = bench.start(&theirs(bench, &words));
    let faults = ["--fault".to_owned(), "loss=2%,seed=4".to_owned()];
    let words = [&to_server(bench)[..], &faults, &words].concat();
    let output = ours(bench, &words).output().unwrap();
    let report = report(output, "loss=2%");
    assert!(report["counters"]["resent"].as_u64() > Some(0), "{report}");
    peer.end();
}

fn a_peer_with_another_size(bench: &Bench) {
    let peer = bench.start(&theirs(bench, &words("1000", "1024", true)));
    let words = [&to_server(bench)[..], &words("2000", "1024", true)].concat();
    let output = ours(bench, &words).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr);
    // rxe reports its own error: see the case of short receives.
    let names_status =
        ["RemoteInvalidRequest", "RemoteOperation"].iter().any(|name| text.contains(name));
    assert!(names_status && text.contains("-s"), "{text}");
    let (status, _) = peer.outcome();
    assert_ne!(status, 0);
}
