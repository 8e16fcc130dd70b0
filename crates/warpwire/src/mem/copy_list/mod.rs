//! Copy lists: many copies as one launch of a scatter-gather kernel.
//!
//! A call of the copy engine costs some microseconds, whatever its size. A kernel that walks a list
//! pays once for all of them: 100 000 pieces of 16 KiB move at the speed of the memory.

mod pinned_reader;
mod queue;

use std::ops::Range;

use parking_lot::Mutex;

use super::address::{DeviceAddr, is_inside};
use super::allocation::{Allocation, MemoryKind, Region};
use super::device::{Backend, Device};
use super::program::{Kernel, Launch, Module, Program, WeakModule};
use super::sim::{Block, KernelFault};
use super::stream::Stream;
use crate::error::{Error, Kind, Result};

pub(crate) use pinned_reader::PinnedReader;
pub(crate) use queue::{
    CopyQueue, CopyTicket, DeviceCopy, ListDescriptors, MAX_BATCH, MAX_BATCHES, MAX_LIST,
};

const KERNEL: &str = "copy_list";
const THREADS: u32 = 512;
/// More blocks than a GPU runs at a time, so that none is idle for long while others have long
/// ranges; each may take several. Blocks of the simulated GPU are threads.
const MAX_BLOCKS: u64 = 4096;
const MAX_SIM_BLOCKS: u64 = 4;
/// Longer ranges are divided, so that blocks have equal shares.
const MAX_CHUNK: u64 = 64 << 10;
/// Bytes of a descriptor: target, source, length.
const DESCRIPTOR_LEN: usize = 24;

/// One copy of a list: `len` bytes from an offset of the source region to one of the target region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// Offset in the target region.
    pub to: u64,
    /// Offset in the source region.
    pub from: u64,
    /// Length in bytes.
    pub len: u64,
}

/// The scatter-gather kernel, loaded on a device: prepares lists of copies that a stream then
/// executes as one operation.
///
/// Targets and sources are memory of the device, memory of other processes opened on it
/// ([`Device::open_ipc`]), or pinned memory.
///
/// ```
/// use std::time::Duration;
/// use warpwire::mem::{self, CopyRange, ScatterGather};
/// let gpu = mem::open("sim:0")?;
/// let (to, from) = (gpu.alloc(4096)?, gpu.alloc(4096)?);
/// from.write(100, b"scatter")?;
/// from.write(200, b"gather")?;
/// let ranges = [
///     CopyRange { to: 0, from: 100, len: 7 },
///     CopyRange { to: 7, from: 200, len: 6 },
/// ];
/// let list = ScatterGather::new(&gpu)?.prepare(&to.whole()?, &from.whole()?, &ranges)?;
/// let stream = gpu.stream()?;
/// stream.copy_list(&list)?;
/// stream.synchronize(Duration::from_secs(10))?;
/// let mut found = [0; 13];
/// to.read(0, &mut found)?;
/// assert_eq!(&found, b"scattergather");
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ScatterGather {
    device: Device,
    kernel: Kernel,
}

impl ScatterGather {
    /// Loads the kernel.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self { device: device.clone(), kernel: load_program(device)?.kernel(KERNEL)? })
    }

    /// Prepares a list of copies from `from` to `to`. It may be executed any number of times, and
    /// keeps the memory alive.
    ///
    /// Copies of a list run concurrently: the result is undefined if a range is the target of
    /// two, or the target of one and the source of another.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if the list is empty, or the device cannot access the memory.
    /// [`Kind::OutOfRange`] for a range that is outside of its region, with its index.
    pub fn prepare(&self, to: &Region, from: &Region, ranges: &[CopyRange]) -> Result<CopyList> {
        let what = || format!("prepare a list of {} copies", ranges.len());
        let failure = |kind, why: String| Err(Error::new(kind, what()).on(self.label()).why(why));
        for region in [to, from] {
            if !self.device.can_access(region.allocation()) {
                let owner = region.allocation().device().label();
                return failure(
                    Kind::InvalidArgument,
                    format!("the memory at {} belongs to {owner}", region.address()),
                )
                .map_err(|error| error.fix("copy it with Stream::copy"));
            }
        }
        let mut descriptors = Vec::with_capacity(ranges.len() * DESCRIPTOR_LEN);
        let mut bytes = 0_u64;
        for (index, range) in ranges.iter().enumerate() {
            let offsets = [(range.to, to.len()), (range.from, from.len())];
            if !offsets.iter().all(|(offset, total)| is_inside(*offset, range.len, *total)) {
                let why = format!(
                    "range {index} ({} bytes to {:#x} from {:#x}) exceeds {} or {} bytes",
                    range.len,
                    range.to,
                    range.from,
                    to.len(),
                    from.len()
                );
                return failure(Kind::OutOfRange, why);
            }
            bytes = bytes.saturating_add(range.len);
            let at = |region: &Region, offset| DeviceAddr::new(region.address().raw() + offset);
            let (to, from) = (at(to, range.to), at(from, range.from));
            copy_range(&mut descriptors, to, from, 0..range.len, MAX_CHUNK);
        }
        if descriptors.is_empty() {
            return failure(Kind::InvalidArgument, "there is nothing to copy".into());
        }
        let memory = alloc_scratch(&self.device, descriptors.len() as u64)?;
        memory.write(0, &descriptors)?;
        let chunks = (descriptors.len() / DESCRIPTOR_LEN) as u64;
        let launch = Launch::new(&self.kernel)
            .grid(chunks.min(self.max_blocks()) as u32)
            .threads(THREADS)
            .region(&memory.whole()?)
            .value(chunks)
            .keep_alive(to)
            .keep_alive(from);
        Ok(CopyList { launch, ranges: ranges.len(), bytes })
    }

    fn label(&self) -> String {
        self.device.label()
    }

    fn max_blocks(&self) -> u64 {
        match self.device.info().backend {
            Backend::Cuda => MAX_BLOCKS,
            Backend::Sim => MAX_SIM_BLOCKS,
        }
    }
}

/// Memory for descriptors: VMM memory, where there is some, because that is freed without waiting
/// for running kernels.
fn alloc_scratch(device: &Device, len: u64) -> Result<Allocation> {
    let vmm = device.capabilities().vmm.is_yes();
    device.alloc_kind(len, if vmm { MemoryKind::Vmm } else { MemoryKind::Plain })
}

/// Loads the kernels, or finds them: they are loaded once while a module of them exists, because
/// CUDA loads code only while the device is idle.
pub(crate) fn load_program(device: &Device) -> Result<Module> {
    static LOADED: Mutex<Vec<WeakModule>> = Mutex::new(Vec::new());
    let found = LOADED.lock().iter().find_map(|weak| weak.upgrade(device));
    if let Some(module) = found {
        return Ok(module);
    }
    // Not locked: it may take seconds, and two modules do no harm.
    let module = load_anew(device)?;
    let mut loaded = LOADED.lock();
    loaded.retain(WeakModule::is_loaded);
    loaded.push(module.downgrade());
    Ok(module)
}

fn load_anew(device: &Device) -> Result<Module> {
    let program = Program::new("copy list")
        .ptx(include_str!("copy_list.ptx"))
        .block(KERNEL, list_block)
        .block(queue::KERNEL, queue::batch_block)
        .block(queue::FEW_KERNEL, queue::few_block);
    device.load(&program)
}

/// Appends the descriptors of a range of bytes of one copy. Both ends are in range of their
/// regions, so the sums do not overflow.
fn copy_range(
    descriptors: &mut Vec<u8>,
    to: DeviceAddr,
    from: DeviceAddr,
    range: Range<u64>,
    max_chunk: u64,
) {
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(max_chunk);
        for word in [to.raw() + at, from.raw() + at, len] {
            descriptors.extend_from_slice(&word.to_le_bytes());
        }
        at += len;
    }
}

/// A list of copies, ready for [`Stream::copy_list`]. Clones share the descriptors.
#[derive(Clone, Debug)]
pub struct CopyList {
    launch: Launch,
    ranges: usize,
    bytes: u64,
}

impl CopyList {
    /// Number of copies.
    #[allow(clippy::len_without_is_empty)] // an empty list is not prepared
    pub fn len(&self) -> usize {
        self.ranges
    }

    /// Bytes that it copies.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Stream {
    /// Executes the copies of a list as one operation of the stream.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if the list was prepared for another device.
    #[allow(unsafe_code)]
    pub fn copy_list(&self, list: &CopyList) -> Result<()> {
        // SAFETY: the kernel reads the descriptors and accesses the ranges that they name, which
        // are inside of the two regions. The launch keeps all three alive until it is complete.
        unsafe { self.launch(list.launch.clone()) }
    }
}

fn list_block(block: &Block<'_>) -> std::result::Result<(), KernelFault> {
    copy_listed(block, block.address(0)?, block.value(1)?)
}

/// Copies every range of a list whose index belongs to this block.
fn copy_listed(
    block: &Block<'_>,
    list: DeviceAddr,
    count: u64,
) -> std::result::Result<(), KernelFault> {
    let mut index = u64::from(block.index());
    while index < count {
        let word = |number: u64| {
            let at = list.checked_add(index * DESCRIPTOR_LEN as u64 + number * 8);
            block.load_u64(at.ok_or_else(|| KernelFault::new("address overflow"))?)
        };
        let [to, from] = [word(0)?, word(1)?].map(DeviceAddr::new);
        copy_between(block, to, from, word(2)?)?;
        index += u64::from(block.grid());
    }
    Ok(())
}

fn copy_between(
    block: &Block<'_>,
    to: DeviceAddr,
    from: DeviceAddr,
    len: u64,
) -> std::result::Result<(), KernelFault> {
    let mut buffer = vec![0; len.min(MAX_CHUNK) as usize];
    for at in (0..len).step_by(MAX_CHUNK as usize) {
        let bytes = &mut buffer[..(len - at).min(MAX_CHUNK) as usize];
        block.read(DeviceAddr::new(from.raw().wrapping_add(at)), bytes)?;
        block.write(DeviceAddr::new(to.raw().wrapping_add(at)), bytes)?;
    }
    Ok(())
}
