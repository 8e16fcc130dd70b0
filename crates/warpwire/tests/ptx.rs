//! GPU programs that only the tests use. Their PTX is compiled when a test on CUDA needs it.

use warpwire::Result;
use warpwire::mem::{Backend, Device, Module, Program, cuda};

/// Whether CUDA and the PTX of these programs are available, or why not; for `Collector::backend`.
pub fn cuda_with(names: &[&str]) -> std::result::Result<(), String> {
    cuda::devices().map_err(|why| why.to_string())?;
    names.iter().try_for_each(|name| testkit::ptx(name).map(drop))
}

/// Loads a program: on CUDA with the PTX of that name, on the simulated GPU without PTX.
pub fn load(gpu: &Device, name: &str, program: Program) -> Result<Module> {
    match gpu.info().backend {
        Backend::Sim => gpu.load(&program),
        Backend::Cuda => gpu.load(&program.ptx(testkit::ptx(name).unwrap())),
    }
}
