//! `warpwire sock serve`, `kv` and `connect`: servers and a client in a kernel.

use std::io::Write;
use std::net::{SocketAddr, ToSocketAddrs};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::Serialize;
use warpwire::sock::{SockOptions, SockStats};
use warpwire_apps::kv::{KvOptions, KvServer, KvStats};
use warpwire_apps::programs::ServerKind;

use super::cpu::{self, CpuFlag};
use super::peer::Family;
use super::{SockTarget, heading};
use crate::copy::target::size;
use crate::output::{self, Failure, print_json};

/// How often a server checks `--seconds`.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, ValueEnum)]
enum ServiceChoice {
    /// Send back what is received
    Echo,
    /// Discard what is received
    Sink,
    /// Answer HTTP requests with a short text
    Http,
}

/// Serve clients from a kernel: echo, sink or http
#[derive(Args)]
#[command(after_help = SERVE_EXAMPLES)]
pub(super) struct Serve {
    #[command(flatten)]
    target: SockTarget,

    /// Address to listen on; with port 0 the system chooses a port
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7000",
        value_parser = super::address)]
    bind: SocketAddr,

    #[command(flatten)]
    cpu_flag: CpuFlag,

    /// What the server does
    #[arg(long, value_enum, default_value = "echo")]
    service: ServiceChoice,

    /// Thread blocks of the kernel; each serves one client at a time
    #[arg(short = 'w', long, value_name = "N", default_value_t = 8)]
    workers: u32,

    /// Stop after this time; default: serve until interrupted
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,

    /// Print JSON at the end: {"address": …, "sockets": {…}}
    #[arg(long)]
    json: bool,
}

const SERVE_EXAMPLES: &str = "\
Examples:
  warpwire sock serve                        try: nc 127.0.0.1 7000
  warpwire sock serve --service http         try: curl http://127.0.0.1:7000/
  warpwire sock serve --family warp          try: warpwire sock connect --family warp ...
  warpwire sock serve --bind 0.0.0.0:7000 -w 32 --seconds 60 --json";

#[derive(Serialize)]
struct ServeReport {
    address: String,
    sockets: SockStats,
}

/// Prints the address, flushed: scripts wait for that line.
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

/// Bytes received and sent, through the host and by RDMA.
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
    /// Serves from CPU threads.
    fn run_on_cpu(&self) -> Result<ExitCode, Failure> {
        let (is_echo, name) = match self.service {
            ServiceChoice::Echo => (true, "a CPU echo server"),
            ServiceChoice::Sink => (false, "a CPU sink"),
            ServiceChoice::Http => {
                return Err(Failure::Usage(
                    "cannot serve HTTP from the CPU: only kernels do; omit --cpu".to_owned(),
                ));
            }
        };
        let (address, served) = cpu::serve(self.target.family, self.bind, is_echo)?;
        announce(self.json, "# sock serve by CPU threads\n", name, address)?;
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
            ServiceChoice::Echo => (ServerKind::Echo, "an echo kernel"),
            ServiceChoice::Sink => (ServerKind::Sink, "a sink kernel"),
            ServiceChoice::Http => (ServerKind::Http, "an HTTP kernel"),
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

/// Serve a key-value store from a kernel, for redis-cli and redis-benchmark
///
/// The store is in device memory. Commands: GET SET DEL EXISTS INCR DECR MGET PING ECHO DBSIZE
/// QUIT.
#[derive(Args)]
#[command(after_help = KV_EXAMPLES)]
pub(super) struct Kv {
    #[command(flatten)]
    target: SockTarget,

    /// Address to listen on; with port 0 the system chooses a port
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:6379",
        value_parser = super::address)]
    bind: SocketAddr,

    /// Thread blocks of the kernel
    #[arg(short = 'w', long, value_name = "N", default_value_t = 4)]
    workers: u32,

    /// Max concurrent clients; more are answered with an error and closed
    #[arg(short = 'c', long, value_name = "N", default_value_t = 128)]
    clients: u32,

    /// Max size of a value, rounded up to 16 bytes
    #[arg(long, value_name = "SIZE", default_value = "1KiB", value_parser = size)]
    value: u64,

    /// Max number of keys; collisions may lower it
    #[arg(long, value_name = "N", default_value_t = 1 << 16)]
    keys: u64,

    /// Close a client that leaves a command incomplete, or a reply unread, for this long
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    idle_timeout: u64,

    /// Stop after this time; default: serve until interrupted
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,

    /// Print JSON at the end: {"address": …, "store": {…}, "sockets": {…}}
    #[arg(long)]
    json: bool,
}

const KV_EXAMPLES: &str = "\
Examples:
  warpwire sock kv                           try: redis-cli, redis-benchmark -t set,get
  warpwire sock kv --bind 127.0.0.1:7379 --keys 1000000 --value 4KiB
  warpwire sock kv --idle-timeout 60 -c 512";

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
                "cannot serve key-value clients by RDMA: they use TCP; omit --family".to_owned(),
            ));
        }
        // Clients above the limit need a socket too, to be refused.
        let sockets = (self.clients.saturating_add(64)).min(65_535);
        let ring = 16 << 10;
        let options =
            SockOptions::default().with_sockets(sockets).with_ring(ring).with_fitting_arena();
        let (host, no_cuda) = self.target.open(options)?;
        let options = KvOptions {
            workers: self.workers,
            clients: self.clients,
            buckets: self.keys.div_ceil(16).max(1).next_power_of_two(),
            max_value: self.value.next_multiple_of(16),
            idle_timeout: Duration::from_secs(self.idle_timeout),
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

/// Connect to a server from a kernel, send a request, and print the reply
#[derive(Args)]
#[command(after_help = CONNECT_EXAMPLES)]
pub(super) struct Connect {
    #[command(flatten)]
    target: SockTarget,

    /// Name or address of the server, and its port
    #[arg(value_name = "HOST:PORT")]
    server: String,

    #[command(flatten)]
    cpu_flag: CpuFlag,

    /// Request to send; \r, \n, \t and \\ are escapes
    #[arg(long, value_name = "TEXT", default_value = "")]
    send: String,

    /// Max bytes of the reply to receive
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = size)]
    max_bytes: u64,

    /// Timeout of each socket operation, at least 1
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    timeout: u64,
}

const CONNECT_EXAMPLES: &str = "\
Examples:
  warpwire sock connect 127.0.0.1:8080 --send 'GET / HTTP/1.0\\r\\n\\r\\n'
  warpwire sock connect localhost:7000 --send hello --timeout 2
  warpwire sock connect 10.0.0.2:80 --send 'GET / HTTP/1.0\\r\\n\\r\\n' --max-bytes 4KiB";

/// Replaces the escapes of `--send`.
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
                        "cannot send {text:?}: backslash before {what}; write \\r, \\n, \\t or \\\\"
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
        let found = self.server.to_socket_addrs().map_err(|error| {
            Failure::Usage(format!("cannot find {}: {error}; write HOST:PORT", self.server))
        })?;
        // A name such as localhost has several addresses, and the server perhaps only one.
        let mut answer = Err(Failure::Usage(format!("cannot find {}: no address", self.server)));
        for server in found {
            answer = self.talk(server, &request);
            if answer.is_ok() {
                break;
            }
        }
        let answer = answer?;
        std::io::stdout()
            .write_all(&answer)
            .map_err(|error| Failure::Runtime(format!("cannot write the reply: {error}")))?;
        Ok(ExitCode::SUCCESS)
    }

    fn talk(&self, server: SocketAddr, request: &[u8]) -> Result<Vec<u8>, Failure> {
        let timeout = Duration::from_secs(self.timeout.max(1));
        if self.cpu_flag.cpu {
            return cpu::talk(self.target.family, server, request, self.max_bytes, timeout);
        }
        let (host, _) = self.target.open(SockOptions::default())?;
        let programs = self.target.programs(&host)?;
        Ok(programs.talk(&host, server, request, self.max_bytes, timeout)?)
    }
}
