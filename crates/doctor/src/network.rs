//! Plain networking, which the software HCA runs over.

use super::{Check, Evidence, Group, Outcome};
use warpwire::host::{NetInterface, System};
use warpwire::units;

const GROUP: Group = Group::Network;

/// RoCE's largest path MTU is 4096 bytes; with all headers a packet stays below this.
const MTU_FOR_4096: u32 = 4200;

/// Room for what arrives while the receiving thread is off the processor for a millisecond at 25 Gb/s.
const WANTED_SOCKET_BUFFER: u64 = 4 << 20;

pub(super) fn checks(evidence: &Evidence) -> Vec<Check> {
    let system = &evidence.system;
    let mut checks: Vec<Check> = system
        .net_interfaces()
        .iter()
        .filter(|interface| interface.address.is_some())
        .map(mtu)
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
        "use Linux 4.18 or newer and no user-space kernel (gVisor); without it every packet is a system call",
    ));
    checks.push(offload(
        "UDP receive offload (GRO)",
        &udp.gro,
        "one call received several datagrams",
        "use Linux 5.0 or newer and no user-space kernel (gVisor); without it every packet is a system call",
    ));
    checks.extend(socket_buffers(system));
    checks
}

fn mtu(interface: &NetInterface) -> Check {
    let name = format!("{} MTU", interface.name);
    let near = interface.numa_node.map_or_else(String::new, |node| format!(", NUMA node {node}"));
    match interface.mtu {
        _ if !interface.is_up() => GROUP.skip(name, "the interface is not up"),
        None => GROUP.skip(name, "the kernel's text is no number"),
        Some(mtu) if mtu >= MTU_FOR_4096 => GROUP.pass(name, format!("{mtu}: carries RoCE packets of 4096 bytes{near}")),
        Some(mtu) => GROUP.warn(
            name,
            format!("{mtu}: too small for RoCE packets of 4096 bytes, so smaller and more packets are sent{near}"),
            format!("`sudo ip link set {} mtu 9000`, if every switch and peer on that network allows it", interface.name),
        ),
    }
}

fn offload(name: &str, outcome: &Outcome, worked: &str, fix: &str) -> Check {
    match outcome {
        Outcome::Worked => GROUP.pass(name, worked),
        Outcome::Failed { why } => GROUP.warn(name, why, fix),
        Outcome::NotTried { why } => GROUP.skip(name, format!("not tried: {why}")),
    }
}

fn socket_buffers(system: &System) -> Vec<Check> {
    let (receive, send) = system.socket_buffer_limits();
    [("net.core.rmem_max", receive), ("net.core.wmem_max", send)]
        .into_iter()
        .map(|(name, limit)| match limit {
            None => GROUP.skip(name, "/proc/sys/net/core does not tell"),
            Some(bytes) if bytes >= WANTED_SOCKET_BUFFER => GROUP.pass(name, units::bytes(bytes)),
            Some(bytes) => GROUP.warn(
                name,
                format!("{}: bursts overrun a socket's buffer sooner", units::bytes(bytes)),
                format!("`sudo sysctl {name}={WANTED_SOCKET_BUFFER}`"),
            ),
        })
        .collect()
}
