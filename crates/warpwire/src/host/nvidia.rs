//! NVIDIA's kernel driver: version, parameters and GPUs, from `/proc/driver/nvidia`.

use super::{PciAddress, System};

/// Version of the loaded kernel driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverVersion {
    /// The full version: `580.159.04`.
    pub version: String,
    /// The release branch: 580.
    pub major: u32,
    /// Whether these are the open kernel modules rather than the proprietary ones.
    pub open: bool,
}

/// Parameters of the kernel module that RDMA from the GPU depends on; `None` if the driver does not
/// list one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverParams {
    /// `EnableStreamMemOPs`: stream memory operations v1, off by default before R515.
    pub enable_stream_mem_ops: Option<bool>,
    /// `PeerMappingOverride`: whether unprivileged users may map a NIC's doorbell page for the GPU.
    pub peer_mapping_override: Option<bool>,
}

/// One GPU, from its `information` file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInformation {
    /// PCI address.
    pub address: PciAddress,
    /// Marketing name: `NVIDIA H200`.
    pub model: Option<String>,
    /// `GPU-…`, unique and stable across reboots.
    pub uuid: Option<String>,
    /// N in `/dev/nvidiaN`.
    pub minor: Option<u32>,
}

impl System {
    /// Version of the loaded NVIDIA driver; `None` if none is loaded, or its text is malformed.
    pub fn nvidia_driver(&self) -> Option<DriverVersion> {
        parse_version(&self.read("/proc/driver/nvidia/version")?)
    }

    /// Parameters of the loaded NVIDIA kernel module.
    pub fn nvidia_params(&self) -> DriverParams {
        parse_params(&self.read("/proc/driver/nvidia/params").unwrap_or_default())
    }

    /// The GPUs that the driver is bound to, sorted by PCI address.
    pub fn nvidia_information(&self) -> Vec<GpuInformation> {
        let folder = "/proc/driver/nvidia/gpus";
        let mut gpus: Vec<GpuInformation> = self
            .list(folder)
            .iter()
            .filter_map(|name| {
                let text = self.read(&format!("{folder}/{name}/information"))?;
                Some(parse_information(name.parse().ok()?, &text))
            })
            .collect();
        gpus.sort_by_key(|gpu| gpu.address);
        gpus
    }

    /// Whether a kernel module is loaded (or built in and known to sysfs).
    /// Dashes and underscores are equivalent, as in modprobe.
    pub fn has_module(&self, name: &str) -> bool {
        let name = name.replace('-', "_");
        let listed = self.read("/proc/modules").unwrap_or_default();
        let loaded = listed.lines().any(|line| line.split_whitespace().next() == Some(&name));
        loaded || self.exists(&format!("/sys/module/{name}"))
    }
}

fn parse_version(text: &str) -> Option<DriverVersion> {
    let line = text.lines().find(|line| line.starts_with("NVRM version:"))?;
    let version = line.split_whitespace().find(|word| looks_like_version(word))?;
    Some(DriverVersion {
        version: version.to_owned(),
        major: version.split('.').next()?.parse().ok()?,
        open: line.contains("Open Kernel Module"),
    })
}

/// Whether the word is numbers separated by dots, unlike `x86_64` or a build date.
fn looks_like_version(word: &str) -> bool {
    let parts: Vec<&str> = word.split('.').collect();
    parts.len() >= 2 && parts.iter().all(|part| part.parse::<u32>().is_ok())
}

fn parse_params(text: &str) -> DriverParams {
    let value_of = |key: &str| {
        text.lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| name.trim() == key)
            .map(|(_, value)| value.trim().trim_matches('"').to_owned())
    };
    let switch = |value: String| value.trim().parse::<u32>().ok().map(|number| number != 0);
    DriverParams {
        enable_stream_mem_ops: value_of("EnableStreamMemOPs").and_then(switch),
        peer_mapping_override: value_of("RegistryDwords").and_then(|dwords| {
            let entry = dwords
                .split(';')
                .filter_map(|entry| entry.split_once('='))
                .find(|(name, _)| name.trim() == "PeerMappingOverride");
            entry.map_or(Some(false), |(_, value)| switch(value.to_owned()))
        }),
    }
}

fn parse_information(address: PciAddress, text: &str) -> GpuInformation {
    let value_of = |key: &str| {
        text.lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| name.trim() == key)
            .map(|(_, value)| value.trim().to_owned())
            .filter(|value| !value.is_empty())
    };
    GpuInformation {
        address,
        model: value_of("Model"),
        uuid: value_of("GPU UUID"),
        minor: value_of("Device Minor").and_then(|minor| minor.parse().ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_and_proprietary_drivers_are_distinguished() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  \
                    Release Build  (nixbld@)\nGCC version:  gcc version 15.3.0 (GCC)";
        let version = parse_version(open).unwrap();
        assert_eq!(
            (version.version.as_str(), version.major, version.open),
            ("580.159.04", 580, true)
        );
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  \
                      Sun May 12 19:39:15 UTC 2024";
        let version = parse_version(closed).unwrap();
        assert_eq!((version.major, version.open), (535, false));
    }

    #[test]
    fn malformed_versions_are_rejected() {
        for text in [
            "",
            "GCC version:  gcc version 15.3.0 (GCC)",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module",
            "NVRM version: 99999999999999.1",
            "NVRM version: 1. .1",
            "\u{fffd}\u{fffd}",
        ] {
            assert_eq!(parse_version(text), None, "{text}");
        }
    }

    #[test]
    fn parameters_are_parsed() {
        let off = parse_params(
            "EnableStreamMemOPs: 0\nRegistryDwords: \"\"\nRegistryDwordsPerDevice: \"\"",
        );
        assert_eq!(off.enable_stream_mem_ops, Some(false));
        assert_eq!(off.peer_mapping_override, Some(false));
        let on = parse_params(
            "EnableStreamMemOPs: 1\nRegistryDwords: \"RMForce=2;PeerMappingOverride=1;\"",
        );
        assert_eq!(on.enable_stream_mem_ops, Some(true));
        assert_eq!(on.peer_mapping_override, Some(true));
    }

    #[test]
    fn malformed_parameters_are_unknown() {
        for text in ["", "EnableStreamMemOPs", "EnableStreamMemOPs: maybe", ":::"] {
            assert_eq!(parse_params(text), DriverParams::default(), "{text}");
        }
        let odd = parse_params("RegistryDwords: \"PeerMappingOverride=yes\"");
        assert_eq!(odd.peer_mapping_override, None);
    }

    #[test]
    fn gpu_information_is_parsed() {
        let address: PciAddress = "0000:00:06.0".parse().unwrap();
        let text = "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-cd0e\nDevice Minor: \t 3\n";
        let gpu = parse_information(address, text);
        assert_eq!(gpu.model.as_deref(), Some("NVIDIA H200"));
        assert_eq!(gpu.minor, Some(3));
        let bad = parse_information(address, "Model:\nDevice Minor: -1\nnonsense");
        assert_eq!((bad.model, bad.uuid, bad.minor), (None, None, None));
    }
}
