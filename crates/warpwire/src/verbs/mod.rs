//! Verbs: one API for RDMA devices, whatever stands behind it.
//!
//! | type | what it is |
//! |---|---|
//! | [`Context`], [`devices`] | an open device: the software HCA, or one of the machine; which there are |
//! | [`Pd`], [`Mr`], [`Access`] | protection domains and registered memory |
//! | [`Cq`], [`Completion`] | where the ends of work are told |
//! | [`Qp`], [`Batch`], [`SendRequest`] | a queue pair, and work to post |
//! | [`AddressHandle`], [`Destination`], [`DatagramSender`], [`Grh`] | whom datagrams are for, and who sent them |
//! | [`Srq`] | receives that many queue pairs share |
//! | [`QpEndpoint`], [`bootstrap`] | what two ends must know of each other, and a way to tell it |
//!
//! ```
//! use std::time::Duration;
//! use warpwire::link::Hub;
//! use warpwire::mr::HostMemory;
//! use warpwire::verbs::{Access, Context, WrOp, QpOptions, Remote, SendRequest};
//!
//! let hub = Hub::new();
//! let [a, b] = ["10.0.0.1:4791", "10.0.0.2:4791"].map(|address| {
//!     Context::open(hub.endpoint(address.parse().unwrap()).unwrap()).unwrap()
//! });
//! let (pd, there) = (a.pd(), b.pd());
//! let (cq, their_cq) = (a.create_cq(16)?, b.create_cq(16)?);
//! let qp = a.create_qp(&pd, &cq, &cq, QpOptions::default())?;
//! let peer = b.create_qp(&there, &their_cq, &their_cq, QpOptions::default())?;
//! qp.connect(&peer.endpoint())?;
//! peer.connect(&qp.endpoint())?;
//!
//! let (from, to) = (HostMemory::new(4096)?, HostMemory::new(4096)?);
//! from.bytes().write(0, b"hello")?;
//! let from = a.register(&pd, from, Access::LOCAL_WRITE)?;
//! let target = b.register(&there, to.clone(), Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
//! let remote = Remote { address: target.iova(), rkey: target.rkey() };
//! qp.post_send(&[SendRequest::new(7, WrOp::Write(remote)).with(&[from.sge(0, 5)])])?;
//! let done = cq.next(Duration::from_secs(5))?.expect("it ends");
//! assert_eq!((done.id, done.is_success()), (7, true));
//! let mut arrived = [0; 5];
//! to.bytes().read(0, &mut arrived)?;
//! assert_eq!(&arrived, b"hello");
//! # Ok::<(), warpwire::Error>(())
//! ```

pub mod bootstrap;
mod completion;
mod cq;
mod datagram;
mod direct_verbs;
mod hard;
mod hardware;
mod memory;
mod post;
mod prepare;
mod qp;
mod queues;
mod receive;
mod srq;
mod wr_table;

use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;

pub use crate::hca::{EventFd, ProgressMode};
pub use crate::ibv::{devices, explain_status};
pub use crate::mlx5::{Atomic, Status};
pub use crate::mr::{Access, AttachMode, DmaBufRange, MemorySource, PeerClient};
pub use crate::work::{
    AsyncEvent, Completion, CompletionKind, DatagramSender, Fence, ReceiveRequest, Remote, Sge,
    WrOp,
};
pub use bootstrap::QpEndpoint;
pub use cq::{Cq, CqOptions};
pub use datagram::{AddressHandle, Destination, GRH_LEN, Grh};
pub use hardware::DeviceOptions;
pub use memory::{Mr, Pd};
pub use post::{Batch, SendRequest};
pub use qp::{Qp, QpOptions};
pub use queues::{DirectQueues, Poster};
pub use srq::{Srq, SrqOptions};
pub use warpwire_proto::qp::{Mtu, PathAttributes, QpAttributes, Service, State};

use crate::error::Result;
use crate::hca::{Hca, HcaOptions, Stats};
use crate::ibv;
use crate::link::{self, Link};
use crate::mr;
use hardware::Hardware;
use qp::Core;

/// An open device. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Context(pub(crate) Arc<Device>);

#[derive(Debug)]
pub(crate) struct Device {
    /// The software HCA; beside hardware, one that does nothing but to tell domains apart.
    pub hca: Hca,
    /// A device of the machine.
    pub hardware: Option<Hardware>,
    /// Queue pairs by the number that their completions bear.
    pub pairs: Mutex<Vec<Option<Arc<Core>>>>,
}

impl Context {
    /// Opens a software HCA on that link, driven by whoever polls.
    pub fn open(link: impl Link + 'static) -> Result<Self> {
        Self::open_with(link, HcaOptions::default())
    }

    /// Opens a software HCA on that link.
    pub fn open_with(link: impl Link + 'static, options: HcaOptions) -> Result<Self> {
        let hca = Hca::open(link, options)?;
        Ok(Self(Arc::new(Device { hca, hardware: None, pairs: Mutex::new(Vec::new()) })))
    }

    /// Opens an RDMA device of the machine, by libibverbs: [`devices`] lists them.
    ///
    /// # Errors
    /// If there is no libibverbs, no such device (with the names of those that there are), or this user may not open it.
    ///
    /// ```no_run
    /// use warpwire::verbs::{Context, QpOptions};
    /// let context = Context::open_device("mlx5_0")?;
    /// let (pd, cq) = (context.pd(), context.create_cq(16)?);
    /// let qp = context.create_qp(&pd, &cq, &cq, QpOptions::default())?;
    /// println!("{}", qp.path()?);
    /// # Ok::<(), warpwire::Error>(())
    /// ```
    pub fn open_device(name: &str) -> Result<Self> {
        Self::open_device_with(name, DeviceOptions::default())
    }

    /// Opens an RDMA device of the machine, for a port and an address of it.
    ///
    /// # Errors
    /// As for [`open_device`](Self::open_device); if the port that was asked for is down or has no such address.
    pub fn open_device_with(name: &str, options: DeviceOptions) -> Result<Self> {
        let hardware = Some(Hardware::open(name, options)?);
        let hca = Hca::placeholder()?;
        Ok(Self(Arc::new(Device { hca, hardware, pairs: Mutex::new(Vec::new()) })))
    }

    /// The software HCA below, for those who fill queues themselves. Beside hardware it is one that is on no network and
    /// has no queues: see [`soft`](Self::soft).
    pub fn hca(&self) -> &Hca {
        &self.0.hca
    }

    /// The software HCA below; `None` if this is hardware.
    pub fn soft(&self) -> Option<&Hca> {
        self.0.hardware.is_none().then_some(&self.0.hca)
    }

    /// The RDMA device of the machine below; `None` if this is the software HCA.
    pub fn device(&self) -> Option<&ibv::Context> {
        self.0.hardware.as_ref().map(|hardware| &hardware.context)
    }

    /// A new protection domain.
    pub fn pd(&self) -> Pd {
        let id = self.0.hca.registry().pd();
        match &self.0.hardware {
            None => Pd::soft(id),
            Some(hardware) => Pd::hard(id, hardware.context.clone()),
        }
    }

    /// Registers memory, under its own address.
    pub fn register(&self, pd: &Pd, memory: impl Into<MemorySource>, access: Access) -> Result<Mr> {
        self.register_at(pd, memory, None, access)
    }

    /// Registers memory; work finds its first byte at `iova`.
    pub fn register_at(
        &self,
        pd: &Pd,
        memory: impl Into<MemorySource>,
        iova: Option<u64>,
        access: Access,
    ) -> Result<Mr> {
        if self.0.hardware.is_some() {
            return memory::register(pd, memory.into(), iova, access, mr::RegisteredBy::Handle);
        }
        Ok(self.0.hca.registry().register(pd, memory, iova, access)?.into())
    }

    /// Registers `len` bytes at `address`, whosever they are: this process's, a GPU's, a client's of the program (which
    /// only the software HCA reaches).
    ///
    /// # Safety
    /// As for [`Registry::register_address`](mr::Registry::register_address).
    #[allow(unsafe_code)]
    pub unsafe fn register_address(
        &self,
        pd: &Pd,
        address: u64,
        len: u64,
        iova: Option<u64>,
        access: Access,
    ) -> Result<Mr> {
        if self.0.hardware.is_some() {
            // SAFETY: the caller's promise.
            return unsafe { memory::register_address(pd, (address, len), iova, access) };
        }
        // SAFETY: the caller's promise.
        let made =
            unsafe { self.0.hca.registry().register_address(pd, address, len, iova, access) };
        Ok(made?.into())
    }

    /// Registers a range of a dma-buf: see [`Registry::register_dmabuf`](mr::Registry::register_dmabuf). On hardware its
    /// driver decides whether the memory may move meanwhile, whatever `attach` says.
    pub fn register_dmabuf(
        &self,
        pd: &Pd,
        range: DmaBufRange<'_>,
        iova: Option<u64>,
        access: Access,
        attach: AttachMode,
    ) -> Result<Mr> {
        if self.0.hardware.is_some() {
            return memory::register_dmabuf(pd, range, iova, access, attach);
        }
        Ok(self.0.hca.registry().register_dmabuf(pd, range, iova, access, attach)?.into())
    }

    /// Adds a peer-memory client: its memory can be registered by its address from now on, with the software HCA.
    pub fn add_client(&self, client: Arc<dyn PeerClient>) {
        self.0.hca.registry().add_client(client);
    }

    /// Makes a completion queue with room for at least so many completions.
    pub fn create_cq(&self, entries: u32) -> Result<Cq> {
        Cq::create(self, CqOptions { entries, ..CqOptions::default() })
    }

    /// Makes a completion queue.
    pub fn create_cq_with(&self, options: CqOptions) -> Result<Cq> {
        Cq::create(self, options)
    }

    /// Makes a shared receive queue.
    pub fn create_srq(&self, pd: &Pd, options: SrqOptions) -> Result<Srq> {
        Srq::create(self, pd, options)
    }

    /// Makes a queue pair, whose ends of work are told in these two completion queues.
    pub fn create_qp(
        &self,
        pd: &Pd,
        send_cq: &Cq,
        receive_cq: &Cq,
        options: QpOptions,
    ) -> Result<Qp> {
        Qp::create(self, pd, send_cq, receive_cq, options)
    }

    /// Makes ready to send datagrams to a peer.
    ///
    /// # Errors
    /// If nothing can be sent to this address from here, with the reason.
    pub fn create_address_handle(&self, peer: SocketAddr) -> Result<AddressHandle> {
        AddressHandle::create(self, peer)
    }

    /// The oldest news of queues that nobody has taken.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        if let Some(hardware) = &self.0.hardware {
            return hardware.next_event();
        }
        self.0.hca.next_event()
    }

    /// Raised while there is news; a file descriptor, for whoever waits for several things.
    pub fn events(&self) -> &EventFd {
        self.0.hardware.as_ref().map_or_else(|| self.0.hca.events(), |hardware| &hardware.events)
    }

    /// The link that it uses, or the device that it is, and why.
    pub fn path(&self) -> &link::LinkPath {
        self.0.hardware.as_ref().map_or_else(|| self.0.hca.path(), |hardware| &hardware.path)
    }

    /// The largest MTU that its link carries: of those that RoCE knows where packets leave this machine, and as large
    /// as it goes where they cannot.
    pub fn max_mtu(&self) -> Mtu {
        if let Some(hardware) = &self.0.hardware {
            return hardware.max_mtu;
        }
        let fits = |mtu: &&Mtu| mtu.bytes() as usize <= self.0.hca.max_payload();
        let is_local = match self.path().kind {
            link::LinkKind::Shm | link::LinkKind::Loopback => true,
            link::LinkKind::Udp | link::LinkKind::Auto => self.path().local.ip().is_loopback(),
            link::LinkKind::Hardware => false,
        };
        let jumbo = [16 << 10, 32 << 10, 60 << 10, 64 << 10].into_iter();
        let jumbo = jumbo.filter_map(Mtu::new).filter(|_| is_local);
        let all: Vec<Mtu> = Mtu::ALL.into_iter().chain(jumbo).collect();
        all.iter().rev().find(fits).copied().unwrap_or(Mtu::ALL[0])
    }

    /// What the software HCA has counted; hardware counts elsewhere, and this stays at nothing.
    pub fn stats(&self) -> Stats {
        self.0.hca.stats()
    }
}
