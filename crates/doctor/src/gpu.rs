//! Checks of GPUs, their driver, and CUDA.

use super::{Check, Evidence, Group, ProbeOutcome, some_of};
use warpwire::host::{FileAccess, System};

const GROUP: Group = Group::Gpu;

/// The oldest driver branch that Warpwire is tested with.
const OLDEST_BRANCH: u32 = 535;
/// The CUDA version of that branch.
const OLDEST_CUDA: u32 = 12_020;
/// From this branch (CUDA 11.7) on, stream memory operations need no module parameter.
const STREAM_OPS_BY_DEFAULT: u32 = 515;

pub(super) fn checks(evidence: &Evidence) -> Vec<Check> {
    let system = &evidence.system;
    let mut checks = vec![pci_functions(evidence), driver(evidence)];
    checks.extend(kernel_modules(evidence));
    checks.extend(device_nodes(system));
    checks.push(cuda_library(evidence));
    checks.extend(cuda_version(evidence));
    checks.extend(devices(evidence));
    checks.extend(stream_mem_ops_parameter(system));
    checks
}

fn pci_functions(evidence: &Evidence) -> Check {
    let gpus = &evidence.gpus;
    if gpus.is_empty() {
        let why = "no NVIDIA display controller on the PCI buses (/sys/bus/pci/devices)";
        return GROUP.skip("NVIDIA GPU", why);
    }
    let addresses: Vec<String> = gpus.iter().map(|gpu| gpu.address.to_string()).collect();
    GROUP.pass("NVIDIA GPU", format!("{} on the PCI buses: {}", gpus.len(), some_of(&addresses)))
}

fn driver(evidence: &Evidence) -> Check {
    let system = &evidence.system;
    let name = "NVIDIA driver";
    if let Some(driver) = system.nvidia_driver() {
        let why = format!("version {}", driver.version);
        if driver.major < OLDEST_BRANCH {
            return GROUP.warn(
                name,
                format!(
                    "{why} is older than R{OLDEST_BRANCH}, the oldest that Warpwire is tested with"
                ),
                format!("install driver R{OLDEST_BRANCH} or newer"),
            );
        }
        return GROUP.pass(name, why);
    }
    if system.exists("/proc/driver/nvidia/version") {
        let why = "/proc/driver/nvidia/version does not have the format of NVIDIA's driver";
        return GROUP.warn(name, why, "reinstall the NVIDIA driver, then `sudo modprobe nvidia`");
    }
    if evidence.gpus.is_empty() {
        return GROUP.skip(name, "not loaded, and there is no NVIDIA GPU");
    }
    let fix = "install the NVIDIA driver with its open kernel modules (Debian, Ubuntu: \
               nvidia-open), then `sudo modprobe nvidia`; in a container, load it on the host";
    GROUP.fail(
        name,
        "there is a GPU, but no driver is loaded (/proc/driver/nvidia/version is missing)",
        fix,
    )
}

fn kernel_modules(evidence: &Evidence) -> Option<Check> {
    let name = "kernel modules";
    let driver = evidence.system.nvidia_driver()?;
    let mut devices = evidence.probes.cuda.devices.iter();
    Some(if !driver.open && devices.any(|device| device.dmabuf_export.worked()) {
        GROUP.pass(name, "proprietary, but dma-buf export works")
    } else if driver.open {
        GROUP.pass(name, "open, as dma-buf export and registration without peer memory need")
    } else {
        GROUP.warn(
            name,
            "proprietary: these do not export dma-bufs",
            "install the open modules of the same version (Debian, Ubuntu: `sudo apt install \
             nvidia-open`; RHEL: `sudo dnf module install nvidia-driver:open-dkms`); they need a \
             Turing GPU or newer",
        )
    })
}

/// The device nodes of the GPUs that the driver is bound to: `/dev/nvidia0`, …
pub(super) fn gpu_nodes(system: &System) -> Vec<String> {
    let gpus = system.nvidia_information();
    gpus.iter().filter_map(|gpu| Some(format!("/dev/nvidia{}", gpu.minor?))).collect()
}

fn device_nodes(system: &System) -> Vec<Check> {
    if system.nvidia_driver().is_none() {
        return Vec::new();
    }
    let mut checks: Vec<Check> = ["/dev/nvidiactl", "/dev/nvidia-uvm"]
        .into_iter()
        .map(|node| device_node(system, node))
        .collect();
    let nodes = gpu_nodes(system);
    let open = nodes.iter().filter(|node| system.access(node) == FileAccess::ReadWrite);
    let open: Vec<String> = open.cloned().collect();
    if !open.is_empty() && open.len() < nodes.len() {
        // A container often gets only some of the host's GPUs, which is not a problem.
        let why = format!(
            "{} of the driver's {} GPUs are accessible to this user: {}",
            open.len(),
            nodes.len(),
            some_of(&open)
        );
        checks.push(GROUP.pass("/dev/nvidiaN", why));
    } else {
        checks.extend(nodes.iter().map(|node| device_node(system, node).about([node])));
    }
    checks
}

fn device_node(system: &System, node: &str) -> Check {
    match system.access(node) {
        FileAccess::ReadWrite => GROUP.pass(node, "this user may read and write it"),
        FileAccess::Missing => GROUP.fail(
            node,
            "the device node does not exist",
            "`sudo nvidia-modprobe -u -c 0`, or start the container with `--gpus all`",
        ),
        FileAccess::Denied | FileAccess::ReadOnly => GROUP.fail(
            node,
            "this user may not read and write it",
            format!(
                "`sudo chmod 666 {node}`; permanently: NVreg_DeviceFileMode=0666 for the nvidia \
                 module"
            ),
        ),
    }
}

fn cuda_library(evidence: &Evidence) -> Check {
    let name = "CUDA driver library";
    match &evidence.probes.cuda.library {
        ProbeOutcome::Worked => GROUP.pass(name, "libcuda.so.1 loaded"),
        ProbeOutcome::NotTried { why } => GROUP.skip(name, format!("not tried: {why}")),
        ProbeOutcome::Failed { why } if evidence.gpus.is_empty() => {
            GROUP.skip(name, format!("{why}; there is no NVIDIA GPU that would need it"))
        }
        ProbeOutcome::Failed { why } => GROUP.fail(
            name,
            why,
            "install libcuda (Debian, Ubuntu: libcuda1); in a container, \
             NVIDIA_DRIVER_CAPABILITIES=compute,utility with `--gpus all`",
        ),
    }
}

fn cuda_version(evidence: &Evidence) -> Option<Check> {
    let name = "CUDA driver version";
    let cuda = &evidence.probes.cuda;
    if !cuda.library.worked() {
        return None;
    }
    if let ProbeOutcome::Failed { why } = &cuda.init {
        let why = format!("cuInit failed: {why}");
        return Some(if evidence.gpus.is_empty() {
            GROUP.skip(name, format!("{why}; there is no NVIDIA GPU"))
        } else {
            GROUP.fail(
                name,
                why,
                "see the driver's messages: `sudo dmesg | grep -i nvrm`; if libcuda and the \
                 kernel driver differ in version, reboot",
            )
        });
    }
    let version = cuda.version()?;
    Some(if cuda.driver_api < Some(OLDEST_CUDA) {
        let why = format!("CUDA {version} is older than 12.2 (R{OLDEST_BRANCH})");
        GROUP.warn(name, why, format!("install driver R{OLDEST_BRANCH} or newer"))
    } else {
        GROUP.pass(name, format!("CUDA {version}"))
    })
}

fn devices(evidence: &Evidence) -> Vec<Check> {
    let mut checks = Vec::new();
    for device in &evidence.probes.cuda.devices {
        let subject = format!("cuda:{}", device.ordinal);
        let mut own = Vec::new();
        let name = format!("cuda:{} memory", device.ordinal);
        own.push(match &device.alloc_64k {
            ProbeOutcome::Worked => {
                let size = warpwire::units::bytes(device.total_memory);
                GROUP.pass(name, format!("{}, {size}: allocated 64 KiB", device.name))
            }
            ProbeOutcome::NotTried { why } => GROUP.skip(name, format!("not tried: {why}")),
            ProbeOutcome::Failed { why } => GROUP.fail(
                name,
                format!("{}: allocating 64 KiB failed: {why}", device.name),
                "see which processes use it: `nvidia-smi`; if it is in exclusive mode: \
                 `sudo nvidia-smi -c DEFAULT`",
            ),
        });
        let name = format!("cuda:{} stream memory operations", device.ordinal);
        let attributes = &device.attributes;
        own.push(match (attributes.stream_mem_ops_64_bit, attributes.stream_wait_value_nor) {
            (Some(true), Some(true)) => GROUP.pass(name, "32- and 64-bit, with wait-until-nor"),
            (Some(true), _) => {
                GROUP.pass(name, "32- and 64-bit; no wait-until-nor, which is emulated")
            }
            (Some(false), _) => GROUP.warn(
                name,
                "the device does not support 64-bit operations",
                "none for this GPU: 32-bit operations are used",
            ),
            (None, _) => GROUP.skip(name, "CUDA did not report the attribute"),
        });
        checks.extend(own.into_iter().map(|check| check.about([&subject])));
    }
    checks
}

fn stream_mem_ops_parameter(system: &System) -> Option<Check> {
    let name = "EnableStreamMemOPs";
    let driver = system.nvidia_driver()?;
    if driver.major >= STREAM_OPS_BY_DEFAULT {
        return Some(
            GROUP.skip(name, format!("not needed: on by default from R{STREAM_OPS_BY_DEFAULT}")),
        );
    }
    Some(match system.nvidia_params().enable_stream_mem_ops {
        Some(true) => {
            GROUP.pass(name, "set, as stream memory operations need with this old driver")
        }
        _ => GROUP.warn(
            name,
            "not set, so this old driver has no stream memory operations",
            "`echo options nvidia NVreg_EnableStreamMemOPs=1 | sudo tee -a \
             /etc/modprobe.d/warpwire.conf`, reload the module",
        ),
    })
}
