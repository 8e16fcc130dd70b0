//! Tests with several processes.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, ExitStatus};
use std::time::Instant;

use crate::clock::{self, until};

/// The role of a child process: the suite, then the arguments of its `role` function.
const ENV_VAR: &str = "WARPWIRE_TEST_ROLE";

/// Part of a test that runs in a separate process: the same program, in which [`run`](crate::run)
/// calls the suite's `role` function.
#[derive(Clone, Debug)]
pub struct Role {
    suite: &'static str,
    args: String,
}

impl Role {
    /// A role of a suite, with arguments for its `role` function.
    pub fn new(suite: &'static str, args: impl Into<String>) -> Self {
        Self { suite, args: args.into() }
    }

    /// The command that runs this role.
    pub fn command(&self) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let (variable, slowdown) = clock::inherit();
        command
            .env(ENV_VAR, format!("{} {}", self.suite, self.args))
            .env(variable, slowdown)
            .env("RUST_BACKTRACE", "0");
        command
    }

    /// The command that runs this role after a line of shell, for example one that sets a limit.
    pub fn command_after(&self, line: &str) -> Command {
        let program = self.command();
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{line}; exec \"$0\"")]).arg(program.get_program());
        command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command
    }

    /// The suite and the arguments of the role that this process was started for.
    pub(crate) fn current() -> Option<(String, String)> {
        let text = std::env::var(ENV_VAR).ok()?;
        let (suite, args) = text.split_once(' ').unwrap_or((&text, ""));
        Some((suite.to_owned(), args.to_owned()))
    }
}

/// A child process, killed on drop.
#[derive(Debug)]
pub struct Process {
    /// The process handle.
    pub child: Child,
    out: Option<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts a command.
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap_or_else(|why| panic!("{command:?}: {why}"));
        let out = child.stdout.take().map(BufReader::new);
        Self { child, out }
    }

    /// The next line of its standard output, trimmed; empty at the end. The output must be piped.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.as_mut().expect("its output is piped").read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Kills the process, waits for its exit, and returns the time of that.
    pub fn kill(&mut self) -> Instant {
        let _ = self.child.kill();
        let _ = self.child.wait();
        Instant::now()
    }

    /// Waits until all its threads have stopped: `SIGSTOP` takes effect in each of them when it is
    /// scheduled next, on a busy machine long after `kill` has returned.
    pub fn until_stopped(&self) {
        let stopped = |task: std::io::Result<std::fs::DirEntry>| {
            // The state follows the name of the program, which stands in parentheses.
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat"));
            // A thread may end meanwhile.
            stat.map_or(true, |stat| stat.rsplit(')').next().unwrap().trim_start().starts_with('T'))
        };
        until("all threads of the process stop", || {
            std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap().all(stopped)
        });
    }

    /// Waits for the process to exit on its own, and returns its exit status.
    pub fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        until("the process exits", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.expect("it has exited")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_killed_on_drop() {
        let process = Process::start(Command::new("sleep").arg("1000"));
        let folder = format!("/proc/{}", process.child.id());
        assert!(std::path::Path::new(&folder).exists());
        drop(process);
        assert!(!std::path::Path::new(&folder).exists());
    }
}
