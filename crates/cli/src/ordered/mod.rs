//! `warpwire async`: checks and measures communication enqueued on streams or posted by kernels.

mod endpoint;
mod kernel_qp;
mod latency;
mod modes;
mod poll;
mod sanity;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::output::{self, Failure, Reporter};

/// Check and measure stream-ordered communication
///
/// Equivalents of libgdsync's programs, over the software HCA and without a special driver: a
/// stream rings the doorbell when it reaches the operation, and waits for completions. Without
/// CUDA, a simulated GPU is used; its figures do not represent a GPU.
#[derive(Args)]
#[command(arg_required_else_help = true, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    tool: Tool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire async sanity                   ordering and error handling (gds_sanity)
  # round trips of the CPU, streams, graphs and kernels (gds_kernel_loopback_latency)
  warpwire async latency
  warpwire async latency --processes      the same between two processes (gds_kernel_latency)
  warpwire async latency --compute 20us   with a kernel of 20 us before each message
  warpwire async poll                     how fast a stream sees a word change (gds_poll_lat)
  warpwire async latency --json | jq .ratios";

#[derive(Subcommand)]
enum Tool {
    Sanity(sanity::Arguments),
    Latency(Box<latency::Arguments>),
    Poll(poll::Arguments),
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let outcome = match &arguments.tool {
        Tool::Sanity(arguments) => sanity::run(arguments),
        Tool::Latency(arguments) => latency::run(arguments),
        Tool::Poll(arguments) => poll::run(arguments),
    };
    output::exit_result(outcome)
}
