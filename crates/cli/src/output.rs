//! Writing to a terminal, a file or a pipe that closes early.

use std::io::{self, ErrorKind, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use warpwire::Error;

/// Whether to colour what goes there: only on a terminal, and not if `NO_COLOR` is set.
pub(crate) fn wants_colour(stream: &impl IsTerminal) -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !refused
}

/// Writes to standard output. A reader that has seen enough (`| head -1`) is no error.
pub(crate) fn print(text: &str) -> Result<(), String> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(source) if source.kind() != ErrorKind::BrokenPipe => {
            Err(format!("cannot write to standard output: {source}"))
        }
        _ => Ok(()),
    }
}

/// Writes a value to standard output as JSON.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), String> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|source| format!("cannot write JSON: {source}"))?;
    print(&format!("{text}\n"))
}

/// Shows on a terminal what runs; nothing elsewhere.
pub(crate) fn spinner() -> ProgressBar {
    let spinner = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
        spinner.set_style(style);
    }
    spinner.enable_steady_tick(Duration::from_millis(200));
    spinner
}

/// Why a tool ended early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// What was asked for makes no sense on this machine: status 2.
    Usage(String),
    /// It makes sense, and did not work: status 1.
    Runtime(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Runtime(error.to_string())
    }
}

/// What is printed by way of text, as it comes, under a spinner; nothing for JSON.
pub(crate) struct Reporter {
    json: bool,
    spinner: ProgressBar,
}

impl Reporter {
    pub(crate) fn new(json: bool) -> Self {
        Self { json, spinner: spinner() }
    }

    /// Says what is at work now.
    pub(crate) fn set_status(&self, what: impl Into<String>) {
        self.spinner.set_message(what.into());
    }

    /// Prints text that stays.
    pub(crate) fn print(&self, text: &str) -> Result<(), Failure> {
        if self.json {
            return Ok(());
        }
        self.spinner.suspend(|| print(text)).map_err(Failure::Runtime)
    }

    /// Takes the spinner away, and prints the result if JSON was asked for.
    pub(crate) fn finish(self, result: &impl serde::Serialize) -> Result<(), Failure> {
        self.spinner.finish_and_clear();
        if !self.json {
            return Ok(());
        }
        print_json(result).map_err(Failure::Runtime)
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.spinner.finish_and_clear();
    }
}

/// The end of a tool, as the command's: what is broken is told here, a wrong use by whoever called.
pub(crate) fn exit_result(outcome: Result<ExitCode, Failure>) -> Result<ExitCode, String> {
    match outcome {
        Ok(code) => Ok(code),
        Err(Failure::Usage(message)) => Err(message),
        Err(Failure::Runtime(message)) => {
            // Nobody may be listening; the status still tells.
            let _ = writeln!(io::stderr(), "error: {message}");
            Ok(ExitCode::FAILURE)
        }
    }
}
