//! `warpwire copy`: speed and correctness of CPU access to device memory.

mod api;
mod bw;
pub(crate) mod clock;
mod lat;
mod pingpong;
mod plan;
mod sanity;
pub(crate) mod target;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::output::{self, Failure, Reporter};

/// Measure and check copies between the CPU and GPU memory
///
/// Equivalents of gdrcopy's programs, over CPU windows that need no kernel module, compared with
/// the driver's copies (`engine`: cuMemcpy). Without CUDA, a simulated GPU is used; its figures are
/// those of host memory and do not represent a GPU.
#[derive(Args)]
#[command(arg_required_else_help = true, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    tool: Tool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire copy sanity                     check correctness (gdrcopy_sanity)
  warpwire copy bw -s 1MiB                 bandwidth of one size (gdrcopy_copybw)
  warpwire copy lat -s 64MiB --odd         latency by size (gdrcopy_copylat)
  warpwire copy api                        time to open and close a window (gdrcopy_apiperf)
  warpwire copy pingpong                   round trip CPU, GPU, CPU (gdrcopy_pplat)
  warpwire copy plan                       which method copies use, by size and direction
  warpwire copy lat -d sim:0 --json | jq '.rows[0]'";

#[derive(Subcommand)]
enum Tool {
    Bw(bw::Arguments),
    Lat(lat::Arguments),
    Api(api::Arguments),
    Pingpong(pingpong::Arguments),
    Sanity(sanity::Arguments),
    Plan(plan::Arguments),
    #[command(hide = true)]
    SanityChild(sanity::ChildArguments),
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let outcome = match &arguments.tool {
        Tool::Bw(arguments) => bw::run(arguments),
        Tool::Lat(arguments) => lat::run(arguments),
        Tool::Api(arguments) => api::run(arguments),
        Tool::Pingpong(arguments) => pingpong::run(arguments),
        Tool::Sanity(arguments) => sanity::run(arguments),
        Tool::Plan(arguments) => plan::run(arguments),
        Tool::SanityChild(arguments) => sanity::run_child(arguments),
    };
    output::exit_result(outcome)
}
