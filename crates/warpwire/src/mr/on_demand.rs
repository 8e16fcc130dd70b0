//! Host memory that is found when it is needed.
//!
//! The range is divided into granules. The first use of one asks the pager to bring its pages in, and the queue pair
//! waits meanwhile; from then on the kernel copies, which looks every page up again: memory that was unmapped since
//! is an error, and not a fault of this process. A granule of which only a part is there serves that part.
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

/// How much is found at a time.
const GRANULE: u64 = 64 << 10;
/// Granules whose states lie together, in a piece that is made when it is first needed.
const GRANULES_PER_CHUNK: u64 = 4096;
/// A question about a long range is about its beginning: its packets ask again for themselves.
const MAX_CHECKED: u64 = 17;

/// What is known of a granule.
const ABSENT: u8 = 0;
const REQUESTED: u8 = 1;
const PRESENT: u8 = 2;
const REFUSED: u8 = 3;
/// Some pages of it are there, or all of them for reading only: each use asks.
const PARTIAL: u8 = 4;

/// How often memory was looked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OdpStats {
    /// Uses that found nothing there yet, and had it found.
    pub faults: u64,
    /// Pieces that a prefetch found.
    pub prefetched: u64,
    /// Pieces that were not to be found.
    pub refused: u64,
    /// Pieces that had been there, and were gone, or elsewhere, when they were next used.
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

/// Host memory by its address.
pub(super) struct OnDemand {
    range: HostRange,
    writes: bool,
    chunks: Box<[OnceLock<Box<[AtomicU8]>>]>,
    counts: OdpCounters,
    /// How many conclusions had been drawn when something was last refused.
    refused: AtomicU64,
    fault_epoch: Arc<FaultEpoch>,
    /// For the pager.
    weak_self: Weak<Self>,
}

/// How often a user of the registry drew the conclusion from memory that was refused: a connection failed. What is
/// refused stays so until then, because several parts of a connection ask, and only one may conclude; and is looked for
/// anew afterwards, because it may be mapped again.
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
    /// Nothing, if the kernel copies by address for this process; else why it does not.
    pub(super) fn available() -> Result<()> {
        static TRIED: OnceLock<Result<()>> = OnceLock::new();
        let tried = TRIED.get_or_init(|| {
            let (from, mut to) = ([1u8], [0u8]);
            let at = from.as_ptr().expose_provenance() as u64;
            copy(at, to.as_mut_ptr(), 1, VmCopy::Out).map_err(|error| {
                Error::new(Kind::Unsupported, "register memory on demand")
                    .why(format!("the kernel copies nothing by address here ({error})"))
                    .fix("leave out on-demand, or let the process call process_vm_readv and process_vm_writev")
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
            refused: AtomicU64::new(0),
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

    /// Which granules a range touches: granules lie on round addresses, as pages do.
    fn granules(&self, offset: u64, len: u64) -> std::ops::Range<u64> {
        let skew = self.range.address() % GRANULE;
        (offset + skew) / GRANULE..(offset + skew + len).div_ceil(GRANULE)
    }

    fn state(&self, granule: u64) -> Option<&AtomicU8> {
        let chunk = self.chunks.get((granule / GRANULES_PER_CHUNK) as usize)?;
        let new = || (0..GRANULES_PER_CHUNK).map(|_| AtomicU8::new(ABSENT)).collect();
        chunk.get_or_init(new).get((granule % GRANULES_PER_CHUNK) as usize)
    }

    /// Whether a granule is there, in part perhaps; if not, it is looked for from now on.
    fn request(&self, granule: u64) -> std::result::Result<u8, AccessDenied> {
        let state = self.state(granule).ok_or(AccessDenied::Range)?;
        match state.load(Ordering::Acquire) {
            found @ (PRESENT | PARTIAL) => Ok(found),
            REQUESTED => Err(AccessDenied::NotResident),
            // The same for all who ask, until somebody has drawn the conclusion.
            REFUSED if self.refused.load(Ordering::Acquire) == self.fault_epoch.current() => {
                Err(AccessDenied::Gone)
            }
            _ => {
                // It may be mapped again since it was refused.
                let away = |seen| matches!(seen, ABSENT | REFUSED).then_some(REQUESTED);
                if state.fetch_update(Ordering::AcqRel, Ordering::Acquire, away).is_ok() {
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

    /// Looks for a granule and notes what came of it.
    fn resolve(&self, granule: u64) {
        // Before it is looked for: who concludes something meanwhile has another answer in mind.
        self.refused.store(self.fault_epoch.current(), Ordering::Release);
        let found = self.probe(granule);
        if let Some(state) = self.state(granule) {
            state.store(found, Ordering::Release);
        }
    }

    /// Looks for a granule: whether it is there, in part or not at all. Nothing is concluded from a shortage: then it is
    /// looked for again when it is next used.
    fn probe(&self, granule: u64) -> u8 {
        let (from, to, page) = self.pages(granule);
        let Err(error) = self.populate(from, to, self.writes) else { return PRESENT };
        if is_transient(&error) {
            tracing::debug!(%error, "memory on demand cannot be looked for now");
            return ABSENT;
        }
        count(&self.counts.refused);
        tracing::debug!(%error, "memory on demand is not there");
        let there = |at| self.touch(at, at + page, page).is_ok();
        match (from..to).step_by(page as usize).any(there) {
            true => PARTIAL,
            false => REFUSED,
        }
    }

    /// The pages of a granule: where they begin and end, and how long one is.
    fn pages(&self, granule: u64) -> (u64, u64, u64) {
        let page = rustix::param::page_size() as u64;
        let (start, end) = (self.range.address(), self.range.address() + self.range.len());
        let first = (start - start % GRANULE) + granule * GRANULE;
        let from = first.max(start - start % page);
        (from, (first + GRANULE).min(end.next_multiple_of(page)), page)
    }

    /// Makes the kernel find pages.
    fn populate(&self, from: u64, to: u64, writes: bool) -> std::io::Result<()> {
        let page = rustix::param::page_size() as u64;
        let advice = match writes {
            true => Advice::LinuxPopulateWrite,
            false => Advice::LinuxPopulateRead,
        };
        let base = std::ptr::without_provenance_mut(from as usize);
        loop {
            // SAFETY: populating changes no contents, and harms no range, whatever lies there.
            match unsafe { madvise(base, (to - from) as usize, advice) } {
                // Some mappings have pages that the kernel copies for nobody: better found out now.
                Ok(()) => return copy(from, [0].as_mut_ptr(), 1, VmCopy::Out),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                // Said where nothing is mapped, and where the machine has no page left for what is.
                Err(rustix::io::Errno::NOMEM) => {
                    return Err(match maps::query_range(from, to - from) {
                        Ok(_) | Err(maps::RangeError::Transient) => std::io::ErrorKind::OutOfMemory,
                        Err(_) => std::io::ErrorKind::NotFound,
                    }
                    .into());
                }
                // Said of mappings that may not be written; and by kernels before 5.14, which do not know it, and of
                // mappings without pages of their own.
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

    /// Has the kernel read a byte of each page.
    fn touch(&self, from: u64, to: u64, page: u64) -> std::io::Result<()> {
        let mut byte = [0];
        let mut pages = (from..to).step_by(page as usize);
        pages.try_for_each(|at| copy(at, byte.as_mut_ptr(), 1, VmCopy::Out))
    }

    /// Finds a range and waits for it.
    pub(super) fn prefetch(&self, offset: u64, len: u64) -> Result<()> {
        for granule in self.granules(offset, len) {
            let Some(state) = self.state(granule) else { continue };
            // Also what is thought to be there: it may be gone.
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
                    .why(format!("the pages are not there ({error})"))
                    .fix("map the memory again, or deregister it")
                })?;
            }
            count(&self.counts.prefetched);
        }
        Ok(())
    }

    /// Whether the pages of a granule that a range touches are there, where not all of them are.
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
                tracing::debug!(%error, "a prefetch found nothing");
            }
        });
    }

    /// Whether that part of a granule is there of which others are not. It is asked of the kernel each time.
    #[cold]
    fn check_partial(
        &self,
        granule: u64,
        offset: u64,
        len: u64,
        writes: bool,
    ) -> std::result::Result<(), AccessDenied> {
        let there = self.populate_part(granule, offset, len, writes);
        there.map_err(|error| {
            if is_transient(&error) { AccessDenied::NotResident } else { AccessDenied::Gone }
        })
    }

    /// A copy failed: what was thought to be there must be looked for again.
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
        // All of them, so that several are looked for at once; one that is not to be found decides.
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
        // Refused when it was registered.
        Err(AccessDenied::Rights)
    }
}

/// Whether it says nothing of the memory that was looked for: the machine is short of something, for now.
fn is_transient(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, OutOfMemory, WouldBlock};
    matches!(error.kind(), Interrupted | OutOfMemory | WouldBlock)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum VmCopy {
    /// Out of the memory that may not be there.
    Out,
    /// Into it.
    In,
}

/// Has the kernel copy between `local`, which is there, and `at`, which may not be.
fn copy(at: u64, local: *mut u8, len: usize, direction: VmCopy) -> std::io::Result<()> {
    let mut done = 0;
    while done < len {
        let left = len - done;
        // SAFETY: inside what the caller passed.
        let here = libc::iovec { iov_base: unsafe { local.add(done) }.cast(), iov_len: left };
        let there = std::ptr::without_provenance_mut(at as usize + done);
        let there = libc::iovec { iov_base: there, iov_len: left };
        // SAFETY: the kernel reads, or writes, at most `left` bytes at `local`, which belong to the caller, and checks
        // every page of the other side, which the caller of the registration vouched to be data of its own.
        let moved = unsafe {
            match direction {
                VmCopy::Out => libc::process_vm_readv(libc::getpid(), &here, 1, &there, 1, 0),
                VmCopy::In => libc::process_vm_writev(libc::getpid(), &here, 1, &there, 1, 0),
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

    /// Maps pages, or takes them away and keeps their addresses.
    fn cover(
        at: *mut std::ffi::c_void,
        len: usize,
        protection: ProtFlags,
    ) -> *mut std::ffi::c_void {
        let fixed = if at.is_null() { MapFlags::empty() } else { MapFlags::FIXED };
        // SAFETY: a new mapping, or one in the place of this test's own; no reference to it exists.
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
    fn what_is_gone_is_gone_for_all_who_ask_until_it_is_there_again() {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let base = cover(std::ptr::null_mut(), LEN, both);
        // SAFETY: mapped above; what is not there any more is found out.
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
                "it is looked for"
            );
            assert_eq!(wait_resolved(&memory, 0), Err(AccessDenied::Gone));
            // Whoever asks, and however often: nobody takes the answer away from another.
            for _ in 0..1000 {
                assert_eq!(memory.check(0, 64, true), Err(AccessDenied::Gone), "{part} bytes gone");
            }
            fault_epoch.advance();
            assert_eq!(wait_resolved(&memory, 0), Err(AccessDenied::Gone), "looked for again");
            cover(base, part, both);
            fault_epoch.advance();
            let start = std::time::Instant::now();
            while wait_resolved(&memory, 0) != Ok(()) {
                assert!(start.elapsed().as_secs() < 10, "it is there again");
            }
            memory.write(0, &[1; 64]).unwrap();
        }
    }
}
