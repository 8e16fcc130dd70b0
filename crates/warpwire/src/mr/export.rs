//! Registrations exported to other processes, and the mapping of other processes' memory.
//!
//! A peer on the same machine can map memory that is backed by a memfd ([`HostMemory`]), and then
//! accesses it without packets. An [`ExportObserver`] is notified of each registration that peers
//! may use in this way, and again before it ends: from then on no access begins, and the registry
//! waits for the end of those in progress. It waits for a limited time only: memory that a stopped
//! peer may still access is quarantined, that is, its key is not reused and the registry keeps it
//! mapped until that access has ended.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
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
    /// Identifies the memfd-backed memory; unique in this process.
    pub memory: u64,
    /// Offset of the registration in that memory, in bytes.
    pub offset: u64,
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
const PEER_ACCESS_LIMIT: Duration = Duration::from_millis(500);

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

    pub(super) fn notify_opened(&self, export: Option<MrExport>) {
        if let (Some(observer), Some(export)) = (self.observer_cell().get(), export) {
            observer.opened(&export);
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
        let unused =
            |observer: &Arc<dyn ExportObserver>| observer.wait_until_unused(key, PEER_ACCESS_LIMIT);
        if self.observer_cell().get().is_none_or(unused) {
            drop(ended);
            return true;
        }
        tracing::warn!(
            key = format_args!("{key:#x}"),
            "a peer process that does not run is still accessing deregistered memory, which is \
             kept until that ends"
        );
        self.quarantine().0.lock().push((key, ended));
        false
    }

    /// Releases what was quarantined and is no longer accessed.
    pub(super) fn release_quarantined(&self) {
        let Some(observer) = self.observer_cell().get() else { return };
        let released = {
            let mut quarantined = self.quarantine().0.lock();
            let (kept, released) = quarantined.drain(..).partition::<Vec<_>, _>(|(key, _)| {
                !observer.wait_until_unused(*key, Duration::ZERO)
            });
            *quarantined = kept;
            released
        };
        for (key, ended) in released {
            drop(ended);
            self.release_key(key);
        }
    }

    /// The memfd behind a registration, for a local peer; opened read-only unless the registration
    /// grants remote write or atomic. `None` if the key is invalid or not exported.
    pub fn file_for_key(&self, key: u32) -> Option<OwnedFd> {
        let guard = self.enter_for_peer(key)?;
        let memory = shared(&guard)?;
        let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        match guard.access().intersects(writes) {
            true => memory.as_fd().try_clone_to_owned().ok(),
            // Reopen the file read-only.
            false => {
                let path = format!("/proc/self/fd/{}", memory.as_fd().as_raw_fd());
                open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
            }
        }
    }
}

/// The memfd-backed memory of a registration that grants remote rights.
fn shared(registration: &Registration) -> Option<&HostMemory> {
    match &registration.target {
        Target::Host(range) if registration.access().is_remote() => range.shared(),
        _ => None,
    }
}

/// The export of a registration, if local peers may access it directly.
pub(super) fn export(key: u32, registration: &Registration) -> Option<MrExport> {
    let memory = shared(registration)?;
    let Target::Host(range) = &registration.target else { return None };
    let offset = range.address().checked_sub(memory.address())?;
    let memory = memory.id();
    let (pd, access) = (registration.pd().raw(), registration.access());
    let (iova, len) = registration.range();
    Some(MrExport { key, pd, access, iova, len, memory, offset })
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
    /// Maps a file that [`Registry::file_for_key`] returned in another process.
    ///
    /// # Errors
    /// If it is not such a file: its owner could truncate it, or access to its pages could fault.
    pub fn open(file: OwnedFd, writable: bool) -> Result<Self> {
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
    use std::sync::atomic::{AtomicBool, Ordering};

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
        let device = register(gpu.alloc(4096).unwrap().whole().unwrap().into(), Access::ALL);
        let keys = [&shared, &own, &pinned, &device].map(|mr| mr.rkey());
        assert_eq!(*recording.0.lock(), [('+', keys[0])]);
        assert_eq!(
            keys.map(|key| registry.file_for_key(key).is_some()),
            [true, false, false, false]
        );
        assert!(registry.file_for_key(keys[0] ^ 1).is_none() && registry.file_for_key(0).is_none());
        registry.invalidate(keys[0], pd.id()).unwrap();
        assert!(registry.file_for_key(keys[0]).is_none());
        drop((shared, own));
        assert_eq!(recording.0.lock()[1..], [('-', keys[0]), ('-', keys[0]), ('-', keys[1])]);
        assert!(registry.file_for_key(keys[0]).is_none());
    }

    #[test]
    fn a_file_grants_no_more_than_the_registration() {
        let registry = Registry::new();
        let (pd, memory) = (registry.pd(), HostMemory::new(4096).unwrap());
        let file = |access| {
            let mr = registry.register(&pd, memory.clone(), None, access).unwrap();
            registry.file_for_key(mr.rkey()).unwrap()
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
        assert!(PeerMapping::open(on_disk, true).is_err());
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let unsealed = rustix::fs::memfd_create("short", flags).unwrap();
        rustix::fs::ftruncate(&unsealed, 4096).unwrap();
        assert!(PeerMapping::open(unsealed, true).is_err());
    }
}
