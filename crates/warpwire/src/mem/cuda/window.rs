//! CPU windows onto this GPU's memory, by each available path.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::super::allocation::MemoryKind;
use super::super::backend::{DeviceBackend, MemoryBackend};
use super::super::bytes::SharedBytes;
use super::super::share::DmaBufRoute;
use super::super::window::{CpuMapping, MappingType, WindowPath};
use super::device::CudaDevice;
use super::gdrdrv;
use super::hook::ObjectRange;
use super::memory::{self, CudaMemory, Origin, export_pages};
use super::naming::{self, AllocKind, RmRange};
use super::rm;
use super::sys::{Opaque64, pointer};
use crate::error::{Error, Kind, Result};

/// An address range with device memory mapped into it, from one descriptor or several; unmapped as
/// a whole.
pub(super) struct MappedRange {
    base: NonNull<u8>,
    len: usize,
    /// A part that no longer belongs to this value.
    hole: Option<(usize, usize)>,
}

// SAFETY: it only owns the address range; the window governs access.
unsafe impl Send for MappedRange {}
// SAFETY: as above.
unsafe impl Sync for MappedRange {}

const READ_AND_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

impl MappedRange {
    /// Maps all of it from one descriptor.
    pub(super) fn of(fd: &OwnedFd, offset: u64, len: u64) -> Result<Self> {
        let size = usize::try_from(len).map_err(|_| map_error(rustix::io::Errno::NOMEM))?;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let base = unsafe {
            mmap(std::ptr::null_mut(), size, READ_AND_WRITE, MapFlags::SHARED, fd, offset)
        };
        let mapped_range = Self::new(base, size)?;
        mapped_range.dont_fork(0, size)?;
        Ok(mapped_range)
    }

    /// Reserves inaccessible address space, to map descriptors into.
    fn reserve(len: u64) -> Result<Self> {
        let size = usize::try_from(len).map_err(|_| map_error(rustix::io::Errno::NOMEM))?;
        // SAFETY: as above.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), size, ProtFlags::empty(), MapFlags::PRIVATE)
        };
        Self::new(base, size)
    }

    fn new(base: rustix::io::Result<*mut std::ffi::c_void>, len: usize) -> Result<Self> {
        let base = NonNull::new(base.map_err(map_error)?.cast());
        let base = base.ok_or_else(|| map_error(rustix::io::Errno::NOMEM))?;
        Ok(Self { base, len, hole: None })
    }

    /// Maps the first `len` bytes of a descriptor at offset `at` of the range.
    fn map_at(&mut self, fd: &OwnedFd, at: usize, len: usize) -> Result<()> {
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(map_error(rustix::io::Errno::INVAL));
        }
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let to = self.at(at as u64).as_ptr().cast();
        // SAFETY: inside the range, which this value owns; what is replaced was inaccessible.
        let placed = unsafe { mmap(to, len, READ_AND_WRITE, flags, fd, 0) };
        if let Err(error) = placed {
            // The kernel unmapped the old mapping before it called the driver. Another thread may
            // have been given these addresses since: they must not be unmapped again.
            self.hole = Some((at, at + len));
            return Err(map_error(error));
        }
        self.dont_fork(at, len)
    }

    /// Excludes the mapping from forked children: they must not access the parent's device memory.
    fn dont_fork(&self, at: usize, len: usize) -> Result<()> {
        // SAFETY: just mapped, and owned by this value.
        unsafe { madvise(self.at(at as u64).as_ptr().cast(), len, Advice::LinuxDontFork) }
            .map_err(map_error)
    }

    pub(super) fn at(&self, offset: u64) -> NonNull<u8> {
        // SAFETY: callers pass offsets inside the range that they mapped.
        unsafe { self.base.add(offset as usize) }
    }
}

impl Drop for MappedRange {
    fn drop(&mut self) {
        let (end, start) = self.hole.unwrap_or((self.len, self.len));
        for (from, to) in [(0, end), (start, self.len)] {
            if from == to {
                continue;
            }
            // SAFETY: this value owns the range, and the window that used it is gone.
            if let Err(error) = unsafe { munmap(self.at(from as u64).as_ptr().cast(), to - from) } {
                tracing::warn!(%error, "a window was not unmapped");
            }
        }
    }
}

fn map_error(error: rustix::io::Errno) -> Error {
    Error::os("map GPU memory", &error.into())
}

/// Maps `offset..offset + len` of `memory` by the given path.
pub(super) fn map(
    memory: &CudaMemory,
    offset: u64,
    len: u64,
    path: WindowPath,
) -> Result<CpuMapping> {
    let device = &memory.device;
    let start = memory.address.raw() + offset;
    let current = device.make_current()?;
    if memory::pointer_attribute_u32(device, pointer::IS_MANAGED, start).unwrap_or(0) != 0 {
        return Err(Error::new(Kind::Unsupported, "map GPU memory")
            .on(device.label())
            .why("it is managed memory, which migrates between host and GPU")
            .fix("allocate it with cudaMalloc, or copy it"));
    }
    let mapped = match path {
        WindowPath::DmaBuf => by_dmabuf(device, start, len),
        WindowPath::ResourceManager => match &memory.origin {
            Origin::Imported { base, handle } => {
                imported_by_resource_manager(device, (*base, handle), start, len)
            }
            _ => by_resource_manager(device, start, len),
        },
        WindowPath::Gdrdrv => gdrdrv::map(start, len),
        WindowPath::Memfd => {
            Err(Error::new(Kind::Unsupported, "").why("only simulated memory is a memfd"))
        }
    };
    drop(current);
    mapped
}

/// Maps an exported dma-buf. Supported by newer drivers (R610, CUDA 13.3); others report an error.
fn by_dmabuf(device: &CudaDevice, start: u64, len: u64) -> Result<CpuMapping> {
    device.capabilities().dmabuf_export.require("export a dma-buf", device.info())?;
    if let Some(refusal) = device.verified_kinds.dmabuf_error.get() {
        return Err(refusal.clone());
    }
    let (fd, first) = export_pages(device, start, len, DmaBufRoute::Default)?;
    let page = rustix::param::page_size() as u64;
    let size = (start + len).next_multiple_of(page) - first;
    let mapped_range = MappedRange::of(&fd, 0, size).map_err(|error| match error.kind() {
        // ENOTSUPP is the driver's final answer: remember it.
        Kind::Os(524) => {
            let refusal = Error::new(Kind::Unsupported, "map a dma-buf").why(
                "this driver's dma-bufs cannot be mapped; R610 (CUDA 13.3) is the first whose can",
            );
            device.verified_kinds.dmabuf_error.get_or_init(|| refusal).clone()
        }
        _ => error,
    })?;
    let base = mapped_range.at(start - first);
    Ok(CpuMapping::new(base, len, MappingType::WriteCombining, Box::new(mapped_range)))
}

fn by_resource_manager(device: &Arc<CudaDevice>, start: u64, len: u64) -> Result<CpuMapping> {
    let alloc_kind = naming::alloc_kind_of(device, start);
    verify(device, alloc_kind)?;
    let mapped =
        map_rm_range(device, naming::resolve(device, alloc_kind, start, len)?, start, len)?;
    compare(device, mapped.base(), start, len)?;
    Ok(mapped)
}

/// Maps plain memory of another process, which was opened at this address with this handle.
fn imported_by_resource_manager(
    device: &Arc<CudaDevice>,
    (base, handle): (u64, &Opaque64),
    start: u64,
    len: u64,
) -> Result<CpuMapping> {
    verify(device, AllocKind::Plain)?;
    let rm_range = naming::by_foreign_handle(handle, base, start, len)?;
    let mapped = map_rm_range(device, rm_range, start, len)?;
    compare(device, mapped.base(), start, len)?;
    Ok(mapped)
}

/// Maps a range around plain memory, within the object that contains it.
pub(super) fn map_around(memory: &CudaMemory, start: u64, len: u64) -> Result<CpuMapping> {
    let (device, anchor) = (&memory.device, memory.address.raw());
    let _current = device.make_current()?;
    if naming::alloc_kind_of(device, anchor) != AllocKind::Plain {
        return Err(Error::new(Kind::Unsupported, "map the pages around memory")
            .on(device.label())
            .why("only plain memory (cuMemAlloc) shares pages with other allocations"));
    }
    verify(device, AllocKind::Plain)?;
    let mapped = map_rm_range(device, naming::by_handle(device, anchor, start, len)?, start, len)?;
    // Only the anchor is known to be memory that the copy engine can read.
    // SAFETY: the anchor is inside the range that was just mapped.
    let at_anchor = unsafe { mapped.base().add((anchor - start) as usize) };
    compare(device, at_anchor, anchor, memory.len)?;
    Ok(mapped)
}

fn map_rm_range(
    device: &CudaDevice,
    rm_range: RmRange,
    start: u64,
    len: u64,
) -> Result<CpuMapping> {
    let pci = device.info().pci.ok_or_else(|| {
        Error::new(Kind::Unsupported, "map GPU memory").why("the GPU's PCI address is not known")
    })?;
    let client = rm::Client::get()?;
    let gpu = client.gpu(pci)?;
    let RmRange { start: first, object_ranges } = rm_range;
    let mut mappings = Vec::with_capacity(object_ranges.len());
    let mut take = |object_range: &ObjectRange| -> Result<OwnedFd> {
        let object = client.dup_object(gpu, object_range.client, object_range.object)?;
        let (mapping, fd) = object.map(object_range.offset, object_range.len)?;
        mappings.push(mapping);
        Ok(fd)
    };
    let mapped_range = match &*object_ranges {
        [object_range] => MappedRange::of(&take(object_range)?, 0, object_range.len)?,
        object_ranges => {
            let mut mapped_range = MappedRange::reserve(
                object_ranges.iter().map(|object_range| object_range.len).sum(),
            )?;
            let mut at = 0;
            for object_range in object_ranges {
                mapped_range.map_at(&take(object_range)?, at, object_range.len as usize)?;
                at += object_range.len as usize;
            }
            mapped_range
        }
    };
    let base = mapped_range.at(start - first);
    // Drop order: the mapping first, then the objects behind it.
    Ok(CpuMapping::new(base, len, MappingType::WriteCombining, Box::new((mapped_range, mappings))))
}

/// Outcomes of the verification, once per kind of memory.
#[derive(Default)]
pub(super) struct VerifiedKinds {
    outcomes: parking_lot::Mutex<Vec<(AllocKind, Result<()>)>>,
    dmabuf_error: std::sync::OnceLock<Error>,
}

/// Verifies on scratch memory that memory of this kind is identified as expected: a pattern written
/// by the copy engine must be read back through the window, and vice versa, at several offsets of
/// two allocations.
fn verify(device: &Arc<CudaDevice>, alloc_kind: AllocKind) -> Result<()> {
    let mut verified_kinds = device.verified_kinds.outcomes.lock();
    if let Some((_, outcome)) = verified_kinds.iter().find(|(known, _)| *known == alloc_kind) {
        return outcome.clone();
    }
    let outcome = verify_kind(device, alloc_kind);
    if let Err(error) = &outcome {
        tracing::warn!(%error, ?alloc_kind, "the resource manager path is disabled for this kind");
    }
    verified_kinds.push((alloc_kind, outcome.clone()));
    outcome
}

fn verify_kind(device: &Arc<CudaDevice>, alloc_kind: AllocKind) -> Result<()> {
    const LEN: u64 = 200_000;
    let kind = match alloc_kind {
        AllocKind::Plain => MemoryKind::Plain,
        AllocKind::Vmm => MemoryKind::Vmm,
        AllocKind::Pool => MemoryKind::Pool,
    };
    for seed in [1, 2] {
        let scratch = memory::allocate(device.clone(), LEN, kind)?;
        let outcome = check_both_ways(device, alloc_kind, &scratch, seed);
        scratch.free()?;
        outcome?;
    }
    Ok(())
}

/// A word that differs by seed and offset (SplitMix64), so that neither stale nor misplaced memory
/// matches what was written.
pub(super) fn test_word(seed: u64, at: u64) -> u64 {
    let mut z = seed.wrapping_add((at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn check_both_ways(
    device: &CudaDevice,
    alloc_kind: AllocKind,
    scratch: &CudaMemory,
    seed: u64,
) -> Result<()> {
    let len = scratch.len();
    let start = scratch.address().raw();
    let mapped =
        map_rm_range(device, naming::resolve(device, alloc_kind, start, len)?, start, len)?;
    // SAFETY: just mapped with this length, and dropped after the last use of the view.
    let bytes = unsafe { SharedBytes::new(mapped.base(), len as usize) };
    let pattern = |at: u64| test_word(seed, at).to_le_bytes();
    for at in [0, 4096, len / 2 / 8 * 8, len - 8] {
        let mut seen = [0; 8];
        scratch.write(at, &pattern(at))?;
        bytes.read(at, &mut seen)?;
        let from_device = seen == pattern(at);
        bytes.write(at, &pattern(at + 1))?;
        super::super::copy::store_fence();
        scratch.read(at, &mut seen)?;
        if !from_device || seen != pattern(at + 1) {
            return Err(Error::new(Kind::Unsupported, "verify the resource manager's mapping")
                .why("scratch memory does not read back through it as written"));
        }
    }
    Ok(())
}

/// Compares a window with what the copy engine reads, without writing: at least one of the sampled
/// words must agree. (A running kernel may be changing the others.)
fn compare(device: &CudaDevice, base: NonNull<u8>, start: u64, len: u64) -> Result<()> {
    const SAMPLES: u64 = 8;
    const MAX_ATTEMPTS: u32 = 3;
    // SAFETY: the caller has just mapped this length there, and keeps it mapped.
    let bytes = unsafe { SharedBytes::new(base, len as usize) };
    let size = len.min(8) as usize;
    for _ in 0..MAX_ATTEMPTS {
        for sample in 0..SAMPLES {
            let at = (len - size as u64) / SAMPLES.max(1) * sample;
            let (mut through_window, mut by_engine) = ([0; 8], [0; 8]);
            bytes.read(at, &mut through_window[..size])?;
            device.copy_sync(by_engine.as_mut_ptr() as u64, start + at, size)?;
            if through_window == by_engine {
                return Ok(());
            }
        }
    }
    Err(Error::new(Kind::Unsupported, "check a window")
        .why("its contents differ from what the copy engine reads"))
}
