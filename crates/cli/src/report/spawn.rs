//! Programs that are measured: this command itself, and others as pairs of server and client.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::output::Failure;

/// Longer than any one measurement takes on a machine that is not overloaded.
pub(crate) const LIMIT: Duration = Duration::from_secs(240);
const POLL: Duration = Duration::from_millis(20);

/// A child that is killed when its measurement ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The CPUs of a server and of its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cores {
    pub(crate) server: usize,
    pub(crate) client: usize,
}

impl Cores {
    /// Two CPUs of one socket that are not hyper-threads of one core, if possible; `None` if this
    /// process may use only one.
    pub(crate) fn choose() -> Option<Self> {
        let allowed = sched_getaffinity(None).ok()?;
        let cpus: Vec<_> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
        let read = |cpu: usize, what: &str| {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/{what}");
            std::fs::read_to_string(path).ok()
        };
        Self::among(&cpus, |cpu| (read(cpu, "physical_package_id"), read(cpu, "core_id")))
    }

    /// `place` is a CPU's socket and core.
    fn among<P: PartialEq>(cpus: &[usize], place: impl Fn(usize) -> (P, P)) -> Option<Self> {
        let (first, rest) = cpus.split_first()?;
        let near = place(*first);
        let is_apart = |cpu: &&usize| {
            let (socket, core) = place(**cpu);
            socket == near.0 && core != near.1
        };
        let second = rest.iter().find(is_apart).or(rest.first())?;
        Some(Self { server: *first, client: *second })
    }
}

/// Starts a program on one CPU, if one is given: it inherits the affinity of this thread.
fn start(command: &mut Command, core: Option<usize>) -> std::io::Result<Child> {
    let before = core.and_then(|_| sched_getaffinity(None).ok());
    if let (Some(core), Some(_)) = (core, &before) {
        let mut one = CpuSet::new();
        one.set(core);
        // Without it the figures are worse, and still true.
        let _ = sched_setaffinity(None, &one);
    }
    let child = command.spawn();
    if let Some(before) = before {
        let _ = sched_setaffinity(None, &before);
    }
    child
}

/// This command, with other arguments.
pub(crate) fn own_command() -> Result<Command, Failure> {
    let own = std::env::current_exe().map_err(|why| {
        Failure::Runtime(format!("cannot find this command's own file to start it: {why}"))
    })?;
    Ok(Command::new(own))
}

/// Standard output of this command with other arguments.
pub(crate) fn own(words: &[&str]) -> Result<String, Failure> {
    let mut command = own_command()?;
    command.args(words);
    finish(&mut command, None, LIMIT)
        .map_err(|why| Failure::Runtime(format!("warpwire {}: {why}", words.join(" "))))
}

/// Runs a program to its end, on one CPU if one is given; returns what it wrote to standard output.
///
/// # Errors
/// If it cannot be started, fails or does not end in time: why, with its last words.
pub(crate) fn finish(
    command: &mut Command,
    core: Option<usize>,
    limit: Duration,
) -> Result<String, String> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let name = command.get_program().to_string_lossy().into_owned();
    let child = start(command, core).map_err(|why| format!("cannot start {name}: {why}"))?;
    let mut running = Running(child);
    // Read both while it runs: a full pipe would block it.
    let out = reader(running.0.stdout.take());
    let err = reader(running.0.stderr.take());
    let deadline = Instant::now() + limit;
    let status = loop {
        match running.0.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() >= deadline => {
                return Err(format!("not finished within {} s", limit.as_secs()));
            }
            Ok(None) => std::thread::sleep(POLL),
            Err(why) => return Err(format!("cannot wait for {name}: {why}")),
        }
    };
    let [out, err] = [out, err].map(|thread| thread.join().unwrap_or_default());
    match status.success() {
        true => Ok(out),
        false => Err(last_words(&err).or(last_words(&out)).unwrap_or(status.to_string())),
    }
}

fn reader(stream: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was read before an error is kept.
        let _ = stream.map(|mut stream| stream.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// The line that says what went wrong: the last error, or the last line.
fn last_words(text: &str) -> Option<String> {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty()).rev();
    let last = lines.next()?;
    let error = std::iter::once(last).chain(lines).find(|line| line.starts_with("error:"));
    let line = error.map_or(last, |line| line.trim_start_matches("error:").trim());
    Some(warpwire::units::printable(line))
}

/// Runs a server, and then its client, each on its CPU; returns the client's output.
///
/// # Errors
/// Why the server or the client failed. The client is repeated while the server does not listen.
pub(crate) fn pair(
    server: &mut Command,
    client: impl Fn() -> Command,
    cores: Option<Cores>,
    limit: Duration,
) -> Result<String, String> {
    server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let name = server.get_program().to_string_lossy().into_owned();
    let child = start(server, cores.map(|cores| cores.server))
        .map_err(|why| format!("cannot start {name}: {why}"))?;
    let mut running = Running(child);
    let deadline = Instant::now() + limit;
    let mut last = String::new();
    while Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(300));
        match finish(&mut client(), cores.map(|cores| cores.client), limit) {
            Ok(text) => return Ok(text),
            Err(why) => last = why,
        }
        if matches!(running.0.try_wait(), Ok(Some(_))) {
            return Err(format!("its server ended: {last}"));
        }
    }
    Err(last)
}

/// A TCP port that is free now.
pub(crate) fn free_port() -> Result<u16, String> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0));
    let address = listener.and_then(|listener| listener.local_addr());
    address.map(|address| address.port()).map_err(|why| format!("no free TCP port: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_cores_apart() {
        let cores = |server, client| Some(Cores { server, client });
        // Two sockets of two cores with two threads each.
        let place = |cpu: usize| (cpu / 4, cpu / 2);
        assert_eq!(Cores::among(&[0, 1, 2, 3, 4], place), cores(0, 2));
        assert_eq!(Cores::among(&[0, 1, 4], place), cores(0, 1));
        assert_eq!(Cores::among(&[5], place), None);
        assert_eq!(Cores::among(&[], place), None);
    }

    #[test]
    fn a_program_runs_on_its_core_and_this_thread_on_all() {
        let before = sched_getaffinity(None).unwrap();
        let one = (0..CpuSet::MAX_CPU).rfind(|cpu| before.is_set(*cpu)).unwrap();
        let script = "grep Cpus_allowed_list /proc/self/status";
        let seen = finish(&mut shell(script), Some(one), Duration::from_secs(20)).unwrap();
        assert_eq!(seen.split_whitespace().last(), Some(one.to_string().as_str()));
        assert!(sched_getaffinity(None).unwrap() == before);
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn output_of_a_program_that_succeeds() {
        let limit = Duration::from_secs(20);
        assert_eq!(finish(&mut shell("echo 1; echo 2 >&2"), None, limit), Ok("1\n".to_owned()));
    }

    #[test]
    fn why_a_program_failed() {
        let limit = Duration::from_secs(20);
        let failed = |script: &str| finish(&mut shell(script), None, limit).unwrap_err();
        assert_eq!(failed("echo error: no device >&2; echo bye >&2; exit 1"), "no device");
        assert_eq!(failed("echo out; exit 3"), "out");
        assert!(failed("exit 3").contains('3'));
        let gone = finish(&mut Command::new("/nowhere/program"), None, limit).unwrap_err();
        assert!(gone.contains("cannot start /nowhere/program"), "{gone}");
        let slow =
            finish(&mut shell("exec sleep 30"), None, Duration::from_millis(100)).unwrap_err();
        assert!(slow.contains("not finished within"), "{slow}");
    }

    #[test]
    fn a_client_whose_server_ends_is_not_repeated_forever() {
        let limit = Duration::from_secs(20);
        let failed = pair(&mut shell("exit 1"), || shell("echo refused >&2; exit 1"), None, limit);
        assert_eq!(failed, Err("its server ended: refused".to_owned()));
        let served = pair(&mut shell("exec sleep 30"), || shell("echo done"), None, limit);
        assert_eq!(served, Ok("done\n".to_owned()));
    }
}
