//! What the dma-bufs that this process exported name: an importer in the same process finds the memory by them.
//!
//! A descriptor is told by its file, whose number the kernel uses once.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use rustix::fs::fstat;

use super::address::DeviceAddr;
use super::allocation::{Allocation, WeakAllocation};
use crate::error::{Error, Kind, Result};

/// The device and number of a file.
type File = (u64, u64);

/// How many descriptors that were handed over are remembered.
const MOST_KEPT: usize = 1 << 16;

#[derive(Default)]
struct Exports {
    /// Several exports may share a file: the simulator has one for each place of its memory.
    known: HashMap<File, Vec<Weak<Export>>>,
    kept: std::collections::VecDeque<Arc<Export>>,
}

fn exports() -> &'static Mutex<Exports> {
    static EXPORTS: OnceLock<Mutex<Exports>> = OnceLock::new();
    EXPORTS.get_or_init(Mutex::default)
}

/// Memory that was exported.
#[derive(Debug)]
pub(super) struct Export {
    memory: Owner,
    /// The address of the descriptor's first byte.
    start: DeviceAddr,
}

#[derive(Debug)]
enum Owner {
    /// Its handles decide how long it lives.
    Ours(WeakAllocation),
    /// Another library does.
    Theirs(Allocation),
}

impl Export {
    /// The memory, if it is still there.
    fn memory(&self) -> Option<Allocation> {
        match &self.memory {
            Owner::Theirs(memory) => Some(memory.clone()),
            Owner::Ours(memory) => memory.upgrade(),
        }
    }

    /// Remembers it although nobody holds the [`DmaBuf`](super::DmaBuf) any more.
    pub(super) fn keep(self: Arc<Self>) {
        let mut exports = exports().lock();
        if exports.kept.len() == MOST_KEPT {
            exports.kept.pop_front();
        }
        exports.kept.push_back(self);
    }
}

/// Notes that `fd` begins at `start`, in this memory.
pub(super) fn note(
    fd: BorrowedFd<'_>,
    memory: &Allocation,
    start: DeviceAddr,
) -> Result<Arc<Export>> {
    let file = identify(fd)?;
    let owner = match memory.kind() {
        super::MemoryKind::Borrowed => Owner::Theirs(memory.clone()),
        _ => Owner::Ours(memory.downgrade()),
    };
    let export = Arc::new(Export { memory: owner, start });
    let mut exports = exports().lock();
    if exports.known.len() > 2 * exports.kept.len() + 64 {
        exports.known.retain(|_, known| known.iter().any(|export| export.strong_count() > 0));
    }
    let known = exports.known.entry(file).or_default();
    known.retain(|export| export.strong_count() > 0);
    known.push(Arc::downgrade(&export));
    Ok(export)
}

fn identify(fd: BorrowedFd<'_>) -> Result<File> {
    let status = fstat(fd).map_err(|error| Error::os("look at a dma-buf", &error.into()))?;
    Ok((status.st_dev, status.st_ino))
}

/// The memory that a dma-buf of this process names, and the address at which the dma-buf begins; nothing if this
/// process did not export it.
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
    find(fd, |_, _| true)
}

/// The same, where a descriptor was exported more than once: by the export that holds this range, if one does.
pub(crate) fn exported_range(
    fd: BorrowedFd<'_>,
    offset: u64,
    len: u64,
) -> Result<Option<(Allocation, DeviceAddr)>> {
    find(fd, |memory, start| {
        let skip = start.raw().wrapping_add(offset).wrapping_sub(memory.address().raw());
        skip.checked_add(len).is_some_and(|end| end <= memory.len())
    })
}

/// The memory that pleases `wanted`; else the longest.
fn find(
    fd: BorrowedFd<'_>,
    wanted: impl Fn(&Allocation, DeviceAddr) -> bool,
) -> Result<Option<(Allocation, DeviceAddr)>> {
    let file = identify(fd)?;
    let exports: Vec<_> = match exports().lock().known.get(&file) {
        Some(known) => known.iter().filter_map(Weak::upgrade).collect(),
        None => Vec::new(),
    };
    if exports.is_empty() {
        return Ok(None);
    }
    let there = exports.iter().filter_map(|export| Some((export.memory()?, export.start)));
    let best = there.max_by_key(|(memory, start)| (wanted(memory, *start), memory.len()));
    best.map(Some).ok_or_else(|| {
        Error::new(Kind::Freed, "find the memory of a dma-buf")
            .why("it was freed after it had been exported")
            .fix("keep the allocation for as long as its dma-buf is used")
    })
}
