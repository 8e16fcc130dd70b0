// Symbol versions for a cdylib, shared by the build scripts of the drop-in libraries.
//
// Symbol versions need a named version script. rustc passes an anonymous one for a cdylib; lld
// accepts both, GNU ld does not. So the linker is tried: if it refuses, the cdylib has no exports,
// and `tools/install-ibverbs` links the library from a staticlib instead.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// The lines of the list: a node and a symbol, or a node without symbols.
pub fn lines(list: &str) -> impl Iterator<Item = (&str, Option<&str>)> {
    let lines = list.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.filter(|line| !line.starts_with('#')).map(|line| match line.split_once(' ') {
        Some((node, symbol)) => (node, Some(symbol)),
        None => (line, None),
    })
}

/// The public nodes, which form a chain. Symbols of private nodes get their version in the
/// assembly, because a script can name a symbol once only.
pub fn version_script(list: &str) -> String {
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
    text
}

/// A `global_asm!` with an exported symbol that jumps to a Rust function.
pub fn jump(text: &mut String, name: &str, version: Option<&str>, target: &str) {
    let symver = version.map(|version| format!("\".symver {name}, {version}\","));
    let symver = symver.unwrap_or_default();
    let _ = writeln!(
        text,
        "core::arch::global_asm!(\".pushsection .text.{name},\\\"ax\\\",@progbits\", \
         \".globl {name}\", \".type {name},@function\", {symver} \"{name}:\", \
         concat!(jump!(), \" {{target}}\"), \".popsection\", \
         target = sym {target});"
    );
}

/// Options of the linker for a library with this soname and version script.
pub fn link(out: &Path, soname: &str, script: &Path) {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{soname}");
    // Clients unload the library while it is in use: the code of its threads must stay mapped.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    match linker_accepts_a_script(out) {
        true => println!("cargo:rustc-cdylib-link-arg=-Wl,--version-script={}", script.display()),
        false => {
            println!("cargo:warning=the linker makes no symbol versions: use tools/install-ibverbs")
        }
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
