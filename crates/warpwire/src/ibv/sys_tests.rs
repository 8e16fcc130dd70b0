//! Compares the declarations of `sys` with the installed header and library.

use std::fmt::Write;
use std::process::Command;

use super::*;

const HEADER: &str = "/usr/include/infiniband/verbs.h";

/// A C program that prints sizes, offsets and constants of the header, one per line.
fn program() -> String {
    let mut text = "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n\
        int main(void) {\n"
        .to_owned();
    for (name, size, fields) in LAYOUTS {
        if size.is_some() {
            let _ = writeln!(text, "printf(\"sizeof({name}) %zu\\n\", sizeof({name}));");
        }
        for (field, _) in *fields {
            let _ = writeln!(text, "printf(\"{name}.{field} %zu\\n\", offsetof({name}, {field}));");
        }
    }
    for (name, _) in NUMBERS {
        let _ = writeln!(text, "printf(\"{name} %u\\n\", (unsigned){name});");
    }
    text + "return 0; }\n"
}

/// The same from the declarations here.
fn declared() -> String {
    let mut text = String::new();
    for (name, size, fields) in LAYOUTS {
        if let Some(size) = size {
            let _ = writeln!(text, "sizeof({name}) {size}");
        }
        for (field, offset) in *fields {
            let _ = writeln!(text, "{name}.{field} {offset}");
        }
    }
    for (name, value) in NUMBERS {
        let _ = writeln!(text, "{name} {value}");
    }
    text
}

#[test]
fn structures_and_numbers_are_those_of_the_header() {
    if !std::path::Path::new(HEADER).exists() {
        eprintln!("skipped: no {HEADER} (Debian: libibverbs-dev)");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [source, binary] = ["layout.c", "layout"].map(|name| folder.path().join(name));
    std::fs::write(&source, program()).unwrap();
    let compiled = match Command::new("cc").arg(&source).arg("-o").arg(&binary).output() {
        Ok(compiled) => compiled,
        Err(why) => {
            eprintln!("skipped: no C compiler ({why})");
            return;
        }
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&binary).output().unwrap();
    let output = String::from_utf8(output.stdout).unwrap();
    let ours = declared();
    let wrong: Vec<_> = output.lines().zip(ours.lines()).filter(|(c, rust)| c != rust).collect();
    assert!(wrong.is_empty(), "header and declaration differ: {wrong:#?}");
    assert_eq!(output.lines().count(), ours.lines().count());
    assert!(ours.lines().count() > 200, "{}", ours.lines().count());
}

#[test]
fn the_installed_library_has_the_symbols_of_its_release() {
    let Some(installed) = crate::host::System::live().verbs_library() else {
        eprintln!("skipped: libibverbs.so.1 is not installed");
        return;
    };
    // SAFETY: rdma-core's library; its initialiser has no preconditions.
    let library = unsafe { Library::new(&installed.path) }.unwrap();
    let release = installed.rdma_core.unwrap_or(0);
    for (name, since) in SYMBOLS.iter().filter(|(_, since)| *since <= release) {
        // SAFETY: only the presence of the symbol is checked.
        let found = unsafe { library.get::<*const c_void>(name.as_bytes()) };
        assert!(found.is_ok(), "{name} (rdma-core {since}) is not in {}", installed.path);
    }
}
