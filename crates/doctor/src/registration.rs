//! Checks of GPU memory registration with a NIC: by dma-buf, by a peer-memory module, or staged.

use super::rdma::usable_hardware;
use super::{BestNic, Check, CudaDeviceProbe, Distance, Evidence, Group, ProbeOutcome};
use warpwire::host::{RdmaDevice, System};

const GROUP: Group = Group::Registration;

/// Kernel modules with which `ibv_reg_mr` accepts GPU addresses.
const PEER_MEMORY_MODULES: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];

/// Value of `WRITES_ORDERING` from which on the GPU that owns the memory sees a NIC's writes in
/// order.
const ORDERED_FOR_OWNER: u32 = 100;

/// What to do where GPU memory cannot be registered.
pub(super) const PEER_MEMORY_FIX: &str = "`sudo modprobe nvidia-peermem`; if it fails with \"Invalid argument\", the RDMA drivers have \
     no peer-memory support: install MLNX_OFED or DOCA-OFED and rebuild the NVIDIA modules";

/// How the memory of a GPU can be registered with a NIC.
pub(super) enum Path {
    /// By dma-buf.
    DmaBuf,
    /// By this peer-memory module.
    PeerMemory(&'static str),
    /// It cannot, for these reasons; data is staged through host memory.
    Staged(Vec<String>),
}

pub(super) fn checks(evidence: &Evidence) -> Vec<Check> {
    let system = &evidence.system;
    let devices = &evidence.probes.cuda.devices;
    let mut checks: Vec<Check> = devices
        .iter()
        .flat_map(|device| {
            let subject = format!("cuda:{}", device.ordinal);
            device_checks(device).into_iter().map(move |check| check.about([&subject]))
        })
        .collect();
    if devices.is_empty() {
        checks.push(GROUP.skip("dma-buf export", "there is no CUDA device to try it on"));
    }
    checks.push(kernel(system));
    checks.push(verbs_library(evidence));
    checks.push(peer_memory(evidence));
    checks.push(peer_mapping_override(evidence));
    checks.extend(distances(evidence));
    checks
}

/// The registration path of a GPU with a NIC, and why no better one is used.
pub(super) fn path_of(evidence: &Evidence, device: &CudaDeviceProbe, nic: &RdmaDevice) -> Path {
    let mut missing = dma_buf_obstacles(evidence, Some(device), Some(nic));
    if missing.is_empty() {
        return Path::DmaBuf;
    }
    match peer_memory_module(&evidence.system) {
        Some(module) => Path::PeerMemory(module),
        None => {
            missing.push("no peer-memory module is loaded".to_owned());
            Path::Staged(missing)
        }
    }
}

/// Everything that prevents registration of a GPU's memory with a NIC by dma-buf; without a GPU or
/// NIC, of any with any.
fn dma_buf_obstacles(
    evidence: &Evidence,
    device: Option<&CudaDeviceProbe>,
    nic: Option<&RdmaDevice>,
) -> Vec<String> {
    let system = &evidence.system;
    let mut missing = Vec::new();
    let all = &evidence.probes.cuda.devices;
    let devices = device.map_or(all.iter().collect(), |device| vec![device]);
    if !devices.iter().any(|device| device.dmabuf_export.worked()) {
        missing.push(match devices.first() {
            Some(device) => format!("dma-buf export {}", device.dmabuf_export.describe()),
            None => "dma-buf export was not tried (no CUDA device)".to_owned(),
        });
    }
    match system.kernel() {
        Some(kernel) if kernel.at_least(5, 12) => {}
        Some(kernel) => missing.push(format!("kernel {} is older than 5.12", kernel.release)),
        None => missing.push("the kernel's version is not known".to_owned()),
    }
    match system.verbs_library().map(|library| library.supports_dma_buf_mr()) {
        Some(Some(true)) => {}
        Some(Some(false)) => missing.push("libibverbs has no ibv_reg_dmabuf_mr".to_owned()),
        Some(None) => missing.push("libibverbs's version is not known".to_owned()),
        None => missing.push("libibverbs.so.1 is not installed".to_owned()),
    }
    let nics = nic.map_or_else(|| usable_hardware(evidence), |nic| vec![nic]);
    if !nics.iter().any(|nic| nic.supports_dma_buf_mr() == Some(true)) {
        missing.push(match nic {
            Some(nic) => {
                let driver = nic.driver.as_deref().unwrap_or("unknown");
                format!("the {driver} driver does not accept dma-bufs")
            }
            None => "no usable RDMA device's driver accepts dma-bufs".to_owned(),
        });
    }
    missing
}

fn peer_memory_module(system: &System) -> Option<&'static str> {
    PEER_MEMORY_MODULES.into_iter().find(|module| system.has_module(module))
}

fn device_checks(device: &CudaDeviceProbe) -> Vec<Check> {
    let attributes = &device.attributes;
    let label = |what: &str| format!("cuda:{} {what}", device.ordinal);
    vec![
        dma_buf_export(device),
        attribute(
            label("GPUDirect RDMA"),
            attributes.gpu_direct_rdma_supported,
            "CUDA reports that a NIC may access this device's memory",
            "use a data-centre or professional GPU for GPUDirect RDMA; on this one, data is staged",
        ),
        attribute(
            label("GPUDirect RDMA with VMM"),
            attributes.gpu_direct_rdma_with_vmm_supported,
            "memory from cuMemCreate can be registered too",
            "register memory from cuMemAlloc instead (PyTorch: \
             PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)",
        ),
        writes_ordering(label("order of a NIC's writes"), device),
    ]
}

fn dma_buf_export(device: &CudaDeviceProbe) -> Check {
    let name = format!("cuda:{} dma-buf export", device.ordinal);
    match &device.dmabuf_export {
        ProbeOutcome::Worked => GROUP.pass(name, "exported 64 KiB as a dma-buf"),
        ProbeOutcome::NotTried { why } => GROUP.skip(name, format!("not tried: {why}")),
        ProbeOutcome::Failed { why } => GROUP.warn(
            name,
            why,
            "use the open kernel modules (nvidia-open) on Linux 5.12 or newer; \
             or `sudo modprobe nvidia-peermem`",
        ),
    }
}

fn attribute(name: String, value: Option<bool>, yes: &str, fix: &str) -> Check {
    match value {
        Some(true) => GROUP.pass(name, yes),
        Some(false) => GROUP.warn(name, "CUDA reports that this device does not support it", fix),
        None => GROUP.skip(name, "CUDA did not report the attribute"),
    }
}

fn writes_ordering(name: String, device: &CudaDeviceProbe) -> Check {
    let attributes = &device.attributes;
    let host_flush = attributes.flush_writes_options.is_some_and(|bits| bits & 1 != 0);
    match attributes.writes_ordering {
        Some(order) if order >= ORDERED_FOR_OWNER => {
            GROUP.pass(name, "preserved for the GPU that owns the memory: no flush is needed")
        }
        Some(_) if host_flush => {
            GROUP.pass(name, "not preserved; flushed with cuFlushGPUDirectRDMAWrites")
        }
        Some(_) => GROUP.warn(
            name,
            "not preserved, and CUDA offers no flush",
            "read from the memory through the NIC after a write, before using the data",
        ),
        None => GROUP.skip(name, "CUDA did not report the attribute"),
    }
}

fn kernel(system: &System) -> Check {
    let name = "kernel version";
    match system.kernel() {
        Some(kernel) if kernel.at_least(5, 12) => {
            GROUP.pass(name, format!("{}: dma-buf registration needs 5.12", kernel.release))
        }
        Some(kernel) => GROUP.warn(
            name,
            format!("{} is older than 5.12, which dma-buf registration needs", kernel.release),
            "use Linux 5.12 or newer, or `sudo modprobe nvidia-peermem` with MLNX_OFED",
        ),
        None => GROUP.skip(name, "/proc/sys/kernel/osrelease contains no version"),
    }
}

fn verbs_library(evidence: &Evidence) -> Check {
    let name = "libibverbs";
    let fix = "install rdma-core 34 or newer (Debian, Ubuntu: `sudo apt install libibverbs1 \
               ibverbs-providers`)";
    let Some(library) = evidence.system.verbs_library() else {
        let why = "libibverbs.so.1 is in none of the standard library directories";
        if evidence.rdma.is_empty() {
            return GROUP.skip(name, format!("{why}; there is no RDMA device that would need it"));
        }
        return GROUP.fail(name, why, fix);
    };
    let path = &library.path;
    match (library.supports_dma_buf_mr(), library.rdma_core) {
        (Some(true), Some(release)) => GROUP.pass(
            name,
            format!("rdma-core {release} by its file name ({path}); ibv_reg_dmabuf_mr needs 34"),
        ),
        (Some(true), None) => GROUP.pass(
            name,
            format!("{path} has interface 1.12 or newer, which includes ibv_reg_dmabuf_mr"),
        ),
        (Some(false), _) => GROUP.warn(
            name,
            format!(
                "{path} is older than interface 1.12 (rdma-core 34), which ibv_reg_dmabuf_mr needs"
            ),
            fix,
        ),
        (None, _) => GROUP.skip(name, format!("{path} is installed; its file name has no version")),
    }
}

fn peer_memory(evidence: &Evidence) -> Check {
    let system = &evidence.system;
    let name = "peer-memory module";
    if let Some(module) = peer_memory_module(system) {
        return GROUP.pass(name, format!("{module} is loaded"));
    }
    let why = "neither nvidia_peermem nor nv_peer_mem is loaded";
    if evidence.gpus.is_empty() || usable_hardware(evidence).is_empty() {
        return GROUP.skip(
            name,
            format!("{why}; there is no GPU with a usable RDMA device that could use one"),
        );
    }
    let obstacles = dma_buf_obstacles(evidence, None, None);
    if obstacles.is_empty() {
        return GROUP.skip(name, format!("{why}; not needed, since dma-bufs can be registered"));
    }
    GROUP.fail(
        name,
        format!("{why}, and dma-bufs cannot be registered: {}", obstacles.join("; ")),
        PEER_MEMORY_FIX,
    )
}

fn peer_mapping_override(evidence: &Evidence) -> Check {
    let system = &evidence.system;
    let name = "PeerMappingOverride";
    let hardware = usable_hardware(evidence);
    let has_connectx = hardware.iter().any(|device| device.driver.as_deref() == Some("mlx5"));
    if !has_connectx || system.nvidia_driver().is_none() {
        return GROUP.skip(name, "only needed to map a ConnectX doorbell page for a GPU");
    }
    match system.nvidia_params().peer_mapping_override {
        Some(true) => {
            GROUP.pass(name, "set: unprivileged users may map a NIC's doorbell page for the GPU")
        }
        Some(false) => GROUP.warn(
            name,
            "not set: only root may map a NIC's doorbell page for the GPU; for other users a CPU \
             thread rings the doorbell",
            "`echo 'options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1;\"' | sudo tee -a \
             /etc/modprobe.d/warpwire.conf`, then reload the nvidia module",
        ),
        None => GROUP.skip(name, "not in /proc/driver/nvidia/params"),
    }
}

fn distances(evidence: &Evidence) -> Vec<Check> {
    let is_rdma = |name: &str| evidence.rdma.iter().any(|device| device.name == name);
    let near: Vec<&BestNic> =
        evidence.topology.best.iter().filter(|best| is_rdma(&best.name)).collect();
    if near.is_empty() {
        let why = "there is no GPU with an RDMA device";
        return vec![GROUP.skip("GPU to NIC distance", why)];
    }
    near.into_iter().map(|best| distance(best).about([&best.gpu, &best.name])).collect()
}

fn distance(best: &BestNic) -> Check {
    let name = format!("{} to {}", best.gpu, best.name);
    let level = best.distance;
    match level {
        Distance::Same | Distance::Pix | Distance::Pxb => GROUP.pass(
            name,
            format!(
                "{level}: they share a root port, so traffic between them stays in PCIe switches"
            ),
        ),
        Distance::Phb => GROUP.warn(
            name,
            "PHB: they share a root complex, which traffic between them has to cross",
            "move both below one PCIe switch, if the machine has one",
        ),
        Distance::Node | Distance::Sys => GROUP.warn(
            name,
            format!(
                "{level}: they share no root complex; peer-to-peer traffic between root complexes \
                 is slow or unsupported"
            ),
            "move the NIC or the GPU to a slot below the same PCIe switch, or use staging",
        ),
    }
}
