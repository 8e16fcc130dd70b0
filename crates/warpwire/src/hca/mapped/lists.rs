//! Lists: many ranges between device memory of this process and of a peer as one work request.
//!
//! A range that is posted as a work request of its own costs most of a microsecond, whatever its
//! length. A list is checked per key instead of per range, and is one launch. Its work request is a
//! NOP, to which the list is attached: that gives it its place in the send queue, and its
//! completion.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use warpwire_proto::Instant;
use warpwire_proto::qp::{SendWr as WireWork, State, Status};

use super::super::engine::Core;
use super::super::qpc::QpContext;
use super::super::stats::IndirectReason;
use super::device_copies::{DeviceCopies, ListCopy, PostedWork};
use super::peer::DirectPeer;
use super::rows::RemoteRows;
use super::{DirectOutcome, Mapped};
use crate::mem::{ListDescriptors, MAX_LIST, Region};
use crate::mr::{Access, Registry, Span};

/// Registrations of a side, at most: each access to one of the peer's is announced.
const MAX_KEYS: usize = 16;

/// A range of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ListRange {
    /// The address here, and at the peer.
    pub local: u64,
    pub remote: u64,
    pub len: u32,
    /// Indices of the keys.
    pub local_key: u32,
    pub remote_key: u32,
}

/// A list of writes or of reads, to be posted any number of times. Its ranges are moved in any
/// order.
#[derive(Debug)]
pub(crate) struct RangeList {
    ranges: Arc<[ListRange]>,
    /// Those of `ranges` that belong to this list.
    pub part: Range<usize>,
    writes: bool,
    local: Vec<UsedKey>,
    remote: Vec<UsedKey>,
    bytes: u64,
    /// For the memory that it was posted for last.
    descriptors: Mutex<Option<Arc<ListDescriptors>>>,
}

/// A key, and the addresses that the list uses of its registration.
#[derive(Clone, Debug)]
pub(super) struct UsedKey {
    index: u32,
    pub key: u32,
    pub start: u64,
    end: u64,
    pub bytes: u64,
}

impl UsedKey {
    pub(super) fn len(&self) -> u64 {
        self.end - self.start
    }
}

/// What became of an attempt to post a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListPost {
    Posted,
    /// The peer's memory is being mapped: later attempts may succeed.
    Mapping,
    /// It must be posted range by range.
    Refused,
}

/// A list that waits for its turn in a send queue.
#[derive(Debug)]
pub(super) struct PostedList {
    wqe_index: u64,
    list: Arc<RangeList>,
    descriptors: Arc<ListDescriptors>,
}

/// The memory of a list: a region per key.
pub(crate) struct ListRegions {
    pub to: Vec<Region>,
    pub from: Vec<Region>,
}

/// What a list needs to be executed, looked up. While it exists, deregistration waits.
struct Resolved<'a> {
    regions: ListRegions,
    spans: Vec<Span<'a>>,
    rows: Vec<RemoteRows>,
    /// Index of the GPU's lane.
    lane: usize,
}

impl RangeList {
    /// Lists of these ranges, as many as it takes; none if they use too many registrations. The
    /// keys' indices are those in `local_keys` and `remote_keys`.
    pub(crate) fn divide(
        ranges: &Arc<[ListRange]>,
        (local_keys, remote_keys): (&[u32], &[u32]),
        writes: bool,
    ) -> Vec<Arc<Self>> {
        let parts = (0..ranges.len()).step_by(MAX_LIST);
        let parts = parts.map(|start| start..ranges.len().min(start + MAX_LIST));
        let list = |part: Range<usize>| {
            let (mut local, mut remote, mut bytes) = (Vec::new(), Vec::new(), 0);
            for range in &ranges[part.clone()] {
                let len = u64::from(range.len);
                note(&mut local, range.local_key, local_keys, range.local, len)?;
                note(&mut remote, range.remote_key, remote_keys, range.remote, len)?;
                bytes += len;
            }
            let (ranges, descriptors) = (ranges.clone(), Mutex::default());
            Some(Arc::new(Self { ranges, part, writes, local, remote, bytes, descriptors }))
        };
        parts.map(list).collect::<Option<_>>().unwrap_or_default()
    }

    /// The descriptors of the copies between these regions; `None` if a range is outside of them.
    pub(crate) fn descriptors(&self, regions: &ListRegions) -> Option<Arc<ListDescriptors>> {
        let mut cached = self.descriptors.lock();
        if let Some(known) = &*cached
            && known.is_for(&regions.to, &regions.from)
        {
            return Some(known.clone());
        }
        let ListRegions { to, from } = regions;
        let ranges = &self.ranges[self.part.clone()];
        let mut made = ListDescriptors::new(to, from, ranges.len(), self.bytes);
        let (mut local, mut remote) = (Lookup::default(), Lookup::default());
        for range in ranges {
            let local = local.find(&self.local, range.local_key, range.local)?;
            let remote = remote.find(&self.remote, range.remote_key, range.remote)?;
            let (to, from) = if self.writes { (remote, local) } else { (local, remote) };
            if !made.push(to, from, range.len.into()) {
                return None;
            }
        }
        let made = Arc::new(made);
        *cached = Some(made.clone());
        Some(made)
    }
}

/// Adds a range to those used of its key; `None` if there are too many keys.
fn note(used: &mut Vec<UsedKey>, index: u32, keys: &[u32], start: u64, len: u64) -> Option<()> {
    let end = start.checked_add(len)?;
    // Mostly the same as before.
    let known = used.iter().rposition(|known| known.index == index);
    let at = match known {
        Some(at) => at,
        None if used.len() == MAX_KEYS => return None,
        None => {
            let key = *keys.get(index as usize)?;
            used.push(UsedKey { index, key, start, end, bytes: 0 });
            used.len() - 1
        }
    };
    let known = &mut used[at];
    (known.start, known.end) = (known.start.min(start), known.end.max(end));
    known.bytes += len;
    Some(())
}

/// Where in the regions an address is; remembers the last key.
#[derive(Default)]
struct Lookup(usize);

impl Lookup {
    fn find(&mut self, used: &[UsedKey], index: u32, address: u64) -> Option<(u32, u64)> {
        if used.get(self.0)?.index != index {
            self.0 = used.iter().position(|known| known.index == index)?;
        }
        Some((self.0 as u32, address.checked_sub(used[self.0].start)?))
    }
}

impl<'a> Resolved<'a> {
    fn new(
        peer: &mut DirectPeer,
        qpc: &mut QpContext,
        list: &RangeList,
        registry: &'a Registry,
        now: Instant,
        copies: &mut DeviceCopies,
    ) -> Result<Self, IndirectReason> {
        let (need, need_here) = match list.writes {
            true => (Access::REMOTE_WRITE, Access::NONE),
            false => (Access::REMOTE_READ, Access::LOCAL_WRITE),
        };
        let QpContext { qp, qp_memory, direct, .. } = qpc;
        let qp = qp.connection().ok_or(IndirectReason::QpNotReady)?;
        let row = peer.check_qp(qp, direct, need)?;
        let span = |used: &UsedKey| {
            registry.resolve(used.key, qp_memory.pd, need_here, used.start, used.len())
        };
        let spans: Result<Vec<_>, _> = list.local.iter().map(span).collect();
        let spans = spans.map_err(|_| IndirectReason::LocalMemory)?;
        let local: Option<Vec<Region>> = spans.iter().map(Span::device_region).collect();
        let local = local.ok_or(IndirectReason::LocalMemory)?;
        let device = local.first().ok_or(IndirectReason::LocalMemory)?.allocation().device();
        if local.iter().any(|region| region.allocation().device() != device) {
            return Err(IndirectReason::LocalMemory);
        }
        let (mut remote, mut rows, mut lane) = (Vec::new(), Vec::new(), 0);
        for used in &list.remote {
            let (memory, offset, generation) = peer.device_memory(used, direct.pd, need, now)?;
            let (opened, at) = match copies.open(memory, device) {
                Ok(opened) => opened,
                Err(why) => {
                    peer.request_next(used.key, now);
                    return Err(why);
                }
            };
            let region = opened.region(offset, used.len());
            remote.push(region.map_err(|_| IndirectReason::AccessDenied)?);
            rows.push(RemoteRows::new(row, direct.generation, used.key, generation));
            lane = at;
        }
        let (to, from) = if list.writes { (remote, local) } else { (local, remote) };
        Ok(Self { regions: ListRegions { to, from }, spans, rows, lane })
    }
}

impl Mapped {
    /// Starts the list that is attached to a NOP, if there is one.
    #[cold]
    pub(super) fn start_list(
        &mut self,
        qpc: &mut QpContext,
        work: &WireWork,
        registry: &Registry,
        now: Instant,
    ) -> Option<DirectOutcome> {
        if qpc.direct.lists.front()?.wqe_index != work.id {
            return None;
        }
        let next = qpc.direct.lists.pop_front()?;
        let outcome = match qpc.qp.state() {
            State::Rts if qpc.qp.outstanding() == 0 => {
                self.try_start_list(qpc, &next, work, registry, now)
            }
            State::Rts | State::Sqd => Ok(DirectOutcome::WaitForOutstanding),
            _ => return None, // to be flushed
        };
        match outcome {
            Ok(DirectOutcome::Started) => return Some(DirectOutcome::Started),
            Err(why) if qpc.direct.in_flight == 0 => {
                return Some(DirectOutcome::Failed(status(why)));
            }
            _ => {}
        }
        qpc.direct.lists.push_front(next);
        Some(outcome.unwrap_or(DirectOutcome::WaitForCopies))
    }

    fn try_start_list(
        &mut self,
        qpc: &mut QpContext,
        next: &PostedList,
        work: &WireWork,
        registry: &Registry,
        now: Instant,
    ) -> Result<DirectOutcome, IndirectReason> {
        let Self { peers, copies, .. } = self;
        let peer = peers.of(qpc).ok_or(IndirectReason::NoExports)?;
        let list = &next.list;
        let resolved = Resolved::new(peer, qpc, list, registry, now, copies)?;
        let ListRegions { to, from } = &resolved.regions;
        if !next.descriptors.is_for(to, from) {
            return Err(IndirectReason::Revoked);
        }
        let rows = resolved.rows.iter().zip(list.remote.iter().map(|used| used.bytes));
        let posted = PostedWork::new(qpc, work, list.bytes);
        let copy = ListCopy {
            descriptors: &next.descriptors,
            regions: &resolved.regions,
            spans: &resolved.spans,
            posted,
        };
        let outcome = copies.start_list(resolved.lane, &peer.peer, rows, &copy, now)?;
        if outcome == DirectOutcome::Started {
            qpc.direct.in_flight += 1;
        }
        Ok(outcome)
    }
}

/// The status of a list that was posted, and cannot be executed any more.
fn status(why: IndirectReason) -> Status {
    match why {
        IndirectReason::LocalMemory => Status::LocalProtection,
        IndirectReason::NoExports | IndirectReason::QpNotReady => Status::RetryExceeded,
        _ => Status::RemoteAccess,
    }
}

impl Core {
    /// The memory of a list, if the queue pair can execute the list now. If not, the peer's memory
    /// has been requested where that helps.
    pub(in crate::hca) fn list_regions(
        &mut self,
        index: u32,
        list: &RangeList,
    ) -> Result<ListRegions, IndirectReason> {
        let Self { qpcs, mapped, registry, last_step, .. } = self;
        let Some(Some(qpc)) = qpcs.get_mut(index as usize) else {
            return Err(IndirectReason::QpNotReady);
        };
        let peer = mapped.peers.of(qpc).ok_or(IndirectReason::NoExports)?;
        let resolved = Resolved::new(peer, qpc, list, registry, *last_step, &mut mapped.copies)?;
        Ok(resolved.regions)
    }

    /// Attaches a list to a NOP that is about to be posted at this index.
    pub(in crate::hca) fn attach_list(
        &mut self,
        index: u32,
        wqe_index: u64,
        list: Arc<RangeList>,
        descriptors: Arc<ListDescriptors>,
    ) {
        if let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) {
            qpc.direct.lists.push_back(PostedList { wqe_index, list, descriptors });
        }
    }
}
