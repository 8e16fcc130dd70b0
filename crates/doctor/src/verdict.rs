//! Verdicts: whether the machine has each capability, derived from the evidence.

use serde::Serialize;

use super::fold::fold_names;
use super::gpudirect::{self, PairVerdict};
use super::windows::{self, resource_manager};
use super::{Check, CheckStatus, CudaDeviceProbe, Evidence, Group, NcclReport, ProbeOutcome};
use super::{doorbells, nccl, programs, rdma, some_of};
use warpwire::host::FileAccess;

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

/// How a verdict is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum KnownBy {
    /// A probe tried it.
    Tried,
    /// It was read from the kernel's files.
    Read,
    /// It follows from what was read, and was not tried.
    Expected,
}

/// Whether and how the machine has one capability.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Verdict {
    /// The word for `doctor --require`: one of [`Verdict::WORDS`].
    pub word: &'static str,
    /// `GPUDirect RDMA`, `NCCL would use`, …
    pub capability: String,
    /// Whether the machine has it.
    pub answer: Answer,
    /// How, or why not; for NCCL, UCX and RDMA programs, what they would use.
    pub text: String,
    /// What to do.
    pub fix: Option<String>,
    /// How it is known.
    pub known_by: KnownBy,
    /// GPUDirect RDMA: each GPU with each RDMA device. Empty for other verdicts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pairs: Vec<PairVerdict>,
}

impl Verdict {
    /// The words of all verdicts, in their order, and what `yes` means.
    pub const WORDS: [(&'static str, &'static str); 11] = [
        (gpudirect::WORD, "NICs can access GPU memory"),
        ("async", "GPU streams and kernels can ring a NIC's doorbell"),
        ("windows", "the CPU can map GPU memory, as gdrcopy does"),
        ("nccl", "NCCL would use a plugin or RDMA devices, not TCP"),
        (programs::UCX, "UCX is installed and could use RDMA"),
        (programs::VERBS, "RDMA programs would see a device, hardware or software"),
        ("rdma", "there is RDMA hardware that this user can use"),
        ("gpu", "CUDA works"),
        ("streams", "CUDA streams can wait for memory and write to it, 64 bits wide"),
        ("udp", "UDP works, with segmentation and receive offload"),
        ("sim", "the simulated GPU works"),
    ];

    /// The verdict in one line: `GPUDirect RDMA: NO, because …`.
    pub fn sentence(&self) -> String {
        let Self { capability, text, .. } = self;
        match self.states_a_use() {
            true if self.known_by == KnownBy::Expected => {
                format!("{capability}: {text} (expected, not tried)")
            }
            true => format!("{capability}: {text}"),
            false => format!("{capability}: {}, {text}", self.answer.name()),
        }
    }

    /// Whether the text says what a program would use, so that the answer is not a part of it.
    pub(super) fn states_a_use(&self) -> bool {
        ["nccl", programs::UCX, programs::VERBS].contains(&self.word)
    }

    pub(super) fn fixed_by(self, fix: Option<String>) -> Self {
        Self { fix, ..self }
    }

    pub(super) fn known_by(self, known_by: KnownBy) -> Self {
        Self { known_by, ..self }
    }
}

/// A verdict that follows from what was read; without a fix.
pub(super) fn verdict(
    word: &'static str,
    capability: &str,
    answer: Answer,
    text: impl Into<String>,
) -> Verdict {
    Verdict {
        word,
        capability: capability.to_owned(),
        answer,
        text: text.into(),
        fix: None,
        known_by: KnownBy::Expected,
        pairs: Vec::new(),
    }
}

pub(super) fn all(evidence: &Evidence, checks: &[Check], report: &NcclReport) -> Vec<Verdict> {
    vec![
        gpudirect::evaluate(evidence, checks),
        gpudirect_async(checks),
        cpu_mappings(evidence, checks),
        nccl_network(report),
        programs::ucx(evidence),
        programs::verbs(evidence),
        rdma_devices(evidence),
        gpu(evidence, checks),
        stream_ordered(evidence),
        software_rdma(evidence),
        simulated_gpu(evidence),
    ]
}

fn nccl_network(report: &NcclReport) -> Verdict {
    let known_by = if report.network == nccl::UNKNOWN { KnownBy::Read } else { KnownBy::Expected };
    verdict("nccl", "NCCL would use", report.answer, &report.text)
        .fixed_by(report.fix.clone())
        .known_by(known_by)
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
pub(super) fn broken_cuda(evidence: &Evidence) -> Option<String> {
    let tried = !matches!(evidence.probes.cuda.library, ProbeOutcome::NotTried { .. });
    no_cuda(evidence).filter(|_| tried)
}

fn gpu(evidence: &Evidence, checks: &[Check]) -> Verdict {
    let on_pci = evidence.gpus.len();
    let cuda = &evidence.probes.cuda;
    let of = |answer, text: String| verdict("gpu", "GPU", answer, text).known_by(KnownBy::Tried);
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
            of(Answer::Yes, format!("{names} through CUDA {version}{rest}"))
        }
        Some(_) if on_pci == 0 && cuda.devices.is_empty() => {
            let text = "because there is no NVIDIA GPU on the PCI buses".to_owned();
            of(Answer::No, text).known_by(KnownBy::Read)
        }
        Some(why) if broken_cuda(evidence).is_none() => {
            let text = format!("{on_pci} on the PCI buses, but CUDA is not known to work: {why}");
            of(Answer::Partly, text).known_by(KnownBy::Read)
        }
        Some(why) => of(Answer::No, format!("because no CUDA device works: {why}"))
            .fixed_by(first_fix(checks, Group::Gpu)),
    }
}

/// The fix of the first problem in a group.
pub(super) fn first_fix(checks: &[Check], group: Group) -> Option<String> {
    let mut problems = checks.iter().filter(|check| check.group == group && check.is_problem());
    problems.find_map(|check| check.fix.clone())
}

/// Whether GPUs can ring the doorbells of NICs, from the check of that.
fn gpudirect_async(checks: &[Check]) -> Verdict {
    let check = checks.iter().find(|check| check.name == doorbells::NAME);
    let of = |answer, text: String| verdict("async", "GPUDirect Async", answer, text);
    match check {
        Some(check) if check.status == CheckStatus::Pass => of(Answer::Yes, check.why.clone()),
        Some(check) => of(Answer::No, format!("because {}", check.why))
            .fixed_by(check.fix.clone())
            .known_by(KnownBy::Read),
        None => of(Answer::No, "because it was not checked".to_owned()),
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

fn cpu_mappings(evidence: &Evidence, checks: &[Check]) -> Verdict {
    let system = &evidence.system;
    let of = |answer, text: String| verdict("windows", "CPU mappings (gdrcopy)", answer, text);
    if evidence.gpus.is_empty() && evidence.probes.cuda.devices.is_empty() {
        let text = "because there is no GPU (memory of the simulated GPU is always mapped)";
        return of(Answer::No, text.to_owned()).known_by(KnownBy::Read);
    }
    if let Some(why) = broken_cuda(evidence) {
        return of(Answer::No, format!("because no CUDA device works: {why}"))
            .fixed_by(first_fix(checks, Group::Gpu));
    }
    let programs = programs::gdrcopy(evidence);
    let fix = || first_fix(checks, Group::CpuWindows);
    if let Some(tried) = windows::tried(evidence) {
        let (answer, text) = tried_window(evidence, tried);
        let found = of(answer, format!("{text}{programs}")).known_by(KnownBy::Tried);
        return if answer == Answer::Yes { found } else { found.fixed_by(fix()) };
    }
    let mut devices = evidence.probes.cuda.devices.iter();
    if devices.any(|device| device.dmabuf_mmap.worked()) {
        let text = format!("through CUDA's dma-buf mmap{programs}");
        return of(Answer::Yes, text).known_by(KnownBy::Tried);
    }
    match resource_manager(system) {
        Ok(nodes) => of(
            Answer::Yes,
            format!(
                "expected, not tried: through the resource manager, since this user may use \
                 {nodes}{programs}"
            ),
        ),
        Err(_) if system.access("/dev/gdrdrv") == FileAccess::ReadWrite => of(
            Answer::Yes,
            format!("expected, not tried: through /dev/gdrdrv, which this user may use{programs}"),
        ),
        Err(why) => of(
            Answer::No,
            format!("because {why}, and there is no other path; every copy is staged{programs}"),
        )
        .fixed_by(fix()),
    }
}

/// The answer if opening a window was tried.
fn tried_window(evidence: &Evidence, device: &CudaDeviceProbe) -> (Answer, String) {
    let without = evidence.probes.cuda.working_devices().filter(|other| !other.window.worked());
    let without: Vec<String> = without.map(|other| format!("cuda:{}", other.ordinal)).collect();
    match (&device.window, without.is_empty()) {
        (ProbeOutcome::Worked, all) => {
            let path = device.window_path.as_deref().unwrap_or("a path that was not recorded");
            let path = windows::with_article(path);
            match all {
                true => (Answer::Yes, format!("through {path}")),
                false => {
                    let without = fold_names(&without);
                    (Answer::Partly, format!("through {path}, but not for {without}"))
                }
            }
        }
        (outcome, _) => (
            Answer::No,
            format!("because opening a window {}; every copy is staged", outcome.describe()),
        ),
    }
}

/// The names of the RDMA devices that this user can use, hardware or software (soft-RoCE), or why
/// there are none.
pub(super) fn usable_devices(evidence: &Evidence) -> Result<Vec<String>, String> {
    let system = &evidence.system;
    if evidence.rdma.is_empty() {
        return Err("there is no RDMA device".to_owned());
    }
    let mut names = Vec::new();
    let mut reasons = Vec::new();
    for device in &evidence.rdma {
        match rdma::unusable(system, device) {
            None => names.push(device.name.clone()),
            Some(why) => reasons.push(why),
        }
    }
    if names.is_empty() {
        return Err(some_of(&reasons));
    }
    if system.verbs_library().is_none() {
        let names = fold_names(&names);
        return Err(format!("libibverbs.so.1 is not installed ({names} could be used)"));
    }
    Ok(names)
}

fn rdma_devices(evidence: &Evidence) -> Verdict {
    let of = |answer, text: String| verdict("rdma", "RDMA devices", answer, text);
    let names = match usable_devices(evidence) {
        Ok(names) => names,
        Err(why) => {
            let mut devices = evidence.rdma.iter();
            let fix = devices.find_map(|device| rdma::fix(&evidence.system, device));
            return of(Answer::No, format!("because {why}")).fixed_by(fix).known_by(KnownBy::Read);
        }
    };
    let hardware: Vec<String> =
        rdma::usable_hardware(evidence).iter().map(|device| device.name.clone()).collect();
    if hardware.is_empty() {
        let text = format!("{}: software devices of the kernel, not tried", fold_names(&names));
        return of(Answer::Partly, text);
    }
    let text =
        format!("{} (active, and accessible to this user; not tried)", fold_names(&hardware));
    of(Answer::Yes, text)
}

fn stream_ordered(evidence: &Evidence) -> Verdict {
    let of = |answer, text: String| verdict("streams", "stream-ordered operations", answer, text);
    if let Some(why) = no_cuda(evidence) {
        let text = format!("on the simulated GPU only: {why}");
        return of(Answer::Partly, text);
    }
    let mut working = evidence.probes.cuda.working_devices();
    let text = if working.all(|device| device.attributes.stream_mem_ops_64_bit == Some(true)) {
        return of(Answer::Yes, "CUDA offers 32- and 64-bit stream memory operations".to_owned())
            .known_by(KnownBy::Read);
    } else {
        "not every CUDA device reports 64-bit stream memory operations"
    };
    of(Answer::Partly, text.to_owned()).known_by(KnownBy::Read)
}

fn software_rdma(evidence: &Evidence) -> Verdict {
    let of = |answer, text: String| {
        verdict("udp", "software RDMA over UDP", answer, text).known_by(KnownBy::Tried)
    };
    let udp = &evidence.probes.udp;
    match (&udp.loopback, udp.gso.worked() && udp.gro.worked()) {
        (ProbeOutcome::Failed { why }, _) => {
            of(Answer::No, format!("because UDP over loopback failed: {why}"))
                .fixed_by(Some("`sudo ip link set lo up`".to_owned()))
        }
        (ProbeOutcome::NotTried { why }, _) => {
            of(Answer::Partly, format!("UDP was not tried: {why}")).known_by(KnownBy::Expected)
        }
        (ProbeOutcome::Worked, true) => {
            of(Answer::Yes, "with segmentation and receive offload".to_owned())
        }
        (ProbeOutcome::Worked, false) => of(
            Answer::Partly,
            format!("more slowly: GSO {}, GRO {}", udp.gso.describe(), udp.gro.describe()),
        ),
    }
}

fn simulated_gpu(evidence: &Evidence) -> Verdict {
    let of = |answer, text: String| {
        verdict("sim", "simulated GPU", answer, text).known_by(KnownBy::Tried)
    };
    match &evidence.probes.memfd {
        ProbeOutcome::Worked => of(Answer::Yes, "memfd_create worked".to_owned()),
        ProbeOutcome::Failed { why } => {
            of(Answer::No, format!("because memfd_create failed: {why}"))
        }
        ProbeOutcome::NotTried { why } => {
            of(Answer::Partly, format!("memfd_create was not tried: {why}"))
                .known_by(KnownBy::Expected)
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
