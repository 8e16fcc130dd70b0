//! The built command: `doctor`, `topo`, `demo`, usage errors and logging.

use std::process::{Output, Stdio};

#[path = "../../doctor/tests/support/mod.rs"]
pub mod support;

use crate::{stderr, stdout, warpwire};
use support::Machine;

fn run(arguments: &[&str]) -> Output {
    warpwire().args(arguments).output().unwrap()
}

#[test]
fn doctor_checks_this_machine() {
    let output = run(&["doctor"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    let (_, verdicts) = text.split_once("Verdicts\n").unwrap();
    assert!(verdicts.contains("simulated GPU: yes"), "{verdicts}");
    if !std::path::Path::new("/proc/driver/nvidia").exists() {
        assert!(verdicts.contains("no CUDA device"), "{verdicts}");
    }
    assert!(verdicts.contains("software HCA:\n  RDMA programs "), "{verdicts}");
    assert!(!text.contains('\x1b'), "no colour into a pipe");
}

#[test]
fn doctor_prints_json() {
    let output = run(&["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["verdicts"].as_array().unwrap().len(), 7);
    let check = &report["checks"][0];
    for field in ["group", "name", "status", "why"] {
        assert!(check[field].is_string(), "{field} in {check}");
    }
}

#[test]
fn root_selects_a_recorded_machine() {
    let machine = Machine::recorded("eight-gpu-server");
    let root = machine.root().to_str().unwrap();
    let doctor = run(&["doctor", "--root", root]);
    assert!(stdout(&doctor).contains("hardware RDMA: yes"), "{}", stderr(&doctor));
    let topo = run(&["topo", "--json", "--root", root]);
    let topology: serde_json::Value = serde_json::from_slice(&topo.stdout).unwrap();
    assert_eq!(topology["best"][3]["name"], "mlx5_3");
    assert_eq!(topology["distances"][0][1], "PXB");
    assert!(stdout(&run(&["topo", "--root", root])).contains("GPU7: NIC7 mlx5_7 (PIX)"));
}

#[test]
fn a_machine_on_which_nothing_works_is_status_one() {
    let failed = "{\"failed\": {\"why\": \"refused\"}}";
    let machine = Machine::unpack(&format!("probes <<END\n{{\"memfd\": {failed}}}\nEND"));
    let output = run(&["doctor", "--root", machine.root().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
}

#[test]
fn a_missing_root_is_a_usage_error() {
    for command in ["doctor", "topo"] {
        let output = run(&[command, "--root", "/no/such/machine"]);
        assert_eq!(output.status.code(), Some(2));
        let message = stderr(&output);
        assert!(
            message.contains("/no/such/machine") && message.contains("pass a directory"),
            "{message}"
        );
        assert!(stdout(&output).is_empty());
    }
}

#[test]
fn malformed_probes_are_a_usage_error() {
    let machine = Machine::unpack("/probes.json = {]");
    let output = run(&["doctor", "--root", machine.root().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("probes.json: line 1"), "{}", stderr(&output));
}

#[test]
fn unknown_commands_and_options_are_usage_errors() {
    for arguments in [&["cure"][..], &["doctor", "--fix"], &["topo", "--root"], &[]] {
        assert_eq!(run(arguments).status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn log_settings_are_checked() {
    for bad in ["loud", "warpwire=loud", "a=b=c", "warn,[", "debug,noisy"] {
        let output = warpwire().arg("topo").env("WARPWIRE_LOG", bad).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{bad}");
        let message = stderr(&output);
        assert!(message.contains("WARPWIRE_LOG") && message.contains("trace"), "{message}");
    }
    for good in ["", "debug", "OFF", "warn,warpwire::host=trace", "warpwire::mem"] {
        let output = warpwire().arg("topo").env("WARPWIRE_LOG", good).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{good}: {}", stderr(&output));
    }
}

#[test]
fn a_closed_output_pipe_is_no_error() {
    for arguments in [&["doctor"][..], &["topo"], &["doctor", "--json"], &["--help"]] {
        let mut child = warpwire()
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert_eq!(stderr(&output), "", "{arguments:?}");
    }
}

#[test]
fn help_has_examples() {
    for arguments in
        [&["--help"][..], &["doctor", "--help"], &["topo", "--help"], &["copy", "--help"]]
    {
        assert!(stdout(&run(arguments)).contains("Examples:\n  warpwire"), "{arguments:?}");
    }
}

#[test]
fn demo_verifies_what_it_moved() {
    let output = run(&["demo", "--size", "1MiB"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    assert!(text.ends_with("\nverified\n"), "{text}");
    assert!(text.contains("using"), "{text}");
}

#[test]
fn demo_prints_json_and_takes_devices() {
    let output =
        run(&["demo", "--json", "--size", "64KiB", "--device", "sim:1", "--device", "sim:0"]);
    let outcome: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(outcome["verified"], true);
    assert_eq!(outcome["devices"], serde_json::json!(["sim:1", "sim:0"]));
    let stages = outcome["stages"].as_array().unwrap();
    assert_eq!(stages.len(), 10);
    let messages: Vec<_> = stages[8..].iter().map(|s| s["what"].as_str().unwrap()).collect();
    assert_eq!(messages, ["message ordered by a stream", "message posted from a kernel"]);
    assert!(stages[8..].iter().all(|s| s["to"] == "sim:1, other process"), "{stages:?}");
    let window = outcome["stages"]
        .as_array()
        .unwrap()
        .iter()
        .find(|s| s["bytes"] == 65_536 && s["from"] == "cpu");
    assert_eq!(window.unwrap()["skipped"], serde_json::Value::Null);
}

#[test]
fn demo_refuses_invalid_arguments() {
    for (arguments, status, expected) in [
        (vec!["demo", "--size", "1B"], 2, "between 4KiB and 1GiB"),
        (vec!["demo", "--size", "much"], 2, "64KiB"),
        (vec!["demo", "--device", "tpu:0"], 2, "cuda:N or sim:N"),
        (vec!["demo", "--device", "sim:99"], 2, "gpus=100"),
    ] {
        let output = run(&arguments);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}");
        assert!(stderr(&output).contains(expected), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn demo_fails_cleanly_when_the_device_does() {
    for (setting, expected) in [
        ("memory=64KiB", "are free"),
        ("fail=copy:3", "configured to fail copy:3"),
        ("fail=launch:1", "configured to fail launch:1"),
        ("gpus=zero", "WARPWIRE_SIM"),
    ] {
        let arguments = ["demo", "--size", "64KiB", "--device", "sim:0"];
        let output = warpwire().env("WARPWIRE_SIM", setting).args(arguments).output().unwrap();
        assert_ne!(output.status.code(), Some(0), "{setting}");
        assert!(stderr(&output).contains(expected), "{setting}: {}", stderr(&output));
        assert!(!stdout(&output).contains("verified"), "{setting}");
    }
}

#[test]
fn the_version_names_commit_and_target() {
    let text = crate::stdout(&crate::warpwire().arg("--version").output().unwrap());
    let rest = text.trim().strip_prefix(&format!("warpwire {} (", env!("CARGO_PKG_VERSION")));
    let build = rest.and_then(|rest| rest.strip_suffix(')')).unwrap_or_else(|| panic!("{text}"));
    let (commit, target) = build.split_once(", ").unwrap_or(("", build));
    assert!(target.contains("linux"), "{text}");
    assert!(commit.chars().all(|c| c.is_ascii_hexdigit()), "{text}");
}

#[test]
fn completions_know_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let output = crate::warpwire().args(["completions", shell]).output().unwrap();
        let text = crate::stdout(&output);
        assert!(output.status.success() && text.contains("perf"), "{shell}");
        assert!(text.contains("run-infinitely") && text.contains("prometheus"), "{shell}");
    }
    let script = crate::stdout(&crate::warpwire().args(["completions", "bash"]).output().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("warpwire");
    std::fs::write(&file, script).unwrap();
    let checked = std::process::Command::new("bash").arg("-n").arg(&file).output().unwrap();
    assert!(checked.status.success(), "{}", crate::stderr(&checked));
    let unknown = crate::warpwire().args(["completions", "dos"]).output().unwrap();
    assert_eq!(unknown.status.code(), Some(2));
}

#[test]
fn man_pages_of_every_command() {
    let page = crate::stdout(&crate::warpwire().arg("man").output().unwrap());
    assert!(page.contains(".TH") && page.contains("warpwire\\-perf(1)"), "{page}");
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("a/man1");
    let output = crate::warpwire().arg("man").arg(&pages).output().unwrap();
    assert!(output.status.success(), "{}", crate::stderr(&output));
    for name in ["warpwire", "warpwire-perf", "warpwire-mp-all_reduce", "warpwire-sock-kv"] {
        let text = std::fs::read_to_string(pages.join(format!("{name}.1"))).unwrap();
        assert!(text.contains(".SH NAME") && text.contains(".SH SYNOPSIS"), "{name}");
    }
    let hidden = pages.join("warpwire-copy-sanity-child.1");
    assert!(!hidden.exists(), "{}", hidden.display());
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let output = crate::warpwire().arg("man").arg(&file).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(crate::stderr(&output).contains("cannot write to"), "{}", crate::stderr(&output));
}
