//! Registrations and their keys.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::access::Access;
use super::denied::Denied;
use super::device::DeviceMemory;
use super::export::{self, Watch};
use super::gate::Inside;
use super::host::HostRange;
use super::memory::{Memory, Path, What};
use super::span::Span;
use super::table::{MOST, Table};
use super::word;
use crate::error::{Error, Kind, Result};
use crate::mem::Region;
use crate::mlx5::INVALID_KEY;
use crate::units;

/// The index that no key has, so that zero is no key.
const RESERVED_INDEX: u32 = 0;
/// How many indexes rest before one is used again: with their tags, a key comes back after some 65 000
/// registrations at the earliest.
const RESTING: usize = 256;

/// The label of a slot's gate: the tag of its key, whether it was ever used, whether peers are shut out.
const TAG: u32 = 0xff;
const USED: u32 = 1 << 8;
const SHUT: u32 = 1 << 9;

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

/// What a key stands for.
pub(super) struct Registration {
    pd: PdId,
    access: Access,
    iova: u64,
    len: u64,
    pub(super) target: Target,
    /// The domain lives as long as its registrations.
    _pd: Pd,
}

impl Registration {
    pub(super) fn pd(&self) -> PdId {
        self.pd
    }

    pub(super) fn access(&self) -> Access {
        self.access
    }

    /// Its first address, and its length.
    pub(super) fn range(&self) -> (u64, u64) {
        (self.iova, self.len)
    }
}

/// Where the memory is.
pub(super) enum Target {
    Host(HostRange),
    Device { memory: Arc<DeviceMemory>, region: Region },
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
#[derive(Clone, Default)]
pub struct Registry(Arc<Inner>);

#[derive(Default)]
struct Inner {
    table: Table,
    keys: Mutex<Keys>,
    /// Device memory in use, so that registrations of one allocation share its window.
    devices: Mutex<Vec<Weak<DeviceMemory>>>,
    /// Who tells other processes of registrations.
    watch: OnceLock<Arc<dyn Watch>>,
}

/// Which keys are free.
struct Keys {
    /// Indexes from here on were never used.
    fresh: u32,
    /// Indexes whose registration has ended, with the tag that it had; the longest rested first.
    resting: VecDeque<(u32, u8)>,
    live: usize,
}

impl Default for Keys {
    fn default() -> Self {
        Self { fresh: RESERVED_INDEX + 1, resting: VecDeque::new(), live: 0 }
    }
}

impl Keys {
    fn take(&mut self) -> Option<u32> {
        let rested = self.resting.len() > RESTING || self.fresh == MOST;
        let key = match rested.then(|| self.resting.pop_front()).flatten() {
            Some((index, tag)) => index << 8 | u32::from(next_tag(index, tag)),
            None if self.fresh < MOST => {
                self.fresh += 1;
                let index = self.fresh - 1;
                index << 8 | u32::from(next_tag(index, 0))
            }
            None => return None,
        };
        self.live += 1;
        Some(key)
    }

    fn give_back(&mut self, key: u32) {
        self.live -= 1;
        self.resting.push_back((key >> 8, (key & TAG) as u8));
    }
}

/// The tag after `tag`; one key, hardware's own invalid one, is never made.
fn next_tag(index: u32, tag: u8) -> u8 {
    let next = tag.wrapping_add(1);
    if index << 8 | u32::from(next) == INVALID_KEY { next.wrapping_add(1) } else { next }
}

impl Registry {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
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
        let memory = memory.into();
        let (address, len) = (memory.address(), memory.len());
        let failure = |kind, why: String| {
            let what = format!("register {} at {address:#x}", units::bytes(len));
            Error::new(kind, what).why(why)
        };
        access.check()?;
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
        let target = match memory.what {
            What::Host(range) => Target::Host(range),
            What::Device { region, how } => {
                Target::Device { memory: self.device(&region, &how)?, region }
            }
        };
        let (path, why, device) = match &target {
            Target::Host(_) => (Path::Host, Vec::new(), None),
            Target::Device { memory, .. } => {
                let (path, why) = memory.path();
                (path, why, Some(memory.clone()))
            }
        };
        let registration = Registration { pd: pd.id(), access, iova, len, target, _pd: pd.clone() };
        let key = self.publish(registration)?;
        Ok(Mr { registry: self.clone(), key, pd: pd.clone(), iova, len, access, path, why, device })
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
    fn device(&self, region: &Region, how: &super::memory::How) -> Result<Arc<DeviceMemory>> {
        let mut devices = self.0.devices.lock();
        devices.retain(|known| known.strong_count() > 0);
        let mut known = devices.iter().filter_map(Weak::upgrade);
        if let Some(memory) = known.find(|memory| memory.is_for(region.allocation(), how)) {
            return Ok(memory);
        }
        let memory = DeviceMemory::open(region.allocation(), how)?;
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
        if let Target::Device { memory, .. } = &inside.target {
            memory.check()?;
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
        word::store_fence();
    }

    /// Ends the registration of a key: see [`Mr::deregister`].
    fn end(&self, key: u32) {
        if let Some(slot) = self.0.table.get(key >> 8) {
            // First those who need no packets: they do not look at the gate.
            self.tell_closing(key);
            // Dropped before the index can be used again, so that memory is free when the key is.
            drop(slot.0.close(key & TAG | USED));
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
        (true, true) if label & !SHUT == wanted => Denied::Invalidated,
        _ => Denied::Stale,
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registry({} registrations)", self.len())
    }
}

/// A memory registration. Dropping it ends it.
///
/// ```
/// use warpwire::mem::sim::{Sim, SimConfig};
/// use warpwire::mr::{Access, Memory, Path, Registry};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let registry = Registry::new();
/// let memory = gpu.alloc(1 << 20).unwrap();
/// let direct = registry.register(&registry.pd(), memory.whole().unwrap(), None, Access::ALL).unwrap();
/// assert!(matches!(direct.path(), Path::Window(_)));
/// let slow = Memory::from(memory.whole().unwrap()).without_window();
/// let slow = registry.register(&registry.pd(), slow, None, Access::ALL).unwrap();
/// assert_eq!(slow.path(), Path::Engine);
/// assert_eq!(slow.why(), ["no window: it was registered without one"]);
/// ```
pub struct Mr {
    registry: Registry,
    key: u32,
    pd: Pd,
    iova: u64,
    len: u64,
    access: Access,
    path: Path,
    why: Vec<String>,
    device: Option<Arc<DeviceMemory>>,
}

impl Mr {
    /// The key for this side's work requests.
    pub fn lkey(&self) -> u32 {
        self.key
    }

    /// The key for peers; the same one.
    pub fn rkey(&self) -> u32 {
        self.key
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Pd {
        &self.pd
    }

    /// The address of its first byte, in work requests.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// How many bytes.
    #[allow(clippy::len_without_is_empty)] // no registration is empty
    pub fn len(&self) -> u64 {
        self.len
    }

    /// What may be done with it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// How the memory is reached.
    pub fn path(&self) -> Path {
        self.path
    }

    /// Why it is not reached in better ways, and what is not as it should be; empty where all is well.
    pub fn why(&self) -> &[String] {
        &self.why
    }

    /// The device's last failure, after a [`Denied::Failed`].
    pub fn failure(&self) -> Option<Error> {
        self.device.as_ref().and_then(|memory| memory.failure())
    }

    /// Ends the registration. When it returns, nobody uses the memory through it, and the key is dead.
    ///
    /// It waits for copies under way. A thread that holds a [`Span`] of it would wait for itself.
    pub fn deregister(self) {}
}

impl Drop for Mr {
    fn drop(&mut self) {
        self.registry.end(self.key);
    }
}

impl fmt::Debug for Mr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (key, len, iova) = (self.key, self.len, self.iova);
        write!(f, "Mr({key:#x}, {len} bytes at {iova:#x}, {}, {})", self.access, self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn keys_rest_wrap_and_never_are_the_invalid_one() {
        let mut keys = Keys::default();
        let mut recent = VecDeque::new();
        let mut seen_recently = HashSet::new();
        for round in 0..200_000u32 {
            let key = keys.take().unwrap();
            assert!(key >> 8 != RESERVED_INDEX && key != INVALID_KEY, "{key:#x}");
            assert!(seen_recently.insert(key), "{key:#x} came back at round {round}");
            recent.push_back(key);
            if recent.len() > 60_000 {
                seen_recently.remove(&recent.pop_front().unwrap());
            }
            keys.give_back(key);
        }
        assert!(keys.fresh < 300, "indexes are used again");
        assert_eq!(keys.live, 0);
    }

    #[test]
    fn the_last_index_is_the_last() {
        let mut keys = Keys { fresh: MOST - 1, ..Keys::default() };
        let last = keys.take().unwrap();
        assert_eq!(last >> 8, MOST - 1);
        assert_eq!(keys.take(), None);
        keys.give_back(last);
        // No rest when there is no other.
        assert_eq!(keys.take(), Some(last + 1));
    }

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
