//! Tries CUDA: loads the driver, asks each device what it can do, and has it do a little of it.

use super::{CudaProbe, Outcome};

/// Tries CUDA on this machine.
pub(super) fn probe() -> CudaProbe {
    let why = "this build does not try CUDA yet";
    CudaProbe {
        library: Outcome::not_tried(why),
        init: Outcome::not_tried(why),
        ..CudaProbe::default()
    }
}
