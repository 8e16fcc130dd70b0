//! The built-in peer-memory clients of every registry: the host, the simulator, CUDA.

use std::sync::Arc;

use parking_lot::Mutex;

use super::client::{InvalidationHandle, PeerClient, PeerPages, Persistence, ReleaseReason};
use super::maps;
use super::memory::MemorySource;
use crate::error::{Error, Kind, Result};
use crate::mem::{self, Allocation, Backend, DeviceAddr, MemoryEvent, WatchGuard};

/// The built-in clients, in lookup order: the host is cheapest, and CUDA may not be loaded.
pub(super) fn all() -> Vec<Arc<dyn PeerClient>> {
    vec![Arc::new(Host), Arc::new(Devices(Backend::Sim)), Arc::new(Devices(Backend::Cuda))]
}

/// Granularity of pinning on NVIDIA GPUs, in bytes.
const GPU_PAGE: u64 = 64 << 10;

fn not_owned(why: impl Into<String>) -> Error {
    Error::new(Kind::NotDeviceMemory, "look up memory by address").why(why.into())
}

/// Memory of this process. Unmapping it is not reported.
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
        let found = maps::query_range(address, len)
            .map_err(|range_error| not_owned(range_error.to_string()))?;
        Ok(Box::new(HostPages { address, len, writable: found.writable }))
    }

    fn identity(&self, address: u64, len: u64) -> Option<u64> {
        maps::query_range(address, len).ok().map(|found| found.identity)
    }
}

impl PeerPages for HostPages {
    fn page_size(&self) -> u64 {
        rustix::param::page_size() as u64
    }

    fn get_pages(&self, writes: bool, _: InvalidationHandle) -> Result<()> {
        if writes && !self.writable {
            return Err(Error::new(Kind::PermissionDenied, "pin host memory")
                .why("part of it is mapped read-only")
                .fix("leave out local-write, or map the memory writable"));
        }
        Ok(())
    }

    #[allow(unsafe_code)]
    fn dma_map(&self, _: &str) -> Result<MemorySource> {
        let base = std::ptr::with_exposed_provenance_mut(self.address as usize);
        // SAFETY: guaranteed by the caller of `Registry::register_address`, the only caller of
        // this.
        unsafe { MemorySource::raw(base, self.len) }
    }

    fn dma_unmap(&self, _: &str) {}

    fn put_pages(&self, _: ReleaseReason) {}
}

/// Memory of all devices of one backend.
struct Devices(Backend);

struct DevicePages {
    memory: Allocation,
    watch: Mutex<Option<WatchGuard>>,
}

impl Devices {
    fn borrow(&self, address: u64, len: u64) -> Result<Allocation> {
        if self.0 == Backend::Cuda && !mem::cuda::is_loaded() {
            return Err(not_owned("this process has not loaded CUDA"));
        }
        let address = DeviceAddr::new(address);
        let device = mem::owner_of(address)?;
        if device.info().backend != self.0 {
            return Err(not_owned(format!("it is memory of {}", device.label())));
        }
        #[allow(unsafe_code)]
        // SAFETY: guaranteed by the caller of `Registry::register_address`, the only caller of
        // this.
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
        for backing in memory.backing_allocations().ok()? {
            (backing.offset, backing.id).hash(&mut identity);
        }
        Some(identity.finish())
    }
}

impl PeerPages for DevicePages {
    fn page_size(&self) -> u64 {
        GPU_PAGE
    }

    fn get_pages(&self, _: bool, invalidate: InvalidationHandle) -> Result<()> {
        let listener = Arc::new(move |event| {
            if event == MemoryEvent::Freed {
                invalidate.invalidate();
            }
        });
        match self.memory.watch(listener) {
            Ok(watch) => *self.watch.lock() = Some(watch),
            // Persistent: each use checks that the memory is still the same.
            Err(error) if *error.kind() == Kind::Unsupported => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn dma_map(&self, _: &str) -> Result<MemorySource> {
        Ok(self.memory.whole()?.into())
    }

    fn dma_unmap(&self, _: &str) {}

    fn put_pages(&self, _: ReleaseReason) {
        let watch = self.watch.lock().take();
        drop(watch);
    }
}
