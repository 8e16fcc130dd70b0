//! `--local`: this process is the client, and starts the server as a second process.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use std::net::TcpStream;

use warpwire::verbs::bootstrap::Bootstrap;

use super::endpoint::Role;
use super::table::{Figures, Report};
use super::test::Test;
use super::{Arguments, MemoryChoice, session};
use crate::output::{Failure, Reporter};

/// The server's process; killed on drop.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    /// Connects to the server, which listens: if it does not, it has died, and retries are in vain.
    fn connect(&mut self, timeout: std::time::Duration) -> Result<Bootstrap, Failure> {
        match TcpStream::connect(("127.0.0.1", self.port)) {
            Ok(stream) => Ok(Bootstrap::from_stream(stream, timeout)?),
            Err(why) => {
                let ended = self.child.wait();
                let ended = ended.map_or_else(|why| why.to_string(), |status| status.to_string());
                let why = format!("the server died before it accepted ({ended}; {why})");
                Err(Failure::Runtime(format!("{why}; see its message above")))
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has exited, unless this side failed before the end of the test.
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

fn start(test: &Test, memory: &MemoryChoice, arguments: &Arguments) -> Result<Server, Failure> {
    let failed = |why: std::io::Error| Failure::Runtime(format!("cannot start the server: {why}"));
    let program = std::env::current_exe().map_err(failed)?;
    let progress = clap::ValueEnum::to_possible_value(&arguments.progress);
    let reg = clap::ValueEnum::to_possible_value(&arguments.reg);
    let mut command = Command::new(program);
    command
        .args(["perf", test.verb.name(), test.metric.name(), "--announce", "--json"])
        .args(["--mem", &memory.to_string(), "--timeout", &arguments.timeout.to_string()])
        .args(arguments.ib_port.map(|port| format!("--ib-port={port}")))
        .args(arguments.gid_index.map(|index| format!("--gid-index={index}")))
        .args(arguments.mtu.map(|mtu| format!("--mtu={mtu}")))
        .args(reg.map(|reg| format!("--reg={}", reg.get_name())))
        .args(arguments.no_direct.then_some("--no-direct"))
        // The client is this process, whose user chose the sizes.
        .args(test.memory(Role::Server).map(|bytes| format!("--max-memory={bytes}")))
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    if test.endless {
        // Ctrl-C is for the client, which ends the test in order.
        command.process_group(0);
    }
    match &arguments.device {
        Some(name) => command.args(["--device", name]),
        None => command
            .args(["--link", &arguments.link])
            .args(arguments.engines.map(|engines| format!("--engines={engines}")))
            .args(progress.map(|mode| format!("--progress={}", mode.get_name()))),
    };
    let child = command.spawn().map_err(failed)?;
    let mut server = Server { child, port: 0 };
    let mut line = String::new();
    if let Some(out) = server.child.stdout.take() {
        let mut out = BufReader::new(out);
        out.read_line(&mut line).map_err(failed)?;
        // Drain its output, or a full pipe would block it.
        std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
    }
    server.port = line.trim().parse().map_err(|_| {
        Failure::Runtime("the server did not start; see its message above".to_owned())
    })?;
    Ok(server)
}

pub(super) fn client(
    test: Test,
    arguments: &Arguments,
    reporter: &Reporter,
) -> Result<Report, Failure> {
    let memory = arguments.peer_mem.clone().unwrap_or_else(|| arguments.memory());
    let mut server = start(&test, &memory, arguments)?;
    let bootstrap = server.connect(arguments.timeout())?;
    let report = session::run_client(bootstrap, test, arguments, reporter)?;
    let status = server.child.wait();
    match status {
        Ok(status) if !status.success() => {
            Err(Failure::Runtime(format!("the server exited with {status}")))
        }
        _ => Ok(report),
    }
}

/// Result of [`run_pair`].
pub(crate) struct Summary {
    /// Mean time of one write.
    pub(crate) each: std::time::Duration,
    /// How the peer's device accesses its memory.
    pub(crate) path: String,
    pub(crate) verified: bool,
}

/// RDMA-writes memory of a device to memory of a device of another process, `count` times, over
/// this link.
pub(crate) fn run_pair(
    link: &str,
    [from, to]: [&str; 2],
    size: u64,
    count: u32,
) -> Result<Summary, String> {
    let (size, messages) = (size.to_string(), count.to_string());
    let words =
        ["write", "bw", "--local", "--json", "--link", link, "--mem", from, "--peer-mem", to];
    let more = ["-s", &size, "-n", &messages, "-t", "2"];
    let arguments =
        &super::parse(words.into_iter().chain(more)).map_err(|error| error.to_string())?;
    let report = arguments
        .test()
        .and_then(|test| client(test, arguments, &Reporter::new(true)))
        .map_err(|(Failure::Usage(why) | Failure::Runtime(why))| why)?;
    let row = report.rows.first().ok_or("no row")?;
    let Figures::Bw { mpps, .. } = row.figures else { return Err("no bandwidth".to_owned()) };
    Ok(Summary {
        each: std::time::Duration::from_secs_f64(1e-6 / mpps.max(1e-9)),
        path: match report.direct {
            Some(direct) if direct.operations >= u64::from(count) => "mapped".to_owned(),
            _ => report.remote.path,
        },
        verified: row.verified,
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_server_that_has_died_is_not_waited_for() {
        let child = Command::new("false").spawn().unwrap();
        let start = Instant::now();
        // No program listens there.
        let failure = Server { child, port: 1 }.connect(Duration::from_secs(3600)).unwrap_err();
        assert!(start.elapsed() < testkit::deadline(Duration::from_secs(10)));
        let Failure::Runtime(why) = failure else { panic!("{failure:?}") };
        assert!(why.contains("died before it accepted (exit status: 1"), "{why}");
    }
}
