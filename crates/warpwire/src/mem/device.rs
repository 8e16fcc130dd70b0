//! A GPU: what it is, what it can do, and where its memory and streams come from.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use serde::Serialize;

use super::address::DeviceAddr;
use super::allocation::{Allocation, MemoryKind};
use super::backend::{DeviceBackend, HostOwner};
use super::program::{Module, Program};
use super::share::IpcHandle;
use super::stream::{Event, Stream};
use crate::error::{Error, Kind, Result};
use crate::host::PciAddress;
use crate::units;

/// Who makes a device work.
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

/// What a device is.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceInfo {
    /// Who makes it work.
    pub backend: Backend,
    /// Its number among the devices of its backend.
    pub ordinal: u32,
    /// The maker's name for it.
    pub name: String,
    /// A number that no other device has, in the form `GPU-…`.
    pub uuid: String,
    /// Where it sits on the PCI buses; the simulator's devices sit nowhere.
    pub pci: Option<PciAddress>,
    /// The NUMA node that it is attached to, where the machine says.
    pub numa_node: Option<u32>,
    /// Bytes of device memory in all.
    pub total_memory: u64,
}

impl DeviceInfo {
    /// The short name that commands take: `cuda:0`, `sim:1`.
    pub fn label(&self) -> String {
        format!("{}:{}", self.backend, self.ordinal)
    }
}

/// How much of a device's memory is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryUsage {
    /// Bytes that can still be allocated.
    pub free: u64,
    /// Bytes in all.
    pub total: u64,
}

/// One thing that a device can do, or the reason why it cannot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Capability {
    /// It can.
    Yes,
    /// It cannot, because of this.
    No(String),
}

impl Capability {
    /// `Yes` if `supported`, else `No` with the reason.
    pub fn when(supported: bool, reason: impl Into<String>) -> Self {
        if supported { Self::Yes } else { Self::No(reason.into()) }
    }

    /// Whether the device can.
    pub fn is_yes(&self) -> bool {
        matches!(self, Self::Yes)
    }

    /// Nothing if the device can, else an error that gives the reason.
    pub fn require(&self, what: &'static str, device: &DeviceInfo) -> Result<()> {
        match self {
            Self::Yes => Ok(()),
            Self::No(reason) => {
                Err(Error::new(Kind::Unsupported, what).on(device.label()).why(reason.clone()))
            }
        }
    }
}

/// What a device can do, with a reason for each thing that is missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Capabilities {
    /// Export memory as a dma-buf file descriptor.
    pub dmabuf_export: Capability,
    /// NICs may read and write its memory directly.
    pub gpudirect_rdma: Capability,
    /// The same for memory made by virtual memory management.
    pub gpudirect_rdma_vmm: Capability,
    /// Memory by virtual memory management ([`MemoryKind::Vmm`]).
    pub vmm: Capability,
    /// Memory from a stream-ordered pool ([`MemoryKind::Pool`]).
    pub pool: Capability,
    /// Handles that another process opens.
    pub ipc: Capability,
    /// Streams that write words and wait for words.
    pub stream_mem_ops: Capability,
    /// Waiting until not all of certain bits are clear ([`Condition::Nor`](super::Condition::Nor)).
    pub stream_wait_nor: Capability,
    /// Flushing writes that a NIC made, from a stream.
    pub flush_remote_writes: Capability,
    /// Capturing stream work into a graph and replaying it.
    pub graphs: Capability,
    /// Telling users of memory that it moves or goes ([`Allocation::watch`]).
    pub notify: Capability,
}

impl Capabilities {
    /// Every capability with its name, in the order in which they are declared.
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
            ("move and free notices", &self.notify),
        ]
    }
}

/// A GPU, real or simulated. Clones are the same device.
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
    /// A device made by a backend.
    pub fn from_backend(backend: Arc<dyn DeviceBackend>) -> Self {
        Self { backend }
    }

    /// What the device is.
    pub fn info(&self) -> &DeviceInfo {
        self.backend.info()
    }

    /// What it can do, and why not what it cannot.
    pub fn capabilities(&self) -> &Capabilities {
        self.backend.capabilities()
    }

    /// How much of its memory is in use now.
    pub fn memory_usage(&self) -> Result<MemoryUsage> {
        self.backend.memory_usage()
    }

    /// Allocates `len` bytes of device memory, of the plain kind.
    pub fn alloc(&self, len: u64) -> Result<Allocation> {
        self.alloc_kind(len, MemoryKind::Plain)
    }

    /// Allocates `len` bytes of host memory that is pinned and that the device reaches by address.
    pub fn alloc_pinned(&self, len: u64) -> Result<Allocation> {
        self.alloc_kind(len, MemoryKind::Pinned)
    }

    /// Allocates `len` bytes of the given kind. The contents are undefined.
    pub fn alloc_kind(&self, len: u64, kind: MemoryKind) -> Result<Allocation> {
        self.check_len(len, kind)?;
        let memory = self.backend.clone().allocate(len, kind)?;
        Ok(Allocation::new(self.clone(), memory))
    }

    /// Uses `len` bytes at `address` that another library allocated on this device.
    ///
    /// The range may begin and end anywhere inside that library's allocations; that it is device memory of
    /// this device is checked. Dropping the borrow frees nothing.
    ///
    /// # Safety
    /// The owner keeps the memory allocated while the borrow, its clones and regions, and work that uses
    /// them exist: CUDA takes an address that it does not know any more for ordinary host memory.
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

    /// Lets streams and kernels of this device reach memory that another library mapped for the CPU: queues in host
    /// memory, or, with `io`, registers of a PCIe device such as a NIC's doorbell page. Streams write the latter; nobody
    /// reads it.
    ///
    /// # Errors
    /// As the driver has it; for registers with what it takes to be allowed.
    ///
    /// # Safety
    /// The range is mapped, and stays so as long as `owner` lives, which the memory, its regions, and work that uses them
    /// keep. Nobody forms references to it. Writing to registers does what that device does.
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
                format!("register {len} bytes of the host"),
            )
            .on(self.label())
            .why("the range is empty or passes the end of the address space"));
        }
        let memory = self.backend.clone().register_host(base, len, io, owner)?;
        Ok(Allocation::new(self.clone(), memory))
    }

    /// Opens memory that another process exported with [`Allocation::export_ipc`].
    pub fn open_ipc(&self, handle: &IpcHandle) -> Result<Allocation> {
        let memory = self.backend.clone().open_ipc(handle)?;
        Ok(Allocation::new(self.clone(), memory))
    }

    /// A new stream: work put on it runs in order, beside the work of other streams.
    pub fn stream(&self) -> Result<Stream> {
        let backend = self.backend.clone().create_stream()?;
        Ok(Stream::new(self.clone(), backend))
    }

    /// A new event, to mark a point in a stream.
    pub fn event(&self) -> Result<Event> {
        Ok(Event::new(self.clone(), self.backend.clone().create_event()?))
    }

    /// Loads a program's kernels onto the device.
    ///
    /// CUDA loads code only while no stream is at work: this waits a few seconds for that, then says
    /// `Busy`. Load programs before starting work that waits, or kernels that do not end.
    pub fn load(&self, program: &Program) -> Result<Module> {
        let backend = self.backend.clone().load(program)?;
        Ok(Module::new(self.clone(), program.name().to_string(), backend))
    }

    /// Lets go of what finished operations still hold.
    pub(super) fn reclaim(&self) {
        self.backend.reclaim();
    }

    /// The short name that commands take: `cuda:0`, `sim:1`.
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
            let why = "the length is more than any address space holds";
            return failure(Kind::InvalidArgument, why.into());
        }
        if kind != MemoryKind::Pinned && len > total {
            let why = format!("the device has {} in all", units::bytes(total));
            return failure(Kind::OutOfMemory, why)
                .map_err(|e| e.fix("ask for less, or use a larger GPU"));
        }
        Ok(())
    }
}

impl PartialEq for Device {
    /// Whether the two are the same device.
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
