//! Uses memory that another library allocated. Built as a C library; `02_foreign_pointer.py` loads
//! it and passes it the address of a PyTorch tensor.
//!
//! ```text
//! cargo build --release -p examples --example 02_foreign_pointer
//! cd examples
//! python3 02_foreign_pointer.py ../../../target/release/examples/lib02_foreign_pointer.so
//! ```
#![allow(unsafe_code)] // for `no_mangle` and for borrowing memory

use std::time::Duration;

use warpwire::Result;
use warpwire::mem::{Allocation, DeviceAddr, cuda};
use warpwire_apps::pattern::{self, Pattern};

/// Fills `len` bytes of device memory at `address` with the pattern of `seed`, by a kernel on a new
/// stream. Returns 0, or -1 after printing the error to standard error.
#[unsafe(no_mangle)]
pub extern "C" fn warpwire_stamp(device: u32, address: u64, len: u64, seed: u64) -> i32 {
    report(borrow(device, address, len).and_then(|memory| stamp(&memory, seed)))
}

/// The same by the CPU, through a window (a CPU mapping of the device memory).
#[unsafe(no_mangle)]
pub extern "C" fn warpwire_stamp_by_cpu(device: u32, address: u64, len: u64, seed: u64) -> i32 {
    report(borrow(device, address, len).and_then(|memory| stamp_by_cpu(&memory, seed)))
}

/// Prints the handle with which another process opens the memory: `13_copy_lists cuda:0 HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn warpwire_export(device: u32, address: u64, len: u64) -> i32 {
    report(borrow(device, address, len).and_then(|memory| {
        let handle = memory.export_ipc()?;
        let text: String = handle.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        println!("{text}");
        // Its descriptors stay open until the process ends.
        std::mem::forget(memory);
        Ok(())
    }))
}

fn borrow(device: u32, address: u64, len: u64) -> Result<Allocation> {
    // SAFETY: the C caller keeps the memory allocated for the duration of the call.
    unsafe { cuda::device(device)?.borrow(DeviceAddr::new(address), len) }
}

fn stamp(memory: &Allocation, seed: u64) -> Result<()> {
    let gpu = memory.device();
    let stream = gpu.stream()?;
    Pattern::load(gpu)?.fill(&stream, &memory.whole()?, seed)?;
    stream.synchronize(Duration::from_secs(10))
}

fn stamp_by_cpu(memory: &Allocation, seed: u64) -> Result<()> {
    let mut bytes = vec![0; memory.len() as usize];
    pattern::fill_bytes(&mut bytes, seed, 0);
    let window = memory.window()?;
    eprintln!("{window:?}");
    window.write(0, &bytes)?;
    window.flush();
    Ok(())
}

fn report(outcome: Result<()>) -> i32 {
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{error}");
            -1
        }
    }
}
