//! Address handles and their attributes.

use std::net::IpAddr;
use std::sync::Arc;

use warpwire_proto::qp::PathAttributes;

use super::explain::Attempt;
use super::library::{Raw, create, destroy};
use super::memory::{Pd, PdInner};
use super::sys;
use crate::error::Result;

/// Attributes of a route to a peer (`ibv_ah_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AhAttributes {
    /// Destination GID. On RoCE: an IPv6 address, or an IPv4-mapped one.
    pub gid: [u8; 16],
    /// Index of the source GID in the port's table.
    pub gid_index: u8,
    /// Local port, counted from 1.
    pub port: u8,
    /// Destination LID; 0 on Ethernet.
    pub lid: u16,
    /// Service level on InfiniBand; priority on Ethernet.
    pub service_level: u8,
    /// Traffic class (DSCP and ECN) of sent packets.
    pub traffic_class: u8,
    /// Hop limit of sent packets.
    pub hop_limit: u8,
    /// Flow label, 20 bits; the entropy for ECMP.
    pub flow_label: u32,
}

impl AhAttributes {
    /// A RoCE route to an IP address, with hop limit 64 and all else 0.
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
        let PathAttributes { peer, traffic_class, hop_limit, flow_label, .. } = *path;
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

/// An address handle (`ibv_ah`): a peer that UD messages can be sent to. Clones refer to the same
/// handle. Keep one until the sends have completed.
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

/// A destination type that may have a hardware address handle.
pub trait AsAddressHandle {
    /// The handle for queue pairs of domain `pd`; `None` if there is none.
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

    /// Whether it was created in this domain.
    pub fn belongs_to(&self, pd: &Pd) -> bool {
        Arc::ptr_eq(&self.0.pd, &pd.0)
    }

    /// The attributes that it was created with.
    pub fn route(&self) -> &AhAttributes {
        &self.0.route
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn route_converts_to_ah_attributes() {
        let path = PathAttributes {
            peer: "[fd00::7]:4791".parse().unwrap(),
            traffic_class: 0x68,
            hop_limit: 3,
            flow_label: 0xabcde,
            source_port: None,
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
