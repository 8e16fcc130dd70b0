//! Memory of an NVIDIA GPU: plain, VMM, pool, pinned, registered, borrowed and imported.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::super::address::DeviceAddr;
use super::super::allocation::{MemoryKind, MemoryListener, WatchGuard};
use super::super::backend::{DeviceBackend, HostOwner, MemoryBackend};
use super::super::bytes::SharedBytes;
use super::super::share::{DmaBuf, DmaBufRoute, IpcHandle};
use super::super::window::{CpuMapping, WindowPath};
use super::deferred_free::{HostPointer, PendingFree};
use super::device::CudaDevice;
use super::driver::{call, get};
use super::share;
use super::sys::{self, AccessDesc, AllocationProp, Opaque64, PoolHandle, pointer};
use super::window;
use crate::error::{Error, Kind, Result};
use crate::units;

pub(super) struct CudaMemory {
    pub(super) device: Arc<CudaDevice>,
    pub(super) address: DeviceAddr,
    pub(super) len: u64,
    pub(super) origin: Origin,
    /// What an inter-process handle refers to; open as long as the memory is allocated.
    pub(super) exported: Mutex<Option<share::Exported>>,
    /// Keeps registered memory mapped.
    owner: Option<HostOwner>,
}

/// How memory was obtained, which decides how it is freed.
pub(super) enum Origin {
    Plain,
    Vmm(VmmAllocation),
    Pool,
    Pinned(NonNull<u8>),
    Borrowed,
    /// Host memory, or registers of another device, mapped by another library.
    Registered {
        base: NonNull<u8>,
        io: bool,
    },
    /// Opened from another process's `cuMemAlloc`, with this handle; `base` is the start of that
    /// allocation.
    Imported {
        base: u64,
        handle: Opaque64,
    },
    /// From virtual memory handles of another process.
    ImportedVmm(ImportedPieces),
    /// From a pool of another process.
    ImportedPool(PoolHandle),
}

// SAFETY: the pinned and registered pointers are only used through SharedBytes, and passed back to
// the driver once.
unsafe impl Send for Origin {}
// SAFETY: as above.
unsafe impl Sync for Origin {}

/// A mapped virtual memory allocation: its handle and its size in whole pages.
#[derive(Clone, Copy)]
pub(super) struct VmmAllocation {
    pub(super) handle: u64,
    pub(super) size: usize,
}

/// Virtual memory allocations of another process, mapped side by side.
pub(super) struct ImportedPieces {
    pub(super) base: u64,
    pub(super) sizes: Box<[usize]>,
}

impl CudaMemory {
    pub(super) fn new(device: Arc<CudaDevice>, address: u64, len: u64, origin: Origin) -> Self {
        let address = DeviceAddr::new(address);
        Self { device, address, len, origin, exported: Mutex::default(), owner: None }
    }

    fn pinned_bytes(&self) -> Option<SharedBytes<'_>> {
        let (Origin::Pinned(base) | Origin::Registered { base, io: false }) = self.origin else {
            return None;
        };
        // SAFETY: pinned by `allocate` with this base and length until dropped, or mapped for as
        // long as its owner guarantees; handles that outlive a free are rejected earlier.
        Some(unsafe { SharedBytes::new(base, self.len as usize) })
    }
}

pub(super) fn allocate(device: Arc<CudaDevice>, len: u64, kind: MemoryKind) -> Result<CudaMemory> {
    let current = device.make_current()?;
    device.deferred_free.free_ready(device.driver);
    let made = try_allocate(&device, len, kind).or_else(|error| {
        // Memory whose free is deferred still counts: try to free it, and allocate again.
        let short = error.kind() == &Kind::OutOfMemory;
        if short {
            device.reclaim();
            device.deferred_free.free_within(device.driver, OUT_OF_MEMORY_RETRY);
            return try_allocate(&device, len, kind);
        }
        Err(error)
    });
    let (address, origin) =
        made.map_err(|error| explain_out_of_memory(&device, error, len, kind))?;
    drop(current);
    Ok(CudaMemory::new(device, address, len, origin))
}

/// Time that an allocation waits for deferred frees before it fails.
const OUT_OF_MEMORY_RETRY: Duration = Duration::from_secs(1);

fn try_allocate(device: &CudaDevice, len: u64, kind: MemoryKind) -> Result<(u64, Origin)> {
    match kind {
        MemoryKind::Plain => {
            get!(device.driver, 0, memory_alloc(len as usize)).map(|at| (at, Origin::Plain))
        }
        MemoryKind::Vmm => allocate_vmm(device, len),
        MemoryKind::Pool => allocate_from_pool(device, len),
        MemoryKind::Pinned => allocate_pinned(device, len),
        MemoryKind::Borrowed | MemoryKind::Imported => {
            Err(Error::new(Kind::InvalidArgument, "")
                .why(format!("{kind} memory cannot be allocated")))
        }
    }
}

#[cold]
fn explain_out_of_memory(device: &CudaDevice, error: Error, len: u64, kind: MemoryKind) -> Error {
    let mut error = error;
    if error.kind() == &Kind::OutOfMemory
        && kind != MemoryKind::Pinned
        && let Ok(usage) = device.memory_usage()
    {
        let (free, total) = (units::bytes(usage.free), units::bytes(usage.total));
        error = error
            .why(format!("{free} of {total} are free"))
            .fix("free some (other processes may use this GPU too), or allocate less");
    }
    device.error_context(format!("allocate {} of {kind} memory", units::bytes(len)))(error)
}

fn allocate_vmm(device: &CudaDevice, len: u64) -> Result<(u64, Origin)> {
    device.capabilities().vmm.require("allocate", device.info())?;
    let driver = device.driver;
    let shareable =
        if device.supports(sys::attribute::POSIX_FD_SUPPORTED) { sys::HANDLE_POSIX_FD } else { 0 };
    let rdma = device.supports(sys::attribute::GPUDIRECT_RDMA_WITH_VMM);
    let prop = AllocationProp::new(device.ordinal(), shareable, rdma);
    let granule = get!(driver, 0_usize, vmm_granularity(&prop, 0))?;
    let size = (len as usize).checked_next_multiple_of(granule.max(1)).ok_or_else(|| {
        Error::new(Kind::OutOfMemory, "").why("the length cannot be rounded up to whole pages")
    })?;
    let handle = get!(driver, 0, vmm_create(size, &prop, 0))?;
    let vmm_allocation = VmmAllocation { handle, size };
    Ok((map_vmm(device, vmm_allocation)?, Origin::Vmm(vmm_allocation)))
}

/// Maps a virtual memory handle; on failure the handle is released.
pub(super) fn map_vmm(device: &CudaDevice, vmm_allocation: VmmAllocation) -> Result<u64> {
    let driver = device.driver;
    let VmmAllocation { handle, size } = vmm_allocation;
    let reserved = get!(driver, 0, vmm_reserve(size, 0, 0, 0))
        .inspect_err(|_| drop(call!(driver, vmm_release(handle))))?;
    let access = AccessDesc::read_write(device.ordinal());
    let mapped = call!(driver, vmm_map(reserved, size, 0, handle, 0)).and_then(|()| {
        call!(driver, vmm_set_access(reserved, size, &access, 1))
            .inspect_err(|_| drop(call!(driver, vmm_unmap(reserved, size))))
    });
    mapped.inspect_err(|_| {
        drop(call!(driver, vmm_unreserve(reserved, size)));
        drop(call!(driver, vmm_release(handle)));
    })?;
    Ok(reserved)
}

fn unmap_vmm(device: &CudaDevice, address: u64, vmm_allocation: VmmAllocation) -> Result<()> {
    let driver = device.driver;
    // Continue after a failure: release whatever can be released.
    let unmapped = call!(driver, vmm_unmap(address, vmm_allocation.size));
    let released = call!(driver, vmm_release(vmm_allocation.handle));
    let unreserved = call!(driver, vmm_unreserve(address, vmm_allocation.size));
    unmapped.and(released).and(unreserved)
}

/// Maps virtual memory allocations of another process side by side; returns where the first is.
/// The mappings keep them allocated.
pub(super) fn import_vmm(device: &CudaDevice, fds: &[OwnedFd], sizes: &[usize]) -> Result<u64> {
    let driver = device.driver;
    let total = sizes.iter().sum();
    let base = get!(driver, 0, vmm_reserve(total, 0, 0, 0))?;
    let (mut at, mut mapped) = (base, 0);
    let outcome = fds.iter().zip(sizes).try_for_each(|(fd, size)| {
        let shareable = fd.as_raw_fd() as usize as *mut c_void;
        let handle = get!(driver, 0, vmm_import(shareable, sys::HANDLE_POSIX_FD))?;
        let done = call!(driver, vmm_map(at, *size, 0, handle, 0));
        drop(call!(driver, vmm_release(handle)));
        done?;
        at += *size as u64;
        mapped += 1;
        Ok(())
    });
    let access = AccessDesc::read_write(device.ordinal());
    outcome
        .and_then(|()| call!(driver, vmm_set_access(base, total, &access, 1)))
        .inspect_err(|_| drop(unmap_pieces(device, base, &sizes[..mapped], total)))?;
    Ok(base)
}

/// Unmaps pieces from `base` on, and releases the `total` bytes that are reserved for them.
fn unmap_pieces(device: &CudaDevice, base: u64, sizes: &[usize], total: usize) -> Result<()> {
    let driver = device.driver;
    let (mut at, mut outcome) = (base, Ok(()));
    for size in sizes {
        // Continue after a failure: release whatever can be released.
        outcome = outcome.and(call!(driver, vmm_unmap(at, *size)));
        at += *size as u64;
    }
    outcome.and(call!(driver, vmm_unreserve(base, total)))
}

fn allocate_from_pool(device: &CudaDevice, len: u64) -> Result<(u64, Origin)> {
    device.capabilities().pool.require("allocate", device.info())?;
    let (driver, internal_handle) = (device.driver, device.internal_stream());
    let address = get!(driver, 0, pool_alloc(len as usize, device.pool()?, internal_handle))?;
    // Other streams may use the memory only after the internal stream has executed the
    // allocation.
    call!(driver, stream_synchronize(internal_handle))?;
    Ok((address, Origin::Pool))
}

fn allocate_pinned(device: &CudaDevice, len: u64) -> Result<(u64, Origin)> {
    let driver = device.driver;
    let flags = sys::HOST_PORTABLE_AND_MAPPED;
    let host = get!(driver, std::ptr::null_mut::<c_void>(), host_alloc(len as usize, flags))?;
    let free_host = |_: &Error| drop(call!(driver, host_free(host)));
    let address = get!(driver, 0, host_device_address(host, 0)).inspect_err(free_host)?;
    let base = NonNull::new(host.cast()).ok_or_else(|| {
        Error::new(Kind::OutOfMemory, "")
            .why("the driver returned a null pointer for pinned memory")
    })?;
    Ok((address, Origin::Pinned(base)))
}

/// Registers memory that another library mapped for the CPU.
pub(super) fn register_host(
    device: Arc<CudaDevice>,
    (base, len): (NonNull<u8>, u64),
    io: bool,
    owner: HostOwner,
) -> Result<CudaMemory> {
    let current = device.make_current()?;
    let driver = device.driver;
    let flags = sys::HOST_PORTABLE_AND_MAPPED | if io { sys::HOST_IO } else { 0 };
    let host: *mut c_void = base.as_ptr().cast();
    let address = call!(driver, host_register(host, len as usize, flags))
        .and_then(|()| {
            get!(driver, 0, host_device_address(host, 0))
                .inspect_err(|_| drop(call!(driver, host_unregister(host))))
        })
        .map_err(|error| explain_register(&device, error, len, io))?;
    drop(current);
    let mut memory = CudaMemory::new(device, address, len, Origin::Registered { base, io });
    memory.owner = Some(owner);
    Ok(memory)
}

#[cold]
fn explain_register(device: &CudaDevice, error: Error, len: u64, io: bool) -> Error {
    let what = match io {
        true => "register another device's MMIO registers",
        false => "register host memory",
    };
    let reason = error.reason().to_owned();
    let error = device.error_context(format!("{what} ({})", units::bytes(len)))(error);
    if !io {
        return error.fix("register whole, mapped pages that are not registered already");
    }
    error
        .why(format!("{reason}; the driver only accepts whole, contiguous pages of a PCIe device"))
        .fix(
            "map the NIC's doorbell page, and load the nvidia module with \
             NVreg_RegistryDwords=\"PeerMappingOverride=1;\"",
        )
}

pub(super) fn borrow(device: Arc<CudaDevice>, address: DeviceAddr, len: u64) -> Result<CudaMemory> {
    let current = device.make_current()?;
    check_borrowed(&device, address.raw(), len).map_err(|error| {
        device.error_context(format!("borrow {} at {address}", units::bytes(len)))(error)
    })?;
    drop(current);
    Ok(CudaMemory::new(device, address.raw(), len, Origin::Borrowed))
}

/// Checks that each byte of the range is device memory of this GPU. A range may span several
/// virtual memory allocations, so it is checked one by one.
fn check_borrowed(device: &CudaDevice, start: u64, len: u64) -> Result<()> {
    let driver = device.driver;
    let refuse = |why: String| Error::new(Kind::NotDeviceMemory, "").why(why);
    let end = start + len;
    let mut at = start;
    while at < end {
        let kind =
            pointer_attribute_u32(device, pointer::MEMORY_TYPE, at).map_err(|error| match error
                .kind()
            {
                Kind::Cuda(sys::INVALID_VALUE) => refuse(format!(
                    "CUDA does not know the address {at:#x}: pageable host memory, or freed"
                )),
                _ => error,
            })?;
        if kind == pointer::MEMORY_TYPE_HOST {
            return Err(refuse("it is pinned host memory".into())
                .fix("borrow device memory; host memory needs no borrowing"));
        }
        if kind != pointer::MEMORY_TYPE_DEVICE {
            return Err(refuse(format!("it is memory of type {kind}")));
        }
        let owner = pointer_attribute_u32(device, pointer::DEVICE_ORDINAL, at)?;
        if owner != device.ordinal() {
            return Err(
                refuse(format!("it is memory of cuda:{owner}")).fix("borrow it on that device")
            );
        }
        let (mut base, mut size) = (0, 0);
        call!(driver, address_range(&mut base, &mut size, at))?;
        let next = base + size as u64;
        if next < end && next <= at {
            return Err(refuse(format!("the driver returned an impossible range for {at:#x}")));
        }
        at = next;
    }
    Ok(())
}

pub(super) fn pointer_attribute_u32(
    device: &CudaDevice,
    attribute: i32,
    address: u64,
) -> Result<u32> {
    // The attributes queried here are 32-bit; the driver writes no more.
    let mut value = 0_u32;
    call!(device.driver, pointer_attribute((&raw mut value).cast(), attribute, address))?;
    Ok(value)
}

/// Exports the pages around a range; returns the descriptor and the address at which it begins.
///
/// The driver requires whole host pages. Where small allocations share a driver allocation, or
/// memory comes from a pool, it also requires that the export begins at the start of the underlying
/// allocation. So several start addresses are tried, the closest first.
pub(super) fn export_pages(
    device: &CudaDevice,
    start: u64,
    len: u64,
    route: DmaBufRoute,
) -> Result<(OwnedFd, u64)> {
    let flags = match route {
        DmaBufRoute::Default => 0,
        DmaBufRoute::Pcie => sys::RANGE_PCIE,
    };
    let page = rustix::param::page_size() as u64;
    let end = (start + len).next_multiple_of(page);
    let (mut base, mut size) = (0, 0);
    call!(device.driver, address_range(&mut base, &mut size, start))?;
    let candidates = [page, GPU_PAGE, LARGE_GPU_PAGE].map(|unit| start - start % unit);
    let mut mapping = base;
    // Newer drivers report where the underlying allocation begins; for others, roundings are tried.
    let mapping_query = call!(
        device.driver,
        pointer_attribute((&raw mut mapping).cast(), pointer::MAPPING_BASE, start)
    );
    let underlying = mapping_query.map_or(base, |()| mapping);
    let candidates = candidates.into_iter().chain([
        underlying,
        base - base % page,
        base - base % LARGE_GPU_PAGE,
    ]);
    let mut first_error = None;
    for first in candidates {
        let size = (end - first) as usize;
        match get!(device.driver, -1, range_handle(first, size, sys::RANGE_DMA_BUF, flags)) {
            // SAFETY: the driver has just opened the descriptor for the caller.
            Ok(fd) => return Ok((unsafe { OwnedFd::from_raw_fd(fd) }, first)),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    Err(first_error.unwrap_or_else(|| Error::new(Kind::Unsupported, "")))
}

/// Explains why CUDA does not export memory, as far as its attributes show.
#[cold]
fn explain_export(device: &CudaDevice, start: u64, error: Error) -> Error {
    let attribute_at = |attribute| pointer_attribute_u32(device, attribute, start).ok();
    let mut pool = 0_u64;
    let pool_query =
        call!(device.driver, pointer_attribute((&raw mut pool).cast(), pointer::POOL, start));
    let (why, fix) = if attribute_at(pointer::IS_MANAGED) == Some(1) {
        (
            "it is managed memory, which moves between host and device",
            "use cuMemAlloc or cuMemCreate",
        )
    } else if attribute_at(pointer::RDMA_CAPABLE) == Some(0) {
        (
            "it was allocated with cuMemCreate without the flag for GPUDirect RDMA",
            "set allocFlags.gpuDirectRDMACapable, or use cuMemAlloc (PyTorch: \
             PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)",
        )
    } else if pool_query.is_ok() && pool != 0 {
        (
            "it comes from another library's memory pool",
            "use cuMemAlloc, or a pool with shareable handles",
        )
    } else {
        return error;
    };
    let reason = format!("{why} ({})", error.reason());
    error.why(reason).fix(fix)
}

const GPU_PAGE: u64 = 64 << 10;
const LARGE_GPU_PAGE: u64 = 2 << 20;

impl MemoryBackend for CudaMemory {
    fn address(&self) -> DeviceAddr {
        self.address
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn kind(&self) -> MemoryKind {
        match self.origin {
            Origin::Plain => MemoryKind::Plain,
            Origin::Vmm(_) => MemoryKind::Vmm,
            Origin::Pool => MemoryKind::Pool,
            Origin::Pinned(_) | Origin::Registered { .. } => MemoryKind::Pinned,
            Origin::Borrowed => MemoryKind::Borrowed,
            Origin::Imported { .. } | Origin::ImportedVmm(_) | Origin::ImportedPool(_) => {
                MemoryKind::Imported
            }
        }
    }

    fn host_bytes(&self) -> Option<SharedBytes<'_>> {
        self.pinned_bytes()
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        if let Some(bytes) = self.pinned_bytes() {
            return bytes.write(offset, from);
        }
        let _current = self.device.make_current()?;
        let to = self.address.raw() + offset;
        self.device.copy_sync(to, from.as_ptr() as u64, from.len()).map_err(|error| {
            self.device.error_context(format!("write {} bytes", from.len()))(error)
        })
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        if let Some(bytes) = self.pinned_bytes() {
            return bytes.read(offset, into);
        }
        let _current = self.device.make_current()?;
        let from = self.address.raw() + offset;
        let len = into.len();
        self.device
            .copy_sync(into.as_mut_ptr() as u64, from, len)
            .map_err(|error| self.device.error_context(format!("read {len} bytes"))(error))
    }

    fn export_dmabuf(&self, offset: u64, len: u64, route: DmaBufRoute) -> Result<DmaBuf> {
        let device = &self.device;
        device.capabilities().dmabuf_export.require("export a dma-buf", device.info())?;
        if matches!(self.origin, Origin::Pinned(_) | Origin::Registered { .. }) {
            return Err(Error::new(Kind::Unsupported, "export a dma-buf")
                .on(device.label())
                .why("it is host memory")
                .fix("register host memory by its address instead"));
        }
        let _current = device.make_current()?;
        let start = self.address.raw() + offset;
        let (fd, first) = export_pages(device, start, len, route)
            .map_err(|error| explain_export(device, start, error))
            .map_err(|error| {
                device.error_context(format!("export {len} bytes as a dma-buf"))(error)
            })?;
        Ok(DmaBuf::new(fd, start - first, len))
    }

    fn export_ipc(&self) -> Result<IpcHandle> {
        share::export(self).map_err(self.device.error_context("export an inter-process handle"))
    }

    fn ipc_descriptors(&self) -> Result<Vec<OwnedFd>> {
        share::descriptors(self)
            .map_err(self.device.error_context("export inter-process descriptors"))
    }

    fn watch(self: Arc<Self>, _listener: MemoryListener) -> Result<WatchGuard> {
        let device = &self.device;
        device.capabilities().notify.require("watch memory", device.info())?;
        Ok(WatchGuard::new(|| ()))
    }

    fn buffer_id(&self, offset: u64) -> Result<Option<u64>> {
        if !matches!(self.origin, Origin::Borrowed) {
            return Ok(None);
        }
        let at = self.address.raw() + offset;
        let mut id = 0_u64;
        call!(self.device.driver, pointer_attribute((&raw mut id).cast(), pointer::BUFFER_ID, at))?;
        Ok(Some(id))
    }

    fn backing_end(&self, offset: u64) -> Result<u64> {
        let (mut base, mut size) = (0, 0);
        let at = self.address.raw() + offset;
        // Unlike attributes, address ranges can only be queried with a current context.
        let _current = self.device.make_current()?;
        call!(self.device.driver, address_range(&mut base, &mut size, at))?;
        Ok((base + size as u64).saturating_sub(self.address.raw()))
    }

    fn window_paths(&self) -> &'static [WindowPath] {
        match self.origin {
            Origin::Pinned(_) | Origin::Registered { .. } => &[],
            _ => &[WindowPath::DmaBuf, WindowPath::ResourceManager, WindowPath::Gdrdrv],
        }
    }

    fn map(&self, offset: u64, len: u64, path: WindowPath) -> Result<CpuMapping> {
        window::map(self, offset, len, path)
    }

    fn map_around(&self, start: DeviceAddr, len: u64) -> Result<CpuMapping> {
        window::map_around(self, start.raw(), len)
    }

    fn free(&self) -> Result<()> {
        let (device, address) = (&self.device, self.address.raw());
        let driver = device.driver;
        let _current = device.make_current()?;
        // An open descriptor would keep the memory allocated and its handle valid.
        drop(self.exported.lock().take());
        let outcome = match &self.origin {
            Origin::Borrowed => Ok(()),
            Origin::Plain => {
                device.deferred_free.defer(device, PendingFree::Memory(address));
                Ok(())
            }
            // The CPU may hold views of it: it is freed with the last handle.
            Origin::Pinned(_) | Origin::Registered { .. } => Ok(()),
            Origin::Imported { base, .. } => {
                device.deferred_free.defer(device, PendingFree::Imported(*base));
                Ok(())
            }
            Origin::Pool => call!(driver, pool_free(address, device.internal_stream())),
            Origin::Vmm(vmm_allocation) => unmap_vmm(device, address, *vmm_allocation),
            Origin::ImportedVmm(ImportedPieces { base, sizes }) => {
                unmap_pieces(device, *base, sizes, sizes.iter().sum())
            }
            Origin::ImportedPool(pool) => {
                let internal_handle = device.internal_stream();
                call!(driver, pool_free(address, internal_handle))
                    .and_then(|()| call!(driver, stream_synchronize(internal_handle)))
                    .and(call!(driver, pool_destroy(*pool)))
            }
        };
        outcome.map_err(device.error_context("free memory"))
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if let Origin::Pinned(base) = self.origin {
            let _current = self.device.make_current();
            let pointer = HostPointer(base.as_ptr().cast());
            self.device.deferred_free.defer(&self.device, PendingFree::Pinned(pointer));
        }
        if let Origin::Registered { base, .. } = self.origin {
            let _current = self.device.make_current();
            let pointer = HostPointer(base.as_ptr().cast());
            self.device
                .deferred_free
                .defer(&self.device, PendingFree::Registered(pointer, self.owner.take()));
        }
    }
}
