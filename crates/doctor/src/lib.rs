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
mod gpu;
mod host;
mod network;
mod probe_cuda;
mod probe_host;
mod probes;
mod rdma;
mod registration;
mod render;
mod topo;
mod trial;
mod verdict;
mod windows;

use serde::Serialize;

pub use probes::{CudaAttributes, CudaDeviceProbe, CudaProbe, ProbeOutcome, Probes, UdpProbe};
pub use topo::{BestNic, CpuNode, Distance, Topology, TopologyGpu, TopologyNic};
pub use trial::{Trial, TrialOutcome, registrations_to_text, try_registrations};
pub use verdict::{Answer, Verdict};

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
        let probes = if system.is_live() { Probes::run() } else { Probes::recorded(&system)? };
        let live = system.is_live();
        // A target under `warpwire`, so that `WARPWIRE_LOG=warpwire::doctor=debug` selects it.
        tracing::debug!(target: "warpwire::doctor", live, ?probes, "evidence gathered");
        Ok(Self {
            gpus: system.nvidia_gpus(),
            rdma: system.rdma_devices(),
            topology: Topology::read(&system),
            system,
            probes,
        })
    }
}

/// The subject of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
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
        Check { group: self, name: name.into(), status, why: why.into(), fix }
    }
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckStatus {
    /// No problem was found.
    Pass,
    /// Works, but not as well as it could; a fix is given.
    Warn,
    /// Prevents something from working; a fix is given.
    Fail,
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
}

/// All checks, and the capabilities that follow from them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The checks, ordered by group.
    pub checks: Vec<Check>,
    /// One verdict per capability.
    pub verdicts: Vec<Verdict>,
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
        Self {
            checks: groups.iter().flat_map(|group| group(evidence)).collect(),
            verdicts: verdict::all(evidence),
        }
    }

    /// Whether Warpwire can be used at all: `false` only if there is no CUDA device and the
    /// simulated GPU does not work.
    pub fn usable(&self) -> bool {
        [verdict::GPU, verdict::SIMULATED_GPU]
            .into_iter()
            .any(|capability| self.answer(capability) != Some(Answer::No))
    }

    /// The verdict's answer on a capability, by its name (`"GPU"`, `"CPU windows"`, …).
    pub fn answer(&self, capability: &str) -> Option<Answer> {
        let verdict = self.verdicts.iter().find(|v| v.capability == capability)?;
        Some(verdict.answer)
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
