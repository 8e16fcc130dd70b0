//! Memory registrations: the state behind a key, and the owner's handle.

use std::fmt;
use std::sync::Arc;

use super::Access;
use super::client::{Acquired, Persistence, ReleaseReason};
use super::custom_memory::CustomMemory;
use super::denied::AccessDenied;
use super::device::DeviceMemory;
use super::host::HostRange;
use super::invalidation::InvalidationLink;
use super::memory::{AccessPath, PathSource};
use super::on_demand::OdpStats;
use super::registry::{PdId, Registry, SoftPd};
use super::window::{BoundWindows, Window};
use crate::error::{Error, Kind, Result};
use crate::mem::{PinGuard, Region};

/// The state that a key resolves to.
pub(super) struct Registration {
    pub(super) pd: PdId,
    pub(super) access: Access,
    pub(super) iova: u64,
    pub(super) len: u64,
    /// Dropped before `acquired`, which holds the pages that it refers to.
    pub(super) target: Target,
    pub(super) acquired: Option<Acquired>,
    /// Keeps the exporter from moving the memory (static dma-buf attachment).
    pub(super) _pin: Option<PinGuard>,
    pub(super) windows: BoundWindows,
    /// Keeps the protection domain alive.
    pub(super) _pd: SoftPd,
}

impl Registration {
    /// The state of a window that is not bound.
    pub(super) fn of_window(pd: &SoftPd, target: Target) -> Self {
        let (access, windows) = (Access::NONE, BoundWindows::of(Access::NONE));
        let (iova, len, acquired, _pin) = (0, 0, None, None);
        Self { pd: pd.id(), access, iova, len, target, acquired, _pin, windows, _pd: pd.clone() }
    }

    pub(super) fn pd(&self) -> PdId {
        self.pd
    }

    pub(super) fn access(&self) -> Access {
        self.access
    }

    /// The first I/O virtual address, and the length in bytes.
    pub(super) fn range(&self) -> (u64, u64) {
        (self.iova, self.len)
    }

    /// Drops the registration and releases the client's pages with this reason.
    pub(super) fn end(mut self, why: ReleaseReason) {
        if let Some(acquired) = &mut self.acquired {
            acquired.set_reason(why);
        }
    }
}

/// The memory behind a registration, by access method.
pub(super) enum Target {
    Host(HostRange),
    Device {
        memory: Arc<DeviceMemory>,
        region: Region,
    },
    Custom {
        custom_memory: Arc<dyn CustomMemory>,
        address: u64,
    },
    /// A part of another registration. No span has this target, but that one's.
    Window(Window),
}

impl Target {
    /// Whether the range can be accessed now.
    #[inline]
    pub(super) fn check(
        &self,
        offset: u64,
        len: u64,
        need: Access,
    ) -> std::result::Result<(), AccessDenied> {
        match self {
            Self::Host(_) | Self::Window(_) => Ok(()),
            Self::Device { memory, region } => memory.check(region.offset() + offset, len),
            Self::Custom { custom_memory, .. } => {
                let writes =
                    need.contains(Access::LOCAL_WRITE) || need.contains(Access::REMOTE_WRITE);
                custom_memory.check(offset, len, writes)
            }
        }
    }
}

/// How the importer of a dma-buf is attached to its exporter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachMode {
    /// Pinned: the exporter may not move the memory while it is registered.
    Static,
    /// The exporter may move the memory. Access is revoked first, and the memory is mapped again at
    /// its next use.
    Dynamic,
}

/// How memory was identified when it was registered.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegisteredBy {
    /// By a handle that keeps the memory alive.
    Handle,
    /// By its address, which a peer-memory client acquired.
    Address {
        /// The client's name.
        client: String,
        /// Whether the client reports that memory is taken back.
        persistence: Persistence,
        /// Granularity of the client's pinning, in bytes.
        page_size: u64,
    },
    /// By a file descriptor, attached in this mode.
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

/// A memory registration of the software HCA. Dropping it deregisters the memory.
///
/// ```
/// use warpwire::mem::sim::{Sim, SimConfig};
/// use warpwire::mr::{Access, MemorySource, AccessPath, Registry};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let registry = Registry::new();
/// let memory = gpu.alloc(1 << 20).unwrap();
/// let whole = memory.whole().unwrap();
/// let direct = registry.register(&registry.pd(), whole, None, Access::ALL).unwrap();
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
    /// Remarks shown with the path's own reasons by [`SoftMr::why`].
    pub(super) notes: Vec<String>,
    pub(super) invalidation: Option<Arc<InvalidationLink>>,
    pub(super) windows: BoundWindows,
    pub(super) ended: bool,
}

impl SoftMr {
    /// The local key, for work requests posted on this side.
    pub fn lkey(&self) -> u32 {
        self.key
    }

    /// The remote key, for peers. It equals the local key.
    pub fn rkey(&self) -> u32 {
        self.key
    }

    /// The protection domain that the registration belongs to.
    pub fn pd(&self) -> &SoftPd {
        &self.pd
    }

    /// The address of the first byte in work requests.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Length in bytes, never zero.
    #[allow(clippy::len_without_is_empty)] // no registration is empty
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The rights granted at registration.
    pub fn access(&self) -> Access {
        self.access
    }

    /// How many memory windows are bound to it. Windows that still are when it is deregistered
    /// become invalid.
    pub fn bound_windows(&self) -> u32 {
        self.windows.count()
    }

    /// How the memory was identified when it was registered.
    pub fn registered_by(&self) -> &RegisteredBy {
        &self.registered_by
    }

    /// The peer-memory client that owns the memory, if it was registered by address.
    pub fn client(&self) -> Option<&str> {
        match &self.registered_by {
            RegisteredBy::Address { client, .. } => Some(client),
            RegisteredBy::Handle | RegisteredBy::DmaBuf(_) => None,
        }
    }

    /// How the memory is accessed. Device memory that is mapped on demand is mapped by this call.
    pub fn path(&self) -> AccessPath {
        self.reached.path().0
    }

    /// Why no better path is used, and other remarks; empty if there are none.
    pub fn why(&self) -> Vec<String> {
        let mut why = self.reached.path().1;
        why.extend(self.notes.iter().cloned());
        why
    }

    /// Waits until everything that was written to the memory has reached its device: a PCIe round
    /// trip where there is a window. Returns at once for host memory.
    pub fn flush(&self) {
        if let PathSource::Device(memory) = &self.reached {
            memory.flush();
        }
    }

    /// The device's last error, after an [`AccessDenied::Failed`](super::AccessDenied::Failed).
    pub fn failure(&self) -> Option<Error> {
        match &self.reached {
            PathSource::Device(memory) => memory.failure(),
            _ => None,
        }
    }

    /// Page-fault counters of memory that is paged on demand or may move; zeros for other memory.
    pub fn faults(&self) -> OdpStats {
        match &self.reached {
            PathSource::Device(memory) => memory.faults(),
            PathSource::OnDemand(memory) => memory.faults(),
            PathSource::Fixed(_) => OdpStats::default(),
        }
    }

    /// Pages in `len` bytes at `offset`, and blocks until they are resident.
    ///
    /// Has an effect on memory that is paged or mapped on demand only.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] outside the registration; [`Kind::Freed`] if host pages are not mapped;
    /// the device's error if its memory cannot be mapped.
    pub fn prefetch(&self, offset: u64, len: u64) -> Result<()> {
        self.check_inside(offset, len)?;
        match &self.reached {
            PathSource::Device(memory) => memory.prefetch(),
            PathSource::OnDemand(memory) => memory.prefetch(offset, len),
            PathSource::Fixed(_) => Ok(()),
        }
    }

    /// As [`prefetch`](Self::prefetch), on the pager thread: does not block, and reports no failure
    /// other than an invalid range.
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

    /// Whether the key still resolves: `false` once the memory was freed under its registration.
    pub fn is_live(&self) -> bool {
        let there = match &self.reached {
            PathSource::Device(memory) => memory.check(0, 0) != Err(super::AccessDenied::Gone),
            PathSource::OnDemand(_) | PathSource::Fixed(_) => true,
        };
        there && self.registry.is_live(self.key)
    }

    /// Deregisters the memory. When it returns successfully, no thread or peer accesses the memory
    /// through this registration, and its key is invalid.
    ///
    /// Blocks until copies in progress have finished. Deadlocks if the calling thread holds a
    /// [`Span`](super::Span) of the registration.
    ///
    /// # Errors
    /// [`Kind::Busy`] if a peer process on this machine was stopped while it accessed the memory,
    /// and has not gone on within half a second. The key is invalid all the same, and the memory
    /// stays mapped until that access has ended; but do not reuse it, because bytes of that access
    /// may still arrive.
    pub fn deregister(mut self) -> Result<()> {
        if self.end() {
            return Ok(());
        }
        Err(Error::new(Kind::Busy, format!("deregister {} bytes", self.len))
            .why("a peer process is stopped, or does not get to run, while it accesses the memory")
            .fix("resume or end that process; do not reuse the memory before"))
    }

    /// Ends another registration, and gives its key to this one: see
    /// [`verbs::Mr::take_key`](crate::verbs::Mr::take_key).
    pub(crate) fn take_key(&mut self, mut of: Self) -> Result<()> {
        let refused = |kind, why: &'static str| Err(Error::new(kind, "take over a key").why(why));
        if !self.registry.is_same(&of.registry) {
            return refused(Kind::InvalidArgument, "it is one of another device");
        }
        of.ended = true;
        if let Some(invalidation) = &of.invalidation {
            invalidation.end();
        }
        if !of.registry.end_keeping_key(of.key) {
            return refused(Kind::Busy, "a peer process that does not run accesses its memory");
        }
        let rekey = || self.registry.rekey(self.key, of.key);
        let moved = match &self.invalidation {
            None => Some(rekey()),
            Some(invalidation) => invalidation.rebind(rekey),
        };
        match moved {
            Some(key) => self.key = key,
            None => self.registry.release_key(of.key), // this one has been revoked
        }
        Ok(())
    }

    /// Ends the registration once; `false` if a peer may still access the memory.
    fn end(&mut self) -> bool {
        if std::mem::replace(&mut self.ended, true) {
            return true;
        }
        // First, so that a later invalidation by the client does nothing. The key may be
        // reallocated once the registration has ended.
        if let Some(invalidation) = &self.invalidation {
            invalidation.end();
        }
        self.registry.end(self.key)
    }
}

impl Drop for SoftMr {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for SoftMr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (key, len, iova) = (self.key, self.len, self.iova);
        write!(f, "SoftMr({key:#x}, {len} bytes at {iova:#x}, {}, {})", self.access, self.path())
    }
}
