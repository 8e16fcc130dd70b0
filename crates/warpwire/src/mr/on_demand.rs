//! Host memory that is found when it is needed.
//!
//! The range is divided into granules. The first use of one asks the pager to bring its pages in, and the queue pair
//! waits meanwhile; from then on the kernel copies, which looks every page up again: memory that was unmapped since
//! is an error, and not a fault of this process.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use std::sync::{Arc, OnceLock, Weak};

use rustix::mm::{Advice, madvise};

use super::denied::Denied;
use super::host::HostRange;
use super::pager;
use super::reach::Reach;
use crate::error::{Error, Kind, Result};
use crate::mlx5::Atomic;
use crate::units;

/// How much is found at a time.
const GRANULE: u64 = 64 << 10;
/// Granules whose states lie together, in a piece that is made when it is first needed.
const IN_PIECE: u64 = 4096;
/// A question about a long range is about its beginning: its packets ask again for themselves.
const MOST_CHECKED: u64 = 17;

/// What is known of a granule.
const ABSENT: u8 = 0;
const WANTED: u8 = 1;
const PRESENT: u8 = 2;
const REFUSED: u8 = 3;

/// How often memory was looked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
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
pub(super) struct Counts {
    pub(super) faults: AtomicU64,
    pub(super) prefetched: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) lost: AtomicU64,
}

impl Counts {
    pub(super) fn get(&self) -> Faults {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Faults {
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
    pieces: Box<[OnceLock<Box<[AtomicU8]>>]>,
    counts: Counts,
    /// For the pager.
    me: Weak<Self>,
}

impl OnDemand {
    pub(super) fn new(range: HostRange, writes: bool) -> Arc<Self> {
        let granules = range.len().div_ceil(GRANULE) + 1;
        let pieces = (0..granules.div_ceil(IN_PIECE)).map(|_| OnceLock::new()).collect();
        Arc::new_cyclic(|me| Self {
            range,
            writes,
            pieces,
            counts: Counts::default(),
            me: me.clone(),
        })
    }

    pub(super) fn len(&self) -> u64 {
        self.range.len()
    }

    pub(super) fn address(&self) -> u64 {
        self.range.address()
    }

    pub(super) fn faults(&self) -> Faults {
        self.counts.get()
    }

    /// Which granules a range touches: granules lie on round addresses, as pages do.
    fn granules(&self, offset: u64, len: u64) -> std::ops::Range<u64> {
        let skew = self.range.address() % GRANULE;
        (offset + skew) / GRANULE..(offset + skew + len).div_ceil(GRANULE)
    }

    fn state(&self, granule: u64) -> Option<&AtomicU8> {
        let piece = self.pieces.get((granule / IN_PIECE) as usize)?;
        let new = || (0..IN_PIECE).map(|_| AtomicU8::new(ABSENT)).collect();
        piece.get_or_init(new).get((granule % IN_PIECE) as usize)
    }

    /// Whether a granule is there; if not, it is looked for from now on.
    fn want(&self, granule: u64) -> std::result::Result<(), Denied> {
        let state = self.state(granule).ok_or(Denied::Range)?;
        match state.load(Ordering::Acquire) {
            PRESENT => Ok(()),
            WANTED => Err(Denied::Absent),
            REFUSED => {
                // Said once; the next use looks again.
                state.store(ABSENT, Ordering::Release);
                Err(Denied::Gone)
            }
            _ => {
                if state
                    .compare_exchange(ABSENT, WANTED, Ordering::AcqRel, Ordering::Acquire)
                    .is_ok()
                {
                    count(&self.counts.faults);
                    let me = self.me.clone();
                    pager::later(move || {
                        if let Some(memory) = me.upgrade() {
                            memory.settle(granule);
                        }
                    });
                }
                Err(Denied::Absent)
            }
        }
    }

    /// Looks for a granule and notes what came of it.
    fn settle(&self, granule: u64) {
        let found = self.bring_in(granule);
        if let Err(error) = &found {
            count(&self.counts.refused);
            tracing::debug!(%error, "memory on demand is not there");
        }
        if let Some(state) = self.state(granule) {
            state.store(if found.is_ok() { PRESENT } else { REFUSED }, Ordering::Release);
        }
    }

    /// Makes the kernel find the pages of a granule.
    fn bring_in(&self, granule: u64) -> std::io::Result<()> {
        let page = rustix::param::page_size() as u64;
        let (start, end) = (self.range.address(), self.range.address() + self.range.len());
        let first = (start - start % GRANULE) + granule * GRANULE;
        let from = first.max(start - start % page);
        let to = (first + GRANULE).min(end.next_multiple_of(page));
        let advice = match self.writes {
            true => Advice::LinuxPopulateWrite,
            false => Advice::LinuxPopulateRead,
        };
        let base = std::ptr::without_provenance_mut(from as usize);
        loop {
            // SAFETY: populating changes no contents, and harms no range, whatever lies there.
            match unsafe { madvise(base, (to - from) as usize, advice) } {
                // Some mappings have pages that the kernel copies for nobody: better found out now.
                Ok(()) => return copy(from.max(start), [0].as_mut_ptr(), 1, Way::Out),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                // Kernels before 5.14, and mappings without pages of their own, do not know it.
                Err(rustix::io::Errno::INVAL) => return self.touch(from, to, page),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Has the kernel read a byte of each page.
    fn touch(&self, from: u64, to: u64, page: u64) -> std::io::Result<()> {
        let mut byte = [0];
        let mut pages = (from..to).step_by(page as usize);
        pages.try_for_each(|at| copy(at, byte.as_mut_ptr(), 1, Way::Out))
    }

    /// Finds a range and waits for it.
    pub(super) fn prefetch(&self, offset: u64, len: u64) -> Result<()> {
        for granule in self.granules(offset, len) {
            let Some(state) = self.state(granule) else { continue };
            if state.load(Ordering::Acquire) == PRESENT {
                continue;
            }
            let what = || format!("prefetch {} at offset {offset}", units::bytes(len));
            self.bring_in(granule).map_err(|error| {
                count(&self.counts.refused);
                Error::new(Kind::Freed, what())
                    .why(format!("the pages are not there ({error})"))
                    .fix("map the memory again, or deregister it")
            })?;
            count(&self.counts.prefetched);
            state.store(PRESENT, Ordering::Release);
        }
        Ok(())
    }

    pub(super) fn prefetch_later(&self, offset: u64, len: u64) {
        let me = self.me.clone();
        pager::later(move || {
            if let Some(Err(error)) = me.upgrade().map(|memory| memory.prefetch(offset, len)) {
                tracing::debug!(%error, "a prefetch found nothing");
            }
        });
    }

    /// A copy failed: what was thought to be there must be looked for again.
    #[cold]
    fn lose(&self, offset: u64, len: u64) -> Denied {
        for granule in self.granules(offset, len) {
            if let Some(state) = self.state(granule) {
                let _ =
                    state.compare_exchange(PRESENT, ABSENT, Ordering::AcqRel, Ordering::Acquire);
            }
        }
        count(&self.counts.lost);
        Denied::Absent
    }
}

impl Reach for OnDemand {
    fn check(&self, offset: u64, len: u64, _writes: bool) -> std::result::Result<(), Denied> {
        let mut outcome = Ok(());
        // All of them, so that several are looked for at once; one that is not to be found decides.
        for granule in self.granules(offset, len).take(MOST_CHECKED as usize) {
            match self.want(granule) {
                Err(Denied::Absent) if outcome.is_ok() => outcome = Err(Denied::Absent),
                Err(denied) if denied != Denied::Absent => outcome = Err(denied),
                _ => {}
            }
        }
        outcome
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> std::result::Result<(), Denied> {
        let at = self.range.address() + offset;
        let done = copy(at, into.as_mut_ptr(), into.len(), Way::Out);
        done.map_err(|_| self.lose(offset, into.len() as u64))
    }

    fn write(&self, offset: u64, from: &[u8]) -> std::result::Result<(), Denied> {
        let at = self.range.address() + offset;
        let done = copy(at, from.as_ptr().cast_mut(), from.len(), Way::In);
        done.map_err(|_| self.lose(offset, from.len() as u64))
    }

    fn atomic(&self, _: u64, _: &Atomic) -> std::result::Result<u64, Denied> {
        // Refused when it was registered.
        Err(Denied::Rights)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Out of the memory that may not be there.
    Out,
    /// Into it.
    In,
}

/// Has the kernel copy between `own`, which is there, and `at`, which may not be.
fn copy(at: u64, own: *mut u8, len: usize, way: Way) -> std::io::Result<()> {
    let mut done = 0;
    while done < len {
        let left = len - done;
        // SAFETY: inside what the caller passed.
        let here = libc::iovec { iov_base: unsafe { own.add(done) }.cast(), iov_len: left };
        let there = std::ptr::without_provenance_mut(at as usize + done);
        let there = libc::iovec { iov_base: there, iov_len: left };
        // SAFETY: the kernel reads, or writes, at most `left` bytes at `own`, which belong to the caller, and checks
        // every page of the other side, which the caller of the registration vouched to be data of its own.
        let moved = unsafe {
            match way {
                Way::Out => libc::process_vm_readv(libc::getpid(), &here, 1, &there, 1, 0),
                Way::In => libc::process_vm_writev(libc::getpid(), &here, 1, &there, 1, 0),
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
