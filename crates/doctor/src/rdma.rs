//! Checks of RDMA devices: identity, port state, device nodes and driver features.

use super::{Check, Evidence, Group, some_of};
use warpwire::host::{FileAccess, RdmaDevice, RdmaPort, System};

const GROUP: Group = Group::RdmaDevices;

pub(super) fn checks(evidence: &Evidence) -> Vec<Check> {
    let system = &evidence.system;
    let devices = &evidence.rdma;
    if devices.is_empty() {
        return vec![GROUP.skip("RDMA devices", "none in /sys/class/infiniband")];
    }
    devices.iter().flat_map(|device| device_checks(system, device)).collect()
}

fn device_checks(system: &System, device: &RdmaDevice) -> Vec<Check> {
    let mut checks = vec![identity(device), node(system, device)];
    checks.extend(device.ports.iter().flat_map(|port| port_checks(device, port)));
    if device.ports.is_empty() {
        checks.push(GROUP.skip(format!("{} ports", device.name), "sysfs lists none"));
    }
    checks.push(dma_buf(device));
    checks.push(on_demand_paging(device));
    checks.push(direct_queues(system, device));
    let node = device.uverbs.clone().unwrap_or_default();
    checks.into_iter().map(|check| check.about([&device.name, &node])).collect()
}

/// The fix of what prevents the use of a device.
pub(super) fn fix(system: &System, device: &RdmaDevice) -> Option<String> {
    // There is nothing to repair about a software device.
    device.address?;
    let checks = device_checks(system, device);
    checks.into_iter().find(Check::is_problem).and_then(|check| check.fix)
}

/// NICs on the PCI buses that usually have RDMA, for which there is no RDMA device.
pub(super) fn without_driver(system: &System) -> Vec<String> {
    const MELLANOX: u16 = 0x15b3;
    const BASE_CLASS_NETWORK: u32 = 0x02;
    let nics = system.pci_devices().into_iter();
    nics.filter(|nic| nic.vendor == MELLANOX && nic.class >> 16 == BASE_CLASS_NETWORK)
        .map(|nic| nic.address.to_string())
        .collect()
}

/// The hardware devices that this user can open and that have an active port.
pub(super) fn usable_hardware(evidence: &Evidence) -> Vec<&RdmaDevice> {
    let devices = evidence.rdma.iter();
    devices.filter(|device| obstacle(&evidence.system, device).is_none()).collect()
}

/// Why a device cannot be used as RDMA hardware; `None` if it can.
pub(super) fn obstacle(system: &System, device: &RdmaDevice) -> Option<String> {
    if device.address.is_none() {
        return Some(format!("{} is not a PCI device", device.name));
    }
    unusable(system, device)
}

/// Why a device, hardware or software (soft-RoCE), cannot be used; `None` if it can.
pub(super) fn unusable(system: &System, device: &RdmaDevice) -> Option<String> {
    let name = &device.name;
    let Some(node) = &device.uverbs else {
        return Some(format!("{name} has no uverbs device"));
    };
    match system.access(node) {
        FileAccess::ReadWrite if device.is_active() => None,
        FileAccess::ReadWrite => Some(format!("no port of {name} is active")),
        FileAccess::Missing => Some(format!("{node} ({name}) is missing")),
        FileAccess::Denied | FileAccess::ReadOnly => {
            Some(format!("{node} ({name}) is not accessible to this user"))
        }
    }
}

fn identity(device: &RdmaDevice) -> Check {
    let unknown = || "not known".to_owned();
    let why = format!(
        "driver {}, {}, firmware {}, board {}{}",
        device.driver.clone().unwrap_or_else(unknown),
        device.node_type.clone().unwrap_or_else(|| "node type not known".to_owned()),
        device.firmware.clone().unwrap_or_else(unknown),
        device.board_id.clone().unwrap_or_else(unknown),
        if device.address.is_some() { "" } else { ", no PCI function" },
    );
    GROUP.info(&device.name, why)
}

fn node(system: &System, device: &RdmaDevice) -> Check {
    let name = format!("{} device node", device.name);
    let Some(node) = &device.uverbs else {
        return GROUP.fail(
            name,
            "no entry in /sys/class/infiniband_verbs, so programs cannot open it",
            "`sudo modprobe ib_uverbs`",
        );
    };
    match system.access(node) {
        FileAccess::ReadWrite => GROUP.pass(name, format!("{node} is accessible to this user")),
        FileAccess::Missing => GROUP.fail(
            name,
            format!("{node} does not exist, although the kernel has the device"),
            "start the container with `--device=/dev/infiniband` (Kubernetes: an RDMA device \
             plugin); on a host, `sudo modprobe ib_uverbs`",
        ),
        FileAccess::Denied | FileAccess::ReadOnly => GROUP.fail(
            name,
            format!("this user may not read and write {node}"),
            format!("`sudo chmod 666 {node}`, or install rdma-core's udev rules"),
        ),
    }
}

fn port_checks(device: &RdmaDevice, port: &RdmaPort) -> Vec<Check> {
    let name = format!("{} port {}", device.name, port.number);
    let unknown = "not known";
    let state = port.state.as_deref().unwrap_or(unknown);
    let layer = port.link_layer.as_deref().unwrap_or(unknown);
    let rate = port.rate.as_deref().unwrap_or(unknown);
    let physical = port.physical_state.as_deref().unwrap_or(unknown);
    let why = format!("{state}, link layer {layer}, rate {rate}, physical state {physical}");
    if !port.is_active() {
        let fix = if layer == "InfiniBand" {
            "check the cable, and that a subnet manager runs (`sudo opensm`)".to_owned()
        } else {
            let interface = device.interfaces.first().map_or("INTERFACE", String::as_str);
            format!("check the cable, then `sudo ip link set {interface} up`")
        };
        return vec![GROUP.warn(name, why, fix)];
    }
    vec![GROUP.pass(name, why), gids(device, port, layer)]
}

/// RoCE needs a GID of type RoCE v2; other link layers accept any. The addresses themselves are not
/// printed: a report is often passed on.
fn gids(device: &RdmaDevice, port: &RdmaPort, layer: &str) -> Check {
    let name = format!("{} port {} GIDs", device.name, port.number);
    let wanted = port
        .gids
        .iter()
        .filter(|gid| layer != "Ethernet" || gid.kind.as_deref() == Some("RoCE v2"));
    let found: Vec<String> = wanted.map(|gid| gid.index.to_string()).collect();
    if !found.is_empty() {
        let kind = if layer == "Ethernet" { "RoCE v2" } else { "set" };
        let at = if found.len() == 1 { "index" } else { "indexes" };
        let found = some_of(&found);
        return GROUP
            .pass(name, format!("{kind} at {at} {found}; `warpwire devices` lists addresses"));
    }
    let interface = device.interfaces.first().map_or("INTERFACE", String::as_str);
    let why = match (layer, port.gids.len()) {
        (_, 0) => "no GID is set".to_owned(),
        (_, count) => format!("{count} set, none of type RoCE v2"),
    };
    GROUP.warn(
        name,
        why,
        format!("assign the interface an address: `sudo ip addr add ADDRESS/24 dev {interface}`"),
    )
}

fn dma_buf(device: &RdmaDevice) -> Check {
    let name = format!("{} dma-buf registration", device.name);
    let driver = device.driver.as_deref().unwrap_or("not known");
    match device.supports_dma_buf_mr() {
        Some(true) => {
            GROUP.pass(name, format!("the {driver} driver implements it; not tried here"))
        }
        Some(false) if device.address.is_none() => GROUP
            .skip(name, format!("{driver} is a software driver, which does not accept GPU memory")),
        Some(false) => GROUP.warn(
            name,
            format!("the {driver} driver does not implement it"),
            "use a NIC of the mlx5, efa, irdma, bnxt_re, mana or ionic driver, or `sudo modprobe \
             nvidia-peermem`; otherwise data is staged",
        ),
        None => GROUP.skip(name, "the device's driver is not known"),
    }
}

/// Whether streams and kernels can post to the device directly.
fn direct_queues(system: &System, device: &RdmaDevice) -> Check {
    let name = format!("{} direct queues", device.name);
    let driver = device.driver.as_deref().unwrap_or("not known");
    match (driver, system.mlx5_library()) {
        ("mlx5" | "mlx5_core", Some(library)) => GROUP.pass(
            name,
            format!(
                "{library} exposes its queues; a GPU also needs its doorbell page, which CUDA must \
                 map as I/O memory (not tried here)"
            ),
        ),
        ("mlx5" | "mlx5_core", None) => GROUP.warn(
            name,
            "libmlx5.so.1, which exposes its queues, is not installed",
            "install the provider: `sudo apt install ibverbs-providers`, or `sudo dnf install \
             libibverbs`",
        ),
        (driver, _) => GROUP.skip(
            name,
            format!(
                "the {driver} driver has no ConnectX queues; streams and kernels use the software \
                 HCA"
            ),
        ),
    }
}

fn on_demand_paging(device: &RdmaDevice) -> Check {
    let name = format!("{} on-demand paging", device.name);
    let driver = device.driver.as_deref().unwrap_or("not known");
    match device.supports_odp() {
        Some(true) => GROUP.pass(
            name,
            format!("the {driver} driver implements it; the firmware must support it too"),
        ),
        Some(false) => GROUP.skip(
            name,
            format!("the {driver} driver is not known to implement it; memory is pinned instead"),
        ),
        None => GROUP.skip(name, "the device's driver is not known"),
    }
}
