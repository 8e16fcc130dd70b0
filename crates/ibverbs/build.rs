//! Makes the exports of `libibverbs.so.1` from `exports.txt`: a version script for the linker, and
//! assembly that gives each symbol its name and version.

mod versions;

use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;
use std::{env, fs};

use versions::lines;

/// The releases of the provider interface.
const PRIVATE: [u32; 6] = [25, 34, 57, 59, 64, 65];
/// The symbol that is data: an `int`.
const DATA: &str = "verbs_allow_disassociate_destroy";

fn main() -> Result<(), Box<dyn Error>> {
    for file in ["build.rs", "versions.rs", "exports.txt"] {
        println!("cargo:rerun-if-changed={file}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    let list = fs::read_to_string("exports.txt")?;
    let map = out.join("exports.map");
    let mut script = versions::version_script(&list);
    for release in PRIVATE {
        let _ = writeln!(script, "IBVERBS_PRIVATE_{release} {{ }};");
    }
    fs::write(&map, script)?;
    fs::write(out.join("exports.rs"), assembly(&list))?;
    versions::link(&out, "libibverbs.so.1", &map);
    Ok(())
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
    if symbol != DATA {
        return versions::jump(text, name, version, &target(symbol, version.is_some()));
    }
    let symver = version.map(|version| format!("\".symver {name}, {version}\","));
    let symver = symver.unwrap_or_default();
    let _ = writeln!(
        text,
        "core::arch::global_asm!(\".pushsection .data.{name},\\\"aw\\\",@progbits\", \
         \".globl {name}\", \".type {name},@object\", \".size {name},4\", {symver} \
         \"{name}: .long 0\", \".popsection\");"
    );
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
