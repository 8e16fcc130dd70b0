//! CPU windows onto this GPU's memory, by each of the paths that there are.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::super::allocation::MemoryKind;
use super::super::backend::{DeviceBackend, MemoryBackend};
use super::super::bytes::SharedBytes;
use super::super::share::DmaBufRoute;
use super::super::window::{Mapped, MappingType, WindowPath};
use super::device::CudaDevice;
use super::gdrdrv;
use super::hook::Piece;
use super::memory::{self, CudaMemory, export_pages};
use super::naming::{self, Named, Sort};
use super::rm;
use super::sys::pointer;
use crate::error::{Error, Kind, Result};

/// Address space with device memory in it, in one piece or several; unmapped as a whole.
pub(super) struct Span {
    base: NonNull<u8>,
    len: usize,
    /// A part that is not ours any more.
    hole: Option<(usize, usize)>,
}

// SAFETY: it only owns the range; access is the window's business.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

const READ_AND_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

impl Span {
    /// All of it from one descriptor.
    pub(super) fn of(fd: &OwnedFd, offset: u64, len: u64) -> Result<Self> {
        let size = usize::try_from(len).map_err(|_| map_error(rustix::io::Errno::NOMEM))?;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let base = unsafe {
            mmap(std::ptr::null_mut(), size, READ_AND_WRITE, MapFlags::SHARED, fd, offset)
        };
        let span = Self::new(base, size)?;
        span.keep_from_children(0, size)?;
        Ok(span)
    }

    /// Inaccessible, for pieces to be placed in.
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

    /// Maps the first `len` bytes of a descriptor at `at` in the span.
    fn place(&mut self, fd: &OwnedFd, at: usize, len: usize) -> Result<()> {
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(map_error(rustix::io::Errno::INVAL));
        }
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let to = self.at(at as u64).as_ptr().cast();
        // SAFETY: in range of the span, which is ours; what is replaced there was inaccessible.
        let placed = unsafe { mmap(to, len, READ_AND_WRITE, flags, fd, 0) };
        if let Err(error) = placed {
            // The kernel has unmapped what was there before it asked the driver. Another thread may have
            // got those addresses meanwhile: they must not be unmapped again.
            self.hole = Some((at, at + len));
            return Err(map_error(error));
        }
        self.keep_from_children(at, len)
    }

    /// A child process must not reach the parent's device memory.
    fn keep_from_children(&self, at: usize, len: usize) -> Result<()> {
        // SAFETY: mapped just now, and ours.
        unsafe { madvise(self.at(at as u64).as_ptr().cast(), len, Advice::LinuxDontFork) }
            .map_err(map_error)
    }

    pub(super) fn at(&self, offset: u64) -> NonNull<u8> {
        // SAFETY: callers ask for offsets inside the span that they mapped.
        unsafe { self.base.add(offset as usize) }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let (end, start) = self.hole.unwrap_or((self.len, self.len));
        for (from, to) in [(0, end), (start, self.len)] {
            if from == to {
                continue;
            }
            // SAFETY: the range is ours, and the window that used it is gone.
            if let Err(error) = unsafe { munmap(self.at(from as u64).as_ptr().cast(), to - from) } {
                tracing::warn!(%error, "a window was not unmapped");
            }
        }
    }
}

fn map_error(error: rustix::io::Errno) -> Error {
    Error::os("map GPU memory", &error.into())
}

/// Maps `offset..offset + len` of `memory` by one path.
pub(super) fn map(memory: &CudaMemory, offset: u64, len: u64, path: WindowPath) -> Result<Mapped> {
    let device = &memory.device;
    let start = memory.address.raw() + offset;
    let current = device.enter()?;
    if memory::ask_pointer(device, pointer::IS_MANAGED, start).unwrap_or(0) != 0 {
        return Err(Error::new(Kind::Unsupported, "map GPU memory")
            .on(device.label())
            .why("it is managed memory, which moves between the host and the GPU and has no fixed place")
            .fix("allocate it with cudaMalloc, or copy it"));
    }
    let mapped = match path {
        WindowPath::DmaBuf => by_dmabuf(device, start, len),
        WindowPath::ResourceManager => by_resource_manager(device, start, len),
        WindowPath::Gdrdrv => gdrdrv::map(start, len),
        WindowPath::Memfd => {
            Err(Error::new(Kind::Unsupported, "").why("only simulated memory lies in a memfd"))
        }
    };
    drop(current);
    mapped
}

/// Newer drivers let the CPU map an exported dma-buf (R610, CUDA 13.3); others say so.
fn by_dmabuf(device: &CudaDevice, start: u64, len: u64) -> Result<Mapped> {
    device.capabilities().dmabuf_export.require("export a dma-buf", device.info())?;
    if let Some(refusal) = device.proofs.dmabuf_refusal.get() {
        return Err(refusal.clone());
    }
    let (fd, first) = export_pages(device, start, len, DmaBufRoute::Default)?;
    let page = rustix::param::page_size() as u64;
    let size = (start + len).next_multiple_of(page) - first;
    let span = Span::of(&fd, 0, size).map_err(|error| match error.kind() {
        // The driver's own answer, which does not change: it need not be asked again.
        Kind::Os(524) => {
            let refusal = Error::new(Kind::Unsupported, "map a dma-buf").why(
                "this driver's dma-bufs cannot be mapped; R610 (CUDA 13.3) is the first whose can",
            );
            device.proofs.dmabuf_refusal.get_or_init(|| refusal).clone()
        }
        _ => error,
    })?;
    let base = span.at(start - first);
    Ok(Mapped::new(base, len, MappingType::WriteCombining, Box::new(span)))
}

fn by_resource_manager(device: &Arc<CudaDevice>, start: u64, len: u64) -> Result<Mapped> {
    let sort = naming::sort_of(device, start);
    prove(device, sort)?;
    let mapped = map_named(device, naming::name(device, sort, start, len)?, start, len)?;
    compare(device, mapped.base(), start, len)?;
    Ok(mapped)
}

/// Maps a range around plain memory, within the object that it lies in.
pub(super) fn map_around(memory: &CudaMemory, start: u64, len: u64) -> Result<Mapped> {
    let (device, anchor) = (&memory.device, memory.address.raw());
    let _current = device.enter()?;
    if naming::sort_of(device, anchor) != Sort::Plain {
        return Err(Error::new(Kind::Unsupported, "map the pages around memory")
            .on(device.label())
            .why("it is not plain memory (cuMemAlloc), which alone shares pages"));
    }
    prove(device, Sort::Plain)?;
    let mapped = map_named(device, naming::by_handle(device, anchor, start, len)?, start, len)?;
    // Only the anchor is known to be memory that the copy engine reads.
    // SAFETY: the anchor lies inside the range that was just mapped.
    let at_anchor = unsafe { mapped.base().add((anchor - start) as usize) };
    compare(device, at_anchor, anchor, memory.len)?;
    Ok(mapped)
}

fn map_named(device: &CudaDevice, named: Named, start: u64, len: u64) -> Result<Mapped> {
    let pci = device.info().pci.ok_or_else(|| {
        Error::new(Kind::Unsupported, "map GPU memory").why("the GPU's PCI address is not known")
    })?;
    let client = rm::Client::get()?;
    let gpu = client.gpu(pci)?;
    let Named { start: first, pieces } = named;
    let mut held = Vec::with_capacity(pieces.len());
    let mut take = |piece: &Piece| -> Result<OwnedFd> {
        let object = client.adopt(gpu, piece.client, piece.object)?;
        let (mapping, fd) = object.map(piece.offset, piece.len)?;
        held.push(mapping);
        Ok(fd)
    };
    let span = match &*pieces {
        [piece] => Span::of(&take(piece)?, 0, piece.len)?,
        pieces => {
            let mut span = Span::reserve(pieces.iter().map(|piece| piece.len).sum())?;
            let mut at = 0;
            for piece in pieces {
                span.place(&take(piece)?, at, piece.len as usize)?;
                at += piece.len as usize;
            }
            span
        }
    };
    let base = span.at(start - first);
    // In this order: first the addresses go, then what they led to.
    Ok(Mapped::new(base, len, MappingType::WriteCombining, Box::new((span, held))))
}

/// What the proofs of this device's sorts of memory gave, once each.
#[derive(Default)]
pub(super) struct Proofs {
    sorts: parking_lot::Mutex<Vec<(Sort, Result<()>)>>,
    dmabuf_refusal: std::sync::OnceLock<Error>,
}

/// Proves on scratch memory that memory of this sort is named as we think: a pattern written one way must
/// be read back the other, in both directions, at both ends of two neighbours.
fn prove(device: &Arc<CudaDevice>, sort: Sort) -> Result<()> {
    let mut proofs = device.proofs.sorts.lock();
    if let Some((_, outcome)) = proofs.iter().find(|(known, _)| *known == sort) {
        return outcome.clone();
    }
    let outcome = try_sort(device, sort);
    if let Err(error) = &outcome {
        tracing::warn!(%error, ?sort, "the resource manager's path is refused for this memory");
    }
    proofs.push((sort, outcome.clone()));
    outcome
}

fn try_sort(device: &Arc<CudaDevice>, sort: Sort) -> Result<()> {
    const LEN: u64 = 200_000;
    let kind = match sort {
        Sort::Plain => MemoryKind::Plain,
        Sort::Vmm => MemoryKind::Vmm,
        Sort::Pool => MemoryKind::Pool,
    };
    for seed in [1, 2] {
        let scratch = memory::allocate(device.clone(), LEN, kind)?;
        let outcome = check_both_ways(device, sort, &scratch, seed);
        scratch.free()?;
        outcome?;
    }
    Ok(())
}

/// A word that differs from seed to seed and from place to place (the generator SplitMix64), so
/// that neither stale nor misplaced memory passes for what was written.
fn test_word(seed: u64, at: u64) -> u64 {
    let mut z = seed.wrapping_add((at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn check_both_ways(device: &CudaDevice, sort: Sort, scratch: &CudaMemory, seed: u64) -> Result<()> {
    let len = scratch.len();
    let start = scratch.address().raw();
    let mapped = map_named(device, naming::name(device, sort, start, len)?, start, len)?;
    // SAFETY: just mapped for this length, and dropped after the last use of the view.
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
            return Err(Error::new(Kind::Unsupported, "prove the resource manager's mapping")
                .why("scratch memory does not read back through it as it was written"));
        }
    }
    Ok(())
}

/// Compares a window with what the copy engine reads, without writing: some of the words must agree. (A
/// running kernel may change the others meanwhile.)
fn compare(device: &CudaDevice, base: NonNull<u8>, start: u64, len: u64) -> Result<()> {
    const SAMPLES: u64 = 8;
    const TRIES: u32 = 3;
    // SAFETY: the caller has just mapped this length there, and keeps it mapped meanwhile.
    let bytes = unsafe { SharedBytes::new(base, len as usize) };
    let size = len.min(8) as usize;
    for _ in 0..TRIES {
        for sample in 0..SAMPLES {
            let at = (len - size as u64) / SAMPLES.max(1) * sample;
            let (mut through_window, mut by_engine) = ([0; 8], [0; 8]);
            bytes.read(at, &mut through_window[..size])?;
            device.copy_beside(by_engine.as_mut_ptr() as u64, start + at, size)?;
            if through_window == by_engine {
                return Ok(());
            }
        }
    }
    Err(Error::new(Kind::Unsupported, "check a window")
        .why("what it shows is not what the copy engine reads from that memory"))
}
