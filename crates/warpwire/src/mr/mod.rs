//! Protection domains, keys and registered memory: what a work request may touch.
//!
//! | type | what it is |
//! |---|---|
//! | [`Registry`] | all registrations of one software device, found by key |
//! | [`SoftPd`] | a protection domain: keys of one do not work in another |
//! | [`SoftMr`] | a registration; it ends when this is dropped |
//! | [`MemorySource`], [`HostMemory`] | what can be registered |
//! | [`Access`] | what may be done with it |
//! | [`Span`] | memory that a key gave, for one copy or one atomic operation |
//! | [`AccessDenied`] | why a key did not |
//! | [`MrExport`], [`ExportObserver`], [`PeerMapping`] | registrations that other processes use by themselves, and theirs |
//!
//! ```
//! use warpwire::mr::{Access, AccessDenied, HostMemory, Registry};
//! let registry = Registry::new();
//! let pd = registry.pd();
//! let memory = HostMemory::new(4096)?;
//! let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
//! let mr = registry.register(&pd, memory.clone(), Some(0x1000), rights)?;
//!
//! // What an engine does for each packet.
//! let span = registry.resolve(mr.rkey(), pd.id(), Access::REMOTE_WRITE, 0x1100, 5).unwrap();
//! span.scatter(0, b"hello").unwrap();
//! drop(span);
//! let mut back = [0; 5];
//! memory.bytes().read(0x100, &mut back)?;
//! assert_eq!(&back, b"hello");
//!
//! let key = mr.rkey();
//! mr.deregister();
//! let denied = registry.resolve(key, pd.id(), Access::REMOTE_WRITE, 0x1100, 5).unwrap_err();
//! assert_eq!(denied, AccessDenied::Stale);
//! # Ok::<(), warpwire::Error>(())
//! ```
//!
//! # Promises
//! 1. **After a registration has ended nobody touches its memory.** [`SoftMr::deregister`], and dropping the
//!    [`SoftMr`], return when the last [`Span`] of it is gone. A thread that holds one must not end it.
//! 2. **Memory outlives its registration.** An [`SoftMr`] holds its memory and its [`SoftPd`]; an allocation cannot
//!    be freed by its handles meanwhile.
//! 3. **Freed memory is never read.** Where memory goes away all the same (a device is told to free it under
//!    its users), every later use is [`AccessDenied::Gone`]; while it moves, [`AccessDenied::Moving`].
//! 4. **Atomics are atomic**, on host memory with every thread and process that uses atomic operations too,
//!    on device memory among all queue pairs of this process's software HCAs. A device's own atomics are not
//!    kept out where its memory lies behind a bus (`IBV_ATOMIC_HCA`, in the words of verbs).
//! 5. **Bytes are placed in rising order**, but may be seen in any; [`Span::publish`] comes between data and
//!    the completion that tells of it.
//! 6. **Finding memory takes no lock and no allocation.** It costs two atomic additions.

mod access;
mod atomics;
mod cache;
mod client;
mod clients;
mod custom_memory;
mod deferred_writes;
mod denied;
mod device;
mod dma_buf;
mod export;
mod host;
mod invalidation;
mod keys;
mod maps;
mod memory;
mod on_demand;
mod pager;
mod registration;
mod registry;
mod revocable_slot;
#[cfg(test)]
mod revocable_slot_tests;
mod span;
mod sync;
mod table;
#[cfg(test)]
mod tests;
mod uffd;

pub use access::Access;
pub use cache::{CacheOptions, CacheStats, Lease, MrCache, Validation};
pub use client::{InvalidationHandle, PeerClient, PeerPages, Persistence, ReleaseReason};
pub use custom_memory::CustomMemory;
pub use denied::AccessDenied;
pub use dma_buf::DmaBufRange;
pub use export::{ExportObserver, MrExport, PeerMapping};
pub use host::HostMemory;
pub use memory::{AccessPath, MemorySource};
pub use on_demand::OdpStats;
pub use registration::{AttachMode, RegisteredBy, SoftMr};
pub use registry::{PdId, Registry, SoftPd};
pub use span::Span;
