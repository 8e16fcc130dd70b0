//! Address vector of a UD message: the segments that follow the control segment of its WQE.
//!
//! ```text
//!  0  Q_Key                      16  reserved 4, MAC address 6
//!  4  reserved                   26  traffic class, hop limit
//!  8  QPN, and a flag            28  flow label, and a flag
//! 12  static rate, SL, reserved  32  destination GID, 16
//! 14  UDP port, 0 for 4791
//! ```
//!
//! The format is ConnectX's without the Ethernet fields (the MAC address stays zero: the link
//! resolves it). A GID is an IPv6 address or an IPv4-mapped one. The LID field, which RoCE does not
//! use, holds the UDP port of peers that listen on another port than 4791.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use warpwire_proto::wire::UDP_PORT;
use warpwire_proto::wire::ip::mapped;

use super::{SEGMENT_LEN, array, be16, be32, put};

/// Length of an address vector in segments.
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

/// Extended (48-byte) address vector. ConnectX also has a short form, which Ethernet never uses.
const EXTENDED: u32 = 1 << 31;
/// GRH present, as always on Ethernet.
const ROUTED: u32 = 1 << 30;

/// Destination of a UD message.
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
    /// Q_Key of the destination; if its top bit is set, the sending QP's own Q_Key is sent.
    pub qkey: u32,
    /// Destination queue pair number, 24 bits.
    pub qpn: u32,
    /// Destination GID.
    pub gid: [u8; 16],
    /// Destination UDP port; 0 in the encoding means 4791.
    pub port: u16,
    /// Traffic class (DSCP and ECN) of the packet.
    pub traffic_class: u8,
    /// Hop limit of the packet.
    pub hop_limit: u8,
    /// Flow label, 20 bits; the entropy for ECMP.
    pub flow_label: u32,
}

impl AddressVector {
    /// An address vector with traffic class 0, hop limit 64 and flow label 0.
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

    /// Parses the three segments; any bytes are valid.
    pub fn parse(bytes: &[u8; ADDRESS_SEGMENTS * SEGMENT_LEN]) -> Self {
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

    /// Encodes the three segments.
    pub fn encode(&self) -> [u8; ADDRESS_SEGMENTS * SEGMENT_LEN] {
        let mut bytes = [0; ADDRESS_SEGMENTS * SEGMENT_LEN];
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

    /// Destination IP address and UDP port.
    pub fn peer(&self) -> SocketAddr {
        SocketAddr::new(gid_address(self.gid), self.port)
    }
}

/// The IP address that a GID represents; IPv4-mapped ones become IPv4.
pub fn gid_address(gid: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(gid).to_canonical()
}
