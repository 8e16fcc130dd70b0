//! `warpwire sock echo`: messages of many sizes to an echo kernel and back, verified.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use serde::Serialize;
use warpwire::sock::SockOptions;
use warpwire_apps::pattern;
use warpwire_apps::programs::ServerKind;

use super::cpu::CpuFlag;
use super::peer::{CpuPeer, Role};
use super::{SockTarget, heading};
use crate::copy::target::size;
use crate::output::{Failure, Reporter};

/// Send messages to an echo kernel, and verify what comes back
///
/// Sends one message of each size, 2^n - 1, 2^n and 2^n + 1 bytes. The exit status is 0 only if all
/// replies are right.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    target: SockTarget,

    #[command(flatten)]
    cpu_flag: CpuFlag,

    /// Max message size, as in 64KiB
    #[arg(short = 's', long, value_name = "SIZE", default_value = "4MiB", value_parser = size)]
    size: u64,

    /// Print JSON: {"device": …, "messages": …, "bytes": …, "wrong": …, "seconds": …}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire sock echo
  warpwire sock echo -s 64KiB --family warp
  warpwire sock echo --cpu --json";

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
            reporter.print("# sock echo by a CPU thread\n")?;
            let server = CpuPeer::start(self.target.family, Role::Echo, 64 << 10, None)?;
            let outcome = self.compare(reporter, server.address, "cpu".to_owned());
            return server.finish().and(outcome);
        }
        let (host, no_cuda) = self.target.open(SockOptions::default())?;
        let programs = self.target.programs(&host)?;
        reporter.print(&heading("echo", &host, no_cuda.as_deref()))?;
        let server = programs.serve(&host, ServerKind::Echo, ([127, 0, 0, 1], 0).into(), 1)?;
        self.compare(reporter, server.address(), host.device().label())
    }

    /// Sends messages of all sizes to an echo server, and verifies the replies.
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
                    let lost = || Err(std::io::Error::other("the writing thread panicked"));
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
