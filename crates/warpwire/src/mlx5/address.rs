//! Where a datagram goes: the address vector that follows the control segment of its entry.
//!
//! ```text
//!  0  queue key                  16  reserved 4, MAC address 6
//!  4  reserved                   26  traffic class, hop limit
//!  8  queue pair, and a flag     28  flow label, and a flag
//! 12  rate and level, reserved   32  the peer's GID, 16
//! 14  UDP port, 0 for 4791
//! ```
//!
//! The format is ConnectX's, less what Ethernet below it needs (the MAC address stays zero: the link knows the way).
//! A GID is an IP address, those of IPv4 mapped into IPv6. Where ConnectX has the LID, which RoCE does not use, stands
//! the UDP port of peers that listen on another than 4791.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use warpwire_proto::wire::UDP_PORT;
use warpwire_proto::wire::ip::mapped;

use super::{SEGMENT, array, be16, be32, put};

/// How many segments an address vector takes.
pub const ADDRESS_SEGMENTS: usize = 3;

mod field {
    pub const QKEY: usize = 0;
    pub const QPN: usize = 8;
    pub const PORT: usize = 14;
    pub const CLASS: usize = 26;
    pub const HOPS: usize = 27;
    pub const FLOW: usize = 28;
    pub const GID: usize = 32;
}

/// Says that all 48 bytes are there: ConnectX has a short form too, which is never written for Ethernet.
const EXTENDED: u32 = 1 << 31;
/// Says that a routing header goes along, as it always does on Ethernet.
const ROUTED: u32 = 1 << 30;

/// Whom a datagram is for.
///
/// ```
/// use warpwire::mlx5::AddressVector;
/// let to = AddressVector::new("10.0.0.2:4791".parse().unwrap(), 0x11, 7);
/// let bytes = to.encode();
/// assert_eq!(bytes[32..], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2]);
/// assert_eq!(AddressVector::parse(&bytes), to);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressVector {
    /// The key of the queue pair there; with its upper bit set, the sender's own is sent.
    pub qkey: u32,
    /// The queue pair there: 24 bits.
    pub qpn: u32,
    /// The address there, as a GID.
    pub gid: [u8; 16],
    /// The UDP port there.
    pub port: u16,
    /// Traffic class of the packet.
    pub traffic_class: u8,
    /// Hop limit of the packet.
    pub hop_limit: u8,
    /// Spreads datagrams over the network's paths: 20 bits.
    pub flow_label: u32,
}

impl AddressVector {
    /// To that queue pair of that peer.
    pub fn new(peer: SocketAddr, qpn: u32, qkey: u32) -> Self {
        Self {
            qkey,
            qpn: qpn & 0xff_ffff,
            gid: mapped(peer.ip()).octets(),
            port: peer.port(),
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
        }
    }

    /// Reads the three segments; all 48 bytes mean something.
    pub fn parse(bytes: &[u8; ADDRESS_SEGMENTS * SEGMENT]) -> Self {
        let port = match be16(bytes, field::PORT) {
            0 => UDP_PORT,
            other => other,
        };
        Self {
            qkey: be32(bytes, field::QKEY),
            qpn: be32(bytes, field::QPN) & 0xff_ffff,
            gid: array(bytes, field::GID),
            port,
            traffic_class: bytes[field::CLASS],
            hop_limit: bytes[field::HOPS],
            flow_label: be32(bytes, field::FLOW) & 0xf_ffff,
        }
    }

    /// The three segments.
    pub fn encode(&self) -> [u8; ADDRESS_SEGMENTS * SEGMENT] {
        let mut bytes = [0; ADDRESS_SEGMENTS * SEGMENT];
        let port = if self.port == UDP_PORT { 0 } else { self.port };
        put(&mut bytes, field::QKEY, self.qkey.to_be_bytes());
        put(&mut bytes, field::QPN, (EXTENDED | self.qpn & 0xff_ffff).to_be_bytes());
        put(&mut bytes, field::PORT, port.to_be_bytes());
        bytes[field::CLASS] = self.traffic_class;
        bytes[field::HOPS] = self.hop_limit;
        put(&mut bytes, field::FLOW, (ROUTED | self.flow_label & 0xf_ffff).to_be_bytes());
        put(&mut bytes, field::GID, self.gid);
        bytes
    }

    /// The address there.
    pub fn peer(&self) -> SocketAddr {
        SocketAddr::new(gid_address(self.gid), self.port)
    }
}

/// The IP address that a GID stands for.
pub fn gid_address(gid: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(gid).to_canonical()
}
