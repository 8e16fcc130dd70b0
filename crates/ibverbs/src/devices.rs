//! The devices: one per network interface that is up and has an address, the default route's first;
//! the loopback interface only if there is no other. `WARPWIRE_IB_DEVICES` chooses instead.

use std::ffi::{c_char, c_int};
use std::net::IpAddr;
use std::sync::OnceLock;

use warpwire::host::System;
use warpwire::verbs::Mtu;

use crate::abi;
use crate::boundary::{Errno, INVALID, Result};
use crate::interfaces::{self, InterfaceAddress};
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
}

/// A list of devices for C: ends with null.
pub(crate) type List = [*const Device; MAX_DEVICES + 1];

/// What to make a device of.
#[derive(Debug, PartialEq, Eq)]
struct Choice {
    name: String,
    at: InterfaceAddress,
}

/// The devices of this process; they live as long as it does, because C may keep pointers to them.
///
/// # Errors
/// If `WARPWIRE_IB_DEVICES` is malformed or names something that is absent.
pub(crate) fn all() -> Result<&'static [Device]> {
    static DEVICES: OnceLock<Result<Vec<Device>>> = OnceLock::new();
    let made = DEVICES.get_or_init(|| {
        let wanted = std::env::var("WARPWIRE_IB_DEVICES").unwrap_or_default();
        let addresses = interfaces::addresses();
        let chosen = choose(&wanted, &addresses, interfaces::default_route()).map_err(|why| {
            log::line(|| format!("WARPWIRE_IB_DEVICES: {why}"));
            INVALID
        })?;
        let chosen = chosen.into_iter().take(MAX_DEVICES).enumerate();
        Ok(chosen.map(|(number, choice)| Device::new(number, &choice)).collect())
    });
    made.as_ref().map(Vec::as_slice).map_err(|errno| Errno(errno.0))
}

impl Device {
    fn new(number: usize, choice: &Choice) -> Self {
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
        Self { abi: device, vendor: [0; 16], ip: at.ip, mtu, ifindex }
    }

    /// A number that identifies the device, in network byte order: a locally administered EUI-64
    /// made from the address.
    pub(crate) fn guid(&self) -> u64 {
        let gid = gid(self.ip);
        let folded = |at: usize| gid[at] ^ gid[at - 8].wrapping_mul(31);
        let low = [folded(11), folded(12), folded(13), folded(14), folded(15)];
        u64::from_ne_bytes([0x02, 0x77, 0x77, low[0], low[1], low[2], low[3], low[4]])
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

/// The devices that `wanted` asks for: a comma-separated list of `[NAME=]INTERFACE|ADDRESS`. Empty:
/// one per interface.
fn choose(
    wanted: &str,
    addresses: &[InterfaceAddress],
    route: Option<IpAddr>,
) -> std::result::Result<Vec<Choice>, String> {
    let numbered = |number: usize, at: &InterfaceAddress| Choice {
        name: format!("warp{number}"),
        at: at.clone(),
    };
    if wanted.trim().is_empty() {
        let found = usable(addresses, route);
        return Ok(found.into_iter().enumerate().map(|(n, at)| numbered(n, at)).collect());
    }
    let mut chosen: Vec<Choice> = Vec::new();
    for word in wanted.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        let (name, place) = match word.split_once('=') {
            Some((name, place)) => (Some(name.trim()), place.trim()),
            None => (None, word),
        };
        let ip = place.parse::<IpAddr>().ok();
        let matches = |at: &&InterfaceAddress| at.name == place || Some(at.ip) == ip;
        let at = addresses.iter().filter(matches).min_by_key(|at| at.ip.is_ipv6());
        let at = at.ok_or_else(|| {
            let known = addresses.iter().map(|at| format!("{} ({})", at.name, at.ip));
            let known: Vec<String> = known.collect();
            format!("no interface or address {place:?} is up; there are {}", known.join(", "))
        })?;
        let mut choice = numbered(chosen.len(), at);
        if let Some(name) = name {
            let is_valid = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
            if name.is_empty() || name.len() > 63 || !name.chars().all(is_valid) {
                return Err(format!("{name:?} cannot be the name of a device"));
            }
            name.clone_into(&mut choice.name);
        }
        if chosen.iter().any(|known| known.name == choice.name) {
            return Err(format!("two devices are called {:?}", choice.name));
        }
        chosen.push(choice);
    }
    Ok(chosen)
}

/// One address per interface, IPv4 before IPv6; the default route's interface first.
fn usable(addresses: &[InterfaceAddress], route: Option<IpAddr>) -> Vec<&InterfaceAddress> {
    let mut found: Vec<&InterfaceAddress> = Vec::new();
    for at in addresses.iter().filter(|at| at.ip.is_ipv4()).chain(addresses) {
        if found.iter().all(|known| known.name != at.name) {
            found.push(at);
        }
    }
    if found.iter().any(|at| !at.is_loopback) {
        found.retain(|at| !at.is_loopback);
    }
    found.sort_by_key(|at| Some(at.ip) != route); // stable
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(name: &str, ip: &str) -> InterfaceAddress {
        InterfaceAddress { name: name.into(), ip: ip.parse().unwrap(), is_loopback: name == "lo" }
    }

    fn names(choices: &[Choice]) -> Vec<(String, String)> {
        choices.iter().map(|choice| (choice.name.clone(), choice.at.ip.to_string())).collect()
    }

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(name, ip)| ((*name).to_owned(), (*ip).to_owned())).collect()
    }

    #[test]
    fn one_device_per_interface_and_the_default_route_first() {
        let all = [
            at("lo", "127.0.0.1"),
            at("eth1", "2001:db8::5"),
            at("eth1", "10.1.0.1"),
            at("eth0", "10.0.0.1"),
            at("eth0", "10.0.0.2"),
            at("six", "2001:db8::1"),
        ];
        let route = Some("10.0.0.1".parse().unwrap());
        let chosen = choose("", &all, route).unwrap();
        let expected = [("warp0", "10.0.0.1"), ("warp1", "10.1.0.1"), ("warp2", "2001:db8::1")];
        assert_eq!(names(&chosen), pairs(&expected));
        let chosen = choose(" ", &all[..1], None).unwrap();
        assert_eq!(names(&chosen), pairs(&[("warp0", "127.0.0.1")]), "only if there is no other");
        assert_eq!(choose("", &[], None).unwrap(), []);
    }

    #[test]
    fn devices_are_chosen_by_interface_address_and_name() {
        let all = [at("lo", "127.0.0.1"), at("eth0", "2001:db8::2"), at("eth0", "10.0.0.1")];
        let chosen = choose("lo, mlx5_0=eth0,2001:db8::2", &all, None).unwrap();
        let expected = [("warp0", "127.0.0.1"), ("mlx5_0", "10.0.0.1"), ("warp2", "2001:db8::2")];
        assert_eq!(names(&chosen), pairs(&expected));
    }

    #[test]
    fn bad_choices_are_refused() {
        let all = [at("lo", "127.0.0.1")];
        for (wanted, why) in [
            ("eth9", "there are lo"),
            ("10.9.9.9", "is up"),
            ("=lo", "cannot be the name"),
            ("a/b=lo", "cannot be the name"),
            ("x=lo,x=lo", "two devices"),
        ] {
            let refused = choose(wanted, &all, None).unwrap_err();
            assert!(refused.contains(why), "{wanted}: {refused}");
        }
    }
}
