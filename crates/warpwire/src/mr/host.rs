//! Host memory: memfd-backed allocations, and ranges whose validity the caller guarantees.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use rustix::param::page_size;

use super::memory::MemorySource;
use crate::error::{Error, Kind, Result};
use crate::mem::{Region, SharedBytes};

/// The size of shared memory is final: if the file shrank, every process that has it mapped would
/// get `SIGBUS`.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Huge page size of x86-64 and of aarch64 with 4 KiB base pages.
const HUGE_PAGE: usize = 2 << 20;

/// Host memory in a memfd, which another process can map too. Clones share the memory.
///
/// ```
/// use std::os::fd::AsFd;
/// use warpwire::mr::HostMemory;
/// let memory = HostMemory::new(10_000).unwrap();
/// memory.bytes().write(9_990, b"here").unwrap();
/// // Another process would receive the descriptor through a Unix socket.
/// let same = HostMemory::open(memory.as_fd().try_clone_to_owned().unwrap()).unwrap();
/// let mut back = [0; 4];
/// same.bytes().read(9_990, &mut back).unwrap();
/// assert_eq!(&back, b"here");
/// ```
#[derive(Clone)]
pub struct HostMemory(Arc<Mapping>);

struct Mapping {
    file: OwnedFd,
    base: NonNull<u8>,
    len: usize,
    id: u64,
}

// SAFETY: the mapping is owned by this value, and accessed through SharedBytes only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl HostMemory {
    /// Allocates `len` zeroed bytes. Pages are allocated when they are first written.
    pub fn new(len: u64) -> Result<Self> {
        if len == 0 || isize::try_from(len).is_err() {
            return Err(Error::new(Kind::InvalidArgument, format!("allocate {len} bytes"))
                .on("the host")
                .why("the length is zero, or exceeds the address space"));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("warpwire-host", flags).map_err(|e| failure(e, len))?;
        ftruncate(&file, len).map_err(|e| failure(e, len))?;
        fcntl_add_seals(&file, SEALS).map_err(|e| failure(e, len))?;
        Self::map(file, len, true)
    }

    /// Allocates zeroed bytes in 2 MiB pages if the kernel supports it (`MADV_COLLAPSE`, Linux 6.1)
    /// and has free ones, otherwise in base pages. Long copies then cause fewer TLB misses and
    /// cache conflicts. The length is rounded up to whole huge pages, and all of them are populated
    /// by this call.
    ///
    /// ```
    /// let memory = warpwire::mr::HostMemory::in_huge_pages(1 << 20).unwrap();
    /// assert_eq!(memory.len(), 2 << 20);
    /// ```
    pub fn in_huge_pages(len: u64) -> Result<Self> {
        let rounded = len.checked_next_multiple_of(HUGE_PAGE as u64).unwrap_or(len);
        let memory = Self::new(rounded)?;
        let (base, size) = (memory.0.base.as_ptr().cast(), memory.0.len);
        // SAFETY: the range is owned by `memory`, and neither call changes its contents.
        let collapsed = unsafe {
            madvise(base, size, Advice::LinuxPopulateWrite).is_ok()
                && libc::madvise(base, size, libc::MADV_COLLAPSE) == 0
        };
        tracing::debug!(bytes = size, collapsed, "allocated host memory in huge pages");
        Ok(memory)
    }

    /// Maps the memory of another process, by the descriptor of its [`HostMemory`].
    ///
    /// # Errors
    /// If the descriptor is not a memfd, is not sealed against shrinking, is empty, or does not
    /// allow a writable mapping.
    pub fn open(file: OwnedFd) -> Result<Self> {
        Self::open_with(file, true)
    }

    /// The same. Unless `writable`, the mapping is read-only, and its bytes must not be written.
    pub(super) fn open_with(file: OwnedFd, writable: bool) -> Result<Self> {
        let len = final_len(|| fcntl_get_seals(&file), || Ok(fstat(&file)?.st_size))?;
        let explain = |error: Error| match error.kind() {
            Kind::PermissionDenied => {
                foreign(Kind::PermissionDenied, "it may not be mapped writable")
                    .fix("do not seal it against writing, and open it for reading and writing")
            }
            _ => error,
        };
        Self::map(file, len, writable).map_err(explain)
    }

    /// How many clones share the memory.
    #[cfg(test)]
    pub(super) fn users(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// Maps a dma-buf whose exporter supports `mmap`.
    pub(super) fn map_dmabuf(file: OwnedFd) -> Result<Self> {
        let len = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0));
        let len = len.map_err(|e| failure(e, 0))?;
        Self::map(file, len, true)
    }

    /// The given range as the source of a registration by descriptor; `None` if it is out of
    /// bounds.
    pub(super) fn into_slice(self, offset: u64, len: u64) -> Option<MemorySource> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len());
        let (base, whole) = (self.0.base, self.0.len);
        let range = HostRange { base, len: whole, range_owner: RangeOwner::Memfd { memory: self } };
        inside.then(|| MemorySource::mapped(range.slice(offset, len)))
    }

    fn map(file: OwnedFd, len: u64, writable: bool) -> Result<Self> {
        let size = usize::try_from(len).map_err(|_| failure(Errno::NOMEM, len))?;
        let mut protection = ProtFlags::READ;
        protection.set(ProtFlags::WRITE, writable);
        let base = map_aligned(&file, size, protection).map_err(|e| failure(e, len))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| failure(Errno::NOMEM, len))?;
        let id = super::export::next_id();
        Ok(Self(Arc::new(Mapping { file, base, len: size, id })))
    }

    /// An identifier that is unique in this process.
    pub(super) fn id(&self) -> u64 {
        self.0.id
    }

    /// Length in bytes, never zero.
    #[allow(clippy::len_without_is_empty)] // it is never empty
    pub fn len(&self) -> u64 {
        self.0.len as u64
    }

    /// The address of the first byte in this process.
    pub fn address(&self) -> u64 {
        self.0.base.as_ptr().addr() as u64
    }

    /// The bytes, which peers may change at any time.
    pub fn bytes(&self) -> SharedBytes<'_> {
        // SAFETY: mapped while this value lives, which the lifetime expresses; no references exist.
        // Writable too: only `PeerMapping` has read-only memory, and it never writes such views.
        unsafe { SharedBytes::new(self.0.base, self.0.len) }
    }
}

impl AsFd for HostMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMemory({} bytes at {:#x})", self.len(), self.address())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this base and length, and no view outlives this value.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::warn!(%error, "failed to unmap host memory");
        }
    }
}

/// Maps a file at an address chosen by the kernel, aligned for huge pages if it is long enough for
/// one.
fn map_aligned(
    file: &OwnedFd,
    size: usize,
    protection: ProtFlags,
) -> std::result::Result<*mut c_void, Errno> {
    let none = std::ptr::null_mut();
    if size < HUGE_PAGE {
        // SAFETY: a new mapping at an address chosen by the kernel affects no other memory.
        return unsafe { mmap(none, size, protection, MapFlags::SHARED, file, 0) };
    }
    let used = size.checked_next_multiple_of(page_size()).ok_or(Errno::NOMEM)?;
    let reserved = used.checked_add(HUGE_PAGE).ok_or(Errno::NOMEM)?;
    // SAFETY: the reservation is a new mapping, as above. What is then mapped over and unmapped is
    // inside the reservation, to which no other pointer exists.
    unsafe {
        let begin = mmap_anonymous(none, reserved, ProtFlags::empty(), MapFlags::PRIVATE)?;
        let at = begin.map_addr(|at| at.next_multiple_of(HUGE_PAGE));
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let mapped = mmap(at, size, protection, flags, file, 0);
        if mapped.is_err() {
            munmap(begin, reserved)?;
            return mapped;
        }
        let before = at.addr() - begin.addr();
        for (from, len) in [(begin, before), (at.byte_add(used), reserved - used - before)] {
            if len > 0 {
                munmap(from, len)?;
            }
        }
        mapped
    }
}

fn failure(error: Errno, len: u64) -> Error {
    Error::os(format!("back {len} bytes of host memory with a memfd"), &error.into())
}

/// A range of host memory, with the owner that keeps it mapped.
#[derive(Clone)]
pub(super) struct HostRange {
    base: NonNull<u8>,
    len: usize,
    range_owner: RangeOwner,
}

#[derive(Clone)]
enum RangeOwner {
    /// The caller of `MemorySource::raw` guarantees that it stays mapped.
    Caller,
    Memfd {
        memory: HostMemory,
    },
    Pinned {
        _region: Region,
    },
}

// SAFETY: the range is accessed through SharedBytes only, which any thread may do, and each variant
// of the owner is `Send` and `Sync`.
unsafe impl Send for HostRange {}
// SAFETY: as above.
unsafe impl Sync for HostRange {}

impl HostRange {
    /// The region as host memory, if it is pinned (page-locked) memory of a device.
    pub(super) fn pinned(region: &Region) -> Option<Self> {
        let bytes = region.allocation().host_bytes().ok()?;
        let slice = bytes.slice(region.offset(), region.len()).ok()?;
        // The region keeps the memory allocated, so the address stays valid.
        let range_owner = RangeOwner::Pinned { _region: region.clone() };
        Some(Self { base: slice.base(), len: usize::try_from(region.len()).ok()?, range_owner })
    }

    /// Whether a handle keeps the range mapped, so that it cannot be unmapped while registered.
    pub(super) fn is_owned(&self) -> bool {
        !matches!(self.range_owner, RangeOwner::Caller)
    }

    /// A subrange. The caller has checked that it is in bounds.
    pub(super) fn slice(&self, offset: u64, len: u64) -> Self {
        // SAFETY: in bounds, as the caller has checked, so the sum stays inside one mapping.
        let base = unsafe { self.base.add(offset as usize) };
        debug_assert!(offset + len <= self.len());
        Self { base, len: len as usize, range_owner: self.range_owner.clone() }
    }

    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    /// The memfd-backed memory that contains the range, which another process can map.
    pub(super) fn shared(&self) -> Option<&HostMemory> {
        match &self.range_owner {
            RangeOwner::Memfd { memory } => Some(memory),
            RangeOwner::Caller | RangeOwner::Pinned { .. } => None,
        }
    }

    pub(super) fn address(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    #[inline]
    pub(super) fn bytes(&self) -> SharedBytes<'_> {
        // SAFETY: the owner, or the caller of `MemorySource::raw`, keeps the bytes mapped while
        // this value lives, which the lifetime expresses.
        unsafe { SharedBytes::new(self.base, self.len) }
    }
}

impl From<HostMemory> for MemorySource {
    fn from(memory: HostMemory) -> Self {
        let (base, len) = (memory.0.base, memory.0.len);
        Self::host(HostRange { base, len, range_owner: RangeOwner::Memfd { memory } })
    }
}

impl MemorySource {
    /// `len` bytes of this process at `base`, whichever allocator or library they come from.
    ///
    /// ```
    /// use warpwire::mr::{Access, MemorySource, Registry};
    /// use std::sync::atomic::AtomicU64;
    /// let words: Vec<AtomicU64> = (0..512).map(AtomicU64::new).collect();
    /// let registry = Registry::new();
    /// // SAFETY: the words outlive the registration, and are atomics, so peers may change them.
    /// let memory = unsafe { MemorySource::raw(words.as_ptr() as *mut u8, 4096) }.unwrap();
    /// let mr = registry.register(&registry.pd(), memory, None, Access::ALL).unwrap();
    /// mr.deregister().unwrap();
    /// ```
    ///
    /// # Safety
    /// The bytes stay mapped, readable and writable until the registration has ended. Until then,
    /// this program accesses those that peers may write with atomic or volatile operations only,
    /// and holds no reference to them that asserts otherwise.
    pub unsafe fn raw(base: *mut u8, len: u64) -> Result<Self> {
        let failure = |why: &'static str| {
            let what = format!("register {len} bytes of host memory at {:#x}", base.addr());
            Err(Error::new(Kind::InvalidArgument, what).why(why))
        };
        let Some(base) = NonNull::new(base) else { return failure("the address is null") };
        let size = usize::try_from(len).ok().filter(|len| isize::try_from(*len).is_ok());
        match size.filter(|size| base.as_ptr().addr().checked_add(*size).is_some()) {
            None => failure("the range exceeds the address space"),
            Some(0) => failure("the length is zero"),
            Some(len) => Ok(Self::host(HostRange { base, len, range_owner: RangeOwner::Caller })),
        }
    }
}

fn foreign(kind: Kind, why: &'static str) -> Error {
    Error::new(kind, "map host memory of another process").why(why)
}

/// The length of a file of another process, which can no longer shrink. The seal is asked for
/// first: before it is there, the owner can truncate the file at any moment, and pages behind the
/// end raise `SIGBUS`.
fn final_len(
    seals: impl FnOnce() -> rustix::io::Result<SealFlags>,
    len: impl FnOnce() -> rustix::io::Result<i64>,
) -> Result<u64> {
    let invalid = |why| foreign(Kind::InvalidArgument, why);
    let seals = seals().map_err(|_| invalid("the descriptor is not a memfd"))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(invalid("it is not sealed against shrinking")
            .fix("share memory made by HostMemory::new, or add F_SEAL_SHRINK"));
    }
    let len = u64::try_from(len().map_err(|e| failure(e, 0))?).unwrap_or(0);
    if len == 0 { Err(invalid("it is empty")) } else { Ok(len) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::sim::{Sim, SimConfig};
    use crate::mr::{Access, AccessDenied, Registry};
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn huge_page_memory_can_be_shared() {
        let memory = HostMemory::in_huge_pages((3 << 20) + 1).unwrap();
        assert_eq!(memory.len(), 4 << 20);
        assert!(memory.address().is_multiple_of(2 << 20), "aligned for huge pages");
        memory.bytes().write((4 << 20) - 4, b"last").unwrap();
        let same = HostMemory::open(memory.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let mut back = [1; 8];
        same.bytes().read((4 << 20) - 8, &mut back).unwrap();
        assert_eq!(&back, b"\0\0\0\0last");
        for len in [0, u64::MAX] {
            HostMemory::in_huge_pages(len).unwrap_err();
        }
    }

    /// The owner truncates its file and seals it while the file is being checked: the length that
    /// counts is the one after that.
    #[test]
    fn a_file_that_is_truncated_while_it_is_checked() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        for (left, expected) in [(4096, Some(4096)), (0, None)] {
            let file = memfd_create("truncated", flags).unwrap();
            ftruncate(&file, 8192).unwrap();
            let seals = || {
                ftruncate(&file, left)?;
                fcntl_add_seals(&file, SealFlags::SHRINK)?;
                fcntl_get_seals(&file)
            };
            let len = final_len(seals, || Ok(fstat(&file)?.st_size));
            assert_eq!(len.ok(), expected);
        }
    }

    #[test]
    fn atomics_on_raw_memory_are_atomic_with_its_owner() {
        let words: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
        let registry = Registry::new();
        let pd = registry.pd();
        // SAFETY: the words outlive the registration and are accessed atomically.
        let memory = unsafe { MemorySource::raw(words.as_ptr() as *mut u8, 4096) }.unwrap();
        let mr = registry.register(&pd, memory, None, Access::ALL).unwrap();
        let own = words.as_ptr().addr() as u64;
        assert_eq!(mr.iova(), own);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..10_000 {
                    words[7].fetch_add(1, Ordering::Relaxed);
                }
            });
            let span = registry.resolve(mr.rkey(), pd.id(), Access::REMOTE_ATOMIC, own + 56, 8);
            let span = span.unwrap();
            for _ in 0..10_000 {
                span.fetch_add(0, 1).unwrap();
            }
        });
        assert_eq!(words[7].load(Ordering::Relaxed), 20_000);
    }

    #[test]
    fn a_custom_iova_does_not_hide_misalignment() {
        let words: Vec<AtomicU64> = (0..16).map(|_| AtomicU64::new(0)).collect();
        let registry = Registry::new();
        let pd = registry.pd();
        // SAFETY: the words outlive the registration and are accessed atomically.
        let odd = unsafe { MemorySource::raw((words.as_ptr() as *mut u8).add(3), 64) }.unwrap();
        let mr = registry.register(&pd, odd, Some(0), Access::ALL).unwrap();
        let atomic = |at| {
            let span = registry.resolve(mr.rkey(), pd.id(), Access::REMOTE_ATOMIC, at, 8).unwrap();
            span.fetch_add(0, 1)
        };
        assert_eq!(atomic(8), Err(AccessDenied::Misaligned));
        assert_eq!(atomic(5), Ok(0));
    }

    #[test]
    fn invalid_ranges_are_rejected() {
        let mut byte = 0u8;
        let base = std::ptr::from_mut(&mut byte);
        for (base, len) in [
            (std::ptr::null_mut(), 1),
            (base, 0),
            (base, u64::MAX),
            (std::ptr::without_provenance_mut(usize::MAX - 10), 100),
        ] {
            // SAFETY: rejected before anything is accessed, which is what is tested.
            let refused = unsafe { MemorySource::raw(base, len) }.unwrap_err();
            assert_eq!(refused.kind(), &Kind::InvalidArgument);
        }
    }

    #[test]
    fn foreign_memory_must_be_sealed() {
        assert!(HostMemory::new(0).is_err() && HostMemory::new(u64::MAX).is_err());
        let unsealed = memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, 4096).unwrap();
        let refused = HostMemory::open(unsealed).unwrap_err();
        assert!(refused.to_string().contains("sealed against shrinking"), "{refused}");
        let file = tempfile::tempfile().unwrap();
        assert!(HostMemory::open(file.into()).is_err());
        let empty = memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        fcntl_add_seals(&empty, SEALS).unwrap();
        assert!(HostMemory::open(empty).is_err());
    }

    #[test]
    fn device_memory_of_another_library_is_registered_by_address() {
        let sim = Sim::start(SimConfig::default()).unwrap();
        let (gpu, registry) = (sim.device(0).unwrap(), Registry::new());
        let pd = registry.pd();
        let owner = gpu.alloc(1 << 16).unwrap();
        owner.write(4096, b"theirs").unwrap();
        let address = owner.address().checked_add(4096).unwrap();
        // SAFETY: the owner is freed below under its users, which the simulator reports.
        let borrowed = unsafe { gpu.borrow(address, 4096) }.unwrap();
        let mr = registry.register(&pd, borrowed.whole().unwrap(), None, Access::ALL).unwrap();
        assert_eq!(mr.iova(), address.raw());
        let mut back = [0; 6];
        let find = || registry.resolve(mr.lkey(), pd.id(), Access::NONE, mr.iova(), 6);
        find().unwrap().gather(0, &mut back).unwrap();
        assert_eq!(&back, b"theirs");
        // The owner frees the memory, unaware of the registration.
        owner.free().unwrap();
        assert_eq!(find().unwrap_err(), AccessDenied::Gone);
    }
}
