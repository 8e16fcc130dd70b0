//! PCI addresses.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind};

/// Where a function sits on the PCI buses: `0000:1a:00.0`.
///
/// ```
/// use warpwire::host::PciAddress;
/// let address: PciAddress = "0000:1a:00.0".parse().unwrap();
/// assert_eq!(address.bus, 0x1a);
/// assert_eq!(address.to_string(), "0000:1a:00.0");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct PciAddress {
    /// Segment, as ACPI calls it; more than 16 bits behind some volume-management devices.
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device number, below 32.
    pub device: u8,
    /// Function number, below 8.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl FromStr for PciAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        parse(text.trim()).ok_or_else(|| {
            Error::new(Kind::Malformed, format!("read {text:?} as a PCI address"))
                .fix("write it like 0000:1a:00.0")
        })
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let (rest, function) = text.rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = rest.rsplit_once(':')?;
    let address = PciAddress {
        domain: u32::from_str_radix(domain, 16).ok()?,
        bus: u8::from_str_radix(bus, 16).ok()?,
        device: u8::from_str_radix(device, 16).ok()?,
        function: u8::from_str_radix(function, 16).ok()?,
    };
    (address.device < 32 && address.function < 8).then_some(address)
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> Self {
        address.to_string()
    }
}

impl TryFrom<String> for PciAddress {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_are_addresses() {
        for text in [
            "",
            "0000:1a:00",
            "1a:00.0",
            "0000:1a:20.0",
            "0000:1a:00.8",
            "0000:zz:00.0",
            "pci0000:00",
        ] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
        assert_eq!(
            "10000:01:1f.7".parse::<PciAddress>().unwrap().domain,
            0x10000
        );
    }
}
