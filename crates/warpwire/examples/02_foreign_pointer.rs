//! Uses memory that another library allocated: built as a C library, loaded by `02_foreign_pointer.py`,
//! which hands it the address of a PyTorch tensor.
//!
//! ```text
//! cargo build --release --example 02_foreign_pointer -p warpwire
//! python3 crates/warpwire/examples/02_foreign_pointer.py target/release/examples/lib02_foreign_pointer.so
//! ```
#![allow(unsafe_code)] // its one function has a C name

use std::time::Duration;

use warpwire::Result;
use warpwire::mem::{DeviceAddr, cuda, pattern::Pattern};

/// Fills `len` bytes of device memory at `address` with the pattern of `seed`, on a stream of its own.
/// Returns 0, or -1 and says why on standard error.
#[unsafe(no_mangle)]
pub extern "C" fn warpwire_stamp(device: u32, address: u64, len: u64, seed: u64) -> i32 {
    match stamp(device, address, len, seed) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{error}");
            -1
        }
    }
}

fn stamp(device: u32, address: u64, len: u64, seed: u64) -> Result<()> {
    let gpu = cuda::device(device)?;
    // SAFETY: the caller keeps the memory for the length of this call, as C callers do.
    let memory = unsafe { gpu.borrow(DeviceAddr::new(address), len) }?;
    let stream = gpu.stream()?;
    Pattern::load(&gpu)?.fill(&stream, &memory.whole()?, seed)?;
    stream.synchronize(Duration::from_secs(10))
}
