//! Copies between device memory of this process and of a peer, executed by the GPU.
//!
//! A driver call costs some microseconds whatever it does, so what queue pairs post while copies
//! are in flight is gathered and becomes one launch. Batches of one GPU run in order. In a batch,
//! copies run concurrently: no target overlaps another target or a source. The last word of each
//! message is stored after all other bytes of its batch, because a program may be waiting for it.
//!
//! Completion is seen by a load from host memory. No call here waits for the GPU.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use warpwire_proto::Instant;
use warpwire_proto::qp::{SendOp, SendWr as WireWork};

use super::super::qpc::{QpContext, QpMemory};
use super::super::stats::IndirectReason;
use super::imported::{ImportState, ImportedMemory};
use super::lists::ListRegions;
use super::rows::RemoteRows;
use super::{DirectOutcome, DirectState};
use crate::error::Error;
use crate::link::{DeviceAccess, ShmPeer};
use crate::mem::{
    Allocation, CopyQueue, CopyTicket, Device, DeviceCopy, ListDescriptors, MAX_BATCH, MAX_BATCHES,
};
use crate::mlx5::DataSegment;
use crate::mr::{Access, PdId, Registry, Span};

/// Shorter operations are faster as packets, whose payload goes through CPU windows.
pub(super) const MIN_COPY: u32 = 16 << 10;
/// From this length on, work waits until the peer's memory is opened, instead of using packets.
pub(super) const MIN_WAIT: u32 = 256 << 10;
/// For so long at most: as long as packets would take, and this.
const MIN_WAIT_LIMIT: Duration = Duration::from_millis(100);
/// Nanoseconds that packets take for a byte of device memory, about.
const PACKET_NANOS_PER_BYTE: f64 = 0.5;
/// Batches in flight before more copies are gathered.
const MAX_IN_FLIGHT: usize = 2;
/// Segments of a work request, at most; others use packets.
const MAX_SEGMENTS: usize = 32;
/// A batch that takes this long makes the engine ask the driver whether the GPU has failed.
const CHECK_AFTER: Duration = Duration::from_millis(200);
/// How long closing the device waits for copies in flight.
const FINISH_LIMIT: Duration = Duration::from_secs(2);

/// How long work of this length waits for the peer's memory.
pub(super) fn max_wait(len: u32) -> Duration {
    MIN_WAIT_LIMIT + Duration::from_nanos((f64::from(len) * PACKET_NANOS_PER_BYTE) as u64)
}

/// The copies of an engine.
#[derive(Default)]
pub(super) struct DeviceCopies {
    lanes: Vec<Lane>,
    /// Work whose copies have ended, and whether they succeeded.
    ended: VecDeque<(PostedWork, bool)>,
}

/// Work that is being copied.
#[derive(Clone, Copy, Debug)]
pub(super) struct PostedWork {
    pub index: u32,
    pub qpn: u32,
    /// [`DirectState::resets`] when it was started.
    pub resets: u32,
    pub work: WireWork,
    pub bytes: u64,
}

impl PostedWork {
    pub(super) fn new(qpc: &QpContext, work: &WireWork, bytes: u64) -> Self {
        let (index, qpn, resets) = (qpc.index, qpc.qp.number(), qpc.direct.resets);
        Self { index, qpn, resets, work: *work, bytes }
    }
}

/// A list to be copied.
pub(super) struct ListCopy<'a> {
    pub descriptors: &'a ListDescriptors,
    pub regions: &'a ListRegions,
    /// The local memory.
    pub spans: &'a [Span<'a>],
    pub posted: PostedWork,
}

/// Copies of one GPU.
struct Lane {
    queue: CopyQueue,
    /// Gathers copies.
    open: Batch,
    in_flight: VecDeque<Batch>,
    /// Batches that have ended, for their capacity.
    spare: Vec<Batch>,
    /// The copies of the work request that is being started; kept for its capacity.
    pending: Vec<DeviceCopy>,
    /// When the driver was asked last, or a batch ended.
    checked: Instant,
    failed: bool,
}

#[derive(Default)]
struct Batch {
    number: u64,
    ticket: Option<CopyTicket>,
    copies: Vec<DeviceCopy>,
    /// The same as addresses and length: target, source, bytes.
    ranges: Vec<[u64; 3]>,
    works: Vec<PostedWork>,
    accesses: Vec<DeviceAccess>,
    /// The addresses between the first and the last target, and source.
    targets: Range<u64>,
    sources: Range<u64>,
}

/// What a copy does to the peer's memory: the rows that allow it, and the range.
pub(super) struct RemoteRange<'a> {
    pub peer: &'a Arc<ShmPeer>,
    pub rows: RemoteRows,
    pub memory: &'a Arc<ImportedMemory>,
    pub offset: u64,
}

impl DeviceCopies {
    /// Whether copies were started that have not been completed.
    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        self.lanes.iter().any(|lane| !lane.is_idle()) || !self.ended.is_empty()
    }

    /// Starts the copies of a write or read, if both sides are memory of one GPU.
    pub(super) fn start(
        &mut self,
        remote: &RemoteRange<'_>,
        posted: PostedWork,
        qp_memory: &QpMemory,
        registry: &Registry,
        direct: &mut DirectState,
    ) -> Result<DirectOutcome, IndirectReason> {
        let writes = matches!(posted.work.op, SendOp::Write(_));
        let local = LocalSpans::resolve(qp_memory, registry, &posted.work, writes)?;
        let first =
            local.iter().next().and_then(Span::device).ok_or(IndirectReason::LocalMemory)?;
        let (memory, lane) = self.open(remote.memory, first)?;
        let lane = &mut self.lanes[lane];
        let started = lane.start(remote, memory, posted, &local, writes);
        match started {
            Ok(DirectOutcome::Started) => direct.in_flight += 1,
            // They hold memory.
            _ => lane.pending.clear(),
        }
        started
    }

    /// The peer's memory on this GPU, and the index of the GPU's lane.
    pub(super) fn open<'m>(
        &mut self,
        memory: &'m Arc<ImportedMemory>,
        device: &Device,
    ) -> Result<(&'m Allocation, usize), IndirectReason> {
        let lane = self.lanes.iter().position(|lane| lane.queue.device() == device);
        let first = memory;
        let memory = memory.on(device).ok_or(IndirectReason::MappingRequested)?;
        let opened = match memory.open_on(device, lane.is_none()) {
            ImportState::Opened(opened) => opened,
            ImportState::Opening => return Err(IndirectReason::MappingRequested),
            ImportState::Failed if Arc::ptr_eq(memory, first) => {
                return Err(IndirectReason::KeyNotExported);
            }
            // Other GPUs may use it.
            ImportState::Failed => return Err(IndirectReason::LocalMemory),
        };
        let at = match lane {
            Some(at) => at,
            None => {
                let queue = memory.take_queue().ok_or(IndirectReason::LocalMemory)?;
                self.lanes.push(Lane::new(queue));
                self.lanes.len() - 1
            }
        };
        if self.lanes[at].failed {
            return Err(IndirectReason::LocalMemory);
        }
        Ok((opened, at))
    }

    /// Starts a list, which accesses the peer's memory by these rows, so many bytes by each.
    pub(super) fn start_list<'a>(
        &mut self,
        lane: usize,
        peer: &Arc<ShmPeer>,
        rows: impl Iterator<Item = (&'a RemoteRows, u64)>,
        list: &ListCopy<'_>,
        now: Instant,
    ) -> Result<DirectOutcome, IndirectReason> {
        let lane = &mut self.lanes[lane];
        // What was gathered before is copied before.
        lane.launch(now);
        if !lane.open.works.is_empty() {
            return Ok(DirectOutcome::OutOfBudget);
        }
        let mut batch = Batch::default();
        for (rows, bytes) in rows {
            if !batch.announce(peer, rows, bytes) {
                return rows.refusal(peer);
            }
        }
        let ticket = lane.queue.next_ticket();
        let ListRegions { to, from } = list.regions;
        match lane.queue.submit_list(list.descriptors, to, from) {
            Ok(Some(number)) => batch.number = number,
            Ok(None) => return Ok(DirectOutcome::OutOfBudget),
            Err(why) => lane.fail(&why),
        }
        list.spans.iter().for_each(|span| span.add_copies(&ticket));
        batch.works.push(list.posted);
        lane.push(batch, now);
        Ok(DirectOutcome::Started)
    }

    /// Launches what was gathered, unless enough is in flight.
    pub(super) fn launch(&mut self, now: Instant) {
        for lane in &mut self.lanes {
            if lane.in_flight.len() < MAX_IN_FLIGHT || lane.open.copies.len() >= MAX_BATCH / 2 {
                lane.launch(now);
            }
        }
    }

    /// Finds the batches that have ended.
    pub(super) fn poll(&mut self, now: Instant) {
        let Self { lanes, ended } = self;
        lanes.iter_mut().for_each(|lane| lane.poll(now, ended));
    }

    /// Takes work whose copies have ended, in order; `false` if they failed.
    pub(super) fn pop_ended(&mut self) -> Option<(PostedWork, bool)> {
        self.ended.pop_front()
    }

    /// Waits for copies in flight, for a limited time.
    pub(super) fn finish(&mut self) {
        let deadline = std::time::Instant::now() + FINISH_LIMIT;
        for lane in &mut self.lanes {
            let mut backoff = crate::sync::Backoff::default();
            let last = lane.in_flight.back().map_or(0, |batch| batch.number);
            while lane.queue.completed() < last && !lane.failed {
                if std::time::Instant::now() > deadline {
                    tracing::warn!("a device is closed while copies that do not end are in flight");
                    break;
                }
                backoff.snooze();
            }
            // What was not launched never accesses memory.
            lane.queue.fail();
        }
    }
}

impl Lane {
    fn new(queue: CopyQueue) -> Self {
        Self {
            queue,
            open: Batch::default(),
            in_flight: VecDeque::new(),
            spare: Vec::new(),
            pending: Vec::new(),
            checked: Instant::from_nanos(0),
            failed: false,
        }
    }

    fn is_idle(&self) -> bool {
        self.open.works.is_empty() && self.in_flight.is_empty()
    }

    /// Adds the copies of a write or read to the open batch. If it cannot, some may be pending.
    fn start(
        &mut self,
        remote: &RemoteRange<'_>,
        memory: &Allocation,
        posted: PostedWork,
        local: &LocalSpans<'_>,
        writes: bool,
    ) -> Result<DirectOutcome, IndirectReason> {
        let mut at = remote.offset;
        for span in local.iter() {
            let here = span.device_region().ok_or(IndirectReason::LocalMemory)?;
            let there = memory.region(at, here.len()).map_err(|_| IndirectReason::AccessDenied)?;
            at = at.saturating_add(here.len());
            if here.allocation().device() != there.allocation().device() {
                return Err(IndirectReason::LocalMemory);
            }
            let (to, from) = if writes { (there, here) } else { (here, there) };
            self.pending.push(DeviceCopy { to, from });
        }
        if !self.make_room() {
            return Ok(DirectOutcome::OutOfBudget);
        }
        if !self.open.announce(remote.peer, &remote.rows, posted.bytes) {
            return remote.rows.refusal(remote.peer);
        }
        self.add(posted, local);
        Ok(DirectOutcome::Started)
    }

    /// Makes the open batch one that the pending copies can join; `false` if that is not possible
    /// now.
    fn make_room(&mut self) -> bool {
        let Self { open, pending, .. } = self;
        if open.copies.len() + pending.len() <= MAX_BATCH
            && !pending.iter().any(|copy| open.conflicts(copy))
        {
            return true;
        }
        let launched = self.checked;
        self.launch(launched);
        self.open.works.is_empty()
    }

    /// Adds the pending copies to the open batch.
    fn add(&mut self, posted: PostedWork, local: &LocalSpans<'_>) {
        let Self { queue, open, pending, .. } = self;
        let ticket = open.ticket.get_or_insert_with(|| queue.next_ticket());
        local.iter().for_each(|span| span.add_copies(ticket));
        for copy in pending.iter() {
            let [to, from, len] = range(copy);
            open.targets = hull(&open.targets, &(to..to + len));
            open.sources = hull(&open.sources, &(from..from + len));
            open.ranges.push([to, from, len]);
        }
        open.copies.append(pending);
        open.works.push(posted);
    }

    fn launch(&mut self, now: Instant) {
        if self.open.works.is_empty() || !self.failed && !self.queue.has_room() {
            return;
        }
        let next = self.spare.pop().unwrap_or_default();
        let mut batch = std::mem::replace(&mut self.open, next);
        match self.queue.submit(&batch.copies) {
            Ok(number) => batch.number = number,
            Err(why) => self.fail(&why),
        }
        self.push(batch, now);
    }

    /// Waits for the end of a batch that was submitted.
    fn push(&mut self, batch: Batch, now: Instant) {
        if self.in_flight.is_empty() {
            self.checked = now;
        }
        self.in_flight.push_back(batch);
    }

    fn fail(&mut self, why: &Error) {
        tracing::warn!(%why, "copies between processes have failed");
        self.failed = true;
        self.queue.fail();
    }

    fn poll(&mut self, now: Instant, ended: &mut VecDeque<(PostedWork, bool)>) {
        let completed = self.queue.completed();
        while let Some(batch) = self.in_flight.front() {
            let succeeded = batch.number != 0 && batch.number <= completed;
            if !succeeded && !self.failed {
                break;
            }
            self.checked = now;
            let Some(batch) = self.in_flight.pop_front() else { break };
            ended.extend(batch.works.iter().map(|posted| (*posted, succeeded)));
            self.recycle(batch);
        }
        if !self.in_flight.is_empty() && now - self.checked > CHECK_AFTER {
            self.checked = now;
            if let Err(why) = self.queue.check() {
                self.fail(&why);
            }
        }
    }

    /// Keeps the capacity of a batch that has ended, and ends its accesses.
    fn recycle(&mut self, batch: Batch) {
        let Batch { mut copies, mut ranges, mut works, mut accesses, .. } = batch;
        accesses.clear();
        copies.clear();
        ranges.clear();
        works.clear();
        // As many as may be in flight.
        if self.spare.len() < MAX_BATCHES {
            self.spare.push(Batch { copies, ranges, works, accesses, ..Batch::default() });
        }
    }
}

impl Batch {
    /// Announces an access to the peer's memory, unless this batch has done so already; `false` if
    /// it is not allowed, or too many are in progress.
    fn announce(&mut self, peer: &Arc<ShmPeer>, rows: &RemoteRows, bytes: u64) -> bool {
        let RemoteRows { rows, generations } = *rows;
        let mut known = self.accesses.iter().rev();
        let known = known.position(|access| access.covers(peer, rows, generations));
        let at = match known {
            Some(from_end) => self.accesses.len() - 1 - from_end,
            None => {
                let Some(access) = peer.begin_device_access(rows, generations) else {
                    return false;
                };
                self.accesses.push(access);
                self.accesses.len() - 1
            }
        };
        self.accesses[at].count(bytes);
        true
    }

    /// Whether a copy must not run concurrently with those of the batch. Two that copy the same
    /// bytes to the same place may, and nothing that does not conflict with one conflicts with the
    /// other.
    fn conflicts(&self, copy: &DeviceCopy) -> bool {
        let new = range(copy);
        let [to, from, len] = new;
        let (to, from) = (to..to + len, from..from + len);
        let far = !overlap(&to, &self.targets)
            && !overlap(&to, &self.sources)
            && !overlap(&from, &self.targets);
        !far && !self.ranges.iter().rev().any(|known| *known == new)
            && self.ranges.iter().any(|[other_to, other_from, len]| {
                let other_to = *other_to..other_to + len;
                overlap(&to, &other_to)
                    || overlap(&to, &(*other_from..other_from + len))
                    || overlap(&from, &other_to)
            })
    }
}

/// Addresses of target and source, and length.
fn range(copy: &DeviceCopy) -> [u64; 3] {
    [copy.to.address().raw(), copy.from.address().raw(), copy.to.len()]
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// The smallest range with both; the first may be empty.
fn hull(one: &Range<u64>, other: &Range<u64>) -> Range<u64> {
    match one.is_empty() {
        true => other.clone(),
        false => one.start.min(other.start)..one.end.max(other.end),
    }
}

/// The local memory of a work request. While it exists, deregistration waits.
pub(super) struct LocalSpans<'a> {
    /// Mostly the only one.
    first: Option<Span<'a>>,
    more: Vec<Span<'a>>,
}

impl<'a> LocalSpans<'a> {
    pub(super) fn resolve(
        qp_memory: &QpMemory,
        registry: &'a Registry,
        work: &WireWork,
        writes: bool,
    ) -> Result<Self, IndirectReason> {
        let need = if writes { Access::NONE } else { Access::LOCAL_WRITE };
        let pd: PdId = qp_memory.pd;
        let mut local = Self { first: None, more: Vec::new() };
        let resolved = qp_memory.data_segments(work.id, 0, work.len, |segment, skip, len| {
            let DataSegment::Memory(data) = segment else {
                return Err(crate::mr::AccessDenied::Range);
            };
            let address = data.address.wrapping_add(skip.into());
            let span = registry.resolve(data.lkey, pd, need, address, len.into())?;
            match local.first {
                None => local.first = Some(span),
                Some(_) if local.more.len() < MAX_SEGMENTS - 1 => local.more.push(span),
                Some(_) => return Err(crate::mr::AccessDenied::Range),
            }
            Ok(())
        });
        resolved.map_err(|_| IndirectReason::LocalMemory)?;
        Ok(local)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Span<'a>> {
        self.first.iter().chain(&self.more)
    }
}
