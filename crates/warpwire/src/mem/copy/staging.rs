//! How copies through pinned memory are cut into parts.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Kind, Result};
use crate::units;

/// The environment variable that sets the parts: `half=1MiB,step=512KiB,small=16KiB,reads=32KiB`; what is left out
/// stays as it is.
pub const STAGING_ENV_VAR: &str = "WARPWIRE_STAGING";

/// The sizes by which memory without a window is reached through pinned memory.
///
/// ```
/// use warpwire::mem::copy::StagingOptions;
/// let staging: StagingOptions = "half=2MiB,step=256KiB".parse()?;
/// assert_eq!((staging.half, staging.small), (2 << 20, StagingOptions::default().small));
/// assert!("step=2MiB".parse::<StagingOptions>().unwrap_err().to_string().contains("half"));
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingOptions {
    /// Each of the two halves of pinned memory: the CPU works on one, the copy engine on the other.
    pub half: u64,
    /// The least that the engine is given before somebody waits: each copy costs some microseconds of its own.
    pub step: u64,
    /// Writes up to this length are one call with ordinary memory, without a stream.
    pub small: u64,
    /// Reads from this length on go through pinned memory; shorter ones are one call with ordinary memory.
    pub reads: u64,
}

impl Default for StagingOptions {
    fn default() -> Self {
        Self { half: 1 << 20, step: 512 << 10, small: 16 << 10, reads: 1 }
    }
}

impl StagingOptions {
    const MIN_HALF: u64 = 4 << 10;
    const MAX_HALF: u64 = 64 << 20;

    /// What `WARPWIRE_STAGING` asks for; the default if it is not set.
    pub fn from_env() -> Result<Self> {
        match std::env::var(STAGING_ENV_VAR) {
            Ok(text) => text.parse(),
            Err(_) => Ok(Self::default()),
        }
    }

    /// Refuses sizes that make no sense together.
    pub fn check(&self) -> Result<()> {
        let refuse = |why: String| Err(malformed(why));
        let Self { half, step, small, reads: _ } = *self;
        if !(Self::MIN_HALF..=Self::MAX_HALF).contains(&half) {
            return refuse(format!("a half of {} is not within 4KiB to 64MiB", units::bytes(half)));
        }
        if step == 0 || step > half {
            let (step, half) = (units::bytes(step), units::bytes(half));
            return refuse(format!("a step of {step} does not fit into a half of {half}"));
        }
        if small > half {
            let (small, half) = (units::bytes(small), units::bytes(half));
            return refuse(format!("small is {small}, more than a half of {half}"));
        }
        Ok(())
    }

    /// How much of a read of `len` bytes is fetched at a time: a quarter, so that most of the CPU's work lies beside
    /// the engine's.
    pub(super) fn fetch(&self, len: u64) -> u64 {
        (len / 4).next_multiple_of(4096).clamp(self.step, self.half)
    }
}

impl fmt::Display for StagingOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { half, step, small, reads } = *self;
        write!(f, "half={half},step={step},small={small},reads={reads}")
    }
}

impl FromStr for StagingOptions {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut staging = Self::default();
        for setting in text.split(',').map(str::trim).filter(|setting| !setting.is_empty()) {
            let (key, value) = setting
                .split_once('=')
                .ok_or_else(|| malformed(format!("{setting:?} is not of the form key=value")))?;
            let size = units::parse_bytes(value.trim())?;
            match key.trim() {
                "half" => staging.half = size,
                "step" => staging.step = size,
                "small" => staging.small = size,
                "reads" => staging.reads = size,
                other => return Err(malformed(format!("there is no setting {other:?}"))),
            }
        }
        staging.check()?;
        Ok(staging)
    }
}

#[cold]
fn malformed(why: String) -> Error {
    Error::new(Kind::Malformed, "read the sizes of staging")
        .on(STAGING_ENV_VAR)
        .why(why)
        .fix("write sizes like half=1MiB,step=512KiB,small=16KiB,reads=32KiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_reads_and_is_written_again() {
        let text = " half=1MiB, step=64KiB,small=0,reads=4KiB, ";
        let staging: StagingOptions = text.parse().unwrap();
        let wanted = StagingOptions { half: 1 << 20, step: 64 << 10, small: 0, reads: 4 << 10 };
        assert_eq!(staging, wanted);
        assert_eq!(staging.to_string().parse::<StagingOptions>().unwrap(), wanted);
        assert_eq!("".parse::<StagingOptions>().unwrap(), StagingOptions::default());
        let staging =
            StagingOptions { half: 512 << 10, step: 128 << 10, ..StagingOptions::default() };
        assert_eq!(staging.fetch(256 << 10), 128 << 10);
        assert_eq!(staging.fetch(8 << 20), 512 << 10);
        assert_eq!(staging.fetch(2 << 20), 512 << 10);
    }

    #[test]
    fn sizes_that_make_no_sense_are_named() {
        for (text, named) in [
            ("half", "key=value"),
            ("half=0", "4KiB to 64MiB"),
            ("half=1GiB", "4KiB to 64MiB"),
            ("step=0", "step"),
            ("step=2MiB", "does not fit"),
            ("small=2MiB", "small"),
            ("speed=1", "speed"),
            ("half=much", "much"),
        ] {
            let error = text.parse::<StagingOptions>().unwrap_err();
            assert!(error.to_string().contains(named), "{text}: {error}");
            assert!(error.advice().is_some(), "{text}: {error}");
        }
    }
}
