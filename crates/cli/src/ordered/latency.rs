//! `warpwire async latency`

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use warpwire::mem::{Backend, Device};
use warpwire::stream::CqMemory;
use warpwire::units;
use warpwire::verbs::Context;
use warpwire::verbs::bootstrap::Bootstrap;

use super::endpoint::{Endpoint, INLINE, Job, Plan, Role, engine};
use super::modes::{MODES, Mode};
use super::{Failure, Reporter};
use crate::baseline::{self, Baseline, Ratio};
use crate::copy::clock::{Series, Times, figure};
use crate::copy::target::{DeviceChoice, iterations, size};
use crate::output::print;
use crate::perf::links;

/// Round trips between two ends: driven by the CPU, by streams, by graphs and by kernels
///
/// Two ends send each other messages in turn. In the mode `cpu` the CPU waits for its kernel, posts, and polls for the
/// answer; in the mode `stream` everything is put on the stream beforehand, and the CPU does nothing; `graph` replays a
/// graph of one round, whose nodes post by themselves; `kernel` is one kernel that plays all rounds. With --compute
/// each end computes for that long before each message, and both ways are shown. Messages of up to 64 bytes are
/// copied into the request by `cpu` and `stream`, as perftest does; others are read from the GPU's memory, and all land there.
///
/// The floors are what two streams, and two kernels, need with a thread that passes words between them, and no HCA at
/// all: measured in the same run. Kernels of two processes share a GPU in turns: with --processes their mode waits for turns.
#[derive(Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    device: DeviceChoice,

    /// Bytes in a message; several with commas [default: 8,64,1KiB,4KiB,64KiB]
    #[arg(short = 's', long, value_name = "SIZES", value_delimiter = ',', value_parser = size)]
    size: Vec<u64>,

    /// Who sends and waits, each a column of its own; all if not given
    #[arg(short = 'm', long, value_name = "MODES", value_delimiter = ',', value_parser = MODES.map(|mode| mode.name))]
    mode: Vec<String>,

    /// Round trips to time, for each size and way
    #[arg(short = 'n', long, value_name = "N", default_value = "1000", value_parser = iterations)]
    iterations: u32,

    /// Round trips that are put on a stream at once
    #[arg(short = 'b', long, value_name = "N", default_value = "50", value_parser = clap::value_parser!(u32).range(1..=1000))]
    batch: u32,

    /// How long a kernel computes before each message, as in 20us
    #[arg(long, value_name = "TIME", value_parser = time)]
    compute: Option<Duration>,

    /// The link between the ends: shm, udp or auto
    #[arg(long, value_name = "LINK", default_value = "shm")]
    link: String,

    /// Where completions lie
    #[arg(long, value_name = "WHERE", default_value = "pinned")]
    cq: Cq,

    /// Streams wait for ever: no watchdog, and a store less in each wait
    #[arg(long)]
    no_patience: bool,

    /// The other end is another process, instead of another context in this one
    #[arg(long, conflicts_with = "one_engine")]
    processes: bool,

    /// Both ends are queue pairs of one context: one thread passes messages on, as one does in the floors
    #[arg(long)]
    one_engine: bool,

    /// Print JSON: {"device": …, "rows": […], "floors": {"stream_us": …, "kernel_us": …}, "ratios": […]}
    #[arg(long)]
    json: bool,

    /// Be the other end, and print the port: what --processes starts
    #[arg(long, hide = true)]
    announce: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Cq {
    /// Pinned host memory
    Pinned,
    /// The GPU's memory, behind a CPU window
    Device,
}

fn time(text: &str) -> Result<Duration, String> {
    match units::parse_duration(text) {
        Ok(time) if time <= Duration::from_secs(1) => Ok(time),
        Ok(_) => Err("a second is the longest".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// What one way took, without and with a kernel.
#[derive(Serialize)]
struct Figures {
    mode: &'static str,
    plain: Times,
    compute: Option<Times>,
}

#[derive(Serialize)]
struct Row {
    bytes: u64,
    inline: bool,
    modes: Vec<Figures>,
    verified: bool,
}

#[derive(Serialize)]
struct Report {
    device: String,
    simulated: bool,
    link: String,
    processes: bool,
    one_engine: bool,
    compute_us: Option<f64>,
    rows: Vec<Row>,
    floors: Baseline,
    /// Round trips of the smallest message, to the floors.
    ratios: Vec<Ratio>,
}

/// What the ends say to each other beside their offers: that they are as far.
#[derive(Serialize, Deserialize)]
struct SyncPoint(u64);

/// How long the ends wait for each other.
const TIMEOUT: Duration = Duration::from_secs(60);

impl Arguments {
    fn sizes(&self) -> Vec<u64> {
        match self.size.is_empty() {
            true => vec![8, 64, 1 << 10, 4 << 10, 64 << 10],
            false => self.size.clone(),
        }
    }

    /// The ways that were asked for, in their own order.
    fn modes(&self) -> impl Iterator<Item = &'static Mode> {
        let requested =
            |mode: &&Mode| self.mode.is_empty() || self.mode.iter().any(|one| one == mode.name);
        MODES.iter().filter(requested)
    }

    fn plan<'a>(&'a self, shared: Option<&'a Context>) -> Plan<'a> {
        Plan {
            link: &self.link,
            shared,
            max_size: self.sizes().into_iter().max().unwrap_or(8),
            rounds: u64::from(self.batch),
            cq_memory: match self.cq {
                Cq::Pinned => CqMemory::Pinned,
                Cq::Device => CqMemory::Device,
            },
            wait_timeout: !self.no_patience,
        }
    }

    fn check(&self) -> Result<(), Failure> {
        links::check(&self.link).map_err(Failure::Usage)?;
        match self.sizes().iter().find(|size| **size < 4 || **size > 64 << 20) {
            Some(size) => Err(Failure::Usage(format!(
                "messages have 4 bytes to 64MiB, and {size} is not in between: they bear a number"
            ))),
            None => Ok(()),
        }
    }
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    arguments.check()?;
    let (device, no_cuda) = arguments.device.open()?;
    if arguments.announce {
        let listener = listen()?;
        let port = listener.local_addr().map_or(0, |address| address.port());
        print(&format!("{port}\n")).map_err(Failure::Runtime)?;
        let mut bootstrap = Bootstrap::accept(&listener, TIMEOUT)?;
        let plan = arguments.plan(None);
        run_all(Role::Pong, &device, arguments, &plan, &mut bootstrap, &mut |_, _| Ok(()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let reporter = Reporter::new(arguments.json);
    reporter.print(&heading(arguments, &device, no_cuda.as_deref()))?;
    reporter.set_status("the floors");
    let floors = Baseline::measure(&device)?;
    let rows = match arguments.processes {
        true => between_processes(arguments, &device, &reporter)?,
        false => in_one_process(arguments, &device, &reporter)?,
    };
    reporter.print(&floors.line())?;
    let mut ratios = Vec::new();
    if let Some(smallest) = rows.iter().min_by_key(|row| row.bytes) {
        let figures = smallest.modes.iter().map(|figures| (figures.mode, figures.plain.median_us));
        ratios = baseline::ratios(&floors, figures);
        reporter.print(&baseline::ratio_line(smallest.bytes, &ratios))?;
    }
    reporter.finish(&Report {
        device: device.label(),
        simulated: device.info().backend == Backend::Sim,
        link: arguments.link.clone(),
        processes: arguments.processes,
        one_engine: arguments.one_engine,
        compute_us: arguments.compute.map(|time| time.as_secs_f64() * 1e6),
        rows,
        floors,
        ratios,
    })?;
    Ok(ExitCode::SUCCESS)
}

fn heading(arguments: &Arguments, device: &Device, no_cuda: Option<&str>) -> String {
    let ends = match (arguments.processes, arguments.one_engine) {
        (true, _) => "two processes",
        (false, true) => "one context with both ends",
        (false, false) => "two contexts of one process",
    };
    let mut text = format!(
        "# Warpwire async latency: {} ({}), {ends}, link {}\n",
        device.label(),
        device.info().name,
        arguments.link
    );
    if let Some(why) = no_cuda {
        text += &format!("# simulated: {why}; the figures say nothing about a GPU\n");
    }
    text += "# round trips in microseconds, median; i: cpu and stream copy it into the request\n";
    let mut columns = format!("{:>10} ", "bytes");
    for mode in arguments.modes() {
        columns += &format!("{:>12}", mode.name);
        if let Some(compute) = arguments.compute {
            columns += &format!("{:>16}", format!("+{compute:?}"));
        }
    }
    text + &columns + "  verified\n"
}

fn listen() -> Result<TcpListener, Failure> {
    TcpListener::bind("127.0.0.1:0")
        .map_err(|why| Failure::Runtime(format!("cannot listen on 127.0.0.1: {why}")))
}

fn in_one_process(
    arguments: &Arguments,
    device: &Device,
    reporter: &Reporter,
) -> Result<Vec<Row>, Failure> {
    let listener = listen()?;
    let address = listener
        .local_addr()
        .map_err(|why| Failure::Runtime(format!("cannot ask for an address: {why}")))?;
    let shared = match arguments.one_engine {
        true => Some(engine(device, &arguments.link, address.ip())?),
        false => None,
    };
    let plan = arguments.plan(shared.as_ref());
    std::thread::scope(|scope| {
        let peer = scope.spawn(|| {
            let mut bootstrap = Bootstrap::accept(&listener, TIMEOUT)?;
            run_all(Role::Pong, device, arguments, &plan, &mut bootstrap, &mut |_, _| Ok(()))
        });
        let mine = client(arguments, device, &plan, address.port(), reporter);
        let theirs = peer
            .join()
            .unwrap_or_else(|_| Err(Failure::Runtime("the other end panicked".to_owned())));
        let rows = mine?;
        theirs.map(|_| rows)
    })
}

/// The other process. It ends with this.
struct PeerProcess(Child);

impl Drop for PeerProcess {
    fn drop(&mut self) {
        if !matches!(self.0.try_wait(), Ok(Some(_))) {
            let _ = self.0.kill();
        }
        let _ = self.0.wait();
    }
}

fn between_processes(
    arguments: &Arguments,
    device: &Device,
    reporter: &Reporter,
) -> Result<Vec<Row>, Failure> {
    let failed =
        |why: std::io::Error| Failure::Runtime(format!("cannot start the other end: {why}"));
    let sizes: Vec<_> = arguments.sizes().iter().map(u64::to_string).collect();
    let cq = clap::ValueEnum::to_possible_value(&arguments.cq);
    let compute = arguments.compute.map(|time| format!("--compute={}ns", time.as_nanos()));
    let program = std::env::current_exe().map_err(failed)?;
    let child = Command::new(program)
        .args(["async", "latency", "--announce", "--device", &device.label()])
        .args(["--size", &sizes.join(","), "--link", &arguments.link])
        .args(["--iterations", &arguments.iterations.to_string()])
        .args(["--batch", &arguments.batch.to_string()])
        .args(arguments.mode.iter().map(|mode| format!("--mode={mode}")))
        .args(cq.map(|cq| format!("--cq={}", cq.get_name())))
        .args(compute)
        .args(arguments.no_patience.then_some("--no-patience"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut peer = PeerProcess(child);
    let mut line = String::new();
    if let Some(out) = peer.0.stdout.take() {
        BufReader::new(out).read_line(&mut line).map_err(failed)?;
    }
    let port = line.trim().parse().map_err(|_| {
        Failure::Runtime("the other end did not start; what it said stands above".to_owned())
    })?;
    let rows = client(arguments, device, &arguments.plan(None), port, reporter)?;
    match peer.0.wait() {
        Ok(status) if !status.success() => {
            Err(Failure::Runtime(format!("the other end ended with {status}")))
        }
        _ => Ok(rows),
    }
}

fn client(
    arguments: &Arguments,
    device: &Device,
    plan: &Plan<'_>,
    port: u16,
    reporter: &Reporter,
) -> Result<Vec<Row>, Failure> {
    let mut bootstrap = Bootstrap::connect(("127.0.0.1", port), TIMEOUT)?;
    run_all(Role::Ping, device, arguments, plan, &mut bootstrap, &mut |row, set_status| {
        match row {
            Some(row) => reporter.print(&render(row))?,
            None => reporter.set_status(set_status),
        }
        Ok(())
    })
}

/// Is told of each row when it is there, and before of what is at work.
type ReportFn<'a> = &'a mut dyn FnMut(Option<&Row>, String) -> Result<(), Failure>;

fn run_all(
    role: Role,
    device: &Device,
    arguments: &Arguments,
    plan: &Plan<'_>,
    bootstrap: &mut Bootstrap,
    report: ReportFn<'_>,
) -> Result<Vec<Row>, Failure> {
    let endpoint = Endpoint::open(role, device, plan, bootstrap)?;
    let mut rows = Vec::new();
    for size in arguments.sizes() {
        let inline = size <= INLINE;
        let mut modes = Vec::new();
        for mode in arguments.modes() {
            report(None, format!("{}, {size} bytes", mode.name))?;
            let mut run_rounds = |compute, stamped| {
                let job =
                    Job { size, rounds: u64::from(arguments.batch), compute, inline, stamped };
                one_batch(&endpoint, mode, &job, bootstrap)
            };
            run_rounds(Duration::ZERO, true)?; // what arrives is looked at first
            let mut series = |compute| -> Result<Times, Failure> {
                let mut series = Series::default();
                for _ in 0..arguments.iterations.div_ceil(arguments.batch) {
                    series.add(run_rounds(compute, false)?, arguments.batch);
                }
                Ok(series.times())
            };
            let plain = series(Duration::ZERO)?;
            let compute = arguments.compute.map(series).transpose()?;
            modes.push(Figures { mode: mode.name, plain, compute });
        }
        let row = Row { bytes: size, inline, modes, verified: true };
        report(Some(&row), String::new())?;
        rows.push(row);
    }
    Ok(rows)
}

fn one_batch(
    endpoint: &Endpoint,
    mode: &Mode,
    job: &Job,
    bootstrap: &mut Bootstrap,
) -> Result<Duration, Failure> {
    if mode.receives {
        endpoint.post_receives(job)?;
    }
    if job.stamped {
        endpoint.clear_log(job)?;
        bootstrap.swap(&SyncPoint(0))?;
    }
    let mut barriers = 0;
    let mut barrier = || -> Result<(), Failure> {
        barriers += 1;
        bootstrap.swap(&SyncPoint(barriers))?;
        Ok(())
    };
    let took = (mode.run_rounds)(endpoint, job, &mut barrier)?;
    if job.stamped {
        endpoint.verify(job)?;
    }
    Ok(took)
}

fn render(row: &Row) -> String {
    let mark = if row.inline { "i" } else { " " };
    let mut text = format!("{:>10}{mark}", row.bytes);
    for Figures { plain, compute, .. } in &row.modes {
        text += &format!("{:>12}", figure(plain.median_us));
        if let Some(compute) = compute {
            text += &format!("{:>16}", figure(compute.median_us));
        }
    }
    text + &format!("  {}\n", if row.verified { "yes" } else { "no" })
}
