//! How fast: a kernel's sockets beside a CPU's socket with copies by the driver, in one run.

use std::io::{Read, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use warpwire::mem::cuda::DriverCopies;
use warpwire::mem::{Allocation, Backend};
use warpwire::sock::programs::{Programs, Work};
use warpwire::sock::{SockHost, SockOptions};
use warpwire::units;

use super::peer::{self, Peer, Role};
use super::{Ground, heading};
use crate::copy::target::{iterations, size};
use crate::output::{Failure, Screen};

const TIMEOUT: Duration = Duration::from_secs(30);
/// Spinning costs a core, and is what latency is measured with.
const SPIN: Duration = Duration::from_millis(5);

/// The device memory that both ways begin and end in, and how the driver copies it.
struct Plain {
    memory: Allocation,
    driver: Option<DriverCopies>,
}

impl Plain {
    fn new(host: &SockHost, len: u64) -> Result<Self, Failure> {
        let info = host.device().info();
        let driver = match info.backend {
            Backend::Cuda => Some(DriverCopies::on(info.ordinal)?),
            Backend::Sim => None,
        };
        Ok(Self { memory: host.device().alloc(len)?, driver })
    }

    fn read(&self, into: &mut [u8]) -> Result<(), Failure> {
        match &self.driver {
            Some(driver) => driver.read(&self.memory, 0, into)?,
            None => self.memory.read(0, into)?,
        }
        Ok(())
    }

    fn write(&self, from: &[u8]) -> Result<(), Failure> {
        match &self.driver {
            Some(driver) => driver.write(&self.memory, 0, from)?,
            None => self.memory.write(0, from)?,
        }
        Ok(())
    }

    fn finish(&self) -> Result<(), Failure> {
        self.driver.as_ref().map_or(Ok(()), DriverCopies::finish)?;
        Ok(())
    }
}

fn io(error: std::io::Error) -> Failure {
    Failure::Broken(format!("the CPU's socket failed: {error}"))
}

/// Measure a round trip of a message from device memory to a CPU echo and back
#[derive(Args)]
pub(super) struct Lat {
    #[command(flatten)]
    ground: Ground,

    /// Bytes of a message
    #[arg(short = 's', long, value_name = "SIZE", default_value = "64", value_parser = size)]
    size: u64,

    /// How many round trips
    #[arg(short = 'n', long, value_name = "N", default_value = "2000", value_parser = iterations)]
    iters: u32,

    /// Print JSON: {"size": …, "kernel_us": …, "cpu_us": …, "ratio": …}
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct LatReport {
    device: String,
    size: u64,
    rounds: u32,
    /// Round trips of a kernel's socket.
    kernel_us: f64,
    /// Round trips of a CPU's socket with a copy by the driver before and behind it.
    cpu_us: f64,
    ratio: f64,
}

impl Lat {
    pub(super) fn run(&self) -> Result<ExitCode, Failure> {
        let screen = Screen::new(self.json);
        let options = SockOptions { sockets: 16, spin: SPIN, ..SockOptions::default() };
        let (host, no_cuda) = self.ground.open(options)?;
        let programs = Programs::load(&host)?;
        screen.say(&heading("lat", &host, no_cuda.as_deref()))?;
        screen.working("a kernel's socket");
        let rounds = u64::from(self.iters);
        let kernel = |rounds: u64| -> Result<Duration, Failure> {
            let echo = Peer::start(Role::Echo, self.size as usize)?;
            let done =
                programs.client(&host, Work::Ping, echo.address, self.size, rounds, TIMEOUT)?;
            echo.finish()?;
            Ok(done.time)
        };
        kernel(rounds.min(100))?;
        let by_kernel = kernel(rounds)?;
        screen.working("a CPU's socket");
        self.by_cpu(&host, rounds.min(100))?;
        let by_cpu = self.by_cpu(&host, rounds)?;
        let each = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(self.iters);
        let report = LatReport {
            device: host.device().label(),
            size: self.size,
            rounds: self.iters,
            kernel_us: each(by_kernel),
            cpu_us: each(by_cpu),
            ratio: each(by_kernel) / each(by_cpu),
        };
        screen.say(&format!(
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
        screen.finish(&report)?;
        Ok(ExitCode::SUCCESS)
    }

    /// The same by the CPU: out of device memory, to the peer and back, into device memory.
    fn by_cpu(&self, host: &SockHost, rounds: u64) -> Result<Duration, Failure> {
        let echo = Peer::start(Role::Echo, self.size as usize)?;
        let plain = Plain::new(host, self.size)?;
        let mut buffer = vec![0; self.size as usize];
        let mut stream = peer::connect(echo.address)?;
        let begun = Instant::now();
        for _ in 0..rounds {
            plain.read(&mut buffer)?;
            stream.write_all(&buffer).map_err(io)?;
            stream.read_exact(&mut buffer).map_err(io)?;
            plain.write(&buffer)?;
            plain.finish()?;
        }
        let time = begun.elapsed();
        drop(stream);
        echo.finish()?;
        Ok(time)
    }
}

/// Measure a stream from device memory to a CPU, and the other way
#[derive(Args)]
pub(super) struct Bw {
    #[command(flatten)]
    ground: Ground,

    /// Bytes of a message
    #[arg(short = 's', long, value_name = "SIZE", default_value = "64KiB", value_parser = size)]
    size: u64,

    /// How many bytes in all
    #[arg(short = 't', long, value_name = "SIZE", default_value = "256MiB", value_parser = size)]
    total: u64,

    /// Print JSON: {"size": …, "rows": [{"direction": …, "kernel_mb_s": …, "cpu_mb_s": …, "ratio": …}]}
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct BwReport {
    device: String,
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
        let screen = Screen::new(self.json);
        let ring = 1 << 20;
        let options = SockOptions { sockets: 16, ring, spin: SPIN, ..SockOptions::default() };
        let (host, no_cuda) = self.ground.open(options)?;
        let programs = Programs::load(&host)?;
        screen.say(&heading("bw", &host, no_cuda.as_deref()))?;
        let rounds = self.total.div_ceil(self.size);
        let total = rounds * self.size;
        let rate = |time: Duration| total as f64 / 1e6 / time.as_secs_f64();
        let mut rows = Vec::new();
        for (direction, work) in [("to the CPU", Work::Push), ("from the CPU", Work::Pull)] {
            screen.working(format!("{direction}, a kernel's socket"));
            let role = || if work == Work::Push { Role::Sink } else { Role::Source(total) };
            let peer = Peer::start(role(), self.size as usize)?;
            let done =
                programs.client(&host, work, peer.address, self.size, rounds, TIMEOUT * 4)?;
            peer.finish()?;
            screen.working(format!("{direction}, a CPU's socket"));
            let peer = Peer::start(role(), self.size as usize)?;
            let by_cpu = self.by_cpu(&host, work, &peer, rounds)?;
            peer.finish()?;
            let (kernel_mb_s, cpu_mb_s) = (rate(done.time), rate(by_cpu));
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
        screen.say(&text)?;
        screen.finish(&BwReport { device: host.device().label(), size: self.size, total, rows })?;
        Ok(ExitCode::SUCCESS)
    }

    fn by_cpu(
        &self,
        host: &SockHost,
        work: Work,
        peer: &Peer,
        rounds: u64,
    ) -> Result<Duration, Failure> {
        let plain = Plain::new(host, self.size)?;
        let mut buffer = vec![0; self.size as usize];
        let mut stream = peer::connect(peer.address)?;
        let begun = Instant::now();
        for _ in 0..rounds {
            if work == Work::Push {
                plain.read(&mut buffer)?;
                stream.write_all(&buffer).map_err(io)?;
            } else {
                stream.read_exact(&mut buffer).map_err(io)?;
                plain.write(&buffer)?;
            }
        }
        plain.finish()?;
        if work == Work::Push {
            stream.shutdown(std::net::Shutdown::Write).map_err(io)?;
            stream.read_exact(&mut buffer[..1]).map_err(io)?;
        }
        Ok(begun.elapsed())
    }
}
