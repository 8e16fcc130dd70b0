//! What a UDP link may use, chosen by a program or by `WARPWIRE_UDP`.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use warpwire_proto::wire::packet::{ICRC_LEN, MAX_HEADERS_LEN};

use crate::error::{Error, Kind, Result};
use crate::link::{MAX_ROCE_PACKET, MIN_PACKET};
use crate::units;

/// The environment variable that [`Options::from_env`] reads.
pub const ENV_VAR: &str = "WARPWIRE_UDP";

/// The longest packet on a loopback address unless somebody says otherwise: 60 KiB of payload. No wire sets a limit there,
/// and packets cost by their number. Peers that offer less get less.
///
/// IP allows four KiB more. But the kernel keeps a packet in at most 17 pieces, which are single pages where memory has fallen to pieces:
/// whole pages of payload fit even then.
pub const LOOPBACK_MAX_PACKET: usize = MAX_HEADERS_LEN + (60 << 10) + ICRC_LEN;

/// The most that UDP over IPv4 carries.
pub(super) const MAX_UDP_PAYLOAD: usize = 65_507;

/// What a UDP link may use. What is allowed here and missing in the kernel is done without; the link's path says so.
///
/// ```
/// use warpwire::link::udp::Options;
/// let options: Options = "gso=off,buffer=4MiB".parse()?;
/// assert!(!options.gso && options.gro);
/// assert_eq!(options.buffer, 4 << 20);
/// assert!("gso=perhaps".parse::<Options>().is_err());
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Segmentation by the kernel (`UDP_SEGMENT`): runs of equal packets to one peer go down the stack as one.
    pub gso: bool,
    /// Joining by the kernel (`UDP_GRO`): such runs come up the stack as one.
    pub gro: bool,
    /// Several messages per system call (`sendmmsg`, `recvmmsg`).
    pub mmsg: bool,
    /// No UDP checksum on packets sent: the ICRC covers more. The kernel does not combine this with segmentation.
    pub no_checksum: bool,
    /// An ICRC over all of each packet, also over those that are longer than RoCE's and stay on this machine.
    pub always_icrc: bool,
    /// The socket's buffers, in bytes each way.
    pub buffer: usize,
    /// The longest packet, from the base header through the ICRC; less where the interface carries less. `None` stands
    /// for what RoCEv2 knows ([`MAX_ROCE_PACKET`]), and for [`LOOPBACK_MAX_PACKET`] on a loopback address, where only this machine's
    /// processes are.
    pub max_packet: Option<usize>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            gso: true,
            gro: true,
            mmsg: true,
            no_checksum: true,
            always_icrc: false,
            buffer: 8 << 20,
            max_packet: None,
        }
    }
}

impl Options {
    /// The longest packet of a link with that address.
    pub(super) fn max_packet_on(&self, local: IpAddr) -> usize {
        let usual = if local.is_loopback() { LOOPBACK_MAX_PACKET } else { MAX_ROCE_PACKET };
        self.max_packet.unwrap_or(usual).clamp(MIN_PACKET, MAX_UDP_PAYLOAD)
    }

    /// The usual options, changed by `WARPWIRE_UDP` where it is set.
    ///
    /// # Errors
    /// If the variable does not have the form that [`Options`] are read from.
    pub fn from_env() -> Result<Self> {
        let Some(text) = std::env::var_os(ENV_VAR) else { return Ok(Self::default()) };
        text.to_string_lossy().parse().map_err(|source: Error| source.on(ENV_VAR))
    }
}

impl FromStr for Options {
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
                "seal" => &mut options.always_icrc,
                "buffer" => {
                    options.buffer = units::parse_bytes(value)?.clamp(4096, 1 << 30) as usize;
                    continue;
                }
                "largest" if value == "auto" => {
                    options.max_packet = None;
                    continue;
                }
                "largest" => {
                    options.max_packet = match units::parse_bytes(value)? as usize {
                        max_packet @ MIN_PACKET..=MAX_UDP_PAYLOAD => Some(max_packet),
                        _ => return Err(malformed(part, "it is not between 16 and 65507")),
                    };
                    continue;
                }
                _ => return Err(malformed(part, "there is no such option")),
            };
            *switch = match value {
                "on" | "1" | "yes" => true,
                "off" | "0" | "no" => false,
                _ => return Err(malformed(part, "it is neither on nor off")),
            };
        }
        Ok(options)
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |on: bool| if on { "on" } else { "off" };
        let Self { gso, gro, mmsg, no_checksum, always_icrc, buffer, max_packet } = *self;
        let (gso, gro, mmsg, nocheck) = (word(gso), word(gro), word(mmsg), word(no_checksum));
        write!(f, "gso={gso},gro={gro},mmsg={mmsg},nocheck={nocheck},seal={},", word(always_icrc))?;
        write!(f, "buffer={buffer},largest=")?;
        match max_packet {
            Some(max_packet) => write!(f, "{max_packet}"),
            None => f.write_str("auto"),
        }
    }
}

#[cold]
fn malformed(part: &str, why: &'static str) -> Error {
    Error::new(Kind::Malformed, format!("read {part:?} as an option of the UDP link"))
        .why(why)
        .fix("write gso=off, gro=off, mmsg=off, nocheck=off, seal=on, buffer=4MiB or largest=1064, with commas between them")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_read_what_they_print() {
        let odd = Options {
            gso: false,
            mmsg: false,
            always_icrc: true,
            buffer: 5000,
            max_packet: Some(100),
            ..Options::default()
        };
        for options in [Options::default(), odd] {
            assert_eq!(options.to_string().parse::<Options>().unwrap(), options);
        }
        assert_eq!("".parse::<Options>().unwrap(), Options::default());
        assert_eq!("largest=100,largest=auto".parse::<Options>().unwrap(), Options::default());
    }

    #[test]
    fn nonsense_is_refused_with_an_example() {
        for text in ["gso=maybe", "tso=on", "largest=15", "largest=65508"] {
            let error = text.parse::<Options>().unwrap_err();
            assert!(error.advice().is_some_and(|advice| advice.contains("gso=off")), "{error}");
        }
        assert!("buffer=much".parse::<Options>().is_err());
    }
}
