//! Demo stages in which the GPU, not the CPU, triggers messages between two processes.

use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use warpwire::mem::Device;

use super::Stage;

/// Round trips. Kernels of two processes time-slice a GPU, some milliseconds each, so few are
/// enough.
const MESSAGES: u32 = 16;
/// Max size of a message.
const MAX_SIZE: u64 = 64 << 10;

/// Mode of `warpwire mp`, and its description.
const MODES: [(&str, &str); 2] =
    [("stream", "message ordered by a stream"), ("kernel", "message posted from a kernel")];

/// Launchers' variables, removed so that `mp` starts its own two ranks.
const RANKS: [&str; 5] =
    ["WARPWIRE_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];

/// Messages between two processes with memory of one device, sent by streams and posted by kernels.
pub(super) fn stages(device: &Device, size: u64) -> Vec<Stage> {
    let (label, size) = (device.label(), size.min(MAX_SIZE));
    let outcome = run_pingpong(&label, size);
    let stage = |(mode, what): (&str, &str)| {
        let stage = Stage::new(what, &label, format!("{label}, peer"), size);
        match outcome.as_ref().map(|report| time_of(report, mode)) {
            Ok(Some(each)) => stage.took(each * MESSAGES, MESSAGES).checked(true),
            Ok(None) => stage.failed("`warpwire mp` printed no figure"),
            Err(why) => stage.failed(why.clone()),
        }
    };
    MODES.map(stage).into()
}

/// Runs `warpwire mp pingpong`, which verifies the data; returns its JSON report.
fn run_pingpong(label: &str, size: u64) -> Result<Value, String> {
    let cannot = |why: String| format!("cannot run two ranks: {why}");
    let program = std::env::current_exe().map_err(|why| cannot(why.to_string()))?;
    let modes = MODES.map(|(mode, _)| mode).join(",");
    let (size, count) = (size.to_string(), MESSAGES.to_string());
    let mut command = Command::new(program);
    for variable in RANKS {
        command.env_remove(variable);
    }
    command.args(["mp", "pingpong", "--json", "--no-baseline", "--timeout", "30s"]);
    command.args(["--mem", label, "--mode", &modes, "--size", &size, "--iterations", &count]);
    let output = command.stdin(Stdio::null()).output().map_err(|why| cannot(why.to_string()))?;
    if !output.status.success() {
        let stderr_text = String::from_utf8_lossy(&output.stderr);
        let last =
            stderr_text.lines().find(|line| line.contains("error")).unwrap_or("no error message");
        return Err(cannot(last.trim().to_owned()));
    }
    serde_json::from_slice(&output.stdout).map_err(|why| cannot(why.to_string()))
}

/// Time of one message in a mode; `None` if the row was not verified.
fn time_of(report: &Value, mode: &str) -> Option<Duration> {
    let row = report["rows"].get(0).filter(|row| row["verified"] == true)?;
    let figure = row["figures"].as_array()?.iter().find(|figure| figure["name"] == mode)?;
    let microseconds = figure["microseconds"].as_f64().filter(|time| time.is_finite())?;
    Some(Duration::from_nanos((microseconds * 1e3) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_figures_of_verified_rows_count() {
        let figures = serde_json::json!([{ "name": "stream", "microseconds": 2.5 }]);
        let report = |verified: bool| {
            let rows = serde_json::json!([{ "verified": verified, "figures": figures }]);
            serde_json::json!({ "rows": rows })
        };
        assert_eq!(time_of(&report(true), "stream"), Some(Duration::from_nanos(2500)));
        assert_eq!(time_of(&report(true), "kernel"), None);
        assert_eq!(time_of(&report(false), "stream"), None);
        assert_eq!(time_of(&serde_json::json!({ "rows": [] }), "stream"), None);
    }
}
