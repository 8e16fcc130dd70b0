//! Vector loads and stores of AArch64.
//!
//! Tested in emulation only (qemu-user with the aarch64-unknown-linux-gnu standard library): that
//! shows what is copied, but neither speed nor the order that a device sees.

use std::arch::asm;

use super::{AccessWidth, scalar};

/// Stores of `BYTES` bytes.
pub(super) struct Store<const BYTES: usize>;

/// Loads of `BYTES` bytes.
pub(super) struct Load<const BYTES: usize>;

/// Orders earlier stores, also to device memory, before later stores.
pub(super) fn store_fence() {
    // SAFETY: only orders memory accesses.
    unsafe { asm!("dmb oshst", options(nostack, preserves_flags)) };
}

/// Prefetches a cache line for writing.
#[inline]
pub(super) fn prefetch_for_write(address: u64) {
    // SAFETY: a hint that accesses nothing and does not fault on any address.
    unsafe {
        asm!("prfm pstl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
}

/// Orders earlier loads, also from device memory, before later accesses.
pub(super) fn load_fence() {
    // SAFETY: only orders memory accesses.
    unsafe { asm!("dmb oshld", options(nostack, preserves_flags)) };
}

// The same instructions serve both sides: host memory allows any address, and on the device side a
// pair is aligned where its 16-byte halves are.
macro_rules! vectors {
    (
        $access:ident<$bytes:literal>, then $narrower:ty,
        [$($line:literal),+], [$($register:tt),+]
    ) => {
        impl AccessWidth for $access<$bytes> {
            const BYTES: usize = $bytes;
            type Narrower = $narrower;

            #[inline]
            unsafe fn copy(to: *mut u8, from: *const u8, count: usize) {
                for block in 0..count {
                    let at = block * $bytes;
                    // SAFETY: the block is within `count` and the device side is aligned, by the
                    // caller's contract; all clobbered registers are declared.
                    unsafe {
                        asm!(
                            $($line,)+
                            from = in(reg) from.add(at),
                            to = in(reg) to.add(at),
                            $(out($register) _,)+
                            options(nostack, preserves_flags),
                        );
                    }
                }
            }
        }
    };
}

macro_rules! vectors_both_ways {
    ($bytes:literal, then $store:ty, $load:ty, $lines:tt, $registers:tt) => {
        vectors!(Store<$bytes>, then $store, $lines, $registers);
        vectors!(Load<$bytes>, then $load, $lines, $registers);
    };
}

vectors_both_ways!(
    16, then scalar::Store<u64>, scalar::Load<u64>,
    ["ldr q0, [{from}]", "str q0, [{to}]"],
    ["v0"]
);

vectors_both_ways!(
    64, then Store<16>, Load<16>,
    [
        "ldp q0, q1, [{from}]",
        "ldp q2, q3, [{from}, #32]",
        "stp q0, q1, [{to}]",
        "stp q2, q3, [{to}, #32]"
    ],
    ["v0", "v1", "v2", "v3"]
);
