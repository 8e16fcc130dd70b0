//! Addresses of UD messages: address handles, and the GRH of received ones.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};

use warpwire_proto::wire::ip::{ECN_MARKED, ECN_MASK};

use super::{Context, Device, SoftDevice};
use crate::error::Result;
use crate::ibv;

/// Bytes at the start of a UD receive buffer that hold the sender's IP header ([`Grh`]); the
/// message follows. Receive buffers must be this much longer.
pub const GRH_LEN: u32 = warpwire_proto::qp::GRH_LEN;

/// A peer that UD messages can be sent to (`ibv_ah`). Clones refer to the same handle. Keep one
/// until the sends have completed: when the last is dropped, messages that are still queued fail.
///
/// Any number of queue pairs of its context may use it (on hardware, of at most 8 protection
/// domains). Handles for the same address share resources. Hardware sends to UDP port 4791,
/// whatever port the address has.
///
/// ```
/// use std::time::Duration;
/// use warpwire::link::Hub;
/// use warpwire::mr::HostMemory;
/// use warpwire::verbs::{
///     Access, Context, GRH_LEN, QpOptions, ReceiveRequest, SendRequest, Service, WrOp,
/// };
///
/// let hub = Hub::new();
/// let context = Context::open(hub.endpoint("10.0.0.1:4791".parse().unwrap())?)?;
/// let (pd, cq) = (context.alloc_pd(), context.create_cq(16)?);
/// let options = QpOptions::default().with_service(Service::Ud);
/// let qp = context.create_qp(&pd, &cq, &cq, options)?;
/// qp.activate_ud(0x1234)?;
/// let memory = HostMemory::new(64)?;
/// let mr = context.register(&pd, memory.clone(), Access::LOCAL_WRITE)?;
/// qp.post_receive(&[ReceiveRequest { id: 1, data: &[mr.sge(0, 64)] }])?;
///
/// let loopback = context.create_address_handle("10.0.0.1:4791".parse().unwrap())?;
/// let request = SendRequest::new(2, WrOp::Send).to(&loopback, qp.number(), 0x1234);
/// qp.post_send(&[request.inline(b"hello")])?;
/// assert_eq!(cq.wait_next(Duration::from_secs(5))?.map(|sent| sent.id), Some(2));
/// let received = cq.wait_next(Duration::from_secs(5))?.expect("it arrives");
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
    peer: SocketAddr,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Soft(Arc<SoftDevice>),
    Hard(PerPdHandles),
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Backend::Soft(device) = &self.backend {
            device.hca.close_destination(self.peer);
        }
    }
}

/// Hardware handles belong to one PD each: one per PD, created on first use.
#[derive(Debug)]
struct PerPdHandles {
    route: ibv::AhAttributes,
    handles: [OnceLock<Option<ibv::AddressHandle>>; MAX_PDS],
}

/// Maximum number of PDs that one handle can be used in.
const MAX_PDS: usize = 8;

impl ibv::AsAddressHandle for AddressHandle {
    fn hardware(&self, pd: &ibv::Pd) -> Option<&ibv::AddressHandle> {
        let Backend::Hard(PerPdHandles { route, handles }) = &self.0.backend else { return None };
        for slot in handles {
            // `create` has checked the address: this fails only if the device is out of handles.
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
        let backend = match &context.0 {
            Device::Soft(device) => {
                device.hca.open_destination(peer)?;
                Backend::Soft(device.clone())
            }
            Device::Hard(hardware) => {
                let route = hardware.route(peer.ip())?;
                hardware.probe_pd()?.create_address_handle(&route)?;
                Backend::Hard(PerPdHandles { route, handles: Default::default() })
            }
        };
        Ok(Self(Arc::new(Inner { peer, backend })))
    }

    /// The address given to [`Context::create_address_handle`].
    pub fn peer(&self) -> SocketAddr {
        self.0.peer
    }

    /// Whether it was created by this device.
    pub(super) fn belongs_to(&self, hca: &crate::hca::Hca) -> bool {
        matches!(&self.0.backend, Backend::Soft(device) if device.hca.is_same(hca))
    }
}

/// Destination of a UD message: address handle, queue pair number and Q_Key.
pub type Destination<'a> = crate::work::Destination<'a, AddressHandle>;

/// The IP header in the first [`GRH_LEN`] bytes of a UD receive: an IPv6 header, or an IPv4 header
/// in the last 20 bytes.
///
/// ```
/// use warpwire::verbs::Grh;
/// assert_eq!(Grh::parse(&[0; 40]), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grh {
    /// The sender's address.
    pub source: IpAddr,
    /// The address that the message was sent to.
    pub destination: IpAddr,
    /// Whether a switch set ECN "congestion experienced" on the packet.
    pub congestion_experienced: bool,
}

impl Grh {
    /// Parses the header; `None` if the bytes are neither IPv6 nor IPv4.
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
        Some(Self { source, destination, congestion_experienced: class & ECN_MASK == ECN_MARKED })
    }
}

fn array<const N: usize>(bytes: &[u8; GRH_LEN as usize], at: usize) -> [u8; N] {
    std::array::from_fn(|n| bytes[at + n])
}
