//! Streaming (non-temporal) loads and stores of x86-64, and direct stores.
//!
//! Assembly rather than intrinsics: the compiler may merge or drop the intrinsics' streaming loads
//! (they are declared pure), those of AVX-512 are newer than the minimum supported Rust version,
//! and MOVDIR64B has none. Assembly also needs no `target_feature` functions, so edges and loops
//! are inlined.

use std::arch::{asm, is_x86_feature_detected, x86_64};

use super::{AccessWidth, Routine, scalar};

/// CPUID leaf 7, ECX: MOVDIR64B. `is_x86_feature_detected` does not support it.
const LEAF7_ECX_MOVDIR64B: u32 = 1 << 28;

/// Registers filled before the first is stored: a load takes a PCIe round trip, and this many are
/// in flight.
const UNROLL: usize = 8;

/// Streaming stores of `BYTES` bytes.
pub(super) struct Store<const BYTES: usize>;

/// Streaming loads of `BYTES` bytes.
pub(super) struct Load<const BYTES: usize>;

/// Ordinary loads and stores of `BYTES` bytes, for cached memory; the stores are aligned.
pub(super) struct Plain<const BYTES: usize>;

/// MOVDIR64B: 64 bytes as one write on the bus.
pub(super) struct DirectStore;

/// Whether the processor and the operating system support the routine, including its edges.
pub(super) fn supports(routine: Routine) -> bool {
    match routine {
        Routine::Scalar => true,
        Routine::Sse41 => is_x86_feature_detected!("sse4.1"),
        Routine::Avx2 => supports(Routine::Sse41) && is_x86_feature_detected!("avx2"),
        Routine::Avx512 => supports(Routine::Avx2) && is_x86_feature_detected!("avx512f"),
        Routine::Movdir64b => supports(Routine::Sse41) && has_movdir64b(),
        Routine::Neon => false,
    }
}

#[allow(unused_unsafe)] // these two became safe functions after the minimum supported Rust version
fn has_movdir64b() -> bool {
    // SAFETY: every x86-64 processor has CPUID, and leaf 7 is queried only if it exists.
    unsafe {
        let (highest, _) = x86_64::__get_cpuid_max(0);
        highest >= 7 && x86_64::__cpuid_count(7, 0).ecx & LEAF7_ECX_MOVDIR64B != 0
    }
}

/// Whether the processor reports fast string moves (ERMSB).
pub(super) fn has_fast_rep_movsb() -> bool {
    is_x86_feature_detected!("ermsb")
}

/// Copies with `rep movsb`. Its stores may become visible in any order, but all before later ones.
///
/// # Safety
/// `to` is valid for writes and `from` for reads of `len` bytes.
#[inline]
pub(super) unsafe fn rep_movsb(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller's contract; the direction flag is clear, as Rust's ABI requires.
    unsafe {
        asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rdi") to => _,
            inout("rsi") from => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Drains the write-combining buffers.
pub(super) fn store_fence() {
    // SAFETY: only orders memory accesses.
    unsafe { asm!("sfence", options(nostack, preserves_flags)) };
}

/// Prefetches a cache line for writing. Assembly, because the intrinsic becomes a prefetch for
/// reading unless the compiler targets a newer processor; every processor that runs a current
/// 64-bit system has the instruction.
#[inline]
pub(super) fn prefetch_for_write(address: u64) {
    // SAFETY: a hint that accesses nothing and does not fault on any address.
    unsafe { asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly)) };
}

/// Discards data buffered by streaming loads, and waits for earlier loads and stores. LFENCE would
/// not do the former.
pub(super) fn load_fence() {
    // SAFETY: only orders memory accesses.
    unsafe { asm!("mfence", options(nostack, preserves_flags)) };
}

/// Clears the upper halves after using registers 0 to 15 as YMM, which would slow down legacy SSE
/// code.
#[inline]
fn zero_upper() {
    // SAFETY: only reached if AVX2 is available; all registers that it changes are declared.
    unsafe {
        asm!(
            "vzeroupper",
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
            out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
            out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
            out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            options(nostack, preserves_flags),
        );
    }
}

/// Loads the registers from `$from` at the given offsets, then stores them at `$to`.
macro_rules! load_store {
    ($to:expr, $from:expr, $fill:literal, $empty:literal, $($register:tt $offset:literal),+) => {
        asm!(
            $(concat!($fill, " ", $register, ", [{from} + ", $offset, "]"),)+
            $(concat!($empty, " [{to} + ", $offset, "], ", $register),)+
            from = in(reg) $from,
            to = in(reg) $to,
            $(out($register) _,)+
            options(nostack, preserves_flags),
        )
    };
}

macro_rules! streaming {
    (
        $access:ident<$bytes:literal>, then $narrower:ty, $fill:literal, $empty:literal,
        $first:tt $(, $register:tt $offset:literal)+
    ) => {
        impl AccessWidth for $access<$bytes> {
            const BYTES: usize = $bytes;
            type Narrower = $narrower;

            #[inline]
            unsafe fn copy(to: *mut u8, from: *const u8, count: usize) {
                let unrolled = count - count % UNROLL;
                for block in (0..unrolled).step_by(UNROLL) {
                    let at = block * $bytes;
                    // SAFETY: the blocks are within `count`; alignment and instructions by the
                    // caller's contract; all clobbered registers are declared.
                    unsafe {
                        load_store!(
                            to.add(at), from.add(at), $fill, $empty,
                            $first 0 $(, $register $offset)+
                        );
                    }
                }
                for block in unrolled..count {
                    let at = block * $bytes;
                    // SAFETY: as above, for one block.
                    unsafe { load_store!(to.add(at), from.add(at), $fill, $empty, $first 0) };
                }
                if $bytes == 32 {
                    zero_upper();
                }
            }
        }
    };
}

macro_rules! streaming_both_ways {
    (
        $bytes:literal, then $store:ty, $load:ty,
        host $fill:literal $empty:literal, device $stream_in:literal $stream_out:literal,
        $($registers:tt)+
    ) => {
        streaming!(Store<$bytes>, then $store, $fill, $stream_out, $($registers)+);
        streaming!(Load<$bytes>, then $load, $stream_in, $empty, $($registers)+);
    };
}

streaming_both_ways!(
    16, then scalar::Store<u64>, scalar::Load<u64>,
    host "movdqu" "movdqu", device "movntdqa" "movntdq",
    "xmm0", "xmm1" 16, "xmm2" 32, "xmm3" 48, "xmm4" 64, "xmm5" 80, "xmm6" 96, "xmm7" 112
);

streaming_both_ways!(
    32, then Store<16>, Load<16>,
    host "vmovdqu" "vmovdqu", device "vmovntdqa" "vmovntdq",
    "ymm0", "ymm1" 32, "ymm2" 64, "ymm3" 96, "ymm4" 128, "ymm5" 160, "ymm6" 192, "ymm7" 224
);

// Registers from 16 on do not affect the lower ones, so no `vzeroupper` is needed.
streaming_both_ways!(
    64, then Store<32>, Load<32>,
    host "vmovdqu64" "vmovdqu64", device "vmovntdqa" "vmovntdq",
    "zmm16", "zmm17" 64, "zmm18" 128, "zmm19" 192,
    "zmm20" 256, "zmm21" 320, "zmm22" 384, "zmm23" 448
);

streaming!(
    Plain<16>, then scalar::Store<u64>, "movdqu", "movdqu",
    "xmm0", "xmm1" 16, "xmm2" 32, "xmm3" 48, "xmm4" 64, "xmm5" 80, "xmm6" 96, "xmm7" 112
);

streaming!(
    Plain<32>, then Plain<16>, "vmovdqu", "vmovdqu",
    "ymm0", "ymm1" 32, "ymm2" 64, "ymm3" 96, "ymm4" 128, "ymm5" 160, "ymm6" 192, "ymm7" 224
);

streaming!(
    Plain<64>, then Plain<32>, "vmovdqu64", "vmovdqu64",
    "zmm16", "zmm17" 64, "zmm18" 128, "zmm19" 192,
    "zmm20" 256, "zmm21" 320, "zmm22" 384, "zmm23" 448
);

impl AccessWidth for DirectStore {
    const BYTES: usize = 64;
    // Some processors have MOVDIR64B but no AVX.
    type Narrower = Store<16>;

    #[inline]
    unsafe fn copy(to: *mut u8, from: *const u8, count: usize) {
        for block in 0..count {
            let at = block * Self::BYTES;
            // SAFETY: the block is within `count`, `to` is aligned and the instruction available,
            // by the caller's contract.
            unsafe {
                asm!(
                    "movdir64b {to}, [{from}]",
                    to = in(reg) to.add(at),
                    from = in(reg) from.add(at),
                    options(nostack, preserves_flags),
                );
            }
        }
    }
}
