//! Network interfaces and their addresses.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An address of an interface that is up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InterfaceAddress {
    pub name: String,
    pub ip: IpAddr,
    pub is_loopback: bool,
}

/// All addresses that packets can be sent from; in the order of the interfaces.
pub(crate) fn addresses() -> Vec<InterfaceAddress> {
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
pub(crate) fn index(name: &str) -> u32 {
    let Ok(name) = std::ffi::CString::new(name) else { return 0 };
    // SAFETY: a C string.
    unsafe { libc::if_nametoindex(name.as_ptr()) }
}

/// The address that packets to other networks leave from, if there is a default route.
pub(crate) fn default_route() -> Option<IpAddr> {
    // Connecting a UDP socket sends nothing. The address is one of those kept for documentation.
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}
