//! The library as C programs use it: installed, linked by pkg-config and CMake, two processes.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use testkit::c::{missing, ok, root};
use warpwire_c::{STATUSES, abi};

/// The library that cargo has just built for this test, next to the test binary.
fn library() -> PathBuf {
    let library = std::env::current_exe().unwrap().with_file_name("libwarpwire_c.so");
    assert!(library.is_file(), "cargo built no {}", library.display());
    library
}

fn installed() -> Command {
    Command::new(root().join("tools/install"))
}

/// A prefix with the library installed, created once.
fn prefix() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join("capi-prefix");
        let _ = fs::remove_dir_all(&prefix);
        ok(installed().arg(&prefix).arg(library()));
        prefix
    })
}

/// Compiler options by pkg-config, or what they should be where it is not installed.
fn options() -> Vec<String> {
    let folder = prefix().join("lib/pkgconfig");
    let mut command = Command::new("pkg-config");
    command.args(["--cflags", "--libs", "warpwire"]).env("PKG_CONFIG_PATH", folder);
    match command.output() {
        Ok(_) => ok(&mut command).split_whitespace().map(str::to_owned).collect(),
        Err(why) => {
            missing("pkg-config", &format!("no pkg-config ({why})"));
            let at = prefix().display();
            vec![format!("-I{at}/include"), format!("-L{at}/lib"), "-lwarpwire".into()]
        }
    }
}

/// A program of this folder, compiled against the installed library.
fn compiled(name: &str) -> PathBuf {
    let program = prefix().join(name);
    let mut cc = Command::new("cc");
    cc.args(["-std=c99", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"]);
    cc.arg(root().join(format!("crates/capi/tests/{name}.c"))).args(options());
    cc.arg(format!("-Wl,-rpath,{}/lib", prefix().display()));
    ok(cc.arg("-o").arg(&program));
    program
}

fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| compiled("api"))
}

fn run(args: &[&str]) -> String {
    let mut command = Command::new(program());
    for variable in ["WARPWIRE_LINK", "WARPWIRE_ADDRESS", "WARPWIRE_ENGINES", "WARPWIRE_WINDOW"] {
        command.env_remove(variable);
    }
    let printed = ok(command.args(args));
    assert!(printed.contains(&format!("{}: all good", args[0])), "{printed}");
    printed
}

#[test]
fn two_agents_in_one_process() {
    run(&["one", "host"]);
    run(&["one", "sim:0"]);
}

#[test]
fn two_agents_with_memory_of_a_gpu() {
    if !Path::new("/dev/nvidiactl").exists() {
        missing("cuda", "no NVIDIA driver here");
        return;
    }
    run(&["one", "cuda:0"]);
}

#[test]
fn two_processes_by_every_link() {
    for link in ["auto", "udp", "shm"] {
        run(&["two", link]);
    }
}

#[test]
fn a_killed_peer_ends_transfers_with_a_cause() {
    for link in ["auto", "udp", "shm"] {
        let printed = run(&["killed", link]);
        assert!(printed.contains("killed: cannot "), "{printed}");
    }
}

#[test]
fn transfers_are_cancelled_and_have_deadlines() {
    run(&["cancel"]);
}

#[test]
fn bad_input_is_refused_with_a_status_and_a_reason() {
    run(&["bad"]);
}

#[test]
fn bad_input_for_what_kernels_are_given() {
    let printed = ok(&mut Command::new(compiled("kernels")));
    assert!(printed.contains("kernels: all good"), "{printed}");
}

/// The example, with CPU threads in place of kernels.
#[test]
fn cpp_threads_use_what_kernels_are_given() {
    if let Err(why) = Command::new("c++").arg("--version").output() {
        missing("g++", &format!("no C++ compiler ({why})"));
        return;
    }
    let program = prefix().join("kernels-on-threads");
    let mut cc = Command::new("c++");
    cc.args(["-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror", "-x", "c++"]);
    cc.arg(root().join("crates/capi/examples/kernels.cu")).args(["-x", "none"]).args(options());
    cc.arg(format!("-Wl,-rpath,{}/lib", prefix().display()));
    ok(cc.arg("-o").arg(&program));
    let printed = ok(&mut Command::new(&program));
    assert!(printed.contains("1 MiB from kernel to kernel: correct\n"), "{printed}");
    assert!(printed.ends_with("by TCP: hello from a kernel\n"), "{printed}");
}

#[test]
fn forked_children_are_refused() {
    run(&["fork"]);
}

#[test]
fn errors_belong_to_their_thread() {
    run(&["threads"]);
}

#[test]
fn options_come_from_the_environment_and_bad_ones_are_errors() {
    for (variable, value, why) in [
        ("WARPWIRE_ADDRESS", "nowhere", "WARPWIRE_ADDRESS is no IP address"),
        ("WARPWIRE_ENGINES", "many", "WARPWIRE_ENGINES is no number"),
        ("WARPWIRE_ENGINES", "0", "engines must be 1 to 16"),
    ] {
        let mut command = Command::new(program());
        let output = command.arg("one").arg("host").env(variable, value).output().unwrap();
        assert!(!output.status.success(), "{variable}={value}");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains(why), "{text}");
    }
}

/// Compiles a text with the header; returns the object.
fn compile(compiler: &str, standard: &str, name: &str, text: &str, folder: &Path) -> PathBuf {
    let (source, object) = (folder.join(name), folder.join(format!("{name}.o")));
    fs::write(&source, text).unwrap();
    let mut command = Command::new(compiler);
    command.args([standard, "-Wall", "-Wextra", "-pedantic-errors", "-Werror", "-c"]).arg(&source);
    command.arg(format!("-I{}", root().join("include").display()));
    ok(command.arg("-o").arg(&object));
    object
}

#[test]
fn the_header_is_plain_c_and_cpp() {
    let folder = tempfile::tempdir().unwrap();
    let text = "#include <warpwire.h>\n\
        ww_agent_options agent_options = WW_AGENT_OPTIONS_INIT;\n\
        ww_transfer_options transfer_options = WW_TRANSFER_OPTIONS_INIT;\n\
        ww_context_options context_options = WW_CONTEXT_OPTIONS_INIT;\n\
        ww_kernel_qp_options kernel_qp_options = WW_KERNEL_QP_OPTIONS_INIT;\n\
        ww_sock_options sock_options = WW_SOCK_OPTIONS_INIT;\n\
        int ask(ww_agent *agent, char *byte, ww_memory **memory);\n\
        int ask(ww_agent *agent, char *byte, ww_memory **memory) {\n\
            return ww_agent_register(agent, WW_ADDRESS(byte), 1, WW_ACCESS_ALL, memory);\n\
        }\n";
    compile("cc", "-std=c99", "c99.c", text, folder.path());
    compile("cc", "-std=c11", "c11.c", text, folder.path());
    match Command::new("c++").arg("--version").output() {
        Ok(_) => {
            for standard in ["c++11", "c++17", "c++20"] {
                let (option, name) = (format!("-std={standard}"), format!("{standard}.cc"));
                compile("c++", &option, &name, text, folder.path());
            }
        }
        Err(why) => missing("g++", &format!("no C++ compiler ({why})")),
    }
}

/// The functions that the header declares.
fn declared() -> BTreeSet<String> {
    let header = fs::read_to_string(root().join("include/warpwire.h")).unwrap();
    let header = header.lines().filter(|line| !line.starts_with([' ', '#', '/']));
    let name = |line: &str| {
        let at = line.find("ww_").filter(|_| line.contains('('))?;
        let (name, _) = line[..line.find('(')?].rsplit_once([' ', '*']).map(|(_, n)| (n, at))?;
        name.starts_with("ww_").then(|| name.to_owned())
    };
    header.filter_map(name).collect()
}

#[test]
fn exactly_the_declared_functions_are_exported() {
    let listed = ok(Command::new("nm").args(["-D", "--defined-only"]).arg(library()));
    let name = |line: &str| line.split_whitespace().last().map(str::to_owned);
    let exported: BTreeSet<_> = listed.lines().filter_map(name).collect();
    assert_eq!(exported, declared());
    assert!(exported.len() > 30, "{exported:?}");
}

/// The values of these expressions with the header.
#[test]
fn structures_and_statuses_are_those_of_the_header() {
    let folder = tempfile::tempdir().unwrap();
    let mut text = "#include <stddef.h>\n#include <warpwire.h>\n".to_owned();
    let mut lines = 0;
    let mut check = |expression: String, value: i64| {
        writeln!(text, "typedef char line_{lines}[(long)({expression}) == {value} ? 1 : -1];")
            .unwrap();
        lines += 1;
    };
    for (name, size, fields) in abi::LAYOUTS {
        check(format!("sizeof({name})"), *size as i64);
        for (field, offset) in *fields {
            check(format!("offsetof({name}, {field})"), *offset as i64);
        }
    }
    for (number, name) in STATUSES {
        check(name.to_str().unwrap().to_owned(), number.into());
    }
    assert!(lines > 50);
    compile("cc", "-std=c99", "layout.c", &text, folder.path());
    // A wrong value does not compile.
    let wrong = text.replace("sizeof(ww_range)) == 16", "sizeof(ww_range)) == 17");
    assert_ne!(wrong, text);
    let source = folder.path().join("wrong.c");
    fs::write(&source, wrong).unwrap();
    let mut cc = Command::new("cc");
    cc.arg("-c").arg(source).arg(format!("-I{}", root().join("include").display()));
    assert!(!cc.arg("-o").arg("/dev/null").output().unwrap().status.success());
}

#[test]
fn the_installed_files_are_complete() {
    let prefix = prefix();
    let link = |name: &str| fs::read_link(prefix.join("lib").join(name)).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(link("libwarpwire.so"), Path::new("libwarpwire.so.0"));
    assert_eq!(link("libwarpwire.so.0"), PathBuf::from(format!("libwarpwire.so.{version}")));
    for header in
        ["warpwire.h", "warpwire/verbs.cuh", "warpwire/sock.cuh", "warpwire/detail/warp.cuh"]
    {
        let (there, here) =
            (prefix.join("include").join(header), root().join("include").join(header));
        assert_eq!(fs::read(there).unwrap(), fs::read(here).unwrap(), "{header}");
    }
    // The soname that a program asks the loader for.
    let needed = ok(Command::new("readelf").arg("-d").arg(program()));
    assert!(needed.contains("[libwarpwire.so.0]"), "{needed}");
    let dynamic = ok(Command::new("readelf").arg("-d").arg(library()));
    assert!(
        dynamic.contains("soname: [libwarpwire.so.0]") && dynamic.contains("NODELETE"),
        "{dynamic}"
    );
    // Cargo's version, the header's, and the one of pkg-config are the same: `api` compares two.
    let pc = fs::read_to_string(prefix.join("lib/pkgconfig/warpwire.pc")).unwrap();
    assert!(pc.contains(&format!("Version: {version}\n")), "{pc}");
    assert!(!pc.contains(&prefix.display().to_string()), "the prefix can be moved: {pc}");

    // Again over existing files; a missing folder or library fails.
    let other = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        ok(installed().arg(other.path()).arg(library()));
    }
    let leftover = ok(Command::new("find").arg(other.path()).args(["-name", "*.new"]));
    assert_eq!(leftover, "");
    assert!(!installed().output().unwrap().status.success());
    let absent = installed().arg(other.path()).arg("/nowhere/libwarpwire.so").output().unwrap();
    assert!(!absent.status.success());
}

#[test]
fn the_program_of_the_page_runs() {
    let page = fs::read_to_string(root().join("docs/c.md")).unwrap();
    let (_, rest) = page.split_once("```c\n").expect("a program");
    let (text, _) = rest.split_once("```").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let [source, program] = ["hello.c", "hello"].map(|name| folder.path().join(name));
    fs::write(&source, text).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-std=c99", "-Wall", "-Wextra", "-Werror"]).arg(source).args(options());
    cc.arg(format!("-Wl,-rpath,{}/lib", prefix().display())).arg("-o").arg(&program);
    ok(&mut cc);
    assert_eq!(ok(&mut Command::new(&program)), "block 7 from alice: hello\n");
}

#[test]
fn cmake_finds_the_package() {
    if let Err(why) = Command::new("cmake").arg("--version").output() {
        missing("cmake", &format!("no CMake ({why})"));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = root().join("crates/capi/tests/api.c");
    let lists = |version: &str| {
        let text = format!(
            "cmake_minimum_required(VERSION 3.10)\nproject(test C)\n\
             find_package(warpwire {version} REQUIRED)\nfind_package(Threads REQUIRED)\n\
             add_executable(api {})\n\
             target_link_libraries(api warpwire::warpwire Threads::Threads)\n",
            source.display()
        );
        fs::write(folder.path().join("CMakeLists.txt"), text).unwrap();
        let mut cmake = Command::new("cmake");
        cmake.arg("-S").arg(folder.path()).arg("-B").arg(folder.path().join("build"));
        cmake.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix().display()));
        cmake
    };
    for refused in ["0.1", "1.0", "0.2.99"] {
        let output = lists(refused).output().unwrap();
        assert!(!output.status.success(), "version {refused} was accepted");
    }
    ok(&mut lists("0.2"));
    ok(Command::new("cmake").arg("--build").arg(folder.path().join("build")));
    ok(Command::new(folder.path().join("build/api")).arg("fork"));
}
