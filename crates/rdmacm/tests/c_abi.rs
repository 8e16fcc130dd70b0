//! The library as C programs use it: installed beside libibverbs, linked with the system's headers,
//! loaded.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use testkit::c::{missing, ok, root};

const HEADER: &str = "/usr/include/rdma/rdma_cma.h";

/// A folder with both libraries installed, made once; `None` if cargo's linker made no versions.
fn folder() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = FOLDER.get_or_init(|| {
        let built = std::env::current_exe().unwrap();
        let built = built.parent().unwrap();
        let library = built.join("librdmacm.so");
        let versions = ok(Command::new("readelf").args(["-V", "--wide"]).arg(&library));
        if !versions.contains("RDMACM_1.3") {
            missing("versions", "the linker makes no symbol versions (tools/install-ibverbs does)");
            return None;
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("rdmacm");
        let _ = fs::remove_dir_all(&folder);
        ok(Command::new(root().join("tools/install-ibverbs")).arg(&folder).arg(built));
        Some(folder)
    });
    made.as_deref()
}

/// `cm.c`, linked with the installed libraries.
fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = PROGRAM.get_or_init(|| {
        if !Path::new(HEADER).exists() {
            missing("rdma_cma.h", &format!("no {HEADER} (Debian: librdmacm-dev)"));
            return None;
        }
        let folder = folder()?;
        let program = folder.join("cm");
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]);
        cc.arg(root().join("crates/rdmacm/tests/cm.c")).arg("-o").arg(&program);
        ok(cc.arg(format!("-L{}", folder.display())).args(["-lrdmacm", "-libverbs"]));
        Some(program)
    });
    made.as_deref()
}

/// The program, with the loopback interface as its only device.
fn run(part: &str) -> Option<Command> {
    let mut command = Command::new(program()?);
    command.arg(part).env("LD_LIBRARY_PATH", folder()?).env("WARPWIRE_IB_DEVICES", "lo");
    Some(command)
}

macro_rules! parts {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            if let Some(mut command) = run(stringify!($name)) {
                let printed = ok(&mut command);
                assert_eq!(printed, concat!(stringify!($name), ": all good\n"));
            }
        })*
    };
}

parts!(connections own_queue_pairs late_receives datagrams synchronous refusals devices strangers
    shared_receives forks);

/// A part of the program whose output is read line by line.
fn start(part: &[&str]) -> Option<(Child, Lines<BufReader<ChildStdout>>)> {
    let mut command = run(part[0])?;
    let mut child = command.args(&part[1..]).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    Some((child, lines))
}

/// A peer that is killed ends the connection for the other side, whichever side it is.
#[test]
fn a_killed_peer_is_told() {
    for is_server_killed in [true, false] {
        let Some((mut server, mut of_server)) = start(&["server"]) else { return };
        let port = of_server.next().unwrap().unwrap();
        let (mut client, mut of_client) = start(&["client", &port]).unwrap();
        for lines in [&mut of_server, &mut of_client] {
            assert_eq!(lines.next().unwrap().unwrap(), "established");
        }
        let (killed, other) = match is_server_killed {
            true => (&mut server, &mut client),
            false => (&mut client, &mut server),
        };
        killed.kill().unwrap();
        assert!(!killed.wait().unwrap().success());
        assert!(other.wait().unwrap().success(), "the other side was not told");
    }
}

#[test]
fn exactly_the_listed_symbols_are_exported() {
    let Some(folder) = folder() else { return };
    let mut nm = Command::new("nm");
    nm.args(["-D", "--defined-only", "--with-symbol-versions"]);
    let printed = ok(nm.arg(folder.join("librdmacm.so.1")));
    let symbols = printed.lines().filter_map(|line| line.split_whitespace().last());
    // The nodes themselves are listed as absolute symbols.
    let symbols: BTreeSet<String> =
        symbols.filter(|name| !name.starts_with("RDMACM_")).map(str::to_owned).collect();
    let list = fs::read_to_string(root().join("crates/rdmacm/exports.txt")).unwrap();
    let lines = list.lines().filter(|line| !line.starts_with('#'));
    let expected: BTreeSet<String> = lines
        .map(|line| line.replace("REFUSED ", ""))
        .map(|line| line.split_once(' ').map(|(node, name)| format!("{name}@@{node}")).unwrap())
        .collect();
    assert_eq!(expected.len(), 68);
    let unlisted: Vec<_> = symbols.difference(&expected).collect();
    let absent: Vec<_> = expected.difference(&symbols).collect();
    assert!(unlisted.is_empty() && absent.is_empty(), "{unlisted:?} {absent:?}");
}

#[test]
fn the_installed_files_are_complete() {
    let Some(folder) = folder() else { return };
    for name in ["ibverbs", "rdmacm"] {
        let (link, file) = (format!("lib{name}.so"), format!("lib{name}.so.1"));
        assert_eq!(fs::read_link(folder.join(link)).unwrap(), Path::new(&file));
        let dynamic = ok(Command::new("readelf").arg("-d").arg(folder.join(&file)));
        assert!(dynamic.contains(&format!("soname: [{file}]")), "{dynamic}");
        assert!(dynamic.contains("NODELETE"), "{dynamic}");
    }
}

/// The library uses the devices of the program's libibverbs: it has none of its own, and says so
/// where there is none.
#[test]
fn without_devices_calls_are_refused() {
    let Some(mut command) = run("devices") else { return };
    let output = command.env("WARPWIRE_IB_DEVICES", "nothing9").output().unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("list && number == 1"), "{text}");
}
