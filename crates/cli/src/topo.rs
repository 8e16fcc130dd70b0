//! `warpwire topo`: distances between GPUs, NICs and CPUs, and NVLinks.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use warpwire_doctor::Topology;

use crate::{doctor::system_at, output};

/// Show the distances of GPUs, NICs and CPUs, NVLinks, and the best NIC for each GPU
///
/// Prints a matrix in the notation of `nvidia-smi topo -m`, with a legend: PCIe paths from /sys,
/// NVLinks from NVIDIA's libnvidia-ml.so.1, if there is a GPU. Needs no root. NICs are RDMA
/// devices, and network interfaces without an RDMA device.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Print JSON: {"gpus": […], "nics": […], "cpus": […], "distances": [[…]], "nvlinks": [[…]],
    /// "nvlinks_unknown": why, "best": […]}; "distances" are by PCIe, "nvlinks" counts links
    /// between GPUs
    #[arg(long)]
    json: bool,

    /// Show a recorded machine: a file of `warpwire doctor --record`, or a directory with its sys
    /// and proc
    #[arg(long, value_name = "FILE|DIR")]
    root: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  warpwire topo
  warpwire topo --json | jq -r '.best[] | \"\\(.gpu) \\(.name)\"'    GPU and NIC, line by line
  warpwire topo --root ./recorded                                a machine recorded earlier

Environment:
  WARPWIRE_NVML  library to load instead of libnvidia-ml.so.1";

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let system = system_at(arguments.root.as_ref())?;
    let topology = Topology::read(&system).map_err(|error| error.to_string())?;
    if arguments.json {
        output::print_json(&topology)?;
    } else {
        output::print(&topology.to_text(output::width()))?;
    }
    Ok(ExitCode::SUCCESS)
}
