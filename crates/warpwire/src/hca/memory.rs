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
#[derive(Clone, Debug)]
pub struct QueueMemory(Arc<Place>);

enum Place {
    Nothing,
    /// A part of other memory.
    Part(QueueMemory, u64, u64),
    /// What a driver has mapped.
    Mapped {
        base: NonNull<u8>,
        len: usize,
        _owner: Arc<dyn Any + Send + Sync>,
    },
    Host(HostMemory),
    Pinned(Allocation),
    Window(Window),
}

// SAFETY: every sort may be used from any thread; what a driver has mapped is shared memory, seen through SharedBytes only.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("Nothing"),
            Self::Part(whole, offset, len) => write!(f, "{len} bytes at {offset} of {whole:?}"),
            Self::Mapped { base, len, .. } => write!(f, "Mapped({len} bytes at {base:p})"),
            Self::Host(memory) => write!(f, "{memory:?}"),
            Self::Pinned(memory) => write!(f, "{memory:?}"),
            Self::Window(window) => write!(f, "{window:?}"),
        }
    }
}

impl QueueMemory {
    /// Ordinary host memory.
    pub fn host(len: u64) -> Result<Self> {
        Ok(Self(Arc::new(Place::Host(HostMemory::new(len)?))))
    }

    /// Pinned host memory that a device reaches as well; the allocation must be of that kind.
    pub fn pinned(memory: Allocation) -> Result<Self> {
        memory.host_bytes()?;
        Ok(Self(Arc::new(Place::Pinned(memory))))
    }

    /// Device memory, through the CPU's window onto it.
    pub fn window(window: Window) -> Self {
        Self(Arc::new(Place::Window(window)))
    }

    /// A part of it.
    pub(crate) fn part(&self, offset: u64, len: u64) -> Self {
        Self(Arc::new(Place::Part(self.clone(), offset, len)))
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
        Self(Arc::new(Place::Mapped { base, len: len as usize, _owner: owner }))
    }

    /// No memory at all: every access is out of range.
    pub(crate) fn nothing() -> Self {
        Self(Arc::new(Place::Nothing))
    }

    /// The bytes, as the CPU sees them.
    #[inline]
    pub fn bytes(&self) -> SharedBytes<'_> {
        match &*self.0 {
            Place::Nothing => SharedBytes::empty(),
            Place::Part(whole, offset, len) => whole.bytes().part_or_empty(*offset, *len),
            // SAFETY: mapped as long as this lives, as was promised when it was made.
            Place::Mapped { base, len, .. } => unsafe { SharedBytes::new(*base, *len) },
            Place::Host(memory) => memory.bytes(),
            // It was tried when this was made; memory that was freed since is kept mapped by the handle.
            Place::Pinned(memory) => match memory.host_bytes() {
                Ok(bytes) => bytes,
                Err(_) => SharedBytes::empty(),
            },
            Place::Window(window) => window.bytes(),
        }
    }

    /// Whether stores are combined and kept, so that those that follow may overtake them: a window does that.
    #[inline]
    pub(super) fn combines_stores(&self) -> bool {
        match &*self.0 {
            Place::Window(_) => true,
            Place::Part(whole, ..) => whole.combines_stores(),
            _ => false,
        }
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
        match &*self.0 {
            Place::Nothing | Place::Mapped { .. } | Place::Host(_) => None,
            Place::Part(whole, offset, _) => {
                whole.device_address().map(|at| DeviceAddr::new(at.raw() + offset))
            }
            Place::Pinned(memory) => Some(memory.address()),
            Place::Window(window) => Some(window.address()),
        }
    }
}
