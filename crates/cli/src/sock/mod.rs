//! `warpwire sock`: sockets inside kernels, to serve with, to talk with, and to measure.

mod cpu;
mod device_copy;
mod echo;
mod load;
mod measure;
mod peer;
mod serve;
mod similar;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use warpwire::mem::{Backend, Device};
use warpwire::sock::{SockHost, SockMemory, SockOptions};
use warpwire_apps::programs::Programs;

use crate::copy::target::DeviceChoice;
use crate::output::{self, Failure};
use peer::Family;

/// Use sockets inside kernels
///
/// A kernel listens, accepts, connects, sends and receives by itself; the other end is any TCP program, or with
/// `--family warp` another kernel or a program of this library, by RDMA. Where there is no CUDA, a simulated GPU stands in: its figures say nothing about a GPU.
#[derive(Args)]
#[command(arg_required_else_help = true, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    tool: Tool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire sock serve --bind 127.0.0.1:7000           a kernel that echoes; try: nc 127.0.0.1 7000
  warpwire sock serve --service http --bind 127.0.0.1:8080    try: curl http://127.0.0.1:8080/
  warpwire sock kv --bind 127.0.0.1:6379              a key-value server; try: redis-cli, redis-benchmark -t set,get
  warpwire sock similar --bind 127.0.0.1:7001         a similarity server; try: warpwire sock similar --connect 127.0.0.1:7001
  warpwire sock connect 127.0.0.1:8080 --send 'GET / HTTP/1.0\\r\\n\\r\\n'    a kernel as the client of any server
  warpwire sock load 127.0.0.1:6379 -P 16             a load for it, or for any server that speaks RESP
  warpwire sock echo                                  a kernel echoes random bytes, and they are compared
  warpwire sock lat -s 64                             a round trip, beside a CPU's socket with cuMemcpy
  warpwire sock bw -s 64KiB --json
  warpwire sock lat --family warp --peer kernel       from a kernel to another and back, by RDMA
  warpwire sock lat --family warp --cpu               from a CPU program to another, beside TCP";

#[derive(Subcommand)]
enum Tool {
    Serve(serve::Serve),
    Kv(serve::Kv),
    Similar(similar::Arguments),
    Connect(serve::Connect),
    Echo(echo::Arguments),
    Load(load::Arguments),
    Lat(measure::Lat),
    Bw(measure::Bw),
}

/// The device, and its sockets.
#[derive(Args)]
struct SockTarget {
    #[command(flatten)]
    device: DeviceChoice,

    /// Let kernels watch pinned host memory, even where the CPU could write to theirs
    #[arg(long)]
    pinned: bool,

    /// Which sockets
    #[arg(long, value_enum, default_value = "inet")]
    family: Family,
}

impl SockTarget {
    fn open(&self, options: SockOptions) -> Result<(SockHost, Option<String>), Failure> {
        let (device, no_cuda) = self.device.open()?;
        Ok((self.serve(&device, options)?, no_cuda))
    }

    /// Sockets for kernels of that device.
    fn serve(&self, device: &Device, options: SockOptions) -> Result<SockHost, Failure> {
        let memory = if self.pinned { SockMemory::Pinned } else { options.memory };
        Ok(SockHost::start(device, SockOptions { memory, ..options })?)
    }

    /// The kernels of this family.
    fn programs(&self, host: &SockHost) -> Result<Programs, Failure> {
        Ok(Programs::load(host)?.over(self.family.kind()))
    }
}

/// What stands above every table.
fn heading(tool: &str, host: &SockHost, no_cuda: Option<&str>) -> String {
    let device: &Device = host.device();
    let mut text = format!("# sock {tool} on {} ({})\n", device.label(), device.info().name);
    text += &match host.why_pinned() {
        None => "# receive rings: device memory, written through a window\n".to_owned(),
        Some(why) => format!("# receive rings: pinned host memory ({why})\n"),
    };
    if let Some(why) = no_cuda {
        text += &format!("# no CUDA device: {why}\n");
    }
    if device.info().backend == Backend::Sim {
        text += "# simulated: these figures are of host memory\n";
    }
    text
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    output::exit_result(match &arguments.tool {
        Tool::Serve(arguments) => arguments.run(),
        Tool::Kv(arguments) => arguments.run(),
        Tool::Similar(arguments) => arguments.run(),
        Tool::Connect(arguments) => arguments.run(),
        Tool::Echo(arguments) => arguments.run(),
        Tool::Load(arguments) => arguments.run(),
        Tool::Lat(arguments) => arguments.run(),
        Tool::Bw(arguments) => arguments.run(),
    })
}
