//! Output to a terminal, a file or a pipe whose reader may close it early; exit statuses.

use std::io::{self, ErrorKind, IsTerminal, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use warpwire::Error;
use warpwire::verbs::PostError;

use crate::machine::Machine;

/// Columns of a terminal that text is made for.
pub(crate) const WIDTH: usize = 100;

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

/// Prints a line on standard error, which may be closed.
pub(crate) fn note(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// A figure with three significant digits, as in 0.00331, 2.85 or 1250.
pub(crate) fn digits(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return format!("{value:.0}");
    }
    // Of the rounded value: 9.996 has the digits of 10.0.
    let rounded: f64 = format!("{value:.2e}").parse().unwrap_or(value);
    let decimals = (2.0 - rounded.abs().log10().floor()).clamp(0.0, 6.0);
    format!("{rounded:.*}", decimals as usize)
}

/// Cuts a line that is longer than [`WIDTH`].
pub(crate) fn fit(line: &str) -> String {
    if line.chars().count() <= WIDTH {
        return line.to_owned();
    }
    let mut cut: String = line.chars().take(WIDTH - 1).collect();
    cut.push('\u{2026}');
    cut
}

/// Breaks text into lines of up to [`WIDTH`] columns: the first starts with `first`, the others
/// with `rest`.
pub(crate) fn wrap(first: &str, rest: &str, text: &str) -> String {
    let (mut lines, mut line, mut is_empty) = (String::new(), first.to_owned(), true);
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            lines += line.trim_end();
            lines.push('\n');
            (line, is_empty) = (rest.to_owned(), true);
        }
        if !is_empty {
            line.push(' ');
        }
        line += word;
        is_empty = false;
    }
    lines + line.trim_end() + "\n"
}

/// Name and port of a server; messages show it as it is written.
#[derive(Clone, Copy)]
pub(crate) struct HostPort<'a>(pub(crate) &'a str, pub(crate) u16);

impl std::fmt::Display for HostPort<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.contains(':') {
            true => write!(f, "[{}]:{}", self.0, self.1),
            false => write!(f, "{}:{}", self.0, self.1),
        }
    }
}

impl std::fmt::Debug for HostPort<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl ToSocketAddrs for HostPort<'_> {
    type Iter = std::vec::IntoIter<SocketAddr>;

    fn to_socket_addrs(&self) -> io::Result<Self::Iter> {
        (self.0, self.1).to_socket_addrs()
    }
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
    /// Where the figures are measured, if they are figures.
    machine: Option<Machine>,
}

/// A result with the machine that it was measured on.
#[derive(serde::Serialize)]
struct Measured<'a, T> {
    machine: &'a Machine,
    #[serde(flatten)]
    result: &'a T,
}

impl Reporter {
    pub(crate) fn new(json: bool) -> Self {
        Self { json, spinner: spinner(), machine: None }
    }

    /// For a measurement: says if the machine is too busy, and adds `machine` to the JSON.
    pub(crate) fn for_measurement(json: bool) -> Self {
        let mut reporter = Self::new(json);
        reporter.machine = Some(reporter.machine());
        reporter
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

    /// Prints a line on standard error, above the spinner, with `--json` too.
    pub(crate) fn note(&self, line: &str) {
        self.spinner.suspend(|| note(line));
    }

    /// The machine at the start of a measurement; says so if it is too busy for one.
    pub(crate) fn machine(&self) -> Machine {
        let machine = Machine::now();
        if let Some(warning) = machine.load_warning() {
            self.note(&warning);
        }
        machine
    }

    /// Ends the measurement; says so if the hypervisor disturbed it.
    pub(crate) fn finish_machine(&self, machine: &mut Machine) {
        if let Some(warning) = machine.finish() {
            self.note(&warning);
        }
    }

    /// Runs `act`, which waits for a peer; names that peer on standard error if it takes long.
    pub(crate) fn wait_for<T>(&self, peer: &str, act: impl FnOnce() -> T) -> T {
        const PATIENCE: Duration = Duration::from_millis(700);
        let (done, wait) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                if wait.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                    self.note(&format!("waiting for {peer} \u{2026}"));
                }
            });
            let result = act();
            drop(done);
            result
        })
    }

    /// Removes the spinner, and prints `result` with `--json`.
    pub(crate) fn finish(mut self, result: &impl serde::Serialize) -> Result<(), Failure> {
        self.spinner.finish_and_clear();
        let machine = self.machine.take().map(|mut machine| {
            self.finish_machine(&mut machine);
            machine
        });
        match machine {
            _ if !self.json => Ok(()),
            Some(machine) => print_json(&Measured { machine: &machine, result }),
            None => print_json(result),
        }
        .map_err(Failure::Runtime)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_wrapped_at_the_width() {
        let text = wrap("# link: ", "#       ", &"word ".repeat(60));
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert!(text.lines().skip(1).all(|line| line.starts_with("#       word")), "{text}");
        assert_eq!(text.matches("word").count(), 60);
        assert_eq!(wrap("# a: ", "# ", ""), "# a:\n");
        // A word that is longer than a line stays whole.
        assert_eq!(wrap("# ", "# ", &"x".repeat(120)).lines().count(), 1);
    }

    #[test]
    fn figures_have_three_digits() {
        for (value, wanted) in [
            (0.0, "0"),
            (0.003_312, "0.00331"),
            (0.999_6, "1.00"),
            (2.849, "2.85"),
            (9.996, "10.0"),
            (99.96, "100"),
            (241.55, "242"),
            (1234.5, "1230"),
            (1e-9, "0.000000"),
        ] {
            assert_eq!(digits(value), wanted, "{value}");
        }
    }

    #[test]
    fn long_lines_are_cut() {
        assert_eq!(fit("short"), "short");
        assert_eq!(fit(&"\u{e4}".repeat(101)).chars().count(), WIDTH);
    }

    #[test]
    fn servers_are_shown_as_they_are_written() {
        assert_eq!(format!("{:?}", HostPort("node1", 18515)), "node1:18515");
        assert_eq!(HostPort("::1", 7).to_string(), "[::1]:7");
    }
}
