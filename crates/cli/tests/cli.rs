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
    let (verdicts, checks) = text.split_once("\n\n").unwrap();
    assert!(verdicts.starts_with("Verdicts\nGPUDirect RDMA: "), "{verdicts}");
    assert!(verdicts.contains("simulated GPU: YES"), "{verdicts}");
    if !std::path::Path::new("/proc/driver/nvidia").exists() {
        assert!(verdicts.contains("GPU: NO, because"), "{verdicts}");
    }
    assert!(verdicts.contains("RDMA programs (libibverbs) would see: "), "{verdicts}");
    assert!(checks.starts_with("GPU\n"), "{checks}");
    assert!(!text.contains('\x1b'), "no colour into a pipe");
}

#[test]
fn doctor_prints_json() {
    let output = run(&["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let verdicts = report["verdicts"].as_array().unwrap();
    assert_eq!(verdicts.len(), 11);
    for field in ["word", "capability", "answer", "text", "known_by"] {
        assert!(
            verdicts.iter().all(|verdict| verdict[field].is_string()),
            "{field} in {verdicts:?}"
        );
    }
    assert!(report["nccl"]["network"].is_string() && report["nccl"]["plugins"].is_array());
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
    assert!(stdout(&doctor).contains("RDMA devices: YES"), "{}", stderr(&doctor));
    let topo = run(&["topo", "--json", "--root", root]);
    let topology: serde_json::Value = serde_json::from_slice(&topo.stdout).unwrap();
    assert_eq!(topology["best"][3]["name"], "mlx5_3");
    assert_eq!(topology["distances"][0][1], "PXB");
    assert_eq!(topology["nvlinks"][0][1], 18);
    assert!(stdout(&run(&["topo", "--root", root])).contains("NIC7 mlx5_7 (PIX)"));
    // The machine file itself, too.
    let file = Machine::file("eight-gpu-server");
    let again = run(&["doctor", "--root", file.to_str().unwrap()]);
    assert_eq!(stdout(&again), stdout(&doctor));
}

#[test]
fn brief_is_a_line_for_each_verdict() {
    let output = run(&["doctor", "--brief"]);
    let text = stdout(&output);
    assert_eq!((output.status.code(), text.lines().count()), (Some(0), 11), "{text}");
    assert!(text.starts_with("GPUDirect RDMA: "), "{text}");
    assert_eq!(run(&["doctor", "--brief", "--json"]).status.code(), Some(2));
}

#[test]
fn requirements_decide_the_exit_status() {
    let file = Machine::file("nvlink-bridge");
    let root = file.to_str().unwrap();
    let met = run(&["doctor", "--brief", "--root", root, "--require", "rdma,nccl,windows,sim"]);
    assert_eq!((met.status.code(), stderr(&met).as_str()), (Some(0), ""));
    let missed = run(&["doctor", "--brief", "--root", root, "--require", "sim,gpudirect,async"]);
    assert_eq!(missed.status.code(), Some(1));
    let message = stderr(&missed);
    assert_eq!(message.lines().count(), 2, "{message}");
    assert!(message.starts_with("error: gpudirect is required: GPUDirect RDMA: PARTLY"));
    assert!(message.contains("async is required") && message.contains("fix: `echo"), "{message}");
    assert_eq!(stdout(&missed).lines().count(), 11);
    let unknown = run(&["doctor", "--require", "gpudirect,luck"]);
    assert_eq!(unknown.status.code(), Some(2));
    let message = stderr(&unknown);
    assert!(
        message.contains("\"luck\"") && message.contains("gpudirect, async, windows"),
        "{message}"
    );
}

#[test]
fn a_recording_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("machine.txt");
    let path = file.to_str().unwrap();
    let output = run(&["doctor", "--record", path]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains(path), "{}", stdout(&output));
    let again = run(&["doctor", "--brief", "--root", path]);
    assert_eq!(stdout(&again), stdout(&run(&["doctor", "--brief"])));
    assert_eq!(stdout(&run(&["topo", "--root", path])), stdout(&run(&["topo"])));
    let refused = run(&["doctor", "--record", "/no/such/folder/file"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("/no/such/folder/file"), "{}", stderr(&refused));
    std::fs::write(&file, "/a = 1\nnonsense\n").unwrap();
    let malformed = run(&["doctor", "--root", path]);
    assert_eq!(malformed.status.code(), Some(2));
    assert!(stderr(&malformed).contains("line 2: \"nonsense\""), "{}", stderr(&malformed));
}

#[test]
fn a_pair_is_tried() {
    let output = run(&["doctor", "--try", "soft", "sim:0"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains("out of the GPU: right"), "{}", stdout(&output));
    let output = run(&["doctor", "--try", "soft", "sim:1", "--json"]);
    let trial: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&trial["gpu"], &trial["direct"]), (&"sim:1".into(), &false.into()));
    for (arguments, status, words) in [
        (&["soft", "sim:99"][..], 1, "gpus=100"),
        (&["mlx9_9", "sim:0"], 1, "RDMA"),
        (&["soft", "tpu"], 1, "cuda:N or sim:N"),
        (&["soft"], 2, "--try"),
        (&["soft", "sim:0", "--root", "/"], 2, "--root"),
    ] {
        let output = run(&[&["doctor", "--try"], arguments].concat());
        assert_eq!(output.status.code(), Some(status), "{arguments:?}");
        assert!(stderr(&output).contains(words), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn nccl_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let plugin = folder.path().join("libnccl-net-warpwire.so");
    std::fs::write(&plugin, "").unwrap();
    let run = |setting: &str, json: bool| {
        let mut command = warpwire();
        command.args(["doctor", "--nccl"]).args(json.then_some("--json"));
        command.env("NCCL_NET_PLUGIN", setting).env_remove("NCCL_NET");
        command.env("LD_LIBRARY_PATH", folder.path()).output().unwrap()
    };
    let text = stdout(&run("warpwire", false));
    assert!(text.starts_with("NCCL would use: Warpwire: the plugin "), "{text}");
    assert!(text.contains("libnccl-net-warpwire.so (LD_LIBRARY_PATH,"), "{text}");
    let text = stdout(&run("nosuch", false));
    assert!(text.contains("neither as nosuch nor as libnccl-net-nosuch.so"), "{text}");
    assert!(text.contains("why not Warpwire's plugin: NCCL_NET_PLUGIN=nosuch"), "{text}");
    let value: serde_json::Value = serde_json::from_str(&stdout(&run("warpwire", true))).unwrap();
    assert_eq!(value["network"], "Warpwire");
    assert_eq!(value["plugins"][0]["library"]["path"], plugin.to_str().unwrap());
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
    assert_eq!(stages.len(), 11);
    let messages: Vec<_> = stages[9..].iter().map(|s| s["what"].as_str().unwrap()).collect();
    assert_eq!(messages, ["message ordered by a stream", "message posted from a kernel"]);
    assert!(stages[9..].iter().all(|s| s["to"] == "sim:1, peer"), "{stages:?}");
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
