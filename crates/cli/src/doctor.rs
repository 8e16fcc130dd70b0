//! `warpwire doctor`: checks of this machine, and verdicts per capability.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use warpwire::host::System;
use warpwire_doctor::{Evidence, Report, registrations_to_text, try_registrations};

use crate::output;
use crate::verbs::Programs;

/// Check what this machine can do, what prevents it, and the fix
///
/// Reads /sys, /proc and /dev, and runs safe probes: a small allocation on each GPU, its export as
/// a dma-buf, a burst of datagrams to itself. Prints a line per check (PASS, WARN, FAIL or SKIP,
/// the subject, the reason, and the fix) and a verdict per capability.
///
/// Needs no root; root sees a little more (PCIe access control). The exit status is 1 only if
/// nothing can work: neither CUDA nor the simulated GPU.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Print JSON: {"checks": […], "verdicts": […]}
    #[arg(long)]
    json: bool,

    /// Check a recorded machine: a directory with its sys, proc and dev, and the results of its
    /// probes in probes.json
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,

    /// Register every kind of memory of this machine in every way, transfer data through it, and
    /// print the path each registration took and why; with --json: [{"memory": …, "by": …,
    /// "outcome": "works", "path": …, "why": […]}, …]
    #[arg(long, conflicts_with = "root")]
    probe_registration: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire doctor
  warpwire doctor | grep -E 'WARN|FAIL'               only the problems
  warpwire doctor --json | jq '.verdicts'             for a script
  warpwire doctor --root ./recorded                   a machine recorded earlier
  warpwire doctor --probe-registration                how each kind of memory can be registered";

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
        if arguments.root.is_none() {
            output::print(&format!("\nsoftware HCA:\n{}", Programs::here().text()))?;
        }
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

/// This machine, or the recorded one of `--root`.
pub(crate) fn system_at(root: Option<&PathBuf>) -> Result<System, String> {
    match root {
        Some(root) => System::at(root).map_err(|error| error.to_string()),
        None => Ok(System::live()),
    }
}
