//! Registrations exported to other processes, and the mapping of other processes' memory.
//!
//! A peer on the same machine can map memory that is backed by a memfd ([`HostMemory`]), or device
//! memory if it uses the same GPU, and then accesses it without packets; other host memory is
//! copied by the kernel. An [`ExportObserver`] is notified of each registration that peers may use
//! in this way, and again before it ends: from then on no access begins, and the registry
//! waits for the end of those in progress. It waits for a limited time only: memory that a stopped
//! peer may still access is quarantined, that is, its key is not reused and the registry keeps it
//! mapped until that access has ended.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags, fstatfs, open};

use super::Access;
use super::atomics;
use super::denied::AccessDenied;
use super::host::HostMemory;
use super::registration::{Registration, Target};
use super::registry::Registry;
use crate::error::{Error, Kind, Result};
use crate::mem::SharedBytes;
use crate::mlx5::Atomic;

/// The file system type of a memfd in base pages. A hugetlbfs memfd is not accepted: access raises
/// `SIGBUS` when no huge page is free.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// A registration that local peers may map and access directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MrExport {
    /// The remote key.
    pub key: u32,
    /// The protection domain's number, unique in this process.
    pub pd: u64,
    /// The rights granted at registration.
    pub access: Access,
    /// The address of the first byte in work requests.
    pub iova: u64,
    /// Length in bytes.
    pub len: u64,
    /// Identifies the memory behind it; unique in this process.
    pub memory: u64,
    /// Offset of the registration in that memory, in bytes; its address for
    /// [`Sharing::Process`].
    pub offset: u64,
    /// How peers access it.
    pub sharing: Sharing,
}

/// How a peer on this machine accesses memory without packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// It maps the file behind it.
    File,
    /// It opens it on the same GPU.
    Device,
    /// The kernel copies between the two processes.
    Process,
}

/// Is notified of registrations that local peers may access directly.
pub trait ExportObserver: Send + Sync {
    /// Called before the key becomes valid.
    fn opened(&self, export: &MrExport);
    /// Called when a registration ends or is invalidated for peers, perhaps more than once, and
    /// also for keys that were never exported. When it returns, no peer begins a direct access.
    /// Must not wait.
    fn closing(&self, key: u32);
    /// Waits for the end of direct accesses to the memory of a key that was closed; `false` if one
    /// has not ended after `limit`.
    fn wait_until_unused(&self, key: u32, limit: Duration) -> bool;
}

/// How long deregistration waits for a peer's access in progress. It takes some 100 µs unless the
/// peer is stopped or does not get to run.
pub(super) const PEER_ACCESS_LIMIT: Duration = Duration::from_millis(500);

/// An id of memory that peers may map, unique in this process.
pub(super) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Registrations that have ended while a peer that is stopped was accessing their memory.
#[derive(Default)]
pub(super) struct Quarantine(Mutex<Vec<(u32, Option<Registration>)>>);

impl Quarantine {
    pub(super) fn len(&self) -> usize {
        self.0.lock().len()
    }
}

impl Registry {
    /// Sets the observer of later registrations. Only the first call has an effect.
    pub fn observer(&self, observer: Arc<dyn ExportObserver>) {
        let _ = self.observer_cell().set(observer);
    }

    /// Notifies the observer of a registration that peers may access directly.
    pub(super) fn notify_opened(&self, key: u32, registration: &Registration) {
        let Some(observer) = self.observer_cell().get() else { return };
        if !registration.access().is_remote() {
            return;
        }
        match &registration.target {
            Target::Host(range) => {
                let (memory, offset, sharing) = match range.shared() {
                    Some(memory) => {
                        let offset = range.address().wrapping_sub(memory.address());
                        (memory.id(), offset, Sharing::File)
                    }
                    None => (0, range.address(), Sharing::Process),
                };
                observer.opened(&export(key, registration, memory, offset, sharing));
            }
            Target::Device { memory, region } => memory.export(key, observer, |id| {
                let offset = region.offset();
                observer.opened(&export(key, registration, id, offset, Sharing::Device));
            }),
            Target::Custom { .. } | Target::Window(_) => {}
        }
    }

    pub(super) fn notify_closing(&self, key: u32) {
        if let Some(observer) = self.observer_cell().get() {
            observer.closing(key);
        }
    }

    /// Drops a registration that was closed and releases its key, once no peer accesses its memory;
    /// quarantines it if that takes too long, and returns `false`.
    pub(super) fn release_unused(&self, key: u32, ended: Option<Registration>) -> bool {
        // Dropped before the index can be reused: the memory is released when the key is.
        let is_unused = self.drop_unused(key, ended);
        if is_unused {
            self.release_key(key);
        }
        is_unused
    }

    /// The same, but the key stays allocated.
    pub(super) fn drop_unused(&self, key: u32, ended: Option<Registration>) -> bool {
        self.release_quarantined();
        if self.is_unused(key, ended.as_ref(), PEER_ACCESS_LIMIT) {
            drop(ended);
            return true;
        }
        tracing::warn!(
            key = format_args!("{key:#x}"),
            "a peer process that does not run, or a GPU, is still accessing deregistered memory, \
             which is kept until that ends"
        );
        self.quarantine().0.lock().push((key, ended));
        false
    }

    /// Waits until neither peers nor copies of this process's GPUs access the memory of a key that
    /// was closed; `false` if one still does after `limit`.
    fn is_unused(&self, key: u32, ended: Option<&Registration>, limit: Duration) -> bool {
        let observer = self.observer_cell().get();
        let by_peers = observer.is_none_or(|observer| observer.wait_until_unused(key, limit));
        by_peers
            && match ended.map(|ended| &ended.target) {
                Some(Target::Device { memory, .. }) => memory.wait_for_copies(limit),
                _ => true,
            }
    }

    /// Releases what was quarantined and is no longer accessed.
    pub(super) fn release_quarantined(&self) {
        let released = {
            let mut quarantined = self.quarantine().0.lock();
            let (kept, released) = quarantined.drain(..).partition::<Vec<_>, _>(|(key, ended)| {
                !self.is_unused(*key, ended.as_ref(), Duration::ZERO)
            });
            *quarantined = kept;
            released
        };
        for (key, ended) in released {
            drop(ended);
            self.release_key(key);
        }
    }

    /// The files with which a local peer maps the memory of a registration: a memfd, opened
    /// read-only unless the registration grants remote write or atomic; or, for device memory, a
    /// file that contains its [`IpcHandle`] and the descriptors that belong to that. None if the
    /// key is invalid or not exported.
    pub fn files_for_key(&self, key: u32) -> Vec<OwnedFd> {
        let Some(guard) = self.enter_for_peer(key) else { return Vec::new() };
        if let Target::Device { memory, .. } = &guard.target
            && guard.access().is_remote()
        {
            return memory.shared_files();
        }
        let Some(memory) = shared(&guard) else { return Vec::new() };
        let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let file = match guard.access().intersects(writes) {
            true => memory.as_fd().try_clone_to_owned().ok(),
            // Reopen the file read-only.
            false => {
                let path = format!("/proc/self/fd/{}", memory.as_fd().as_raw_fd());
                open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
            }
        };
        file.into_iter().collect()
    }
}

/// The export of a registration: `offset` is its place in a memory of this id.
fn export(
    key: u32,
    registration: &Registration,
    memory: u64,
    offset: u64,
    sharing: Sharing,
) -> MrExport {
    let (pd, access) = (registration.pd().raw(), registration.access());
    let (iova, len) = registration.range();
    MrExport { key, pd, access, iova, len, memory, offset, sharing }
}

/// The memfd-backed memory of a registration that grants remote rights.
fn shared(registration: &Registration) -> Option<&HostMemory> {
    match &registration.target {
        Target::Host(range) if registration.access().is_remote() => range.shared(),
        _ => None,
    }
}

/// Memory of another process, mapped here. Not public: views of a read-only mapping must only be
/// read, which their type does not express.
///
/// ```compile_fail
/// use warpwire::mr::PeerMapping;
/// ```
#[derive(Debug)]
pub(crate) struct PeerMapping {
    memory: HostMemory,
    writable: bool,
}

impl PeerMapping {
    /// Maps the file that [`Registry::files_for_key`] returned in another process.
    ///
    /// # Errors
    /// If it is not such a file: its owner could truncate it, or access to its pages could fault.
    pub fn open(files: Vec<OwnedFd>, writable: bool) -> Result<Self> {
        let Ok([file]) = <[OwnedFd; 1]>::try_from(files) else {
            return Err(Error::new(Kind::Unsupported, "map a peer's memory")
                .why("its owner does not share it, or not any more"));
        };
        let stat = fstatfs(&file).map_err(|why| Error::os("map a peer's memory", &why.into()))?;
        if stat.f_type as u64 != TMPFS_MAGIC {
            return Err(Error::new(Kind::InvalidArgument, "map a peer's memory")
                .why("it is not a memfd in base pages")
                .fix("register memory made by HostMemory::new"));
        }
        Ok(Self { memory: HostMemory::open_with(file, writable)?, writable })
    }

    /// The bytes, which may be written only if `writes` was given; `None` if `writes` and the owner
    /// granted read access only.
    #[inline]
    pub fn bytes(&self, writes: bool) -> Option<SharedBytes<'_>> {
        (self.writable || !writes).then(|| self.memory.bytes())
    }

    /// Applies an atomic operation, atomic with respect to the owner and its device. Returns the
    /// previous value.
    pub fn atomic(&self, at: u64, op: &Atomic) -> std::result::Result<u64, AccessDenied> {
        if !at.is_multiple_of(op.width().bytes().into()) {
            return Err(AccessDenied::Misaligned);
        }
        let bytes = self.bytes(true).ok_or(AccessDenied::Rights)?;
        atomics::rmw_shared(&bytes, at, op).map_err(|_| AccessDenied::Range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::sim::{Sim, SimConfig};
    use crate::mr::MemorySource;
    use std::sync::atomic::AtomicBool;

    #[derive(Default)]
    struct RecordingObserver(Mutex<Vec<(char, u32)>>, AtomicBool);

    impl ExportObserver for RecordingObserver {
        fn opened(&self, export: &MrExport) {
            self.0.lock().push(('+', export.key));
        }

        fn closing(&self, key: u32) {
            self.0.lock().push(('-', key));
        }

        fn wait_until_unused(&self, _: u32, _: Duration) -> bool {
            !self.1.load(Ordering::Relaxed)
        }
    }

    /// Memory that a stopped peer may still write is neither unmapped nor is its key reused, until
    /// that access has ended.
    #[test]
    fn memory_in_use_by_a_stopped_peer_is_quarantined() {
        let registry = Registry::new();
        let recording = Arc::new(RecordingObserver::default());
        registry.observer(recording.clone());
        let (pd, memory) = (registry.pd(), HostMemory::new(4096).unwrap());
        let register = || registry.register(&pd, memory.clone(), None, Access::ALL).unwrap();
        register().deregister().unwrap();
        let [kept, dropped] = [register(), register()];
        recording.1.store(true, Ordering::Relaxed);
        let refused = kept.deregister().unwrap_err();
        assert_eq!(refused.kind(), &Kind::Busy, "{refused}");
        drop(dropped);
        assert_eq!((registry.quarantined(), registry.len()), (2, 2));
        assert_eq!(memory.users(), 3, "the registry keeps the memory");
        // Other registrations go on, and do not release it.
        let other = register();
        assert_eq!(registry.quarantined(), 2);
        // A key whose memory may still be accessed is not given to another registration.
        let (mut replacing, replaced) = (register(), register());
        let own = replacing.lkey();
        assert_eq!(replacing.take_key(replaced).unwrap_err().kind(), &Kind::Busy);
        assert_eq!((replacing.lkey(), replacing.is_live()), (own, true));
        assert_eq!(registry.quarantined(), 3);
        recording.1.store(false, Ordering::Relaxed);
        drop(replacing);
        other.deregister().unwrap();
        assert_eq!((registry.quarantined(), registry.len()), (0, 0));
        assert_eq!(memory.users(), 1);
    }

    #[test]
    fn only_mappable_registrations_are_opened_and_all_are_closed() {
        let registry = Registry::new();
        let recording = Arc::new(RecordingObserver::default());
        registry.observer(recording.clone());
        let (pd, memory) = (registry.pd(), HostMemory::new(4096).unwrap());
        let register = |memory, access| registry.register(&pd, memory, None, access).unwrap();
        let shared = register(MemorySource::from(memory.clone()), Access::ALL);
        let own = register(MemorySource::from(memory.clone()), Access::LOCAL_WRITE);
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let pinned = register(gpu.alloc_pinned(4096).unwrap().whole().unwrap().into(), Access::ALL);
        let on_gpu = |access| {
            let memory = gpu.alloc(4096).unwrap().whole().unwrap();
            [register(memory.clone().into(), access), {
                register(MemorySource::from(memory).staged(), access)
            }]
        };
        let [device, staged] = on_gpu(Access::ALL);
        let [local, _staged] = on_gpu(Access::LOCAL_WRITE);
        let keys = [&shared, &own, &pinned, &device, &staged, &local].map(|mr| mr.rkey());
        assert_eq!(*recording.0.lock(), [0, 2, 3].map(|at: usize| ('+', keys[at])));
        let files = |key| registry.files_for_key(key).len();
        // Device memory: its handle, and one descriptor.
        assert_eq!(keys.map(files), [1, 0, 0, 2, 0, 0]);
        assert_eq!([keys[0] ^ 1, 0].map(files), [0, 0]);
        registry.invalidate(keys[0], pd.id()).unwrap();
        assert_eq!(files(keys[0]), 0);
        drop((shared, own));
        assert_eq!(recording.0.lock()[3..], [('-', keys[0]), ('-', keys[0]), ('-', keys[1])]);
        assert_eq!(files(keys[0]), 0);
    }

    /// Peers map device memory at its location: before it moves or ends, they are excluded.
    #[test]
    fn device_memory_that_moves_or_ends_is_closed_for_peers() {
        let registry = Registry::new();
        let recording = Arc::new(RecordingObserver::default());
        registry.observer(recording.clone());
        let sim = Sim::start(SimConfig::default()).unwrap();
        let (gpu, pd) = (sim.device(0).unwrap(), registry.pd());
        let memory = gpu.alloc(4096).unwrap();
        let register = || {
            let whole = memory.whole().unwrap();
            registry.register(&pd, whole, None, Access::ALL).unwrap()
        };
        let [first, second] = [register(), register()];
        let keys = [first.rkey(), second.rkey()];
        sim.control(0).unwrap().relocate(&memory).unwrap();
        let opened = [('+', keys[0]), ('+', keys[1])];
        let closed = [('-', keys[0]), ('-', keys[1])];
        assert_eq!(*recording.0.lock(), [opened, closed].concat());
        // What is registered afterwards is exported at the new location.
        let third = register();
        assert_eq!(recording.0.lock()[4..], [('+', third.rkey())]);
        drop((first, second));
        sim.control(0).unwrap().force_free(&memory).unwrap();
        assert_eq!(recording.0.lock().last(), Some(&('-', third.rkey())));
        assert_eq!(registry.files_for_key(third.rkey()).len(), 0);
    }

    #[test]
    fn a_file_grants_no_more_than_the_registration() {
        let registry = Registry::new();
        let (pd, memory) = (registry.pd(), HostMemory::new(4096).unwrap());
        let file = |access| {
            let mr = registry.register(&pd, memory.clone(), None, access).unwrap();
            registry.files_for_key(mr.rkey())
        };
        let both = PeerMapping::open(file(Access::ALL), true).unwrap();
        both.bytes(true).unwrap().write(8, b"theirs").unwrap();
        assert_eq!(both.atomic(0, &Atomic::FetchAdd { add: 3 }), Ok(0));
        assert_eq!(memory.bytes().load_u64(0).unwrap(), 3);
        for (at, denied) in [(4, AccessDenied::Misaligned), (4096, AccessDenied::Range)] {
            assert_eq!(both.atomic(at, &Atomic::FetchAdd { add: 1 }), Err(denied));
        }
        assert!(PeerMapping::open(file(Access::REMOTE_READ), true).is_err(), "it is read-only");
        let read = PeerMapping::open(file(Access::REMOTE_READ), false).unwrap();
        assert!(read.bytes(true).is_none());
        assert_eq!(read.atomic(0, &Atomic::FetchAdd { add: 1 }), Err(AccessDenied::Rights));
        let mut seen = [0; 6];
        read.bytes(false).unwrap().read(8, &mut seen).unwrap();
        assert_eq!(&seen, b"theirs");
    }

    #[test]
    fn files_that_could_fault_are_rejected() {
        let on_disk: OwnedFd = tempfile::tempfile().unwrap().into();
        assert!(PeerMapping::open(vec![on_disk], true).is_err());
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let unsealed = rustix::fs::memfd_create("short", flags).unwrap();
        rustix::fs::ftruncate(&unsealed, 4096).unwrap();
        assert!(PeerMapping::open(vec![unsealed], true).is_err());
        assert!(PeerMapping::open(Vec::new(), true).is_err());
    }
}
