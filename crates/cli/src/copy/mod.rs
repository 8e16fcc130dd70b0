//! `warpwire copy`: how fast the CPU reaches device memory, and whether rightly.

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
/// The programs of gdrcopy, over CPU windows that need no kernel module, beside the driver's own copies
/// (`engine`: what cuMemcpy does). Where there is no CUDA, a simulated GPU stands in: its figures are those
/// of host memory and say nothing about a GPU.
#[derive(Args)]
#[command(arg_required_else_help = true, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    tool: Tool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire copy sanity                     is everything right? (gdrcopy_sanity)
  warpwire copy bw -s 1MiB                 bandwidth of one size (gdrcopy_copybw)
  warpwire copy lat -s 64MiB --odd         time of every size (gdrcopy_copylat)
  warpwire copy api                        time to open and close a window (gdrcopy_apiperf)
  warpwire copy pingpong                   CPU to GPU to CPU (gdrcopy_pplat)
  warpwire copy plan                       which way a copy takes, by size and direction
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
