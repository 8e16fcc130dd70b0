//! Compares the declarations of `abi` with the installed headers.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::Command;

use super::*;

const HEADER: &str = "/usr/include/rdma/rdma_cma.h";

/// Every size, offset and number that is declared here.
fn declared() -> BTreeMap<String, usize> {
    let mut all = BTreeMap::new();
    for (name, size, fields) in LAYOUTS {
        // The beginning of a structure says nothing about its size.
        if *name != "struct ibv_qp" {
            all.insert(format!("sizeof({name})"), *size);
        }
        for (field, offset) in *fields {
            all.insert(format!("offsetof({name}, {field})"), *offset);
        }
    }
    for (name, value) in NUMBERS {
        all.insert(format!("(size_t){name}"), *value as usize);
    }
    let context = "offsetof(struct verbs_context, context)";
    let before = |field: &str| format!("({context} - offsetof(struct verbs_context, {field}))");
    all.insert(before("sz"), verbs_context::SZ_BEFORE);
    all.insert(before("create_qp_ex"), verbs_context::CREATE_QP_EX_BEFORE);
    all.insert("offsetof(struct ibv_context, abi_compat)".into(), verbs_context::ABI_COMPAT);
    all
}

#[test]
fn structures_and_numbers_are_those_of_the_headers() {
    let absent = |why: &str| {
        let list = std::env::var("WARPWIRE_REQUIRE").unwrap_or_default();
        assert!(!list.split(',').any(|name| name == "rdma_cma.h"), "required: {why}");
        println!("skipped: {why}");
    };
    if !std::path::Path::new(HEADER).exists() {
        return absent(&format!("no {HEADER} (Debian: librdmacm-dev)"));
    }
    let declared = declared();
    let mut text = "#include <stddef.h>\n#include <stdio.h>\n#include <rdma/rdma_cma.h>\n\
        int main(void) {\n"
        .to_owned();
    for expression in declared.keys() {
        let _ = writeln!(text, "printf(\"%s=%zu\\n\", \"{expression}\", (size_t){expression});");
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
    assert!(in_header.len() > 180, "{}", in_header.len());
    // Newer headers have longer structures; what is declared here comes first in them.
    for (name, value) in declared {
        let known = in_header[&name];
        assert!(
            known == value || name.starts_with("sizeof") && known > value,
            "{name}: {known}, here {value}"
        );
    }
}

#[test]
fn addresses_of_c() {
    for text in ["10.1.2.3:7174", "[2001:db8::7]:1", "[fe80::1%3]:65535"] {
        let address: SocketAddr = text.parse().unwrap();
        let made = Sockaddr::from(address);
        assert_eq!(made.get(), Some(address));
        assert_eq!(made.len(), if address.is_ipv4() { 16 } else { 28 });
        let (ip, port) = (address.ip(), address.port());
        assert_eq!(made.0[2..4], port.to_be_bytes());
        assert_eq!(super::ip(gid(ip)), ip);
    }
    assert_eq!((Sockaddr::EMPTY.get(), Sockaddr::EMPTY.len()), (None, 0));
    let mut unix = Sockaddr::EMPTY;
    unix.0[..2].copy_from_slice(&(libc::AF_UNIX as u16).to_ne_bytes());
    assert_eq!(unix.get(), None);
}
