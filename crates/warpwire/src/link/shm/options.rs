//! How large a shared-memory link's rings and packets are, chosen by a program or by `WARPWIRE_SHM`.

use std::fmt;
use std::str::FromStr;

use warpwire_proto::wire::packet::{ICRC_LEN, MAX_HEADERS_LEN};

use super::ring::{self, SIZES};
use crate::error::{Error, Kind, Result};
use crate::link::MIN_PACKET;
use crate::units;

/// The environment variable that [`Options::from_env`] reads.
pub const ENV_VAR: &str = "WARPWIRE_SHM";

/// The longest packet that can be asked for.
const MAX_PACKET_LEN: usize = 1 << 20;

/// How large a shared-memory link's rings and packets are.
///
/// ```
/// use warpwire::link::shm::Options;
/// let options: Options = "ring=4MiB,max_packet=4140".parse()?;
/// assert_eq!((options.ring, options.max_packet), (4 << 20, 4140));
/// assert!("ring=much".parse::<Options>().is_err());
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The bytes of one ring, of which there is one per peer and direction: rounded up to a power of two, and to what
    /// holds four of the largest packets.
    pub ring: usize,
    /// The longest packet, from the base header through the ICRC. Both ends should have the same: a receiver drops
    /// what is longer than its own.
    pub max_packet: usize,
    /// A receiver that never sleeps looks for new connections, and for what peers ask, after so many calls.
    pub control_poll_interval: u32,
}

impl Default for Options {
    /// Packets of 64 KiB of payload, and rings that the second-level cache holds beside other things.
    fn default() -> Self {
        Self {
            ring: 1 << 20,
            max_packet: MAX_HEADERS_LEN + (1 << 16) + ICRC_LEN,
            control_poll_interval: 256,
        }
    }
}

impl Options {
    /// The usual options, changed by `WARPWIRE_SHM` where it is set.
    ///
    /// # Errors
    /// If the variable does not have the form that [`Options`] are read from.
    pub fn from_env() -> Result<Self> {
        let Some(text) = std::env::var_os(ENV_VAR) else { return Ok(Self::default()) };
        text.to_string_lossy().parse().map_err(|source: Error| source.on(ENV_VAR))
    }

    /// As they are used.
    pub(super) fn rounded(self) -> Self {
        let max_packet = self.max_packet.clamp(MIN_PACKET, MAX_PACKET_LEN);
        let least = (4 * ring::stride(max_packet)).max(*SIZES.start());
        let ring = self.ring.clamp(least, *SIZES.end()).next_power_of_two();
        Self { ring, max_packet, control_poll_interval: self.control_poll_interval.max(1) }
    }
}

impl FromStr for Options {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut options = Self::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            let value = || Ok(usize::try_from(units::parse_bytes(value)?).unwrap_or(usize::MAX));
            match key {
                "ring" => match value()? {
                    ring if SIZES.contains(&ring) => options.ring = ring,
                    _ => return Err(malformed(part, "it is not between 4 KiB and 64 MiB")),
                },
                "largest" => match value()? {
                    max_packet @ MIN_PACKET..=MAX_PACKET_LEN => options.max_packet = max_packet,
                    _ => return Err(malformed(part, "it is not between 16 and 1 MiB")),
                },
                "attend" => match value()? {
                    calls @ 1..=1_000_000 => options.control_poll_interval = calls as u32,
                    _ => return Err(malformed(part, "it is not between 1 and 1000000")),
                },
                _ => return Err(malformed(part, "there is no such option")),
            }
        }
        Ok(options)
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ring={},largest={},attend={}",
            self.ring, self.max_packet, self.control_poll_interval
        )
    }
}

#[cold]
fn malformed(part: &str, why: &'static str) -> Error {
    Error::new(Kind::Malformed, format!("read {part:?} as an option of the shared-memory link"))
        .why(why)
        .fix("write ring=4MiB or largest=4140, with a comma between them")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_read_what_they_print() {
        for options in
            [Options::default(), Options { ring: 5000, max_packet: 100, control_poll_interval: 7 }]
        {
            assert_eq!(options.to_string().parse::<Options>().unwrap(), options);
        }
        for text in
            ["ring=1", "ring=65MiB", "largest=15", "largest=2MiB", "attend=0", "depth=3", "ring"]
        {
            assert!(text.parse::<Options>().is_err(), "{text}");
        }
    }

    #[test]
    fn any_options_make_a_ring_that_holds_its_packets() {
        for (ring, max_packet) in [(0, 0), (1, 5000), (usize::MAX, usize::MAX), (70_000, 65_000)] {
            let rounded = Options { ring, max_packet, control_poll_interval: 0 }.rounded();
            assert!(rounded.ring.is_power_of_two() && SIZES.contains(&rounded.ring));
            assert!(rounded.ring >= 4 * ring::stride(rounded.max_packet));
            assert_eq!(rounded.rounded(), rounded);
        }
    }
}
