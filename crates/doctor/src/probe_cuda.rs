//! Probes of CUDA: loads the driver, queries each device's attributes, and allocates, exports and
//! maps a small buffer on it.

use super::probes::{CudaAttributes, CudaDeviceProbe};
use super::{CudaProbe, ProbeOutcome};
use warpwire::error::{Kind, Result};
use warpwire::mem::{Allocation, Device, DmaBuf, Window, cuda};

/// Size of the probe buffer in bytes: small enough not to disturb other users of the GPU.
const PROBE_LEN: u64 = 64 << 10;

/// Probes CUDA on the running machine.
pub(super) fn probe() -> CudaProbe {
    let (major, minor) = match cuda::driver_version() {
        Ok(version) => version,
        Err(error) => {
            let failed = ProbeOutcome::failed(error.reason());
            // A missing library or symbol is distinct from a driver that fails to initialize.
            let (library, init) = match error.kind() {
                Kind::Unavailable => (failed, ProbeOutcome::not_tried("the library did not load")),
                _ => (ProbeOutcome::Worked, failed),
            };
            return CudaProbe { library, init, ..CudaProbe::default() };
        }
    };
    CudaProbe {
        library: ProbeOutcome::Worked,
        init: ProbeOutcome::Worked,
        driver_api: Some(major * 1000 + minor * 10),
        devices: cuda::devices().unwrap_or_default().iter().map(device).collect(),
    }
}

fn device(device: &Device) -> CudaDeviceProbe {
    let info = device.info();
    let memory = device.alloc(PROBE_LEN);
    let exported =
        memory.as_ref().ok().map(|memory: &Allocation| memory.export_dmabuf(0, PROBE_LEN));
    let mapped = exported.as_ref().and_then(|exported| exported.as_ref().ok()).map(DmaBuf::try_map);
    let window = memory.as_ref().ok().map(Allocation::window);
    let open = window.as_ref().and_then(|window| window.as_ref().ok());
    CudaDeviceProbe {
        ordinal: info.ordinal,
        name: info.name.clone(),
        pci: info.pci,
        total_memory: info.total_memory,
        attributes: attributes(info.ordinal),
        window_path: open.map(|window| window.path().to_string()),
        window_refused: open.map(refused).unwrap_or_default(),
        window: outcome(window, "there was no memory to map"),
        alloc_64k: outcome(Some(memory), ""),
        dmabuf_export: outcome(exported, "there was no memory to export"),
        dmabuf_mmap: outcome(mapped, "there was no dma-buf to map"),
    }
}

/// The window paths that were not available, each with its reason.
fn refused(window: &Window) -> Vec<String> {
    let each = window.rejected_paths().iter();
    each.map(|refusal| format!("{}: {}", refusal.path, refusal.why.reason())).collect()
}

fn outcome<T>(tried: Option<Result<T>>, otherwise: &str) -> ProbeOutcome {
    match tried {
        Some(Ok(_)) => ProbeOutcome::Worked,
        Some(Err(error)) => ProbeOutcome::failed(error.reason()),
        None => ProbeOutcome::not_tried(otherwise),
    }
}

fn attributes(ordinal: u32) -> CudaAttributes {
    let known = cuda::attributes(ordinal).unwrap_or_default();
    let is_set = |value: Option<i32>| value.map(|value| value != 0);
    let number = |value: Option<i32>| value.and_then(|value| u32::try_from(value).ok());
    CudaAttributes {
        dma_buf_supported: is_set(known.dma_buf),
        gpu_direct_rdma_supported: is_set(known.gpudirect_rdma),
        gpu_direct_rdma_with_vmm_supported: is_set(known.gpudirect_rdma_with_vmm),
        flush_writes_options: number(known.flush_options),
        writes_ordering: number(known.writes_ordering),
        stream_mem_ops_64_bit: is_set(known.stream_mem_ops_64),
        stream_wait_value_nor: is_set(known.stream_wait_nor),
        posix_fd_handles: is_set(known.posix_fd_handles),
        memory_pools: is_set(known.pools),
    }
}
