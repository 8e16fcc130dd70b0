//! `warpwire async`: work and waits that a stream orders, checked and measured.

mod endpoint;
mod kernel_qp;
mod latency;
mod modes;
mod poll;
mod sanity;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::output::{self, Failure, Reporter};

/// Check and measure work that a GPU's streams order
///
/// The programs of libgdsync, over the software HCA and without a special driver: a stream rings the doorbell when it
/// gets there, and waits for completions. Where there is no CUDA, a simulated GPU stands in: its figures say nothing
/// about a GPU.
#[derive(Args)]
#[command(arg_required_else_help = true, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    tool: Tool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire async sanity                       is the order kept, and does nothing hang? (gds_sanity)
  warpwire async latency                      round trips: the CPU, streams, graphs, kernels (gds_kernel_loopback_latency)
  warpwire async latency --processes          the same between two processes (gds_kernel_latency)
  warpwire async latency --compute 20us       with a kernel of that length on either side
  warpwire async poll                         how fast a stream sees a word (gds_poll_lat)
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
