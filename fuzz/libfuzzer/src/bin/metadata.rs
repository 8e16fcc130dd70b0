#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| warpwire_fuzz::metadata::run(bytes));
