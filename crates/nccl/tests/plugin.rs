//! The plugin as NCCL uses it: a C program that loads the built library by its symbols.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use testkit::Effort;
use testkit::c::{missing, ok, root};
use warpwire::host::System;

const VERSIONS: std::ops::RangeInclusive<u32> = 8..=12;

fn library() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libnccl_net_warpwire.so")
}

/// A program that plays NCCL.
#[derive(Clone, Copy)]
enum Program {
    /// `plugin.c`: sends and receives.
    Net,
    /// `gin.c`: device-initiated networking.
    Gin,
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Self::Net => "plugin",
            Self::Gin => "gin",
        }
    }

    /// Compiled once.
    fn path(self) -> &'static Path {
        static NET: OnceLock<PathBuf> = OnceLock::new();
        static GIN: OnceLock<PathBuf> = OnceLock::new();
        let program = match self {
            Self::Net => &NET,
            Self::Gin => &GIN,
        };
        program.get_or_init(|| {
            let (mut compiler, program) = self.compiler("", &["-O1"]);
            ok(&mut compiler);
            program
        })
    }

    /// The compiler's command, and the program that it makes.
    fn compiler(self, kind: &str, flags: &[&str]) -> (Command, PathBuf) {
        let name = self.name();
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("nccl-{name}{kind}"));
        let source = root().join(format!("crates/nccl/tests/{name}.c"));
        let mut cc = Command::new("cc");
        // Its `malloc` counts allocations of the library, so its symbols are exported.
        cc.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", "-rdynamic"]);
        cc.args(flags).arg(source).arg("-o").arg(&program).arg("-ldl");
        (cc, program)
    }

    /// Compiled with sanitizers; `None` if they are not there, or do not start.
    fn sanitized(self) -> Option<PathBuf> {
        let flags = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
        let (mut compiler, program) = self.compiler("-sanitized", &flags);
        let made = compiler.output().is_ok_and(|output| output.status.success());
        // A mistake must be found, or nothing below says anything.
        let mut command = Command::new(&program);
        let output = command.args(["-", "overrun"]).env("ASAN_OPTIONS", ASAN).output();
        let is_found = made && output.is_ok_and(|output| output.status.code() == Some(FOUND));
        is_found.then_some(program)
    }
}

/// The library's Rust code is not instrumented, and its statics live until the end.
const ASAN: &str = "detect_leaks=0:exitcode=66";
const FOUND: i32 = 66;

/// Settings of the plugin: link, engines, who runs them.
#[derive(Clone, Copy, Debug)]
struct Setup {
    link: &'static str,
    engines: &'static str,
    progress: &'static str,
}

const fn setup(link: &'static str, engines: &'static str, progress: &'static str) -> Setup {
    Setup { link, engines, progress }
}

/// The setups that a case runs with: the first two in the inner loop.
const SETUPS: &[Setup] = &[
    setup("shm", "1", "auto"),
    setup("udp", "2", "auto"),
    setup("auto", "3", "auto"),
    setup("udp", "1", "50"),
    setup("shm", "4", "20"),
];

fn setups() -> &'static [Setup] {
    &SETUPS[..Effort::choose([2, SETUPS.len(), SETUPS.len()])]
}

fn run(mode: &str, version: u32, seed: u64, setup: Setup) -> Command {
    run_program(Program::Net, mode, version, seed, setup)
}

fn run_program(program: Program, mode: &str, version: u32, seed: u64, setup: Setup) -> Command {
    run_path(program.path(), mode, version, seed, setup)
}

fn run_path(program: &Path, mode: &str, version: u32, seed: u64, setup: Setup) -> Command {
    let limit = testkit::deadline(Duration::from_secs(60)).as_secs();
    let mut command = Command::new(program);
    command.arg(library()).args([mode, &version.to_string(), &seed.to_string()]);
    command
        .env("WARPWIRE_NCCL_DEVICES", "lo")
        .env("WARPWIRE_NCCL_LINK", setup.link)
        .env("WARPWIRE_NCCL_ENGINES", setup.engines)
        .env("WARPWIRE_NCCL_PROGRESS", setup.progress)
        .env("PLUGIN_LIMIT", limit.to_string());
    for name in ["NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ", "NCCL_PROTO", "WARPWIRE_NCCL_GDR"] {
        command.env_remove(name);
    }
    command
}

fn passes(mode: &str, version: u32, seed: u64, setup: Setup) {
    passes_program(Program::Net, mode, version, seed, setup);
}

fn passes_program(program: Program, mode: &str, version: u32, seed: u64, setup: Setup) {
    let printed = ok(&mut run_program(program, mode, version, seed, setup));
    assert_eq!(printed.lines().last(), Some(format!("{mode}: all good").as_str()));
}

/// A version for each setup, so that all occur.
fn with_setups(mode: &str) {
    for (setup, version) in setups().iter().zip(VERSIONS) {
        passes(mode, version, 1, *setup);
    }
}

#[test]
fn every_version_moves_random_schedules() {
    for (seed, version) in VERSIONS.enumerate() {
        passes("random", version, seed as u64, SETUPS[seed % 2]);
    }
}

#[test]
fn random_schedules_from_seeds() {
    let seeds = Effort::pick("WARPWIRE_SEEDS", [1, 2, 200]);
    for seed in 100..100 + seeds {
        for setup in setups() {
            passes("random", 11, seed, *setup);
        }
    }
}

#[test]
fn several_communicators_and_threads() {
    with_setups("threads");
}

/// In a network namespace whose loopback interface is slow and drops what it cannot queue.
#[test]
fn lost_packets_are_sent_again() {
    if Effort::current() == Effort::Quick {
        return;
    }
    let setup = "ip link set lo mtu 4200 up && \
                 tc qdisc add dev lo root tbf rate 200mbit burst 64kb limit 100kb";
    let namespace = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", &format!("{setup} && {script}"), "sh"]);
        command
    };
    if !namespace("true").output().is_ok_and(|output| output.status.success()) {
        missing("net-lab", "no network namespace with tbf (needs root, and ip and tc of iproute2)");
        return;
    }
    let inside = run("random", 11, 7, SETUPS[1]);
    let mut command = namespace("\"$@\" && tc -s qdisc show dev lo");
    command.arg(inside.get_program()).args(inside.get_args());
    command.envs(inside.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let printed = ok(command.env("PLUGIN_EFFORT", "3"));
    assert!(printed.contains("random: all good"), "{printed}");
    let dropped = printed.split("dropped ").nth(1).and_then(|rest| rest.split(',').next());
    let dropped: u32 = dropped.and_then(|count| count.parse().ok()).unwrap();
    assert!(dropped > 0, "{printed}");
}

/// Two network namespaces, joined by interfaces that are slow and drop what they cannot queue. Runs
/// its arguments in the first; `PLUGIN_NETNS` is the second.
const TWO_NAMESPACES: &str = r#"
    unshare --net sleep 1000 & other=$!
    trap 'kill $other' EXIT
    while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do
        kill -0 $other || exit 1
    done
    export PLUGIN_NETNS=/proc/$other/ns/net
    tbf="tc qdisc add dev ww0 root tbf rate 200mbit burst 64kb limit 100kb"
    ip link add ww0 mtu 4200 type veth peer name ww0 mtu 4200 netns $other &&
    ip link set lo up && nsenter -t $other -n ip link set lo up &&
    ip address add 10.99.0.1/24 dev ww0 && ip link set ww0 up && $tbf &&
    nsenter -t $other -n ip address add 10.99.0.2/24 dev ww0 &&
    nsenter -t $other -n ip link set ww0 up && nsenter -t $other -n $tbf || exit 1
    for in in "" "nsenter -t $other -n"; do
        until $in ip link show ww0 | grep -q "state UP"; do sleep 0.05; done
    done
    "$@" && tc -s qdisc show dev ww0 && nsenter -t $other -n tc -s qdisc show dev ww0
"#;

/// Also with the link `auto`, which finds no shared memory there.
#[test]
fn two_machines_with_loss() {
    let namespaces = |command: &Command| {
        let mut outer = Command::new("unshare");
        outer.args(["--net", "sh", "-c", TWO_NAMESPACES, "sh"]);
        outer.arg(command.get_program()).args(command.get_args());
        outer.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        outer
    };
    if !namespaces(&Command::new("true")).output().is_ok_and(|output| output.status.success()) {
        let why = "no two network namespaces with veth and tbf (needs root, ip and tc)";
        missing("net-lab", why);
        return;
    }
    let count = Effort::choose([1, 2, 2]);
    for setup in &[setup("auto", "2", "auto"), setup("udp", "3", "50")][..count] {
        let net = run_program(Program::Net, "random", 11, 7, *setup);
        let gin = run_program(Program::Gin, "random", GIN[0], 2, *setup);
        for mut inside in [net, gin] {
            inside.env("WARPWIRE_NCCL_DEVICES", "ww0");
            let printed = ok(&mut namespaces(&inside));
            assert!(printed.contains("random: all good"), "{printed}");
            let dropped = printed.split("dropped ").skip(1).filter_map(|rest| {
                rest.split(',').next().and_then(|count| count.parse::<u32>().ok())
            });
            let dropped: Vec<u32> = dropped.collect();
            assert!(dropped.len() == 2 && dropped.iter().sum::<u32>() > 0, "{printed}");
        }
    }
}

/// The C programs, with what they pass to the library and get from it.
#[test]
fn nothing_is_found_by_sanitizers() {
    if Effort::current() == Effort::Quick {
        return;
    }
    let (Some(net), Some(gin)) = (Program::Net.sanitized(), Program::Gin.sanitized()) else {
        missing("sanitizers", "cc has no ASan and UBSan that find a mistake here");
        return;
    };
    let passes = |program: &Path, mode: &str, version: u32, seed: u64| {
        let mut command = run_path(program, mode, version, seed, SETUPS[version as usize % 2]);
        let printed = ok(command.env("ASAN_OPTIONS", ASAN));
        assert_eq!(printed.lines().last(), Some(format!("{mode}: all good").as_str()));
    };
    for seed in 50..50 + Effort::pick("WARPWIRE_SEEDS", [1, 1, 20]) {
        VERSIONS.for_each(|version| passes(&net, "random", version, seed));
        GIN.iter().for_each(|version| passes(&gin, "random", *version, seed));
    }
    let net_modes = ["sizes", "mistakes", "closing", "threads", "full", "killed", "strangers"];
    for (mode, version) in
        net_modes[..Effort::choose([0, 3, 7])].iter().zip([8, 11, 9, 10].iter().cycle())
    {
        passes(&net, mode, *version, 1);
    }
    let gin_modes = ["mistakes", "closing", "gets", "visible", "signals", "full", "killed"];
    for mode in &gin_modes[..Effort::choose([0, 3, 7])] {
        passes(&gin, mode, GIN[1], 1);
    }
}

#[test]
fn gpu_memory_is_announced_if_told_so() {
    for version in VERSIONS {
        let mut command = run("gdr", version, 1, SETUPS[version as usize % 2]);
        ok(command.env("WARPWIRE_NCCL_GDR", "1"));
    }
    let mut command = run("gdr", 11, 1, SETUPS[0]);
    command.env("WARPWIRE_NCCL_GDR", "1").env("NCCL_NET_GDR_LEVEL", "PHB");
    ok(command.env("PLUGIN_LEVEL", "PHB"));
    // Host memory, as before.
    ok(run("random", 11, 3, SETUPS[0]).env("WARPWIRE_NCCL_GDR", "1"));
}

#[test]
fn sizes_from_nothing_to_many_stripes() {
    with_setups("sizes");
}

#[test]
fn two_gibibytes() {
    if Effort::current() != Effort::Quick {
        passes("huge", 11, 1, SETUPS[0]);
    }
}

#[test]
fn full_queues_refuse_and_requests_allocate_nothing() {
    with_setups("full");
}

#[test]
fn closing_in_every_order_leaves_nothing_behind() {
    with_setups("closing");
}

#[test]
fn a_receiver_that_ends_does_not_fail_its_sender() {
    for seed in 0..8 {
        passes("last_words", 11, seed, SETUPS[seed as usize / 2 % 2]);
    }
}

#[test]
fn a_killed_peer_is_an_error() {
    with_setups("killed");
}

#[test]
fn a_stopped_peer_is_an_error_in_the_end() {
    for setup in &SETUPS[..Effort::choose([0, 1, 2])] {
        passes("stopped", 11, 1, *setup);
    }
}

#[test]
fn strangers_do_not_stop_the_peer() {
    with_setups("strangers");
}

#[test]
fn mistakes_are_refused() {
    for version in VERSIONS {
        passes("mistakes", version, 1, SETUPS[version as usize % 2]);
    }
}

#[test]
fn forked_children_are_refused() {
    with_setups("forks");
}

#[test]
fn wrong_settings_are_refused_with_the_reason() {
    for (name, value) in [
        ("WARPWIRE_NCCL_DEVICES", "nowhere9"),
        ("WARPWIRE_NCCL_LINK", "tcp"),
        ("WARPWIRE_NCCL_ENGINES", "99"),
        ("WARPWIRE_NCCL_PROGRESS", "never"),
        ("WARPWIRE_NCCL_GDR", "yes"),
    ] {
        let mut command = run("settings", 11, 1, SETUPS[0]);
        ok(command.env(name, value));
    }
    let mut command = run("settings", 11, 1, SETUPS[0]);
    ok(command.env("WARPWIRE_NCCL_GDR", "1").env("NCCL_PROTO", "LL128"));
}

/// Versions of the tables for device-initiated networking: GIN and RMA.
const GIN: [u32; 2] = [11, 14];

/// Both versions with the first two setups; then, with more effort, one version for each.
fn gin_with_setups(mode: &str, seed: u64) {
    for (at, setup) in setups().iter().enumerate() {
        passes_program(Program::Gin, mode, GIN[at % 2], seed, *setup);
    }
    passes_program(Program::Gin, mode, GIN[1], seed, SETUPS[0]);
}

#[test]
fn ranks_put_random_ranges_and_count_signals() {
    let seeds = Effort::pick("WARPWIRE_SEEDS", [1, 2, 200]);
    for seed in 0..seeds {
        gin_with_setups("random", seed);
    }
}

#[test]
fn data_is_there_before_its_signal() {
    gin_with_setups("visible", 1);
}

#[test]
fn signals_of_several_ranks_are_counted_exactly() {
    gin_with_setups("signals", 1);
}

#[test]
fn more_operations_than_announced_are_refused_and_none_allocates() {
    gin_with_setups("full", 1);
}

#[test]
fn mistakes_of_device_initiated_networking_write_nothing() {
    gin_with_setups("mistakes", 1);
}

#[test]
fn reads_and_flushes_of_rma() {
    for setup in setups() {
        passes_program(Program::Gin, "gets", GIN[1], 3, *setup);
    }
}

#[test]
fn ranks_close_in_every_order() {
    gin_with_setups("closing", 1);
}

/// While it is used, before it connects, and during a registration.
#[test]
fn a_killed_rank_is_an_error_in_the_others() {
    for seed in 0..3 {
        gin_with_setups("killed", seed);
    }
}

#[test]
fn exactly_the_tables_are_exported() {
    let printed = ok(Command::new("nm").args(["-D", "--defined-only"]).arg(library()));
    let mut symbols: Vec<_> =
        printed.lines().filter_map(|line| line.split_whitespace().last()).collect();
    symbols.sort_unstable();
    let mut expected: Vec<_> =
        VERSIONS.map(|version| format!("ncclNetPlugin_v{version}")).collect();
    expected.extend(["ncclGinPlugin_v11", "ncclRmaPlugin_v14"].map(str::to_owned));
    expected.sort_unstable();
    assert_eq!(symbols, expected);
    let dynamic = ok(Command::new("readelf").arg("-d").arg(library()));
    assert!(dynamic.contains("soname: [libnccl-net-warpwire.so]"), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
    let version = System::live().warpwire_version(library().to_str().unwrap());
    assert_eq!(version.as_deref(), Some(env!("CARGO_PKG_VERSION")), "the note of the doctor");
}

#[test]
fn the_library_is_installed_under_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let script = root().join("tools/install-nccl");
    let printed = ok(Command::new(&script).arg(folder.path()).arg(library()));
    let installed = folder.path().join("libnccl-net-warpwire.so");
    assert!(installed.is_file() && printed.contains("NCCL_NET_PLUGIN="), "{printed}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    assert!(!Command::new(&script).output().unwrap().status.success(), "without a folder");
    let mut absent = Command::new(&script);
    let absent = absent.arg(folder.path()).arg("/nowhere.so").output().unwrap();
    assert!(!absent.status.success());
}
