//! Errors for what a machine may lack: libibverbs, a recent release of it, permissions, limits, an
//! active port.
//!
//! A process loads the library once, so each attempt runs in a child process, which prints its
//! outcome.

use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use warpwire::error::Kind as ErrorKind;
use warpwire::mr::{HostMemory, MemorySource};
use warpwire::verbs::{Access, AttachMode, Context, DeviceOptions, DmaBufRange, QpOptions};

use crate::verbs::fixture::{Endpoint, Fixture, TestLink};
use testkit::{Role, cases, skip};

cases!(Fixture; CASES: unprivileged_users, releases_that_are_too_old, a_port_that_is_down);
cases!(Fixture; ONCE: missing_libraries);

/// Environment variable that names another library.
const LIBRARY: &str = "WARPWIRE_IBVERBS";

/// In a child process: tries to use the named device, and prints the outcome.
pub fn run(name: &str) {
    match attempt(name) {
        Ok(output_text) => println!("it works: {output_text}"),
        Err(error) => println!("{error:?}"),
    }
}

/// Opens the device, creates queues, registers host and GPU memory. Returns the access path of the
/// GPU memory and the outcome of a dma-buf registration.
fn attempt(name: &str) -> warpwire::Result<String> {
    let context = Context::open_device(name)?;
    let (pd, cq) = (context.alloc_pd(), context.create_cq(4)?);
    let _qp = context.create_qp(&pd, &cq, &cq, QpOptions::default())?;
    let sim = warpwire::mem::sim::Sim::start(warpwire::mem::sim::SimConfig::default())?;
    let memory = MemorySource::from(sim.device(0)?.alloc(4096)?.whole()?).without_window();
    let staged = context.register(&pd, memory, Access::LOCAL_WRITE)?;
    let memory = HostMemory::new(1 << 20)?;
    let range = DmaBufRange { fd: memory.as_fd(), offset: 0, len: 4096 };
    let buffer = context.register_dmabuf(&pd, range, None, Access::ALL, AttachMode::Static);
    let buffer = buffer.map_or_else(|error| format!("{error:?}"), |_| "accepted".into());
    context.register(&pd, memory.clone(), Access::ALL)?;
    Ok(format!("{}; a dma-buf: {buffer}", staged.why().join("; ")))
}

fn attempt_command(name: &str) -> Command {
    Role::new("verbs", format!("try {name}")).command()
}

fn output_text(command: &mut Command) -> String {
    String::from_utf8(command.output().unwrap().stdout).unwrap()
}

fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}

/// No library, a missing file, and another library.
fn missing_libraries(_: &Fixture) {
    let with = |library: &str| output_text(attempt_command("mlx5_0").env(LIBRARY, library));
    let text = with("libibverbs-of-nowhere.so.1");
    assert!(text.starts_with("Unavailable: "), "{text}");
    assert_contains(
        &text,
        &["libibverbs-of-nowhere.so.1 is not installed", "apt install libibverbs1"],
    );
    assert_contains(&with("/proc/self/exe.not"), &["/proc/self/exe.not is not installed"]);
    assert_contains(
        &with("libc.so.6"),
        &["has no symbol ibv_get_device_list", "unset WARPWIRE_IBVERBS"],
    );
}

fn device(fixture: &Fixture) -> (Endpoint, String) {
    if fixture.test_link != TestLink::Device {
        skip("runs in one device configuration only");
    }
    let end = fixture.testbed().a;
    let name = end.context.device().unwrap().device().name.clone();
    (end, name)
}

/// An ordinary user: first without permission for the device node, then with a low limit on locked
/// memory.
fn unprivileged_users(fixture: &Fixture) {
    let (end, name) = device(fixture);
    let node = end.context.device().unwrap().device().node.clone();
    let role = Role::new("verbs", format!("try {name}"));
    let run = || output_text(role.command_after("ulimit -l 64").uid(65_534).gid(65_534));
    assert!(shell(&format!("chmod 600 {node}")));
    let closed = run();
    assert!(shell(&format!("chmod 666 {node}")));
    let limited = run();
    assert!(closed.starts_with("PermissionDenied: "), "{closed}");
    assert_contains(&closed, &["/dev/infiniband/uverbs", &name, "rdma-core's udev rule"]);
    assert!(limited.starts_with("OutOfMemory: "), "{limited}");
    assert_contains(&limited, &["may lock 64 KiB in total", "ulimit -l"]);
}

/// The machine's own library without a symbol of a later release.
fn releases_that_are_too_old(fixture: &Fixture) {
    let (_, name) = device(fixture);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps.lines().filter_map(|line| line.split_whitespace().last());
    let path = path.into_iter().find(|path| path.contains("libibverbs.so")).unwrap();
    let mut bytes = std::fs::read(path).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let symbol = "ibv_reg_dmabuf_mr";
    let wanted = format!("\0{symbol}\0");
    let is_its_name = |window: &[u8]| window == wanted.as_bytes();
    let at = bytes
        .windows(wanted.len())
        .position(is_its_name)
        .expect("the symbol's name in the library");
    // Renaming the symbol hides it.
    bytes[at + 1] = b'_';
    let old = folder.path().join("libibverbs-33.so.1");
    std::fs::write(&old, &bytes).unwrap();
    let text = output_text(attempt_command(&name).env(LIBRARY, old));
    // Operations that do not need the symbol still work.
    assert_contains(
        &text,
        &[
            "it works: ",
            "no dma-buf: ",
            "libibverbs-33.so.1 has no symbol ibv_reg_dmabuf_mr",
            "staged: ",
        ],
    );
    assert_contains(&text, &["a dma-buf: Unavailable: ", "install rdma-core 34 or newer"]);
}

/// Runs a shell command in the guest; returns whether it succeeded.
fn shell(command: &str) -> bool {
    Command::new("sh").args(["-c", command]).status().is_ok_and(|status| status.success())
}

fn a_port_that_is_down(fixture: &Fixture) {
    let _ = device(fixture);
    // A separate veth pair that no other case uses.
    let create = "ip link add down0 type veth peer name down1 && \
                  rdma link add rxedown type rxe netdev down0";
    assert!(shell(create), "cannot create a device on a link that is down");
    let opened = Context::open_device("rxedown");
    let options = DeviceOptions::default().with_port(1);
    let refused = Context::open_device_with("rxedown", options).map(drop);
    let made = opened.and_then(|context| {
        let why = context.path().why.clone();
        let cq = context.create_cq(4)?;
        Ok((why, context.create_qp(&context.alloc_pd(), &cq, &cq, QpOptions::default()).map(drop)))
    });
    assert!(shell("rdma link delete rxedown; ip link delete down0"));
    let (why, qp) = made.unwrap();
    // Without an explicit port the device opens, as the port may come up later; queue pairs are
    // rejected until then.
    assert_contains(&why, &["rxedown (rxe): ", "the port is down"]);
    for refused in [refused.unwrap_err(), qp.unwrap_err()] {
        assert_eq!(refused.kind(), &ErrorKind::Unavailable, "{refused}");
        assert_contains(&refused.to_string(), &["the port is down", "ip link"]);
    }
}
