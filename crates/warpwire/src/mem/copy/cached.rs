//! Copies within the host's own, cached memory: a `memcpy` that is opaque to the compiler and whose
//! last byte becomes visible last. On x86-64 stores become visible in order (TSO); elsewhere a
//! release fence precedes the store of the last word.
//!
//! # Direction
//! Long copies use `rep movsb` where it is fast (ERMSB). But a forward copy suffers 4K aliasing if
//! it stores shortly before it loads from an address with the same low 12 bits, because the
//! processor matches loads against earlier stores by these bits: 8 instead of 39 GB/s on the
//! machine measured. So copies with 0 < (to − from) mod 4096 < 512 go backward, block by block,
//! and then only load from below what they have stored.

use std::sync::OnceLock;

#[cfg(target_arch = "aarch64")]
use super::aarch64;
#[cfg(target_arch = "x86_64")]
use super::x86::{self, has_fast_rep_movsb, rep_movsb};
use super::{AccessWidth, Routine, copy, scalar, split};

/// Minimum length for `rep movsb`, where it is fast: it need not read the lines that it overwrites.
/// At 4 KiB it is 1.6 times as fast as AVX-512 loads and stores, at 1 MiB 1.3 times.
const MIN_REP_MOVSB: usize = 2048;
/// Minimum length for which the check for 4K aliasing pays off.
const MIN_ALIASING_CHECK: usize = 512;
/// Bytes at the end that are copied with ordinary stores after the body, whose stores may become
/// visible in any order: a reader that sees the last byte sees all others.
const TAIL_LEN: usize = 64;
/// The processor compares addresses modulo this.
const ALIAS_PERIOD: usize = 4096;
/// A destination ahead of its source by less than this, modulo [`ALIAS_PERIOD`], aliases. At larger
/// distances the stores have completed before they matter.
const ALIAS_DISTANCE: usize = 512;

/// Copies `len` bytes within the host's own, cached memory; other threads or processes may access
/// one side concurrently. The last byte becomes visible last: a reader that sees it in an acquire
/// load sees all others.
///
/// # Safety
/// `to` is valid for writes and `from` for reads of `len` bytes, and the two do not overlap.
pub(crate) unsafe fn cached(to: *mut u8, from: *const u8, len: usize) {
    static ROUTINE: OnceLock<(Routine, usize)> = OnceLock::new();
    let &(routine, min_rep_movsb) = ROUTINE.get_or_init(|| {
        let min_rep_movsb = if has_fast_rep_movsb() { MIN_REP_MOVSB } else { usize::MAX };
        (Routine::for_loads(), min_rep_movsb)
    });
    let aliases = len >= MIN_ALIASING_CHECK && aliases_4k(to.addr(), from.addr());
    let body = if aliases || len >= min_rep_movsb { len - TAIL_LEN } else { 0 };
    let last = last_len(to.addr(), len);
    // SAFETY: the caller's contract, for three adjacent parts; the routine is available.
    unsafe {
        if aliases {
            copy_backward(routine, to, from, body);
        } else if body > 0 {
            rep_movsb(to, from, body);
        }
        copy_forward(routine, to.add(body), from.add(body), len - body - last);
        if last > 0 {
            store_last(to.add(len - last), from.add(len - last), last);
        }
    }
}

/// Length of the part that is stored by itself, after a fence: none on x86-64, else the last word
/// if its address is aligned, or the last byte.
#[inline]
fn last_len(to: usize, len: usize) -> usize {
    match len {
        _ if cfg!(target_arch = "x86_64") => 0,
        0 => 0,
        _ if len >= 8 && (to + len).is_multiple_of(8) => 8,
        _ => 1,
    }
}

/// Makes all earlier stores visible, then stores the last word or byte.
///
/// # Safety
/// As for [`cached`]; `len` is 1, or 8 with `to` aligned to 8.
#[inline]
unsafe fn store_last(to: *mut u8, from: *const u8, len: usize) {
    std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
    // SAFETY: the caller's contract. Volatile, as other threads or processes may access the memory.
    unsafe {
        match len {
            8 => to.cast::<u64>().write_volatile(from.cast::<u64>().read_unaligned()),
            _ => to.write_volatile(from.read_volatile()),
        }
    }
}

/// Whether a forward copy would stall on its own stores (4K aliasing).
#[inline]
fn aliases_4k(to: usize, from: usize) -> bool {
    (1..ALIAS_DISTANCE).contains(&(to.wrapping_sub(from) % ALIAS_PERIOD))
}

#[cfg(not(target_arch = "x86_64"))]
fn has_fast_rep_movsb() -> bool {
    false
}

/// # Safety
/// Never called: `has_fast_rep_movsb` is false.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn rep_movsb(_: *mut u8, _: *const u8, _: usize) {}

/// Copies with the registers of a given routine, in ascending order.
///
/// # Safety
/// As for [`cached`], and `routine` is available.
#[inline]
pub(super) unsafe fn copy_forward(routine: Routine, to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller's contract; each arm only uses instructions of the available routine.
    // Stores are aligned, loads need not be.
    unsafe {
        match routine {
            #[cfg(target_arch = "x86_64")]
            Routine::Avx512 => copy::<x86::Plain<64>>(to, from, len, to.addr()),
            #[cfg(target_arch = "x86_64")]
            Routine::Avx2 => copy::<x86::Plain<32>>(to, from, len, to.addr()),
            #[cfg(target_arch = "x86_64")]
            Routine::Sse41 => copy::<x86::Plain<16>>(to, from, len, to.addr()),
            #[cfg(target_arch = "aarch64")]
            Routine::Neon => copy::<aarch64::Load<64>>(to, from, len, from.addr()),
            _ => copy::<scalar::Store<scalar::Widest>>(to, from, len, to.addr()),
        }
    }
}

/// Like [`copy_forward`], but in descending order, except for a few bytes at either end.
///
/// # Safety
/// As for [`copy_forward`].
unsafe fn copy_backward(routine: Routine, to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: as in `copy_forward`.
    unsafe {
        match routine {
            #[cfg(target_arch = "x86_64")]
            Routine::Avx512 => copy_blocks_backward::<x86::Plain<64>>(to, from, len),
            #[cfg(target_arch = "x86_64")]
            Routine::Avx2 => copy_blocks_backward::<x86::Plain<32>>(to, from, len),
            #[cfg(target_arch = "x86_64")]
            Routine::Sse41 => copy_blocks_backward::<x86::Plain<16>>(to, from, len),
            // Not measured on processors without these routines; they copy forward.
            _ => copy_forward(routine, to, from, len),
        }
    }
}

/// Copies block by block, last block first: each is one load and one aligned store.
///
/// # Safety
/// As for [`copy`].
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy_blocks_backward<A: AccessWidth>(to: *mut u8, from: *const u8, len: usize) {
    let (head, body) = split(to.addr(), len, A::BYTES);
    let edge = head + body;
    // SAFETY: head, blocks and rest are adjacent within `len`; the destination of each block is
    // aligned.
    unsafe {
        copy::<A>(to.add(edge), from.add(edge), len - edge, to.addr() + edge);
        for at in (head..edge).step_by(A::BYTES).rev() {
            A::copy(to.add(at), from.add(at), 1);
        }
        copy::<A>(to, from, head, to.addr());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes in which no two positions have the same surroundings.
    fn pattern(len: usize) -> Vec<u8> {
        (0..len as u32)
            .flat_map(|at| at.wrapping_mul(2_654_435_761).to_le_bytes())
            .take(len)
            .collect()
    }

    #[test]
    fn copies_just_ahead_of_their_source_alias() {
        for (distance, aliases) in [
            (0, false),
            (1, true),
            (64, true),
            (511, true),
            (512, false),
            (4032, false),
            (4095, false),
        ] {
            for pages in [0, 1, 77] {
                let from = 123_456_789;
                assert_eq!(aliases_4k(from + distance + pages * 4096, from), aliases, "{distance}");
            }
        }
        assert!(aliases_4k(100, usize::MAX - 4095), "addresses wrap");
    }

    #[test]
    fn the_last_word_is_stored_by_itself() {
        let source = pattern(64);
        for (at, len) in [(0, 1), (0, 8), (8, 8), (3, 5)] {
            let mut target = [0_u64; 8];
            let to = target.as_mut_ptr().cast::<u8>();
            let last = if (at + len) % 8 == 0 && len >= 8 { 8 } else { 1 };
            // SAFETY: inside the array, which is aligned to 8, and not shared.
            unsafe { store_last(to.add(at + len - last), source.as_ptr().add(len - last), last) };
            let stored = target.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
            assert_eq!(stored[at + len - last..at + len], source[len - last..len]);
        }
        let expected: [usize; 4] = if cfg!(target_arch = "x86_64") { [0; 4] } else { [0, 1, 8, 1] };
        let cases = [(16, 0), (16, 7), (16, 64), (15, 64)];
        assert_eq!(cases.map(|(to, len)| last_len(to, len)), expected);
    }

    #[test]
    fn copies_are_right_in_both_directions() {
        let source = pattern(24 << 10);
        let mut target = vec![0; 24 << 10];
        let page = |address: usize| address.wrapping_neg() % ALIAS_PERIOD;
        let (from, to) = (page(source.as_ptr().addr()), page(target.as_ptr().addr()));
        for len in [1, 63, 64, 511, 512, 513, 575, 600, 2047, 2048, 2049, 4096, 5003, 8192 + 17] {
            for (distance, skip) in
                [(0, 0), (1, 0), (8, 1), (64, 0), (64, 3), (100, 63), (511, 7), (512, 0), (4032, 5)]
            {
                target.fill(0xee);
                let (from, to) = (from + skip, to + skip + distance);
                // SAFETY: both ranges are inside their vectors, which are disjoint and not shared.
                unsafe { cached(target.as_mut_ptr().add(to), source.as_ptr().add(from), len) };
                assert!(
                    target[to..to + len] == source[from..from + len],
                    "{len} {distance} {skip}"
                );
                let others = target[..to].iter().chain(&target[to + len..]);
                assert!(others.into_iter().all(|byte| *byte == 0xee), "{len} {distance} {skip}");
            }
        }
    }

    #[test]
    fn every_routine_copies_backward() {
        let source = pattern(5000);
        for routine in Routine::available() {
            for (start, len) in [(0, 4096), (1, 4096), (63, 1000), (5, 64), (7, 3), (0, 0)] {
                let mut target = vec![0xee; 5000];
                // SAFETY: inside their vectors, which are disjoint; the routine is available.
                unsafe {
                    copy_backward(routine, target.as_mut_ptr().add(start), source.as_ptr(), len)
                };
                assert!(target[start..start + len] == source[..len], "{routine} {start} {len}");
                assert!(target[..start].iter().chain(&target[start + len..]).all(|b| *b == 0xee));
            }
        }
    }
}
