//! Makes the exports of `librdmacm.so.1` from `exports.txt`: a version script for the linker, and
//! assembly that gives each symbol its name.

mod versions;

use std::error::Error;
use std::path::PathBuf;
use std::{env, fs};

/// Calls of rsockets that are refused; their names in `exports.txt` begin with this.
const REFUSED: &str = "REFUSED ";

fn main() -> Result<(), Box<dyn Error>> {
    for file in ["build.rs", "versions.rs", "exports.txt"] {
        println!("cargo:rerun-if-changed={file}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    let list = fs::read_to_string("exports.txt")?;
    let map = out.join("exports.map");
    fs::write(&map, versions::version_script(&list.replace(REFUSED, "")))?;
    let mut text = String::new();
    for (_, symbol) in versions::lines(&list) {
        match symbol.map(|symbol| (symbol, symbol.strip_prefix(REFUSED))) {
            Some((_, Some(name))) => {
                versions::jump(&mut text, name, None, "crate::exports::refuse");
            }
            Some((name, None)) => {
                versions::jump(&mut text, name, None, &format!("crate::exports::{name}"));
            }
            None => {}
        }
    }
    fs::write(out.join("exports.rs"), text)?;
    // Loaded by its path, the library finds the libibverbs.so.1 beside it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-rpath,$ORIGIN");
    versions::link(&out, "librdmacm.so.1", &map);
    Ok(())
}
