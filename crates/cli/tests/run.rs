//! The built command: `warpwire run` and `warpwire mp`.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use testkit::Effort;

fn warpwire(arguments: &[&str]) -> Command {
    let mut command = crate::warpwire();
    command.args(arguments);
    command
}

fn run(arguments: &[&str]) -> Output {
    warpwire(&[&["run"], arguments].concat()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn ranks_get_their_environment() {
    let line = "echo $WARPWIRE_RANK/$WARPWIRE_LOCAL_RANK of $WARPWIRE_SIZE; echo oops >&2; \
                cat; printf end";
    let output = run(&["-n", "3", "--", "sh", "-c", line]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let out = text(&output.stdout);
    let mut lines: Vec<&str> = out.lines().collect();
    lines.sort_unstable();
    let wanted = ["[0] 0/0 of 3", "[0] end", "[1] 1/1 of 3", "[1] end", "[2] 2/2 of 3", "[2] end"];
    assert_eq!(lines, wanted);
    let err = text(&output.stderr);
    let mut lines: Vec<&str> = err.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] oops", "[1] oops", "[2] oops"]);
    let raw = run(&["-n", "2", "--raw", "--", "echo", "plain"]);
    assert_eq!(text(&raw.stdout), "plain\nplain\n");
}

/// A launcher that is killed leaves nothing that the next one does not remove.
#[test]
fn a_killed_launcher_leaves_no_files() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o700)).unwrap();
    let launch = |line: &str| {
        let mut command = warpwire(&["run", "-n", "2", "--raw", "--", "sh", "-c", line]);
        command.env("XDG_RUNTIME_DIR", folder.path()).env("TMPDIR", folder.path());
        command.stdout(Stdio::piped());
        command
    };
    // The ranks write the file as rank 0 would, and wait to be killed with their launcher.
    let line = "echo x > ${WARPWIRE_MASTER#file:}; echo ready; sleep 60";
    let mut killed = launch(line).spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(killed.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    killed.kill().unwrap();
    killed.wait().unwrap();
    let files = || -> Vec<_> {
        let inside = std::fs::read_dir(folder.path()).unwrap().flatten();
        inside.flat_map(|entry| std::fs::read_dir(entry.path()).unwrap().flatten()).collect()
    };
    assert_eq!(files().len(), 1, "{:?}", files());
    assert!(launch("true").status().unwrap().success());
    assert!(files().is_empty(), "{:?}", files());
}

#[test]
fn a_failed_rank_terminates_the_others() {
    let start = Instant::now();
    let line = "if [ $WARPWIRE_RANK = 1 ]; then exit 7; fi; sleep 60 & wait";
    let output = run(&["-n", "3", "--grace", "100ms", "--", "sh", "-c", line]);
    assert_eq!(output.status.code(), Some(7));
    let err = text(&output.stderr);
    assert!(err.contains("warpwire run: rank 1 exited with status 7"), "{err}");
    assert!(!err.contains("rank 0"), "{err}");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    let killed = run(&["-n", "2", "--grace", "10ms", "--", "sh", "-c", "kill -9 $$"]);
    assert_eq!(killed.status.code(), Some(137));
    assert!(text(&killed.stderr).contains("signal 9 (SIGKILL)"), "{}", text(&killed.stderr));
    // A rank that ignores SIGTERM is killed.
    let ignore_term_script =
        "trap '' TERM; [ $WARPWIRE_RANK = 0 ] && exit 1; while :; do sleep 1; done";
    let output = run(&["-n", "2", "--grace", "10ms", "--", "sh", "-c", ignore_term_script]);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn invalid_arguments_are_refused() {
    let missing = run(&["-n", "2", "--grace", "10ms", "--", "/no/such/program"]);
    assert_ne!(missing.status.code(), Some(0));
    let err = text(&missing.stderr);
    assert!(err.contains("cannot start /no/such/program"), "{err}");
    for wrong in [&["-n", "0", "--", "true"][..], &["-n", "2000", "--", "true"], &["-n", "2"]] {
        assert_eq!(run(wrong).status.code(), Some(2), "{wrong:?}");
    }
}

/// Starts ranks that print their process id and sleep.
fn waiting_ranks() -> (std::process::Child, Vec<u32>) {
    let mut child = warpwire(&["run", "-n", "2", "--", "sh", "-c", "echo $$; exec sleep 60"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let number = |line: std::io::Result<String>| {
        line.unwrap().split_whitespace().last().unwrap().parse().unwrap()
    };
    let ranks = lines.take(2).map(number).collect();
    (child, ranks)
}

fn all_gone(ranks: &[u32]) -> bool {
    let start = Instant::now();
    let lives = |rank: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{rank}/stat")).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
    };
    while ranks.iter().any(lives) {
        if start.elapsed() > Duration::from_secs(10) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

#[test]
fn signals_reach_the_ranks() {
    for (signal, code) in [(libc_signal::TERM, Some(143)), (libc_signal::INT, Some(130))] {
        let (mut child, ranks) = waiting_ranks();
        libc_signal::send(child.id(), signal);
        let status = child.wait().unwrap();
        assert_eq!(status.code(), code);
        assert!(all_gone(&ranks));
    }
    // When the launcher is killed, so are the ranks.
    let (mut child, ranks) = waiting_ranks();
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    assert!(all_gone(&ranks));
}

mod libc_signal {
    pub const TERM: &str = "TERM";
    pub const INT: &str = "INT";

    pub fn send(pid: u32, signal: &str) {
        let sent =
            std::process::Command::new("kill").args(["-s", signal, &pid.to_string()]).status();
        assert!(sent.unwrap().success());
    }
}

#[test]
fn mp_measures_and_verifies() {
    for test in ["pingpong", "putget", "sendrecv"] {
        for (memory, link) in [("host", "auto"), ("sim:0", "udp")] {
            let words = ["mp", test, "-s", "8,9000", "-n", "20", "--mem", memory, "--link", link];
            let output = warpwire(&[&words[..], &["--json"]].concat()).output().unwrap();
            assert_eq!(output.status.code(), Some(0), "{test}: {}", text(&output.stderr));
            let report: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(report["test"], test);
            let rows = report["rows"].as_array().unwrap();
            assert_eq!(rows.len(), 2);
            for row in rows {
                assert_eq!(row["verified"], true);
                for figure in row["figures"].as_array().unwrap() {
                    assert!(figure["microseconds"].as_f64().unwrap() > 0.0, "{figure}");
                }
            }
        }
    }
    // All modes, with and without a compute kernel.
    for test in ["pingpong", "putget", "sendrecv"].into_iter().take(Effort::choose([1, 3, 3])) {
        let words = ["mp", test, "-s", "8,20000", "-n", "20", "--mem", "sim:0", "--kernel", "20us"];
        let output = warpwire(&[&words[..], &["--json"]].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{test}: {}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let names = report["rows"][1]["figures"].as_array().unwrap().iter();
        let names: Vec<&str> = names.map(|figure| figure["name"].as_str().unwrap()).collect();
        for mode in ["cpu", "stream", "graph", "kernel", "stream+kernel", "kernel+kernel"] {
            assert!(names.iter().any(|name| name.ends_with(mode)), "{test}: {names:?}");
        }
        let columns = if test == "putget" { 16 } else { 8 };
        assert_eq!(names.len(), columns, "{test}: {names:?}");
        assert_eq!(names.contains(&"get kernel+kernel"), test == "putget");
        // Only round trips have a baseline to compare with.
        assert!(report["baseline"]["kernel_us"].as_f64().unwrap() > 0.0, "{report}");
        let ratios = report["ratios"].as_array().unwrap();
        assert_eq!(ratios.len(), if test == "pingpong" { 3 } else { 0 }, "{ratios:?}");
    }
    let words = ["mp", "pingpong", "-s", "64", "-n", "10", "--mem", "sim:0", "--threads", "--json"];
    let output = warpwire(&words).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["rows"][0]["figures"].as_array().unwrap().len(), 4);
    let table = warpwire(&["mp", "putget", "-s", "64", "-n", "5"]).output().unwrap();
    let out = text(&table.stdout);
    assert!(out.contains("put cpu") && out.contains("get cpu"), "{out}");
    assert!(!out.contains("baseline"), "no device, no baseline: {out}");
}

#[test]
fn mp_refuses_invalid_arguments() {
    for wrong in [
        &["mp"][..],
        &["mp", "dance"],
        &["mp", "pingpong", "-s", "0"],
        &["mp", "pingpong", "-s", "2GiB"],
    ] {
        assert_eq!(warpwire(wrong).output().unwrap().status.code(), Some(2), "{wrong:?}");
    }
    for wrong in [&["-m", "stream"][..], &["--kernel", "5us"], &["--threads", "-m", "graph"]] {
        let output = warpwire(&[&["mp", "pingpong"], wrong].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
        assert!(text(&output.stderr).contains("give --mem sim:0"), "{}", text(&output.stderr));
    }
    let three = run(&["-n", "3", "--", env!("CARGO_BIN_EXE_warpwire"), "mp", "pingpong"]);
    assert_eq!(three.status.code(), Some(2));
    assert!(text(&three.stderr).contains("mp needs two ranks, not 3"));
    // A launcher's environment, but the other rank never starts.
    let mut alone = warpwire(&["mp", "pingpong", "--timeout", "200ms"]);
    let vars =
        [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")];
    let output = alone.envs(vars).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("1 of 2 did not join: rank 1"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn the_other_rank_names_the_dead_one() {
    // Rank 1 is killed in the middle of a long measurement.
    let line = "if [ $WARPWIRE_RANK = 1 ]; then \"$0\" mp pingpong -s 8 -n 100000000 & sleep 0.7; \
                kill -9 $!; exit 5; \
                else exec \"$0\" mp pingpong -s 8 -n 100000000; fi";
    let start = Instant::now();
    let program = env!("CARGO_BIN_EXE_warpwire");
    let output = run(&["-n", "2", "--grace", "10s", "--", "sh", "-c", line, program]);
    assert_ne!(output.status.code(), Some(0));
    let err = text(&output.stderr);
    assert!(err.contains("[0] error: ") && err.contains("rank 1 exited without leaving"), "{err}");
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
}
