//! The library as C programs use it: installed, linked, loaded.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use testkit::c::{ok, root};
use warpwire::host::System;

const API: [&str; 17] = [
    "gdr_close",
    "gdr_copy_from_mapping",
    "gdr_copy_to_mapping",
    "gdr_driver_get_version",
    "gdr_get_attribute",
    "gdr_get_callback_flag",
    "gdr_get_info",
    "gdr_get_info_v2",
    "gdr_get_mapping_type_string",
    "gdr_map",
    "gdr_map_v2",
    "gdr_open",
    "gdr_pin_buffer",
    "gdr_pin_buffer_v2",
    "gdr_runtime_get_version",
    "gdr_unmap",
    "gdr_unpin_buffer",
];
const TEST_HELPERS: [&str; 4] =
    ["warpwire_sim_alloc", "warpwire_sim_free", "warpwire_sim_read", "warpwire_sim_write"];

/// The library that cargo has just built for this test, next to the test binary.
fn library() -> PathBuf {
    let library_dir = std::env::current_exe().unwrap().with_file_name("libgdrapi.so");
    assert!(library_dir.is_file(), "cargo built no {}", library_dir.display());
    library_dir
}

/// A prefix with the library installed, created once.
fn prefix() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gdrapi-prefix");
        let _ = fs::remove_dir_all(&prefix);
        let mut install = Command::new(root().join("tools/install-gdrapi"));
        ok(install.arg(&prefix).arg(library()));
        prefix
    })
}

/// `api.c`, compiled against the installed library.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let (prefix, program) = (prefix(), prefix().join("api"));
        let rpath = format!("-Wl,-rpath,{}/lib", prefix.display());
        let source = root().join("crates/gdrapi/tests/api.c");
        let warnings = ["-Wall", "-Wextra", "-Werror"];
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu99", "-O1", "-pthread"]).args(warnings).arg(source);
        cc.arg(format!("-I{}/include", prefix.display()));
        cc.arg(format!("-L{}/lib", prefix.display()));
        cc.args(["-lgdrapi", "-ldl", &rpath, "-o"]).arg(&program);
        ok(&mut cc);
        program
    })
}

fn run(mode: &str) -> Command {
    let mut command = Command::new(program());
    command.arg(mode).env("WARPWIRE_GDRAPI_SIM", "1");
    for variable in ["GDRCOPY_ENABLE_LOGGING", "WARPWIRE_WINDOW", "WARPWIRE_GDRAPI_STRICT"] {
        command.env_remove(variable);
    }
    command
}

#[test]
fn every_call_on_the_simulated_gpu() {
    let output_text = ok(&mut run("sim"));
    assert!(output_text.contains("sim: all good"), "{output_text}");
}

#[test]
fn strict_mode_behaves_as_the_kernel_module() {
    ok(run("strict").env("WARPWIRE_GDRAPI_STRICT", "map, fork"));
    for lenient in ["", "mop,fork", "map"] {
        let output = run("strict").env("WARPWIRE_GDRAPI_STRICT", lenient).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{lenient:?}");
    }
}

#[test]
fn every_call_on_cuda() {
    let required = std::env::var("WARPWIRE_REQUIRE").is_ok_and(|list| list.contains("cuda"));
    if !required && !Path::new("/dev/nvidiactl").exists() {
        println!("skipped: no NVIDIA driver here");
        return;
    }
    let output_text = ok(run("cuda").env_remove("WARPWIRE_GDRAPI_SIM"));
    assert!(output_text.contains("cuda: all good"), "{output_text}");
}

#[test]
fn no_session_without_a_gpu() {
    if Path::new("/dev/nvidiactl").exists() {
        println!("skipped: there is a GPU");
        return;
    }
    ok(run("absent").env_remove("WARPWIRE_GDRAPI_SIM"));
    ok(run("absent").env("WARPWIRE_GDRAPI_SIM", "0"));
}

#[test]
fn logging_is_off_unless_enabled() {
    let output_text = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert_eq!(output_text(&mut run("sim")), "");
    let errors = output_text(run("sim").env("GDRCOPY_ENABLE_LOGGING", "1"));
    assert!(errors.contains("gdrapi (warpwire) error: the memory is mapped already"), "{errors}");
    assert!(!errors.contains("info: pinned"), "{errors}");
    let all =
        output_text(run("sim").env("GDRCOPY_ENABLE_LOGGING", "1").env("GDRCOPY_LOG_LEVEL", "2"));
    assert!(all.contains("info: pinned 1 bytes at"), "{all}");
    assert!(all.contains("by memfd"), "{all}");
}

#[test]
fn the_header_is_plain_c_and_cpp() {
    let folder = tempfile::tempdir().unwrap();
    let text = "#include <gdrapi.h>\n\
        int ask(gdr_t g, gdr_mh_t handle, gdr_info_t *info) {\n\
            return gdr_get_info(g, handle, info);\n\
        }\n";
    let compile = |compiler: &str, standard: &str, name: &str| {
        let source = folder.path().join(name);
        fs::write(&source, text).unwrap();
        let mut command = Command::new(compiler);
        command.args([standard, "-Wall", "-pedantic-errors", "-Werror", "-c"]).arg(source);
        command.arg(format!("-I{}", root().join("include").display()));
        ok(command.arg("-o").arg(folder.path().join("object.o")));
    };
    compile("cc", "-std=c99", "c99.c");
    compile("cc", "-std=c11", "c11.c");
    match Command::new("c++").arg("--version").output() {
        Ok(_) => compile("c++", "-std=c++11", "cpp.cc"),
        Err(error) => println!("skipped: no C++ compiler ({error})"),
    }
}

#[test]
fn exactly_the_interface_is_exported() {
    let listed = ok(Command::new("nm").args(["-D", "--defined-only"]).arg(library()));
    let mut symbols: Vec<_> =
        listed.lines().filter_map(|line| line.split_whitespace().last()).collect();
    symbols.sort_unstable();
    let expected: Vec<_> = API.into_iter().chain(TEST_HELPERS).collect();
    assert_eq!(symbols, expected);
    let version = System::live().warpwire_version(library().to_str().unwrap());
    assert_eq!(version.as_deref(), Some(env!("CARGO_PKG_VERSION")), "the note of the doctor");
}

#[test]
fn the_installed_files_are_complete() {
    let prefix = prefix();
    let link = |name: &str| fs::read_link(prefix.join("lib").join(name)).unwrap();
    assert_eq!(link("libgdrapi.so"), Path::new("libgdrapi.so.2"));
    assert_eq!(link("libgdrapi.so.2"), Path::new("libgdrapi.so.2.6.0"));
    let header = fs::read(prefix.join("include/gdrapi.h")).unwrap();
    assert_eq!(header, fs::read(root().join("include/gdrapi.h")).unwrap());
    let pc = fs::read_to_string(prefix.join("lib/pkgconfig/gdrapi.pc")).unwrap();
    assert!(pc.contains(&format!("prefix={}\n", prefix.display())), "{pc}");
    assert!(pc.contains("Version: 2.6.0") && pc.contains("-lgdrapi"), "{pc}");
    // The soname that a program linked with -lgdrapi requests from the loader.
    let needed = ok(Command::new("readelf").arg("-d").arg(program()));
    assert!(needed.contains("[libgdrapi.so.2]"), "{needed}");
    let dynamic = ok(Command::new("readelf").arg("-d").arg(library()));
    assert!(dynamic.contains("soname: [libgdrapi.so.2]"), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");

    // Installing again over existing files works; a missing folder argument or library fails.
    let script = root().join("tools/install-gdrapi");
    let other = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        ok(Command::new(&script).arg(other.path()).arg(library()));
    }
    assert!(!Command::new(&script).output().unwrap().status.success());
    let mut absent = Command::new(&script);
    let absent = absent.arg(other.path()).arg("/nowhere/libgdrapi.so").output().unwrap();
    assert!(!absent.status.success());
}
