//! Child processes for checks: the command starts itself with a hidden subcommand.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use warpwire::mem::Device;

use super::super::Failure;
use super::super::target::DeviceChoice;
use super::raw::{self, ChildExit};
use super::table::{self, Case, Run};
use super::{CheckError, CheckResult, CheckTarget, processes};

/// Longer than any child takes; creating a CUDA context alone may take seconds.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Exit statuses of the child.
const FAILED: u8 = 1;
const WAIVED: u8 = 3;

/// Run a check, or a role of one, in this process
#[derive(Args)]
pub(in crate::copy) struct ChildArguments {
    /// CHECK, or ROLE:CHECK
    task: String,

    #[command(flatten)]
    device: DeviceChoice,
}

/// In the child: runs the task; the exit status is the outcome, and standard output has the reason.
pub(in crate::copy) fn run_child(arguments: &ChildArguments) -> Result<ExitCode, Failure> {
    // The parent waits for this process: it must not hang.
    raw::kill_after(TIMEOUT);
    let (device, _) = arguments.device.open()?;
    let task = arguments.task.as_str();
    let case = table::cases().into_iter().find(|case| {
        let name = task.split_once(':').map_or(task, |(_, case)| case);
        case.name() == name
    });
    let Some(case) = case else {
        return Err(Failure::Usage(format!("there is no task {task:?}")));
    };
    let target = CheckTarget { device, kind: case.kind() };
    let checked = match (task.split_once(':'), case.run) {
        (Some((role, _)), _) => processes::role(role, &target),
        (None, Run::InProcess(check) | Run::InChild(check)) => check(&target),
        (None, Run::Waived(why)) => Err(CheckError::Waived(why.to_owned())),
    };
    let (code, why) = match checked {
        Ok(()) => return Ok(ExitCode::SUCCESS),
        Err(CheckError::Failed(why)) => (FAILED, why),
        Err(CheckError::Waived(why)) => (WAIVED, why),
    };
    crate::output::print(&format!("{why}\n")).map_err(Failure::Runtime)?;
    Ok(ExitCode::from(code))
}

/// Runs a whole check in a child process.
pub(super) fn run(case: &Case, device: &Device) -> CheckResult {
    let mut child_process = ChildProcess::start(&case.name(), device)?;
    let text = child_process.rest();
    match child_process.end()? {
        ChildExit::Exited(0) => Ok(()),
        ChildExit::Exited(code) if code == i32::from(WAIVED) => Err(CheckError::Waived(text)),
        ChildExit::Exited(code) if text.is_empty() => {
            Err(CheckError::Failed(format!("its process exited with status {code}")))
        }
        ChildExit::Exited(_) => Err(CheckError::Failed(text)),
        child_exit if child_exit.is_timeout() => {
            Err(CheckError::Failed(format!("its process did not exit in {TIMEOUT:?}")))
        }
        ChildExit::Killed(signal) => {
            Err(CheckError::Failed(format!("its process was killed by signal {signal}")))
        }
    }
}

/// A child that runs a task, prints a line when ready, and waits for a line on standard input.
pub(super) struct ChildProcess {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl ChildProcess {
    pub(super) fn start(task: &str, device: &Device) -> Result<Self, CheckError> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["copy", "sanity-child", task, "--device", &device.label()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let output = child.stdout.take();
        let output =
            output.ok_or_else(|| CheckError::Failed("the child has no output pipe".to_owned()))?;
        Ok(Self { child, output: BufReader::new(output) })
    }

    /// The child's next output line; empty if it has exited.
    pub(super) fn line(&mut self) -> String {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(_) => line.trim_end().to_owned(),
            Err(_) => String::new(),
        }
    }

    /// The rest of the child's output, until it exits.
    fn rest(&mut self) -> String {
        let lines: Vec<String> =
            std::iter::from_fn(|| Some(self.line()).filter(|l| !l.is_empty())).collect();
        lines.join(" ")
    }

    /// Kills the child, to simulate a crash.
    pub(super) fn kill(mut self) -> Result<(), CheckError> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Lets the child continue, and returns how it exited; kills it on timeout.
    pub(super) fn end(mut self) -> Result<ChildExit, CheckError> {
        if let Some(mut input) = self.child.stdin.take() {
            // It may have exited already.
            let _ = input.write_all(b"\n");
        }
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(child_exit(status));
            }
            if start.elapsed() > TIMEOUT {
                self.kill()?;
                return Err(CheckError::Failed(format!("its process did not exit in {TIMEOUT:?}")));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn child_exit(status: ExitStatus) -> ChildExit {
    match (status.code(), status.signal()) {
        (Some(code), _) => ChildExit::Exited(code),
        (None, signal) => ChildExit::Killed(signal.unwrap_or(0)),
    }
}
