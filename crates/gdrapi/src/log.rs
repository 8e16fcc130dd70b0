//! Log lines on stderr, controlled by `GDRCOPY_ENABLE_LOGGING` and `GDRCOPY_LOG_LEVEL`.

use std::fmt::Display;
use std::io::Write;
use std::sync::OnceLock;

/// Log levels; the numbers are those of `GDRCOPY_LOG_LEVEL`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Debug = 1,
    Info = 2,
    Warn = 3,
    Error = 4,
}

/// The minimum level that is logged; `None` if logging is off.
fn threshold() -> Option<i64> {
    static THRESHOLD: OnceLock<Option<i64>> = OnceLock::new();
    *THRESHOLD.get_or_init(|| {
        std::env::var_os("GDRCOPY_ENABLE_LOGGING")?;
        let level = std::env::var("GDRCOPY_LOG_LEVEL").ok();
        // Text that is not a number counts as 0, as with C's atoi.
        Some(level.map_or(Level::Error as i64, |text| text.trim().parse().unwrap_or(0)))
    })
}

/// Writes one line if its level is enabled; the text is formatted only then.
pub(crate) fn line<T: Display>(level: Level, text: impl FnOnce() -> T) {
    if threshold().is_some_and(|threshold| level as i64 >= threshold) {
        let name = match level {
            Level::Debug => "debug",
            Level::Info => "info",
            Level::Warn => "warning",
            Level::Error => "error",
        };
        let line = format!("gdrapi (warpwire) {name}: {}\n", text());
        // A failure cannot be reported anywhere: stderr is closed.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}
