//! The suite's kernels: kernels.cu for CUDA, block functions for the simulated GPU.

use warpwire::Result;
use warpwire::mem::{Device, Module, Program};

use crate::ptx;

/// Name of the PTX that CUDA loads.
pub const PTX: &str = "conformance/kernels";

pub fn load(gpu: &Device) -> Result<Module> {
    let program = Program::new("conformance kernels")
        .block("meet", |block| {
            let arrived = block.address(0)?;
            block.fetch_add_u64(arrived, 1)?;
            block.spin_until(|| Ok(block.load_u64(arrived)? >= u64::from(block.grid())))
        })
        .block("answer", |block| {
            let (ask, answer, rounds) = (block.address(0)?, block.address(1)?, block.value(2)?);
            for round in 1..=rounds {
                block.spin_until(|| Ok(block.load_u64(ask)? >= round))?;
                block.store_u64(answer, round)?;
            }
            Ok(())
        })
        .block("trespass", |block| block.store_u64(block.address(0)?, 1));
    ptx::load(gpu, PTX, program)
}
