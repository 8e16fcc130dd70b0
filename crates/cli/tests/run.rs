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
        let kinds = [("host", "auto"), ("sim:0", "udp")];
        for (memory, link) in kinds.into_iter().take(Effort::choose([1, 2, 2])) {
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
        // The simulated GPU has no baseline: it would bound nothing.
        assert!(report["baseline"].is_null(), "{report}");
        assert!(report["machine"]["date"].is_string(), "{report}");
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
    assert!(out.contains("\n# direct access: "), "{out}");
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
    assert!(text(&three.stderr).contains("mp pingpong needs two ranks, not 3"));
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
    let line = "if [ $WARPWIRE_RANK = 1 ]; then \"$0\" mp pingpong -s 8 -n 100000000 & sleep 3; \
                kill -9 $!; exit 5; \
                else exec \"$0\" mp pingpong -s 8 -n 100000000; fi";
    let start = Instant::now();
    let program = env!("CARGO_BIN_EXE_warpwire");
    let output = run(&["-n", "2", "--grace", "10s", "--", "sh", "-c", line, program]);
    assert_ne!(output.status.code(), Some(0));
    let err = text(&output.stderr);
    assert!(err.contains("[0] error: ") && err.contains("rank 1 exited without leaving"), "{err}");
    let limit = testkit::deadline(Duration::from_secs(30));
    assert!(start.elapsed() < limit, "{:?}", start.elapsed());
}

#[test]
fn collectives_in_the_shape_of_nccl_tests() {
    for (test, more, root) in [
        ("all_reduce", &["-d", "int32", "-o", "min"][..], "-1"),
        ("all_gather", &["-d", "double"], "-1"),
        ("reduce_scatter", &["-d", "int32", "-o", "max"], "-1"),
        ("all_to_all", &["--mem", "sim:0"], "-1"),
        ("broadcast", &["-r", "1"], "1"),
    ]
    .into_iter()
    .take(Effort::choose([2, 5, 5]))
    {
        let words = ["mp", test, "-n", "2", "-b", "16", "-e", "4K", "-f", "4", "--iters", "5"];
        let words = [&words[..], more].concat();
        let output = warpwire(&words).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let table = text(&output.stdout);
        let heading = table.lines().find(|line| line.contains("#wrong")).unwrap();
        let heading: Vec<&str> = heading.split_whitespace().skip(1).collect();
        assert_eq!(heading.join(" "), "size count type redop root time algbw busbw #wrong");
        let rows: Vec<Vec<&str>> = table
            .lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| line.split_whitespace().collect())
            .collect();
        let column = |at: usize| rows.iter().map(|row| row[at]).collect::<Vec<_>>();
        assert_eq!(column(0), ["16", "64", "256", "1024", "4096"], "{table}");
        assert!(column(4).iter().all(|found| *found == root), "{table}");
        assert!(column(8).iter().all(|wrong| *wrong == "0"), "{table}");
        assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
        assert!(table.contains("# Out of bounds values : 0 OK"), "{table}");
    }
    let words = ["mp", "all_reduce", "-n", "4", "-e", "64K", "-f", "8", "--mem", "sim:0", "--json"];
    let output = warpwire(&words).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["ranks"], 4);
    for row in report["rows"].as_array().unwrap() {
        let figure = |name: &str| row[name].as_f64().unwrap();
        assert_eq!(row["wrong"], 0, "{row}");
        assert!((figure("busbw_gb_s") / figure("algbw_gb_s") - 1.5).abs() < 1e-9, "{row}");
    }
}

#[test]
fn collectives_that_are_not_possible() {
    for (wrong, why) in [
        (&["all_reduce", "-b", "64", "-e", "8"][..], "-b is larger than -e"),
        (&["all_reduce", "-f", "1"], "-f"),
        (&["all_reduce", "-d", "complex"], "uint64"),
        (&["broadcast", "-n", "2", "-r", "2"], "--root is 0 to 1"),
        (&["all_reduce", "-n", "0"], "1..=256"),
        (&["all_reduce", "-e", "2", "-b", "1"], "make -e larger"),
        (&["all_gather", "-n", "3", "-e", "8"], "the least is 12 bytes, 3 x float"),
        (&["pingpong", "-m", "stream"], "--mem sim:0"),
    ] {
        let output = warpwire(&[&["mp"], wrong].concat()).output().unwrap();
        let found = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}: {found}");
        assert!(found.contains(why), "{wrong:?}: {found}");
        assert_eq!(found.matches("error:").count(), 1, "{found}");
    }
}

#[test]
fn programs_need_no_separator() {
    let output = run(&["-n", "2", "--raw", "sh", "-c", "printf '%s\\n' \"$0 $1\"", "-n", "--json"]);
    assert_eq!(text(&output.stdout), "-n --json\n-n --json\n");
    let output = run(&["-n", "2", "--raw", "--", "echo", "--", "-n", "x"]);
    assert_eq!(text(&output.stdout), "-- -n x\n-- -n x\n");
    let unknown = run(&["--nonsense", "true"]);
    assert_eq!(unknown.status.code(), Some(2), "{}", text(&unknown.stderr));
}
