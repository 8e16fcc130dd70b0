//! `GDRCOPY_ENABLE_LOGGING` and `GDRCOPY_LOG_LEVEL`: lines on stderr, for people.

use std::fmt::Display;
use std::io::Write;
use std::sync::OnceLock;

/// How much a line matters; the numbers are those of `GDRCOPY_LOG_LEVEL`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Debug = 1,
    Info = 2,
    Warn = 3,
    Error = 4,
}

/// The least level that is written; `None`: nothing is.
fn threshold() -> Option<i64> {
    static THRESHOLD: OnceLock<Option<i64>> = OnceLock::new();
    *THRESHOLD.get_or_init(|| {
        std::env::var_os("GDRCOPY_ENABLE_LOGGING")?;
        let level = std::env::var("GDRCOPY_LOG_LEVEL").ok();
        // Text that is no number counts as 0, as C's atoi has it.
        Some(level.map_or(Level::Error as i64, |text| text.trim().parse().unwrap_or(0)))
    })
}

/// Writes one line, if its level is asked for; the text is made only then.
pub(crate) fn line<T: Display>(level: Level, text: impl FnOnce() -> T) {
    if threshold().is_some_and(|threshold| level as i64 >= threshold) {
        let name = match level {
            Level::Debug => "debug",
            Level::Info => "info",
            Level::Warn => "warning",
            Level::Error => "error",
        };
        let line = format!("gdrapi (warpwire) {name}: {}\n", text());
        // Nobody can be told that stderr is closed.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}
