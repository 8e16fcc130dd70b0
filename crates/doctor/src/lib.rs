//! Diagnoses a machine: what it can do, what prevents the rest, and the fix.
//!
//! A [`Report`] is derived from [`Evidence`] only: the machine's files and the results of probes
//! run on it. So the same code evaluates the running machine and a recorded one, and every
//! statement is based on something that was read or tried.
//!
//! ```
//! use warpwire::host::System;
//! use warpwire_doctor::{Evidence, Report};
//! let report = Report::of(&Evidence::gather(System::live())?);
//! println!("{}", report.to_text(false));
//! # Ok::<(), warpwire::Error>(())
//! ```
//!
//! Only `trial.rs` has unsafe code: it registers memory by address.
#![deny(unsafe_code)]

mod doorbells;
mod fold;
mod gpu;
mod gpudirect;
mod host;
mod nccl;
mod network;
mod pair_trial;
mod probe_cuda;
mod probe_host;
mod probe_libraries;
mod probes;
mod programs;
mod rdma;
mod record;
mod registration;
mod render;
mod topo;
mod topo_text;
mod trial;
mod verdict;
mod windows;

use serde::Serialize;

pub use gpudirect::PairVerdict;
pub use nccl::{NcclPlugin, NcclReport};
pub use pair_trial::{PairTrial, try_pair};
pub use probes::{
    CudaAttributes, CudaDeviceProbe, CudaProbe, LibraryProbe, NvmlGpu, NvmlProbe, ProbeOutcome,
    Probes, UdpProbe,
};
pub use record::record;
pub use render::TextStyle;
pub use topo::{BestNic, CpuNode, Distance, Topology, TopologyGpu, TopologyNic};
pub use trial::{PeerAccess, Trial, TrialOutcome, registrations_to_text, try_registrations};
pub use verdict::{Answer, KnownBy, Verdict};

use warpwire::error::Result;
use warpwire::host::{PciDevice, RdmaDevice, System};

/// The input of a report: the machine's files, and the results of the probes.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// The machine's files.
    pub system: System,
    /// The results of the probes.
    pub probes: Probes,
    // Read once, since most checks need them.
    gpus: Vec<PciDevice>,
    rdma: Vec<RdmaDevice>,
    topology: Topology,
}

impl Evidence {
    /// Runs the probes on the running machine, or reads the results from a recorded one.
    ///
    /// # Errors
    /// If a recorded machine's `probes.json` is malformed.
    pub fn gather(system: System) -> Result<Self> {
        let probes = Probes::of(&system)?;
        let live = system.is_live();
        // A target under `warpwire`, so that `WARPWIRE_LOG=warpwire::doctor=debug` selects it.
        tracing::debug!(target: "warpwire::doctor", live, ?probes, "evidence gathered");
        Ok(Self {
            gpus: system.nvidia_gpus(),
            rdma: system.rdma_devices(),
            topology: Topology::of(&system, &probes.nvml),
            system,
            probes,
        })
    }
}

/// The subject of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub enum Group {
    /// GPUs, their driver, and CUDA.
    #[serde(rename = "GPU")]
    Gpu,
    /// CPU mappings of GPU memory.
    #[serde(rename = "CPU windows")]
    CpuWindows,
    /// GPU memory registered with a NIC.
    #[serde(rename = "registration")]
    Registration,
    /// RDMA hardware.
    #[serde(rename = "RDMA devices")]
    RdmaDevices,
    /// Kernel, memory limits, PCIe.
    #[serde(rename = "host")]
    Host,
    /// Network interfaces and UDP, which software RDMA uses.
    #[serde(rename = "network")]
    Network,
}

impl Group {
    fn pass(self, name: impl Into<String>, why: impl Into<String>) -> Check {
        self.check(CheckStatus::Pass, name, why, None)
    }

    fn info(self, name: impl Into<String>, why: impl Into<String>) -> Check {
        self.check(CheckStatus::Info, name, why, None)
    }

    fn skip(self, name: impl Into<String>, why: impl Into<String>) -> Check {
        self.check(CheckStatus::Skip, name, why, None)
    }

    fn warn(
        self,
        name: impl Into<String>,
        why: impl Into<String>,
        fix: impl Into<String>,
    ) -> Check {
        self.check(CheckStatus::Warn, name, why, Some(fix.into()))
    }

    fn fail(
        self,
        name: impl Into<String>,
        why: impl Into<String>,
        fix: impl Into<String>,
    ) -> Check {
        self.check(CheckStatus::Fail, name, why, Some(fix.into()))
    }

    fn check(
        self,
        status: CheckStatus,
        name: impl Into<String>,
        why: impl Into<String>,
        fix: Option<String>,
    ) -> Check {
        Check { group: self, name: name.into(), status, why: why.into(), fix, subjects: Vec::new() }
    }
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum CheckStatus {
    /// No problem was found.
    Pass,
    /// Works, but not as well as it could; a fix is given.
    Warn,
    /// Prevents something from working; a fix is given.
    Fail,
    /// A fact about the machine, neither good nor bad.
    Info,
    /// Does not apply to this machine, or could not be determined.
    Skip,
}

/// One check of a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// The subject that it belongs to.
    pub group: Group,
    /// What was checked: `NVIDIA driver`.
    pub name: String,
    /// The result.
    pub status: CheckStatus,
    /// The reason, in terms of what was read or tried.
    pub why: String,
    /// What to do; always present for [`CheckStatus::Warn`] and [`CheckStatus::Fail`].
    pub fix: Option<String>,
    /// The devices and files in the name; where only these differ, the text of a report shows
    /// several checks as one. Empty if there is only one of its kind.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub subjects: Vec<String>,
}

impl Check {
    fn about<S: AsRef<str>>(self, subjects: impl IntoIterator<Item = S>) -> Self {
        let subjects = subjects.into_iter().map(|subject| subject.as_ref().to_owned()).collect();
        Self { subjects, ..self }
    }

    /// Whether the status is [`Warn`](CheckStatus::Warn) or [`Fail`](CheckStatus::Fail).
    pub fn is_problem(&self) -> bool {
        matches!(self.status, CheckStatus::Warn | CheckStatus::Fail)
    }
}

/// All checks, and the capabilities that follow from them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// One verdict per capability.
    pub verdicts: Vec<Verdict>,
    /// Which network NCCL would use.
    pub nccl: NcclReport,
    /// The checks, ordered by group.
    pub checks: Vec<Check>,
}

impl Report {
    /// Evaluates the evidence.
    pub fn of(evidence: &Evidence) -> Self {
        let groups = [
            gpu::checks,
            windows::checks,
            registration::checks,
            rdma::checks,
            doorbells::checks,
            host::checks,
            network::checks,
        ];
        let checks: Vec<Check> = groups.iter().flat_map(|group| group(evidence)).collect();
        let nccl = NcclReport::of(evidence);
        Self { verdicts: verdict::all(evidence, &checks, &nccl), nccl, checks }
    }

    /// Whether Warpwire can be used at all: `false` only if there is no CUDA device and the
    /// simulated GPU does not work.
    pub fn usable(&self) -> bool {
        ["gpu", "sim"].into_iter().any(|word| self.answer(word) != Some(Answer::No))
    }

    /// The verdict with this word: one of [`Verdict::WORDS`].
    pub fn verdict(&self, word: &str) -> Option<&Verdict> {
        self.verdicts.iter().find(|verdict| verdict.word == word)
    }

    /// The answer of the verdict with this word.
    pub fn answer(&self, word: &str) -> Option<Answer> {
        self.verdict(word).map(|verdict| verdict.answer)
    }
}

/// Replaces control characters and line breaks, which text from files may contain, by spaces.
fn printable(text: &str) -> String {
    text.replace(|c: char| c.is_control(), " ")
}

/// Joins names for a sentence, at most eight: `one, two and 3 more`.
fn some_of(names: &[String]) -> String {
    const SHOWN: usize = 8;
    if names.len() <= SHOWN {
        return names.join(", ");
    }
    let shown = names.get(..SHOWN).unwrap_or(names).join(", ");
    format!("{shown} and {} more", names.len() - SHOWN)
}
