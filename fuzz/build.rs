//! Compiles the scripts of target `verbs`, which call libibverbs with the system's header. Without
//! it the target does nothing, and tools/fuzz skips it.

use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=src/verbs.c");
    println!("cargo:rustc-check-cfg=cfg(has_verbs_header)");
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        return;
    }
    println!("cargo:rustc-cfg=has_verbs_header");
    cc::Build::new().file("src/verbs.c").flag("-std=gnu11").opt_level(1).compile("verbs_script");
}
