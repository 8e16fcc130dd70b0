//! Network interfaces, from `/sys/class/net`.

use super::{PciAddress, System};

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetInterface {
    /// Interface name: `eth0`.
    pub name: String,
    /// Maximum transmission unit in bytes.
    pub mtu: Option<u32>,
    /// Operational state: `up`, `down`, or `unknown` (loopback).
    pub state: Option<String>,
    /// The PCI function behind it; `None` for loopback, bridges, tunnels and the like.
    pub address: Option<PciAddress>,
    /// The PCI function's NUMA node, if known.
    pub numa_node: Option<u32>,
}

impl NetInterface {
    /// Whether its operational state is `up`.
    pub fn is_up(&self) -> bool {
        self.state.as_deref() == Some("up")
    }
}

impl System {
    /// All network interfaces, sorted by name.
    pub fn net_interfaces(&self) -> Vec<NetInterface> {
        self.list("/sys/class/net")
            .into_iter()
            // The bonding driver creates a plain file in this directory.
            .filter(|name| self.exists(&format!("/sys/class/net/{name}/mtu")))
            .map(|name| {
                let path = format!("/sys/class/net/{name}");
                let address = self.pci_parent(&path);
                NetInterface {
                    mtu: self.read(&format!("{path}/mtu")).and_then(|mtu| mtu.parse().ok()),
                    state: self.read(&format!("{path}/operstate")),
                    address,
                    numa_node: address.and_then(|address| self.numa_node_of(&address)),
                    name,
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn interfaces_have_their_pci_function_and_malformed_files_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let real = root.join("sys/devices/pci0000:00/0000:00:03.0/virtio2/net/eth0");
        fs::create_dir_all(&real).unwrap();
        fs::write(real.join("mtu"), "1400\n").unwrap();
        fs::write(real.join("operstate"), "up\n").unwrap();
        let class = root.join("sys/class/net");
        fs::create_dir_all(class.join("odd")).unwrap();
        symlink("../../devices/pci0000:00/0000:00:03.0/virtio2/net/eth0", class.join("eth0"))
            .unwrap();
        fs::write(class.join("odd/mtu"), "large").unwrap();
        fs::write(class.join("bonding_masters"), "").unwrap();

        let interfaces = System::at(root).unwrap().net_interfaces();
        let names: Vec<_> = interfaces.iter().map(|i| i.name.as_str()).collect();
        assert_eq!(names, ["eth0", "odd"]);
        assert_eq!(interfaces[0].address, Some("0000:00:03.0".parse().unwrap()));
        assert_eq!(interfaces[0].mtu, Some(1400));
        assert!(interfaces[0].is_up());
        assert_eq!((interfaces[1].mtu, interfaces[1].address), (None, None));
    }
}
