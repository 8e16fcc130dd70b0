//! How CUDA's memory is named to the resource manager: which client, which object, where in it.
//!
//! Two ways, because neither is documented: the inter-process handle of `cuMemAlloc` memory holds the
//! names in a layout that we know from experiment; and the request by which CUDA exports a dma-buf holds
//! them for every kind of memory. Whoever uses a name proves it first (`window.rs`).

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

/// How memory was named, which is what a proof is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AllocKind {
    /// By the inter-process handle.
    Plain,
    /// By the export of virtual memory.
    Vmm,
    /// By the export of pool memory.
    Pool,
}

/// A page-aligned range of device addresses and the pieces of objects that it consists of.
#[derive(Debug)]
pub(super) struct RmRange {
    pub(super) start: u64,
    pub(super) object_ranges: Vec<ObjectRange>,
}

/// What sort of device memory lies at an address.
pub(super) fn alloc_kind_of(device: &CudaDevice, address: u64) -> AllocKind {
    if pointer_attribute_u32(device, pointer::IS_LEGACY_IPC_CAPABLE, address).unwrap_or(0) != 0 {
        return AllocKind::Plain;
    }
    let mut pool: u64 = 0;
    let asked =
        call!(device.driver, pointer_attribute((&raw mut pool).cast(), pointer::POOL, address));
    if asked.is_ok() && pool != 0 { AllocKind::Pool } else { AllocKind::Vmm }
}

/// Names `len` bytes at `address`. The context is current.
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
        return Err(naming_error("CUDA's names for the memory do not cover it"));
    }
    Ok(rm_range)
}

/// Names `len` bytes at `address` by the object that the plain memory at `anchor` lies in. The range may go
/// beyond the allocation of the anchor, not beyond the object.
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
        return Err(naming_error("this driver's inter-process handle has another layout"));
    }
    // Where the object begins, and from there the range.
    let object_start = base.checked_sub(offset);
    let first = object_start.and_then(|start| address.checked_sub(start));
    let Some(first) = first.filter(|first| first + len <= object_len) else {
        return Err(naming_error("the range passes the piece of memory that it begins in"));
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
        return Err(naming_error(
            "CUDA exported the memory without naming it to the kernel as expected",
        ));
    }
    Ok(RmRange { start, object_ranges })
}

#[cold]
fn naming_error(why: &'static str) -> Error {
    Error::new(Kind::Unsupported, "name GPU memory to the resource manager").why(why)
}
