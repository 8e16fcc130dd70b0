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
    let object = PlainObject::parse(&handle, size as u64)?;
    if object.pid != std::process::id() {
        return Err(naming_error(OTHER_LAYOUT));
    }
    object.range(base, address, len)
}

/// The same for another process's plain memory that was opened at `base` with this handle.
pub(super) fn by_foreign_handle(
    handle: &Opaque64,
    base: u64,
    address: u64,
    len: u64,
) -> Result<RmRange> {
    PlainObject::parse(handle, 0)?.range(base, address, len)
}

const OTHER_LAYOUT: &str = "this driver's inter-process handle has a different layout";

/// What the inter-process handle of plain memory says.
struct PlainObject {
    pid: u32,
    client: u32,
    object: u32,
    object_len: u64,
    /// Where the allocation begins in the object.
    offset: u64,
}

impl PlainObject {
    /// Rejects handles that cannot be of an allocation of at least `size` bytes.
    fn parse(handle: &Opaque64, size: u64) -> Result<Self> {
        let word = |at: usize| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&handle.0[at * 4..at * 4 + 4]);
            u32::from_le_bytes(bytes)
        };
        let allocation = u64::from(word(4)) | u64::from(word(5)) << 32;
        let (object_len, offset) = (u64::from(word(6)) * PAGE, u64::from(word(7)));
        let (client, object) = (word(12), word(13));
        let plausible = client >> 16 == 0xc1d0
            && object != 0
            && allocation >= size
            && offset + allocation.min(size) <= object_len;
        match plausible {
            true => Ok(Self { pid: word(2), client, object, object_len, offset }),
            false => Err(naming_error(OTHER_LAYOUT)),
        }
    }

    /// The range of `len` bytes at `address`, where the allocation begins at `base`.
    fn range(&self, base: u64, address: u64, len: u64) -> Result<RmRange> {
        // Offset of the range in the object.
        let object_start = base.checked_sub(self.offset);
        let first = object_start.and_then(|start| address.checked_sub(start));
        let Some(first) = first.filter(|first| first + len <= self.object_len) else {
            return Err(naming_error(
                "the range extends beyond the memory object that it begins in",
            ));
        };
        let start = first - first % PAGE;
        let end = (first + len).next_multiple_of(PAGE).min(self.object_len);
        let &Self { client, object, .. } = self;
        let object_range = ObjectRange { client, object, offset: start, len: end - start };
        Ok(RmRange { start: address - (first - start), object_ranges: vec![object_range] })
    }
}

/// The same for memory of any kind that CUDA exports as a dma-buf.
pub(super) fn by_export(device: &CudaDevice, address: u64, len: u64) -> Result<RmRange> {
    let export = || export_pages(device, address, len, DmaBufRoute::Default);
    let ((_descriptor, start), recorded): ((OwnedFd, u64), _) = hook::record_exports(export)?;
    let object_ranges = recorded.object_ranges;
    if object_ranges.is_empty() {
        return Err(naming_error("CUDA exported the memory without the expected ioctl"));
    }
    Ok(RmRange { start, object_ranges })
}

#[cold]
fn naming_error(why: &'static str) -> Error {
    Error::new(Kind::Unsupported, "identify GPU memory to the resource manager").why(why)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A handle of 3 pages at offset 512 of an object of 8 pages.
    fn handle() -> Opaque64 {
        let mut handle = Opaque64([0; 64]);
        let words = [(2, 77), (4, 3 * PAGE as u32), (6, 8), (7, 512), (12, 0xc1d0_0005), (13, 9)];
        words.into_iter().for_each(|(at, word)| set(&mut handle, at, word));
        handle
    }

    fn set(handle: &mut Opaque64, at: usize, word: u32) {
        handle.0[at * 4..at * 4 + 4].copy_from_slice(&word.to_le_bytes());
    }

    #[test]
    fn foreign_handles_name_whole_pages() {
        let base = 0x10_0200;
        let found = by_foreign_handle(&handle(), base, base + 5000, 100).unwrap();
        let [object] = found.object_ranges[..] else { panic!("{found:?}") };
        assert_eq!((object.client, object.object), (0xc1d0_0005, 9));
        assert_eq!((object.offset, object.len), (PAGE, PAGE));
        assert_eq!(found.start, 0x10_0000 + PAGE);
    }

    #[test]
    fn wrong_handles_are_refused() {
        let refused = |handle: &Opaque64, base, address, len| {
            by_foreign_handle(handle, base, address, len).unwrap_err().to_string()
        };
        for (at, word) in [(12, 5), (13, 0), (7, 9 * PAGE as u32)] {
            let mut wrong = handle();
            set(&mut wrong, at, word);
            assert!(refused(&wrong, 1 << 20, 1 << 20, 8).contains("different layout"), "{at}");
        }
        // Beyond the object, before it, and where no object can begin.
        for (base, address, len) in [(1 << 20, 1 << 20, 8 * PAGE), (1 << 20, 0, 8), (8, 8, 8)] {
            assert!(refused(&handle(), base, address, len).contains("beyond"), "{base}, {address}");
        }
    }
}
