//! Where queues lie: memory that the engine and whoever posts both reach.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::Result;
use crate::mem::{Allocation, DeviceAddr, SharedBytes, Window};
use crate::mr::HostMemory;

/// Memory for queues, doorbell records and doorbells. Clones are the same memory.
///
/// Host memory serves CPUs; pinned memory and device memory behind a window serve streams and kernels too. The
/// engine reads and writes all of them alike, and trusts nothing that it finds there.
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
    /// Where the CPU finds it, for as long as the place is there; posting and polling look nowhere else.
    base: NonNull<u8>,
    len: usize,
    /// Whether stores are combined and kept, so that those that follow may overtake them: a window does that.
    is_write_combining: bool,
}

enum Backing {
    Empty,
    /// A part of other memory.
    Slice(QueueMemory, u64),
    /// What a driver has mapped.
    Mapped(#[allow(dead_code)] Arc<dyn Any + Send + Sync>), // kept, not looked at
    Host(HostMemory),
    Pinned(Allocation),
    Window(Window),
}

// SAFETY: every sort may be used from any thread; what a driver has mapped is shared memory, seen through SharedBytes only.
unsafe impl Send for QueueMemory {}
// SAFETY: as above.
unsafe impl Sync for QueueMemory {}

impl fmt::Debug for QueueMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { base, len, .. } = self;
        match &*self.backing {
            Backing::Empty => f.write_str("Nothing"),
            Backing::Slice(whole, offset) => write!(f, "{len} bytes at {offset} of {whole:?}"),
            Backing::Mapped(_) => write!(f, "Mapped({len} bytes at {base:p})"),
            Backing::Host(memory) => write!(f, "{memory:?}"),
            Backing::Pinned(memory) => write!(f, "{memory:?}"),
            Backing::Window(window) => write!(f, "{window:?}"),
        }
    }
}

impl QueueMemory {
    /// Memory whose bytes are there as long as the place is.
    fn new(backing: Backing, bytes: (NonNull<u8>, usize), is_write_combining: bool) -> Self {
        let (base, len) = bytes;
        Self { backing: Arc::new(backing), base, len, is_write_combining }
    }

    /// Ordinary host memory.
    pub fn host(len: u64) -> Result<Self> {
        let memory = HostMemory::new(len)?;
        let raw_parts = raw_parts(memory.bytes());
        Ok(Self::new(Backing::Host(memory), raw_parts, false))
    }

    /// Pinned host memory that a device reaches as well; the allocation must be of that kind.
    pub fn pinned(memory: Allocation) -> Result<Self> {
        let raw_parts = raw_parts(memory.host_bytes()?);
        Ok(Self::new(Backing::Pinned(memory), raw_parts, false))
    }

    /// Device memory, through the CPU's window onto it.
    pub fn window(window: Window) -> Self {
        let raw_parts = raw_parts(window.bytes());
        Self::new(Backing::Window(window), raw_parts, true)
    }

    /// A part of it.
    pub(crate) fn slice(&self, offset: u64, len: u64) -> Self {
        let raw_parts = raw_parts(self.bytes().slice_or_empty(offset, len));
        Self::new(Backing::Slice(self.clone(), offset), raw_parts, self.is_write_combining)
    }

    /// Memory that a driver has mapped.
    ///
    /// # Safety
    /// So many bytes at `base` stay mapped as long as `owner` lives, and nobody has references to them.
    pub(crate) unsafe fn mapped(
        base: NonNull<u8>,
        len: u64,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self::new(Backing::Mapped(owner), (base, len as usize), false)
    }

    /// No memory at all: every access is out of range.
    pub(crate) fn no_memory() -> Self {
        Self::new(Backing::Empty, raw_parts(SharedBytes::empty()), false)
    }

    /// The bytes, as the CPU sees them.
    #[inline]
    pub fn bytes(&self) -> SharedBytes<'_> {
        // SAFETY: the place keeps them mapped as long as this lives: its own memory, or a driver's by its promise. What was freed
        // elsewhere is kept mapped by the handle.
        unsafe { SharedBytes::new(self.base, self.len) }
    }

    /// Whether stores are combined and kept, so that those that follow may overtake them.
    #[inline]
    pub(super) fn is_write_combining(&self) -> bool {
        self.is_write_combining
    }

    /// Puts what was stored on its way, where stores are combined and kept; elsewhere it is there already.
    #[inline]
    pub(crate) fn flush_stores(&self) {
        if self.is_write_combining() {
            crate::mem::copy::store_fence();
        }
    }

    /// Where a device finds it, if one does.
    pub fn device_address(&self) -> Option<DeviceAddr> {
        match &*self.backing {
            Backing::Empty | Backing::Mapped(_) | Backing::Host(_) => None,
            Backing::Slice(whole, offset) => {
                whole.device_address().map(|at| DeviceAddr::new(at.raw() + offset))
            }
            Backing::Pinned(memory) => Some(memory.address()),
            Backing::Window(window) => Some(window.address()),
        }
    }
}

/// Where a view lies, for those who keep its memory alive.
fn raw_parts(bytes: SharedBytes<'_>) -> (NonNull<u8>, usize) {
    (bytes.base(), bytes.len() as usize)
}
