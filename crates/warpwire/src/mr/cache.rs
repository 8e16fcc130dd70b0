//! A registration cache, keyed by address.
//!
//! Registering costs microseconds, and programs reuse their buffers. The risk of such a cache is
//! memory that was freed in the meantime, so an entry is reused only if its memory is known to be
//! unchanged. [`Validation`] lists how that is established.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;

use super::Access;
use super::client::{PeerClient, Persistence};
use super::registration::SoftMr;
use super::registry::{Registry, SoftPd};
use super::uffd::{self, UffdWatch};
use crate::error::{Error, Kind, Result};

/// Limits of an [`MrCache`], and the rights of its registrations.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CacheOptions {
    /// Maximum total length of the cached registrations, in bytes. Default: 64 GiB.
    pub max_bytes: u64,
    /// Maximum number of cached registrations. Default: 4096.
    pub max_entries: usize,
    /// Rights of every registration. Default: [`Access::ALL`].
    pub access: Access,
    /// Whether host memory is watched with userfaultfd. If not, each lookup queries the kernel for
    /// the mapping. Default: `true`.
    pub watch: bool,
}

setters! {
    CacheOptions {
        with_max_bytes => max_bytes: u64,
        with_max_entries => max_entries: usize,
        with_access => access: Access,
        with_watch => watch: bool,
    }
}

impl Default for CacheOptions {
    fn default() -> Self {
        let access = Access::ALL;
        Self { max_bytes: 64 << 30, max_entries: 4096, access, watch: true }
    }
}

/// How a cache establishes that the memory of an entry is unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Validation {
    /// The client that owns the memory invalidates the registration when it frees it.
    OwnerNotifies,
    /// userfaultfd reports that the memory is unmapped, remapped or discarded.
    UffdWatch,
    /// Frees are not reported, for this reason: each lookup compares the memory's identity.
    CheckedPerUse(String),
}

impl fmt::Display for Validation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OwnerNotifies => f.pad("its owner reports frees"),
            Self::UffdWatch => f.pad("userfaultfd reports when it is unmapped"),
            Self::CheckedPerUse(why) => write!(f, "checked at each use, because {why}"),
        }
    }
}

/// Counters and current size of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Lookups that found an entry.
    pub hits: u64,
    /// Lookups that registered memory.
    pub misses: u64,
    /// Entries evicted for new ones, or removed by [`MrCache::clear`].
    pub evictions: u64,
    /// Entries whose memory changed, or that [`MrCache::invalidate`] removed.
    pub invalidations: u64,
    /// Entries that were merged into a larger one.
    pub merges: u64,
    /// Registrations that did not fit, and end with their lease.
    pub uncached: u64,
    /// Current number of entries.
    pub entries: usize,
    /// Current total length of the entries, in bytes.
    pub bytes: u64,
}

/// A cache of registrations of one protection domain, all with the same rights. Clones share it.
///
/// ```
/// use warpwire::mr::{MrCache, CacheOptions, Registry};
/// let registry = Registry::new();
/// let cache = MrCache::new(&registry, &registry.pd(), CacheOptions::default())?;
/// let words: Vec<_> = (0..512).map(std::sync::atomic::AtomicU64::new).collect();
/// let at = words.as_ptr().addr() as u64;
/// // SAFETY: the words outlive their use, and are atomics, so peers may change them.
/// let first = unsafe { cache.get(at, 4096) }?;
/// let key = first.rkey();
/// drop(first);
/// // SAFETY: as above.
/// let again = unsafe { cache.get(at + 8, 64) }?;
/// assert_eq!(again.rkey(), key);
/// assert_eq!((cache.stats().hits, cache.stats().misses), (1, 1));
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone)]
pub struct MrCache(Arc<Shared>);

struct Shared {
    registry: Registry,
    pd: SoftPd,
    options: CacheOptions,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By start address; no two overlap.
    entries: BTreeMap<u64, Entry>,
    /// Logical clock for LRU eviction, advanced by each lookup.
    clock: u64,
    stats: CacheStats,
}

struct Entry {
    end: u64,
    mr: Arc<SoftMr>,
    validator: Arc<Validator>,
    last_used: u64,
}

/// The mechanism behind [`Validation`].
enum Validator {
    OwnerNotifies,
    UffdWatch(UffdWatch),
    CheckedPerUse { client: Arc<dyn PeerClient>, identity: Option<u64>, why: String },
}

/// A registration in use. It stays registered until the lease is dropped; then the cache may keep
/// or end it.
pub struct Lease {
    mr: Arc<SoftMr>,
    validator: Arc<Validator>,
}

impl Lease {
    /// How the cache establishes that the memory is unchanged.
    pub fn validation(&self) -> Validation {
        match &*self.validator {
            Validator::OwnerNotifies => Validation::OwnerNotifies,
            Validator::UffdWatch(_) => Validation::UffdWatch,
            Validator::CheckedPerUse { why, .. } => Validation::CheckedPerUse(why.clone()),
        }
    }
}

impl Deref for Lease {
    type Target = SoftMr;

    fn deref(&self) -> &SoftMr {
        &self.mr
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({:?}, {})", self.mr, self.validation())
    }
}

impl Entry {
    fn is_valid(&self, start: u64) -> bool {
        let valid = match &*self.validator {
            Validator::OwnerNotifies => true,
            Validator::UffdWatch(watch) => !watch.is_invalidated(),
            Validator::CheckedPerUse { client, identity, .. } => {
                identity.is_some() && client.identity(start, self.end - start) == *identity
            }
        };
        valid && self.mr.is_live()
    }

    fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.mr) > 1
    }

    fn lease(&self) -> Lease {
        Lease { mr: self.mr.clone(), validator: self.validator.clone() }
    }
}

impl MrCache {
    /// An empty cache.
    ///
    /// # Errors
    /// If the rights are invalid, or include [`Access::ZERO_BASED`].
    pub fn new(registry: &Registry, pd: &SoftPd, options: CacheOptions) -> Result<Self> {
        options.access.check()?;
        if options.access.contains(Access::ZERO_BASED) {
            return Err(Error::new(Kind::InvalidArgument, "create a registration cache")
                .why("its registrations are looked up by address, and cannot be zero-based")
                .fix("leave out zero-based"));
        }
        let (registry, pd) = (registry.clone(), pd.clone());
        Ok(Self(Arc::new(Shared { registry, pd, options, state: Mutex::default() })))
    }

    /// Returns a registration that contains `len` bytes at `address`, a cached one or a new one.
    ///
    /// # Safety
    /// As for [`Registry::register_address`], while the lease lives. Afterwards the memory may be
    /// freed: the cache detects it before it reuses the registration.
    #[allow(unsafe_code)]
    pub unsafe fn get(&self, address: u64, len: u64) -> Result<Lease> {
        let Some(end) = address.checked_add(len).filter(|_| len > 0) else {
            return Err(Error::new(Kind::InvalidArgument, "look up a registration")
                .why("the range is empty, or passes the last address"));
        };
        if let Some(lease) = self.find(address, end) {
            return Ok(lease);
        }
        // Without the lock: registering may be slow, and must not block other lookups.
        let (start, stop) = self.union(address, end);
        // SAFETY: guaranteed by the caller for the requested range. The rest belongs to valid
        // entries, so it is mapped, and the holders of their leases gave the same guarantee.
        let registered = unsafe { self.register(start, stop) };
        let (start, end, entry) = match registered {
            Ok(entry) => (start, stop, entry),
            // The part added to the requested range was unmapped meanwhile.
            Err(_) if (start, stop) != (address, end) => {
                // SAFETY: guaranteed by the caller.
                let entry = unsafe { self.register(address, end) }?;
                (address, end, entry)
            }
            Err(error) => return Err(error),
        };
        Ok(self.insert(start, end, entry))
    }

    /// Removes the entries that overlap the range, for memory that is about to be freed. Leased
    /// registrations live until their leases are dropped.
    pub fn invalidate(&self, address: u64, len: u64) {
        let end = address.saturating_add(len);
        let mut removed = Vec::new();
        {
            let mut state = self.0.state.lock();
            for start in state.overlapping(address, end) {
                removed.extend(state.remove(start));
                state.stats.invalidations += 1;
            }
        }
    }

    /// Removes all entries without a lease.
    pub fn clear(&self) {
        let mut removed = Vec::new();
        let mut state = self.0.state.lock();
        let idle = |(start, entry): (&u64, &Entry)| (!entry.is_in_use()).then_some(*start);
        let idle: Vec<u64> = state.entries.iter().filter_map(idle).collect();
        for start in idle {
            removed.extend(state.remove(start));
            state.stats.evictions += 1;
        }
        drop(state);
    }

    /// The counters, and the current size.
    pub fn stats(&self) -> CacheStats {
        let state = self.0.state.lock();
        CacheStats { entries: state.entries.len(), ..state.stats }
    }

    /// A lease on the entry that contains a range, if its memory is unchanged.
    fn find(&self, address: u64, end: u64) -> Option<Lease> {
        let mut removed = None;
        let mut state = self.0.state.lock();
        state.clock += 1;
        let now = state.clock;
        let found = state.entries.range_mut(..=address).next_back();
        let (start, valid) = match found {
            Some((start, entry)) if entry.end >= end => (*start, entry.is_valid(*start)),
            _ => return None,
        };
        if valid {
            state.stats.hits += 1;
            let entry = state.entries.get_mut(&start)?;
            entry.last_used = now;
            return Some(entry.lease());
        }
        state.stats.invalidations += 1;
        removed.replace(state.remove(start));
        drop(state);
        None
    }

    /// The range, extended by the valid entries that overlap it.
    fn union(&self, address: u64, end: u64) -> (u64, u64) {
        let mut removed = Vec::new();
        let mut state = self.0.state.lock();
        let (mut from, mut to) = (address, end);
        for start in state.overlapping(address, end) {
            match state.entries.get(&start) {
                Some(entry) if entry.is_valid(start) => {
                    (from, to) = (from.min(start), to.max(entry.end));
                }
                _ => {
                    removed.extend(state.remove(start));
                    state.stats.invalidations += 1;
                }
            }
        }
        drop(state);
        (from, to)
    }

    /// # Safety
    /// As for `Registry::register_address`.
    #[allow(unsafe_code)]
    unsafe fn register(&self, start: u64, end: u64) -> Result<Entry> {
        let Shared { registry, pd, options, .. } = &*self.0;
        let len = end - start;
        // Before the memory is examined, so that every later change is detected.
        let watch = match options.watch {
            true => uffd::watch(start, len),
            false => Err(Error::new(Kind::Unsupported, "watch host memory")
                .why("watching is off in the cache's options")),
        };
        // SAFETY: guaranteed by the caller.
        let mr = unsafe { registry.register_address(pd, start, len, None, options.access) }?;
        let client =
            registry.clients().into_iter().find(|client| mr.client() == Some(client.name()));
        let client = client.ok_or_else(|| {
            Error::new(Kind::Unavailable, "cache a registration").why("its client is unknown")
        })?;
        let validator = match (client.persistence(), watch) {
            (Persistence::Invalidates, _) => Validator::OwnerNotifies,
            (Persistence::Persistent, Ok(watch)) => Validator::UffdWatch(watch),
            (Persistence::Persistent, Err(error)) => {
                let identity = client.identity(start, len);
                let why = match client.name() {
                    "host" => error.reason().to_owned(),
                    name => format!("{name} does not report frees"),
                };
                Validator::CheckedPerUse { client, identity, why }
            }
        };
        Ok(Entry { end, mr: Arc::new(mr), validator: Arc::new(validator), last_used: 0 })
    }

    /// Adds an entry, replacing those that it overlaps, if it fits after evicting unused ones.
    fn insert(&self, start: u64, end: u64, mut entry: Entry) -> Lease {
        let lease = entry.lease();
        let mut removed = Vec::new();
        let mut state = self.0.state.lock();
        state.stats.misses += 1;
        for other in state.overlapping(start, end) {
            removed.extend(state.remove(other));
            state.stats.merges += 1;
        }
        while !state.fits(end - start, &self.0.options) {
            let Some(oldest) = state.least_recently_used() else { break };
            removed.extend(state.remove(oldest));
            state.stats.evictions += 1;
        }
        if state.fits(end - start, &self.0.options) {
            state.clock += 1;
            entry.last_used = state.clock;
            state.stats.bytes += end - start;
            state.entries.insert(start, entry);
        } else {
            state.stats.uncached += 1;
            removed.push(entry);
        }
        // Registrations end outside the lock, because that calls their clients' code.
        drop(state);
        lease
    }
}

impl State {
    /// The start addresses of all entries that overlap a range.
    fn overlapping(&self, from: u64, to: u64) -> Vec<u64> {
        let before = self.entries.range(..to).rev();
        let touching = before.take_while(|(_, entry)| entry.end > from);
        touching.map(|(start, _)| *start).collect()
    }

    fn remove(&mut self, start: u64) -> Option<Entry> {
        let entry = self.entries.remove(&start)?;
        self.stats.bytes -= entry.end - start;
        Some(entry)
    }

    fn fits(&self, len: u64, options: &CacheOptions) -> bool {
        let bytes = self.stats.bytes.saturating_add(len);
        self.entries.len() < options.max_entries && bytes <= options.max_bytes
    }

    fn least_recently_used(&self) -> Option<u64> {
        let idle = self.entries.iter().filter(|(_, entry)| !entry.is_in_use());
        idle.min_by_key(|(_, entry)| entry.last_used).map(|(start, _)| *start)
    }
}

impl fmt::Debug for MrCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CacheStats { entries, bytes, hits, misses, .. } = self.stats();
        write!(f, "MrCache({entries} entries, {bytes} bytes, {hits} hits, {misses} misses)")
    }
}

#[cfg(test)]
mod tests;
