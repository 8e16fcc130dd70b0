//! The `warpwire` command: argument parsing, logging setup and dispatch to the subcommands.

mod baseline;
mod copy;
mod demo;
mod devices;
mod doctor;
mod machine;
mod mp;
mod nccl;
mod ordered;
mod output;
mod perf;
mod pingpong;
mod report;
mod run;
mod shell;
mod sock;
mod stat;
mod topo;
mod verbs;

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Exit status for a wrong command line or environment setting; clap uses the same.
const USAGE_ERROR: u8 = 2;

/// Version, commit if it was built in a checkout, and target.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("WARPWIRE_BUILD"), ")");

const LOG_VARIABLE: &str = "WARPWIRE_LOG";

/// RDMA and GPU memory: inspect this machine, measure it, run programs on it
#[derive(Parser)]
#[command(name = "warpwire", version = VERSION, max_term_width = 100,
    arg_required_else_help = true, after_help = EXAMPLES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  warpwire demo                         move GPU memory, real or simulated, and verify it
  warpwire doctor                       what works on this machine, what does not, and the fix
  warpwire copy lat                     latency of CPU copies to and from GPU memory, by size
  warpwire perf write bw --local        RDMA between two processes, without RDMA hardware
  warpwire async latency                round trips of messages sent by GPU streams and kernels
  warpwire pingpong 10.0.0.2            ping-pong with ibv_rc_pingpong on another machine
  warpwire run -n 4 ./program           start 4 ranks on this machine
  warpwire mp pingpong                  messages between two ranks, timed and verified
  warpwire sock kv                      a key-value server in a kernel, for redis-cli
  warpwire devices                      RDMA devices, their ports and addresses
  warpwire topo                         which NIC is near which GPU
  warpwire report                       measurements of this machine, as an HTML page with plots
  warpwire verbs -- ib_write_bw -x 0    any RDMA program, without an RDMA device
  warpwire nccl -- torchrun train.py    NCCL programs, without an RDMA device
  WARPWIRE_LOG=debug warpwire doctor    the same, with a log on standard error

Environment:
  WARPWIRE_LOG     log level: error, warn (default), info, debug, trace; or levels per module, as
                   in warn,warpwire::mem=debug
  WARPWIRE_SIM     simulated GPUs, as in gpus=4,memory=8GiB,copy_delay=50us
  WARPWIRE_WINDOW  path of CPU windows: dmabuf, rm, gdrdrv or memfd; default: best available
  WARPWIRE_COPY    max size of copies through a window, as in write=64KiB,read=512
  NO_COLOR         no colour if set and not empty";

#[derive(Subcommand)]
enum Command {
    Async(ordered::Arguments),
    Completions(shell::CompletionArguments),
    Copy(copy::Arguments),
    Demo(demo::Arguments),
    Devices(devices::Arguments),
    Doctor(doctor::Arguments),
    Man(shell::ManArguments),
    Mp(mp::Arguments),
    Nccl(nccl::Arguments),
    Perf(Box<perf::Arguments>),
    Pingpong(pingpong::Arguments),
    Report(report::Arguments),
    Run(run::Arguments),
    Sock(sock::Arguments),
    Stat(stat::Arguments),
    Topo(topo::Arguments),
    Verbs(verbs::Arguments),
}

fn main() -> ExitCode {
    let words = perf::perftest::normalize(std::env::args_os());
    let arguments = match Arguments::try_parse_from(&words) {
        Ok(arguments) => arguments,
        Err(error) => match perf::perftest::explain(&words, &error) {
            Some(answer) => {
                output::note(&format!("error: {answer}"));
                return ExitCode::from(USAGE_ERROR);
            }
            None => error.exit(),
        },
    };
    let outcome = start_log().and_then(|()| match arguments.command {
        Command::Async(arguments) => ordered::run(&arguments),
        Command::Completions(arguments) => shell::completions(&arguments, Arguments::command()),
        Command::Copy(arguments) => copy::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Devices(arguments) => devices::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Man(arguments) => shell::man(&arguments, Arguments::command()),
        Command::Mp(arguments) => mp::run(&arguments),
        Command::Nccl(arguments) => nccl::run(&arguments),
        Command::Perf(arguments) => perf::run(&arguments),
        Command::Pingpong(arguments) => pingpong::run(&arguments),
        Command::Report(arguments) => report::run(&arguments),
        Command::Run(arguments) => run::run(&arguments),
        Command::Sock(arguments) => sock::run(&arguments),
        Command::Stat(arguments) => stat::run(&arguments),
        Command::Topo(arguments) => topo::run(&arguments),
        Command::Verbs(arguments) => verbs::run(&arguments),
    });
    outcome.unwrap_or_else(|message| {
        // Standard error may be closed; the exit status still reports the failure.
        let _ = writeln!(std::io::stderr(), "error: {message}");
        ExitCode::from(USAGE_ERROR)
    })
}

/// Installs the log on standard error, filtered by `WARPWIRE_LOG`.
///
/// # Errors
/// If the filter cannot be parsed.
fn start_log() -> Result<(), String> {
    let wanted = match std::env::var(LOG_VARIABLE) {
        Ok(text) if !text.trim().is_empty() => text,
        Ok(_) | Err(std::env::VarError::NotPresent) => "warn".to_owned(),
        Err(std::env::VarError::NotUnicode(_)) => return Err(log_error("its bytes are not UTF-8")),
    };
    if let Some(word) = wanted.split(',').find(|word| is_unknown_directive(word.trim())) {
        return Err(log_error(&format!("{word:?} is neither a level nor a module")));
    }
    let filter = EnvFilter::builder()
        .parse(&wanted)
        .map_err(|source| log_error(&format!("{wanted:?}: {source}")))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(output::wants_colour(&std::io::stderr()))
        .init();
    Ok(())
}

/// `EnvFilter` takes a bare word that is not a level for a module of that name, and would silence
/// all other modules.
fn is_unknown_directive(word: &str) -> bool {
    let is_level = word.parse::<tracing_subscriber::filter::LevelFilter>().is_ok();
    !word.is_empty() && !is_level && !word.contains(['=', '[']) && !word.starts_with("warpwire")
}

fn log_error(why: &str) -> String {
    format!(
        "cannot read {LOG_VARIABLE}: {why}; write a level (error, warn, info, debug, trace) or \
         levels per module, as in warn,warpwire::mem=debug"
    )
}
