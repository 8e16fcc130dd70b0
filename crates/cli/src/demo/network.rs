//! Demo stage that moves memory from one process to another.

use warpwire::mem::Device;

use super::Stage;
use crate::perf;

/// Number of writes.
const WRITES: u32 = 8;

/// RDMA writes from the first device's memory to the second's, in another process, by UDP on the
/// loopback interface.
pub(super) fn stage(device_pair: &[Device; 2], size: u64) -> Stage {
    let [from, to] = device_pair.each_ref().map(Device::label);
    let there = format!("{to}, peer");
    match perf::run_pair(&from, &to, size, WRITES) {
        Ok(summary) => {
            let what = format!("RDMA write, {}, {}", summary.link, summary.path);
            let stage = Stage::new(&what, from, there, size);
            stage.took(summary.each * WRITES, WRITES).checked(summary.verified)
        }
        Err(why) => Stage::new("RDMA write, udp", from, there, size).failed(why),
    }
}
