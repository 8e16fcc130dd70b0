//! Compares the declarations of `abi` with the installed headers.

use std::collections::BTreeMap;

use super::*;

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
        all.insert((*name).to_owned(), *value as usize);
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
    let declared = declared();
    let values = testkit::c::header_values("rdma/rdma_cma.h", "librdmacm-dev", declared.keys());
    let Some(in_header) = values else { return };
    assert!(in_header.len() > 90, "{}", in_header.len());
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
