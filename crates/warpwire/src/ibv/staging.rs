//! Memory of a GPU that an RDMA device cannot reach: the last way, through pinned memory beside it.
//!
//! The device gets pinned memory, as long as the GPU's and under the same addresses. What is sent is copied there as it
//! is posted, before the device is told; what arrives is copied back before the program hears of it. So the memory
//! serves work of this side only: of what peers do by themselves, nobody hears, and rights for them are refused.
//!
//! # What always holds
//! 1. Bytes that work may still write (an *arrival*) are never copied over from the GPU's memory.
//! 2. An arrival is noted before the device is told of its work, and forgotten after its bytes are copied back.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};

use super::ids::{Side, all_of_queue, is_not_after, side_of};
use super::sys;
use crate::error::{Error, Kind, Result};
use crate::mem::{Allocation, Region, Stream};
use crate::mlx5::Status;
use crate::mr::Access;
use crate::units;
use crate::work::Sge;

/// No copy takes as long.
const PATIENCE: Duration = Duration::from_secs(30);

/// Memory of a GPU, and the pinned memory that stands in for it.
#[derive(Debug)]
pub(super) struct Stage {
    memory: Region,
    pinned: Allocation,
    /// Where the first byte is, in work.
    iova: u64,
    stream: Stream,
}

impl Stage {
    /// # Errors
    /// If peers would have rights, or there is not so much pinned memory.
    pub(super) fn new(memory: &Region, iova: u64, access: Access) -> Result<Self> {
        if access.is_remote() {
            return Err(not_for_peers(memory.len(), access));
        }
        let device = memory.allocation().device();
        let pinned = device.alloc_pinned(memory.len())?;
        Ok(Self { memory: memory.clone(), pinned, iova, stream: device.stream()? })
    }

    /// Where the pinned memory lies.
    pub(super) fn address(&self) -> Result<u64> {
        Ok(self.pinned.host_bytes()?.address())
    }

    /// The bytes that a range of work names; none if they are not all here, and the device will say so.
    fn part(&self, range: &Sge) -> Option<Range<u64>> {
        let start = range.address.checked_sub(self.iova)?;
        let end = start.checked_add(range.len.into())?;
        (end <= self.memory.len() && start < end).then_some(start..end)
    }

    fn sides(&self, part: &Range<u64>) -> Result<[Region; 2]> {
        let len = part.end - part.start;
        let memory = self.memory.allocation().region(self.memory.offset() + part.start, len)?;
        Ok([memory, self.pinned.region(part.start, len)?])
    }

    fn copy_out(&self, part: &Range<u64>) -> Result<()> {
        let [memory, pinned] = self.sides(part)?;
        self.stream.copy(&pinned, &memory)?;
        self.stream.synchronize(PATIENCE)
    }

    fn copy_back(&self, part: &Range<u64>) -> Result<()> {
        let [memory, pinned] = self.sides(part)?;
        self.stream.copy(&memory, &pinned)?;
        self.stream.synchronize(PATIENCE)
    }
}

#[cold]
fn not_for_peers(len: u64, access: Access) -> Error {
    Error::new(Kind::Unsupported, format!("stage {} of device memory", units::bytes(len)))
        .why(format!("peers would use it by themselves ({access}), and nobody would copy for them"))
        .fix("register it for this side alone, with local-write or nothing, and have peers send; or let peers reach pinned host memory")
}

/// A range of work that will be written: how long it is, and where it is staged, if it is.
#[derive(Debug)]
struct Landing {
    len: u64,
    stage: Option<(Arc<Stage>, Range<u64>)>,
}

/// What is staged of a device's memory, and what has yet to arrive.
#[derive(Debug, Default)]
pub(super) struct Stages {
    /// How many stages there are: where there is none, nobody looks any further.
    count: AtomicUsize,
    /// By their keys.
    table: RwLock<HashMap<u32, Arc<Stage>>>,
    /// How many arrivals are awaited.
    awaited: AtomicUsize,
    /// By the numbers of their work, which go up within a queue.
    arrivals: Mutex<BTreeMap<u64, Vec<Landing>>>,
}

impl Stages {
    /// Whether no registration is staged.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Whether nothing staged has yet to arrive.
    #[inline]
    pub(super) fn awaits_nothing(&self) -> bool {
        self.awaited.load(Ordering::Acquire) == 0
    }

    pub(super) fn add(&self, lkey: u32, stage: Stage) {
        let mut table = self.table.write();
        table.insert(lkey, Arc::new(stage));
        self.count.store(table.len(), Ordering::Release);
    }

    /// The registration with that key ends.
    pub(super) fn remove(&self, lkey: u32) {
        let mut table = self.table.write();
        table.remove(&lkey);
        self.count.store(table.len(), Ordering::Release);
    }

    fn find(&self, range: &Sge) -> Option<(Arc<Stage>, Range<u64>)> {
        let stage = self.table.read().get(&range.lkey)?.clone();
        let part = stage.part(range)?;
        Some((stage, part))
    }

    /// Work with that number is about to be posted: what it sends is copied, what it will write is noted.
    ///
    /// # Errors
    /// If the GPU's memory is gone, or its device fails.
    #[cold]
    pub(super) fn prepare(&self, number: u64, opcode: u32, ranges: &[Sge]) -> Result<()> {
        match opcode {
            sys::WR_RDMA_READ | sys::WR_ATOMIC_CMP_AND_SWP | sys::WR_ATOMIC_FETCH_AND_ADD => {
                self.expect(number, ranges);
                Ok(())
            }
            _ => ranges.iter().try_for_each(|range| self.send(range)),
        }
    }

    fn send(&self, range: &Sge) -> Result<()> {
        let Some((stage, part)) = self.find(range) else { return Ok(()) };
        // Held while it is copied: what arrives meanwhile would be copied back from under it.
        let arrivals = self.arrivals.lock();
        let landings = arrivals.values().flatten().filter_map(|landing| landing.stage.as_ref());
        let awaited = landings.filter(|(other, _)| Arc::ptr_eq(other, &stage));
        let mut holes: Vec<_> = awaited.map(|(_, part)| part.clone()).collect();
        holes.sort_by_key(|hole| hole.start);
        without(part, &holes).iter().try_for_each(|part| stage.copy_out(part))
    }

    /// Work with that number will write these ranges.
    #[cold]
    pub(super) fn expect(&self, number: u64, ranges: &[Sge]) {
        let landing = |range: &Sge| Landing { len: range.len.into(), stage: self.find(range) };
        let landings: Vec<_> = ranges.iter().map(landing).collect();
        if landings.iter().all(|landing| landing.stage.is_none()) {
            return;
        }
        let mut arrivals = self.arrivals.lock();
        arrivals.insert(number, landings);
        self.awaited.store(arrivals.len(), Ordering::Release);
    }

    /// Work with that number was not posted.
    #[cold]
    pub(super) fn cancel(&self, number: u64) {
        let mut arrivals = self.arrivals.lock();
        arrivals.remove(&number);
        self.awaited.store(arrivals.len(), Ordering::Release);
    }

    /// The queues whose numbers these are were reset, or are gone.
    pub(super) fn forget(&self, numbers: impl IntoIterator<Item = Range<u64>>) {
        if self.awaits_nothing() {
            return;
        }
        let mut arrivals = self.arrivals.lock();
        for range in numbers {
            arrivals.retain(|number, _| !range.contains(number));
        }
        self.awaited.store(arrivals.len(), Ordering::Release);
    }

    /// Work has ended, as this completion says: what it wrote is copied to where it belongs, before anybody hears of it.
    /// If that cannot be, the work has failed.
    #[cold]
    pub(super) fn ended(&self, wc: &mut sys::Wc) {
        let mut arrivals = self.arrivals.lock();
        let numbers: Vec<u64> = match side_of(wc.wr_id) {
            // Reads before it may have made no completion, and are done too.
            Some(Side::Send) => arrivals
                .range(all_of_queue(wc.wr_id))
                .map(|(number, _)| *number)
                .filter(|number| is_not_after(*number, wc.wr_id))
                .collect(),
            _ => vec![wc.wr_id],
        };
        for number in numbers {
            let Some(landings) = arrivals.remove(&number) else { continue };
            let arrived = if number == wc.wr_id { arrived(wc) } else { u64::MAX };
            if let Err(error) = land(&landings, arrived) {
                tracing::warn!(%error, "what arrived could not be copied to the device's memory");
                wc.status = Status::LocalAccess as u32;
            }
        }
        self.awaited.store(arrivals.len(), Ordering::Release);
    }
}

/// How many bytes work has written, at most.
fn arrived(wc: &sys::Wc) -> u64 {
    let failed = wc.status != Status::Success as u32;
    match side_of(wc.wr_id) {
        _ if failed => 0,
        Some(Side::Send) => u64::MAX,
        // The peer has said where that goes; the receive was used up for the news of it.
        _ if wc.opcode == sys::WC_RECV_RDMA_WITH_IMM => 0,
        _ => wc.byte_len.into(),
    }
}

/// Copies the first so many bytes of these ranges back.
fn land(landings: &[Landing], mut bytes: u64) -> Result<()> {
    for Landing { len, stage } in landings {
        let here = (*len).min(bytes);
        if let Some((stage, part)) = stage
            && here > 0
        {
            stage.copy_back(&(part.start..part.start + here))?;
        }
        bytes -= here;
    }
    Ok(())
}

/// What is left of a range without the holes, which are sorted.
fn without(range: Range<u64>, holes: &[Range<u64>]) -> Vec<Range<u64>> {
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
    left.retain(|part| part.start < part.end);
    left
}

#[cfg(test)]
mod tests {
    use super::super::ids::{Naming, Shelf};
    use super::*;
    use crate::mem::sim::{Sim, SimConfig};

    const KEY: u32 = 0x77;
    const LEN: u64 = 4096;
    const IOVA: u64 = 0x10_0000;

    fn staged() -> (Stages, Allocation) {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let memory = gpu.alloc(LEN + 64).unwrap();
        let region = memory.region(64, LEN).unwrap();
        let stages = Stages::default();
        stages.add(KEY, Stage::new(&region, IOVA, Access::LOCAL_WRITE).unwrap());
        (stages, memory)
    }

    fn pinned(stages: &Stages, at: u64, len: usize) -> Vec<u8> {
        let stage = stages.table.read()[&KEY].clone();
        let mut bytes = vec![0; len];
        stage.pinned.host_bytes().unwrap().read(at, &mut bytes).unwrap();
        bytes
    }

    fn arrive(stages: &Stages, at: u64, bytes: &[u8]) {
        let stage = stages.table.read()[&KEY].clone();
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
        // SAFETY: numbers, for which zero is a value.
        let empty: sys::Wc = unsafe { std::mem::zeroed() };
        sys::Wc { wr_id, status: status as u32, opcode, byte_len, ..empty }
    }

    #[test]
    fn what_is_sent_is_copied_but_for_what_is_awaited() {
        let (stages, memory) = staged();
        memory.write(64, &[1; LEN as usize]).unwrap();
        arrive(&stages, 0, &[9; LEN as usize]);
        stages.expect(5, &[sge(10, 4), sge(100, 50)]);
        stages.prepare(6, sys::WR_SEND, &[sge(8, 100)]).unwrap();
        assert_eq!(pinned(&stages, 6, 10), [9, 9, 1, 1, 9, 9, 9, 9, 1, 1]);
        assert_eq!(pinned(&stages, 98, 12), [1, 1, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]);
        // Other keys, and ranges that are not all there, are the device's affair.
        stages
            .prepare(7, sys::WR_SEND, &[Sge { lkey: 1, ..sge(200, 10) }, sge(LEN - 1, 2)])
            .unwrap();
        assert_eq!(pinned(&stages, 200, 1), [9]);
        assert_eq!(pinned(&stages, LEN - 1, 1), [9]);
    }

    #[test]
    fn what_arrives_is_copied_back_as_far_as_it_came() {
        let (stages, memory) = staged();
        let number = |side: u64, counter: u64| side << 62 | counter;
        let receive = number(1, 3);
        memory.write(64, &[0; LEN as usize]).unwrap();
        arrive(&stages, 0, &[7; LEN as usize]);
        let ranges = [sge(0, 4), Sge { lkey: 1, address: 0, len: 4 }, sge(100, 4)];
        stages.expect(receive, &ranges);
        assert!(!stages.awaits_nothing());
        stages.ended(&mut wc(receive, Status::Success, 128, 10));
        assert!(stages.awaits_nothing());
        assert_eq!(device(&memory, 0, 5), [7, 7, 7, 7, 0]);
        assert_eq!(device(&memory, 100, 3), [7, 7, 0]);
        for (status, opcode) in [
            (Status::Flushed, 128),
            (Status::LocalLength, 128),
            (Status::Success, sys::WC_RECV_RDMA_WITH_IMM),
        ] {
            stages.expect(receive, &[sge(200, 50)]);
            stages.ended(&mut wc(receive, status, opcode, 50));
            assert_eq!(device(&memory, 200, 1), [0]);
        }
        // What nobody awaits changes nothing.
        stages.ended(&mut wc(receive, Status::Success, 128, 10));
    }

    #[test]
    fn a_completion_ends_the_reads_before_it() {
        let (stages, memory) = staged();
        memory.write(64, &[0; LEN as usize]).unwrap();
        arrive(&stages, 0, &[7; LEN as usize]);
        let shelf = Shelf::default();
        let books = [(); 2].map(|()| shelf.add_pair([16, 16], true).unwrap());
        let numbers = books.each_ref().map(|book| {
            let mut naming = book.name_sends();
            [naming.name(0), naming.name(1), naming.name(2)]
        });
        for (at, [first, _, last]) in (0..).zip(numbers) {
            stages.prepare(first, sys::WR_RDMA_READ, &[sge(at * 100, 8)]).unwrap();
            stages.prepare(last, sys::WR_ATOMIC_FETCH_AND_ADD, &[sge(at * 100 + 8, 8)]).unwrap();
        }
        // The second of the first queue failed: what was before it has ended well.
        stages.ended(&mut wc(numbers[0][1], Status::RemoteAccess, 0, 0));
        assert_eq!(device(&memory, 0, 9), [7, 7, 7, 7, 7, 7, 7, 7, 0]);
        assert_eq!(device(&memory, 100, 1), [0]);
        stages.forget(books[0].numbers());
        stages.ended(&mut wc(numbers[0][2], Status::Success, 4, 0));
        assert_eq!(device(&memory, 8, 1), [0], "its queue was reset");
        stages.ended(&mut wc(numbers[1][2], Status::Success, 4, 0));
        assert_eq!(device(&memory, 100, 17), [[7; 16].as_slice(), &[0]].concat());
        assert!(stages.awaits_nothing());
    }

    #[test]
    fn memory_that_peers_would_use_is_refused() {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let region = gpu.alloc(LEN).unwrap().whole().unwrap();
        let error = Stage::new(&region, 0, Access::REMOTE_READ).unwrap_err();
        assert_eq!(error.kind(), &Kind::Unsupported);
        let text = error.to_string();
        assert!(text.contains("remote-read") && text.contains("have peers send"), "{text}");
        let (stages, _memory) = staged();
        assert!(!stages.is_empty());
        stages.remove(KEY);
        assert!(stages.is_empty());
    }

    #[test]
    fn holes_are_left_out() {
        let holes = [2..4, 3..5, 8..9, 20..30];
        assert_eq!(without(0..10, &holes), [0..2, 5..8, 9..10]);
        assert_eq!(without(2..5, &holes), []);
        assert_eq!(without(25..40, &holes), vec![Range { start: 30, end: 40 }]);
        assert_eq!(without(10..12, &holes), vec![Range { start: 10, end: 12 }]);
    }
}
