//! Fuzzes libibverbs through its C ABI: `src/verbs.c` plays the input as a script of calls, between
//! two devices of this process.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(init: {
    // Two open devices on the loopback interface, whatever else the machine has. SAFETY: no other
    // thread runs yet.
    unsafe { std::env::set_var("WARPWIRE_IB_DEVICES", "lo") };
}, |bytes: &[u8]| {
    #[cfg(has_verbs_header)]
    scripts::run(bytes);
    #[cfg(not(has_verbs_header))]
    let _ = bytes;
});

#[cfg(has_verbs_header)]
mod scripts {
    use ibverbs as _; // linked for its C symbols

    unsafe extern "C" {
        fn verbs_script(bytes: *const u8, count: usize);
    }

    pub fn run(bytes: &[u8]) {
        // SAFETY: the script is read only, and within its length.
        unsafe { verbs_script(bytes.as_ptr(), bytes.len()) };
    }
}
