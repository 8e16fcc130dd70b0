//! The simulator's memory: memfds at addresses that the CPU cannot dereference.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use rustix::fs::{
    MemfdFlags, SealFlags, SeekFrom, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate,
    memfd_create, seek,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::super::address::DeviceAddr;
use super::super::allocation::{MemoryEvent, MemoryKind, MemoryListener, PinGuard, WatchGuard};
use super::super::backend::{HostOwner, MemoryBackend};
use super::super::bytes::SharedBytes;
use super::super::device::Backend;
use super::super::share::{DmaBuf, DmaBufRoute, IpcHandle};
use super::super::window::{CpuMapping, MappingType, WindowPath};
use super::device::SimDevice;
use crate::error::{Error, Kind, Result};

/// Byte value that fills the old backing when memory moves or is freed, to expose stale readers.
pub const POISON: u8 = 0xde;

/// Value of `pins` while the memory moves.
const MOVING: u64 = u64::MAX;

/// Seals that make the size of simulated memory final.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A memfd and its mapping, or host memory of another owner.
pub(super) struct Backing {
    file: std::result::Result<OwnedFd, HostOwner>,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is owned by this value and only accessed through SharedBytes.
unsafe impl Send for Backing {}
// SAFETY: as above.
unsafe impl Sync for Backing {}

impl Backing {
    fn create(len: u64, name: &str) -> Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create(name, flags).map_err(|e| memfd_error(e, len))?;
        ftruncate(&file, len).map_err(|e| memfd_error(e, len))?;
        // The file is shared with other processes: truncating it would kill those that map it.
        fcntl_add_seals(&file, SEALS).map_err(|e| memfd_error(e, len))?;
        Self::map(file, len)
    }

    fn map(file: OwnedFd, len: u64) -> Result<Self> {
        let size = usize::try_from(len).map_err(|_| memfd_error(rustix::io::Errno::NOMEM, len))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let base =
            unsafe { mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, &file, 0) };
        let base = base.map_err(|e| memfd_error(e, len))?;
        let base =
            NonNull::new(base.cast()).ok_or_else(|| memfd_error(rustix::io::Errno::NOMEM, len))?;
        Ok(Self { file: Ok(file), base, len: size })
    }

    fn bytes(&self) -> SharedBytes<'_> {
        // SAFETY: mapped while this value lives, which the view's lifetime does not exceed; no
        // references exist.
        unsafe { SharedBytes::new(self.base, self.len) }
    }

    /// The ranges that were ever written. The rest reads as zero and uses no memory; large
    /// simulated buffers are mostly such holes.
    fn data_ranges(&self) -> Vec<(u64, u64)> {
        let mut ranges = Vec::new();
        let mut at = 0;
        let Ok(file) = &self.file else { return ranges };
        while let Ok(start) = seek(file, SeekFrom::Data(at)) {
            let end = seek(file, SeekFrom::Hole(start)).unwrap_or(self.len as u64);
            ranges.push((start, end - start));
            at = end;
        }
        ranges
    }

    /// Copies the contents of `old`, then poisons it.
    fn copy_and_poison(&self, old: &Backing) -> Result<()> {
        for (start, len) in old.data_ranges() {
            self.bytes().copy_from(start, &old.bytes(), start, len)?;
        }
        old.poison()
    }

    fn poison(&self) -> Result<()> {
        let poison = |(start, len)| self.bytes().fill(start, len, &[POISON]);
        self.data_ranges().into_iter().try_for_each(poison)
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        if self.file.is_err() {
            return; // its owner unmaps it
        }
        // SAFETY: mapped by `map` with this base and length, and no view outlives this value.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        if let Err(error) = unmapped {
            tracing::warn!(%error, "simulated memory was not unmapped");
        }
    }
}

fn memfd_error(error: rustix::io::Errno, len: u64) -> Error {
    Error::os(format!("back {len} bytes of simulated memory with a memfd"), &error.into())
}

/// An allocation of simulated memory.
pub(super) struct SimMemory {
    device: Arc<SimDevice>,
    address: DeviceAddr,
    len: u64,
    kind: MemoryKind,
    /// The bytes; `None` once freed. Users hold the lock for reading during an access, so that a
    /// move or a free happens between accesses, never during one.
    backing: RwLock<Option<Backing>>,
    /// A fixed view for pinned memory, whose backing never moves.
    pinned: Option<Backing>,
    listeners: Mutex<BTreeMap<u64, MemoryListener>>,
    next_listener: AtomicU64,
    /// Number of pins that keep the memory from moving, or [`MOVING`].
    pins: AtomicU64,
}

impl SimMemory {
    pub(super) fn create(device: Arc<SimDevice>, len: u64, kind: MemoryKind) -> Result<Arc<Self>> {
        device.reserve(len, kind)?;
        let made = Backing::create(len, "warpwire-sim").inspect_err(|_| device.release(len, kind));
        Self::from_backing(device, made?, len, kind)
    }

    /// Wraps memory that another owner mapped for the CPU.
    pub(super) fn register(
        device: Arc<SimDevice>,
        (base, len): (NonNull<u8>, u64),
        owner: HostOwner,
    ) -> Result<Arc<Self>> {
        device.reserve(len, MemoryKind::Pinned)?;
        let made = Backing { file: Err(owner), base, len: len as usize };
        Self::from_backing(device, made, len, MemoryKind::Pinned)
    }

    fn from_backing(
        device: Arc<SimDevice>,
        made: Backing,
        len: u64,
        kind: MemoryKind,
    ) -> Result<Arc<Self>> {
        // Pinned memory needs a view that lives as long as the object and never moves.
        let (backing, pinned) = match kind {
            MemoryKind::Pinned => (None, Some(made)),
            _ => (Some(made), None),
        };
        let memory = Arc::new(Self {
            address: address_space().reserve(len),
            device,
            len,
            kind,
            backing: RwLock::new(backing),
            pinned,
            listeners: Mutex::default(),
            next_listener: AtomicU64::new(0),
            pins: AtomicU64::new(0),
        });
        address_space().insert(&memory);
        Ok(memory)
    }

    /// Opens memory that this or another process exported.
    pub(super) fn open(
        device: Arc<SimDevice>,
        handle: &IpcHandle,
        descriptors: Option<Vec<OwnedFd>>,
    ) -> Result<Arc<Self>> {
        let name = MemfdHandle::decode(handle.body_for(Backend::Sim)?)?;
        device.check_peer_access(name.ordinal)?;
        let file = match descriptors.map(<[OwnedFd; 1]>::try_from) {
            Some(Ok([file])) => file,
            Some(Err(given)) => {
                let why = format!("{} descriptors came with it, and it has 1", given.len());
                return Err(Error::new(Kind::Malformed, "open an inter-process handle").why(why));
            }
            None => name.open()?,
        };
        let size = fstat(&file).map_err(|e| memfd_error(e, handle.len()))?;
        // The seals show that this is simulated memory, not another file that a handle might name.
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS));
        let same_size = u64::try_from(size.st_size).ok() == Some(handle.len());
        if size.st_ino != name.inode || !same_size || !sealed {
            return Err(name.stale("the descriptor now refers to another file"));
        }
        device.reserve(handle.len(), MemoryKind::Imported)?;
        let mapped = Backing::map(file, handle.len())
            .inspect_err(|_| device.release(handle.len(), MemoryKind::Imported));
        Self::from_backing(device, mapped?, handle.len(), MemoryKind::Imported)
    }

    /// Runs `access` on the bytes, which do not move during the call.
    pub(super) fn with_bytes<R>(
        &self,
        access: impl FnOnce(SharedBytes<'_>) -> Result<R>,
    ) -> Result<R> {
        if let Some(pinned) = &self.pinned {
            return access(pinned.bytes());
        }
        // Recursive: a copy within one allocation takes the lock twice, and a writer may queue in
        // between.
        let backing: RwLockReadGuard<'_, _> = self.backing.read_recursive();
        match &*backing {
            Some(backing) => access(backing.bytes()),
            None => Err(self.freed_error()),
        }
    }

    pub(super) fn device(&self) -> &Arc<SimDevice> {
        &self.device
    }

    /// Moves the bytes to new backing: watchers are notified before and after, the old backing is
    /// poisoned.
    pub(super) fn relocate(&self) -> Result<()> {
        if self.pinned.is_some() || self.kind == MemoryKind::Imported {
            return Err(Error::new(Kind::Unsupported, "move memory")
                .on(self.device.label())
                .why(format!("{} memory does not move", self.kind)));
        }
        let new_backing = Backing::create(self.len, "warpwire-sim")?;
        // Keeps the memory from being pinned during the move.
        let marked = self.pins.compare_exchange(0, MOVING, Ordering::AcqRel, Ordering::Acquire);
        if let Err(pins) = marked {
            let why = match pins {
                MOVING => "it is moving already".to_owned(),
                pins => format!("{pins} of its users have pinned it"),
            };
            let error = Error::new(Kind::Busy, "move memory").on(self.device.label()).why(why);
            return Err(error.fix("wait until they unpin it, or let them attach dynamically"));
        }
        let moved = self.move_to(new_backing);
        self.pins.store(0, Ordering::Release);
        moved
    }

    fn move_to(&self, new_backing: Backing) -> Result<()> {
        self.notify(MemoryEvent::Moving);
        {
            let mut backing = self.backing.write();
            let Some(old) = backing.as_ref() else {
                return Err(self.freed_error());
            };
            new_backing.copy_and_poison(old)?;
            *backing = Some(new_backing);
        }
        self.notify(MemoryEvent::Moved);
        Ok(())
    }

    /// Frees the memory under its users, and poisons it for those that still map it.
    pub(super) fn force_remove(&self) -> Result<()> {
        if self.pinned.is_some() || self.kind == MemoryKind::Imported {
            return Err(Error::new(Kind::Unsupported, "free memory under its users")
                .on(self.device.label())
                .why(format!("{} memory does not belong to the device", self.kind)));
        }
        self.remove().ok_or_else(|| self.freed_error())?.poison()
    }

    fn remove(&self) -> Option<Backing> {
        let taken = self.backing.write().take()?;
        self.device.release(self.len, self.kind);
        address_space().remove(self.address);
        self.notify(MemoryEvent::Freed);
        Some(taken)
    }

    fn notify(&self, event: MemoryEvent) {
        let listeners: Vec<_> = self.listeners.lock().values().cloned().collect();
        for listener in listeners {
            listener(event);
        }
    }

    #[cold]
    fn freed_error(&self) -> Error {
        Error::new(Kind::Freed, "access memory")
            .on(self.device.label())
            .why(format!("the memory at {} was freed under its users", self.address))
    }
}

impl MemoryBackend for SimMemory {
    fn address(&self) -> DeviceAddr {
        self.address
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }

    fn host_bytes(&self) -> Option<SharedBytes<'_>> {
        self.pinned.as_ref().map(Backing::bytes)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.device.check_alive()?;
        self.with_bytes(|bytes| bytes.write(offset, from))
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.device.check_alive()?;
        self.with_bytes(|bytes| bytes.read(offset, into))
    }

    fn export_dmabuf(&self, offset: u64, len: u64, _route: DmaBufRoute) -> Result<DmaBuf> {
        let file = self.with_file(|file| file.try_clone_to_owned())?;
        let file = file.map_err(|e| Error::os("export a dma-buf", &e))?;
        Ok(DmaBuf::new(file, offset, len))
    }

    fn export_ipc(&self) -> Result<IpcHandle> {
        let name = self.with_file(|file| MemfdHandle::of(file, self.device.ordinal()))??;
        Ok(IpcHandle::new(Backend::Sim, self.len, name.encode()))
    }

    fn ipc_descriptors(&self) -> Result<Vec<OwnedFd>> {
        let file = self.with_file(|file| file.try_clone_to_owned())?;
        Ok(vec![file.map_err(|e| Error::os("export inter-process descriptors", &e))?])
    }

    fn pin(self: Arc<Self>) -> Result<PinGuard> {
        let pin = |pins| (pins != MOVING).then_some(pins + 1);
        if self.pins.fetch_update(Ordering::AcqRel, Ordering::Acquire, pin).is_err() {
            return Err(Error::new(Kind::Busy, "pin memory")
                .on(self.device.label())
                .why("it is moving")
                .fix("retry after the move"));
        }
        Ok(PinGuard::new(move || {
            self.pins.fetch_sub(1, Ordering::AcqRel);
        }))
    }

    fn watch(self: Arc<Self>, listener: MemoryListener) -> Result<WatchGuard> {
        let number = self.next_listener.fetch_add(1, Ordering::Relaxed);
        self.listeners.lock().insert(number, listener);
        let memory = Arc::downgrade(&self);
        Ok(WatchGuard::new(move || {
            if let Some(memory) = memory.upgrade() {
                // Dropped outside of the lock: a listener may own anything, including another
                // watch.
                let ended = memory.listeners.lock().remove(&number);
                drop(ended);
            }
        }))
    }

    fn window_paths(&self) -> &'static [WindowPath] {
        if self.pinned.is_some() { &[] } else { &[WindowPath::Memfd] }
    }

    fn map(&self, offset: u64, len: u64, path: WindowPath) -> Result<CpuMapping> {
        if path != WindowPath::Memfd {
            return Err(Error::new(Kind::Unsupported, "map memory")
                .on(self.device.label())
                .why("simulated memory can only be mapped through its memfd"));
        }
        // Maps all of it, so that no rounding is needed; only the requested range is accessed.
        let file = self.with_file(|file| file.try_clone_to_owned())?;
        let backing = Backing::map(file.map_err(|e| Error::os("map memory", &e))?, self.len)?;
        // A forked child must not access the parent's device memory.
        // SAFETY: the mapping was just created, with this base and length.
        unsafe { madvise(backing.base.as_ptr().cast(), backing.len, Advice::LinuxDontFork) }
            .map_err(|e| memfd_error(e, self.len))?;
        // SAFETY: the offset is inside the memory, by this trait's contract.
        let base = unsafe { backing.base.add(offset as usize) };
        Ok(CpuMapping::new(base, len, MappingType::Cached, Box::new(backing)))
    }

    fn free(&self) -> Result<()> {
        if self.pinned.is_some() {
            // The CPU may hold views: the bytes are freed with the last handle, the address now.
            address_space().remove(self.address);
        }
        self.remove();
        Ok(())
    }
}

impl SimMemory {
    fn with_file<R>(&self, f: impl FnOnce(std::os::fd::BorrowedFd<'_>) -> R) -> Result<R> {
        let (held, file);
        if let Some(pinned) = &self.pinned {
            file = &pinned.file;
        } else {
            held = self.backing.read();
            file = &held.as_ref().ok_or_else(|| self.freed_error())?.file;
        }
        match file {
            Ok(file) => Ok(f(file.as_fd())),
            Err(_) => Err(Error::new(Kind::Unsupported, "share memory")
                .on(self.device.label())
                .why("it is registered host memory")
                .fix("share it through its owner")),
        }
    }
}

impl Drop for SimMemory {
    fn drop(&mut self) {
        if self.pinned.is_some() {
            self.device.release(self.len, self.kind);
            address_space().remove(self.address);
        }
    }
}

/// Identifies a memfd to another process: PID, descriptor and inode number; and the GPU whose
/// memory it is.
struct MemfdHandle {
    pid: u32,
    fd: i32,
    inode: u64,
    ordinal: u32,
}

impl MemfdHandle {
    const LEN: usize = 20;

    fn of(file: std::os::fd::BorrowedFd<'_>, ordinal: u32) -> Result<Self> {
        let inode =
            fstat(file).map_err(|e| Error::os("export simulated memory", &e.into()))?.st_ino;
        Ok(Self { pid: std::process::id(), fd: file.as_raw_fd(), inode, ordinal })
    }

    fn encode(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(Self::LEN);
        body.extend_from_slice(&self.pid.to_le_bytes());
        body.extend_from_slice(&self.fd.to_le_bytes());
        body.extend_from_slice(&self.inode.to_le_bytes());
        body.extend_from_slice(&self.ordinal.to_le_bytes());
        body
    }

    fn decode(body: &[u8]) -> Result<Self> {
        let split = body.split_last_chunk().and_then(|(words, ordinal)| {
            let words = u128::from_le_bytes(words.try_into().ok()?);
            Some((words, u32::from_le_bytes(*ordinal)))
        });
        let (words, ordinal) = split.ok_or_else(|| {
            Error::new(Kind::Malformed, "open an inter-process handle")
                .why("its simulator part has the wrong length")
        })?;
        let (pid, fd, inode) = (words as u32, (words >> 32) as i32, (words >> 64) as u64);
        Ok(Self { pid, fd, inode, ordinal })
    }

    fn open(&self) -> Result<OwnedFd> {
        let path = format!("/proc/{}/fd/{}", self.pid, self.fd);
        let opened = File::options().read(true).write(true).open(&path);
        opened.map(OwnedFd::from).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                self.stale("its process or descriptor no longer exists")
            }
            _ => Error::os(format!("open simulated memory at {path}"), &error)
                .fix("run both processes as the same user"),
        })
    }

    #[cold]
    fn stale(&self, why: &str) -> Error {
        Error::new(Kind::Stale, "open an inter-process handle")
            .on(format!("descriptor {} of process {}", self.fd, self.pid))
            .why(why.to_string())
            .fix("keep the memory alive in the process that exported it")
    }
}

/// All simulated memory of this process, by address. Addresses are never reused, so a stale one
/// never refers to newer memory.
pub(super) struct AddressSpace {
    next: AtomicU64,
    allocations: RwLock<BTreeMap<u64, Weak<SimMemory>>>,
}

/// Not canonical on any processor: dereferencing such an address faults immediately.
const FIRST_ADDRESS: u64 = 0x5157_0000_0000_0000;
const ALIGNMENT: u64 = 2 << 20;

pub(super) fn address_space() -> &'static AddressSpace {
    static ADDRESS_SPACE: AddressSpace = AddressSpace {
        next: AtomicU64::new(FIRST_ADDRESS),
        allocations: RwLock::new(BTreeMap::new()),
    };
    &ADDRESS_SPACE
}

impl AddressSpace {
    /// Reserves an unused range, followed by an unused gap.
    fn reserve(&self, len: u64) -> DeviceAddr {
        let step = len.next_multiple_of(ALIGNMENT) + ALIGNMENT;
        DeviceAddr::new(self.next.fetch_add(step, Ordering::Relaxed))
    }

    fn insert(&self, memory: &Arc<SimMemory>) {
        self.allocations.write().insert(memory.address.raw(), Arc::downgrade(memory));
    }

    fn remove(&self, address: DeviceAddr) {
        self.allocations.write().remove(&address.raw());
    }

    /// The memory that contains all of `address..address + len`, and the offset of the range in it.
    pub(super) fn find(&self, address: DeviceAddr, len: u64) -> Option<(Arc<SimMemory>, u64)> {
        // The lock is released before the memory: dropping the last handle takes it for writing.
        let memory = {
            let allocations = self.allocations.read();
            let (_, memory) = allocations.range(..=address.raw()).next_back()?;
            memory.upgrade()
        }?;
        let offset = address.raw() - memory.address.raw();
        let end = offset.checked_add(len)?;
        (offset < memory.len && end <= memory.len).then_some((memory, offset))
    }
}

/// Memory that another library allocated on a simulated GPU; looked up again at each use.
pub(super) struct Borrowed {
    pub(super) device: Arc<SimDevice>,
    pub(super) address: DeviceAddr,
    pub(super) len: u64,
}

impl Borrowed {
    pub(super) fn owner(&self) -> Result<(Arc<SimMemory>, u64)> {
        address_space().find(self.address, self.len).ok_or_else(|| {
            Error::new(Kind::Freed, "access borrowed memory")
                .on(self.device.label())
                .why(format!("the owner of the memory at {} has freed it", self.address))
        })
    }

    /// The owner, if all of its memory is borrowed.
    fn whole_owner(&self) -> Result<Arc<SimMemory>> {
        let (owner, start) = self.owner()?;
        if start == 0 && owner.len == self.len {
            return Ok(owner);
        }
        Err(Error::new(Kind::Unsupported, "export an inter-process handle")
            .on(self.device.label())
            .why("only a part of the owner's memory is borrowed")
            .fix("borrow all of it"))
    }
}

impl MemoryBackend for Borrowed {
    fn address(&self) -> DeviceAddr {
        self.address
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Borrowed
    }

    fn host_bytes(&self) -> Option<SharedBytes<'_>> {
        None
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let (owner, start) = self.owner()?;
        owner.write(start + offset, from)
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let (owner, start) = self.owner()?;
        owner.read(start + offset, into)
    }

    fn export_dmabuf(&self, offset: u64, len: u64, route: DmaBufRoute) -> Result<DmaBuf> {
        let (owner, start) = self.owner()?;
        owner.export_dmabuf(start + offset, len, route)
    }

    fn export_ipc(&self) -> Result<IpcHandle> {
        self.whole_owner()?.export_ipc()
    }

    fn ipc_descriptors(&self) -> Result<Vec<OwnedFd>> {
        self.whole_owner()?.ipc_descriptors()
    }

    fn pin(self: Arc<Self>) -> Result<PinGuard> {
        self.owner()?.0.pin()
    }

    fn watch(self: Arc<Self>, listener: MemoryListener) -> Result<WatchGuard> {
        self.owner()?.0.watch(listener)
    }

    fn window_paths(&self) -> &'static [WindowPath] {
        &[WindowPath::Memfd]
    }

    fn map(&self, offset: u64, len: u64, path: WindowPath) -> Result<CpuMapping> {
        let (owner, start) = self.owner()?;
        owner.map(start + offset, len, path)
    }

    fn free(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulated_addresses_cannot_be_dereferenced() {
        // Bits 63..57 of a user address are zero on every supported processor.
        assert_ne!(FIRST_ADDRESS >> 57, 0);
    }
}
