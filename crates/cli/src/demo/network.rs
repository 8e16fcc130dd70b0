//! Demo stages that move memory from one process to another.

use warpwire::mem::Device;

use super::Stage;
use crate::perf;

/// Number of writes.
const WRITES: u32 = 8;

/// RDMA writes from the first device's memory to the second's, in another process: as packets on
/// the loopback interface, and through shared memory, where memory of one GPU is mapped.
pub(super) fn stages(device_pair: &[Device; 2], size: u64) -> Vec<Stage> {
    let [from, to] = device_pair.each_ref().map(Device::label);
    let there = format!("{to}, peer");
    let stage = |link: &str| match perf::run_pair(link, [&from, &to], size, WRITES) {
        Ok(summary) => {
            // Without the kind of window, which `perf -v` and `doctor` have.
            let path = summary.path.split(" (").next().unwrap_or_default();
            let what = format!("RDMA write, {link}, {path}");
            let stage = Stage::new(&what, from.clone(), there.clone(), size);
            stage.took(summary.each * WRITES, WRITES).checked(summary.verified)
        }
        Err(why) => {
            let what = format!("RDMA write, {link}");
            Stage::new(&what, from.clone(), there.clone(), size).failed(why)
        }
    };
    ["udp", "shm"].map(stage).into()
}
