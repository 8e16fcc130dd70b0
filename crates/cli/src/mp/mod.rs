//! `warpwire mp`: messages between two ranks, triggered by the CPU, a stream, a graph or a kernel;
//! collectives of N ranks.

mod collective;
mod measure;
mod modes;
mod table;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use warpwire::msg::{Comm, CommOptions, Launcher, RankInfo};
use warpwire::units;

use crate::machine::Machine;
use crate::output::{self, Failure, Reporter};
use crate::perf::memory::MemoryChoice;
use crate::run::{self, Job, duration, link};
use collective::Collective;
use measure::Endpoint;
use modes::TransferKind;
use table::Report;

/// Measure messages between two ranks, and collectives
///
/// Without a launcher it starts the ranks on this machine; under a launcher (warpwire run,
/// torchrun, mpirun, srun) it is one of them. Data is verified; a difference is an error.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    test: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Half a round trip of a message
    ///
    /// Where a device sends, the baseline is measured in the same run: round trips of two streams,
    /// and of two kernels, with a relay thread in between and no HCA. It is not measured on the
    /// simulated GPU, whose times mean nothing.
    #[command(after_help = PINGPONG_EXAMPLES)]
    Pingpong(PointToPoint),
    /// Writes to and reads from the peer's window, until the data has arrived
    #[command(after_help = PUTGET_EXAMPLES)]
    Putget(PointToPoint),
    /// Both ranks send and receive simultaneously
    #[command(after_help = SENDRECV_EXAMPLES)]
    Sendrecv(PointToPoint),
    /// Reductions of N ranks, in the shape of nccl-tests
    #[command(name = "all_reduce", aliases = ["allreduce", "all-reduce"],
        after_help = ALL_REDUCE_EXAMPLES)]
    AllReduce(collective::Arguments),
    /// Blocks of N ranks on every rank, in the shape of nccl-tests
    #[command(name = "all_gather", aliases = ["allgather", "all-gather"],
        after_help = ALL_GATHER_EXAMPLES)]
    AllGather(collective::Arguments),
    /// Reductions of which every rank gets a block, in the shape of nccl-tests
    #[command(name = "reduce_scatter", aliases = ["reducescatter", "reduce-scatter"],
        after_help = REDUCE_SCATTER_EXAMPLES)]
    ReduceScatter(collective::Arguments),
    /// A block from every rank to every rank, in the shape of nccl-tests
    #[command(name = "all_to_all", aliases = ["alltoall", "all-to-all"],
        after_help = ALL_TO_ALL_EXAMPLES)]
    AllToAll(collective::Arguments),
    /// Copies from one of N ranks to all, in the shape of nccl-tests
    #[command(aliases = ["bcast"], after_help = BROADCAST_EXAMPLES)]
    Broadcast(collective::Arguments),
}

/// A test of two ranks.
#[derive(Args, Clone)]
pub(crate) struct PointToPoint {
    #[arg(skip)]
    test: Test,

    /// What sends and waits, a column each, separated by commas: cpu, stream, graph, kernel
    /// [default: all that the memory allows]
    #[arg(short = 'm', long, value_name = "MODE", value_delimiter = ',')]
    mode: Vec<Mode>,

    /// Message sizes, separated by commas [default: 8 to 4MiB in 8 steps]
    #[arg(short = 's', long, value_name = "SIZE", value_delimiter = ',', value_parser = size)]
    size: Vec<u64>,

    /// Messages per size [default: 1000, fewer for large sizes]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    iterations: Option<u32>,

    /// Memory of the messages: host, sim:N or cuda:N; all modes except cpu need a device
    #[arg(long, value_name = "MEMORY", default_value = "host")]
    mem: MemoryChoice,

    /// Also measure with a kernel of this duration before each message, as in 20us: adds columns
    #[arg(long, value_name = "TIME", value_parser = duration)]
    kernel: Option<Duration>,

    /// Link between ranks on this machine: auto, udp, shm, or device:NAME for an RDMA device
    /// [default: WARPWIRE_LINK, else auto]
    #[arg(long, value_name = "LINK", value_parser = link)]
    link: Option<String>,

    /// Run both ranks as threads of this process: their kernels run concurrently, while processes
    /// time-slice a GPU
    #[arg(long)]
    threads: bool,

    /// Do not measure the baseline, which the simulated GPU has not in any case
    #[arg(long)]
    no_baseline: bool,

    /// Timeout for the other rank to connect, and for each message
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    timeout: Duration,

    /// Print JSON: {"machine": {…}, "test": …, "path": …, "rows": [{"size": …, "figures": […],
    /// "verified": …}], "baseline": …, "ratios": […]}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire mp pingpong                         half round trips, two ranks on this machine
  warpwire mp sendrecv --mem cuda:0 -s 1MiB    both ranks send simultaneously
  warpwire mp all_reduce -n 4 -b 8 -e 1M -f 2  four ranks, columns of nccl-tests
  torchrun --nproc-per-node 2 --no-python warpwire mp pingpong";

const PINGPONG_EXAMPLES: &str = "\
Examples:
  warpwire mp pingpong                         two ranks on this machine
  warpwire mp pingpong --mem cuda:0 --threads  all modes, both ranks in one process
  warpwire mp pingpong --mem sim:0 --kernel 20us -m cpu,stream";

const PUTGET_EXAMPLES: &str = "\
Examples:
  warpwire run -n 2 --link udp warpwire mp putget";

const SENDRECV_EXAMPLES: &str = "\
Examples:
  warpwire mp sendrecv -s 64KiB,1MiB --json";

const ALL_REDUCE_EXAMPLES: &str = "\
Examples:
  warpwire mp all_reduce -n 4 -b 8 -e 1M -f 2
  warpwire mp all_reduce -n 3 -d double -o max --mem sim:0 --json";

const ALL_GATHER_EXAMPLES: &str = "\
Examples:
  warpwire mp all_gather -n 4 -b 64 -e 1M -f 4";

const REDUCE_SCATTER_EXAMPLES: &str = "\
Examples:
  warpwire mp reduce_scatter -n 4 -b 64 -e 1M -f 4 -d int64";

const ALL_TO_ALL_EXAMPLES: &str = "\
Examples:
  warpwire mp all_to_all -n 4 -b 64 -e 1M -f 4 --mem sim:0";

const BROADCAST_EXAMPLES: &str = "\
Examples:
  warpwire mp broadcast -n 4 -r 1 --link udp";

/// The test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Test {
    /// Half a round trip of a message
    #[default]
    Pingpong,
    /// Writes to and reads from the peer's window, until the data has arrived
    Putget,
    /// Both ranks send and receive simultaneously
    Sendrecv,
}

impl Test {
    fn name(self) -> &'static str {
        match self {
            Self::Pingpong => "pingpong",
            Self::Putget => "putget",
            Self::Sendrecv => "sendrecv",
        }
    }

    /// The transfers to measure, a column each.
    fn rounds(self) -> &'static [TransferKind] {
        match self {
            Self::Pingpong => &[TransferKind::PingPong],
            Self::Sendrecv => &[TransferKind::Simultaneous],
            Self::Putget => &[TransferKind::Put, TransferKind::Get],
        }
    }
}

/// What sends and waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// The CPU
    Cpu,
    /// A stream; the CPU enqueues the operations
    Stream,
    /// A graph, replayed for each message
    Graph,
    /// One kernel for all messages
    Kernel,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Stream => "stream",
            Self::Graph => "graph",
            Self::Kernel => "kernel",
        }
    }
}

fn size(text: &str) -> Result<u64, String> {
    let size = units::parse_bytes(text).map_err(|error| error.to_string())?;
    match size {
        1..=0x4000_0000 => Ok(size),
        _ => Err("message sizes are 1 byte to 1 GiB".to_owned()),
    }
}

/// Default of `--size`.
const SIZES: [u64; 8] = [8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20];

impl PointToPoint {
    fn sizes(&self) -> Vec<u64> {
        match self.size.is_empty() {
            true => SIZES.to_vec(),
            false => self.size.clone(),
        }
    }

    fn modes(&self) -> Vec<Mode> {
        match self.mode.is_empty() {
            true if self.mem == MemoryChoice::Host => vec![Mode::Cpu],
            true => Mode::value_variants().to_vec(),
            false => self.mode.clone(),
        }
    }

    /// True if a device sends, waits or computes.
    fn needs_device(&self) -> bool {
        self.kernel.is_some() || self.modes().iter().any(|mode| *mode != Mode::Cpu)
    }

    /// The columns: each mode without and, with `--kernel`, with a compute kernel.
    fn columns(&self) -> Vec<(Mode, Duration)> {
        let times = [Some(Duration::ZERO), self.kernel];
        let each = |mode: Mode| times.into_iter().flatten().map(move |time| (mode, time));
        self.modes().into_iter().flat_map(each).collect()
    }

    /// Fewer messages of large sizes, so that all rows take about as long.
    fn iterations(&self, size: u64) -> u32 {
        let fewer = (1_000_000_000 / size.max(1)).clamp(10, 1000) as u32;
        self.iterations.unwrap_or(fewer)
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let of = |test, two: &PointToPoint| run_two(&PointToPoint { test, ..two.clone() });
    output::exit_result(match &arguments.test {
        Command::Pingpong(two) => of(Test::Pingpong, two),
        Command::Putget(two) => of(Test::Putget, two),
        Command::Sendrecv(two) => of(Test::Sendrecv, two),
        Command::AllReduce(all) => collective::run(Collective::AllReduce, all),
        Command::AllGather(all) => collective::run(Collective::AllGather, all),
        Command::ReduceScatter(all) => collective::run(Collective::ReduceScatter, all),
        Command::AllToAll(all) => collective::run(Collective::AllToAll, all),
        Command::Broadcast(all) => collective::run(Collective::Broadcast, all),
    })
}

fn run_two(arguments: &PointToPoint) -> Result<ExitCode, Failure> {
    let rank_info = RankInfo::from_env().map_err(|error| Failure::Usage(error.to_string()))?;
    match rank_info.launcher {
        Launcher::Standalone if arguments.threads => run_both_ranks(arguments),
        Launcher::Standalone => start(arguments),
        _ => run_rank(arguments, rank_info),
    }
}

/// This executable, and its arguments.
fn this_command() -> Result<Vec<OsString>, Failure> {
    let program = std::env::current_exe()
        .map_err(|why| Failure::Runtime(format!("cannot find this executable: {why}")))?;
    let words = std::env::args_os().skip(1);
    Ok(std::iter::once(program.into_os_string()).chain(words).collect())
}

/// Starts this command again as two ranks.
fn start(arguments: &PointToPoint) -> Result<ExitCode, Failure> {
    // What both ranks would refuse is refused once.
    options(arguments)?;
    run::launch(&Job {
        command: "mp",
        ranks: 2,
        raw: true,
        grace: Duration::from_secs(2),
        link: arguments.link.clone(),
        program: this_command()?,
    })
}

/// Runs both ranks as threads of this process.
fn run_both_ranks(arguments: &PointToPoint) -> Result<ExitCode, Failure> {
    let comms = Comm::local_with(2, &options(arguments)?)?;
    std::thread::scope(|scope| {
        let rank = |comm| scope.spawn(move || measure_or_abort(arguments, &{ comm }));
        let ranks: Vec<_> = comms.into_iter().map(rank).collect();
        let panicked = |_| Err(Failure::Runtime("a rank panicked".to_owned()));
        let mut outcomes: Vec<_> =
            ranks.into_iter().map(|rank| rank.join().unwrap_or_else(panicked)).collect();
        // Prefer the root cause: the other rank only reports that its peer is lost.
        let own = outcomes.iter().position(|outcome| matches!(outcome, Err(Failure::Usage(_))));
        let failed = own.or_else(|| outcomes.iter().position(Result::is_err));
        outcomes.swap_remove(failed.unwrap_or(0))
    })
}

fn options(arguments: &PointToPoint) -> Result<CommOptions, Failure> {
    if arguments.needs_device() && arguments.mem == MemoryChoice::Host {
        let message = "streams and kernels need a device; give --mem sim:0 or cuda:0".to_owned();
        return Err(Failure::Usage(message));
    }
    let mut options = CommOptions::from_env()?.with_timeout(arguments.timeout);
    if arguments.needs_device() {
        options.progress_mode = CommOptions::for_streams().progress_mode;
    }
    if let Some(link) = &arguments.link {
        options.link = link.parse()?;
    }
    Ok(options)
}

fn run_rank(arguments: &PointToPoint, rank_info: RankInfo) -> Result<ExitCode, Failure> {
    let options = options(arguments)?;
    if rank_info.size != 2 {
        let message = format!(
            "mp {} needs two ranks, not {}; all_reduce and broadcast take more",
            arguments.test.name(),
            rank_info.size
        );
        return Err(Failure::Usage(message));
    }
    measure_or_abort(arguments, &Comm::open(rank_info, options)?)
}

/// A line that says how the peer's memory was accessed, from the path at the end.
fn direct_access(path: &str) -> String {
    let found = path.find("direct access: ").and_then(|at| path.get(at..));
    found.map_or(String::new(), |text| output::fit(&format!("# {text}")) + "\n")
}

fn measure_or_abort(arguments: &PointToPoint, comm: &Comm) -> Result<ExitCode, Failure> {
    let outcome = measure_all(arguments, comm);
    if let Err(Failure::Runtime(why) | Failure::Usage(why)) = &outcome {
        comm.abort(why.clone());
    }
    outcome
}

fn measure_all(arguments: &PointToPoint, comm: &Comm) -> Result<ExitCode, Failure> {
    let sizes = arguments.sizes();
    let max_size = sizes.iter().copied().max().unwrap_or(1);
    let endpoint =
        Endpoint::new(comm, &arguments.mem, max_size, arguments.needs_device(), arguments.timeout)?;
    let is_reporter = comm.rank() == 0;
    let reporter = Reporter::new(arguments.json || !is_reporter);
    let machine = if is_reporter { reporter.machine() } else { Machine::now() };
    let mut report = Report::new(machine, arguments.test, comm, &endpoint)?;
    if !arguments.no_baseline {
        reporter.set_status("baseline");
        report.baseline = endpoint.baseline()?;
    }
    reporter.print(&report.head(&arguments.columns()))?;
    for size in sizes {
        reporter.set_status(format!("{:?}: {size} bytes", arguments.test));
        let iterations = arguments.iterations(size);
        let mut row = table::Row { size, iterations, figures: Vec::new(), verified: true };
        for (mode, compute) in arguments.columns() {
            endpoint.verify(arguments.test, mode, size)?;
            row.figures.extend(endpoint.measure(
                arguments.test,
                mode,
                size,
                compute,
                iterations,
            )?);
        }
        reporter.print(&row.render())?;
        report.rows.push(row);
    }
    reporter.print(&report.compare())?;
    report.path = comm.path(1 - comm.rank())?.to_string();
    reporter.print(&direct_access(&report.path))?;
    comm.finish(arguments.timeout)?;
    if is_reporter {
        reporter.finish_machine(&mut report.machine);
    }
    match is_reporter {
        true if arguments.json => reporter.finish(&report)?,
        _ => drop(reporter),
    }
    Ok(ExitCode::SUCCESS)
}
