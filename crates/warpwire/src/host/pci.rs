//! PCI functions: address, class, BARs, driver, and the bridges above them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::System;
use crate::error::{Error, Kind};

/// PCI base class of display controllers; data-centre GPUs are its subclass "3D controller".
const BASE_CLASS_DISPLAY: u32 = 0x03;

/// NVIDIA's PCI vendor ID.
const VENDOR_NVIDIA: u16 = 0x10de;

// Flags in the third column of sysfs's `resource` file (include/linux/ioport.h).
const RESOURCE_MEMORY: u64 = 0x0000_0200;
const RESOURCE_PREFETCHABLE: u64 = 0x0000_2000;

/// Only the first six lines of `resource` are base address registers.
const BAR_LINES: usize = 6;

/// The address of a PCI function: `0000:1a:00.0` (domain, bus, device, function).
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
    /// PCI segment; more than 16 bits wide behind volume-management devices (VMD).
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
        let Self { domain, bus, device, function } = self;
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

/// A memory BAR of a PCI function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Number of the base address register, 0 to 5. A 64-bit BAR occupies two.
    pub index: usize,
    /// Length in bytes.
    pub size: u64,
    /// Whether reads have no side effects, so that it may be mapped write-combining.
    pub prefetchable: bool,
}

/// A PCI function, as sysfs describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciDevice {
    /// Domain, bus, device and function number.
    pub address: PciAddress,
    /// Vendor ID (0x10de is NVIDIA).
    pub vendor: u16,
    /// Device ID, assigned by the vendor.
    pub device: u16,
    /// Class code: base class, subclass and interface, a byte each.
    pub class: u32,
    /// The NUMA node according to firmware; `None` if it reports none, as in most VMs.
    pub numa_node: Option<u32>,
    /// The memory BARs, in register order.
    pub bars: Vec<Bar>,
    /// The kernel driver bound to it; `None` if there is none.
    pub driver: Option<String>,
    /// The host bridge above it: `pci0000:00`.
    pub host_bridge: Option<String>,
    /// The bridges from the host bridge down to the function, which is not included.
    pub bridges: Vec<PciAddress>,
    /// The IOMMU group number, if an IOMMU is in use.
    pub iommu_group: Option<u32>,
}

impl PciDevice {
    /// Whether this is an NVIDIA GPU, by vendor ID and base class.
    pub fn is_nvidia_gpu(&self) -> bool {
        self.vendor == VENDOR_NVIDIA && self.class >> 16 == BASE_CLASS_DISPLAY
    }

    /// NVIDIA's "BAR1", the aperture to GPU memory: the largest prefetchable BAR. Its register is 1
    /// if BAR 0 is 32 bits wide, and 2 if BAR 0 is 64 bits wide.
    pub fn bar1(&self) -> Option<&Bar> {
        self.bars.iter().filter(|bar| bar.prefetchable).max_by_key(|bar| bar.size)
    }
}

impl System {
    /// All PCI functions, sorted by address.
    pub fn pci_devices(&self) -> Vec<PciDevice> {
        let mut devices: Vec<PciDevice> = self
            .list("/sys/bus/pci/devices")
            .iter()
            .filter_map(|name| self.pci_device(&name.parse().ok()?))
            .collect();
        devices.sort_by_key(|device| device.address);
        devices
    }

    /// One PCI function; `None` if it does not exist, or its vendor, device or class cannot be
    /// read.
    pub fn pci_device(&self, address: &PciAddress) -> Option<PciDevice> {
        let path = format!("/sys/bus/pci/devices/{address}");
        let hexadecimal = |name: &str| parse_hexadecimal(&self.read(&format!("{path}/{name}"))?);
        let (host_bridge, bridges) =
            self.real_path(&path).map(|real| parse_device_path(&real, address)).unwrap_or_default();
        Some(PciDevice {
            address: *address,
            vendor: u16::try_from(hexadecimal("vendor")?).ok()?,
            device: u16::try_from(hexadecimal("device")?).ok()?,
            class: u32::try_from(hexadecimal("class")?).ok()?,
            numa_node: parse_node(self.read(&format!("{path}/numa_node"))),
            bars: parse_resource(&self.read(&format!("{path}/resource")).unwrap_or_default()),
            driver: self.link_name(&format!("{path}/driver")),
            host_bridge,
            bridges,
            iommu_group: self
                .link_name(&format!("{path}/iommu_group"))
                .and_then(|name| name.parse().ok()),
        })
    }

    /// All NVIDIA GPUs on the PCI buses, in `nvidia-smi`'s order, with or without a driver.
    pub fn nvidia_gpus(&self) -> Vec<PciDevice> {
        let mut devices = self.pci_devices();
        devices.retain(PciDevice::is_nvidia_gpu);
        devices
    }

    /// The PCI function that a device directory in `/sys` belongs to: the last one on its real
    /// path.
    pub(super) fn pci_parent(&self, path: &str) -> Option<PciAddress> {
        let real = self.real_path(path)?;
        real.rsplit('/').find_map(|name| name.parse().ok())
    }

    /// The NUMA node of a PCI function: the one reported by firmware, or the machine's only node.
    pub fn numa_node_of(&self, address: &PciAddress) -> Option<u32> {
        let named = parse_node(self.read(&format!("/sys/bus/pci/devices/{address}/numa_node")));
        named.or_else(|| match self.numa_nodes().as_slice() {
            [only] => Some(only.id),
            _ => None,
        })
    }
}

fn parse_hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// A NUMA node number; the kernel writes -1 for none.
pub(super) fn parse_node(text: Option<String>) -> Option<u32> {
    text?.parse().ok()
}

/// Parses sysfs's `resource` file: a line per BAR, with start, end and flags. Malformed lines are
/// skipped.
fn parse_resource(text: &str) -> Vec<Bar> {
    text.lines()
        .take(BAR_LINES)
        .enumerate()
        .filter_map(|(index, line)| {
            let mut columns = line.split_whitespace().map(parse_hexadecimal);
            let (start, end, flags) = (columns.next()??, columns.next()??, columns.next()??);
            if flags & RESOURCE_MEMORY == 0 {
                return None;
            }
            Some(Bar {
                index,
                size: end.checked_sub(start)?.checked_add(1)?,
                prefetchable: flags & RESOURCE_PREFETCHABLE != 0,
            })
        })
        .collect()
}

/// Parses `/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0`: the host bridge's name, and the
/// bridges above `address`. Behind a volume-management device the path has two host bridges; the
/// lower one counts.
fn parse_device_path(path: &str, address: &PciAddress) -> (Option<String>, Vec<PciAddress>) {
    let mut host_bridge = None;
    let mut bridges = Vec::new();
    for name in path.split('/') {
        if let Ok(bridge) = name.parse::<PciAddress>() {
            bridges.push(bridge);
        } else if name.starts_with("pci") && name.contains(':') {
            host_bridge = Some(name.to_owned());
            bridges.clear();
        }
    }
    bridges.retain(|bridge| bridge != address);
    (host_bridge, bridges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_parsed_and_malformed_lines_skipped() {
        let h200 = "0x0000104002000000 0x0000104002ffffff 0x000000000014220c\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                    0x0000100000000000 0x0000103fffffffff 0x000000000014220c\n";
        let bars = parse_resource(h200);
        let sizes: Vec<_> = bars.iter().map(|bar| (bar.index, bar.size)).collect();
        assert_eq!(sizes, [(0, 16 << 20), (2, 256 << 30)]);
        for bad in [
            "",
            "0x0 0x1",
            "x y z",
            "0x10 0x0 0x200",
            "0x0 0xffffffffffffffff 0x200",
            "\0\0\0",
            "0x0 0xfff 0x100",
        ] {
            assert_eq!(parse_resource(bad), [], "{bad}");
        }
    }

    #[test]
    fn device_paths_contain_host_bridge_and_bridges() {
        let gpu: PciAddress = "0000:03:00.0".parse().unwrap();
        let (host, bridges) = parse_device_path(
            "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:03:00.0",
            &gpu,
        );
        assert_eq!(host.as_deref(), Some("pci0000:00"));
        assert_eq!(bridges.len(), 2);
        let behind_vmd =
            "/sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/0000:03:00.0";
        let (host, bridges) = parse_device_path(behind_vmd, &gpu);
        assert_eq!(host.as_deref(), Some("pci10000:e0"));
        assert_eq!(bridges.len(), 1);
        assert_eq!(parse_device_path("/sys/devices/virtual/x", &gpu), (None, vec![]));
    }

    #[test]
    fn malformed_addresses_are_rejected() {
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
        assert_eq!("10000:01:1f.7".parse::<PciAddress>().unwrap().domain, 0x10000);
    }
}
