//! Memory that is registered with an agent, and where it is found by address.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::metadata::MemoryMetadata;
use super::prepared::Descriptor;
use super::progress::Shared;
use super::stream_order;
use crate::error::{Error, Kind, Result};
use crate::mem::{self, DeviceAddr};
use crate::mr::{AccessPath, MemorySource};
use crate::verbs::Mr;

/// Memory that is registered with an [`Agent`](super::Agent). Dropping it ends the registration
/// when no [`PreparedTransfer`](super::PreparedTransfer) and no transfer in progress use it.
#[derive(Clone, Debug)]
pub struct Memory(Arc<Registered>);

/// A registration with each rail.
pub(super) struct Registered {
    number: u64,
    agent: Weak<Shared>,
    kind: String,
    address: u64,
    len: u64,
    pub mrs: Vec<Mr>,
    /// Keeps the memory allocated.
    owner: Option<Owner>,
}

/// Keeps memory allocated until its registration has ended.
pub(super) type Owner = Box<dyn Any + Send + Sync>;

impl std::fmt::Debug for Registered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at {:#x} ({})", self.len(), self.address(), self.kind)
    }
}

impl PartialEq for Registered {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(agent) = self.agent.upgrade() {
            agent.memory.0.lock().remove(&(self.address(), self.number));
        }
        if let Err(error) = self.deregister() {
            tracing::warn!(%error, memory = ?self, "a peer may still access memory");
        }
    }
}

impl Registered {
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    fn deregister(&mut self) -> Result<()> {
        let mrs = std::mem::take(&mut self.mrs);
        let deregistered = mrs.into_iter().map(Mr::deregister).fold(Ok(()), Result::and);
        if deregistered.is_err() {
            // A peer process that was stopped may access the memory when it continues.
            std::mem::forget(self.owner.take());
        }
        deregistered
    }

    pub(super) fn metadata(&self) -> MemoryMetadata {
        MemoryMetadata {
            address: self.address(),
            len: self.len(),
            kind: self.kind.clone(),
            rkeys: self.mrs.iter().map(Mr::rkey).collect(),
        }
    }
}

impl Memory {
    pub(super) fn new(
        agent: &Arc<Shared>,
        mrs: Vec<Mr>,
        kind: String,
        owner: Option<Owner>,
    ) -> Self {
        stream_order::load_kernels(agent, &kind);
        let number = agent.next_number();
        let agent_ref = Arc::downgrade(agent);
        let (address, len) = (mrs[0].iova(), mrs[0].len());
        let registered = Registered { number, agent: agent_ref, kind, address, len, mrs, owner };
        let registered = Arc::new(registered);
        let key = (registered.address(), number);
        agent.memory.0.lock().insert(key, (len, Arc::downgrade(&registered)));
        Self(registered)
    }

    pub(super) fn inner(&self) -> &Registered {
        &self.0
    }

    pub(super) fn belongs_to(&self, agent: &Arc<Shared>) -> bool {
        std::ptr::eq(self.0.agent.as_ptr(), Arc::as_ptr(agent))
    }

    /// The address of its first byte, by which transfers refer to it.
    pub fn address(&self) -> u64 {
        self.0.address()
    }

    /// Its length in bytes; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// What it is: `host`, or the device, such as `cuda:0`.
    pub fn kind(&self) -> &str {
        &self.0.kind
    }

    /// A range of it.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] if it exceeds the memory.
    pub fn range(&self, offset: u64, len: u64) -> Result<Descriptor> {
        Descriptor::within(self.address(), self.len(), offset, len)
    }

    /// How the device reaches it.
    pub fn path(&self) -> AccessPath {
        self.0.mrs[0].path()
    }

    /// Why it is not reached in a better way: one line per way that was tried.
    pub fn why(&self) -> Vec<String> {
        self.0.mrs[0].why()
    }

    /// Ends the registration: on success neither peers nor this agent access the memory any more.
    ///
    /// # Errors
    /// [`Kind::Busy`] if a clone, a prepared list or a transfer in progress uses it: it stays
    /// registered until they have ended. Also if a peer process was stopped while it accessed the
    /// memory: see [`Mr::deregister`].
    pub fn deregister(self) -> Result<()> {
        let what = format!("deregister {:?}", self.0);
        let mut registered = Arc::try_unwrap(self.0).map_err(|_| {
            Error::new(Kind::Busy, what)
                .why("a clone, a prepared list or a transfer in progress uses it")
                .fix("drop prepared lists, and wait for transfers or cancel them")
        })?;
        registered.deregister()
    }

    /// Whether a clone, a prepared list or a transfer in progress uses it, so that
    /// [`deregister`](Self::deregister) would fail.
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// All memory of an agent, by address and number, with its length.
// A strong reference must not be dropped under the lock: it may be the last.
#[derive(Default)]
pub(super) struct MemoryTable(Mutex<ByAddress>);

type ByAddress = BTreeMap<(u64, u64), (u64, Weak<Registered>)>;

impl MemoryTable {
    pub(super) fn all(&self) -> Vec<Arc<Registered>> {
        self.0.lock().values().filter_map(|(_, known)| known.upgrade()).collect()
    }

    /// The memory that contains a range. Registrations may overlap.
    pub(super) fn find(&self, range: Descriptor) -> Option<Arc<Registered>> {
        let table = self.0.lock();
        let before = table.range(..=(range.address, u64::MAX)).rev();
        let mut containing = before.filter(|((start, _), (len, _))| range.is_within(*start, *len));
        containing.find_map(|(_, (_, known))| known.upgrade())
    }
}

/// What memory is, for people.
pub(super) fn kind_of(memory: &MemorySource) -> String {
    match memory.device_region() {
        Some(region) => region.allocation().device().label(),
        None => "host".to_owned(),
    }
}

/// What the memory at an address is, for people.
pub(super) fn kind_at(address: u64) -> String {
    mem::owner_of(DeviceAddr::new(address))
        .map_or_else(|_| "host".to_owned(), |device| device.label())
}
