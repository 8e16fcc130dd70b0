//! Table of the dma-bufs that this process exported, so that an importer in the same process finds
//! the memory behind a descriptor.
//!
//! A dma-buf is identified by its file's device and inode number, which the kernel does not reuse.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use rustix::fs::fstat;

use super::address::DeviceAddr;
use super::allocation::{Allocation, WeakAllocation};
use crate::error::{Error, Kind, Result};

/// Device and inode number of a file.
type FileId = (u64, u64);

/// Maximum number of exports retained for descriptors that were handed over; then the oldest is
/// dropped.
const MAX_RETAINED: usize = 1 << 16;

#[derive(Default)]
struct Exports {
    /// Several exports may share a file: the simulator has one memfd for many ranges.
    entries: HashMap<FileId, Vec<Weak<DmaBufExport>>>,
    retained: std::collections::VecDeque<Arc<DmaBufExport>>,
}

fn exports() -> &'static Mutex<Exports> {
    static EXPORTS: OnceLock<Mutex<Exports>> = OnceLock::new();
    EXPORTS.get_or_init(Mutex::default)
}

/// An exported range.
#[derive(Debug)]
pub(super) struct DmaBufExport {
    memory: MemoryRef,
    /// Device address of the descriptor's byte 0.
    start: DeviceAddr,
}

#[derive(Debug)]
enum MemoryRef {
    /// Memory of this library; the export does not keep it alive.
    Owned(WeakAllocation),
    /// Memory of another library, which decides its lifetime.
    Borrowed(Allocation),
}

impl DmaBufExport {
    /// The memory, unless it has been freed.
    fn memory(&self) -> Option<Allocation> {
        match &self.memory {
            MemoryRef::Borrowed(memory) => Some(memory.clone()),
            MemoryRef::Owned(memory) => memory.upgrade(),
        }
    }

    /// Keeps the entry after the [`DmaBuf`](super::DmaBuf) is gone.
    pub(super) fn keep_alive(self: Arc<Self>) {
        let mut exports = exports().lock();
        if exports.retained.len() == MAX_RETAINED {
            exports.retained.pop_front();
        }
        exports.retained.push_back(self);
    }
}

/// Records that `fd` begins at `start` in `memory`.
pub(super) fn record(
    fd: BorrowedFd<'_>,
    memory: &Allocation,
    start: DeviceAddr,
) -> Result<Arc<DmaBufExport>> {
    let file = file_id(fd)?;
    let owner = match memory.kind() {
        super::MemoryKind::Borrowed => MemoryRef::Borrowed(memory.clone()),
        _ => MemoryRef::Owned(memory.downgrade()),
    };
    let export = Arc::new(DmaBufExport { memory: owner, start });
    let mut exports = exports().lock();
    if exports.entries.len() > 2 * exports.retained.len() + 64 {
        exports.entries.retain(|_, entries| entries.iter().any(|export| export.strong_count() > 0));
    }
    let entries = exports.entries.entry(file).or_default();
    entries.retain(|export| export.strong_count() > 0);
    entries.push(Arc::downgrade(&export));
    Ok(export)
}

fn file_id(fd: BorrowedFd<'_>) -> Result<FileId> {
    let status = fstat(fd).map_err(|error| Error::os("stat a dma-buf", &error.into()))?;
    Ok((status.st_dev, status.st_ino))
}

/// The memory behind a dma-buf exported by this process, and the device address of the dma-buf's
/// byte 0; `None` if this process did not export it. Fails with `Freed` if the memory has been
/// freed.
///
/// ```
/// use std::os::fd::AsFd;
/// use warpwire::mem;
/// let memory = mem::open("sim:0").unwrap().alloc(1 << 20).unwrap();
/// let buffer = memory.export_dmabuf(4096, 4096).unwrap();
/// let (found, start) = mem::exported(buffer.as_fd()).unwrap().unwrap();
/// assert_eq!((found.address(), start), (memory.address(), memory.address()));
/// assert_eq!(buffer.offset(), 4096);
/// assert!(mem::exported(std::io::stdin().as_fd()).unwrap().is_none());
/// ```
pub fn exported(fd: BorrowedFd<'_>) -> Result<Option<(Allocation, DeviceAddr)>> {
    find_best(fd, |_, _| true)
}

/// Like [`exported`]. If a descriptor was exported more than once, prefers the export that contains
/// the range.
pub(crate) fn exported_range(
    fd: BorrowedFd<'_>,
    offset: u64,
    len: u64,
) -> Result<Option<(Allocation, DeviceAddr)>> {
    find_best(fd, |memory, start| {
        let skip = start.raw().wrapping_add(offset).wrapping_sub(memory.address().raw());
        skip.checked_add(len).is_some_and(|end| end <= memory.len())
    })
}

/// The live memory for which `is_preferred` holds; if there is none, the one with the greatest
/// length.
fn find_best(
    fd: BorrowedFd<'_>,
    is_preferred: impl Fn(&Allocation, DeviceAddr) -> bool,
) -> Result<Option<(Allocation, DeviceAddr)>> {
    let file = file_id(fd)?;
    let exports: Vec<_> = match exports().lock().entries.get(&file) {
        Some(entries) => entries.iter().filter_map(Weak::upgrade).collect(),
        None => Vec::new(),
    };
    if exports.is_empty() {
        return Ok(None);
    }
    let live = exports.iter().filter_map(|export| Some((export.memory()?, export.start)));
    let best = live.max_by_key(|(memory, start)| (is_preferred(memory, *start), memory.len()));
    best.map(Some).ok_or_else(|| {
        Error::new(Kind::Freed, "find the memory of a dma-buf")
            .why("it was freed after the export")
            .fix("keep the allocation while its dma-buf is in use")
    })
}
