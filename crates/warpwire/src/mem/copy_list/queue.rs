//! Batches of copies on a stream of their own, whose ends are seen by a load from host memory.
//!
//! A batch is one launch, and perhaps some copies of the copy engine. The descriptors of a few
//! copies are parameters of the launch; those of more are in host memory. In a batch, the last word
//! of each copy (its tail) is stored after everything else, because a reader may be waiting for it.
//! A list ([`ListDescriptors`]) is a batch of its own, without tails.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::address::{DeviceAddr, is_inside, last_word_len};
use super::super::allocation::{Allocation, Region};
use super::super::bytes::SharedBytes;
use super::super::device::{Backend, Device};
use super::super::program::{Kernel, Launch};
use super::super::sim::{Block, KernelFault};
use super::super::stream::Stream;
use super::{DESCRIPTOR_LEN, MAX_BLOCKS, THREADS, alloc_scratch, copy_range, load_program};
use crate::error::{Error, Kind, Result};

pub(super) const KERNEL: &str = "copy_batch";
pub(super) const FEW_KERNEL: &str = "copy_few";

/// Copies that are parameters of a launch, and its blocks: about as many as a large GPU runs at a
/// time.
const FEW: usize = 4;
const FEW_BLOCKS: u64 = 512;

/// A launch whose chunks have at least this length has so many blocks for each multiprocessor: all
/// run at a time, and read memory more sequentially than more blocks would.
const LONG_CHUNK: u64 = 1 << 20;
const LONG_BLOCKS_EACH: u64 = 2;

/// Maximum number of copies of one batch.
pub(crate) const MAX_BATCH: usize = 512;
/// Batches that may be submitted before the first one has ended.
pub(crate) const MAX_BATCHES: usize = 4;
/// From this length on, the copy engine is faster than the kernel.
const MIN_ENGINE_COPY: u64 = 256 << 20;
/// Ranges of a launch are divided into chunks of at least this length, about so many in all. It is
/// what a block has in flight: 512 threads with four loads of 16 bytes each.
const MIN_CHUNK: u64 = 32 << 10;
const CHUNKS: u64 = 2048;
/// Every copy may add one that is not full.
const MAX_CHUNKS: usize = CHUNKS as usize + MAX_BATCH;
/// Bytes of a batch's descriptors: chunks, then tails.
const SLOT_LEN: usize = (MAX_CHUNKS + MAX_BATCH) * DESCRIPTOR_LEN;
/// Maximum number of ranges of a list.
pub(crate) const MAX_LIST: usize = 1 << 17;
/// Long ranges of a list are divided into about so many chunks in all, of at least this length.
const LIST_CHUNKS: u64 = 1 << 14;
const MIN_LIST_CHUNK: u64 = 64 << 10;
/// Bytes of the ring that holds the descriptors of lists: two of the longest.
const RING_LEN: usize = 2 * (MAX_LIST + LIST_CHUNKS as usize) * DESCRIPTOR_LEN;

/// Descriptors of a list of copies: up to [`MAX_LIST`], of which no target overlaps another target
/// or a source. It knows the addresses of the memory that it is for, and does not keep it alive.
#[derive(Debug)]
pub(crate) struct ListDescriptors {
    bytes: Vec<u8>,
    to: Vec<Range<u64>>,
    from: Vec<Range<u64>>,
    chunk: u64,
}

impl ListDescriptors {
    /// For copies between these regions, `ranges` of them with `total` bytes.
    pub(crate) fn new(to: &[Region], from: &[Region], ranges: usize, total: u64) -> Self {
        let addresses = |regions: &[Region]| regions.iter().map(addresses).collect();
        Self {
            bytes: Vec::with_capacity(ranges * DESCRIPTOR_LEN),
            to: addresses(to),
            from: addresses(from),
            chunk: chunk_len(total, LIST_CHUNKS).max(MIN_LIST_CHUNK),
        }
    }

    /// Adds a copy of `len` bytes: each end is the index of a region and an offset in it. `false`
    /// if that is outside of the region.
    pub(crate) fn push(&mut self, to: (u32, u64), from: (u32, u64), len: u64) -> bool {
        let at = |regions: &[Range<u64>], (index, offset): (u32, u64)| {
            let region = regions.get(index as usize)?;
            let is_inside = is_inside(offset, len, region.end - region.start);
            is_inside.then(|| DeviceAddr::new(region.start + offset))
        };
        let (Some(to), Some(from)) = (at(&self.to, to), at(&self.from, from)) else {
            return false;
        };
        copy_range(&mut self.bytes, to, from, 0..len, self.chunk);
        true
    }

    /// Whether these regions are the ones that it was made for, or others at their addresses.
    pub(crate) fn is_for(&self, to: &[Region], from: &[Region]) -> bool {
        self.to.iter().cloned().eq(to.iter().map(addresses))
            && self.from.iter().cloned().eq(from.iter().map(addresses))
    }
}

/// The length of chunks, so that there are about `count`.
fn chunk_len(total: u64, count: u64) -> u64 {
    (total / count).next_multiple_of(MIN_CHUNK).max(MIN_CHUNK)
}

fn addresses(region: &Region) -> Range<u64> {
    region.address().raw()..region.address().raw() + region.len()
}

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

    /// The same, of copies that may have failed after the last time that their owner looked. Asks
    /// the driver.
    pub(crate) fn has_ended(&self) -> bool {
        self.is_done() || self.state.check_failed(self.number)
    }
}

/// What a queue shares with its tickets.
#[derive(Debug)]
pub(super) struct QueueState {
    /// Pinned memory: the number of the last batch that has ended, then what the queue needs.
    memory: Allocation,
    /// The device has failed: batches that have not ended never will.
    failed: AtomicBool,
    /// The stream, if there are tickets of submitted batches only, and the queue may be gone before
    /// these have ended.
    stream: Option<Stream>,
}

impl QueueState {
    pub(super) fn new(memory: Allocation) -> Self {
        Self { memory, failed: AtomicBool::new(false), stream: None }
    }

    pub(super) fn with_stream(memory: Allocation, stream: Stream) -> Self {
        Self { stream: Some(stream), ..Self::new(memory) }
    }

    /// Whether the stream has failed before that batch ended.
    fn check_failed(&self, number: u64) -> bool {
        let Some(stream) = &self.stream else { return false };
        let failed = match stream.is_idle() {
            Ok(idle) => idle && self.completed() < number,
            Err(_) => true,
        };
        if failed {
            self.fail();
        }
        failed
    }

    pub(super) fn ticket(self: &Arc<Self>, number: u64) -> CopyTicket {
        CopyTicket { number, state: self.clone() }
    }

    #[inline]
    pub(super) fn completed(&self) -> u64 {
        self.bytes().and_then(|bytes| bytes.load_u64(0)).unwrap_or(0)
    }

    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
    }

    pub(super) fn memory(&self) -> &Allocation {
        &self.memory
    }

    #[inline]
    pub(super) fn bytes(&self) -> Result<SharedBytes<'_>> {
        self.memory.host_bytes()
    }
}

/// Where the descriptors of the first slot begin, in the memory of the queue's state.
const FIRST_SLOT: usize = 128;
/// Where the ring for descriptors of lists begins.
const RING_AT: usize = FIRST_SLOT + MAX_BATCHES * SLOT_LEN;

/// A stream for batches of copies on one device. Creating one may wait for the device; submitting
/// does not.
pub(crate) struct CopyQueue {
    device: Device,
    stream: Stream,
    kernel: Kernel,
    few_kernel: Kernel,
    state: Arc<QueueState>,
    /// Counts the blocks of a launch that are done with their ranges.
    arrived: Region,
    submitted: u64,
    /// Descriptors of the batch being submitted; kept for their capacity.
    chunks: Vec<u8>,
    tails: Vec<u8>,
    lists: ListRing,
}

/// Which part of the ring is in use. Positions count bytes and do not wrap.
#[derive(Debug, Default)]
struct ListRing {
    next: u64,
    /// Lists in flight: the numbers of their batches, and where their descriptors end.
    used: VecDeque<(u64, u64)>,
    /// Where the part in use begins.
    first: u64,
}

impl ListRing {
    /// The position of `len` contiguous bytes; `None` while there is no room.
    fn reserve(&mut self, len: usize, completed: u64) -> Option<u64> {
        while let Some((number, end)) = self.used.front().copied()
            && number <= completed
        {
            self.first = end;
            self.used.pop_front();
        }
        let (len, ring) = (len as u64, RING_LEN as u64);
        let until_wrap = ring - self.next % ring;
        let at = if len <= until_wrap { self.next } else { self.next + until_wrap };
        (at + len - self.first <= ring).then_some(at)
    }
}

impl CopyQueue {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let program = load_program(device)?;
        let memory = device.alloc_pinned((RING_AT + RING_LEN) as u64)?;
        memory.host_bytes()?.store_u64(0, 0)?;
        let arrived = alloc_scratch(device, 256)?;
        arrived.write(0, &[0; 256])?;
        Ok(Self {
            device: device.clone(),
            stream: device.stream()?,
            kernel: program.kernel(KERNEL)?,
            few_kernel: program.kernel(FEW_KERNEL)?,
            state: Arc::new(QueueState::new(memory)),
            arrived: arrived.region(0, 4)?,
            submitted: 0,
            chunks: Vec::new(),
            tails: Vec::new(),
            lists: ListRing::default(),
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
        self.state.ticket(self.submitted + 1)
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
        self.state.fail();
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
        let by_kernel = |copy: &&DeviceCopy| copy.to.len() < MIN_ENGINE_COPY;
        let total: u64 = copies.iter().filter(by_kernel).map(|copy| copy.to.len()).sum();
        let chunk = chunk_len(total, CHUNKS);
        if copies.len() <= FEW && copies.iter().all(|copy| by_kernel(&copy)) {
            return self.submit_few(copies, chunk);
        }
        self.chunks.clear();
        self.tails.clear();
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
        bytes.write((slot + self.chunks.len()) as u64, &self.tails)?;
        let long_blocks = LONG_BLOCKS_EACH * u64::from(self.device.info().multiprocessors);
        let max_blocks = if chunk < LONG_CHUNK { MAX_BLOCKS } else { long_blocks };
        self.launch_listed(launch, slot as u64, (self.chunks.len(), self.tails.len()), max_blocks)
    }

    /// Submits at most [`FEW`] copies.
    fn submit_few(&mut self, copies: &[DeviceCopy], chunk: u64) -> Result<u64> {
        let mut launch = Launch::new(&self.few_kernel).threads(THREADS);
        let mut chunks = 0;
        for at in 0..FEW {
            launch = match copies.get(at) {
                Some(DeviceCopy { to, from }) => {
                    chunks += to.len().div_ceil(chunk);
                    launch.region(to).region(from).value(to.len())
                }
                None => launch.value(0).value(0).value(0),
            };
        }
        let launch = launch.grid(self.blocks(chunks, FEW_BLOCKS)).value(chunk);
        self.launch(launch)
    }

    /// Submits a list as a batch; returns its number, or `None` while earlier lists leave no room.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if the list is for other regions; those of the driver. Nothing is
    /// copied then.
    pub(crate) fn submit_list(
        &mut self,
        list: &ListDescriptors,
        to: &[Region],
        from: &[Region],
    ) -> Result<Option<u64>> {
        let len = list.bytes.len();
        if !list.is_for(to, from) || len == 0 || len > RING_LEN / 2 {
            let what = "copy a list between processes";
            return Err(Error::new(Kind::InvalidArgument, what).on(self.device.label()));
        }
        let Some(at) = self.lists.reserve(len, self.state.completed()) else { return Ok(None) };
        let launch = Launch::new(&self.kernel).threads(THREADS);
        let launch = to.iter().chain(from).fold(launch, Launch::keep_alive);
        let begin = RING_AT as u64 + at % RING_LEN as u64;
        self.state.bytes()?.write(begin, &list.bytes)?;
        let number = self.launch_listed(launch, begin, (len, 0), MAX_BLOCKS)?;
        self.lists.next = at + len as u64;
        self.lists.used.push_back((number, self.lists.next));
        Ok(Some(number))
    }

    /// Launches a batch whose descriptors are at `at`: chunks, then tails, with these lengths.
    fn launch_listed(
        &mut self,
        launch: Launch,
        at: u64,
        (chunks, tails): (usize, usize),
        max_blocks: u64,
    ) -> Result<u64> {
        let (memory, count) = (&self.state.memory, |len: usize| (len / DESCRIPTOR_LEN) as u64);
        let list = memory.region(at, (chunks + tails) as u64)?;
        let tail_list = match tails {
            0 => list.clone(),
            _ => memory.region(at + chunks as u64, tails as u64)?,
        };
        let launch = launch
            .grid(self.blocks(count(chunks), max_blocks))
            .region(&list)
            .value(count(chunks))
            .region(&tail_list)
            .value(count(tails));
        self.launch(launch)
    }

    /// Launches a batch that lacks only the parameters which all kernels have.
    fn launch(&mut self, launch: Launch) -> Result<u64> {
        let number = self.submitted + 1;
        let word = self.state.memory.region(0, 8)?;
        let launch = launch.region(&self.arrived).region(&word).value(number);
        // SAFETY: the kernel reads the descriptors and accesses the ranges that they name, which
        // are inside of regions that the launch keeps alive (those of a list by `push` and
        // `is_for`), as it does the words that it writes.
        #[allow(unsafe_code)]
        unsafe {
            self.stream.launch(launch)?;
        }
        self.submitted = number;
        Ok(number)
    }

    fn blocks(&self, chunks: u64, max: u64) -> u32 {
        match self.device.info().backend {
            Backend::Cuda => chunks.clamp(1, max) as u32,
            // One, because blocks do not count their arrivals there.
            Backend::Sim => 1,
        }
    }
}

/// Length of the tail of a copy to this region: its last bytes in one aligned word.
fn tail_len(to: &Region) -> u64 {
    last_word_len(to.address().raw(), to.len())
}

pub(super) fn batch_block(block: &Block<'_>) -> std::result::Result<(), KernelFault> {
    for (list, count) in [(0, 1), (2, 3)] {
        super::copy_listed(block, block.address(list)?, block.value(count)?)?;
    }
    block.store_u64(block.address(5)?, block.value(6)?)
}

pub(super) fn few_block(block: &Block<'_>) -> std::result::Result<(), KernelFault> {
    for at in (0..3 * FEW).step_by(3) {
        let len = block.value(at + 2)?;
        if len > 0 {
            super::copy_between(block, block.address(at)?, block.address(at + 1)?, len)?;
        }
    }
    let last = 3 * FEW + 2;
    block.store_u64(block.address(last)?, block.value(last + 1)?)
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
        let bytes = testkit::random_bytes(1, total as usize);
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
    fn a_few_copies_of_every_length() {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let mut queue = CopyQueue::new(&gpu).unwrap();
        let (to, from) = (gpu.alloc(1 << 20).unwrap(), gpu.alloc(1 << 20).unwrap());
        let bytes: Vec<u8> = (0..1 << 20).map(|i| (i % 253) as u8).collect();
        from.write(0, &bytes).unwrap();
        for (count, lens) in
            [(1, [1; 4]), (2, [7, 8, 0, 0]), (3, [9, 65_536, 3, 0]), (4, [99_999; 4])]
        {
            to.write(0, &vec![0; 1 << 20]).unwrap();
            let mut at = 5;
            let copies: Vec<DeviceCopy> = lens[..count]
                .iter()
                .map(|len| {
                    let region = |memory: &Allocation| memory.region(at, *len).unwrap();
                    let copy = DeviceCopy { to: region(&to), from: region(&from) };
                    at += len;
                    copy
                })
                .collect();
            let number = queue.submit(&copies).unwrap();
            wait(&queue, number);
            let mut found = vec![0; 1 << 20];
            to.read(0, &mut found).unwrap();
            assert!(found[5..at as usize] == bytes[5..at as usize], "{count}");
            assert_eq!((found[4], found[at as usize]), (0, 0));
        }
    }

    #[test]
    fn lists_wait_for_room_in_their_ring() {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let mut queue = CopyQueue::new(&gpu).unwrap();
        let (to, from) = (gpu.alloc(4096).unwrap(), gpu.alloc(4096).unwrap());
        let regions = |memory: &Allocation| [memory.region(8, 4000).unwrap()];
        let (to_regions, from_regions) = (regions(&to), regions(&from));
        let mut list = ListDescriptors::new(&to_regions, &from_regions, MAX_LIST, 8);
        for at in 0..MAX_LIST as u64 - 100 {
            assert!(list.push((0, at % 500 * 8), (0, at % 500 * 8), 8));
        }
        assert!(!list.push((0, 3993), (0, 0), 8) && !list.push((0, 0), (1, 0), 8));
        assert!(!list.push((0, u64::MAX), (0, 0), 8));
        let (mut refused, mut last) = (0, 0);
        for round in 0..3_u64 {
            from.write(0, &round.to_ne_bytes().repeat(512)).unwrap();
            last = loop {
                match queue.submit_list(&list, &to_regions, &from_regions).unwrap() {
                    Some(number) => break number,
                    None => refused += 1,
                }
                std::thread::yield_now();
            };
        }
        wait(&queue, last);
        assert!(refused > 0, "three lists fit into a ring for two");
        assert_eq!(to.word64(8).unwrap().load().unwrap(), 2);
        assert_eq!(to.word64(0).unwrap().load().unwrap(), 0);
        // It is for these regions alone.
        let other = [to.region(16, 3992).unwrap()];
        let error = queue.submit_list(&list, &other, &from_regions).unwrap_err();
        assert_eq!(error.kind(), &Kind::InvalidArgument);
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
