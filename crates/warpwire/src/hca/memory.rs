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
    place: Arc<Place>,
    /// Where the CPU finds it, for as long as the place is there; posting and polling look nowhere else.
    base: NonNull<u8>,
    len: usize,
    /// Whether stores are combined and kept, so that those that follow may overtake them: a window does that.
    combines_stores: bool,
}

enum Place {
    Nothing,
    /// A part of other memory.
    Part(QueueMemory, u64),
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
        match &*self.place {
            Place::Nothing => f.write_str("Nothing"),
            Place::Part(whole, offset) => write!(f, "{len} bytes at {offset} of {whole:?}"),
            Place::Mapped(_) => write!(f, "Mapped({len} bytes at {base:p})"),
            Place::Host(memory) => write!(f, "{memory:?}"),
            Place::Pinned(memory) => write!(f, "{memory:?}"),
            Place::Window(window) => write!(f, "{window:?}"),
        }
    }
}

impl QueueMemory {
    /// Memory whose bytes are there as long as the place is.
    fn new(place: Place, bytes: (NonNull<u8>, usize), combines_stores: bool) -> Self {
        let (base, len) = bytes;
        Self { place: Arc::new(place), base, len, combines_stores }
    }

    /// Ordinary host memory.
    pub fn host(len: u64) -> Result<Self> {
        let memory = HostMemory::new(len)?;
        let found = found(memory.bytes());
        Ok(Self::new(Place::Host(memory), found, false))
    }

    /// Pinned host memory that a device reaches as well; the allocation must be of that kind.
    pub fn pinned(memory: Allocation) -> Result<Self> {
        let found = found(memory.host_bytes()?);
        Ok(Self::new(Place::Pinned(memory), found, false))
    }

    /// Device memory, through the CPU's window onto it.
    pub fn window(window: Window) -> Self {
        let found = found(window.bytes());
        Self::new(Place::Window(window), found, true)
    }

    /// A part of it.
    pub(crate) fn part(&self, offset: u64, len: u64) -> Self {
        let found = found(self.bytes().part_or_empty(offset, len));
        Self::new(Place::Part(self.clone(), offset), found, self.combines_stores)
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
        Self::new(Place::Mapped(owner), (base, len as usize), false)
    }

    /// No memory at all: every access is out of range.
    pub(crate) fn nothing() -> Self {
        Self::new(Place::Nothing, found(SharedBytes::empty()), false)
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
    pub(super) fn combines_stores(&self) -> bool {
        self.combines_stores
    }

    /// Puts what was stored on its way, where stores are combined and kept; elsewhere it is there already.
    #[inline]
    pub(crate) fn send_off(&self) {
        if self.combines_stores() {
            crate::mem::copy::store_fence();
        }
    }

    /// Where a device finds it, if one does.
    pub fn device_address(&self) -> Option<DeviceAddr> {
        match &*self.place {
            Place::Nothing | Place::Mapped(_) | Place::Host(_) => None,
            Place::Part(whole, offset) => {
                whole.device_address().map(|at| DeviceAddr::new(at.raw() + offset))
            }
            Place::Pinned(memory) => Some(memory.address()),
            Place::Window(window) => Some(window.address()),
        }
    }
}

/// Where a view lies, for those who keep its memory alive.
fn found(bytes: SharedBytes<'_>) -> (NonNull<u8>, usize) {
    (bytes.base(), bytes.len() as usize)
}
