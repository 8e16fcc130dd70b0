//! Compiles the scripts of target `verbs`, which call libibverbs with the system's header. Without
//! it the target does nothing, and tools/fuzz skips it.

fn main() {
    println!("cargo:rerun-if-changed=src/verbs.c");
    println!("cargo:rustc-check-cfg=cfg(has_verbs_header)");
    #[cfg(feature = "library")]
    if std::path::Path::new("/usr/include/infiniband/verbs.h").exists() {
        println!("cargo:rustc-cfg=has_verbs_header");
        let mut build = cc::Build::new();
        build.file("src/verbs.c").flag("-std=gnu11").opt_level(1).compile("verbs_script");
    }
}
