//! Peer-memory clients: which provider owns an address, and how a device accesses its memory.
//!
//! A registration by address asks the clients in turn. The client that owns the memory pins it,
//! maps it for the device, and may later revoke it:
//!
//! ```text
//! acquire → get_pages → dma_map → … → dma_unmap → put_pages → release (drop)
//!                          └── invalidate: the client revokes registered memory
//! ```
//!
//! ```
//! use std::sync::Arc;
//! use warpwire::mr::{Access, AccessDenied, HostMemory, InvalidationHandle, MemorySource};
//! use warpwire::mr::{PeerClient, PeerPages, Persistence, Registry, ReleaseReason};
//! use warpwire::Result;
//!
//! /// Memory of another accelerator, at addresses that only this client knows.
//! struct Accelerator(HostMemory, std::sync::Mutex<Option<InvalidationHandle>>);
//! struct Pages(Arc<Accelerator>, u64, u64);
//!
//! impl PeerClient for Accelerator {
//!     fn name(&self) -> &str { "accelerator" }
//!     fn persistence(&self) -> Persistence { Persistence::Invalidates }
//!     fn acquire(self: Arc<Self>, address: u64, len: u64) -> Result<Box<dyn PeerPages>> {
//!         let kind = warpwire::error::Kind::NotDeviceMemory;
//!         let not_mine = || warpwire::Error::new(kind, "find it");
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
//! let at = 0xacce_0000_0000_0100;
//! // SAFETY: the memory belongs to the client, and is not accessed meanwhile.
//! let mr = unsafe { registry.register_address(&pd, at, 64, None, Access::ALL) }?;
//! assert_eq!(mr.client(), Some("accelerator"));
//! // The client takes its memory back: the key is invalid from then on.
//! theirs.1.lock().unwrap().take().unwrap().invalidate();
//! let denied = registry.resolve(mr.rkey(), pd.id(), Access::REMOTE_READ, mr.iova(), 64);
//! assert_eq!(denied.unwrap_err(), AccessDenied::Gone);
//! # Ok::<(), warpwire::Error>(())
//! ```

use std::fmt;
use std::sync::{Arc, Weak};

use super::invalidation::InvalidationLink;
use super::memory::MemorySource;
use super::registry::Inner;
use crate::error::Result;

/// Whether a client reports that its memory is taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// The client calls [`InvalidationHandle::invalidate`] before its memory becomes invalid.
    Invalidates,
    /// The client never does: pinned pages stay valid until they are put back, or frees are not
    /// detectable.
    Persistent,
}

impl fmt::Display for Persistence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Invalidates => "reports when memory is freed",
            Self::Persistent => "does not report when memory is freed",
        })
    }
}

/// Why pages are released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseReason {
    /// The registration ended.
    Deregistered,
    /// The client took them back: `put_pages` runs inside the client's own call of
    /// [`InvalidationHandle::invalidate`].
    Invalidated,
}

/// A provider of memory that can be registered by address.
pub trait PeerClient: Send + Sync {
    /// The client's name in [`SoftMr::client`](super::SoftMr::client) and in error texts.
    fn name(&self) -> &str;
    /// Whether the client reports that memory is taken back.
    fn persistence(&self) -> Persistence;
    /// Claims a range. An error means that the client does not own all of it, with the reason; then
    /// the next client is asked.
    fn acquire(self: Arc<Self>, address: u64, len: u64) -> Result<Box<dyn PeerPages>>;
    /// A number that changes when the range is backed by other memory, if the client has one. A
    /// registration cache compares it where frees are not reported.
    fn identity(&self, _address: u64, _len: u64) -> Option<u64> {
        None
    }
}

/// A range that a client has acquired. Dropping it releases it.
///
/// Each method is called at most once. None of them, nor any access to the memory that
/// [`dma_map`](PeerPages::dma_map) returned, may wait for a thread inside
/// [`InvalidationHandle::invalidate`]: that thread waits for them.
pub trait PeerPages: Send + Sync {
    /// Granularity of pinning, in bytes.
    fn page_size(&self) -> u64;
    /// Pins the pages, for writing too if `writes`. From now until `put_pages`, the client must
    /// call `invalidate` before it takes them back.
    fn get_pages(&self, writes: bool, invalidate: InvalidationHandle) -> Result<()>;
    /// Makes the pages accessible to the named device.
    fn dma_map(&self, device: &str) -> Result<MemorySource>;
    /// Undoes `dma_map`. The device no longer accesses the pages.
    fn dma_unmap(&self, device: &str);
    /// Unpins the pages.
    fn put_pages(&self, end: ReleaseReason);
}

/// Revokes registered memory on behalf of its client.
#[derive(Clone)]
pub struct InvalidationHandle {
    pub(super) invalidation: Arc<InvalidationLink>,
    pub(super) registry: Weak<Inner>,
}

impl InvalidationHandle {
    /// Revokes the memory. When this returns, nothing accesses it through its registration, the key
    /// resolves to [`AccessDenied::Gone`](super::AccessDenied::Gone), and the pages have been put
    /// back: exactly once, however many threads call this, and also if it races with
    /// deregistration. Waits for accesses in progress.
    ///
    /// Two exceptions, in which another thread puts the pages back, perhaps slightly later: if the
    /// memory is still being registered, the registration fails and its thread releases the pages,
    /// as [`ReleaseReason::Deregistered`]; and a second concurrent call does not wait until the
    /// first has put them back.
    pub fn invalidate(&self) {
        let Some(registry) = self.registry.upgrade() else { return };
        let taken = self.invalidation.revoke(|key| registry.detach_key(key));
        // Outside the link's lock: this calls the client's code.
        if let Some(registration) = taken {
            registration.end(ReleaseReason::Invalidated);
        }
    }
}

impl fmt::Debug for InvalidationHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad("InvalidationHandle")
    }
}

/// Pages acquired from a client. Dropping it undoes `dma_map` and `get_pages`, once.
pub(super) struct Acquired {
    pages: Box<dyn PeerPages>,
    device: String,
    mapped: bool,
    end: ReleaseReason,
}

impl Acquired {
    /// Pins and maps an acquired range.
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
