//! `warpwire perf`: RDMA bandwidth and latency between two processes, compatible with perftest.

mod bw;
mod control;
mod endpoint;
mod lat;
pub(crate) mod links;
mod local;
pub(crate) mod memory;
pub(crate) mod perftest;
mod samples;
mod session;
mod table;
mod test;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use warpwire::link::fault::FaultPlan;
use warpwire::units;

use crate::output::{self, Failure, HostPort, Reporter};
pub(crate) use local::run_pair;
use memory::{MemoryChoice, RegisterBy};
use test::{Connection, Metric, Test, Verb};

/// Measure RDMA writes, reads, sends and atomics between two processes
///
/// Usage and tables follow perftest: without HOST this side is the server, with HOST the client;
/// with --local this process is the client and starts the server. The software HCA carries RoCE v2
/// over --link, so no RDMA hardware is needed; --device uses hardware, and the two kinds
/// interoperate. Memory of either side may be the host's or a GPU's.
///
/// Unlike with perftest, the server takes sizes, iterations, queue pairs and all else that both
/// sides must agree on from the client. The test (write bw, read lat, …) must be the same on both
/// sides, or both fail. Received data is compared with what was sent; a difference is an error.
/// Options of perftest may be written with underscores; those that are missing here say what to
/// use instead.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Operation to measure
    verb: Verb,

    /// What to measure: bw (bandwidth) or lat (latency: half a round trip for write and send, a
    /// whole one for read and atomic)
    metric: Metric,

    /// Name or address of the server; without it, this side is the server
    host: Option<String>,

    /// Run both sides on this machine, as two processes
    #[arg(long, conflicts_with = "host")]
    local: bool,

    /// TCP port of the control connection
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = PORT)]
    port: u16,

    /// Address the server listens on; the default is reachable from this machine only
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", conflicts_with = "host")]
    bind: std::net::IpAddr,

    /// Message size, as in 64KiB [default: 2 for latency, 64KiB for bandwidth; 8 for atomics]
    #[arg(short = 's', long, value_name = "SIZE", value_parser = size)]
    size: Option<u64>,

    /// Measure all powers of two from 2 bytes to --max
    #[arg(short = 'a', long, conflicts_with = "size")]
    all: bool,

    /// Max size of --all
    #[arg(long, value_name = "SIZE", default_value = "8MiB", value_parser = size, requires = "all")]
    max: u64,

    /// Messages per size [default: 5000 for bandwidth, 1000 for latency, fewer for large sizes]
    #[arg(short = 'n', long, alias = "iters", value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..))]
    iterations: Option<u32>,

    /// Duration per size, instead of a number of messages
    #[arg(short = 'D', long, value_name = "SECONDS", conflicts_with = "iterations",
        value_parser = seconds)]
    duration: Option<f64>,

    /// Go on until interrupted (Ctrl-C), with a row per second, or per -D
    #[arg(long, conflicts_with_all = ["iterations", "all"])]
    run_infinitely: bool,

    /// Both directions at the same time; bandwidth is the sum (bandwidth only)
    #[arg(short = 'b', long)]
    bidirectional: bool,

    /// Transport service of the queue pairs
    #[arg(short = 'c', long, value_name = "SERVICE", default_value = "RC", ignore_case = true)]
    connection: Connection,

    /// Sleep until completion events instead of polling, on both sides
    #[arg(short = 'e', long)]
    events: bool,

    /// Send messages up to this size inline, 0 to 512 [default: 64 for latency, 0 for bandwidth]
    #[arg(short = 'I', long, value_name = "BYTES",
        value_parser = clap::value_parser!(u32).range(0..=test::MAX_INLINE as i64))]
    inline_size: Option<u32>,

    /// Signal one message in N [default: one in depth / 4] (bandwidth only)
    #[arg(short = 'Q', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    cq_mod: Option<u32>,

    /// Number of queue pairs (bandwidth only)
    #[arg(short = 'q', long, alias = "qp", value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=4096))]
    qps: u32,

    /// Number of engines of this side's device, 1 to 16; with --local, of both. Each has a socket,
    /// and a thread that posts and polls; queue pairs are spread over them [default: as many as
    /// queue pairs, half the cores and 4 allow; 1 on links other than udp]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    engines: Option<u32>,

    /// Messages in flight per queue pair (bandwidth only)
    #[arg(short = 't', long, alias = "tx-depth", value_name = "N", default_value_t = 128,
        value_parser = clap::value_parser!(u32).range(1..=8192))]
    depth: u32,

    /// Path MTU, the max payload of a packet: 256, 512, 1024, 2048 or 4096 [default: the largest
    /// that both sides support]
    #[arg(short = 'm', long, value_name = "BYTES", value_parser = mtu)]
    mtu: Option<u32>,

    /// Memory of this side: host, sim:N or cuda:N
    #[arg(long, value_name = "MEMORY", default_value = "host")]
    mem: MemoryChoice,

    /// Memory of this side is that of CUDA device N: as --mem cuda:N
    #[arg(long, value_name = "N", conflicts_with = "mem")]
    use_cuda: Option<u32>,

    /// Memory of the other side, with --local [default: same as --mem]
    #[arg(long, value_name = "MEMORY", requires = "local")]
    peer_mem: Option<MemoryChoice>,

    /// How this side's memory is registered; with --local, on both sides
    #[arg(long, value_name = "HOW", default_value = "handle")]
    reg: RegisterBy,

    /// Link of the software HCA: udp, shm (two processes of one machine) or auto (shm if possible,
    /// else udp). Append :ADDRESS:PORT to use another address than that of the control connection
    #[arg(long, value_name = "LINK", default_value = "udp", value_parser = link)]
    link: String,

    /// RDMA device to use instead of the software HCA; `warpwire devices` lists them
    #[arg(short = 'd', long, alias = "ib-dev", value_name = "NAME",
        conflicts_with_all = ["link", "fault", "pcap", "no_direct", "progress", "engines"])]
    device: Option<String>,

    /// Port of --device [default: the first that is active]
    #[arg(short = 'i', long, value_name = "PORT", requires = "device",
        value_parser = clap::value_parser!(u8).range(1..))]
    ib_port: Option<u8>,

    /// GID index of --device [default: the GID that most peers can reach]
    #[arg(short = 'x', long, value_name = "INDEX", requires = "device")]
    gid_index: Option<u8>,

    /// Faults to inject on this side's link, as in loss=5%,reorder=1%,seed=7
    #[arg(long, value_name = "FAULTS", value_parser = faults)]
    fault: Option<FaultPlan>,

    /// Capture this side's packets to a pcap file, for Wireshark
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,

    /// Max length of the capture; later packets are not in it
    #[arg(long, value_name = "SIZE", default_value = "64MiB", requires = "pcap",
        value_parser = memory_size)]
    pcap_max: u64,

    /// What advances the device: polling threads with a fallback thread, polling threads alone, or
    /// a dedicated thread
    #[arg(long, value_name = "MODE", default_value = "auto")]
    progress: ProgressChoice,

    /// Use packets even where processes of one machine can access each other's memory directly
    #[arg(long)]
    no_direct: bool,

    /// Do not compare received data with what was sent
    #[arg(long)]
    no_verify: bool,

    /// Max memory that a client can make this server allocate [default: a quarter of the memory
    /// that is available]
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["host", "local"],
        value_parser = memory_size)]
    max_memory: Option<u64>,

    /// Timeout for the peer to connect, and for its silence during the test (there at least 5)
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    timeout: f64,

    /// Report Gb/s (10^9 bits) instead of MB/s (2^20 bytes)
    #[arg(long)]
    report_gbits: bool,

    /// Add a column: CPU time of this side and of the other, in percent of one CPU
    #[arg(long)]
    cpu_util: bool,

    /// Print a histogram of the latencies
    #[arg(short = 'H', long)]
    report_histogram: bool,

    /// Print the latency of every message, in the order of measurement
    #[arg(short = 'U', long)]
    report_unsorted: bool,

    /// Print addresses, and the properties of links and memory
    #[arg(short = 'v', long)]
    verbose: bool,

    /// Print CSV: a line of titles, and a line per row with all figures
    #[arg(long, conflicts_with = "json")]
    csv: bool,

    /// Print JSON: {"machine": {…}, "test": {…}, "local": {…}, "remote": {…}, "rows": […]}
    #[arg(long)]
    json: bool,

    /// Write the JSON to a file, besides what is printed
    #[arg(long, value_name = "FILE")]
    out_json_file: Option<PathBuf>,

    /// Of perftest, without effect: nothing here depends on the CPU's frequency
    #[arg(short = 'F', long = "CPU-freq", hide = true)]
    cpu_freq: bool,

    /// Of perftest, without effect: the peak costs nothing
    #[arg(short = 'N', long = "noPeak", alias = "no-peak", hide = true)]
    no_peak: bool,

    /// Of perftest, without effect: every size has a warm-up
    #[arg(long, hide = true)]
    perform_warm_up: bool,

    /// Serve one client on any free port, and print the port; started by --local
    #[arg(long, hide = true)]
    announce: bool,
}

/// perftest's default port.
const PORT: u16 = 18515;

const EXAMPLES: &str = "\
Examples:
  warpwire perf write bw --local               both sides on this machine
  warpwire perf write bw --bind 0.0.0.0        server, reachable from other machines
  warpwire perf write bw 10.0.0.1              client
  warpwire perf send lat --local -a            all sizes
  warpwire perf read lat --local -H            a histogram of the times
  warpwire perf send bw --local -b -c UC       both directions, unreliable connection
  warpwire perf write bw --local --mem sim:0   memory of a simulated GPU
  # eight queue pairs on four engines
  warpwire perf write bw --local -q 8 --engines 4
  # by RDMA hardware, into the memory of a GPU
  warpwire perf write bw -d mlx5_0 --use_cuda=0 10.0.0.1
  # lost packets, and the others for Wireshark
  warpwire perf read bw --local --fault loss=5%,seed=7 --pcap read.pcap
  warpwire perf write bw --local -s 1MiB --json | jq '.rows[0].average_mb_s'";

#[derive(Clone, Copy, ValueEnum)]
enum ProgressChoice {
    /// Threads that poll; a fallback thread when none does
    Auto,
    /// Threads that poll, and no other
    Manual,
    /// A dedicated thread
    Thread,
}

impl ProgressChoice {
    fn mode(self) -> warpwire::verbs::ProgressMode {
        use warpwire::verbs::ProgressMode;
        match self {
            Self::Auto => ProgressMode::Auto,
            Self::Manual => ProgressMode::Manual,
            Self::Thread => ProgressMode::Thread { spin: Duration::from_millis(1), core: None },
        }
    }
}

/// Max size of a message.
const MAX_SIZE: u64 = 1 << 30;

pub(crate) fn size(text: &str) -> Result<u64, String> {
    match units::parse_bytes(text) {
        Ok(size) if (1..=MAX_SIZE).contains(&size) => Ok(size),
        Ok(_) => Err("message sizes are 1 byte to 1GiB".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn memory_size(text: &str) -> Result<u64, String> {
    units::parse_bytes(text).map_err(|error| error.to_string())
}

pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 86_400.0 => Ok(number),
        _ => Err("write a number of seconds, as in 10 or 0.5, up to 86400".to_owned()),
    }
}

pub(crate) fn mtu(text: &str) -> Result<u32, String> {
    let known = text.parse().ok().and_then(warpwire::verbs::Mtu::new);
    known.map(|mtu| mtu.bytes()).ok_or_else(|| "write 256, 512, 1024, 2048 or 4096".to_owned())
}

pub(crate) fn faults(text: &str) -> Result<FaultPlan, String> {
    text.parse().map_err(|error: warpwire::Error| error.to_string())
}

fn link(text: &str) -> Result<String, String> {
    links::check(text).map(|()| text.to_owned())
}

impl Arguments {
    /// The number of engines for a test with that many queue pairs. Half the cores: the other side
    /// is often on this machine, too.
    fn engines(&self, qps: u32) -> u32 {
        const MAX_DEFAULT: u32 = 4;
        if let Some(engines) = self.engines {
            return engines;
        }
        if !links::has_engines(&self.link) {
            return 1;
        }
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        qps.min(cores / 2).clamp(1, MAX_DEFAULT)
    }

    /// Bytes that a client can make this server allocate.
    fn max_memory(&self) -> u64 {
        /// Where `/proc/meminfo` cannot be read.
        const UNKNOWN: u64 = 1 << 30;
        let available = || warpwire::host::System::live().available_memory();
        self.max_memory.unwrap_or_else(|| available().map_or(UNKNOWN, |bytes| bytes / 4))
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout)
    }

    /// The test that these arguments describe.
    fn test(&self) -> Result<Test, Failure> {
        let usage = |text: &str| Err(Failure::Usage(text.to_owned()));
        if self.verb == Verb::Atomic && (self.all || self.size.is_some_and(|size| size != 8)) {
            return usage("atomics operate on words of 8 bytes: omit -s and -a");
        }
        if self.metric == Metric::Bw && (self.report_histogram || self.report_unsorted) {
            return usage("-H and -U show single latencies: measure lat, or omit them");
        }
        let default = match (self.verb, self.metric) {
            (Verb::Atomic, _) => 8,
            (_, Metric::Lat) => 2,
            (_, Metric::Bw) => 64 << 10,
        };
        let sizes: Vec<u64> = match self.all {
            true => std::iter::successors(Some(2), |size| Some(size * 2))
                .take_while(|size| *size <= self.max)
                .collect(),
            false => vec![self.size.unwrap_or(default)],
        };
        if sizes.is_empty() {
            return usage("--max is smaller than the smallest size, 2 bytes");
        }
        let seconds = self.duration.or(self.run_infinitely.then_some(1.0));
        let test = Test {
            verb: self.verb,
            metric: self.metric,
            sizes,
            iterations: self.iterations,
            seconds,
            qps: self.qps,
            depth: self.depth,
            verify: !self.no_verify,
            bidirectional: self.bidirectional,
            connection: self.connection,
            events: self.events,
            inline: self.inline_size,
            cq_mod: self.cq_mod,
            endless: self.run_infinitely,
        };
        test.check_combination().map_err(|why| Failure::Usage(why.to_owned()))?;
        Ok(test)
    }

    /// The capture file and its max length.
    fn capture(&self) -> Option<(&std::path::Path, u64)> {
        self.pcap.as_deref().map(|path| (path, self.pcap_max))
    }

    /// Memory of this side.
    fn memory(&self) -> MemoryChoice {
        match self.use_cuda {
            Some(number) => MemoryChoice::Device(format!("cuda:{number}")),
            None => self.mem.clone(),
        }
    }

    /// Says which options have no effect.
    fn note_ineffective(&self, reporter: &Reporter) {
        for (given, name, why) in [
            (self.cpu_freq, "-F", "nothing here depends on the CPU's frequency"),
            (self.no_peak, "-N", "the peak costs nothing"),
            (self.perform_warm_up, "--perform_warm_up", "every size has a warm-up"),
        ] {
            if given {
                reporter.note(&format!("# {name} has no effect: {why}"));
            }
        }
    }
}

/// The arguments of a command line, for tests and for other commands.
fn parse<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Arguments, clap::Error> {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }
    let words = ["warpwire", "perf"].into_iter().chain(words).map(Into::into);
    let words = perftest::normalize(words);
    <Line as clap::Parser>::try_parse_from(words.iter().skip(1)).map(|line| line.arguments)
}

#[cfg(test)]
fn arguments_of(words: &[&str]) -> Arguments {
    parse(words.iter().copied()).unwrap_or_else(|error| panic!("{words:?}: {error}"))
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    output::exit_result(measure(arguments))
}

fn measure(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let reporter = Reporter::new(arguments.json);
    let test = arguments.test()?;
    arguments.note_ineffective(&reporter);
    let report = match &arguments.host {
        Some(host) => session::client(HostPort(host, arguments.port), test, arguments, &reporter)?,
        None if arguments.local => local::client(test, arguments, &reporter)?,
        None => session::server(&test, arguments, &reporter)?,
    };
    if let Some(path) = &arguments.out_json_file {
        let name = path.display();
        let text = serde_json::to_string_pretty(&report)
            .map_err(|why| Failure::Runtime(format!("cannot write JSON: {why}")))?;
        std::fs::write(path, text + "\n")
            .map_err(|why| Failure::Runtime(format!("cannot write {name}: {why}")))?;
    }
    reporter.finish(&report)?;
    Ok(ExitCode::SUCCESS)
}
