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
    known: HashMap<File, Weak<Export>>,
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
        exports.known.retain(|_, known| known.strong_count() > 0);
    }
    exports.known.insert(file, Arc::downgrade(&export));
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
    let file = identify(fd)?;
    let Some(export) = exports().lock().known.get(&file).and_then(Weak::upgrade) else {
        return Ok(None);
    };
    let memory = match &export.memory {
        Owner::Theirs(memory) => memory.clone(),
        Owner::Ours(memory) => memory.upgrade().ok_or_else(|| {
            Error::new(Kind::Freed, "find the memory of a dma-buf")
                .why("it was freed after it had been exported")
                .fix("keep the allocation for as long as its dma-buf is used")
        })?,
    };
    Ok(Some((memory, export.start)))
}
