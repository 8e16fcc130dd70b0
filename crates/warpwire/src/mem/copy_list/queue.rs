//! Batches of copies on a stream of their own, whose ends are seen by a load from host memory.
//!
//! A batch is one launch, and perhaps some copies of the copy engine. In a batch, the last word of
//! each copy (its tail) is stored after everything else, because a reader may be waiting for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::allocation::{Allocation, Region};
use super::super::bytes::SharedBytes;
use super::super::device::{Backend, Device};
use super::super::program::{Kernel, Launch};
use super::super::sim::{Block, KernelFault};
use super::super::stream::Stream;
use super::{DESCRIPTOR_LEN, MAX_BLOCKS, THREADS, alloc_scratch, copy_range, load_program};
use crate::error::{Error, Kind, Result};

pub(super) const KERNEL: &str = "copy_batch";

/// Maximum number of copies of one batch.
pub(crate) const MAX_BATCH: usize = 512;
/// Batches that may be submitted before the first one has ended.
pub(crate) const MAX_BATCHES: usize = 4;
/// From this length on, the copy engine is faster than the kernel.
const MIN_ENGINE_COPY: u64 = 256 << 20;
/// Ranges of a launch are divided into chunks of at least this length, about so many in all.
const MIN_CHUNK: u64 = 8 << 10;
const CHUNKS: u64 = 2048;
/// Every copy may add one that is not full.
const MAX_CHUNKS: usize = CHUNKS as usize + MAX_BATCH;
/// Bytes of a batch's descriptors: chunks, then tails.
const SLOT_LEN: usize = (MAX_CHUNKS + MAX_BATCH) * DESCRIPTOR_LEN;

/// One copy between two regions of the same length that do not overlap.
#[derive(Clone, Debug)]
pub(crate) struct DeviceCopy {
    pub to: Region,
    pub from: Region,
}

/// A batch of copies, for threads that wait for its end.
#[derive(Clone, Debug)]
pub(crate) struct CopyTicket {
    number: u64,
    state: Arc<QueueState>,
}

impl CopyTicket {
    /// Whether both are of one batch.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.number == other.number && Arc::ptr_eq(&self.state, &other.state)
    }

    /// Whether the batch no longer accesses memory.
    pub(crate) fn is_done(&self) -> bool {
        self.state.completed() >= self.number || self.state.failed.load(Ordering::Acquire)
    }
}

#[derive(Debug)]
struct QueueState {
    /// Pinned memory: the number of the last batch that has ended, then the descriptors.
    memory: Allocation,
    /// The device has failed: batches that have not ended never will.
    failed: AtomicBool,
}

impl QueueState {
    fn completed(&self) -> u64 {
        self.bytes().and_then(|bytes| bytes.load_u64(0)).unwrap_or(0)
    }

    fn bytes(&self) -> Result<SharedBytes<'_>> {
        self.memory.host_bytes()
    }
}

/// Where the descriptors of the first slot begin.
const FIRST_SLOT: usize = 128;

/// A stream for batches of copies on one device. Creating one may wait for the device; submitting
/// does not.
pub(crate) struct CopyQueue {
    device: Device,
    stream: Stream,
    kernel: Kernel,
    state: Arc<QueueState>,
    /// Counts the blocks of a launch that are done with their ranges.
    arrived: Region,
    submitted: u64,
    /// Descriptors of the batch being submitted; kept for their capacity.
    chunks: Vec<u8>,
    tails: Vec<u8>,
}

impl CopyQueue {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let kernel = load_program(device)?.kernel(KERNEL)?;
        let memory = device.alloc_pinned((FIRST_SLOT + MAX_BATCHES * SLOT_LEN) as u64)?;
        memory.host_bytes()?.store_u64(0, 0)?;
        let arrived = alloc_scratch(device, 256)?;
        arrived.write(0, &[0; 256])?;
        Ok(Self {
            device: device.clone(),
            stream: device.stream()?,
            kernel,
            state: Arc::new(QueueState { memory, failed: AtomicBool::new(false) }),
            arrived: arrived.region(0, 4)?,
            submitted: 0,
            chunks: Vec::new(),
            tails: Vec::new(),
        })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether a batch can be submitted now.
    pub(crate) fn has_room(&self) -> bool {
        self.submitted - self.state.completed() < MAX_BATCHES as u64
    }

    /// The number of the last batch that has ended.
    #[inline]
    pub(crate) fn completed(&self) -> u64 {
        self.state.completed()
    }

    /// The ticket of the next batch. If that is not submitted after all, call [`fail`](Self::fail).
    pub(crate) fn next_ticket(&self) -> CopyTicket {
        CopyTicket { number: self.submitted + 1, state: self.state.clone() }
    }

    /// Whether the device can still end batches; asks the driver.
    pub(crate) fn check(&self) -> Result<()> {
        match self.stream.is_idle() {
            Ok(true) if self.state.completed() < self.submitted => {
                Err(Error::new(Kind::DeviceLost, "copy between processes")
                    .on(self.device.label())
                    .why("the stream is idle, but its last batch has not ended"))
            }
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Declares all batches ended, after the device has failed.
    pub(crate) fn fail(&self) {
        self.state.failed.store(true, Ordering::Release);
    }

    /// Submits a batch of at most [`MAX_BATCH`] copies, of which no target overlaps another target
    /// or a source; returns its number. It runs after those before it.
    ///
    /// # Errors
    /// [`Kind::Busy`] without [room](Self::has_room); those of the driver. Nothing is copied then,
    /// or only a part.
    pub(crate) fn submit(&mut self, copies: &[DeviceCopy]) -> Result<u64> {
        if !self.has_room() || copies.len() > MAX_BATCH {
            return Err(Error::new(Kind::Busy, "copy between processes").on(self.device.label()));
        }
        self.chunks.clear();
        self.tails.clear();
        let by_kernel = |copy: &&DeviceCopy| copy.to.len() < MIN_ENGINE_COPY;
        let total: u64 = copies.iter().filter(by_kernel).map(|copy| copy.to.len()).sum();
        let chunk = (total / CHUNKS).next_multiple_of(4096).max(MIN_CHUNK);
        let mut launch = Launch::new(&self.kernel).threads(THREADS);
        for copy in copies {
            let DeviceCopy { to, from } = copy;
            let body = to.len() - tail_len(to);
            if by_kernel(&copy) {
                copy_range(&mut self.chunks, to.address(), from.address(), 0..body, chunk);
            } else {
                let part = |region: &Region| region.allocation().region(region.offset(), body);
                self.stream.copy(&part(to)?, &part(from)?)?;
            }
            copy_range(&mut self.tails, to.address(), from.address(), body..to.len(), chunk);
            for region in [to, from] {
                // Mostly the same two, over and over.
                let same = |known: &Region| known.allocation().is_same(region.allocation());
                if !launch.regions.iter().rev().take(4).any(same) {
                    launch = launch.keep_alive(region);
                }
            }
        }
        let number = self.submitted + 1;
        let slot = FIRST_SLOT + (number as usize % MAX_BATCHES) * SLOT_LEN;
        let bytes = self.state.bytes()?;
        bytes.write(slot as u64, &self.chunks)?;
        let tails_at = (slot + self.chunks.len()) as u64;
        bytes.write(tails_at, &self.tails)?;
        let memory = &self.state.memory;
        let chunk_count = (self.chunks.len() / DESCRIPTOR_LEN) as u64;
        let launch = launch
            .grid(self.blocks(chunk_count))
            .region(&memory.region(slot as u64, SLOT_LEN as u64)?)
            .value(chunk_count)
            .region(&memory.region(tails_at, self.tails.len() as u64)?)
            .value((self.tails.len() / DESCRIPTOR_LEN) as u64)
            .region(&self.arrived)
            .region(&memory.region(0, 8)?)
            .value(number);
        // SAFETY: the kernel reads the descriptors and accesses the ranges that they name, which
        // are inside of regions that the launch keeps alive, as it does the words that it writes.
        #[allow(unsafe_code)]
        unsafe {
            self.stream.launch(launch)?;
        }
        self.submitted = number;
        Ok(number)
    }

    fn blocks(&self, chunks: u64) -> u32 {
        match self.device.info().backend {
            Backend::Cuda => chunks.clamp(1, MAX_BLOCKS) as u32,
            // One, because blocks do not count their arrivals there.
            Backend::Sim => 1,
        }
    }
}

/// Length of the tail of a copy to this region: its last bytes in one aligned word.
fn tail_len(to: &Region) -> u64 {
    let last = to.address().raw() + to.len() - 1;
    (last % 8 + 1).min(to.len())
}

pub(super) fn batch_block(block: &Block<'_>) -> std::result::Result<(), KernelFault> {
    for (list, count) in [(0, 1), (2, 3)] {
        super::copy_listed(block, block.address(list)?, block.value(count)?)?;
    }
    block.store_u64(block.address(5)?, block.value(6)?)
}

#[cfg(test)]
mod tests {
    use super::super::super::sim::{Sim, SimConfig};
    use super::*;
    use std::time::{Duration, Instant};

    fn wait(queue: &CopyQueue, number: u64) {
        let limit = Instant::now() + Duration::from_secs(20);
        while queue.completed() < number {
            assert!(Instant::now() < limit, "the batch does not end");
            std::thread::yield_now();
        }
    }

    #[test]
    fn batches_of_every_length_are_copied() {
        let config = SimConfig::default().with_memory(1 << 30);
        let gpu = Sim::start(config).unwrap().device(0).unwrap();
        let mut queue = CopyQueue::new(&gpu).unwrap();
        let total = 280 << 20;
        let (to, from) = (gpu.alloc(total).unwrap(), gpu.alloc(total).unwrap());
        let bytes: Vec<u8> = (0..total).map(|i| (i % 251) as u8).collect();
        from.write(0, &bytes).unwrap();
        let lens = [1, 2, 7, 8, 9, 15, 16, 4096, 65_537, 3 << 20, 9 << 20, MIN_ENGINE_COPY + 5];
        let (mut copies, mut at) = (Vec::new(), 3);
        for len in lens {
            let region = |memory: &Allocation| memory.region(at, len).unwrap();
            copies.push(DeviceCopy { to: region(&to), from: region(&from) });
            at += len;
        }
        let ticket = queue.next_ticket();
        let number = queue.submit(&copies).unwrap();
        wait(&queue, number);
        assert!(ticket.is_done());
        let mut found = vec![0; total as usize];
        to.read(0, &mut found).unwrap();
        assert!(found[3..at as usize] == bytes[3..at as usize]);
        assert_eq!((found[..3].to_vec(), found[at as usize]), (vec![0; 3], 0));
    }

    #[test]
    fn batches_run_in_order_and_only_so_many() {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let mut queue = CopyQueue::new(&gpu).unwrap();
        let memory = gpu.alloc(4096).unwrap();
        memory.write(0, &7_u64.to_ne_bytes()).unwrap();
        let word = |at: u64| memory.region(at * 8, 8).unwrap();
        let mut submitted = 0;
        for at in 1..200 {
            let copies = [DeviceCopy { to: word(at), from: word(at - 1) }];
            while !queue.has_room() {
                assert_eq!(queue.submit(&copies).map_err(|e| e.kind().clone()), Err(Kind::Busy));
                wait(&queue, submitted - 1);
            }
            submitted = queue.submit(&copies).unwrap();
        }
        wait(&queue, submitted);
        assert_eq!(memory.word64(199 * 8).unwrap().load().unwrap(), 7);
        queue.check().unwrap();
    }

    #[test]
    fn a_device_that_fails_ends_its_batches() {
        let sim = Sim::start(SimConfig::default()).unwrap();
        let gpu = sim.device(0).unwrap();
        let mut queue = CopyQueue::new(&gpu).unwrap();
        let (to, from) = (gpu.alloc(4096).unwrap(), gpu.alloc(4096).unwrap());
        let copy = DeviceCopy { to: to.whole().unwrap(), from: from.whole().unwrap() };
        sim.control(0).unwrap().kill();
        let ticket = queue.next_ticket();
        assert!(queue.submit(&[copy]).is_err() || queue.check().is_err());
        assert!(!ticket.is_done());
        queue.fail();
        assert!(ticket.is_done());
    }
}
