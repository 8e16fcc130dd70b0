//! Linker options of `libgdrapi.so.2`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libgdrapi.so.2");
    // Clients unload the library with open sessions (libfabric did): its code must stay mapped.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // rustc exports the `no_mangle` functions only; tests/c_api.rs checks that.
}
