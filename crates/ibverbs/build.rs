//! Makes the exports of `libibverbs.so.1` from `exports.txt`: a version script for the linker, and
//! assembly that gives each symbol its name and version.
//!
//! Symbol versions need a named version script. rustc passes an anonymous one for a cdylib; lld
//! accepts both, GNU ld does not. So the linker is tried: if it refuses, the cdylib has no exports,
//! and `tools/install-ibverbs` links the library from a staticlib instead.

use std::error::Error;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The releases of the provider interface.
const PRIVATE: [u32; 6] = [25, 34, 57, 59, 64, 65];
/// The symbol that is data: an `int`.
const DATA: &str = "verbs_allow_disassociate_destroy";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=exports.txt");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    let list = fs::read_to_string("exports.txt")?;
    let map = out.join("exports.map");
    fs::write(&map, version_script(&list))?;
    fs::write(out.join("exports.rs"), assembly(&list))?;

    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libibverbs.so.1");
    // Clients unload the library with open devices: the code of its threads must stay mapped.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    match linker_accepts_a_script(&out) {
        true => println!("cargo:rustc-cdylib-link-arg=-Wl,--version-script={}", map.display()),
        false => {
            println!("cargo:warning=the linker makes no symbol versions: use tools/install-ibverbs")
        }
    }
    Ok(())
}

/// The lines of the list: a node and a symbol, or a node without symbols.
fn lines(list: &str) -> impl Iterator<Item = (&str, Option<&str>)> {
    let lines = list.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.filter(|line| !line.starts_with('#')).map(|line| match line.split_once(' ') {
        Some((node, symbol)) => (node, Some(symbol)),
        None => (line, None),
    })
}

/// Public nodes form a chain. Symbols of private nodes get their version in the assembly, because a
/// script can name a symbol once only.
fn version_script(list: &str) -> String {
    let mut nodes: Vec<(&str, Vec<&str>)> = Vec::new();
    for (node, symbol) in lines(list).filter(|(node, _)| !node.contains("PRIVATE")) {
        if nodes.last().is_none_or(|(last, _)| *last != node) {
            nodes.push((node, Vec::new()));
        }
        if let (Some((_, symbols)), Some(symbol)) = (nodes.last_mut(), symbol) {
            symbols.push(symbol);
        }
    }
    let (mut text, mut parent) = (String::new(), String::new());
    for (node, symbols) in &nodes {
        let _ = writeln!(text, "{node} {{");
        if !symbols.is_empty() {
            let _ = writeln!(text, "  global: {};", symbols.join("; "));
        }
        let hide = if parent.is_empty() { "  local: *;\n" } else { "" };
        let _ = writeln!(text, "{hide}}}{parent};");
        parent = format!(" {node}");
    }
    for release in PRIVATE {
        let _ = writeln!(text, "IBVERBS_PRIVATE_{release} {{ }};");
    }
    text
}

/// One `global_asm!` per symbol: a jump to the Rust function of the same name.
fn assembly(list: &str) -> String {
    let mut text = String::new();
    for (node, symbol) in lines(list) {
        let Some(symbol) = symbol else { continue };
        let nodes: Vec<String> = match node.strip_prefix("IBVERBS_PRIVATE_") {
            _ if node == "PRIVATE" => PRIVATE.iter().map(u32::to_string).collect(),
            Some(release) => vec![release.to_owned()],
            None => {
                export(&mut text, symbol, symbol, None);
                continue;
            }
        };
        for release in nodes {
            let local = format!("warpwire_private_{release}_{symbol}");
            let version = format!("{symbol}@IBVERBS_PRIVATE_{release}");
            export(&mut text, &local, symbol, Some(&version));
        }
    }
    text
}

fn export(text: &mut String, name: &str, symbol: &str, version: Option<&str>) {
    let symver = version.map(|version| format!("\".symver {name}, {version}\","));
    let symver = symver.unwrap_or_default();
    let _ = match symbol == DATA {
        true => writeln!(
            text,
            "core::arch::global_asm!(\".pushsection .data.{name},\\\"aw\\\",@progbits\", \
             \".globl {name}\", \".type {name},@object\", \".size {name},4\", {symver} \
             \"{name}: .long 0\", \".popsection\");"
        ),
        false => writeln!(
            text,
            "core::arch::global_asm!(\".pushsection .text.{name},\\\"ax\\\",@progbits\", \
             \".globl {name}\", \".type {name},@function\", {symver} \"{name}:\", \
             concat!(jump!(), \" {{target}}\"), \".popsection\", \
             target = sym {});",
            target(symbol, version.is_some())
        ),
    };
}

/// The Rust function behind a symbol.
fn target(symbol: &str, is_private: bool) -> String {
    match symbol {
        "_verbs_init_and_alloc_context" | "verbs_open_device" => "crate::private::null".to_owned(),
        "__verbs_log" => "crate::private::ignore".to_owned(),
        _ if symbol.starts_with("verbs_register_driver_") => "crate::private::ignore".to_owned(),
        _ if is_private && symbol != "ibv_query_gid_type" => "crate::private::refuse".to_owned(),
        _ => format!("crate::exports::{symbol}"),
    }
}

/// Whether the linker takes a named version script beside rustc's: tried with a small library.
fn linker_accepts_a_script(out: &Path) -> bool {
    let (source, script) = (out.join("probe.rs"), out.join("probe.map"));
    let text = "#![no_std]\n#[panic_handler]\nfn stop(_: &core::panic::PanicInfo) -> ! { loop {} }\n\
        core::arch::global_asm!(\".globl probe\", \"probe: .long 0\");";
    let written = fs::write(&source, text)
        .and_then(|()| fs::write(&script, "PROBE_1.0 { global: probe; local: *; };\n"));
    if written.is_err() {
        return false;
    }
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut command = Command::new(rustc);
    command.args(["--crate-type=cdylib", "--edition=2021", "-Cpanic=abort"]).arg(&source);
    command.arg(format!("-Clink-arg=-Wl,--version-script={}", script.display()));
    command.arg("-o").arg(out.join("probe.so"));
    if let Some(target) = env::var_os("TARGET") {
        command.arg("--target").arg(target);
    }
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        command.arg("-C").arg(format!("linker={}", linker.to_string_lossy()));
    }
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    command.args(flags.split('\u{1f}').filter(|flag| !flag.is_empty()));
    command.output().is_ok_and(|output| output.status.success())
}
