//! Linker options of `libnccl-net-warpwire.so`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl-net-warpwire.so");
    // NCCL unloads the library with its last communicator; the engines' threads run on.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // rustc exports the `no_mangle` tables only; tests/plugin.rs checks that.
}
