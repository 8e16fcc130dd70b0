//! Verdicts, decisive checks and topology of recorded machines. Each good case is repeated with one
//! thing broken.

// Helpers may panic as tests do; clippy exempts only functions marked as tests.
#![allow(clippy::unwrap_used, clippy::panic)]

mod programs;
mod support;

use support::{MACHINES, Machine};
use testkit::Effort;
use warpwire::host::System;
use warpwire_doctor::{Answer, Check, CheckStatus, Evidence, Report, TextStyle, Topology, record};

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

/// A verdict's sentence and fix.
fn told(report: &Report, word: &str) -> String {
    let verdict = report.verdict(word).unwrap();
    format!("{}; {}", verdict.sentence(), verdict.fix.as_deref().unwrap_or_default())
}

/// The whole report, what NCCL would do, and the topology of every machine.
#[test]
fn reports_match_the_snapshots() {
    for name in MACHINES {
        let machine = Machine::recorded(name);
        let (report, topology) = (machine.report(), machine.topology().to_string());
        let nccl = report.nccl.to_text(TextStyle::default());
        let text = report.to_text(false);
        insta::assert_snapshot!(format!("report_{name}"), format!("{text}\n{nccl}"));
        insta::assert_snapshot!(format!("topology_{name}"), topology);
        for line in text.lines().chain(nccl.lines()).chain(topology.lines()) {
            // A word that is longer, such as a path, stays whole.
            let breaks = line.trim_start().contains(' ');
            assert!(line.chars().count() <= 100 || !breaks, "{name}: {line}");
        }
    }
}

/// Everything that is read is recorded: a report of the recording says the same.
#[test]
fn recordings_give_the_same_report() {
    for name in MACHINES {
        let machine = Machine::recorded(name);
        let text = record(&machine.system()).unwrap();
        let recording = Machine::unpack(&text);
        assert_eq!(recording.report(), machine.report(), "{name}\n{text}");
        assert_eq!(recording.topology(), machine.topology(), "{name}");
        // As a file, without a folder.
        let file = machine.root().join("recording");
        std::fs::write(&file, &text).unwrap();
        let system = System::at(&file).unwrap();
        assert_eq!(Report::of(&Evidence::gather(system.clone()).unwrap()), machine.report());
        assert_eq!(record(&system).unwrap(), text, "{name}: a recording of the recording");
    }
}

#[test]
fn this_machine_can_be_recorded() {
    let live = System::live();
    let text = record(&live).unwrap();
    let recorded = Machine::unpack(&text);
    // Probes of two runs may differ; those of the recording are its own.
    let probes = Evidence::gather(recorded.system()).unwrap().probes;
    assert!(probes.memfd.worked() && probes.libraries.is_some(), "{text}");
    assert_eq!(recorded.topology(), Topology::read(&live).unwrap());
    let checks = |report: &Report| {
        let of_files =
            |check: &&Check| ["GPU", "Host"].contains(&format!("{:?}", check.group).as_str());
        report.checks.iter().filter(of_files).cloned().collect::<Vec<_>>()
    };
    let report = Report::of(&Evidence::gather(live).unwrap());
    assert_eq!(checks(&recorded.report()), checks(&report));
}

#[test]
fn recordings_do_not_identify_anyone() {
    let text = record(&Machine::recorded("nvlink-bridge").system()).unwrap();
    for secret in ["GPU-0000", "0a00:0001", "0e42", "BOOT_IMAGE", "processor", "56000000"] {
        assert!(!text.contains(secret), "{secret} in\n{text}");
    }
    for kept in ["iommu=pt", "flags : fpu", "Device Minor: 1", "ffff:c000:0203", "mlx5_0"] {
        assert!(text.contains(kept), "{kept} not in\n{text}");
    }
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let live = record(&System::live()).unwrap();
    assert!(!live.contains("hostname") && !live.contains("BOOT_IMAGE"), "{live}");
    let process = std::process::id().to_string();
    assert!(!live.contains(&format!("/proc/{process}")), "{live}");
    // A short name may be a part of other words.
    let host = host.trim();
    assert!(host.len() < 8 || !live.contains(host), "{host} in\n{live}");
}

#[test]
fn no_gpu() {
    let report = Machine::recorded("no-gpu").report();
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
    expect(&report, "container", CheckStatus::Info, "none detected");
    expect(&report, "virtual machine", CheckStatus::Info, "/proc/cpuinfo");
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
    assert_eq!(report.answer("sim"), Some(Answer::No));
    assert_eq!(report.answer("udp"), Some(Answer::No));
    expect(&report, "shareable anonymous memory", CheckStatus::Fail, "seccomp");
}

#[test]
fn h200_without_a_nic() {
    let report = Machine::recorded("h200-no-nic").report();
    expect(&report, "NVIDIA driver", CheckStatus::Pass, "580.159.04");
    expect(&report, "kernel modules", CheckStatus::Pass, "open");
    expect(&report, "CUDA driver version", CheckStatus::Pass, "13.0");
    expect(&report, "GPU0 BAR1", CheckStatus::Pass, "256 GiB, for 139.8 GiB");
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
    assert_eq!(report.answer("windows"), Some(Answer::No));
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
    assert!(
        told(&report, "windows").contains("YES, expected, not tried: through the resource manager")
    );
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
    assert_eq!(report.answer("windows"), Some(Answer::No));
    assert!(told(&report, "windows").contains("NO, because opening a window failed"));
    expect(&report, "cuda:0 CPU window", CheckStatus::Fail, "the layout differs");
}

#[test]
fn h200_without_a_driver_and_without_probes() {
    let machine = Machine::recorded("h200-no-nic");
    machine.remove("/proc/driver");
    machine.remove("/probes.json");
    let report = machine.report();
    expect(&report, "NVIDIA driver", CheckStatus::Fail, "nvidia-open");
    expect(&report, "GPU0 BAR1", CheckStatus::Skip, "256 GiB; not compared");
    expect(
        &report,
        "CUDA driver library",
        CheckStatus::Skip,
        "recorded machine without probes.json",
    );
    assert_eq!(report.answer("gpu"), Some(Answer::Partly));
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
    for word in ["gpu", "windows", "gpudirect"] {
        assert_eq!(report.answer(word), Some(Answer::No), "{word}");
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
    expect(&report, "mlx5_0 direct queues", CheckStatus::Pass, "libmlx5.so.1.24.50.0 exposes");
    for (gpu, nic) in (0..8).map(|i| (format!("GPU{i}"), format!("mlx5_{i}"))) {
        expect(&report, &format!("{gpu} to {nic}"), CheckStatus::Pass, "PIX");
    }
    expect(&report, "IOMMU", CheckStatus::Pass, "passthrough");
    expect(&report, "PCIe access control (ACS)", CheckStatus::Pass, "off at all 16 ports");
    expect(&report, "NUMA", CheckStatus::Info, "node 1 has CPUs 48-95,144-191");
    expect(&report, "locked memory", CheckStatus::Pass, "unlimited");
    expect(&report, "huge pages", CheckStatus::Info, "1024 of 2 MiB");
    expect(&report, "PeerMappingOverride", CheckStatus::Pass, "set");
    expect(&report, "peer-memory module", CheckStatus::Skip, "not needed");
    expect(
        &report,
        "mlx5_0",
        CheckStatus::Info,
        "driver mlx5, CA, firmware 28.43.1014, board MT_0000000838",
    );
    expect(
        &report,
        "mlx5_7 port 1",
        CheckStatus::Pass,
        "ACTIVE, link layer InfiniBand, rate 400 Gb/sec (4X NDR)",
    );
    expect(&report, "mlx5_7 port 1 GIDs", CheckStatus::Pass, "at index 0");
    expect(&report, "mlx5_7 on-demand paging", CheckStatus::Pass, "mlx5");
    let problems =
        report.checks.iter().filter(|c| matches!(c.status, CheckStatus::Warn | CheckStatus::Fail));
    assert_eq!(problems.count(), 0, "{}", report.to_text(false));
}

#[test]
fn eight_gpu_server_with_all_ports_down() {
    let machine = Machine::recorded("eight-gpu-server");
    for i in 0..8 {
        machine.write(&format!("/sys/class/infiniband/mlx5_{i}/ports/1/state"), "1: DOWN");
    }
    let report = machine.report();
    assert_eq!(report.answer("rdma"), Some(Answer::No));
    assert_eq!(report.answer("gpudirect"), Some(Answer::No));
    expect(&report, "mlx5_0 port 1", CheckStatus::Warn, "opensm");
    let best = machine.topology().best;
    assert!(best.iter().all(|best| best.name == "eth0"), "inactive ports are not chosen");
}

#[test]
fn streams_ring_doorbells_that_the_gpu_can_map() {
    let machine = Machine::recorded("eight-gpu-server");
    expect(&machine.report(), "GPUDirect Async", CheckStatus::Pass, "expected for mlx5_0");
    machine.write("/proc/driver/nvidia/params", "RegistryDwords: \"\"\n");
    expect(&machine.report(), "GPUDirect Async", CheckStatus::Warn, "PeerMappingOverride=1");
    let narrow = std::fs::read_to_string(machine.root().join("probes.json")).unwrap();
    let wide = "\"stream_mem_ops_64_bit\": true";
    assert!(narrow.contains(wide), "{narrow}");
    machine.write("/probes.json", &narrow.replace(wide, "\"stream_mem_ops_64_bit\": false"));
    expect(&machine.report(), "GPUDirect Async", CheckStatus::Fail, "64 bits");
    let report = Machine::recorded("h200-no-nic").report();
    expect(&report, "GPUDirect Async", CheckStatus::Skip, "no ConnectX");
}

#[test]
fn eight_gpu_server_without_libibverbs() {
    let machine = Machine::recorded("eight-gpu-server");
    machine.remove("/usr");
    let report = machine.report();
    expect(&report, "libibverbs", CheckStatus::Fail, "apt install libibverbs1");
    assert_eq!(report.answer("rdma"), Some(Answer::No));
}

#[test]
fn peermem_missing() {
    let report = Machine::recorded("peermem-missing").report();
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
    expect(&report, "mlx5_0 port 1 GIDs", CheckStatus::Pass, "RoCE v2 at index 3");
}

#[test]
fn peermem_enables_registration() {
    let machine = Machine::recorded("peermem-missing");
    machine.write("/proc/modules", "nvidia_peermem 16384 0 - Live 0x0");
    let report = machine.report();
    expect(&report, "peer-memory module", CheckStatus::Pass, "nvidia_peermem is loaded");
    assert_eq!(report.answer("gpudirect"), Some(Answer::Yes));
}

#[test]
fn proprietary_driver() {
    let report = Machine::recorded("proprietary-driver").report();
    expect(&report, "kernel modules", CheckStatus::Warn, "apt install nvidia-open");
    expect(&report, "peer-memory module", CheckStatus::Pass, "nvidia_peermem is loaded");
    expect(&report, "GPU0 BAR1", CheckStatus::Warn, "256 MiB, for 39.4 GiB");
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
    expect(&report, "mlx5_0 device node", CheckStatus::Fail, "--device=/dev/infiniband");
    expect(&report, "container", CheckStatus::Info, "docker");
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
    assert_eq!(report.answer("rdma"), Some(Answer::Yes));
    assert_eq!(report.answer("gpudirect"), Some(Answer::Yes));
}

#[test]
fn a_broken_machine_gets_a_report() {
    let machine = Machine::recorded("broken");
    let report = machine.report();
    assert_eq!(report.verdicts.len(), 11);
    expect(&report, "NVIDIA driver", CheckStatus::Warn, "does not have the format");
    expect(&report, "GPU0 BAR1", CheckStatus::Skip, "no prefetchable memory window");
    let text = report.to_text(false);
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "control characters in the output");
    expect(&report, "NUMA", CheckStatus::Info, "node 0 lists no CPUs");
    expect(&report, "IOMMU", CheckStatus::Skip, "mode not known");
    let topology = machine.topology().to_string();
    assert!(topology.contains("GPU0  X\n"), "{topology}");
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
        for file in files.into_iter().step_by(Effort::choose([5, 2, 1])) {
            let check_report = || {
                let report = machine.report();
                assert_eq!(report.verdicts.len(), 11, "{name}: {}", file.display());
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
