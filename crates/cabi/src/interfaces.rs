//! Network interfaces and their addresses, and which of them libraries offer as devices: one per
//! interface that is up and has an address, the default route's first; the loopback interface only
//! if there is no other.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An address of an interface that is up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The interface's name.
    pub name: String,
    /// Its address.
    pub ip: IpAddr,
    /// Whether it is the loopback interface.
    pub is_loopback: bool,
}

/// All addresses that packets can be sent from; in the order of the interfaces.
pub fn addresses() -> Vec<InterfaceAddress> {
    let (mut list, mut found) = (std::ptr::null_mut(), Vec::new());
    // SAFETY: on success the list is valid until it is freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return found;
    }
    let mut entry = list;
    while !entry.is_null() {
        // SAFETY: a non-null entry of the list.
        let interface = unsafe { &*entry };
        let (up, flags) = ((libc::IFF_UP | libc::IFF_RUNNING) as u32, interface.ifa_flags);
        // SAFETY: the address is null or valid for its family, the name is a C string.
        let (ip, name) = unsafe { (ip_of(interface.ifa_addr), CStr::from_ptr(interface.ifa_name)) };
        if let Some(ip) = ip.filter(|_| flags & up == up) {
            let name = name.to_string_lossy().into_owned();
            let is_loopback = flags & libc::IFF_LOOPBACK as u32 != 0;
            found.push(InterfaceAddress { name, ip, is_loopback });
        }
        entry = interface.ifa_next;
    }
    // SAFETY: the list returned above, freed once.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// The address, unless it has a scope: a GID has no room for one.
///
/// # Safety
/// `address` is null or points to an address of the size that its family implies.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: guaranteed by the caller; the family says which structure it is.
    let ip = unsafe {
        match i32::from((*address).sa_family) {
            libc::AF_INET => {
                let known = &*address.cast::<libc::sockaddr_in>();
                IpAddr::V4(Ipv4Addr::from(u32::from_be(known.sin_addr.s_addr)))
            }
            libc::AF_INET6 => {
                let known = &*address.cast::<libc::sockaddr_in6>();
                IpAddr::V6(Ipv6Addr::from(known.sin6_addr.s6_addr))
            }
            _ => return None,
        }
    };
    let is_link_local = matches!(ip, IpAddr::V6(address) if address.is_unicast_link_local());
    (!is_link_local).then_some(ip)
}

/// The number of an interface; 0 if it is gone.
pub fn index(name: &str) -> u32 {
    let Ok(name) = std::ffi::CString::new(name) else { return 0 };
    // SAFETY: a C string.
    unsafe { libc::if_nametoindex(name.as_ptr()) }
}

/// The address that packets to other networks leave from, if there is a default route.
pub fn default_route() -> Option<IpAddr> {
    // Connecting a UDP socket sends nothing. The address is one of those kept for documentation.
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

/// What to make a device of.
#[derive(Debug, PartialEq, Eq)]
pub struct Choice {
    /// The device's name.
    pub name: String,
    /// Where it is.
    pub at: InterfaceAddress,
}

/// The devices that `wanted` asks for: a comma-separated list of `[NAME=]INTERFACE|ADDRESS`. Empty:
/// one per interface, named `warp0`, `warp1`, …
///
/// # Errors
/// If the list is malformed, or names something that is absent: the text says what.
pub fn choose(
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
