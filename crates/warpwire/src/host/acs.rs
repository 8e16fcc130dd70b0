//! PCIe Access Control Services (ACS): whether a port redirects peer-to-peer traffic to the root
//! complex.

use super::{PciAddress, System};

/// Offset of the extended capabilities, after the 256 bytes of conventional configuration space.
const EXTENDED_START: usize = 0x100;
/// Length of the extended configuration space, in bytes.
const CONFIG_LENGTH: usize = 0x1000;
const ACS_CAPABILITY: u16 = 0x000d;
/// Offset of the control register in the capability.
const ACS_CONTROL: usize = 6;
/// P2P request redirect, P2P completion redirect and upstream forwarding.
const REDIRECT_BITS: u16 = 0x04 | 0x08 | 0x10;

/// The ACS state of a PCIe port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acs {
    /// The port does not have the capability: peer-to-peer traffic takes the direct path.
    Absent,
    /// The value of the control register.
    Control(u16),
    /// The extended configuration space could not be read; only root may read it.
    UnknownNeedsRoot,
}

impl Acs {
    /// Whether the port is known to redirect traffic between devices below it to the root complex.
    pub fn redirects(self) -> bool {
        matches!(self, Self::Control(bits) if bits & REDIRECT_BITS != 0)
    }
}

impl System {
    /// The ACS state of a port, from its configuration space.
    pub fn acs(&self, port: &PciAddress) -> Acs {
        let config = self.read_bytes(&format!("/sys/bus/pci/devices/{port}/config"));
        parse_config(&config.unwrap_or_default())
    }
}

fn parse_config(config: &[u8]) -> Acs {
    let mut offset = EXTENDED_START;
    // Each capability is at least eight bytes long, which bounds the walk of a circular list.
    for _ in 0..CONFIG_LENGTH / 8 {
        // An unprivileged user can read the first 64 bytes only; a conventional device has 256.
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
    fn the_control_register_is_found_after_other_capabilities() {
        let on = parse_config(&config(&[(0x100, 1, 0x148, 0), (0x148, 13, 0, 0x1d)]));
        assert_eq!(on, Acs::Control(0x1d));
        assert!(on.redirects());
        assert!(!parse_config(&config(&[(0x100, 13, 0, 0x01)])).redirects());
        assert_eq!(parse_config(&config(&[(0x100, 1, 0, 0)])), Acs::Absent);
        assert_eq!(parse_config(&config(&[])), Acs::Absent);
    }

    #[test]
    fn unreadable_config_space_is_unknown_rather_than_absent() {
        for short in [0, 64, 256, 0x102] {
            assert_eq!(parse_config(&vec![0; short]), Acs::UnknownNeedsRoot, "{short}");
        }
        assert!(!Acs::UnknownNeedsRoot.redirects());
    }

    #[test]
    fn circular_and_malformed_lists_terminate() {
        assert_eq!(parse_config(&config(&[(0x100, 1, 0x100, 0)])), Acs::Absent);
        assert_eq!(parse_config(&vec![0xff; CONFIG_LENGTH]), Acs::Absent);
        let wild = config(&[(0x100, 1, 0xfff, 0)]);
        assert_eq!(parse_config(&wild), Acs::UnknownNeedsRoot);
    }
}
