//! GPU memory in sends and receives (`WARPWIRE_NCCL_GDR=1`).
//!
//! # Invariants
//! 1. **No driver call on the data path.** A driver call may wait for a thread that is in
//!    `cudaFree`, which waits for NCCL's kernel, which waits for the data. So GPU memory is
//!    accessed through CPU windows only; without one it is not registered. Engines have no direct
//!    access, which would copy with kernels.
//! 2. **Data precedes its word.** Engines drain their write-combining buffers behind each packet,
//!    before the word that reports it. `iflush` waits until it has arrived on the other side of the
//!    bus; NCCL is asked for that on all GPUs (`forceFlush`), because completions of a GPU's reads
//!    of host memory may overtake writes.
//! 3. **Lines of 128 bytes may become visible in two halves**, in any order. NCCL's protocol LL128
//!    needs them in order. NCCL chooses it for devices close to a GPU, so the device is at the CPU
//!    (no PCI path), and `NCCL_PROTO` must not demand it. Words of 8 bytes, which LL needs, are
//!    whole.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int};

use crate::abi::PTR_CUDA;
use crate::log;
use crate::result::{Failure, INVALID_USAGE};

#[cfg(test)]
mod tests;

/// Variables of NCCL's that it needs, and why. NCCL reads them after `init`.
const VARIABLES: [(&CStr, &CStr, &str); 2] = [
    (c"NCCL_NET_GDR_LEVEL", c"SYS", "NCCL passes GPU memory to devices at any distance"),
    (c"NCCL_NET_GDR_READ", c"0", "sends are from host memory: the CPU reads a GPU's slowly"),
];

/// Sets the variables that are not set.
pub(crate) fn prepare() {
    for (name, value, why) in VARIABLES {
        let [shown, value_text] = [name, value].map(CStr::to_string_lossy);
        match std::env::var_os(&*shown) {
            Some(set) if set == *value_text => {}
            Some(set) => log::info(format_args!("{shown}={} stays as it is", set.display())),
            None => {
                // SAFETY: both strings end with a zero. NCCL calls `init` under its own lock, and
                // sets variables of its configuration file in the same way before.
                unsafe { libc::setenv(name.as_ptr(), value.as_ptr(), 0) };
                log::info(format_args!("sets {shown}={value_text}: {why}"));
            }
        }
    }
}

/// Whether a value of `NCCL_PROTO` enables LL128, which is off by default for this device: a list
/// that has it, or excludes others only. Lists for single functions (`allreduce:LL`) are separated
/// by semicolons.
pub(crate) fn demands_ll128(protocols: &str) -> bool {
    protocols.split(';').any(|list| {
        let list = list.rsplit(':').next().unwrap_or_default().trim().to_ascii_lowercase();
        let is_named = list.split(',').any(|name| name.trim_start_matches('^').trim() == "ll128");
        !list.is_empty() && list.starts_with('^') != is_named
    })
}

/// A type of memory that was not announced.
#[cold]
pub(crate) fn wrong_type(kind: c_int, gdr: bool) -> Failure {
    let text = match (kind, gdr) {
        (PTR_CUDA, false) => {
            "GPU memory (type 2); only host memory is announced. Set WARPWIRE_NCCL_GDR=1 for it"
                .to_owned()
        }
        (_, false) => format!("memory of type {kind}; only host memory (1) is announced"),
        (_, true) => format!("memory of type {kind}; host (1) and CUDA memory (2) are announced"),
    };
    Failure::new(INVALID_USAGE, text)
}
