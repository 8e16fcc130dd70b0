//! A pattern that depends on a seed and on the position, written and verified by the device.
//!
//! Benchmarks and demonstrations use it to verify transfers without copying the data to the CPU.

use warpwire::error::{Error, Kind, Result};
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::mem::{Backend, Device, Kernel, Launch, Program, Region, Stream, Word};

const FILL: &str = "pattern_fill";
const CHECK: &str = "pattern_check";

/// The kernels, loaded onto a device.
///
/// ```
/// use std::time::Duration;
/// use warpwire::mem::sim::{Sim, SimConfig};
/// use warpwire_apps::pattern::Pattern;
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let (memory, wrong) = (gpu.alloc(10_001).unwrap(), gpu.alloc_pinned(8).unwrap());
/// let (pattern, stream) = (Pattern::load(&gpu).unwrap(), gpu.stream().unwrap());
/// let count = wrong.word64(0).unwrap();
/// count.store(0).unwrap();
/// pattern.fill(&stream, &memory.whole().unwrap(), 7).unwrap();
/// pattern.check(&stream, &memory.whole().unwrap(), 7, &count).unwrap();
/// stream.synchronize(Duration::from_secs(5)).unwrap();
/// assert_eq!(count.load().unwrap(), 0);
/// ```
#[derive(Clone, Debug)]
pub struct Pattern {
    fill: Kernel,
    check: Kernel,
}

impl Pattern {
    /// Loads the kernels.
    pub fn load(device: &Device) -> Result<Self> {
        let program = Program::new("pattern")
            .ptx(include_str!("pattern.ptx"))
            .block(FILL, fill_block)
            .block(CHECK, check_block);
        let module = device.load(&program)?;
        Ok(Self { fill: module.kernel(FILL)?, check: module.kernel(CHECK)? })
    }

    /// Fills `region` with the pattern of `seed`. Its address must be a multiple of 8.
    pub fn fill(&self, stream: &Stream, region: &Region, seed: u64) -> Result<()> {
        let launch = prepare(&self.fill, region, seed)?;
        start(stream, launch)
    }

    /// Adds the number of 8-byte words of `region` that differ from the pattern of `seed` to the
    /// 64-bit word `wrong`.
    pub fn check(&self, stream: &Stream, region: &Region, seed: u64, wrong: &Word) -> Result<()> {
        if wrong.region().len() != 8 {
            return Err(Error::new(Kind::InvalidArgument, "check a pattern")
                .why("the count is not a 64-bit word")
                .fix("use word64"));
        }
        let launch = prepare(&self.check, region, seed)?;
        start(stream, launch.region(wrong.region()))
    }
}

fn prepare(kernel: &Kernel, region: &Region, seed: u64) -> Result<Launch> {
    if !region.address().is_aligned_to(8) {
        return Err(Error::new(Kind::Misaligned, "use a pattern")
            .on(region.allocation().device().label())
            .why(format!("{} is not a multiple of 8", region.address())));
    }
    let threads = 256;
    // Enough blocks to fill a large GPU, but no more than the work needs. The simulator's blocks
    // are host threads, so it gets few.
    let max_blocks = match kernel.device().info().backend {
        Backend::Cuda => 1024,
        Backend::Sim => 2,
    };
    let grid = region.len().div_ceil(8 * u64::from(threads)).clamp(1, max_blocks);
    Ok(Launch::new(kernel)
        .grid(grid as u32)
        .threads(threads)
        .region(region)
        .value(region.len())
        .value(seed))
}

#[allow(unsafe_code)]
fn start(stream: &Stream, launch: Launch) -> Result<()> {
    // SAFETY: both kernels access only the regions that they are given, within their lengths; the
    // launch keeps them alive.
    unsafe { stream.launch(launch) }
}

/// The pattern's 8 bytes at position `index`, counted in words.
pub fn word(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Fills CPU memory with the pattern from byte `at` on, a multiple of 8.
pub fn fill_bytes(buffer: &mut [u8], seed: u64, at: u64) {
    for (index, bytes) in buffer.chunks_mut(8).enumerate() {
        let pattern = word(seed, at / 8 + index as u64).to_le_bytes();
        bytes.copy_from_slice(&pattern[..bytes.len()]);
    }
}

/// Calls `page` with offset and length of each page that this block processes.
fn each_page(
    block: &Block<'_>,
    mut page: impl FnMut(u64, usize) -> std::result::Result<(), KernelFault>,
) -> std::result::Result<(), KernelFault> {
    const PAGE: u64 = 4096;
    let len = block.value(1)?;
    let mut at = u64::from(block.index()) * PAGE;
    while at < len {
        page(at, (len - at).min(PAGE) as usize)?;
        at += u64::from(block.grid()) * PAGE;
    }
    Ok(())
}

fn fill_block(block: &Block<'_>) -> std::result::Result<(), KernelFault> {
    let (address, seed) = (block.address(0)?, block.value(2)?);
    let mut buffer = [0; 4096];
    each_page(block, |at, len| {
        fill_bytes(&mut buffer[..len], seed, at);
        let to = address.checked_add(at).ok_or_else(|| KernelFault::new("address overflow"))?;
        block.write(to, &buffer[..len])
    })
}

fn check_block(block: &Block<'_>) -> std::result::Result<(), KernelFault> {
    let (address, seed, wrong) = (block.address(0)?, block.value(2)?, block.address(3)?);
    let (mut wanted, mut found) = ([0; 4096], [0; 4096]);
    let mut differing = 0;
    each_page(block, |at, len| {
        fill_bytes(&mut wanted[..len], seed, at);
        let from = address.checked_add(at).ok_or_else(|| KernelFault::new("address overflow"))?;
        block.read(from, &mut found[..len])?;
        let words = wanted[..len].chunks(8).zip(found[..len].chunks(8));
        differing += words.filter(|(wanted, found)| wanted != found).count() as u64;
        Ok(())
    })?;
    if differing > 0 {
        block.fetch_add_u64(wrong, differing)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_depends_on_seed_and_position() {
        let mut bytes = [0; 20];
        fill_bytes(&mut bytes, 1, 0);
        assert_eq!(bytes[..8], word(1, 0).to_le_bytes());
        assert_eq!(bytes[16..], word(1, 2).to_le_bytes()[..4]);
        assert_ne!(word(1, 0), word(2, 0));
        assert_ne!(word(1, 0), word(1, 1));
    }
}
