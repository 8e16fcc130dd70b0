//! Registrations and their keys.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::{Mutex, RwLock};

use super::access::Access;
use super::client::{Got, Invalidate, PeerClient};
use super::clients;
use super::denied::Denied;
use super::device::{DeviceMemory, Unsettled};
use super::export::{self, Watch};
use super::gate::Inside;
use super::keys::{Keys, TAG};
use super::memory::{How, Memory, Reached, What};
use super::on_demand::Conclusions;
use super::registration::{Mr, Named, Registration, Target};
use super::span::Span;
use super::table::Table;
use super::tie::Tie;
use super::word;
use crate::error::{Error, Kind, Result};
use crate::mem::{Pin, Region};
use crate::units;

/// The label of a slot's gate: the tag of its key, whether it was ever used, whether peers are shut out, whether
/// the memory went away under it.
const USED: u32 = 1 << 8;
const SHUT: u32 = 1 << 9;
const GONE: u32 = 1 << 10;

/// What a [`Pd`] is told by, in work requests and queue pairs. No two in a process are alike.
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
pub struct Pd(Arc<PdId>);

impl Pd {
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
/// use warpwire::mr::{Access, Denied, HostMemory, Registry};
/// let registry = Registry::new();
/// let (pd, other) = (registry.pd(), registry.pd());
/// let mr = registry.register(&pd, HostMemory::new(4096)?, Some(0), Access::NONE)?;
/// let find = |pd, need, at, len| registry.resolve(mr.lkey(), pd, need, at, len).err();
/// assert_eq!(find(pd.id(), Access::NONE, 0, 4096), None);
/// assert_eq!(find(pd.id(), Access::NONE, 1, 4096), Some(Denied::Range));
/// assert_eq!(find(pd.id(), Access::LOCAL_WRITE, 0, 1), Some(Denied::Rights));
/// assert_eq!(find(other.id(), Access::NONE, 0, 1), Some(Denied::OtherPd));
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone)]
pub struct Registry(Arc<Inner>);

pub(super) struct Inner {
    /// What clients know the device by.
    name: String,
    table: Table,
    keys: Mutex<Keys>,
    /// Device memory in use, so that registrations of one allocation share its window.
    devices: Mutex<Vec<Weak<DeviceMemory>>>,
    unsettled: Arc<Unsettled>,
    /// What users of memory on demand have concluded.
    conclusions: Arc<Conclusions>,
    /// Whom to ask whose an address is, in this order.
    clients: RwLock<Vec<Arc<dyn PeerClient>>>,
    /// Who tells other processes of registrations.
    watch: OnceLock<Arc<dyn Watch>>,
}

impl Inner {
    /// Takes a registration off its key, whose memory is going away. The key stays its owner's.
    pub(super) fn take_off(&self, key: u32) -> Option<Registration> {
        // First those who need no packets: they do not look at the gate.
        if let Some(watch) = self.watch.get() {
            watch.closing(key);
        }
        let taken = self.table.get(key >> 8)?.0.close(key & TAG | USED | GONE);
        if let Some(Registration { target: Target::Device { memory, .. }, .. }) = &taken {
            memory.let_go();
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
    pub(super) named: Named,
    pub(super) got: Option<Got>,
    pub(super) tie: Option<Arc<Tie>>,
    pub(super) pin: Option<Pin>,
}

impl Default for Provenance {
    fn default() -> Self {
        Self { named: Named::Handle, got: None, tie: None, pin: None }
    }
}

impl Registry {
    /// An empty registry, whose clients are the host, CUDA and the simulator.
    pub fn new() -> Self {
        Self::named("soft")
    }

    /// The same, of a device with that name.
    pub fn named(name: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
            name: name.into(),
            table: Table::default(),
            keys: Mutex::default(),
            devices: Mutex::default(),
            unsettled: Arc::default(),
            conclusions: Arc::default(),
            clients: RwLock::new(clients::all()),
            watch: OnceLock::new(),
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
    pub fn pd(&self) -> Pd {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Pd(Arc::new(PdId(NEXT.fetch_add(1, Ordering::Relaxed))))
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
        pd: &Pd,
        memory: impl Into<Memory>,
        iova: Option<u64>,
        access: Access,
    ) -> Result<Mr> {
        self.admit(pd, memory.into(), iova, access, Provenance::default())
    }

    /// Registers `len` bytes at `address`, whosever they are: the clients are asked in turn.
    ///
    /// With [`Access::ON_DEMAND`], host memory is looked up at each use: unmapping it makes work fail and harms
    /// nothing. Without, an unmapped page under a registration is a fault of this process.
    ///
    /// ```
    /// use warpwire::mr::{Access, Path, Registry};
    /// let registry = Registry::new();
    /// let words: Vec<_> = (0..512).map(std::sync::atomic::AtomicU64::new).collect();
    /// let at = words.as_ptr().addr() as u64;
    /// // SAFETY: the words outlive the registration, and are atomics, which peers may change.
    /// let mr = unsafe { registry.register_address(&registry.pd(), at, 4096, None, Access::ALL) }?;
    /// assert_eq!((mr.client(), mr.path()), (Some("host"), Path::Host));
    /// // SAFETY: nothing is there, which is found out.
    /// let nobody = unsafe { registry.register_address(&registry.pd(), 4096, 64, None, Access::ALL) };
    /// assert!(nobody.unwrap_err().to_string().contains("nobody knows the address"));
    /// # Ok::<(), warpwire::Error>(())
    /// ```
    ///
    /// # Safety
    /// What [`Memory::raw`] and [`Device::borrow`](crate::mem::Device::borrow) ask for, whichever sort of memory it is:
    /// it stays until the registration has ended or its client has taken it back, and what peers may write is
    /// touched by atomic or volatile accesses only.
    #[allow(unsafe_code)]
    pub unsafe fn register_address(
        &self,
        pd: &Pd,
        address: u64,
        len: u64,
        iova: Option<u64>,
        access: Access,
    ) -> Result<Mr> {
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
            let tie = Arc::new(Tie::new());
            let invalidate = Invalidate { tie: tie.clone(), registry: Arc::downgrade(&self.0) };
            let writes = access.contains(Access::LOCAL_WRITE);
            let got = Got::get(pages, self.0.name.clone(), writes, invalidate);
            let (got, memory) = got.map_err(|error| error.during(what()))?;
            let page_size = got.page_size();
            if memory.len() != len {
                let why = format!("client {name} gave {} bytes for them", memory.len());
                return Err(Error::new(Kind::InvalidArgument, what()).why(why));
            }
            let named = Named::Address { client: name, persistence, page_size };
            let provenance = Provenance { named, got: Some(got), tie: Some(tie), pin: None };
            // The memory may have an address of its own, which is not the one that it was named by.
            let own = (!access.contains(Access::ZERO_BASED)).then_some(address);
            return self.admit(pd, memory, iova.or(own), access, provenance);
        }
        let why = format!("nobody knows the address ({})", refusals.join("; "));
        Err(Error::new(Kind::NotDeviceMemory, what()).why(why).fix(
            "pass memory that is mapped in this process or allocated on a GPU of it, all of it",
        ))
    }

    /// What all registrations have in common.
    pub(super) fn admit(
        &self,
        pd: &Pd,
        memory: Memory,
        iova: Option<u64>,
        access: Access,
        provenance: Provenance,
    ) -> Result<Mr> {
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
            true => memory.on_demand(access, &self.0.conclusions, &mut notes)?,
            false => memory,
        };
        let (target, reached) = self.target(memory)?;
        let Provenance { named, got, tie, pin } = provenance;
        let (id, _pd) = (pd.id(), pd.clone());
        let registration = Registration { pd: id, access, iova, len, target, got, _pin: pin, _pd };
        let publish = || self.publish(registration);
        let key = match &tie {
            None => publish()?,
            Some(tie) => tie.bind(publish).unwrap_or_else(|| {
                let why = "its owner took it back meanwhile".to_owned();
                Err(failure(Kind::Freed, why))
            })?,
        };
        let (registry, pd) = (self.clone(), pd.clone());
        Ok(Mr { registry, key, pd, iova, len, access, reached, named, notes, tie })
    }

    /// How memory is reached, for work and for those who ask.
    fn target(&self, memory: Memory) -> Result<(Target, Reached)> {
        let address = memory.address();
        Ok(match memory.what {
            What::Host { range, path } => (Target::Host(range), Reached::Fixed(path)),
            What::Device { region, how } => {
                let memory = self.device(&region, &how)?;
                (Target::Device { memory: memory.clone(), region }, Reached::Device(memory))
            }
            What::OnDemand(memory) => {
                let reach = memory.clone();
                (Target::Reached { reach, address }, Reached::OnDemand(memory))
            }
            What::Reached { reach, .. } => {
                (Target::Reached { reach, address }, Reached::Fixed(super::Path::PeerMemory))
            }
        })
    }

    /// Puts a registration under a new key.
    fn publish(&self, registration: Registration) -> Result<u32> {
        let full = || {
            Error::new(Kind::OutOfMemory, "register memory")
                .why("every key is in use")
                .fix("deregister what is no longer needed")
        };
        let key = self.0.keys.lock().take().ok_or_else(full)?;
        let slot = self.0.table.make(key >> 8).ok_or_else(full)?;
        // Before the gate opens: from then on a peer's message may close the key again.
        self.tell_opened(export::export(key, &registration));
        // The index was free, so its gate is closed.
        slot.0.open(key & TAG | USED, registration).map_err(|_| full())?;
        Ok(key)
    }

    pub(super) fn watcher(&self) -> &OnceLock<Arc<dyn Watch>> {
        &self.0.watch
    }

    /// The registration of a key, if peers may use it.
    pub(super) fn enter_for_peer(&self, key: u32) -> Option<Inside<'_, Registration>> {
        let wanted = key & TAG | USED;
        self.0.table.get(key >> 8)?.0.enter(|label| label == wanted).ok()
    }

    /// The shared state of the device memory that a region is of.
    fn device(&self, region: &Region, how: &How) -> Result<Arc<DeviceMemory>> {
        let mut devices = self.0.devices.lock();
        devices.retain(|known| known.strong_count() > 0);
        let mut known = devices.iter().filter_map(Weak::upgrade);
        if let Some(memory) = known.find(|memory| memory.is_for(region.allocation(), how)) {
            return Ok(memory);
        }
        let memory = DeviceMemory::open(region.allocation(), how, &self.0.unsettled)?;
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
    ) -> std::result::Result<Span<'_>, Denied> {
        if len == 0 {
            return Ok(Span::empty());
        }
        let slot = self.0.table.get(key >> 8).ok_or(Denied::Unknown)?;
        // Peers are shut out by a label; those of this side pass in either case.
        let shut_too = if need.is_remote() { 0 } else { SHUT };
        let wanted = key & TAG | USED;
        let inside = slot
            .0
            .enter(|label| label & !shut_too == wanted)
            .map_err(|(label, open)| reason(label, open, wanted))?;
        if inside.pd != pd {
            return Err(Denied::OtherPd);
        }
        if !inside.access.contains(need) {
            return Err(Denied::Rights);
        }
        let offset = place(inside.iova, inside.len, address, len).ok_or(Denied::Range)?;
        match &inside.target {
            Target::Host(_) => {}
            Target::Device { memory, region } => memory.check(region.offset() + offset, len)?,
            Target::Reached { reach, .. } => {
                let writes =
                    need.contains(Access::LOCAL_WRITE) || need.contains(Access::REMOTE_WRITE);
                reach.check(offset, len, writes)?;
            }
        }
        Ok(Span::new(inside, offset, len))
    }

    /// Ends remote use of a key, as a peer's message asked for: to let peers in again, register anew.
    /// Local use goes on. When it returns, no peer's access is under way any more; the caller must hold no
    /// [`Span`] of the key.
    pub fn invalidate(&self, rkey: u32, pd: PdId) -> std::result::Result<(), Denied> {
        let slot = self.0.table.get(rkey >> 8).ok_or(Denied::Unknown)?;
        let wanted = rkey & TAG | USED;
        {
            let denied = |(label, open)| reason(label, open, wanted);
            let inside = slot.0.enter(|label| label == wanted).map_err(denied)?;
            if inside.pd != pd {
                return Err(Denied::OtherPd);
            }
            if !inside.access.is_remote() {
                return Err(Denied::Rights);
            }
        }
        // Somebody may have come first in between: then the key is ended or invalid already.
        match slot.0.turn(wanted, wanted | SHUT) {
            true => {
                self.tell_closing(rkey);
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
        self.0.unsettled.wait();
        word::store_fence();
    }

    /// A connection has failed: memory on demand that was refused is looked for again when it is next used.
    pub fn conclude(&self) {
        self.0.conclusions.draw();
    }

    /// Waits until all that was placed in memory without a window is there; where there is none, it costs nothing.
    /// Says whether all of it is, since this was last asked: a device that fails on the way loses what it had taken.
    #[inline]
    pub fn settle(&self) -> bool {
        self.0.unsettled.settle()
    }

    /// Whether a key has its memory.
    pub(super) fn is_live(&self, key: u32) -> bool {
        self.0.table.get(key >> 8).is_some_and(|slot| {
            let (label, open) = slot.0.peek();
            open && label & TAG == key & TAG
        })
    }

    /// Ends the registration of a key: see [`Mr::deregister`].
    pub(super) fn end(&self, key: u32) {
        if let Some(slot) = self.0.table.get(key >> 8) {
            // First those who need no packets: they do not look at the gate.
            self.tell_closing(key);
            let ended = slot.0.close(key & TAG | USED);
            // All that was placed through it is there, now that nothing more can come.
            self.0.unsettled.wait();
            // Before the index can be used again, so that memory is free when the key is.
            drop(ended);
            self.0.keys.lock().give_back(key);
        }
    }
}

/// Where a range lies in memory of `total` bytes that begins at `iova`, if it lies inside. `len` is not zero.
#[inline]
fn place(iova: u64, total: u64, address: u64, len: u64) -> Option<u64> {
    let offset = address.checked_sub(iova)?;
    (offset < total && len <= total - offset).then_some(offset)
}

/// Why a slot with this label does not take a key.
#[cold]
fn reason(label: u32, open: bool, wanted: u32) -> Denied {
    match (label & USED != 0, open) {
        (false, _) => Denied::Unknown,
        (true, false) if label & !SHUT == wanted | GONE => Denied::Gone,
        (true, true) if label & !SHUT == wanted => Denied::Invalidated,
        _ => Denied::Stale,
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
            let inside = address >= iova && wide(address) + wide(len) <= wide(iova) + wide(total);
            prop_assert_eq!(place(iova, total, address, len), inside.then(|| address - iova));
        }
    }
}
