//! Servers in a kernel, and a kernel as somebody's client.

use std::io::Write;
use std::net::{SocketAddr, ToSocketAddrs};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::Serialize;
use warpwire::sock::{SockOptions, SockStats};
use warpwire_apps::kv::{KvOptions, KvServer, KvStats};
use warpwire_apps::programs::Service;

use super::cpu::{self, CpuFlag};
use super::peer::Family;
use super::{SockTarget, heading};
use crate::copy::target::size;
use crate::output::{self, Failure, print_json};

/// How often a server that has a time limit looks at the clock.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, ValueEnum)]
enum ServiceChoice {
    Echo,
    Sink,
    Http,
}

/// Serve TCP clients from a kernel: echo, sink or http
#[derive(Args)]
pub(super) struct Serve {
    #[command(flatten)]
    target: SockTarget,

    /// Where to listen; port 0 lets the system choose
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7000")]
    bind: SocketAddr,

    #[command(flatten)]
    cpu_flag: CpuFlag,

    /// What to do with what comes
    #[arg(long, value_enum, default_value = "echo")]
    service: ServiceChoice,

    /// Blocks of the kernel, each with one client at a time
    #[arg(short = 'w', long, value_name = "N", default_value_t = 8)]
    workers: u32,

    /// Stop after so long; without it, serve until interrupted
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,

    /// Print JSON at the end: {"address": …, "sockets": {…}}
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct ServeReport {
    address: String,
    sockets: SockStats,
}

/// Says where it listens, at once: scripts read that line.
pub(super) fn announce(
    json: bool,
    heading: &str,
    what: &str,
    address: SocketAddr,
) -> Result<(), Failure> {
    let line = format!("{what} listens at {address}\n");
    if json {
        // Standard output is for the report.
        let _ = std::io::stderr().write_all(line.as_bytes());
        return Ok(());
    }
    output::print(&format!("{heading}{line}")).map_err(Failure::Runtime)
}

pub(super) fn wait(seconds: Option<u64>) {
    let begun = Instant::now();
    while seconds.is_none_or(|limit| begun.elapsed() < Duration::from_secs(limit)) {
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// How many bytes went which way.
pub(super) fn traffic(sockets: &SockStats) -> String {
    let mut text =
        format!("{} bytes in, {} bytes out through the host", sockets.received, sockets.sent);
    if sockets.warp_received + sockets.warp_sent > 0 {
        let more = format!(", {} in, {} out by RDMA", sockets.warp_received, sockets.warp_sent);
        text.push_str(&more);
    }
    text
}

impl Serve {
    /// The same by threads of the CPU.
    fn run_on_cpu(&self) -> Result<ExitCode, Failure> {
        let (is_echo, name) = match self.service {
            ServiceChoice::Echo => (true, "an echo of the CPU's"),
            ServiceChoice::Sink => (false, "a CPU that throws away"),
            ServiceChoice::Http => {
                return Err(Failure::Usage(
                    "cannot answer HTTP by the CPU: that is a kernel's; leave out --cpu".to_owned(),
                ));
            }
        };
        let (address, served) = cpu::serve(self.target.family, self.bind, is_echo)?;
        announce(self.json, "# sock serve by threads of the CPU\n", name, address)?;
        wait(self.seconds);
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let sockets = SockStats {
            accepted: of(&served.connections),
            received: of(&served.received),
            sent: of(&served.sent),
            ..SockStats::default()
        };
        self.report(address, sockets)
    }

    fn report(&self, address: SocketAddr, sockets: SockStats) -> Result<ExitCode, Failure> {
        if self.json {
            let address = address.to_string();
            print_json(&ServeReport { address, sockets }).map_err(Failure::Runtime)?;
        } else {
            let text = format!("{} connections, {}\n", sockets.accepted, traffic(&sockets));
            output::print(&text).map_err(Failure::Runtime)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    pub(super) fn run(&self) -> Result<ExitCode, Failure> {
        if self.cpu_flag.cpu {
            return self.run_on_cpu();
        }
        let (host, no_cuda) = self.target.open(SockOptions::default())?;
        let programs = self.target.programs(&host)?;
        let (service, name) = match self.service {
            ServiceChoice::Echo => (Service::Echo, "an echo kernel"),
            ServiceChoice::Sink => (Service::Sink, "a kernel that throws away"),
            ServiceChoice::Http => (Service::Http, "an HTTP kernel"),
        };
        let server = programs.serve(&host, service, self.bind, self.workers)?;
        let head = heading("serve", &host, no_cuda.as_deref());
        announce(self.json, &head, name, server.address())?;
        wait(self.seconds);
        let address = server.address();
        drop(server);
        self.report(address, host.stats())
    }
}

/// Serve keys and values from a kernel, for redis-cli and redis-benchmark
///
/// The store lies in device memory. Known: GET SET DEL EXISTS INCR DECR MGET PING ECHO DBSIZE QUIT.
#[derive(Args)]
pub(super) struct Kv {
    #[command(flatten)]
    target: SockTarget,

    /// Where to listen; port 0 lets the system choose
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:6379")]
    bind: SocketAddr,

    /// Blocks of the kernel
    #[arg(short = 'w', long, value_name = "N", default_value_t = 4)]
    workers: u32,

    /// Clients at a time; more are told so and closed
    #[arg(short = 'c', long, value_name = "N", default_value_t = 128)]
    clients: u32,

    /// The longest value
    #[arg(long, value_name = "SIZE", default_value = "1KiB", value_parser = size)]
    value: u64,

    /// Room for so many keys, at best
    #[arg(long, value_name = "N", default_value_t = 1 << 16)]
    keys: u64,

    /// How long half a command, or an answer that is not taken, is borne
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    patience: u64,

    /// Stop after so long; without it, serve until interrupted
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,

    /// Print JSON at the end: {"address": …, "store": {…}, "sockets": {…}}
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct KvReport {
    address: String,
    store: KvStats,
    sockets: SockStats,
}

impl Kv {
    pub(super) fn run(&self) -> Result<ExitCode, Failure> {
        if self.target.family == Family::Warp {
            return Err(Failure::Usage(
                "cannot serve keys by RDMA: its clients speak TCP; leave out --family".to_owned(),
            ));
        }
        // Those that are turned away need places too.
        let sockets = (self.clients.saturating_add(64)).min(65_535);
        let ring = 16 << 10;
        let options = SockOptions { sockets, ring, ..SockOptions::default() }.fitted();
        let (host, no_cuda) = self.target.open(options)?;
        let options = KvOptions {
            workers: self.workers,
            clients: self.clients,
            buckets: self.keys.div_ceil(16).max(1).next_power_of_two(),
            most_value: self.value.next_multiple_of(16),
            patience: Duration::from_secs(self.patience),
            ..KvOptions::at(self.bind)
        };
        let server = KvServer::start(&host, options)?;
        let head = heading("kv", &host, no_cuda.as_deref());
        announce(self.json, &head, "a key-value kernel", server.address())?;
        wait(self.seconds);
        let (address, store) = (server.address().to_string(), server.stats()?);
        drop(server);
        let sockets = host.stats();
        if self.json {
            print_json(&KvReport { address, store, sockets }).map_err(Failure::Runtime)?;
        } else {
            let text = format!(
                "{} commands, {} keys, {} connections, {} refused, {}\n",
                store.commands,
                store.keys,
                sockets.accepted,
                store.refused,
                traffic(&sockets)
            );
            output::print(&text).map_err(Failure::Runtime)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Let a kernel connect to any TCP server, ask, and show the answer
#[derive(Args)]
pub(super) struct Connect {
    #[command(flatten)]
    target: SockTarget,

    /// The server
    #[arg(value_name = "HOST:PORT")]
    server: String,

    #[command(flatten)]
    cpu_flag: CpuFlag,

    /// What to send; \r, \n, \t and \\ are understood
    #[arg(long, value_name = "TEXT", default_value = "")]
    send: String,

    /// The longest answer
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = size)]
    most: u64,

    /// How long to wait for each piece
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    timeout: u64,
}

/// Text with its escapes understood.
fn unescape(text: &str) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let mut chars = text.chars();
    while let Some(ch) = chars.next() {
        let decoded = match ch {
            '\\' => match chars.next() {
                Some('r') => '\r',
                Some('n') => '\n',
                Some('t') => '\t',
                Some('\\') => '\\',
                other => {
                    let what = other.map_or("nothing".to_owned(), String::from);
                    return Err(Failure::Usage(format!(
                        "cannot send {text:?}: a backslash before {what}; write \\r, \\n, \\t or \\\\"
                    )));
                }
            },
            ch => ch,
        };
        bytes.extend(decoded.encode_utf8(&mut [0; 4]).as_bytes());
    }
    Ok(bytes)
}

impl Connect {
    pub(super) fn run(&self) -> Result<ExitCode, Failure> {
        let request = unescape(&self.send)?;
        let found = self.server.to_socket_addrs().map(|mut list| list.next());
        let server = match found {
            Ok(Some(server)) => server,
            Ok(None) => {
                return Err(Failure::Usage(format!("cannot find {}: no address", self.server)));
            }
            Err(error) => {
                return Err(Failure::Usage(format!(
                    "cannot find {}: {error}; write HOST:PORT",
                    self.server
                )));
            }
        };
        let timeout = Duration::from_secs(self.timeout.max(1));
        let answer = if self.cpu_flag.cpu {
            cpu::talk(self.target.family, server, &request, self.most, timeout)?
        } else {
            let (host, _) = self.target.open(SockOptions::default())?;
            let programs = self.target.programs(&host)?;
            programs.talk(&host, server, &request, self.most, timeout)?
        };
        std::io::stdout()
            .write_all(&answer)
            .map_err(|error| Failure::Runtime(format!("cannot write the answer: {error}")))?;
        Ok(ExitCode::SUCCESS)
    }
}
