//! Bytes of every size through a kernel and back, compared.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use serde::Serialize;
use warpwire::sock::SockOptions;
use warpwire_apps::pattern;
use warpwire_apps::programs::Service;

use super::cpu::CpuFlag;
use super::peer::{CpuPeer, Role};
use super::{SockTarget, heading};
use crate::copy::target::size;
use crate::output::{Failure, Reporter};

/// Send bytes through an echo kernel, and compare what comes back
#[derive(Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    target: SockTarget,

    #[command(flatten)]
    cpu_flag: CpuFlag,

    /// The largest message; all powers of two up to it, and one byte more and less
    #[arg(short = 's', long, value_name = "SIZE", default_value = "4MiB", value_parser = size)]
    size: u64,

    /// Print JSON: {"device": …, "messages": …, "bytes": …, "wrong": …, "seconds": …}
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    device: String,
    messages: u64,
    bytes: u64,
    wrong: u64,
    seconds: f64,
}

impl Arguments {
    pub(super) fn run(&self) -> Result<ExitCode, Failure> {
        let reporter = Reporter::new(self.json);
        if self.cpu_flag.cpu {
            reporter.print("# sock echo by a thread of the CPU\n")?;
            let server = CpuPeer::start(self.target.family, Role::Echo, 64 << 10, None)?;
            let ended = self.compare(reporter, server.address, "cpu".to_owned());
            return server.finish().and(ended);
        }
        let (host, no_cuda) = self.target.open(SockOptions::default())?;
        let programs = self.target.programs(&host)?;
        reporter.print(&heading("echo", &host, no_cuda.as_deref()))?;
        let server = programs.serve(&host, Service::Echo, ([127, 0, 0, 1], 0).into(), 1)?;
        self.compare(reporter, server.address(), host.device().label())
    }

    /// Sends messages of all sizes to an echo, and compares.
    fn compare(
        &self,
        reporter: Reporter,
        server: SocketAddr,
        device: String,
    ) -> Result<ExitCode, Failure> {
        let stream = self.target.family.connect(server)?;
        let broken = |error: std::io::Error| Failure::Runtime(format!("the echo failed: {error}"));
        let (mut messages, mut bytes, mut wrong) = (0, 0, 0);
        let begun = Instant::now();
        let powers = (0..).map(|power| 1_u64 << power).take_while(|size| *size <= self.size);
        for power in powers {
            for len in [power - 1, power, power + 1] {
                reporter.set_status(format!("{len} bytes"));
                let mut sent = vec![0; len as usize];
                pattern::fill_bytes(&mut sent, len, 0);
                let mut back = vec![0; len as usize];
                std::thread::scope(|scope| {
                    let writing = scope.spawn(|| (&stream).write_all(&sent));
                    let read = (&stream).read_exact(&mut back);
                    let lost = || Err(std::io::Error::other("its writer stopped"));
                    writing.join().unwrap_or_else(|_| lost()).and(read)
                })
                .map_err(broken)?;
                messages += 1;
                bytes += len;
                wrong += u64::from(sent != back);
            }
        }
        stream.shutdown(Shutdown::Both).map_err(broken)?;
        let seconds = begun.elapsed().as_secs_f64();
        let report = Report { device, messages, bytes, wrong, seconds };
        reporter.print(&format!("{messages} messages, {bytes} bytes, {wrong} wrong\n"))?;
        reporter.finish(&report)?;
        Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
