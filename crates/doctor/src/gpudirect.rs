//! GPUDirect RDMA, for each GPU with each RDMA device.

use serde::Serialize;

use super::fold::fold_names;
use super::registration::{self, Path};
use super::verdict::{Answer, KnownBy, Verdict, broken_cuda, first_fix, verdict};
use super::{Check, CudaDeviceProbe, Distance, Evidence, Group, TopologyNic, host, rdma};
use warpwire::host::RdmaDevice;

pub(super) const WORD: &str = "gpudirect";
const CAPABILITY: &str = "GPUDirect RDMA";

/// Whether a NIC can access a GPU's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PairVerdict {
    /// The GPU as in `warpwire topo`: `GPU0`.
    pub gpu: String,
    /// The GPU as CUDA numbers it: `cuda:0`; `None` if CUDA does not list it.
    pub device: Option<String>,
    /// The RDMA device: `mlx5_0`.
    pub nic: String,
    /// The distance between the two.
    pub distance: Distance,
    /// Whether this is the NIC that the GPU should use.
    pub best: bool,
    /// Whether it can.
    pub answer: Answer,
    /// How, or why not.
    pub text: String,
    /// What to do.
    pub fix: Option<String>,
}

pub(super) fn evaluate(evidence: &Evidence, checks: &[Check]) -> Verdict {
    if let Some((why, fix)) = obstacle(evidence, checks) {
        let found = verdict(WORD, CAPABILITY, Answer::No, format!("because {why}"));
        return found.fixed_by(fix).known_by(KnownBy::Read);
    }
    let pairs = pairs(evidence, checks);
    let best: Vec<&PairVerdict> = pairs.iter().filter(|pair| pair.best).collect();
    // GPUs that CUDA does not list are hidden from this process, unless it lists none.
    let listed: Vec<&PairVerdict> =
        best.iter().copied().filter(|pair| pair.device.is_some()).collect();
    let counted = if listed.is_empty() { best } else { listed };
    let same = |pair: &&PairVerdict, other: &&PairVerdict| {
        (pair.answer, &pair.text, &pair.fix) == (other.answer, &other.text, &other.fix)
    };
    let mut result = match counted.as_slice() {
        [] => verdict(WORD, CAPABILITY, Answer::No, "because no GPU has an RDMA device"),
        [first, rest @ ..] if rest.iter().all(|other| same(first, other)) => {
            let text = format!("{} ({})", first.text, with(&counted));
            verdict(WORD, CAPABILITY, first.answer, text).fixed_by(first.fix.clone())
        }
        several => {
            let yes = several.iter().filter(|pair| pair.answer == Answer::Yes).count();
            let no = several.iter().filter(|pair| pair.answer == Answer::No).count();
            let answer = if no == several.len() { Answer::No } else { Answer::Partly };
            let text = format!("for {yes} of {} GPUs with their best NIC", several.len());
            verdict(WORD, CAPABILITY, answer, text)
        }
    };
    result.pairs = pairs;
    result
}

/// The pairs of a verdict that differ, equal ones together, for the text of a report: the names,
/// and one of the pairs.
pub(super) fn folded(pairs: &[PairVerdict]) -> Vec<(String, &PairVerdict)> {
    let best: Vec<&PairVerdict> = pairs.iter().filter(|pair| pair.best).collect();
    let mut groups: Vec<Vec<&PairVerdict>> = Vec::new();
    for pair in best {
        let equal = |group: &&mut Vec<&PairVerdict>| {
            group.first().is_some_and(|first| {
                (first.answer, &first.text, &first.fix) == (pair.answer, &pair.text, &pair.fix)
            })
        };
        match groups.iter_mut().find(equal) {
            Some(group) => group.push(pair),
            None => groups.push(vec![pair]),
        }
    }
    groups.iter().filter_map(|group| Some((with(group), *group.first()?))).collect()
}

/// `GPU0…7 with mlx5_0…7, PIX`.
fn with(pairs: &[&PairVerdict]) -> String {
    let list = |name: fn(&PairVerdict) -> String| {
        let mut names: Vec<String> = pairs.iter().map(|pair| name(pair)).collect();
        names.dedup();
        names
    };
    let mut distances = list(|pair| pair.distance.to_string());
    distances.sort();
    distances.dedup();
    format!(
        "{} with {}, {}",
        fold_names(&list(|pair| pair.gpu.clone())),
        fold_names(&list(|pair| pair.nic.clone())),
        distances.join(" or ")
    )
}

/// What rules it out for every pair, and the fix.
fn obstacle(evidence: &Evidence, checks: &[Check]) -> Option<(String, Option<String>)> {
    if evidence.gpus.is_empty() && evidence.probes.cuda.devices.is_empty() {
        return Some(("there is no NVIDIA GPU".to_owned(), None));
    }
    if let Some(why) = broken_cuda(evidence) {
        return Some((format!("no CUDA device works: {why}"), first_fix(checks, Group::Gpu)));
    }
    if evidence.rdma.is_empty() {
        let without = rdma::without_driver(&evidence.system);
        return Some(match without.as_slice() {
            [] => ("there is no RDMA device".to_owned(), None),
            some => (
                format!(
                    "there is no RDMA device: no RDMA driver is loaded for {}",
                    some.join(", ")
                ),
                Some("`sudo modprobe mlx5_ib ib_uverbs`".to_owned()),
            ),
        });
    }
    if evidence.system.verbs_library().is_none() {
        let fix = fix_of(checks, "libibverbs");
        return Some(("libibverbs.so.1 is not installed".to_owned(), fix));
    }
    None
}

fn fix_of(checks: &[Check], name: &str) -> Option<String> {
    checks.iter().find(|check| check.name == name).and_then(|check| check.fix.clone())
}

fn pairs(evidence: &Evidence, checks: &[Check]) -> Vec<PairVerdict> {
    let topology = &evidence.topology;
    let mut pairs = Vec::new();
    for (index, gpu) in topology.gpus.iter().enumerate() {
        let devices = &evidence.probes.cuda.devices;
        let device = devices.iter().find(|device| device.pci == Some(gpu.address));
        let chosen = topology.best.iter().find(|best| best.gpu == gpu.label);
        let mut own: Vec<PairVerdict> = Vec::new();
        for (number, nic) in topology.nics.iter().enumerate() {
            let found = evidence.rdma.iter().find(|device| device.name == nic.name && nic.rdma);
            let (Some(rdma), Some(distance)) = (found, topology.gpu_to_nic(index, number)) else {
                continue;
            };
            let (answer, text, fix) = answer(evidence, checks, device, rdma, (nic, distance));
            own.push(PairVerdict {
                gpu: gpu.label.clone(),
                device: device.map(|device| format!("cuda:{}", device.ordinal)),
                nic: nic.name.clone(),
                distance,
                best: chosen.is_some_and(|best| best.nic == nic.label),
                answer,
                text,
                fix,
            });
        }
        // The best NIC may be one without RDMA, if no RDMA device is active.
        if !own.iter().any(|pair| pair.best)
            && let Some(nearest) = own.iter_mut().min_by_key(|pair| pair.distance)
        {
            nearest.best = true;
        }
        pairs.extend(own);
    }
    pairs
}

type Found = (Answer, String, Option<String>);

fn answer(
    evidence: &Evidence,
    checks: &[Check],
    device: Option<&CudaDeviceProbe>,
    rdma_device: &RdmaDevice,
    (nic, distance): (&TopologyNic, Distance),
) -> Found {
    let no = |why: String, fix: Option<String>| (Answer::No, format!("because {why}"), fix);
    if let Some(why) = rdma::obstacle(&evidence.system, rdma_device) {
        return no(why, rdma::fix(&evidence.system, rdma_device));
    }
    let Some(device) = device else {
        let why = "not known: CUDA does not list the GPU (CUDA_VISIBLE_DEVICES?), or was not tried";
        return (Answer::Partly, why.to_owned(), None);
    };
    if device.attributes.gpu_direct_rdma_supported == Some(false) {
        let fix = fix_of(checks, &format!("cuda:{} GPUDirect RDMA", device.ordinal));
        return no("CUDA reports that this GPU does not support it".to_owned(), fix);
    }
    let by = match registration::path_of(evidence, device, rdma_device) {
        Path::DmaBuf => "by dma-buf".to_owned(),
        Path::PeerMemory(module) => format!("by peer memory ({module})"),
        Path::Staged(why) => {
            let why = format!("{}; data is staged through host memory", why.join("; "));
            return no(why, Some(registration::PEER_MEMORY_FIX.to_owned()));
        }
    };
    let gpu = evidence.topology.gpus.iter().find(|gpu| Some(gpu.address) == device.pci);
    let slower = gpu.map(|gpu| host::slower(evidence, &gpu.address, &nic.address));
    let slower = match slower.unwrap_or_default() {
        list if list.is_empty() => String::new(),
        list => format!("; slower than it could be: {}", list.join(", ")),
    };
    if distance >= Distance::Node {
        let text = format!(
            "expected {by}, not tried; but slow or unsupported between root complexes{slower}"
        );
        let fix = "use a NIC below the GPU's own PCIe switch or root complex".to_owned();
        return (Answer::Partly, text, Some(fix));
    }
    (Answer::Yes, format!("expected {by}, not tried{slower}"), None)
}
