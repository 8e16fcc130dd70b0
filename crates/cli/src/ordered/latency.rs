//! `warpwire async latency`: round trips driven by the CPU, streams, graphs and kernels.

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
use warpwire::verbs::bootstrap::{Bootstrap, BootstrapListener};

use super::endpoint::{Endpoint, INLINE, Job, Plan, Role, engine};
use super::modes::{MODES, Mode};
use super::{Failure, Reporter};
use crate::baseline::{self, Baseline, Ratio};
use crate::copy::clock::{Series, Times, figure};
use crate::copy::target::{DeviceChoice, iterations, size};
use crate::output::print;
use crate::perf::links;

/// Measure round trips driven by the CPU, streams, graphs and kernels
///
/// Two endpoints send each other messages in turn; times are round trips in microseconds. Modes: in
/// `cpu` the CPU waits for its compute kernel, posts, and polls for the reply; in `stream` all
/// rounds are enqueued beforehand and the CPU does nothing; `graph` replays a graph of one round,
/// whose nodes post the work; `kernel` is one kernel that runs all rounds. With --compute each
/// endpoint computes for that long before each message, and a second column per mode shows it.
/// Messages of up to 64 bytes are copied into the work request by `cpu` and `stream`, as perftest
/// does; larger ones are read from GPU memory. All messages arrive in GPU memory; one batch per
/// mode and size is verified before the timed ones.
///
/// The baseline is measured in the same run: a CPU thread relays words between two streams, and
/// between two kernels, without an HCA. Kernels of two processes time-slice a GPU, so with
/// --processes the `kernel` mode includes waiting for time slices.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    device: DeviceChoice,

    /// Message sizes, separated by commas, 4 to 64MiB [default: 8,64,1KiB,4KiB,64KiB]
    #[arg(short = 's', long, value_name = "SIZES", value_delimiter = ',', value_parser = size)]
    size: Vec<u64>,

    /// Modes to measure, separated by commas; default: all
    #[arg(short = 'm', long, value_name = "MODES", value_delimiter = ',',
        value_parser = MODES.map(|mode| mode.name))]
    mode: Vec<String>,

    /// Round trips to time, per size and mode
    #[arg(short = 'n', long, value_name = "N", default_value = "1000", value_parser = iterations)]
    iterations: u32,

    /// Round trips enqueued on a stream at a time
    #[arg(short = 'b', long, value_name = "N", default_value = "50",
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    batch: u32,

    /// Run a kernel of this duration before each message, as in 20us; up to 1s
    #[arg(long, value_name = "TIME", value_parser = time)]
    compute: Option<Duration>,

    /// Link between the endpoints: shm, udp or auto
    #[arg(long, value_name = "LINK", default_value = "shm")]
    link: String,

    /// Memory of the completion queue
    #[arg(long, value_name = "WHERE", default_value = "pinned")]
    cq: Cq,

    /// No timeout for waits on streams: no watchdog, and one store less per wait
    #[arg(long)]
    no_wait_timeout: bool,

    /// Run the other endpoint in another process, instead of another context of this one
    #[arg(long, conflicts_with = "one_engine")]
    processes: bool,

    /// Use one context for both endpoints: one progress thread, as the baseline has one relay
    /// thread
    #[arg(long)]
    one_engine: bool,

    /// Print JSON: {"device": …, "rows": […], "baseline": {"stream_us": …, "kernel_us": …},
    /// "ratios": […]}
    #[arg(long)]
    json: bool,

    /// Run as the other endpoint and print the TCP port; started by --processes
    #[arg(long, hide = true)]
    announce: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire async latency -s 8,4KiB -m stream,kernel
  warpwire async latency --compute 20us           a kernel of 20 us before each message
  warpwire async latency --processes --cq device
  warpwire async latency --json | jq .ratios";

#[derive(Clone, Copy, ValueEnum)]
enum Cq {
    /// Pinned host memory
    Pinned,
    /// GPU memory, behind a CPU window
    Device,
}

fn time(text: &str) -> Result<Duration, String> {
    match units::parse_duration(text) {
        Ok(time) if time <= Duration::from_secs(1) => Ok(time),
        Ok(_) => Err("the max is 1s".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Times of one mode, without and with the compute kernel.
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
    /// `None` on the simulated GPU, where it bounds nothing.
    baseline: Option<Baseline>,
    /// Round trips of the smallest message, divided by the baseline.
    ratios: Vec<Ratio>,
}

/// A barrier message: its number, which is not checked.
#[derive(Serialize, Deserialize)]
struct SyncPoint(u64);

/// How long the endpoints wait for each other on the bootstrap connection.
const TIMEOUT: Duration = Duration::from_secs(60);

impl Arguments {
    fn sizes(&self) -> Vec<u64> {
        match self.size.is_empty() {
            true => vec![8, 64, 1 << 10, 4 << 10, 64 << 10],
            false => self.size.clone(),
        }
    }

    /// The requested modes, in the order of [`MODES`].
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
            wait_timeout: !self.no_wait_timeout,
        }
    }

    fn check(&self) -> Result<(), Failure> {
        links::check(&self.link).map_err(Failure::Usage)?;
        match self.sizes().iter().find(|size| **size < 4 || **size > 64 << 20) {
            Some(size) => Err(Failure::Usage(format!(
                "message sizes are 4 bytes to 64MiB, not {size}: a message starts with its number"
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
        let mut bootstrap = accept(listener)?;
        let plan = arguments.plan(None);
        run_all(Role::Pong, &device, arguments, &plan, &mut bootstrap, &mut |_, _| Ok(()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let reporter = Reporter::for_measurement(arguments.json);
    reporter.print(&heading(arguments, &device, no_cuda.as_deref()))?;
    reporter.set_status("baseline");
    let baseline = Baseline::of_device(&device)?;
    let rows = match arguments.processes {
        true => between_processes(arguments, &device, &reporter)?,
        false => in_one_process(arguments, &device, &reporter)?,
    };
    let mut ratios = Vec::new();
    let smallest = rows.iter().min_by_key(|row| row.bytes);
    if let (Some(baseline), Some(smallest)) = (&baseline, smallest) {
        let figures = smallest.modes.iter().map(|figures| (figures.mode, figures.plain.median_us));
        ratios = baseline::ratios(baseline, figures);
        reporter.print(&baseline.line())?;
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
        baseline,
        ratios,
    })?;
    Ok(ExitCode::SUCCESS)
}

fn heading(arguments: &Arguments, device: &Device, no_cuda: Option<&str>) -> String {
    let ends = match (arguments.processes, arguments.one_engine) {
        (true, _) => "two processes",
        (false, true) => "one context with both endpoints",
        (false, false) => "two contexts of one process",
    };
    let mut text = format!(
        "# async latency on {} ({}), {ends}, link {}\n",
        device.label(),
        device.info().name,
        arguments.link
    );
    if let Some(why) = no_cuda {
        text += &format!("# simulated: {why}; the figures do not represent a GPU\n");
    }
    text += "# median round trips in microseconds; i: sent inline by cpu and stream\n";
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

/// The first message of the other endpoint: connections without it are strangers.
const FIRST: &str = "async latency";

/// Accepts the other endpoint.
fn accept(listener: TcpListener) -> Result<Bootstrap, Failure> {
    let (bootstrap, _) = BootstrapListener::new(listener)?.accept(TIMEOUT, |peer| {
        let first: String = peer.recv()?;
        let wrong = || warpwire::Error::new(warpwire::error::Kind::Malformed, "accept a peer");
        if first == FIRST { Ok(()) } else { Err(wrong().why("it is not the other endpoint")) }
    })?;
    Ok(bootstrap)
}

fn in_one_process(
    arguments: &Arguments,
    device: &Device,
    reporter: &Reporter,
) -> Result<Vec<Row>, Failure> {
    let listener = listen()?;
    let address = listener
        .local_addr()
        .map_err(|why| Failure::Runtime(format!("cannot get the listener's address: {why}")))?;
    let shared = match arguments.one_engine {
        true => Some(engine(device, &arguments.link, address.ip())?),
        false => None,
    };
    let plan = arguments.plan(shared.as_ref());
    std::thread::scope(|scope| {
        let peer = scope.spawn(|| {
            let mut bootstrap = accept(listener)?;
            run_all(Role::Pong, device, arguments, &plan, &mut bootstrap, &mut |_, _| Ok(()))
        });
        let mine = client(arguments, device, &plan, address.port(), reporter);
        let theirs = peer
            .join()
            .unwrap_or_else(|_| Err(Failure::Runtime("the other endpoint panicked".to_owned())));
        let rows = mine?;
        theirs.map(|_| rows)
    })
}

/// The other process; killed on drop.
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
        |why: std::io::Error| Failure::Runtime(format!("cannot start the other endpoint: {why}"));
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
        .args(arguments.no_wait_timeout.then_some("--no-wait-timeout"))
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
        Failure::Runtime("the other endpoint did not start; see its message above".to_owned())
    })?;
    let rows = client(arguments, device, &arguments.plan(None), port, reporter)?;
    match peer.0.wait() {
        Ok(status) if !status.success() => {
            Err(Failure::Runtime(format!("the other endpoint exited with {status}")))
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
    bootstrap.send(&FIRST)?;
    run_all(Role::Ping, device, arguments, plan, &mut bootstrap, &mut |row, status| {
        match row {
            Some(row) => reporter.print(&render(row))?,
            None => reporter.set_status(status),
        }
        Ok(())
    })
}

/// Called with a status text before each measurement, and with each finished row.
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
            run_rounds(Duration::ZERO, true)?; // verified, not timed
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
