#![no_main]

libfuzzer_sys::fuzz_target!(init: {
    // Two open devices on the loopback interface, whatever else the machine has. SAFETY: no other
    // thread runs yet.
    unsafe { std::env::set_var("WARPWIRE_IB_DEVICES", "lo") };
}, |bytes: &[u8]| warpwire_fuzz::verbs::run(bytes));
