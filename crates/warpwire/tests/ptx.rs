//! Programs that only tests have. Their PTX is made when a test on CUDA wants it.

use warpwire::Result;
use warpwire::mem::{Backend, Device, Module, Program, cuda};

/// Whether CUDA is there, and the PTX of these programs: what `Collector::backend` is told.
pub fn cuda_with(names: &[&str]) -> std::result::Result<(), String> {
    cuda::devices().map_err(|why| why.to_string())?;
    names.iter().try_for_each(|name| testkit::ptx(name).map(drop))
}

/// Loads a program. CUDA is given the PTX of that name; the simulated GPU needs none.
pub fn load(gpu: &Device, name: &str, program: Program) -> Result<Module> {
    match gpu.info().backend {
        Backend::Sim => gpu.load(&program),
        Backend::Cuda => gpu.load(&program.ptx(testkit::ptx(name).unwrap())),
    }
}
