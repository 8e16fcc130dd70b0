//! Fuzzes the metadata of transfer agents, which a store or a socket may have damaged or forged.
//!
//! Invariants: nothing panics, and what is accepted is written and read again unchanged.

use warpwire::agent::is_metadata;

/// Runs one input.
pub fn run(bytes: &[u8]) {
    is_metadata(bytes);
}
