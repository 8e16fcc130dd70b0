//! Compares the declarations of `abi` with the installed header.

use std::collections::BTreeMap;

use warpwire_cabi::verbs;

use super::*;

/// Every size, offset and number that is declared here.
fn declared() -> BTreeMap<String, usize> {
    let mut all = BTreeMap::new();
    for (name, size, fields) in LAYOUTS.iter().chain(verbs::LAYOUTS) {
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
    for (name, value) in NUMBERS.iter().chain(verbs::NUMBERS) {
        all.insert((*name).to_owned(), *value as usize);
    }
    all
}

#[test]
fn structures_and_numbers_are_those_of_the_header() {
    let declared = declared();
    let values = testkit::c::header_values("infiniband/verbs.h", "libibverbs-dev", declared.keys());
    let Some(in_header) = values else { return };
    assert!(in_header.len() > 250, "{}", in_header.len());
    // Newer headers have longer structures; what is declared here comes first in them.
    for (name, value) in declared {
        let known = in_header[&name];
        let grows = name.starts_with("sizeof") || name.starts_with("offsetof(struct verbs_context");
        assert!(known == value || grows && known > value, "{name}: {known}, here {value}");
    }
}
