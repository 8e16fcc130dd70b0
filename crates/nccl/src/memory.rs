//! Registered memory: NCCL's buffers, and the words of a receiver.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use warpwire::mem::{self, DeviceAddr};
use warpwire::verbs::{Access, MemorySource, Mr, Remote};

use crate::lanes::{Lanes, remotes};
use crate::log;
use crate::result::{Failure, INVALID_ARGUMENT, Result};
use crate::ring::{WORDS, word_at};

/// A buffer of NCCL's, registered on every lane of a connection: `mhandle`.
pub(crate) struct MemoryHandle {
    regions: Vec<Mr>,
    /// It is a GPU's.
    is_device: bool,
}

impl MemoryHandle {
    /// Registers `len` bytes.
    ///
    /// # Errors
    /// If the range is null, empty or exceeds the address space.
    ///
    /// # Safety
    /// The bytes stay mapped until the handle is dropped. NCCL orders its own accesses by the
    /// completion of requests.
    pub(crate) unsafe fn register(
        lanes: &Lanes,
        base: *mut u8,
        len: usize,
        access: Access,
    ) -> Result<Self> {
        // SAFETY: guaranteed by the caller.
        let regions = unsafe { register(lanes, base, len, access) };
        Ok(Self { regions: regions?, is_device: false })
    }

    /// Registers `len` bytes of a GPU. They are accessed through a CPU window only: NCCL's kernels
    /// wait for the data, and a driver call may wait for them (while another thread is in
    /// `cudaFree`, for example).
    ///
    /// # Errors
    /// If no GPU of this process has all of the memory, or there is no window onto it.
    ///
    /// # Safety
    /// The bytes stay allocated until the handle is dropped. NCCL and its kernels order their own
    /// accesses by the completion of requests.
    pub(crate) unsafe fn register_device(
        lanes: &Lanes,
        base: *mut u8,
        len: usize,
        access: Access,
    ) -> Result<Self> {
        let address = base.addr() as u64;
        let invalid = |why: warpwire::Error| {
            let text = format!("{len} bytes at {address:#x} of type CUDA (2): {why}");
            Failure::new(INVALID_ARGUMENT, text)
        };
        let address = DeviceAddr::new(address);
        let device = mem::owner_of(address).map_err(invalid)?;
        // SAFETY: guaranteed by the caller.
        let memory = unsafe { device.borrow(address, len as u64) }.map_err(invalid)?;
        let regions = lanes.iter().map(|lane| {
            let memory = MemorySource::from(memory.whole()?).window_only();
            lane.context.register(&lane.pd, memory, access)
        });
        let regions = regions.collect::<warpwire::Result<Vec<Mr>>>().map_err(invalid)?;
        if let Some(mr) = regions.first() {
            log::info(format_args!("{len} bytes of {} by {}", device.label(), mr.path()));
        }
        Ok(Self { regions, is_device: true })
    }

    /// Waits until what arrived is visible to the GPU. The engines have written it, with a store
    /// fence behind each packet; a load over the same bus does not pass their stores, whichever
    /// thread or mapping made them.
    #[inline]
    pub(crate) fn flush(&self) {
        if self.is_device
            && let Some(region) = self.regions.first()
        {
            region.flush();
        }
    }

    /// Its region on a lane.
    ///
    /// # Errors
    /// If it was registered for a connection with fewer lanes.
    #[inline]
    pub(crate) fn region(&self, lane: usize) -> Result<&Mr> {
        let other = || Failure::new(INVALID_ARGUMENT, "memory of another communicator");
        self.regions.get(lane).ok_or_else(other)
    }

    /// Ends the registration.
    ///
    /// # Errors
    /// If a peer is still accessing the memory.
    pub(crate) fn deregister(self) -> Result {
        for region in self.regions {
            region.deregister()?;
        }
        Ok(())
    }
}

/// The words that say which parts have arrived (invariants 3 and 4). Not in memory that peers map:
/// a word must be a packet behind its data.
pub(crate) struct Words {
    // Dropped before the words, in this order.
    regions: Vec<Mr>,
    words: Box<[AtomicU64]>,
}

impl Words {
    pub(crate) fn new(lanes: &Lanes) -> Result<Self> {
        let words: Box<[AtomicU64]> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let (base, len) = (words.as_ptr().cast::<u8>().cast_mut(), WORDS * size_of::<u64>());
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        // SAFETY: the words live longer than their regions, and are atomics.
        let regions = unsafe { register(lanes, base, len, access) }?;
        Ok(Self { regions, words })
    }

    pub(crate) fn remotes(&self) -> Vec<Remote> {
        remotes(&self.regions)
    }

    #[inline]
    pub(crate) fn load(&self, slot: usize, entry: usize, lane: usize) -> u64 {
        self.words.get(word_at(slot, entry, lane)).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Zeroes the words of a receive on the first `lanes` lanes.
    #[inline]
    pub(crate) fn clear(&self, slot: usize, entry: usize, lanes: usize) {
        let first = word_at(slot, entry, 0);
        let words = self.words.get(first..first + lanes).unwrap_or_default();
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

/// # Safety
/// The bytes stay mapped until the regions are dropped, and those that peers may write are accessed
/// with atomic operations, or after the peer's request is complete.
unsafe fn register(lanes: &Lanes, base: *mut u8, len: usize, access: Access) -> Result<Vec<Mr>> {
    let regions = lanes.iter().map(|lane| {
        // SAFETY: guaranteed by the caller.
        let memory = unsafe { MemorySource::raw(base, len as u64) };
        let memory = memory.map_err(|why| Failure::new(INVALID_ARGUMENT, why))?;
        Ok(lane.context.register(&lane.pd, memory, access)?)
    });
    regions.collect()
}
