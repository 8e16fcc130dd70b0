//! RDMA devices, from `/sys/class/infiniband`.

use super::{PciAddress, System};

/// An RDMA device, hardware or software.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaDevice {
    /// Device name in verbs: `mlx5_0`.
    pub name: String,
    /// The RDMA driver's name in rdma-core: `mlx5`, `efa`, `irdma`, `bnxt_re`, `rxe`, …; the PCI
    /// driver's name if that is not known.
    pub driver: Option<String>,
    /// Node type: `CA`, `RNIC`, …
    pub node_type: Option<String>,
    /// Firmware version.
    pub firmware: Option<String>,
    /// The vendor's board identifier.
    pub board_id: Option<String>,
    /// The ports, in order of their numbers.
    pub ports: Vec<RdmaPort>,
    /// The PCI function behind it; `None` for a software device.
    pub address: Option<PciAddress>,
    /// The device node that programs open: `/dev/infiniband/uverbs0`.
    pub uverbs: Option<String>,
    /// Network interfaces of the same PCI function.
    pub interfaces: Vec<String>,
}

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaPort {
    /// Port number, from 1.
    pub number: u32,
    /// Logical state: `ACTIVE`, `DOWN`, `INIT`, …
    pub state: Option<String>,
    /// Physical state: `LinkUp`, `Disabled`, `Polling`, …
    pub physical_state: Option<String>,
    /// `InfiniBand`, `Ethernet`, or `Unspecified` (EFA).
    pub link_layer: Option<String>,
    /// Rate in the kernel's format: `400 Gb/sec (4X NDR)`.
    pub rate: Option<String>,
    /// The GIDs that are not zero.
    pub gids: Vec<Gid>,
}

/// An entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Index in the port's GID table.
    pub index: u32,
    /// The GID, written like an IPv6 address.
    pub gid: String,
    /// GID type: `RoCE v2`, `IB/RoCE v1`, …
    pub kind: Option<String>,
}

impl RdmaPort {
    /// Whether the logical state is `ACTIVE`, so that the port can carry traffic.
    pub fn is_active(&self) -> bool {
        self.state.as_deref() == Some("ACTIVE")
    }
}

impl RdmaDevice {
    /// Whether any port is active.
    pub fn is_active(&self) -> bool {
        self.ports.iter().any(RdmaPort::is_active)
    }

    /// Whether the driver implements registration of dma-bufs; `None` if the driver is not known.
    ///
    /// According to rdma-core and the kernel, mlx5, efa, irdma, bnxt_re, mana and ionic do.
    pub fn supports_dma_buf_mr(&self) -> Option<bool> {
        let driver = self.driver.as_deref()?;
        Some(["mlx5", "efa", "irdma", "bnxt_re", "mana", "ionic"].contains(&driver))
    }

    /// Whether the driver implements on-demand paging, as mlx5 does (the NIC's firmware must
    /// support it too); `None` if the driver is not known.
    pub fn supports_odp(&self) -> Option<bool> {
        Some(self.driver.as_deref()? == "mlx5")
    }
}

impl System {
    /// All RDMA devices, hardware and software, sorted by name.
    pub fn rdma_devices(&self) -> Vec<RdmaDevice> {
        self.list("/sys/class/infiniband").iter().map(|name| self.rdma_device(name)).collect()
    }

    fn rdma_device(&self, name: &str) -> RdmaDevice {
        let path = format!("/sys/class/infiniband/{name}");
        let text =
            |file: &str| self.read(&format!("{path}/{file}")).filter(|text| !text.is_empty());
        RdmaDevice {
            name: name.to_owned(),
            driver: self.rdma_driver(name),
            node_type: text("node_type").map(|text| strip_state_number(&text)),
            firmware: text("fw_ver"),
            board_id: text("board_id"),
            ports: self.rdma_ports(&path),
            address: self.pci_parent(&format!("{path}/device")),
            uverbs: self.uverbs_node(name),
            interfaces: self.list(&format!("{path}/device/net")),
        }
    }

    /// The driver's name in rdma-core, without reading the rest of the device.
    pub fn rdma_driver(&self, name: &str) -> Option<String> {
        let path = format!("/sys/class/infiniband/{name}");
        if self.pci_parent(&format!("{path}/device")).is_some() {
            let driver = self.link_name(&format!("{path}/device/driver"))?;
            return Some(verbs_driver(&driver).to_owned());
        }
        let node_type =
            self.read(&format!("{path}/node_type")).map(|text| strip_state_number(&text));
        self.software_driver(&path, node_type.as_deref())
    }

    /// Software devices have no driver link. Only rxe has a `parent` file (its network interface);
    /// of the others, siw is the one with node type RNIC.
    fn software_driver(&self, path: &str, node_type: Option<&str>) -> Option<String> {
        let is_virtual =
            self.real_path(path).is_some_and(|real| real.starts_with("/sys/devices/virtual/"));
        match (is_virtual, self.exists(&format!("{path}/parent"))) {
            (true, true) => Some("rxe".to_owned()),
            (true, false) if node_type == Some("RNIC") => Some("siw".to_owned()),
            _ => None,
        }
    }

    fn rdma_ports(&self, device: &str) -> Vec<RdmaPort> {
        let mut ports = Vec::new();
        for name in self.list(&format!("{device}/ports")) {
            let Ok(number) = name.parse() else { continue };
            let path = format!("{device}/ports/{name}");
            let text =
                |file: &str| self.read(&format!("{path}/{file}")).filter(|text| !text.is_empty());
            ports.push(RdmaPort {
                number,
                state: text("state").map(|text| strip_state_number(&text)),
                physical_state: text("phys_state").map(|text| strip_state_number(&text)),
                link_layer: text("link_layer"),
                rate: text("rate"),
                gids: self.gids(&path),
            });
        }
        ports
    }

    fn gids(&self, port: &str) -> Vec<Gid> {
        let indexes = self.list(&format!("{port}/gids"));
        indexes
            .iter()
            .filter_map(|index| {
                let gid = self.read(&format!("{port}/gids/{index}"))?;
                is_set(&gid).then_some(())?;
                Some(Gid {
                    index: index.parse().ok()?,
                    gid,
                    kind: self.read(&format!("{port}/gid_attrs/types/{index}")),
                })
            })
            .collect()
    }

    fn uverbs_node(&self, device: &str) -> Option<String> {
        let folder = "/sys/class/infiniband_verbs";
        let node = self
            .list(folder)
            .into_iter()
            .find(|node| self.read(&format!("{folder}/{node}/ibdev")).as_deref() == Some(device))?;
        Some(format!("/dev/infiniband/{node}"))
    }
}

/// rdma-core's name for the RDMA driver on top of a PCI driver.
fn verbs_driver(pci_driver: &str) -> &str {
    match pci_driver {
        "mlx5_core" => "mlx5",
        "mlx4_core" => "mlx4",
        "ice" | "i40e" | "idpf" => "irdma",
        "bnxt_en" => "bnxt_re",
        other => other,
    }
}

/// `ACTIVE` from `4: ACTIVE`.
fn strip_state_number(text: &str) -> String {
    let name = text.split_once(':').map_or(text, |(_, name)| name);
    name.trim().to_owned()
}

/// Whether the GID is valid and not zero; unused entries of the table are zero.
fn is_set(gid: &str) -> bool {
    gid.parse::<std::net::Ipv6Addr>().is_ok_and(|address| !address.is_unspecified())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_numbers_are_stripped() {
        assert_eq!(strip_state_number("4: ACTIVE"), "ACTIVE");
        assert_eq!(strip_state_number("5: LinkUp"), "LinkUp");
        assert_eq!(strip_state_number("odd"), "odd");
        assert_eq!(strip_state_number(":"), "");
    }

    #[test]
    fn zero_and_malformed_gids_are_skipped() {
        assert!(is_set("fe80:0000:0000:0000:0a00:27ff:fe00:0001"));
        assert!(is_set("0000:0000:0000:0000:0000:ffff:0a00:0001"));
        for unset in ["0000:0000:0000:0000:0000:0000:0000:0000", "", "garbage", "10.0.0.1"] {
            assert!(!is_set(unset), "{unset}");
        }
    }

    #[test]
    fn capabilities_depend_on_the_driver() {
        let mut device = RdmaDevice {
            name: "x".into(),
            driver: Some(verbs_driver("mlx5_core").into()),
            node_type: None,
            firmware: None,
            board_id: None,
            ports: vec![],
            address: None,
            uverbs: None,
            interfaces: vec![],
        };
        assert_eq!(device.supports_dma_buf_mr(), Some(true));
        assert_eq!(device.supports_odp(), Some(true));
        device.driver = Some("rxe".into());
        assert_eq!(device.supports_dma_buf_mr(), Some(false));
        device.driver = None;
        assert_eq!(device.supports_dma_buf_mr(), None);
        assert!(!device.is_active());
    }

    #[test]
    fn software_devices_are_distinguished() {
        let folder = tempfile::tempdir().unwrap();
        let class = folder.path().join("sys/class/infiniband");
        std::fs::create_dir_all(&class).unwrap();
        for (name, file, text) in [("rxe0", "parent", "eth0"), ("siw0", "node_type", "4: RNIC")] {
            let real = folder.path().join("sys/devices/virtual/infiniband").join(name);
            std::fs::create_dir_all(&real).unwrap();
            std::fs::write(real.join(file), text).unwrap();
            let target = format!("../../devices/virtual/infiniband/{name}");
            std::os::unix::fs::symlink(target, class.join(name)).unwrap();
        }
        std::fs::create_dir(class.join("odd")).unwrap();
        let devices = System::at(folder.path()).unwrap().rdma_devices();
        let drivers: Vec<_> = devices.iter().map(|d| d.driver.as_deref()).collect();
        assert_eq!(drivers, [None, Some("rxe"), Some("siw")]);
        assert!(devices.iter().all(|device| device.address.is_none()));
    }
}
