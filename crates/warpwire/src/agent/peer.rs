//! Other agents: what is known of them, and the connection to each.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};

use super::connection::Connection;
use super::metadata::{MemoryMetadata, Metadata};
use super::prepared::Descriptor;
use super::progress::Shared;
use crate::error::{Error, Kind, Result};

/// Another agent, as added to this one. Clones are the same peer.
#[derive(Clone)]
pub struct Peer(Arc<Inner>);

struct Inner {
    agent: Weak<Shared>,
    /// Without its memory.
    metadata: Metadata,
    /// Sorted by address.
    memory: RwLock<Arc<Vec<RemoteMemory>>>,
    link: Mutex<LinkState>,
}

enum LinkState {
    /// Connected, connecting, or to be connected when it is needed.
    Open(Option<Arc<Connection>>),
    /// Removed or replaced.
    Gone(Error),
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Peer({:?} at {})", self.name(), self.0.metadata.address)
    }
}

/// Memory that a peer has registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteMemory(MemoryMetadata);

impl RemoteMemory {
    /// The address of its first byte, in the peer's process.
    pub fn address(&self) -> u64 {
        self.0.address
    }

    /// Its length in bytes; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.0.len
    }

    /// What the peer says it is: `host`, or the device, such as `cuda:0`.
    pub fn kind(&self) -> &str {
        &self.0.kind
    }

    pub(super) fn rkeys(&self) -> &[u32] {
        &self.0.rkeys
    }

    /// A range of it.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] if it exceeds the memory.
    pub fn range(&self, offset: u64, len: u64) -> Result<Descriptor> {
        Descriptor::within(self.address(), self.len(), offset, len)
    }
}

impl Peer {
    pub(super) fn new(agent: &Arc<Shared>, mut metadata: Metadata) -> Self {
        let memory = std::mem::take(&mut metadata.memory);
        let peer = Self(Arc::new(Inner {
            agent: Arc::downgrade(agent),
            metadata,
            memory: RwLock::default(),
            link: Mutex::new(LinkState::Open(None)),
        }));
        peer.update(memory, false);
        peer
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.metadata.name
    }

    /// Its memory, by what is known of it, sorted by address.
    pub fn memory(&self) -> Vec<RemoteMemory> {
        self.snapshot().to_vec()
    }

    /// Whether it is connected now. It need not be: a transfer connects.
    pub fn is_connected(&self) -> bool {
        match &*self.0.link.lock() {
            LinkState::Open(Some(connection)) => connection.is_ready(),
            _ => false,
        }
    }

    /// How it is reached and why, one line per queue pair; empty while it is not connected.
    pub fn path(&self) -> Vec<String> {
        match &*self.0.link.lock() {
            LinkState::Open(Some(connection)) => connection.path(),
            _ => Vec::new(),
        }
    }

    pub(super) fn belongs_to(&self, agent: &Arc<Shared>) -> bool {
        std::ptr::eq(self.0.agent.as_ptr(), Arc::as_ptr(agent))
    }

    pub(super) fn metadata(&self) -> &Metadata {
        &self.0.metadata
    }

    pub(super) fn snapshot(&self) -> Arc<Vec<RemoteMemory>> {
        self.0.memory.read().clone()
    }

    /// Whether newer metadata is of the same process, at the same address.
    pub(super) fn is_same(&self, newer: &Metadata) -> bool {
        let known = &self.0.metadata;
        known.incarnation == newer.incarnation && known.address == newer.address
    }

    /// Replaces what is known of its memory, or adds to it. What is added replaces memory of the
    /// same address and length: the peer has registered it again, with other keys.
    pub(super) fn update(&self, memory: Vec<MemoryMetadata>, partial: bool) {
        let mut known = self.0.memory.write();
        let mut all = if partial { known.to_vec() } else { Vec::new() };
        let added: HashSet<_> = memory.iter().map(|new| (new.address, new.len)).collect();
        all.retain(|old| !added.contains(&(old.address(), old.len())));
        all.extend(memory.into_iter().map(RemoteMemory));
        all.sort_by(|a, b| {
            (a.address(), a.len(), a.rkeys()).cmp(&(b.address(), b.len(), b.rkeys()))
        });
        all.dedup();
        *known = Arc::new(all);
    }

    /// The connection to it; starts one if there is none, or if the last one has failed.
    pub(super) fn connection(&self, agent: &Arc<Shared>) -> Result<Arc<Connection>> {
        let mut link = self.0.link.lock();
        match &mut *link {
            LinkState::Gone(why) => Err(Error::new(Kind::Stale, "post a transfer")
                .why(why.reason().to_owned())
                .fix("add the peer's metadata again, and prepare with the new peer")),
            LinkState::Open(Some(connection)) if connection.is_usable() => Ok(connection.clone()),
            LinkState::Open(connection) => {
                let new = Connection::start(agent, self)?;
                *connection = Some(new.clone());
                Ok(new)
            }
        }
    }

    /// Ends the connection for good.
    pub(super) fn disconnect(&self, why: Error) {
        let before = std::mem::replace(&mut *self.0.link.lock(), LinkState::Gone(why.clone()));
        if let LinkState::Open(Some(connection)) = before {
            connection.fail(why);
        }
    }
}
