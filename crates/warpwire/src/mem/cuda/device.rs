//! One NVIDIA GPU and its primary context.

use std::borrow::Cow;
use std::ffi::{CStr, c_char};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::super::address::DeviceAddr;
use super::super::allocation::MemoryKind;
use super::super::backend::{
    DeviceBackend, EventBackend, ForeignStreamBackend, HostOwner, MemoryBackend, ModuleBackend,
    StreamBackend,
};
use super::super::device::{Backend, Capabilities, Capability, DeviceInfo, MemoryUsage};
use super::super::program::Program;
use super::super::share::IpcHandle;
use super::deferred_free::DeferredFree;
use super::driver::{Driver, call, get, version_text};
use super::foreign::CudaForeignStream;
use super::memory::{self, CudaMemory};
use super::module::CudaModule;
use super::rm::ExportMetadata;
use super::share;
use super::stream::{CudaEvent, CudaStream};
use super::sys::{self, Context, PoolHandle, StreamHandle, attribute as a};
use super::window::VerifiedKinds;
use crate::error::{Error, Result};
use crate::host::{PciAddress, System};

pub(super) struct CudaDevice {
    pub(super) driver: &'static Driver,
    pub(super) deferred_free: DeferredFree,
    pub(super) verified_kinds: VerifiedKinds,
    /// What descriptors of memory objects need, once verified (`object_export.rs`).
    pub(super) object_exports: OnceLock<Result<ExportMetadata>>,
    info: DeviceInfo,
    capabilities: Capabilities,
    handle: i32,
    context: Context,
    /// An internal stream, for work that must not queue behind user streams.
    internal_handle: StreamHandle,
    pool: Mutex<Option<PoolHandle>>,
    next_stream: AtomicU64,
}

/// Keeps the context current on this thread until dropped.
pub(super) struct ContextGuard<'a> {
    device: &'a CudaDevice,
    pushed: bool,
    /// The thread's previous capture mode, to be restored.
    capture_mode: i32,
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        let driver = self.device.driver;
        let restored = call!(driver, exchange_capture_mode(&mut self.capture_mode));
        let popped = match self.pushed {
            true => get!(driver, Context::NULL, context_pop()).map(|_| ()),
            false => Ok(()),
        };
        if let Err(error) = restored.and(popped) {
            tracing::warn!(%error, "this thread's CUDA context was not restored");
        }
    }
}

impl CudaDevice {
    pub(super) fn open(driver: &'static Driver, ordinal: u32) -> Result<Self> {
        let handle = get!(driver, 0, device_get(ordinal as i32))?;
        let info = info(driver, handle, ordinal)?;
        let context = get!(driver, Context::NULL, primary_context_retain(handle))?;
        let mut device = Self {
            driver,
            deferred_free: DeferredFree::default(),
            verified_kinds: VerifiedKinds::default(),
            object_exports: OnceLock::new(),
            info,
            capabilities: capabilities(driver, handle),
            handle,
            context,
            internal_handle: StreamHandle::NULL,
            pool: Mutex::new(None),
            next_stream: AtomicU64::new(1),
        };
        let guard = device.make_current()?;
        let internal_handle =
            get!(driver, StreamHandle::NULL, stream_create(sys::STREAM_NON_BLOCKING))?;
        drop(guard);
        device.internal_handle = internal_handle;
        Ok(device)
    }

    pub(super) fn ordinal(&self) -> u32 {
        self.info.ordinal
    }

    pub(super) fn label(&self) -> String {
        self.info.label()
    }

    pub(super) fn uuid(&self) -> &str {
        &self.info.uuid
    }

    pub(super) fn internal_stream(&self) -> StreamHandle {
        self.internal_handle
    }

    /// Copies between a host buffer and device memory, independent of user streams (a hung stream
    /// must not block it). Complete on return. The context must be current.
    pub(super) fn copy_sync(&self, to: u64, from: u64, len: usize) -> Result<()> {
        call!(self.driver, copy_async(to, from, len, self.internal_handle))?;
        call!(self.driver, stream_synchronize(self.internal_handle))
    }

    /// Makes the context current until [`pop`](Self::pop).
    pub(super) fn push(&self) -> Result<()> {
        call!(self.driver, context_push(self.context))
    }

    pub(super) fn pop(&self) {
        if let Err(error) = get!(self.driver, Context::NULL, context_pop()) {
            tracing::warn!(%error, "this thread's CUDA context was not restored");
        }
    }

    /// Makes the context current until the guard is dropped; cheap if it already is.
    pub(super) fn make_current(&self) -> Result<ContextGuard<'_>> {
        let current = get!(self.driver, Context::NULL, context_current())?;
        let pushed = current != self.context;
        if pushed {
            call!(self.driver, context_push(self.context))?;
        }
        // Our queries and allocations must not interfere with other libraries' captures.
        let mut capture_mode = sys::CAPTURE_RELAXED;
        call!(self.driver, exchange_capture_mode(&mut capture_mode))?;
        Ok(ContextGuard { device: self, pushed, capture_mode })
    }

    pub(super) fn supports(&self, attribute_number: i32) -> bool {
        attribute(self.driver, self.ordinal(), attribute_number).is_ok_and(|value| value != 0)
    }

    /// The pool for pool memory, created at first use.
    pub(super) fn pool(&self) -> Result<PoolHandle> {
        let mut pool = self.pool.lock();
        if let Some(pool) = *pool {
            return Ok(pool);
        }
        let types = attribute(self.driver, self.ordinal(), a::POOL_HANDLE_TYPES).unwrap_or(0);
        let shareable = types as u32 & sys::HANDLE_POSIX_FD;
        let props = sys::PoolProps::new(self.ordinal(), shareable);
        let made = get!(self.driver, PoolHandle::NULL, pool_create(&props))?;
        *pool = Some(made);
        Ok(made)
    }

    /// Adds the device and the attempted operation to a driver error. Costs nothing without an
    /// error.
    pub(super) fn error_context<W>(&self, what: W) -> impl FnOnce(Error) -> Error
    where
        W: Into<Cow<'static, str>>,
    {
        move |error| error.during(what).on(self.label())
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Queued work and pending frees hold the device, so there are none.
        let Ok(guard) = self.make_current() else { return };
        let pool = self.pool.lock().take();
        let outcome = pool
            .map_or(Ok(()), |pool| call!(self.driver, pool_destroy(pool)))
            .and(call!(self.driver, stream_destroy(self.internal_handle)));
        drop(guard);
        let released = outcome.and(call!(self.driver, primary_context_release(self.handle)));
        if let Err(error) = released {
            tracing::warn!(%error, device = %self.label(), "the context was not released");
        }
    }
}

impl DeviceBackend for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn memory_usage(&self) -> Result<MemoryUsage> {
        let _current = self.make_current()?;
        let mut total = 0;
        let free = get!(self.driver, 0, memory_info(&mut total))
            .map_err(self.error_context("query free memory"))?;
        Ok(MemoryUsage { free: free as u64, total: total as u64 })
    }

    fn allocate(self: Arc<Self>, len: u64, kind: MemoryKind) -> Result<Arc<dyn MemoryBackend>> {
        let memory: CudaMemory = memory::allocate(self, len, kind)?;
        Ok(Arc::new(memory))
    }

    fn borrow(self: Arc<Self>, address: DeviceAddr, len: u64) -> Result<Arc<dyn MemoryBackend>> {
        Ok(Arc::new(memory::borrow(self, address, len)?))
    }

    fn register_host(
        self: Arc<Self>,
        base: NonNull<u8>,
        len: u64,
        io: bool,
        owner: HostOwner,
    ) -> Result<Arc<dyn MemoryBackend>> {
        Ok(Arc::new(memory::register_host(self, (base, len), io, owner)?))
    }

    fn open_ipc(
        self: Arc<Self>,
        handle: &IpcHandle,
        descriptors: Option<Vec<OwnedFd>>,
    ) -> Result<Arc<dyn MemoryBackend>> {
        Ok(Arc::new(share::open(self, handle, descriptors)?))
    }

    fn create_stream(self: Arc<Self>) -> Result<Arc<dyn StreamBackend>> {
        let number = self.next_stream.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(CudaStream::create(self, number)?))
    }

    fn foreign_stream(self: Arc<Self>, handle: u64) -> Result<Arc<dyn ForeignStreamBackend>> {
        Ok(Arc::new(CudaForeignStream::new(self, handle)))
    }

    fn create_event(self: Arc<Self>) -> Result<Arc<dyn EventBackend>> {
        Ok(Arc::new(CudaEvent::create(self)?))
    }

    fn reclaim(&self) {
        let Ok(_current) = self.make_current() else { return };
        self.deferred_free.live_streams().iter().for_each(|stream| stream.reclaim());
    }

    fn load(self: Arc<Self>, program: &Program) -> Result<Arc<dyn ModuleBackend>> {
        Ok(Arc::new(CudaModule::load(self, program)?))
    }
}

pub(super) fn attribute(driver: &Driver, ordinal: u32, attribute: i32) -> Result<i32> {
    let handle = get!(driver, 0, device_get(ordinal as i32))?;
    get!(driver, 0, device_attribute(attribute, handle))
}

fn info(driver: &Driver, handle: i32, ordinal: u32) -> Result<DeviceInfo> {
    let query = |number| get!(driver, 0, device_attribute(number, handle));
    let pci = PciAddress {
        domain: query(a::PCI_DOMAIN_ID)? as u32,
        bus: query(a::PCI_BUS_ID)? as u8,
        device: query(a::PCI_DEVICE_ID)? as u8,
        function: 0,
    };
    Ok(DeviceInfo {
        backend: Backend::Cuda,
        ordinal,
        name: name(driver, handle)?,
        uuid: uuid(driver, handle)?,
        pci: Some(pci),
        numa_node: System::live().numa_node_of(&pci),
        total_memory: get!(driver, 0, device_total_memory(handle))? as u64,
        multiprocessors: query(a::MULTIPROCESSORS)? as u32,
    })
}

fn name(driver: &Driver, handle: i32) -> Result<String> {
    let mut text = [0 as c_char; 256];
    call!(driver, device_name(text.as_mut_ptr(), text.len() as i32 - 1, handle))?;
    // SAFETY: the last byte is zero, whatever the driver wrote before it.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    Ok(text.to_string_lossy().into_owned())
}

fn uuid(driver: &Driver, handle: i32) -> Result<String> {
    let bytes = get!(driver, [0; 16], device_uuid(handle))?;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let (a, b, c, d, e) = (&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    Ok(format!("GPU-{a}-{b}-{c}-{d}-{e}"))
}

fn capabilities(driver: &Driver, handle: i32) -> Capabilities {
    let version = version_text(driver.version);
    let attribute = |number, what: &str| {
        let value = get!(driver, 0, device_attribute(number, handle));
        match value {
            Ok(0) => Capability::No(format!(
                "the driver (CUDA {version}) reports that this GPU cannot {what}"
            )),
            Ok(_) => Capability::Yes,
            Err(error) => Capability::No(format!(
                "the driver does not know the attribute: {}",
                error.reason()
            )),
        }
    };
    let symbol = |there: bool, name: &str| {
        Capability::when(there, format!("the driver (CUDA {version}) has no {name}"))
    };
    let functions = &driver.functions;
    let both = |attribute: Capability, symbol: Capability| {
        if symbol.is_yes() { attribute } else { symbol }
    };
    Capabilities {
        dmabuf_export: both(
            attribute(
                a::DMA_BUF_SUPPORTED,
                "export dma-bufs (requires open kernel modules and Linux 5.12)",
            ),
            symbol(functions.range_handle.is_some(), sys::symbol::range_handle),
        ),
        gpudirect_rdma: attribute(a::GPUDIRECT_RDMA, "do GPUDirect RDMA"),
        gpudirect_rdma_vmm: attribute(
            a::GPUDIRECT_RDMA_WITH_VMM,
            "do GPUDirect RDMA with VMM memory",
        ),
        vmm: attribute(a::VMM_SUPPORTED, "use virtual memory management"),
        pool: attribute(a::POOLS_SUPPORTED, "allocate from pools"),
        ipc: symbol(functions.ipc_open.is_some(), sys::symbol::ipc_open),
        stream_mem_ops: both(
            attribute(a::STREAM_MEM_OPS_64, "do 64-bit stream memory operations"),
            symbol(functions.stream_batch.is_some(), sys::symbol::stream_batch),
        ),
        stream_wait_nor: attribute(a::STREAM_WAIT_NOR, "wait for NOR"),
        flush_remote_writes: attribute(
            a::CAN_FLUSH_REMOTE_WRITES,
            "flush remote writes from a stream",
        ),
        graphs: symbol(functions.graph_instantiate.is_some(), sys::symbol::graph_instantiate),
        notify: Capability::No(
            "CUDA does not report when memory is freed; buffer IDs are compared instead".into(),
        ),
    }
}
