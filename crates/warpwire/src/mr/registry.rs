//! The registry: registrations of one software device, and the resolution of keys.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::{Mutex, RwLock};

use super::Access;
use super::atomics;
use super::client::{Acquired, InvalidationHandle, PeerClient};
use super::clients;
use super::denied::AccessDenied;
use super::device::{DeviceMemory, PendingWrites};
use super::export::{self, ExportObserver, Quarantine};
use super::invalidation::InvalidationLink;
use super::keys::{KeyAllocator, KeyMask, TAG};
use super::memory::{DeviceAccess, MemorySource, PathSource, SourceKind};
use super::on_demand::FaultEpoch;
use super::registration::{RegisteredBy, Registration, SoftMr, Target};
use super::revocable_slot::SlotGuard;
use super::span::Span;
use super::table::{Slot, Table};
use super::window::BoundWindows;
use crate::error::{Error, Kind, Result};
use crate::mem::{PinGuard, Region};
use crate::units;

// A slot's label: the tag of its key (bits 0 to 7), and these flags.

/// The slot has held a registration.
pub(super) const USED: u32 = 1 << 8;
/// The key has been invalidated for remote use.
pub(super) const REMOTE_INVALIDATED: u32 = 1 << 9;
/// The memory was freed under its registration.
const GONE: u32 = 1 << 10;
/// The slot has a window; [`USED`] then says that it is bound.
pub(super) const WINDOW: u32 = 1 << 11;

/// Identifies a [`SoftPd`] in work requests and queue pairs; unique in the process. That of a queue
/// pair has its number in the upper 24 bits, for windows that only one queue pair may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PdId(u64);

impl PdId {
    const DOMAIN_BITS: u32 = 40;

    /// The same domain, used by this queue pair.
    #[must_use]
    pub const fn of_qp(self, number: u32) -> Self {
        Self(self.raw() | (number as u64) << Self::DOMAIN_BITS)
    }

    /// The queue pair that uses it; 0 if none was given.
    pub(super) const fn qp(self) -> u32 {
        (self.0 >> Self::DOMAIN_BITS) as u32
    }

    /// Whether both are the same domain, whichever queue pair uses it.
    #[inline]
    pub(super) const fn is_same_domain(self, other: Self) -> bool {
        (self.0 ^ other.0) << (u64::BITS - Self::DOMAIN_BITS) == 0
    }

    /// The domain as a number, which local peers compare.
    pub(crate) const fn raw(self) -> u64 {
        self.0 & ((1 << Self::DOMAIN_BITS) - 1)
    }
}

/// A protection domain. Clones refer to the same domain.
///
/// ```
/// use warpwire::mr::Registry;
/// let registry = Registry::new();
/// assert_ne!(registry.pd().id(), registry.pd().id());
/// ```
#[derive(Clone, Debug)]
pub struct SoftPd(Arc<PdId>);

impl SoftPd {
    /// The identifier that keys are checked against.
    pub fn id(&self) -> PdId {
        *self.0
    }

    /// Whether registrations or other handles still refer to it.
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// All registrations of one software device. Clones share the registry.
///
/// ```
/// use warpwire::mr::{Access, AccessDenied, HostMemory, Registry};
/// let registry = Registry::new();
/// let (pd, other) = (registry.pd(), registry.pd());
/// let mr = registry.register(&pd, HostMemory::new(4096)?, Some(0), Access::NONE)?;
/// let find = |pd, need, at, len| registry.resolve(mr.lkey(), pd, need, at, len).err();
/// assert_eq!(find(pd.id(), Access::NONE, 0, 4096), None);
/// assert_eq!(find(pd.id(), Access::NONE, 1, 4096), Some(AccessDenied::Range));
/// assert_eq!(find(pd.id(), Access::LOCAL_WRITE, 0, 1), Some(AccessDenied::Rights));
/// assert_eq!(find(other.id(), Access::NONE, 0, 1), Some(AccessDenied::WrongPd));
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone)]
pub struct Registry(
    Arc<Inner>,
    /// In which shard of a slot this handle counts its accesses.
    usize,
);

pub(super) struct Inner {
    /// The device name passed to clients.
    name: String,
    table: Table,
    key_mask: KeyMask,
    keys: Mutex<KeyAllocator>,
    /// Registered device memory, so that all registrations of one allocation share its window.
    devices: Mutex<Vec<Weak<DeviceMemory>>>,
    pending_writes: Arc<PendingWrites>,
    /// Advanced when a connection has failed because of an unmapped on-demand page.
    fault_epoch: Arc<FaultEpoch>,
    /// In lookup order.
    clients: RwLock<Vec<Arc<dyn PeerClient>>>,
    /// Exports registrations to other processes.
    observer: OnceLock<Arc<dyn ExportObserver>>,
    quarantine: Quarantine,
    /// Held while a window is bound, invalidated or deallocated.
    window_transitions: Mutex<()>,
}

impl Inner {
    /// The slot of a key, if there is one.
    #[inline]
    fn slot(&self, key: u32) -> Option<&Slot> {
        self.table.get(self.key_mask.index(key))
    }

    /// Takes the registration out of its slot because its memory is being revoked. The key stays
    /// allocated until its owner deregisters.
    pub(super) fn detach_key(&self, key: u32) -> Option<Registration> {
        // First the peers that access the memory directly: they do not go through the slot.
        if let Some(observer) = self.observer.get() {
            observer.closing(key);
        }
        let taken = self.slot(key)?.0.close(key & TAG | USED | GONE);
        if let Some(Registration { target: Target::Device { memory, .. }, .. }) = &taken {
            memory.end_export(key);
            memory.flush_if_live();
            // Host memory that is revoked is none that peers can map.
            let limit = export::PEER_ACCESS_LIMIT;
            let unused =
                |observer: &Arc<dyn ExportObserver>| observer.wait_until_unused(key, limit);
            let by_peers = !self.observer.get().is_none_or(unused);
            if by_peers || !memory.wait_for_copies(limit) {
                tracing::warn!(
                    "device memory is taken back while copies that do not end access it"
                );
            }
        }
        taken
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::new()
    }
}

/// How a registration's memory was obtained, and what keeps it valid.
pub(super) struct Provenance {
    pub(super) registered_by: RegisteredBy,
    pub(super) acquired: Option<Acquired>,
    pub(super) invalidation: Option<Arc<InvalidationLink>>,
    pub(super) pin: Option<PinGuard>,
}

impl Default for Provenance {
    fn default() -> Self {
        Self { registered_by: RegisteredBy::Handle, acquired: None, invalidation: None, pin: None }
    }
}

impl Registry {
    /// An empty registry of a device named `soft`, with the host, the simulator and CUDA as
    /// clients.
    pub fn new() -> Self {
        Self::with_name("soft")
    }

    /// The same, of a device with this name.
    pub fn with_name(name: impl Into<String>) -> Self {
        Self::sharded(name, 0)
    }

    /// The same, for a device whose `engines` engines use it at the same time.
    pub(crate) fn for_engines(engines: usize) -> Self {
        Self::sharded("soft", if engines > 1 { engines } else { 0 })
    }

    /// The registry as engine `number` uses it: accesses of two engines to one registration do not
    /// slow each other down.
    pub(crate) fn of_engine(&self, number: usize) -> Self {
        Self(self.0.clone(), number + 1)
    }

    fn sharded(name: impl Into<String>, shards: usize) -> Self {
        let key_mask = KeyMask::random();
        let inner = Inner {
            name: name.into(),
            table: Table::new(shards),
            key_mask,
            keys: Mutex::new(KeyAllocator::new(key_mask)),
            devices: Mutex::default(),
            pending_writes: Arc::default(),
            fault_epoch: Arc::default(),
            clients: RwLock::new(clients::all()),
            observer: OnceLock::new(),
            quarantine: Quarantine::default(),
            window_transitions: Mutex::default(),
        };
        Self(Arc::new(inner), 0)
    }

    /// Adds a client in front of the existing ones.
    pub fn add_client(&self, client: Arc<dyn PeerClient>) {
        self.0.clients.write().insert(0, client);
    }

    /// The clients, in lookup order.
    pub fn clients(&self) -> Vec<Arc<dyn PeerClient>> {
        self.0.clients.read().clone()
    }

    /// Allocates a protection domain.
    pub fn pd(&self) -> SoftPd {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        SoftPd(Arc::new(PdId(NEXT.fetch_add(1, Ordering::Relaxed))))
    }

    /// The number of live registrations and windows, with those that are
    /// [kept](Self::quarantined).
    pub fn len(&self) -> usize {
        self.release_quarantined();
        self.0.keys.lock().live
    }

    /// Whether there is no live registration or window.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Registers memory under a new key, with which work requests of `pd` can access it.
    ///
    /// `iova` is the address of its first byte in work requests: by default the memory's own
    /// address, or zero for [`Access::ZERO_BASED`]. The cost does not depend on the size of the
    /// memory.
    pub fn register(
        &self,
        pd: &SoftPd,
        memory: impl Into<MemorySource>,
        iova: Option<u64>,
        access: Access,
    ) -> Result<SoftMr> {
        self.register_source(pd, memory.into(), iova, access, Provenance::default())
    }

    /// Registers `len` bytes at `address`, of any kind of memory: the clients are asked in turn.
    ///
    /// With [`Access::ON_DEMAND`], the kernel looks up host pages at each use: if one is unmapped,
    /// the work request fails. Without it, access to an unmapped page raises `SIGSEGV` in this
    /// process.
    ///
    /// ```
    /// use warpwire::mr::{Access, AccessPath, Registry};
    /// let registry = Registry::new();
    /// let words: Vec<_> = (0..512).map(std::sync::atomic::AtomicU64::new).collect();
    /// let at = words.as_ptr().addr() as u64;
    /// // SAFETY: the words outlive the registration, and are atomics, so peers may change them.
    /// let mr = unsafe { registry.register_address(&registry.pd(), at, 4096, None, Access::ALL) }?;
    /// assert_eq!((mr.client(), mr.path()), (Some("host"), AccessPath::Host));
    /// // SAFETY: nothing is mapped there, so the registration fails.
    /// let bad = unsafe { registry.register_address(&registry.pd(), 4096, 64, None, Access::ALL) };
    /// assert!(bad.unwrap_err().to_string().contains("no client owns the address"));
    /// # Ok::<(), warpwire::Error>(())
    /// ```
    ///
    /// # Safety
    /// The conditions of [`MemorySource::raw`] or [`Device::borrow`](crate::mem::Device::borrow),
    /// depending on the kind of memory: it stays valid until the registration has ended or its
    /// client has revoked it, and what peers may write is accessed with atomic or volatile
    /// operations only.
    #[allow(unsafe_code)]
    pub unsafe fn register_address(
        &self,
        pd: &SoftPd,
        address: u64,
        len: u64,
        iova: Option<u64>,
        access: Access,
    ) -> Result<SoftMr> {
        access.check()?;
        let what = || format!("register {} at {address:#x}", units::bytes(len));
        if len == 0 || address.checked_add(len).is_none() {
            return Err(Error::new(Kind::InvalidArgument, what())
                .why("the range is empty, or passes the last address"));
        }
        let mut refusals = Vec::new();
        for client in self.clients() {
            let name = client.name().to_owned();
            let persistence = client.persistence();
            let pages = match client.acquire(address, len) {
                Ok(pages) => pages,
                Err(error) => {
                    refusals.push(format!("{name}: {}", error.reason()));
                    continue;
                }
            };
            let invalidation = Arc::new(InvalidationLink::new());
            let invalidate = InvalidationHandle {
                invalidation: invalidation.clone(),
                registry: Arc::downgrade(&self.0),
            };
            let writes = access.contains(Access::LOCAL_WRITE);
            let acquired = Acquired::get(pages, self.0.name.clone(), writes, invalidate);
            let (acquired, memory) = acquired.map_err(|error| error.during(what()))?;
            let page_size = acquired.page_size();
            if memory.len() != len {
                let why = format!("client {name} gave {} bytes instead", memory.len());
                return Err(Error::new(Kind::InvalidArgument, what()).why(why));
            }
            let registered_by = RegisteredBy::Address { client: name, persistence, page_size };
            let provenance = Provenance {
                registered_by,
                acquired: Some(acquired),
                invalidation: Some(invalidation),
                pin: None,
            };
            // The client may map the memory at another address than the one it was registered by.
            let own = (!access.contains(Access::ZERO_BASED)).then_some(address);
            return self.register_source(pd, memory, iova.or(own), access, provenance);
        }
        let why = format!("no client owns the address ({})", refusals.join("; "));
        Err(Error::new(Kind::NotDeviceMemory, what()).why(why).fix(
            "pass memory that is entirely mapped in this process, or allocated by it on a GPU",
        ))
    }

    /// The common part of all ways to register memory.
    pub(super) fn register_source(
        &self,
        pd: &SoftPd,
        memory: MemorySource,
        iova: Option<u64>,
        access: Access,
        provenance: Provenance,
    ) -> Result<SoftMr> {
        access.check()?;
        let (address, len) = (memory.address(), memory.len());
        let failure = |kind, why: String| {
            let what = format!("register {} at {address:#x}", units::bytes(len));
            Error::new(kind, what).why(why)
        };
        let zero_based = access.contains(Access::ZERO_BASED);
        let iova = match (iova, zero_based) {
            (Some(0) | None, true) => 0,
            (Some(iova), true) => {
                let why = format!("it is zero-based, but should begin at {iova:#x}");
                return Err(failure(Kind::InvalidArgument, why).fix("leave out one of the two"));
            }
            (iova, false) => iova.unwrap_or(address),
        };
        if len == 0 || iova.checked_add(len - 1).is_none() {
            let why = format!("it is empty, or {len} bytes from {iova:#x} pass the last address");
            return Err(failure(Kind::InvalidArgument, why));
        }
        let mut notes = Vec::new();
        let memory = match access.contains(Access::ON_DEMAND) {
            true => memory.on_demand(access, &self.0.fault_epoch, &mut notes)?,
            false => memory,
        };
        let (target, reached) = self.target(memory)?;
        let Provenance { registered_by, acquired, invalidation, pin } = provenance;
        let (id, _pd) = (pd.id(), pd.clone());
        let windows = BoundWindows::of(access);
        let registration = Registration {
            pd: id,
            access,
            iova,
            len,
            target,
            acquired,
            _pin: pin,
            windows: windows.clone(),
            _pd,
        };
        let publish = || self.publish(registration);
        let key = match &invalidation {
            None => publish()?,
            Some(invalidation) => invalidation.bind(publish).unwrap_or_else(|| {
                let why = "its owner took it back meanwhile".to_owned();
                Err(failure(Kind::Freed, why))
            })?,
        };
        let (registry, pd) = (self.clone(), pd.clone());
        Ok(SoftMr {
            registry,
            key,
            pd,
            iova,
            len,
            access,
            reached,
            registered_by,
            notes,
            invalidation,
            windows,
            ended: false,
        })
    }

    /// The access method of memory, for work requests and for [`SoftMr::path`].
    fn target(&self, memory: MemorySource) -> Result<(Target, PathSource)> {
        let address = memory.address();
        Ok(match memory.what {
            SourceKind::Host { range, path } => (Target::Host(range), PathSource::Fixed(path)),
            SourceKind::Device { region, device_access } => {
                let memory = self.device(&region, &device_access)?;
                (Target::Device { memory: memory.clone(), region }, PathSource::Device(memory))
            }
            SourceKind::OnDemand(memory) => {
                let custom_memory = memory.clone();
                (Target::Custom { custom_memory, address }, PathSource::OnDemand(memory))
            }
            SourceKind::Custom { custom_memory, .. } => (
                Target::Custom { custom_memory, address },
                PathSource::Fixed(super::AccessPath::PeerMemory),
            ),
        })
    }

    /// Allocates a key and stores the registration, or a window that is not bound, under it.
    pub(super) fn publish(&self, registration: Registration) -> Result<u32> {
        let full = || {
            Error::new(Kind::OutOfMemory, "register memory")
                .why("every key is in use")
                .fix("deregister what is no longer needed")
        };
        self.release_quarantined();
        let label = if matches!(registration.target, Target::Window(_)) { WINDOW } else { USED };
        let key = self.0.keys.lock().allocate().ok_or_else(full)?;
        let slot = self.0.table.get_or_alloc(self.0.key_mask.index(key)).ok_or_else(full)?;
        // Before the slot opens: from then on a peer's message may invalidate the key.
        self.notify_opened(key, &registration);
        // The index was free, so its slot is closed.
        slot.0.open(key & TAG | label, registration).map_err(|_| full())?;
        Ok(key)
    }

    /// The slot of a key, if there is one.
    pub(super) fn slot(&self, key: u32) -> Option<&Slot> {
        self.0.slot(key)
    }

    /// In which shard of a slot this handle counts its accesses.
    pub(super) fn shard(&self) -> usize {
        self.1
    }

    pub(super) fn window_transitions(&self) -> &Mutex<()> {
        &self.0.window_transitions
    }

    pub(super) fn observer_cell(&self) -> &OnceLock<Arc<dyn ExportObserver>> {
        &self.0.observer
    }

    /// A guard on the registration of a key, unless it is stale or invalidated for peers.
    pub(super) fn enter_for_peer(&self, key: u32) -> Option<SlotGuard<'_, Registration>> {
        let wanted = key & TAG | USED;
        self.0.slot(key)?.0.enter(|label| label == wanted).ok()
    }

    /// The shared state of a region's device memory; created if there is none yet.
    fn device(&self, region: &Region, device_access: &DeviceAccess) -> Result<Arc<DeviceMemory>> {
        let mut devices = self.0.devices.lock();
        devices.retain(|known| known.strong_count() > 0);
        let mut known = devices.iter().filter_map(Weak::upgrade);
        if let Some(memory) =
            known.find(|memory| memory.is_same_memory(region.allocation(), device_access))
        {
            return Ok(memory);
        }
        let memory =
            DeviceMemory::open(region.allocation(), device_access, &self.0.pending_writes)?;
        devices.push(Arc::downgrade(&memory));
        Ok(memory)
    }

    /// Resolves `len` bytes at `address` under a key, and checks that it grants the rights `need`
    /// ([`Access::NONE`] for local reads).
    ///
    /// For an empty range neither key nor rights are checked. The memory stays registered while the
    /// span exists. Takes no lock and allocates nothing; any number of threads may call it.
    #[inline]
    pub fn resolve(
        &self,
        key: u32,
        pd: PdId,
        need: Access,
        address: u64,
        len: u64,
    ) -> std::result::Result<Span<'_>, AccessDenied> {
        if len == 0 {
            return Ok(Span::empty());
        }
        let slot = self.0.slot(key).ok_or(AccessDenied::Unknown)?;
        // Local access ignores the flag that shuts out peers; only peers use windows.
        let ignored = if need.is_remote() { WINDOW } else { REMOTE_INVALIDATED };
        let wanted = key & TAG | USED;
        let guard = slot
            .0
            .enter_shard(self.1, |label| label & !ignored == wanted)
            .map_err(|(label, open)| reason(label, open, wanted))?;
        if !guard.pd.is_same_domain(pd) {
            return Err(AccessDenied::WrongPd);
        }
        if !guard.access.contains(need) {
            return Err(AccessDenied::Rights);
        }
        let offset = locate(guard.iova, guard.len, address, len).ok_or(AccessDenied::Range)?;
        match &guard.target {
            Target::Host(_) => {}
            Target::Window(window) => return self.resolve_window(window, pd, need, offset, len),
            target => target.check(offset, len, need)?,
        }
        Ok(Span::new(guard, offset, len))
    }

    /// Ends remote use of a key (send with invalidate, local invalidation): of a window of type 2,
    /// which can then be bound again; or of a registration, until the memory is registered anew,
    /// and whose local use is unaffected. When it returns, no packet's access is in progress,
    /// and no peer's direct access begins; one that has begun ends within its quantum. The caller
    /// must hold no [`Span`] of the key.
    pub fn invalidate(&self, rkey: u32, pd: PdId) -> std::result::Result<(), AccessDenied> {
        let slot = self.0.slot(rkey).ok_or(AccessDenied::Unknown)?;
        let wanted = rkey & TAG | USED;
        if slot.0.peek().0 & WINDOW != 0 {
            return self.invalidate_window(rkey, pd);
        }
        {
            let denied = |(label, open)| reason(label, open, wanted);
            let guard = slot.0.enter(|label| label == wanted).map_err(denied)?;
            if !guard.pd.is_same_domain(pd) {
                return Err(AccessDenied::WrongPd);
            }
            if !guard.access.is_remote() {
                return Err(AccessDenied::Rights);
            }
        }
        // A concurrent call may have deregistered or invalidated the key since the check.
        match slot.0.relabel_and_drain(wanted, wanted | REMOTE_INVALIDATED) {
            true => {
                self.notify_closing(rkey);
                Ok(())
            }
            false => {
                let (label, open) = slot.0.peek();
                Err(reason(label, open, wanted))
            }
        }
    }

    /// Orders everything that this thread has written to registered memory before its later stores.
    /// Blocks until staged writes have completed.
    pub fn publish_all(&self) {
        self.0.pending_writes.wait();
        atomics::store_fence();
    }

    /// To be called when a connection has failed: on-demand memory that could not be paged in is
    /// tried again at its next use.
    pub fn reset_fault_state(&self) {
        self.0.fault_epoch.advance();
    }

    /// Blocks until all writes to memory without a window have reached it; costs two loads if there
    /// are none. Returns how often writes were lost since the registry was created, because a
    /// device failed: a caller compares that with what it was told last.
    #[inline]
    pub fn flush_staged(&self) -> u64 {
        self.0.pending_writes.flush_staged()
    }

    /// Whether a key's slot is open, that is, its memory was neither deregistered nor revoked.
    pub(super) fn is_live(&self, key: u32) -> bool {
        self.0.slot(key).is_some_and(|slot| {
            let (label, open) = slot.0.peek();
            open && label & TAG == key & TAG
        })
    }

    /// Ends the registration of a key: see [`SoftMr::deregister`]. Returns `false` if a peer may
    /// still access the memory.
    pub(super) fn end(&self, key: u32) -> bool {
        let Some(slot) = self.0.slot(key) else { return true };
        let ended = self.close_slot(key, slot);
        self.release_unused(key, ended)
    }

    /// Excludes peers and packets from the memory of a key, and takes its registration out.
    fn close_slot(&self, key: u32, slot: &Slot) -> Option<Registration> {
        // First the peers that access the memory directly: they do not go through the slot.
        self.notify_closing(key);
        let ended = slot.0.close(key & TAG | USED);
        if let Some(Registration { target: Target::Device { memory, .. }, .. }) = &ended {
            memory.end_export(key);
        }
        // No more writes can arrive; wait for the staged ones.
        self.0.pending_writes.wait();
        ended
    }

    /// Ends the registration of a key, which stays allocated. Returns `false` if a peer may still
    /// access the memory: the key is then released later, with the memory.
    pub(super) fn end_keeping_key(&self, key: u32) -> bool {
        let Some(slot) = self.0.slot(key) else { return false };
        let ended = self.close_slot(key, slot);
        self.drop_unused(key, ended)
    }

    /// Moves a registration from one key to another, whose own registration has ended. Returns the
    /// key that it has then; the other one is released.
    pub(super) fn rekey(&self, from: u32, to: u32) -> u32 {
        let (Some(source), Some(target)) = (self.0.slot(from), self.0.slot(to)) else {
            return from;
        };
        self.notify_closing(from);
        let Some(registration) = source.0.close(from & TAG | USED) else {
            // It has just been revoked.
            self.release_key(to);
            return from;
        };
        if let Target::Device { memory, .. } = &registration.target {
            memory.end_export(from);
        }
        self.notify_opened(to, &registration);
        // The slot is closed: nothing else uses a key that is allocated.
        let _ = target.0.open(to & TAG | USED, registration);
        self.release_key(from);
        to
    }

    /// Whether both are handles of one registry.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(super) fn release_key(&self, key: u32) {
        self.0.keys.lock().release(key);
    }

    pub(super) fn quarantine(&self) -> &Quarantine {
        &self.0.quarantine
    }

    /// The number of registrations that have ended, but whose memory is kept because a peer process
    /// that does not run may still access it. Released by later registrations and deregistrations,
    /// and by [`len`](Self::len).
    pub fn quarantined(&self) -> usize {
        self.0.quarantine.len()
    }
}

/// The offset of a range in memory of `total` bytes that begins at `iova`; `None` if it is out of
/// bounds. `len` is not zero.
#[inline]
pub(super) fn locate(iova: u64, total: u64, address: u64, len: u64) -> Option<u64> {
    let offset = address.checked_sub(iova)?;
    (offset < total && len <= total - offset).then_some(offset)
}

/// Why a slot with this label rejected a key.
#[cold]
pub(super) fn reason(label: u32, open: bool, wanted: u32) -> AccessDenied {
    match (label & USED != 0, open) {
        (false, true) => AccessDenied::Invalidated, // a window that is not bound
        (true, true) if label == wanted | WINDOW => AccessDenied::Rights, // as a local key
        (false, _) => AccessDenied::Unknown,
        (true, false) if label & !REMOTE_INVALIDATED == wanted | GONE => AccessDenied::Gone,
        (true, true) if label & !REMOTE_INVALIDATED == wanted => AccessDenied::Invalidated,
        _ => AccessDenied::Stale,
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registry({} registrations)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_are_placed_without_overflow(
            iova in prop_oneof![any::<u64>(), u64::MAX - 100..=u64::MAX, 0u64..100],
            total in prop_oneof![1..200u64, any::<u64>()],
            address in prop_oneof![any::<u64>(), u64::MAX - 100..=u64::MAX, 0u64..100],
            len in prop_oneof![1..200u64, any::<u64>(), Just(u64::MAX)],
        ) {
            prop_assume!(len > 0 && total > 0 && iova.checked_add(total - 1).is_some());
            let wide = |number| u128::from(number);
            let guard = address >= iova && wide(address) + wide(len) <= wide(iova) + wide(total);
            prop_assert_eq!(locate(iova, total, address, len), guard.then(|| address - iova));
        }
    }
}
