//! Memory that can be registered, and the ways to it.

use std::fmt;
use std::sync::Arc;

use super::host::HostRange;
use crate::mem::{Agent, Region, WindowPath};

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
    Host(HostRange),
    Device { region: Region, how: How },
}

/// What a registration of device memory may use.
#[derive(Clone, Default)]
pub(super) struct How {
    pub(super) no_window: bool,
    pub(super) agent: Option<Arc<Agent>>,
}

impl How {
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let same_agent = match (&self.agent, &other.agent) {
            (Some(mine), Some(theirs)) => Arc::ptr_eq(mine, theirs),
            (mine, theirs) => mine.is_none() && theirs.is_none(),
        };
        self.no_window == other.no_window && same_agent
    }
}

impl Memory {
    pub(super) fn host(range: HostRange) -> Self {
        Self { what: What::Host(range) }
    }

    /// The same memory, without a CPU window: everything goes by the copy engine.
    #[must_use]
    pub fn without_window(mut self) -> Self {
        if let What::Device { how, .. } = &mut self.what {
            how.no_window = true;
        }
        self
    }

    /// The same memory, with a copy agent of its device for the sizes at which that is the fastest.
    #[must_use]
    pub fn with_agent(mut self, agent: Arc<Agent>) -> Self {
        if let What::Device { how, .. } = &mut self.what {
            how.agent = Some(agent);
        }
        self
    }

    /// How many bytes.
    pub fn len(&self) -> u64 {
        match &self.what {
            What::Host(range) => range.len(),
            What::Device { region, .. } => region.len(),
        }
    }

    /// Whether there is no byte; such memory cannot be registered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it lies: an address of this process or of the device.
    pub fn address(&self) -> u64 {
        match &self.what {
            What::Host(range) => range.address(),
            What::Device { region, .. } => region.address().raw(),
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
    /// Through a CPU window of this kind; what is large goes by the copy engine.
    Window(WindowPath),
    /// By the copy engine.
    Engine,
    /// By the copy engine, and through pinned memory where that is faster.
    Staged,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.pad("host memory"),
            Self::Window(path) => write!(f, "window ({path})"),
            Self::Engine => f.pad("copy engine"),
            Self::Staged => f.pad("staged"),
        }
    }
}
