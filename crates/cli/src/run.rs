//! `warpwire run`: starts and supervises ranks on this machine.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use warpwire::host::{make_private_folder, runtime_folder};
use warpwire::units::parse_duration;

use crate::output::Failure;

/// Start ranks on this machine
///
/// Starts PROGRAM N times. Each process finds its rank in its environment, and Comm::from_env
/// connects the ranks. Output lines are prefixed with the rank. When a rank fails, the others may
/// run for --grace to report errors; then they are terminated (SIGTERM, after 3 s SIGKILL). The
/// exit status is that of the first rank that failed, or 128 plus the signal number. Standard input
/// of all ranks is empty.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Number of ranks
    #[arg(short = 'n', long, value_name = "N", default_value_t = 2,
        value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: u16,

    /// Pass the ranks' output through, without prefixes
    #[arg(long)]
    raw: bool,

    /// How long the other ranks may run after one has failed, as in 500ms
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    grace: Duration,

    /// Link between the ranks: auto, udp, shm, or device:NAME for an RDMA device [default:
    /// WARPWIRE_LINK, else auto]
    #[arg(long, value_name = "LINK", value_parser = link)]
    link: Option<String>,

    /// Exec the program as a rank; the value is the launcher's process id
    #[arg(long, hide = true)]
    become_rank_of: Option<u32>,

    /// Program to start, and its arguments; a -- before it is not necessary
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  warpwire run -n 4 ./solver --size 1024
  warpwire run -n 2 --link udp warpwire mp pingpong

Environment of the ranks:
  WARPWIRE_RANK, WARPWIRE_SIZE, WARPWIRE_LOCAL_RANK, WARPWIRE_LOCAL_SIZE
  WARPWIRE_MASTER  rendezvous: file with the address of rank 0
  WARPWIRE_TOKEN   secret by which the ranks of one run authenticate each other";

pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(|error| error.to_string())
}

/// A link by its name; the ranks open the device.
pub(crate) fn link(text: &str) -> Result<String, String> {
    match text {
        "auto" | "udp" | "shm" => Ok(text.to_owned()),
        _ if text.starts_with("device:") => Ok(text.to_owned()),
        _ => Err("use auto, udp, shm, or device:NAME for an RDMA device".to_owned()),
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    if let Some(parent) = arguments.become_rank_of {
        return Err(exec_program(parent, &arguments.program));
    }
    let job = Job {
        command: "run",
        ranks: arguments.ranks.into(),
        raw: arguments.raw,
        grace: arguments.grace,
        link: arguments.link.clone(),
        program: arguments.program.clone(),
    };
    crate::output::exit_result(launch(&job))
}

/// Sets the parent-death signal, so that the rank is killed with its launcher, and execs the
/// program. Returns only on failure.
fn exec_program(parent: u32, program: &[OsString]) -> String {
    if let Err(why) = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)) {
        return format!("cannot set the parent-death signal: {why}");
    }
    let here = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get() as u32);
    if here != Some(parent) {
        return "the launcher has exited".to_owned();
    }
    let why = Command::new(&program[0]).args(&program[1..]).exec();
    format!("cannot start {}: {why}", program[0].to_string_lossy())
}

/// Ranks to start.
pub(crate) struct Job {
    /// The subcommand that starts them, for messages.
    pub(crate) command: &'static str,
    pub(crate) ranks: usize,
    pub(crate) raw: bool,
    pub(crate) grace: Duration,
    pub(crate) link: Option<String>,
    pub(crate) program: Vec<OsString>,
}

/// The file with the address of rank 0, in the folder of this user; removed on drop. The next
/// launcher removes those of launchers that were killed.
struct AddressFile(PathBuf);

impl AddressFile {
    fn new() -> Result<Self, Failure> {
        let folder = runtime_folder(std::env::var_os("XDG_RUNTIME_DIR"));
        make_private_folder(&folder).map_err(|why| {
            Failure::Runtime(format!("cannot create {}: {why}", folder.display()))
        })?;
        remove_stale(&folder);
        let name = format!("{PREFIX}{}-{}.address", std::process::id(), token()?);
        Ok(Self(folder.join(name)))
    }
}

impl Drop for AddressFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Prefix of address files; the launcher's process id follows.
const PREFIX: &str = "run-";

/// Removes files of launchers that no longer exist.
fn remove_stale(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let rest = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let launcher = rest.and_then(|rest| rest.split('-').next()?.parse::<i32>().ok());
        let is_gone = |pid| rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH);
        if launcher.and_then(Pid::from_raw).is_some_and(is_gone) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// 128 random bits in hexadecimal.
fn token() -> Result<String, Failure> {
    let mut bytes = [0; 16];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|why| Failure::Runtime(format!("cannot read /dev/urandom: {why}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A started rank; its process group is killed on drop.
struct Rank {
    child: Child,
    readers: Vec<JoinHandle<()>>,
    exit_status: Option<ExitStatus>,
}

impl Rank {
    fn signal(&self, signal: Signal) {
        if self.exit_status.is_none() {
            // Each rank leads its own process group: this reaches its children too.
            let _ = kill_process_group(Pid::from_child(&self.child), signal);
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait();
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
    }
}

/// Starts the ranks, and waits for all of them.
pub(crate) fn launch(job: &Job) -> Result<ExitCode, Failure> {
    let broken =
        |what: &str, why: std::io::Error| Failure::Runtime(format!("cannot {what}: {why}"));
    let mut signals = Signals::new([SIGCHLD, SIGINT, SIGTERM, SIGHUP])
        .map_err(|why| broken("listen for signals", why))?;
    let (signals_tx, signals_rx) = channel();
    let handle = signals.handle();
    let listener = std::thread::spawn(move || {
        for signal in signals.forever() {
            if signals_tx.send(signal).is_err() {
                return;
            }
        }
    });
    let address_file = AddressFile::new()?;
    let token = token()?;
    let mut ranks = Vec::new();
    for rank in 0..job.ranks {
        let started = start(job, rank, &address_file, &token);
        ranks.push(started.map_err(|why| broken(&format!("start rank {rank}"), why))?);
    }
    let outcome = supervise(job, &mut ranks, &signals_rx);
    drop(ranks);
    handle.close();
    let _ = listener.join();
    Ok(outcome)
}

fn start(job: &Job, rank: usize, file: &AddressFile, token: &str) -> std::io::Result<Rank> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["run", "--become-rank-of", &std::process::id().to_string(), "--"])
        .args(&job.program)
        .env("WARPWIRE_RANK", rank.to_string())
        .env("WARPWIRE_SIZE", job.ranks.to_string())
        .env("WARPWIRE_LOCAL_RANK", rank.to_string())
        .env("WARPWIRE_LOCAL_SIZE", job.ranks.to_string())
        .env("WARPWIRE_MASTER", format!("file:{}", file.0.display()))
        .env("WARPWIRE_TOKEN", token)
        .envs(job.link.as_ref().map(|link| ("WARPWIRE_LINK", link)))
        .stdin(Stdio::null())
        .process_group(0);
    if !job.raw {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
    }
    let mut child = command.spawn()?;
    let mut readers = Vec::new();
    if let Some(out) = child.stdout.take() {
        readers.push(std::thread::spawn(move || forward_output(rank, out, std::io::stdout())));
    }
    if let Some(err) = child.stderr.take() {
        readers.push(std::thread::spawn(move || forward_output(rank, err, std::io::stderr())));
    }
    Ok(Rank { child, readers, exit_status: None })
}

/// Copies whole lines, prefixed with the rank, until end of file.
fn forward_output(rank: usize, from: impl Read, mut to: impl Write) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    loop {
        line.clear();
        line.extend(format!("[{rank}] ").as_bytes());
        let prefix = line.len();
        match from.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) if line.len() == prefix => return,
            Ok(_) => {}
        }
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        // The reader of our output may be gone; the ranks must not block on that.
        let _ = to.write_all(&line).and_then(|()| to.flush());
    }
}

/// Waits until all ranks have exited. After a failure, terminates the others.
fn supervise(job: &Job, ranks: &mut [Rank], signals_rx: &Receiver<i32>) -> ExitCode {
    /// Time between SIGTERM and SIGKILL.
    const KILL_AFTER: Duration = Duration::from_secs(3);
    let mut first_failure: Option<(usize, ExitStatus)> = None;
    let mut interrupted = None;
    let mut terminating_since: Option<Instant> = None;
    let mut failed_at: Option<Instant> = None;
    loop {
        for (rank, process) in ranks.iter_mut().enumerate() {
            if process.exit_status.is_some() {
                continue;
            }
            let Ok(Some(status)) = process.child.try_wait() else { continue };
            process.exit_status = Some(status);
            if !status.success() && terminating_since.is_none() {
                let _ = writeln!(
                    std::io::stderr(),
                    "warpwire {}: rank {rank} {}",
                    job.command,
                    describe_exit(status)
                );
                first_failure.get_or_insert((rank, status));
                failed_at.get_or_insert_with(Instant::now);
            }
        }
        if ranks.iter().all(|process| process.exit_status.is_some()) {
            return exit_code(first_failure, interrupted);
        }
        if terminating_since.is_none()
            && failed_at.is_some_and(|since| since.elapsed() >= job.grace)
        {
            ranks.iter().for_each(|process| process.signal(Signal::TERM));
            terminating_since = Some(Instant::now());
        }
        if terminating_since.is_some_and(|since| since.elapsed() >= KILL_AFTER) {
            ranks.iter().for_each(|process| process.signal(Signal::KILL));
        }
        let poll_ms = if failed_at.or(terminating_since).is_some() { 20 } else { 1000 };
        match signals_rx.recv_timeout(Duration::from_millis(poll_ms)) {
            Ok(SIGCHLD) | Err(RecvTimeoutError::Timeout) => {}
            Ok(number) => {
                interrupted.get_or_insert(number);
                terminating_since.get_or_insert_with(Instant::now);
                let signal = Signal::from_named_raw(number).unwrap_or(Signal::TERM);
                ranks.iter().for_each(|process| process.signal(signal));
            }
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Describes how a rank exited.
fn describe_exit(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, Some(signal)) => {
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("unknown");
            format!("was killed by signal {signal} ({name})")
        }
        (None, None) => "exited with an unknown status".to_owned(),
    }
}

fn exit_code(failure: Option<(usize, ExitStatus)>, interrupted: Option<i32>) -> ExitCode {
    let code_of_signal = |signal: i32| ExitCode::from((128 + signal).clamp(1, 255) as u8);
    match (interrupted, failure) {
        (Some(signal), _) => code_of_signal(signal),
        (None, None) => ExitCode::SUCCESS,
        (None, Some((_, status))) => match (status.code(), status.signal()) {
            (Some(code), _) => ExitCode::from(code.clamp(1, 255) as u8),
            (None, signal) => code_of_signal(signal.unwrap_or(1)),
        },
    }
}
