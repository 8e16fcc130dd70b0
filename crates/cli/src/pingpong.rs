//! `warpwire pingpong`: messages to and fro with rdma-core's `ibv_rc_pingpong`, or with itself.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use warpwire::hca::QpTotals;
use warpwire::link::Capture;
use warpwire::link::fault::FaultPlan;
use warpwire::verbs::bootstrap::{Bootstrap, PingpongHandshake};
use warpwire::verbs::{
    Completion, Context, Cq, Mtu, Qp, QpOptions, ReceiveRequest, SendRequest, WrOp,
};

use crate::output::{self, Failure, Reporter};
use crate::perf::memory::{self, Buffer, MemoryChoice, RegisterBy};
use crate::perf::{faults, links, mtu, seconds, size};

/// Send messages to and fro with ibv_rc_pingpong
///
/// The other end is rdma-core's ibv_rc_pingpong on any RoCE device (give it -g and the index of an IPv4 or IPv6 GID),
/// or this command. Without HOST it is the server, with HOST the client. Size, number and MTU must be the same on
/// both ends, as the two do not tell each other.
///
/// A server sends back what it got, so that a client sends other bytes each time, and compares what comes back.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The server's name or address; without it, this is the server
    host: Option<String>,

    /// The TCP port on which the two ends agree
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = 18515)]
    port: u16,

    /// Where the server listens; others than this machine reach it only if this says so
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", conflicts_with = "host")]
    bind: IpAddr,

    /// Our RoCE address, with UDP port 4791; the one at which the peer sees us if not given
    #[arg(long, value_name = "ADDRESS")]
    from: Option<IpAddr>,

    /// Bytes in a message
    #[arg(short = 's', long, value_name = "SIZE", default_value = "4KiB", value_parser = size)]
    size: u64,

    /// The most payload in a packet: 256, 512, 1024, 2048 or 4096
    #[arg(short = 'm', long, value_name = "BYTES", default_value = "1024", value_parser = mtu)]
    mtu: u32,

    /// Receives that wait at a time
    #[arg(short = 'r', long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=32768))]
    rx_depth: u32,

    /// How often a message goes to and fro
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,

    /// Sleep until a completion comes, instead of polling
    #[arg(short = 'e', long)]
    events: bool,

    /// Memory of this side: host, sim:N or cuda:N
    #[arg(long, value_name = "MEMORY", default_value = "host")]
    mem: MemoryChoice,

    /// Faults on this side's link, as in loss=5%,reorder=1%,seed=7
    #[arg(long, value_name = "FAULTS", value_parser = faults)]
    fault: Option<FaultPlan>,

    /// Record this side's packets, for Wireshark
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,

    /// Do not compare what came back with what was sent
    #[arg(long)]
    no_verify: bool,

    /// How long to wait for a peer, and for each message
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    timeout: f64,

    /// Print JSON: {"role": …, "local": {…}, "remote": {…}, "iterations": …, "usec_per_iteration": …, …}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire pingpong --bind 0.0.0.0        the server; the other end: ibv_rc_pingpong -g 1 HOST
  ibv_rc_pingpong -g 1                    on a machine with a RoCE device, and here:
  warpwire pingpong 10.0.0.2              the client
  warpwire pingpong 10.0.0.2 -e -s 1MiB -m 4096 --mem cuda:0
  warpwire pingpong 127.0.0.1 --from 127.0.0.2    against a server on this machine";

/// How one end is known.
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
    /// Whether what came back was compared with what was sent.
    verified: bool,
    counters: QpTotals,
}

/// This end, ready to be connected.
struct Endpoint<'a> {
    arguments: &'a Arguments,
    is_client: bool,
    context: Context,
    cq: Cq,
    qp: Qp,
    /// Messages go out from here, and come in here.
    buffer: Buffer,
    capture: Option<Capture>,
}

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
    reporter.set_status("messages go to and fro");
    let took = endpoint.ping_pong()?;
    endpoint.linger()?;
    let report = endpoint.report(took, local, remote);
    reporter.print(&report.to_string())?;
    reporter.finish(&report)?;
    Ok(ExitCode::SUCCESS)
}

/// Finds the other end.
fn connect_peer(arguments: &Arguments, reporter: &Reporter) -> Result<Bootstrap, Failure> {
    let timeout = Duration::from_secs_f64(arguments.timeout);
    if let Some(host) = &arguments.host {
        reporter.set_status(format!("connecting to {host}:{}", arguments.port));
        return Ok(Bootstrap::connect((host.as_str(), arguments.port), timeout)?);
    }
    let address = SocketAddr::new(arguments.bind, arguments.port);
    let listener = TcpListener::bind(address).map_err(|why| {
        let fix = "give another port with -p, or an address of this machine with --bind";
        Failure::Runtime(format!("cannot listen on {address}: {why}; {fix}"))
    })?;
    let address = listener.local_addr().unwrap_or(address);
    reporter.print(&format!("  waiting for a client on {address}\n"))?;
    reporter.set_status("waiting");
    Ok(Bootstrap::accept(&listener, timeout)?)
}

impl<'a> Endpoint<'a> {
    fn new(arguments: &'a Arguments, local_ip: IpAddr) -> Result<Self, Failure> {
        let address = arguments.from.unwrap_or(local_ip).to_canonical();
        let link = format!("udp:{}", SocketAddr::new(address, roce_port()));
        let (link, capture) =
            links::make(&link, local_ip, arguments.fault, arguments.pcap.as_deref())?;
        let context = Context::open(link)?;
        if arguments.mtu > context.max_mtu().bytes() {
            let max_mtu = context.max_mtu().bytes();
            let fix = format!("give both ends -m {max_mtu}, or raise the interface's MTU");
            let why = format!("packets of {} bytes do not fit the link", arguments.mtu);
            return Err(Failure::Runtime(format!("{why}: {}; {fix}", context.path())));
        }
        let pd = context.pd();
        let device = memory::device(&arguments.mem)
            .map_err(|error| Failure::Usage(format!("--mem {}: {error}", arguments.mem)))?;
        let buffer =
            Buffer::new(&context, &pd, device.as_ref(), arguments.size, RegisterBy::Handle)?;
        let cq = context.create_cq(arguments.rx_depth + 1)?;
        let options = QpOptions {
            send_depth: 1,
            receive_depth: arguments.rx_depth,
            max_send_sge: 1,
            max_recv_sge: 1,
            mtu: Mtu::new(arguments.mtu),
            max_rd_atomic: 1,
            min_rnr_timer: 12,
            ..QpOptions::default()
        };
        let qp = context.create_qp(&pd, &cq, &cq, options)?;
        // The peer's first message may come as soon as it can.
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

    /// Sends what lies in the buffer; a client puts something new there first.
    fn send(&self, number: u32) -> Result<(), Failure> {
        if self.is_client && !self.arguments.no_verify {
            self.buffer.fill(0, self.arguments.size, number.into())?;
        }
        let range = [self.buffer.mr.sge(0, self.arguments.size as u32)];
        Ok(self.qp.post_send(&[SendRequest::new(SEND, WrOp::Send).with(&range)])?)
    }

    /// All messages, to and fro. A send follows when the one before has ended, and a message came in.
    fn ping_pong(&self) -> Result<Duration, Failure> {
        let iters = self.arguments.iters;
        let (mut sent, mut exit_result, mut received, mut posted_receives) =
            (0, 0, 0, self.arguments.rx_depth);
        let start = Instant::now();
        if self.is_client {
            self.send(sent)?;
            sent += 1;
        }
        while received < iters || exit_result < iters {
            let completion = self.next()?;
            if completion.id == SEND {
                exit_result += 1;
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
            if sent < iters && sent == exit_result && sent == answered && received > 0 {
                self.send(sent)?;
                sent += 1;
            }
        }
        Ok(start.elapsed())
    }

    /// What came must be as long as it should, and to a client what it sent.
    fn check(&self, completion: &Completion, number: u32) -> Result<(), Failure> {
        let wrong = |what: String| {
            Failure::Runtime(format!(
                "message {number} is wrong: {what}; give both ends the same -s"
            ))
        };
        if u64::from(completion.len) != self.arguments.size {
            let (len, size) = (completion.len, self.arguments.size);
            return Err(wrong(format!("{len} bytes, and not {size}")));
        }
        if !self.is_client || self.arguments.no_verify {
            return Ok(());
        }
        match self.buffer.first_mismatch(0, self.arguments.size, number.into())? {
            None => Ok(()),
            Some(at) => Err(wrong(format!("byte {at} is not the one that was sent"))),
        }
    }

    /// The next completion, which must be a success.
    fn next(&self) -> Result<Completion, Failure> {
        let timeout = Duration::from_secs_f64(self.arguments.timeout);
        let completion = match self.arguments.events {
            true => self.cq.next(timeout)?,
            false => self.poll(timeout)?,
        };
        let Some(completion) = completion else {
            let (why, fix) = ("nothing came", "look at what the other end says");
            let seconds = timeout.as_secs_f64();
            return Err(Failure::Runtime(format!("{why} for {seconds} s; {fix}, and at its -g")));
        };
        if !completion.is_success() {
            let status = completion.status;
            let fix = "look whether both ends have the same -s and -m, and what the other says";
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
                // On a machine with fewer cores than work, the peer may wait for this one.
                std::thread::yield_now();
                if start.elapsed() >= timeout {
                    break;
                }
            }
        }
        Ok(None)
    }

    /// The peer's last message may come again if our answer was lost, and nobody says when the peer is done: stays
    /// for a little while, and longer if packets still come.
    fn linger(&self) -> Result<(), Failure> {
        const QUIET: Duration = Duration::from_millis(100);
        let packets = || self.context.stats().pairs.packets_received;
        let (start, mut last, mut before) = (Instant::now(), Instant::now(), packets());
        while last.elapsed() < QUIET && start.elapsed() < QUIET * 20 {
            self.context.hca().poll()?;
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
            counters: self.context.stats().pairs,
        }
    }
}

/// Such ends know one port.
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
    /// As `ibv_rc_pingpong` has it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { size, iterations, seconds, mbit_per_second, usec_per_iteration, .. } = self;
        let bytes = size * u64::from(*iterations) * 2;
        writeln!(f, "{bytes} bytes in {seconds:.2} seconds = {mbit_per_second:.2} Mbit/sec")?;
        writeln!(
            f,
            "{iterations} iters in {seconds:.2} seconds = {usec_per_iteration:.2} usec/iter"
        )?;
        match (self.verified, self.role) {
            (true, _) => writeln!(f, "what came back is what was sent"),
            (false, "server") => writeln!(f, "what came was sent back"),
            _ => Ok(()),
        }
    }
}
