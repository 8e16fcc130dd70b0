//! Every routine against plain expectations, and the list of accesses against its guarantees.

use std::cell::RefCell;

use proptest::prelude::*;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

use super::*;

/// Every byte before a copy.
const BEFORE: u8 = 0xee;

/// Bytes checked on either side of a copy; a multiple of every alignment.
const GUARD: usize = 64;

const DEVICE_OFFSETS: std::ops::RangeInclusive<usize> = 0..=70;
const HOST_OFFSETS: [usize; 5] = [0, 1, 7, 8, 33];

fn lengths() -> impl Iterator<Item = usize> {
    (0..=200).chain([255, 256, 257, 1000, 2047, 2048, 4096 + 13, 65536 + 5])
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "read through a pointer")] [u8; 64]);

/// Memory aligned to 64 bytes with space for `len` bytes at the maximum offset, and guards.
struct Memory(Vec<Line>);

impl Memory {
    fn new(len: usize) -> Self {
        let bytes = 2 * GUARD + DEVICE_OFFSETS.end() + len;
        Self(vec![Line([BEFORE; 64]); bytes.div_ceil(64)])
    }

    /// Pointer to the byte at `offset`, after the guard.
    fn at(&mut self, offset: usize) -> *mut u8 {
        self.bytes()[GUARD + offset..].as_mut_ptr()
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: a line is 64 bytes without padding, and lines are contiguous.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 64) }
    }

    /// Panics unless `data` is at `offset` and everything else is unchanged; then resets all bytes.
    fn expect(&mut self, offset: usize, data: &[u8], case: &dyn Fn() -> String) {
        let bytes = self.bytes();
        let (before, rest) = bytes.split_at(GUARD + offset);
        let (copied, behind) = rest.split_at(data.len());
        let untouched = |part: &[u8]| *part == [BEFORE; 4 * GUARD][..part.len()];
        assert!(untouched(before) && untouched(behind), "{}: bytes outside were changed", case());
        assert!(copied == data, "{}: wrong data", case());
        bytes.fill(BEFORE);
    }
}

/// Bytes that differ from their neighbours, near and far.
fn sample(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at ^ (at >> 8).wrapping_mul(167)) as u8).collect()
}

/// Stores and loads once, and checks both.
fn both_ways(routine: Routine, device_at: usize, host_at: usize, data: &[u8], memory: &mut Memory) {
    let len = data.len();
    let case = || format!("{routine}, {len} bytes, device +{device_at}, host +{host_at}");
    let mut source = vec![0; host_at + len];
    source[host_at..].copy_from_slice(data);
    // SAFETY: the memory has that many bytes at either offset, and the routine is available.
    unsafe { store(routine, memory.at(device_at), source[host_at..].as_ptr(), len) };
    store_fence();
    memory.expect(device_at, data, &case);

    let mut device = Memory::new(len);
    device.bytes()[GUARD + device_at..][..len].copy_from_slice(data);
    // SAFETY: as above.
    unsafe { load(routine, memory.at(host_at), device.at(device_at), len) };
    memory.expect(host_at, data, &case);

    // SAFETY: as above.
    unsafe { cached::copy_forward(routine, memory.at(host_at), device.at(device_at), len) };
    memory.expect(host_at, data, &case);

    // SAFETY: as above.
    unsafe { cached(memory.at(host_at), device.at(device_at), len) };
    memory.expect(host_at, data, &case);
}

/// A reader that sees the last byte of a copy sees all others, whichever method copied them.
#[test]
fn the_last_byte_of_a_cached_copy_becomes_visible_last() {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
    const LEN: usize = 8192;
    let target: Vec<AtomicU8> = (0..LEN).map(|_| AtomicU8::new(0)).collect();
    let seen = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=2000_u64 {
                let source = vec![round as u8; LEN];
                // SAFETY: both are `LEN` bytes; the target is atomics that outlive the scope.
                unsafe { cached(target.as_ptr().cast_mut().cast(), source.as_ptr(), LEN) };
                while seen.load(Ordering::Acquire) != round {
                    std::thread::yield_now();
                }
            }
        });
        for round in 1..=2000_u64 {
            let mut polls = 0_u32;
            while target[LEN - 1].load(Ordering::Acquire) != round as u8 {
                polls += 1;
                if polls.is_multiple_of(1000) {
                    std::thread::yield_now(); // on one CPU the writer needs it to make progress
                }
            }
            let late = target.iter().position(|byte| byte.load(Ordering::Relaxed) != round as u8);
            assert_eq!(late, None, "round {round}");
            seen.store(round, Ordering::Release);
        }
    });
}

#[test]
fn every_routine_copies_exactly_at_every_offset_and_length() {
    for len in lengths() {
        let (data, mut memory) = (sample(len), Memory::new(len));
        for routine in Routine::available() {
            for device_at in DEVICE_OFFSETS {
                for host_at in HOST_OFFSETS {
                    both_ways(routine, device_at, host_at, &data, &mut memory);
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn any_triple_copies_exactly(
        device_at in DEVICE_OFFSETS,
        host_at in 0usize..=70,
        data in proptest::collection::vec(any::<u8>(), 0..3000),
    ) {
        let mut memory = Memory::new(data.len());
        for routine in Routine::available() {
            both_ways(routine, device_at, host_at, &data, &mut memory);
        }
    }

    #[test]
    fn accesses_are_aligned_in_order_and_cover_exactly(
        address in any::<usize>(),
        len in 0usize..5000,
        widest in prop::sample::select(vec![1usize, 2, 4, 8, 16, 32, 64]),
    ) {
        let mut end = 0;
        for access in aligned_accesses(address, len, widest) {
            prop_assert_eq!(access.offset, end);
            prop_assert!(access.width.is_power_of_two() && access.width <= widest);
            prop_assert_eq!(address.wrapping_add(access.offset) % access.width, 0);
            end += access.width;
        }
        prop_assert_eq!(end, len);
    }

    #[test]
    fn a_range_aligned_to_its_length_is_one_access(
        block in 0usize..1 << 40,
        shift in 0u32..=6,
    ) {
        let width = 1 << shift;
        let found: Vec<_> = aligned_accesses(block * width, width, 64).collect();
        prop_assert_eq!(found, [AlignedAccess { offset: 0, width }]);
    }

    #[test]
    fn copies_make_the_planned_accesses(start in 0usize..64, len in 0usize..700) {
        prop_assert_eq!(seen::<RecordingAccess<64>>(start, len), planned(start, len, 64));
        prop_assert_eq!(seen::<RecordingAccess<8>>(start, len), planned(start, len, 8));
    }
}

thread_local! {
    static ACCESSES: RefCell<Vec<(usize, usize)>> = const { RefCell::new(Vec::new()) };
}

/// Copies nothing, and records each access: its address and width.
struct RecordingAccess<const BYTES: usize>;

macro_rules! seen {
    ($bytes:literal, $narrower:literal) => {
        impl AccessWidth for RecordingAccess<$bytes> {
            const BYTES: usize = $bytes;
            type Narrower = RecordingAccess<$narrower>;

            unsafe fn copy(to: *mut u8, _: *const u8, count: usize) {
                let accesses = (0..count).map(|at| (to.addr() + at * $bytes, $bytes));
                ACCESSES.with_borrow_mut(|all| all.extend(accesses));
            }
        }
    };
}

seen!(1, 1);
seen!(2, 1);
seen!(4, 2);
seen!(8, 4);
seen!(16, 8);
seen!(32, 16);
seen!(64, 32);

/// The accesses of a copy, with addresses relative to the start of aligned memory.
fn seen<A: AccessWidth>(start: usize, len: usize) -> Vec<(usize, usize)> {
    let (mut memory, source) = (Memory::new(len), vec![0; len]);
    let base = memory.at(0).addr();
    let to = memory.at(start);
    // SAFETY: the memory has that many bytes there, and nothing is copied.
    unsafe { copy::<A>(to, source.as_ptr(), len, to.addr()) };
    ACCESSES.take().into_iter().map(|(address, width)| (address - base, width)).collect()
}

fn planned(start: usize, len: usize, widest: usize) -> Vec<(usize, usize)> {
    aligned_accesses(start, len, widest)
        .map(|access| (start + access.offset, access.width))
        .collect()
}

#[test]
fn no_byte_outside_the_range_is_accessed() {
    const PAGE: usize = 4096;
    let none = ProtFlags::empty();
    // SAFETY: a new mapping; only its middle page is accessible, and it is unmapped at the end.
    unsafe {
        let base = mmap_anonymous(std::ptr::null_mut(), 3 * PAGE, none, MapFlags::PRIVATE).unwrap();
        let page = base.cast::<u8>().add(PAGE);
        mprotect(page.cast(), PAGE, MprotectFlags::READ | MprotectFlags::WRITE).unwrap();
        let mut host = vec![0; PAGE];
        for routine in Routine::available() {
            for len in lengths().filter(|len| *len <= PAGE) {
                for start in [page, page.add(PAGE - len)] {
                    store(routine, start, host.as_ptr(), len);
                    load(routine, host.as_mut_ptr(), start, len);
                    // The host side must stay within its bounds as well.
                    let mut device = vec![0; len];
                    store(routine, device.as_mut_ptr(), start, len);
                    load(routine, start, device.as_ptr(), len);
                }
            }
        }
        store_fence();
        munmap(base, 3 * PAGE).unwrap();
    }
}

#[test]
fn an_aligned_word_is_never_seen_torn() {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    let (word, done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..200_000_u64 {
                let value = (round & 0xff).wrapping_mul(0x0101_0101_0101_0101).to_ne_bytes();
                for routine in Routine::available() {
                    // SAFETY: the word is 8 aligned bytes that outlive the scope, in an atomic.
                    unsafe { store(routine, word.as_ptr().cast(), value.as_ptr(), 8) };
                }
            }
            done.store(true, Ordering::Release);
        });
        while !done.load(Ordering::Acquire) {
            for routine in Routine::available() {
                let mut seen = [0; 8];
                // SAFETY: as above.
                unsafe { load(routine, seen.as_mut_ptr(), word.as_ptr().cast(), 8) };
                assert!(seen.iter().all(|byte| *byte == seen[0]), "{routine}: {seen:x?}");
            }
        }
    });
}

#[test]
fn routines_have_names_and_defaults() {
    for (routine, name) in Routine::ALL {
        assert_eq!(routine.to_string(), name);
        assert_eq!(name.parse::<Routine>().unwrap(), routine);
    }
    let unknown = "sse9".parse::<Routine>().unwrap_err();
    assert_eq!(unknown.kind(), &Kind::InvalidArgument);
    assert_eq!(
        unknown.to_string(),
        "cannot read \"sse9\" as a copy routine: there is no such routine; \
         use one of scalar, sse4.1, avx2, avx512, movdir64b, neon"
    );
    let available = Routine::available();
    assert_eq!(available[0], Routine::Scalar);
    assert!(available.contains(&Routine::for_stores()));
    assert!(available.contains(&Routine::for_loads()));
    assert_ne!(Routine::for_loads(), Routine::Movdir64b);
    println!("this processor: {available:?}");
}
