//! Fuzzes the metadata of transfer agents, which a store or a socket may have damaged or forged.
//!
//! Invariants: nothing panics, and what is accepted is written and read again unchanged.
#![no_main]

use libfuzzer_sys::fuzz_target;
use warpwire::agent::is_metadata;

fuzz_target!(|bytes: &[u8]| {
    is_metadata(bytes);
});
