//! Address handles.

use std::net::{IpAddr, SocketAddr};
use std::sync::OnceLock;

use warpwire::verbs::{AddressHandle, Grh};

use crate::abi::{self, AhAttr};
use crate::boundary::{INVALID, Result, give, some};
use crate::context::{ContextPtr, check_port};
use crate::memory::{Pd, Used, destroy};
use crate::numbers::{self, gid};

/// `struct ibv_ah`: a machine. The process there is known when a message names a queue pair.
#[repr(C)]
pub(crate) struct Ah {
    abi: abi::Ah,
    ip: IpAddr,
    /// The first process that was sent to; usually the only one.
    first: OnceLock<(SocketAddr, AddressHandle)>,
    _pd: Used,
}

/// The address in a path.
///
/// # Errors
/// `EINVAL` if there is none: on Ethernet every path has a GID.
pub(crate) fn ip(attr: &AhAttr) -> Result<IpAddr> {
    check_port(attr.port_num.into())?;
    if attr.is_global == 0 || attr.grh.sgid_index != 0 {
        return Err(INVALID);
    }
    numbers::ip(attr.grh.dgid).ok_or(INVALID)
}

pub(crate) fn create(pd: Option<&Pd>, attr: Option<&AhAttr>) -> Result<*mut Ah> {
    let pd = some(pd)?;
    let ip = ip(some(attr)?)?;
    let abi = abi::Ah { context: pd.abi.context, pd: &raw const pd.abi, handle: 0 };
    Ok(give(Ah { abi, ip, first: OnceLock::new(), _pd: pd.add_user() }))
}

pub(crate) fn destroy_ah(ah: Option<Box<Ah>>) -> Result<()> {
    destroy(ah, |_| Ok(()))
}

/// The path back to the sender of a received datagram.
pub(crate) fn from_wc(port: u8, wc: Option<&abi::Wc>, grh: Option<&[u8; 40]>) -> Result<AhAttr> {
    check_port(port.into())?;
    let (wc, grh) = (some(wc)?, some(grh)?);
    let grh = Grh::parse(grh).filter(|_| wc.wc_flags & abi::WC_GRH != 0).ok_or(INVALID)?;
    let route = abi::GlobalRoute { dgid: gid(grh.source), hop_limit: 64, ..Default::default() };
    Ok(AhAttr { grh: route, is_global: 1, port_num: port, ..AhAttr::default() })
}

impl Ah {
    /// Calls `use_it` with the handle of the process that has queue pair `qpn`.
    #[inline]
    pub(crate) fn with_destination<T>(
        &self,
        qpn: u32,
        use_it: impl FnOnce(&AddressHandle) -> Result<T>,
    ) -> Result<T> {
        let peer = numbers::address(self.ip, qpn);
        match self.first.get() {
            Some((known, handle)) if *known == peer => use_it(handle),
            _ => use_it(&self.find(peer)?),
        }
    }

    #[cold]
    fn find(&self, peer: SocketAddr) -> Result<AddressHandle> {
        let (_, open) = ContextPtr(self.abi.context).of()?;
        let handle = open.destination(peer)?;
        let _ = self.first.set((peer, handle.clone()));
        Ok(handle)
    }
}
