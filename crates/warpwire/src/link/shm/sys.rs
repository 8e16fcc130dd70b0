//! Memory that two processes map, and the credentials of a peer: the only unsafe code of the
//! shared-memory link.
//!
//! A ring consists of two memfds, because its two sides do not trust each other:
//!
//! - **The sender's** ([`SealedMapping`]) holds the packets and their headers. Before it is passed
//!   on, it is sealed with `F_SEAL_FUTURE_WRITE`: the sender's own mapping stays writable, but no
//!   new writable mapping and no `write` is possible. Therefore the sender may hold a `&mut [u8]`
//!   into it and fill packets directly: no other writer exists, and a concurrent reader must cope
//!   with changes.
//! - **The receiver's** ([`ControlPage`]) is one page, with the head and the request to be woken.
//!   Both sides write it, and both access it by atomic words only.
//!
//! The receiver maps the sender's file as [`ReadOnlyMapping`]: memory that may change at any
//! moment. It is never accessed as a `&[u8]`, only by atomic words and by copies that are opaque to
//! the compiler ([`SharedBytes`]).
#![allow(unsafe_code)]

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::mem::SharedBytes;
use crate::mem::copy::CopyDirection;

/// Size of the receiver's page.
const PAGE: usize = 4096;
/// Distance between words that different sides write: two cache lines, because CPUs prefetch lines
/// in pairs.
const LINE_PAIR: usize = 128;
/// Accesses of the sender's GPU that may be in progress at one time.
pub(super) const DEVICE_ACCESSES: usize = 64;
/// `f_type` of memory in ordinary pages. Huge pages may be unavailable when the memory is first
/// touched.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// A shared mapping, unmapped on drop.
struct MappedFile {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread; the wrapping types restrict access.
unsafe impl Send for MappedFile {}
// SAFETY: through a shared reference, the wrapping types offer only atomic words, copies that
// tolerate concurrent changes, and, for `SealedMapping`, bytes that only an exclusive reference
// changes.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    fn new(file: BorrowedFd<'_>, len: usize, protection: ProtFlags) -> io::Result<Self> {
        // SAFETY: a new mapping at an address chosen by the kernel affects no existing memory.
        let base = unsafe {
            rustix::mm::mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; all borrows of it end with the borrow of
        // `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The sender's view of a ring: the only writable mapping of its bytes.
pub(super) struct SealedMapping(MappedFile);

impl SealedMapping {
    /// Creates zeroed memory for a ring of `size` bytes; returns the file for its reader as well.
    pub(super) fn new(size: usize) -> io::Result<(Self, OwnedFd)> {
        let file = memory_file(size)?;
        let map = MappedFile::new(file.as_fd(), size, ProtFlags::READ | ProtFlags::WRITE)?;
        // `bytes_mut` relies on `FUTURE_WRITE`; a kernel before 5.1 rejects it, and with it the
        // call.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        Ok((Self(map), file))
    }

    /// Stores a 64-bit word, which a reader may load concurrently; ignored if it is outside the
    /// ring or misaligned.
    #[inline]
    pub(super) fn set(&mut self, offset: usize, word: u64, ordering: Ordering) {
        if let Some(at) = self.range(offset, 8).map(<*mut u8>::cast::<AtomicU64>)
            && at.is_aligned()
        {
            // SAFETY: inside the mapping by the check in `range`, aligned, initialized, and
            // borrowed exclusively.
            unsafe { &*at }.store(word, ordering);
        }
    }

    /// Prefetches the line at this offset for write.
    #[inline]
    pub(super) fn prefetch(&self, offset: usize) {
        #[cfg(target_arch = "x86_64")]
        if let Some(at) = self.range(offset, 8) {
            use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
            // SAFETY: a hint that accesses no memory; the address is valid.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(at.cast_const().cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = offset;
    }

    /// Bytes of the ring; `None` if they are outside of it.
    #[inline]
    pub(super) fn bytes(&self, offset: usize, len: usize) -> Option<&[u8]> {
        let at = self.range(offset, len)?;
        // SAFETY: inside the mapping by the check in `range`; zeroed on creation, so initialized;
        // borrowed from `self`; and this is the only writable mapping (see `new`).
        Some(unsafe { std::slice::from_raw_parts(at, len) })
    }

    /// As `bytes`, to be filled.
    #[inline]
    pub(super) fn bytes_mut(&mut self, offset: usize, len: usize) -> Option<&mut [u8]> {
        let at = self.range(offset, len)?;
        // SAFETY: as in `bytes`; borrowed mutably from `self`, hence the only reference in this
        // process.
        Some(unsafe { std::slice::from_raw_parts_mut(at, len) })
    }

    #[inline]
    fn range(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        if end > self.0.len {
            return None;
        }
        // SAFETY: inside the mapping, by the check above.
        Some(unsafe { self.0.base.add(offset) }.as_ptr())
    }
}

/// The reader's view of a ring: the sender may change any byte at any moment.
pub(super) struct ReadOnlyMapping(MappedFile);

impl ReadOnlyMapping {
    /// Maps a peer's ring of `size` bytes, if the file cannot shrink.
    pub(super) fn open(file: &OwnedFd, size: usize) -> io::Result<Self> {
        check_file(file, size)?;
        MappedFile::new(file.as_fd(), size, ProtFlags::READ).map(Self)
    }

    /// Loads the 64-bit word at this offset once; 0 if it is outside the ring or misaligned.
    #[inline]
    pub(super) fn word(&self, offset: usize, ordering: Ordering) -> u64 {
        if !offset.is_multiple_of(8) || offset.saturating_add(8) > self.0.len {
            return 0;
        }
        // SAFETY: inside the mapping and aligned, by the check above; only an atomic load is
        // performed, which read-only memory allows.
        let word: &AtomicU64 = unsafe { self.0.base.add(offset).cast().as_ref() };
        word.load(ordering)
    }

    /// Copies bytes out of the ring; `false` if they are outside of it.
    #[inline]
    pub(super) fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        // SAFETY: mapped as long as `self` is borrowed, and accessed by such views and atomics
        // only. The view is only read, so the mapping need not be writable.
        let bytes = unsafe { SharedBytes::new(self.0.base, self.0.len) };
        bytes.read_cached(offset as u64, into).is_ok()
    }
}

/// Words that one process writes, from any of its threads, and others read: sealed as
/// [`SealedMapping`] is.
pub(super) struct WordTable(MappedFile);

impl WordTable {
    /// Creates zeroed words in `len` bytes; returns the file for readers, which map it as
    /// [`ReadOnlyMapping`]. Pages are allocated on first touch.
    pub(super) fn new(len: usize) -> io::Result<(Self, OwnedFd)> {
        let (SealedMapping(map), file) = SealedMapping::new(len)?;
        Ok((Self(map), file))
    }

    /// The word with this index; `None` beyond the end.
    #[inline]
    pub(super) fn word(&self, number: usize) -> Option<&AtomicU64> {
        let offset = number.checked_mul(8)?;
        if offset.saturating_add(8) > self.0.len {
            return None;
        }
        // SAFETY: inside the mapping, which is page-aligned, so the word is aligned; the mapping
        // lives as long as `self`. Atomics permit concurrent access by other threads and processes.
        Some(unsafe { self.0.base.add(offset).cast().as_ref() })
    }
}

/// The receiver's page.
pub(super) struct ControlPage(MappedFile);

impl ControlPage {
    /// Creates a page; returns the file for the receiver as well.
    pub(super) fn new() -> io::Result<(Self, OwnedFd)> {
        let file = memory_file(PAGE)?;
        let map = MappedFile::new(file.as_fd(), PAGE, ProtFlags::READ | ProtFlags::WRITE)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self(map), file))
    }

    /// Maps the page that a sender created.
    pub(super) fn open(file: &OwnedFd) -> io::Result<Self> {
        check_file(file, PAGE)?;
        MappedFile::new(file.as_fd(), PAGE, ProtFlags::READ | ProtFlags::WRITE).map(Self)
    }

    /// The head: the number of bytes that the receiver has read.
    #[inline]
    pub(super) fn head(&self) -> &AtomicU64 {
        self.word(0)
    }

    /// Nonzero if the receiver sleeps or is about to.
    #[inline]
    pub(super) fn armed(&self) -> &AtomicU64 {
        self.word(1)
    }

    /// The tag of the sender's direct access in progress; 0 if there is none.
    #[inline]
    pub(super) fn access_word(&self) -> &AtomicU64 {
        self.word(2)
    }

    /// The tags of the sender's accesses in progress that its GPU executes; 0 where there is none.
    #[inline]
    pub(super) fn device_access_words(&self) -> [&AtomicU64; DEVICE_ACCESSES] {
        std::array::from_fn(|at| self.word_at(4 * LINE_PAIR + 8 * at))
    }

    /// Operations and bytes of the sender's direct accesses; for the receiver's counters only.
    #[inline]
    pub(super) fn access_counts(&self) -> [&AtomicU64; 2] {
        [self.word_at(3 * LINE_PAIR), self.word_at(3 * LINE_PAIR + 8)]
    }

    /// The word at the start of this pair of cache lines.
    #[inline]
    fn word(&self, pair: usize) -> &AtomicU64 {
        self.word_at(pair * LINE_PAIR)
    }

    /// The word at this offset; the first word of the page if the offset is invalid.
    #[inline]
    fn word_at(&self, offset: usize) -> &AtomicU64 {
        let offset = if offset.is_multiple_of(8) && offset < PAGE { offset } else { 0 };
        // SAFETY: the mapping is one page, page-aligned, so the word is inside and aligned; the
        // mapping lives as long as `self`. Atomics permit concurrent access by other writers.
        unsafe { self.0.base.add(offset).cast().as_ref() }
    }
}

fn memory_file(len: usize) -> io::Result<OwnedFd> {
    let file =
        rustix::fs::memfd_create("warpwire-ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, len as u64)?;
    Ok(file)
}

/// Rejects a file whose mapping could fault on access.
fn check_file(file: &OwnedFd, len: usize) -> io::Result<()> {
    let reject = |why: &'static str| Err(io::Error::other(why));
    if rustix::fs::fstatfs(file)?.f_type as u64 != TMPFS_MAGIC {
        return reject("it is not memory in ordinary pages");
    }
    if !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
        return reject("it can shrink while it is mapped");
    }
    if rustix::fs::fstat(file)?.st_size != len as i64 {
        return reject("its length differs from the one announced");
    }
    Ok(())
}

/// The user and process ids of the other end of a connected unix socket, as of when that end
/// connected or began to listen.
///
/// Not with `rustix`, whose type cannot represent the process id 0 of a peer in another PID
/// namespace.
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<(u32, i32)> {
    // SAFETY: all zeros are valid credentials.
    let mut peer: libc::ucred = unsafe { zeroed() };
    let mut len = size_of::<libc::ucred>() as u32;
    // SAFETY: the kernel writes at most `len` bytes, which is the structure's size.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    if got < 0 { Err(io::Error::last_os_error()) } else { Ok((peer.uid, peer.pid)) }
}

/// Copies `local` to the memory of another process, from its address `remote` on, or the other way
/// round. Returns how many bytes were copied before a page that is not mapped.
///
/// # Errors
/// `EPERM` where the kernel does not let this process access the other's memory; `ESRCH` if it has
/// exited; `EFAULT` if the first page is not mapped, or is not ordinary memory.
pub(super) fn copy_process_memory(
    process: i32,
    local: &SharedBytes<'_>,
    remote: u64,
    direction: CopyDirection,
) -> io::Result<usize> {
    let len = local.len() as usize;
    let here = libc::iovec { iov_base: local.address() as *mut libc::c_void, iov_len: len };
    let there = libc::iovec { iov_base: remote as *mut libc::c_void, iov_len: len };
    let copy = match direction {
        CopyDirection::Write => libc::process_vm_writev,
        CopyDirection::Read => libc::process_vm_readv,
    };
    // SAFETY: the local range is memory that may change at any moment, which the kernel reads or
    // writes; addresses of the other process are checked by the kernel.
    let copied = unsafe { copy(process, &raw const here, 1, &raw const there, 1, 0) };
    if copied < 0 { Err(io::Error::last_os_error()) } else { Ok(copied as usize) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_sender_can_write_a_ring() {
        let (mut sealed_mapping, file) = SealedMapping::new(1 << 16).unwrap();
        sealed_mapping.bytes_mut(0, 4).unwrap().copy_from_slice(b"mine");
        let writable = ProtFlags::READ | ProtFlags::WRITE;
        assert!(MappedFile::new(file.as_fd(), 1 << 16, writable).is_err());
        assert!(rustix::io::write(&file, b"x").is_err());
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        if let Ok(again) = std::fs::OpenOptions::new().write(true).read(true).open(path) {
            assert!(MappedFile::new(again.as_fd(), 1 << 16, writable).is_err());
        }
        let read_only_mapping = ReadOnlyMapping::open(&file, 1 << 16).unwrap();
        let mut seen = [0; 4];
        assert!(read_only_mapping.read(0, &mut seen));
        assert_eq!(&seen, b"mine");
        sealed_mapping.bytes_mut(0, 4).unwrap().copy_from_slice(b"more");
        assert!(read_only_mapping.read(0, &mut seen));
        assert_eq!((&seen, sealed_mapping.bytes(0, 4).unwrap()), (b"more", &b"more"[..]));
    }

    #[test]
    fn out_of_range_accesses_are_rejected() {
        let (mut sealed_mapping, file) = SealedMapping::new(1 << 12).unwrap();
        let read_only_mapping = ReadOnlyMapping::open(&file, 1 << 12).unwrap();
        for (offset, len) in [(1 << 12, 1), (0, 4097), (usize::MAX, 2), (4090, 7)] {
            assert!(
                sealed_mapping.bytes(offset, len).is_none()
                    && sealed_mapping.bytes_mut(offset, len).is_none()
            );
            assert!(!read_only_mapping.read(offset, &mut vec![0; len]));
        }
        for offset in [1 << 12, usize::MAX, usize::MAX - 7, 4] {
            sealed_mapping.set(offset, u64::MAX, Ordering::Relaxed);
            assert_eq!(read_only_mapping.word(offset, Ordering::Relaxed), 0);
        }
    }

    #[test]
    fn files_that_could_fault_are_rejected() {
        let (_, ring) = SealedMapping::new(1 << 12).unwrap();
        assert!(ReadOnlyMapping::open(&ring, 1 << 13).is_err(), "shorter than announced");
        assert!(ReadOnlyMapping::open(&memory_file(4096).unwrap(), 4096).is_err(), "no seal");
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        assert!(ControlPage::open(&file).is_err(), "a file on disk");
    }
}
