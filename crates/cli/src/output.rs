//! Output to a terminal, a file or a pipe whose reader may close it early; exit statuses.

use std::io::{self, ErrorKind, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use warpwire::Error;
use warpwire::verbs::PostError;

/// True if `stream` is a terminal and `NO_COLOR` is unset or empty.
pub(crate) fn wants_colour(stream: &impl IsTerminal) -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !refused
}

/// Columns of standard output: the terminal's, at least 40; 100 if it is none.
pub(crate) fn width() -> usize {
    let out = io::stdout();
    let size = out.is_terminal().then(|| rustix::termios::tcgetwinsize(&out).ok()).flatten();
    let columns = size.map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0);
    columns.map_or(100, |columns| columns.max(40))
}

/// Writes to standard output. A closed pipe (`| head -1`) is not an error.
pub(crate) fn print(text: &str) -> Result<(), String> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(source) if source.kind() != ErrorKind::BrokenPipe => {
            Err(format!("cannot write to standard output: {source}"))
        }
        _ => Ok(()),
    }
}

/// Writes a value to standard output as indented JSON and a newline.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), String> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|source| format!("cannot write JSON: {source}"))?;
    print(&format!("{text}\n"))
}

/// A progress spinner on a terminal; hidden elsewhere.
pub(crate) fn spinner() -> ProgressBar {
    let spinner = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
        spinner.set_style(style);
    }
    spinner.enable_steady_tick(Duration::from_millis(200));
    spinner
}

/// Why a command failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The arguments are invalid on this machine: exit status 2.
    Usage(String),
    /// The arguments are valid, but the operation failed: exit status 1.
    Runtime(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Runtime(error.to_string())
    }
}

impl From<PostError> for Failure {
    fn from(error: PostError) -> Self {
        Error::from(error).into()
    }
}

/// Prints text as it is produced, with a spinner below it; with `--json` only the final report.
pub(crate) struct Reporter {
    json: bool,
    spinner: ProgressBar,
}

impl Reporter {
    pub(crate) fn new(json: bool) -> Self {
        Self { json, spinner: spinner() }
    }

    /// Sets the spinner's message.
    pub(crate) fn set_status(&self, what: impl Into<String>) {
        self.spinner.set_message(what.into());
    }

    /// Prints text above the spinner; nothing with `--json`.
    pub(crate) fn print(&self, text: &str) -> Result<(), Failure> {
        if self.json {
            return Ok(());
        }
        self.spinner.suspend(|| print(text)).map_err(Failure::Runtime)
    }

    /// Removes the spinner, and prints `result` with `--json`.
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

/// Converts a command's result: a runtime failure is printed here and becomes exit status 1, a
/// usage error is returned for `main` to print.
pub(crate) fn exit_result(outcome: Result<ExitCode, Failure>) -> Result<ExitCode, String> {
    match outcome {
        Ok(code) => Ok(code),
        Err(Failure::Usage(message)) => Err(message),
        Err(Failure::Runtime(message)) => {
            // Standard error may be closed; the exit status still reports the failure.
            let _ = writeln!(io::stderr(), "error: {message}");
            Ok(ExitCode::FAILURE)
        }
    }
}
