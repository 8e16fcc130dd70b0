//! Memory that can be registered, and the ways to it.

use std::fmt;
use std::sync::Arc;

use super::access::Access;
use super::device::DeviceMemory;
use super::host::HostRange;
use super::on_demand::{Conclusions, OnDemand};
use super::reach::Reach;
use crate::error::{Error, Kind, Result};
use crate::mem::copy::Staging;
use crate::mem::{Agent, Region, WindowPath};
use crate::units;

/// Memory to register: our own host memory, a caller's range, or memory of a device.
///
/// It is made from a [`HostMemory`](super::HostMemory), from a [`Region`] of device or pinned memory, or by
/// [`Memory::raw`]. Device pointers of other libraries become a region by
/// [`Device::borrow`](crate::mem::Device::borrow).
///
/// ```
/// use warpwire::mem::sim::{Sim, SimConfig};
/// use warpwire::mr::{HostMemory, Memory};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let on_device = Memory::from(gpu.alloc(4096).unwrap().region(1024, 512).unwrap());
/// assert_eq!(on_device.len(), 512);
/// let on_host = Memory::from(HostMemory::new(4096).unwrap());
/// assert_eq!(on_host.len(), 4096);
/// ```
pub struct Memory {
    pub(super) what: What,
}

pub(super) enum What {
    Host {
        range: HostRange,
        path: Path,
    },
    Device {
        region: Region,
        how: How,
    },
    OnDemand(Arc<OnDemand>),
    /// Memory that its owner copies, and where it begins.
    Reached {
        reach: Arc<dyn Reach>,
        address: u64,
        len: u64,
    },
}

/// How the memory of a registration is reached, for those who ask.
pub(super) enum Reached {
    Fixed(Path),
    Device(Arc<DeviceMemory>),
    OnDemand(Arc<OnDemand>),
}

impl Reached {
    /// The path, and why there is no better one.
    pub(super) fn path(&self) -> (Path, Vec<String>) {
        match self {
            Self::Fixed(path) => (*path, Vec::new()),
            Self::Device(memory) => memory.path(),
            Self::OnDemand(_) => (Path::OnDemand, Vec::new()),
        }
    }
}

/// What a registration of device memory may use.
#[derive(Clone, Default)]
pub(super) struct How {
    pub(super) no_window: bool,
    /// Goes through pinned memory; what has no window does so anyhow.
    pub(super) staged: bool,
    /// The way is found when it is first needed, and again after each move.
    pub(super) on_demand: bool,
    pub(super) agent: Option<Arc<Agent>>,
    /// The parts of what goes through pinned memory, where they were set.
    pub(super) staging: Option<Staging>,
}

impl How {
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let same_agent = match (&self.agent, &other.agent) {
            (Some(mine), Some(theirs)) => Arc::ptr_eq(mine, theirs),
            (mine, theirs) => mine.is_none() && theirs.is_none(),
        };
        let flags = |how: &Self| (how.no_window, how.staged, how.on_demand, how.staging);
        flags(self) == flags(other) && same_agent
    }
}

impl Memory {
    pub(super) fn host(range: HostRange) -> Self {
        Self { what: What::Host { range, path: Path::Host } }
    }

    /// Host memory that came by a file descriptor.
    pub(super) fn mapped(range: HostRange) -> Self {
        Self { what: What::Host { range, path: Path::DmaBuf } }
    }

    /// `len` bytes at `address` that `reach` copies: for [peer-memory clients](super::PeerClient) whose memory is
    /// neither host memory nor a device's.
    pub fn reached_by(reach: Arc<dyn Reach>, address: u64, len: u64) -> Self {
        Self { what: What::Reached { reach, address, len } }
    }

    /// A part of it, where it is made of host or device memory.
    pub fn part(self, offset: u64, len: u64) -> Result<Self> {
        let whole = self.len();
        let what = || format!("use {} at offset {offset}", units::bytes(len));
        if len == 0 || offset.checked_add(len).is_none_or(|end| end > whole) {
            let why = format!("the memory has {whole} bytes");
            return Err(Error::new(Kind::OutOfRange, what()).why(why));
        }
        let what = match self.what {
            What::Host { range, path } => What::Host { range: range.part(offset, len), path },
            What::Device { region, how } => {
                let region = region.allocation().region(region.offset() + offset, len)?;
                What::Device { region, how }
            }
            What::OnDemand(_) | What::Reached { .. } => {
                return Err(Error::new(Kind::Unsupported, what()).why("only its owner divides it"));
            }
        };
        Ok(Self { what })
    }

    /// The same memory, found when it is needed. Memory that cannot go away stays as it is, and `notes` says so.
    pub(super) fn on_demand(
        mut self,
        access: Access,
        conclusions: &Arc<Conclusions>,
        notes: &mut Vec<String>,
    ) -> Result<Self> {
        let refused = |why: &'static str, fix: &'static str| {
            Err(Error::new(Kind::Unsupported, "register memory on demand").why(why).fix(fix))
        };
        match &mut self.what {
            What::Device { how, .. } => how.on_demand = true,
            What::Host { range, .. } if range.is_held() => {
                notes.push(
                    "always there: its handle keeps it, so nothing is found on demand".into(),
                );
            }
            What::Host { .. } if access.contains(Access::REMOTE_ATOMIC) => {
                return refused(
                    "the kernel copies such memory, and has no atomic operations for that",
                    "leave out remote-atomic, or register the memory without on-demand",
                );
            }
            What::Host { range, .. } => {
                OnDemand::available()?;
                let writes = access.contains(Access::LOCAL_WRITE);
                self.what = What::OnDemand(OnDemand::new(range.clone(), writes, conclusions));
            }
            What::OnDemand(_) => {}
            What::Reached { .. } => {
                return refused("its owner alone finds it", "leave out on-demand");
            }
        }
        Ok(self)
    }

    /// The same memory, without a CPU window: everything goes by the copy engine.
    #[must_use]
    pub fn without_window(mut self) -> Self {
        if let What::Device { how, .. } = &mut self.what {
            how.no_window = true;
        }
        self
    }

    /// The same memory, without a CPU window: everything goes through pinned memory, a part at a time, with the copy
    /// engine working beside the CPU. It is the way of memory for which there is no other.
    #[must_use]
    pub fn staged(mut self) -> Self {
        if let What::Device { how, .. } = &mut self.what {
            (how.no_window, how.staged) = (true, true);
        }
        self
    }

    /// The same as [`staged`](Self::staged), in parts of these sizes: see [`Staging::check`].
    #[must_use]
    pub fn staged_by(self, staging: Staging) -> Self {
        let mut memory = self.staged();
        if let What::Device { how, .. } = &mut memory.what {
            how.staging = Some(staging);
        }
        memory
    }

    /// The same memory, with a copy agent of its device for the sizes at which that is the fastest.
    #[must_use]
    pub fn with_agent(mut self, agent: Arc<Agent>) -> Self {
        if let What::Device { how, .. } = &mut self.what {
            how.agent = Some(agent);
        }
        self
    }

    /// The part of a device's memory that it is, if it is that.
    pub(crate) fn device_region(&self) -> Option<&Region> {
        match &self.what {
            What::Device { region, .. } => Some(region),
            _ => None,
        }
    }

    /// Whether it is to be used without a window.
    pub(crate) fn is_without_window(&self) -> bool {
        matches!(&self.what, What::Device { how, .. } if how.no_window)
    }

    /// Whether it is to go through pinned memory.
    pub(crate) fn is_staged(&self) -> bool {
        matches!(&self.what, What::Device { how, .. } if how.staged)
    }

    /// Whether it is memory of this process, at its address.
    pub(crate) fn is_host(&self) -> bool {
        matches!(&self.what, What::Host { .. } | What::OnDemand(_))
    }

    /// How many bytes.
    pub fn len(&self) -> u64 {
        match &self.what {
            What::Host { range, .. } => range.len(),
            What::Device { region, .. } => region.len(),
            What::OnDemand(memory) => memory.len(),
            What::Reached { len, .. } => *len,
        }
    }

    /// Whether there is no byte; such memory cannot be registered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it lies: an address of this process or of the device.
    pub fn address(&self) -> u64 {
        match &self.what {
            What::Host { range, .. } => range.address(),
            What::Device { region, .. } => region.address().raw(),
            What::OnDemand(memory) => memory.address(),
            What::Reached { address, .. } => *address,
        }
    }
}

impl From<Region> for Memory {
    fn from(region: Region) -> Self {
        match HostRange::pinned(&region) {
            Some(range) => Self::host(range),
            None => Self { what: What::Device { region, how: How::default() } },
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes at {:#x})", self.len(), self.address())
    }
}

/// How registered memory is reached.
///
/// ```
/// use warpwire::mr::{Access, HostMemory, Path, Registry};
/// let registry = Registry::new();
/// let memory = HostMemory::new(4096).unwrap();
/// let mr = registry.register(&registry.pd(), memory, None, Access::NONE).unwrap();
/// assert_eq!(mr.path(), Path::Host);
/// assert_eq!(mr.path().to_string(), "host memory");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// It is the host's own memory.
    Host,
    /// Host memory by its address, looked up by the kernel at each use.
    OnDemand,
    /// Pages of a dma-buf, or of another file of memory, that are mapped here.
    DmaBuf,
    /// In its client's own way.
    PeerMemory,
    /// Through a CPU window of this kind; what is large goes by the copy engine.
    Window(WindowPath),
    /// By the copy engine.
    Engine,
    /// Through pinned memory, with the copy engine working beside the CPU.
    Staged,
}

impl fmt::Display for Path {
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
