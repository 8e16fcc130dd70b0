//! `warpwire topo`: PCIe distances between GPUs, NICs and CPUs.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use warpwire_doctor::Topology;

use crate::{doctor::system_at, output};

/// Show the distances of GPUs, NICs and CPUs, and the best NIC for each GPU
///
/// Prints a matrix in the notation of `nvidia-smi topo -m`, with a legend, from the PCIe paths in
/// /sys. Needs neither a driver nor root. NICs are RDMA devices, and network interfaces without an
/// RDMA device.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Print JSON: {"gpus": […], "nics": […], "cpus": […], "distances": [[…]], "best": […]}
    #[arg(long)]
    json: bool,

    /// Show a recorded machine: a directory with its sys and proc
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  warpwire topo
  warpwire topo --json | jq -r '.best[] | \"\\(.gpu) \\(.name)\"'    GPU and NIC, line by line
  warpwire topo --root ./recorded                                a machine recorded earlier";

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let topology = Topology::read(&system_at(arguments.root.as_ref())?);
    if arguments.json {
        output::print_json(&topology)?;
    } else {
        output::print(&topology.to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}
