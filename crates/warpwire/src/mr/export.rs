//! Registrations told to other processes, and other processes' memory used here.
//!
//! Memory that lies in a file ([`HostMemory`]) can be mapped by a peer of this machine, who then needs no packets to reach
//! it. A [`Watch`] hears of each registration that peers may use in that way, and is told before it ends: when
//! [`Watch::closing`] returns, no peer may touch the memory.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, fstatfs, open};

use super::access::Access;
use super::denied::Denied;
use super::host::HostMemory;
use super::registration::{Registration, Target};
use super::registry::Registry;
use super::word;
use crate::error::{Error, Kind, Result};
use crate::mem::SharedBytes;
use crate::mlx5::Atomic;

/// What `fstatfs` says of memory in ordinary pages. Memory in huge pages may be missing when it is touched.
const TMPFS: u64 = 0x0102_1994;

/// A registration that peers of this machine may use by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// Its key.
    pub key: u32,
    /// Its protection domain, as a number that no other of this process has.
    pub pd: u64,
    /// What may be done with it.
    pub access: Access,
    /// The address of its first byte.
    pub iova: u64,
    /// How many bytes.
    pub len: u64,
    /// Which memory it is of: a number that no other memory of this process has.
    pub memory: u64,
    /// Where in that memory it begins.
    pub offset: u64,
}

/// Who hears of registrations that peers may use by themselves.
pub trait Watch: Send + Sync {
    /// One has begun.
    fn opened(&self, export: &Export);
    /// One ends, or is closed to peers. When this returns, no peer touches the memory any more.
    fn closing(&self, key: u32);
}

impl Registry {
    /// Has registrations from now on told to `watch`; the first one stays.
    pub fn watch(&self, watch: Arc<dyn Watch>) {
        let _ = self.watcher().set(watch);
    }

    /// Tells of a registration that has begun.
    pub(super) fn tell_opened(&self, export: Option<Export>) {
        if let (Some(watch), Some(export)) = (self.watcher().get(), export) {
            watch.opened(&export);
        }
    }

    /// Tells of one that is closed to peers.
    pub(super) fn tell_closing(&self, key: u32) {
        if let Some(watch) = self.watcher().get() {
            watch.closing(key);
        }
    }

    /// The file of a registration's memory, for a peer that may do no more with it than the registration allows; none
    /// if the key is not one that peers may use by themselves.
    pub fn file_of(&self, key: u32) -> Option<OwnedFd> {
        let inside = self.enter_for_peer(key)?;
        let memory = shared(&inside)?;
        let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        match inside.access().has_any(writes) {
            true => memory.as_fd().try_clone_to_owned().ok(),
            // The file anew, for reading.
            false => {
                let path = format!("/proc/self/fd/{}", memory.as_fd().as_raw_fd());
                open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
            }
        }
    }
}

fn shared(registration: &Registration) -> Option<&HostMemory> {
    match &registration.target {
        Target::Host(range) if registration.access().is_remote() => range.shared(),
        _ => None,
    }
}

/// What peers are told of a registration, if they may use it by themselves.
pub(super) fn export(key: u32, registration: &Registration) -> Option<Export> {
    let memory = shared(registration)?;
    let Target::Host(range) = &registration.target else { return None };
    let offset = range.address().checked_sub(memory.address())?;
    let memory = memory.number();
    let (pd, access) = (registration.pd().raw(), registration.access());
    let (iova, len) = registration.range();
    Some(Export { key, pd, access, iova, len, memory, offset })
}

/// Memory of another process, mapped here.
#[derive(Debug)]
pub struct Foreign {
    memory: HostMemory,
    writable: bool,
}

impl Foreign {
    /// Maps a file that [`Registry::file_of`] gave in another process.
    ///
    /// # Errors
    /// If it is not such a file: its owner could make it shorter, or its pages could be missing when they are touched.
    pub fn open(file: OwnedFd, writable: bool) -> Result<Self> {
        let stat = fstatfs(&file).map_err(|why| Error::os("map a peer's memory", &why.into()))?;
        if stat.f_type as u64 != TMPFS {
            return Err(Error::new(Kind::InvalidArgument, "map a peer's memory")
                .why("it is not memory in ordinary pages")
                .fix("register memory made by HostMemory::new"));
        }
        Ok(Self { memory: HostMemory::open_as(file, writable)?, writable })
    }

    /// Its bytes, for reading; and for writing, if the owner allows it.
    #[inline]
    pub fn bytes(&self, writes: bool) -> Option<SharedBytes<'_>> {
        (self.writable || !writes).then(|| self.memory.bytes())
    }

    /// Changes a word, as the owner's own device would.
    pub fn atomic(&self, at: u64, op: &Atomic) -> std::result::Result<u64, Denied> {
        if !at.is_multiple_of(op.width().bytes()) {
            return Err(Denied::Misaligned);
        }
        let bytes = self.bytes(true).ok_or(Denied::Rights)?;
        word::change_shared(&bytes, at, op).map_err(|_| Denied::Range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::sim::{Sim, SimConfig};
    use crate::mr::Memory;
    use parking_lot::Mutex;

    #[derive(Default)]
    struct Heard(Mutex<Vec<(char, u32)>>);

    impl Watch for Heard {
        fn opened(&self, export: &Export) {
            self.0.lock().push(('+', export.key));
        }

        fn closing(&self, key: u32) {
            self.0.lock().push(('-', key));
        }
    }

    #[test]
    fn registrations_are_told_if_peers_may_map_them_and_end_in_any_case() {
        let registry = Registry::new();
        let heard = Arc::new(Heard::default());
        registry.watch(heard.clone());
        let (pd, memory) = (registry.pd(), HostMemory::new(4096).unwrap());
        let register = |memory, access| registry.register(&pd, memory, None, access).unwrap();
        let shared = register(Memory::from(memory.clone()), Access::ALL);
        let own = register(Memory::from(memory.clone()), Access::LOCAL_WRITE);
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let pinned = register(gpu.alloc_pinned(4096).unwrap().whole().unwrap().into(), Access::ALL);
        let device = register(gpu.alloc(4096).unwrap().whole().unwrap().into(), Access::ALL);
        let keys = [&shared, &own, &pinned, &device].map(|mr| mr.rkey());
        assert_eq!(*heard.0.lock(), [('+', keys[0])]);
        assert_eq!(keys.map(|key| registry.file_of(key).is_some()), [true, false, false, false]);
        assert!(registry.file_of(keys[0] ^ 1).is_none() && registry.file_of(0).is_none());
        registry.invalidate(keys[0], pd.id()).unwrap();
        assert!(registry.file_of(keys[0]).is_none());
        drop((shared, own));
        assert_eq!(heard.0.lock()[1..], [('-', keys[0]), ('-', keys[0]), ('-', keys[1])]);
        assert!(registry.file_of(keys[0]).is_none());
    }

    #[test]
    fn a_file_gives_no_more_than_the_registration() {
        let registry = Registry::new();
        let (pd, memory) = (registry.pd(), HostMemory::new(4096).unwrap());
        let file = |access| {
            let mr = registry.register(&pd, memory.clone(), None, access).unwrap();
            registry.file_of(mr.rkey()).unwrap()
        };
        let both = Foreign::open(file(Access::ALL), true).unwrap();
        both.bytes(true).unwrap().write(8, b"theirs").unwrap();
        assert_eq!(both.atomic(0, &Atomic::FetchAdd { add: 3 }), Ok(0));
        assert_eq!(memory.bytes().load_u64(0).unwrap(), 3);
        for (at, denied) in [(4, Denied::Misaligned), (4096, Denied::Range)] {
            assert_eq!(both.atomic(at, &Atomic::FetchAdd { add: 1 }), Err(denied));
        }
        assert!(Foreign::open(file(Access::REMOTE_READ), true).is_err(), "it cannot be written");
        let read = Foreign::open(file(Access::REMOTE_READ), false).unwrap();
        assert!(read.bytes(true).is_none());
        assert_eq!(read.atomic(0, &Atomic::FetchAdd { add: 1 }), Err(Denied::Rights));
        let mut seen = [0; 6];
        read.bytes(false).unwrap().read(8, &mut seen).unwrap();
        assert_eq!(&seen, b"theirs");
    }

    #[test]
    fn files_that_could_fault_are_refused() {
        let on_disk: OwnedFd = tempfile::tempfile().unwrap().into();
        assert!(Foreign::open(on_disk, true).is_err());
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let unsealed = rustix::fs::memfd_create("short", flags).unwrap();
        rustix::fs::ftruncate(&unsealed, 4096).unwrap();
        assert!(Foreign::open(unsealed, true).is_err());
    }
}
