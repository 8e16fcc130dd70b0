//! The devices: one per usable network interface. `WARPWIRE_IB_DEVICES` chooses instead.

use std::ffi::{c_char, c_int};
use std::net::IpAddr;
use std::sync::OnceLock;

use warpwire::host::System;
use warpwire::verbs::Mtu;
use warpwire_cabi::interfaces::{self, Choice};

use crate::abi;
use crate::boundary::{Errno, INVALID, Result};
use crate::log;
use crate::numbers::gid;

/// Devices of one process, at most.
const MAX_DEVICES: usize = 64;

/// `struct ibv_device`, and what it stands for.
#[repr(C)]
pub(crate) struct Device {
    pub abi: abi::Device,
    /// Libraries of vendors recognise their own devices by a pointer here: it stays null.
    vendor: [usize; 16],
    pub ip: IpAddr,
    pub mtu: Mtu,
    pub ifindex: u32,
    /// How many devices before it have its address.
    twins: u8,
}

/// A list of devices for C: ends with null.
pub(crate) type List = [*const Device; MAX_DEVICES + 1];

/// The devices of this process; they live as long as it does, because C may keep pointers to them.
///
/// # Errors
/// If `WARPWIRE_IB_DEVICES` is malformed or names something that is absent.
pub(crate) fn all() -> Result<&'static [Device]> {
    static DEVICES: OnceLock<Result<Vec<Device>>> = OnceLock::new();
    let made = DEVICES.get_or_init(|| {
        let wanted = std::env::var("WARPWIRE_IB_DEVICES").unwrap_or_default();
        let addresses = interfaces::addresses();
        let route = interfaces::default_route();
        let chosen = interfaces::choose(&wanted, &addresses, route).map_err(|why| {
            log::line(|| format!("WARPWIRE_IB_DEVICES: {why}"));
            INVALID
        })?;
        Ok(made_of(&chosen))
    });
    made.as_ref().map(Vec::as_slice).map_err(|errno| Errno(errno.0))
}

fn made_of(chosen: &[Choice]) -> Vec<Device> {
    let mut devices: Vec<Device> = Vec::new();
    for (number, choice) in chosen.iter().take(MAX_DEVICES).enumerate() {
        let twins = devices.iter().filter(|known| known.ip == choice.at.ip).count();
        devices.push(Device::new(number, choice, twins as u8));
    }
    devices
}

impl Device {
    /// `twins` is how many devices before it have its address.
    fn new(number: usize, choice: &Choice, twins: u8) -> Self {
        let Choice { name, at } = choice;
        let mut device = abi::Device {
            ops: [0; 2],
            node_type: abi::NODE_CA as c_int,
            transport_type: abi::TRANSPORT_IB as c_int,
            name: [0; 64],
            dev_name: [0; 64],
            dev_path: [0; 256],
            ibdev_path: [0; 256],
        };
        copy(&mut device.name, name);
        copy(&mut device.dev_name, &format!("uverbs{number}"));
        copy(&mut device.dev_path, &format!("/sys/class/infiniband_verbs/uverbs{number}"));
        copy(&mut device.ibdev_path, &format!("/sys/class/infiniband/{name}"));
        let (mtu, ifindex) = (mtu(&at.name), interfaces::index(&at.name));
        Self { abi: device, vendor: [0; 16], ip: at.ip, mtu, ifindex, twins }
    }

    /// A number that identifies the device, in network byte order: a locally administered EUI-64
    /// made from the address and the number of devices before it that have it too.
    pub(crate) fn guid(&self) -> u64 {
        let gid = gid(self.ip);
        let folded = |at: usize| gid[at] ^ gid[at - 8].wrapping_mul(31);
        let low = [folded(11), folded(12), folded(13), folded(14), folded(15)];
        u64::from_ne_bytes([0x02, 0x77, 0x77 ^ self.twins, low[0], low[1], low[2], low[3], low[4]])
    }

    pub(crate) fn index(&self) -> usize {
        let same = |other: &Device| std::ptr::eq(other, self);
        all().ok().and_then(|devices| devices.iter().position(same)).unwrap_or(0)
    }
}

/// The largest RoCE MTU that fits the interface's.
fn mtu(interface: &str) -> Mtu {
    let interfaces = System::live().net_interfaces();
    let found = interfaces.into_iter().find(|known| known.name == interface);
    let bytes = found.and_then(|known| known.mtu).unwrap_or(1500);
    Mtu::fitting(bytes as usize).unwrap_or(Mtu::ALL[0])
}

/// Copies a name, shortened if need be, and leaves a zero at the end.
fn copy(into: &mut [c_char], text: &str) {
    let Some((_, room)) = into.split_last_mut() else { return };
    for (to, from) in room.iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// NCCL takes devices with one GUID for the same.
    #[test]
    fn devices_of_one_interface_have_guids_of_their_own() {
        let addresses = interfaces::addresses();
        let chosen = interfaces::choose("a=lo,b=lo,c=lo", &addresses, None).unwrap();
        let mut guids: Vec<u64> = made_of(&chosen).iter().map(Device::guid).collect();
        assert_eq!(guids[0], made_of(&chosen[..1])[0].guid());
        guids.sort_unstable();
        guids.dedup();
        assert_eq!(guids.len(), 3);
    }
}
