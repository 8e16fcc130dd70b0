//! Options of the UDP link, set by the program or by `WARPWIRE_UDP`.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Kind, Result};
use crate::link::{MAX_ROCE_PACKET, MIN_PACKET};
use crate::units;

/// The environment variable that [`UdpOptions::from_env`] reads.
pub const ENV_VAR: &str = "WARPWIRE_UDP";

/// Features that a UDP link may use. A feature that is allowed here but missing in the kernel is
/// not used, and the link's path reports it.
///
/// ```
/// use warpwire::link::UdpOptions;
/// let options: UdpOptions = "gso=off,buffer=4MiB".parse()?;
/// assert!(!options.gso && options.gro);
/// assert_eq!(options.buffer, 4 << 20);
/// assert!("gso=perhaps".parse::<UdpOptions>().is_err());
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UdpOptions {
    /// Generic segmentation offload (`UDP_SEGMENT`): runs of equal packets to one peer pass the
    /// stack as one. Default on.
    pub gso: bool,
    /// Generic receive offload (`UDP_GRO`): runs of equal packets are delivered as one. Default on.
    pub gro: bool,
    /// Several messages per system call (`sendmmsg`, `recvmmsg`). Default on.
    pub mmsg: bool,
    /// No UDP checksum on packets sent: the ICRC covers more. The kernel does not combine this with
    /// segmentation. Default on.
    pub no_checksum: bool,
    /// Size of the socket's send and receive buffers, in bytes each; default 8 MiB.
    pub buffer: usize,
    /// The maximum packet length in bytes, from the BTH through the ICRC; limited by the
    /// interface's MTU. `None`, the default, means RoCEv2's maximum ([`MAX_ROCE_PACKET`]), which
    /// none may exceed.
    pub max_packet: Option<usize>,
}

setters! {
    UdpOptions {
        with_gso => gso: bool,
        with_gro => gro: bool,
        with_mmsg => mmsg: bool,
        with_no_checksum => no_checksum: bool,
        with_buffer => buffer: usize,
    } optional {
        with_max_packet => max_packet: usize,
    }
}

impl Default for UdpOptions {
    fn default() -> Self {
        Self {
            gso: true,
            gro: true,
            mmsg: true,
            no_checksum: true,
            buffer: 8 << 20,
            max_packet: None,
        }
    }
}

impl UdpOptions {
    pub(super) fn max_packet_or_default(&self) -> usize {
        self.max_packet.unwrap_or(MAX_ROCE_PACKET).clamp(MIN_PACKET, MAX_ROCE_PACKET)
    }

    /// The default options, as modified by `WARPWIRE_UDP` if it is set.
    ///
    /// # Errors
    /// If the variable cannot be parsed as [`UdpOptions`].
    pub fn from_env() -> Result<Self> {
        let Some(text) = std::env::var_os(ENV_VAR) else { return Ok(Self::default()) };
        text.to_string_lossy().parse().map_err(|source: Error| source.on(ENV_VAR))
    }
}

impl FromStr for UdpOptions {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut options = Self::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').unwrap_or((part, "on"));
            let switch = match key {
                "gso" => &mut options.gso,
                "gro" => &mut options.gro,
                "mmsg" => &mut options.mmsg,
                "nocheck" => &mut options.no_checksum,
                "buffer" => {
                    options.buffer = units::parse_bytes(value)?.clamp(4096, 1 << 30) as usize;
                    continue;
                }
                "max_packet" if value == "auto" => {
                    options.max_packet = None;
                    continue;
                }
                "max_packet" => {
                    options.max_packet = match units::parse_bytes(value)? as usize {
                        max_packet @ MIN_PACKET..=MAX_ROCE_PACKET => Some(max_packet),
                        _ => return Err(malformed(part, "it must be between 16 and 4156")),
                    };
                    continue;
                }
                _ => return Err(malformed(part, "unknown option")),
            };
            *switch = match value {
                "on" | "1" | "yes" => true,
                "off" | "0" | "no" => false,
                _ => return Err(malformed(part, "the value must be on or off")),
            };
        }
        Ok(options)
    }
}

impl fmt::Display for UdpOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |on: bool| if on { "on" } else { "off" };
        let Self { gso, gro, mmsg, no_checksum, buffer, max_packet } = *self;
        let (gso, gro, mmsg, nocheck) = (word(gso), word(gro), word(mmsg), word(no_checksum));
        write!(f, "gso={gso},gro={gro},mmsg={mmsg},nocheck={nocheck},")?;
        write!(f, "buffer={buffer},max_packet=")?;
        match max_packet {
            Some(max_packet) => write!(f, "{max_packet}"),
            None => f.write_str("auto"),
        }
    }
}

#[cold]
fn malformed(part: &str, why: &'static str) -> Error {
    Error::new(Kind::Malformed, format!("parse {part:?} as an option of the UDP link"))
        .why(why)
        .fix(
            "use gso=off, gro=off, mmsg=off, nocheck=off, buffer=4MiB or max_packet=1064, \
             separated by commas",
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_and_from_str_round_trip() {
        let odd = UdpOptions {
            gso: false,
            mmsg: false,
            buffer: 5000,
            max_packet: Some(100),
            ..UdpOptions::default()
        };
        for options in [UdpOptions::default(), odd] {
            assert_eq!(options.to_string().parse::<UdpOptions>().unwrap(), options);
        }
        assert_eq!("".parse::<UdpOptions>().unwrap(), UdpOptions::default());
        assert_eq!(
            "max_packet=100,max_packet=auto".parse::<UdpOptions>().unwrap(),
            UdpOptions::default()
        );
    }

    #[test]
    fn invalid_options_are_rejected_with_an_example() {
        for text in ["gso=maybe", "tso=on", "max_packet=15", "max_packet=4157", "always_icrc=on"] {
            let error = text.parse::<UdpOptions>().unwrap_err();
            assert!(error.advice().is_some_and(|advice| advice.contains("gso=off")), "{error}");
        }
        assert!("buffer=much".parse::<UdpOptions>().is_err());
    }
}
