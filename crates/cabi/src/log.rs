//! Log lines on stderr: why a call or a peer was refused, if `WARPWIRE_IB_LOG` is set.

use std::fmt::Display;
use std::io::Write;
use std::sync::OnceLock;

/// Writes one line of this library if logging is on; the text is formatted only then.
#[cold]
pub fn line<T: Display>(library: &str, text: impl FnOnce() -> T) {
    static ENABLED: OnceLock<bool> = OnceLock::new();
    let is_set = || std::env::var_os("WARPWIRE_IB_LOG").is_some_and(|value| value != "0");
    if *ENABLED.get_or_init(is_set) {
        let line = format!("{library} (warpwire): {}\n", text());
        // A failure cannot be reported anywhere: stderr is closed.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}
