//! Memory that can be registered, and the paths by which it is accessed.

use std::fmt;
use std::sync::Arc;

use super::Access;
use super::custom_memory::CustomMemory;
use super::device::DeviceMemory;
use super::host::HostRange;
use super::on_demand::{FaultEpoch, OnDemand};
use crate::error::{Error, Kind, Result};
use crate::mem::copy::StagingOptions;
use crate::mem::{CopyAgent, Region, WindowPath};
use crate::units;

/// Memory to register: memfd-backed host memory, a caller's range, or memory of a device.
///
/// Created from a [`HostMemory`](super::HostMemory), from a [`Region`] of device or pinned memory,
/// or by [`MemorySource::raw`]. For device pointers of other libraries,
/// [`Device::borrow`](crate::mem::Device::borrow) creates a region.
///
/// ```
/// use warpwire::mem::sim::{Sim, SimConfig};
/// use warpwire::mr::{HostMemory, MemorySource};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let on_device = MemorySource::from(gpu.alloc(4096).unwrap().region(1024, 512).unwrap());
/// assert_eq!(on_device.len(), 512);
/// let on_host = MemorySource::from(HostMemory::new(4096).unwrap());
/// assert_eq!(on_host.len(), 4096);
/// ```
#[derive(Clone)]
pub struct MemorySource {
    pub(super) what: SourceKind,
}

#[derive(Clone)]
pub(super) enum SourceKind {
    Host {
        range: HostRange,
        path: AccessPath,
    },
    Device {
        region: Region,
        device_access: DeviceAccess,
    },
    OnDemand(Arc<OnDemand>),
    /// Memory that its provider copies.
    Custom {
        custom_memory: Arc<dyn CustomMemory>,
        address: u64,
        len: u64,
    },
}

/// Where a registration's [`AccessPath`] is obtained from.
pub(super) enum PathSource {
    Fixed(AccessPath),
    Device(Arc<DeviceMemory>),
    OnDemand(Arc<OnDemand>),
}

impl PathSource {
    /// The path, and why there is no better one.
    pub(super) fn path(&self) -> (AccessPath, Vec<String>) {
        match self {
            Self::Fixed(path) => (*path, Vec::new()),
            Self::Device(memory) => memory.path(),
            Self::OnDemand(_) => (AccessPath::OnDemand, Vec::new()),
        }
    }
}

/// Access options of a registration of device memory.
#[derive(Clone, Default)]
pub(super) struct DeviceAccess {
    pub(super) no_window: bool,
    /// Copies go through pinned memory. Memory for which no window can be opened does so anyway.
    pub(super) staged: bool,
    /// No driver call on the data path; needs a window.
    pub(super) window_only: bool,
    /// The memory is mapped at first use, and again after each move.
    pub(super) on_demand: bool,
    pub(super) agent: Option<Arc<CopyAgent>>,
    /// Buffer sizes for staging; `None` for the default.
    pub(super) staging: Option<StagingOptions>,
}

impl DeviceAccess {
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let same_agent = match (&self.agent, &other.agent) {
            (Some(mine), Some(theirs)) => Arc::ptr_eq(mine, theirs),
            (mine, theirs) => mine.is_none() && theirs.is_none(),
        };
        let flags = |device_access: &Self| {
            (
                device_access.no_window,
                device_access.staged,
                device_access.window_only,
                device_access.on_demand,
                device_access.staging,
            )
        };
        flags(self) == flags(other) && same_agent
    }
}

impl MemorySource {
    pub(super) fn host(range: HostRange) -> Self {
        Self { what: SourceKind::Host { range, path: AccessPath::Host } }
    }

    /// Host memory that was mapped from a file descriptor.
    pub(super) fn mapped(range: HostRange) -> Self {
        Self { what: SourceKind::Host { range, path: AccessPath::DmaBuf } }
    }

    /// `len` bytes at `address` that are accessed through `custom_memory`: for
    /// [peer-memory clients](super::PeerClient) whose memory is neither host memory nor a known
    /// device's.
    pub fn custom(custom_memory: Arc<dyn CustomMemory>, address: u64, len: u64) -> Self {
        Self { what: SourceKind::Custom { custom_memory, address, len } }
    }

    /// The subrange of `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] if it is empty or out of bounds; [`Kind::Unsupported`] if the memory is
    /// neither host nor device memory.
    pub fn slice(self, offset: u64, len: u64) -> Result<Self> {
        let whole = self.len();
        let what = || format!("use {} at offset {offset}", units::bytes(len));
        if len == 0 || offset.checked_add(len).is_none_or(|end| end > whole) {
            let why = format!("the memory has {whole} bytes");
            return Err(Error::new(Kind::OutOfRange, what()).why(why));
        }
        let what = match self.what {
            SourceKind::Host { range, path } => {
                SourceKind::Host { range: range.slice(offset, len), path }
            }
            SourceKind::Device { region, device_access } => {
                let region = region.allocation().region(region.offset() + offset, len)?;
                SourceKind::Device { region, device_access }
            }
            SourceKind::OnDemand(_) | SourceKind::Custom { .. } => {
                let why = "custom memory cannot be sliced";
                return Err(Error::new(Kind::Unsupported, what()).why(why));
            }
        };
        Ok(Self { what })
    }

    /// The same memory, paged on demand. Memory that cannot be unmapped is left as it is, with a
    /// remark in `notes`.
    pub(super) fn on_demand(
        mut self,
        access: Access,
        fault_epoch: &Arc<FaultEpoch>,
        notes: &mut Vec<String>,
    ) -> Result<Self> {
        let refused = |why: &'static str, fix: &'static str| {
            Err(Error::new(Kind::Unsupported, "register memory on demand").why(why).fix(fix))
        };
        match &mut self.what {
            SourceKind::Device { device_access, .. } => device_access.on_demand = true,
            SourceKind::Host { range, .. } if range.is_owned() => {
                notes.push(
                    "always resident: its handle keeps it mapped, so on-demand is off".into(),
                );
            }
            SourceKind::Host { .. } if access.contains(Access::REMOTE_ATOMIC) => {
                return refused(
                    "the kernel copies such memory, and has no atomic operation for that",
                    "leave out remote-atomic, or register the memory without on-demand",
                );
            }
            SourceKind::Host { range, .. } => {
                OnDemand::available()?;
                let writes = access.contains(Access::LOCAL_WRITE);
                self.what = SourceKind::OnDemand(OnDemand::new(range.clone(), writes, fault_epoch));
            }
            SourceKind::OnDemand(_) => {}
            SourceKind::Custom { .. } => {
                return refused("custom memory is not paged on demand", "leave out on-demand");
            }
        }
        Ok(self)
    }

    /// The same memory, without a CPU window: all copies use the copy engine.
    #[must_use]
    pub fn without_window(mut self) -> Self {
        if let SourceKind::Device { device_access, .. } = &mut self.what {
            (device_access.no_window, device_access.window_only) = (true, false);
        }
        self
    }

    /// The same memory, accessed through a CPU window only, whatever the size: no access makes a
    /// driver call or waits for the device, so a thread that a kernel waits for may make it.
    /// Registration fails if there is no window. Where frees are not reported, the owner must
    /// deregister the memory before it frees it: they are not looked for, which is a driver call.
    /// Loads through a window are slow (on an H200 0.9 GB/s by one thread); stores are not. No
    /// effect on host memory or on RDMA devices.
    ///
    /// ```
    /// use warpwire::mem::sim::{Sim, SimConfig};
    /// use warpwire::mr::{Access, AccessPath, MemorySource, Registry};
    /// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
    /// let memory = MemorySource::from(gpu.alloc(1 << 20).unwrap().whole().unwrap());
    /// let registry = Registry::new();
    /// let (pd, memory) = (registry.pd(), memory.window_only());
    /// let mr = registry.register(&pd, memory, None, Access::ALL).unwrap();
    /// assert!(matches!(mr.path(), AccessPath::Window(_)));
    /// ```
    #[must_use]
    pub fn window_only(mut self) -> Self {
        if let SourceKind::Device { device_access, .. } = &mut self.what {
            (device_access.no_window, device_access.staged) = (false, false);
            (device_access.window_only, device_access.agent) = (true, None);
        }
        self
    }

    /// The same memory, without a CPU window: copies go through pinned memory, pipelined with the
    /// copy engine. This is the fallback for memory without a window.
    #[must_use]
    pub fn staged(mut self) -> Self {
        if let SourceKind::Device { device_access, .. } = &mut self.what {
            (device_access.no_window, device_access.staged) = (true, true);
            device_access.window_only = false;
        }
        self
    }

    /// As [`staged`](Self::staged), with these buffer sizes: see [`StagingOptions::check`].
    #[must_use]
    pub fn with_staging(self, staging: StagingOptions) -> Self {
        let mut memory = self.staged();
        if let SourceKind::Device { device_access, .. } = &mut memory.what {
            device_access.staging = Some(staging);
        }
        memory
    }

    /// The same memory, with a copy agent of its device for the sizes at which it is fastest.
    #[must_use]
    pub fn with_agent(mut self, agent: Arc<CopyAgent>) -> Self {
        if let SourceKind::Device { device_access, .. } = &mut self.what {
            (device_access.agent, device_access.window_only) = (Some(agent), false);
        }
        self
    }

    /// The region, if this is device memory.
    pub(crate) fn device_region(&self) -> Option<&Region> {
        match &self.what {
            SourceKind::Device { region, .. } => Some(region),
            _ => None,
        }
    }

    /// Whether [`without_window`](Self::without_window) or [`staged`](Self::staged) was called.
    pub(crate) fn is_without_window(&self) -> bool {
        matches!(&self.what, SourceKind::Device { device_access, .. } if device_access.no_window)
    }

    /// Whether [`staged`](Self::staged) was called.
    pub(crate) fn is_staged(&self) -> bool {
        matches!(&self.what, SourceKind::Device { device_access, .. } if device_access.staged)
    }

    /// Whether this is memory in this process's address space.
    pub(crate) fn is_host(&self) -> bool {
        matches!(&self.what, SourceKind::Host { .. } | SourceKind::OnDemand(_))
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        match &self.what {
            SourceKind::Host { range, .. } => range.len(),
            SourceKind::Device { region, .. } => region.len(),
            SourceKind::OnDemand(memory) => memory.len(),
            SourceKind::Custom { len, .. } => *len,
        }
    }

    /// Whether the length is zero; such memory cannot be registered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first address, in this process or on the device.
    pub fn address(&self) -> u64 {
        match &self.what {
            SourceKind::Host { range, .. } => range.address(),
            SourceKind::Device { region, .. } => region.address().raw(),
            SourceKind::OnDemand(memory) => memory.address(),
            SourceKind::Custom { address, .. } => *address,
        }
    }
}

impl From<Region> for MemorySource {
    fn from(region: Region) -> Self {
        match HostRange::pinned(&region) {
            Some(range) => Self::host(range),
            None => {
                Self { what: SourceKind::Device { region, device_access: DeviceAccess::default() } }
            }
        }
    }
}

impl fmt::Debug for MemorySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemorySource({} bytes at {:#x})", self.len(), self.address())
    }
}

/// How registered memory is accessed.
///
/// ```
/// use warpwire::mr::{Access, HostMemory, AccessPath, Registry};
/// let registry = Registry::new();
/// let memory = HostMemory::new(4096).unwrap();
/// let mr = registry.register(&registry.pd(), memory, None, Access::NONE).unwrap();
/// assert_eq!(mr.path(), AccessPath::Host);
/// assert_eq!(mr.path().to_string(), "host memory");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AccessPath {
    /// Host memory, accessed directly.
    Host,
    /// Host memory that the kernel copies, looking up its pages at each use.
    OnDemand,
    /// A dma-buf or memfd that is mapped in this process.
    DmaBuf,
    /// Through the callbacks of a peer-memory client.
    PeerMemory,
    /// Through a CPU window of this kind; large copies use the copy engine.
    Window(WindowPath),
    /// With the copy engine.
    Engine,
    /// Through pinned memory, pipelined with the copy engine.
    Staged,
}

impl fmt::Display for AccessPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.pad("host memory"),
            Self::OnDemand => f.pad("host memory on demand"),
            Self::DmaBuf => f.pad("mapped dma-buf"),
            Self::PeerMemory => f.pad("peer memory"),
            Self::Window(path) => write!(f, "window ({path})"),
            Self::Engine => f.pad("copy engine"),
            Self::Staged => f.pad("staged"),
        }
    }
}
