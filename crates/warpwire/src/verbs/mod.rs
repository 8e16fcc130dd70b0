//! RDMA verbs: one API for the software HCA and for RDMA hardware.
//!
//! [`Context::open`] creates a software HCA on a [`link`] and needs no NIC;
//! [`Context::open_device`] opens an RDMA device of this machine through libibverbs. All other
//! objects are created from the context, as in rdma-core.
//!
//! | type | what it is |
//! |---|---|
//! | [`Context`], [`devices`] | an open device (`ibv_context`); the RDMA devices of this machine |
//! | [`LinkChoice`] | which device communicators and agents use |
//! | [`Pd`], [`Mr`], [`Access`] | protection domains, memory regions and their access flags |
//! | [`Cq`], [`Completion`] | completion queues and work completions (`ibv_wc`) |
//! | [`Qp`], [`Batch`], [`SendRequest`] | queue pairs and work requests |
//! | [`AddressHandle`], [`Destination`], [`DatagramSender`], [`Grh`] | addresses of UD messages |
//! | [`Srq`] | shared receive queues |
//! | [`QpEndpoint`], [`bootstrap`] | connection data, and its exchange over TCP |
//!
//! Handles may be used from any thread, and each object keeps the objects that it depends on alive:
//! a queue pair its completion queues, its domain and the device.
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
//! let (pd, there) = (a.alloc_pd(), b.alloc_pd());
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
//! let done = cq.wait_next(Duration::from_secs(5))?.expect("it ends");
//! assert_eq!((done.id, done.is_success()), (7, true));
//! let mut arrived = [0; 5];
//! to.bytes().read(0, &mut arrived)?;
//! assert_eq!(&arrived, b"hello");
//! # Ok::<(), warpwire::Error>(())
//! ```

pub mod bootstrap;
mod choice;
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

pub use crate::hca::{
    DirectStats, EngineStats, EventFd, HcaOptions, HcaStats, ProgressMode, QpTotals, QpnSlot,
};
pub use crate::ibv::{devices, explain_status};
pub use crate::mlx5::WqeOpcode;
pub use crate::mr::{
    Access, AttachMode, DmaBufRange, MemorySource, MwBind, MwType, PeerClient, next_rkey,
};
pub use crate::work::{
    AsyncEvent, Completion, CompletionKind, DatagramSender, Fence, PostError, ReceiveRequest,
    Remote, Sge, WrOp,
};
pub use bootstrap::QpEndpoint;
pub use choice::LinkChoice;
pub use cq::{Cq, CqOptions};
pub use datagram::{AddressHandle, Destination, GRH_LEN, Grh};
pub use hardware::DeviceOptions;
pub use memory::{Mr, Mw, Pd};
pub use post::{Batch, SendRequest};
pub use qp::{Qp, QpOptions};
pub use queues::{DirectQueues, Poster};
pub use srq::{Srq, SrqOptions};
pub use warpwire_proto::qp::{
    Atomic, AtomicWidth, Mtu, PathAttributes, QpAttributes, Service, State, Status,
};

use crate::error::{Error, Kind, Result};
use crate::hca::Hca;
pub(crate) use crate::hca::{ListPost, ListRange, RangeList};
use crate::ibv;
use crate::link::{self, Link};
use crate::mr;
use hardware::Hardware;

/// An open device (`ibv_context`). Clones refer to the same device; queues and address handles that
/// were created from it keep it open.
#[derive(Clone, Debug)]
pub struct Context(Device);

#[derive(Clone, Debug)]
enum Device {
    Soft(Arc<SoftDevice>),
    Hard(Arc<Hardware>),
}

/// A software HCA and its queue pairs.
#[derive(Debug)]
struct SoftDevice {
    hca: Hca,
    /// Which user indices queue pairs have; CQEs carry them.
    user_indices: Mutex<Vec<bool>>,
}

impl Context {
    /// Opens a software HCA on `link` with default [`HcaOptions`]: polling a completion queue
    /// advances the engine, and a fallback thread advances it while nothing polls.
    ///
    /// # Errors
    /// If an eventfd or the engine's thread cannot be created.
    pub fn open(link: impl Link + 'static) -> Result<Self> {
        Self::open_with(link, HcaOptions::default())
    }

    /// Opens a software HCA on `link`.
    ///
    /// # Errors
    /// As for [`open`](Self::open). [`Kind::InvalidArgument`] or [`Kind::Unsupported`] if it cannot
    /// have as many engines as the options ask for: the text says why.
    pub fn open_with(link: impl Link + 'static, options: HcaOptions) -> Result<Self> {
        let hca = Hca::open(link, options)?;
        Ok(Self(Device::Soft(Arc::new(SoftDevice { hca, user_indices: Mutex::default() }))))
    }

    /// Opens an RDMA device of this machine through libibverbs; [`devices`] lists their names.
    ///
    /// # Errors
    /// If libibverbs is not installed, no device has this name (the text lists those that exist),
    /// or this user may not open it.
    ///
    /// ```no_run
    /// use warpwire::verbs::{Context, QpOptions};
    /// let context = Context::open_device("mlx5_0")?;
    /// let (pd, cq) = (context.alloc_pd(), context.create_cq(16)?);
    /// let qp = context.create_qp(&pd, &cq, &cq, QpOptions::default())?;
    /// println!("{}", qp.path()?);
    /// # Ok::<(), warpwire::Error>(())
    /// ```
    pub fn open_device(name: &str) -> Result<Self> {
        Self::open_device_with(name, DeviceOptions::default())
    }

    /// Opens an RDMA device with a given port or GID index.
    ///
    /// # Errors
    /// As for [`open_device`](Self::open_device). If a port or GID index was given: also if the
    /// port is not active or the port has no such GID.
    pub fn open_device_with(name: &str, options: DeviceOptions) -> Result<Self> {
        Ok(Self(Device::Hard(Arc::new(Hardware::open(name, options)?))))
    }

    /// Whether there are other clones of this context, or queues of the device.
    pub(crate) fn is_in_use(&self) -> bool {
        match &self.0 {
            Device::Soft(soft) => Arc::strong_count(soft) > 1,
            Device::Hard(hardware) => Arc::strong_count(hardware) > 1,
        }
    }

    /// The software HCA, for callers that fill its queues themselves; `None` on hardware.
    pub fn soft(&self) -> Option<&Hca> {
        match &self.0 {
            Device::Soft(soft) => Some(&soft.hca),
            Device::Hard(_) => None,
        }
    }

    /// The registrations of the software HCA, for example for an [`MrCache`](mr::MrCache).
    ///
    /// # Errors
    /// [`Kind::Unsupported`] on hardware, whose registrations the driver keeps.
    pub fn registry(&self) -> Result<&mr::Registry> {
        self.soft().map(Hca::registry).ok_or_else(|| soft_only("access registrations"))
    }

    /// The libibverbs device; `None` for the software HCA.
    pub fn device(&self) -> Option<&ibv::Context> {
        match &self.0 {
            Device::Soft(_) => None,
            Device::Hard(hardware) => Some(&hardware.context),
        }
    }

    /// Allocates a protection domain. Never fails: on hardware the domain is allocated when it is
    /// first used, and that call reports the error.
    pub fn alloc_pd(&self) -> Pd {
        match &self.0 {
            Device::Soft(soft) => Pd::of_soft(soft.hca.registry().pd()),
            Device::Hard(hardware) => Pd::of_hard(hardware.context.clone()),
        }
    }

    /// Registers memory; its IOVA is the memory's own address, or 0 with [`Access::ZERO_BASED`].
    /// The region keeps the memory alive.
    ///
    /// # Errors
    /// As for [`register_at`](Self::register_at).
    pub fn register(&self, pd: &Pd, memory: impl Into<MemorySource>, access: Access) -> Result<Mr> {
        self.register_at(pd, memory, None, access)
    }

    /// Registers memory; work requests address its first byte as `iova` (`ibv_reg_mr_iova`). `None`
    /// is as in [`register`](Self::register).
    ///
    /// Cost: constant time on the software HCA; on hardware the kernel pins every page, unless
    /// [`Access::ON_DEMAND`] is set.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if the memory is empty, the
    /// addresses overflow, `access` has a remote write or atomic right without
    /// [`Access::LOCAL_WRITE`], or a zero-based region was given another `iova`. On hardware also
    /// if the locked-memory limit is reached or the device cannot reach GPU memory in any way: the
    /// text says what was tried.
    pub fn register_at(
        &self,
        pd: &Pd,
        memory: impl Into<MemorySource>,
        iova: Option<u64>,
        access: Access,
    ) -> Result<Mr> {
        match &self.0 {
            Device::Soft(soft) => {
                Ok(soft.hca.registry().register(pd.soft()?, memory, iova, access)?.into())
            }
            Device::Hard(_) => {
                memory::register(pd, memory.into(), iova, access, mr::RegisteredBy::Handle)
            }
        }
    }

    /// Registers `len` bytes at `address`: memory of this process, of a GPU, or of a [peer-memory
    /// client](PeerClient) (software HCA only).
    ///
    /// # Errors
    /// If the range is empty or overflows, or is not mapped memory that a client recognises.
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
        let Device::Soft(soft) = &self.0 else {
            // SAFETY: guaranteed by the caller.
            return unsafe { memory::register_address(pd, (address, len), iova, access) };
        };
        let (registry, pd) = (soft.hca.registry(), pd.soft()?);
        // SAFETY: guaranteed by the caller.
        let made = unsafe { registry.register_address(pd, address, len, iova, access) };
        Ok(made?.into())
    }

    /// Registers a range of a dma-buf (`ibv_reg_dmabuf_mr`): see
    /// [`Registry::register_dmabuf`](mr::Registry::register_dmabuf). `iova` defaults to the range's
    /// offset; the two must be equal modulo the page size. On hardware the driver decides whether
    /// the exporter may move the memory; `attach` is only recorded.
    ///
    /// # Errors
    /// On hardware: [`Kind::Unsupported`] if the driver cannot
    /// register dma-bufs, [`Kind::Unavailable`] before rdma-core
    /// 34.
    pub fn register_dmabuf(
        &self,
        pd: &Pd,
        range: DmaBufRange<'_>,
        iova: Option<u64>,
        access: Access,
        attach: AttachMode,
    ) -> Result<Mr> {
        let Device::Soft(soft) = &self.0 else {
            return memory::register_dmabuf(pd, range, iova, access, attach);
        };
        let registry = soft.hca.registry();
        Ok(registry.register_dmabuf(pd.soft()?, range, iova, access, attach)?.into())
    }

    /// Allocates a memory window (`ibv_alloc_mw`), which is not bound yet.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] on hardware; [`Kind::OutOfMemory`] if every key is in use.
    pub fn alloc_mw(&self, pd: &Pd, kind: MwType) -> Result<Mw> {
        let hca = self.soft().ok_or_else(|| soft_only("allocate a memory window"))?;
        Ok(Mw(hca.registry().alloc_window(pd.soft()?, kind)?))
    }

    /// Adds a peer-memory client, which is asked before those already present when memory is
    /// registered by address.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] on hardware, whose driver has clients of its own.
    pub fn add_client(&self, client: Arc<dyn PeerClient>) -> Result<()> {
        let hca = self.soft().ok_or_else(|| soft_only("add a peer-memory client"))?;
        hca.registry().add_client(client);
        Ok(())
    }

    /// Creates a completion queue with at least `entries` entries (`ibv_create_cq`).
    ///
    /// # Errors
    /// If `entries` is not 1 to 4194304, or the device has no resources left.
    pub fn create_cq(&self, entries: u32) -> Result<Cq> {
        Cq::create(self, CqOptions { entries, ..CqOptions::default() })
    }

    /// Creates a completion queue.
    ///
    /// # Errors
    /// As for [`create_cq`](Self::create_cq). On hardware also if [`CqOptions::memory`] or
    /// [`CqOptions::collapsed`] is set, or an option needs an mlx5 device.
    pub fn create_cq_with(&self, options: CqOptions) -> Result<Cq> {
        Cq::create(self, options)
    }

    /// Creates a shared receive queue.
    ///
    /// # Errors
    /// If the depth is not 1 to 32767, `max_sge` not 1 to 15, or the device has no resources left.
    pub fn create_srq(&self, pd: &Pd, options: SrqOptions) -> Result<Srq> {
        Srq::create(self, pd, options)
    }

    /// Creates a queue pair in `RESET`. Completions of sends go to `send_cq` and those of receives
    /// to `receive_cq`; both may be the same queue.
    ///
    /// # Errors
    /// If a queue belongs to a device of the other kind, the options exceed what a queue can hold,
    /// or the device has no resources left.
    pub fn create_qp(
        &self,
        pd: &Pd,
        send_cq: &Cq,
        receive_cq: &Cq,
        options: QpOptions,
    ) -> Result<Qp> {
        Qp::create(self, pd, send_cq, receive_cq, options)
    }

    /// Creates an address handle: UD messages may then be sent to `peer`.
    ///
    /// # Errors
    /// If no route leads to this address from this device; the text gives the reason.
    pub fn create_address_handle(&self, peer: SocketAddr) -> Result<AddressHandle> {
        AddressHandle::create(self, peer)
    }

    /// Takes the oldest pending asynchronous event (`ibv_get_async_event`) and acknowledges it;
    /// `None` if there is none. Never blocks.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        match &self.0 {
            Device::Soft(soft) => soft.hca.next_event(),
            Device::Hard(hardware) => hardware.next_event(),
        }
    }

    /// Raised (readable) while asynchronous events are pending. It is a file descriptor, for use
    /// with `poll` or `epoll`.
    pub fn events(&self) -> &EventFd {
        match &self.0 {
            Device::Soft(soft) => soft.hca.events(),
            Device::Hard(hardware) => &hardware.events,
        }
    }

    /// The link or device in use, and the reason for the choice.
    pub fn path(&self) -> &link::LinkPath {
        match &self.0 {
            Device::Soft(soft) => soft.hca.path(),
            Device::Hard(hardware) => &hardware.path,
        }
    }

    /// The maximum path MTU of this device's link or port: at most 4096 bytes on a network, up to
    /// 64 KiB in memory (shared memory, and the loopback link of one process).
    pub fn max_mtu(&self) -> Mtu {
        match &self.0 {
            Device::Soft(soft) => soft.max_mtu(),
            Device::Hard(hardware) => hardware.max_mtu,
        }
    }

    fn max_mtu_on_host(&self) -> Mtu {
        match &self.0 {
            Device::Soft(soft) => soft.max_mtu_on_host(),
            Device::Hard(hardware) => hardware.max_mtu,
        }
    }

    /// Counters of the software HCA; `None` on hardware, whose counters are in sysfs.
    ///
    /// ```
    /// use warpwire::{link::Hub, verbs::Context};
    /// let context = Context::open(Hub::new().endpoint("10.0.0.1:4791".parse().unwrap())?)?;
    /// assert_eq!(context.stats().map(|stats| stats.pairs.packets_sent), Some(0));
    /// # Ok::<(), warpwire::Error>(())
    /// ```
    /// A program that does not think of hardware does not compile:
    /// ```compile_fail,E0609
    /// # use warpwire::verbs::Context;
    /// let packets = |context: &Context| context.stats().pairs.packets_sent;
    /// ```
    pub fn stats(&self) -> Option<HcaStats> {
        self.soft().map(Hca::stats)
    }
}

impl SoftDevice {
    /// The largest path MTU to a peer at the same IP address: RoCE's, because the queue pair may
    /// move to another link.
    fn max_mtu_on_host(&self) -> Mtu {
        let fits = |mtu: &&Mtu| mtu.bytes() as usize <= self.hca.max_payload_on_host();
        let on_host = Mtu::ALL.iter().rev().find(fits).copied().unwrap_or(Mtu::ALL[0]);
        on_host.max(self.max_mtu())
    }

    fn max_mtu(&self) -> Mtu {
        let fits = |mtu: &&Mtu| mtu.bytes() as usize <= self.hca.max_payload();
        let kind = self.hca.path().kind;
        let in_memory = matches!(kind, link::LinkKind::Shm | link::LinkKind::Loopback);
        let jumbo = [16 << 10, 32 << 10, 60 << 10, 64 << 10].into_iter();
        let jumbo = jumbo.filter_map(Mtu::new).filter(|_| in_memory);
        let all: Vec<Mtu> = Mtu::ALL.into_iter().chain(jumbo).collect();
        all.iter().rev().find(fits).copied().unwrap_or(Mtu::ALL[0])
    }
}

#[cold]
fn soft_only(what: &'static str) -> Error {
    Error::new(Kind::Unsupported, what)
        .why("the context is an RDMA device")
        .fix("use the software HCA: Context::open")
}
