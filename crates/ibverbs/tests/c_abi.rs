//! The library as C programs use it: installed, linked with the system's header, loaded.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use testkit::c::{missing, ok, root};

const HEADER: &str = "/usr/include/infiniband/verbs.h";
const PRIVATE: [u32; 6] = [25, 34, 57, 59, 64, 65];

fn no_header() -> bool {
    let is_absent = !Path::new(HEADER).exists();
    if is_absent {
        missing("verbs.h", &format!("no {HEADER} (Debian: libibverbs-dev)"));
    }
    is_absent
}

/// A folder with the library installed, made once; `None` if cargo's linker made no versions.
fn folder() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = FOLDER.get_or_init(|| {
        let library = std::env::current_exe().unwrap().with_file_name("libibverbs.so");
        let versions = ok(Command::new("readelf").args(["-V", "--wide"]).arg(&library));
        if !versions.contains("IBVERBS_PRIVATE_34") {
            missing("versions", "the linker makes no symbol versions (tools/install-ibverbs does)");
            return None;
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ibverbs");
        let _ = fs::remove_dir_all(&folder);
        let built = library.parent().unwrap();
        ok(Command::new(root().join("tools/install-ibverbs")).arg(&folder).arg(built));
        Some(folder)
    });
    made.as_deref()
}

/// `verbs.c`, linked with the installed library.
fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = PROGRAM.get_or_init(|| {
        let folder = folder()?;
        let program = folder.join("verbs");
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]);
        cc.arg(root().join("crates/ibverbs/tests/verbs.c")).arg("-o").arg(&program);
        ok(cc.arg(format!("-L{}", folder.display())).arg("-libverbs"));
        Some(program)
    });
    made.as_deref()
}

/// The program, with the loopback interface as its only device.
fn run(mode: &str) -> Option<Command> {
    if no_header() {
        return None;
    }
    let mut command = Command::new(program()?);
    command.arg(mode).env("LD_LIBRARY_PATH", folder()?).env("WARPWIRE_IB_DEVICES", "lo");
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

parts!(queries regions operations unreliable windows channels shared_receives datagrams extended
    forks signals);

/// glibc overwrites freed memory here, so that its use is noticed.
#[test]
fn objects_that_outlive_their_device() {
    if let Some(mut command) = run("wrong_order") {
        ok(command.env("MALLOC_PERTURB_", "165"));
    }
}

#[test]
fn every_part_passes_over_udp() {
    for part in ["operations", "unreliable", "windows", "datagrams", "extended"] {
        let Some(mut command) = run(part) else { return };
        ok(command.env("WARPWIRE_IB_LINK", "udp"));
    }
}

/// The packets of a capture: their UDP ports, and the bytes behind.
fn captured(bytes: &[u8]) -> Vec<([u16; 2], &[u8])> {
    // Nanoseconds, little endian.
    assert_eq!(bytes[..4], 0xa1b2_3c4d_u32.to_le_bytes());
    let (mut rest, mut packets) = (&bytes[24..], Vec::new());
    while !rest.is_empty() {
        let len = u32::from_le_bytes(rest[8..12].try_into().unwrap()) as usize;
        let udp = &rest[16 + 20..16 + len];
        let port = |at: usize| u16::from_be_bytes([udp[at], udp[at + 1]]);
        packets.push(([port(0), port(2)], &udp[8..]));
        rest = &rest[16 + len..];
    }
    packets
}

/// The address of an interface to elsewhere, if there is one.
fn outward_address() -> Option<std::net::IpAddr> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?; // sends nothing
    socket.local_addr().ok().map(|at| at.ip()).filter(|ip| !ip.is_loopback())
}

/// An interface of 1500 bytes does not limit packets that do not pass it.
#[test]
fn packets_within_a_machine_are_large() {
    let Some(address) = outward_address() else {
        println!("skipped: no interface but the loopback interface");
        return;
    };
    for link in ["auto", "udp"] {
        let folder = tempfile::tempdir().unwrap();
        let Some(mut command) = run("operations") else { return };
        command.env("WARPWIRE_IB_LINK", link).env("WARPWIRE_IB_DEVICES", address.to_string());
        ok(command.env("WARPWIRE_PCAP", folder.path().join("pcap")));
        let bytes = fs::read(folder.path().join("pcap")).unwrap();
        let longest = captured(&bytes).iter().map(|(_, packet)| packet.len()).max().unwrap();
        assert!((4096..4200).contains(&longest), "{link}: {longest}");
    }
}

#[test]
fn packets_are_captured() {
    for link in ["auto", "udp"] {
        let folder = tempfile::tempdir().unwrap();
        let Some(mut command) = run("operations") else { return };
        command.env("WARPWIRE_IB_LINK", link).env("WARPWIRE_PCAP", folder.path().join("%p.pcap"));
        let mut child = command.stdout(Stdio::null()).spawn().unwrap();
        assert!(child.wait().unwrap().success());
        let bytes = fs::read(folder.path().join(format!("{}.pcap", child.id()))).unwrap();
        let packets = captured(&bytes);
        assert!(packets.len() > 20, "{link}: {}", packets.len());
        for (ports, packet) in packets {
            assert!(ports.iter().all(|port| (24576..26624).contains(port)), "{ports:?}");
            assert!(packet.len() >= 16 && packet[0] >> 5 == 0, "not RC: {packet:02x?}");
        }
    }
    // A file that cannot be created: devices do not open, and the log says why.
    let Some(mut command) = run("operations") else { return };
    command.env("WARPWIRE_PCAP", "/nowhere/a.pcap").env("WARPWIRE_IB_LOG", "1");
    let output = command.output().unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("/nowhere/a.pcap"), "{text}");
}

#[test]
fn every_part_passes_with_a_thread_that_spins() {
    for part in ["operations", "channels", "shared_receives"] {
        let Some(mut command) = run(part) else { return };
        ok(command.env("WARPWIRE_IB_PROGRESS", "thread"));
    }
}

/// A peer that exits right after its last completion has acknowledged it.
#[test]
fn a_program_that_exits_has_acknowledged() {
    let start = |mode: &str| -> Option<Child> {
        let mut command = run(mode)?;
        Some(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
    };
    for _ in 0..10 {
        let (Some(mut sender), Some(mut receiver)) = (start("sender"), start("receiver")) else {
            return;
        };
        let mut lines = [&mut sender, &mut receiver]
            .map(|child| BufReader::new(child.stdout.take().unwrap()).lines());
        let [first, second] = lines.each_mut().map(|lines| lines.next().unwrap().unwrap());
        // Each gets the other's number; and both are connected before the first message.
        let inputs = [&mut sender, &mut receiver].map(|child| child.stdin.as_mut().unwrap());
        for (input, number) in inputs.into_iter().zip([second, first]) {
            writeln!(input, "{number}").unwrap();
        }
        for lines in &mut lines {
            assert_eq!(lines.next().unwrap().unwrap(), "ready");
        }
        for child in [&mut receiver, &mut sender] {
            writeln!(child.stdin.as_mut().unwrap(), "go").unwrap();
        }
        assert!(receiver.wait().unwrap().success());
        assert!(sender.wait().unwrap().success(), "the sender's work failed");
    }
}

/// The symbols of `exports.txt`, as `nm` prints them.
fn listed() -> BTreeSet<String> {
    let list = fs::read_to_string(root().join("crates/ibverbs/exports.txt")).unwrap();
    let mut symbols = BTreeSet::new();
    for line in list.lines().filter(|line| !line.starts_with('#')) {
        match line.split_once(' ') {
            Some(("PRIVATE", symbol)) => {
                symbols.extend(PRIVATE.map(|node| format!("{symbol}@IBVERBS_PRIVATE_{node}")));
            }
            Some((node, symbol)) if node.contains("PRIVATE") => {
                symbols.insert(format!("{symbol}@{node}"));
            }
            Some((node, symbol)) => {
                symbols.insert(format!("{symbol}@@{node}"));
            }
            None => {}
        }
    }
    symbols
}

#[test]
fn exactly_the_listed_symbols_are_exported() {
    let Some(folder) = folder() else { return };
    let mut nm = Command::new("nm");
    nm.args(["-D", "--defined-only", "--with-symbol-versions"]);
    let printed = ok(nm.arg(folder.join("libibverbs.so.1")));
    let symbols = printed.lines().filter_map(|line| line.split_whitespace().last());
    // The nodes themselves are listed as absolute symbols.
    let symbols: BTreeSet<String> =
        symbols.filter(|name| !name.starts_with("IBVERBS_")).map(str::to_owned).collect();
    let expected = listed();
    assert!(expected.len() > 400, "{}", expected.len());
    let unlisted: Vec<_> = symbols.difference(&expected).collect();
    let absent: Vec<_> = expected.difference(&symbols).collect();
    assert!(unlisted.is_empty() && absent.is_empty(), "{unlisted:?} {absent:?}");
}

#[test]
fn the_installed_files_are_complete() {
    let Some(folder) = folder() else { return };
    assert_eq!(fs::read_link(folder.join("libibverbs.so")).unwrap(), Path::new("libibverbs.so.1"));
    let dynamic = ok(Command::new("readelf").arg("-d").arg(folder.join("libibverbs.so.1")));
    assert!(dynamic.contains("soname: [libibverbs.so.1]"), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
    // A missing folder argument or library fails.
    let script = root().join("tools/install-ibverbs");
    assert!(!Command::new(&script).output().unwrap().status.success());
    let mut absent = Command::new(&script);
    let absent = absent.arg(folder.join("other")).arg("/nowhere").output().unwrap();
    assert!(!absent.status.success());
}

/// Libraries of vendors, which programs link, find every symbol that they want here.
#[test]
fn libraries_of_vendors_load() {
    let Some(folder) = folder() else { return };
    let places = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"];
    let mut tried = 0;
    for name in ["libmlx5.so.1", "libmlx4.so.1", "libefa.so.1", "libmana.so.1"] {
        let found = places.iter().map(|place| Path::new(place).join(name)).find(|at| at.exists());
        let Some(library) = found else { continue };
        let mut ldd = Command::new("ldd");
        let printed = ldd.arg("-r").arg(&library).env("LD_LIBRARY_PATH", folder).output().unwrap();
        let text = String::from_utf8_lossy(&[printed.stdout, printed.stderr].concat()).into_owned();
        assert!(text.contains(&format!("{}/libibverbs.so.1", folder.display())), "{text}");
        assert!(!text.contains("undefined symbol") && !text.contains("not found"), "{text}");
        tried += 1;
    }
    if tried == 0 {
        missing("providers", "no library of a vendor (Debian: ibverbs-providers)");
    }
}
