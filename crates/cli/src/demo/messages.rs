//! The stages in which the GPU, and not the CPU, decides when to send: messages between two processes.

use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use warpwire::mem::Device;

use super::Stage;

/// How many messages go to and fro. Kernels of two processes share a GPU in turns, some milliseconds each.
const MESSAGES: u32 = 16;
/// The longest message.
const MAX_SIZE: u64 = 64 << 10;

/// Who sends, for `mp` and for people.
const MODES: [(&str, &str); 2] =
    [("stream", "message ordered by a stream"), ("kernel", "message posted from a kernel")];

/// By these a launcher would tell the ranks of the demonstration that they are others.
const RANKS: [&str; 5] =
    ["WARPWIRE_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];

/// Messages between two processes with memory of the same device, ordered by streams and posted from kernels.
pub(super) fn stages(device: &Device, size: u64) -> Vec<Stage> {
    let (label, size) = (device.label(), size.min(MAX_SIZE));
    let outcome = run_pingpong(&label, size);
    let stage = |(mode, what): (&str, &str)| {
        let stage = Stage::new(what, &label, format!("{label}, a process away"), size);
        match outcome.as_ref().map(|report| time_of(report, mode)) {
            Ok(Some(each)) => stage.took(each * MESSAGES, MESSAGES).checked(true),
            Ok(None) => stage.failed("it printed no figure"),
            Err(why) => stage.failed(why.clone()),
        }
    };
    MODES.map(stage).into()
}

/// Two ranks that compare what arrives: they fail if it is wrong.
fn run_pingpong(label: &str, size: u64) -> Result<Value, String> {
    let cannot = |why: String| format!("cannot run two ranks: {why}");
    let program = std::env::current_exe().map_err(|why| cannot(why.to_string()))?;
    let modes = MODES.map(|(mode, _)| mode).join(",");
    let (size, count) = (size.to_string(), MESSAGES.to_string());
    let mut command = Command::new(program);
    for variable in RANKS {
        command.env_remove(variable);
    }
    command.args(["mp", "pingpong", "--json", "--no-floors", "--timeout", "30s"]);
    command.args(["--mem", label, "--mode", &modes, "--size", &size, "--iterations", &count]);
    let output = command.stdin(Stdio::null()).output().map_err(|why| cannot(why.to_string()))?;
    if !output.status.success() {
        let stderr_text = String::from_utf8_lossy(&output.stderr);
        let last =
            stderr_text.lines().find(|line| line.contains("error")).unwrap_or("it said nothing");
        return Err(cannot(last.trim().to_owned()));
    }
    serde_json::from_slice(&output.stdout).map_err(|why| cannot(why.to_string()))
}

/// The time of one message in a mode, if it was compared.
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
        let report = |verified: bool| serde_json::json!({ "rows": [{ "verified": verified, "figures": figures }] });
        assert_eq!(time_of(&report(true), "stream"), Some(Duration::from_nanos(2500)));
        assert_eq!(time_of(&report(true), "kernel"), None);
        assert_eq!(time_of(&report(false), "stream"), None);
        assert_eq!(time_of(&serde_json::json!({ "rows": [] }), "stream"), None);
    }
}
