//! RDMA hardware behind the types of this module: port, GID and route selection.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::OnceLock;

use warpwire_proto::qp::Mtu;
use warpwire_proto::wire::UDP_PORT;

use crate::error::{Error, Result};
use crate::hca::EventFd;
use crate::ibv::{self, Gid, GidKind, PortState};
use crate::link;
use crate::work::AsyncEvent;

/// How an RDMA device is opened.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct DeviceOptions {
    /// Default port of queue pairs, counted from 1. `None`: the first active port.
    pub port: Option<u8>,
    /// Default index into the port's GID table. `None`: the GID that most peers can reach: RoCE v2
    /// before v1, then routable before link-local, then IPv4 before IPv6.
    pub gid_index: Option<u8>,
}

setters! {
    DeviceOptions {
    } optional {
        with_port => port: u8,
        with_gid_index => gid_index: u8,
    }
}

/// An open libibverbs device with its port defaults.
#[derive(Debug)]
pub(crate) struct Hardware {
    pub(super) context: ibv::Context,
    pub(super) events: EventFd,
    pub(super) path: link::LinkPath,
    pub(super) max_mtu: Mtu,
    options: DeviceOptions,
    /// Protection domain in which addresses are checked.
    probe_pd: OnceLock<Result<ibv::Pd>>,
}

/// The local end of connections: a port and one of its GIDs.
#[derive(Clone, Copy, Debug)]
pub(super) struct LocalPort {
    pub(super) port: u8,
    pub(super) gid_index: u8,
    pub(super) gid: [u8; 16],
    pub(super) lid: u16,
    pub(super) address: SocketAddr,
    pub(super) mtu: u32,
}

impl Hardware {
    pub(super) fn open(name: &str, options: DeviceOptions) -> Result<Self> {
        let context = ibv::Context::open(name)?;
        let fd = context.as_fd().try_clone_to_owned();
        let fd = fd.map_err(|why| Error::os("watch an RDMA device for events", &why))?;
        let port = options.port.map_or_else(|| first_port(&context), Ok)?;
        let local_port = endpoint(&context, port, options.gid_index);
        if options.port.or(options.gid_index).is_some() {
            // A port or GID index that was given must be usable.
            local_port.clone()?;
        }
        let driver = context.device().driver.clone().unwrap_or_else(|| "unknown driver".into());
        let (local, mtu, why) = match &local_port {
            Ok(local_port) => (
                local_port.address,
                local_port.mtu,
                format!("{name} ({driver}), port {port}, GID {}", local_port.gid_index),
            ),
            // The port may come up later, or others be active: queue pairs check again.
            Err(error) => (([0, 0, 0, 0], 0).into(), 0, format!("{name} ({driver}): {error}")),
        };
        let path = link::LinkPath { kind: link::LinkKind::Hardware, local, why };
        let max_mtu = Mtu::new(mtu).unwrap_or(Mtu::ALL[0]);
        Ok(Self {
            context,
            events: EventFd::of(fd),
            path,
            max_mtu,
            options,
            probe_pd: OnceLock::new(),
        })
    }

    /// The local port for a queue pair with these options.
    ///
    /// # Errors
    /// If the port is not active, or has no such GID: the text lists those that it has.
    pub(super) fn endpoint(&self, port: Option<u8>, gid_index: Option<u8>) -> Result<LocalPort> {
        let default_port = self.options.port.map_or_else(|| first_port(&self.context), Ok)?;
        // The context's GID index is valid for the context's port only.
        let same_port = port.is_none_or(|port| port == default_port);
        let index = gid_index.or(self.options.gid_index.filter(|_| same_port));
        endpoint(&self.context, port.unwrap_or(default_port), index)
    }

    /// The route to a UD peer, from a GID of the same address family.
    pub(super) fn route(&self, peer: IpAddr) -> Result<ibv::AhAttributes> {
        let port = self.options.port.map_or_else(|| first_port(&self.context), Ok)?;
        let gids = self.context.gids()?;
        let of_family = gids.iter().filter(|gid| gid.address.is_ipv4() == peer.is_ipv4());
        let index = best_gid(of_family, port).map(|gid| gid.index as u8);
        let local_port = endpoint(&self.context, port, index)?;
        Ok(ibv::AhAttributes::to(peer, local_port.port, local_port.gid_index))
    }

    pub(super) fn probe_pd(&self) -> Result<&ibv::Pd> {
        self.probe_pd.get_or_init(|| self.context.create_pd()).as_ref().map_err(Clone::clone)
    }

    pub(super) fn next_event(&self) -> Option<AsyncEvent> {
        match self.context.next_event() {
            Ok(event) => event,
            Err(error) => {
                tracing::warn!(%error, "asynchronous event of an RDMA device");
                None
            }
        }
    }
}

/// The first active port, or else port 1.
fn first_port(context: &ibv::Context) -> Result<u8> {
    let ports = context.attributes()?.ports;
    let is_active =
        |port: &u8| context.port(*port).is_ok_and(|found| found.state == PortState::Active);
    Ok((1..=ports).find(is_active).unwrap_or(1))
}

fn endpoint(context: &ibv::Context, port: u8, gid_index: Option<u8>) -> Result<LocalPort> {
    let found = context.port(port)?;
    let index = match gid_index {
        Some(index) => u32::from(index),
        None => best_gid(&context.gids()?, port).map_or(0, |gid| gid.index),
    };
    // InfiniBand works without a GID within one subnet; Ethernet does not.
    let gid = match context.gid(port, index) {
        Err(error) if found.lid == 0 || gid_index.is_some() => return Err(error),
        gid => gid.ok(),
    };
    let address = gid.as_ref().map_or(IpAddr::from([0, 0, 0, 0]), |gid| gid.address);
    Ok(LocalPort {
        port,
        gid_index: index as u8,
        gid: gid.map_or([0; 16], |gid| gid.bytes),
        lid: found.lid,
        address: (address, UDP_PORT).into(),
        mtu: found.active_mtu,
    })
}

/// The GID that most peers can reach: RoCE v2 before v1, link-local ones last, IPv4 before IPv6.
fn best_gid<'a>(gids: impl IntoIterator<Item = &'a Gid>, port: u8) -> Option<&'a Gid> {
    let rank = |gid: &&Gid| {
        let local = match gid.address {
            IpAddr::V4(four) => four.is_link_local(),
            IpAddr::V6(six) => six.is_unicast_link_local(),
        };
        (gid.kind == GidKind::RoceV1, local, gid.address.is_ipv6(), gid.index)
    };
    gids.into_iter().filter(|gid| gid.port == port && gid.index < 256).min_by_key(rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u32, address: &str, kind: GidKind) -> Gid {
        let address: IpAddr = address.parse().unwrap();
        Gid { port: 1, index, bytes: [0; 16], address, kind, interface: None }
    }

    #[test]
    fn the_most_reachable_gid_is_chosen() {
        let all = [
            gid(0, "fe80::1", GidKind::RoceV1),
            gid(1, "fe80::1", GidKind::RoceV2),
            gid(2, "10.0.0.7", GidKind::RoceV1),
            gid(3, "fd00::7", GidKind::RoceV2),
            gid(4, "10.0.0.7", GidKind::RoceV2),
        ];
        let index = |gids: &[Gid]| best_gid(gids, 1).map(|gid| gid.index);
        assert_eq!(index(&all), Some(4));
        assert_eq!(index(&all[..4]), Some(3));
        assert_eq!(index(&all[..3]), Some(1));
        assert_eq!(index(&all[..1]), Some(0));
        assert_eq!(best_gid(&all, 2), None);
    }
}
