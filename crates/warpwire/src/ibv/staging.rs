//! Staging: the fallback for GPU memory that an RDMA device cannot reach, through pinned memory.
//!
//! The device gets pinned memory of the same size and IOVA as the GPU memory. Data to send is
//! copied there when it is posted, before the doorbell; received data is copied back before its
//! completion is returned. So only work of this side can use the memory: RDMA operations of peers
//! would trigger no copy, and remote access rights are rejected.
//!
//! # Invariants
//! 1. Bytes that outstanding work may still write (*inbound* ranges) are never overwritten by a
//!    copy from GPU memory.
//! 2. An inbound range is recorded before its work is posted, and removed after its bytes are
//!    copied back.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};

use super::sys;
use super::wr_ids::{WrQueue, is_at_or_before, queue_of, queue_wr_ids};
use crate::error::{Error, Kind, Result};
use crate::mem::{Allocation, Region, Stream};
use crate::mlx5::Status;
use crate::mr::Access;
use crate::units;
use crate::work::Sge;

/// Timeout of a copy; none takes that long on a working device.
const COPY_TIMEOUT: Duration = Duration::from_secs(30);

/// GPU memory and its pinned staging buffer.
#[derive(Debug)]
pub(super) struct StagingBuffer {
    memory: Region,
    pinned: Allocation,
    /// IOVA of the first byte.
    iova: u64,
    stream: Stream,
}

impl StagingBuffer {
    /// # Errors
    /// If `access` has remote rights, or pinned memory is short.
    pub(super) fn new(memory: &Region, iova: u64, access: Access) -> Result<Self> {
        if access.is_remote() {
            return Err(no_remote_access(memory.len(), access));
        }
        let device = memory.allocation().device();
        let pinned = device.alloc_pinned(memory.len())?;
        Ok(Self { memory: memory.clone(), pinned, iova, stream: device.stream()? })
    }

    /// Address of the pinned memory.
    pub(super) fn address(&self) -> Result<u64> {
        Ok(self.pinned.host_bytes()?.address())
    }

    /// The byte offsets of a scatter-gather entry; `None` if it is not inside the region, in which
    /// case the device reports the error.
    fn span(&self, range: &Sge) -> Option<Range<u64>> {
        let start = range.address.checked_sub(self.iova)?;
        let end = start.checked_add(range.len.into())?;
        (end <= self.memory.len() && start < end).then_some(start..end)
    }

    fn regions(&self, span: &Range<u64>) -> Result<[Region; 2]> {
        let len = span.end - span.start;
        let memory = self.memory.allocation().region(self.memory.offset() + span.start, len)?;
        Ok([memory, self.pinned.region(span.start, len)?])
    }

    fn copy_out(&self, span: &Range<u64>) -> Result<()> {
        let [memory, pinned] = self.regions(span)?;
        self.stream.copy(&pinned, &memory)?;
        self.stream.synchronize(COPY_TIMEOUT)
    }

    fn copy_back(&self, span: &Range<u64>) -> Result<()> {
        let [memory, pinned] = self.regions(span)?;
        self.stream.copy(&memory, &pinned)?;
        self.stream.synchronize(COPY_TIMEOUT)
    }
}

#[cold]
fn no_remote_access(len: u64, access: Access) -> Error {
    Error::new(Kind::Unsupported, format!("stage {} of device memory", units::bytes(len)))
        .why(format!("accesses of peers ({access}) would not be copied"))
        .fix(
            "register it with local-write or no rights, and have peers send; or give peers pinned \
             host memory",
        )
}

/// A scatter-gather entry that work will write: its length, and its staging range if it has one.
#[derive(Debug)]
struct PendingWrite {
    len: u64,
    stage: Option<(Arc<StagingBuffer>, Range<u64>)>,
}

/// All staging buffers of a device, and the ranges that outstanding work will write.
#[derive(Debug, Default)]
pub(super) struct StagingTable {
    /// Number of staging buffers; 0 is the fast path of posting.
    count: AtomicUsize,
    /// By lkey.
    table: RwLock<HashMap<u32, Arc<StagingBuffer>>>,
    /// Number of inbound work requests; 0 is the fast path of polling.
    inbound_count: AtomicUsize,
    /// By library work request id, which increases within a queue.
    inbound: Mutex<BTreeMap<u64, Vec<PendingWrite>>>,
}

impl StagingTable {
    /// Whether no memory region is staged.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Whether no outstanding work writes staged memory.
    #[inline]
    pub(super) fn has_no_inbound(&self) -> bool {
        self.inbound_count.load(Ordering::Acquire) == 0
    }

    pub(super) fn add(&self, lkey: u32, stage: StagingBuffer) {
        let mut table = self.table.write();
        table.insert(lkey, Arc::new(stage));
        self.count.store(table.len(), Ordering::Release);
    }

    /// The memory region with this lkey is deregistered.
    pub(super) fn remove(&self, lkey: u32) {
        let mut table = self.table.write();
        table.remove(&lkey);
        self.count.store(table.len(), Ordering::Release);
    }

    fn find(&self, range: &Sge) -> Option<(Arc<StagingBuffer>, Range<u64>)> {
        let stage = self.table.read().get(&range.lkey)?.clone();
        let span = stage.span(range)?;
        Some((stage, span))
    }

    /// Prepares work that is about to be posted: copies what it sends, records what it will write.
    ///
    /// # Errors
    /// If the GPU memory was freed, or its device fails.
    #[cold]
    pub(super) fn prepare(&self, wr_id: u64, opcode: u32, sges: &[Sge]) -> Result<()> {
        match opcode {
            sys::WR_RDMA_READ | sys::WR_ATOMIC_CMP_AND_SWP | sys::WR_ATOMIC_FETCH_AND_ADD => {
                self.add_inbound(wr_id, sges);
                Ok(())
            }
            _ => sges.iter().try_for_each(|range| self.send(range)),
        }
    }

    fn send(&self, range: &Sge) -> Result<()> {
        let Some((stage, span)) = self.find(range) else { return Ok(()) };
        // Held during the copy, so that `completed` copies nothing back in between.
        let inbound = self.inbound.lock();
        let pending_writes =
            inbound.values().flatten().filter_map(|pending_write| pending_write.stage.as_ref());
        let inbound_count = pending_writes.filter(|(other, _)| Arc::ptr_eq(other, &stage));
        let mut holes: Vec<_> = inbound_count.map(|(_, span)| span.clone()).collect();
        holes.sort_by_key(|hole| hole.start);
        subtract_ranges(span, &holes).iter().try_for_each(|span| stage.copy_out(span))
    }

    /// Records the ranges that work with this id will write.
    #[cold]
    pub(super) fn add_inbound(&self, wr_id: u64, sges: &[Sge]) {
        let pending_write =
            |range: &Sge| PendingWrite { len: range.len.into(), stage: self.find(range) };
        let pending_writes: Vec<_> = sges.iter().map(pending_write).collect();
        if pending_writes.iter().all(|pending_write| pending_write.stage.is_none()) {
            return;
        }
        let mut inbound = self.inbound.lock();
        inbound.insert(wr_id, pending_writes);
        self.inbound_count.store(inbound.len(), Ordering::Release);
    }

    /// Work with this id was not posted.
    #[cold]
    pub(super) fn cancel(&self, wr_id: u64) {
        let mut inbound = self.inbound.lock();
        inbound.remove(&wr_id);
        self.inbound_count.store(inbound.len(), Ordering::Release);
    }

    /// The queues with these ids were reset or destroyed.
    pub(super) fn discard(&self, wr_ids: impl IntoIterator<Item = Range<u64>>) {
        if self.has_no_inbound() {
            return;
        }
        let mut inbound = self.inbound.lock();
        for range in wr_ids {
            inbound.retain(|wr_id, _| !range.contains(wr_id));
        }
        self.inbound_count.store(inbound.len(), Ordering::Release);
    }

    /// Copies back what completed work has written, before the completion is returned. If the copy
    /// fails, the completion becomes a failure.
    #[cold]
    pub(super) fn completed(&self, wc: &mut sys::Wc) {
        let mut inbound = self.inbound.lock();
        let wr_ids: Vec<u64> = match queue_of(wc.wr_id) {
            // Earlier unsignaled reads are complete too.
            Some(WrQueue::Send) => inbound
                .range(queue_wr_ids(wc.wr_id))
                .map(|(wr_id, _)| *wr_id)
                .filter(|wr_id| is_at_or_before(*wr_id, wc.wr_id))
                .collect(),
            _ => vec![wc.wr_id],
        };
        for wr_id in wr_ids {
            let Some(pending_writes) = inbound.remove(&wr_id) else { continue };
            let bytes_received = if wr_id == wc.wr_id { bytes_received(wc) } else { u64::MAX };
            if let Err(error) = copy_back_all(&pending_writes, bytes_received) {
                tracing::warn!(%error, "received data could not be copied to device memory");
                wc.status = Status::LocalAccess as u32;
            }
        }
        self.inbound_count.store(inbound.len(), Ordering::Release);
    }
}

/// Maximum number of bytes that the work has written.
fn bytes_received(wc: &sys::Wc) -> u64 {
    let failed = wc.status != Status::Success as u32;
    match queue_of(wc.wr_id) {
        _ if failed => 0,
        Some(WrQueue::Send) => u64::MAX,
        // An RDMA write with immediate data: its payload did not go to the receive buffer.
        _ if wc.opcode == sys::WC_RECV_RDMA_WITH_IMM => 0,
        _ => wc.byte_len.into(),
    }
}

/// Copies the first `bytes` bytes of these ranges back.
fn copy_back_all(pending_writes: &[PendingWrite], mut bytes: u64) -> Result<()> {
    for PendingWrite { len, stage } in pending_writes {
        let chunk = (*len).min(bytes);
        if let Some((stage, span)) = stage
            && chunk > 0
        {
            stage.copy_back(&(span.start..span.start + chunk))?;
        }
        bytes -= chunk;
    }
    Ok(())
}

/// The parts of `range` outside the holes, which are sorted by start.
fn subtract_ranges(range: Range<u64>, holes: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut left = Vec::new();
    let mut at = range.start;
    for hole in holes {
        if hole.start > at {
            left.push(at..hole.start.min(range.end));
        }
        at = at.max(hole.end);
        if at >= range.end {
            break;
        }
    }
    if at < range.end {
        left.push(at..range.end);
    }
    left.retain(|span| span.start < span.end);
    left
}

#[cfg(test)]
mod tests {
    use super::super::wr_ids::{WrIdAllocator, WrIdRegistry};
    use super::*;
    use crate::mem::sim::{Sim, SimConfig};

    const KEY: u32 = 0x77;
    const LEN: u64 = 4096;
    const IOVA: u64 = 0x10_0000;

    fn staged() -> (StagingTable, Allocation) {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let memory = gpu.alloc(LEN + 64).unwrap();
        let region = memory.region(64, LEN).unwrap();
        let staging_table = StagingTable::default();
        staging_table.add(KEY, StagingBuffer::new(&region, IOVA, Access::LOCAL_WRITE).unwrap());
        (staging_table, memory)
    }

    fn pinned(staging_table: &StagingTable, at: u64, len: usize) -> Vec<u8> {
        let stage = staging_table.table.read()[&KEY].clone();
        let mut bytes = vec![0; len];
        stage.pinned.host_bytes().unwrap().read(at, &mut bytes).unwrap();
        bytes
    }

    fn write_pinned(staging_table: &StagingTable, at: u64, bytes: &[u8]) {
        let stage = staging_table.table.read()[&KEY].clone();
        stage.pinned.host_bytes().unwrap().write(at, bytes).unwrap();
    }

    fn device(memory: &Allocation, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        memory.read(64 + at, &mut bytes).unwrap();
        bytes
    }

    fn sge(at: u64, len: u32) -> Sge {
        Sge { address: IOVA + at, len, lkey: KEY }
    }

    fn wc(wr_id: u64, status: Status, opcode: u32, byte_len: u32) -> sys::Wc {
        // SAFETY: plain numbers, which may be zero.
        let empty: sys::Wc = unsafe { std::mem::zeroed() };
        sys::Wc { wr_id, status: status as u32, opcode, byte_len, ..empty }
    }

    #[test]
    fn staged_sends_skip_pending_inbound_ranges() {
        let (staging_table, memory) = staged();
        memory.write(64, &[1; LEN as usize]).unwrap();
        write_pinned(&staging_table, 0, &[9; LEN as usize]);
        staging_table.add_inbound(5, &[sge(10, 4), sge(100, 50)]);
        staging_table.prepare(6, sys::WR_SEND, &[sge(8, 100)]).unwrap();
        assert_eq!(pinned(&staging_table, 6, 10), [9, 9, 1, 1, 9, 9, 9, 9, 1, 1]);
        assert_eq!(pinned(&staging_table, 98, 12), [1, 1, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]);
        // Other lkeys and out-of-range entries are left to the device.
        staging_table
            .prepare(7, sys::WR_SEND, &[Sge { lkey: 1, ..sge(200, 10) }, sge(LEN - 1, 2)])
            .unwrap();
        assert_eq!(pinned(&staging_table, 200, 1), [9]);
        assert_eq!(pinned(&staging_table, LEN - 1, 1), [9]);
    }

    #[test]
    fn received_bytes_are_copied_back() {
        let (staging_table, memory) = staged();
        let wr_id = |queue: u64, counter: u64| queue << 62 | counter;
        let receive = wr_id(1, 3);
        memory.write(64, &[0; LEN as usize]).unwrap();
        write_pinned(&staging_table, 0, &[7; LEN as usize]);
        let sges = [sge(0, 4), Sge { lkey: 1, address: 0, len: 4 }, sge(100, 4)];
        staging_table.add_inbound(receive, &sges);
        assert!(!staging_table.has_no_inbound());
        staging_table.completed(&mut wc(receive, Status::Success, 128, 10));
        assert!(staging_table.has_no_inbound());
        assert_eq!(device(&memory, 0, 5), [7, 7, 7, 7, 0]);
        assert_eq!(device(&memory, 100, 3), [7, 7, 0]);
        for (status, opcode) in [
            (Status::Flushed, 128),
            (Status::LocalLength, 128),
            (Status::Success, sys::WC_RECV_RDMA_WITH_IMM),
        ] {
            staging_table.add_inbound(receive, &[sge(200, 50)]);
            staging_table.completed(&mut wc(receive, status, opcode, 50));
            assert_eq!(device(&memory, 200, 1), [0]);
        }
        // A completion without a recorded range copies nothing.
        staging_table.completed(&mut wc(receive, Status::Success, 128, 10));
    }

    #[test]
    fn a_completion_implies_earlier_reads() {
        let (staging_table, memory) = staged();
        memory.write(64, &[0; LEN as usize]).unwrap();
        write_pinned(&staging_table, 0, &[7; LEN as usize]);
        let registry = WrIdRegistry::default();
        let queue_entries = [(); 2].map(|()| registry.add_qp([16, 16], true).unwrap());
        let wr_ids = queue_entries.each_ref().map(|queue_entry| {
            let mut allocator = queue_entry.alloc_send();
            [allocator.assign(0), allocator.assign(1), allocator.assign(2)]
        });
        for (at, [first, _, last]) in (0..).zip(wr_ids) {
            staging_table.prepare(first, sys::WR_RDMA_READ, &[sge(at * 100, 8)]).unwrap();
            staging_table
                .prepare(last, sys::WR_ATOMIC_FETCH_AND_ADD, &[sge(at * 100 + 8, 8)])
                .unwrap();
        }
        // The second request of the first queue failed: the one before it has succeeded.
        staging_table.completed(&mut wc(wr_ids[0][1], Status::RemoteAccess, 0, 0));
        assert_eq!(device(&memory, 0, 9), [7, 7, 7, 7, 7, 7, 7, 7, 0]);
        assert_eq!(device(&memory, 100, 1), [0]);
        staging_table.discard(queue_entries[0].wr_ids());
        staging_table.completed(&mut wc(wr_ids[0][2], Status::Success, 4, 0));
        assert_eq!(device(&memory, 8, 1), [0], "the queue was reset");
        staging_table.completed(&mut wc(wr_ids[1][2], Status::Success, 4, 0));
        assert_eq!(device(&memory, 100, 17), [[7; 16].as_slice(), &[0]].concat());
        assert!(staging_table.has_no_inbound());
    }

    #[test]
    fn remote_access_cannot_be_staged() {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let region = gpu.alloc(LEN).unwrap().whole().unwrap();
        let error = StagingBuffer::new(&region, 0, Access::REMOTE_READ).unwrap_err();
        assert_eq!(error.kind(), &Kind::Unsupported);
        let text = error.to_string();
        assert!(text.contains("remote-read") && text.contains("have peers send"), "{text}");
        let (staging_table, _memory) = staged();
        assert!(!staging_table.is_empty());
        staging_table.remove(KEY);
        assert!(staging_table.is_empty());
    }

    #[test]
    fn excluded_ranges_are_subtracted() {
        let holes = [2..4, 3..5, 8..9, 20..30];
        assert_eq!(subtract_ranges(0..10, &holes), [0..2, 5..8, 9..10]);
        assert_eq!(subtract_ranges(2..5, &holes), []);
        assert_eq!(subtract_ranges(25..40, &holes), vec![Range { start: 30, end: 40 }]);
        assert_eq!(subtract_ranges(10..12, &holes), vec![Range { start: 10, end: 12 }]);
    }
}
