//! Where queues lie: memory that the engine and whoever posts both reach.

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

#[derive(Debug)]
enum Place {
    Host(HostMemory),
    Pinned(Allocation),
    Window(Window),
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

    /// The bytes, as the CPU sees them.
    #[inline]
    pub fn bytes(&self) -> SharedBytes<'_> {
        match &*self.0 {
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
        matches!(&*self.0, Place::Window(_))
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
            Place::Host(_) => None,
            Place::Pinned(memory) => Some(memory.address()),
            Place::Window(window) => Some(window.address()),
        }
    }
}
