//! The cache reuses valid registrations, and never those whose memory has changed.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::atomic::AtomicU64;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use super::*;
use crate::mem::sim::{Sim, SimConfig};
use crate::mr::AccessDenied;

const PAGE: u64 = 4096;

/// Pages that are mapped until dropped. Their addresses stay reserved, so that no other mapping is
/// placed there.
struct Pages(*mut c_void, u64);

impl Pages {
    fn map(len: u64) -> Self {
        let none = ProtFlags::empty();
        // SAFETY: a new mapping at an address chosen by the kernel affects no other memory.
        let base =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len as usize, none, MapFlags::PRIVATE) };
        Self::map_at(base.unwrap(), len)
    }

    fn map_at(reserved: *mut c_void, len: u64) -> Self {
        cover(reserved, len, ProtFlags::READ | ProtFlags::WRITE);
        Self(reserved, len)
    }

    fn at(&self) -> u64 {
        self.0.addr() as u64
    }
}

fn cover(reserved: *mut c_void, len: u64, protection: ProtFlags) {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED;
    // SAFETY: the range is reserved by the test, and no reference to it exists.
    let base = unsafe { mmap_anonymous(reserved, len as usize, protection, flags) };
    assert_eq!(base.unwrap(), reserved);
}

impl Drop for Pages {
    fn drop(&mut self) {
        cover(self.0, self.1, ProtFlags::empty());
    }
}

fn cache(options: CacheOptions) -> (Registry, SoftPd, MrCache) {
    let registry = Registry::new();
    let pd = registry.pd();
    let cache = MrCache::new(&registry, &pd, options).unwrap();
    (registry, pd, cache)
}

fn get(cache: &MrCache, address: u64, len: u64) -> Lease {
    // SAFETY: the tests pass mapped memory, and access it through registrations only.
    unsafe { cache.get(address, len) }.unwrap()
}

#[test]
fn hits_merges_and_subranges() {
    let (registry, _, cache) = cache(CacheOptions::default());
    let pages = Pages::map(16 * PAGE);
    let at = pages.at();
    let first = get(&cache, at + PAGE, PAGE);
    assert_eq!(get(&cache, at + PAGE + 100, 50).rkey(), first.rkey(), "a subrange");
    let second = get(&cache, at + 4 * PAGE, 2 * PAGE);
    assert_ne!(second.rkey(), first.rkey());
    // Both entries, the gap between them, and bytes beyond.
    let all = get(&cache, at + PAGE + 1, 6 * PAGE);
    assert_eq!((all.iova(), all.len()), (at + PAGE, 6 * PAGE + 1));
    let stats = cache.stats();
    assert_eq!((stats.hits, stats.misses, stats.merges, stats.entries), (1, 3, 2, 1));
    assert_eq!(stats.bytes, 6 * PAGE + 1);
    // Leases of the merged entries stay valid.
    assert!(first.is_live() && second.is_live());
    assert_eq!(registry.len(), 3);
    drop((first, second));
    assert_eq!(registry.len(), 1);
}

#[test]
fn the_least_recently_used_is_evicted_and_leased_entries_stay() {
    let options = CacheOptions { max_entries: 2, max_bytes: 10 * PAGE, ..CacheOptions::default() };
    let (registry, _, cache) = cache(options);
    let pages: Vec<Pages> = (0..4).map(|_| Pages::map(2 * PAGE)).collect();
    let at: Vec<u64> = pages.iter().map(|pages| pages.at()).collect();
    let held = get(&cache, at[0], PAGE);
    let second = get(&cache, at[1], PAGE).rkey();
    get(&cache, at[0], PAGE);
    // The first entry was used most recently, and is leased.
    get(&cache, at[2], PAGE);
    assert_eq!(cache.stats().evictions, 1);
    assert_ne!(get(&cache, at[1], PAGE).rkey(), second, "the second was evicted");
    let other = get(&cache, at[3], PAGE);
    // Both entries are leased.
    let uncached = get(&cache, at[2], PAGE);
    assert_eq!(cache.stats().uncached, 1);
    assert_eq!(cache.stats().entries, 2);
    let before = registry.len();
    drop(uncached);
    assert_eq!(registry.len(), before - 1, "it ended with its lease");
    drop((held, other));
    cache.clear();
    assert_eq!((registry.len(), cache.stats().bytes), (0, 0));
}

#[test]
fn memory_larger_than_the_cache_is_registered_uncached() {
    let options = CacheOptions { max_bytes: PAGE, ..CacheOptions::default() };
    let (registry, _, cache) = cache(options);
    let pages = Pages::map(4 * PAGE);
    let lease = get(&cache, pages.at(), 4 * PAGE);
    assert_eq!((lease.len(), cache.stats().uncached, cache.stats().entries), (4 * PAGE, 1, 0));
    drop(lease);
    assert!(registry.is_empty());
}

#[test]
fn unmapped_memory_is_not_reused() {
    for watch in [true, false] {
        let (registry, _, cache) = cache(CacheOptions { watch, ..CacheOptions::default() });
        let at = Pages::map(4 * PAGE).0;
        for round in 0..50 {
            let pages = Pages::map_at(at, 4 * PAGE);
            let lease = get(&cache, pages.at(), 4 * PAGE);
            if watch && matches!(lease.validation(), Validation::CheckedPerUse(_)) {
                println!("skipped: {}", lease.validation());
                return;
            }
            drop(lease);
            let hits = cache.stats().hits;
            get(&cache, pages.at(), PAGE);
            assert_eq!(cache.stats().hits, hits + 1);
            drop(pages);
            // SAFETY: nothing is mapped there, so it fails.
            let refused = unsafe { cache.get(at.addr() as u64, 4 * PAGE) }.unwrap_err();
            assert!(refused.to_string().contains("no client owns"), "round {round}: {refused}");
            assert_eq!(registry.len(), 0, "watch {watch}");
        }
        assert_eq!(cache.stats().invalidations, 50);
    }
}

#[test]
fn memory_remapped_at_the_same_address_is_registered_again() {
    let (_, _, cache) = cache(CacheOptions::default());
    let pages = Pages::map(4 * PAGE);
    let lease = get(&cache, pages.at(), 4 * PAGE);
    if lease.validation() != Validation::UffdWatch {
        println!("skipped: {}", lease.validation());
        return;
    }
    let key = lease.rkey();
    drop(lease);
    let at = pages.0;
    drop(pages);
    let again = Pages::map_at(at, 4 * PAGE);
    assert_ne!(get(&cache, again.at(), 4 * PAGE).rkey(), key);
}

#[test]
fn freed_device_memory_is_not_reused() {
    let sim = Sim::start(SimConfig::default()).unwrap();
    let gpu = sim.device(0).unwrap();
    let (registry, pd, cache) = cache(CacheOptions::default());
    let memory = gpu.alloc(1 << 20).unwrap();
    let at = memory.address().raw();
    let lease = get(&cache, at + 100, 1000);
    assert_eq!((lease.client(), lease.validation()), (Some("sim"), Validation::OwnerNotifies));
    assert_eq!(get(&cache, at + 200, 10).rkey(), lease.rkey());
    memory.free().unwrap();
    let denied = registry.resolve(lease.rkey(), pd.id(), Access::REMOTE_READ, at + 100, 8);
    assert_eq!(denied.unwrap_err(), AccessDenied::Gone);
    // SAFETY: nothing is mapped there, so it fails.
    assert!(unsafe { cache.get(at + 100, 1000) }.is_err());
    assert_eq!((cache.stats().invalidations, cache.stats().entries), (1, 0));
}

#[test]
fn explicit_invalidation_removes_overlapping_entries() {
    let (_, _, cache) = cache(CacheOptions::default());
    let words: Vec<AtomicU64> = (0..4096).map(AtomicU64::new).collect();
    let at = words.as_ptr().addr() as u64;
    let key = get(&cache, at, 4096).rkey();
    cache.invalidate(at + 8192, 100);
    assert_eq!(get(&cache, at, 4096).rkey(), key);
    cache.invalidate(at + 4095, 100);
    assert_ne!(get(&cache, at, 4096).rkey(), key);
    assert_eq!(cache.stats().invalidations, 1);
}

#[test]
fn bad_input_is_rejected() {
    let registry = Registry::new();
    let zero = CacheOptions { access: Access::ZERO_BASED, ..CacheOptions::default() };
    assert!(MrCache::new(&registry, &registry.pd(), zero).is_err());
    let rights = CacheOptions { access: Access::REMOTE_WRITE, ..CacheOptions::default() };
    assert!(MrCache::new(&registry, &registry.pd(), rights).is_err());
    let (_, _, cache) = cache(CacheOptions::default());
    for (address, len) in [(4096, 0), (u64::MAX, 2), (4096, 10), (0, 1)] {
        // SAFETY: rejected before any access.
        assert!(unsafe { cache.get(address, len) }.is_err(), "{address} {len}");
    }
    assert_eq!(cache.stats(), CacheStats::default());
}

#[test]
fn many_threads_share_a_cache() {
    let options = CacheOptions { max_entries: 8, ..CacheOptions::default() };
    let (registry, pd, cache) = cache(options);
    let pages = Pages::map(64 * PAGE);
    let at = pages.at();
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (cache, registry, pd) = (&cache, &registry, &pd);
            scope.spawn(move || {
                let mut random = thread + 1;
                for _ in 0..2000 {
                    random =
                        random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let start = at + (random >> 33) % (60 * PAGE);
                    let len = 1 + (random >> 50) % (3 * PAGE);
                    let lease = get(cache, start, len);
                    let span = registry.resolve(lease.lkey(), pd.id(), Access::NONE, start, len);
                    assert_eq!(span.unwrap().len(), len);
                    if random % 31 == 0 {
                        cache.invalidate(start, PAGE);
                    }
                }
            });
        }
    });
    cache.clear();
    assert_eq!((registry.len(), cache.stats().bytes), (0, 0));
}
