//! Options of a shared-memory link, set by the program or by `WARPWIRE_SHM`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use warpwire_proto::wire::packet::{ICRC_LEN, MAX_HEADERS_LEN};

use super::names::MAX_DIRECTORY_LEN;
use super::ring::{self, SIZES};
use crate::error::{Error, Kind, Result};
use crate::link::MIN_PACKET;
use crate::units;

/// The environment variable that [`ShmOptions::from_env`] reads.
pub const ENV_VAR: &str = "WARPWIRE_SHM";

/// Upper limit of [`ShmOptions::max_packet`]: 1 MiB.
const MAX_PACKET_LEN: usize = 1 << 20;

/// Options of a shared-memory link: sizes, and where peers find it.
///
/// ```
/// use warpwire::link::ShmOptions;
/// let options: ShmOptions = "ring=4MiB,max_packet=4140".parse()?;
/// assert_eq!((options.ring, options.max_packet), (4 << 20, 4140));
/// assert!("ring=much".parse::<ShmOptions>().is_err());
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShmOptions {
    /// Size of a ring in bytes, one per peer and direction; 4 KiB to 64 MiB, default 1 MiB. Rounded
    /// up to a power of two that holds at least four packets of the maximum length.
    pub ring: usize,
    /// Maximum packet length in bytes, from the BTH through the ICRC; at most 1 MiB, default 64 KiB
    /// of payload. Both ends should use the same value: a receiver drops packets longer than its
    /// own.
    pub max_packet: usize,
    /// Maximum number of calls of `receive` between two polls for new connections and peer
    /// requests, for a receiver that never sleeps; default 256.
    pub control_poll_interval: u32,
    /// A directory that containers share: links listen there, if their address is not a loopback,
    /// link-local or unspecified one, and peers in other network namespaces find them; default
    /// none. A link without the directory does not find those that have one.
    pub directory: Option<PathBuf>,
}

setters! {
    ShmOptions {
        with_ring => ring: usize,
        with_max_packet => max_packet: usize,
        with_control_poll_interval => control_poll_interval: u32,
    } optional {
        with_directory => directory: PathBuf,
    }
}

impl Default for ShmOptions {
    /// Packets of 64 KiB of payload, and rings that fit into the second-level cache beside other
    /// data.
    fn default() -> Self {
        Self {
            ring: 1 << 20,
            max_packet: MAX_HEADERS_LEN + (1 << 16) + ICRC_LEN,
            control_poll_interval: 256,
            directory: None,
        }
    }
}

impl ShmOptions {
    /// The default options, as modified by `WARPWIRE_SHM` if it is set.
    ///
    /// # Errors
    /// If the variable cannot be parsed as [`ShmOptions`].
    pub fn from_env() -> Result<Self> {
        let Some(text) = std::env::var_os(ENV_VAR) else { return Ok(Self::default()) };
        text.to_string_lossy().parse().map_err(|source: Error| source.on(ENV_VAR))
    }

    /// The options clamped and rounded to what is used.
    pub(super) fn rounded(self) -> Self {
        let max_packet = self.max_packet.clamp(MIN_PACKET, MAX_PACKET_LEN);
        let min_ring = (4 * ring::stride(max_packet)).max(*SIZES.start());
        let ring = self.ring.clamp(min_ring, *SIZES.end()).next_power_of_two();
        let control_poll_interval = self.control_poll_interval.max(1);
        Self { ring, max_packet, control_poll_interval, ..self }
    }

    /// Checks the directory.
    pub(in crate::link) fn check(&self) -> Result<()> {
        let Some(directory) = &self.directory else { return Ok(()) };
        let why = match directory.metadata() {
            _ if directory.as_os_str().len() > MAX_DIRECTORY_LEN => {
                format!(
                    "its path has more than {MAX_DIRECTORY_LEN} bytes, and sockets in it too many"
                )
            }
            Ok(found) if found.is_dir() => return Ok(()),
            Ok(_) => "it is not a directory".to_owned(),
            Err(source) => source.to_string(),
        };
        Err(Error::new(Kind::InvalidArgument, "use a directory for shared memory")
            .on(directory.display().to_string())
            .why(why)
            .fix("name a directory that all containers have, by WARPWIRE_SHM=dir=PATH"))
    }
}

impl FromStr for ShmOptions {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut options = Self::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (key, text) = part.split_once('=').unwrap_or((part, ""));
            let value =
                || units::parse_bytes(text).map(|len| usize::try_from(len).unwrap_or(usize::MAX));
            match key {
                "ring" => match value()? {
                    ring if SIZES.contains(&ring) => options.ring = ring,
                    _ => return Err(malformed(part, "it must be between 4 KiB and 64 MiB")),
                },
                "max_packet" => match value()? {
                    max_packet @ MIN_PACKET..=MAX_PACKET_LEN => options.max_packet = max_packet,
                    _ => return Err(malformed(part, "it must be between 16 and 1 MiB")),
                },
                "control_poll_interval" => match value()? {
                    calls @ 1..=1_000_000 => options.control_poll_interval = calls as u32,
                    _ => return Err(malformed(part, "it must be between 1 and 1000000")),
                },
                "dir" if text.starts_with('/') => options.directory = Some(text.into()),
                "dir" => return Err(malformed(part, "it must be an absolute path")),
                _ => return Err(malformed(part, "unknown option")),
            }
        }
        Ok(options)
    }
}

impl fmt::Display for ShmOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ring={},max_packet={},control_poll_interval={}",
            self.ring, self.max_packet, self.control_poll_interval
        )?;
        match &self.directory {
            Some(directory) => write!(f, ",dir={}", directory.display()),
            None => Ok(()),
        }
    }
}

#[cold]
fn malformed(part: &str, why: &'static str) -> Error {
    Error::new(Kind::Malformed, format!("parse {part:?} as an option of the shared-memory link"))
        .why(why)
        .fix("use ring=4MiB, max_packet=4140, control_poll_interval=256 or dir=/PATH, with commas between")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_and_from_str_round_trip() {
        for options in [
            ShmOptions::default(),
            ShmOptions {
                ring: 5000,
                max_packet: 100,
                control_poll_interval: 7,
                directory: Some("/run/with space".into()),
            },
        ] {
            assert_eq!(options.to_string().parse::<ShmOptions>().unwrap(), options);
        }
        for text in [
            "ring=1",
            "ring=65MiB",
            "max_packet=15",
            "max_packet=2MiB",
            "control_poll_interval=0",
            "depth=3",
            "dir",
            "dir=relative/path",
            "ring",
        ] {
            assert!(text.parse::<ShmOptions>().is_err(), "{text}");
        }
    }

    #[test]
    fn rounded_options_hold_four_packets() {
        for (ring, max_packet) in [(0, 0), (1, 5000), (usize::MAX, usize::MAX), (70_000, 65_000)] {
            let rounded =
                ShmOptions::default().with_ring(ring).with_max_packet(max_packet).rounded();
            assert!(rounded.ring.is_power_of_two() && SIZES.contains(&rounded.ring));
            assert!(rounded.ring >= 4 * ring::stride(rounded.max_packet));
            assert_eq!(rounded.clone().rounded(), rounded);
        }
    }
}
