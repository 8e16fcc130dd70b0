//! The clients that every registry has: the host, the simulator, CUDA.

use std::sync::Arc;

use parking_lot::Mutex;

use super::client::{End, Invalidate, PeerClient, PeerPages, Persistence};
use super::maps;
use super::memory::Memory;
use crate::error::{Error, Kind, Result};
use crate::mem::{self, Allocation, Backend, DeviceAddr, MemoryEvent, Watch};

/// In the order in which they are asked. The host knows at once; CUDA would have to be loaded.
pub(super) fn all() -> Vec<Arc<dyn PeerClient>> {
    vec![Arc::new(Host), Arc::new(Devices(Backend::Sim)), Arc::new(Devices(Backend::Cuda))]
}

/// GPUs pin memory in units of this size.
const GPU_PAGE: u64 = 64 << 10;

fn not_mine(why: impl Into<String>) -> Error {
    Error::new(Kind::NotDeviceMemory, "find memory by its address").why(why.into())
}

/// Memory of this process. Nobody tells when it is unmapped.
struct Host;

struct HostPages {
    address: u64,
    len: u64,
    writable: bool,
}

impl PeerClient for Host {
    fn name(&self) -> &str {
        "host"
    }

    fn persistence(&self) -> Persistence {
        Persistence::Persistent
    }

    fn acquire(self: Arc<Self>, address: u64, len: u64) -> Result<Box<dyn PeerPages>> {
        let found = maps::look_up(address, len).map_err(|missing| not_mine(missing.to_string()))?;
        Ok(Box::new(HostPages { address, len, writable: found.writable }))
    }

    fn identity(&self, address: u64, len: u64) -> Option<u64> {
        maps::look_up(address, len).ok().map(|found| found.identity)
    }
}

impl PeerPages for HostPages {
    fn page_size(&self) -> u64 {
        rustix::param::page_size() as u64
    }

    fn get_pages(&self, writes: bool, _: Invalidate) -> Result<()> {
        if writes && !self.writable {
            return Err(Error::new(Kind::PermissionDenied, "pin host memory")
                .why("part of it is mapped for reading only")
                .fix("leave out local-write, or map the memory for writing"));
        }
        Ok(())
    }

    #[allow(unsafe_code)]
    fn dma_map(&self, _: &str) -> Result<Memory> {
        let base = std::ptr::with_exposed_provenance_mut(self.address as usize);
        // SAFETY: the promise of `Registry::register_address`, which is the only way here.
        unsafe { Memory::raw(base, self.len) }
    }

    fn dma_unmap(&self, _: &str) {}

    fn put_pages(&self, _: End) {}
}

/// Memory of the devices of one backend.
struct Devices(Backend);

struct DevicePages {
    memory: Allocation,
    watch: Mutex<Option<Watch>>,
}

impl Devices {
    fn borrow(&self, address: u64, len: u64) -> Result<Allocation> {
        if self.0 == Backend::Cuda && !mem::cuda::is_loaded() {
            return Err(not_mine("this process has not loaded CUDA"));
        }
        let address = DeviceAddr::new(address);
        let device = mem::owner_of(address)?;
        if device.info().backend != self.0 {
            return Err(not_mine(format!("it is memory of {}", device.label())));
        }
        #[allow(unsafe_code)]
        // SAFETY: the promise of `Registry::register_address`, which is the only way here.
        unsafe {
            device.borrow(address, len)
        }
    }
}

impl PeerClient for Devices {
    fn name(&self) -> &str {
        match self.0 {
            Backend::Cuda => "cuda",
            Backend::Sim => "sim",
        }
    }

    fn persistence(&self) -> Persistence {
        match self.0 {
            Backend::Cuda => Persistence::Persistent,
            Backend::Sim => Persistence::Invalidates,
        }
    }

    fn acquire(self: Arc<Self>, address: u64, len: u64) -> Result<Box<dyn PeerPages>> {
        let memory = self.borrow(address, len)?;
        Ok(Box::new(DevicePages { memory, watch: Mutex::new(None) }))
    }

    fn identity(&self, address: u64, len: u64) -> Option<u64> {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let memory = self.borrow(address, len).ok()?;
        let mut identity = DefaultHasher::new();
        for piece in memory.pieces().ok()? {
            (piece.offset, piece.id).hash(&mut identity);
        }
        Some(identity.finish())
    }
}

impl PeerPages for DevicePages {
    fn page_size(&self) -> u64 {
        GPU_PAGE
    }

    fn get_pages(&self, _: bool, invalidate: Invalidate) -> Result<()> {
        let listener = Arc::new(move |event| {
            if event == MemoryEvent::Freed {
                invalidate.invalidate();
            }
        });
        match self.memory.watch(listener) {
            Ok(watch) => *self.watch.lock() = Some(watch),
            // Persistent: each use asks whether it is still there.
            Err(error) if *error.kind() == Kind::Unsupported => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn dma_map(&self, _: &str) -> Result<Memory> {
        Ok(self.memory.whole()?.into())
    }

    fn dma_unmap(&self, _: &str) {}

    fn put_pages(&self, _: End) {
        let watch = self.watch.lock().take();
        drop(watch);
    }
}
