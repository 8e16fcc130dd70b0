//! `warpwire sock`: servers, clients and benchmarks of sockets inside kernels.

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
/// A kernel listens, accepts, connects, sends and receives. The peer is any TCP program, or with
/// `--family warp` another kernel or a program that uses this library, by RDMA. Without CUDA, a
/// simulated GPU is used; its figures do not represent a GPU.
#[derive(Args)]
#[command(arg_required_else_help = true, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    tool: Tool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire sock serve                             echo server in a kernel; try: nc 127.0.0.1 7000
  warpwire sock serve --service http              HTTP server; try: curl http://127.0.0.1:7000/
  warpwire sock kv                                key-value server; try: redis-cli
  warpwire sock similar                           similarity search server, and its client:
  warpwire sock similar --connect 127.0.0.1:7001
  # client in a kernel
  warpwire sock connect 127.0.0.1:7000 --send 'GET / HTTP/1.0\\r\\n\\r\\n'
  warpwire sock load 127.0.0.1:6379 -P 16         load for a key-value server (RESP)
  warpwire sock echo                              send random bytes to an echo kernel, and verify
  warpwire sock lat -s 64                         round trip, compared with CPU socket + cuMemcpy
  warpwire sock bw -s 64KiB --json
  warpwire sock lat --family warp --peer kernel   kernel to kernel, by RDMA
  warpwire sock lat --family warp --cpu           CPU to CPU by RDMA, compared with TCP";

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

/// Options of the device and of its sockets.
#[derive(Args)]
struct SockTarget {
    #[command(flatten)]
    device: DeviceChoice,

    /// Put receive rings in pinned host memory, even where the CPU can write device memory
    #[arg(long)]
    pinned: bool,

    /// Post all that kernels send to `warp` peers, even where they could store into the peer's
    /// receive ring, in memory of the same GPU
    #[arg(long)]
    no_direct: bool,

    /// Socket family
    #[arg(long, value_enum, default_value = "inet")]
    family: Family,
}

impl SockTarget {
    fn open(&self, options: SockOptions) -> Result<(SockHost, Option<String>), Failure> {
        let (device, no_cuda) = self.device.open()?;
        Ok((self.serve(&device, options)?, no_cuda))
    }

    /// Starts a socket host for kernels of `device`.
    fn serve(&self, device: &Device, options: SockOptions) -> Result<SockHost, Failure> {
        let memory = if self.pinned { SockMemory::Pinned } else { options.memory };
        let options = options.with_memory(memory).with_direct(!self.no_direct);
        Ok(SockHost::start(device, options)?)
    }

    /// Loads the kernels, for sockets of this family.
    fn programs(&self, host: &SockHost) -> Result<Programs, Failure> {
        Ok(Programs::load(host)?.over(self.family.kind()))
    }
}

/// Parses an address with a port.
fn address(text: &str) -> Result<std::net::SocketAddr, String> {
    text.parse().map_err(|_| "write an address with a port, as in 127.0.0.1:7000".to_owned())
}

/// The comment lines above every table.
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
