//! `warpwire doctor`

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use warpwire::host::System;
use warpwire_doctor::{Evidence, Report, registrations_to_text, try_registrations};

use crate::output;

/// Say what this machine can do, what stops it, and the fix
///
/// Reads /sys, /proc and /dev, and tries what is safe to try: a small allocation on each GPU, its export
/// as a dma-buf, a burst of datagrams to itself. Prints a line per check (PASS, WARN, FAIL or SKIP, what
/// was looked at, why, and the fix) and ends with a verdict per capability.
///
/// Needs no root, though root sees a little more (PCIe access control). Ends with status 1 only if
/// nothing can work: neither CUDA nor the simulated GPU.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Print JSON: {"checks": […], "verdicts": […]}
    #[arg(long)]
    json: bool,

    /// Judge a recorded machine: a folder that holds its sys, proc and dev, and what was tried on it in
    /// probes.json
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,

    /// Register every sort of memory of this machine in every way, with data through it, and say which path each took
    /// and why; with --json: [{"memory": …, "by": …, "outcome": "works", "path": …, "why": […]}, …]
    #[arg(long, conflicts_with = "root")]
    probe_registration: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire doctor
  warpwire doctor | grep -E 'WARN|FAIL'               only what could be better
  warpwire doctor --json | jq '.verdicts'             for a script
  warpwire doctor --root ./recorded                   a machine recorded earlier
  warpwire doctor --probe-registration                how memory gets to the network here, and why so";

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    if arguments.probe_registration {
        return probe_registration(arguments.json);
    }
    let system = system_at(arguments.root.as_ref())?;
    let evidence = Evidence::gather(system).map_err(|error| error.to_string())?;
    let report = Report::of(&evidence);
    if arguments.json {
        output::print_json(&report)?;
    } else {
        output::print(&report.to_text(output::wants_colour(&std::io::stdout())))?;
    }
    Ok(if report.usable() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn probe_registration(json: bool) -> Result<ExitCode, String> {
    let trials = try_registrations().map_err(|error| error.to_string())?;
    match json {
        true => output::print_json(&trials)?,
        false => output::print(&registrations_to_text(&trials))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The running machine, or the recorded one that the user named.
pub(crate) fn system_at(root: Option<&PathBuf>) -> Result<System, String> {
    match root {
        Some(root) => System::at(root).map_err(|error| error.to_string()),
        None => Ok(System::live()),
    }
}
