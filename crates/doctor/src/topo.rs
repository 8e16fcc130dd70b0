//! PCIe and NUMA distances between GPUs, NICs and CPUs, and NVLinks, in the notation of
//! `nvidia-smi topo -m`.

use std::fmt;

use serde::Serialize;

use super::probes::NVSWITCH;
use super::{NvmlGpu, NvmlProbe, ProbeOutcome};
use warpwire::error::Result;
use warpwire::host::{PciAddress, PciDevice, System};

/// The distance between two PCI functions, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Distance {
    /// The same function.
    #[serde(rename = "X")]
    Same,
    /// Across at most a single PCIe switch.
    Pix,
    /// Across several PCIe switches, without a host bridge.
    Pxb,
    /// Across a PCIe host bridge (the CPU's root complex).
    Phb,
    /// Across host bridges within a NUMA node.
    Node,
    /// Across the link between NUMA nodes, or the nodes are not known.
    Sys,
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Same => "X",
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        })
    }
}

/// A GPU in the matrix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TopologyGpu {
    /// `GPU0`, numbered in PCI order as by `nvidia-smi`.
    pub label: String,
    /// Marketing name, if the driver reports one.
    pub model: Option<String>,
    /// PCI address.
    pub address: PciAddress,
    /// The CPUs of its NUMA node: `0-15`.
    pub cpu_affinity: Option<String>,
    /// Its NUMA node, if known.
    pub numa_node: Option<u32>,
    /// The NUMA node that its memory is ("GPU NUMA ID"), where CPUs and GPUs share memory.
    pub memory_numa_node: Option<u32>,
}

/// A NIC in the matrix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TopologyNic {
    /// `NIC0`; RDMA devices come first.
    pub label: String,
    /// Name of the RDMA device or network interface.
    pub name: String,
    /// PCI address.
    pub address: PciAddress,
    /// Whether it is an RDMA device rather than a plain interface.
    pub rdma: bool,
    /// Whether a port is active, or the interface is up.
    pub active: bool,
    /// The CPUs of its NUMA node: `0-15`.
    pub cpu_affinity: Option<String>,
    /// Its NUMA node, if known.
    pub numa_node: Option<u32>,
}

/// The CPUs of a NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CpuNode {
    /// Node number.
    pub node: u32,
    /// CPU list: `0-15`.
    pub cpus: String,
}

/// The NIC that a GPU should use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BestNic {
    /// Label of the GPU: `GPU0`.
    pub gpu: String,
    /// Label of the NIC: `NIC0`.
    pub nic: String,
    /// Device or interface name of the NIC.
    pub name: String,
    /// The distance between the two.
    pub distance: Distance,
}

/// A machine's GPUs, NICs and CPUs, and the distances between them.
///
/// ```
/// use warpwire::host::System;
/// use warpwire_doctor::Topology;
/// let topology = Topology::read(&System::live())?;
/// println!("{topology}");
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Topology {
    /// GPUs, in PCI order.
    pub gpus: Vec<TopologyGpu>,
    /// NICs: RDMA devices with a PCI function, then the interfaces of other PCI functions.
    pub nics: Vec<TopologyNic>,
    /// NUMA nodes.
    pub cpus: Vec<CpuNode>,
    /// Matrix of distances by PCIe; rows and columns are the GPUs followed by the NICs.
    pub distances: Vec<Vec<Distance>>,
    /// Matrix of the number of NVLinks between GPUs, directly or through NVSwitches.
    pub nvlinks: Vec<Vec<u32>>,
    /// Why NVLinks are not known; `None` if they are, or if there is no GPU.
    pub nvlinks_unknown: Option<String>,
    /// The best NIC for each GPU; empty if there is no NIC.
    pub best: Vec<BestNic>,
}

impl Topology {
    /// Reads a machine's topology: PCIe from sysfs, NVLinks from NVIDIA's management library, or
    /// from the recorded machine's probes.
    ///
    /// # Errors
    /// If a recorded machine's `probes.json` is malformed.
    pub fn read(system: &System) -> Result<Self> {
        Ok(Self::of(system, &NvmlProbe::of(system)?))
    }

    /// The topology with these NVLinks.
    pub fn of(system: &System, nvml: &NvmlProbe) -> Self {
        let nodes = system.numa_nodes().into_iter();
        let cpus: Vec<CpuNode> =
            nodes.map(|node| CpuNode { node: node.id, cpus: node.cpu_list }).collect();
        let mut topology = Self {
            gpus: gpus(system, &cpus, nvml),
            nics: nics(system, &cpus),
            cpus,
            distances: Vec::new(),
            nvlinks: Vec::new(),
            nvlinks_unknown: None,
            best: Vec::new(),
        };
        topology.nvlinks = topology.count_nvlinks(nvml);
        topology.nvlinks_unknown = match &nvml.library {
            ProbeOutcome::Failed { why } | ProbeOutcome::NotTried { why } => {
                Some(why.clone()).filter(|_| !topology.gpus.is_empty())
            }
            ProbeOutcome::Worked => None,
        };
        let gpu_addresses = topology.gpus.iter().map(|gpu| gpu.address);
        let nic_addresses = topology.nics.iter().map(|nic| nic.address);
        let functions: Vec<TreeNode> = gpu_addresses
            .chain(nic_addresses)
            .map(|address| TreeNode::of(system, address))
            .collect();
        topology.distances = functions
            .iter()
            .enumerate()
            .map(|(row, a)| {
                let to = |(column, b)| {
                    if row == column { Distance::Same } else { a.distance(b) }
                };
                functions.iter().enumerate().map(to).collect()
            })
            .collect();
        topology.best = topology.choose_nics();
        topology
    }

    /// The distance between a GPU and a NIC, by their indexes in [`Self::gpus`] and [`Self::nics`].
    pub fn gpu_to_nic(&self, gpu: usize, nic: usize) -> Option<Distance> {
        let column = self.gpus.len().checked_add(nic)?;
        self.distances.get(gpu)?.get(column).copied()
    }

    fn count_nvlinks(&self, nvml: &NvmlProbe) -> Vec<Vec<u32>> {
        let known =
            |gpu: &TopologyGpu| nvml.gpus.iter().find(|known| known.pci == Some(gpu.address));
        let count = |a: &TopologyGpu, b: &TopologyGpu| match (known(a), known(b)) {
            (Some(one), Some(other)) if a.address != b.address => nvlinks_between(one, other),
            _ => 0,
        };
        self.gpus.iter().map(|a| self.gpus.iter().map(|b| count(a, b)).collect()).collect()
    }

    /// Assigns each GPU the nearest NIC of the best available kind; among equals, the one with the
    /// fewest GPUs so far, so that eight GPUs are spread over eight NICs.
    fn choose_nics(&self) -> Vec<BestNic> {
        let mut users = vec![0_usize; self.nics.len()];
        let mut best = Vec::new();
        for (gpu_index, gpu) in self.gpus.iter().enumerate() {
            let candidates = self.nics.iter().zip(&users).enumerate();
            let chosen = candidates
                .filter_map(|(index, (nic, &nic_users))| {
                    let distance = self.gpu_to_nic(gpu_index, index)?;
                    let preference = match (nic.active, nic.rdma) {
                        (true, true) => 0,
                        (true, false) => 1,
                        (false, true) => 2,
                        (false, false) => 3,
                    };
                    Some(((preference, distance, nic_users, index), nic))
                })
                .min_by_key(|(rank, _)| *rank);
            let Some(((_, distance, _, index), nic)) = chosen else {
                continue;
            };
            if let Some(count) = users.get_mut(index) {
                *count += 1;
            }
            best.push(BestNic {
                gpu: gpu.label.clone(),
                nic: nic.label.clone(),
                name: nic.name.clone(),
                distance,
            });
        }
        best
    }
}

/// GPUs with links to switches reach each other with as many links as the one with fewer has.
fn nvlinks_between(a: &NvmlGpu, b: &NvmlGpu) -> u32 {
    let links = |of: &NvmlGpu, to: &str| of.nvlinks.get(to).copied().unwrap_or(0);
    let direct = b.pci.map_or(0, |address| links(a, &address.to_string()));
    direct.saturating_add(links(a, NVSWITCH).min(links(b, NVSWITCH)))
}

fn gpus(system: &System, cpus: &[CpuNode], nvml: &NvmlProbe) -> Vec<TopologyGpu> {
    let information = system.nvidia_information();
    let found = system.nvidia_gpus();
    found
        .iter()
        .enumerate()
        .map(|(index, gpu)| {
            let (numa_node, cpu_affinity) = affinity(system, cpus, &gpu.address);
            TopologyGpu {
                label: format!("GPU{index}"),
                model: information
                    .iter()
                    .find(|known| known.address == gpu.address)
                    .and_then(|known| known.model.clone()),
                address: gpu.address,
                cpu_affinity,
                numa_node,
                memory_numa_node: nvml
                    .gpus
                    .iter()
                    .find(|known| known.pci == Some(gpu.address))
                    .and_then(|known| known.numa_node),
            }
        })
        .collect()
}

fn nics(system: &System, cpus: &[CpuNode]) -> Vec<TopologyNic> {
    let mut found: Vec<(String, PciAddress, bool, bool)> = Vec::new();
    for device in system.rdma_devices() {
        if let Some(address) = device.address {
            let active = device.is_active();
            found.push((device.name, address, true, active));
        }
    }
    for interface in system.net_interfaces() {
        let Some(address) = interface.address else {
            continue;
        };
        if !found.iter().any(|(_, covered, ..)| *covered == address) {
            let active = interface.is_up();
            found.push((interface.name, address, false, active));
        }
    }
    found
        .into_iter()
        .enumerate()
        .map(|(index, (name, address, rdma, active))| {
            let (numa_node, cpu_affinity) = affinity(system, cpus, &address);
            TopologyNic {
                label: format!("NIC{index}"),
                name,
                address,
                rdma,
                active,
                cpu_affinity,
                numa_node,
            }
        })
        .collect()
}

fn affinity(
    system: &System,
    cpus: &[CpuNode],
    address: &PciAddress,
) -> (Option<u32>, Option<String>) {
    let numa_node = system.numa_node_of(address);
    let near = cpus.iter().find(|known| Some(known.node) == numa_node);
    let cpus = near.map(|known| known.cpus.clone());
    (numa_node, cpus.filter(|cpus| !cpus.is_empty()))
}

/// The position of a function in the PCI tree.
struct TreeNode {
    device: Option<PciDevice>,
    numa_node: Option<u32>,
}

impl TreeNode {
    fn of(system: &System, address: PciAddress) -> Self {
        Self { device: system.pci_device(&address), numa_node: system.numa_node_of(&address) }
    }

    fn distance(&self, other: &Self) -> Distance {
        if let (Some(a), Some(b)) = (&self.device, &other.device)
            && a.host_bridge.is_some()
            && a.host_bridge == b.host_bridge
        {
            return below_one_host_bridge(&a.bridges, &b.bridges);
        }
        if self.numa_node.is_some() && self.numa_node == other.numa_node {
            Distance::Node
        } else {
            Distance::Sys
        }
    }
}

/// Two functions below one PCIe switch differ in the switch's downstream port only; each further
/// bridge above only one of them is a further switch between them.
fn below_one_host_bridge(a: &[PciAddress], b: &[PciAddress]) -> Distance {
    let shared = a.iter().zip(b).take_while(|(x, y)| x == y).count();
    let own = (a.len() - shared).max(b.len() - shared);
    match (shared, own) {
        (0, _) => Distance::Phb,
        (_, 0 | 1) => Distance::Pix,
        _ => Distance::Pxb,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bridges(names: &[&str]) -> Vec<PciAddress> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    #[test]
    fn distances_follow_from_the_bridges() {
        let gpu = bridges(&["0000:10:01.0", "0000:11:00.0", "0000:12:00.0"]);
        let same_switch = bridges(&["0000:10:01.0", "0000:11:00.0", "0000:12:01.0"]);
        let second_switch =
            bridges(&["0000:10:01.0", "0000:11:00.0", "0000:12:02.0", "0000:20:00.0"]);
        let other_root_port = bridges(&["0000:10:02.0"]);
        assert_eq!(below_one_host_bridge(&gpu, &gpu), Distance::Pix);
        assert_eq!(below_one_host_bridge(&gpu, &same_switch), Distance::Pix);
        assert_eq!(below_one_host_bridge(&gpu, &second_switch), Distance::Pxb);
        assert_eq!(below_one_host_bridge(&gpu, &other_root_port), Distance::Phb);
        assert_eq!(below_one_host_bridge(&[], &[]), Distance::Phb);
    }

    #[test]
    fn functions_with_unknown_bridges_are_compared_by_node() {
        let unknown = |numa_node| TreeNode { device: None, numa_node };
        assert_eq!(unknown(None).distance(&unknown(None)), Distance::Sys);
        assert_eq!(unknown(Some(0)).distance(&unknown(Some(1))), Distance::Sys);
        assert_eq!(unknown(Some(1)).distance(&unknown(Some(1))), Distance::Node);
    }

    /// GPUs and NICs at equal distances.
    fn equal(gpu_count: usize, nics: &[(bool, bool)]) -> Topology {
        let address: PciAddress = "0000:00:00.0".parse().unwrap();
        let total = gpu_count + nics.len();
        Topology {
            gpus: (0..gpu_count)
                .map(|i| TopologyGpu {
                    label: format!("GPU{i}"),
                    model: None,
                    address,
                    cpu_affinity: None,
                    numa_node: None,
                    memory_numa_node: None,
                })
                .collect(),
            nics: nics
                .iter()
                .enumerate()
                .map(|(i, &(rdma, active))| TopologyNic {
                    label: format!("NIC{i}"),
                    name: format!("nic{i}"),
                    address,
                    rdma,
                    active,
                    cpu_affinity: None,
                    numa_node: None,
                })
                .collect(),
            cpus: vec![],
            distances: vec![vec![Distance::Node; total]; total],
            nvlinks: vec![vec![0; gpu_count]; gpu_count],
            nvlinks_unknown: None,
            best: vec![],
        }
    }

    #[test]
    fn nvlinks_are_direct_or_through_switches() {
        let gpu = |pci: &str, links: &[(&str, u32)]| NvmlGpu {
            pci: Some(pci.parse().unwrap()),
            numa_node: None,
            nvlinks: links.iter().map(|(to, count)| ((*to).to_owned(), *count)).collect(),
        };
        let [a, b] = ["0000:17:00.0", "0000:65:00.0"];
        let (one, other) = (gpu(a, &[(b, 4), ("switch", 18)]), gpu(b, &[(a, 4), ("switch", 12)]));
        assert_eq!(nvlinks_between(&one, &other), 16);
        assert_eq!(nvlinks_between(&one, &gpu("0000:01:00.0", &[])), 0);
        assert_eq!(nvlinks_between(&gpu(a, &[("switch", 18)]), &other), 12);
    }

    #[test]
    fn gpus_are_spread_over_equal_nics() {
        let chosen = equal(8, &[(true, true); 8]).choose_nics();
        let names: Vec<_> = chosen.iter().map(|best| best.nic.as_str()).collect();
        assert_eq!(names, ["NIC0", "NIC1", "NIC2", "NIC3", "NIC4", "NIC5", "NIC6", "NIC7"]);
    }

    #[test]
    fn active_rdma_devices_are_preferred() {
        let mixed = equal(1, &[(false, true), (true, false), (true, true)]);
        assert_eq!(mixed.choose_nics()[0].nic, "NIC2");
        assert!(equal(3, &[]).choose_nics().is_empty());
        assert!(equal(0, &[(true, true)]).choose_nics().is_empty());
    }
}
