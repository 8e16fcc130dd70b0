//! `warpwire pingpong`: round trips with rdma-core's `ibv_rc_pingpong`, or with itself.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use warpwire::hca::QpTotals;
use warpwire::link::Capture;
use warpwire::link::fault::FaultPlan;
use warpwire::verbs::bootstrap::{Bootstrap, BootstrapListener, PingpongHandshake};
use warpwire::verbs::{
    Completion, Context, Cq, Mtu, Qp, QpOptions, ReceiveRequest, SendRequest, WrOp,
};

use crate::output::{self, Failure, HostPort, Reporter};
use crate::perf::memory::{self, Buffer, MemoryChoice, RegisterBy};
use crate::perf::{faults, links, mtu, seconds, size};

/// Exchange messages with ibv_rc_pingpong
///
/// The peer is rdma-core's ibv_rc_pingpong on any RoCE device (give it -g and the index of an IPv4
/// or IPv6 GID), or this command. Without HOST this side is the server, with HOST the client.
/// Message size, iterations and MTU must be the same on both sides: the handshake does not carry
/// them.
///
/// The server echoes what it receives; the client sends different bytes each time and compares the
/// echo with them.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Name or address of the server; without it, this side is the server
    host: Option<String>,

    /// TCP port of the handshake
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = 18515)]
    port: u16,

    /// Address the server listens on; the default is reachable from this machine only
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", conflicts_with = "host")]
    bind: IpAddr,

    /// Local RoCE address (UDP port 4791); default: local address of the TCP connection
    #[arg(long, value_name = "ADDRESS")]
    from: Option<IpAddr>,

    /// Message size, in bytes or with a unit as in 64KiB
    #[arg(short = 's', long, value_name = "SIZE", default_value = "4KiB", value_parser = size)]
    size: u64,

    /// Path MTU, the max payload of a packet: 256, 512, 1024, 2048 or 4096
    #[arg(short = 'm', long, value_name = "BYTES", default_value = "1024", value_parser = mtu)]
    mtu: u32,

    /// Depth of the receive queue
    #[arg(short = 'r', long, value_name = "N", default_value_t = 500,
        value_parser = clap::value_parser!(u32).range(1..=32768))]
    rx_depth: u32,

    /// Number of round trips
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1000,
        value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,

    /// Sleep until a completion arrives, instead of polling
    #[arg(short = 'e', long)]
    events: bool,

    /// Memory of this side: host, sim:N or cuda:N
    #[arg(long, value_name = "MEMORY", default_value = "host")]
    mem: MemoryChoice,

    /// Faults to inject on this side's link, as in loss=5%,reorder=1%,seed=7
    #[arg(long, value_name = "FAULTS", value_parser = faults)]
    fault: Option<FaultPlan>,

    /// Capture this side's packets, up to 64 MiB, to a pcap file for Wireshark
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,

    /// Do not compare the echo with what was sent
    #[arg(long)]
    no_verify: bool,

    /// Timeout for the peer to connect, and for each message
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    timeout: f64,

    /// Print JSON: {"role": …, "local": {…}, "remote": {…}, "iterations": …,
    /// "usec_per_iteration": …, …}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire pingpong --bind 0.0.0.0        server; on the peer: ibv_rc_pingpong -g 1 HOST
  ibv_rc_pingpong -g 1                    on a machine with a RoCE device, and here:
  warpwire pingpong 10.0.0.2              client
  warpwire pingpong 10.0.0.2 -e -s 1MiB -m 4096 --mem cuda:0
  # against a server on this machine
  warpwire pingpong 127.0.0.1 --from 127.0.0.2";

/// Max length of a capture.
const PCAP_MAX: u64 = 64 << 20;

/// The address of one side, as in the handshake.
#[derive(Serialize)]
struct AddressInfo {
    qpn: u32,
    psn: u32,
    gid: String,
}

#[derive(Serialize)]
struct Report {
    role: &'static str,
    link: String,
    local: AddressInfo,
    remote: AddressInfo,
    size: u64,
    mtu: u32,
    iterations: u32,
    seconds: f64,
    mbit_per_second: f64,
    usec_per_iteration: f64,
    /// True if the client compared every echo with what it sent.
    verified: bool,
    /// `None` on hardware.
    counters: Option<QpTotals>,
}

/// This side: device, queue pair and memory, ready to be connected.
struct Endpoint<'a> {
    arguments: &'a Arguments,
    is_client: bool,
    context: Context,
    cq: Cq,
    qp: Qp,
    /// Both the send and the receive buffer.
    buffer: Buffer,
    capture: Option<Capture>,
}

/// Work request ids.
const RECEIVE: u64 = 1;
const SEND: u64 = 2;

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    output::exit_result(run_pingpong(arguments))
}

fn run_pingpong(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let reporter = Reporter::new(arguments.json);
    let mut bootstrap = connect_peer(arguments, &reporter)?;
    let endpoint = Endpoint::new(arguments, bootstrap.local()?.ip())?;
    let mine = PingpongHandshake::of(&endpoint.qp.endpoint());
    let connect = |theirs: &PingpongHandshake| endpoint.qp.connect(&theirs.endpoint(arguments.mtu));
    let theirs = if endpoint.is_client {
        let theirs = bootstrap.handshake_as_client(&mine)?;
        connect(&theirs)?;
        theirs
    } else {
        bootstrap.handshake_as_server(&mine, connect)?
    };
    let [local, remote] = [mine, theirs].map(AddressInfo::of);
    reporter.print(&format!("  local address:  {local}\n  remote address: {remote}\n"))?;
    reporter.set_status("exchanging messages");
    let took = endpoint.ping_pong()?;
    endpoint.linger()?;
    let report = endpoint.report(took, local, remote);
    reporter.print(&report.to_string())?;
    reporter.finish(&report)?;
    Ok(ExitCode::SUCCESS)
}

/// Connects to the server, or waits for a client.
fn connect_peer(arguments: &Arguments, reporter: &Reporter) -> Result<Bootstrap, Failure> {
    let timeout = Duration::from_secs_f64(arguments.timeout);
    if let Some(host) = &arguments.host {
        reporter.set_status(format!("connecting to {host}:{}", arguments.port));
        let host = HostPort(host, arguments.port);
        let connect = || Bootstrap::connect(host, timeout);
        return Ok(reporter.wait_for(&host.to_string(), connect)?);
    }
    let address = SocketAddr::new(arguments.bind, arguments.port);
    let listener = TcpListener::bind(address).map_err(|why| {
        let fix = "give another port with -p, or an address of this machine with --bind";
        Failure::Runtime(format!("cannot listen on {address}: {why}; {fix}"))
    })?;
    let address = listener.local_addr().unwrap_or(address);
    reporter.print(&format!("  waiting for a client on {address}\n"))?;
    reporter.set_status("waiting");
    Ok(BootstrapListener::new(listener)?.accept_handshake(timeout)?)
}

impl<'a> Endpoint<'a> {
    fn new(arguments: &'a Arguments, local_ip: IpAddr) -> Result<Self, Failure> {
        let address = arguments.from.unwrap_or(local_ip).to_canonical();
        let link = format!("udp:{}", SocketAddr::new(address, roce_port()));
        let (link, capture) = links::make(
            &link,
            local_ip,
            arguments.fault,
            arguments.pcap.as_deref().map(|path| (path, PCAP_MAX)),
        )?;
        let context = Context::open(link)?;
        if arguments.mtu > context.max_mtu().bytes() {
            let max_mtu = context.max_mtu().bytes();
            let fix = format!("give both sides -m {max_mtu}, or raise the interface's MTU");
            let why = format!("packets of {} bytes do not fit the link", arguments.mtu);
            return Err(Failure::Runtime(format!("{why}: {}; {fix}", context.path())));
        }
        let pd = context.alloc_pd();
        let device = memory::device(&arguments.mem)
            .map_err(|error| Failure::Usage(format!("--mem {}: {error}", arguments.mem)))?;
        let buffer =
            Buffer::new(&context, &pd, device.as_ref(), arguments.size, RegisterBy::Handle)?;
        let cq = context.create_cq(arguments.rx_depth + 1)?;
        let options = QpOptions::default()
            .with_send_depth(1)
            .with_receive_depth(arguments.rx_depth)
            .with_max_send_sge(1)
            .with_max_recv_sge(1)
            .with_mtu(Mtu::new(arguments.mtu))
            .with_max_rd_atomic(1);
        let qp = context.create_qp(&pd, &cq, &cq, options)?;
        // The peer may send its first message as soon as it is connected: receives must be posted.
        qp.modify(&qp.init_attr())?;
        let is_client = arguments.host.is_some();
        let endpoint = Self { arguments, is_client, context, cq, qp, buffer, capture };
        endpoint.post_receives(arguments.rx_depth)?;
        Ok(endpoint)
    }

    fn post_receives(&self, count: u32) -> Result<(), Failure> {
        let range = [self.buffer.mr.sge(0, self.arguments.size as u32)];
        for _ in 0..count {
            self.qp.post_receive(&[ReceiveRequest { id: RECEIVE, data: &range }])?;
        }
        Ok(())
    }

    /// Sends the buffer; a client fills it with a new pattern first.
    fn send(&self, number: u32) -> Result<(), Failure> {
        if self.is_client && !self.arguments.no_verify {
            self.buffer.fill(0, self.arguments.size, number.into())?;
        }
        let range = [self.buffer.mr.sge(0, self.arguments.size as u32)];
        Ok(self.qp.post_send(&[SendRequest::new(SEND, WrOp::Send).with(&range)])?)
    }

    /// Runs all round trips. A message is sent when the previous send has completed and the peer's
    /// message has arrived.
    fn ping_pong(&self) -> Result<Duration, Failure> {
        let iters = self.arguments.iters;
        let (mut sent, mut completed, mut received, mut posted_receives) =
            (0, 0, 0, self.arguments.rx_depth);
        let start = Instant::now();
        if self.is_client {
            self.send(sent)?;
            sent += 1;
        }
        while received < iters || completed < iters {
            let completion = self.next()?;
            if completion.id == SEND {
                completed += 1;
            } else {
                self.check(&completion, received)?;
                received += 1;
                posted_receives -= 1;
                if posted_receives <= 1 {
                    self.post_receives(self.arguments.rx_depth - posted_receives)?;
                    posted_receives = self.arguments.rx_depth;
                }
            }
            let answered = if self.is_client { received } else { received.saturating_sub(1) };
            if sent < iters && sent == completed && sent == answered && received > 0 {
                self.send(sent)?;
                sent += 1;
            }
        }
        Ok(start.elapsed())
    }

    /// Checks the length of a received message and, on the client, its bytes.
    fn check(&self, completion: &Completion, number: u32) -> Result<(), Failure> {
        let wrong = |what: String| {
            Failure::Runtime(format!(
                "message {number} is wrong: {what}; give both sides the same -s"
            ))
        };
        if u64::from(completion.len) != self.arguments.size {
            let (len, size) = (completion.len, self.arguments.size);
            return Err(wrong(format!("{len} bytes instead of {size}")));
        }
        if !self.is_client || self.arguments.no_verify {
            return Ok(());
        }
        match self.buffer.first_mismatch(0, self.arguments.size, number.into())? {
            None => Ok(()),
            Some(at) => Err(wrong(format!("byte {at} differs from what was sent"))),
        }
    }

    /// The next completion, which must be a success.
    fn next(&self) -> Result<Completion, Failure> {
        let timeout = Duration::from_secs_f64(self.arguments.timeout);
        let completion = match self.arguments.events {
            true => self.cq.wait_next(timeout)?,
            false => self.poll(timeout)?,
        };
        let Some(completion) = completion else {
            let (why, fix) = ("no completion", "check the peer's output and its -g");
            let seconds = timeout.as_secs_f64();
            return Err(Failure::Runtime(format!("{why} for {seconds} s; {fix}")));
        };
        if !completion.is_success() {
            let status = completion.status;
            let fix = "check that both sides have the same -s and -m, and the peer's output";
            return Err(Failure::Runtime(format!("a message failed: {status:?}; {fix}")));
        }
        Ok(completion)
    }

    fn poll(&self, timeout: Duration) -> Result<Option<Completion>, Failure> {
        let mut one = [Completion::EMPTY];
        let start = Instant::now();
        for spins in 1_u32.. {
            if self.cq.poll(&mut one)? == 1 {
                return Ok(Some(one[0]));
            }
            if spins.is_multiple_of(64) {
                // With fewer cores than busy threads, the peer may need this core.
                std::thread::yield_now();
                if start.elapsed() >= timeout {
                    break;
                }
            }
        }
        Ok(None)
    }

    /// Keeps the device running until no packet has arrived for 100 ms, 2 s at most: if the last
    /// ACK was lost, the peer retransmits, and the protocol has no closing handshake.
    fn linger(&self) -> Result<(), Failure> {
        const QUIET: Duration = Duration::from_millis(100);
        let packets = || self.context.stats().map(|stats| stats.pairs.packets_received);
        let (start, mut last, mut before) = (Instant::now(), Instant::now(), packets());
        while last.elapsed() < QUIET && start.elapsed() < QUIET * 20 {
            if let Some(hca) = self.context.soft() {
                hca.poll()?;
            }
            std::thread::sleep(Duration::from_millis(1));
            if std::mem::replace(&mut before, packets()) != before {
                last = Instant::now();
            }
        }
        self.capture.as_ref().map_or(Ok(()), |capture| Ok(capture.finish()?))
    }

    fn report(&self, took: Duration, local: AddressInfo, remote: AddressInfo) -> Report {
        let Arguments { size, mtu, iters, no_verify, .. } = *self.arguments;
        let seconds = took.as_secs_f64();
        Report {
            role: if self.is_client { "client" } else { "server" },
            link: self.context.path().to_string(),
            local,
            remote,
            size,
            mtu,
            iterations: iters,
            seconds,
            mbit_per_second: (size * u64::from(iters) * 2) as f64 * 8e-6 / seconds,
            usec_per_iteration: seconds * 1e6 / f64::from(iters),
            verified: self.is_client && !no_verify,
            counters: self.context.stats().map(|stats| stats.pairs),
        }
    }
}

/// The RoCE v2 UDP port: the handshake carries no other.
fn roce_port() -> u16 {
    warpwire::link::udp::ADDRESS.port()
}

impl AddressInfo {
    fn of(handshake: PingpongHandshake) -> Self {
        Self { qpn: handshake.qpn, psn: handshake.psn, gid: handshake.gid.to_string() }
    }
}

impl std::fmt::Display for AddressInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { qpn, psn, gid } = self;
        write!(f, "QPN {qpn:#08x}, PSN {psn:#08x}, GID {gid}")
    }
}

impl std::fmt::Display for Report {
    /// In the format of `ibv_rc_pingpong`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { size, iterations, seconds, mbit_per_second, usec_per_iteration, .. } = self;
        let bytes = size * u64::from(*iterations) * 2;
        writeln!(f, "{bytes} bytes in {seconds:.2} seconds = {mbit_per_second:.2} Mbit/sec")?;
        writeln!(
            f,
            "{iterations} iters in {seconds:.2} seconds = {usec_per_iteration:.2} usec/iter"
        )?;
        match (self.verified, self.role) {
            (true, _) => writeln!(f, "verified: every echo matches what was sent"),
            (false, "server") => writeln!(f, "echoed every message"),
            _ => Ok(()),
        }
    }
}
