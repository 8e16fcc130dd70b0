//! Datagrams: whom they are for, and who sent them.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};

use warpwire_proto::wire::ip::{ECN_MARKED, ECN_MASK};

use super::{Context, Device};
use crate::error::Result;
use crate::ibv;

/// The bytes that stand in a receive before a datagram: who sent it. See [`Grh`].
pub const GRH_LEN: u32 = warpwire_proto::qp::GRH_LEN;

/// A peer to send datagrams to. Clones are the same one; with the last, datagrams that were not sent yet fail.
///
/// Any number of queue pairs of its context may use it (on hardware, those of eight domains), and handles for one address
/// share what they need. Hardware sends to port 4791, whatever the port.
///
/// ```
/// use std::time::Duration;
/// use warpwire::link::Hub;
/// use warpwire::mr::HostMemory;
/// use warpwire::verbs::{Access, Context, WrOp, QpOptions, GRH_LEN, ReceiveRequest, SendRequest, Service};
///
/// let hub = Hub::new();
/// let context = Context::open(hub.endpoint("10.0.0.1:4791".parse().unwrap())?)?;
/// let (pd, cq) = (context.pd(), context.create_cq(16)?);
/// let options = QpOptions { service: Service::Ud, ..QpOptions::default() };
/// let qp = context.create_qp(&pd, &cq, &cq, options)?;
/// qp.activate_ud(0x1234)?;
/// let memory = HostMemory::new(64)?;
/// let mr = context.register(&pd, memory.clone(), Access::LOCAL_WRITE)?;
/// qp.post_receive(&[ReceiveRequest { id: 1, data: &[mr.sge(0, 64)] }])?;
///
/// let loopback = context.create_address_handle("10.0.0.1:4791".parse().unwrap())?;
/// qp.post_send(&[SendRequest::new(2, WrOp::Send).to(&loopback, qp.number(), 0x1234).inline(b"hello")])?;
/// assert_eq!(cq.next(Duration::from_secs(5))?.map(|sent| sent.id), Some(2));
/// let received = cq.next(Duration::from_secs(5))?.expect("it arrives");
/// assert_eq!((received.id, received.len), (1, GRH_LEN + 5));
/// assert_eq!(received.sender.unwrap().address, loopback.peer());
/// let mut text = [0; 5];
/// memory.bytes().read(GRH_LEN.into(), &mut text)?;
/// assert_eq!(&text, b"hello");
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct AddressHandle(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: Arc<Device>,
    peer: SocketAddr,
    hardware: Option<PerPdHandles>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.hardware.is_none() {
            self.device.hca.close_destination(self.peer);
        }
    }
}

/// A peer of hardware, which knows it anew in each domain.
#[derive(Debug)]
struct PerPdHandles {
    route: ibv::AhAttributes,
    handles: [OnceLock<Option<ibv::AddressHandle>>; MAX_PDS],
}

/// In how many domains one handle may be used.
const MAX_PDS: usize = 8;

impl ibv::AsAddressHandle for AddressHandle {
    fn hardware(&self, pd: &ibv::Pd) -> Option<&ibv::AddressHandle> {
        let PerPdHandles { route, handles } = self.0.hardware.as_ref()?;
        for slot in handles {
            // It was tried when the handle was made, so that it fails only if the device has no more room.
            let found = slot.get_or_init(|| pd.create_address_handle(route).ok()).as_ref();
            if let Some(found) = found.filter(|found| found.belongs_to(pd)) {
                return Some(found);
            }
        }
        None
    }
}

impl AddressHandle {
    pub(super) fn create(context: &Context, peer: SocketAddr) -> Result<Self> {
        let device = context.0.clone();
        let hardware = match &device.hardware {
            None => {
                device.hca.open_destination(peer)?;
                None
            }
            Some(hardware) => {
                let route = hardware.route(peer.ip())?;
                hardware.probe_pd()?.create_address_handle(&route)?;
                Some(PerPdHandles { route, handles: Default::default() })
            }
        };
        Ok(Self(Arc::new(Inner { device, peer, hardware })))
    }

    /// The peer's address.
    pub fn peer(&self) -> SocketAddr {
        self.0.peer
    }

    /// Whether it was made by that device.
    pub(super) fn belongs_to(&self, hca: &crate::hca::Hca) -> bool {
        self.0.device.hca.is_same(hca)
    }
}

/// Whom a datagram is for.
pub type Destination<'a> = crate::work::Destination<'a, AddressHandle>;

/// What the first [`GRH_LEN`] bytes of a receive say: an IPv6 header, or, in the last 20, an IPv4 header.
///
/// ```
/// use warpwire::verbs::Grh;
/// assert_eq!(Grh::parse(&[0; 40]), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grh {
    /// The sender's address.
    pub source: IpAddr,
    /// The address that it was sent to.
    pub destination: IpAddr,
    /// Whether the network marked it: congestion.
    pub marked: bool,
}

impl Grh {
    /// Reads them; `None` if there is no such header.
    pub fn parse(bytes: &[u8; GRH_LEN as usize]) -> Option<Self> {
        let (six, four) = (bytes[0] >> 4 == 6, bytes[20] >> 4 == 4);
        let (source, destination, class): (IpAddr, IpAddr, u8) = match (six, four) {
            (true, _) => {
                let address = |at| array::<16>(bytes, at).into();
                (address(8), address(24), bytes[1] >> 4)
            }
            (false, true) => {
                let address = |at| array::<4>(bytes, at).into();
                (address(32), address(36), bytes[21])
            }
            (false, false) => return None,
        };
        Some(Self { source, destination, marked: class & ECN_MASK == ECN_MARKED })
    }
}

fn array<const N: usize>(bytes: &[u8; GRH_LEN as usize], at: usize) -> [u8; N] {
    std::array::from_fn(|n| bytes[at + n])
}
