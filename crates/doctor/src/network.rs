//! Checks of network interfaces and UDP, which the software HCA uses.

use super::{Check, Evidence, Group, ProbeOutcome};
use warpwire::host::{NetInterface, System};
use warpwire::units;

const GROUP: Group = Group::Network;

/// Interface MTU for RoCE's maximum path MTU of 4096 bytes, including all headers.
const MTU_FOR_4096: u32 = 4200;

/// Holds what arrives at 25 Gb/s while the receiving thread is descheduled for a millisecond.
const WANTED_SOCKET_BUFFER: u64 = 4 << 20;

pub(super) fn checks(evidence: &Evidence) -> Vec<Check> {
    let system = &evidence.system;
    let mut checks: Vec<Check> = system
        .net_interfaces()
        .iter()
        .filter(|interface| interface.address.is_some())
        .map(|interface| mtu(interface).about([&interface.name]))
        .collect();
    if checks.is_empty() {
        checks.push(GROUP.skip("interface MTU", "no network interface on the PCI buses"));
    }
    let udp = &evidence.probes.udp;
    checks.push(offload(
        "UDP over loopback",
        &udp.loopback,
        "sent and received a datagram",
        "`sudo ip link set lo up`",
    ));
    checks.push(offload(
        "UDP segmentation offload (GSO)",
        &udp.gso,
        "one call sent a burst of datagrams",
        "use Linux 4.18 or newer and no user-space kernel (gVisor); without it, each packet takes \
         a system call",
    ));
    checks.push(offload(
        "UDP receive offload (GRO)",
        &udp.gro,
        "one call received several datagrams",
        "use Linux 5.0 or newer and no user-space kernel (gVisor); without it, each packet takes \
         a system call",
    ));
    checks.extend(socket_buffers(system));
    checks
}

fn mtu(interface: &NetInterface) -> Check {
    let name = format!("{} MTU", interface.name);
    let near = interface.numa_node.map_or_else(String::new, |node| format!(", NUMA node {node}"));
    match interface.mtu {
        _ if !interface.is_up() => GROUP.skip(name, "the interface is not up"),
        None => GROUP.skip(name, "its `mtu` file does not contain a number"),
        Some(mtu) if mtu >= MTU_FOR_4096 => {
            GROUP.pass(name, format!("{mtu}: sufficient for RoCE packets of 4096 bytes{near}"))
        }
        Some(mtu) => GROUP.warn(
            name,
            format!(
                "{mtu}: too small for RoCE packets of 4096 bytes, so more and smaller packets are \
                 sent{near}"
            ),
            format!(
                "`sudo ip link set {} mtu 9000`, if all switches and peers on the network allow it",
                interface.name
            ),
        ),
    }
}

fn offload(name: &str, outcome: &ProbeOutcome, worked: &str, fix: &str) -> Check {
    match outcome {
        ProbeOutcome::Worked => GROUP.pass(name, worked),
        ProbeOutcome::Failed { why } => GROUP.warn(name, why, fix),
        ProbeOutcome::NotTried { why } => GROUP.skip(name, format!("not tried: {why}")),
    }
}

fn socket_buffers(system: &System) -> Vec<Check> {
    let (receive, send) = system.socket_buffer_limits();
    [("net.core.rmem_max", receive), ("net.core.wmem_max", send)]
        .into_iter()
        .map(|(name, limit)| match limit {
            None => GROUP.skip(name, "not in /proc/sys/net/core"),
            Some(bytes) if bytes >= WANTED_SOCKET_BUFFER => GROUP.pass(name, units::bytes(bytes)),
            Some(bytes) => GROUP.warn(
                name,
                format!("{}: bursts overflow a socket's buffer sooner", units::bytes(bytes)),
                format!("`sudo sysctl {name}={WANTED_SOCKET_BUFFER}`"),
            ),
        })
        .collect()
}
