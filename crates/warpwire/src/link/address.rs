//! Socket addresses as fixed-length bytes, for memory and messages shared between processes and
//! kernels.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// Encoded length in bytes: family (16 bits: 4 or 6), port (16 bits), scope id (32 bits), 16
/// address bytes; integers are little-endian.
pub const ADDRESS_LEN: usize = 24;

/// Encodes an address.
///
/// ```
/// use warpwire::link::{address_bytes, address_from};
/// let address = "127.0.0.1:4791".parse().unwrap();
/// assert_eq!(address_from(&address_bytes(address)), Some(address));
/// assert_eq!(address_from(&[0; 24]), None);
/// ```
pub fn address_bytes(address: SocketAddr) -> [u8; ADDRESS_LEN] {
    let mut bytes = [0; ADDRESS_LEN];
    bytes[2..4].copy_from_slice(&address.port().to_le_bytes());
    match address {
        SocketAddr::V4(v4) => {
            bytes[0] = 4;
            bytes[8..12].copy_from_slice(&v4.ip().octets());
        }
        SocketAddr::V6(v6) => {
            bytes[0] = 6;
            bytes[4..8].copy_from_slice(&v6.scope_id().to_le_bytes());
            bytes[8..24].copy_from_slice(&v6.ip().octets());
        }
    }
    bytes
}

/// Decodes an address. `None` if the family is neither 4 nor 6.
pub fn address_from(bytes: &[u8; ADDRESS_LEN]) -> Option<SocketAddr> {
    let port = u16::from_le_bytes([bytes[2], bytes[3]]);
    match u16::from_le_bytes([bytes[0], bytes[1]]) {
        4 => {
            let ip = Ipv4Addr::new(bytes[8], bytes[9], bytes[10], bytes[11]);
            Some(SocketAddr::new(IpAddr::V4(ip), port))
        }
        6 => {
            let mut ip = [0; 16];
            ip.copy_from_slice(&bytes[8..]);
            let scope = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
            Some(SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, scope)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for text in ["127.0.0.1:80", "[::1]:65535", "[fe80::1%3]:9", "0.0.0.0:0"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(address_from(&address_bytes(address)), Some(address));
        }
        let mut invalid = address_bytes("1.2.3.4:5".parse().unwrap());
        for family in [[0, 0], [5, 0], [4, 1]] {
            invalid[..2].copy_from_slice(&family);
            assert_eq!(address_from(&invalid), None, "{family:?}");
        }
    }
}
