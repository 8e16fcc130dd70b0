//! Checks of CPU windows: mappings of GPU memory for loads and stores by the CPU.

use super::gpu::gpu_nodes;
use super::{Check, CudaDeviceProbe, Evidence, Group, ProbeOutcome};
use warpwire::host::{FileAccess, PciDevice, System};
use warpwire::units;

const GROUP: Group = Group::CpuWindows;

/// The size of BAR1 without Resizable BAR.
const SMALL_BAR1: u64 = 256 << 20;
/// The first driver branch whose dma-bufs support `mmap` (CUDA 13.3).
const FIRST_MAPPABLE_BRANCH: u32 = 610;

pub(super) fn checks(evidence: &Evidence) -> Vec<Check> {
    let gpus = &evidence.gpus;
    if gpus.is_empty() && evidence.probes.cuda.devices.is_empty() {
        return vec![GROUP.skip("CPU windows", "there is no NVIDIA GPU to map")];
    }
    let mut checks: Vec<Check> =
        gpus.iter().enumerate().map(|(index, gpu)| bar1(evidence, index, gpu)).collect();
    let devices = &evidence.probes.cuda.devices;
    let subject = |device: &CudaDeviceProbe| format!("cuda:{}", device.ordinal);
    checks.extend(devices.iter().map(|device| window(device).about([subject(device)])));
    checks.extend(
        devices.iter().map(|device| dma_buf_mmap(evidence, device).about([subject(device)])),
    );
    checks.push(resource_manager_check(evidence));
    checks.push(gdrdrv(evidence));
    checks
}

fn bar1(evidence: &Evidence, index: usize, gpu: &PciDevice) -> Check {
    let label = format!("GPU{index}");
    let found = bar1_size(evidence, format!("{label} BAR1"), gpu);
    found.about([label])
}

fn bar1_size(evidence: &Evidence, name: String, gpu: &PciDevice) -> Check {
    let fix = "enable Above 4G Decoding and Resizable BAR in the firmware setup; for a VM, \
               configure a large 64-bit PCI window";
    let Some(bar) = gpu.bar1() else {
        return GROUP.skip(name, "no prefetchable memory window in the device's `resource` file");
    };
    let size = units::bytes(bar.size);
    let devices = &evidence.probes.cuda.devices;
    let memory = devices
        .iter()
        .find(|device| device.pci == Some(gpu.address))
        .map(|device| device.total_memory)
        .filter(|memory| *memory > 0);
    match memory {
        Some(memory) if bar.size >= memory => {
            let memory = units::bytes(memory);
            GROUP.pass(name, format!("{size}, for {memory} of memory: all of it can be mapped"))
        }
        Some(memory) => {
            let memory = units::bytes(memory);
            let why = format!(
                "{size}, for {memory} of memory: only a part can be mapped or registered at a time"
            );
            GROUP.warn(name, why, fix)
        }
        None if bar.size <= SMALL_BAR1 => {
            let why = format!(
                "{size}, less than any current GPU's memory: only a part can be mapped or \
                 registered at a time"
            );
            GROUP.warn(name, why, fix)
        }
        None => GROUP.skip(
            name,
            format!("{size}; not compared, since CUDA did not report the memory's size"),
        ),
    }
}

/// The result of opening a window to a scratch buffer, by any path.
fn window(device: &CudaDeviceProbe) -> Check {
    let name = format!("cuda:{} CPU window", device.ordinal);
    match &device.window {
        ProbeOutcome::Worked => {
            let path = device.window_path.as_deref().unwrap_or("a path that was not recorded");
            let why = format!("opened one to 64 KiB, through {}", with_article(path));
            GROUP.pass(
                name,
                [vec![why], device.window_refused.clone()].concat().join("; not through "),
            )
        }
        ProbeOutcome::NotTried { why } => GROUP.skip(name, format!("not tried: {why}")),
        ProbeOutcome::Failed { why } => GROUP.fail(
            name,
            why.clone(),
            "make the nodes listed below accessible, or install gdrdrv-dkms; until then copies are \
             staged",
        ),
    }
}

/// A path's name in a sentence: `the resource manager`, `CUDA's dma-buf mmap`.
pub(super) fn with_article(path: &str) -> String {
    match path {
        "resource manager" => format!("the {path}"),
        "dma-buf mmap" => format!("CUDA's {path}"),
        _ => path.to_owned(),
    }
}

/// The first device on which opening a window worked, or else the first on which it failed.
pub(super) fn tried(evidence: &Evidence) -> Option<&CudaDeviceProbe> {
    let devices = &evidence.probes.cuda.devices;
    let failed = |device: &&CudaDeviceProbe| matches!(device.window, ProbeOutcome::Failed { .. });
    devices.iter().find(|device| device.window.worked()).or_else(|| devices.iter().find(failed))
}

fn dma_buf_mmap(evidence: &Evidence, device: &CudaDeviceProbe) -> Check {
    let name = format!("cuda:{} dma-buf mmap", device.ordinal);
    let driver = evidence.system.nvidia_driver();
    match &device.dmabuf_mmap {
        ProbeOutcome::Worked => GROUP.pass(name, "mapped an exported dma-buf"),
        ProbeOutcome::NotTried { why } => GROUP.skip(name, format!("not tried: {why}")),
        ProbeOutcome::Failed { why }
            if driver.is_some_and(|d| d.major >= FIRST_MAPPABLE_BRANCH) =>
        {
            GROUP.warn(
                name,
                format!("this driver should map dma-bufs, but failed: {why}"),
                "see `sudo dmesg | grep -i nvrm`; until then the next path is used",
            )
        }
        ProbeOutcome::Failed { why } => GROUP.skip(
            name,
            format!(
                "{why}: not supported by drivers before R{FIRST_MAPPABLE_BRANCH}; the next path \
                 is used"
            ),
        ),
    }
}

/// The resource manager's device nodes, if accessible to this user; otherwise the reason.
pub(super) fn resource_manager(system: &System) -> Result<String, String> {
    let control = "/dev/nvidiactl";
    if system.access(control) != FileAccess::ReadWrite {
        return Err(format!("{control} is {}", describe(system.access(control))));
    }
    let nodes = gpu_nodes(system);
    let open = nodes.iter().find(|node| system.access(node) == FileAccess::ReadWrite);
    match (open, nodes.first()) {
        (Some(node), _) => Ok(format!("{control} and {node}")),
        (None, Some(node)) => Err(format!("{node} is {}", describe(system.access(node)))),
        (None, None) => Err("the driver lists no GPU in /proc/driver/nvidia/gpus".to_owned()),
    }
}

pub(super) fn describe(access: FileAccess) -> &'static str {
    match access {
        FileAccess::Missing => "missing",
        FileAccess::Denied => "not accessible to this user",
        FileAccess::ReadOnly => "read-only for this user",
        FileAccess::ReadWrite => "accessible to this user",
    }
}

fn resource_manager_check(evidence: &Evidence) -> Check {
    let name = "resource manager";
    let devices = &evidence.probes.cuda.devices;
    let tried = devices.iter().any(|device| device.window_path.as_deref() == Some(name));
    match resource_manager(&evidence.system) {
        Ok(nodes) => {
            let tried = if tried { "a mapping worked" } else { "not tried here" };
            GROUP.pass(
                name,
                format!(
                    "{nodes} are accessible to this user, so the driver can map memory; {tried}"
                ),
            )
        }
        Err(why) => GROUP.fail(
            name,
            why,
            "create the nodes with `sudo nvidia-modprobe -u -c 0`, and make them accessible with \
             `sudo chmod 666 /dev/nvidia*`; in a container: `--gpus all`",
        ),
    }
}

fn gdrdrv(evidence: &Evidence) -> Check {
    let name = "/dev/gdrdrv";
    let system = &evidence.system;
    let devices = &evidence.probes.cuda.devices;
    let other_path = resource_manager(system).is_ok()
        || devices.iter().any(|device| device.dmabuf_mmap.worked() || device.window.worked());
    match system.access(name) {
        FileAccess::ReadWrite => {
            GROUP.pass(name, "gdrcopy's kernel module is loaded and accessible to this user")
        }
        found if other_path => {
            let found = describe(found);
            GROUP.skip(
                name,
                format!(
                    "gdrcopy's device node is {found}, and not needed: another path is available"
                ),
            )
        }
        FileAccess::Missing => GROUP.warn(
            name,
            "gdrcopy's device node is missing, and no other path to a CPU window is available",
            "make the NVIDIA device nodes accessible (see above), or install gdrdrv-dkms and \
             `sudo modprobe gdrdrv`",
        ),
        found => {
            GROUP.warn(name, format!("it is {}", describe(found)), "`sudo chmod 666 /dev/gdrdrv`")
        }
    }
}
