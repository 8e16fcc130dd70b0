//! A registration: what a key stands for, and the handle that its owner has.

use std::fmt;
use std::sync::Arc;

use super::access::Access;
use super::client::{Acquired, Persistence, ReleaseReason};
use super::custom_memory::CustomMemory;
use super::device::DeviceMemory;
use super::host::HostRange;
use super::invalidation::InvalidationLink;
use super::memory::{AccessPath, PathSource};
use super::on_demand::OdpStats;
use super::registry::{PdId, Registry, SoftPd};
use crate::error::{Error, Kind, Result};
use crate::mem::{PinGuard, Region};

/// What a key stands for.
pub(super) struct Registration {
    pub(super) pd: PdId,
    pub(super) access: Access,
    pub(super) iova: u64,
    pub(super) len: u64,
    /// Goes before the pages that it leads to.
    pub(super) target: Target,
    pub(super) acquired: Option<Acquired>,
    /// Keeps the memory where it is.
    pub(super) _pin: Option<PinGuard>,
    /// The domain lives as long as its registrations.
    pub(super) _pd: SoftPd,
}

impl Registration {
    pub(super) fn pd(&self) -> PdId {
        self.pd
    }

    pub(super) fn access(&self) -> Access {
        self.access
    }

    /// Its first address, and its length.
    pub(super) fn range(&self) -> (u64, u64) {
        (self.iova, self.len)
    }

    /// Ends it, and says to the pages' owner why.
    pub(super) fn end(mut self, why: ReleaseReason) {
        if let Some(acquired) = &mut self.acquired {
            acquired.set_reason(why);
        }
    }
}

/// Where the memory is.
pub(super) enum Target {
    Host(HostRange),
    Device { memory: Arc<DeviceMemory>, region: Region },
    Custom { custom_memory: Arc<dyn CustomMemory>, address: u64 },
}

/// How an importer stands with the exporter of a dma-buf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachMode {
    /// The memory stays where it is while it is registered: its exporter may not move it.
    Static,
    /// The exporter may move it: access stops, and the new place is found when it is next needed.
    Dynamic,
}

/// How memory was named when it was registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegisteredBy {
    /// By a handle that keeps it alive.
    Handle,
    /// By its address, which this client knew.
    Address {
        /// The client's name.
        client: String,
        /// Whether it tells when memory goes.
        persistence: Persistence,
        /// In which units it pins.
        page_size: u64,
    },
    /// By a file descriptor.
    DmaBuf(AttachMode),
}

impl fmt::Display for RegisteredBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Handle => f.pad("handle"),
            Self::Address { client, .. } => write!(f, "address ({client})"),
            Self::DmaBuf(AttachMode::Static) => f.pad("dma-buf (pinned)"),
            Self::DmaBuf(AttachMode::Dynamic) => f.pad("dma-buf (may move)"),
        }
    }
}

/// A memory registration. Dropping it ends it.
///
/// ```
/// use warpwire::mem::sim::{Sim, SimConfig};
/// use warpwire::mr::{Access, MemorySource, AccessPath, Registry};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let registry = Registry::new();
/// let memory = gpu.alloc(1 << 20).unwrap();
/// let direct = registry.register(&registry.pd(), memory.whole().unwrap(), None, Access::ALL).unwrap();
/// assert!(matches!(direct.path(), AccessPath::Window(_)));
/// let slow = MemorySource::from(memory.whole().unwrap()).without_window();
/// let slow = registry.register(&registry.pd(), slow, None, Access::ALL).unwrap();
/// assert_eq!(slow.path(), AccessPath::Engine);
/// assert_eq!(slow.why(), ["no window: it was registered without one"]);
/// ```
pub struct SoftMr {
    pub(super) registry: Registry,
    pub(super) key: u32,
    pub(super) pd: SoftPd,
    pub(super) iova: u64,
    pub(super) len: u64,
    pub(super) access: Access,
    pub(super) reached: PathSource,
    pub(super) registered_by: RegisteredBy,
    /// What is worth saying beside the path's own reasons.
    pub(super) notes: Vec<String>,
    pub(super) invalidation: Option<Arc<InvalidationLink>>,
}

impl SoftMr {
    /// The key for this side's work requests.
    pub fn lkey(&self) -> u32 {
        self.key
    }

    /// The key for peers; the same one.
    pub fn rkey(&self) -> u32 {
        self.key
    }

    /// Its protection domain.
    pub fn pd(&self) -> &SoftPd {
        &self.pd
    }

    /// The address of its first byte, in work requests.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// How many bytes.
    #[allow(clippy::len_without_is_empty)] // no registration is empty
    pub fn len(&self) -> u64 {
        self.len
    }

    /// What may be done with it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// How the memory was named.
    pub fn registered_by(&self) -> &RegisteredBy {
        &self.registered_by
    }

    /// The peer-memory client whose memory it is, if it was registered by its address.
    pub fn client(&self) -> Option<&str> {
        match &self.registered_by {
            RegisteredBy::Address { client, .. } => Some(client),
            RegisteredBy::Handle | RegisteredBy::DmaBuf(_) => None,
        }
    }

    /// How the memory is reached. Memory that is found on demand is found now.
    pub fn path(&self) -> AccessPath {
        self.reached.path().0
    }

    /// Why it is not reached in better ways, and what is not as it should be; empty where all is well.
    pub fn why(&self) -> Vec<String> {
        let mut why = self.reached.path().1;
        why.extend(self.notes.iter().cloned());
        why
    }

    /// The device's last failure, after a [`AccessDenied::Failed`](super::Denied::Failed).
    pub fn failure(&self) -> Option<Error> {
        match &self.reached {
            PathSource::Device(memory) => memory.failure(),
            _ => None,
        }
    }

    /// How often its memory had to be found, if it is found on demand or may move.
    pub fn faults(&self) -> OdpStats {
        match &self.reached {
            PathSource::Device(memory) => memory.faults(),
            PathSource::OnDemand(memory) => memory.faults(),
            PathSource::Fixed(_) => OdpStats::default(),
        }
    }

    /// Finds `len` bytes, `offset` into it, before they are needed, and waits until they are there.
    ///
    /// It does something for memory that is found on demand, and nothing for other.
    pub fn prefetch(&self, offset: u64, len: u64) -> Result<()> {
        self.check_inside(offset, len)?;
        match &self.reached {
            PathSource::Device(memory) => memory.prefetch(),
            PathSource::OnDemand(memory) => memory.prefetch(offset, len),
            PathSource::Fixed(_) => Ok(()),
        }
    }

    /// As [`prefetch`](Self::prefetch), without waiting, and without a word when it fails.
    pub fn prefetch_later(&self, offset: u64, len: u64) -> Result<()> {
        self.check_inside(offset, len)?;
        match &self.reached {
            PathSource::Device(memory) => memory.prefetch_later(),
            PathSource::OnDemand(memory) => memory.prefetch_later(offset, len),
            PathSource::Fixed(_) => {}
        }
        Ok(())
    }

    fn check_inside(&self, offset: u64, len: u64) -> Result<()> {
        if len > 0 && offset.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        let what = format!("prefetch {len} bytes at offset {offset}");
        let why = format!("the registration has {} bytes", self.len);
        Err(Error::new(Kind::OutOfRange, what).why(why))
    }

    /// Whether the memory is still there for the key: not after it was freed under its registration.
    pub fn is_live(&self) -> bool {
        let there = match &self.reached {
            PathSource::Device(memory) => memory.check(0, 0) != Err(super::AccessDenied::Gone),
            PathSource::OnDemand(_) | PathSource::Fixed(_) => true,
        };
        there && self.registry.is_live(self.key)
    }

    /// Ends the registration. When it returns, nobody uses the memory through it, and the key is dead.
    ///
    /// It waits for copies under way. A thread that holds a [`Span`](super::Span) of it would wait for itself.
    pub fn deregister(self) {}
}

impl Drop for SoftMr {
    fn drop(&mut self) {
        // First: a client that takes its memory back from now on has nothing to do, and never finds the key in
        // other hands.
        if let Some(invalidation) = &self.invalidation {
            invalidation.end();
        }
        self.registry.end(self.key);
    }
}

impl fmt::Debug for SoftMr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (key, len, iova) = (self.key, self.len, self.iova);
        write!(f, "Mr({key:#x}, {len} bytes at {iova:#x}, {}, {})", self.access, self.path())
    }
}
