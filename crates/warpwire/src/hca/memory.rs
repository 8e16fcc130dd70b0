//! Memory of queues, which the engine and posters both access.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::error::{Error, Result};
use crate::mem::{Allocation, DeviceAddr, SharedBytes, Window};

/// Memory for queues, doorbell records and doorbells. Clones share the memory.
///
/// Host memory serves CPU threads; pinned memory, and device memory behind a window, serve streams
/// and kernels too. The engine accesses all of them alike, and trusts nothing that it reads there.
///
/// ```
/// use warpwire::hca::QueueMemory;
/// let memory = QueueMemory::host(4096)?;
/// memory.bytes().store_u32(0, 7)?;
/// assert_eq!(memory.bytes().load_u32(0)?, 7);
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone)]
pub struct QueueMemory {
    backing: Arc<Backing>,
    /// The CPU address, valid as long as `backing` lives; posting and polling use only this.
    base: NonNull<u8>,
    len: usize,
    /// Whether the CPU mapping is write-combining, so that later stores may overtake earlier ones:
    /// true for windows.
    is_write_combining: bool,
}

enum Backing {
    /// A slice of other memory.
    Slice(QueueMemory, u64),
    /// Memory mapped by a driver.
    Mapped(#[allow(dead_code)] Arc<dyn Any + Send + Sync>), // only keeps it mapped
    Host(#[allow(dead_code)] Anonymous), // only keeps it mapped
    Pinned(Allocation),
    Window(Window),
}

/// An anonymous mapping.
struct Anonymous {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping may be used and unmapped by any thread; its bytes are accessed only through
// `SharedBytes`.
unsafe impl Send for Anonymous {}
// SAFETY: as above.
unsafe impl Sync for Anonymous {}

impl Anonymous {
    fn new(len: u64) -> Result<Self> {
        let failed = |why: std::io::Error| Error::os(format!("map {len} bytes for queues"), &why);
        let size =
            usize::try_from(len).map_err(|_| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapped =
            unsafe { mmap_anonymous(std::ptr::null_mut(), size, protection, MapFlags::PRIVATE) };
        let base = NonNull::new(mapped.map_err(|code| failed(code.into()))?.cast());
        let base = base.ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        Ok(Self { base, len: size })
    }
}

impl Drop for Anonymous {
    fn drop(&mut self) {
        // SAFETY: this value's own mapping, which only its `QueueMemory` refers to.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

// SAFETY: every kind of backing may be used from any thread; driver mappings are shared memory,
// accessed only through `SharedBytes`.
unsafe impl Send for QueueMemory {}
// SAFETY: as above.
unsafe impl Sync for QueueMemory {}

impl fmt::Debug for QueueMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { base, len, .. } = self;
        match &*self.backing {
            Backing::Slice(whole, offset) => write!(f, "{len} bytes at {offset} of {whole:?}"),
            Backing::Mapped(_) => write!(f, "Mapped({len} bytes at {base:p})"),
            Backing::Host(_) => write!(f, "Host({len} bytes at {base:p})"),
            Backing::Pinned(memory) => write!(f, "{memory:?}"),
            Backing::Window(window) => write!(f, "{window:?}"),
        }
    }
}

impl QueueMemory {
    /// `bytes` stay valid as long as `backing` lives.
    fn new(backing: Backing, bytes: (NonNull<u8>, usize), is_write_combining: bool) -> Self {
        let (base, len) = bytes;
        Self { backing: Arc::new(backing), base, len, is_write_combining }
    }

    /// Ordinary host memory, zeroed. It needs no file descriptor, and a forked child has a copy of
    /// its own.
    pub fn host(len: u64) -> Result<Self> {
        let memory = Anonymous::new(len)?;
        let bytes = (memory.base, memory.len);
        Ok(Self::new(Backing::Host(memory), bytes, false))
    }

    /// Pinned host memory, which the device accesses as well. Fails if the allocation is not pinned
    /// memory.
    pub fn pinned(memory: Allocation) -> Result<Self> {
        let raw_parts = raw_parts(memory.host_bytes()?);
        Ok(Self::new(Backing::Pinned(memory), raw_parts, false))
    }

    /// Device memory, through the CPU's window onto it.
    pub fn window(window: Window) -> Self {
        let raw_parts = raw_parts(window.bytes());
        Self::new(Backing::Window(window), raw_parts, true)
    }

    /// A slice, which keeps the whole alive.
    pub(crate) fn slice(&self, offset: u64, len: u64) -> Self {
        let raw_parts = raw_parts(self.bytes().slice_or_empty(offset, len));
        Self::new(Backing::Slice(self.clone(), offset), raw_parts, self.is_write_combining)
    }

    /// Memory mapped by a driver.
    ///
    /// # Safety
    /// `len` bytes at `base` stay mapped as long as `owner` lives, and no references to them exist.
    pub(crate) unsafe fn mapped(
        base: NonNull<u8>,
        len: u64,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self::new(Backing::Mapped(owner), (base, len as usize), false)
    }

    /// The bytes, as the CPU sees them.
    #[inline]
    pub fn bytes(&self) -> SharedBytes<'_> {
        // SAFETY: `backing` keeps them mapped as long as this lives: its own memory, or a driver's
        // by the contract of `mapped`. Memory that was freed elsewhere is kept mapped by the
        // handle.
        unsafe { SharedBytes::new(self.base, self.len) }
    }

    /// Whether later stores may overtake earlier ones.
    #[inline]
    pub(super) fn is_write_combining(&self) -> bool {
        self.is_write_combining
    }

    /// Flushes write-combining buffers; does nothing for other memory.
    #[inline]
    pub(crate) fn flush_stores(&self) {
        if self.is_write_combining() {
            crate::mem::copy::store_fence();
        }
    }

    /// The address that a device accesses it by, if one can.
    pub fn device_address(&self) -> Option<DeviceAddr> {
        match &*self.backing {
            Backing::Mapped(_) | Backing::Host(_) => None,
            Backing::Slice(whole, offset) => {
                whole.device_address().map(|at| DeviceAddr::new(at.raw() + offset))
            }
            Backing::Pinned(memory) => Some(memory.address()),
            Backing::Window(window) => Some(window.address()),
        }
    }
}

/// The address and length of a view, for callers that keep its memory alive.
fn raw_parts(bytes: SharedBytes<'_>) -> (NonNull<u8>, usize) {
    (bytes.base(), bytes.len() as usize)
}
