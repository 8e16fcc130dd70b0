//! How CUDA memory is identified to the resource manager: client handle, object handle, offset.
//!
//! There are two sources, neither documented: the inter-process handle of `cuMemAlloc` memory
//! contains them in a layout known from experiment, and the ioctl by which CUDA exports a dma-buf
//! contains them for every kind of memory. They are verified before use (`window.rs`).

use std::os::fd::OwnedFd;

use super::super::share::DmaBufRoute;
use super::device::CudaDevice;
use super::driver::{call, get};
use super::hook::{self, ObjectRange};
use super::memory::{export_pages, pointer_attribute_u32};
use super::sys::{Opaque64, pointer};
use crate::error::{Error, Kind, Result};

/// The page size in which the resource manager maps.
const PAGE: u64 = 4096;

/// Kind of allocation, which decides how it is identified; verification is per kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AllocKind {
    /// By its inter-process handle.
    Plain,
    /// By a dma-buf export; virtual memory.
    Vmm,
    /// By a dma-buf export; pool memory.
    Pool,
}

/// A page-aligned range of device addresses, and the object ranges that it consists of.
#[derive(Debug)]
pub(super) struct RmRange {
    pub(super) start: u64,
    pub(super) object_ranges: Vec<ObjectRange>,
}

/// The kind of device memory at an address.
pub(super) fn alloc_kind_of(device: &CudaDevice, address: u64) -> AllocKind {
    if pointer_attribute_u32(device, pointer::IS_LEGACY_IPC_CAPABLE, address).unwrap_or(0) != 0 {
        return AllocKind::Plain;
    }
    let mut pool: u64 = 0;
    let pool_query =
        call!(device.driver, pointer_attribute((&raw mut pool).cast(), pointer::POOL, address));
    if pool_query.is_ok() && pool != 0 { AllocKind::Pool } else { AllocKind::Vmm }
}

/// Finds the object ranges of `len` bytes at `address`. The context must be current.
pub(super) fn resolve(
    device: &CudaDevice,
    alloc_kind: AllocKind,
    address: u64,
    len: u64,
) -> Result<RmRange> {
    let rm_range = match alloc_kind {
        AllocKind::Plain => by_handle(device, address, address, len)?,
        AllocKind::Vmm | AllocKind::Pool => by_export(device, address, len)?,
    };
    let covered: u64 = rm_range.object_ranges.iter().map(|object_range| object_range.len).sum();
    let aligned = rm_range.object_ranges.iter().all(|p| p.offset % PAGE == 0 && p.len % PAGE == 0);
    if !aligned || rm_range.start > address || rm_range.start + covered < address + len {
        return Err(naming_error("the object ranges that CUDA reports do not cover the memory"));
    }
    Ok(rm_range)
}

/// Finds the range of `len` bytes at `address` in the object that contains the plain memory at
/// `anchor`. The range may extend beyond the anchor's allocation, but not beyond the object.
pub(super) fn by_handle(
    device: &CudaDevice,
    anchor: u64,
    address: u64,
    len: u64,
) -> Result<RmRange> {
    let driver = device.driver;
    let (mut base, mut size) = (0, 0);
    call!(driver, address_range(&mut base, &mut size, anchor))?;
    let handle = get!(driver, Opaque64([0; 64]), ipc_export(anchor))?;
    let word = |at: usize| {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&handle.0[at * 4..at * 4 + 4]);
        u64::from(u32::from_le_bytes(bytes))
    };
    let (allocation, object_pages, offset) = (word(4) | word(5) << 32, word(6), word(7));
    let (client, object) = (word(12), word(13));
    let object_len = object_pages * PAGE;
    let plausible = client >> 16 == 0xc1d0
        && object != 0
        && word(2) == u64::from(std::process::id())
        && allocation >= size as u64
        && offset + size as u64 <= object_len;
    if !plausible {
        return Err(naming_error("this driver's inter-process handle has a different layout"));
    }
    // Offset of the range in the object.
    let object_start = base.checked_sub(offset);
    let first = object_start.and_then(|start| address.checked_sub(start));
    let Some(first) = first.filter(|first| first + len <= object_len) else {
        return Err(naming_error("the range extends beyond the memory object that it begins in"));
    };
    let start = first - first % PAGE;
    let end = (first + len).next_multiple_of(PAGE).min(object_len);
    let object_range = ObjectRange {
        client: client as u32,
        object: object as u32,
        offset: start,
        len: end - start,
    };
    Ok(RmRange { start: address - (first - start), object_ranges: vec![object_range] })
}

fn by_export(device: &CudaDevice, address: u64, len: u64) -> Result<RmRange> {
    let export = || export_pages(device, address, len, DmaBufRoute::Default);
    let ((_descriptor, start), object_ranges): ((OwnedFd, u64), _) = hook::record_exports(export)?;
    if object_ranges.is_empty() {
        return Err(naming_error("CUDA exported the memory without the expected ioctl"));
    }
    Ok(RmRange { start, object_ranges })
}

#[cold]
fn naming_error(why: &'static str) -> Error {
    Error::new(Kind::Unsupported, "identify GPU memory to the resource manager").why(why)
}
