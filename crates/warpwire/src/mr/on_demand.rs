//! On-demand paging of host memory.
//!
//! The range is divided into granules. The first use of a granule makes the pager fault its pages
//! in, while the queue pair waits; from then on the kernel copies (`process_vm_readv`), and looks
//! up every page again: memory that was unmapped since is an error, not a signal in this process.
//! Of a partially mapped granule, the mapped pages remain usable.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use std::sync::{Arc, OnceLock, Weak};

use rustix::mm::{Advice, madvise};

use super::custom_memory::CustomMemory;
use super::denied::AccessDenied;
use super::host::HostRange;
use super::maps;
use super::pager;
use crate::error::{Error, Kind, Result};
use crate::mlx5::Atomic;
use crate::units;

/// Unit of paging, in bytes.
const GRANULE: u64 = 64 << 10;
/// Granule states per lazily allocated chunk.
const GRANULES_PER_CHUNK: u64 = 4096;
/// `check` covers at most this many granules, the beginning of a long range: each of its packets is
/// checked again.
const MAX_CHECKED: u64 = 17;

// States of a granule.
const ABSENT: u8 = 0;
const REQUESTED: u8 = 1;
const PRESENT: u8 = 2;
/// Refused in some fault epoch, whose last bits are beside it: it stays refused in that epoch.
const REFUSED: u8 = 3;
/// Some pages are not mapped, or not writable: each use checks the pages that it touches.
const PARTIAL: u8 = 4;
/// The bits of the state itself.
const STATE: u8 = 7;

/// Page-fault counters of a registration, in granules of 64 KiB of host memory, or in mappings of
/// device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OdpStats {
    /// Faults raised by accesses to memory that was not resident.
    pub faults: u64,
    /// Faults resolved by a prefetch.
    pub prefetched: u64,
    /// Faults that could not be resolved.
    pub refused: u64,
    /// Resident memory that was found unmapped at its next use, or was moved.
    pub lost: u64,
}

#[derive(Default)]
pub(super) struct OdpCounters {
    pub(super) faults: AtomicU64,
    pub(super) prefetched: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) lost: AtomicU64,
}

impl OdpCounters {
    pub(super) fn get(&self) -> OdpStats {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        OdpStats {
            faults: load(&self.faults),
            prefetched: load(&self.prefetched),
            refused: load(&self.refused),
            lost: load(&self.lost),
        }
    }
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Host memory, paged on demand.
pub(super) struct OnDemand {
    range: HostRange,
    writes: bool,
    chunks: Box<[OnceLock<Box<[AtomicU8]>>]>,
    counts: OdpCounters,
    fault_epoch: Arc<FaultEpoch>,
    /// For jobs on the pager.
    weak_self: Weak<Self>,
}

/// Generation counter of failed connections. A refused granule stays refused within an epoch,
/// because several parts of a connection check it and all must get the same answer; a failing
/// connection starts a new epoch, in which it is looked up again, because it may have been mapped
/// again.
#[derive(Default)]
pub(super) struct FaultEpoch(AtomicU64);

impl FaultEpoch {
    pub(super) fn advance(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    fn current(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

impl OnDemand {
    /// Checks, once per process, that `process_vm_readv` works here.
    pub(super) fn available() -> Result<()> {
        static TRIED: OnceLock<Result<()>> = OnceLock::new();
        let tried = TRIED.get_or_init(|| {
            let (from, mut to) = ([1u8], [0u8]);
            let at = from.as_ptr().expose_provenance() as u64;
            copy(at, to.as_mut_ptr(), 1, VmCopy::Out).map_err(|error| {
                Error::new(Kind::Unsupported, "register memory on demand")
                    .why(format!("process_vm_readv fails in this process ({error})"))
                    .fix("leave out on-demand, or allow process_vm_readv and process_vm_writev")
            })
        });
        tried.clone()
    }

    pub(super) fn new(range: HostRange, writes: bool, fault_epoch: &Arc<FaultEpoch>) -> Arc<Self> {
        let granules = range.len().div_ceil(GRANULE) + 1;
        let chunks = (0..granules.div_ceil(GRANULES_PER_CHUNK)).map(|_| OnceLock::new()).collect();
        Arc::new_cyclic(|weak_self| Self {
            range,
            writes,
            chunks,
            counts: OdpCounters::default(),
            fault_epoch: fault_epoch.clone(),
            weak_self: weak_self.clone(),
        })
    }

    pub(super) fn len(&self) -> u64 {
        self.range.len()
    }

    pub(super) fn address(&self) -> u64 {
        self.range.address()
    }

    pub(super) fn faults(&self) -> OdpStats {
        self.counts.get()
    }

    /// The granules that a range touches. Granules are aligned by address, as pages are.
    fn granules(&self, offset: u64, len: u64) -> std::ops::Range<u64> {
        let skew = self.range.address() % GRANULE;
        (offset + skew) / GRANULE..(offset + skew + len).div_ceil(GRANULE)
    }

    fn state(&self, granule: u64) -> Option<&AtomicU8> {
        let chunk = self.chunks.get((granule / GRANULES_PER_CHUNK) as usize)?;
        let new = || (0..GRANULES_PER_CHUNK).map(|_| AtomicU8::new(ABSENT)).collect();
        chunk.get_or_init(new).get((granule % GRANULES_PER_CHUNK) as usize)
    }

    /// The state of a granule that is present, perhaps partially. Otherwise queues its resolution.
    fn request(&self, granule: u64) -> std::result::Result<u8, AccessDenied> {
        let state = self.state(granule).ok_or(AccessDenied::Range)?;
        match state.load(Ordering::Acquire) {
            found @ (PRESENT | PARTIAL) => Ok(found),
            REQUESTED => Err(AccessDenied::NotResident),
            // The same answer for every caller, until a connection has failed because of it.
            found if found == self.refused() => Err(AccessDenied::Gone),
            _ => {
                // A refused granule may have been mapped again.
                let request = |seen| matches!(seen & STATE, ABSENT | REFUSED).then_some(REQUESTED);
                if state.fetch_update(Ordering::AcqRel, Ordering::Acquire, request).is_ok() {
                    count(&self.counts.faults);
                    self.resolve_later(granule);
                }
                Err(AccessDenied::NotResident)
            }
        }
    }

    fn resolve_later(&self, granule: u64) {
        let weak_self = self.weak_self.clone();
        pager::submit(move || {
            if let Some(memory) = weak_self.upgrade() {
                memory.resolve(granule);
            }
        });
    }

    /// Faults a granule in and stores its new state.
    fn resolve(&self, granule: u64) {
        let found = self.probe(granule);
        if let Some(state) = self.state(granule) {
            state.store(found, Ordering::Release);
        }
    }

    /// Faults a granule in, and returns its state: present, partial or refused. After a transient
    /// failure it is absent, and the next use retries.
    fn probe(&self, granule: u64) -> u8 {
        // First: an epoch that begins meanwhile refers to an earlier answer.
        let refused = self.refused();
        let (from, to, page) = self.pages(granule);
        let Err(error) = self.populate(from, to, self.writes) else { return PRESENT };
        if is_transient(&error) {
            tracing::debug!(%error, "on-demand memory cannot be paged in at the moment");
            return ABSENT;
        }
        count(&self.counts.refused);
        tracing::debug!(%error, "on-demand memory is not mapped");
        let mapped = |at| self.touch(at, at + page, page).is_ok();
        match (from..to).step_by(page as usize).any(mapped) {
            true => PARTIAL,
            false => refused,
        }
    }

    /// The state of a granule that is refused in this fault epoch.
    fn refused(&self) -> u8 {
        REFUSED | (self.fault_epoch.current() as u8) << STATE.count_ones()
    }

    /// Start and end address of a granule's pages in the range, and the page size.
    fn pages(&self, granule: u64) -> (u64, u64, u64) {
        let page = rustix::param::page_size() as u64;
        let (start, end) = (self.range.address(), self.range.address() + self.range.len());
        let first = (start - start % GRANULE) + granule * GRANULE;
        let from = first.max(start - start % page);
        (from, (first + GRANULE).min(end.next_multiple_of(page)), page)
    }

    /// Faults the pages of a range in, for writing if `writes`.
    fn populate(&self, from: u64, to: u64, writes: bool) -> std::io::Result<()> {
        let page = rustix::param::page_size() as u64;
        let advice = match writes {
            true => Advice::LinuxPopulateWrite,
            false => Advice::LinuxPopulateRead,
        };
        let base = std::ptr::without_provenance_mut(from as usize);
        loop {
            // SAFETY: populating changes no contents, and is harmless on any range, mapped or not.
            match unsafe { madvise(base, (to - from) as usize, advice) } {
                // Some mappings have pages that process_vm_readv cannot copy: detect it now.
                Ok(()) => return copy(from, [0].as_mut_ptr(), 1, VmCopy::Out),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                // Either nothing is mapped there, or the machine is out of memory.
                Err(rustix::io::Errno::NOMEM) => {
                    return Err(match maps::query_range(from, to - from) {
                        Ok(_) | Err(maps::RangeError::Transient) => std::io::ErrorKind::OutOfMemory,
                        Err(_) => std::io::ErrorKind::NotFound,
                    }
                    .into());
                }
                // Either the mapping is not writable; or the kernel is older than 5.14 and does not
                // know the advice; or the mapping has no pages of its own.
                Err(rustix::io::Errno::INVAL) => {
                    return match maps::query_range(from, to - from) {
                        Err(maps::RangeError::Transient) => {
                            Err(std::io::ErrorKind::WouldBlock.into())
                        }
                        Ok(range) if range.writable || !writes => self.touch(from, to, page),
                        _ if writes => Err(std::io::ErrorKind::PermissionDenied.into()),
                        _ => self.touch(from, to, page),
                    };
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Faults pages in by having the kernel read a byte of each.
    fn touch(&self, from: u64, to: u64, page: u64) -> std::io::Result<()> {
        let mut byte = [0];
        let mut pages = (from..to).step_by(page as usize);
        pages.try_for_each(|at| copy(at, byte.as_mut_ptr(), 1, VmCopy::Out))
    }

    /// Faults a range in on the calling thread.
    pub(super) fn prefetch(&self, offset: u64, len: u64) -> Result<()> {
        for granule in self.granules(offset, len) {
            let Some(state) = self.state(granule) else { continue };
            // Present granules too: they may have been unmapped.
            let found = self.probe(granule);
            if state.swap(found, Ordering::AcqRel) == PRESENT && found == PRESENT {
                continue;
            }
            if found != PRESENT {
                self.populate_part(granule, offset, len, self.writes).map_err(|error| {
                    Error::new(
                        Kind::Freed,
                        format!("prefetch {} at offset {offset}", units::bytes(len)),
                    )
                    .why(format!("its pages are not mapped ({error})"))
                    .fix("map the memory again, or deregister it")
                })?;
            }
            count(&self.counts.prefetched);
        }
        Ok(())
    }

    /// Faults in the pages of a granule that a range touches.
    fn populate_part(
        &self,
        granule: u64,
        offset: u64,
        len: u64,
        writes: bool,
    ) -> std::io::Result<()> {
        let (from, to, page) = self.pages(granule);
        let start = self.range.address() + offset;
        let (first, last) = (from.max(start - start % page), to.min(start + len));
        self.populate(first, last.next_multiple_of(page), writes)
    }

    pub(super) fn prefetch_later(&self, offset: u64, len: u64) {
        let weak_self = self.weak_self.clone();
        pager::submit(move || {
            if let Some(Err(error)) = weak_self.upgrade().map(|memory| memory.prefetch(offset, len))
            {
                tracing::debug!(%error, "prefetch failed");
            }
        });
    }

    /// Checks the pages that a range touches in a partial granule, by asking the kernel each time.
    #[cold]
    fn check_partial(
        &self,
        granule: u64,
        offset: u64,
        len: u64,
        writes: bool,
    ) -> std::result::Result<(), AccessDenied> {
        let populated = self.populate_part(granule, offset, len, writes);
        populated.map_err(|error| {
            if is_transient(&error) { AccessDenied::NotResident } else { AccessDenied::Gone }
        })
    }

    /// Marks the granules of a range absent after a copy has failed.
    #[cold]
    fn invalidate(&self, offset: u64, len: u64) -> AccessDenied {
        for granule in self.granules(offset, len) {
            let Some(state) = self.state(granule) else { continue };
            let lost = |seen| matches!(seen, PRESENT | PARTIAL).then_some(ABSENT);
            let _ = state.fetch_update(Ordering::AcqRel, Ordering::Acquire, lost);
        }
        count(&self.counts.lost);
        AccessDenied::NotResident
    }
}

impl CustomMemory for OnDemand {
    fn check(&self, offset: u64, len: u64, writes: bool) -> std::result::Result<(), AccessDenied> {
        let mut outcome = Ok(());
        // Check all of them, so that their faults are resolved together. A refused one decides.
        for granule in self.granules(offset, len).take(MAX_CHECKED as usize) {
            let found = self.request(granule).and_then(|state| match state {
                PARTIAL => self.check_partial(granule, offset, len, writes),
                _ => Ok(()),
            });
            match found {
                Err(AccessDenied::NotResident) if outcome.is_ok() => {
                    outcome = Err(AccessDenied::NotResident)
                }
                Err(denied) if denied != AccessDenied::NotResident => outcome = Err(denied),
                _ => {}
            }
        }
        outcome
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> std::result::Result<(), AccessDenied> {
        let at = self.range.address() + offset;
        let done = copy(at, into.as_mut_ptr(), into.len(), VmCopy::Out);
        done.map_err(|_| self.invalidate(offset, into.len() as u64))
    }

    fn write(&self, offset: u64, from: &[u8]) -> std::result::Result<(), AccessDenied> {
        let at = self.range.address() + offset;
        let done = copy(at, from.as_ptr().cast_mut(), from.len(), VmCopy::In);
        done.map_err(|_| self.invalidate(offset, from.len() as u64))
    }

    fn atomic(&self, _: u64, _: &Atomic) -> std::result::Result<u64, AccessDenied> {
        // Remote atomic is rejected at registration.
        Err(AccessDenied::Rights)
    }
}

/// Whether the error is a temporary shortage, which says nothing about the memory itself.
fn is_transient(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, OutOfMemory, WouldBlock};
    matches!(error.kind(), Interrupted | OutOfMemory | WouldBlock)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum VmCopy {
    /// From registered memory (`process_vm_readv`).
    Out,
    /// To registered memory (`process_vm_writev`).
    In,
}

/// Has the kernel copy `len` bytes between `local`, which is mapped, and `at`, which may not be.
fn copy(at: u64, local: *mut u8, len: usize, direction: VmCopy) -> std::io::Result<()> {
    let mut done = 0;
    while done < len {
        let left = len - done;
        // SAFETY: `done` is less than `len`, so the sum is inside the caller's buffer.
        let near = libc::iovec { iov_base: unsafe { local.add(done) }.cast(), iov_len: left };
        let base = std::ptr::without_provenance_mut(at as usize + done);
        let far = libc::iovec { iov_base: base, iov_len: left };
        // SAFETY: the kernel accesses at most `left` bytes at `local + done`, which belong to the
        // caller, and checks every page of the other side, of which the registering program has
        // guaranteed that it is data for peers to read or write.
        let moved = unsafe {
            match direction {
                VmCopy::Out => libc::process_vm_readv(libc::getpid(), &near, 1, &far, 1, 0),
                VmCopy::In => libc::process_vm_writev(libc::getpid(), &near, 1, &far, 1, 0),
            }
        };
        match usize::try_from(moved) {
            Ok(moved) if moved > 0 => done += moved,
            Ok(_) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Err(_) => return Err(std::io::Error::last_os_error()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mr::MemorySource;
    use crate::mr::memory::SourceKind;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

    const LEN: usize = 2 * GRANULE as usize;

    /// Maps pages at `at`; with empty protection, replaces them by a reservation.
    fn cover(
        at: *mut std::ffi::c_void,
        len: usize,
        protection: ProtFlags,
    ) -> *mut std::ffi::c_void {
        let fixed = if at.is_null() { MapFlags::empty() } else { MapFlags::FIXED };
        // SAFETY: a new mapping, or a replacement of this test's own; no reference to it exists.
        unsafe { mmap_anonymous(at, len, protection, MapFlags::PRIVATE | fixed) }.unwrap()
    }

    fn wait_resolved(memory: &OnDemand, offset: u64) -> std::result::Result<(), AccessDenied> {
        loop {
            match memory.check(offset, 64, true) {
                Err(AccessDenied::NotResident) => std::thread::yield_now(),
                other => return other,
            }
        }
    }

    #[test]
    fn unmapped_memory_is_gone_for_all_callers_until_it_is_mapped_again() {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let base = cover(std::ptr::null_mut(), LEN, both);
        // SAFETY: mapped above; on-demand access detects what is unmapped later.
        let memory = unsafe { MemorySource::raw(base.cast(), LEN as u64) }.unwrap();
        let SourceKind::Host { range, .. } = memory.what else { unreachable!() };
        let fault_epoch = Arc::default();
        let memory = OnDemand::new(range, true, &fault_epoch);
        assert_eq!(wait_resolved(&memory, 0), Ok(()));
        for part in [4096, LEN] {
            cover(base, part, ProtFlags::empty());
            assert_eq!(
                memory.write(0, &[1; 64]),
                Err(AccessDenied::NotResident),
                "it is looked up again"
            );
            assert_eq!(wait_resolved(&memory, 0), Err(AccessDenied::Gone));
            // The answer is the same for every caller, and no call consumes it.
            for _ in 0..1000 {
                assert_eq!(memory.check(0, 64, true), Err(AccessDenied::Gone), "{part} bytes gone");
            }
            fault_epoch.advance();
            assert_eq!(wait_resolved(&memory, 0), Err(AccessDenied::Gone), "looked up again");
            cover(base, part, both);
            fault_epoch.advance();
            let start = std::time::Instant::now();
            while wait_resolved(&memory, 0) != Ok(()) {
                assert!(start.elapsed().as_secs() < 10, "it is mapped again");
            }
            memory.write(0, &[1; 64]).unwrap();
        }
    }

    /// A lookup of one granule in a new epoch does not renew what another one had answered before.
    #[test]
    fn a_granule_is_looked_up_again_though_another_was() {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let len = 2 * GRANULE as usize;
        let base = cover(std::ptr::null_mut(), len, both);
        // SAFETY: mapped above; on-demand access detects what is unmapped later.
        let memory = unsafe { MemorySource::raw(base.cast(), len as u64) }.unwrap();
        let SourceKind::Host { range, .. } = memory.what else { unreachable!() };
        let fault_epoch = Arc::default();
        let memory = OnDemand::new(range, true, &fault_epoch);
        cover(base, len, ProtFlags::empty());
        assert_eq!(wait_resolved(&memory, 0), Err(AccessDenied::Gone));
        cover(base, len, both);
        fault_epoch.advance();
        assert_eq!(wait_resolved(&memory, GRANULE), Ok(()), "the second granule");
        assert_eq!(wait_resolved(&memory, 0), Ok(()), "the first one is mapped again");
    }
}
