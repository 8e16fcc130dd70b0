//! `warpwire sock lat` and `bw`: a kernel's socket, compared with a CPU socket plus driver copies
//! in the same run.

use std::io::{Read, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::Serialize;
use warpwire::mem::Device;
use warpwire::sock::{SockHost, SockOptions};
use warpwire::units;
use warpwire_apps::programs::{ClientKind, Programs, ServerKind};

use super::cpu::{self, CpuFlag, socket_error};
use super::device_copy::DeviceCopy;
use super::peer::{self, CpuPeer, Family, Role};
use super::{SockTarget, heading};
use crate::copy::target::{iterations, size};
use crate::output::{Failure, Reporter};

const TIMEOUT: Duration = Duration::from_secs(30);
/// How long the host thread spins before it sleeps: costs a core, but measures latency without
/// wake-ups.
const SPIN: Duration = Duration::from_millis(5);

/// What runs at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum PeerKind {
    /// A thread of this process
    Cpu,
    /// A kernel of the same device, with its own socket host
    Kernel,
}

impl PeerKind {
    /// The device whose memory the CPU peer copies to and from, if it replaces a kernel.
    fn device(self, host: &SockHost) -> Option<Device> {
        (self == Self::Kernel).then(|| host.device().clone())
    }
}

/// Runs `work` in a kernel, with a kernel or a CPU thread at the other end.
fn by_kernel(
    target: &SockTarget,
    (host, programs): (&SockHost, &Programs),
    peer_kind: PeerKind,
    options: SockOptions,
    (work, role): (ClientKind, Role),
    (size, rounds): (u64, u64),
) -> Result<Duration, Failure> {
    let client = |server| programs.client(host, work, server, size, rounds, TIMEOUT * 4);
    match peer_kind {
        PeerKind::Cpu => {
            let peer = CpuPeer::start(target.family, role, size as usize, None)?;
            let done = client(peer.address)?;
            peer.finish()?;
            Ok(done.time)
        }
        PeerKind::Kernel => {
            let there = target.serve(host.device(), options)?;
            let service =
                if work == ClientKind::Push { ServerKind::Sink } else { ServerKind::Echo };
            let server = programs.serve(&there, service, ([127, 0, 0, 1], 0).into(), 1)?;
            Ok(client(server.address())?.time)
        }
    }
}

/// Refuses `--cpu` with `--peer kernel`, which is ambiguous.
fn check_cpu(peer: PeerKind) -> Result<(), Failure> {
    match peer {
        PeerKind::Cpu => Ok(()),
        PeerKind::Kernel => Err(Failure::Usage(
            "cannot measure --cpu with --peer kernel: omit --cpu to have a kernel at this end and \
             the CPU at the other, or omit --peer"
                .to_owned(),
        )),
    }
}

/// Measure round trips of a message from device memory to an echo server and back
///
/// Compares a kernel's socket with a CPU socket plus cuMemcpy, in microseconds per round trip.
#[derive(Args)]
#[command(after_help = LAT_EXAMPLES)]
pub(super) struct Lat {
    #[command(flatten)]
    target: SockTarget,

    /// Message size, as in 64 or 4KiB
    #[arg(short = 's', long, value_name = "SIZE", default_value = "64", value_parser = size)]
    size: u64,

    #[command(flatten)]
    cpu_flag: CpuFlag,

    /// What runs the echo server; with `kernel`, the CPU comparison copies at both ends
    #[arg(long, value_enum, default_value = "cpu")]
    peer: PeerKind,

    /// Round trips to time
    #[arg(short = 'n', long, value_name = "N", default_value = "2000", value_parser = iterations)]
    iters: u32,

    /// Print JSON: {"size": …, "kernel_us": …, "cpu_us": …, "ratio": …}
    #[arg(long)]
    json: bool,
}

const LAT_EXAMPLES: &str = "\
Examples:
  warpwire sock lat -s 64
  warpwire sock lat --family warp --peer kernel    kernel to kernel, by RDMA
  warpwire sock lat --family warp --cpu            CPU to CPU by RDMA, compared with TCP";

#[derive(Serialize)]
struct LatReport {
    device: String,
    family: &'static str,
    peer: PeerKind,
    size: u64,
    rounds: u32,
    /// Microseconds per round trip of a kernel's socket.
    kernel_us: f64,
    /// Microseconds per round trip of a CPU socket, including a driver copy before and after it.
    cpu_us: f64,
    ratio: f64,
}

impl Lat {
    pub(super) fn run(&self) -> Result<ExitCode, Failure> {
        if self.cpu_flag.cpu {
            check_cpu(self.peer)?;
            return cpu::lat(self.target.family, self.size, self.iters, self.json);
        }
        let reporter = Reporter::for_measurement(self.json);
        let options = SockOptions::default().with_sockets(16).with_spin(SPIN);
        let (host, no_cuda) = self.target.open(options)?;
        let programs = self.target.programs(&host)?;
        reporter.print(&heading("lat", &host, no_cuda.as_deref()))?;
        reporter.set_status("a kernel's socket");
        let rounds = u64::from(self.iters);
        let kernel = |rounds: u64| {
            let what = (ClientKind::Ping, Role::Echo);
            let by = (&host, &programs);
            by_kernel(&self.target, by, self.peer, options, what, (self.size, rounds))
        };
        kernel(rounds.min(100))?;
        let by_kernel = kernel(rounds)?;
        reporter.set_status("a CPU socket");
        self.by_cpu(&host, rounds.min(100))?;
        let by_cpu = self.by_cpu(&host, rounds)?;
        let each = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(self.iters);
        let report = LatReport {
            device: host.device().label(),
            family: self.target.family.name(),
            peer: self.peer,
            size: self.size,
            rounds: self.iters,
            kernel_us: each(by_kernel),
            cpu_us: each(by_cpu),
            ratio: each(by_kernel) / each(by_cpu),
        };
        reporter.print(&format!(
            "{:>10}  {:>12}  {:>22}  {:>6}\n{:>10}  {:>9.2} us  {:>19.2} us  {:>6.2}\n",
            "size",
            "kernel",
            "CPU socket + memcpy",
            "ratio",
            units::bytes(report.size),
            report.kernel_us,
            report.cpu_us,
            report.ratio
        ))?;
        reporter.finish(&report)?;
        Ok(ExitCode::SUCCESS)
    }

    /// The same with a CPU socket: from device memory to the peer and back into device memory.
    fn by_cpu(&self, host: &SockHost, rounds: u64) -> Result<Duration, Failure> {
        let device = self.peer.device(host);
        let echo = CpuPeer::start(Family::Inet, Role::Echo, self.size as usize, device)?;
        let device_copy = DeviceCopy::new(host.device(), self.size)?;
        let mut buffer = vec![0; self.size as usize];
        let mut stream = peer::connect(echo.address)?;
        let begun = Instant::now();
        for _ in 0..rounds {
            device_copy.read(&mut buffer)?;
            stream.write_all(&buffer).map_err(socket_error)?;
            stream.read_exact(&mut buffer).map_err(socket_error)?;
            device_copy.write(&buffer)?;
            device_copy.finish()?;
        }
        let time = begun.elapsed();
        drop(stream);
        echo.finish()?;
        Ok(time)
    }
}

/// Measure the bandwidth of a stream from device memory to a CPU and back, or to a kernel
///
/// Compares a kernel's socket with a CPU socket plus cuMemcpy, in MB/s (10^6 bytes).
#[derive(Args)]
#[command(after_help = BW_EXAMPLES)]
pub(super) struct Bw {
    #[command(flatten)]
    target: SockTarget,

    /// Size of each send and receive
    #[arg(short = 's', long, value_name = "SIZE", default_value = "64KiB", value_parser = size)]
    size: u64,

    #[command(flatten)]
    cpu_flag: CpuFlag,

    /// What runs at the other end; with `kernel`, the CPU comparison copies at both ends
    #[arg(long, value_enum, default_value = "cpu")]
    peer: PeerKind,

    /// Bytes to transfer in each direction
    #[arg(short = 't', long, value_name = "SIZE", default_value = "256MiB", value_parser = size)]
    total: u64,

    /// Print JSON: {"size": …, "rows": [{"direction": …, "kernel_mb_s": …, "cpu_mb_s": …, "ratio":
    /// …}]}
    #[arg(long)]
    json: bool,
}

const BW_EXAMPLES: &str = "\
Examples:
  warpwire sock bw
  warpwire sock bw -s 1MiB -t 1GiB --json
  warpwire sock bw --family warp --peer kernel";

#[derive(Serialize)]
struct BwReport {
    device: String,
    family: &'static str,
    peer: PeerKind,
    size: u64,
    total: u64,
    rows: Vec<BwRow>,
}

#[derive(Serialize)]
struct BwRow {
    direction: &'static str,
    kernel_mb_s: f64,
    cpu_mb_s: f64,
    ratio: f64,
}

impl Bw {
    pub(super) fn run(&self) -> Result<ExitCode, Failure> {
        if self.cpu_flag.cpu {
            check_cpu(self.peer)?;
            return cpu::bw(self.target.family, self.size, self.total, self.json);
        }
        let reporter = Reporter::for_measurement(self.json);
        let ring = 1 << 20;
        let options = SockOptions::default().with_sockets(16).with_ring(ring).with_spin(SPIN);
        let (host, no_cuda) = self.target.open(options)?;
        let programs = self.target.programs(&host)?;
        reporter.print(&heading("bw", &host, no_cuda.as_deref()))?;
        let rounds = self.total.div_ceil(self.size);
        let total = rounds * self.size;
        let rate = |time: Duration| total as f64 / 1e6 / time.as_secs_f64();
        let mut rows = Vec::new();
        let directions: &[(&'static str, ClientKind)] = match self.peer {
            PeerKind::Cpu => {
                &[("to the CPU", ClientKind::Push), ("from the CPU", ClientKind::Pull)]
            }
            PeerKind::Kernel => &[("to a kernel", ClientKind::Push)],
        };
        for (direction, work) in directions.iter().copied() {
            reporter.set_status(format!("{direction}, a kernel's socket"));
            let role = || if work == ClientKind::Push { Role::Sink } else { Role::Source(total) };
            let (by, what) = ((&host, &programs), (work, role()));
            let time = by_kernel(&self.target, by, self.peer, options, what, (self.size, rounds))?;
            reporter.set_status(format!("{direction}, a CPU socket"));
            let device = self.peer.device(&host);
            let peer = CpuPeer::start(Family::Inet, role(), self.size as usize, device)?;
            let by_cpu = self.by_cpu(&host, work, &peer, rounds)?;
            peer.finish()?;
            let (kernel_mb_s, cpu_mb_s) = (rate(time), rate(by_cpu));
            let ratio = kernel_mb_s / cpu_mb_s;
            rows.push(BwRow { direction, kernel_mb_s, cpu_mb_s, ratio });
        }
        let mut text = format!(
            "{:<14}  {:>14}  {:>22}  {:>6}\n",
            "", "kernel", "CPU socket + memcpy", "ratio"
        );
        for row in &rows {
            text += &format!(
                "{:<14}  {:>9.0} MB/s  {:>17.0} MB/s  {:>6.2}\n",
                row.direction, row.kernel_mb_s, row.cpu_mb_s, row.ratio
            );
        }
        reporter.print(&text)?;
        let report = BwReport {
            device: host.device().label(),
            family: self.target.family.name(),
            peer: self.peer,
            size: self.size,
            total,
            rows,
        };
        reporter.finish(&report)?;
        Ok(ExitCode::SUCCESS)
    }

    fn by_cpu(
        &self,
        host: &SockHost,
        work: ClientKind,
        peer: &CpuPeer,
        rounds: u64,
    ) -> Result<Duration, Failure> {
        let device_copy = DeviceCopy::new(host.device(), self.size)?;
        let mut buffer = vec![0; self.size as usize];
        let mut stream = peer::connect(peer.address)?;
        let begun = Instant::now();
        for _ in 0..rounds {
            if work == ClientKind::Push {
                device_copy.read(&mut buffer)?;
                stream.write_all(&buffer).map_err(socket_error)?;
            } else {
                stream.read_exact(&mut buffer).map_err(socket_error)?;
                device_copy.write(&buffer)?;
            }
        }
        device_copy.finish()?;
        if work == ClientKind::Push {
            stream.shutdown(std::net::Shutdown::Write).map_err(socket_error)?;
            stream.read_exact(&mut buffer[..1]).map_err(socket_error)?;
        }
        Ok(begun.elapsed())
    }
}
