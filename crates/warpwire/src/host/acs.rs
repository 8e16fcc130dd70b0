//! Access control services: whether a PCIe port sends peer-to-peer traffic up to the root complex.

use super::{PciAddress, System};

/// Extended capabilities start behind the 256 bytes of the conventional configuration space.
const EXTENDED_START: usize = 0x100;
/// The configuration space's full length.
const CONFIG_LENGTH: usize = 0x1000;
const ACS_CAPABILITY: u16 = 0x000d;
/// The control register's place in the capability.
const ACS_CONTROL: usize = 6;
/// Request redirect, completion redirect, upstream forwarding: what makes peers' traffic detour.
const REDIRECT_BITS: u16 = 0x04 | 0x08 | 0x10;

/// What is known of access control on one PCIe port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acs {
    /// The port has no such capability: peers talk directly.
    Absent,
    /// The control register's value.
    Control(u16),
    /// The extended configuration space could not be read; the kernel shows it to root only.
    UnknownNeedsRoot,
}

impl Acs {
    /// Whether traffic between devices below this port is known to be sent through the root complex.
    pub fn redirects(self) -> bool {
        matches!(self, Self::Control(bits) if bits & REDIRECT_BITS != 0)
    }
}

impl System {
    /// Access control of a port, from its configuration space.
    pub fn acs(&self, port: &PciAddress) -> Acs {
        let config = self.read_bytes(&format!("/sys/bus/pci/devices/{port}/config"));
        parse_config(&config.unwrap_or_default())
    }
}

fn parse_config(config: &[u8]) -> Acs {
    let mut offset = EXTENDED_START;
    // Each capability takes at least eight bytes, so a list that goes round is noticed.
    for _ in 0..CONFIG_LENGTH / 8 {
        // Without root, the kernel gives the first 64 bytes; a conventional device has only 256.
        let Some(header) = word(config, offset).zip(word(config, offset + 2)) else {
            return Acs::UnknownNeedsRoot;
        };
        let (id, version_and_next) = header;
        if id == ACS_CAPABILITY {
            return word(config, offset + ACS_CONTROL).map_or(Acs::UnknownNeedsRoot, Acs::Control);
        }
        offset = usize::from(version_and_next >> 4);
        if offset < EXTENDED_START || id == u16::MAX {
            return Acs::Absent;
        }
    }
    Acs::Absent
}

fn word(bytes: &[u8], offset: usize) -> Option<u16> {
    let pair = bytes.get(offset..offset.checked_add(2)?)?;
    Some(u16::from_le_bytes([pair[0], pair[1]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(capabilities: &[(usize, u16, usize, u16)]) -> Vec<u8> {
        let mut bytes = vec![0; CONFIG_LENGTH];
        for &(at, id, next, control) in capabilities {
            bytes[at..at + 2].copy_from_slice(&id.to_le_bytes());
            let link = u16::try_from(next << 4 | 1).unwrap();
            bytes[at + 2..at + 4].copy_from_slice(&link.to_le_bytes());
            bytes[at + 6..at + 8].copy_from_slice(&control.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn the_control_register_is_found_behind_other_capabilities() {
        let on = parse_config(&config(&[(0x100, 1, 0x148, 0), (0x148, 13, 0, 0x1d)]));
        assert_eq!(on, Acs::Control(0x1d));
        assert!(on.redirects());
        assert!(!parse_config(&config(&[(0x100, 13, 0, 0x01)])).redirects());
        assert_eq!(parse_config(&config(&[(0x100, 1, 0, 0)])), Acs::Absent);
        assert_eq!(parse_config(&config(&[])), Acs::Absent);
    }

    #[test]
    fn what_cannot_be_read_is_unknown_and_not_off() {
        for short in [0, 64, 256, 0x102] {
            assert_eq!(parse_config(&vec![0; short]), Acs::UnknownNeedsRoot, "{short}");
        }
        assert!(!Acs::UnknownNeedsRoot.redirects());
    }

    #[test]
    fn circular_and_wild_lists_end() {
        assert_eq!(parse_config(&config(&[(0x100, 1, 0x100, 0)])), Acs::Absent);
        assert_eq!(parse_config(&vec![0xff; CONFIG_LENGTH]), Acs::Absent);
        let wild = config(&[(0x100, 1, 0xfff, 0)]);
        assert_eq!(parse_config(&wild), Acs::UnknownNeedsRoot);
    }
}
