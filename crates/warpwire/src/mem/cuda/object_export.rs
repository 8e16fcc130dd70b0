//! Descriptors of memory that CUDA itself does not export: of pools without a handle type, such as
//! the default pool behind `cudaMallocAsync`, and of virtual memory without one.
//!
//! CUDA can export all of it as a dma-buf, which names the memory objects behind it (`naming.rs`).
//! The resource manager puts each of them into a descriptor, as it does for
//! `cuMemExportToShareableHandle`, and `cuMemImportFromShareableHandle` accepts it. What CUDA
//! attaches to its descriptors is not documented, and is copied from one that CUDA has made. The
//! whole is verified on scratch memory, once per device.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::super::allocation::MemoryKind;
use super::super::backend::{DeviceBackend, MemoryBackend};
use super::device::CudaDevice;
use super::memory::{self, CudaMemory, ImportedPieces, Origin};
use super::rm::{self, ExportMetadata};
use super::window::test_word;
use super::{hook, naming, share};
use crate::error::{Error, Kind, Result};

/// Memory objects side by side, each as a whole.
pub(super) struct ExportedObjects {
    /// Where the exported range begins in the first of them.
    pub(super) offset: u64,
    /// Their descriptors and sizes.
    pub(super) pieces: Vec<(OwnedFd, u64)>,
}

/// Exports the objects behind `len` bytes at `address`. The context must be current.
pub(super) fn export(device: &Arc<CudaDevice>, address: u64, len: u64) -> Result<ExportedObjects> {
    let verified = device.object_exports.get_or_init(|| {
        verify(device).inspect_err(
            |error| tracing::warn!(%error, "memory that CUDA does not export is not shared"),
        )
    });
    export_objects(device, address, len, verified.as_ref().map_err(Clone::clone)?)
}

fn export_objects(
    device: &CudaDevice,
    address: u64,
    len: u64,
    metadata: &ExportMetadata,
) -> Result<ExportedObjects> {
    let pci = device.info().pci.ok_or_else(|| failure("the GPU's PCI address is not known"))?;
    let client = rm::Client::get()?;
    let gpu = client.gpu(pci)?;
    let range = naming::by_export(device, address, len)?;
    let parts = &range.object_ranges;
    let mut pieces = Vec::with_capacity(parts.len());
    for (number, part) in parts.iter().enumerate() {
        let object = client.dup_object(gpu, part.client, part.object)?;
        let size = object.size()?;
        // An importer can map an object as a whole only, side by side with the next one.
        let begins = number == 0 || part.offset == 0;
        let end = part.offset + part.len;
        if !begins || end > size || (end < size && number + 1 < parts.len()) {
            return Err(failure("parts of its memory objects are mapped elsewhere"));
        }
        pieces.push((object.export(metadata)?, size));
    }
    let into_range = address.checked_sub(range.start);
    match (into_range, parts.first()) {
        (Some(into_range), Some(first)) => {
            Ok(ExportedObjects { offset: first.offset + into_range, pieces })
        }
        _ => Err(failure("CUDA named other memory than asked for")),
    }
}

/// Learns what CUDA attaches to a descriptor, and verifies that a descriptor made here gives the
/// same memory.
fn verify(device: &Arc<CudaDevice>) -> Result<ExportMetadata> {
    const LEN: u64 = 200_000;
    let scratch = memory::allocate(device.clone(), LEN, MemoryKind::Vmm)?;
    let metadata = learn_metadata(&scratch).and_then(|metadata| {
        let exported = export_objects(device, scratch.address().raw(), LEN, &metadata)?;
        let (fds, sizes): (Vec<_>, Vec<_>) =
            exported.pieces.into_iter().map(|(fd, size)| (fd, size as usize)).unzip();
        let base = memory::import_vmm(device, &fds, &sizes)?;
        let origin = Origin::ImportedVmm(ImportedPieces { base, sizes: sizes.into() });
        let imported = CudaMemory::new(device.clone(), base + exported.offset, LEN, origin);
        let checked = check_same(&scratch, &imported);
        imported.free().and(checked).map(|()| metadata)
    });
    scratch.free()?;
    metadata
}

fn learn_metadata(scratch: &CudaMemory) -> Result<ExportMetadata> {
    let ((), recorded) = hook::record_exports(|| {
        share::export_piece(&scratch.device, scratch.address().raw()).map(drop)
    })?;
    recorded.metadata.ok_or_else(|| failure("CUDA made a descriptor without the expected ioctl"))
}

/// Writes to each of the two, and reads from the other.
fn check_same(scratch: &CudaMemory, imported: &CudaMemory) -> Result<()> {
    for (seed, at) in [0, 4096, scratch.len() - 8].into_iter().enumerate() {
        for (from, to) in [(scratch, imported), (imported, scratch)] {
            let pattern = test_word(seed as u64, from.address().raw() + at).to_le_bytes();
            let mut seen = [0; 8];
            from.write(at, &pattern)?;
            to.read(at, &mut seen)?;
            if seen != pattern {
                return Err(failure("scratch memory does not read back through it as written"));
            }
        }
    }
    Ok(())
}

#[cold]
fn failure(why: &'static str) -> Error {
    Error::new(Kind::Unsupported, "export the memory objects").why(why)
}
