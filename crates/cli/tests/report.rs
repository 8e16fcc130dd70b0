//! The built command: `warpwire report`.

use std::fs;
use std::process::Output;

use testkit::Effort;

use crate::{stderr, stdout, warpwire};

fn run(folder: &tempfile::TempDir, arguments: &[&str]) -> Output {
    warpwire().arg("report").args(arguments).current_dir(folder.path()).output().unwrap()
}

#[test]
fn figures_as_json_and_then_as_a_page() {
    if Effort::current() == Effort::Quick {
        return println!("skipped: it measures for ten seconds; ./ci.sh does");
    }
    let folder = tempfile::tempdir().unwrap();
    let options = ["--quick", "--no-peers", "-d", "sim:0", "--json", "--out", "report.html"];
    let measured = run(&folder, &options);
    assert!(measured.status.success(), "{}", stderr(&measured));
    let report: serde_json::Value = serde_json::from_slice(&measured.stdout).unwrap();
    assert!(fs::read_to_string(folder.path().join("report.html")).unwrap().contains("<svg"));
    let figures = report["figures"].as_array().unwrap();
    for (kind, name) in [
        ("latency", "shared memory"),
        ("latency", "UDP"),
        ("bandwidth", "shared memory"),
        ("bandwidth", "UDP"),
        ("bandwidth", "simulated GPU memory, shared memory"),
        ("copy_to", "CPU window"),
        ("copy_from", "CPU window"),
        ("round_trip", "kernel"),
    ] {
        let is_it = |figure: &&serde_json::Value| figure["kind"] == kind && figure["name"] == name;
        let figure = figures.iter().find(is_it).unwrap_or_else(|| panic!("{kind} {name}"));
        let points = figure["points"].as_array().unwrap();
        assert!(!points.is_empty(), "{figure}");
        assert!(points.iter().all(|point| point["value"].as_f64().unwrap() > 0.0), "{figure}");
        assert!(figure["command"].as_str().unwrap().contains("warpwire "), "{figure}");
    }
    fs::write(folder.path().join("elsewhere.json"), &measured.stdout).unwrap();
    let made = run(&folder, &["--from", "elsewhere.json", "--out", "elsewhere.html"]);
    assert!(made.status.success(), "{}", stderr(&made));
    assert!(stdout(&made).contains("elsewhere.html ("), "{}", stdout(&made));
    let page = fs::read_to_string(folder.path().join("elsewhere.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("simulated GPU memory, shared memory"));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "nothing else is left");
    let again = run(&folder, &["--from", "elsewhere.json", "--json"]);
    assert!(again.status.success(), "{}", stderr(&again));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "--json alone writes no file");
}

#[test]
fn bad_command_lines() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("bad.json"), "{}").unwrap();
    for (arguments, why) in [
        (&["--out", "none/report.html"][..], "cannot write none/report.html: No such file"),
        (&["--out", "."], "cannot write .: it is a folder"),
        (&["--from", "none.json"], "cannot read none.json: No such file"),
        (&["--from", "bad.json"], "cannot read bad.json: it has no number `format`"),
        (&["--peers", "bad.json"], "bench/peers --json"),
        (&["--quick", "--long"], "cannot be used with"),
        (&["--from", "bad.json", "--quick"], "cannot be used with"),
    ] {
        let output = run(&folder, arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(why), "{arguments:?}: {}", stderr(&output));
    }
    let output = run(&folder, &["--quick", "-d", "cuda:99", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("cuda:99"), "{}", stderr(&output));
}
