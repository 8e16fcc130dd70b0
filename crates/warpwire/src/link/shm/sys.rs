//! Memory that two processes map, and what the kernel says about a peer: all pointers of the link are here.
//!
//! A ring is two files in memory, because its two sides trust each other with nothing:
//!
//! - **The sender's** ([`SealedMapping`]) has the packets and their headers. Before it is given away it is sealed with
//!   `F_SEAL_FUTURE_WRITE`: the sender's own mapping stays writable, and nobody can ever write it in another way, be it
//!   by mapping it or by `write`. Therefore the sender may hold `&mut [u8]` into it: nobody else writes there, and what a
//!   reader sees meanwhile is the reader's affair. The sender fills packets in place.
//! - **The receiver's** ([`ControlPage`]) is one page, with the head and the wish to be woken. Both sides write it, and
//!   both touch it by atomic words alone.
//!
//! The receiver sees the sender's file as [`ReadOnlyMapping`]: memory that changes at any moment. There is no `&[u8]` to it,
//! only atomic words, and copies that the compiler cannot see into ([`SharedBytes`]).
#![allow(unsafe_code)]

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::mem::SharedBytes;

/// The receiver's page.
const PAGE: usize = 4096;
/// Indices that different sides write lie this far apart: two lines, because processors fetch lines in pairs.
const LINE_PAIR: usize = 128;
/// What `fstatfs` says of memory in ordinary pages. Memory in huge pages may be missing when it is touched.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// A mapping, unmapped when it goes.
struct MappedFile {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread; who may access it is said by the types around it.
unsafe impl Send for MappedFile {}
// SAFETY: what the types around it offer by a shared reference are atomic words, copies that expect change, and, for
// `SealedMapping`, bytes that only an exclusive reference changes.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    fn new(file: BorrowedFd<'_>, len: usize, protection: ProtFlags) -> io::Result<Self> {
        // SAFETY: a new mapping at a place of the kernel's choice touches nothing that exists.
        let base = unsafe {
            rustix::mm::mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; borrows of it ended with the borrow of `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A ring's bytes as their sender has them: nobody else writes them.
pub(super) struct SealedMapping(MappedFile);

impl SealedMapping {
    /// Memory for a ring of `size` bytes, all zero, and the file to give to its reader.
    pub(super) fn new(size: usize) -> io::Result<(Self, OwnedFd)> {
        let file = memory_file(size)?;
        let map = MappedFile::new(file.as_fd(), size, ProtFlags::READ | ProtFlags::WRITE)?;
        // The promise of `bytes_mut` rests on the third of them; a kernel before 5.1 refuses it, and with it all.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        Ok((Self(map), file))
    }

    /// Stores a word of eight bytes, which a reader may look at meanwhile; nothing outside the ring.
    #[inline]
    pub(super) fn set(&mut self, offset: usize, word: u64, ordering: Ordering) {
        if let Some(at) = self.range(offset, 8).map(<*mut u8>::cast::<AtomicU64>)
            && at.is_aligned()
        {
            // SAFETY: inside the mapping by the check in `range`, aligned, initialized, and exclusively ours.
            unsafe { &*at }.store(word, ordering);
        }
    }

    /// Asks for the line at this offset, to be written soon.
    #[inline]
    pub(super) fn prefetch(&self, offset: usize) {
        #[cfg(target_arch = "x86_64")]
        if let Some(at) = self.range(offset, 8) {
            use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
            // SAFETY: a hint; it accesses nothing, and the address is a valid one.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(at.cast_const().cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = offset;
    }

    /// Bytes of the ring.
    #[inline]
    pub(super) fn bytes(&self, offset: usize, len: usize) -> Option<&[u8]> {
        let at = self.range(offset, len)?;
        // SAFETY: inside the mapping by the check in `range`; zeroed when it was made, so initialized; borrowed from `self`; and this mapping is the only one that can be written (see `new`).
        Some(unsafe { std::slice::from_raw_parts(at, len) })
    }

    /// Bytes of the ring, to be filled.
    #[inline]
    pub(super) fn bytes_mut(&mut self, offset: usize, len: usize) -> Option<&mut [u8]> {
        let at = self.range(offset, len)?;
        // SAFETY: as in `bytes`; borrowed mutably from `self`, hence the only reference of this process.
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

/// A ring's bytes as their reader has them: the sender may change any of them at any moment.
pub(super) struct ReadOnlyMapping(MappedFile);

impl ReadOnlyMapping {
    /// Maps a peer's ring of `size` bytes, if the file is one that cannot become shorter.
    pub(super) fn open(file: &OwnedFd, size: usize) -> io::Result<Self> {
        check_file(file, size)?;
        MappedFile::new(file.as_fd(), size, ProtFlags::READ).map(Self)
    }

    /// The word of eight bytes at this offset, read once; 0 outside the ring.
    #[inline]
    pub(super) fn word(&self, offset: usize, ordering: Ordering) -> u64 {
        if !offset.is_multiple_of(8) || offset.saturating_add(8) > self.0.len {
            return 0;
        }
        // SAFETY: inside the mapping and aligned, by the check above; a load from an atomic is all that is done,
        // which read-only memory allows.
        let word: &AtomicU64 = unsafe { self.0.base.add(offset).cast().as_ref() };
        word.load(ordering)
    }

    /// Copies bytes of the ring; false if they do not lie in it.
    #[inline]
    pub(super) fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        // SAFETY: mapped for as long as `self` is borrowed, and read by such views and atomics only. That it cannot
        // be written does not matter to a view that is only read.
        let bytes = unsafe { SharedBytes::new(self.0.base, self.0.len) };
        bytes.read_cached(offset as u64, into).is_ok()
    }
}

/// Rows of words that one process writes, from any of its threads, and others read: sealed as [`SealedMapping`] is.
pub(super) struct WordTable(MappedFile);

impl WordTable {
    /// Words in `len` bytes, all zero, and the file to give to readers, who have it as [`ReadOnlyMapping`]. Memory is taken
    /// only where a word is touched.
    pub(super) fn new(len: usize) -> io::Result<(Self, OwnedFd)> {
        let (SealedMapping(map), file) = SealedMapping::new(len)?;
        Ok((Self(map), file))
    }

    /// The word with that number.
    #[inline]
    pub(super) fn word(&self, number: usize) -> Option<&AtomicU64> {
        let offset = number.checked_mul(8)?;
        if offset.saturating_add(8) > self.0.len {
            return None;
        }
        // SAFETY: inside the mapping, which begins at a page, so aligned; it lives as long as `self`. An atomic
        // promises nothing about other threads.
        Some(unsafe { self.0.base.add(offset).cast().as_ref() })
    }
}

/// The receiver's page.
pub(super) struct ControlPage(MappedFile);

impl ControlPage {
    /// A new page, and the file to give to the receiver.
    pub(super) fn new() -> io::Result<(Self, OwnedFd)> {
        let file = memory_file(PAGE)?;
        let map = MappedFile::new(file.as_fd(), PAGE, ProtFlags::READ | ProtFlags::WRITE)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self(map), file))
    }

    /// Maps the page that a sender made.
    pub(super) fn open(file: &OwnedFd) -> io::Result<Self> {
        check_file(file, PAGE)?;
        MappedFile::new(file.as_fd(), PAGE, ProtFlags::READ | ProtFlags::WRITE).map(Self)
    }

    /// The head: up to where the receiver has read.
    #[inline]
    pub(super) fn head(&self) -> &AtomicU64 {
        self.word(0)
    }

    /// Whether the receiver sleeps, or is about to.
    #[inline]
    pub(super) fn armed(&self) -> &AtomicU64 {
        self.word(1)
    }

    /// Where the sender is, in memory of the receiver's that it reaches by itself.
    #[inline]
    pub(super) fn access_word(&self) -> &AtomicU64 {
        self.word(2)
    }

    /// What the sender did there, in operations and in bytes; told for the receiver's counters only.
    #[inline]
    pub(super) fn access_counts(&self) -> [&AtomicU64; 2] {
        [self.word_at(3 * LINE_PAIR), self.word_at(3 * LINE_PAIR + 8)]
    }

    /// The word at the beginning of this pair of cache lines.
    #[inline]
    fn word(&self, pair: usize) -> &AtomicU64 {
        self.word_at(pair * LINE_PAIR)
    }

    /// The word there, or at the beginning of the page if there is none.
    #[inline]
    fn word_at(&self, offset: usize) -> &AtomicU64 {
        let offset = if offset.is_multiple_of(8) && offset < PAGE { offset } else { 0 };
        // SAFETY: the mapping is a page long and begins at one, so that the word is inside and aligned; it lives as
        // long as `self`. An atomic promises nothing about other writers.
        unsafe { self.0.base.add(offset).cast().as_ref() }
    }
}

fn memory_file(len: usize) -> io::Result<OwnedFd> {
    let file =
        rustix::fs::memfd_create("warpwire-ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, len as u64)?;
    Ok(file)
}

/// Refuses a file whose mapping could fault when it is touched.
fn check_file(file: &OwnedFd, len: usize) -> io::Result<()> {
    let refuse = |why: &'static str| Err(io::Error::other(why));
    if rustix::fs::fstatfs(file)?.f_type as u64 != TMPFS_MAGIC {
        return refuse("it is not memory in ordinary pages");
    }
    if !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
        return refuse("it may become shorter while it is mapped");
    }
    if rustix::fs::fstat(file)?.st_size != len as i64 {
        return refuse("its length is not the one that was said");
    }
    Ok(())
}

/// The user and the process at the other end of a connected unix socket, as of when that end was connected or began to
/// listen.
///
/// Not by `rustix`, whose type has no value for the process number 0 of a peer in another namespace.
pub(super) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<(u32, i32)> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_but_the_sender_can_write_a_ring() {
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
    fn nothing_outside_is_reached() {
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
    fn files_that_could_fault_are_refused() {
        let (_, ring) = SealedMapping::new(1 << 12).unwrap();
        assert!(ReadOnlyMapping::open(&ring, 1 << 13).is_err(), "shorter than was said");
        assert!(ReadOnlyMapping::open(&memory_file(4096).unwrap(), 4096).is_err(), "no seal");
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        assert!(ControlPage::open(&file).is_err(), "a file on a disk");
    }
}
