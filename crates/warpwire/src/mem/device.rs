//! A GPU: properties, capabilities, and allocation of its memory and streams.

use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use serde::Serialize;

use super::address::DeviceAddr;
use super::allocation::{Allocation, MemoryKind};
use super::backend::{DeviceBackend, ForeignStreamBackend, HostOwner};
use super::program::{Module, Program};
use super::share::IpcHandle;
use super::stream::{Event, Stream};
use crate::error::{Error, Kind, Result};
use crate::host::PciAddress;
use crate::units;

/// The implementation behind a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// An NVIDIA GPU through its driver.
    Cuda,
    /// The simulated GPU.
    Sim,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Cuda => "cuda",
            Self::Sim => "sim",
        })
    }
}

/// Properties of a device.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceInfo {
    /// The implementation behind the device.
    pub backend: Backend,
    /// Index among the devices of its backend, from 0.
    pub ordinal: u32,
    /// Product name.
    pub name: String,
    /// Unique identifier, in the form `GPU-…`.
    pub uuid: String,
    /// PCI address; `None` for simulated devices.
    pub pci: Option<PciAddress>,
    /// NUMA node that the device is attached to, if the machine reports it.
    pub numa_node: Option<u32>,
    /// Device memory in bytes.
    pub total_memory: u64,
    /// Number of multiprocessors; 1 for simulated devices.
    pub multiprocessors: u32,
}

impl DeviceInfo {
    /// The label that commands take: `cuda:0`, `sim:1`.
    pub fn label(&self) -> String {
        format!("{}:{}", self.backend, self.ordinal)
    }
}

/// How much of a device's memory is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryUsage {
    /// Bytes that can still be allocated.
    pub free: u64,
    /// Total bytes.
    pub total: u64,
}

/// Whether a device supports a feature; if not, why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Capability {
    /// Supported.
    Yes,
    /// Not supported, for this reason.
    No(String),
}

impl Capability {
    /// `Yes` if `supported`, otherwise `No` with the reason.
    pub fn when(supported: bool, reason: impl Into<String>) -> Self {
        if supported { Self::Yes } else { Self::No(reason.into()) }
    }

    /// Whether the feature is supported.
    pub fn is_yes(&self) -> bool {
        matches!(self, Self::Yes)
    }

    /// Fails with `Unsupported` and the reason unless the feature is supported.
    pub fn require(&self, what: &'static str, device: &DeviceInfo) -> Result<()> {
        match self {
            Self::Yes => Ok(()),
            Self::No(reason) => {
                Err(Error::new(Kind::Unsupported, what).on(device.label()).why(reason.clone()))
            }
        }
    }
}

/// The features of a device, with a reason for each that is missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Capabilities {
    /// Exporting memory as a dma-buf file descriptor.
    pub dmabuf_export: Capability,
    /// Direct access by NICs to device memory.
    pub gpudirect_rdma: Capability,
    /// The same for memory from the virtual memory management API.
    pub gpudirect_rdma_vmm: Capability,
    /// Memory from the virtual memory management API ([`MemoryKind::Vmm`]).
    pub vmm: Capability,
    /// Memory from a stream-ordered pool ([`MemoryKind::Pool`]).
    pub pool: Capability,
    /// Handles with which another process opens memory.
    pub ipc: Capability,
    /// Stream operations that write a word or wait for one.
    pub stream_mem_ops: Capability,
    /// Stream waits with [`Condition::Nor`](super::Condition::Nor).
    pub stream_wait_nor: Capability,
    /// A stream operation that makes earlier NIC writes visible
    /// ([`MemOp::Flush`](super::MemOp::Flush)).
    pub flush_remote_writes: Capability,
    /// Capturing stream work into a graph and replaying it.
    pub graphs: Capability,
    /// Notifying users of memory when it moves or is freed ([`Allocation::watch`]).
    pub notify: Capability,
}

impl Capabilities {
    /// Every capability with its display name, in declaration order.
    pub fn each(&self) -> [(&'static str, &Capability); 11] {
        [
            ("dma-buf export", &self.dmabuf_export),
            ("GPUDirect RDMA", &self.gpudirect_rdma),
            ("GPUDirect RDMA with VMM", &self.gpudirect_rdma_vmm),
            ("VMM memory", &self.vmm),
            ("pool memory", &self.pool),
            ("inter-process handles", &self.ipc),
            ("stream memory operations", &self.stream_mem_ops),
            ("stream wait NOR", &self.stream_wait_nor),
            ("flush of remote writes", &self.flush_remote_writes),
            ("graphs", &self.graphs),
            ("move and free events", &self.notify),
        ]
    }
}

/// A GPU, real or simulated. Clones refer to the same device.
///
/// ```
/// use warpwire::mem::sim::{Sim, SimConfig};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let memory = gpu.alloc(64 * 1024).unwrap();
/// memory.write(100, b"hello, device").unwrap();
/// let mut back = [0; 13];
/// memory.read(100, &mut back).unwrap();
/// assert_eq!(&back, b"hello, device");
/// ```
#[derive(Clone)]
pub struct Device {
    backend: Arc<dyn DeviceBackend>,
}

impl Device {
    /// Wraps a backend's device.
    pub fn from_backend(backend: Arc<dyn DeviceBackend>) -> Self {
        Self { backend }
    }

    /// Properties of the device.
    pub fn info(&self) -> &DeviceInfo {
        self.backend.info()
    }

    /// What the device supports, with a reason for each missing feature.
    pub fn capabilities(&self) -> &Capabilities {
        self.backend.capabilities()
    }

    /// Free and total memory at the time of the call.
    pub fn memory_usage(&self) -> Result<MemoryUsage> {
        self.backend.memory_usage()
    }

    /// Allocates `len` bytes of device memory of kind [`MemoryKind::Plain`].
    pub fn alloc(&self, len: u64) -> Result<Allocation> {
        self.alloc_kind(len, MemoryKind::Plain)
    }

    /// Allocates `len` bytes of pinned host memory that the device can access by address.
    pub fn alloc_pinned(&self, len: u64) -> Result<Allocation> {
        self.alloc_kind(len, MemoryKind::Pinned)
    }

    /// Allocates `len` bytes of the given kind. The contents are undefined.
    pub fn alloc_kind(&self, len: u64, kind: MemoryKind) -> Result<Allocation> {
        self.check_len(len, kind)?;
        let memory = self.backend.clone().allocate(len, kind)?;
        Ok(Allocation::new(self.clone(), memory))
    }

    /// Wraps `len` bytes at `address` that another library allocated on this device.
    ///
    /// The range may begin and end anywhere inside that library's allocations. That it is memory of
    /// this device is checked. Dropping the handle frees nothing.
    ///
    /// # Safety
    /// The owner must keep the memory allocated while the handle, its clones and regions, and
    /// operations that use them exist: CUDA treats an address that it no longer knows as ordinary
    /// host memory.
    #[allow(unsafe_code)]
    pub unsafe fn borrow(&self, address: DeviceAddr, len: u64) -> Result<Allocation> {
        if len == 0 || address.checked_add(len).is_none() {
            let what = format!("borrow {len} bytes at {address}");
            return Err(Error::new(Kind::InvalidArgument, what)
                .on(self.label())
                .why("the range is empty or passes the end of the address space"));
        }
        let memory = self.backend.clone().borrow(address, len)?;
        Ok(Allocation::new(self.clone(), memory))
    }

    /// Registers memory that another library mapped for the CPU, so that this device's streams and
    /// kernels can access it: queues in host memory or, with `io`, MMIO registers of a PCIe device
    /// such as a NIC's doorbell page. Registers are only written by streams, never read.
    ///
    /// # Errors
    /// Those of the driver; for registers, the error describes what must be permitted.
    ///
    /// # Safety
    /// The range is mapped and stays mapped while `owner` lives; the memory, its regions and
    /// operations that use them hold `owner`. No Rust references to the range exist. Writing to
    /// registers has that device's side effects.
    #[allow(unsafe_code)]
    pub unsafe fn register_host(
        &self,
        base: NonNull<u8>,
        len: u64,
        io: bool,
        owner: HostOwner,
    ) -> Result<Allocation> {
        if len == 0 || (base.as_ptr() as u64).checked_add(len).is_none() {
            return Err(Error::new(
                Kind::InvalidArgument,
                format!("register {len} bytes of host memory"),
            )
            .on(self.label())
            .why("the range is empty or passes the end of the address space"));
        }
        let memory = self.backend.clone().register_host(base, len, io, owner)?;
        Ok(Allocation::new(self.clone(), memory))
    }

    /// Whether kernels of this device can access the memory: it is the device's own, or pinned
    /// memory, which all devices of a backend can access. That of another GPU would need peer
    /// access.
    pub(super) fn can_access(&self, memory: &Allocation) -> bool {
        let same_backend = memory.device().info().backend == self.info().backend;
        *memory.device() == *self || same_backend && memory.kind() == MemoryKind::Pinned
    }

    /// Opens memory that another process exported with [`Allocation::export_ipc`].
    ///
    /// # Errors
    /// [`Kind::PermissionDenied`] if the exporter's descriptors cannot be duplicated: see
    /// [`open_ipc_with`](Self::open_ipc_with). [`Kind::Stale`] if the exporter is gone.
    pub fn open_ipc(&self, handle: &IpcHandle) -> Result<Allocation> {
        let memory = self.backend.clone().open_ipc(handle, None)?;
        Ok(Allocation::new(self.clone(), memory))
    }

    /// Like [`open_ipc`](Self::open_ipc), with the descriptors of [`Allocation::ipc_descriptors`]
    /// that came with the handle over a Unix socket (`SCM_RIGHTS`). The exporter may then be in
    /// another PID namespace, and its permission is what it sent.
    ///
    /// # Errors
    /// [`Kind::Malformed`] if the number of descriptors does not match.
    pub fn open_ipc_with(
        &self,
        handle: &IpcHandle,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Allocation> {
        let memory = self.backend.clone().open_ipc(handle, Some(descriptors))?;
        Ok(Allocation::new(self.clone(), memory))
    }

    /// Creates a stream. Its operations run in order, concurrently with other streams.
    pub fn stream(&self) -> Result<Stream> {
        let backend = self.backend.clone().create_stream()?;
        Ok(Stream::new(self.clone(), backend))
    }

    pub(super) fn downgrade(&self) -> Weak<dyn DeviceBackend> {
        Arc::downgrade(&self.backend)
    }

    /// Whether it is a handle of that device.
    pub(super) fn is_backend(&self, device: &Weak<dyn DeviceBackend>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.backend), device.as_ptr())
    }

    pub(super) fn foreign_backend(&self, handle: u64) -> Result<Arc<dyn ForeignStreamBackend>> {
        self.backend.clone().foreign_stream(handle)
    }

    /// Creates an event, to mark a point in a stream.
    pub fn event(&self) -> Result<Event> {
        Ok(Event::new(self.clone(), self.backend.clone().create_event()?))
    }

    /// Loads a program's kernels onto the device.
    ///
    /// CUDA loads code only while no stream has work: this waits a few seconds for that, then fails
    /// with `Busy`. Load programs before starting long waits or kernels that do not end.
    pub fn load(&self, program: &Program) -> Result<Module> {
        let backend = self.backend.clone().load(program)?;
        Ok(Module::new(self.clone(), program.name().to_string(), backend))
    }

    /// Releases resources held by finished operations.
    pub(super) fn reclaim(&self) {
        self.backend.reclaim();
    }

    /// The label that commands take: `cuda:0`, `sim:1`.
    pub fn label(&self) -> String {
        self.info().label()
    }

    fn check_len(&self, len: u64, kind: MemoryKind) -> Result<()> {
        let failure = |kind, why: String| {
            let what = format!("allocate {}", units::bytes(len));
            Err(Error::new(kind, what).on(self.label()).why(why))
        };
        let total = self.info().total_memory;
        if len == 0 {
            return failure(Kind::InvalidArgument, "the length is zero".into());
        }
        if isize::try_from(len).is_err() {
            let why = "the length exceeds any address space";
            return failure(Kind::InvalidArgument, why.into());
        }
        if kind != MemoryKind::Pinned && len > total {
            let why = format!("the device has {} in all", units::bytes(total));
            return failure(Kind::OutOfMemory, why)
                .map_err(|e| e.fix("allocate less, or use a larger GPU"));
        }
        Ok(())
    }
}

impl PartialEq for Device {
    /// Whether both handles refer to the same device.
    fn eq(&self, other: &Self) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.backend), Arc::as_ptr(&other.backend))
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {})", self.label(), self.info().name)
    }
}
