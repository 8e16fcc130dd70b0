//! IPv4, IPv6 and UDP, as far as RoCEv2 needs them.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{Writer, bytes_at, u16_at};

/// The UDP destination port of RoCEv2.
pub const UDP_PORT: u16 = 4791;
/// Length of a UDP header in bytes.
pub const UDP_LEN: usize = 8;
pub(super) const IPV4_LEN: usize = 20;
pub(super) const IPV6_LEN: usize = 40;
const UDP_PROTOCOL: u8 = 17;
const DONT_FRAGMENT: u16 = 0x4000;

/// A parsed IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpRepr {
    /// The source address.
    pub source: IpAddr,
    /// The destination address. If only one of the two is IPv4, it is written [mapped] into IPv6.
    pub destination: IpAddr,
    /// Traffic class: DSCP and, in the low two bits, ECN.
    pub traffic_class: u8,
    /// Time to live (IPv4) or hop limit (IPv6).
    pub hop_limit: u8,
    /// IPv4 identification, which the ICRC covers; 0 for IPv6.
    pub identification: u16,
    /// Bytes after the header.
    pub payload_len: u16,
}

/// The ECN bits of a traffic class.
pub const ECN_MASK: u8 = 0b11;
/// ECN-capable transport, ECT(0).
pub const ECN_CAPABLE: u8 = 0b10;
/// Congestion experienced (CE): a switch marked the packet.
pub const ECN_MARKED: u8 = 0b11;

impl IpRepr {
    /// The length of the header in bytes.
    pub const fn header_len(&self) -> usize {
        match (self.source, self.destination) {
            (IpAddr::V4(_), IpAddr::V4(_)) => IPV4_LEN,
            _ => IPV6_LEN,
        }
    }

    /// Parses a header that is followed by UDP; returns it and its length. `None` if it is not IP
    /// with UDP, is truncated, or has options or fragments, which RoCEv2 does not use.
    pub fn parse(bytes: &[u8]) -> Option<(Self, usize)> {
        match bytes.first()? >> 4 {
            4 => Self::parse_v4(bytes),
            6 => Self::parse_v6(bytes),
            _ => None,
        }
    }

    fn parse_v4(bytes: &[u8]) -> Option<(Self, usize)> {
        let header = bytes.get(..IPV4_LEN)?;
        let total = usize::from(u16_at(header, 2));
        let fragment = u16_at(header, 6) & !DONT_FRAGMENT;
        let valid = header[0] == 0x45 && header[9] == UDP_PROTOCOL && fragment == 0;
        if !valid || total < IPV4_LEN || total > bytes.len() {
            return None;
        }
        let repr = Self {
            source: Ipv4Addr::from(bytes_at::<4>(header, 12)).into(),
            destination: Ipv4Addr::from(bytes_at::<4>(header, 16)).into(),
            traffic_class: header[1],
            hop_limit: header[8],
            identification: u16_at(header, 4),
            payload_len: (total - IPV4_LEN) as u16,
        };
        Some((repr, IPV4_LEN))
    }

    fn parse_v6(bytes: &[u8]) -> Option<(Self, usize)> {
        let header = bytes.get(..IPV6_LEN)?;
        let payload_len = u16_at(header, 4);
        if header[6] != UDP_PROTOCOL || bytes.len() < IPV6_LEN + usize::from(payload_len) {
            return None;
        }
        let repr = Self {
            source: Ipv6Addr::from(bytes_at::<16>(header, 8)).into(),
            destination: Ipv6Addr::from(bytes_at::<16>(header, 24)).into(),
            traffic_class: (u16_at(header, 0) >> 4) as u8,
            hop_limit: header[7],
            identification: 0,
            payload_len,
        };
        Some((repr, IPV6_LEN))
    }

    /// Writes the header into `buffer`, which is at least as long, and returns its length.
    pub fn emit(&self, buffer: &mut [u8]) -> usize {
        let mut writer = Writer::new(buffer);
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                writer.put([0x45, self.traffic_class]);
                writer.u16(self.payload_len.saturating_add(IPV4_LEN as u16));
                writer.u16(self.identification);
                writer.u16(DONT_FRAGMENT);
                writer.put([self.hop_limit, UDP_PROTOCOL, 0, 0]);
                writer.put(source.octets());
                writer.put(destination.octets());
                if let Some(header) = buffer.get_mut(..IPV4_LEN) {
                    let sum = checksum(header);
                    header[10..12].copy_from_slice(&sum.to_be_bytes());
                }
                IPV4_LEN
            }
            (source, destination) => {
                writer.u32(6 << 28 | u32::from(self.traffic_class) << 20);
                writer.u16(self.payload_len);
                writer.put([UDP_PROTOCOL, self.hop_limit]);
                writer.put(mapped(source).octets());
                writer.put(mapped(destination).octets());
                IPV6_LEN
            }
        }
    }
}

/// The address as a GID: IPv4 addresses are mapped into IPv6.
pub fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

/// The internet checksum of a header whose checksum field is zero.
fn checksum(header: &[u8]) -> u16 {
    let words = header.chunks(2).map(|pair| u32::from(u16_at(pair, 0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// A parsed UDP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpRepr {
    /// The source port: chosen per queue pair, so that switches spread the load (ECMP) and keep the
    /// order.
    pub source_port: u16,
    /// The destination port: 4791, or another by agreement.
    pub destination_port: u16,
    /// Bytes after the header.
    pub payload_len: u16,
}

impl UdpRepr {
    /// Parses a header; `None` if it is truncated or its length exceeds `bytes`.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let header = bytes.get(..UDP_LEN)?;
        let payload_len = u16_at(header, 4).checked_sub(UDP_LEN as u16)?;
        if bytes.len() < UDP_LEN + usize::from(payload_len) {
            return None;
        }
        Some(Self {
            source_port: u16_at(header, 0),
            destination_port: u16_at(header, 2),
            payload_len,
        })
    }

    /// Writes the header without a checksum (the ICRC covers more), and returns its length.
    pub fn emit(&self, buffer: &mut [u8]) -> usize {
        let mut writer = Writer::new(buffer);
        writer.u16(self.source_port);
        writer.u16(self.destination_port);
        writer.u16(self.payload_len.saturating_add(UDP_LEN as u16));
        writer.u16(0);
        UDP_LEN
    }
}
