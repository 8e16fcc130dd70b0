//! What programs would use, GPUDirect RDMA of pairs, and trials of a pair.

use serde_json::{Value, json};
use warpwire::host::{MachineFiles, System};
use warpwire_doctor::{Answer, Distance, Evidence, KnownBy, Report, try_pair};

use crate::support::Machine;
use crate::told;

/// The machine with changed probes: the environment and libraries are replaced. It stays in memory,
/// which is faster than in a folder.
fn with(name: &str, environment: Value, libraries: Value) -> Report {
    let mut files =
        MachineFiles::parse(&std::fs::read_to_string(Machine::file(name)).unwrap()).unwrap();
    let text = System::of(files.clone()).read("/probes.json").unwrap();
    let mut probes: Value = serde_json::from_str(&text).unwrap();
    probes["environment"] = environment;
    probes["libraries"] = libraries;
    files.set_text("/probes.json", &probes.to_string());
    Report::of(&Evidence::gather(System::of(files)).unwrap())
}

fn library(path: &str, warpwire: Option<&str>) -> Value {
    json!({"path": path, "file": path, "by": "LD_LIBRARY_PATH", "warpwire": warpwire})
}

#[test]
fn nccl_loads_what_its_variables_name() {
    let ours = || library("/w/libnccl-net-warpwire.so", Some("0.2.0"));
    let other = || library("/o/libnccl-net.so", None);
    let verbs = || library("/usr/lib/libibverbs.so.1", None);
    let cases = [
        // environment, libraries, network, answer, words
        (json!({}), json!({}), "Socket", Answer::Partly, "no plugin is found"),
        (json!({}), json!({"libnccl-net.so": other()}), "plugin", Answer::Yes, "another project's"),
        (json!({}), json!({"libnccl-net.so": ours()}), "Warpwire", Answer::Yes, "version 0.2.0"),
        (
            json!({"NCCL_NET_PLUGIN": "gone,warpwire"}),
            json!({"libnccl-net-warpwire.so": ours()}),
            "Warpwire",
            Answer::Yes,
            "/w/libnccl-net-warpwire.so",
        ),
        (
            json!({"NCCL_NET_PLUGIN": "none"}),
            json!({"libnccl-net.so": ours()}),
            "Socket",
            Answer::Partly,
            "warpwire nccl",
        ),
        (
            json!({"NCCL_NET": "Socket"}),
            json!({"libnccl-net.so": ours()}),
            "Socket",
            Answer::Partly,
            "unset NCCL_NET",
        ),
        (json!({"NCCL_NET": "warpwire"}), json!({}), "none", Answer::No, "demands a plugin"),
        (
            json!({"NCCL_NET": "AWS"}),
            json!({"libnccl-net.so": ours()}),
            "none",
            Answer::No,
            "NCCL_NET=AWS, but the plugin is",
        ),
        (
            json!({"NCCL_NET": "Warpwire"}),
            json!({"libnccl-net.so": other()}),
            "none",
            Answer::No,
            "another project's",
        ),
        (
            json!({"NCCL_NET": "AWS"}),
            json!({"libnccl-net.so": other()}),
            "plugin",
            Answer::Yes,
            "/o/",
        ),
        (json!({}), json!({"libibverbs.so.1": verbs()}), "IB", Answer::Yes, "mlx5_0…7"),
        (
            json!({"NCCL_NET": "IB"}),
            json!({"libibverbs.so.1": verbs()}),
            "IB",
            Answer::Yes,
            "mlx5_0",
        ),
        (json!({"NCCL_NET": "IB"}), json!({}), "none", Answer::No, "libibverbs.so.1 is not found"),
        (
            json!({"NCCL_IB_DISABLE": "1"}),
            json!({"libibverbs.so.1": verbs()}),
            "Socket",
            Answer::Partly,
            "NCCL_IB_DISABLE=1",
        ),
        (
            json!({"NCCL_IBVERBS_LIB": "/w/libibverbs.so.1"}),
            json!({"/w/libibverbs.so.1": library("/w/libibverbs.so.1", Some("0.2.0"))}),
            "IB",
            Answer::Yes,
            "the software HCA",
        ),
    ];
    for (environment, libraries, network, answer, words) in cases {
        let report = with("eight-gpu-server", environment.clone(), libraries);
        let text = told(&report, "nccl");
        assert_eq!(
            (report.nccl.network, report.nccl.answer),
            (network, answer),
            "{environment}: {text}"
        );
        assert!(text.contains(words), "{environment}: {words:?} is not in {text}");
        assert_eq!(report.nccl.not_ours.is_none(), network == "Warpwire");
        assert_eq!(report.answer("nccl"), Some(answer));
    }
}

#[test]
fn nccls_notes_say_what_else_is_needed() {
    let ours = library("/w/libnccl-net-warpwire.so", Some("0.2.0"));
    let old =
        json!({"path": "/l/libnccl.so.2", "file": "/l/libnccl.so.2.18.5", "by": "ld.so.cache"});
    let libraries = json!({"libnccl-net.so": ours, "libnccl.so.2": old});
    let report = with("no-gpu", json!({}), libraries.clone());
    let notes = report.nccl.notes.join("\n");
    for part in ["NCCL_NET_PLUGIN_REF_COUNT=1", "NCCL_NET=Warpwire", "2.18 is older than 2.19"] {
        assert!(notes.contains(part), "{notes}");
    }
    let set = json!({"NCCL_NET_PLUGIN_REF_COUNT": "1", "NCCL_NET": "Warpwire"});
    assert_eq!(with("no-gpu", set, libraries).nccl.notes.len(), 1);
}

#[test]
fn ucx_has_the_transports_of_its_modules() {
    let ucp = || library("/usr/lib/libucp.so.0", None);
    let preload = json!({"LD_PRELOAD": "/w/libwarpwire_ibpaths.so"});
    let ours = || library("/w/libibverbs.so.1", Some("0.2.0"));
    let none = with("eight-gpu-server", json!({}), json!({}));
    assert_eq!(none.answer("ucx"), Some(Answer::No));
    let hardware = with("eight-gpu-server", json!({}), json!({"libucp.so.0": ucp()}));
    let text = told(&hardware, "ucx");
    assert!(text.contains("rc_mlx5") && text.contains("no libgdrapi.so.2 is found"), "{text}");
    assert_eq!(hardware.verdict("ucx").unwrap().known_by, KnownBy::Expected);
    let software =
        with("nvlink-bridge", preload, json!({"libucp.so.0": ucp(), "libibverbs.so.1": ours()}));
    assert!(told(&software, "ucx").contains("rc_verbs"), "{}", told(&software, "ucx"));
    let without =
        with("nvlink-bridge", json!({}), json!({"libucp.so.0": ucp(), "libibverbs.so.1": ours()}));
    assert_eq!(without.answer("ucx"), Some(Answer::Partly));
    assert!(told(&without, "ucx").contains("needs libwarpwire_ibpaths.so"));
    let machine = Machine::recorded("h200-no-nic");
    assert!(told(&machine.report(), "ucx").contains("no libucp.so.0"));
}

#[test]
fn rdma_programs_see_what_their_library_has() {
    let system = library("/usr/lib/libibverbs.so.1", None);
    let hardware = with("eight-gpu-server", json!({}), json!({"libibverbs.so.1": system}));
    assert_eq!(hardware.answer("verbs"), Some(Answer::Yes));
    assert!(told(&hardware, "verbs").contains("see: mlx5_0…7, through"));
    let nothing = with("h200-no-nic", json!({}), json!({"libibverbs.so.1": system}));
    assert_eq!(nothing.answer("verbs"), Some(Answer::No));
    assert!(told(&nothing, "verbs").contains("warpwire verbs -- PROGRAM"));
    assert_eq!(with("no-gpu", json!({}), json!({})).answer("verbs"), Some(Answer::No));
    let ours = library("/w/libibverbs.so.1", Some("0.2.0"));
    let software =
        with("no-gpu", json!({"WARPWIRE_IB_DEVICES": "lo"}), json!({"libibverbs.so.1": ours}));
    let text = told(&software, "verbs");
    assert!(text.contains("WARPWIRE_IB_DEVICES=lo") && text.contains("rdma_cm do not"), "{text}");
}

#[test]
fn soft_roce_serves_programs() {
    let machine = Machine::recorded("soft-roce");
    let report = machine.report();
    assert_eq!(report.answer("rdma"), Some(Answer::Partly), "not hardware");
    assert_eq!((report.nccl.network, report.answer("verbs")), ("IB", Some(Answer::Yes)));
    for device in ["rxe0", "rxe2"] {
        let state = format!("/sys/devices/virtual/infiniband/{device}/ports/1/state");
        machine.write(&state, "1: DOWN");
    }
    let report = machine.report();
    assert_eq!((report.nccl.network, report.answer("verbs")), ("Socket", Some(Answer::No)));
    assert!(told(&report, "rdma").contains("no port of rxe0 is active"));
}

#[test]
fn gpudirect_is_a_question_of_pairs() {
    let report = Machine::recorded("nvlink-bridge").report();
    let verdict = report.verdict("gpudirect").unwrap();
    let pairs: Vec<_> =
        verdict.pairs.iter().map(|p| (p.gpu.as_str(), p.answer, p.distance)).collect();
    assert_eq!(
        pairs,
        [("GPU0", Answer::Yes, Distance::Pix), ("GPU1", Answer::Partly, Distance::Sys)]
    );
    assert_eq!(verdict.answer, Answer::Partly);
    let report = Machine::recorded("eight-gpu-server").report();
    let verdict = report.verdict("gpudirect").unwrap();
    assert_eq!((verdict.pairs.len(), verdict.answer), (64, Answer::Yes));
    assert_eq!(verdict.pairs.iter().filter(|pair| pair.best).count(), 8);
}

#[test]
fn equal_pairs_are_folded() {
    let machine = Machine::recorded("eight-gpu-server");
    let text = machine.system().read("/probes.json").unwrap();
    let mut probes: Value = serde_json::from_str(&text).unwrap();
    let device = probes["cuda"]["devices"][0].clone();
    let buses = ["15", "19", "35", "39", "85", "89", "a5", "a9"];
    let devices = buses.iter().enumerate().map(|(ordinal, bus)| {
        let mut device = device.clone();
        device["ordinal"] = ordinal.into();
        device["pci"] = format!("0000:{bus}:00.0").into();
        device
    });
    probes["cuda"]["devices"] = devices.collect();
    machine.write("/probes.json", &probes.to_string());
    let report = machine.report();
    let expected = "GPUDirect RDMA: YES, expected by dma-buf, not tried \
                    (GPU0…7 with mlx5_0…7, PIX)";
    assert!(report.to_text(false).contains(&format!("{expected}\nGPUDirect Async")), "{report:?}");
    // One that differs is shown beside the others.
    probes["cuda"]["devices"][3]["dmabuf_export"] = json!({"failed": {"why": "refused"}});
    machine.write("/probes.json", &probes.to_string());
    let text = machine.report().to_text(false);
    for line in [
        "GPUDirect RDMA: PARTLY, for 7 of 8 GPUs with their best NIC\n",
        "    GPU0…2, GPU4…7 with mlx5_0…2, mlx5_4…7, PIX: YES, expected by dma-buf, not tried\n",
        "    GPU3 with mlx5_3, PIX: NO, because dma-buf export failed (refused); no peer-memory",
    ] {
        assert!(text.contains(line), "{line:?} is not in\n{text}");
    }
}

#[test]
fn gpudirect_has_the_fix_of_what_prevents_it() {
    let denied = Machine::recorded("container-without-infiniband").report();
    assert!(told(&denied, "gpudirect").contains("--device=/dev/infiniband"));
    let machine = Machine::recorded("eight-gpu-server");
    machine.remove("/sys/class/infiniband");
    let text = told(&machine.report(), "gpudirect");
    assert!(
        text.contains("no RDMA driver is loaded") && text.contains("modprobe mlx5_ib"),
        "{text}"
    );
    let machine = Machine::recorded("proprietary-driver");
    let text = told(&machine.report(), "gpudirect");
    assert!(text.contains("YES, expected by peer memory (nvidia_peermem)"), "{text}");
    assert!(text.contains("slower") && text.contains("IOMMU") && text.contains("ACS"), "{text}");
}

#[test]
fn data_goes_into_the_gpu_and_back() {
    let trial = try_pair("soft", "sim:0").unwrap();
    assert!(!trial.direct && !trial.staged && trial.write_us > 0.0, "{trial:?}");
    assert!(trial.to_text(warpwire_doctor::TextStyle::default()).contains("window (memfd)"));
    for (nic, gpu, words) in [
        ("soft", "sim:99", "gpus=100"),
        ("soft", "gpu", "cuda:N or sim:N"),
        ("mlx9_9", "sim:0", "RDMA"),
    ] {
        let error = try_pair(nic, gpu).unwrap_err().to_string();
        assert!(error.contains(words), "{nic} {gpu}: {error}");
    }
}
