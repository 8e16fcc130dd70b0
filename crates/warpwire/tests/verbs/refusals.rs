//! What a machine may lack, as programs hear of it: the library, a release of it, rights, limits, a port.
//!
//! The library is found once in a process, so that each of these is a process of its own, which tries and tells.

use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use warpwire::error::Kind as ErrorKind;
use warpwire::mr::{HostMemory, MemorySource};
use warpwire::verbs::{Access, AttachMode, Context, DeviceOptions, DmaBufRange, QpOptions};

use crate::verbs::fixture::{Endpoint, Fixture, TestLink};
use testkit::{Role, cases, skip};

cases!(Fixture; CASES: users_who_may_not, releases_that_are_too_old, a_port_that_is_down);
cases!(Fixture; ONCE: libraries_that_are_not_there);

/// Where another library is named.
const LIBRARY: &str = "WARPWIRE_IBVERBS";

/// In a process of its own: tries to use the device of that name, and prints what came of it.
pub fn run(name: &str) {
    match attempt(name) {
        Ok(output_text) => println!("it works: {output_text}"),
        Err(error) => println!("{error:?}"),
    }
}

/// Opens, makes queues, registers memory of the host and of a GPU; tells how that is reached, and what becomes of a dma-buf.
fn attempt(name: &str) -> warpwire::Result<String> {
    let context = Context::open_device(name)?;
    let (pd, cq) = (context.pd(), context.create_cq(4)?);
    let _qp = context.create_qp(&pd, &cq, &cq, QpOptions::default())?;
    let sim = warpwire::mem::sim::Sim::start(warpwire::mem::sim::SimConfig::default())?;
    let memory = MemorySource::from(sim.device(0)?.alloc(4096)?.whole()?).without_window();
    let staged = context.register(&pd, memory, Access::LOCAL_WRITE)?;
    let memory = HostMemory::new(1 << 20)?;
    let range = DmaBufRange { fd: memory.as_fd(), offset: 0, len: 4096 };
    let buffer = context.register_dmabuf(&pd, range, None, Access::ALL, AttachMode::Static);
    let buffer = buffer.map_or_else(|error| format!("{error:?}"), |_| "it is taken".into());
    context.register(&pd, memory.clone(), Access::ALL)?;
    Ok(format!("{}; a dma-buf: {buffer}", staged.why().join("; ")))
}

fn attempt_command(name: &str) -> Command {
    Role::new("verbs", format!("try {name}")).command()
}

fn output_text(command: &mut Command) -> String {
    String::from_utf8(command.output().unwrap().stdout).unwrap()
}

fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}

/// No library, a file that is none, and a library that is another.
fn libraries_that_are_not_there(_: &Fixture) {
    let with = |library: &str| output_text(attempt_command("mlx5_0").env(LIBRARY, library));
    let text = with("libibverbs-of-nowhere.so.1");
    assert!(text.starts_with("Unavailable: "), "{text}");
    says(&text, &["libibverbs-of-nowhere.so.1 is not installed", "apt install libibverbs1"]);
    says(&with("/proc/self/exe.not"), &["/proc/self/exe.not is not installed"]);
    says(&with("libc.so.6"), &["has no symbol ibv_get_device_list", "unset WARPWIRE_IBVERBS"]);
}

fn device(fixture: &Fixture) -> (Endpoint, String) {
    if fixture.test_link != TestLink::Device {
        skip("once is enough");
    }
    let end = fixture.testbed().a;
    let name = end.context.device().unwrap().device().name.clone();
    (end, name)
}

/// An ordinary user: first the node is closed to him, then he may lock little memory.
fn users_who_may_not(fixture: &Fixture) {
    let (end, name) = device(fixture);
    let node = end.context.device().unwrap().device().node.clone();
    let role = Role::new("verbs", format!("try {name}"));
    let run = || output_text(role.command_after("ulimit -l 64").uid(65_534).gid(65_534));
    assert!(shell(&format!("chmod 600 {node}")));
    let closed = run();
    assert!(shell(&format!("chmod 666 {node}")));
    let limited = run();
    assert!(closed.starts_with("PermissionDenied: "), "{closed}");
    says(&closed, &["/dev/infiniband/uverbs", &name, "rdma-core's udev rule"]);
    assert!(limited.starts_with("OutOfMemory: "), "{limited}");
    says(&limited, &["may lock 64 KiB in all", "ulimit -l"]);
}

/// The machine's own library, without a symbol that came later.
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
    let at = bytes.windows(wanted.len()).position(is_its_name).expect("the library has it");
    // Under another name it is not found by its own.
    bytes[at + 1] = b'_';
    let old = folder.path().join("libibverbs-33.so.1");
    std::fs::write(&old, &bytes).unwrap();
    let text = output_text(attempt_command(&name).env(LIBRARY, old));
    // What there are other ways for is done in another way.
    says(
        &text,
        &[
            "it works: ",
            "no dma-buf: ",
            "libibverbs-33.so.1 has no symbol ibv_reg_dmabuf_mr",
            "staged: ",
        ],
    );
    says(&text, &["a dma-buf: Unavailable: ", "install rdma-core 34 or newer"]);
}

/// Runs a command of the guest; returns whether it ended well.
fn shell(command: &str) -> bool {
    Command::new("sh").args(["-c", command]).status().is_ok_and(|status| status.success())
}

fn a_port_that_is_down(fixture: &Fixture) {
    let _ = device(fixture);
    // A cable of its own, which nothing here needs.
    let made = "ip link add down0 type veth peer name down1 && rdma link add rxedown type rxe netdev down0";
    assert!(shell(made), "no device on a cable that is down");
    let opened = Context::open_device("rxedown");
    let asked = DeviceOptions { port: Some(1), ..DeviceOptions::default() };
    let refused = Context::open_device_with("rxedown", asked).map(drop);
    let made = opened.and_then(|context| {
        let why = context.path().why.clone();
        let cq = context.create_cq(4)?;
        Ok((why, context.create_qp(&context.pd(), &cq, &cq, QpOptions::default()).map(drop)))
    });
    assert!(shell("rdma link delete rxedown; ip link delete down0"));
    let (why, qp) = made.unwrap();
    // Opened without a port by name, it may come up later: queue pairs are refused until then.
    says(&why, &["rxedown (rxe): ", "the port is down"]);
    for refused in [refused.unwrap_err(), qp.unwrap_err()] {
        assert_eq!(refused.kind(), &ErrorKind::Unavailable, "{refused}");
        says(&refused.to_string(), &["the port is down", "ip link"]);
    }
}
