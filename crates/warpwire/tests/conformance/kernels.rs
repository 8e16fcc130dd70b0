//! The suite's kernels: PTX from kernels.cu, and their twins for the simulated GPU.

use warpwire::mem::Program;

pub fn program() -> Program {
    Program::new("conformance kernels")
        .ptx(include_str!("kernels.ptx"))
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
        .block("trespass", |block| block.store_u64(block.address(0)?, 1))
}
