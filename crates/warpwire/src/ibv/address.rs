//! Where a peer is, as a device wants to be told.

use std::net::IpAddr;
use std::sync::Arc;

use warpwire_proto::qp::PathAttributes;

use super::explain::Attempt;
use super::library::{Raw, create, destroy};
use super::memory::{Pd, PdInner};
use super::sys;
use crate::error::Result;

/// The way to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AhAttributes {
    /// The peer's address, 16 bytes: of RoCE, an IPv6 address, or an IPv4 address mapped into one.
    pub gid: [u8; 16],
    /// Which of the port's own addresses to send from.
    pub gid_index: u8,
    /// The port to send from.
    pub port: u8,
    /// The peer's local identifier; 0 on Ethernet.
    pub lid: u16,
    /// InfiniBand's service level; on Ethernet, the priority.
    pub service_level: u8,
    /// Traffic class of our packets.
    pub traffic_class: u8,
    /// Hop limit of our packets.
    pub hop_limit: u8,
    /// Spreads queue pairs over the network's paths: 20 bits.
    pub flow_label: u32,
}

impl AhAttributes {
    /// The way to an IP address, by RoCE.
    ///
    /// ```
    /// use warpwire::ibv::AhAttributes;
    /// let route = AhAttributes::to("10.0.0.2".parse().unwrap(), 1, 3);
    /// assert_eq!(route.gid[10..], [0xff, 0xff, 10, 0, 0, 2]);
    /// ```
    pub fn to(peer: IpAddr, port: u8, gid_index: u8) -> Self {
        let gid = match peer {
            IpAddr::V4(four) => four.to_ipv6_mapped(),
            IpAddr::V6(six) => six,
        };
        Self {
            gid: gid.octets(),
            gid_index,
            port,
            lid: 0,
            service_level: 0,
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
        }
    }

    pub(super) fn from_path(path: &PathAttributes, port: u8, gid_index: u8) -> Self {
        let PathAttributes { peer, traffic_class, hop_limit, flow_label } = *path;
        Self { traffic_class, hop_limit, flow_label, ..Self::to(peer.ip(), port, gid_index) }
    }

    pub(super) fn attributes(&self) -> sys::AhAttr {
        let mut words = [[0; 8]; 2];
        words[0].copy_from_slice(&self.gid[..8]);
        words[1].copy_from_slice(&self.gid[8..]);
        sys::AhAttr {
            grh: sys::GlobalRoute {
                dgid: words.map(u64::from_ne_bytes),
                flow_label: self.flow_label,
                sgid_index: self.gid_index,
                hop_limit: self.hop_limit,
                traffic_class: self.traffic_class,
            },
            dlid: self.lid,
            sl: self.service_level,
            src_path_bits: 0,
            static_rate: 0,
            is_global: u8::from(self.gid != [0; 16]),
            port_num: self.port,
        }
    }
}

/// A peer to send datagrams to. Clones are the same one. Keep it until the datagrams' completions have come.
#[derive(Clone, Debug)]
pub struct AddressHandle(pub(super) Arc<AhInner>);

#[derive(Debug)]
pub(super) struct AhInner {
    pub(super) raw: Raw<sys::Ah>,
    pub(super) pd: Arc<PdInner>,
    route: AhAttributes,
}

impl Drop for AhInner {
    fn drop(&mut self) {
        destroy!(self.pd.context.library, destroy_ah(self.raw.ptr()));
    }
}

/// A peer's address that hardware may know.
pub trait AsAddressHandle {
    /// What queue pairs of that domain know it by; `None` if it is no hardware's.
    fn hardware(&self, pd: &Pd) -> Option<&AddressHandle>;
}

impl AsAddressHandle for AddressHandle {
    fn hardware(&self, _: &Pd) -> Option<&AddressHandle> {
        Some(self)
    }
}

impl AddressHandle {
    pub(super) fn create(pd: &Pd, route: &AhAttributes) -> Result<Self> {
        let domain = pd.0.clone();
        let mut attr = route.attributes();
        let library = domain.context.library;
        let raw = create!(library, Attempt::CreateAddress, create_ah(domain.raw.ptr(), &mut attr))?;
        Ok(Self(Arc::new(AhInner { raw, pd: domain, route: *route })))
    }

    /// Whether it belongs to that domain.
    pub fn belongs_to(&self, pd: &Pd) -> bool {
        Arc::ptr_eq(&self.0.pd, &pd.0)
    }

    /// The way to the peer.
    pub fn route(&self) -> &AhAttributes {
        &self.0.route
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_is_written_as_the_library_reads_it() {
        let path = PathAttributes {
            peer: "[fd00::7]:4791".parse().unwrap(),
            traffic_class: 0x68,
            hop_limit: 3,
            flow_label: 0xabcde,
        };
        let attr = AhAttributes::from_path(&path, 2, 5).attributes();
        let [first, last] = attr.grh.dgid.map(u64::to_ne_bytes);
        assert_eq!((first[0], first[1], last[7]), (0xfd, 0, 7));
        assert_eq!((attr.grh.sgid_index, attr.port_num, attr.is_global), (5, 2, 1));
        assert_eq!(
            (attr.grh.traffic_class, attr.grh.hop_limit, attr.grh.flow_label),
            (0x68, 3, 0xabcde)
        );
        let by_lid =
            AhAttributes { gid: [0; 16], lid: 9, ..AhAttributes::to([0, 0, 0, 0].into(), 1, 0) };
        assert_eq!((by_lid.attributes().is_global, by_lid.attributes().dlid), (0, 9));
    }
}
