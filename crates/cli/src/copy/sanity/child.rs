//! Processes of our own: the command starts itself again, with a hidden subcommand.

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

/// Longer than any of them takes; a CUDA context alone may take seconds.
const TIMEOUT: Duration = Duration::from_secs(60);
const FAILED: u8 = 1;
const WAIVED: u8 = 3;

/// A part of a check, in a process of its own
#[derive(Args)]
pub(in crate::copy) struct ChildArguments {
    /// A check, or a task of one
    task: String,

    #[command(flatten)]
    device: DeviceChoice,
}

/// In the child: does the task, tells how it went by the status, and why on standard output.
pub(in crate::copy) fn run_child(arguments: &ChildArguments) -> Result<ExitCode, Failure> {
    // Its parent waits for what it says.
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

/// Runs a whole check in a process of its own.
pub(super) fn run(case: &Case, device: &Device) -> CheckResult {
    let mut child_process = ChildProcess::start(&case.name(), device)?;
    let text = child_process.rest();
    match child_process.end()? {
        ChildExit::Exited(0) => Ok(()),
        ChildExit::Exited(code) if code == i32::from(WAIVED) => Err(CheckError::Waived(text)),
        ChildExit::Exited(code) if text.is_empty() => {
            Err(CheckError::Failed(format!("its process ended with status {code}")))
        }
        ChildExit::Exited(_) => Err(CheckError::Failed(text)),
        child_exit if child_exit.is_timeout() => {
            Err(CheckError::Failed(format!("its process did not end in {TIMEOUT:?}")))
        }
        ChildExit::Killed(signal) => {
            Err(CheckError::Failed(format!("its process was ended by signal {signal}")))
        }
    }
}

/// A child of ours that does a task, says so, and waits until it is told to go on.
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
            output.ok_or_else(|| CheckError::Failed("a child without output".to_owned()))?;
        Ok(Self { child, output: BufReader::new(output) })
    }

    /// The next line that it says; nothing if it has ended.
    pub(super) fn line(&mut self) -> String {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(_) => line.trim_end().to_owned(),
            Err(_) => String::new(),
        }
    }

    /// All that it still says, until it ends.
    fn rest(&mut self) -> String {
        let lines: Vec<String> =
            std::iter::from_fn(|| Some(self.line()).filter(|l| !l.is_empty())).collect();
        lines.join(" ")
    }

    /// Kills it, as a crash would.
    pub(super) fn kill(mut self) -> Result<(), CheckError> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Tells it to go on, and returns how it ended; kills it if it does not end.
    pub(super) fn end(mut self) -> Result<ChildExit, CheckError> {
        if let Some(mut input) = self.child.stdin.take() {
            // It may have ended already.
            let _ = input.write_all(b"\n");
        }
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(child_exit(status));
            }
            if start.elapsed() > TIMEOUT {
                self.kill()?;
                return Err(CheckError::Failed(format!("its process did not end in {TIMEOUT:?}")));
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
