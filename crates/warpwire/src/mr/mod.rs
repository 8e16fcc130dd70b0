//! Protection domains, keys and registered memory: what a work request may touch.
//!
//! | type | what it is |
//! |---|---|
//! | [`Registry`] | all registrations of one software device, found by key |
//! | [`SoftPd`] | a protection domain: keys of one do not work in another |
//! | [`SoftMr`] | a registration; dropping it deregisters |
//! | [`MemorySource`], [`HostMemory`] | what can be registered |
//! | [`Access`] | access rights |
//! | [`SoftMw`] | a memory window: a key for a part of a registration |
//! | [`Span`] | memory resolved from a key, for one copy or one atomic operation |
//! | [`AccessDenied`] | why a key was not resolved |
//! | [`MrExport`], [`ExportObserver`] | registrations that local peers map and access directly |
//!
//! ```
//! use warpwire::mr::{Access, AccessDenied, HostMemory, Registry};
//! let registry = Registry::new();
//! let pd = registry.pd();
//! let memory = HostMemory::new(4096)?;
//! let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
//! let mr = registry.register(&pd, memory.clone(), Some(0x1000), rights)?;
//!
//! // The engine does this for each packet.
//! let span = registry.resolve(mr.rkey(), pd.id(), Access::REMOTE_WRITE, 0x1100, 5).unwrap();
//! span.scatter(0, b"hello").unwrap();
//! drop(span);
//! let mut back = [0; 5];
//! memory.bytes().read(0x100, &mut back)?;
//! assert_eq!(&back, b"hello");
//!
//! let key = mr.rkey();
//! mr.deregister()?;
//! let denied = registry.resolve(key, pd.id(), Access::REMOTE_WRITE, 0x1100, 5).unwrap_err();
//! assert_eq!(denied, AccessDenied::Stale);
//! # Ok::<(), warpwire::Error>(())
//! ```
//!
//! # Promises
//! 1. **No access after deregistration.** [`SoftMr::deregister`], and dropping the [`SoftMr`],
//!    return when the last [`Span`] of the registration has been dropped. A thread that holds a
//!    span must not deregister: it would deadlock. A peer process that is stopped during a direct
//!    access is waited for half a second; deregistration then reports
//!    [`Kind::Busy`](crate::error::Kind::Busy), and the memory is quarantined
//!    ([`Registry::quarantined`]). The same holds for keys of windows: when one was invalidated, or
//!    its window was bound again or dropped, its last [`Span`] has been dropped.
//! 2. **Memory outlives its registration.** A [`SoftMr`] holds its memory and its [`SoftPd`]; the
//!    handles of an allocation cannot free it while it is registered.
//! 3. **Freed memory is never read.** If memory is freed under its registration nevertheless (its
//!    owner forces it), every later use fails with [`AccessDenied::Gone`]; while it is being moved,
//!    with [`AccessDenied::Moving`].
//! 4. **Atomics are atomic**: on host memory with respect to every thread and process that uses
//!    atomic operations, on device memory among all queue pairs of this process's software HCAs.
//!    They are not atomic with respect to a device's own atomics where its memory is accessed over
//!    a bus (`IBV_ATOMIC_HCA` in verbs).
//! 5. **Bytes are written in ascending order**, but may become visible in any order;
//!    [`Span::publish`] orders data before the completion that reports it.
//! 6. **Resolving a key takes no lock and allocates nothing.** It costs two atomic additions.

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
mod kernel_use;
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
mod window;

pub use cache::{CacheOptions, CacheStats, Lease, MrCache, Validation};
pub use client::{InvalidationHandle, PeerClient, PeerPages, Persistence, ReleaseReason};
pub use custom_memory::CustomMemory;
pub use denied::AccessDenied;
pub use dma_buf::DmaBufRange;
pub(crate) use export::PeerMapping;
#[doc(hidden)]
pub use export::{ExportObserver, MrExport, Sharing};
pub use host::HostMemory;
pub(crate) use kernel_use::KernelUse;
pub use memory::{AccessPath, MemorySource};
pub use on_demand::OdpStats;
pub(crate) use pager::submit as run_on_pager;
#[doc(hidden)]
pub use registration::SoftMr;
pub use registration::{AttachMode, RegisteredBy};
#[doc(hidden)]
pub use registry::{PdId, Registry, SoftPd};
#[doc(hidden)]
pub use span::Span;
pub use warpwire_proto::qp::Access;
#[doc(hidden)]
pub use window::SoftMw;
pub use window::{MwBind, MwType, next_rkey};
