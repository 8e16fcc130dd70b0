//! NVIDIA GPUs through the CUDA driver API (`libcuda.so.1`), loaded at run time.
//!
//! Works on driver R535 and newer. What an older one lacks is a missing
//! [capability](super::Capability) or an error that names the symbol. The primary context is used,
//! so memory and streams are shared with PyTorch and other libraries in the process; it is current
//! on the calling thread only for the duration of a call.
#![allow(unsafe_code)]

mod deferred_free;
mod device;
mod driver;
mod foreign;
mod gdrdrv;
mod hook;
mod memory;
mod module;
mod naming;
mod object_export;
mod rm;
mod share;
mod stream;
mod sys;
mod window;

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::address::DeviceAddr;
use super::allocation::Allocation;
use super::device::Device;
use crate::error::{Error, Kind, Result};
use device::CudaDevice;
use driver::{Driver, call, get};
pub(super) use share::handle_type;

/// All CUDA devices, or the reason why there are none.
///
/// A device that cannot be opened (for instance one in exclusive mode) is skipped, unless none can.
pub fn devices() -> Result<Vec<Device>> {
    let (mut devices, mut last_error) = (Vec::new(), None);
    for ordinal in 0..count()? {
        match device(ordinal) {
            Ok(device) => devices.push(device),
            Err(error) => {
                tracing::warn!(%error, "cuda:{ordinal} is skipped");
                last_error = Some(error);
            }
        }
    }
    match last_error {
        Some(error) if devices.is_empty() => Err(error),
        _ => Ok(devices),
    }
}

/// Opens the CUDA device with that ordinal. Returns the same device while any object of it is
/// alive.
pub fn device(ordinal: u32) -> Result<Device> {
    open(ordinal).map(|device| Device::from_backend(device))
}

fn open(ordinal: u32) -> Result<Arc<CudaDevice>> {
    static OPEN: Mutex<Vec<Weak<CudaDevice>>> = Mutex::new(Vec::new());
    let count = count()?;
    if ordinal >= count {
        return Err(Error::new(Kind::InvalidArgument, format!("open device cuda:{ordinal}"))
            .why(format!("CUDA reports {count} devices"))
            .fix("use a lower number; check CUDA_VISIBLE_DEVICES"));
    }
    let mut open = OPEN.lock();
    open.retain(|device| device.strong_count() > 0);
    let known = open.iter().filter_map(Weak::upgrade).find(|device| device.ordinal() == ordinal);
    if let Some(device) = known {
        return Ok(device);
    }
    let device = Arc::new(CudaDevice::open(Driver::get()?, ordinal)?);
    open.push(Arc::downgrade(&device));
    Ok(device)
}

/// The driver's synchronous copies (`cuMemcpyHtoD`, `cuMemcpyDtoH`) as an ordinary program uses
/// them, with its context always current: a baseline for comparisons. A small copy to the device
/// from pageable memory may still be in flight when the call returns.
pub struct DriverCopies {
    device: Arc<CudaDevice>,
    /// The context is current on this thread only.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl DriverCopies {
    /// Makes the device's context current on this thread until the value is dropped.
    pub fn new(ordinal: u32) -> Result<Self> {
        let device = open(ordinal)?;
        device.push()?;
        Ok(Self { device, _not_send: std::marker::PhantomData })
    }

    /// Copies `from` to `memory` at `offset`.
    pub fn write(&self, memory: &Allocation, offset: u64, from: &[u8]) -> Result<()> {
        let region = memory.region(offset, from.len() as u64)?;
        let (to, len) = (region.address().raw(), from.len());
        call!(self.device.driver, copy_to_device(to, from.as_ptr().cast(), len))
    }

    /// Copies from `memory` at `offset` to `into`.
    pub fn read(&self, memory: &Allocation, offset: u64, into: &mut [u8]) -> Result<()> {
        let region = memory.region(offset, into.len() as u64)?;
        let (from, len) = (region.address().raw(), into.len());
        call!(self.device.driver, copy_to_host(into.as_mut_ptr().cast(), from, len))
    }

    /// Waits until all copies have completed.
    pub fn synchronize(&self) -> Result<()> {
        call!(self.device.driver, stream_synchronize(sys::StreamHandle::NULL))
    }
}

impl Drop for DriverCopies {
    fn drop(&mut self) {
        self.device.pop();
    }
}

/// Whether libcuda is loaded in this process, by this library or any other.
pub fn is_loaded() -> bool {
    Driver::is_loaded()
}

/// The CUDA device that owns the memory at `address`.
pub(super) fn owner_of(address: DeviceAddr) -> Result<Device> {
    let driver = Driver::get()?;
    let mut ordinal = 0_u32;
    let queried = call!(
        driver,
        pointer_attribute((&raw mut ordinal).cast(), sys::pointer::DEVICE_ORDINAL, address.raw())
    );
    queried.map_err(|error| {
        Error::new(Kind::NotDeviceMemory, format!("find the device of {address}"))
            .why(format!("CUDA does not know the address ({})", error.reason()))
    })?;
    device(ordinal)
}

/// The CUDA version that the driver supports, as `(13, 0)`.
pub fn driver_version() -> Result<(u32, u32)> {
    let version = Driver::get()?.version;
    Ok((version as u32 / 1000, version as u32 % 1000 / 10))
}

/// Attributes of a device as reported by the driver, for diagnosis; `None` if the driver does not
/// know one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Attributes {
    /// dma-buf export is supported.
    pub dma_buf: Option<i32>,
    /// GPUDirect RDMA is supported.
    pub gpudirect_rdma: Option<i32>,
    /// GPUDirect RDMA with memory from the virtual memory management API is supported.
    pub gpudirect_rdma_with_vmm: Option<i32>,
    /// Ways to flush NIC writes, as bits (`CUflushGPUDirectRDMAWritesOptions`).
    pub flush_options: Option<i32>,
    /// Scope in which NIC writes are ordered without a flush (`CUGPUDirectRDMAWritesOrdering`).
    pub writes_ordering: Option<i32>,
    /// 64-bit stream memory operations are supported.
    pub stream_mem_ops_64: Option<i32>,
    /// Stream waits for NOR are supported.
    pub stream_wait_nor: Option<i32>,
    /// Virtual memory handles can be exported as file descriptors.
    pub posix_fd_handles: Option<i32>,
    /// Stream-ordered pools are supported.
    pub pools: Option<i32>,
}

/// Queries the driver's attributes of a device.
pub fn attributes(ordinal: u32) -> Result<Attributes> {
    use sys::attribute as a;
    let driver = Driver::get()?;
    let query = |attribute| device::attribute(driver, ordinal, attribute).ok();
    Ok(Attributes {
        dma_buf: query(a::DMA_BUF_SUPPORTED),
        gpudirect_rdma: query(a::GPUDIRECT_RDMA),
        gpudirect_rdma_with_vmm: query(a::GPUDIRECT_RDMA_WITH_VMM),
        flush_options: query(a::GPUDIRECT_FLUSH_OPTIONS),
        writes_ordering: query(a::GPUDIRECT_WRITES_ORDERING),
        stream_mem_ops_64: query(a::STREAM_MEM_OPS_64),
        stream_wait_nor: query(a::STREAM_WAIT_NOR),
        posix_fd_handles: query(a::POSIX_FD_SUPPORTED),
        pools: query(a::POOLS_SUPPORTED),
    })
}

fn count() -> Result<u32> {
    let count = get!(Driver::get()?, 0, device_count())?;
    u32::try_from(count).ok().filter(|count| *count > 0).ok_or_else(|| {
        Error::new(Kind::Unavailable, "use CUDA")
            .why("the driver reports no GPU")
            .fix("check CUDA_VISIBLE_DEVICES and nvidia-smi; the simulated GPU needs no driver")
    })
}
