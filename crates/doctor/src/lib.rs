//! What this machine can do, what stops it, and the fix.
//!
//! A [`Report`] is worked out from [`Evidence`] alone: the machine's files and the results of what was
//! tried on it. So the same code judges the running machine and a recorded one, and nothing is claimed
//! that was neither read nor tried.
//!
//! ```
//! use warpwire::host::System;
//! use warpwire_doctor::{Evidence, Report};
//! let report = Report::of(&Evidence::gather(System::live())?);
//! println!("{}", report.to_text(false));
//! # Ok::<(), warpwire::Error>(())
//! ```
//!
//! `trial.rs` alone has unsafe code: it registers addresses that it vouches for.
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

pub use probes::{CudaAttributes, CudaDeviceProbe, CudaProbe, Outcome, Probes, UdpProbe};
pub use topo::{BestNic, CpuNode, Distance, Topology, TopologyGpu, TopologyNic};
pub use trial::{Trial, TrialOutcome, registrations_to_text, try_registrations};
pub use verdict::{Answer, Verdict};

use warpwire::error::Result;
use warpwire::host::{PciDevice, RdmaDevice, System};

/// All that a report rests on: the machine's files, and what happened when things were tried.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// The machine's files.
    pub system: System,
    /// What was tried.
    pub probes: Probes,
    // Read once, since most checks ask for these.
    gpus: Vec<PciDevice>,
    rdma: Vec<RdmaDevice>,
    topology: Topology,
}

impl Evidence {
    /// Tries things on the running machine, or reads what was tried on a recorded one.
    ///
    /// # Errors
    /// If a recorded machine's `probes.json` cannot be understood.
    pub fn gather(system: System) -> Result<Self> {
        let probes = if system.is_live() { Probes::run() } else { Probes::recorded(&system)? };
        let live = system.is_live();
        // Named as a module of the library, as in `WARPWIRE_LOG=warpwire::doctor=debug`.
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

/// What a check is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Group {
    /// The GPU, its driver, and what CUDA offers.
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
    /// Kernel, memory, buses.
    #[serde(rename = "host")]
    Host,
    /// Plain networking.
    #[serde(rename = "network")]
    Network,
}

impl Group {
    fn pass(self, name: impl Into<String>, why: impl Into<String>) -> Check {
        self.check(Status::Pass, name, why, None)
    }

    fn skip(self, name: impl Into<String>, why: impl Into<String>) -> Check {
        self.check(Status::Skip, name, why, None)
    }

    fn warn(
        self,
        name: impl Into<String>,
        why: impl Into<String>,
        fix: impl Into<String>,
    ) -> Check {
        self.check(Status::Warn, name, why, Some(fix.into()))
    }

    fn fail(
        self,
        name: impl Into<String>,
        why: impl Into<String>,
        fix: impl Into<String>,
    ) -> Check {
        self.check(Status::Fail, name, why, Some(fix.into()))
    }

    fn check(
        self,
        status: Status,
        name: impl Into<String>,
        why: impl Into<String>,
        fix: Option<String>,
    ) -> Check {
        Check { group: self, name: name.into(), status, why: why.into(), fix }
    }
}

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Pass,
    /// Works, but less well than it could; there is a fix.
    Warn,
    /// Stops something; there is a fix.
    Fail,
    /// Does not apply to this machine, or could not be found out.
    Skip,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What it is about.
    pub group: Group,
    /// What was looked at.
    pub name: String,
    /// How it went.
    pub status: Status,
    /// Why, in terms of what was read or tried.
    pub why: String,
    /// What to do; always there for [`Status::Warn`] and [`Status::Fail`].
    pub fix: Option<String>,
}

/// Everything that was looked at, and what follows from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// What was looked at, group by group.
    pub checks: Vec<Check>,
    /// What this machine can do.
    pub verdicts: Vec<Verdict>,
}

impl Report {
    /// Judges a machine.
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

    /// Whether anything at all can work: false only if there is neither a CUDA device nor a way to
    /// simulate one.
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

/// Text from files may hold line breaks and control characters, and what is printed on a line must not.
fn printable(text: &str) -> String {
    text.replace(|c: char| c.is_control(), " ")
}

/// `one`, or `one, two and 3 more`: names in a sentence.
fn some_of(names: &[String]) -> String {
    const SHOWN: usize = 8;
    if names.len() <= SHOWN {
        return names.join(", ");
    }
    let shown = names.get(..SHOWN).unwrap_or(names).join(", ");
    format!("{shown} and {} more", names.len() - SHOWN)
}
