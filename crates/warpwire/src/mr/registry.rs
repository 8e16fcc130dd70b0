//! Registrations and their keys.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::{Mutex, RwLock};

use super::access::Access;
use super::atomics;
use super::client::{Acquired, InvalidationHandle, PeerClient};
use super::clients;
use super::denied::AccessDenied;
use super::device::{DeviceMemory, PendingWrites};
use super::export::{self, ExportObserver};
use super::invalidation::InvalidationLink;
use super::keys::{KeyAllocator, TAG};
use super::memory::{DeviceAccess, MemorySource, PathSource, SourceKind};
use super::on_demand::FaultEpoch;
use super::registration::{RegisteredBy, Registration, SoftMr, Target};
use super::revocable_slot::SlotGuard;
use super::span::Span;
use super::table::Table;
use crate::error::{Error, Kind, Result};
use crate::mem::{PinGuard, Region};
use crate::units;

/// The label of a slot's gate: the tag of its key, whether it was ever used, whether peers are shut out, whether
/// the memory went away under it.
const USED: u32 = 1 << 8;
const REMOTE_INVALIDATED: u32 = 1 << 9;
const GONE: u32 = 1 << 10;

/// What a [`SoftPd`] is told by, in work requests and queue pairs. No two in a process are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PdId(u64);

impl PdId {
    /// As a number, for peers who compare it.
    pub(crate) fn raw(self) -> u64 {
        self.0
    }
}

/// A protection domain. Clones are the same one.
///
/// ```
/// use warpwire::mr::Registry;
/// let registry = Registry::new();
/// assert_ne!(registry.pd().id(), registry.pd().id());
/// ```
#[derive(Clone, Debug)]
pub struct SoftPd(Arc<PdId>);

impl SoftPd {
    /// What it is told by.
    pub fn id(&self) -> PdId {
        *self.0
    }

    /// Whether registrations, or other handles, still hold it.
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// All registrations of one software device. Clones are the same registry.
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
pub struct Registry(Arc<Inner>);

pub(super) struct Inner {
    /// What clients know the device by.
    name: String,
    table: Table,
    keys: Mutex<KeyAllocator>,
    /// Device memory in use, so that registrations of one allocation share its window.
    devices: Mutex<Vec<Weak<DeviceMemory>>>,
    pending_writes: Arc<PendingWrites>,
    /// What users of memory on demand have concluded.
    fault_epoch: Arc<FaultEpoch>,
    /// Whom to ask whose an address is, in this order.
    clients: RwLock<Vec<Arc<dyn PeerClient>>>,
    /// Who tells other processes of registrations.
    observer: OnceLock<Arc<dyn ExportObserver>>,
}

impl Inner {
    /// Takes a registration off its key, whose memory is going away. The key stays its owner's.
    pub(super) fn detach_key(&self, key: u32) -> Option<Registration> {
        // First those who need no packets: they do not look at the gate.
        if let Some(observer) = self.observer.get() {
            observer.closing(key);
        }
        let taken = self.table.get(key >> 8)?.0.close(key & TAG | USED | GONE);
        if let Some(Registration { target: Target::Device { memory, .. }, .. }) = &taken {
            memory.flush_if_live();
        }
        taken
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::new()
    }
}

/// Where memory came from, beside the memory itself.
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
    /// An empty registry, whose clients are the host, CUDA and the simulator.
    pub fn new() -> Self {
        Self::with_name("soft")
    }

    /// The same, of a device with that name.
    pub fn with_name(name: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
            name: name.into(),
            table: Table::default(),
            keys: Mutex::default(),
            devices: Mutex::default(),
            pending_writes: Arc::default(),
            fault_epoch: Arc::default(),
            clients: RwLock::new(clients::all()),
            observer: OnceLock::new(),
        }))
    }

    /// Adds a client, to be asked before those that are there.
    pub fn add_client(&self, client: Arc<dyn PeerClient>) {
        self.0.clients.write().insert(0, client);
    }

    /// The clients, in the order in which they are asked.
    pub fn clients(&self) -> Vec<Arc<dyn PeerClient>> {
        self.0.clients.read().clone()
    }

    /// A new protection domain.
    pub fn pd(&self) -> SoftPd {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        SoftPd(Arc::new(PdId(NEXT.fetch_add(1, Ordering::Relaxed))))
    }

    /// How many registrations there are.
    pub fn len(&self) -> usize {
        self.0.keys.lock().live
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Registers memory: gives it a key under which work requests of `pd` reach it.
    ///
    /// `iova` is the address at which they find its first byte: by default the memory's own address, or
    /// zero for [`Access::ZERO_BASED`]. The time that it takes does not depend on the memory's size.
    pub fn register(
        &self,
        pd: &SoftPd,
        memory: impl Into<MemorySource>,
        iova: Option<u64>,
        access: Access,
    ) -> Result<SoftMr> {
        self.register_source(pd, memory.into(), iova, access, Provenance::default())
    }

    /// Registers `len` bytes at `address`, whosever they are: the clients are asked in turn.
    ///
    /// With [`Access::ON_DEMAND`], host memory is looked up at each use: unmapping it makes work fail and harms
    /// nothing. Without, an unmapped page under a registration is a fault of this process.
    ///
    /// ```
    /// use warpwire::mr::{Access, AccessPath, Registry};
    /// let registry = Registry::new();
    /// let words: Vec<_> = (0..512).map(std::sync::atomic::AtomicU64::new).collect();
    /// let at = words.as_ptr().addr() as u64;
    /// // SAFETY: the words outlive the registration, and are atomics, which peers may change.
    /// let mr = unsafe { registry.register_address(&registry.pd(), at, 4096, None, Access::ALL) }?;
    /// assert_eq!((mr.client(), mr.path()), (Some("host"), AccessPath::Host));
    /// // SAFETY: nothing is there, which is found out.
    /// let nobody = unsafe { registry.register_address(&registry.pd(), 4096, 64, None, Access::ALL) };
    /// assert!(nobody.unwrap_err().to_string().contains("nobody knows the address"));
    /// # Ok::<(), warpwire::Error>(())
    /// ```
    ///
    /// # Safety
    /// What [`MemorySource::raw`] and [`Device::borrow`](crate::mem::Device::borrow) ask for, whichever sort of memory it is:
    /// it stays until the registration has ended or its client has taken it back, and what peers may write is
    /// touched by atomic or volatile accesses only.
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
                let why = format!("client {name} gave {} bytes for them", memory.len());
                return Err(Error::new(Kind::InvalidArgument, what()).why(why));
            }
            let registered_by = RegisteredBy::Address { client: name, persistence, page_size };
            let provenance = Provenance {
                registered_by,
                acquired: Some(acquired),
                invalidation: Some(invalidation),
                pin: None,
            };
            // The memory may have an address of its own, which is not the one that it was named by.
            let own = (!access.contains(Access::ZERO_BASED)).then_some(address);
            return self.register_source(pd, memory, iova.or(own), access, provenance);
        }
        let why = format!("nobody knows the address ({})", refusals.join("; "));
        Err(Error::new(Kind::NotDeviceMemory, what()).why(why).fix(
            "pass memory that is mapped in this process or allocated on a GPU of it, all of it",
        ))
    }

    /// What all registrations have in common.
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
                let why = format!("it is zero-based, and yet should begin at {iova:#x}");
                return Err(failure(Kind::InvalidArgument, why).fix("leave one of the two out"));
            }
            (iova, false) => iova.unwrap_or(address),
        };
        if len == 0 || iova.checked_add(len - 1).is_none() {
            let why = format!("{len} bytes from {iova:#x} on are none, or pass the last address");
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
        let registration =
            Registration { pd: id, access, iova, len, target, acquired, _pin: pin, _pd };
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
        })
    }

    /// How memory is reached, for work and for those who ask.
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

    /// Puts a registration under a new key.
    fn publish(&self, registration: Registration) -> Result<u32> {
        let full = || {
            Error::new(Kind::OutOfMemory, "register memory")
                .why("every key is in use")
                .fix("deregister what is no longer needed")
        };
        let key = self.0.keys.lock().allocate().ok_or_else(full)?;
        let slot = self.0.table.get_or_alloc(key >> 8).ok_or_else(full)?;
        // Before the gate opens: from then on a peer's message may close the key again.
        self.notify_opened(export::export(key, &registration));
        // The index was free, so its gate is closed.
        slot.0.open(key & TAG | USED, registration).map_err(|_| full())?;
        Ok(key)
    }

    pub(super) fn observer_cell(&self) -> &OnceLock<Arc<dyn ExportObserver>> {
        &self.0.observer
    }

    /// The registration of a key, if peers may use it.
    pub(super) fn enter_for_peer(&self, key: u32) -> Option<SlotGuard<'_, Registration>> {
        let wanted = key & TAG | USED;
        self.0.table.get(key >> 8)?.0.enter(|label| label == wanted).ok()
    }

    /// The shared state of the device memory that a region is of.
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

    /// Finds `len` bytes at `address` under a key, for one who needs these rights. Reading locally needs
    /// [`Access::NONE`].
    ///
    /// A range of no bytes needs neither key nor rights: nothing is checked. The memory stays registered
    /// while the span exists. No lock is taken and nothing allocated; many threads may call it.
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
        let slot = self.0.table.get(key >> 8).ok_or(AccessDenied::Unknown)?;
        // Peers are shut out by a label; those of this side pass in either case.
        let ignored = if need.is_remote() { 0 } else { REMOTE_INVALIDATED };
        let wanted = key & TAG | USED;
        let guard = slot
            .0
            .enter(|label| label & !ignored == wanted)
            .map_err(|(label, open)| reason(label, open, wanted))?;
        if guard.pd != pd {
            return Err(AccessDenied::WrongPd);
        }
        if !guard.access.contains(need) {
            return Err(AccessDenied::Rights);
        }
        let offset = locate(guard.iova, guard.len, address, len).ok_or(AccessDenied::Range)?;
        match &guard.target {
            Target::Host(_) => {}
            Target::Device { memory, region } => memory.check(region.offset() + offset, len)?,
            Target::Custom { custom_memory, .. } => {
                let writes =
                    need.contains(Access::LOCAL_WRITE) || need.contains(Access::REMOTE_WRITE);
                custom_memory.check(offset, len, writes)?;
            }
        }
        Ok(Span::new(guard, offset, len))
    }

    /// Ends remote use of a key, as a peer's message asked for: to let peers in again, register anew.
    /// Local use goes on. When it returns, no peer's access is under way any more; the caller must hold no
    /// [`Span`] of the key.
    pub fn invalidate(&self, rkey: u32, pd: PdId) -> std::result::Result<(), AccessDenied> {
        let slot = self.0.table.get(rkey >> 8).ok_or(AccessDenied::Unknown)?;
        let wanted = rkey & TAG | USED;
        {
            let denied = |(label, open)| reason(label, open, wanted);
            let guard = slot.0.enter(|label| label == wanted).map_err(denied)?;
            if guard.pd != pd {
                return Err(AccessDenied::WrongPd);
            }
            if !guard.access.is_remote() {
                return Err(AccessDenied::Rights);
            }
        }
        // Somebody may have come first in between: then the key is ended or invalid already.
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

    /// Sends everything that this thread has placed, in any memory, on its way before what it stores later.
    pub fn publish_all(&self) {
        self.0.pending_writes.wait();
        atomics::store_fence();
    }

    /// A connection has failed: memory on demand that was refused is looked for again when it is next used.
    pub fn reset_fault_state(&self) {
        self.0.fault_epoch.advance();
    }

    /// Waits until all that was placed in memory without a window is there; where there is none, it costs nothing.
    /// Says whether all of it is, since this was last asked: a device that fails on the way loses what it had taken.
    #[inline]
    pub fn flush_staged(&self) -> bool {
        self.0.pending_writes.flush_staged()
    }

    /// Whether a key has its memory.
    pub(super) fn is_live(&self, key: u32) -> bool {
        self.0.table.get(key >> 8).is_some_and(|slot| {
            let (label, open) = slot.0.peek();
            open && label & TAG == key & TAG
        })
    }

    /// Ends the registration of a key: see [`SoftMr::deregister`].
    pub(super) fn end(&self, key: u32) {
        if let Some(slot) = self.0.table.get(key >> 8) {
            // First those who need no packets: they do not look at the gate.
            self.notify_closing(key);
            let ended = slot.0.close(key & TAG | USED);
            // All that was placed through it is there, now that nothing more can come.
            self.0.pending_writes.wait();
            // Before the index can be used again, so that memory is free when the key is.
            drop(ended);
            self.0.keys.lock().release(key);
        }
    }
}

/// Where a range lies in memory of `total` bytes that begins at `iova`, if it lies inside. `len` is not zero.
#[inline]
fn locate(iova: u64, total: u64, address: u64, len: u64) -> Option<u64> {
    let offset = address.checked_sub(iova)?;
    (offset < total && len <= total - offset).then_some(offset)
}

/// Why a slot with this label does not take a key.
#[cold]
fn reason(label: u32, open: bool, wanted: u32) -> AccessDenied {
    match (label & USED != 0, open) {
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
