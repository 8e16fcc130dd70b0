//! The platform: kernel, container, virtual machine, IOMMU.

use std::fmt;

use super::System;

/// The kernel's version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelVersion {
    /// First number of the release.
    pub major: u32,
    /// Second number of the release.
    pub minor: u32,
    /// The full release: `6.1.0-18-amd64`.
    pub release: String,
}

impl KernelVersion {
    /// Whether this kernel is `major.minor` or newer.
    pub fn at_least(&self, major: u32, minor: u32) -> bool {
        (self.major, self.minor) >= (major, minor)
    }
}

/// The container that the program runs in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// `docker`, `podman`, `kubernetes`, …
    pub kind: String,
    /// The file by which it was detected.
    pub evidence: String,
}

/// The hypervisor that the machine runs under.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Virtualization {
    /// The vendor's name according to firmware, or `unnamed`.
    pub vendor: String,
    /// The file by which it was detected.
    pub evidence: String,
}

/// How this kernel uses an IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Iommu {
    /// None is present or in use (in a VM, the host's is not visible).
    None,
    /// DMA uses physical addresses.
    Passthrough,
    /// DMA addresses are translated.
    Translated,
    /// One is present, but its mode is not known.
    Unknown,
}

impl fmt::Display for Iommu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "not in use by this kernel",
            Self::Passthrough => "passthrough",
            Self::Translated => "translating",
            Self::Unknown => "present, mode not known",
        })
    }
}

impl System {
    /// The kernel's version; `None` if it cannot be read or parsed.
    pub fn kernel(&self) -> Option<KernelVersion> {
        parse_release(&self.read("/proc/sys/kernel/osrelease")?)
    }

    /// The container that this runs in, detected by the files that container engines create.
    pub fn container(&self) -> Option<Container> {
        let found = |kind: &str, evidence: &str| {
            Some(Container { kind: kind.to_owned(), evidence: evidence.to_owned() })
        };
        if self.exists("/var/run/secrets/kubernetes.io") {
            return found("kubernetes", "/var/run/secrets/kubernetes.io");
        }
        // A VM created from a container image has the engine's files, but on a disk of its own.
        if !self.root_is_a_disk() {
            for (kind, evidence) in [("docker", "/.dockerenv"), ("podman", "/run/.containerenv")] {
                if self.exists(evidence) {
                    return found(kind, evidence);
                }
            }
            let systemd = "/run/systemd/container";
            if let Some(kind) = self.read(systemd).filter(|kind| !kind.is_empty()) {
                return found(&kind, systemd);
            }
        }
        let groups = self.read("/proc/1/cgroup")?;
        let kind = ["kubepods", "docker", "lxc", "containerd", "libpod"]
            .into_iter()
            .find(|kind| groups.contains(kind))?;
        found(kind, "/proc/1/cgroup")
    }

    /// Whether the root file system is on a block device, rather than a container engine's overlay.
    fn root_is_a_disk(&self) -> bool {
        let mounts = self.read("/proc/self/mountinfo").unwrap_or_default();
        mounts.lines().any(|line| {
            let Some((mount, what)) = line.split_once(" - ") else { return false };
            let mount: Vec<&str> = mount.split(' ').collect();
            let source = what.split(' ').nth(1).unwrap_or_default();
            mount.get(3..5) == Some(&["/", "/"])
                && source.starts_with("/dev/")
                && !source.starts_with("/dev/mapper/docker")
        })
    }

    /// The hypervisor, detected by DMI names and the CPU's `hypervisor` flag; `None` on bare metal.
    pub fn virtualization(&self) -> Option<Virtualization> {
        let product_file = "/sys/class/dmi/id/product_name";
        let product = self.read(product_file).unwrap_or_default();
        for evidence in ["/sys/hypervisor/type", "/sys/class/dmi/id/sys_vendor", product_file] {
            let vendor = self.read(evidence).filter(|name| is_hypervisor(name));
            // The bare-metal instances of clouds have the same vendor name.
            if let Some(vendor) = vendor.filter(|_| !product.contains("metal")) {
                let evidence = evidence.to_owned();
                return Some(Virtualization { vendor, evidence });
            }
        }
        let processors = self.read("/proc/cpuinfo")?;
        let flags = processors.lines().find(|line| line.starts_with("flags"))?;
        let virtual_flag = flags.split_whitespace().any(|flag| flag == "hypervisor");
        virtual_flag.then(|| Virtualization {
            vendor: "unnamed".to_owned(),
            evidence: "/proc/cpuinfo".to_owned(),
        })
    }

    /// The IOMMU mode, from the types of the IOMMU groups, or else from the kernel command line.
    pub fn iommu(&self) -> Iommu {
        let folder = "/sys/kernel/iommu_groups";
        let groups = self.list(folder);
        if groups.is_empty() && self.list("/sys/class/iommu").is_empty() {
            return Iommu::None;
        }
        let types: Vec<String> = groups
            .iter()
            .filter_map(|group| self.read(&format!("{folder}/{group}/type")))
            .collect();
        let command_line = self.read("/proc/cmdline").unwrap_or_default();
        iommu_mode(&types, &command_line)
    }
}

fn parse_release(text: &str) -> Option<KernelVersion> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some(KernelVersion {
        major: numbers.next()?.parse().ok()?,
        minor: numbers.next()?.parse().ok()?,
        release: text.to_owned(),
    })
}

fn is_hypervisor(name: &str) -> bool {
    [
        "QEMU",
        "KVM",
        "VMware",
        "Xen",
        "xen",
        "VirtualBox",
        "innotek",
        "Bochs",
        "Parallels",
        "Amazon EC2",
        "Google Compute Engine",
        "Virtual Machine",
        "OpenStack",
        "Firecracker",
    ]
    .iter()
    .any(|hypervisor| name.contains(hypervisor))
}

fn iommu_mode(group_types: &[String], command_line: &str) -> Iommu {
    if group_types.iter().any(|kind| kind.starts_with("DMA")) {
        return Iommu::Translated;
    }
    if group_types.iter().any(|kind| kind == "identity") {
        return Iommu::Passthrough;
    }
    let has_option = |option: &str| command_line.split_whitespace().any(|word| word == option);
    if has_option("iommu=pt") || has_option("iommu.passthrough=1") {
        return Iommu::Passthrough;
    }
    Iommu::Unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_are_compared() {
        let kernel = parse_release("6.18.44-fc-v445-gpu").unwrap();
        assert!(kernel.at_least(5, 12) && kernel.at_least(6, 18) && !kernel.at_least(6, 19));
        assert!(!parse_release("5.4.0").unwrap().at_least(5, 12));
        for bad in ["", "six", ".5", "99999999999.1", "6"] {
            assert_eq!(parse_release(bad), None, "{bad}");
        }
    }

    #[test]
    fn iommu_modes_are_detected() {
        let types = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        assert_eq!(iommu_mode(&types(&["identity", "DMA-FQ"]), ""), Iommu::Translated);
        assert_eq!(iommu_mode(&types(&["identity"]), ""), Iommu::Passthrough);
        assert_eq!(iommu_mode(&[], "quiet iommu=pt"), Iommu::Passthrough);
        assert_eq!(iommu_mode(&types(&["\u{fffd}"]), "xiommu=pt"), Iommu::Unknown);
    }

    #[test]
    fn hardware_vendors_are_not_hypervisors() {
        assert!(is_hypervisor("QEMU") && is_hypervisor("Amazon EC2"));
        assert!(!is_hypervisor("Supermicro") && !is_hypervisor("") && !is_hypervisor("NVIDIA"));
    }
}
