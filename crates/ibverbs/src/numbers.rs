//! Addresses. A GID is an IP address, as RoCE has it, and names a machine's interface; but here
//! every process has a device of its own, with a UDP port of its own. So the port is in the queue
//! pair's number, which programs exchange anyway: numbers with a [`QpnSlot`] mean the port
//! `FIRST_PORT` + slot, all others RoCE's own port, where NICs and Linux's soft-RoCE receive.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use warpwire::verbs::QpnSlot;
use warpwire_proto::wire::UDP_PORT;

/// UDP port of slot 0. The 2048 ports from here on are below Linux's ephemeral ports.
const FIRST_PORT: u16 = 24576;

/// A GID in network byte order.
pub(crate) type Gid = [u8; 16];

/// The port of a slot; of none: RoCE's.
pub(crate) fn port(slot: Option<QpnSlot>) -> u16 {
    slot.map_or(UDP_PORT, |slot| FIRST_PORT + slot.index())
}

/// Where a queue pair with this number receives, on the machine with this address.
pub(crate) fn address(ip: IpAddr, qpn: u32) -> SocketAddr {
    SocketAddr::new(ip, port(QpnSlot::of(qpn)))
}

pub(crate) fn gid(ip: IpAddr) -> Gid {
    match ip {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// The address in a GID; `None` if it names no machine.
pub(crate) fn ip(gid: Gid) -> Option<IpAddr> {
    let address = Ipv6Addr::from(gid);
    let ip = address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4);
    (!ip.is_unspecified() && !ip.is_multicast()).then_some(ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_are_addresses() {
        for text in ["10.1.2.3", "127.0.0.1", "2001:db8::1"] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(ip(gid(address)), Some(address));
        }
        for text in ["0.0.0.0", "::", "224.0.0.1", "ff02::1"] {
            assert_eq!(ip(gid(text.parse().unwrap())), None, "{text}");
        }
    }

    #[test]
    fn the_port_is_in_the_number() {
        let host: IpAddr = "10.0.0.1".parse().unwrap();
        assert_eq!(address(host, 0x12).port(), 4791);
        assert_eq!(address(host, 0x7f_ffff).port(), 4791);
        assert_eq!(address(host, 0x80_0010).port(), 24576);
        assert_eq!(address(host, 0xff_efff).port(), 24576 + 2046);
        for index in [0, 1, 2046] {
            let slot = QpnSlot::new(index);
            assert_eq!(port(slot), address(host, 0x80_0010 | u32::from(index) << 12).port());
        }
        // Ephemeral ports begin at 32768.
        assert!(port(QpnSlot::new(2046)) < 32768);
    }
}
