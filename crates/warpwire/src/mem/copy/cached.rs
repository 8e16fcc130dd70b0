//! Copies between places of the host's own, cached memory: `memcpy`, where the compiler can see nothing, and whose last bytes become visible last.
//!
//! # Which way
//! Long copies are the processor's own string move, where it has a fast one. But a copy that rises waits for itself if it stores shortly before it loads
//! from an address with the same lower twelve bits, which is how processors look for stores that a load depends on: on the machine measured, 8 GB/s in
//! the place of 39. So one that would *chase itself* falls instead, from the last block to the first, and then loads what lies below all that it stored.

use std::sync::OnceLock;

#[cfg(target_arch = "aarch64")]
use super::aarch64;
#[cfg(target_arch = "x86_64")]
use super::x86::{self, has_fast_rep_movsb, rep_movsb};
use super::{AccessWidth, Routine, copy, scalar, split};

/// From this length on, the processor's own string move is faster than loads and stores of ours, where it has a fast one:
/// it need not read what it overwrites. At 4 KiB it is 1.6 times as fast as AVX-512, at 1 MiB 1.3 times.
const MIN_REP_MOVSB: usize = 2048;
/// From this length on, it is worth asking whether a copy chases itself.
const MIN_ALIASING_CHECK: usize = 512;
/// What is left to ordinary stores behind the rest, whose stores may become visible in any order: who waits for
/// the last byte finds all others in their places.
const TAIL_LEN: usize = 64;
/// Addresses are compared by as much of them.
const ALIAS_PERIOD: usize = 4096;
/// A copy that is ahead of its source by less than this, modulo [`ALIAS_PERIOD`], chases itself: farther ahead, the stores are over when they would matter.
const ALIAS_DISTANCE: usize = 512;

/// Copies `len` bytes between places of the host's own, cached memory, one of which others may access
/// meanwhile. The last bytes become visible last.
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
    // SAFETY: the caller's promise, for two parts that follow each other; the routine was found available.
    unsafe {
        if aliases {
            copy_backward(routine, to, from, body);
        } else if body > 0 {
            rep_movsb(to, from, body);
        }
        copy_forward(routine, to.add(body), from.add(body), len - body);
    }
}

/// Whether a copy that rises would wait for its own stores.
#[inline]
fn aliases_4k(to: usize, from: usize) -> bool {
    (1..ALIAS_DISTANCE).contains(&(to.wrapping_sub(from) % ALIAS_PERIOD))
}

#[cfg(not(target_arch = "x86_64"))]
fn has_fast_rep_movsb() -> bool {
    false
}

/// # Safety
/// Never called.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn rep_movsb(_: *mut u8, _: *const u8, _: usize) {}

/// Copies with the registers of a given routine, in rising order.
///
/// # Safety
/// As for [`cached`], and `routine` is available.
#[inline]
pub(super) unsafe fn copy_forward(routine: Routine, to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller's promise; each arm's instructions belong to the routine that is available. Stores
    // are aligned, loads need not be.
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

/// The same in falling order, but for a few bytes at either end.
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
            // Not measured: these have no string move, and what they have is what they had.
            _ => copy_forward(routine, to, from, len),
        }
    }
}

/// Copies block by block, the last one first: each is one load and one aligned store.
///
/// # Safety
/// As for [`copy`].
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy_blocks_backward<A: AccessWidth>(to: *mut u8, from: *const u8, len: usize) {
    let (head, body) = split(to.addr(), len, A::BYTES);
    let edge = head + body;
    // SAFETY: head, blocks and the rest follow each other within `len`; blocks are aligned where they are stored.
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

    /// Bytes of which no two neighbourhoods look alike.
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
                // SAFETY: both ranges lie inside their vectors, which are apart; nobody else has them.
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
                // SAFETY: inside their vectors, which are apart; the routine is available.
                unsafe {
                    copy_backward(routine, target.as_mut_ptr().add(start), source.as_ptr(), len)
                };
                assert!(target[start..start + len] == source[..len], "{routine} {start} {len}");
                assert!(target[..start].iter().chain(&target[start + len..]).all(|b| *b == 0xee));
            }
        }
    }
}
