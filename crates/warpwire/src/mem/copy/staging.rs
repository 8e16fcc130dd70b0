//! Chunk sizes of copies staged through pinned memory.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Kind, Result};
use crate::units;

/// Environment variable that sets the sizes: `half=1MiB,step=512KiB,small=16KiB,reads=32KiB`;
/// omitted ones keep their defaults.
pub const STAGING_ENV_VAR: &str = "WARPWIRE_STAGING";

/// Sizes for copies through pinned memory, for memory without a window. All are in bytes.
///
/// ```
/// use warpwire::mem::copy::StagingOptions;
/// let staging: StagingOptions = "half=2MiB,step=256KiB".parse()?;
/// assert_eq!((staging.half, staging.small), (2 << 20, StagingOptions::default().small));
/// assert!("step=2MiB".parse::<StagingOptions>().unwrap_err().to_string().contains("half"));
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StagingOptions {
    /// Size of each of the two halves of pinned memory: the CPU works on one, the copy engine on
    /// the other. 4 KiB to 64 MiB; default: 1 MiB.
    pub half: u64,
    /// Minimum length of one engine copy: each has a fixed cost of some microseconds. At most
    /// `half`; default: 512 KiB.
    pub step: u64,
    /// Maximum length of writes done in one call from pageable memory, without a stream. At most
    /// `half`; default: 16 KiB.
    pub small: u64,
    /// Minimum length of reads through pinned memory; shorter ones are one call into pageable
    /// memory. Default: 1.
    pub reads: u64,
}

setters! {
    StagingOptions {
        with_half => half: u64,
        with_step => step: u64,
        with_small => small: u64,
        with_reads => reads: u64,
    }
}

impl Default for StagingOptions {
    fn default() -> Self {
        Self { half: 1 << 20, step: 512 << 10, small: 16 << 10, reads: 1 }
    }
}

impl StagingOptions {
    const MIN_HALF: u64 = 4 << 10;
    const MAX_HALF: u64 = 64 << 20;

    /// The sizes from `WARPWIRE_STAGING`; the defaults if it is not set.
    pub fn from_env() -> Result<Self> {
        match std::env::var(STAGING_ENV_VAR) {
            Ok(text) => text.parse(),
            Err(_) => Ok(Self::default()),
        }
    }

    /// Rejects sizes that are out of range or inconsistent.
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

    /// Chunk size for a read of `len` bytes: a quarter, so that most of the CPU's work overlaps
    /// with the engine's.
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
    Error::new(Kind::Malformed, "read the staging sizes")
        .on(STAGING_ENV_VAR)
        .why(why)
        .fix("use sizes like half=1MiB,step=512KiB,small=16KiB,reads=32KiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_parses_and_displays() {
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
    fn invalid_sizes_are_named_in_the_error() {
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
