//! `warpwire doctor`: verdicts per capability, and checks of this machine.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use warpwire::host::System;
use warpwire_doctor::{
    Answer, Evidence, Report, TextStyle, Verdict, record, registrations_to_text, try_pair,
    try_registrations,
};

use crate::output::{self, Failure};

/// Check what this machine can do, what prevents it, and the fix
///
/// Prints verdicts first (GPUDirect RDMA, GPUDirect Async, CPU mappings, what NCCL, UCX and RDMA
/// programs would use), each with the reason and the fix, then the checks: PASS, WARN, FAIL, INFO
/// for facts, or SKIP for what does not apply. Checks that differ in the device only are one line
/// (mlx5_0…7).
///
/// Reads /sys, /proc and /dev, looks for libraries without loading them, and runs safe probes: a
/// small allocation on each GPU, its export as a dma-buf, a burst of datagrams to itself. What was
/// not tried is called "expected". Needs no root; root sees a little more (PCIe access control).
///
/// The exit status is 1 if nothing can work (neither CUDA nor the simulated GPU), or if a verdict
/// of --require is not YES.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Print JSON: {"verdicts": [{"word": …, "capability": …, "answer": "yes"|"no"|"partly",
    /// "text": …, "fix": …, "known_by": "tried"|"read"|"expected", "pairs": […]}], "nccl": {…},
    /// "checks": [{"group": …, "name": …, "status": …, "why": …, "fix": …, "subjects": […]}]}
    #[arg(long)]
    json: bool,

    /// Print the verdicts only, one line each
    #[arg(long, conflicts_with = "json")]
    brief: bool,

    /// Exit with status 1, and say why on standard error, unless these verdicts are YES: words
    /// separated by commas, listed below
    #[arg(long, value_name = "WORDS", value_delimiter = ',', value_parser = word)]
    require: Vec<&'static str>,

    /// Check a recorded machine: a file of --record, or a directory with its sys, proc and dev, and
    /// the results of its probes in probes.json
    #[arg(long, value_name = "FILE|DIR")]
    root: Option<PathBuf>,

    /// Write the files and probe results that a report depends on to this file, for --root. It has
    /// no host name, no user name, no IP or hardware address and no GPU UUID; it has names and
    /// versions of devices, interfaces and libraries, and LD_*, NCCL_* and UCX_TLS variables that
    /// decide which libraries are loaded
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,

    /// Write through this RDMA device into this GPU's memory and read it back, on a queue pair
    /// connected to another of the same device, and compare all bytes; `soft` is the software HCA,
    /// `sim:0` the simulated GPU. Status 1 if the data is wrong or had to be staged. With --json:
    /// {"nic": …, "gpu": …, "path": …, "direct": true, "staged": false, "why": […], "bytes": …, …}
    #[arg(long = "try", num_args = 2, value_names = ["NIC", "GPU"])]
    #[arg(conflicts_with_all = ["root", "record", "brief", "require", "nccl"])]
    pair: Option<Vec<String>>,

    /// Show which network NCCL would use, which plugins it would look for, where, and why it would
    /// not use Warpwire's; with --json: {"network": …, "plugins": […], "not_ours": …, …}
    #[arg(long, conflicts_with_all = ["brief", "record"])]
    nccl: bool,

    /// Register every kind of memory of this machine in every way, transfer data through it, and
    /// print the path each registration took and why; with --json: [{"memory": …, "by": …,
    /// "outcome": "works", "path": …, "why": […]}, …]
    #[arg(long, conflicts_with_all = ["root", "record", "brief", "require", "pair", "nccl"])]
    probe_registration: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire doctor
  warpwire doctor --brief                             verdicts only
  warpwire doctor | grep -E 'WARN|FAIL'               only the problems
  warpwire doctor --json | jq '.verdicts'             for a script
  warpwire doctor --brief --require udp,sim           for a Slurm prolog or a Kubernetes probe
  warpwire doctor --try soft sim:0                    write into a GPU and back
  warpwire doctor --try mlx5_0 cuda:0                 the same through a NIC
  warpwire doctor --nccl                              which network NCCL would use
  warpwire doctor --record machine.txt                to pass on
  warpwire doctor --root ./recorded                   a machine recorded earlier
  warpwire doctor --probe-registration                how each kind of memory can be registered

Words of --require, and what YES means:
  gpudirect  NICs can access GPU memory
  async      GPU streams and kernels can ring a NIC's doorbell
  windows    the CPU can map GPU memory, as gdrcopy does
  nccl       NCCL would use a plugin or RDMA devices, not TCP
  ucx        UCX is installed and could use RDMA
  verbs      RDMA programs would see a device, hardware or software
  rdma       there is RDMA hardware that this user can use
  gpu        CUDA works
  streams    CUDA streams can wait for memory and write to it, 64 bits wide
  udp        UDP works, with segmentation and receive offload
  sim        the simulated GPU works";

/// A word of `--require`.
fn word(text: &str) -> Result<&'static str, String> {
    let mut known = Verdict::WORDS.iter().map(|(word, _)| *word);
    known.clone().find(|word| *word == text).ok_or_else(|| {
        let known: Vec<&str> = known.by_ref().collect();
        format!("there is no verdict {text:?}; the words are: {}", known.join(", "))
    })
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    if arguments.probe_registration {
        return probe_registration(arguments.json);
    }
    let style =
        TextStyle { colour: output::wants_colour(&std::io::stdout()), width: output::width() };
    if let Some([nic, gpu]) = arguments.pair.as_deref() {
        return output::exit_result(try_one(nic, gpu, arguments.json, style));
    }
    let system = system_at(arguments.root.as_ref())?;
    if let Some(file) = &arguments.record {
        return write_recording(&system, file);
    }
    let evidence = Evidence::gather(system).map_err(|error| error.to_string())?;
    let report = Report::of(&evidence);
    match (arguments.json, arguments.nccl) {
        (true, true) => output::print_json(&report.nccl)?,
        (true, false) => output::print_json(&report)?,
        (false, true) => output::print(&report.nccl.to_text(style))?,
        (false, false) if arguments.brief => output::print(&report.brief(style))?,
        (false, false) => output::print(&report.render(style))?,
    }
    let met = requirements_met(&report, &arguments.require);
    Ok(if report.usable() && met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Whether the verdicts with these words are yes; prints those that are not to standard error.
fn requirements_met(report: &Report, words: &[&str]) -> bool {
    let required = words.iter().filter_map(|word| report.verdict(word));
    let missing: Vec<&Verdict> = required.filter(|found| found.answer != Answer::Yes).collect();
    for verdict in &missing {
        let fix = verdict.fix.as_ref().map_or(String::new(), |fix| format!("; fix: {fix}"));
        // Standard error may be closed; the exit status still reports the failure.
        let _ = writeln!(
            std::io::stderr(),
            "error: {} is required: {}{fix}",
            verdict.word,
            verdict.sentence()
        );
    }
    missing.is_empty()
}

fn try_one(nic: &str, gpu: &str, json: bool, style: TextStyle) -> Result<ExitCode, Failure> {
    let trial = try_pair(nic, gpu)?;
    let printed = match json {
        true => output::print_json(&trial),
        false => output::print(&trial.to_text(style)),
    };
    printed.map_err(Failure::Runtime)?;
    Ok(if trial.staged { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn write_recording(system: &System, file: &Path) -> Result<ExitCode, String> {
    let text = record(system).map_err(|error| error.to_string())?;
    std::fs::write(file, &text).map_err(|why| {
        format!("cannot write the recording to {}: {why}; give another path", file.display())
    })?;
    let lines = text.lines().count();
    let file = file.display();
    output::print(&format!(
        "recorded this machine in {file} ({lines} lines of text: read it before you pass it on)\n\
         `warpwire doctor --root {file}` and `warpwire topo --root {file}` show it\n"
    ))?;
    Ok(ExitCode::SUCCESS)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_lists_every_word_of_require() {
        for (name, meaning) in Verdict::WORDS {
            assert!(EXAMPLES.contains(&format!("\n  {name:<10} {meaning}")), "{name}");
            assert_eq!(word(name), Ok(name));
        }
        let refused = word("luck").unwrap_err();
        assert!(refused.contains("\"luck\"") && refused.contains("gpudirect, async"), "{refused}");
    }
}
