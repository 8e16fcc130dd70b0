//! Linker options of `libwarpwire.so.0`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libwarpwire.so.0");
    // Programs unload the library with open agents: their threads run on.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // rustc exports the `no_mangle` functions only; tests/c_api.rs checks that.
}
