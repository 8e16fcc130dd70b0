//! Results of the probes run on a machine, in a form that can be recorded as `probes.json`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{probe_cuda, probe_host, probe_libraries};
use warpwire::error::{Error, Kind, Result};
use warpwire::host::{GpuLinks, NvLinkPeer, PciAddress, System, gpu_links};

/// The file with the probe results of a recorded machine.
pub(super) const RECORDED: &str = "/probes.json";

/// The result of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ProbeOutcome {
    /// The probe succeeded.
    Worked,
    /// The probe failed.
    Failed {
        /// The reason reported by the library or the kernel.
        why: String,
    },
    /// The probe was not run.
    NotTried {
        /// Why it was not run.
        why: String,
    },
}

impl ProbeOutcome {
    /// [`Failed`](Self::Failed) with this reason.
    pub fn failed(why: impl Into<String>) -> Self {
        Self::Failed { why: why.into() }
    }

    /// [`NotTried`](Self::NotTried) with this reason.
    pub fn not_tried(why: impl Into<String>) -> Self {
        Self::NotTried { why: why.into() }
    }

    /// Whether the probe succeeded.
    pub fn worked(&self) -> bool {
        *self == Self::Worked
    }

    /// A predicate for a sentence: `worked`, `failed (…)`, `was not tried (…)`.
    pub fn describe(&self) -> String {
        match self {
            Self::Worked => "worked".to_owned(),
            Self::Failed { why } => format!("failed ({why})"),
            Self::NotTried { why } => format!("was not tried ({why})"),
        }
    }
}

impl Default for ProbeOutcome {
    fn default() -> Self {
        Self::not_tried("not recorded")
    }
}

/// The results of all probes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Probes {
    /// CUDA, and each of its devices.
    pub cuda: CudaProbe,
    /// UDP over loopback.
    pub udp: UdpProbe,
    /// `memfd_create`, on which the simulated GPU's memory is based.
    pub memfd: ProbeOutcome,
    /// The variables that decide which libraries programs load, as far as they are set.
    pub environment: BTreeMap<String, String>,
    /// The libraries that programs with this environment would load, by the name that they ask for;
    /// `None` if a recording does not have them.
    pub libraries: Option<BTreeMap<String, LibraryProbe>>,
    /// UCX's transport modules: `ib`, `cuda`, …
    pub ucx_modules: Vec<String>,
    /// NVLinks.
    pub nvml: NvmlProbe,
}

/// A library as the dynamic linker finds it; it is not loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LibraryProbe {
    /// The file that is opened.
    pub path: String,
    /// The same with symlinks resolved, whose name often has the version.
    pub file: String,
    /// Where the linker found it: `LD_LIBRARY_PATH`, `ld.so.cache`, …
    pub by: String,
    /// The version, if the library is this project's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warpwire: Option<String>,
}

/// What NVIDIA's management library says about NVLinks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NvmlProbe {
    /// Loading and using `libnvidia-ml.so.1`.
    pub library: ProbeOutcome,
    /// The GPUs that it lists.
    pub gpus: Vec<NvmlGpu>,
}

/// The NVLinks of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NvmlGpu {
    /// PCI address.
    pub pci: Option<PciAddress>,
    /// The NUMA node that its memory is, where CPUs and GPUs share memory.
    pub numa_node: Option<u32>,
    /// Active links, counted by what they lead to: a GPU's PCI address, or `switch`.
    pub nvlinks: BTreeMap<String, u32>,
}

/// Stands for an NVSwitch in [`NvmlGpu::nvlinks`].
pub(super) const NVSWITCH: &str = "switch";

impl NvmlProbe {
    /// Asks the library on the running machine. Without an NVIDIA GPU it is not loaded.
    fn run(system: &System) -> Self {
        if system.nvidia_gpus().is_empty() {
            let library = ProbeOutcome::not_tried("there is no NVIDIA GPU");
            return Self { library, gpus: Vec::new() };
        }
        match gpu_links() {
            Ok(gpus) => Self {
                library: ProbeOutcome::Worked,
                gpus: gpus.into_iter().map(NvmlGpu::from).collect(),
            },
            Err(error) => Self { library: ProbeOutcome::failed(error.reason()), gpus: Vec::new() },
        }
    }

    /// Asks the library on the running machine, or reads the answer from a recorded one.
    ///
    /// # Errors
    /// If a recorded machine's `probes.json` is malformed.
    pub fn of(system: &System) -> Result<Self> {
        if system.is_live() { Ok(Self::run(system)) } else { Ok(Probes::recorded(system)?.nvml) }
    }
}

impl From<GpuLinks> for NvmlGpu {
    fn from(gpu: GpuLinks) -> Self {
        let mut nvlinks = BTreeMap::new();
        for peer in gpu.links {
            let to = match peer {
                NvLinkPeer::Gpu(address) => address.to_string(),
                _ => NVSWITCH.to_owned(),
            };
            *nvlinks.entry(to).or_insert(0) += 1;
        }
        Self { pci: Some(gpu.address), numa_node: gpu.numa_node, nvlinks }
    }
}

/// Results of probing the CUDA driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CudaProbe {
    /// Loading `libcuda.so.1` and its symbols; a failure names the library or symbol.
    pub library: ProbeOutcome,
    /// `cuInit`.
    pub init: ProbeOutcome,
    /// `cuDriverGetVersion`: 13000 is 13.0.
    pub driver_api: Option<u32>,
    /// All devices that CUDA lists.
    pub devices: Vec<CudaDeviceProbe>,
}

/// Attributes of one CUDA device, and the results of probing it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CudaDeviceProbe {
    /// CUDA device ordinal.
    pub ordinal: u32,
    /// Marketing name.
    pub name: String,
    /// PCI address.
    pub pci: Option<PciAddress>,
    /// Total memory in bytes.
    pub total_memory: u64,
    /// Attributes reported by CUDA.
    pub attributes: CudaAttributes,
    /// Allocating 64 KiB.
    pub alloc_64k: ProbeOutcome,
    /// Exporting the 64 KiB as a dma-buf.
    pub dmabuf_export: ProbeOutcome,
    /// Mapping the exported dma-buf with `mmap`.
    pub dmabuf_mmap: ProbeOutcome,
    /// Opening a CPU window to the 64 KiB, by any path.
    pub window: ProbeOutcome,
    /// The path that the window uses: `resource manager`.
    pub window_path: Option<String>,
    /// The better paths, and why each is unavailable: `dma-buf mmap: …`.
    pub window_refused: Vec<String>,
}

/// Device attributes; `None` if the driver does not know the attribute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CudaAttributes {
    /// DMA_BUF_SUPPORTED.
    pub dma_buf_supported: Option<bool>,
    /// GPU_DIRECT_RDMA_SUPPORTED.
    pub gpu_direct_rdma_supported: Option<bool>,
    /// GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED.
    pub gpu_direct_rdma_with_vmm_supported: Option<bool>,
    /// GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: bit 0 host call, bit 1 stream operation.
    pub flush_writes_options: Option<u32>,
    /// GPU_DIRECT_RDMA_WRITES_ORDERING: 0 none, 100 owner, 200 all devices.
    pub writes_ordering: Option<u32>,
    /// CAN_USE_64_BIT_STREAM_MEM_OPS (v2 API).
    pub stream_mem_ops_64_bit: Option<bool>,
    /// CAN_USE_STREAM_WAIT_VALUE_NOR (v2 API).
    pub stream_wait_value_nor: Option<bool>,
    /// HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED.
    pub posix_fd_handles: Option<bool>,
    /// MEMORY_POOLS_SUPPORTED.
    pub memory_pools: Option<bool>,
}

/// Results of probing UDP over the IPv4 loopback.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UdpProbe {
    /// Sending and receiving a datagram.
    pub loopback: ProbeOutcome,
    /// Generic segmentation offload: one send call for several datagrams.
    pub gso: ProbeOutcome,
    /// Generic receive offload: one receive call returns several datagrams.
    pub gro: ProbeOutcome,
}

impl Probes {
    /// Runs all probes on the running machine. Takes some 10 ms without a GPU.
    pub fn run() -> Self {
        let system = System::live();
        let environment = probe_libraries::environment();
        let libraries = probe_libraries::libraries(&system, &environment);
        Self {
            cuda: probe_cuda::probe(),
            udp: probe_host::udp(),
            memfd: probe_host::memfd(),
            ucx_modules: probe_libraries::ucx_modules(&system, &libraries),
            environment,
            libraries: Some(libraries),
            nvml: NvmlProbe::run(&system),
        }
    }

    /// Runs all probes on the running machine, or reads the results of a recorded one.
    ///
    /// # Errors
    /// As for [`recorded`](Self::recorded).
    pub fn of(system: &System) -> Result<Self> {
        if system.is_live() { Ok(Self::run()) } else { Self::recorded(system) }
    }

    /// Reads the results of a recorded machine from `probes.json` at its root. Without that file,
    /// all probes count as not run.
    ///
    /// # Errors
    /// If the file does not deserialize to this type.
    pub fn recorded(system: &System) -> Result<Self> {
        let Some(text) = system.read(RECORDED) else {
            return Ok(Self::nothing_tried("recorded machine without probes.json"));
        };
        serde_json::from_str(&text).map_err(|source| {
            Error::new(Kind::Malformed, "read the recorded machine's probes.json")
                .why(format!("line {}: {source}", source.line()))
                .fix("correct that line, or delete the file to go without probes")
        })
    }

    fn nothing_tried(why: &str) -> Self {
        let not_tried = || ProbeOutcome::not_tried(why);
        Self {
            cuda: CudaProbe { library: not_tried(), init: not_tried(), ..CudaProbe::default() },
            udp: UdpProbe { loopback: not_tried(), gso: not_tried(), gro: not_tried() },
            memfd: not_tried(),
            nvml: NvmlProbe { library: not_tried(), gpus: Vec::new() },
            ..Self::default()
        }
    }
}

impl CudaProbe {
    /// The devices on which memory can be allocated.
    pub fn working_devices(&self) -> impl Iterator<Item = &CudaDeviceProbe> {
        self.devices.iter().filter(|device| device.alloc_64k.worked())
    }

    /// The driver's CUDA version: `13.0`.
    pub fn version(&self) -> Option<String> {
        let number = self.driver_api?;
        Some(format!("{}.{}", number / 1000, number % 1000 / 10))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_round_trip_through_json() {
        let mut probes = Probes::nothing_tried("a test");
        probes.cuda.library = ProbeOutcome::Worked;
        probes.cuda.driver_api = Some(13_010);
        probes.cuda.devices.push(CudaDeviceProbe {
            pci: Some("0000:00:06.0".parse().unwrap()),
            dmabuf_mmap: ProbeOutcome::failed("errno 524"),
            ..CudaDeviceProbe::default()
        });
        let text = serde_json::to_string_pretty(&probes).unwrap();
        assert_eq!(serde_json::from_str::<Probes>(&text).unwrap(), probes);
        assert_eq!(probes.cuda.version().as_deref(), Some("13.1"));
        assert_eq!(probes.cuda.working_devices().count(), 0);
    }

    #[test]
    fn the_error_for_a_malformed_recording_has_file_line_and_fix() {
        for (text, line) in [
            ("{\n\"memfd\": \"maybe\"}", "line 2"),
            ("{\"memfd\":\n", "line 1"),
            ("{\n\n\"mem\": 1}", "line 3"),
            ("\u{fffd}", "line 1"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("probes.json"), text).unwrap();
            let system = System::at(folder.path()).unwrap();
            let error = Probes::recorded(&system).unwrap_err();
            assert_eq!(error.kind(), &Kind::Malformed);
            let message = error.to_string();
            for part in ["probes.json", line, "correct that line"] {
                assert!(message.contains(part), "{message}");
            }
        }
    }

    #[test]
    fn the_running_machine_can_be_probed() {
        let probes = Probes::run();
        assert!(probes.memfd.worked(), "{:?}", probes.memfd);
        assert!(probes.udp.loopback.worked(), "{:?}", probes.udp);
    }
}
