//! Tests with more than one process.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, ExitStatus};
use std::time::Instant;

use crate::clock::{self, until};

/// Says what a child does: the suite, then words for its role.
const ENV_VAR: &str = "WARPWIRE_TEST_ROLE";

/// Part of a test that runs in a process of its own: this same program, which
/// [`run`](crate::run) hands over to the suite's `role` function.
#[derive(Clone, Debug)]
pub struct Role {
    suite: &'static str,
    args: String,
}

impl Role {
    /// Words for the role function of a suite.
    pub fn new(suite: &'static str, args: impl Into<String>) -> Self {
        Self { suite, args: args.into() }
    }

    /// The command that plays it.
    pub fn command(&self) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let (variable, slowdown) = clock::inherit();
        command
            .env(ENV_VAR, format!("{} {}", self.suite, self.args))
            .env(variable, slowdown)
            .env("RUST_BACKTRACE", "0");
        command
    }

    /// The command that plays it after a line of shell: a limit that is set, say.
    pub fn command_after(&self, line: &str) -> Command {
        let program = self.command();
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{line}; exec \"$0\"")]).arg(program.get_program());
        command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command
    }

    /// The role that this process was started for: its suite and its words.
    pub(crate) fn current() -> Option<(String, String)> {
        let text = std::env::var(ENV_VAR).ok()?;
        let (suite, args) = text.split_once(' ').unwrap_or((&text, ""));
        Some((suite.to_owned(), args.to_owned()))
    }
}

/// A child process that is killed when this is dropped.
#[derive(Debug)]
pub struct Process {
    /// The process itself.
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

    /// The next line that it prints, trimmed; empty if it has ended. Its output must be piped.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.as_mut().expect("its output is piped").read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Kills it, waits for its end, and returns when that was.
    pub fn kill(&mut self) -> Instant {
        let _ = self.child.kill();
        let _ = self.child.wait();
        Instant::now()
    }

    /// Its exit status, once it has ended by itself.
    pub fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        until("the process ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.expect("it has ended")
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
    fn a_process_ends_with_its_handle() {
        let process = Process::start(Command::new("sleep").arg("1000"));
        let folder = format!("/proc/{}", process.child.id());
        assert!(std::path::Path::new(&folder).exists());
        drop(process);
        assert!(!std::path::Path::new(&folder).exists());
    }
}
