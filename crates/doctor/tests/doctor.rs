//! Verdicts, decisive checks and topology of recorded machines. Each good case is repeated with one
//! thing broken.

// Helpers may panic as tests do; clippy exempts only functions marked as tests.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use support::{MACHINES, Machine};
use testkit::Effort;
use warpwire_doctor::{Answer, Check, CheckStatus, Evidence, Report};

fn check<'a>(report: &'a Report, name: &str) -> &'a Check {
    let found = report.checks.iter().find(|check| check.name == name);
    found.unwrap_or_else(|| panic!("no check {name:?} in\n{}", report.to_text(false)))
}

/// Asserts a check's status, and that its reason or fix contains `words`.
fn expect(report: &Report, name: &str, status: CheckStatus, words: &str) {
    let check = check(report, name);
    assert_eq!(check.status, status, "{check:?}");
    let text = format!("{} — {}", check.why, check.fix.clone().unwrap_or_default());
    assert!(text.contains(words), "{words:?} is not in {text:?}");
}

fn verdicts(report: &Report) -> String {
    let text = report.to_text(false);
    let (_, verdicts) = text.split_once("Verdicts\n").unwrap();
    verdicts.to_owned()
}

#[test]
fn no_gpu() {
    let report = Machine::recorded("no-gpu").report();
    insta::assert_snapshot!(verdicts(&report), @r#"
    GPU: no, no CUDA device: there is no NVIDIA GPU on the PCI buses
    CPU windows: no, there is no GPU to map (simulated GPU memory is always mapped)
    GPU memory registration: no, there is no GPU
    hardware RDMA: no, because there is no RDMA device
    stream-ordered operations: partly, on the simulated GPU only; no CUDA device: loading libcuda.so.1 failed (libcuda.so.1 not found)
    software RDMA over UDP: yes, with segmentation and receive offload
    simulated GPU: yes, its memory can be created (memfd_create worked)
    "#);
    expect(&report, "NVIDIA GPU", CheckStatus::Skip, "no NVIDIA display controller");
    expect(&report, "CUDA driver library", CheckStatus::Skip, "libcuda.so.1 not found");
    expect(&report, "locked memory", CheckStatus::Skip, "8 MiB");
    expect(
        &report,
        "net.core.rmem_max",
        CheckStatus::Warn,
        "sudo sysctl net.core.rmem_max=4194304",
    );
    expect(&report, "net.core.wmem_max", CheckStatus::Pass, "4 MiB");
    expect(&report, "eth0 MTU", CheckStatus::Warn, "sudo ip link set eth0 mtu 9000");
    // A VM created from a container image has its marker file, but is not a container.
    expect(&report, "container", CheckStatus::Pass, "none detected");
    expect(&report, "virtual machine", CheckStatus::Pass, "/proc/cpuinfo");
    assert!(report.usable());
}

#[test]
fn no_gpu_and_no_memfd_is_unusable() {
    let machine = Machine::recorded("no-gpu");
    let refused = r#"{"failed": {"why": "Operation not permitted (os error 1)"}}"#;
    machine.write(
        "/probes.json",
        &format!(r#"{{"memfd": {refused}, "udp": {{"loopback": {refused}}}}}"#),
    );
    let report = machine.report();
    assert!(!report.usable());
    assert_eq!(report.answer("simulated GPU"), Some(Answer::No));
    assert_eq!(report.answer("software RDMA over UDP"), Some(Answer::No));
    expect(&report, "shareable anonymous memory", CheckStatus::Fail, "seccomp");
}

#[test]
fn h200_without_a_nic() {
    let report = Machine::recorded("h200-no-nic").report();
    insta::assert_snapshot!(verdicts(&report), @r#"
    GPU: yes, NVIDIA H200 through CUDA 13.0
    CPU windows: yes, through the resource manager
    GPU memory registration: partly, dma-buf export works, but there is nothing to register with: there is no RDMA device
    hardware RDMA: no, because there is no RDMA device
    stream-ordered operations: yes, CUDA offers 32- and 64-bit stream memory operations
    software RDMA over UDP: yes, with segmentation and receive offload
    simulated GPU: yes, its memory can be created (memfd_create worked)
    "#);
    expect(&report, "NVIDIA driver", CheckStatus::Pass, "580.159.04");
    expect(&report, "kernel modules", CheckStatus::Pass, "open");
    expect(&report, "CUDA driver version", CheckStatus::Pass, "13.0");
    expect(&report, "0000:00:06.0 BAR1", CheckStatus::Pass, "256 GiB, for 139.8 GiB");
    expect(
        &report,
        "cuda:0 CPU window",
        CheckStatus::Pass,
        "through the resource manager; not through dma-buf",
    );
    expect(&report, "cuda:0 CPU window", CheckStatus::Pass, "R610 (CUDA 13.3)");
    expect(&report, "resource manager", CheckStatus::Pass, "a mapping worked");
    expect(&report, "cuda:0 dma-buf mmap", CheckStatus::Skip, "errno 524");
    expect(&report, "/dev/gdrdrv", CheckStatus::Skip, "not needed");
    expect(&report, "cuda:0 GPUDirect RDMA with VMM", CheckStatus::Pass, "cuMemCreate");
    expect(&report, "libibverbs", CheckStatus::Pass, "rdma-core 50");
    expect(&report, "EnableStreamMemOPs", CheckStatus::Skip, "R515");
    expect(&report, "RDMA devices", CheckStatus::Skip, "/sys/class/infiniband");
}

#[test]
fn h200_without_device_nodes() {
    let machine = Machine::recorded("h200-no-nic");
    machine.remove("/dev/nvidiactl");
    remove_window_probe(&machine);
    let report = machine.report();
    assert_eq!(report.answer("CPU windows"), Some(Answer::No));
    expect(&report, "/dev/nvidiactl", CheckStatus::Fail, "--gpus all");
    expect(&report, "resource manager", CheckStatus::Fail, "/dev/nvidiactl is missing");
    expect(&report, "/dev/gdrdrv", CheckStatus::Warn, "modprobe gdrdrv");
}

/// Removes the results of the window probe from a recording.
fn remove_window_probe(machine: &Machine) {
    edit_probes(machine, |device| {
        for field in ["window", "window_path", "window_refused"] {
            device.remove(field);
        }
    });
}

fn edit_probes(machine: &Machine, edit: impl Fn(&mut serde_json::Map<String, serde_json::Value>)) {
    let text = machine.system().read("/probes.json").unwrap();
    let mut probes: serde_json::Value = serde_json::from_str(&text).unwrap();
    for device in probes["cuda"]["devices"].as_array_mut().unwrap() {
        edit(device.as_object_mut().unwrap());
    }
    machine.write("/probes.json", &probes.to_string());
}

#[test]
fn a_window_that_was_not_tried_is_expected() {
    let machine = Machine::recorded("h200-no-nic");
    remove_window_probe(&machine);
    let report = machine.report();
    assert!(verdicts(&report).contains("yes, expected, through the resource manager's map call"));
    expect(&report, "cuda:0 CPU window", CheckStatus::Skip, "not tried: not recorded");
    expect(&report, "resource manager", CheckStatus::Pass, "not tried here");
}

#[test]
fn a_window_that_failed_is_reported() {
    let machine = Machine::recorded("h200-no-nic");
    remove_window_probe(&machine);
    let failed = serde_json::json!({"failed": {"why": "resource manager: the layout differs"}});
    edit_probes(&machine, |device| {
        device.insert("window".into(), failed.clone());
    });
    let report = machine.report();
    assert_eq!(report.answer("CPU windows"), Some(Answer::No));
    assert!(verdicts(&report).contains("no, every copy is staged: opening a window failed"));
    expect(&report, "cuda:0 CPU window", CheckStatus::Fail, "the layout differs");
}

#[test]
fn h200_without_a_driver_and_without_probes() {
    let machine = Machine::recorded("h200-no-nic");
    machine.remove("/proc/driver");
    machine.remove("/probes.json");
    let report = machine.report();
    expect(&report, "NVIDIA driver", CheckStatus::Fail, "nvidia-open");
    expect(&report, "0000:00:06.0 BAR1", CheckStatus::Skip, "256 GiB; not compared");
    expect(
        &report,
        "CUDA driver library",
        CheckStatus::Skip,
        "recorded machine without probes.json",
    );
    assert_eq!(report.answer("GPU"), Some(Answer::Partly));
    assert!(report.usable(), "CUDA was not tried, and may work");
}

#[test]
fn h200_without_libcuda() {
    let machine = Machine::recorded("h200-no-nic");
    let missing = r#"{"failed": {"why": "libcuda.so.1 not found"}}"#;
    let text = format!(r#"{{"cuda": {{"library": {missing}}}, "memfd": "worked"}}"#);
    machine.write("/probes.json", &text);
    let report = machine.report();
    expect(&report, "CUDA driver library", CheckStatus::Fail, "NVIDIA_DRIVER_CAPABILITIES=compute");
    for capability in ["GPU", "CPU windows", "GPU memory registration"] {
        assert_eq!(report.answer(capability), Some(Answer::No), "{capability}");
    }
    assert!(report.usable(), "the simulated GPU works");
}

#[test]
fn old_drivers_are_reported() {
    let machine = Machine::recorded("h200-no-nic");
    machine.write(
        "/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2 14:37:44 UTC 2024",
    );
    let report = machine.report();
    expect(&report, "NVIDIA driver", CheckStatus::Warn, "R535 or newer");
    expect(&report, "kernel modules", CheckStatus::Pass, "but dma-buf export works");
    expect(&report, "EnableStreamMemOPs", CheckStatus::Warn, "NVreg_EnableStreamMemOPs=1");
}

#[test]
fn eight_gpu_server() {
    let report = Machine::recorded("eight-gpu-server").report();
    insta::assert_snapshot!(verdicts(&report), @r#"
    GPU: yes, NVIDIA H100 80GB HBM3 through CUDA 12.8 (1 of the 8 on the PCI buses)
    CPU windows: yes, expected, through the resource manager's map call: /dev/nvidiactl and /dev/nvidia0 are accessible to this user
    GPU memory registration: yes, expected, by dma-buf: export works, and the drivers of mlx5_0, mlx5_1, mlx5_2, mlx5_3, mlx5_4, mlx5_5, mlx5_6, mlx5_7 accept dma-bufs
    hardware RDMA: yes, expected, with mlx5_0, mlx5_1, mlx5_2, mlx5_3, mlx5_4, mlx5_5, mlx5_6, mlx5_7: active, and accessible to this user
    stream-ordered operations: yes, CUDA offers 32- and 64-bit stream memory operations
    software RDMA over UDP: yes, with segmentation and receive offload
    simulated GPU: yes, its memory can be created (memfd_create worked)
    "#);
    expect(&report, "mlx5_0 direct queues", CheckStatus::Pass, "libmlx5.so.1.24.50.0 exposes");
    for (gpu, nic) in (0..8).map(|i| (format!("GPU{i}"), format!("mlx5_{i}"))) {
        expect(&report, &format!("{gpu} to {nic}"), CheckStatus::Pass, "PIX");
    }
    expect(&report, "IOMMU", CheckStatus::Pass, "passthrough");
    expect(&report, "PCIe access control (ACS)", CheckStatus::Pass, "off at all 16 ports");
    expect(&report, "NUMA", CheckStatus::Pass, "node 1 has CPUs 48-95,144-191");
    expect(&report, "locked memory", CheckStatus::Pass, "unlimited");
    expect(&report, "huge pages", CheckStatus::Pass, "1024 of 2 MiB");
    expect(&report, "PeerMappingOverride", CheckStatus::Pass, "set");
    expect(&report, "peer-memory module", CheckStatus::Skip, "not needed");
    expect(
        &report,
        "mlx5_0",
        CheckStatus::Pass,
        "driver mlx5, CA, firmware 28.43.1014, board MT_0000000838",
    );
    expect(
        &report,
        "mlx5_7 port 1",
        CheckStatus::Pass,
        "ACTIVE, link layer InfiniBand, rate 400 Gb/sec (4X NDR)",
    );
    expect(&report, "mlx5_7 port 1 GIDs", CheckStatus::Pass, "[0] fe80:");
    expect(&report, "mlx5_7 on-demand paging", CheckStatus::Pass, "mlx5");
    let problems =
        report.checks.iter().filter(|c| matches!(c.status, CheckStatus::Warn | CheckStatus::Fail));
    assert_eq!(problems.count(), 0, "{}", report.to_text(false));
}

#[test]
fn eight_gpu_server_topology() {
    let topology = Machine::recorded("eight-gpu-server").topology();
    insta::assert_snapshot!(topology.to_string(), @r#"
          GPU0  GPU1  GPU2  GPU3  GPU4  GPU5  GPU6  GPU7  NIC0  NIC1  NIC2  NIC3  NIC4  NIC5  NIC6  NIC7  NIC8  CPU Affinity   NUMA Affinity
    GPU0  X     PXB   NODE  NODE  SYS   SYS   SYS   SYS   PIX   PXB   NODE  NODE  SYS   SYS   SYS   SYS   PHB   0-47,96-143    0
    GPU1  PXB   X     NODE  NODE  SYS   SYS   SYS   SYS   PXB   PIX   NODE  NODE  SYS   SYS   SYS   SYS   PHB   0-47,96-143    0
    GPU2  NODE  NODE  X     PXB   SYS   SYS   SYS   SYS   NODE  NODE  PIX   PXB   SYS   SYS   SYS   SYS   NODE  0-47,96-143    0
    GPU3  NODE  NODE  PXB   X     SYS   SYS   SYS   SYS   NODE  NODE  PXB   PIX   SYS   SYS   SYS   SYS   NODE  0-47,96-143    0
    GPU4  SYS   SYS   SYS   SYS   X     PXB   NODE  NODE  SYS   SYS   SYS   SYS   PIX   PXB   NODE  NODE  SYS   48-95,144-191  1
    GPU5  SYS   SYS   SYS   SYS   PXB   X     NODE  NODE  SYS   SYS   SYS   SYS   PXB   PIX   NODE  NODE  SYS   48-95,144-191  1
    GPU6  SYS   SYS   SYS   SYS   NODE  NODE  X     PXB   SYS   SYS   SYS   SYS   NODE  NODE  PIX   PXB   SYS   48-95,144-191  1
    GPU7  SYS   SYS   SYS   SYS   NODE  NODE  PXB   X     SYS   SYS   SYS   SYS   NODE  NODE  PXB   PIX   SYS   48-95,144-191  1
    NIC0  PIX   PXB   NODE  NODE  SYS   SYS   SYS   SYS   X     PXB   NODE  NODE  SYS   SYS   SYS   SYS   PHB   0-47,96-143    0
    NIC1  PXB   PIX   NODE  NODE  SYS   SYS   SYS   SYS   PXB   X     NODE  NODE  SYS   SYS   SYS   SYS   PHB   0-47,96-143    0
    NIC2  NODE  NODE  PIX   PXB   SYS   SYS   SYS   SYS   NODE  NODE  X     PXB   SYS   SYS   SYS   SYS   NODE  0-47,96-143    0
    NIC3  NODE  NODE  PXB   PIX   SYS   SYS   SYS   SYS   NODE  NODE  PXB   X     SYS   SYS   SYS   SYS   NODE  0-47,96-143    0
    NIC4  SYS   SYS   SYS   SYS   PIX   PXB   NODE  NODE  SYS   SYS   SYS   SYS   X     PXB   NODE  NODE  SYS   48-95,144-191  1
    NIC5  SYS   SYS   SYS   SYS   PXB   PIX   NODE  NODE  SYS   SYS   SYS   SYS   PXB   X     NODE  NODE  SYS   48-95,144-191  1
    NIC6  SYS   SYS   SYS   SYS   NODE  NODE  PIX   PXB   SYS   SYS   SYS   SYS   NODE  NODE  X     PXB   SYS   48-95,144-191  1
    NIC7  SYS   SYS   SYS   SYS   NODE  NODE  PXB   PIX   SYS   SYS   SYS   SYS   NODE  NODE  PXB   X     SYS   48-95,144-191  1
    NIC8  PHB   PHB   NODE  NODE  SYS   SYS   SYS   SYS   PHB   PHB   NODE  NODE  SYS   SYS   SYS   SYS   X     0-47,96-143    0

    GPUs:
      GPU0: NVIDIA H100 80GB HBM3 (0000:15:00.0)
      GPU1: NVIDIA H100 80GB HBM3 (0000:19:00.0)
      GPU2: NVIDIA H100 80GB HBM3 (0000:35:00.0)
      GPU3: NVIDIA H100 80GB HBM3 (0000:39:00.0)
      GPU4: NVIDIA H100 80GB HBM3 (0000:85:00.0)
      GPU5: NVIDIA H100 80GB HBM3 (0000:89:00.0)
      GPU6: NVIDIA H100 80GB HBM3 (0000:a5:00.0)
      GPU7: NVIDIA H100 80GB HBM3 (0000:a9:00.0)

    NIC Legend:
      NIC0: mlx5_0 (0000:16:00.0, RDMA)
      NIC1: mlx5_1 (0000:1a:00.0, RDMA)
      NIC2: mlx5_2 (0000:36:00.0, RDMA)
      NIC3: mlx5_3 (0000:3a:00.0, RDMA)
      NIC4: mlx5_4 (0000:86:00.0, RDMA)
      NIC5: mlx5_5 (0000:8a:00.0, RDMA)
      NIC6: mlx5_6 (0000:a6:00.0, RDMA)
      NIC7: mlx5_7 (0000:aa:00.0, RDMA)
      NIC8: eth0 (0000:1f:00.0, plain interface)

    Best NIC for each GPU:
      GPU0: NIC0 mlx5_0 (PIX)
      GPU1: NIC1 mlx5_1 (PIX)
      GPU2: NIC2 mlx5_2 (PIX)
      GPU3: NIC3 mlx5_3 (PIX)
      GPU4: NIC4 mlx5_4 (PIX)
      GPU5: NIC5 mlx5_5 (PIX)
      GPU6: NIC6 mlx5_6 (PIX)
      GPU7: NIC7 mlx5_7 (PIX)

    Legend:
      X    = Self
      SYS  = Across the link between NUMA nodes (or the nodes are not known)
      NODE = Across PCIe host bridges within a NUMA node
      PHB  = Across a PCIe host bridge (the CPU's root complex)
      PXB  = Across several PCIe switches, without a host bridge
      PIX  = Across at most a single PCIe switch
      NVLink is not shown: the matrix shows PCIe, read from /sys.
    "#);
}

#[test]
fn eight_gpu_server_with_all_ports_down() {
    let machine = Machine::recorded("eight-gpu-server");
    for i in 0..8 {
        machine.write(&format!("/sys/class/infiniband/mlx5_{i}/ports/1/state"), "1: DOWN");
    }
    let report = machine.report();
    assert_eq!(report.answer("hardware RDMA"), Some(Answer::No));
    assert_eq!(report.answer("GPU memory registration"), Some(Answer::Partly));
    expect(&report, "mlx5_0 port 1", CheckStatus::Warn, "opensm");
    let best = machine.topology().best;
    assert!(best.iter().all(|best| best.name == "eth0"), "inactive ports are not chosen");
}

#[test]
fn streams_ring_doorbells_that_the_gpu_can_map() {
    let machine = Machine::recorded("eight-gpu-server");
    expect(&machine.report(), "streams ring NICs", CheckStatus::Pass, "expected for mlx5_0");
    machine.write("/proc/driver/nvidia/params", "RegistryDwords: \"\"\n");
    expect(&machine.report(), "streams ring NICs", CheckStatus::Warn, "PeerMappingOverride=1");
    let narrow = std::fs::read_to_string(machine.root().join("probes.json")).unwrap();
    let wide = "\"stream_mem_ops_64_bit\": true";
    assert!(narrow.contains(wide), "{narrow}");
    machine.write("/probes.json", &narrow.replace(wide, "\"stream_mem_ops_64_bit\": false"));
    expect(&machine.report(), "streams ring NICs", CheckStatus::Fail, "64 bits");
    let report = Machine::recorded("h200-no-nic").report();
    expect(&report, "streams ring NICs", CheckStatus::Skip, "no ConnectX");
}

#[test]
fn eight_gpu_server_without_libibverbs() {
    let machine = Machine::recorded("eight-gpu-server");
    machine.remove("/usr");
    let report = machine.report();
    expect(&report, "libibverbs", CheckStatus::Fail, "apt install libibverbs1");
    assert_eq!(report.answer("hardware RDMA"), Some(Answer::No));
}

#[test]
fn peermem_missing() {
    let report = Machine::recorded("peermem-missing").report();
    insta::assert_snapshot!(verdicts(&report), @r#"
    GPU: yes, NVIDIA A100-PCIE-40GB through CUDA 12.2
    CPU windows: yes, expected, through the resource manager's map call: /dev/nvidiactl and /dev/nvidia0 are accessible to this user
    GPU memory registration: partly, staged through host memory, because dma-buf export failed (cuMemGetHandleForAddressRange: CUDA_ERROR_NOT_SUPPORTED); kernel 5.4.0-190-generic is older than 5.12; libibverbs has no ibv_reg_dmabuf_mr; no peer-memory module is loaded
    hardware RDMA: yes, expected, with mlx5_0: active, and accessible to this user
    stream-ordered operations: yes, CUDA offers 32- and 64-bit stream memory operations
    software RDMA over UDP: partly, more slowly: GSO worked, GRO failed (the kernel refuses the UDP_GRO socket option)
    simulated GPU: yes, its memory can be created (memfd_create worked)
    "#);
    expect(&report, "peer-memory module", CheckStatus::Fail, "sudo modprobe nvidia-peermem");
    expect(&report, "kernel version", CheckStatus::Warn, "5.4.0-190-generic is older than 5.12");
    expect(&report, "libibverbs", CheckStatus::Warn, "rdma-core 34");
    expect(&report, "mlx5_0 direct queues", CheckStatus::Warn, "apt install ibverbs-providers");
    expect(&report, "cuda:0 dma-buf export", CheckStatus::Warn, "CUDA_ERROR_NOT_SUPPORTED");
    expect(&report, "PCIe access control (ACS)", CheckStatus::Skip, "sudo warpwire doctor");
    expect(&report, "IOMMU", CheckStatus::Warn, "iommu=pt");
    expect(&report, "locked memory", CheckStatus::Warn, "ulimit -l unlimited");
    expect(
        &report,
        "cuda:0 order of a NIC's writes",
        CheckStatus::Pass,
        "cuFlushGPUDirectRDMAWrites",
    );
    expect(&report, "mlx5_0 port 1 GIDs", CheckStatus::Pass, "RoCE v2: [3]");
}

#[test]
fn peermem_enables_registration() {
    let machine = Machine::recorded("peermem-missing");
    machine.write("/proc/modules", "nvidia_peermem 16384 0 - Live 0x0");
    let report = machine.report();
    expect(&report, "peer-memory module", CheckStatus::Pass, "nvidia_peermem is loaded");
    assert_eq!(report.answer("GPU memory registration"), Some(Answer::Yes));
}

#[test]
fn proprietary_driver() {
    let report = Machine::recorded("proprietary-driver").report();
    insta::assert_snapshot!(verdicts(&report), @r#"
    GPU: yes, NVIDIA A100-PCIE-40GB through CUDA 12.2
    CPU windows: yes, expected, through the resource manager's map call: /dev/nvidiactl and /dev/nvidia0 are accessible to this user
    GPU memory registration: yes, expected, by peer memory: nvidia_peermem is loaded
    hardware RDMA: yes, expected, with mlx5_0: active, and accessible to this user
    stream-ordered operations: yes, CUDA offers 32- and 64-bit stream memory operations
    software RDMA over UDP: yes, with segmentation and receive offload
    simulated GPU: yes, its memory can be created (memfd_create worked)
    "#);
    expect(&report, "kernel modules", CheckStatus::Warn, "apt install nvidia-open");
    expect(&report, "peer-memory module", CheckStatus::Pass, "nvidia_peermem is loaded");
    expect(&report, "0000:03:00.0 BAR1", CheckStatus::Warn, "256 MiB, for 39.4 GiB");
    expect(
        &report,
        "PCIe access control (ACS)",
        CheckStatus::Warn,
        "for p in 0000:02:00.0 0000:02:01.0; do",
    );
    expect(&report, "PeerMappingOverride", CheckStatus::Warn, "PeerMappingOverride=1;");
}

#[test]
fn container_without_infiniband() {
    let report = Machine::recorded("container-without-infiniband").report();
    insta::assert_snapshot!(verdicts(&report), @r#"
    GPU: yes, NVIDIA A100-PCIE-40GB through CUDA 13.0
    CPU windows: yes, expected, through the resource manager's map call: /dev/nvidiactl and /dev/nvidia0 are accessible to this user
    GPU memory registration: partly, dma-buf export works, but there is nothing to register with: /dev/infiniband/uverbs0 (mlx5_0) is missing
    hardware RDMA: no, because /dev/infiniband/uverbs0 (mlx5_0) is missing
    stream-ordered operations: yes, CUDA offers 32- and 64-bit stream memory operations
    software RDMA over UDP: yes, with segmentation and receive offload
    simulated GPU: yes, its memory can be created (memfd_create worked)
    "#);
    expect(&report, "mlx5_0 device node", CheckStatus::Fail, "--device=/dev/infiniband");
    expect(&report, "container", CheckStatus::Pass, "docker");
}

#[test]
fn the_same_container_with_infiniband() {
    let machine = Machine::recorded("container-without-infiniband");
    std::fs::create_dir(machine.root().join("dev/infiniband")).unwrap();
    machine.write("/dev/infiniband/uverbs0", "");
    let report = machine.report();
    expect(
        &report,
        "mlx5_0 device node",
        CheckStatus::Fail,
        "sudo chmod 666 /dev/infiniband/uverbs0",
    );
    let node = machine.root().join("dev/infiniband/uverbs0");
    std::fs::set_permissions(node, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    let report = machine.report();
    assert_eq!(report.answer("hardware RDMA"), Some(Answer::Yes));
    assert_eq!(report.answer("GPU memory registration"), Some(Answer::Yes));
}

#[test]
fn a_broken_machine_gets_a_report() {
    let machine = Machine::recorded("broken");
    let report = machine.report();
    assert_eq!(report.verdicts.len(), 7);
    expect(&report, "NVIDIA driver", CheckStatus::Warn, "does not have the format");
    expect(&report, "0000:00:09.0 BAR1", CheckStatus::Skip, "no prefetchable memory window");
    let text = report.to_text(false);
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "control characters in the output");
    expect(&report, "NUMA", CheckStatus::Pass, "node 0 lists no CPUs");
    expect(&report, "IOMMU", CheckStatus::Skip, "mode not known");
    let topology = machine.topology().to_string();
    assert!(topology.contains("GPU0  X     N/A"), "{topology}");
}

#[test]
fn every_problem_has_a_fix() {
    for name in MACHINES {
        for check in Machine::recorded(name).report().checks {
            assert!(!check.why.is_empty(), "{name}: {check:?}");
            if matches!(check.status, CheckStatus::Warn | CheckStatus::Fail) {
                assert!(check.fix.is_some_and(|fix| !fix.is_empty()), "{name}: {}", check.name);
            }
        }
    }
}

/// Truncates, overwrites and removes each file of each machine in turn, except for the probes. Of
/// files whose paths differ in numbers only, one is used.
#[test]
fn corrupt_files_do_not_prevent_a_report() {
    for name in MACHINES {
        let machine = Machine::recorded(name);
        let mut files = Vec::new();
        collect_files(machine.root(), &mut files);
        files.sort();
        let shape = |file: &std::path::PathBuf| {
            let path = file.strip_prefix(machine.root()).unwrap().to_str().unwrap();
            path.replace(|c: char| c.is_ascii_hexdigit(), "")
        };
        let mut seen = std::collections::HashSet::new();
        files.retain(|file| !file.ends_with("probes.json") && seen.insert(shape(file)));
        assert!(files.len() > 10, "{name} has few files");
        for file in files.into_iter().step_by(Effort::choose([5, 1, 1])) {
            let check_report = || {
                let report = machine.report();
                assert_eq!(report.verdicts.len(), 7, "{name}: {}", file.display());
            };
            let whole = std::fs::read(&file).unwrap();
            let half = whole[..whole.len() / 2].to_vec();
            for corrupted in [half, vec![0xff; 300], b"9999999999999999999999\n-1:0x".to_vec()] {
                std::fs::write(&file, corrupted).unwrap();
                check_report();
            }
            std::fs::write(&file, whole).unwrap();
            let aside = machine.root().join("aside");
            std::fs::rename(&file, &aside).unwrap();
            check_report();
            assert!(machine.topology().to_string().contains("Legend"));
            std::fs::rename(&aside, &file).unwrap();
        }
    }
}

fn collect_files(folder: &std::path::Path, files: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            collect_files(&entry.path(), files);
        } else if kind.is_file() {
            files.push(entry.path());
        }
    }
}

#[test]
fn malformed_probes_are_an_error() {
    let machine = Machine::recorded("no-gpu");
    machine.write("/probes.json", "{\n  \"memfd\": 7\n}");
    let error = Evidence::gather(machine.system()).unwrap_err().to_string();
    assert!(error.contains("probes.json") && error.contains("line 2"), "{error}");
}

#[test]
#[should_panic(expected = "line 2: \"nonsense\" has no known form")]
fn the_error_for_a_malformed_recording_has_its_line() {
    Machine::unpack("/a = 1\nnonsense\n");
}

#[test]
fn recordings_repeat_and_substitute() {
    let machine = Machine::unpack(
        "repeat A=x,y B=1..2\nset P = /d/${A}\nrepeat C=7,8\n\
         ${P}/${C} [0600] = ${B}\\nend\nend\nend\n/e @0x2 0aff",
    );
    let system = machine.system();
    assert_eq!(system.list("/d/y"), ["7", "8"]);
    assert_eq!(system.read("/d/y/8").as_deref(), Some("2\nend"));
    assert_eq!(system.read_bytes("/e"), Some(vec![0, 0, 10, 255]));
}
