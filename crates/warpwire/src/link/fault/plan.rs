//! Which faults, how often: as text and as numbers.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::units;

/// The environment variable that [`FaultPlan::from_env`] reads.
pub const ENV_VAR: &str = "WARPWIRE_FAULT";

/// How often something happens, in parts of 2³².
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Probability(u64);

impl Probability {
    const ALWAYS: u64 = 1 << 32;

    /// From a share of 1; outside of 0 to 1 it is never or always.
    ///
    /// ```
    /// use warpwire::link::fault::Probability;
    /// assert_eq!(Probability::of(0.25).share(), 0.25);
    /// ```
    pub fn of(share: f64) -> Self {
        Self((share.clamp(0.0, 1.0) * Self::ALWAYS as f64) as u64)
    }

    /// As a share of 1.
    pub fn share(self) -> f64 {
        self.0 as f64 / Self::ALWAYS as f64
    }

    /// Whether a draw of 32 bits is a hit.
    pub(super) fn hits(self, draw: u32) -> bool {
        u64::from(draw) < self.0
    }

    pub(super) fn is_zero(self) -> bool {
        self.0 == 0
    }
}

/// Which packets meet faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FaultDirection {
    /// Those sent and those received.
    #[default]
    Both,
    /// Those sent.
    Out,
    /// Those received.
    In,
}

/// Which faults a link has.
///
/// As text, in which every part may be left out:
///
/// ```text
/// loss=5%,dup=1%,reorder=2%,corrupt=1%,cut=0.1%,delay=10us,jitter=5us,rate=1GiB,partition=1s+200ms,dir=out,seed=7
/// ```
///
/// `cut` shortens packets, `rate` is bytes per second, `partition=A+B` loses everything for B, from A after the
/// beginning, `dir` is `both`, `out` or `in`.
///
/// ```
/// use std::time::Duration;
/// use warpwire::link::fault::FaultPlan;
/// let plan: FaultPlan = "loss=5%, delay=10us, seed=7".parse()?;
/// assert_eq!(plan.delay, Duration::from_micros(10));
/// assert_eq!(plan.to_string(), "loss=5%,delay=10us,seed=7");
/// assert!("loss=much".parse::<FaultPlan>().is_err());
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// Packets vanish.
    pub loss: Probability,
    /// Packets come twice.
    pub dup: Probability,
    /// Packets are overtaken by up to eight later ones.
    pub reorder: Probability,
    /// A bit of the sealed packet flips: the ICRC finds it.
    pub corrupt: Probability,
    /// The sealed packet is cut short: the receiver's checks find it.
    pub cut: Probability,
    /// Every packet takes this much longer.
    pub delay: Duration,
    /// And up to this much on top, drawn for each packet: packets overtake one another.
    pub jitter: Duration,
    /// Bytes per second that go through; the rest waits, and is lost when too much does.
    pub rate: Option<u64>,
    /// Nothing goes through from the first time, counted from the link's beginning, for the second.
    pub partition: Option<(Duration, Duration)>,
    /// Which packets this is about.
    pub direction: FaultDirection,
    /// What all draws follow from.
    pub seed: u64,
}

impl FaultPlan {
    /// The plan in `WARPWIRE_FAULT`; `None` if it is not set, or empty.
    ///
    /// # Errors
    /// If the variable does not have the form that a plan is read from.
    pub fn from_env() -> Result<Option<Self>> {
        let Some(text) = std::env::var_os(ENV_VAR).filter(|text| !text.is_empty()) else {
            return Ok(None);
        };
        text.to_string_lossy().parse().map(Some).map_err(|source: Error| source.on(ENV_VAR))
    }

    /// Whether nothing ever happens by this plan.
    pub fn is_noop(&self) -> bool {
        let chances = [self.loss, self.dup, self.reorder, self.corrupt, self.cut];
        chances.into_iter().all(Probability::is_zero)
            && (self.delay, self.jitter) == (Duration::ZERO, Duration::ZERO)
            && (self.rate, self.partition) == (None, None)
    }

    fn set(&mut self, key: &str, value: &str, part: &str) -> Result<()> {
        match key {
            "loss" => self.loss = chance(value, part)?,
            "dup" => self.dup = chance(value, part)?,
            "reorder" => self.reorder = chance(value, part)?,
            "corrupt" => self.corrupt = chance(value, part)?,
            "cut" => self.cut = chance(value, part)?,
            "delay" => self.delay = units::parse_duration(value)?,
            "jitter" => self.jitter = units::parse_duration(value)?,
            "rate" => {
                let rate = units::parse_bytes(value.trim_end_matches("/s"))?;
                if rate == 0 {
                    return Err(malformed(part, "at that rate nothing would ever go through"));
                }
                self.rate = Some(rate);
            }
            "partition" => {
                let times = value.split_once('+');
                let (from, length) =
                    times.ok_or_else(|| malformed(part, "it is not a time, a plus and a time"))?;
                let both = (units::parse_duration(from)?, units::parse_duration(length)?);
                self.partition = Some(both);
            }
            "dir" => {
                self.direction = match value {
                    "both" => FaultDirection::Both,
                    "out" => FaultDirection::Out,
                    "in" => FaultDirection::In,
                    _ => return Err(malformed(part, "it is neither both, out nor in")),
                }
            }
            "seed" => {
                let seed = value.parse();
                self.seed = seed.map_err(|_| malformed(part, "a seed is a whole number"))?;
            }
            _ => return Err(malformed(part, "there is no such fault")),
        }
        Ok(())
    }
}

impl FromStr for FaultPlan {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut plan = Self::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (key, value) =
                part.split_once('=').ok_or_else(|| malformed(part, "it has no equals sign"))?;
            plan.set(key.trim(), value.trim(), part)?;
        }
        Ok(plan)
    }
}

impl fmt::Display for FaultPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |chance: Probability| {
            // What was read as 5% is a little less in parts of 2³².
            (chance.share() * 1e9).round() / 1e7
        };
        let named = [
            ("loss", self.loss),
            ("dup", self.dup),
            ("reorder", self.reorder),
            ("corrupt", self.corrupt),
            ("cut", self.cut),
        ];
        for (name, chance) in named.into_iter().filter(|(_, chance)| !chance.is_zero()) {
            write!(f, "{name}={}%,", percent(chance))?;
        }
        for (name, time) in [("delay", self.delay), ("jitter", self.jitter)] {
            if !time.is_zero() {
                write!(f, "{name}={},", Time(time))?;
            }
        }
        if let Some(rate) = self.rate {
            write!(f, "rate={rate},")?;
        }
        if let Some((from, length)) = self.partition {
            write!(f, "partition={}+{},", Time(from), Time(length))?;
        }
        match self.direction {
            FaultDirection::Both => {}
            FaultDirection::Out => f.write_str("dir=out,")?,
            FaultDirection::In => f.write_str("dir=in,")?,
        }
        write!(f, "seed={}", self.seed)
    }
}

/// A duration in the largest unit that tells it exactly, as it would be written.
struct Time(Duration);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.as_nanos();
        let units = [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)];
        let unit = units.into_iter().find(|(_, unit)| nanos.is_multiple_of(*unit));
        let (name, unit) = unit.unwrap_or(("ns", 1));
        write!(f, "{}{name}", nanos / unit)
    }
}

fn chance(value: &str, part: &str) -> Result<Probability> {
    let (digits, scale) = match value.strip_suffix('%') {
        Some(digits) => (digits.trim_end(), 100.0),
        None => (value, 1.0),
    };
    let share = digits.parse::<f64>().ok().map(|number| number / scale);
    let share = share.filter(|share| (0.0..=1.0).contains(share));
    share
        .map(Probability::of)
        .ok_or_else(|| malformed(part, "it is not a share between 0% and 100%"))
}

#[cold]
fn malformed(part: &str, why: &'static str) -> Error {
    Error::new(Kind::Malformed, format!("read {part:?} as a fault")).why(why).fix(
        "write it like loss=5%,dup=1%,reorder=2%,corrupt=1%,cut=1%,delay=10us,jitter=5us,rate=1GiB,\
         partition=1s+200ms,dir=out,seed=7",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_read_what_they_print() {
        let text = "loss=5%,dup=1%,reorder=2%,corrupt=0.5%,cut=0.125%,delay=10us,jitter=1500ns,rate=1000000,\
                    partition=1s+200ms,dir=out,seed=7";
        let plan: FaultPlan = text.parse().unwrap();
        assert_eq!(plan.to_string(), text);
        assert_eq!(plan.to_string().parse::<FaultPlan>().unwrap(), plan);
        assert!(!plan.is_noop());
        assert!("".parse::<FaultPlan>().unwrap().is_noop());
        assert!("seed=9,loss=0%".parse::<FaultPlan>().unwrap().is_noop());
        assert_eq!("loss=0.05".parse::<FaultPlan>().unwrap().loss, plan.loss);
        assert_eq!("loss=100%".parse::<FaultPlan>().unwrap().loss.share(), 1.0);
    }

    #[test]
    fn nonsense_is_refused_with_its_reason() {
        for (text, reason) in [
            ("loss", "equals sign"),
            ("loss=101%", "between 0%"),
            ("loss=-1%", "between 0%"),
            ("loss=NaN", "between 0%"),
            ("luck=5%", "no such fault"),
            ("delay=soon", "whole number"),
            ("rate=0", "nothing would ever"),
            ("partition=1s", "a plus"),
            ("dir=up", "neither"),
            ("seed=x", "whole number"),
        ] {
            let error = text.parse::<FaultPlan>().unwrap_err();
            assert!(error.to_string().contains(reason), "{text}: {error}");
            assert!(error.advice().is_some(), "{text}: {error}");
        }
    }
}
