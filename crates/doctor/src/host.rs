//! Checks of the host: container, virtual machine, IOMMU, ACS, NUMA, memory limits.

use super::rdma::usable_hardware;
use super::{Check, Evidence, Group, some_of};
use warpwire::host::{Acs, Iommu, Limit, PciAddress, System};
use warpwire::units;

const GROUP: Group = Group::Host;

pub(super) fn checks(evidence: &Evidence) -> Vec<Check> {
    let system = &evidence.system;
    vec![
        container(system),
        virtual_machine(system),
        iommu(evidence),
        acs(evidence),
        numa(evidence),
        memlock(evidence),
        huge_pages(system),
        memfd(evidence),
    ]
}

fn container(system: &System) -> Check {
    match system.container() {
        Some(found) => GROUP.info(
            "container",
            format!(
                "{} ({}): its engine determines device nodes and limits",
                found.kind, found.evidence
            ),
        ),
        None => GROUP.info("container", "none detected"),
    }
}

fn virtual_machine(system: &System) -> Check {
    let name = "virtual machine";
    match system.virtualization() {
        Some(found) => GROUP.info(
            name,
            format!(
                "yes, vendor {} ({}): PCIe distances are as the hypervisor presents them",
                found.vendor, found.evidence
            ),
        ),
        None => GROUP.info(name, "none detected"),
    }
}

fn iommu(evidence: &Evidence) -> Check {
    let mode = evidence.system.iommu();
    let peers = !evidence.gpus.is_empty() && !usable_hardware(evidence).is_empty();
    match mode {
        Iommu::Translated if peers => GROUP.warn(
            "IOMMU",
            "translating: traffic between GPU and NIC is routed through it",
            "add `iommu=pt` to the kernel command line and reboot",
        ),
        Iommu::Unknown => GROUP.skip("IOMMU", mode.to_string()),
        Iommu::None | Iommu::Passthrough | Iommu::Translated => {
            GROUP.pass("IOMMU", mode.to_string())
        }
    }
}

/// The ports below the common switch that traffic between two functions passes.
fn ports_between(system: &System, a: &PciAddress, b: &PciAddress) -> Vec<PciAddress> {
    let (Some(a), Some(b)) = (system.pci_device(a), system.pci_device(b)) else {
        return Vec::new();
    };
    let shared = a.bridges.iter().zip(&b.bridges).take_while(|(x, y)| x == y).count();
    if shared == 0 || a.host_bridge != b.host_bridge {
        return Vec::new();
    }
    let below = |bridges: Vec<PciAddress>| bridges.into_iter().skip(shared);
    below(a.bridges).chain(below(b.bridges)).collect()
}

/// What slows traffic between a GPU and a NIC down.
pub(super) fn slower(evidence: &Evidence, gpu: &PciAddress, nic: &PciAddress) -> Vec<String> {
    let system = &evidence.system;
    let mut found = Vec::new();
    if system.iommu() == Iommu::Translated {
        found.push("the IOMMU translates".to_owned());
    }
    if ports_between(system, gpu, nic).iter().any(|port| system.acs(port).redirects()) {
        found.push("ACS redirects".to_owned());
    }
    found
}

fn acs(evidence: &Evidence) -> Check {
    let system = &evidence.system;
    let name = "PCIe access control (ACS)";
    let topology = &evidence.topology;
    let mut ports: Vec<PciAddress> = Vec::new();
    for best in &topology.best {
        let gpu = topology.gpus.iter().find(|gpu| gpu.label == best.gpu);
        let nic = topology.nics.iter().find(|nic| nic.label == best.nic);
        if let (Some(gpu), Some(nic)) = (gpu, nic) {
            ports.extend(ports_between(system, &gpu.address, &nic.address));
        }
    }
    ports.sort();
    ports.dedup();
    if ports.is_empty() {
        return GROUP.skip(name, "no PCIe switch is visible between a GPU and its NIC");
    }
    let states: Vec<Acs> = ports.iter().map(|port| system.acs(port)).collect();
    let redirecting: Vec<String> = ports
        .iter()
        .zip(&states)
        .filter(|(_, state)| state.redirects())
        .map(|(port, _)| port.to_string())
        .collect();
    if !redirecting.is_empty() {
        return GROUP.warn(
            name,
            format!(
                "redirects peer-to-peer traffic to the root complex at {}",
                some_of(&redirecting)
            ),
            format!(
                "`for p in {}; do sudo setpci -s $p ECAP_ACS+6.w=0000; done` (not if VMs share \
                 the machine)",
                redirecting.join(" ")
            ),
        );
    }
    if states.contains(&Acs::UnknownNeedsRoot) {
        let mut check =
            GROUP.skip(name, "unknown: only root can read the ports' extended configuration space");
        check.fix = Some("`sudo warpwire doctor`".to_owned());
        return check;
    }
    GROUP.pass(name, format!("off at all {} ports between GPUs and their NICs", ports.len()))
}

fn numa(evidence: &Evidence) -> Check {
    let system = &evidence.system;
    let nodes = system.numa_nodes();
    if nodes.is_empty() {
        return GROUP.skip("NUMA", "sysfs lists no nodes");
    }
    let shown: Vec<String> = nodes
        .iter()
        .map(|node| match node.cpu_list.as_str() {
            "" => format!("node {} lists no CPUs", node.id),
            cpus => format!("node {} has CPUs {cpus}", node.id),
        })
        .collect();
    let shown = some_of(&shown);
    let without_node = evidence.topology.gpus.iter().find(|gpu| gpu.numa_node.is_none());
    match without_node {
        Some(gpu) => GROUP.warn(
            "NUMA",
            format!("{shown}; firmware reports no node for GPU {}", gpu.address),
            format!(
                "`echo NODE | sudo tee /sys/bus/pci/devices/{}/numa_node` with the right node",
                gpu.address
            ),
        ),
        None => GROUP.info("NUMA", shown),
    }
}

fn memlock(evidence: &Evidence) -> Check {
    let name = "locked memory";
    let Some(memlock) = evidence.system.memlock() else {
        return GROUP.skip(name, "not in /proc/self/limits");
    };
    let why = format!("limit {}", memlock.soft);
    if memlock.soft == Limit::Unlimited {
        return GROUP.pass(name, "unlimited");
    }
    if memlock.exempt {
        return GROUP.pass(name, format!("{why}, which this process may exceed (CAP_IPC_LOCK)"));
    }
    if evidence.rdma.is_empty() {
        return GROUP.skip(
            name,
            format!("{why}; it limits registration with RDMA devices only, and there is none"),
        );
    }
    GROUP.warn(
        name,
        format!("{why}: memory registered with a NIC counts against it"),
        "`ulimit -l unlimited`, with `* - memlock unlimited` in /etc/security/limits.conf; \
         Docker: `--ulimit memlock=-1`",
    )
}

fn huge_pages(system: &System) -> Check {
    let name = "huge pages";
    match system.huge_pages() {
        Some(pages) if pages.total > 0 => {
            let size = units::bytes(pages.page_bytes);
            GROUP.info(name, format!("{} of {size}, {} free", pages.total, pages.free))
        }
        Some(pages) => {
            let size = units::bytes(pages.page_bytes);
            let mut check =
                GROUP.skip(name, format!("none of {size} are reserved; they are optional"));
            check.fix = Some("`sudo sysctl vm.nr_hugepages=512`".to_owned());
            check
        }
        None => GROUP.skip(name, "not in /proc/meminfo"),
    }
}

fn memfd(evidence: &Evidence) -> Check {
    let name = "shareable anonymous memory";
    match &evidence.probes.memfd {
        super::ProbeOutcome::Worked => {
            GROUP.pass(name, "memfd_create worked; the simulated GPU's memory uses it")
        }
        super::ProbeOutcome::NotTried { why } => GROUP.skip(name, format!("not tried: {why}")),
        super::ProbeOutcome::Failed { why } => GROUP.fail(
            name,
            format!("memfd_create failed: {why}"),
            "allow memfd_create in the container's seccomp profile (to try, Docker: \
             `--security-opt seccomp=unconfined`)",
        ),
    }
}
