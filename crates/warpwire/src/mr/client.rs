//! Peer-memory clients: whose an address is, and how a device gets at what lies there.
//!
//! A registration by address asks the clients in turn. The one whose memory it is pins it, maps it for the device,
//! and may later take it back:
//!
//! ```text
//! acquire → get_pages → dma_map → … → dma_unmap → put_pages → release (drop)
//!                          └── invalidate: the memory goes away under its registration
//! ```
//!
//! ```
//! use std::sync::Arc;
//! use warpwire::mr::{Access, AccessDenied, ReleaseReason, HostMemory, InvalidationHandle, MemorySource, PeerClient, PeerPages, Persistence, Registry};
//! use warpwire::Result;
//!
//! /// MemorySource of some other accelerator, at addresses that only this client knows.
//! struct Accelerator(HostMemory, std::sync::Mutex<Option<InvalidationHandle>>);
//! struct Pages(Arc<Accelerator>, u64, u64);
//!
//! impl PeerClient for Accelerator {
//!     fn name(&self) -> &str { "accelerator" }
//!     fn persistence(&self) -> Persistence { Persistence::Invalidates }
//!     fn acquire(self: Arc<Self>, address: u64, len: u64) -> Result<Box<dyn PeerPages>> {
//!         let not_mine = || warpwire::Error::new(warpwire::error::Kind::NotDeviceMemory, "find it");
//!         let offset = address.checked_sub(0xacce_0000_0000_0000).ok_or_else(not_mine)?;
//!         Ok(Box::new(Pages(self, offset, len)))
//!     }
//! }
//! impl PeerPages for Pages {
//!     fn page_size(&self) -> u64 { 65536 }
//!     fn get_pages(&self, _writes: bool, invalidate: InvalidationHandle) -> Result<()> {
//!         *self.0.1.lock().unwrap() = Some(invalidate);
//!         Ok(())
//!     }
//!     fn dma_map(&self, _device: &str) -> Result<MemorySource> {
//!         MemorySource::from(self.0.0.clone()).slice(self.1, self.2)
//!     }
//!     fn dma_unmap(&self, _device: &str) {}
//!     fn put_pages(&self, end: ReleaseReason) { assert_eq!(end, ReleaseReason::Invalidated); }
//! }
//!
//! let registry = Registry::new();
//! let theirs = Arc::new(Accelerator(HostMemory::new(65536)?, Default::default()));
//! registry.add_client(theirs.clone());
//! let pd = registry.pd();
//! // SAFETY: the memory is the client's own, and not touched meanwhile.
//! let mr = unsafe { registry.register_address(&pd, 0xacce_0000_0000_0100, 64, None, Access::ALL) }?;
//! assert_eq!(mr.client(), Some("accelerator"));
//! // It takes its memory back: the key is dead from then on.
//! theirs.1.lock().unwrap().take().unwrap().invalidate();
//! let denied = registry.resolve(mr.rkey(), pd.id(), Access::REMOTE_READ, mr.iova(), 64).unwrap_err();
//! assert_eq!(denied, AccessDenied::Gone);
//! # Ok::<(), warpwire::Error>(())
//! ```

use std::fmt;
use std::sync::{Arc, Weak};

use super::invalidation::InvalidationLink;
use super::memory::MemorySource;
use super::registry::Inner;
use crate::error::Result;

/// Whether a client tells when its memory goes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// It does: registrations end with the memory.
    Invalidates,
    /// It does not: pages that were got stay until they are put back, or nobody can tell.
    Persistent,
}

impl fmt::Display for Persistence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Invalidates => "tells when memory goes",
            Self::Persistent => "does not tell when memory goes",
        })
    }
}

/// Why pages are put back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseReason {
    /// The registration ended.
    Deregistered,
    /// The client itself took them back: this runs inside its own call of [`InvalidationHandle::invalidate`].
    Invalidated,
}

/// Somebody whose memory can be registered by its address.
pub trait PeerClient: Send + Sync {
    /// What it is called, in [`SoftMr::client`](super::Mr::client) and in messages.
    fn name(&self) -> &str;
    /// Whether it tells when memory goes away.
    fn persistence(&self) -> Persistence;
    /// Is all of this range yours? Any error means that it is not, and says why.
    fn acquire(self: Arc<Self>, address: u64, len: u64) -> Result<Box<dyn PeerPages>>;
    /// A number that changes when other memory comes to lie at these addresses, if there is such a number. A cache
    /// asks it where nobody tells of frees.
    fn identity(&self, _address: u64, _len: u64) -> Option<u64> {
        None
    }
}

/// A range that a client has acquired. Dropping it releases it.
///
/// Each step is made once. No step may wait for whoever is inside [`InvalidationHandle::invalidate`], nor may access to the
/// memory that [`dma_map`](PeerPages::dma_map) gave.
pub trait PeerPages: Send + Sync {
    /// In which units the memory is pinned.
    fn page_size(&self) -> u64;
    /// Pins the pages, to be written too if `writes`. From now until they are put back, `invalidate` is the way to
    /// take them away.
    fn get_pages(&self, writes: bool, invalidate: InvalidationHandle) -> Result<()>;
    /// Makes them reachable for the device of that name.
    fn dma_map(&self, device: &str) -> Result<MemorySource>;
    /// Ends that. Nobody reaches them through the device any more.
    fn dma_unmap(&self, device: &str);
    /// Unpins the pages.
    fn put_pages(&self, end: ReleaseReason);
}

/// How a client takes memory back that is registered.
#[derive(Clone)]
pub struct InvalidationHandle {
    pub(super) invalidation: Arc<InvalidationLink>,
    pub(super) registry: Weak<Inner>,
}

impl InvalidationHandle {
    /// The memory goes away. When this returns nobody touches it through its registration, the key gives
    /// [`AccessDenied::Gone`](super::Denied::Gone), and the pages were put back: once, however many call this, and also
    /// while the registration ends by itself. Whoever is inside the memory is waited for.
    ///
    /// Two things are done on another thread, perhaps a moment later: while the memory is still being registered, that
    /// is refused, and the pages are put back there, as [`ReleaseReason::Deregistered`]; and who calls this second does not wait
    /// until the first has put them back.
    pub fn invalidate(&self) {
        let Some(registry) = self.registry.upgrade() else { return };
        let taken = self.invalidation.revoke(|key| registry.detach_key(key));
        // Outside of the tie's lock: the client's own code runs here.
        if let Some(registration) = taken {
            registration.end(ReleaseReason::Invalidated);
        }
    }
}

impl fmt::Debug for InvalidationHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad("Invalidate")
    }
}

/// Pages on their way from a client to a registration and back: what was done is undone once.
pub(super) struct Acquired {
    pages: Box<dyn PeerPages>,
    device: String,
    mapped: bool,
    end: ReleaseReason,
}

impl Acquired {
    /// Pins and maps what was acquired.
    pub(super) fn get(
        pages: Box<dyn PeerPages>,
        device: String,
        writes: bool,
        invalidate: InvalidationHandle,
    ) -> Result<(Self, MemorySource)> {
        pages.get_pages(writes, invalidate)?;
        let mut acquired = Self { pages, device, mapped: false, end: ReleaseReason::Deregistered };
        let memory = acquired.pages.dma_map(&acquired.device)?;
        acquired.mapped = true;
        Ok((acquired, memory))
    }

    pub(super) fn page_size(&self) -> u64 {
        self.pages.page_size()
    }

    pub(super) fn set_reason(&mut self, end: ReleaseReason) {
        self.end = end;
    }
}

impl Drop for Acquired {
    fn drop(&mut self) {
        if self.mapped {
            self.pages.dma_unmap(&self.device);
        }
        self.pages.put_pages(self.end);
    }
}
