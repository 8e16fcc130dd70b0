//! The faults to inject and their probabilities, with a text format.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::units;

/// A probability in units of 2⁻³².
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Probability(u64);

impl Probability {
    const ALWAYS: u64 = 1 << 32;

    /// From a value between 0 and 1, to which others are clamped.
    ///
    /// ```
    /// use warpwire::link::fault::Probability;
    /// assert_eq!(Probability::of(0.25).share(), 0.25);
    /// ```
    pub fn of(share: f64) -> Self {
        Self((share.clamp(0.0, 1.0) * Self::ALWAYS as f64) as u64)
    }

    /// As a value between 0 and 1.
    pub fn share(self) -> f64 {
        self.0 as f64 / Self::ALWAYS as f64
    }

    /// Whether a uniform 32-bit draw is a hit.
    pub(super) fn hits(self, draw: u32) -> bool {
        u64::from(draw) < self.0
    }

    pub(super) fn is_zero(self) -> bool {
        self.0 == 0
    }
}

/// The direction in which packets meet faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FaultDirection {
    /// Packets sent and received.
    #[default]
    Both,
    /// Packets sent.
    Out,
    /// Packets received.
    In,
}

/// The faults to inject into a link.
///
/// As text, with every part optional:
///
/// ```text
/// loss=5%,dup=1%,reorder=2%,corrupt=1%,cut=0.1%,delay=10us,jitter=5us,rate=1GiB,
/// partition=1s+200ms,dir=out,seed=7
/// ```
///
/// `cut` truncates packets, `rate` is in bytes per second, `partition=A+B` drops everything for the
/// duration B, beginning A after the link was created, `dir` is `both`, `out` or `in`.
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
    /// Packets are dropped.
    pub loss: Probability,
    /// Packets are duplicated.
    pub dup: Probability,
    /// Packets are overtaken by up to eight later ones.
    pub reorder: Probability,
    /// One bit of the packet, after its ICRC was appended, flips: the ICRC detects it.
    pub corrupt: Probability,
    /// The packet is truncated after its ICRC was appended: the receiver's checks detect it.
    pub cut: Probability,
    /// Added latency of every packet.
    pub delay: Duration,
    /// Maximum random latency on top, drawn per packet: packets overtake one another.
    pub jitter: Duration,
    /// Bandwidth in bytes per second; packets beyond it are queued, and dropped if the queue is
    /// full.
    pub rate: Option<u64>,
    /// Start, counted from the creation of the link, and duration of a period in which all packets
    /// are dropped.
    pub partition: Option<(Duration, Duration)>,
    /// The direction in which packets meet faults.
    pub direction: FaultDirection,
    /// The seed of all random draws.
    pub seed: u64,
}

impl FaultPlan {
    /// Whether the plan contains no faults.
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
                    return Err(malformed(part, "the rate must not be 0"));
                }
                self.rate = Some(rate);
            }
            "partition" => {
                let times = value.split_once('+');
                let (from, length) =
                    times.ok_or_else(|| malformed(part, "it must be a time, a plus and a time"))?;
                let both = (units::parse_duration(from)?, units::parse_duration(length)?);
                self.partition = Some(both);
            }
            "dir" => {
                self.direction = match value {
                    "both" => FaultDirection::Both,
                    "out" => FaultDirection::Out,
                    "in" => FaultDirection::In,
                    _ => return Err(malformed(part, "the direction must be both, out or in")),
                }
            }
            "seed" => {
                let seed = value.parse();
                self.seed = seed.map_err(|_| malformed(part, "the seed must be a whole number"))?;
            }
            _ => return Err(malformed(part, "unknown fault")),
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
            // 5% is stored as slightly less in units of 2⁻³².
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

/// A duration in the largest unit that represents it exactly, in the format that is parsed.
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
    share.map(Probability::of).ok_or_else(|| malformed(part, "it must be between 0% and 100%"))
}

#[cold]
fn malformed(part: &str, why: &'static str) -> Error {
    Error::new(Kind::Malformed, format!("parse {part:?} as a fault")).why(why).fix(
        "use the form loss=5%,dup=1%,reorder=2%,corrupt=1%,cut=1%,delay=10us,jitter=5us,rate=1GiB,\
         partition=1s+200ms,dir=out,seed=7",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_and_from_str_round_trip() {
        let text = "loss=5%,dup=1%,reorder=2%,corrupt=0.5%,cut=0.125%,delay=10us,jitter=1500ns,\
                    rate=1000000,\
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
    fn invalid_plans_are_rejected_with_the_reason() {
        for (text, reason) in [
            ("loss", "equals sign"),
            ("loss=101%", "between 0%"),
            ("loss=-1%", "between 0%"),
            ("loss=NaN", "between 0%"),
            ("luck=5%", "unknown fault"),
            ("delay=soon", "whole number"),
            ("rate=0", "must not be 0"),
            ("partition=1s", "a plus"),
            ("dir=up", "both, out or in"),
            ("seed=x", "whole number"),
        ] {
            let error = text.parse::<FaultPlan>().unwrap_err();
            assert!(error.to_string().contains(reason), "{text}: {error}");
            assert!(error.advice().is_some(), "{text}: {error}");
        }
    }
}
