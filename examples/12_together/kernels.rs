//! The kernels between messages: PTX for CUDA, block functions for the simulated GPU.

use warpwire::Result;
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::mem::{Device, DeviceAddr, Kernel, Launch, Program, Region, Stream};

const FILL: &str = "together_fill";
const ADD: &str = "together_add";
const THREADS: u32 = 256;

#[derive(Clone)]
pub struct Kernels {
    fill: Kernel,
    add: Kernel,
}

impl Kernels {
    pub fn load(device: &Device) -> Result<Self> {
        let program = Program::new("together")
            .ptx(include_str!("together.ptx"))
            .block(FILL, fill)
            .block(ADD, add);
        let module = device.load(&program)?;
        Ok(Self { fill: module.kernel(FILL)?, add: module.kernel(ADD)? })
    }

    /// Writes the numbers `first`, `first + step`, `first + 2 * step`, …
    pub fn fill(&self, stream: &Stream, to: &Region, first: u64, step: u64) -> Result<()> {
        let count = to.len() / 8;
        let launch = Launch::new(&self.fill).region(to).value(count).value(first).value(step);
        start(stream, launch)
    }

    /// Adds `from` to `to`, element by element.
    pub fn add(&self, stream: &Stream, to: &Region, from: &Region) -> Result<()> {
        assert_eq!(to.len(), from.len());
        let launch = Launch::new(&self.add).region(to).region(from).value(to.len() / 8);
        start(stream, launch)
    }
}

fn start(stream: &Stream, launch: Launch) -> Result<()> {
    // SAFETY: the kernels access only the numbers in the regions, which the launch keeps alive.
    unsafe { stream.launch(launch.threads(THREADS)) }
}

type FaultResult<T> = std::result::Result<T, KernelFault>;

fn fill(block: &Block<'_>) -> FaultResult<()> {
    let (to, count) = (block.value(0)?, block.value(1)?);
    let (first, step) = (block.value(2)?, block.value(3)?);
    for index in 0..count {
        let number = first.wrapping_add(index.wrapping_mul(step));
        block.store_u64(DeviceAddr::new(to + index * 8), number)?;
    }
    Ok(())
}

fn add(block: &Block<'_>) -> FaultResult<()> {
    let (to, from, count) = (block.value(0)?, block.value(1)?, block.value(2)?);
    for index in 0..count {
        let (to, from) = (DeviceAddr::new(to + index * 8), DeviceAddr::new(from + index * 8));
        let sum = block.load_u64(to)?.wrapping_add(block.load_u64(from)?);
        block.store_u64(to, sum)?;
    }
    Ok(())
}
