//! Copies between ordinary memory and a CPU window onto device memory.
//!
//! A window is write-combining or uncached PCIe memory: each access is a bus transaction, a load
//! costs about a microsecond, and an access that is not naturally aligned may be split or fault.
//! `memcpy` guarantees nothing about its accesses. The copies here guarantee that the device side
//!
//! * is accessed only with naturally aligned accesses, as wide as the [`Routine`] allows and in
//!   ascending order: a copy of 1, 2, 4 or 8 bytes aligned to its length is exactly one access;
//! * is never read by a store, never written by a load, and never accessed outside the range.
//!
//! The host side may have any alignment.
//!
//! # Ordering
//! Stores may stay in write-combining buffers and be reordered until the caller's one
//! `store_fence`. A load long enough to use streaming loads begins with a `load_fence`, so that it
//! sees what the device wrote before, and what this thread stored. It does not order later loads.
#![allow(unsafe_code)]

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use crate::error::{Error, Kind, Result};

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod cached;
mod copier;
mod plan;
mod scalar;
mod staging;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use cached::cached;
pub use copier::Copier;
pub use plan::{CopyDirection, CopyMethod, CopyPlan, CopySample, ENV_VAR};
pub use staging::{STAGING_ENV_VAR, StagingOptions};

/// Minimum length of loads that use streaming loads, which may return data older than the load.
const MIN_STREAMING_LOAD: usize = 16;

/// A copy routine, named after the instruction set extension that it needs.
///
/// ```
/// use warpwire::mem::copy::Routine;
/// assert!(Routine::available().contains(&Routine::for_stores()));
/// assert_eq!("avx512".parse::<Routine>().unwrap(), Routine::Avx512);
/// assert!("mmx".parse::<Routine>().is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Routine {
    /// Machine words; works everywhere.
    Scalar,
    /// 16-byte streaming loads and stores.
    Sse41,
    /// 32-byte streaming loads and stores.
    Avx2,
    /// 64-byte streaming loads and stores.
    Avx512,
    /// 64-byte direct stores. There are no such loads: loads use [`Routine::for_loads`].
    Movdir64b,
    /// Pairs of 16-byte loads and stores, 64 bytes per iteration.
    Neon,
}

impl Routine {
    /// Every routine with its name, simplest first.
    const ALL: [(Self, &'static str); 6] = [
        (Self::Scalar, "scalar"),
        (Self::Sse41, "sse4.1"),
        (Self::Avx2, "avx2"),
        (Self::Avx512, "avx512"),
        (Self::Movdir64b, "movdir64b"),
        (Self::Neon, "neon"),
    ];

    /// The routines that this processor supports, simplest first.
    pub fn available() -> Vec<Self> {
        detected().to_vec()
    }

    /// Whether this processor supports it.
    pub fn is_available(self) -> bool {
        detected().contains(&self)
    }

    /// The default routine for writing to device memory.
    ///
    /// On the machine measured, AVX-512 streaming stores reach 15–20 GB/s and MOVDIR64B 12–14.
    pub fn for_stores() -> Self {
        // AVX2 precedes MOVDIR64B because write combining merges its halves into the same 64-byte
        // writes. Processors with these two but without AVX-512 have not been measured.
        Self::first_of(&[Self::Avx512, Self::Avx2, Self::Movdir64b, Self::Sse41, Self::Neon])
    }

    /// The default routine for reading device memory.
    ///
    /// On the machine measured, 64- and 32-byte streaming loads read 4 KiB in 4 µs, 16-byte ones
    /// in 31 µs.
    pub fn for_loads() -> Self {
        Self::first_of(&[Self::Avx512, Self::Avx2, Self::Sse41, Self::Neon])
    }

    fn first_of(preferred: &[Self]) -> Self {
        preferred.iter().copied().find(|one| one.is_available()).unwrap_or(Self::Scalar)
    }

    /// Whether its wide loads may be served from a buffer filled earlier.
    fn streams_loads(self) -> bool {
        matches!(self, Self::Sse41 | Self::Avx2 | Self::Avx512)
    }

    #[cfg(target_arch = "x86_64")]
    fn detect(self) -> bool {
        x86::supports(self)
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn detect(self) -> bool {
        // Every AArch64 processor that runs an operating system has NEON; it is in the base target.
        self == Self::Scalar || (self == Self::Neon && cfg!(target_arch = "aarch64"))
    }
}

impl fmt::Display for Routine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.into_iter().find(|(one, _)| one == self).map_or("?", |(_, name)| name);
        f.pad(name)
    }
}

impl FromStr for Routine {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|(_, name)| *name == text);
        found.map(|(routine, _)| routine).ok_or_else(|| {
            let names = Self::ALL.map(|(_, name)| name).join(", ");
            Error::new(Kind::InvalidArgument, format!("read {text:?} as a copy routine"))
                .why("there is no such routine")
                .fix(format!("use one of {names}"))
        })
    }
}

/// The supported routines, detected once: CPUID is slow in a virtual machine.
fn detected() -> &'static [Routine] {
    static DETECTED: OnceLock<Vec<Routine>> = OnceLock::new();
    DETECTED.get_or_init(|| {
        let every = Routine::ALL.into_iter().map(|(routine, _)| routine);
        every.filter(|routine| routine.detect()).collect()
    })
}

/// Writes `len` bytes from `host` to `device`. Call [`store_fence`] after the last write of a
/// series.
///
/// # Safety
/// `routine` is available; `device` is valid for writes and `host` for reads of `len` bytes; the
/// two do not overlap; and no reference to the device's bytes exists.
pub(crate) unsafe fn store(routine: Routine, device: *mut u8, host: *const u8, len: usize) {
    debug_assert!(routine.is_available(), "{routine} cannot run here");
    let address = device.addr();
    // SAFETY: the caller's contract; each arm only uses instructions of the available routine.
    unsafe {
        match routine {
            #[cfg(target_arch = "x86_64")]
            Routine::Sse41 => copy::<x86::Store<16>>(device, host, len, address),
            #[cfg(target_arch = "x86_64")]
            Routine::Avx2 => copy::<x86::Store<32>>(device, host, len, address),
            #[cfg(target_arch = "x86_64")]
            Routine::Avx512 => copy::<x86::Store<64>>(device, host, len, address),
            #[cfg(target_arch = "x86_64")]
            Routine::Movdir64b => copy::<x86::DirectStore>(device, host, len, address),
            #[cfg(target_arch = "aarch64")]
            Routine::Neon => copy::<aarch64::Store<64>>(device, host, len, address),
            _ => copy::<scalar::Store<scalar::Widest>>(device, host, len, address),
        }
    }
}

/// Reads `len` bytes from `device` to `host`.
///
/// # Safety
/// `routine` is available; `host` is valid for writes and `device` for reads of `len` bytes; the
/// two do not overlap; and no reference to the device's bytes exists.
pub(crate) unsafe fn load(routine: Routine, host: *mut u8, device: *const u8, len: usize) {
    debug_assert!(routine.is_available(), "{routine} cannot run here");
    let routine = if routine == Routine::Movdir64b { Routine::for_loads() } else { routine };
    if len >= MIN_STREAMING_LOAD && routine.streams_loads() {
        load_fence();
    }
    let address = device.addr();
    // SAFETY: the caller's contract; each arm only uses instructions of the available routine.
    unsafe {
        match routine {
            #[cfg(target_arch = "x86_64")]
            Routine::Sse41 => copy::<x86::Load<16>>(host, device, len, address),
            #[cfg(target_arch = "x86_64")]
            Routine::Avx2 => copy::<x86::Load<32>>(host, device, len, address),
            #[cfg(target_arch = "x86_64")]
            Routine::Avx512 => copy::<x86::Load<64>>(host, device, len, address),
            #[cfg(target_arch = "aarch64")]
            Routine::Neon => copy::<aarch64::Load<64>>(host, device, len, address),
            _ => copy::<scalar::Load<scalar::Widest>>(host, device, len, address),
        }
    }
}

/// Drains this thread's earlier stores towards the device, before any later store.
pub(crate) fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    x86::store_fence();
    #[cfg(target_arch = "aarch64")]
    aarch64::store_fence();
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// Prefetches the cache line at `address` for writing, so that the transfer from another core's
/// cache overlaps with other work. A hint: any value is allowed, unmapped addresses have no effect.
#[inline]
pub(crate) fn prefetch_for_write(address: u64) {
    #[cfg(target_arch = "x86_64")]
    x86::prefetch_for_write(address);
    #[cfg(target_arch = "aarch64")]
    aarch64::prefetch_for_write(address);
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}

/// Keeps later loads from returning data older than this call. Needed between a "ready" flag and
/// the data it announces, if both are read through a window.
pub(crate) fn load_fence() {
    #[cfg(target_arch = "x86_64")]
    x86::load_fence();
    #[cfg(target_arch = "aarch64")]
    aarch64::load_fence();
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// Device accesses of one width in one direction.
trait AccessWidth {
    /// The width of one access, a power of two.
    const BYTES: usize;

    /// The next narrower accesses, for short or unaligned parts; for bytes, the type itself.
    type Narrower: AccessWidth;

    /// Copies `count * BYTES` bytes, with one access per `BYTES` on the device side, in ascending
    /// order.
    ///
    /// # Safety
    /// The processor has the instructions; `from` is valid for reads and `to` for writes of that
    /// length; the one on the device side is aligned to `BYTES`.
    unsafe fn copy(to: *mut u8, from: *const u8, count: usize);
}

/// Copies `len` bytes. `device` is the address of the device side, which decides how they are
/// split.
///
/// # Safety
/// The processor has `A`'s instructions; `from` is valid for reads and `to` for writes of `len`
/// bytes; `device` is the address of one of them.
#[inline]
unsafe fn copy<A: AccessWidth>(to: *mut u8, from: *const u8, len: usize, device: usize) {
    let (head, body) = split(device, len, A::BYTES);
    let edge = head + body;
    // SAFETY: head, body and rest are adjacent within `len`; the body starts aligned.
    unsafe {
        copy_edge::<A::Narrower>(to, from, head, device);
        if body > 0 {
            A::copy(to.add(head), from.add(head), body / A::BYTES);
        }
        let rest = device.wrapping_add(edge);
        copy_edge::<A::Narrower>(to.add(edge), from.add(edge), len - edge, rest);
    }
}

/// Copies the part before or after the body, one aligned access at a time.
///
/// # Safety
/// As for [`copy`].
#[inline]
unsafe fn copy_edge<A: AccessWidth>(to: *mut u8, from: *const u8, len: usize, device: usize) {
    for AlignedAccess { offset, width } in aligned_accesses(device, len, A::BYTES) {
        // SAFETY: accesses are within `len` and aligned to their width on the device side.
        unsafe { copy_aligned::<A>(to.add(offset), from.add(offset), width) }
    }
}

/// Copies `width` bytes with the widest accesses, from `A` downwards, that fit.
///
/// # Safety
/// As for [`AccessWidth::copy`], for `width` bytes aligned to `width`.
#[inline]
unsafe fn copy_aligned<A: AccessWidth>(to: *mut u8, from: *const u8, width: usize) {
    // SAFETY: the caller's contract; both are powers of two, so the accesses cover it exactly.
    unsafe {
        if width >= A::BYTES {
            A::copy(to, from, width / A::BYTES);
        } else {
            copy_aligned::<A::Narrower>(to, from, width);
        }
    }
}

/// A part of a copy that is a single device access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AlignedAccess {
    /// Offset from the start of the copy.
    offset: usize,
    /// Length in bytes; the address is a multiple of it.
    width: usize,
}

/// The fewest aligned accesses, none wider than `widest`, that cover `len` bytes at `address`.
#[inline]
fn aligned_accesses(
    address: usize,
    len: usize,
    widest: usize,
) -> impl Iterator<Item = AlignedAccess> {
    let mut offset = 0;
    std::iter::from_fn(move || {
        let fits = (len - offset).checked_ilog2()?;
        let reach = address.wrapping_add(offset) | widest;
        let aligned = reach & reach.wrapping_neg();
        let access = AlignedAccess { offset, width: aligned.min(1 << fits) };
        offset += access.width;
        Some(access)
    })
}

/// Splits `len` bytes at `address` into the bytes before the first multiple of `width`, and the
/// following whole multiples; returns both lengths.
#[inline]
fn split(address: usize, len: usize, width: usize) -> (usize, usize) {
    let mask = width - 1;
    let head = (address.wrapping_neg() & mask).min(len);
    (head, (len - head) & !mask)
}
