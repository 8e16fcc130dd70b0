//! Views of memory that a device, a NIC or another process may change at any time.
//!
//! A Rust reference asserts that nothing else writes the memory, which is false here. So there is
//! no `&[u8]`: words are accessed atomically, and bulk copies use [`copy`], whose accesses are
//! opaque to the compiler.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use super::address::{check_range, is_inside};
use super::copy::{self, Routine};
use crate::error::{Error, Kind, Result};

/// Minimum length for the wide instructions of [`copy`]; below it their set-up costs more than it
/// saves.
const MIN_WIDE_COPY: usize = 128;
const CACHE_LINE: usize = 64;

/// A view of memory that is shared with writers outside this program's control.
///
/// ```
/// use warpwire::mem::sim::{Sim, SimConfig};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let pinned = gpu.alloc_pinned(4096).unwrap();
/// let bytes = pinned.host_bytes().unwrap();
/// bytes.write(16, b"hello").unwrap();
/// bytes.store_u32(0, 7).unwrap();
/// assert_eq!(bytes.load_u32(0).unwrap(), 7);
/// assert!(bytes.load_u32(4096).is_err());
/// ```
#[derive(Clone, Copy)]
pub struct SharedBytes<'a> {
    base: NonNull<u8>,
    len: usize,
    owner: PhantomData<&'a ()>,
}

// SAFETY: every access below is atomic or equivalent to volatile, so views may be used from any
// thread.
unsafe impl Send for SharedBytes<'_> {}
// SAFETY: as above; a shared view offers the same accesses.
unsafe impl Sync for SharedBytes<'_> {}

macro_rules! atomic_word {
    ($load:ident, $store:ident, $add:ident, $cas:ident, $word:ty, $atomic:ty) => {
        /// Loads the word at `offset` with acquire ordering.
        #[inline]
        pub fn $load(&self, offset: u64) -> Result<$word> {
            Ok(self.word::<$atomic>(offset)?.load(Ordering::Acquire))
        }

        /// Stores the word at `offset` with release ordering.
        #[inline]
        pub fn $store(&self, offset: u64, value: $word) -> Result<()> {
            self.word::<$atomic>(offset)?.store(value, Ordering::Release);
            Ok(())
        }

        /// Adds to the word at `offset`, wrapping, and returns the previous value.
        pub fn $add(&self, offset: u64, value: $word) -> Result<$word> {
            Ok(self.word::<$atomic>(offset)?.fetch_add(value, Ordering::AcqRel))
        }

        /// Stores `new` at `offset` if the word equals `expected`; returns the previous value.
        pub fn $cas(&self, offset: u64, expected: $word, new: $word) -> Result<$word> {
            let word = self.word::<$atomic>(offset)?;
            let (Ok(seen) | Err(seen)) =
                word.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire);
            Ok(seen)
        }
    };
}

impl<'a> SharedBytes<'a> {
    /// A view of `len` bytes at `base`.
    ///
    /// # Safety
    /// The bytes stay mapped, readable and writable for `'a`, and this program accesses them only
    /// through such views, never through references.
    pub(crate) unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        Self { base, len, owner: PhantomData }
    }

    /// An empty view: every access is out of range.
    pub(crate) fn empty() -> Self {
        Self { base: NonNull::dangling(), len: 0, owner: PhantomData }
    }

    /// Like [`slice`](Self::slice), but returns an empty view if the range is not inside this one.
    pub(crate) fn slice_or_empty(&self, offset: u64, len: u64) -> Self {
        self.slice(offset, len).unwrap_or(Self::empty())
    }

    /// The first byte, for callers that keep the memory alive by other means than this view's
    /// lifetime.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// CPU address of the first byte, for C code that shares the memory.
    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // no view is empty: allocations are not
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    atomic_word!(load_u32, store_u32, fetch_add_u32, compare_exchange_u32, u32, AtomicU32);
    atomic_word!(load_u64, store_u64, fetch_add_u64, compare_exchange_u64, u64, AtomicU64);

    /// Loads the byte at `offset` with acquire ordering, to poll it.
    #[inline]
    pub fn load_u8(&self, offset: u64) -> Result<u8> {
        Ok(self.word::<AtomicU8>(offset)?.load(Ordering::Acquire))
    }

    /// Loads the eight words of the aligned cache line at `offset`, with acquire ordering; `None`
    /// if out of range or misaligned.
    #[inline]
    pub(crate) fn load_line(&self, offset: u64) -> Option<[u64; CACHE_LINE / 8]> {
        let line = self.line(offset)?;
        let words = std::array::from_fn(|at| line[at].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        Some(words)
    }

    /// Stores the eight words of the aligned cache line at `offset`, the last one with release
    /// ordering: a reader that sees it in an acquire load sees the others too. Does nothing if out
    /// of range or misaligned.
    #[inline]
    pub(crate) fn store_line(&self, offset: u64, words: &[u64; CACHE_LINE / 8]) {
        let Some(line) = self.line(offset) else { return };
        let [first @ .., last] = line;
        let [rest @ .., tail] = words;
        for (word, value) in first.iter().zip(rest) {
            word.store(*value, Ordering::Relaxed);
        }
        last.store(*tail, Ordering::Release);
    }

    /// Copies from the view, starting at `offset`, into `into`.
    ///
    /// Aligned 8-byte words are not torn; the copy as a whole may see a concurrent write partly.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let from = self.slice(offset, into.len() as u64)?;
        if into.len() >= MIN_WIDE_COPY {
            // SAFETY: the view is valid for that length; `into` is exclusive, so it does not
            // overlap.
            unsafe {
                copy::load(Routine::for_loads(), into.as_mut_ptr(), from.base.as_ptr(), into.len());
            }
            return Ok(());
        }
        if from.len == CACHE_LINE
            && let Some(line) = from.line(0)
            && let Ok(into) = <&mut [u8; CACHE_LINE]>::try_from(&mut *into)
        {
            for (word, out) in line.iter().zip(into.as_chunks_mut::<8>().0) {
                *out = word.load(Ordering::Relaxed).to_ne_bytes();
            }
            fence(Ordering::Acquire);
            return Ok(());
        }
        let (head, words, tail) = from.split(into.len());
        let (into_head, rest) = into.split_at_mut(head.len());
        let (into_words, into_tail) = rest.split_at_mut(words.len() * 8);
        load_bytes(head, into_head);
        for (word, out) in words.iter().zip(into_words.chunks_exact_mut(8)) {
            out.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        load_bytes(tail, into_tail);
        fence(Ordering::Acquire);
        Ok(())
    }

    /// Copies `from` into the view, starting at `offset`. Aligned 8-byte words are not torn. Below
    /// 128 bytes the last byte becomes visible last: a reader that sees it in an acquire load sees
    /// all others.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let into = self.slice(offset, from.len() as u64)?;
        if from.len() >= MIN_WIDE_COPY {
            // SAFETY: as in `read`.
            unsafe {
                copy::store(Routine::for_stores(), into.base.as_ptr(), from.as_ptr(), from.len());
            }
            // These stores are weakly ordered: a later store, such as a flag, must not pass them.
            copy::store_fence();
            return Ok(());
        }
        if into.len == CACHE_LINE
            && let Some(line) = into.line(0)
            && let Ok(from) = <&[u8; CACHE_LINE]>::try_from(from)
        {
            fence(Ordering::Release);
            let [first @ .., last] = line;
            for (word, bytes) in first.iter().zip(from.as_chunks::<8>().0) {
                word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
            }
            last.store(native_word(&from[CACHE_LINE - 8..]), Ordering::Release);
            return Ok(());
        }
        let (head, words, tail) = into.split(from.len());
        let (from_head, rest) = from.split_at(head.len());
        let (from_words, from_tail) = rest.split_at(words.len() * 8);
        fence(Ordering::Release);
        store_bytes(head, from_head);
        if let [first @ .., last] = words {
            let split = from_words.len() - 8;
            for (word, bytes) in first.iter().zip(from_words[..split].chunks_exact(8)) {
                word.store(native_word(bytes), Ordering::Relaxed);
            }
            last.store(native_word(&from_words[split..]), Ordering::Release);
        }
        store_bytes(tail, from_tail);
        Ok(())
    }

    /// Like [`read`](SharedBytes::read), for the host's own cached memory: without the fences that
    /// device memory needs. From 2 KiB on, words may be torn.
    #[inline]
    pub(crate) fn read_cached(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        if into.len() < MIN_WIDE_COPY {
            return self.read(offset, into);
        }
        let from = self.slice(offset, into.len() as u64)?;
        // SAFETY: as in `read`.
        unsafe { copy::cached(into.as_mut_ptr(), from.base.as_ptr(), into.len()) };
        fence(Ordering::Acquire);
        Ok(())
    }

    /// Like [`write`](SharedBytes::write), for the host's own cached memory: the bytes stay in the
    /// cache for the reader. From 2 KiB on, words may be torn. The last byte becomes visible last.
    #[inline]
    pub(crate) fn write_cached(&self, offset: u64, from: &[u8]) -> Result<()> {
        if let Ok(value) = <[u8; 8]>::try_from(from)
            && is_inside(offset, 8, self.len())
            && (self.base.addr().get() + offset as usize).is_multiple_of(8)
        {
            return self.store_u64(offset, u64::from_ne_bytes(value));
        }
        if from.len() < MIN_WIDE_COPY {
            return self.write(offset, from);
        }
        let into = self.slice(offset, from.len() as u64)?;
        fence(Ordering::Release);
        // SAFETY: as in `read`.
        unsafe { copy::cached(into.base.as_ptr(), from.as_ptr(), from.len()) };
        Ok(())
    }

    /// Copies `len` bytes from `source` at `source_offset` into this view at `offset`. The ranges
    /// must be disjoint or identical.
    pub fn copy_from(
        &self,
        offset: u64,
        source: &SharedBytes<'_>,
        source_offset: u64,
        len: u64,
    ) -> Result<()> {
        let into = self.slice(offset, len)?;
        let from = source.slice(source_offset, len)?;
        if into.len >= MIN_WIDE_COPY {
            // SAFETY: both views are valid for that length; they are disjoint or identical.
            unsafe {
                copy::load(Routine::for_loads(), into.base.as_ptr(), from.base.as_ptr(), into.len);
            }
            return Ok(());
        }
        let mut buffer = [0; MIN_WIDE_COPY];
        let slice = &mut buffer[..into.len];
        from.read(0, slice)?;
        into.write(0, slice)
    }

    /// Like [`copy_from`](SharedBytes::copy_from), where both views are the host's own cached
    /// memory. If the ranges overlap partly, for instance through two mappings, the result is
    /// unspecified.
    #[inline]
    pub(crate) fn copy_cached(
        &self,
        offset: u64,
        source: &SharedBytes<'_>,
        source_offset: u64,
        len: u64,
    ) -> Result<()> {
        if len < MIN_WIDE_COPY as u64 {
            return self.copy_from(offset, source, source_offset, len);
        }
        let into = self.slice(offset, len)?;
        let from = source.slice(source_offset, len)?;
        fence(Ordering::Release);
        // SAFETY: as in `copy_from`; the copy is assembly or volatile stores, so a partial overlap
        // only affects the result.
        unsafe { copy::cached(into.base.as_ptr(), from.base.as_ptr(), into.len) };
        fence(Ordering::Acquire);
        Ok(())
    }

    /// Fills `len` bytes at `offset` with repetitions of `pattern`; `len` must be a multiple of its
    /// length.
    pub fn fill(&self, offset: u64, len: u64, pattern: &[u8]) -> Result<()> {
        let into = self.slice(offset, len)?;
        let unit = pattern.len();
        let mut buffer = [0; 4096];
        if unit == 0 || unit > buffer.len() || !len.is_multiple_of(unit as u64) {
            return Err(Error::new(Kind::InvalidArgument, format!("fill {len} bytes"))
                .on("shared memory")
                .why(format!("the length is not a multiple of the pattern's {unit} bytes")));
        }
        for (at, byte) in buffer.iter_mut().enumerate() {
            *byte = pattern[at % unit];
        }
        // Each step restarts the pattern, so a step is a whole multiple of it.
        let whole = (buffer.len() - buffer.len() % unit) as u64;
        let mut done = 0;
        while done < len {
            let step = (len - done).min(whole);
            into.write(done, &buffer[..step as usize])?;
            done += step;
        }
        Ok(())
    }

    /// The sub-view `offset..offset + len`.
    #[inline]
    pub fn slice(&self, offset: u64, len: u64) -> Result<SharedBytes<'a>> {
        check_range(offset, len, self.len(), "shared memory")?;
        // SAFETY: the range is inside this view by the check above; its bytes stay valid for 'a.
        Ok(unsafe { Self::new(self.base.add(offset as usize), len as usize) })
    }

    #[inline]
    fn word<W>(&self, offset: u64) -> Result<&'a W> {
        let width = size_of::<W>() as u64;
        check_range(offset, width, self.len(), "shared memory")?;
        // SAFETY: in range by the check above.
        let at = unsafe { self.base.add(offset as usize) }.cast::<W>();
        if !at.is_aligned() {
            return Err(misaligned(offset, width));
        }
        // SAFETY: valid and aligned; W is an atomic (the function is private and only called with
        // atomics), so a shared reference permits other writers.
        Ok(unsafe { at.as_ref() })
    }

    /// The cache line at `offset` as words; `None` if out of range or misaligned. Queue entries are
    /// aligned.
    #[inline]
    fn line(&self, offset: u64) -> Option<&'a [AtomicU64; CACHE_LINE / 8]> {
        if !is_inside(offset, CACHE_LINE as u64, self.len()) {
            return None;
        }
        // SAFETY: in range by the check above.
        let at = unsafe { self.base.add(offset as usize) }.cast::<[AtomicU64; CACHE_LINE / 8]>();
        if !at.is_aligned() {
            return None;
        }
        // SAFETY: valid and aligned by the checks above; atomics permit other writers.
        Some(unsafe { at.as_ref() })
    }

    /// Splits the first `len` bytes: bytes up to an 8-byte boundary, whole words, remaining bytes.
    fn split(&self, len: usize) -> (&'a [AtomicU8], &'a [AtomicU64], &'a [AtomicU8]) {
        let head = self.base.align_offset(8).min(len);
        let words = (len - head) / 8;
        let tail_at = head + words * 8;
        // SAFETY: the three parts are adjacent and inside the view; the middle one is aligned, and
        // if it is empty the pointer is not used; slices of atomics permit other writers.
        unsafe {
            let middle = if words == 0 {
                &[]
            } else {
                std::slice::from_raw_parts(self.base.add(head).as_ptr().cast(), words)
            };
            (
                std::slice::from_raw_parts(self.base.as_ptr().cast(), head),
                middle,
                std::slice::from_raw_parts(self.base.add(tail_at).as_ptr().cast(), len - tail_at),
            )
        }
    }
}

fn native_word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(bytes);
    u64::from_ne_bytes(word)
}

fn load_bytes(from: &[AtomicU8], into: &mut [u8]) {
    for (byte, out) in from.iter().zip(into) {
        *out = byte.load(Ordering::Relaxed);
    }
}

/// Stores bytes, the last one with release ordering.
fn store_bytes(into: &[AtomicU8], from: &[u8]) {
    let (Some((last, into)), Some((last_value, from))) = (into.split_last(), from.split_last())
    else {
        return;
    };
    for (byte, value) in into.iter().zip(from) {
        byte.store(*value, Ordering::Relaxed);
    }
    last.store(*last_value, Ordering::Release);
}

#[cold]
fn misaligned(offset: u64, width: u64) -> Error {
    Error::new(Kind::Misaligned, format!("access a {}-bit word at offset {offset}", width * 8))
        .on("shared memory")
        .why(format!("the address is not a multiple of {width}"))
        .fix(format!("use an offset that is a multiple of {width}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Calls `f` with a view of 8-byte aligned storage.
    fn with_view<R>(len: usize, f: impl FnOnce(SharedBytes<'_>) -> R) -> R {
        let storage: Vec<AtomicU64> = (0..len.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        let base = NonNull::from(storage.as_slice()).cast();
        // SAFETY: the storage outlives the closure and is accessed through the view only.
        f(unsafe { SharedBytes::new(base, len) })
    }

    #[test]
    fn words_are_checked_for_range_and_alignment() {
        with_view(20, |view| {
            view.store_u64(8, 5).unwrap();
            assert_eq!(view.fetch_add_u64(8, 2).unwrap(), 5);
            assert_eq!(view.compare_exchange_u64(8, 7, 9).unwrap(), 7);
            assert_eq!(view.compare_exchange_u64(8, 7, 1).unwrap(), 9);
            assert_eq!(view.load_u64(4).unwrap_err().kind(), &Kind::Misaligned);
            assert_eq!(view.load_u64(16).unwrap_err().kind(), &Kind::OutOfRange);
            assert_eq!(view.store_u32(u64::MAX - 3, 0).unwrap_err().kind(), &Kind::OutOfRange);
        });
    }

    proptest! {
        #[test]
        fn any_offset_and_length_copies_exactly(
            data in proptest::collection::vec(any::<u8>(), 0..9000),
            offset in 0u64..24,
            other in 0u64..24,
        ) {
            let len = data.len() as u64;
            with_view(data.len() + 48, |view| {
                with_view(data.len() + 48, |copy| {
                    view.write(offset, &data).unwrap();
                    copy.copy_from(other, &view, offset, len).unwrap();
                    let mut back = vec![0; data.len() + 48];
                    copy.read(0, &mut back).unwrap();
                    let start = other as usize;
                    assert!(back[..start].iter().all(|b| *b == 0));
                    assert_eq!(&back[start..start + data.len()], &data[..]);
                    assert!(back[start + data.len()..].iter().all(|b| *b == 0));
                });
            });
        }

        #[test]
        fn fill_repeats_the_pattern_from_its_start(
            count in 0u64..3000,
            unit in prop::sample::select(vec![1usize, 2, 4]),
        ) {
            let pattern = [1, 2, 3, 4];
            with_view(12_016, |view| {
                view.fill(3, count * unit as u64, &pattern[..unit]).unwrap();
                let mut back = vec![0; 12_016];
                view.read(0, &mut back).unwrap();
                for (at, byte) in back[3..].iter().enumerate() {
                    let inside = at < count as usize * unit;
                    assert_eq!(*byte, if inside { pattern[at % unit] } else { 0 });
                }
            });
        }
    }
}
