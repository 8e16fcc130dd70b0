//! How CUDA's memory is named to the resource manager: which client, which object, where in it.
//!
//! Two ways, because neither is documented: the inter-process handle of `cuMemAlloc` memory holds the
//! names in a layout that we know from experiment; and the request by which CUDA exports a dma-buf holds
//! them for every kind of memory. Whoever uses a name proves it first (`window.rs`).

use std::os::fd::OwnedFd;

use super::super::share::DmaBufRoute;
use super::device::CudaDevice;
use super::driver::{call, get};
use super::hook::{self, Piece};
use super::memory::{ask_pointer, export_pages};
use super::sys::{Opaque64, pointer};
use crate::error::{Error, Kind, Result};

/// The page size in which the resource manager maps.
const PAGE: u64 = 4096;

/// How memory was named, which is what a proof is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    /// By the inter-process handle.
    Plain,
    /// By the export of virtual memory.
    Vmm,
    /// By the export of pool memory.
    Pool,
}

/// A page-aligned range of device addresses and the pieces of objects that it consists of.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) start: u64,
    pub(super) pieces: Vec<Piece>,
}

/// What sort of device memory lies at an address.
pub(super) fn sort_of(device: &CudaDevice, address: u64) -> Sort {
    if ask_pointer(device, pointer::IS_LEGACY_IPC_CAPABLE, address).unwrap_or(0) != 0 {
        return Sort::Plain;
    }
    let mut pool: u64 = 0;
    let asked =
        call!(device.driver, pointer_attribute((&raw mut pool).cast(), pointer::POOL, address));
    if asked.is_ok() && pool != 0 { Sort::Pool } else { Sort::Vmm }
}

/// Names `len` bytes at `address`. The context is current.
pub(super) fn name(device: &CudaDevice, sort: Sort, address: u64, len: u64) -> Result<Named> {
    let named = match sort {
        Sort::Plain => by_handle(device, address, address, len)?,
        Sort::Vmm | Sort::Pool => by_export(device, address, len)?,
    };
    let covered: u64 = named.pieces.iter().map(|piece| piece.len).sum();
    let aligned = named.pieces.iter().all(|p| p.offset % PAGE == 0 && p.len % PAGE == 0);
    if !aligned || named.start > address || named.start + covered < address + len {
        return Err(unknown("CUDA's names for the memory do not cover it"));
    }
    Ok(named)
}

/// Names `len` bytes at `address` by the object that the plain memory at `anchor` lies in. The range may go
/// beyond the allocation of the anchor, not beyond the object.
pub(super) fn by_handle(device: &CudaDevice, anchor: u64, address: u64, len: u64) -> Result<Named> {
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
        return Err(unknown("this driver's inter-process handle has another layout"));
    }
    // Where the object begins, and from there the range.
    let object_start = base.checked_sub(offset);
    let first = object_start.and_then(|start| address.checked_sub(start));
    let Some(first) = first.filter(|first| first + len <= object_len) else {
        return Err(unknown("the range passes the piece of memory that it begins in"));
    };
    let start = first - first % PAGE;
    let end = (first + len).next_multiple_of(PAGE).min(object_len);
    let piece =
        Piece { client: client as u32, object: object as u32, offset: start, len: end - start };
    Ok(Named { start: address - (first - start), pieces: vec![piece] })
}

fn by_export(device: &CudaDevice, address: u64, len: u64) -> Result<Named> {
    let export = || export_pages(device, address, len, DmaBufRoute::Default);
    let ((_descriptor, start), pieces): ((OwnedFd, u64), _) = hook::watch(export)?;
    if pieces.is_empty() {
        return Err(unknown(
            "CUDA exported the memory without naming it to the kernel as expected",
        ));
    }
    Ok(Named { start, pieces })
}

#[cold]
fn unknown(why: &'static str) -> Error {
    Error::new(Kind::Unsupported, "name GPU memory to the resource manager").why(why)
}
