//! Verdicts: whether the machine has each capability, derived from the evidence.

use serde::Serialize;

use super::registration::{self, Path};
use super::windows::{self, resource_manager};
use super::{CudaDeviceProbe, Evidence, ProbeOutcome, rdma, some_of};
use warpwire::host::FileAccess;

pub(super) const GPU: &str = "GPU";
pub(super) const SIMULATED_GPU: &str = "simulated GPU";

/// Whether the machine has a capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// It has.
    Yes,
    /// It does not.
    No,
    /// In part, by a slower path, or not known for certain.
    Partly,
}

/// Whether and how the machine has one capability.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// `GPU`, `CPU windows`, `GPU memory registration`, `hardware RDMA`, `stream-ordered
    /// operations`, `software RDMA over UDP`, `simulated GPU`.
    pub capability: String,
    /// Whether the machine has it.
    pub answer: Answer,
    /// How, or why not.
    pub text: String,
}

fn verdict(capability: &str, answer: Answer, text: impl Into<String>) -> Verdict {
    Verdict { capability: capability.to_owned(), answer, text: text.into() }
}

pub(super) fn all(evidence: &Evidence) -> Vec<Verdict> {
    vec![
        gpu(evidence),
        cpu_windows(evidence),
        registration(evidence),
        hardware_rdma(evidence),
        stream_ordered(evidence),
        software_rdma(evidence),
        simulated_gpu(evidence),
    ]
}

/// Why no CUDA device is usable; `None` if one is.
fn no_cuda(evidence: &Evidence) -> Option<String> {
    let cuda = &evidence.probes.cuda;
    if cuda.working_devices().next().is_some() {
        return None;
    }
    let steps = [("loading libcuda.so.1", &cuda.library), ("cuInit", &cuda.init)];
    for (what, outcome) in steps {
        if !outcome.worked() {
            return Some(format!("{what} {}", outcome.describe()));
        }
    }
    Some(match cuda.devices.first() {
        Some(device) => format!("allocating on {} {}", device.name, device.alloc_64k.describe()),
        None => "CUDA lists no device".to_owned(),
    })
}

/// Why CUDA does not work; `None` if it works or was not tried.
fn broken_cuda(evidence: &Evidence) -> Option<String> {
    let tried = !matches!(evidence.probes.cuda.library, ProbeOutcome::NotTried { .. });
    no_cuda(evidence).filter(|_| tried)
}

fn gpu(evidence: &Evidence) -> Verdict {
    let on_pci = evidence.gpus.len();
    let cuda = &evidence.probes.cuda;
    match no_cuda(evidence) {
        None => {
            let names = cuda.working_devices().map(|device| device.name.as_str());
            let names = counted(names.collect());
            let version = cuda.version().unwrap_or_else(|| "of unknown version".to_owned());
            let working = cuda.working_devices().count();
            let rest = if working < on_pci {
                format!(" ({working} of the {on_pci} on the PCI buses)")
            } else {
                String::new()
            };
            verdict(GPU, Answer::Yes, format!("{names} through CUDA {version}{rest}"))
        }
        Some(_) if on_pci == 0 && cuda.devices.is_empty() => {
            verdict(GPU, Answer::No, "no CUDA device: there is no NVIDIA GPU on the PCI buses")
        }
        Some(why) if broken_cuda(evidence).is_none() => verdict(
            GPU,
            Answer::Partly,
            format!("{on_pci} on the PCI buses, but CUDA is not known to work: {why}"),
        ),
        Some(why) => verdict(GPU, Answer::No, format!("no CUDA device: {why}")),
    }
}

/// Joins names, equal ones with a count: `8 × NVIDIA H200`.
fn counted(names: Vec<&str>) -> String {
    let mut shown: Vec<String> = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let count = names.iter().filter(|other| *other == name).count();
        let seen = names.iter().take(index).any(|other| other == name);
        match (seen, count) {
            (true, _) => {}
            (false, 1) => shown.push((*name).to_owned()),
            (false, _) => shown.push(format!("{count} × {name}")),
        }
    }
    some_of(&shown)
}

fn cpu_windows(evidence: &Evidence) -> Verdict {
    let capability = "CPU windows";
    let system = &evidence.system;
    if evidence.gpus.is_empty() && evidence.probes.cuda.devices.is_empty() {
        return verdict(
            capability,
            Answer::No,
            "there is no GPU to map (simulated GPU memory is always mapped)",
        );
    }
    if let Some(why) = broken_cuda(evidence) {
        return verdict(capability, Answer::No, format!("no CUDA device: {why}"));
    }
    if let Some(tried) = windows::tried(evidence) {
        return tried_window(evidence, tried);
    }
    let mut devices = evidence.probes.cuda.devices.iter();
    if devices.any(|device| device.dmabuf_mmap.worked()) {
        return verdict(capability, Answer::Yes, "through CUDA's dma-buf mmap");
    }
    match resource_manager(system) {
        Ok(nodes) => verdict(
            capability,
            Answer::Yes,
            format!(
                "expected, through the resource manager's map call: {nodes} are accessible to this \
                 user"
            ),
        ),
        Err(_) if system.access("/dev/gdrdrv") == FileAccess::ReadWrite => verdict(
            capability,
            Answer::Yes,
            "expected, through /dev/gdrdrv, which is accessible to this user",
        ),
        Err(why) => verdict(
            capability,
            Answer::No,
            format!("every copy is staged: {why}, and no other path is available"),
        ),
    }
}

/// The verdict if opening a window was tried.
fn tried_window(evidence: &Evidence, device: &CudaDeviceProbe) -> Verdict {
    let capability = "CPU windows";
    let without = evidence.probes.cuda.working_devices().filter(|other| !other.window.worked());
    let without: Vec<String> = without.map(|other| format!("cuda:{}", other.ordinal)).collect();
    match (&device.window, without.is_empty()) {
        (ProbeOutcome::Worked, all) => {
            let path = device.window_path.as_deref().unwrap_or("a path that was not recorded");
            let path = windows::with_article(path);
            match all {
                true => verdict(capability, Answer::Yes, format!("through {path}")),
                false => verdict(
                    capability,
                    Answer::Partly,
                    format!("through {path}, but not for {}", some_of(&without)),
                ),
            }
        }
        (outcome, _) => verdict(
            capability,
            Answer::No,
            format!("every copy is staged: opening a window {}", outcome.describe()),
        ),
    }
}

fn registration(evidence: &Evidence) -> Verdict {
    let capability = "GPU memory registration";
    let devices = &evidence.probes.cuda.devices;
    if evidence.gpus.is_empty() && devices.is_empty() {
        return verdict(capability, Answer::No, "there is no GPU");
    }
    if let Some(why) = broken_cuda(evidence) {
        return verdict(capability, Answer::No, format!("no CUDA device: {why}"));
    }
    if let Err(why) = hardware(evidence) {
        return if devices.iter().any(|device| device.dmabuf_export.worked()) {
            verdict(
                capability,
                Answer::Partly,
                format!("dma-buf export works, but there is nothing to register with: {why}"),
            )
        } else {
            verdict(capability, Answer::No, format!("there is nothing to register with: {why}"))
        };
    }
    match registration::path(evidence) {
        Path::DmaBuf(names) => verdict(
            capability,
            Answer::Yes,
            format!(
                "expected, by dma-buf: export works, and the drivers of {} accept dma-bufs",
                some_of(&names)
            ),
        ),
        Path::PeerMemory(module) => verdict(
            capability,
            Answer::Yes,
            format!("expected, by peer memory: {module} is loaded"),
        ),
        Path::Staged(why) => verdict(
            capability,
            Answer::Partly,
            format!("staged through host memory, because {}", why.join("; ")),
        ),
    }
}

/// The names of the usable RDMA devices, or why there are none.
fn hardware(evidence: &Evidence) -> Result<Vec<String>, String> {
    let system = &evidence.system;
    let devices = &evidence.rdma;
    if devices.is_empty() {
        return Err("there is no RDMA device".to_owned());
    }
    let usable = rdma::usable_hardware(evidence);
    let names: Vec<String> = usable.iter().map(|device| device.name.clone()).collect();
    if names.is_empty() {
        let reasons = devices.iter().filter_map(|device| rdma::obstacle(system, device));
        return Err(some_of(&reasons.collect::<Vec<_>>()));
    }
    if system.verbs_library().is_none() {
        let names = some_of(&names);
        return Err(format!("libibverbs.so.1 is not installed ({names} could be used)"));
    }
    Ok(names)
}

fn hardware_rdma(evidence: &Evidence) -> Verdict {
    let capability = "hardware RDMA";
    match hardware(evidence) {
        Ok(names) => verdict(
            capability,
            Answer::Yes,
            format!("expected, with {}: active, and accessible to this user", some_of(&names)),
        ),
        Err(why) => verdict(capability, Answer::No, format!("because {why}")),
    }
}

fn stream_ordered(evidence: &Evidence) -> Verdict {
    let capability = "stream-ordered operations";
    if let Some(why) = no_cuda(evidence) {
        return verdict(
            capability,
            Answer::Partly,
            format!("on the simulated GPU only; no CUDA device: {why}"),
        );
    }
    let mut working = evidence.probes.cuda.working_devices();
    if working.all(|device| device.attributes.stream_mem_ops_64_bit == Some(true)) {
        verdict(capability, Answer::Yes, "CUDA offers 32- and 64-bit stream memory operations")
    } else {
        verdict(
            capability,
            Answer::Partly,
            "not every CUDA device reports 64-bit stream memory operations",
        )
    }
}

fn software_rdma(evidence: &Evidence) -> Verdict {
    let capability = "software RDMA over UDP";
    let udp = &evidence.probes.udp;
    match (&udp.loopback, udp.gso.worked() && udp.gro.worked()) {
        (ProbeOutcome::Failed { why }, _) => {
            verdict(capability, Answer::No, format!("UDP over loopback failed: {why}"))
        }
        (ProbeOutcome::NotTried { why }, _) => {
            verdict(capability, Answer::Partly, format!("UDP was not tried: {why}"))
        }
        (ProbeOutcome::Worked, true) => {
            verdict(capability, Answer::Yes, "with segmentation and receive offload")
        }
        (ProbeOutcome::Worked, false) => verdict(
            capability,
            Answer::Partly,
            format!("more slowly: GSO {}, GRO {}", udp.gso.describe(), udp.gro.describe()),
        ),
    }
}

fn simulated_gpu(evidence: &Evidence) -> Verdict {
    match &evidence.probes.memfd {
        ProbeOutcome::Worked => {
            verdict(SIMULATED_GPU, Answer::Yes, "its memory can be created (memfd_create worked)")
        }
        ProbeOutcome::Failed { why } => {
            verdict(SIMULATED_GPU, Answer::No, format!("memfd_create failed: {why}"))
        }
        ProbeOutcome::NotTried { why } => {
            verdict(SIMULATED_GPU, Answer::Partly, format!("memfd_create was not tried: {why}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_names_are_counted() {
        assert_eq!(counted(vec!["A", "B", "A"]), "2 × A, B");
        assert_eq!(counted(vec![]), "");
    }
}
