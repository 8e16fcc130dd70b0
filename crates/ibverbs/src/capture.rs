//! A capture of the packets of this process, for Wireshark: `WARPWIRE_PCAP` names the file.

use std::path::PathBuf;
use std::sync::OnceLock;

use warpwire::link::Capture;

use crate::boundary::{Errno, Result};

static CAPTURE: OnceLock<Result<Option<Capture>>> = OnceLock::new();

/// The file of this process: `%p` stands for its number, so that programs of one environment do not
/// overwrite each other's captures.
fn path(text: &str, process: u32) -> PathBuf {
    text.replace("%p", &process.to_string()).into()
}

/// The capture that all devices of this process write to, if there is one.
///
/// # Errors
/// If the file cannot be created; the log has why.
pub(crate) fn get() -> Result<Option<&'static Capture>> {
    let capture = CAPTURE.get_or_init(|| {
        let text = std::env::var("WARPWIRE_PCAP").unwrap_or_default();
        if text.is_empty() {
            return Ok(None);
        }
        Ok(Some(Capture::create(&path(&text, std::process::id()))?))
    });
    match capture {
        Ok(capture) => Ok(capture.as_ref()),
        Err(Errno(errno)) => Err(Errno(*errno)),
    }
}

/// Writes what is still in memory, at the end of the process.
pub(crate) fn finish() {
    if let Some(Ok(Some(capture))) = CAPTURE.get() {
        // The process ends: no call is left that could return the error.
        let _ = capture.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_is_in_the_name() {
        assert_eq!(path("/tmp/a.pcap", 7), PathBuf::from("/tmp/a.pcap"));
        assert_eq!(path("/tmp/%p/%p.pcap", 7), PathBuf::from("/tmp/7/7.pcap"));
    }
}
