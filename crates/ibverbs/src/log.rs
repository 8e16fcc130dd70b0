//! Log lines: why a call or a peer was refused.

use std::fmt::Display;

/// Writes one line if `WARPWIRE_IB_LOG` is set; the text is formatted only then.
#[cold]
pub(crate) fn line<T: Display>(text: impl FnOnce() -> T) {
    warpwire_cabi::log::line("ibverbs", text);
}
