//! Lists of memory ranges, checked, and their registrations looked up.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use super::memory::Registered;
use super::peer::{Peer, RemoteMemory};
use super::progress::Shared;
use super::transfer::TransferOp;
use crate::error::{Error, Kind, Result};
use crate::units;
use crate::verbs::{ListRange, Mr, RangeList};

/// The longest work request: a transfer is cancelled between two of them.
const MAX_PIECE: u64 = 64 << 20;
/// The shortest part that a range is split into, to be spread over queue pairs.
const MIN_STRIPE: u64 = 256 << 10;
/// Fewer pieces are not posted as a list.
const MIN_LIST: usize = 4;
/// From these numbers on, a list waits for the peer's memory to be mapped.
const LONG_BYTES: u64 = 256 << 10;
const LONG_PIECES: usize = 1000;

/// A range of memory: of this process in a local list, of the peer's in a remote one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Descriptor {
    /// Address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Descriptor {
    /// A range.
    pub const fn new(address: u64, len: u64) -> Self {
        Self { address, len }
    }

    pub(super) fn is_within(self, start: u64, len: u64) -> bool {
        let offset = self.address.wrapping_sub(start);
        self.address >= start && offset <= len && self.len <= len - offset
    }

    pub(super) fn within(start: u64, len: u64, offset: u64, count: u64) -> Result<Self> {
        if offset > len || count > len - offset {
            let what = format!("use {count} bytes at offset {offset}");
            let why = format!("the registration has {}", units::bytes(len));
            return Err(Error::new(Kind::OutOfRange, what).why(why));
        }
        Ok(Self { address: start + offset, len: count })
    }
}

/// Two lists of ranges that were checked and looked up, to be posted any number of times. Keeps the
/// local memory registered.
#[derive(Clone, Debug)]
pub struct PreparedTransfer(pub(super) Arc<Lists>);

pub(super) struct Lists {
    pub peer: Peer,
    /// Work requests of a transfer: neighbours merged, long ranges split. The indices are those of
    /// registrations.
    pub pieces: Arc<[ListRange]>,
    pub bytes: u64,
    descriptors: usize,
    /// Keeps them registered.
    _memory: Vec<Arc<Registered>>,
    /// Keys of the registrations, `rails` each.
    pub lkeys: Vec<u32>,
    pub rkeys: Vec<u32>,
    pub rails: usize,
    /// The pieces as lists for a GPU, once they are needed: to write, and to read.
    lists: [OnceLock<Vec<Arc<RangeList>>>; 2],
}

impl std::fmt::Debug for Lists {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { peer, descriptors, bytes, .. } = self;
        write!(f, "{descriptors} ranges of {bytes} bytes and {:?}", peer.name())
    }
}

impl PreparedTransfer {
    pub(super) fn new(
        agent: &Arc<Shared>,
        peer: &Peer,
        local: &[Descriptor],
        remote: &[Descriptor],
    ) -> Result<Self> {
        let wrong = |why: String| Error::new(Kind::InvalidArgument, "prepare a transfer").why(why);
        if !peer.belongs_to(agent) {
            return Err(wrong(format!("peer {:?} was added to another agent", peer.name())));
        }
        if local.len() != remote.len() {
            let why = format!("{} local ranges for {} remote ones", local.len(), remote.len());
            return Err(wrong(why).fix("give lists of the same length"));
        }
        let (rails, count) = (agent.rails.len(), local.len());
        let mut pieces = Pieces { all: Vec::with_capacity(local.len()), bytes: 0 };
        let known = peer.snapshot();
        let (local_found, remote_found) = (Found::default(), Found::default());
        let mut find =
            Finder { agent, peer, known: &known, local: local_found, remote: remote_found };
        for (index, (here, there)) in local.iter().zip(remote).enumerate() {
            if here.len != there.len {
                let why = format!(
                    "range {index} has {} bytes here and {} at the peer",
                    here.len, there.len
                );
                return Err(wrong(why));
            }
            if here.len > 0 {
                let piece = ListRange {
                    local: here.address,
                    remote: there.address,
                    len: 0,
                    local_key: find.local(index, *here)?,
                    remote_key: find.remote(index, *there)?,
                };
                pieces.add(piece, here.len);
            }
        }
        let Finder { local, remote, .. } = find;
        let lkeys = local.all.iter().flat_map(|memory| memory.mrs.iter().map(Mr::lkey)).collect();
        let rkeys = remote.all.iter().flat_map(|memory| memory.rkeys().iter().copied()).collect();
        pieces.stripe(agent.lanes_per_connection() as u64);
        Ok(Self(Arc::new(Lists {
            peer: peer.clone(),
            pieces: pieces.all.into(),
            bytes: pieces.bytes,
            descriptors: count,
            _memory: local.all,
            lkeys,
            rkeys,
            rails,
            lists: Default::default(),
        })))
    }

    /// The peer.
    pub fn peer(&self) -> &Peer {
        &self.0.peer
    }

    /// Bytes in all.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Work requests that a transfer posts: neighbouring ranges are merged, long ones are split.
    pub fn work_requests(&self) -> usize {
        self.0.pieces.len()
    }
}

impl Lists {
    /// Whether waiting for a GPU to execute it is faster than to post it piece by piece.
    pub(super) fn is_long(&self) -> bool {
        self.bytes >= LONG_BYTES || self.pieces.len() >= LONG_PIECES
    }

    /// The pieces as lists that a GPU may execute, in order; empty if that gains nothing.
    pub(super) fn range_lists(&self, op: TransferOp) -> &[Arc<RangeList>] {
        match self.pieces.len() < MIN_LIST {
            true => &[],
            false => self.all_range_lists(op),
        }
    }

    /// The same, however few they are.
    pub(super) fn all_range_lists(&self, op: TransferOp) -> &[Arc<RangeList>] {
        let (at, writes) = match op {
            TransferOp::Write => (0, true),
            TransferOp::Read => (1, false),
        };
        self.lists[at].get_or_init(|| {
            let of_first_rail = |keys: &[u32]| -> Vec<u32> {
                keys.iter().copied().step_by(self.rails.max(1)).collect()
            };
            let (local, remote) = (of_first_rail(&self.lkeys), of_first_rail(&self.rkeys));
            RangeList::divide(&self.pieces, (&local, &remote), writes)
        })
    }
}

/// Pieces in the making.
struct Pieces {
    all: Vec<ListRange>,
    bytes: u64,
}

impl Pieces {
    /// Adds `len` bytes: to the last piece if they follow it on both sides, else as new pieces.
    fn add(&mut self, mut piece: ListRange, mut len: u64) {
        self.bytes += len;
        if let Some(last) = self.all.last_mut()
            && (last.local_key, last.remote_key) == (piece.local_key, piece.remote_key)
            && last.local + u64::from(last.len) == piece.local
            && last.remote + u64::from(last.len) == piece.remote
        {
            let more = len.min(MAX_PIECE - u64::from(last.len));
            last.len += more as u32;
            piece.local += more;
            piece.remote += more;
            len -= more;
        }
        while len > 0 {
            let step = len.min(MAX_PIECE);
            self.all.push(ListRange { len: step as u32, ..piece });
            piece.local = piece.local.wrapping_add(step);
            piece.remote = piece.remote.wrapping_add(step);
            len -= step;
        }
    }

    /// Splits pieces so that all of `lanes` queue pairs have some.
    fn stripe(&mut self, lanes: u64) {
        let part = self.bytes.div_ceil(lanes).next_multiple_of(64 << 10).max(MIN_STRIPE);
        if lanes == 1 || self.all.iter().all(|piece| u64::from(piece.len) <= part) {
            return;
        }
        let whole = std::mem::take(&mut self.all);
        for mut piece in whole {
            let mut len = u64::from(piece.len);
            while len > 0 {
                let step = len.min(part);
                self.all.push(ListRange { len: step as u32, ..piece });
                piece.local = piece.local.wrapping_add(step);
                piece.remote = piece.remote.wrapping_add(step);
                len -= step;
            }
        }
    }
}

/// Finds registrations. Lists use few of them often: those found are kept by address.
struct Finder<'a> {
    agent: &'a Shared,
    peer: &'a Peer,
    known: &'a [RemoteMemory],
    local: Found<Arc<Registered>>,
    remote: Found<&'a RemoteMemory>,
}

struct Found<T> {
    all: Vec<T>,
    /// Index, start and length of the last one used.
    last: (u32, u64, u64),
    /// The same of others, by start.
    by_start: BTreeMap<u64, (u32, u64)>,
}

impl<T> Default for Found<T> {
    fn default() -> Self {
        Self { all: Vec::new(), last: (0, 0, 0), by_start: BTreeMap::new() }
    }
}

impl<T: PartialEq> Found<T> {
    fn get(&mut self, range: Descriptor) -> Option<u32> {
        let (index, start, len) = self.last;
        if range.is_within(start, len) {
            return Some(index);
        }
        let (&start, &(index, len)) = self.by_start.range(..=range.address).next_back()?;
        if !range.is_within(start, len) {
            return None;
        }
        self.last = (index, start, len);
        Some(index)
    }

    fn add(&mut self, found: T, start: u64, len: u64) -> u32 {
        // Those that overlap are found again and again.
        let at = self.all.iter().position(|known| *known == found);
        let index = at.unwrap_or_else(|| {
            self.all.push(found);
            self.all.len() - 1
        }) as u32;
        self.last = (index, start, len);
        self.by_start.insert(start, (index, len));
        index
    }
}

impl Finder<'_> {
    fn local(&mut self, index: usize, range: Descriptor) -> Result<u32> {
        if let Some(at) = self.local.get(range) {
            return Ok(at);
        }
        let found = self.agent.memory.find(range).ok_or_else(|| {
            unregistered(index, range)
                .why("it is not in memory that is registered with this agent")
                .fix("register the memory first, and give its address")
        })?;
        let (start, len) = (found.address(), found.len());
        Ok(self.local.add(found, start, len))
    }

    fn remote(&mut self, index: usize, range: Descriptor) -> Result<u32> {
        if let Some(at) = self.remote.get(range) {
            return Ok(at);
        }
        // Sorted by address; registrations may overlap.
        let end = self.known.partition_point(|memory| memory.address() <= range.address);
        let contains = |memory: &&RemoteMemory| range.is_within(memory.address(), memory.len());
        let found = self.known[..end].iter().rev().find(contains).ok_or_else(|| {
            let name = self.peer.name();
            unregistered(index, range)
                .why(format!("it is not in memory that peer {name:?} has registered"))
                .fix("get the peer's metadata again, and add it with add_peer")
        })?;
        Ok(self.remote.add(found, found.address(), found.len()))
    }
}

#[cold]
fn unregistered(index: usize, range: Descriptor) -> Error {
    let Descriptor { address, len } = range;
    Error::new(Kind::OutOfRange, format!("use range {index}: {len} bytes at {address:#x}"))
}
