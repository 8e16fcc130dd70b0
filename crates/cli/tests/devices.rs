//! The built command: `warpwire devices`.

use std::process::Output;

use crate::{stderr, stdout};

fn run(arguments: &[&str], library: Option<&str>) -> Output {
    let mut command = crate::warpwire();
    command.arg("devices").args(arguments).env_remove("LD_PRELOAD");
    command.env_remove("LD_LIBRARY_PATH");
    if let Some(library) = library {
        command.env("WARPWIRE_IBVERBS", library);
    }
    command.output().unwrap()
}

const MISSING: &str = "libibverbs-that-is-not-there.so.1";

#[test]
fn help_devices() {
    insta::assert_snapshot!(stdout(&run(&["--help"], None)));
}

#[test]
fn without_the_library_it_says_what_to_install_and_lists_the_software_device() {
    let output = run(&[], Some(MISSING));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    insta::assert_snapshot!(stdout(&output));
}

#[test]
fn without_the_library_json_has_the_reason() {
    let output = run(&["--json"], Some(MISSING));
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["devices"], serde_json::json!([]));
    assert!(value["unavailable"]["fix"].as_str().unwrap().contains("apt install"), "{value}");
    assert_eq!(value["software"]["name"], "soft");
    let programs = &value["software"]["programs"];
    assert!(programs["library"].is_null() && programs["why"][0].is_string(), "{value}");
}

#[test]
fn a_library_without_the_symbols_is_reported() {
    let output = run(&[], Some("libc.so.6"));
    assert!(stdout(&output).contains("has no symbol ibv_get_device"), "{}", stdout(&output));
}

#[test]
fn the_software_device_can_be_listed_alone() {
    let text = stdout(&run(&["soft"], None));
    assert!(text.starts_with("soft: ") && !text.contains("hardware:"), "{text}");
}

#[test]
fn an_unknown_device_is_an_error() {
    let output = run(&["mlx9_9"], Some(MISSING));
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("is not installed"), "{}", stderr(&output));
    let output = run(&["mlx9_9"], None);
    assert!([Some(1), Some(2)].contains(&output.status.code()), "{}", stderr(&output));
    assert!(stdout(&output).is_empty());
}

#[test]
fn this_machine_is_listed_with_any_hardware() {
    let output = run(&["-v"], None);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(
        stdout(&output).contains("\nsoft: ") || stdout(&output).starts_with("soft: "),
        "{}",
        stdout(&output)
    );
}
