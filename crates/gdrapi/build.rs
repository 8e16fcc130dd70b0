//! What the linker must know of `libgdrapi.so.2`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libgdrapi.so.2");
    // Clients unload the library with sessions open (libfabric did): its code must stay.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // rustc exports the `no_mangle` functions and nothing else; tests/c_api.rs holds it to that.
}
