//! Configuration of the simulated machine, by value or by the variable `WARPWIRE_SIM`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::units;

/// Environment variable that configures the simulator; see [`SimConfig`] for the settings.
pub const ENV_VAR: &str = "WARPWIRE_SIM";

/// Kinds of operations that the simulator can be configured to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Any operation.
    Any,
    /// Allocations.
    Alloc,
    /// Copies and fills on a stream.
    Copy,
    /// Word writes, waits and batches on a stream.
    Mem,
    /// Kernel launches.
    Launch,
}

impl OpKind {
    const ALL: [(&'static str, Self); 5] = [
        ("any", Self::Any),
        ("alloc", Self::Alloc),
        ("copy", Self::Copy),
        ("mem", Self::Mem),
        ("launch", Self::Launch),
    ];

    /// Whether an operation of kind `other` counts for this one.
    pub(super) fn covers(self, other: Self) -> bool {
        self == Self::Any || self == other
    }
}

/// The n-th operation of a kind, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailNth {
    /// The kind of operations that are counted.
    pub kind: OpKind,
    /// Number of the operation that fails, from 1.
    pub number: u64,
}

/// The simulated machine: number, size and speed of its GPUs, and injected faults.
///
/// ```
/// use warpwire::mem::sim::SimConfig;
/// let config: SimConfig = "gpus=4,memory=8GiB,copy_delay=50us,fail=copy:3".parse().unwrap();
/// assert_eq!(config.gpus, 4);
/// let error = "gpus=many".parse::<SimConfig>().unwrap_err();
/// assert!(error.to_string().contains("gpus"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SimConfig {
    /// Number of GPUs, 1 to 64 (`gpus=2`).
    pub gpus: u32,
    /// Memory per GPU, 64 KiB to 1 TiB (`memory=4GiB`). Only pages that are written use host
    /// memory.
    pub memory: u64,
    /// Delay before each copy or fill (`copy_delay=50us`).
    pub copy_delay: Duration,
    /// Maximum length of a random pause of a kernel before one in 16 memory accesses, chosen at
    /// random (`jitter=200us`): rare interleavings become common, and races with them.
    pub jitter: Duration,
    /// Fail the n-th operation of a kind (`fail=copy:3`), once.
    pub fail: Option<FailNth>,
    /// After every N-th stream operation, move the memory that it accessed (`move_every=100`).
    pub move_every: Option<u64>,
    /// After the N-th stream operation, free the memory that it accessed, under its users
    /// (`free_at=500`).
    pub free_at: Option<u64>,
    /// Whether streams can wait for NOR; some devices cannot (`nor=off`).
    pub wait_nor: bool,
    /// Whether a GPU can map memory of another one (`peer_access=off`).
    pub peer_access: bool,
}

setters! {
    SimConfig {
        with_gpus => gpus: u32,
        with_memory => memory: u64,
        with_copy_delay => copy_delay: Duration,
        with_jitter => jitter: Duration,
        with_wait_nor => wait_nor: bool,
        with_peer_access => peer_access: bool,
    } optional {
        with_fail => fail: FailNth,
        with_move_every => move_every: u64,
        with_free_at => free_at: u64,
    }
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            gpus: 2,
            memory: 4 << 30,
            copy_delay: Duration::ZERO,
            jitter: Duration::ZERO,
            fail: None,
            move_every: None,
            free_at: None,
            wait_nor: true,
            peer_access: true,
        }
    }
}

impl SimConfig {
    const MAX_GPUS: u32 = 64;

    /// The configuration in `WARPWIRE_SIM`; the default if it is not set.
    pub fn from_env() -> Result<Self> {
        match std::env::var(ENV_VAR) {
            Ok(text) => text.parse(),
            Err(std::env::VarError::NotPresent) => Ok(Self::default()),
            Err(std::env::VarError::NotUnicode(_)) => Err(bad_setting("it is not valid UTF-8")),
        }
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "gpus" => self.gpus = parse_integer(key, value)?,
            "memory" => self.memory = units::parse_bytes(value)?,
            "copy_delay" => self.copy_delay = units::parse_duration(value)?,
            "jitter" => self.jitter = units::parse_duration(value)?,
            "fail" => self.fail = Some(value.parse()?),
            "move_every" => self.move_every = Some(parse_integer(key, value)?),
            "free_at" => self.free_at = Some(parse_integer(key, value)?),
            "nor" => self.wait_nor = parse_switch(key, value)?,
            "peer_access" => self.peer_access = parse_switch(key, value)?,
            _ => return Err(bad_setting(format!("there is no setting {key:?}"))),
        }
        Ok(())
    }

    pub(super) fn check(&self) -> Result<()> {
        let max = Self::MAX_GPUS;
        if self.gpus == 0 || self.gpus > max {
            return Err(bad_setting(format!("gpus must be between 1 and {max}")));
        }
        if self.memory < 64 << 10 || self.memory > 1 << 40 {
            return Err(bad_setting("memory must be between 64KiB and 1TiB"));
        }
        if self.move_every == Some(0) || self.free_at == Some(0) {
            return Err(bad_setting("move_every and free_at count from 1"));
        }
        Ok(())
    }
}

impl FromStr for SimConfig {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut config = Self::default();
        for setting in text.split(',').map(str::trim).filter(|s| !s.is_empty()) {
            let (key, value) = setting
                .split_once('=')
                .ok_or_else(|| bad_setting(format!("{setting:?} is not of the form key=value")))?;
            config.set(key.trim(), value.trim())?;
        }
        config.check()?;
        Ok(config)
    }
}

impl FromStr for FailNth {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parsed = text.split_once(':').and_then(|(kind, number)| {
            let (_, kind) = OpKind::ALL.into_iter().find(|(name, _)| *name == kind)?;
            let number = number.parse().ok().filter(|n| *n > 0)?;
            Some(Self { kind, number })
        });
        parsed.ok_or_else(|| bad_setting(format!("{text:?} is not of the form kind:number")))
    }
}

impl fmt::Display for FailNth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = OpKind::ALL
            .into_iter()
            .find(|(_, kind)| *kind == self.kind)
            .map_or("any", |(name, _)| name);
        write!(f, "{name}:{}", self.number)
    }
}

fn parse_integer<N: FromStr>(key: &str, value: &str) -> Result<N> {
    value.parse().map_err(|_| bad_setting(format!("{key}={value:?} is not an integer in range")))
}

fn parse_switch(key: &str, value: &str) -> Result<bool> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(bad_setting(format!("{key}={value:?} is neither on nor off"))),
    }
}

#[cold]
fn bad_setting(why: impl Into<String>) -> Error {
    Error::new(Kind::Malformed, "configure the simulated GPU").on(ENV_VAR).why(why.into()).fix(
        "use settings like gpus=2,memory=4GiB,copy_delay=50us,jitter=200us,fail=copy:3,\
         move_every=100,free_at=500,nor=off,peer_access=off (fail takes any, alloc, copy, mem or \
         launch)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_parses() {
        let text = " gpus=8, memory=1GiB,copy_delay=2ms,jitter=9us,fail=launch:7,move_every=10,\
                    free_at=3,nor=off,peer_access=off, ";
        let config: SimConfig = text.parse().unwrap();
        let expected = SimConfig {
            gpus: 8,
            memory: 1 << 30,
            copy_delay: Duration::from_millis(2),
            jitter: Duration::from_micros(9),
            fail: Some(FailNth { kind: OpKind::Launch, number: 7 }),
            move_every: Some(10),
            free_at: Some(3),
            wait_nor: false,
            peer_access: false,
        };
        assert_eq!(config, expected);
        assert_eq!("".parse::<SimConfig>().unwrap(), SimConfig::default());
        assert_eq!(config.fail.unwrap().to_string(), "launch:7");
    }

    #[test]
    fn invalid_settings_are_named_in_the_error() {
        for (text, named) in [
            ("gpus", "gpus"),
            ("gpus=0", "between 1 and 64"),
            ("gpus=99999999999", "gpus"),
            ("memory=lots", "lots"),
            ("memory=2TiB", "1TiB"),
            ("speed=9", "speed"),
            ("fail=copy", "copy"),
            ("fail=copy:0", "copy:0"),
            ("fail=nap:1", "nap:1"),
            ("move_every=0", "count from 1"),
            ("copy_delay=5", "5"),
            ("jitter=much", "much"),
            ("nor=maybe", "maybe"),
        ] {
            let error = text.parse::<SimConfig>().unwrap_err();
            assert!(error.to_string().contains(named), "{text}: {error}");
            assert!(error.advice().is_some(), "{text}: {error}");
        }
    }
}
