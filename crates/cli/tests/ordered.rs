//! The built command: `warpwire async`, on the simulated GPU.

use std::process::Output;

use serde_json::Value;
use testkit::Effort;

fn run(arguments: &[&str]) -> Output {
    let mut command = crate::warpwire();
    command.arg("async").args(arguments).args(["-d", "sim:0"]).output().unwrap()
}

/// Standard output of a run that must succeed.
fn text(arguments: &[&str]) -> String {
    let output = run(arguments);
    let stderr_text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {stderr_text}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&text(&[arguments, &["--json"]].concat())).unwrap()
}

fn assert_positive(value: &Value) {
    assert!(value.as_f64().is_some_and(|number| number > 0.0), "{value}");
}

#[test]
fn sanity_checks_everything() {
    if Effort::current() > Effort::Quick {
        let text = text(&["sanity"]);
        assert!(text.contains(">>> SUCCESS"), "{text}");
    }
    let checks = json(&["sanity"])["checks"].as_array().unwrap().clone();
    assert!(checks.len() >= 9 && checks.iter().all(|check| check["why_not"].is_null()));
}

#[test]
fn latency_shows_each_mode() {
    const SHORT: [&str; 7] = ["latency", "-s", "8,4096", "-n", "20", "-b", "10"];
    let variants = [
        &[][..],
        &["--one-engine"],
        &["--processes", "--cq", "device"],
        &["--link", "udp", "--no-wait-timeout"],
    ];
    for more in variants.into_iter().take(Effort::choose([1, 4, 4])) {
        let report = json(&[&SHORT, more].concat());
        let rows = report["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 2, "{more:?}");
        for row in rows {
            assert_eq!(row["verified"], true);
            let modes = row["modes"].as_array().unwrap();
            let names: Vec<_> = modes.iter().map(|mode| mode["mode"].as_str().unwrap()).collect();
            assert_eq!(names, ["cpu", "stream", "graph", "kernel"]);
            modes.iter().for_each(|mode| assert_positive(&mode["plain"]["median_us"]));
        }
        // The simulated GPU has none: it would bound nothing.
        assert!(report["baseline"].is_null(), "{report}");
        assert_eq!(report["ratios"].as_array().map(Vec::len), Some(0), "{report}");
        assert!(report["machine"]["host"].is_string(), "{report}");
    }
    let report = json(&[&SHORT[..], &["-m", "kernel,cpu", "--processes"]].concat());
    let modes = report["rows"][1]["modes"].as_array().unwrap();
    let names: Vec<_> = modes.iter().map(|mode| mode["mode"].as_str().unwrap()).collect();
    assert_eq!(names, ["cpu", "kernel"]);
}

#[test]
fn latency_includes_the_compute_kernel() {
    let arguments = ["latency", "-s", "64", "-n", "10", "-b", "5", "--compute", "2ms"];
    let report = json(&arguments);
    for mode in report["rows"][0]["modes"].as_array().unwrap() {
        // Each side computes once per round.
        let with = mode["compute"]["min_us"].as_f64().unwrap();
        assert!(with >= 4000.0, "{mode}");
    }
    assert!(text(&arguments).contains("+2ms"));
}

#[test]
fn poll_shows_words_in_both_memories() {
    let report = json(&["poll", "-n", "100"]);
    let rows = report["rows"].as_array().unwrap();
    let name = |row: &Value| format!("{} {}", row["by"], row["word"]).replace('"', "");
    let words: Vec<_> = rows.iter().map(name).collect();
    assert_eq!(words, ["stream pinned", "stream device", "kernel pinned", "kernel device"]);
    rows.iter().for_each(|row| assert_positive(&row["median_us"]));
}

#[test]
fn invalid_arguments_are_refused() {
    for (arguments, named) in [
        (&["latency", "-s", "2"][..], "4 bytes to 64MiB"),
        (&["latency", "--link", "pigeon"], "pigeon"),
        (&["latency", "--compute", "1h"], "1h"),
        (&["latency", "-b", "0"], "0"),
        (&["latency", "--processes", "--one-engine"], "--one-engine"),
        (&["latency", "-m", "cpu,pigeon"], "pigeon"),
        (&["poll", "-n", "0"], "zero"),
    ] {
        let output = run(arguments);
        let stderr_text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr_text}");
        assert!(stderr_text.contains(named), "{arguments:?}: {stderr_text}");
    }
}
