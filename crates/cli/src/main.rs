//! The `warpwire` command.

mod baseline;
mod copy;
mod demo;
mod devices;
mod doctor;
mod mp;
mod ordered;
mod output;
mod perf;
mod pingpong;
mod run;
mod sock;
mod stat;
mod topo;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// The exit status for a command line or a setting that makes no sense, as clap has it.
const USAGE_ERROR: u8 = 2;

const LOG_VARIABLE: &str = "WARPWIRE_LOG";

/// Move GPU memory: see what this machine can do, and have it done.
#[derive(Parser)]
#[command(name = "warpwire", version, arg_required_else_help = true, after_help = EXAMPLES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  warpwire demo                         see GPU memory move, real or simulated, and be verified
  warpwire doctor                       what works on this machine, what does not, and the fix
  warpwire copy lat                     how fast the CPU reaches GPU memory, size by size
  warpwire perf write bw --local        RDMA between two processes, without RDMA hardware
  warpwire async latency                messages that a GPU's streams send and wait for
  warpwire pingpong 10.0.0.2            messages to and fro with ibv_rc_pingpong
  warpwire run -n 4 -- ./program        ranks on this machine, which send to each other
  warpwire mp pingpong                  messages between two ranks, timed and verified
  warpwire sock kv                      a key-value server in a kernel, for redis-cli
  warpwire devices                      RDMA devices, their ports and addresses
  warpwire topo                         which NIC is near which GPU
  WARPWIRE_LOG=debug warpwire doctor    the same, with a log on standard error

Environment:
  WARPWIRE_LOG     what to log: error, warn (the default), info, debug, trace, or by room, as in
                   warn,warpwire::mem=debug
  WARPWIRE_SIM     the simulated machine, as in gpus=4,memory=8GiB,copy_delay=50us
  WARPWIRE_WINDOW  the path of CPU windows: dmabuf, rm, gdrdrv or memfd; the best one if not set
  WARPWIRE_COPY    the largest copies that go through a window, as in write=64KiB,read=512
  NO_COLOR         if set and not empty, no colour";

#[derive(Subcommand)]
enum Command {
    Async(ordered::Arguments),
    Copy(copy::Arguments),
    Demo(demo::Arguments),
    Devices(devices::Arguments),
    Doctor(doctor::Arguments),
    Mp(mp::Arguments),
    Perf(Box<perf::Arguments>),
    Pingpong(pingpong::Arguments),
    Run(run::Arguments),
    Sock(sock::Arguments),
    Stat(stat::Arguments),
    Topo(topo::Arguments),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = start_log().and_then(|()| match arguments.command {
        Command::Async(arguments) => ordered::run(&arguments),
        Command::Copy(arguments) => copy::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Devices(arguments) => devices::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Mp(arguments) => mp::run(&arguments),
        Command::Perf(arguments) => perf::run(&arguments),
        Command::Pingpong(arguments) => pingpong::run(&arguments),
        Command::Run(arguments) => run::run(&arguments),
        Command::Sock(arguments) => sock::run(&arguments),
        Command::Stat(arguments) => stat::run(&arguments),
        Command::Topo(arguments) => topo::run(&arguments),
    });
    outcome.unwrap_or_else(|message| {
        // Nobody may be listening; the status still tells.
        let _ = writeln!(std::io::stderr(), "error: {message}");
        ExitCode::from(USAGE_ERROR)
    })
}

/// Logs to standard error what `WARPWIRE_LOG` asks for.
fn start_log() -> Result<(), String> {
    let wanted = match std::env::var(LOG_VARIABLE) {
        Ok(text) if !text.trim().is_empty() => text,
        Ok(_) | Err(std::env::VarError::NotPresent) => "warn".to_owned(),
        Err(std::env::VarError::NotUnicode(_)) => return Err(log_error("its bytes are not UTF-8")),
    };
    if let Some(word) = wanted.split(',').find(|word| is_unknown_directive(word.trim())) {
        return Err(log_error(&format!("{word:?} is neither a level nor a room")));
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

/// A bare word that is no level would be taken for a module of that name, and silence everything.
fn is_unknown_directive(word: &str) -> bool {
    let is_level = word.parse::<tracing_subscriber::filter::LevelFilter>().is_ok();
    !word.is_empty() && !is_level && !word.contains(['=', '[']) && !word.starts_with("warpwire")
}

fn log_error(why: &str) -> String {
    format!(
        "cannot read {LOG_VARIABLE}: {why}; write a level (error, warn, info, debug, trace) or levels by room, \
         as in warn,warpwire::mem=debug"
    )
}
