//! Writing to a terminal, a file or a pipe that closes early.

use std::io::{self, ErrorKind, IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

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
