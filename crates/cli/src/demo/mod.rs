//! `warpwire demo`: moves GPU memory over every path, and verifies it.

mod memory;
mod messages;
mod network;
mod table;

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use warpwire::mem::{self, Device, Discovery};
use warpwire::{Result, units};

use crate::output;

/// Move GPU memory over every path, and verify every byte
///
/// Finds the GPUs of this machine, prints which it uses and why, and moves memory between two of
/// them and the host on streams: filled by a kernel, copied, verified by the device and by the CPU.
/// Then writes GPU memory to that of another process, by RDMA over the software HCA, and has two
/// processes exchange messages sent by streams and by kernels. Without CUDA, two simulated GPUs are
/// used. Takes a few seconds.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Device to use (cuda:N or sim:N); give it twice for source and destination
    #[arg(long = "device", value_name = "DEVICE")]
    devices: Vec<String>,

    /// Bytes per transfer, 4KiB to 1GiB
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = size)]
    size: u64,

    /// Print JSON: {"devices": […], "missing": […], "stages": […], "verified": true}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire demo
  warpwire demo --device cuda:0 --device sim:0    from a real GPU to a simulated one
  WARPWIRE_SIM=copy_delay=1ms warpwire demo       a slow simulated GPU
  warpwire demo --json | jq .stages";

/// Max of `--size`, so that the demo stays short.
const MAX_SIZE: u64 = 1 << 30;

fn size(text: &str) -> std::result::Result<u64, String> {
    let size = units::parse_bytes(text).map_err(|error| error.to_string())?;
    if (4096..=MAX_SIZE).contains(&size) {
        return Ok(size);
    }
    Err("the size must be between 4KiB and 1GiB".to_owned())
}

/// Result of one stage.
#[derive(Serialize)]
pub(crate) struct Stage {
    what: String,
    from: String,
    to: String,
    /// Bytes per repetition.
    bytes: u64,
    /// Repetitions.
    times: u32,
    /// Mean time of one repetition.
    nanoseconds: u64,
    verified: bool,
    /// Why the stage was skipped.
    skipped: Option<String>,
    /// Why the stage failed.
    failed: Option<String>,
}

impl Stage {
    fn new(what: &str, from: impl ToString, to: impl ToString, bytes: u64) -> Self {
        let (what, from, to) = (what.to_owned(), from.to_string(), to.to_string());
        Self {
            what,
            from,
            to,
            bytes,
            times: 1,
            nanoseconds: 0,
            verified: false,
            skipped: None,
            failed: None,
        }
    }

    fn took(mut self, total: Duration, times: u32) -> Self {
        self.times = times;
        self.nanoseconds = u64::try_from(total.as_nanos()).unwrap_or(u64::MAX) / u64::from(times);
        self
    }

    fn skipped(mut self, why: impl Into<String>) -> Self {
        self.skipped = Some(why.into());
        self
    }

    fn failed(mut self, why: impl Into<String>) -> Self {
        self.failed = Some(why.into());
        self
    }

    /// Verified, or skipped.
    fn is_ok(&self) -> bool {
        self.verified || self.skipped.is_some()
    }

    fn checked(mut self, verified: bool) -> Self {
        self.verified = verified;
        self
    }
}

#[derive(Serialize)]
struct Outcome {
    devices: Vec<String>,
    missing: Vec<Missing>,
    stages: Vec<Stage>,
    verified: bool,
}

#[derive(Serialize)]
struct Missing {
    backend: mem::Backend,
    why: String,
    fix: Option<String>,
}

pub(crate) fn run(arguments: &Arguments) -> std::result::Result<ExitCode, String> {
    let found = mem::discover();
    let device_pair = choose(&found, &arguments.devices).map_err(|error| error.to_string())?;
    if !arguments.json {
        output::print(&introduction(&found, &device_pair))?;
    }
    let spinner = output::spinner();
    let stages = memory::stages(&device_pair, arguments.size, &spinner).map(|mut stages| {
        spinner.set_message("network");
        stages.extend(network::stages(&device_pair, arguments.size));
        spinner.set_message("messages");
        stages.extend(messages::stages(&device_pair[0], arguments.size));
        stages
    });
    spinner.finish_and_clear();
    let stages = match stages {
        Ok(stages) => stages,
        Err(error) => {
            eprintln!("error: {error}");
            return Ok(ExitCode::FAILURE);
        }
    };
    let verified = stages.iter().all(Stage::is_ok);
    if arguments.json {
        let missing = found.missing.iter().map(|(backend, error)| Missing {
            backend: *backend,
            why: error.reason().to_owned(),
            fix: error.advice().map(str::to_owned),
        });
        let devices = device_pair.iter().map(Device::label).collect();
        output::print_json(&Outcome { devices, missing: missing.collect(), stages, verified })?;
    } else {
        output::print(&table::render(&stages))?;
        output::print(verdict(&stages))?;
    }
    Ok(if verified { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The last line: wrong data is worse than stages that could not run.
fn verdict(stages: &[Stage]) -> &'static str {
    let is_wrong = |stage: &Stage| !stage.is_ok() && stage.failed.is_none();
    match (stages.iter().all(Stage::is_ok), stages.iter().any(is_wrong)) {
        (true, _) => "\nverified\n",
        (false, true) => "\nWRONG DATA: see the table\n",
        (false, false) => "\nFAILED: a stage could not run; see the table\n",
    }
}

/// The two devices: the requested ones, else the first two of the best backend, or the same one
/// twice.
fn choose(found: &Discovery, requested: &[String]) -> Result<[Device; 2]> {
    let mut requested = requested.iter();
    let first = match requested.next() {
        Some(label) => mem::open(label)?,
        None => found.devices.first().cloned().map_or_else(|| mem::open("sim:0"), Ok)?,
    };
    let second = match requested.next() {
        Some(label) => mem::open(label)?,
        None => {
            let mut others = found.devices_of(first.info().backend).into_iter();
            others.find(|other| *other != first).unwrap_or_else(|| first.clone())
        }
    };
    Ok([first, second])
}

fn introduction(found: &Discovery, device_pair: &[Device; 2]) -> String {
    let mut text = String::new();
    for device in &found.devices {
        let info = device.info();
        let memory = units::bytes(info.total_memory);
        text += &format!("found    {:<8} {}, {memory}\n", info.label(), info.name);
    }
    for (backend, error) in &found.missing {
        text += &format!("absent   {backend:<8} {}\n", error.reason());
    }
    let [first, second] = device_pair;
    text += &match first == second {
        true => {
            format!("using    {} for both ends: it is the only one of its kind\n\n", first.label())
        }
        false => format!("using    {} and {}\n\n", first.label(), second.label()),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_that_could_not_run_has_no_wrong_data() {
        let stage = || Stage::new("copy", "a", "b", 8);
        let (right, wrong) = (stage().checked(true), stage().checked(false));
        let (failed, skipped) = (stage().failed("no /proc"), stage().skipped("no GPU"));
        assert_eq!(verdict(&[right, skipped]), "\nverified\n");
        assert!(verdict(&[stage().checked(true), failed]).contains("could not run"));
        assert!(verdict(&[stage().failed("no /proc"), wrong]).contains("WRONG DATA"));
    }
}
