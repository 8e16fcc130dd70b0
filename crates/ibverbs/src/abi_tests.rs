//! Compares the declarations of `abi` with the installed header.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::Command;

use super::*;

const HEADER: &str = "/usr/include/infiniband/verbs.h";

/// Every size, offset and number that is declared here.
fn declared() -> BTreeMap<String, usize> {
    let mut all = BTreeMap::new();
    for (name, size, fields) in LAYOUTS {
        all.insert(format!("sizeof({name})"), *size);
        for (field, offset) in *fields {
            all.insert(format!("offsetof({name}, {field})"), *offset);
        }
    }
    for (name, base, fields) in CALLS {
        for (field, offset) in *fields {
            all.insert(format!("offsetof({name}, {field})"), base + offset);
        }
    }
    for (name, value) in NUMBERS {
        all.insert(format!("(size_t){name}"), *value as usize);
    }
    all
}

#[test]
fn structures_and_numbers_are_those_of_the_header() {
    let absent = |why: &str| {
        let list = std::env::var("WARPWIRE_REQUIRE").unwrap_or_default();
        assert!(!list.split(',').any(|name| name == "verbs.h"), "required: {why}");
        println!("skipped: {why}");
    };
    if !std::path::Path::new(HEADER).exists() {
        return absent(&format!("no {HEADER} (Debian: libibverbs-dev)"));
    }
    let declared = declared();
    let mut text = "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n\
        int main(void) {\n"
        .to_owned();
    for expression in declared.keys() {
        let _ = writeln!(text, "printf(\"%s=%zu\\n\", \"{expression}\", {expression});");
    }
    let folder = tempfile::tempdir().unwrap();
    let [source, binary] = ["layout.c", "layout"].map(|name| folder.path().join(name));
    std::fs::write(&source, text + "return 0; }\n").unwrap();
    let compiled = match Command::new("cc").arg(&source).arg("-o").arg(&binary).output() {
        Ok(compiled) => compiled,
        Err(why) => return absent(&format!("no C compiler ({why})")),
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let printed = Command::new(&binary).output().unwrap().stdout;
    let in_header: BTreeMap<String, usize> = String::from_utf8(printed)
        .unwrap()
        .lines()
        .filter_map(|line| line.rsplit_once('='))
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect();
    assert!(in_header.len() > 250, "{}", in_header.len());
    // Newer headers have longer structures; what is declared here comes first in them.
    for (name, value) in declared {
        let known = in_header[&name];
        let grows = name.starts_with("sizeof") || name.starts_with("offsetof(struct verbs_context");
        assert!(known == value || grows && known > value, "{name}: {known}, here {value}");
    }
}
