//! The built command: `warpwire copy`, on the simulated GPU.

use std::process::Output;

use serde_json::Value;

use crate::{stderr, stdout};

fn run(arguments: &[&str]) -> Output {
    run_with(arguments, &[])
}

fn run_with(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = crate::warpwire();
    command.arg("copy").args(arguments).envs(environment.iter().copied()).output().unwrap()
}

/// Standard output of a run that must succeed.
fn text(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", stderr(&output));
    stdout(&output)
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&text(arguments)).unwrap()
}

/// Words of the lines whose first word is `first`.
fn rows<'a>(text: &'a str, first: &str) -> Vec<Vec<&'a str>> {
    let words = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    words.filter(|words| words.first() == Some(&first)).collect()
}

fn assert_positive(value: &Value) {
    assert!(value.as_f64().is_some_and(|number| number > 0.0), "{value}");
}

const SIM: [&str; 2] = ["-d", "sim:0"];

fn on_sim<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    [arguments, &SIM].concat()
}

#[test]
fn bw_shows_both_directions_and_the_engine() {
    let text = text(&on_sim(&["bw", "-s", "64KiB", "-w", "50", "-r", "50"]));
    for direction in ["write", "read"] {
        let row = &rows(&text, direction)[0];
        assert_eq!(row[1], "BW:", "{text}");
        assert!(row[2].parse::<f64>().unwrap() > 0.0 && row[3] == "GB/s", "{text}");
        assert!(row.contains(&"engine:") && row.contains(&"ratio:"), "{text}");
    }
    assert!(text.contains("# window: memfd, cached"), "{text}");
    assert!(text.contains("# simulated"), "{text}");
}

#[test]
fn bw_prints_json_of_an_unaligned_copy() {
    let arguments = [
        "bw", "-s", "1MiB", "-c", "4099", "-o", "13", "-w", "20", "-r", "20", "-a", "vmm", "--json",
    ];
    let outcome = json(&on_sim(&arguments));
    assert_eq!((&outcome["bytes"], &outcome["setting"]["memory"]), (&4099.into(), &"vmm".into()));
    for direction in ["write", "read"] {
        for rate in ["window_gb_s", "engine_gb_s", "best_gb_s", "ratio"] {
            assert_positive(&outcome[direction][rate]);
        }
        assert!(outcome[direction]["best_method"].is_string());
    }
}

#[test]
fn lat_has_a_row_for_each_size_and_direction() {
    let text = text(&on_sim(&["lat", "-s", "1KiB", "-w", "30", "-r", "30"]));
    for test in ["copy_to_window", "copy_from_window"] {
        let rows = rows(&text, test);
        let sizes: Vec<u64> = rows.iter().map(|row| row[1].parse().unwrap()).collect();
        assert_eq!(sizes, [4, 8, 16, 32, 64, 128, 256, 512, 1024]);
        for row in rows {
            // best, window and engine: median and min of each; method; ratio
            assert_eq!(row.len(), 2 + 6 + 2, "{row:?}");
            let (median, min): (f64, f64) = (row[2].parse().unwrap(), row[3].parse().unwrap());
            assert!(min <= median && min > 0.0, "{row:?}");
        }
    }
}

#[test]
fn lat_shows_routines_the_agent_and_unaligned_copies() {
    let arguments = [
        "lat",
        "-s",
        "100",
        "-w",
        "20",
        "-r",
        "20",
        "--routines",
        "--agent",
        "--odd",
        "-C",
        "--json",
    ];
    let outcome = json(&on_sim(&arguments));
    let rows = outcome["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4 * 6, "4 tests of 6 sizes");
    for row in rows {
        let cells = row["cells"].as_array().unwrap();
        let names: Vec<&str> = cells.iter().map(|cell| cell["column"].as_str().unwrap()).collect();
        assert_eq!(names.first(), Some(&"best"));
        assert!(names.contains(&"scalar") && names.ends_with(&["engine", "agent"]), "{names:?}");
        for cell in cells {
            assert_positive(&cell["median_us"]);
            assert_positive(&cell["calls"]);
        }
        assert_positive(&row["ratio"]);
    }
    let odd = rows.iter().filter(|row| row["odd"] == true && row["test"] == "copy_from_window_odd");
    assert_eq!(odd.count(), 6);
}

#[test]
fn api_times_open_and_close_by_size() {
    let arguments = on_sim(&["api", "-s", "256KiB", "-n", "20", "-w", "2"]);
    let text = text(&arguments);
    for size in ["65536", "131072", "262144"] {
        assert_eq!(rows(&text, size)[0].len(), 3, "{text}");
    }
    let bins = text.lines().filter(|line| line.starts_with('['));
    let counts = bins.map(|line| line.split_whitespace().last().unwrap().parse::<u32>().unwrap());
    let counts: Vec<u32> = counts.collect();
    assert_eq!((counts.len(), counts.iter().sum()), (10, 20), "{text}");
    let outcome = json(&[&arguments[..], &["--json"]].concat());
    assert_positive(&outcome["first_us"]);
    assert_eq!(outcome["rows"][2]["open"]["calls"], 20);
    assert_eq!(outcome["rows"][0]["histogram"].as_array().unwrap().len(), 10);
}

#[test]
fn pingpong_compares_the_window_with_a_pinned_word() {
    for size in ["4", "8"] {
        let arguments = on_sim(&["pingpong", "-s", size, "-t", "60", "-w", "5"]);
        let text = text(&arguments);
        for name in ["window:", "pinned:"] {
            let row = rows(&text, name)[0].join(" ");
            assert!(row.contains("Round-trip latency per iteration is (min)"), "{text}");
        }
        let outcome = json(&[&arguments[..], &["--json"]].concat());
        assert_eq!(outcome["window"]["calls"], 60);
        assert_positive(&outcome["pinned"]["min_us"]);
        assert_positive(&outcome["ratio"]);
    }
}

#[test]
fn plan_shows_what_was_measured_or_set() {
    let measured = text(&on_sim(&["plan", "--recalibrate"]));
    assert!(
        measured.contains("writes through the window") && measured.contains("4 KiB"),
        "{measured}"
    );
    let set = run_with(&on_sim(&["plan"]), &[("WARPWIRE_COPY", "write=64KiB,read=512")]);
    assert!(stdout(&set).contains("up to 64 KiB"), "{}", stdout(&set));
    assert!(json(&on_sim(&["plan", "--json"]))["plan"].is_object());
    let wrong = run_with(&on_sim(&["plan"]), &[("WARPWIRE_COPY", "write=much")]);
    assert_eq!(wrong.status.code(), Some(2), "{}", stderr(&wrong));
}

#[test]
fn sanity_passes_with_a_reason_for_each_waived_check() {
    let text = text(&on_sim(&["sanity"]));
    let (mut running, mut ended, mut waived) = (0, 0, 0);
    for line in text.lines().filter_map(|line| line.strip_prefix("&&&& ")) {
        let (word, rest) = line.split_once(' ').unwrap();
        match word {
            "RUNNING" => running += 1,
            "PASSED" => ended += 1,
            "WAIVED" => {
                waived += 1;
                ended += 1;
                assert!(rest.contains(" (") && rest.ends_with(')'), "without a reason: {line}");
            }
            _ => unreachable!("{line}"),
        }
    }
    assert!(running >= 37 && running == ended, "{running} started, {ended} finished");
    let totals =
        format!("Total: {running}, Passed: {}, Failed: 0, Waived: {waived}", ended - waived);
    assert!(text.contains(&totals), "{text}");
    assert!(text.contains("List of waived tests:"), "{text}");
}

#[test]
fn sanity_lists_and_selects() {
    let list = text(&["sanity", "-l"]);
    assert!(list.lines().count() >= 37, "{list}");
    assert!(!list.contains("&&&&"));
    let summary = json(&on_sim(&[
        "sanity",
        "-t",
        "freed_memory_stays_readable",
        "-t",
        "a_forked_child_cannot_touch_the_window_vmm",
        "--json",
    ]));
    assert_eq!((&summary["total"], &summary["passed"]), (&4.into(), &4.into()), "{summary}");
    let verbose = text(&on_sim(&["sanity", "-v", "-s", "-t", "single_words_are_atomic"]));
    assert!(verbose.contains(" in ") && verbose.contains("atomics"), "{verbose}");
    assert!(!verbose.contains("Total:"), "{verbose}");
}

#[test]
fn sanity_fails_when_the_device_does() {
    let arguments = on_sim(&["sanity", "-t", "the_cpu_sees_what_the_device_wrote_plain"]);
    let output = run_with(&arguments, &[("WARPWIRE_SIM", "fail=launch:1")]);
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    let text = stdout(&output);
    assert!(text.contains("&&&& FAILED the_cpu_sees_what_the_device_wrote_plain ("), "{text}");
    assert!(text.contains("Failed: 1") && text.contains("configured to fail launch:1"), "{text}");
}

#[test]
fn the_default_device_is_cuda_else_simulated() {
    let outcome = json(&["bw", "-s", "4KiB", "-w", "5", "-r", "5", "--json"]);
    let device = outcome["setting"]["device"].as_str().unwrap();
    let no_cuda = outcome["setting"]["no_cuda"].as_str();
    assert!(device == "cuda:0" || (device == "sim:0" && no_cuda.is_some()), "{device} {no_cuda:?}");
}

#[test]
fn gdrcopys_names_are_accepted() {
    for kind in ["cuMemAlloc", "cuMemCreate"] {
        text(&on_sim(&["bw", "-s", "4KiB", "-w", "5", "-r", "5", "-a", kind, "-M", "cache"]));
    }
    text(&on_sim(&["lat", "-s", "4", "-w", "5", "-r", "5", "-c"]));
}

#[test]
fn bad_input_is_a_usage_error() {
    for (arguments, expected) in [
        (vec!["bw", "-s", "0", "-d", "sim:0"], "the size is zero"),
        (vec!["api", "-s", "0"], "the size is zero"),
        (vec!["lat", "-s", "0"], "between 4 and 64MiB"),
        (vec!["lat", "-s", "65MiB"], "between 4 and 64MiB"),
        (vec!["bw", "-s", "many"], "64KiB"),
        (vec!["bw", "-s", "900TiB", "-d", "sim:0"], "give a smaller size"),
        (vec!["api", "-s", "900TiB", "-d", "sim:0"], "give a smaller size"),
        (vec!["bw", "-s", "4KiB", "-c", "5KiB", "-d", "sim:0"], "give a larger --size"),
        (vec!["bw", "-s", "4KiB", "-o", "4KiB", "-d", "sim:0"], "give a larger --size"),
        (vec!["bw", "-w", "0"], "at least 1"),
        (vec!["bw", "-d", "tpu:0"], "cuda:N or sim:N"),
        (vec!["sanity", "-d", "sim:99"], "gpus=100"),
        (vec!["bw", "-d", "99"], "cuda:99"),
        (vec!["bw", "-a", "managed"], "plain, vmm or pool"),
        (vec!["bw", "-M", "fast"], "default, wc, cache or device"),
        (vec!["pingpong", "-s", "16"], "4 or 8 bytes"),
        (vec!["sanity", "-t", "everything", "-d", "sim:0"], "sanity -l"),
        (vec!["fly"], "unrecognized subcommand"),
    ] {
        let output = run(&arguments);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        // Without a driver, the error is about that instead of the device number.
        let absent = message.contains("no CUDA driver");
        assert!(message.contains(expected) || absent, "{arguments:?}: {message}");
        assert!(stdout(&output).is_empty(), "{arguments:?}");
    }
}

#[test]
fn missing_platform_features_fail_with_a_reason() {
    for (arguments, environment, expected) in [
        (["bw", "-M", "device"], [("WARPWIRE_WINDOW", "")], "maps it as cached"),
        (["bw", "-M", "default"], [("WARPWIRE_WINDOW", "rm")], "no path of that name"),
        (["bw", "-M", "default"], [("WARPWIRE_SIM", "memory=64KiB")], "in all"),
    ] {
        let output = run_with(&on_sim(&arguments), &environment);
        assert_ne!(output.status.code(), Some(0), "{arguments:?}");
        assert!(stderr(&output).contains(expected), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn help_has_examples() {
    for tool in ["bw", "lat", "api", "pingpong", "sanity", "plan"] {
        let help = text(&[tool, "--help"]);
        assert!(help.contains(&format!("Examples:\n  warpwire copy {tool}")), "{help}");
    }
    assert!(!text(&["--help"]).contains("sanity-child"));
}
