//! The devices of libibverbs, by IP address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::OnceLock;

use crate::abi;
use crate::boundary::{Errno, NO_DEVICE, Result};
use crate::log;
use crate::verbs::{OpenDevice, verbs};

/// All devices, opened when they are first asked for, and kept.
///
/// # Errors
/// `ENODEV` if there are none.
pub(crate) fn all() -> Result<&'static [OpenDevice]> {
    static DEVICES: OnceLock<Result<Vec<OpenDevice>>> = OnceLock::new();
    let opened = DEVICES.get_or_init(|| verbs()?.open_devices());
    match opened.as_deref() {
        Ok([]) => Err(NO_DEVICE),
        Ok(devices) => Ok(devices),
        Err(Errno(errno)) => Err(Errno(*errno)),
    }
}

/// The device with this address. A loopback address stands for the first device, so that programs
/// can name the machine itself, as with the kernel's connection manager.
///
/// # Errors
/// `ENODEV` if there is none.
pub(crate) fn with_address(ip: IpAddr) -> Result<&'static OpenDevice> {
    let devices = all()?;
    let ip = ip.to_canonical();
    let found = devices.iter().find(|device| abi::ip(device.gid) == ip);
    let first = || devices.first().filter(|_| ip.is_loopback());
    found.or_else(first).ok_or_else(|| {
        log::line(|| format!("no device has address {ip}; WARPWIRE_IB_DEVICES chooses devices"));
        NO_DEVICE
    })
}

/// The device that packets to this address leave from.
///
/// # Errors
/// `ENODEV` if there is none, `ENETUNREACH` if there is no route.
pub(crate) fn towards(to: IpAddr) -> Result<&'static OpenDevice> {
    // Connecting a UDP socket sends nothing.
    let any: IpAddr = match to {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect((to, 9))?;
    with_address(socket.local_addr()?.ip())
}

/// Whether `gid` is believable for a peer whose TCP connection comes from `peer`: the same address;
/// or both are addresses of this machine, where one may have been reached through the other.
pub(crate) fn is_believable(gid: abi::Gid, peer: SocketAddr) -> bool {
    let (said, seen) = (abi::ip(gid), peer.ip().to_canonical());
    said == seen || is_local(said) && is_local(seen)
}

/// Whether an address is this machine's: a socket can be bound to it.
fn is_local(ip: IpAddr) -> bool {
    !ip.is_unspecified() && !ip.is_multicast() && UdpSocket::bind((ip, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_believed_about_their_own_address_only() {
        let gid = |text: &str| abi::gid(text.parse().unwrap());
        let peer = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert!(is_believable(gid("198.51.100.1"), peer("198.51.100.1:5")));
        assert!(is_believable(gid("198.51.100.1"), peer("[::ffff:198.51.100.1]:5")));
        assert!(is_believable(gid("127.0.0.1"), peer("127.0.0.2:5")), "both are local");
        assert!(!is_believable(gid("198.51.100.2"), peer("198.51.100.1:5")));
        assert!(!is_believable(gid("198.51.100.2"), peer("127.0.0.1:5")), "a third machine");
        assert!(!is_believable(gid("127.0.0.1"), peer("198.51.100.1:5")));
        assert!(!is_believable([0; 16], peer("127.0.0.1:5")));
        assert!(!is_believable(gid("224.0.0.1"), peer("127.0.0.1:5")));
    }
}
